//! What an operator should look at on a node: what `status` says besides numbers.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use crate::id::SaveId;
use crate::node::Node;
use crate::node::background::orphan_gc::Kept;
use crate::wire::Failure;

/// Saves that a note names.
const NAMED: usize = 3;

impl Node {
    /// Saves that no step has and that are kept, as the catalogue's home knows them.
    pub(in crate::node) fn kept(&self) -> MutexGuard<'_, BTreeMap<SaveId, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::node) async fn notes(&self, quarantined: u64) -> Result<Vec<String>, Failure> {
        let mut notes: Vec<String> = self.hosting.note().into_iter().collect();
        notes.extend(self.fullness_notes().await);
        let (found, aside) = self
            .on_store(|store| {
                Ok::<_, crate::store::StoreError>((store.found(), store.quarantined()?))
            })
            .await?;
        if quarantined > 0 {
            notes.push(of_some(quarantined, "in quarantine/, set aside and not used", &aside));
        }
        notes.extend(self.damage_note(NAMED));
        notes.extend(self.damaged_records_note(NAMED).await);
        let counts = found.counts;
        if counts.strangers > 0 {
            let what = "under shards/ with names that are not ours, left alone since the start";
            notes.push(of_some(counts.strangers, what, &found.strangers));
        }
        if counts.unreadable > 0 {
            let what = "that could not be read at the start, left where they are and not used";
            notes.push(of_some(counts.unreadable, what, &found.unreadable));
        }
        if self.serves() {
            notes.extend(of_kept(&self.kept()));
        }
        Ok(notes)
    }
}

/// `1 file in quarantine/: NAME`.
fn of_some(count: u64, what: &str, names: &[String]) -> String {
    let files = if count == 1 { "file" } else { "files" };
    let more = if count > names.len() as u64 { ", ..." } else { "" };
    format!("{count} {files} {what}: {}{more}", names.join(", "))
}

fn of_kept(kept: &BTreeMap<SaveId, Kept>) -> Option<String> {
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
        assert_eq!(of_some(1, "here", &names[..1]), "1 file here: a");
        assert_eq!(of_some(2, "here", &names), "2 files here: a, b");
        assert_eq!(of_some(9, "here", &names), "9 files here: a, b, ...");
        assert_eq!(of_kept(&BTreeMap::new()), None);
        let saves =
            |count: u8| (0..count).map(|byte| (SaveId([byte; 12]), Kept::Unmarked)).collect();
        let one = of_kept(&saves(1)).unwrap();
        assert!(one.starts_with("1 save that no step has is kept: 000000"), "{one}");
        let many = of_kept(&saves(5)).unwrap();
        assert!(many.starts_with("5 saves") && many.ends_with("; ..."), "{many}");
        assert_eq!(many.matches("no node has a commit mark").count(), NAMED);
    }
}
