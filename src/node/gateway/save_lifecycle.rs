//! Saves at the gateway: complete shards, decide, publish, abort (docs/semantics.md, 3).

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};

use super::begin_save::SaveGateway;
use super::error::GatewayError;
use super::launches::{admit_launch, find_launch_of_open_save, require_newest};
use crate::catalogue::Catalogue;
use crate::catalogue::record_access::{
    RecordSetOutcome, checkpoint_key, compare_and_set_record, compare_and_set_record_guarded,
    deferred_removal_key, joint_save_key, read_record, save_ring_key, shard_root_key,
    shard_state_key, update_record,
};
use crate::format::geometry::MAX_SHARDS;
use crate::format::joint_save::JointSave;
use crate::format::records::{
    Checkpoint, CommitMark, FIELD_GF8, LAYOUT_STANDARD, MAX_RING, Record, RemoveReason, Removing,
    SaveRing, Saved, ShardRoot, ShardState, Writing, roots_hash,
};
use crate::id::{Epoch, Generation, LaunchId, NodeId, SaveId, ShardId, StepRef};
use crate::net::call::CallError;
use crate::node::quorum::majority;
use crate::pipeline::coordinator::list_shard_roots;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{AbortSave, CommitSave, CompleteShard, PutMark, RenewLease};

/// Maximum number of shards whose marks are written at once.
const SHARDS_AT_ONCE: usize = 8;
/// Maximum number of marks of one shard written at once.
const MARKS_AT_ONCE: usize = 32;

/// Maximum number of missing shards that an error names.
const MISSING_SHARDS_NAMED: usize = 8;

impl SaveGateway {
    pub(super) async fn fetch_directory(&self) -> Result<Directory, RemoteError> {
        Ok(Directory::read(&*self.context.catalogue()).await?)
    }

    /// Renews the lease of an open save.
    pub(in crate::node) async fn renew_lease(&self, call: RenewLease) -> Result<(), RemoteError> {
        if self.context.catalogue().renew_lease(call.lease).await? {
            Ok(())
        } else {
            Err(GatewayError::LeaseOver.into())
        }
    }

    /// Records the root and the initial state of a shard whose blocks are all stored. Repeating it
    /// with the same root is safe.
    pub(in crate::node) async fn complete_shard(
        &self,
        call: CompleteShard,
    ) -> Result<(), RemoteError> {
        let root = call.root;
        let geometry = root.geometry()?;
        let ring: HashSet<NodeId> = root.ring.iter().map(|member| member.node).collect();
        let fits = root.index < root.shards
            && ring.len() == root.ring.len()
            && root.shards <= MAX_SHARDS
            && root.shard == ShardId::new(root.save, root.index)
            && (usize::from(root.n)..=MAX_RING).contains(&root.ring.len())
            && root.layout == LAYOUT_STANDARD
            && root.field == FIELD_GF8;
        if !fits {
            return Err(GatewayError::RootInconsistent { shard: root.name }.into());
        }
        let directory = self.fetch_directory().await?;
        if let Some(node) = ring.iter().find(|node| !directory.may_complete_save_on(**node)) {
            let (node, shard) = (*node, root.name);
            return Err(GatewayError::RingNodeUnregistered { node, shard }.into());
        }
        let catalogue = self.context.catalogue();
        let key = checkpoint_key(root.job.at(root.step));
        let not_open = || GatewayError::SaveNotOpen { save: root.save };
        let checkpoint = read_record::<Checkpoint>(&*catalogue, &key).await?;
        let generation = match checkpoint.and_then(|(checkpoint, _)| checkpoint.writing) {
            Some(Writing::Open { save, generation, .. }) if save == root.save => generation,
            _ => return Err(not_open().into()),
        };
        let joint = read_record::<JointSave>(&*catalogue, &joint_save_key(root.save)).await?;
        if joint.as_ref().is_some_and(|(joint, _)| joint.dropped_writer().is_some()) {
            return Err(not_open().into());
        }
        let is_admitted = match joint {
            Some((joint, _)) if !joint.has_one_client() => joint.admits(&root),
            Some((joint, _)) => SaveRing::from(joint).admits(&root),
            // A save of a gateway with an older program has no ring on record.
            None => read_record::<SaveRing>(&*catalogue, &save_ring_key(root.save))
                .await?
                .is_none_or(|(ring, _)| ring.admits(&root)),
        };
        if !is_admitted {
            return Err(GatewayError::RootInconsistent { shard: root.name }.into());
        }
        let fresh = ShardState::fresh(generation, geometry.stripes());
        let keys = [shard_state_key(root.shard), shard_root_key(root.save, root.index)];
        trace_point(TracePoint::Seal, root.shard);
        create_or_require_equal(&*catalogue, &keys[0], &fresh).await?;
        create_or_require_equal(&*catalogue, &keys[1], &root).await?;
        // The save may have been aborted and removed before these keys existed. That removal did
        // not see them.
        let checkpoint = read_record::<Checkpoint>(&*catalogue, &key).await?;
        if checkpoint
            .is_some_and(|(checkpoint, _)| has_writing_or_committed(&checkpoint, root.save))
        {
            return Ok(());
        }
        for key in &keys {
            if let Some(found) = catalogue.get(key).await? {
                catalogue.compare_and_set(key, Some(found.revision), None).await?;
            }
        }
        Err(not_open().into())
    }

