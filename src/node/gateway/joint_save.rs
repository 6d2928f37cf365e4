//! Saves of several writers: joining a save, the reports of writers, and the list of completed
//! shards (docs/semantics.md, 3).

use std::sync::Arc;
use std::time::Duration;

use super::begin_save::{
    EarlierSave, SaveCaller, SaveGateway, check_step_accepts_save, newest_generation,
    revoke_unused_lease,
};
use super::error::GatewayError;
use super::launches::{AdmittedLaunch, admit_launch};
use super::page_limits::SHARDS_SHOWN;
use super::save_lifecycle::is_open_or_was_decided;
use crate::catalogue::Catalogue;
use crate::catalogue::record_access::{
    RecordSetOutcome, checkpoint_key, compare_and_set_record, compare_and_set_record_guarded,
    joint_save_key, parse_record, read_record, save_ring_key, shard_root_key, shard_roots_prefix,
};
use crate::format::geometry::MAX_SHARDS;
use crate::format::joint_save::{JointSave, MAX_REASON_BYTES, MAX_WRITERS, WriterState};
use crate::format::records::{Checkpoint, RemoveReason, Removing, RingNode, ShardRoot, Writing};
use crate::id::{LeaseId, SaveId, StepRef};
use crate::placement;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{
    CompletedShards, JoinSave, JoinSaveAnswer, JoinedSave, ListCompletedShards, WriterReport,
};

/// Number of times that the record of the launch or the ring of an open save is looked for, and the
/// pause between two looks. It is written right after the step's record, and may not be there yet.
const RECORD_LOOKS: (u32, Duration) = (20, Duration::from_millis(50));

/// The fate of the save that was under way for a step when a writer joins.
enum EarlierJoint {
    /// The save belongs to the writer's launch, and the writer has joined it.
    Joined(JoinSaveAnswer),
    /// The save was decided, and is committed now.
    Published,
    /// There was no save, or the save can no longer be completed and is removed.
    Ended(Option<Removing>),
}

impl SaveGateway {
    /// Joins the open save of a launch's step, and opens it if there is none. Records what the
    /// writer reports. Repeating it is safe.
    ///
    /// # Errors
    /// [`GatewayError::StepBeingSaved`] if another client or launch saves the step;
    /// [`GatewayError::StepCommitted`] if a save that is not to be replaced is committed;
    /// [`GatewayError::WriterUnfit`] if the call is over a limit, or contradicts the open save.
    pub(in crate::node) async fn join_save(
        self: &Arc<Self>,
        call: JoinSave,
    ) -> Result<JoinSaveAnswer, RemoteError> {
        if !(1..=MAX_WRITERS).contains(&(call.writers as usize)) {
            return Err(unfit(&call, format!("a save has 1 to {MAX_WRITERS} writers")));
        }
        if call.writer >= call.writers {
            let last = call.writers - 1;
            return Err(unfit(&call, format!("its writers have the numbers 0 to {last}")));
        }
        let catalogue = self.context.catalogue();
        let mut unused = None;
        let joined = self.join_or_open(&*catalogue, &call, &mut unused).await;
        if let Some(lease) = unused {
            revoke_unused_lease(&*catalogue, lease).await;
        }
        joined
    }

