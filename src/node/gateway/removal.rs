//! Removal of saves that were deleted, aborted, superseded or retired (docs/semantics.md, 5). A
//! removal fences the shards, writes tombstones, purges the files, and then makes the catalogue
//! forget the save.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::begin_save::MAX_REMOVING;
use super::error::GatewayError;
use super::launches::require_newest;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    NOTHING_FORGOTTEN, RecordSetOutcome, checkpoint_key, compare_and_set_record,
    compare_and_set_record_guarded, deferred_removal_key, joint_save_key, labels_key, read_record,
    save_ring_key, shard_roots_prefix, shard_state_key, shard_states_prefix, update_record,
};
use crate::catalogue::{Catalogue, Guard, SetOutcome};
use crate::format::records::{
    Checkpoint, Record, RemoveReason, Removing, Saved, ShardRoot, ShardState, StepLabels, Tombstone,
};
use crate::id::{Generation, Job, LaunchId, NodeId, PeerName, SaveId, ShardId, Step, StepRef};
use crate::net::call::address;
use crate::node::context::NodeContext;
use crate::node::quorum::{majority, tolerated_losses};
use crate::pipeline::coordinator::list_shard_roots;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::calls::{PurgeSave, PutTombstone, RemoveAnswer};
use crate::wire::{Call, RemoteError};

/// Time limit of one call to a node. A node with many small files takes long to remove them.
const PURGE_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of nodes called at once.
const AT_ONCE: usize = 32;

/// The progress of a removal.
pub(in crate::node) struct RemovalOutcome {
    /// The answer for the caller.
    pub(in crate::node) answer: RemoveAnswer,
    /// Whether all nodes have purged the save and the catalogue has forgotten it.
    pub(in crate::node) is_complete: bool,
    /// The nodes that have a tombstone of the save, or have recorded that they removed it.
    tombstoned: Vec<NodeId>,
}

/// The result of making a committed save invisible.
pub(in crate::node) enum UnpublishOutcome {
    /// The save is being removed, from now on or already before.
    Removing(Removing),
    /// Another save of the step is committed.
    OtherSave,
    /// No save of the step is committed, and this one is not being removed.
    NotCommitted,
}

/// The service that removes saves from all nodes and from the catalogue.
pub(in crate::node) struct SaveRemoval {
    context: Arc<NodeContext>,
}

impl SaveRemoval {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Makes `save` invisible, if it is the committed save of the step, by one compare-and-set.
    /// From then on the save is being removed. Returns what the step's record then says about the
    /// save.
    pub(in crate::node) async fn unpublish(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        reason: RemoveReason,
    ) -> Result<UnpublishOutcome, RemoteError> {
        let mut found = UnpublishOutcome::NotCommitted;
        // `update_record` calls this again if the record has changed meanwhile, either by another
        // writer or by a write of this daemon whose answer was lost.
        let change = |mut checkpoint: Checkpoint| -> Result<Option<Checkpoint>, RemoteError> {
            let (outcome, has_changed) = move_to_removing(&mut checkpoint, save, reason);
            found = outcome;
            Ok(has_changed.then_some(checkpoint))
        };
        trace_point(TracePoint::Removing, format_args!("{step_ref}"));
        update_record(&*self.context.catalogue(), &checkpoint_key(step_ref), change).await?;
        Ok(found)
    }

    /// Makes `save` invisible as [`unpublish`](Self::unpublish) does, for a launch that is the
    /// newest one of the job.
    ///
    /// # Errors
    /// [`GatewayError::LaunchReplaced`] or [`GatewayError::LaunchUnregistered`] if the launch is
    /// not the newest one.
    pub(super) async fn unpublish_for_launch(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        launch: LaunchId,
    ) -> Result<UnpublishOutcome, RemoteError> {
        let catalogue = self.context.catalogue();
        loop {
            let guard = require_newest(&*catalogue, launch, step_ref.job).await?;
            let reason = RemoveReason::Deleted;
            if let Some(outcome) = self.unpublish_if(step_ref, save, reason, &guard).await? {
                return Ok(outcome);
            }
        }
    }

