//! Collection of orphans and stray keys: saves that a rebuilt catalogue knows only as to be
//! removed, saves that nodes hold and the catalogue does not know (docs/semantics.md, 5 and 8), and
//! keys that a gateway wrote after their save was removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, DEFERRED_REMOVALS, JOINT_SAVES, NODES, ORPHANS, SAVE_RINGS, SHARD_ROOTS,
    SHARD_STATES, checkpoint_key, orphan_key, parse_record, read_record,
};
use crate::catalogue::save_evidence::is_on_enough_nodes;
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::{
    Checkpoint, CommitMark, Node as NodeRecord, Record, RemoveReason, Removing, Saved,
};
use crate::id::{Epoch, Generation, Job, PeerName, SaveId, Step, StepRef};
use crate::node::catalogue_server::cluster_inventory::InventoryReader;
use crate::node::context::NodeContext;
use crate::node::gateway::removal::{
    SaveRemoval, is_superseded, record_removal_history_incomplete,
};
use crate::node::retry_schedule::backoff;
use crate::wire::calls::FindRemovedSaves;
use crate::wire::{NodeAddress, RemoteError};

/// Maximum number of saves that no step's record names and that are judged in one round.
const JUDGED_A_ROUND: usize = 16;
/// Maximum number of nodes whose saves are compared in one round. The whole inventory of such a
/// node is read.
const COMPARED_A_ROUND: usize = 1;

/// The nodes whose saves were compared with the catalogue of `epoch`, and the saves on them that
/// wait for a verdict.
#[derive(Default)]
struct InventoryComparison {
    epoch: Epoch,
    /// The compared nodes, with the revision of their record in the catalogue. A node that has left
    /// the list and come back has another revision.
    nodes: BTreeMap<PeerName, u64>,
    waiting: BTreeMap<SaveId, UnknownSave>,
}

/// A save that a node holds and no step's record names: how often it was judged, and when it is due
/// to be judged again.
#[derive(Default)]
struct UnknownSave {
    looks: u32,
    due: Duration,
}

/// The reason why a save that no step's record names is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) enum RetainReason {
    /// A node has a commit mark of the save. A rebuild with the nodes that hold the rest of the
    /// save brings it back.
    Marked,
    /// No node has a commit mark of the save, and nothing shows that the save was aborted.
    Unmarked,
    /// Not all nodes have reported yet whether they have a commit mark of the save.
    NotAllAsked,
}

impl fmt::Display for RetainReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Marked => {
                "which has a commit mark: a rebuild of the catalogue with all nodes brings it back"
            }
            Self::Unmarked => {
                "of which no node has a commit mark: a rebuild of the catalogue removes it"
            }
            Self::NotAllAsked => {
                "until every storage node has said whether it has a commit mark of it"
            }
        })
    }
}

/// The position of the scan for stray keys: the last key read of each prefix.
#[derive(Default)]
struct StrayKeyScan {
    after: [Option<String>; 4],
}

/// The verdict on a save that no step's record names.
enum OrphanVerdict {
    Remove(RemoveReason),
    /// The save was decided, but too few nodes have a commit mark for it to be published. The save
    /// that is committed as its step now was begun in a later epoch.
    Supersede {
        job: Job,
        step: Step,
        saved: Saved,
    },
    Retain(RetainReason),
}

/// The service that removes orphans, and stray keys of the catalogue.
pub(in crate::node) struct OrphanGc {
    context: Arc<NodeContext>,
    inventory_reader: Arc<InventoryReader>,
    removal: Arc<SaveRemoval>,
    /// The saves that no step's record names and that are kept, with the reasons.
    retained: Mutex<BTreeMap<SaveId, RetainReason>>,
}