    /// Commits a save. Returns its committed form. The work runs in a task of its own, so that a
    /// decided save is published even if the client disconnects.
    pub(in crate::node) async fn commit_save(
        self: &Arc<Self>,
        call: CommitSave,
    ) -> Result<Saved, RemoteError> {
        let service = self.clone();
        let work = self.context.tasks.spawn(async move { service.decide_and_publish(call).await });
        work.await.map_err(|_| GatewayError::CommitInterrupted)?
    }

    /// Decides a save, unless it is decided already, and publishes it. Returns its committed form.
    async fn decide_and_publish(self: &Arc<Self>, call: CommitSave) -> Result<Saved, RemoteError> {
        let catalogue = self.context.catalogue();
        let key = checkpoint_key(call.job.at(call.step));
        let mut current = read_record::<Checkpoint>(&*catalogue, &key).await?;
        loop {
            let (mut checkpoint, revision) = current.ok_or_else(|| {
                GatewayError::StepNotCommitted { job: call.job.clone(), step: call.step }
            })?;
            if let Some(saved) =
                checkpoint.committed.as_ref().filter(|saved| saved.save == call.save)
            {
                return Ok(saved.clone());
            }
            let mut guard = None;
            let saved = match checkpoint.writing.take() {
                Some(Writing::Decided { saved }) if saved.save == call.save => {
                    return self.mark_and_publish(call.job.at(call.step), saved).await;
                }
                // A late copy of the call that began a save may open it again while its removal is
                // deferred.
                Some(Writing::Open { save, generation, .. })
                    if save == call.save
                        && catalogue.get(&deferred_removal_key(save)).await?.is_none() =>
                {
                    if let Some(launch) = find_launch_of_open_save(&*catalogue, save).await? {
                        let step_ref = call.job.at(call.step);
                        let admitted = admit_launch(&*catalogue, launch, step_ref).await?;
                        guard = Some(admitted.guard);
                    }
                    self.build_saved_if_complete(&call, generation).await?
                }
                _ => {
                    let CommitSave { job, step, save, .. } = call;
                    return Err(GatewayError::SaveAbortedOrReplaced { save, job, step }.into());
                }
            };
            checkpoint.writing = Some(Writing::Decided { saved: saved.clone() });
            trace_point(TracePoint::Decide, format_args!("{}/{}", call.job, call.step));
            let (expected, guard) = (Some(revision), guard.as_ref());
            match compare_and_set_record_guarded(&*catalogue, &key, expected, &checkpoint, guard)
                .await?
            {
                RecordSetOutcome::Set(_) => {
                    return self.mark_and_publish(call.job.at(call.step), saved).await;
                }
                RecordSetOutcome::Conflict(other) => current = other,
            }
        }
    }

