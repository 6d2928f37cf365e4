//! Warnings for the operator of a node, which `status` prints beside its numbers.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use crate::id::SaveId;
use crate::node::Node;
use crate::node::background::orphan_gc::RetainReason;
use crate::wire::RemoteError;

/// Maximum number of saves or files named in a warning.
const NAMED: usize = 3;

impl Node {
    /// Returns the saves that no step records and that are retained, with the reasons. Only the
    /// catalogue server knows them.
    pub(in crate::node) fn lock_retained(&self) -> MutexGuard<'_, BTreeMap<SaveId, RetainReason>> {
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the warnings of this node, as text. `quarantined` is the number of files in
    /// quarantine.
    pub(in crate::node) async fn collect_status_warnings(
        &self,
        quarantined: u64,
    ) -> Result<Vec<String>, RemoteError> {
        let mut notes: Vec<String> =
            self.context.catalogue_server.serving_warning().into_iter().collect();
        notes.extend(self.disk_space_warnings().await);
        let (found, aside) = self
            .context
            .on_store(|store| {
                Ok::<_, crate::store::StoreError>((
                    store.open_findings(),
                    store.first_quarantined_files()?,
                ))
            })
            .await?;
        if quarantined > 0 {
            notes.push(format_count_and_names(
                quarantined,
                "in quarantine/, set aside and not used",
                &aside,
            ));
        }
        notes.extend(self.damage_warning(NAMED));
        notes.extend(self.recheck_damaged_records_warning(NAMED).await);
        let counts = found.counts;
        if counts.strangers > 0 {
            let what = "under shards/ with names that are not ours, left alone since the start";
            notes.push(format_count_and_names(counts.strangers, what, &found.unknown_files));
        }
        if counts.unreadable > 0 {
            let what = "that could not be read at the start, left where they are and not used";
            notes.push(format_count_and_names(counts.unreadable, what, &found.unreadable_files));
        }
        if self.is_writable_catalogue_server() {
            notes.extend(retained_warning(&self.lock_retained()));
        }
        Ok(notes)
    }
}

/// Formats a count and the first names, for example `1 file in quarantine/: NAME`.
fn format_count_and_names(count: u64, description: &str, names: &[String]) -> String {
    let files = if count == 1 { "file" } else { "files" };
    let more = if count > names.len() as u64 { ", ..." } else { "" };
    format!("{count} {files} {description}: {}{more}", names.join(", "))
}

/// Returns the warning about retained saves, if there are any.
fn retained_warning(kept: &BTreeMap<SaveId, RetainReason>) -> Option<String> {
    if kept.is_empty() {
        return None;
    }
    let named: Vec<String> =
        kept.iter().take(NAMED).map(|(save, why)| format!("{save}, {why}")).collect();
    let saves =
        if kept.len() == 1 { "save that no step has is" } else { "saves that no step has are" };
    let more = if kept.len() > NAMED { "; ..." } else { "" };
    Some(format!("{} {saves} kept: {}{more}", kept.len(), named.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_count_all_and_name_a_few() {
        let names = ["a".to_owned(), "b".to_owned()];
        assert_eq!(format_count_and_names(1, "here", &names[..1]), "1 file here: a");
        assert_eq!(format_count_and_names(2, "here", &names), "2 files here: a, b");
        assert_eq!(format_count_and_names(9, "here", &names), "9 files here: a, b, ...");
        assert_eq!(retained_warning(&BTreeMap::new()), None);
        let saves = |count: u8| {
            (0..count).map(|byte| (SaveId([byte; 12]), RetainReason::Unmarked)).collect()
        };
        let one = retained_warning(&saves(1)).unwrap();
        assert!(one.starts_with("1 save that no step has is kept: 000000"), "{one}");
        let many = retained_warning(&saves(5)).unwrap();
        assert!(many.starts_with("5 saves") && many.ends_with("; ..."), "{many}");
        assert_eq!(many.matches("no node has a commit mark").count(), NAMED);
    }
}