    /// Does the work of [`join_save`](Self::join_save). A lease that was granted and is not that of
    /// the save is left in `unused`.
    async fn join_or_open(
        self: &Arc<Self>,
        catalogue: &dyn Catalogue,
        call: &JoinSave,
        unused: &mut Option<LeaseId>,
    ) -> Result<JoinSaveAnswer, RemoteError> {
        let step_ref = call.job.at(call.step);
        let key = checkpoint_key(step_ref);
        let mut current = read_record::<Checkpoint>(catalogue, &key).await?;
        loop {
            let (mut checkpoint, revision) =
                current.map_or_else(Default::default, |(found, revision)| (found, Some(revision)));
            let admitted = admit_launch(catalogue, call.launch, step_ref).await?;
            let aborted =
                match self.resolve_earlier(catalogue, call, &admitted, &mut checkpoint).await? {
                    EarlierJoint::Joined(answer) => return Ok(answer),
                    EarlierJoint::Published => {
                        current = read_record(catalogue, &key).await?;
                        continue;
                    }
                    EarlierJoint::Ended(removing) => removing,
                };
            if let Some(answer) =
                find_answer_without_open_save(catalogue, call, &checkpoint).await?
            {
                return Ok(answer);
            }
            let lease = match *unused {
                Some(lease) => lease,
                None => *unused.insert(catalogue.grant_lease().await?.0),
            };
            let joint = self.draft_joint_save_record(call, lease).await?;
            check_step_accepts_save(catalogue, step_ref, joint.save, &checkpoint).await?;
            checkpoint.removing.extend(aborted.clone());
            let generation = newest_generation(&checkpoint).next(catalogue.epoch());
            checkpoint.writing = Some(Writing::Open { save: joint.save, generation, lease });
            trace_point(TracePoint::Begin, format_args!("{}/{}", call.job, call.step));
            let guard = Some(&admitted.guard);
            match compare_and_set_record_guarded(catalogue, &key, revision, &checkpoint, guard)
                .await?
            {
                RecordSetOutcome::Conflict(other) => {
                    current = other;
                    continue;
                }
                RecordSetOutcome::Set(revision) => current = Some((checkpoint, revision)),
            }
            *unused = None;
            if let Some(entry) = aborted {
                self.removal.spawn_removal(call.job.clone(), call.step, entry);
            }
            trace_point(TracePoint::Join, joint.save);
            let joint_key = joint_save_key(joint.save);
            compare_and_set_record(catalogue, &joint_key, None, &joint).await?;
        }
    }

    /// Records the report of the writer if the step has an open save of its launch that can still
    /// be completed. Otherwise takes the save under way, if there is one, out of `checkpoint`:
    /// publishes it if it is decided, or returns the entry of its removal if it may be aborted.
    async fn resolve_earlier(
        self: &Arc<Self>,
        catalogue: &dyn Catalogue,
        call: &JoinSave,
        admitted: &AdmittedLaunch,
        checkpoint: &mut Checkpoint,
    ) -> Result<EarlierJoint, RemoteError> {
        if let Some((joint, removing)) =
            self.find_own_open_save(catalogue, call, checkpoint).await?
        {
            return Ok(match self.record_report(catalogue, call, joint, &removing).await? {
                Some(answer) => EarlierJoint::Joined(answer),
                // The lease or the epoch of the save is over, or a node of its ring is gone.
                None => EarlierJoint::Ended(Some(removing)),
            });
        }
        let step_ref = call.job.at(call.step);
        let caller = SaveCaller { save: None, launch: Some(admitted) };
        let earlier =
            self.take_and_resolve_earlier_save(catalogue, step_ref, caller, checkpoint).await?;
        Ok(match earlier {
            EarlierSave::Published => EarlierJoint::Published,
            EarlierSave::Aborted(removing) => EarlierJoint::Ended(Some(removing)),
            EarlierSave::None | EarlierSave::IsThisOne { .. } => EarlierJoint::Ended(None),
        })
    }

    /// Draws the id and the seed of a new save, and chooses its code and its ring.
    async fn draft_joint_save_record(
        &self,
        call: &JoinSave,
        lease: LeaseId,
    ) -> Result<JointSave, RemoteError> {
        let (mut save, mut seed) = (SaveId([0; 12]), [0; 32]);
        self.context.entropy.fill(&mut save.0);
        self.context.entropy.fill(&mut seed);
        let (n, k, nodes) = self.choose_code_and_nodes(&call.avoid, save).await?;
        Ok(JointSave {
            save,
            launch: call.launch,
            lease,
            seed,
            n,
            k,
            block_bytes: self.context.settings.block_bytes,
            ring: placement::ring(&nodes, 0),
            writers: vec![WriterState::Unknown; call.writers as usize],
        })
    }

    /// Returns the joint record of the step's open save if the save belongs to the caller's launch,
    /// with the entry by which the save would be removed. Waits for a while if the joint record is
    /// not written yet.
    async fn find_own_open_save(
        &self,
        catalogue: &dyn Catalogue,
        call: &JoinSave,
        checkpoint: &Checkpoint,
    ) -> Result<Option<((JointSave, u64), Removing)>, RemoteError> {
        let Some(Writing::Open { save, generation, .. }) = checkpoint.writing else {
            return Ok(None);
        };
        let found = self.await_joint_record(catalogue, call.job.at(call.step), save).await?;
        let own = found.filter(|(joint, _)| joint.launch == call.launch);
        let removing = Removing { save, generation, reason: RemoveReason::Aborted };
        Ok(own.map(|own| (own, removing)))
    }

