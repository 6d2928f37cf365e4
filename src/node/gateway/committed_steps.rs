//! The calls of clients about committed checkpoints: list, show, archive, remove.

use std::sync::Arc;

use serde::Serialize;
use tokio::sync::mpsc;

use super::error::GatewayError;
use super::page_limits::SHARDS_SHOWN;
use super::reads_without_catalogue::OutageReader;
use super::removal::{SaveRemoval, UnpublishOutcome};
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, checkpoint_key, parse_checkpoint_key, parse_record, read_record,
    read_ring_changes, shard_root_key, shard_roots_prefix, shard_state_key,
};
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::{Checkpoint, RemoveReason, RingChanges, ShardRoot, ShardState};
use crate::id::Job;
use crate::net::Role;
use crate::node::catalogue_server::catalogue_calls::CatalogueCalls;
use crate::node::context::NodeContext;
use crate::node::incoming_call::{IncomingCall, Request};
use crate::pipeline::coordinator::{CoordinatorError, RepairCause};
use crate::wire::RemoteError;
use crate::wire::calls::{
    ArchiveEvent, ArchiveStep, GetShardState, ListRingChanges, ListSteps, ListStepsAnswer,
    NodeView, RemoveAnswer, RemoveLaunchStep, RemoveStep, RepairEvent, RepairStep, ShowStep,
    ShowStepAnswer, StepView,
};

/// Maximum number of queued events for a client that watches an archiving or a repair.
const EVENTS: usize = 64;

/// The service that lists, shows, labels, archives, repairs and removes committed steps. It also
/// lists the nodes and the ring changes, and pauses retention.
pub(in crate::node) struct CommittedSteps {
    context: Arc<NodeContext>,
    catalogue_calls: Arc<CatalogueCalls>,
    outage_reader: Arc<OutageReader>,
    removal: Arc<SaveRemoval>,
}

