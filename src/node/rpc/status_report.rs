//! The state of a node: its numbers, and the warnings for its operator that `status` prints beside
//! them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::id::SaveId;
use crate::node::background::orphan_gc::{OrphanGc, RetainReason};
use crate::node::budgets::Budgets;
use crate::node::context::NodeContext;
use crate::node::storage::damage_mending::Mending;
use crate::node::storage::damaged_records::DamagedRecords;
use crate::node::storage::full_disk::DiskSpace;
use crate::wire::RemoteError;
use crate::wire::calls::NodeStatusAnswer;

/// Maximum number of saves or files named in a warning.
const NAMED: usize = 3;

/// The service that reports the state of this node.
pub(in crate::node) struct StatusReport {
    context: Arc<NodeContext>,
    budgets: Arc<Budgets>,
    mending: Arc<Mending>,
    damaged_records: Arc<DamagedRecords>,
    disk_space: Arc<DiskSpace>,
    orphan_gc: Arc<OrphanGc>,
    /// Whether the network card cuts large sends into datagrams.
    segmentation_offload: bool,
}

impl StatusReport {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        budgets: Arc<Budgets>,
        mending: Arc<Mending>,
        damaged_records: Arc<DamagedRecords>,
        disk_space: Arc<DiskSpace>,
        orphan_gc: Arc<OrphanGc>,
        segmentation_offload: bool,
    ) -> Self {
        Self {
            context,
            budgets,
            mending,
            damaged_records,
            disk_space,
            orphan_gc,
            segmentation_offload,
        }
    }

    /// Returns the state of this node: files, disk, memory and warnings.
    pub(in crate::node) async fn get_node_status(&self) -> Result<NodeStatusAnswer, RemoteError> {
        let totals = self.context.store.totals();
        let space = self.context.store.disk_space()?;
        let budgets = [
            ("archive", &self.budgets.archive),
            ("save", &self.budgets.save),
            ("restore", &self.budgets.restore),
            ("control", &self.budgets.control),
            ("requests", &self.budgets.requests),
        ];
        let notes = self.collect_status_warnings(totals.quarantined).await?;
        Ok(NodeStatusAnswer {
            replicas: (totals.replica_files, totals.replica_bytes),
            pieces: (totals.piece_files, totals.piece_bytes),
            record_bytes: totals.small_bytes,
            quarantined: totals.quarantined,
            disk: (space.total_bytes, space.free_bytes),
            budgets: budgets
                .map(|(name, share)| {
                    (name.to_owned(), share.used_bytes(), share.peak_bytes(), share.total_bytes())
                })
                .to_vec(),
            peak_memory_bytes: crate::clock::peak_memory_bytes(),
            segmentation_offload: self.segmentation_offload,
            catalogue: self.context.local_catalogue().is_some(),
            notes,
        })
    }

    /// Returns the warnings of this node, as text. `quarantined` is the number of files in
    /// quarantine.
    pub(in crate::node) async fn collect_status_warnings(
        &self,
        quarantined: u64,
    ) -> Result<Vec<String>, RemoteError> {
        let mut notes: Vec<String> =
            self.context.catalogue_server.serving_warning().into_iter().collect();
        notes.extend(self.disk_space.disk_space_warnings().await);
        let (found, aside) = self
            .context
            .run_on_store(|store| {
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
        notes.extend(self.mending.damage_warning(NAMED));
        notes.extend(self.damaged_records.recheck_and_describe_damage(&self.context, NAMED).await);
        let counts = found.counts;
        if counts.strangers > 0 {
            let what = "under shards/ with names that are not ours, left alone since the start";
            notes.push(format_count_and_names(counts.strangers, what, &found.unknown_files));
        }
        if counts.unreadable > 0 {
            let what = "that could not be read at the start, left where they are and not used";
            notes.push(format_count_and_names(counts.unreadable, what, &found.unreadable_files));
        }
        if self.context.is_writable_catalogue_server() {
            notes.extend(retained_saves_warning(&self.orphan_gc.lock_retained()));
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
fn retained_saves_warning(kept: &BTreeMap<SaveId, RetainReason>) -> Option<String> {
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
        assert_eq!(retained_saves_warning(&BTreeMap::new()), None);
        let saves = |count: u8| {
            (0..count).map(|byte| (SaveId([byte; 12]), RetainReason::Unmarked)).collect()
        };
        let one = retained_saves_warning(&saves(1)).unwrap();
        assert!(one.starts_with("1 save that no step has is kept: 000000"), "{one}");
        let many = retained_saves_warning(&saves(5)).unwrap();
        assert!(many.starts_with("5 saves") && many.ends_with("; ..."), "{many}");
        assert_eq!(many.matches("no node has a commit mark").count(), NAMED);
    }
}