    /// Returns the joint record of an open save, or `None` if the save belongs to no launch. Waits
    /// for up to a second while the gateway that has opened the save has recorded neither a launch
    /// nor a ring.
    pub(super) async fn await_joint_record(
        &self,
        catalogue: &dyn Catalogue,
        step_ref: StepRef<'_>,
        save: SaveId,
    ) -> Result<Option<(JointSave, u64)>, RemoteError> {
        let (looks, pause) = RECORD_LOOKS;
        for _ in 0..looks {
            if let Some(found) = read_record(catalogue, &joint_save_key(save)).await? {
                return Ok(Some(found));
            }
            if catalogue.get(&save_ring_key(save)).await?.is_some() {
                break;
            }
            let found = read_record::<Checkpoint>(catalogue, &checkpoint_key(step_ref)).await?;
            let writing = found.and_then(|(checkpoint, _)| checkpoint.writing);
            if writing.is_none_or(|writing| writing.save() != save) {
                break;
            }
            self.context.clock.sleep(pause).await;
        }
        Ok(None)
    }

    /// Records the report of a writer in the joint record of an open save. Returns the answer to
    /// the writer, or `None` if the save can no longer be completed.
    async fn record_report(
        &self,
        catalogue: &dyn Catalogue,
        call: &JoinSave,
        (mut joint, mut revision): (JointSave, u64),
        removing: &Removing,
    ) -> Result<Option<JoinSaveAnswer>, RemoteError> {
        // Nodes refuse writes of an older epoch.
        if removing.generation.epoch < catalogue.epoch()
            || !catalogue.renew_lease(joint.lease).await?
        {
            return Ok(None);
        }
        let directory = Directory::read(catalogue).await?;
        let can_complete = |member: &RingNode| directory.may_complete_save_on(member.node);
        if !joint.ring.iter().all(can_complete) {
            return Ok(None);
        }
        let nodes = directory.list_ring_nodes(&joint.ring);
        while enter_report(&mut joint, call)? {
            let key = joint_save_key(joint.save);
            match compare_and_set_record(catalogue, &key, Some(revision), &joint).await? {
                RecordSetOutcome::Set(_) => break,
                RecordSetOutcome::Conflict(Some(other)) => (joint, revision) = other,
                // The save was removed and forgotten.
                RecordSetOutcome::Conflict(None) => return Ok(None),
            }
        }
        let lease_ms = self.context.settings.lease.as_millis() as u64;
        let generation = removing.generation;
        let joined = JoinedSave { joint, generation, lease_ms, nodes };
        Ok(Some(JoinSaveAnswer::Open(Box::new(joined))))
    }

    /// Lists the completed shards of an open save from number `first` on, and says whether the save
    /// is open, committed or over. Publishes the save first if it is decided.
    pub(in crate::node) async fn list_completed_shards(
        self: &Arc<Self>,
        call: ListCompletedShards,
    ) -> Result<CompletedShards, RemoteError> {
        let catalogue = self.context.catalogue();
        let step_ref = call.job.at(call.step);
        let found = read_record::<Checkpoint>(&*catalogue, &checkpoint_key(step_ref)).await?;
        let checkpoint = found.map(|(checkpoint, _)| checkpoint).unwrap_or_default();
        match &checkpoint.writing {
            Some(Writing::Decided { saved }) if saved.save == call.save => {
                self.mark_and_publish(step_ref, saved.clone()).await?;
                return Ok(CompletedShards::Committed);
            }
            Some(writing) if writing.save() == call.save => {}
            _ if is_open_or_was_decided(&checkpoint, call.save) => {
                return Ok(CompletedShards::Committed);
            }
            _ => return Ok(CompletedShards::Over),
        }
        let prefix = shard_roots_prefix(call.save);
        let before = call.first.checked_sub(1).map(|before| shard_root_key(call.save, before));
        let page = catalogue.list_entries(&prefix, before.as_deref(), SHARDS_SHOWN as u32).await?;
        let roots: Result<Vec<ShardRoot>, _> =
            page.iter().map(|(key, entry)| parse_record(key, &entry.value)).collect();
        Ok(CompletedShards::Open { roots: roots? })
    }
}

