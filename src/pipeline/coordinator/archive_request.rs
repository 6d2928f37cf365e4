//! The run of an archive request, from its record in the catalogue to its end.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::sync::mpsc;

use super::error::CoordinatorError;
use super::lease_keeper::LeaseKeeper;
use super::owned_shard::OwnedShard;
use super::stripe_archiving::code_for_plan;
use super::stripe_counts::StripeCounts;
use super::watch_request::WatchOutcome;
use crate::catalogue::record_access::{
    ArchiveRequest, MAX_WHY_CHARS, RecordSetOutcome, archive_request_key, checkpoint_key,
    compare_and_set_record, parse_record, read_record, shard_roots_prefix,
};
use crate::catalogue::{Catalogue, CatalogueError, MAX_PAGE};
use crate::clock::Clock;
use crate::code::CodeId;
use crate::entropy::Entropy;
use crate::format::records::{Checkpoint, Record, Saved, ShardRoot};
use crate::id::{ClusterId, Generation, Job, LeaseId, NodeId, SaveId, Step, StepRef};
use crate::net::call::Caller;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions};

/// Number of stripes that are archived at once unless the request sets another number.
const DEFAULT_PARALLEL: usize = 4;
/// Maximum number of stripes of one request that are archived at the same time.
const MAX_PARALLEL: usize = 64;

/// How long an archiving waits for the owner of a shard, for example a repairer, to give the shard
/// back. A repairer looks for an archive request before each run of a plan and each copy of a block.
const REPAIRER_WAIT: Duration = Duration::from_secs(600);
/// Wait before an archiving or a repair tries again to take a shard that has another owner, or a
/// request that another coordinator runs.
pub(super) const OWNER_POLL: Duration = Duration::from_millis(250);

/// The coordinator of one daemon. It runs archive requests and repairs steps on behalf of this
/// daemon.
#[derive(Clone)]
pub struct Coordinator {
    /// The cluster.
    pub cluster: ClusterId,
    /// The daemon's node id.
    pub me: NodeId,
    /// The catalogue.
    pub catalogue: Arc<dyn Catalogue>,
    /// The client for calls to nodes.
    pub caller: Arc<Caller>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The source of the random names of attempts and runs.
    pub entropy: Arc<dyn Entropy>,
}

/// An archive request that this coordinator runs, or is about to run, under its lease.
struct ActiveRequest {
    key: String,
    job: Job,
    step: Step,
    save: SaveId,
    options: ArchiveOptions,
    /// The number of consecutive failures before this run.
    failures: u32,
    lease_keeper: LeaseKeeper,
}

impl ActiveRequest {
    async fn with_new_lease(
        coordinator: &Coordinator,
        (job, step, save): (&Job, Step, SaveId),
        options: ArchiveOptions,
    ) -> Result<Self, CatalogueError> {
        let (key, lease_keeper) =
            (archive_request_key(job.at(step)), LeaseKeeper::start(coordinator).await?);
        Ok(Self { key, job: job.clone(), step, save, options, failures: 0, lease_keeper })
    }

    /// Returns the catalogue's record of the request while `node` runs it.
    fn to_record(&self, node: NodeId) -> ArchiveRequest {
        let &Self { save, options, failures, .. } = self;
        ArchiveRequest {
            node,
            lease: self.lease_keeper.lease,
            save,
            options,
            failures,
            waiting: None,
        }
    }
}

/// The outcome of opening an archive request.
enum OpenedRequest {
    /// This coordinator runs the request.
    Claimed(ActiveRequest),
    /// The coordinator of this node runs the request.
    RunBy(NodeId),
}

/// A shard of an archive request.
enum ShardToArchive {
    /// The coordinator owns the shard.
    Taken(Arc<OwnedShard>),
    /// All stripes of the shard are archived, and this run does nothing about the rest: all replicas
    /// are dropped, or another coordinator owns the shard.
    LeftAlone(StripeCounts),
}