    /// Makes `save` invisible as [`unpublish`](Self::unpublish) does, if the key of `guard` still
    /// has the revision of `guard` at that moment. Returns `None`, and changes nothing, if that key
    /// or the step's record has changed.
    pub(in crate::node) async fn unpublish_if(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        reason: RemoveReason,
        guard: &Guard,
    ) -> Result<Option<UnpublishOutcome>, RemoteError> {
        let catalogue = self.context.catalogue();
        let key = checkpoint_key(step_ref);
        let found = read_record::<Checkpoint>(&*catalogue, &key).await?;
        let Some((mut checkpoint, revision)) = found else {
            return Ok(Some(UnpublishOutcome::NotCommitted));
        };
        let (outcome, has_changed) = move_to_removing(&mut checkpoint, save, reason);
        if !has_changed {
            return Ok(Some(outcome));
        }
        trace_point(TracePoint::Removing, format_args!("{step_ref}"));
        let (expected, guard) = (Some(revision), Some(guard));
        let set = compare_and_set_record_guarded(&*catalogue, &key, expected, &checkpoint, guard);
        Ok(matches!(set.await?, RecordSetOutcome::Set(_)).then_some(outcome))
    }

    /// Carries out the removal of a save of a step, as far as possible now. Returns its progress.
    /// Repeating it is safe.
    pub(in crate::node) async fn advance_removal(
        &self,
        step_ref: StepRef<'_>,
        entry: &Removing,
    ) -> Result<RemovalOutcome, RemoteError> {
        let StepRef { job, step } = step_ref;
        let what = format!("{job}/{step}");
        if entry.reason != RemoveReason::Aborted {
            // A catalogue rebuilt meanwhile may list the save as committed again, because of its
            // marks.
            self.unpublish(step_ref, entry.save, entry.reason).await?;
            // Earlier committed saves of the step come first. Without tombstones, their marks would
            // make them look committed as soon as the marks of the newer save are gone.
            for older in self.find_older_removals(step_ref, entry).await? {
                self.unpublish(step_ref, older.save, older.reason).await?;
                self.fence_and_put_tombstones(&what, &older).await?;
            }
        }
        let (answer, tombstoned) = self.fence_and_purge_save(&what, entry).await?;
        let is_complete = answer.waiting.is_empty();
        if is_complete {
            self.forget_save(&*self.context.catalogue(), step_ref, entry).await?;
        }
        Ok(RemovalOutcome { answer, is_complete, tombstoned })
    }

    /// Removes a save that no step's record names, as far as possible now. Returns the nodes that
    /// have not purged it yet.
    pub(in crate::node) async fn advance_unnamed_removal(
        &self,
        entry: &Removing,
    ) -> Result<Vec<PeerName>, RemoteError> {
        let (answer, _) = self.fence_and_purge_save(&format!("save {}", entry.save), entry).await?;
        Ok(answer.waiting)
    }

    /// Moves the removal of an aborted save from the record of its step to a key of its own, if
    /// every live storage node has a tombstone of the save. Returns whether it was moved.
    pub(in crate::node) async fn defer_if_tombstoned_on_live_nodes(
        &self,
        step_ref: StepRef<'_>,
        entry: &Removing,
        outcome: &RemovalOutcome,
    ) -> Result<bool, RemoteError> {
        let catalogue = self.context.catalogue();
        let directory = Directory::read(&*catalogue).await?;
        // A live node without a tombstone may have refused it, because it has a commit mark.
        let has_refused =
            |node: &NodeId| directory.has_lease(*node) && !outcome.tombstoned.contains(node);
        if entry.reason != RemoveReason::Aborted || directory.storage().iter().any(has_refused) {
            return Ok(false);
        }
        trace_point(TracePoint::Defer, entry.save);
        // If the key exists, an earlier move was interrupted, and this one completes it.
        let (key, value) = (deferred_removal_key(entry.save), entry.to_bytes()?);
        catalogue.compare_and_set(&key, None, Some(value)).await?;
        self.forget_save(&*catalogue, step_ref, entry).await?;
        Ok(true)
    }

