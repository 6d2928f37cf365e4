//! Beginning a save: a code and nodes are chosen, and the step's record then names the save
//! (docs/semantics.md, 3.1).

use std::collections::HashSet;
use std::sync::Arc;

use super::error::GatewayError;
use super::launches::{AdmittedLaunch, admit_launch};
use super::removal::SaveRemoval;
use crate::catalogue::Catalogue;
use crate::catalogue::record_access::{
    RecordSetOutcome, checkpoint_key, compare_and_set_record, compare_and_set_record_guarded,
    deferred_removal_key, joint_save_key, read_record, save_ring_key, shard_roots_prefix,
};
use crate::format::joint_save::JointSave;
use crate::format::records::{
    Checkpoint, Node as NodeRecord, RemoveReason, Removing, SaveRing, Writing,
};
use crate::id::{Generation, LaunchId, LeaseId, NodeId, SaveId, StepRef};
use crate::node::context::NodeContext;
use crate::node::retry_schedule::scan_interval;
use crate::placement;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{BeginLaunchSave, BeginSave, BeginSaveAnswer};

/// Maximum number of pending removals of one step.
pub(super) const MAX_REMOVING: usize = 128;

/// The fate of the save that was under way for a step when another save of that step begins.
pub(super) enum EarlierSave {
    None,
    /// The save under way is the caller's: an earlier copy of the same call has opened it.
    IsThisOne {
        generation: Generation,
        lease: LeaseId,
    },
    /// It was decided, and is committed now.
    Published,
    /// Its lease is over, or its launch is older than the caller's, so it is removed.
    Aborted(Removing),
}

/// A client that is about to open a save.
#[derive(Clone, Copy)]
pub(super) struct SaveCaller<'a> {
    /// The id of the client's save, if the client has drawn one.
    pub(super) save: Option<SaveId>,
    /// The launch that the save belongs to, if any.
    pub(super) launch: Option<&'a AdmittedLaunch>,
}

impl SaveCaller<'_> {
    async fn has_newer_launch_than(
        &self,
        catalogue: &dyn Catalogue,
        save: SaveId,
    ) -> Result<bool, RemoteError> {
        match self.launch {
            Some(launch) => launch.is_newer_than_launch_of(catalogue, save).await,
            None => Ok(false),
        }
    }
}

/// The service that registers and lists launches, and begins, lists, commits and aborts the saves
/// of clients, those of several writers included. It also records completed shards.
pub(in crate::node) struct SaveGateway {
    pub(super) context: Arc<NodeContext>,
    pub(super) removal: Arc<SaveRemoval>,
}