/// The work that a run of an archive request leaves for later.
#[derive(Default)]
struct RemainingWork {
    /// The number of archived stripes with replicas that are not confirmed as dropped.
    undropped: u64,
    /// Whether there was a failure that a later run may get past.
    can_retry: bool,
}

/// The channel for the events of an archive request. If no receiver listens, the events are lost
/// and the work continues.
pub type ArchiveEventSender = mpsc::Sender<ArchiveEvent>;

/// Returns the shard roots of a save, in order.
pub async fn list_shard_roots(
    catalogue: &dyn Catalogue,
    save: SaveId,
) -> Result<Vec<ShardRoot>, CatalogueError> {
    let prefix = shard_roots_prefix(save);
    let mut roots = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page = catalogue.list_entries(&prefix, after.as_deref(), MAX_PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(roots) };
        after = Some(last.clone());
        for (key, entry) in &page {
            roots.push(parse_record::<ShardRoot>(key, &entry.value)?);
        }
    }
}

impl Coordinator {
    /// Returns the nodes that are registered now.
    pub async fn fetch_directory(&self) -> Result<Directory, CatalogueError> {
        Directory::read(&*self.catalogue).await
    }

    /// Returns the nodes that may hold data or records of a shard ([`Directory::nodes_to_ask`]).
    pub(super) async fn fetch_nodes_to_ask(
        &self,
        shard: &OwnedShard,
    ) -> Result<Vec<NodeId>, CoordinatorError> {
        Ok(self.fetch_directory().await?.nodes_to_ask(&shard.root).collect())
    }

    /// Archives all stripes of a committed step that are not archived yet, and completes drops that
    /// are pending.
    ///
    /// The archive request is recorded in the catalogue before any work starts, so that another
    /// daemon resumes it if this one vanishes.
    ///
    /// If another live coordinator runs the request, this coordinator reports the progress of the
    /// other. It takes the request over if the other coordinator vanishes before all stripes are
    /// archived.
    ///
    /// # Errors
    /// [`CoordinatorError::NotFound`] if the step is not committed; [`CoordinatorError::Owned`] if
    /// another live coordinator keeps one of the shards, or runs the request while nobody listens to
    /// `events`; [`CoordinatorError::Deferred`] if the other coordinator failed and the request
    /// waits for a retry; otherwise the first error of a stripe, or an error of the catalogue.
    pub async fn archive_step(
        &self,
        step_ref: StepRef<'_>,
        options: ArchiveOptions,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let StepRef { job, step } = step_ref;
        let mut watched = None;
        loop {
            let save = self.find_committed_save(step_ref).await?;
            let node = match self.claim_request_or_find_runner((job, step, save), options).await? {
                OpenedRequest::Claimed(claim) => return self.run_request(&claim, events).await,
                OpenedRequest::RunBy(node) => node,
            };
            let owner = self.fetch_directory().await?.name(node);
            if events.is_closed() {
                return Err(CoordinatorError::Owned { what: step_ref.to_string(), owner });
            }
            if watched.replace(node) != Some(node) {
                let note = format!("{owner} archives {step_ref} already: this is its progress");
                let _ = events.send(ArchiveEvent::Note(note)).await;
            }
            match self.watch_request(step_ref, save, events).await? {
                WatchOutcome::Finished => return Ok(()),
                // Another coordinator may still run the request of an older save of this step.
                WatchOutcome::Vacant => self.clock.sleep(OWNER_POLL).await,
                WatchOutcome::Waiting { node, reason } => {
                    let owner = self.fetch_directory().await?.name(node);
                    let what = step_ref.to_string();
                    return Err(CoordinatorError::Deferred { what, owner, reason });
                }
            }
        }
    }