impl OrphanGc {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        inventory_reader: Arc<InventoryReader>,
        removal: Arc<SaveRemoval>,
    ) -> Self {
        Self { context, inventory_reader, removal, retained: Mutex::default() }
    }

    /// Returns the saves that no step's record names and that are kept, with the reasons. Only the
    /// catalogue server knows them.
    pub(in crate::node) fn lock_retained(&self) -> MutexGuard<'_, BTreeMap<SaveId, RetainReason>> {
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes orphans, and stray keys (keys of saves that are neither in a step's record nor listed
    /// as orphans), once per lease period, while this daemon serves the catalogue. Runs until the
    /// node stops.
    pub(in crate::node) async fn run_cluster_orphan_gc(self: Arc<Self>) {
        let (mut compared, mut stray_keys) =
            (InventoryComparison::default(), StrayKeyScan::default());
        loop {
            self.context.clock.sleep(self.context.settings.lease).await;
            if !self.context.is_writable_catalogue_server() {
                continue;
            }
            let catalogue = self.context.catalogue();
            if let Err(error) = self.remove_stray_keys(&*catalogue, &mut stray_keys).await {
                tracing::warn!(%error, "failed to look for stray keys in the catalogue, or to remove one; retrying");
            }
            if let Err(error) = self.find_and_record_orphans(&*catalogue, &mut compared).await {
                tracing::warn!(%error, "failed to compare the nodes' saves with the catalogue, or to record an orphan; retrying. Orphans on record are still handled in this round");
            }
            if let Err(error) = self.remove_recorded_orphans(&*catalogue).await {
                tracing::warn!(%error, "failed to go through the orphans, or to remove one; retrying");
            }
        }
    }

    /// Compares the saves on each node with the catalogue: once in an epoch, and again when the
    /// node has come back to the list of nodes. A catalogue that was rebuilt without a node does
    /// not know what that node holds.
    ///
    /// A save that no step's record names is an orphan if some node has recorded it as removed. If
    /// all nodes report that they have no commit mark of it, it is an orphan in every epoch after
    /// the first, because a rebuilt catalogue begins without the saves that were never decided. In
    /// the first epoch nothing explains such a save, and it is kept. A save with commit marks that
    /// was never published is superseded if its step has a save of a later epoch. No save is
    /// removed merely because the catalogue does not know it.
    async fn find_and_record_orphans(
        &self,
        catalogue: &dyn Catalogue,
        comparison: &mut InventoryComparison,
    ) -> Result<(), RemoteError> {
        let epoch = catalogue.epoch();
        if comparison.epoch != epoch {
            *comparison = InventoryComparison { epoch, ..InventoryComparison::default() };
            self.lock_retained().clear();
        }
        let storage = self.queue_saves_unknown_to_catalogue(catalogue, comparison).await?;
        let now = self.context.clock.now();
        let due = comparison.waiting.iter().filter(|(_, unknown)| unknown.due <= now);
        let due: Vec<SaveId> = due.map(|(save, _)| *save).take(JUDGED_A_ROUND).collect();
        for save in due {
            match self.judge_orphan(catalogue, &storage, save).await {
                OrphanVerdict::Remove(RemoveReason::Aborted) if epoch <= Epoch(1) => {
                    self.retain_for_now(save, RetainReason::Unmarked, comparison);
                    continue;
                }
                OrphanVerdict::Remove(reason) => {
                    let generation = Generation { epoch, counter: 0 };
                    let bytes = Removing { save, generation, reason }.to_bytes()?;
                    catalogue.compare_and_set(&orphan_key(save), None, Some(bytes)).await?;
                }
                OrphanVerdict::Supersede { job, step, saved } => {
                    if !self.try_supersede(catalogue, job.at(step), &saved).await {
                        self.retain_for_now(save, RetainReason::Marked, comparison);
                        continue;
                    }
                }
                OrphanVerdict::Retain(why) => {
                    self.retain_for_now(save, why, comparison);
                    continue;
                }
            }
            comparison.waiting.remove(&save);
            self.lock_retained().remove(&save);
        }
        Ok(())
    }

    /// Compares the saves on up to [`COMPARED_A_ROUND`] nodes with the saves of all steps. It takes
    /// nodes that were not compared yet or have registered anew since. Saves that no step's record
    /// names wait for a verdict. Returns all storage nodes.
    async fn queue_saves_unknown_to_catalogue(
        &self,
        catalogue: &dyn Catalogue,
        comparison: &mut InventoryComparison,
    ) -> Result<Vec<NodeRecord>, RemoteError> {
        let mut storage: Vec<NodeRecord> = Vec::new();
        let mut fresh = Vec::new();
        let mut nodes = KeyScan::of_prefix(catalogue, NODES);
        while let Some((key, entry)) = nodes.next().await? {
            let node: NodeRecord = parse_record(&key, &entry.value)?;
            if node.storage {
                if comparison.nodes.get(&node.name) != Some(&entry.revision) {
                    fresh.push((node.clone(), entry.revision));
                }
                storage.push(node);
            }
        }
        comparison.nodes.retain(|name, _| storage.iter().any(|node| node.name == *name));
        let mut looks = 0;
        for (node, revision) in &fresh {
            if looks == COMPARED_A_ROUND {
                break;
            }
            // A deferred removal may end while the node's saves are read. So the deferred removals
            // are read before and after them.
            let mut known = BTreeSet::new();
            collect_removals(catalogue, DEFERRED_REMOVALS, &mut known).await?;
            let Ok(held) = self.inventory_reader.fetch_saves_on(node).await else { continue };
            looks += 1;
            // A step's record names a save before any node has a file of it. The records are read
            // after the node's saves, so they name every save of a step among them.
            known.append(&mut known_saves(catalogue, &[DEFERRED_REMOVALS, ORPHANS]).await?);
            for save in held.difference(&known) {
                comparison.waiting.entry(*save).or_default();
            }
            comparison.nodes.insert(node.name.clone(), *revision);
        }
        Ok(storage)
    }

    /// Keeps a save that no step's record names until it is judged again after a wait.
    fn retain_for_now(
        &self,
        save: SaveId,
        why: RetainReason,
        comparison: &mut InventoryComparison,
    ) {
        if self.lock_retained().insert(save, why) != Some(why) {
            tracing::warn!(%save, %why, "nodes hold a save that no step in the catalogue names: the save is kept");
        }
        let unknown = comparison.waiting.entry(save).or_default();
        unknown.looks = unknown.looks.saturating_add(1);
        let wait = backoff(self.context.settings.lease, unknown.looks);
        unknown.due = self.context.clock.now().saturating_add(wait);
    }

    /// Removes the roots, states, joint records and rings of saves that no step's record names, one
    /// page of each per round. A gateway that was paused may write such keys after the save is
    /// removed and forgotten. A gateway that was completing a shard removes them itself, unless it
    /// dies. A gateway that was beginning a save does not.
    async fn remove_stray_keys(
        &self,
        catalogue: &dyn Catalogue,
        scan: &mut StrayKeyScan,
    ) -> Result<(), RemoteError> {
        let mut found = Vec::new();
        for (prefix, after) in
            [SHARD_ROOTS, SHARD_STATES, JOINT_SAVES, SAVE_RINGS].into_iter().zip(&mut scan.after)
        {
            let page = catalogue.list_entries(prefix, after.as_deref(), MAX_PAGE).await?;
            *after = page.last().map(|(key, _)| key.clone());
            let save =
                |key: &str| key.get(prefix.len()..)?.get(..2 * size_of::<SaveId>())?.parse().ok();
            found.extend(
                page.into_iter().filter_map(|(key, entry)| Some((save(&key)?, key, entry))),
            );
        }
        if found.is_empty() {
            return Ok(());
        }
        // A step's record names a save before the save has keys, and as long as it has keys. The
        // records are read after the keys, so they name every save of a step among them.
        // Deferred removals are not read: the keys of such a save are removed before the entry in
        // the step's record.
        let known = known_saves(catalogue, &[ORPHANS]).await?;
        for (save, key, entry) in found {
            if !known.contains(&save) {
                tracing::info!(%save, key, "removing a stray key from the catalogue: no step's record names its save");
                catalogue.compare_and_set(&key, Some(entry.revision), None).await?;
            }
        }
        Ok(())
    }

    /// Returns the verdict on a save that no step's record names, from what the storage nodes
    /// report and, if they have a commit mark of it, from the record of its step.
    async fn judge_orphan(
        &self,
        catalogue: &dyn Catalogue,
        storage_nodes: &[NodeRecord],
        save: SaveId,
    ) -> OrphanVerdict {
        for node in storage_nodes {
            let call = FindRemovedSaves { saves: vec![save] };
            let removed = self.context.caller.call(&NodeAddress::of(node), &call).await;
            if removed.is_ok_and(|removed| !removed.is_empty()) {
                return OrphanVerdict::Remove(RemoveReason::Deleted);
            }
        }
        let marks = self.inventory_reader.fetch_marks_from_all(storage_nodes, save).await;
        let Some(marks) = marks else { return OrphanVerdict::Retain(RetainReason::NotAllAsked) };
        if marks.nodes == 0 {
            return OrphanVerdict::Remove(RemoveReason::Aborted);
        }
        // A save is published after n-k+1 nodes of each ring have a mark. One with so many marks may
        // have been reported as saved.
        if let Some(CommitMark { root, saved, .. }) = marks.good
            && !is_on_enough_nodes(&root, marks.nodes)
            && let Ok(Some((checkpoint, _))) =
                read_record::<Checkpoint>(catalogue, &checkpoint_key(root.job.at(root.step))).await
            && is_superseded(&checkpoint, &saved)
        {
            return OrphanVerdict::Supersede { job: root.job, step: root.step, saved };
        }
        OrphanVerdict::Retain(RetainReason::Marked)
    }

    /// Moves a superseded save to the removals of its step. Returns whether it is one of them now.
    async fn try_supersede(
        &self,
        catalogue: &dyn Catalogue,
        step_ref: StepRef<'_>,
        saved: &Saved,
    ) -> bool {
        let superseded = self.removal.supersede_orphan(catalogue, step_ref, saved).await;
        superseded.unwrap_or_else(|error| {
            tracing::warn!(step = %step_ref, save = %saved.save, %error, "failed to record that a save is superseded; retrying");
            false
        })
    }

    /// Continues the removal of all orphans, as far as possible now. An orphan stays on the list
    /// until every node has removed it.
    async fn remove_recorded_orphans(&self, catalogue: &dyn Catalogue) -> Result<(), RemoteError> {
        let nodes = catalogue.list_nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<_> = nodes.filter(|node| node.storage).collect();
        let mut orphans = KeyScan::of_prefix(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            let mut removing: Removing = parse_record(&key, &entry.value)?;
            // The absence of marks is evidence only if all nodes have reported it. A node's record
            // that the save was removed always is evidence.
            if removing.reason == RemoveReason::Aborted {
                match self.judge_orphan(catalogue, &storage, removing.save).await {
                    OrphanVerdict::Remove(reason) => removing.reason = reason,
                    OrphanVerdict::Supersede { job, step, saved } => {
                        if self.try_supersede(catalogue, job.at(step), &saved).await {
                            catalogue.compare_and_set(&key, Some(entry.revision), None).await?;
                            self.lock_retained().remove(&removing.save);
                        }
                        continue;
                    }
                    OrphanVerdict::Retain(why) => {
                        tracing::info!(save = %removing.save, %why, "an orphan is kept");
                        self.lock_retained().insert(removing.save, why);
                        continue;
                    }
                }
                self.lock_retained().remove(&removing.save);
            }
            match self.removal.advance_unnamed_removal(&removing).await {
                Ok(waiting) if waiting.is_empty() => {
                    record_removal_history_incomplete(catalogue).await?;
                    catalogue.compare_and_set(&key, Some(entry.revision), None).await?;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::info!(save = %removing.save, %error, "the removal of an orphan is not complete: the next round retries it")
                }
            }
        }
        Ok(())
    }
}