impl SaveGateway {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>, removal: Arc<SaveRemoval>) -> Self {
        Self { context, removal }
    }

    /// Opens a save that belongs to no launch: chooses its code and its nodes, and grants it a
    /// lease. Returns all that the client needs to send blocks.
    pub(in crate::node) async fn begin_save(
        self: &Arc<Self>,
        call: BeginSave,
    ) -> Result<BeginSaveAnswer, RemoteError> {
        self.begin(call, None).await
    }

    /// Opens a save of a launch. Otherwise as [`begin_save`](Self::begin_save).
    pub(in crate::node) async fn begin_launch_save(
        self: &Arc<Self>,
        call: BeginLaunchSave,
    ) -> Result<BeginSaveAnswer, RemoteError> {
        self.begin(call.begin, Some(call.launch)).await
    }

    async fn begin(
        self: &Arc<Self>,
        call: BeginSave,
        launch: Option<LaunchId>,
    ) -> Result<BeginSaveAnswer, RemoteError> {
        let catalogue = self.context.catalogue();
        let (n, k, nodes) = self.choose_code_and_nodes(&call.avoid, call.save).await?;
        let (granted, period) = catalogue.grant_lease().await?;
        trace_point(TracePoint::Begin, format_args!("{}/{}", call.job, call.step));
        let begun = self.open_save(&*catalogue, &call, launch, granted).await;
        if begun.as_ref().map_or(true, |(_, lease)| *lease != granted) {
            revoke_unused_lease(&*catalogue, granted).await;
        }
        let (generation, lease) = begun?;
        let begun = BeginSaveAnswer {
            save: call.save,
            generation,
            lease,
            lease_ms: period.as_millis() as u64,
            n,
            k,
            block_bytes: self.context.settings.block_bytes,
            nodes,
        };
        match launch {
            Some(launch) => record_launch_of_save(&*catalogue, begun, launch).await,
            None => record_ring_of_save(&*catalogue, begun).await,
        }
    }

    /// Returns the code of a new save, as (n, k), and the nodes that it may use: the live storage
    /// nodes, without those in `avoid` if enough others are left for a code.
    pub(super) async fn choose_code_and_nodes(
        &self,
        avoid: &[NodeId],
        save: SaveId,
    ) -> Result<(u8, u8, Vec<NodeRecord>), RemoteError> {
        let live = self.fetch_directory().await?.storage_for_saves();
        let avoid: HashSet<NodeId> = avoid.iter().copied().collect();
        let is_wanted = |node: &&NodeRecord| !avoid.contains(&NodeId::of(&node.name));
        let mut nodes: Vec<NodeRecord> = live.iter().filter(is_wanted).cloned().collect();
        if self.choose_code(nodes.len()).is_err() {
            // Too few nodes are left without the avoided ones. A save on nodes that may fail is
            // better than none.
            nodes = live;
        }
        let (n, k) = self.choose_code(nodes.len())?;
        Ok((n, k, placement::nodes_of_save(nodes, save)))
    }

    /// Returns the first configured code, as (n, k), for which `live_nodes` are enough.
    fn choose_code(&self, live_nodes: usize) -> Result<(u8, u8), RemoteError> {
        let fits = self.context.settings.codes.iter().find(|(n, _)| usize::from(*n) <= live_nodes);
        if let Some(code) = fits {
            return Ok(*code);
        }
        if live_nodes == 0 {
            return Err(GatewayError::NoLiveStorageNode.into());
        }
        let needed = self.context.settings.codes.iter().map(|(n, _)| *n).min().unwrap_or(0);
        Err(GatewayError::TooFewStorageNodes { live: live_nodes, needed }.into())
    }

    /// Opens the save under `lease`. Returns its generation and its lease. If an earlier copy of
    /// this call has opened the save already, the returned lease is the one of that call.
    ///
    /// # Errors
    /// [`GatewayError::StepCommitted`] if the step is committed; [`GatewayError::StepBeingSaved`]
    /// if another client saves it; [`GatewayError::SaveOver`] if the save is over;
    /// [`GatewayError::TooManyRemovals`] if too many removals of the step are pending;
    /// [`GatewayError::LaunchReplaced`] or [`GatewayError::LaunchUnregistered`] if the launch may
    /// not save the step.
    async fn open_save(
        self: &Arc<Self>,
        catalogue: &dyn Catalogue,
        call: &BeginSave,
        launch: Option<LaunchId>,
        lease: LeaseId,
    ) -> Result<(Generation, LeaseId), RemoteError> {
        let step_ref = call.job.at(call.step);
        let key = checkpoint_key(step_ref);
        let mut current = read_record::<Checkpoint>(catalogue, &key).await?;
        loop {
            let (mut checkpoint, revision) =
                current.map_or_else(Default::default, |(found, revision)| (found, Some(revision)));
            let admitted = match launch {
                Some(launch) => Some(admit_launch(catalogue, launch, step_ref).await?),
                None => None,
            };
            let caller = SaveCaller { save: Some(call.save), launch: admitted.as_ref() };
            let aborted = match self
                .take_and_resolve_earlier_save(catalogue, step_ref, caller, &mut checkpoint)
                .await?
            {
                EarlierSave::IsThisOne { generation, lease } => return Ok((generation, lease)),
                EarlierSave::Published => {
                    current = read_record(catalogue, &key).await?;
                    continue;
                }
                EarlierSave::Aborted(removing) => Some(removing),
                EarlierSave::None => None,
            };
            if checkpoint.committed.is_some() && !call.replace {
                let (job, step) = (call.job.clone(), call.step);
                return Err(GatewayError::StepCommitted { job, step }.into());
            }
            check_step_accepts_save(catalogue, step_ref, call.save, &checkpoint).await?;
            checkpoint.removing.extend(aborted.clone());
            let generation = newest_generation(&checkpoint).next(catalogue.epoch());
            checkpoint.writing = Some(Writing::Open { save: call.save, generation, lease });
            let guard = admitted.as_ref().map(|admitted| &admitted.guard);
            match compare_and_set_record_guarded(catalogue, &key, revision, &checkpoint, guard)
                .await?
            {
                RecordSetOutcome::Set(_) => {
                    if let Some(entry) = aborted {
                        self.removal.spawn_removal(call.job.clone(), call.step, entry);
                    }
                    return Ok((generation, lease));
                }
                RecordSetOutcome::Conflict(other) => current = other,
            }
        }
    }

    /// Removes the save under way from `checkpoint`, if there is one, and returns its fate. A
    /// decided save is published. An open save is aborted if its lease is over, or if its launch is
    /// older than that of the caller.
    ///
    /// # Errors
    /// [`GatewayError::StepBeingSaved`] if another client saves the step;
    /// [`GatewayError::SaveOver`] if the open save is the caller's and its lease is over.
    pub(super) async fn take_and_resolve_earlier_save(
        self: &Arc<Self>,
        catalogue: &dyn Catalogue,
        step_ref: StepRef<'_>,
        caller: SaveCaller<'_>,
        checkpoint: &mut Checkpoint,
    ) -> Result<EarlierSave, RemoteError> {
        match checkpoint.writing.take() {
            None => Ok(EarlierSave::None),
            Some(Writing::Open { save, generation, lease }) if Some(save) == caller.save => {
                match catalogue.renew_lease(lease).await? {
                    true => Ok(EarlierSave::IsThisOne { generation, lease }),
                    false => Err(GatewayError::SaveOver { save }.into()),
                }
            }
            Some(Writing::Open { save, lease, .. })
                if catalogue.is_lease_alive(lease).await?
                    && !caller.has_newer_launch_than(catalogue, save).await? =>
            {
                let lease = self.context.settings.lease;
                let abort_seconds = (lease + scan_interval(lease)).as_secs() + 1;
                let StepRef { job, step } = step_ref;
                let job = job.clone();
                Err(GatewayError::StepBeingSaved { job, step, abort_seconds }.into())
            }
            Some(Writing::Open { save, generation, .. }) => {
                let reason = RemoveReason::Aborted;
                Ok(EarlierSave::Aborted(Removing { save, generation, reason }))
            }
            Some(Writing::Decided { saved }) => {
                self.mark_and_publish(step_ref, saved).await?;
                Ok(EarlierSave::Published)
            }
        }
    }
}