    /// Puts a decided save that no step's record names first among the removals of its step, if
    /// [`is_superseded`]. Returns whether it is one of them now.
    pub(in crate::node) async fn supersede_orphan(
        &self,
        catalogue: &dyn Catalogue,
        step_ref: StepRef<'_>,
        orphan: &Saved,
    ) -> Result<bool, RemoteError> {
        let &Saved { save, generation, .. } = orphan;
        let entry = Removing { save, generation, reason: RemoveReason::Superseded };
        let change = |mut checkpoint: Checkpoint| -> Result<Option<Checkpoint>, RemoteError> {
            let is_full = checkpoint.removing.len() >= MAX_REMOVING;
            if is_full || !is_superseded(&checkpoint, orphan) || names(&checkpoint, save) {
                return Ok(None);
            }
            // Each removal puts the tombstones of those before it. So the removal of a newer save
            // that begins from now on puts those of this one, too.
            checkpoint.removing.insert(0, entry.clone());
            Ok(Some(checkpoint))
        };
        let record = update_record(catalogue, &checkpoint_key(step_ref), change).await?;
        Ok(record.removing.contains(&entry))
    }

    /// Returns the earlier committed saves of the step that are being removed too, oldest first.
    async fn find_older_removals(
        &self,
        step_ref: StepRef<'_>,
        entry: &Removing,
    ) -> Result<Vec<Removing>, RemoteError> {
        let found =
            read_record::<Checkpoint>(&*self.context.catalogue(), &checkpoint_key(step_ref))
                .await?;
        let mut removing = found.map(|(checkpoint, _)| checkpoint.removing).unwrap_or_default();
        let at = removing.iter().position(|other| other.save == entry.save);
        removing.truncate(at.unwrap_or_default());
        removing.retain(|older| older.reason != RemoveReason::Aborted);
        Ok(removing)
    }

    /// Fences the shards, writes tombstones and purges the files. Returns how many nodes have
    /// purged the save, with the names of those that have not, and the nodes that have a tombstone.
    async fn fence_and_purge_save(
        &self,
        label: &str,
        entry: &Removing,
    ) -> Result<(RemoveAnswer, Vec<NodeId>), RemoteError> {
        let (directory, marked) = self.fence_and_put_tombstones(label, entry).await?;
        let swept = self
            .call_nodes_returning_confirmed(&directory, &marked, &PurgeSave { save: entry.save })
            .await;
        let waiting = unconfirmed_storage_nodes(&directory, &swept);
        Ok((RemoveAnswer { confirmed: swept.len() as u32, waiting }, marked))
    }

    /// Fences the shards and writes tombstones to all storage nodes that can be reached. Returns the
    /// directory of the nodes, and the nodes that have a tombstone.
    ///
    /// # Errors
    /// [`GatewayError::TombstonesMissing`] if too few nodes have a tombstone.
    async fn fence_and_put_tombstones(
        &self,
        label: &str,
        entry: &Removing,
    ) -> Result<(Directory, Vec<NodeId>), RemoteError> {
        let catalogue = self.context.catalogue();
        let roots = list_shard_roots(&*catalogue, entry.save).await?;
        let mut generation = entry.generation;
        for root in &roots {
            generation = generation.max(fence_shard_for_deletion(&*catalogue, root.shard).await?);
        }
        let tombstone = Tombstone {
            cluster: self.context.settings.cluster,
            save: entry.save,
            generation: generation.next(catalogue.epoch()),
            reason: entry.reason,
        };
        let directory = Directory::read(&*catalogue).await?;
        let call = PutTombstone { bytes: tombstone.to_bytes()? };
        // A node that is away would cost each removal a timeout, as long as it is away. It is asked
        // only if its tombstone is needed.
        let (leased, others): (Vec<_>, Vec<_>) =
            directory.storage().into_iter().partition(|node| directory.has_lease(*node));
        let mut marked = self.call_nodes_returning_confirmed(&directory, &leased, &call).await;
        if !self.are_tombstones_enough(&directory, entry.reason, &roots, &marked) {
            marked.extend(self.call_nodes_returning_confirmed(&directory, &others, &call).await);
        }
        if !self.are_tombstones_enough(&directory, entry.reason, &roots, &marked) {
            let missed = unconfirmed_storage_nodes(&directory, &marked);
            let names: Vec<&str> = missed.iter().map(|name| name.as_str()).collect();
            let (label, nodes) = (label.to_owned(), names.join(", "));
            return Err(GatewayError::TombstonesMissing { label, nodes }.into());
        }
        Ok((directory, marked))
    }