    /// Resumes the archive request that was `found` under `revision`. Does nothing if the request has
    /// another revision by now, because another coordinator has run it or runs it.
    pub async fn take_over_and_run_request(
        &self,
        step_ref: StepRef<'_>,
        (found, revision): (ArchiveRequest, u64),
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let StepRef { job, step } = step_ref;
        let mut claim =
            ActiveRequest::with_new_lease(self, (job, step, found.save), found.options).await?;
        claim.failures = found.failures;
        trace_point(TracePoint::Request, format_args!("{job}/{step}"));
        match compare_and_set_record(
            &*self.catalogue,
            &claim.key,
            Some(revision),
            &claim.to_record(self.me),
        )
        .await?
        {
            RecordSetOutcome::Set(_) => self.run_request(&claim, events).await,
            RecordSetOutcome::Conflict(_) => {
                Ok(self.catalogue.revoke_lease(claim.lease_keeper.lease).await?)
            }
        }
    }

    /// Runs the request. Then removes it from the catalogue, or leaves it there to wait for a
    /// retry.
    async fn run_request(
        &self,
        claim: &ActiveRequest,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let mut left = RemainingWork::default();
        let result = self.archive_if_committed(claim, &mut left, events).await;
        let mut why: Vec<String> =
            result.as_ref().err().map(ToString::to_string).into_iter().collect();
        if left.undropped > 0 {
            why.push(format!("replicas of {} stripes wait to be dropped", left.undropped));
        }
        let goes_on = left.can_retry || left.undropped > 0;
        let waiting = goes_on.then(|| why.join("; ").chars().take(MAX_WHY_CHARS).collect());
        // If this fails, the lease expires, and the record remains as if its coordinator had
        // crashed.
        let ended = self.finish_request(claim, waiting).await;
        result.and(ended)
    }

    /// Records the archive request in the catalogue, or takes over a recorded one that has no live
    /// coordinator. Returns the request, or the node whose coordinator runs it.
    async fn claim_request_or_find_runner(
        &self,
        target: (&Job, Step, SaveId),
        options: ArchiveOptions,
    ) -> Result<OpenedRequest, CoordinatorError> {
        let mut claim = ActiveRequest::with_new_lease(self, target, options).await?;
        let mut current = read_record::<ArchiveRequest>(&*self.catalogue, &claim.key).await?;
        loop {
            if let Some((other, _)) = &current
                && other.has_coordinator(&*self.catalogue).await?
            {
                self.catalogue.revoke_lease(claim.lease_keeper.lease).await?;
                return Ok(OpenedRequest::RunBy(other.node));
            }
            claim.failures = current.as_ref().map_or(0, |(other, _)| other.failures);
            let revision = current.map(|(_, revision)| revision);
            trace_point(TracePoint::Request, format_args!("{}/{}", target.0, target.1));
            match compare_and_set_record(
                &*self.catalogue,
                &claim.key,
                revision,
                &claim.to_record(self.me),
            )
            .await?
            {
                RecordSetOutcome::Set(_) => return Ok(OpenedRequest::Claimed(claim)),
                RecordSetOutcome::Conflict(other) => current = other,
            }
        }
    }

    /// Removes the request from the catalogue, or leaves it with `waiting_reason` for a retry. Then
    /// revokes the lease.
    async fn finish_request(
        &self,
        claim: &ActiveRequest,
        waiting_reason: Option<String>,
    ) -> Result<(), CoordinatorError> {
        let ActiveRequest { key, job, step, lease_keeper, .. } = claim;
        trace_point(TracePoint::Done, format_args!("{job}/{step}"));
        if let Some((found, revision)) =
            read_record::<ArchiveRequest>(&*self.catalogue, key).await?
            && found.lease == lease_keeper.lease
        {
            // A record with another lease belongs to a coordinator that took over. It stays.
            let failures = claim.failures.saturating_add(1);
            let left =
                waiting_reason.map(|why| ArchiveRequest { failures, waiting: Some(why), ..found });
            let left = left.map(|left| left.to_bytes()).transpose();
            let left = left.map_err(|error| CoordinatorError::Format(error.to_string()))?;
            self.catalogue.compare_and_set(key, Some(revision), left).await?;
        }
        Ok(self.catalogue.revoke_lease(lease_keeper.lease).await?)
    }