    /// Checks that all shards of a save are complete. Returns the save's record, made from their
    /// roots.
    async fn build_saved_if_complete(
        &self,
        call: &CommitSave,
        generation: Generation,
    ) -> Result<Saved, RemoteError> {
        let roots = list_shard_roots(&*self.context.catalogue(), call.save).await?;
        let (shards, save) = (call.shards, call.save);
        // Without this check, a commit of zero shards would decide a save that has just been opened.
        if shards == 0 {
            return Err(GatewayError::NoShards { save }.into());
        }
        if let Some(root) = roots.iter().find(|root| root.shards != shards || root.index >= shards)
        {
            let (index, of) = (root.index, root.shards);
            return Err(GatewayError::ShardCountDiffers { index, of, shards, save }.into());
        }
        // The roots have keys by number, so no number occurs twice.
        let missing = (shards as usize).saturating_sub(roots.len());
        if missing > 0 {
            let first = name_missing_shards(shards, &roots);
            return Err(GatewayError::ShardsIncomplete { missing, shards, first, save }.into());
        }
        let mut names = HashSet::new();
        if let Some(twice) = roots.iter().find(|root| !names.insert(&root.name)) {
            let (shard, save) = (twice.name.clone(), call.save);
            return Err(GatewayError::ShardNamesEqual { shard, save }.into());
        }
        let Some(roots_hash) = roots_hash(roots.iter()) else {
            return Err(GatewayError::RootNotEncodable.into());
        };
        Ok(Saved {
            save: call.save,
            generation,
            shards: call.shards,
            len_bytes: roots.iter().map(|root| root.len_bytes).sum(),
            roots_hash,
            saved_at: self.context.clock.wall_seconds(),
        })
    }

    /// Makes a decided save visible: writes commit marks to the nodes, then publishes it by one
    /// compare-and-set. Returns its committed form. Repeating it is safe, also by several daemons
    /// at once.
    pub(in crate::node) async fn mark_and_publish(
        self: &Arc<Self>,
        step_ref: StepRef<'_>,
        saved: Saved,
    ) -> Result<Saved, RemoteError> {
        let StepRef { job, step } = step_ref;
        let catalogue = self.context.catalogue();
        // Read the epoch before the roots, so that roots of an older catalogue database are never
        // marked under a later epoch.
        let epoch = catalogue.epoch();
        let roots = list_shard_roots(&*catalogue, saved.save).await?;
        let directory = self.fetch_directory().await?;
        let (directory, saved) = (&directory, &saved);
        let first = roots.first().cloned();
        let marks =
            roots.into_iter().map(|root| self.put_marks_on_ring(directory, saved, root, epoch));
        let marked: Vec<Vec<NodeId>> =
            stream::iter(marks).buffer_unordered(SHARDS_AT_ONCE).try_collect().await?;
        if let Some(root) = first {
            let marked = marked.into_iter().flatten().collect();
            self.put_marks_on_majority(directory, saved, root, epoch, marked).await?;
        }
        let mut superseded = None;
        let change = |mut checkpoint: Checkpoint| -> Result<Option<Checkpoint>, RemoteError> {
            if checkpoint.committed.as_ref().is_some_and(|other| other.save == saved.save) {
                return Ok(None);
            }
            match checkpoint.writing.take() {
                Some(Writing::Decided { saved: decided }) if decided.save == saved.save => {}
                _ => return Err(GatewayError::StepNotCommitted { job: job.clone(), step }.into()),
            }
            superseded = checkpoint.committed.replace(saved.clone()).map(|old| Removing {
                save: old.save,
                generation: saved.generation,
                reason: RemoveReason::Superseded,
            });
            checkpoint.removing.extend(superseded.clone());
            Ok(Some(checkpoint))
        };
        trace_point(TracePoint::Publish, format_args!("{job}/{step}"));
        update_record(&*catalogue, &checkpoint_key(step_ref), change).await?;
        if let Some(entry) = superseded {
            self.removal.spawn_removal(job.clone(), step, entry);
        }
        tracing::info!(%job, %step, save = %saved.save, bytes = saved.len_bytes, "committed");
        Ok(saved.clone())
    }