    /// Returns whether enough nodes have a tombstone of a save for its files to be deleted: a later
    /// rebuild or reader that finds a mark must also find a tombstone (docs/semantics.md, 5).
    fn are_tombstones_enough(
        &self,
        directory: &Directory,
        reason: RemoveReason,
        roots: &[ShardRoot],
        marked: &[NodeId],
    ) -> bool {
        let storage = directory.storage();
        let missed: HashSet<&NodeId> =
            storage.iter().filter(|node| !marked.contains(node)).collect();
        // Each stripe has its n nodes in the ring, so at least n-k+1 of them have a tombstone. Nodes
        // that have left, or that store nothing any more, do not count.
        let has_ring = |root: &ShardRoot| {
            let in_ring = || directory.nodes_to_ask(root).filter(|node| missed.contains(node));
            missed.len() < usize::from(root.k) || in_ring().count() < usize::from(root.k)
        };
        // An aborted save has no mark that a tombstone would have to outweigh.
        let is_aborted = reason == RemoveReason::Aborted;
        let has_majority = is_aborted || marked.len() >= majority(storage.len());
        let is_rootless_enough = || {
            let tolerated = tolerated_losses(self.context.settings.codes.iter().copied());
            is_aborted || missed.len() <= tolerated
        };
        has_majority && roots.iter().all(has_ring) && (!roots.is_empty() || is_rootless_enough())
    }

    /// Sends `call` to each of `nodes`. Returns the nodes that carried it out.
    async fn call_nodes_returning_confirmed<C: Call>(
        &self,
        directory: &Directory,
        nodes: &[NodeId],
        call: &C,
    ) -> Vec<NodeId> {
        stream::iter(nodes.iter().copied())
            .map(|node| async move {
                let to = directory.address(node)?;
                match self.context.caller.call_within(&address(&to), call, PURGE_LIMIT).await {
                    Ok(_) => Some(node),
                    Err(error) => {
                        tracing::info!(node = %to.name, %error, "a removal waits for this node");
                        None
                    }
                }
            })
            .buffer_unordered(AT_ONCE)
            .filter_map(|node| async move { node })
            .collect()
            .await
    }

    /// Removes all keys of a save from the catalogue. Every node must have purged it, or its removal
    /// must be deferred.
    async fn forget_save(
        &self,
        catalogue: &dyn Catalogue,
        step_ref: StepRef<'_>,
        entry: &Removing,
    ) -> Result<(), RemoteError> {
        trace_point(TracePoint::Forget, entry.save);
        if entry.reason != RemoveReason::Aborted {
            record_removal_history_incomplete(catalogue).await?;
        }
        // List by prefix: a save interrupted while its shards were completed has states without
        // roots.
        for prefix in [shard_states_prefix(entry.save), shard_roots_prefix(entry.save)] {
            let mut keys = KeyScan::of_prefix(catalogue, prefix);
            while let Some((key, found)) = keys.next().await? {
                catalogue.compare_and_set(&key, Some(found.revision), None).await?;
            }
        }
        for key in [joint_save_key(entry.save), save_ring_key(entry.save)] {
            if let Some(found) = catalogue.get(&key).await? {
                catalogue.compare_and_set(&key, Some(found.revision), None).await?;
            }
        }
        let labels = labels_key(step_ref);
        if let Some((found, revision)) = read_record::<StepLabels>(catalogue, &labels).await?
            && found.save == entry.save
        {
            catalogue.compare_and_set(&labels, Some(revision), None).await?;
        }
        let key = checkpoint_key(step_ref);
        while let Some((mut checkpoint, revision)) =
            read_record::<Checkpoint>(catalogue, &key).await?
        {
            checkpoint.removing.retain(|removing| removing.save != entry.save);
            // As in `advance_removal`, a rebuilt catalogue may list the save as committed. No node
            // has anything of the save now. A save that was aborted was never committed, and nodes
            // that are away may still have its files.
            if entry.reason != RemoveReason::Aborted {
                checkpoint.committed.take_if(|saved| saved.save == entry.save);
            }
            let value = if checkpoint == Checkpoint::default() {
                None
            } else {
                Some(checkpoint.to_bytes()?)
            };
            if let SetOutcome::Set(_) =
                catalogue.compare_and_set(&key, Some(revision), value).await?
            {
                break;
            }
        }
        Ok(())
    }