    async fn archive_if_committed(
        &self,
        claim: &ActiveRequest,
        left: &mut RemainingWork,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let result = match self.ensure_committed(claim).await {
            Ok(()) => self.archive_save(claim, left, events).await,
            Err(error) => Err(error),
        };
        left.can_retry |= result.as_ref().is_err_and(CoordinatorError::is_retryable);
        let is_gone = |now| matches!(now, Err(CoordinatorError::NotFound { .. }));
        if result.is_err() && is_gone(self.ensure_committed(claim).await) {
            // The save is no longer committed. The request does not apply to another save of the
            // step.
            *left = RemainingWork::default();
        }
        result
    }

    /// Returns an error unless the save of the request is the committed save of its step.
    async fn ensure_committed(&self, claim: &ActiveRequest) -> Result<(), CoordinatorError> {
        let ActiveRequest { job, step, save, .. } = claim;
        match self.find_committed_save(job.at(*step)).await? == *save {
            true => Ok(()),
            false => Err(CoordinatorError::NotFound { job: job.clone(), step: *step }),
        }
    }

    async fn find_committed_save(&self, step_ref: StepRef<'_>) -> Result<SaveId, CoordinatorError> {
        Ok(self.find_committed(step_ref).await?.save)
    }

    /// Returns the save that is committed as the step.
    pub(super) async fn find_committed(
        &self,
        step_ref: StepRef<'_>,
    ) -> Result<Saved, CoordinatorError> {
        let StepRef { job, step } = step_ref;
        let found = read_record::<Checkpoint>(&*self.catalogue, &checkpoint_key(step_ref)).await?;
        let saved = found.and_then(|(checkpoint, _)| checkpoint.committed);
        saved.ok_or_else(|| CoordinatorError::NotFound { job: job.clone(), step })
    }

    async fn archive_save(
        &self,
        claim: &ActiveRequest,
        left: &mut RemainingWork,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let &ActiveRequest { save, options, ref lease_keeper, .. } = claim;
        let roots = list_shard_roots(&*self.catalogue, save).await?;
        let parallel = match options.parallel {
            0 => DEFAULT_PARALLEL,
            some => usize::from(some).min(MAX_PARALLEL),
        };
        let mut shards = Vec::with_capacity(roots.len());
        let mut jobs = Vec::new();
        let (mut total_bytes, mut stripes) = (0, 0);
        for root in roots.into_iter().filter(|root| root.len_bytes > 0) {
            let (code, lease) = (code_for_plan(&root, options.plan)?.id(), lease_keeper.lease);
            let shard = match self.take_shard_or_leave_it(root, code, lease, events).await? {
                ShardToArchive::Taken(shard) => shard,
                ShardToArchive::LeftAlone(counts) => {
                    stripes += counts.archived();
                    left.undropped += counts.undropped;
                    continue;
                }
            };
            for index in shard.unfinished_stripes().await {
                total_bytes += shard.stripe_bytes(index);
                jobs.push((shard.clone(), index));
            }
            shards.push(shard);
        }
        let result =
            self.archive_stripes(jobs, (total_bytes, parallel), options, left, events).await;
        for shard in &shards {
            if let Err(error) = shard.release_ownership(self).await {
                tracing::info!(shard = %shard.root.name, %error, "a shard was not released: it becomes free when its owner's lease ends");
            }
            let counts = shard.count_stripes().await;
            stripes += counts.archived();
            left.undropped += counts.undropped;
        }
        result?;
        let undropped = left.undropped;
        let _ = events.send(ArchiveEvent::Done { stripes, undropped }).await;
        Ok(())
    }