impl CommittedSteps {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        catalogue_calls: Arc<CatalogueCalls>,
        outage_reader: Arc<OutageReader>,
        removal: Arc<SaveRemoval>,
    ) -> Self {
        Self { context, catalogue_calls, outage_reader, removal }
    }

    pub(super) fn catalogue(&self) -> Arc<dyn Catalogue> {
        self.context.catalogue()
    }

    /// Removes a committed step. Returns how many nodes have purged it, and which have not. The
    /// work continues if the client disconnects.
    ///
    /// # Errors
    /// [`GatewayError::StepNotCommitted`] if nothing is committed; [`GatewayError::StepSavedAnew`]
    /// if another save of the step is committed.
    pub(in crate::node) async fn remove_step(
        self: &Arc<Self>,
        call: RemoveStep,
    ) -> Result<RemoveAnswer, RemoteError> {
        let step_ref = call.job.at(call.step);
        let outcome = self.removal.unpublish(step_ref, call.save, RemoveReason::Deleted).await?;
        self.carry_out_removal(call, outcome).await
    }

    /// Removes a committed step for a launch. Otherwise as [`remove_step`](Self::remove_step).
    ///
    /// # Errors
    /// [`GatewayError::LaunchReplaced`] or [`GatewayError::LaunchUnregistered`] if the launch is
    /// not the newest one of the job.
    pub(in crate::node) async fn remove_launch_step(
        self: &Arc<Self>,
        call: RemoveLaunchStep,
    ) -> Result<RemoveAnswer, RemoteError> {
        let RemoveLaunchStep { remove, launch } = call;
        let step_ref = remove.job.at(remove.step);
        let outcome = self.removal.unpublish_for_launch(step_ref, remove.save, launch).await?;
        self.carry_out_removal(remove, outcome).await
    }

    async fn carry_out_removal(
        self: &Arc<Self>,
        call: RemoveStep,
        outcome: UnpublishOutcome,
    ) -> Result<RemoveAnswer, RemoteError> {
        let (job, step) = (call.job.clone(), call.step);
        let entry = match outcome {
            UnpublishOutcome::Removing(entry) => entry,
            UnpublishOutcome::OtherSave => {
                return Err(GatewayError::StepSavedAnew { job, step }.into());
            }
            UnpublishOutcome::NotCommitted => {
                return Err(GatewayError::StepNotCommitted { job, step }.into());
            }
        };
        let removal = self.removal.clone();
        let work = self
            .context
            .tasks
            .spawn(async move { removal.advance_removal(call.job.at(call.step), &entry).await });
        let removed = work.await.map_err(|_| GatewayError::RemovalInterrupted)?;
        Ok(removed?.answer)
    }

    /// Returns a page of committed steps, from the catalogue or, if none answers, from the commit
    /// marks.
    pub(in crate::node) async fn list_steps(
        self: &Arc<Self>,
        call: ListSteps,
    ) -> Result<ListStepsAnswer, RemoteError> {
        let asked_at = self.context.clock.now();
        let read = self.list_committed_steps_in_catalogue(call.clone());
        match self.outage_reader.read_if_catalogue_answers(read).await {
            Some(answer) => answer,
            None => self.outage_reader.list_steps_by_marks(call, asked_at).await,
        }
    }

    /// Returns a page of committed steps from the catalogue.
    async fn list_committed_steps_in_catalogue(
        &self,
        call: ListSteps,
    ) -> Result<ListStepsAnswer, RemoteError> {
        let catalogue = self.context.catalogue();
        let prefix = match &call.job {
            Some(job) => format!("{CHECKPOINTS}{job}/"),
            None => CHECKPOINTS.to_owned(),
        };
        let after = call.after.map(|(job, step)| checkpoint_key(job.at(step)));
        let page = catalogue.list_entries(&prefix, after.as_deref(), MAX_PAGE).await?;
        let next = page.last().and_then(|(key, _)| parse_checkpoint_key(key));
        let mut steps = Vec::new();
        for (key, entry) in &page {
            let checkpoint: Checkpoint = parse_record(key, &entry.value)?;
            if let (Some((job, step)), Some(saved)) =
                (parse_checkpoint_key(key), checkpoint.committed)
            {
                steps.push(StepView { job, step, saved, by_marks: false });
            }
        }
        Ok(ListStepsAnswer { steps, next })
    }

    /// Returns the greatest committed step of a job.
    async fn find_latest_step(&self, job: &Job) -> Result<StepView, RemoteError> {
        let (mut after, mut latest) = (None, None);
        loop {
            let page = self
                .list_committed_steps_in_catalogue(ListSteps { job: Some(job.clone()), after })
                .await?;
            latest = page.steps.into_iter().next_back().or(latest);
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        latest.ok_or_else(|| GatewayError::NoStepCommitted { job: job.clone() }.into())
    }

    /// Returns a committed step with a page of its shards, from the catalogue or, if none answers,
    /// from the commit marks.
    pub(in crate::node) async fn show_step(
        self: &Arc<Self>,
        call: ShowStep,
    ) -> Result<ShowStepAnswer, RemoteError> {
        let asked_at = self.context.clock.now();
        let read = self.show_step_in_catalogue(call.clone());
        match self.outage_reader.read_if_catalogue_answers(read).await {
            Some(answer) => answer,
            None => self.outage_reader.show_step_by_marks(call, asked_at).await,
        }
    }

    /// Returns a committed step with a page of its shards from the catalogue.
    async fn show_step_in_catalogue(&self, call: ShowStep) -> Result<ShowStepAnswer, RemoteError> {
        let catalogue = self.context.catalogue();
        let step = match call.step {
            None => self.find_latest_step(&call.job).await?,
            Some(step) => {
                let found =
                    read_record::<Checkpoint>(&*catalogue, &checkpoint_key(call.job.at(step)))
                        .await?;
                let saved = found.and_then(|(checkpoint, _)| checkpoint.committed);
                let saved = saved.ok_or_else(|| GatewayError::StepNotCommitted {
                    job: call.job.clone(),
                    step,
                })?;
                StepView { job: call.job, step, saved, by_marks: false }
            }
        };
        let mut shards = Vec::new();
        // The keys of the roots are in the order of the shards.
        let save = step.saved.save;
        let mut roots = KeyScan::of_prefix(&*catalogue, shard_roots_prefix(save));
        if let Some(before) = call.first_shard.checked_sub(1) {
            roots = roots.starting_after(shard_root_key(save, before));
        }
        while let Some((key, entry)) = roots.next().await? {
            if shards.len() == SHARDS_SHOWN {
                break;
            }
            let root: ShardRoot = parse_record(&key, &entry.value)?;
            let state =
                read_record::<ShardState>(&*catalogue, &shard_state_key(root.shard)).await?;
            shards.push((root, state.map(|(state, _)| state)));
        }
        Ok(ShowStepAnswer { step, shards })
    }

    /// Returns the state of a shard, from the catalogue or, if none answers, from the receipts.
    pub(in crate::node) async fn get_shard_state(
        self: &Arc<Self>,
        call: GetShardState,
    ) -> Result<Option<ShardState>, RemoteError> {
        let known = async {
            let state =
                read_record::<ShardState>(&*self.context.catalogue(), &shard_state_key(call.shard))
                    .await?;
            Ok(state.map(|(state, _)| state))
        };
        match self.outage_reader.read_if_catalogue_answers(known).await {
            Some(answer) => answer,
            None => self.outage_reader.read_shard_state_from_receipts(call).await,
        }
    }

    /// Returns the nodes of the cluster. A node that asks is answered only from the catalogue
    /// database that this daemon serves. A client gets the nodes from the catalogue or, if none
    /// answers, the members that this daemon knows.
    pub(in crate::node) async fn list_nodes(
        self: &Arc<Self>,
        caller_role: Role,
    ) -> Result<Vec<NodeView>, RemoteError> {
        if caller_role == Role::Node {
            return Ok(self.catalogue_calls.require_local_catalogue()?.list_nodes().await?);
        }
        match self
            .outage_reader
            .read_if_catalogue_answers(async { Ok(self.context.catalogue().list_nodes().await?) })
            .await
        {
            Some(answer) => answer,
            None => self.outage_reader.list_members_with_liveness().await,
        }
    }

    /// Returns the ring changes of the catalogue or, if none answers, those that this node stores
    /// or has heard of from other nodes. If the call asks only for stored ones, returns those that
    /// this node stores.
    pub(in crate::node) async fn list_ring_changes(
        &self,
        call: ListRingChanges,
    ) -> Result<RingChanges, RemoteError> {
        if !call.only_stored {
            let read = async { Ok(read_ring_changes(&*self.context.catalogue()).await?) };
            return match self.outage_reader.read_if_catalogue_answers(read).await {
                Some(found) => found,
                None => self.outage_reader.list_stored_and_heard_ring_changes().await,
            };
        }
        self.context.run_on_store(|store| store.read_ring_changes()).await
    }

    /// Archives a step in a task of this daemon and sends its events to the client. The archiving
    /// continues if the client disconnects. If another daemon archives the step already, the
    /// client sees the progress of that archiving.
    pub(in crate::node) async fn archive_step(&self, request: Request, served: IncomingCall) {
        let call = match request.parse::<ArchiveStep>() {
            Ok(call) => call,
            Err(error) => return served.refuse(error.into()).await,
        };
        let coordinator = self.context.coordinator();
        let work = |events: mpsc::Sender<ArchiveEvent>| async move {
            let archive = coordinator.archive_step(call.job.at(call.step), call.options, &events);
            archive.await.inspect_err(|error| {
                tracing::warn!(job = %call.job, step = %call.step, %error, "an archiving that a client requested ended with an error");
            })
        };
        self.work_and_send_events(served, work, || GatewayError::ArchivingInterrupted).await;
    }

    /// Repairs a step in a task of this daemon and sends its events to the client. The repair
    /// continues if the client disconnects.
    pub(in crate::node) async fn repair_step(&self, request: Request, served: IncomingCall) {
        let call = match request.parse::<RepairStep>() {
            Ok(call) => call,
            Err(error) => return served.refuse(error.into()).await,
        };
        let coordinator = self.context.coordinator();
        let work = |events: mpsc::Sender<RepairEvent>| async move {
            let (step_ref, given_up) = (call.job.at(call.step), call.given_up.iter().copied());
            let cause = RepairCause::Request(given_up.collect());
            let repair = coordinator.repair_step(step_ref, call.options, &cause, &events);
            repair.await.inspect_err(|error| {
                tracing::warn!(job = %call.job, step = %call.step, %error, "a repair that a client requested ended with an error");
            })
        };
        self.work_and_send_events(served, work, || GatewayError::RepairInterrupted).await;
    }

    /// Runs `work` in a task of this daemon, to its end or until the daemon stops, and sends the
    /// client its events and its error. `interrupted` is the error if the daemon stops.
    async fn work_and_send_events<E, W>(
        &self,
        mut served: IncomingCall,
        work: impl FnOnce(mpsc::Sender<E>) -> W,
        interrupted: fn() -> GatewayError,
    ) where
        E: Serialize + Send + 'static,
        W: Future<Output = Result<(), CoordinatorError>> + Send + 'static,
    {
        let (events, mut watched) = mpsc::channel(EVENTS);
        let (work, stop) = (work(events), self.context.tasks.stop_token());
        let work = self.context.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => Err(interrupted().into()),
                result = work => result.map_err(RemoteError::from),
            }
        });
        while let Some(event) = watched.recv().await {
            if !served.answer(Ok(event)).await {
                return;
            }
        }
        if let Err(error) = work.await.unwrap_or_else(|_| Err(interrupted().into())) {
            let _ = served.answer::<E>(Err(error)).await;
        }
        let _ = served.send.finish().await;
    }
}