    /// Writes the commit marks of one shard to its ring. Returns the nodes that have one.
    ///
    /// # Errors
    /// [`GatewayError::RingMarksMissing`] if more than k-1 nodes of the ring have none.
    async fn put_marks_on_ring(
        &self,
        directory: &Directory,
        saved: &Saved,
        root: ShardRoot,
        epoch: Epoch,
    ) -> Result<Vec<NodeId>, RemoteError> {
        let tolerated = usize::from(root.k) - 1;
        let ring: Vec<NodeId> = root.ring.iter().map(|member| member.node).collect();
        let (shard, cluster) = (root.name.clone(), self.context.settings.cluster);
        let mark = CommitMark { cluster, saved: saved.clone(), root };
        let call = PutMark { bytes: mark.to_bytes()?, epoch };
        // A silent node would cost a timeout for each shard of the save. It is asked only if its
        // mark is needed.
        let (silent, others): (Vec<_>, Vec<_>) =
            ring.into_iter().partition(|node| directory.is_silent(*node));
        let (mut marked, mut missed) = self.put_marks(directory, &others, &call).await;
        if missed.len() + silent.len() > tolerated {
            let (late, failed) = self.put_marks(directory, &silent, &call).await;
            marked.extend(late);
            missed.extend(failed);
        }
        if missed.len() > tolerated {
            let (missed, reason) = (missed.len(), missed.join("; "));
            return Err(GatewayError::RingMarksMissing { missed, shard, reason }.into());
        }
        Ok(marked)
    }

    /// Writes marks of a save's first shard to nodes that have no mark of the save, until more than
    /// half of the storage nodes have one. A reader without a catalogue asks more than half of
    /// them, too, and so finds a mark (docs/semantics.md, 2).
    ///
    /// # Errors
    /// [`GatewayError::MajorityMarksMissing`] if too few nodes have a mark.
    async fn put_marks_on_majority(
        &self,
        directory: &Directory,
        saved: &Saved,
        root: ShardRoot,
        epoch: Epoch,
        mut already_marked: HashSet<NodeId>,
    ) -> Result<(), RemoteError> {
        let storage = directory.storage();
        let mark =
            CommitMark { cluster: self.context.settings.cluster, saved: saved.clone(), root };
        let call = PutMark { bytes: mark.to_bytes()?, epoch };
        already_marked.retain(|node| storage.contains(node));
        let mut others: Vec<NodeId> =
            storage.iter().filter(|node| !already_marked.contains(node)).copied().collect();
        // Nodes that answer come first. Silent ones are asked only if those are not enough.
        others.sort_by_key(|node| !directory.is_live(*node));
        let mut missed = Vec::new();
        while let missing @ 1.. = majority(storage.len()).saturating_sub(already_marked.len()) {
            if others.is_empty() {
                return Err(GatewayError::MajorityMarksMissing {
                    marked: already_marked.len(),
                    storage: storage.len(),
                    needed: majority(storage.len()),
                    reason: missed.join("; "),
                }
                .into());
            }
            let next: Vec<NodeId> = others.drain(..missing.min(others.len())).collect();
            let (done, failed) = self.put_marks(directory, &next, &call).await;
            already_marked.extend(done);
            missed.extend(failed);
        }
        Ok(())
    }

    /// Writes a mark to each of `nodes`. Returns the nodes that have it, and for each other node
    /// the reason why not.
    async fn put_marks(
        &self,
        directory: &Directory,
        nodes: &[NodeId],
        call: &PutMark,
    ) -> (Vec<NodeId>, Vec<String>) {
        let mut puts = stream::iter(nodes.iter().copied())
            .map(|node| async move {
                let to =
                    directory.address(node).ok_or_else(|| format!("{node} is not registered"))?;
                let put = self.context.caller.call(&to, call).await;
                // A node that does not answer is asked after all others next time.
                directory.heard(node, !put.as_ref().is_err_and(CallError::is_unanswered));
                put.map(|()| node).map_err(|error| error.to_string())
            })
            .buffer_unordered(MARKS_AT_ONCE);
        let (mut marked, mut missed) = (Vec::new(), Vec::new());
        while let Some(put) = puts.next().await {
            match put {
                Ok(node) => marked.push(node),
                Err(why) => missed.push(why),
            }
        }
        (marked, missed)
    }

    /// Aborts an open save and starts its removal. Does nothing if the step does not have the save.
    ///
    /// # Errors
    /// [`GatewayError::SaveDecided`] if the save is decided or committed, or was committed before
    /// its removal.
    pub(in crate::node) async fn abort_save(
        self: &Arc<Self>,
        call: AbortSave,
    ) -> Result<(), RemoteError> {
        self.abort_save_for(call, None).await
    }