    /// Carries out the removal of `entry` in a background task.
    pub(in crate::node) fn spawn_removal(self: &Arc<Self>, job: Job, step: Step, entry: Removing) {
        let service = self.clone();
        self.context.tasks.spawn_until_stop(async move {
            if let Err(error) = service.advance_removal(job.at(step), &entry).await {
                tracing::warn!(%job, %step, %error, "a removal is not complete: the catalogue server continues it");
            }
        });
    }
}

/// Moves `save` to the removals of the step if it is committed. Returns what the step's record says
/// about it then, and whether the record has changed.
fn move_to_removing(
    checkpoint: &mut Checkpoint,
    save: SaveId,
    reason: RemoveReason,
) -> (UnpublishOutcome, bool) {
    let Some(saved) = checkpoint.committed.take_if(|saved| saved.save == save) else {
        let going = checkpoint.removing.iter().find(|entry| entry.save == save);
        let outcome = match (&checkpoint.committed, going) {
            (Some(_), _) => UnpublishOutcome::OtherSave,
            (None, Some(entry)) => UnpublishOutcome::Removing(entry.clone()),
            (None, None) => UnpublishOutcome::NotCommitted,
        };
        return (outcome, false);
    };
    let entry = Removing { save, generation: saved.generation, reason };
    checkpoint.removing.push(entry.clone());
    (UnpublishOutcome::Removing(entry), true)
}

/// Returns whether the committed save of the step was begun in a later epoch than `orphan`.
/// Generations of one epoch are not compared: an old copy of the catalogue may have given one of
/// them to two saves.
pub(in crate::node) fn is_superseded(checkpoint: &Checkpoint, orphan: &Saved) -> bool {
    let committed = checkpoint.committed.as_ref();
    committed.is_some_and(|saved| saved.generation.epoch > orphan.generation.epoch)
}

/// Returns whether the record of a step names the save.
fn names(checkpoint: &Checkpoint, save: SaveId) -> bool {
    checkpoint.removing.iter().any(|removing| removing.save == save)
        || checkpoint.committed.as_ref().is_some_and(|saved| saved.save == save)
        || checkpoint.writing.as_ref().is_some_and(|writing| writing.save() == save)
}

/// Records that the catalogue no longer knows every removal. Nodes that catch up from now on ask
/// the other nodes for removals (docs/semantics.md, 2).
pub(in crate::node) async fn record_removal_history_incomplete(
    catalogue: &dyn Catalogue,
) -> Result<(), RemoteError> {
    if let Some(found) = catalogue.get(NOTHING_FORGOTTEN).await? {
        catalogue.compare_and_set(NOTHING_FORGOTTEN, Some(found.revision), None).await?;
    }
    Ok(())
}

/// Returns the names of the storage nodes that are not in `confirmed`.
fn unconfirmed_storage_nodes(directory: &Directory, confirmed: &[NodeId]) -> Vec<PeerName> {
    let missing = directory.storage().into_iter().filter(|node| !confirmed.contains(node));
    missing.filter_map(|node| directory.peer_name(node)).collect()
}

/// Fences a shard permanently. Returns its last generation; the lowest one if the shard has no
/// state.
async fn fence_shard_for_deletion(
    catalogue: &dyn Catalogue,
    shard: ShardId,
) -> Result<Generation, RemoteError> {
    let key = shard_state_key(shard);
    let mut current = read_record::<ShardState>(catalogue, &key).await?;
    loop {
        let Some((mut state, revision)) = current else { return Ok(Generation::default()) };
        if state.deleting {
            return Ok(state.generation);
        }
        state.deleting = true;
        state.owner = None;
        state.generation = state.generation.next(catalogue.epoch());
        trace_point(TracePoint::Fence, shard);
        match compare_and_set_record(catalogue, &key, Some(revision), &state).await? {
            RecordSetOutcome::Set(_) => return Ok(state.generation),
            RecordSetOutcome::Conflict(other) => current = other,
        }
    }
}