/// Creates the record that names the launch and the ring of a save which one client writes.
/// Returns the answer to the client. If the record exists, because this call is a duplicate, the
/// answer has the code and the nodes in that record.
async fn record_launch_of_save(
    catalogue: &dyn Catalogue,
    begun: BeginSaveAnswer,
    launch: LaunchId,
) -> Result<BeginSaveAnswer, RemoteError> {
    let BeginSaveAnswer { save, lease, n, k, block_bytes, .. } = begun;
    let ring = placement::ring(&begun.nodes, 0);
    let (seed, writers) = ([0; 32], Vec::new());
    let record = JointSave { save, launch, lease, seed, n, k, block_bytes, ring, writers };
    trace_point(TracePoint::Join, save);
    let key = joint_save_key(save);
    match compare_and_set_record(catalogue, &key, None, &record).await? {
        RecordSetOutcome::Conflict(Some((first, _))) => {
            answer_from_ring(catalogue, begun, first.into()).await
        }
        _ => Ok(begun),
    }
}

/// Creates the record of the ring of a save that belongs to no launch. Returns the answer to the
/// client. If the record exists, because this call is a duplicate, the answer has the code and the
/// nodes in that record.
async fn record_ring_of_save(
    catalogue: &dyn Catalogue,
    begun: BeginSaveAnswer,
) -> Result<BeginSaveAnswer, RemoteError> {
    let BeginSaveAnswer { save, n, k, block_bytes, .. } = begun;
    let record = SaveRing { n, k, block_bytes, ring: placement::ring(&begun.nodes, 0) };
    trace_point(TracePoint::Ring, save);
    match compare_and_set_record(catalogue, &save_ring_key(save), None, &record).await? {
        RecordSetOutcome::Conflict(Some((first, _))) => {
            answer_from_ring(catalogue, begun, first).await
        }
        _ => Ok(begun),
    }
}

/// Returns the answer with the code and the nodes that were chosen when the save was begun.
async fn answer_from_ring(
    catalogue: &dyn Catalogue,
    begun: BeginSaveAnswer,
    first: SaveRing,
) -> Result<BeginSaveAnswer, RemoteError> {
    let SaveRing { n, k, block_bytes, ring } = first;
    let nodes = Directory::read(catalogue).await?.list_ring_nodes(&ring);
    Ok(BeginSaveAnswer { n, k, block_bytes, nodes, ..begun })
}

/// Revokes a lease that was granted for a save which was not opened under it.
pub(super) async fn revoke_unused_lease(catalogue: &dyn Catalogue, lease: LeaseId) {
    if let Err(error) = catalogue.revoke_lease(lease).await {
        tracing::info!(%error, "cannot revoke an unused lease: it expires by itself");
    }
}

/// Returns the newest generation of the committed save and of those that are being removed. A save
/// under way must have been taken from the record before.
pub(super) fn newest_generation(checkpoint: &Checkpoint) -> Generation {
    let committed = checkpoint.committed.as_ref().map(|saved| saved.generation);
    let removing = checkpoint.removing.iter().map(|removing| removing.generation);
    removing.chain(committed).max().unwrap_or_default()
}

/// Checks that the step may have a new save with this id.
///
/// # Errors
/// [`GatewayError::SaveOver`] if the save is over; [`GatewayError::TooManyRemovals`] if too many
/// removals of the step are pending.
pub(super) async fn check_step_accepts_save(
    catalogue: &dyn Catalogue,
    step_ref: StepRef<'_>,
    save: SaveId,
    checkpoint: &Checkpoint,
) -> Result<(), RemoteError> {
    // The call may have been delayed for long. A save id that is being removed or has roots is
    // never opened again, by this daemon or by another.
    let is_removed = checkpoint.removing.iter().any(|removing| removing.save == save)
        || catalogue.get(&deferred_removal_key(save)).await?.is_some();
    let roots = shard_roots_prefix(save);
    if is_removed || !catalogue.list_entries(&roots, None, 1).await?.is_empty() {
        return Err(GatewayError::SaveOver { save }.into());
    }
    if checkpoint.removing.len() >= MAX_REMOVING {
        let StepRef { job, step } = step_ref;
        return Err(GatewayError::TooManyRemovals { job: job.clone(), step }.into());
    }
    Ok(())
}