    /// Takes a shard if there is something to do about it. A shard whose stripes are all archived is
    /// not waited for: a request may wait for drops on a dead node for as long as the node is away,
    /// and must not end the repairs meanwhile.
    async fn take_shard_or_leave_it(
        &self,
        root: ShardRoot,
        code: CodeId,
        lease: LeaseId,
        events: &ArchiveEventSender,
    ) -> Result<ShardToArchive, CoordinatorError> {
        let counts = self.fetch_stripe_counts(&root).await?;
        let Some(counts) = counts.filter(|counts| counts.unarchived == 0) else {
            let taken = self.take_shard_to_archive(root, code, lease, events).await?;
            return Ok(ShardToArchive::Taken(Arc::new(taken)));
        };
        if counts.undropped == 0 {
            return Ok(ShardToArchive::LeftAlone(counts));
        }
        match OwnedShard::take_ownership(self, root, lease).await {
            Ok(taken) => Ok(ShardToArchive::Taken(Arc::new(taken))),
            Err(CoordinatorError::Owned { what, owner }) => {
                let note = format!("{owner} works on {what}: its replicas are dropped later");
                let _ = events.send(ArchiveEvent::Note(note)).await;
                Ok(ShardToArchive::LeftAlone(counts))
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a shard and marks it as archiving. A repairer that owns the shard gives it back when it
    /// sees the archive request, so this function waits for up to [`REPAIRER_WAIT`].
    async fn take_shard_to_archive(
        &self,
        root: ShardRoot,
        code: CodeId,
        lease: LeaseId,
        events: &ArchiveEventSender,
    ) -> Result<OwnedShard, CoordinatorError> {
        let (end, mut is_told) = (self.clock.now() + REPAIRER_WAIT, false);
        loop {
            let taken =
                OwnedShard::take_ownership_and_mark_archiving(self, root.clone(), code, lease);
            match taken.await {
                Err(CoordinatorError::Owned { what, owner }) if self.clock.now() < end => {
                    if !std::mem::replace(&mut is_told, true) {
                        let note = format!("{owner} works on {what}: waiting until it is free");
                        let _ = events.send(ArchiveEvent::Note(note)).await;
                    }
                    self.clock.sleep(OWNER_POLL).await;
                }
                taken => return taken,
            }
        }
    }

    async fn archive_stripes(
        &self,
        jobs: Vec<(Arc<OwnedShard>, u32)>,
        (total_bytes, parallel): (u64, usize),
        options: ArchiveOptions,
        left: &mut RemainingWork,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let mut done_bytes = 0;
        let _ = events.send(ArchiveEvent::Progress { done_bytes, total_bytes }).await;
        let mut running = stream::iter(jobs)
            .map(|(shard, index)| async move {
                self.archive_stripe(&shard, index, options, events).await?;
                Ok::<u64, CoordinatorError>(shard.stripe_bytes(index))
            })
            .buffer_unordered(parallel);
        let mut first_error = None;
        let mut told = String::new();
        while let Some(result) = running.next().await {
            match result {
                Ok(bytes) => {
                    done_bytes += bytes;
                    let _ = events.send(ArchiveEvent::Progress { done_bytes, total_bytes }).await;
                }
                // Stripes are independent. Finish the others and report the first failure.
                Err(error) => {
                    // All stripes of a shard that has a new owner fail in the same way. Report that
                    // once.
                    let text = error.to_string();
                    if text != told {
                        let _ = events.send(ArchiveEvent::Note(text.clone())).await;
                        told = text;
                    }
                    left.can_retry |= error.is_retryable();
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Returns the generation that follows `seen`. Its epoch, which the orders of this coordinator
    /// carry, is never below the catalogue's epoch.
    pub(super) fn generation_after(&self, seen: Generation) -> Generation {
        seen.next(self.catalogue.epoch())
    }
}