    /// Aborts an open save as [`abort_save`](Self::abort_save) does. With a `launch`, fails if that
    /// launch is not the newest one of the job.
    pub(super) async fn abort_save_for(
        self: &Arc<Self>,
        call: AbortSave,
        launch: Option<LaunchId>,
    ) -> Result<(), RemoteError> {
        let catalogue = self.context.catalogue();
        let key = checkpoint_key(call.job.at(call.step));
        loop {
            let guard = match launch {
                Some(launch) => Some(require_newest(&*catalogue, launch, &call.job).await?),
                None => None,
            };
            let found = read_record::<Checkpoint>(&*catalogue, &key).await?;
            let Some((mut checkpoint, revision)) = found else { return Ok(()) };
            let removing = match checkpoint.writing.take() {
                Some(Writing::Open { save, generation, .. }) if save == call.save => {
                    Removing { save, generation, reason: RemoveReason::Aborted }
                }
                writing => {
                    checkpoint.writing = writing;
                    return match is_open_or_was_decided(&checkpoint, call.save) {
                        true => Err(GatewayError::SaveDecided { save: call.save }.into()),
                        false => Ok(()),
                    };
                }
            };
            checkpoint.removing.push(removing.clone());
            let (expected, guard) = (Some(revision), guard.as_ref());
            if let RecordSetOutcome::Set(_) =
                compare_and_set_record_guarded(&*catalogue, &key, expected, &checkpoint, guard)
                    .await?
            {
                self.removal.spawn_removal(call.job, call.step, removing);
                return Ok(());
            }
        }
    }
}

/// Returns whether the save is decided or committed, or was committed before its removal. Also
/// returns true for an open save, which the caller has handled before.
pub(super) fn is_open_or_was_decided(checkpoint: &Checkpoint, save: SaveId) -> bool {
    let was = checkpoint
        .removing
        .iter()
        .any(|removing| removing.save == save && removing.reason != RemoveReason::Aborted);
    was || has_writing_or_committed(checkpoint, save)
}

/// Returns whether the step has the save as open, decided or committed.
fn has_writing_or_committed(checkpoint: &Checkpoint, save: SaveId) -> bool {
    let writing = checkpoint.writing.as_ref().map(Writing::save);
    let committed = checkpoint.committed.as_ref().map(|saved| saved.save);
    [writing, committed].contains(&Some(save))
}

/// Creates a record. A record that exists already must be equal.
///
/// # Errors
/// [`GatewayError::RecordConflict`] if the key has another value.
async fn create_or_require_equal<R: Record + PartialEq>(
    catalogue: &dyn Catalogue,
    key: &str,
    record: &R,
) -> Result<(), RemoteError> {
    match compare_and_set_record(catalogue, key, None, record).await? {
        RecordSetOutcome::Set(_) => Ok(()),
        RecordSetOutcome::Conflict(Some((same, _))) if same == *record => Ok(()),
        RecordSetOutcome::Conflict(_) => {
            Err(GatewayError::RecordConflict { key: key.to_owned() }.into())
        }
    }
}

/// Returns the numbers of the first shards of a save that are not complete, as text.
fn name_missing_shards(shards: u32, complete: &[ShardRoot]) -> String {
    let known: HashSet<u32> = complete.iter().map(|root| root.index).collect();
    // A client names the number of shards, so only the first missing ones are looked for.
    let missing = (0..shards).filter(|index| !known.contains(index));
    let named: Vec<String> =
        missing.take(MISSING_SHARDS_NAMED).map(|index| index.to_string()).collect();
    let (noun, first) = (if named.len() == 1 { "shard" } else { "shards" }, named.join(", "));
    match (shards as usize).saturating_sub(known.len() + named.len()) {
        0 => format!("{noun} {first}"),
        more => format!("{noun} {first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::samples::shard_root;

    #[test]
    fn an_error_names_the_first_missing_shards() {
        let complete = |index: u32| ShardRoot { index, ..shard_root(Vec::new()) };
        assert_eq!(name_missing_shards(3, &[complete(0), complete(2)]), "shard 1");
        assert_eq!(name_missing_shards(3, &[complete(1)]), "shards 0, 2");
        let many = name_missing_shards(100, &[complete(3)]);
        assert_eq!(many, "shards 0, 1, 2, 4, 5, 6, 7, 8 and 91 more");
    }
}