/// Returns the saves that a step's record names, and those that are to be removed according to the
/// records with one of `prefixes`.
async fn known_saves(
    catalogue: &dyn Catalogue,
    prefixes: &[&str],
) -> Result<BTreeSet<SaveId>, RemoteError> {
    let mut known = BTreeSet::new();
    let mut checkpoints = KeyScan::of_prefix(catalogue, CHECKPOINTS);
    while let Some((key, entry)) = checkpoints.next().await? {
        let checkpoint: Checkpoint = parse_record(&key, &entry.value)?;
        known.extend(checkpoint.committed.map(|saved| saved.save));
        known.extend(checkpoint.removing.iter().map(|removing| removing.save));
        known.extend(checkpoint.writing.map(|writing| writing.save()));
    }
    // A removal that is deferred meanwhile has its own key before the step's record loses it.
    for prefix in prefixes {
        collect_removals(catalogue, prefix, &mut known).await?;
    }
    Ok(known)
}

/// Adds the saves that are to be removed according to the records with `prefix`.
async fn collect_removals(
    catalogue: &dyn Catalogue,
    prefix: &str,
    into: &mut BTreeSet<SaveId>,
) -> Result<(), RemoteError> {
    let mut removals = KeyScan::of_prefix(catalogue, prefix);
    while let Some((key, entry)) = removals.next().await? {
        into.insert(parse_record::<Removing>(&key, &entry.value)?.save);
    }
    Ok(())
}