/// Enters the report of a writer into the record. Returns whether that has changed it. A report on
/// another save has no effect: the answer names the present save.
fn enter_report(joint: &mut JointSave, call: &JoinSave) -> Result<bool, RemoteError> {
    if joint.writers.len() != call.writers as usize {
        let (has, says) = (joint.writers.len(), call.writers);
        return Err(unfit(call, format!("the save has {has} writers, this call names {says}")));
    }
    let is_dropped = joint.dropped_writer().is_some();
    let state = &mut joint.writers[call.writer as usize];
    let reported = match (&call.report, &*state) {
        (WriterReport::Joins, _) => return Ok(false),
        (_, state) if state.has_dropped() => return Ok(false),
        (WriterReport::Drops | WriterReport::DropsBecause(_), _) if is_dropped => {
            WriterState::DroppedLater
        }
        (WriterReport::Drops, _) => WriterState::Dropped,
        (WriterReport::DropsBecause(reason), _) => {
            if reason.len() > MAX_REASON_BYTES {
                let limit = format!("a reason has at most {MAX_REASON_BYTES} bytes");
                return Err(unfit(call, limit));
            }
            WriterState::DroppedBecause { reason: reason.clone() }
        }
        (WriterReport::Announces { save, .. } | WriterReport::Reports { save, .. }, _)
            if *save != joint.save =>
        {
            return Ok(false);
        }
        (
            &WriterReport::Announces { shards, .. } | &WriterReport::Reports { shards, .. },
            state,
        ) if state.announced().is_some_and(|(known, _)| shards != known) => {
            let known = state.announced().map_or(0, |(known, _)| known);
            let differs = format!("its number of shards was {known}, and is {shards} now");
            return Err(unfit(call, differs));
        }
        // A writer that was restarted counts its progress anew.
        (&WriterReport::Announces { shards, sent_mib, .. }, _) => {
            WriterState::Announced { shards, sent_mib }
        }
        (&WriterReport::Reports { shards, progress, reports, .. }, _) => {
            WriterState::Reporting { shards, progress, reports }
        }
    };
    let has_changed = *state != reported;
    *state = reported;
    if joint.dropped_writer().is_none()
        && joint.unknown_writers().is_empty()
        && joint.shard_count().is_none_or(|count| count > MAX_SHARDS)
    {
        return Err(unfit(call, format!("a save has at most {MAX_SHARDS} shards")));
    }
    Ok(has_changed)
}

fn unfit(call: &JoinSave, reason: String) -> RemoteError {
    let JoinSave { job, step, writer, .. } = call;
    GatewayError::WriterUnfit { writer: *writer, job: job.clone(), step: *step, reason }.into()
}

/// Returns the answer to a writer whose launch has no open save of the step, or `None` if a save is
/// to be opened. If the launch has committed the step, the answer says so. If the writer reports on
/// a save, the answer says that the save is over.
///
/// # Errors
/// [`GatewayError::StepCommitted`] if another save is committed and is not to be replaced.
async fn find_answer_without_open_save(
    catalogue: &dyn Catalogue,
    call: &JoinSave,
    checkpoint: &Checkpoint,
) -> Result<Option<JoinSaveAnswer>, RemoteError> {
    if let Some(save) = checkpoint.committed.as_ref().map(|saved| saved.save) {
        let joint = read_record::<JointSave>(catalogue, &joint_save_key(save)).await?;
        if joint.is_some_and(|(joint, _)| joint.launch == call.launch) {
            return Ok(Some(JoinSaveAnswer::Committed { save }));
        }
        if call.replace != Some(save) {
            let (job, step) = (call.job.clone(), call.step);
            return Err(GatewayError::StepCommitted { job, step }.into());
        }
    }
    let is_report =
        matches!(call.report, WriterReport::Announces { .. } | WriterReport::Reports { .. });
    Ok(is_report.then_some(JoinSaveAnswer::Over))
}
