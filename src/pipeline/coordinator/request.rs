//! One archive request, from its claim in the catalogue to its end.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::error::ArchiveError;
use super::owned_shard::OwnedShard;
use crate::catalogue::records::{
    Archiving, MAX_WHY_CHARS, Written, archiving_key, checkpoint_key, parse, read, roots_prefix,
    write,
};
use crate::catalogue::{Catalogue, CatalogueError, MAX_PAGE};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::format::records::{Checkpoint, Record, ShardRoot, StripeState};
use crate::id::{ClusterId, Generation, Job, LeaseId, NodeId, SaveId, Step};
use crate::net::call::Caller;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions};

/// Stripes archived at once unless the caller says otherwise.
const DEFAULT_PARALLEL: usize = 4;
/// The most that a caller may ask for.
const MAX_PARALLEL: usize = 64;

/// Archives on behalf of one daemon.
#[derive(Clone)]
pub struct Coordinator {
    /// The cluster.
    pub cluster: ClusterId,
    /// The daemon's node.
    pub me: NodeId,
    /// The catalogue.
    pub catalogue: Arc<dyn Catalogue>,
    /// Calls to nodes.
    pub caller: Arc<Caller>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Names of attempts and runs.
    pub entropy: Arc<dyn Entropy>,
}

/// A coordinator's lease, kept until this is dropped or the lease is lost.
struct LeaseKeeper {
    lease: LeaseId,
    keeper: JoinHandle<()>,
}

impl LeaseKeeper {
    async fn begin(coordinator: &Coordinator) -> Result<Self, CatalogueError> {
        let (lease, period) = coordinator.catalogue.lease_grant().await?;
        let (catalogue, clock) = (coordinator.catalogue.clone(), coordinator.clock.clone());
        let keeper = tokio::spawn(async move {
            loop {
                clock.sleep(period / 3).await;
                if let Ok(false) = catalogue.lease_touch(lease, true).await {
                    return;
                }
            }
        });
        Ok(Self { lease, keeper })
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// An archiving that this coordinator has, or is about to have, under its lease.
struct ActiveRequest {
    key: String,
    job: Job,
    step: Step,
    save: SaveId,
    options: ArchiveOptions,
    /// How often in a row it failed before.
    failures: u32,
    tenure: LeaseKeeper,
}

impl ActiveRequest {
    async fn begin(
        coordinator: &Coordinator,
        (job, step, save): (&Job, Step, SaveId),
        options: ArchiveOptions,
    ) -> Result<Self, CatalogueError> {
        let (key, tenure) = (archiving_key(job, step), LeaseKeeper::begin(coordinator).await?);
        Ok(Self { key, job: job.clone(), step, save, options, failures: 0, tenure })
    }

    /// What the catalogue has while `node` is at it.
    fn record(&self, node: NodeId) -> Archiving {
        let &Self { save, options, failures, .. } = self;
        Archiving { node, lease: self.tenure.lease, save, options, failures, waiting: None }
    }
}

/// What an archiving leaves to be done later.
#[derive(Default)]
struct Remaining {
    /// Stripes whose replicas are not all confirmed to be dropped.
    undropped: u64,
    /// Something failed that may go on later.
    may_pass: bool,
}

/// What an archiving has to say while it runs. Lost when nobody listens; the work goes on.
pub type Events = mpsc::Sender<ArchiveEvent>;

/// The shard roots of a save, in order.
pub async fn shard_roots(
    catalogue: &dyn Catalogue,
    save: SaveId,
) -> Result<Vec<ShardRoot>, CatalogueError> {
    let prefix = roots_prefix(save);
    let mut roots = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page = catalogue.list(&prefix, after.as_deref(), MAX_PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(roots) };
        after = Some(last.clone());
        for (key, entry) in &page {
            roots.push(parse::<ShardRoot>(key, &entry.value)?);
        }
    }
}

impl Coordinator {
    /// The registered nodes, now.
    pub async fn directory(&self) -> Result<Directory, CatalogueError> {
        Ok(Directory::new(self.catalogue.nodes().await?))
    }

    /// Archives all stripes of a committed step that are not archived yet, and finishes drops that were left.
    ///
    /// The wish is recorded in the catalogue before anything is done, so that another daemon goes on with it when this one vanishes.
    pub async fn archive(
        &self,
        job: &Job,
        step: Step,
        options: ArchiveOptions,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let save = self.committed_save(job, step).await?;
        let claim = self.open_request((job, step, save), options).await?;
        self.run_request(&claim, events).await
    }

    /// Goes on with the archiving that was `found` under `revision`, unless somebody else has been at it since: what he left waits anew.
    pub async fn take_over(
        &self,
        job: &Job,
        step: Step,
        (found, revision): (Archiving, u64),
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let mut claim = ActiveRequest::begin(self, (job, step, found.save), found.options).await?;
        claim.failures = found.failures;
        trace_point(TracePoint::Wish, format_args!("{job}/{step}"));
        match write(&*self.catalogue, &claim.key, Some(revision), &claim.record(self.me)).await? {
            Written::Set(_) => self.run_request(&claim, events).await,
            Written::Other(_) => Ok(self.catalogue.lease_revoke(claim.tenure.lease).await?),
        }
    }

    /// Archives what is claimed, and ends the claim or leaves it to wait.
    async fn run_request(
        &self,
        claim: &ActiveRequest,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let mut left = Remaining::default();
        let result = self.archive_requested(claim, &mut left, events).await;
        let mut why: Vec<String> =
            result.as_ref().err().map(ToString::to_string).into_iter().collect();
        if left.undropped > 0 {
            why.push(format!("replicas of {} stripes wait to be dropped", left.undropped));
        }
        let goes_on = left.may_pass || left.undropped > 0;
        let waiting = goes_on.then(|| why.join("; ").chars().take(MAX_WHY_CHARS).collect());
        // Where this fails, the lease ends by itself, and the record stands as if its coordinator had died.
        let ended = self.finish_request(claim, waiting).await;
        result.and(ended)
    }

    /// Records the archiving, or takes over one whose coordinator is gone.
    async fn open_request(
        &self,
        of: (&Job, Step, SaveId),
        options: ArchiveOptions,
    ) -> Result<ActiveRequest, ArchiveError> {
        let mut claim = ActiveRequest::begin(self, of, options).await?;
        let mut current = read::<Archiving>(&*self.catalogue, &claim.key).await?;
        loop {
            if let Some((other, _)) = &current
                && self.catalogue.lease_touch(other.lease, false).await?
            {
                let owner = self.directory().await?.name(other.node);
                return Err(ArchiveError::Owned { what: format!("{}/{}", of.0, of.1), owner });
            }
            claim.failures = current.as_ref().map_or(0, |(other, _)| other.failures);
            let revision = current.map(|(_, revision)| revision);
            trace_point(TracePoint::Wish, format_args!("{}/{}", of.0, of.1));
            match write(&*self.catalogue, &claim.key, revision, &claim.record(self.me)).await? {
                Written::Set(_) => return Ok(claim),
                Written::Other(other) => current = other,
            }
        }
    }

    /// Ends the claim, or leaves it for whoever tries again, and gives the lease back.
    async fn finish_request(
        &self,
        claim: &ActiveRequest,
        waiting: Option<String>,
    ) -> Result<(), ArchiveError> {
        let ActiveRequest { key, job, step, tenure, .. } = claim;
        trace_point(TracePoint::Done, format_args!("{job}/{step}"));
        if let Some((found, revision)) = read::<Archiving>(&*self.catalogue, key).await?
            && found.lease == tenure.lease
        {
            // Somebody who took over meanwhile keeps it.
            let failures = claim.failures.saturating_add(1);
            let left = waiting.map(|why| Archiving { failures, waiting: Some(why), ..found });
            let left = left.map(|left| left.to_bytes()).transpose();
            let left = left.map_err(|error| ArchiveError::Format(error.to_string()))?;
            self.catalogue.compare_and_set(key, Some(revision), left).await?;
        }
        Ok(self.catalogue.lease_revoke(tenure.lease).await?)
    }

    async fn archive_requested(
        &self,
        claim: &ActiveRequest,
        left: &mut Remaining,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let result = match self.ensure_committed(claim).await {
            Ok(()) => self.archive_save(claim, left, events).await,
            Err(error) => Err(error),
        };
        left.may_pass |= result.as_ref().is_err_and(ArchiveError::is_retryable);
        let is_gone = |now| matches!(now, Err(ArchiveError::NotFound { .. }));
        if result.is_err() && is_gone(self.ensure_committed(claim).await) {
            // Another save in its place is not what was asked for.
            *left = Remaining::default();
        }
        result
    }

    /// Fails when something else is committed than what is claimed, or nothing.
    async fn ensure_committed(&self, claim: &ActiveRequest) -> Result<(), ArchiveError> {
        let ActiveRequest { job, step, save, .. } = claim;
        match self.committed_save(job, *step).await? == *save {
            true => Ok(()),
            false => Err(ArchiveError::NotFound { job: job.clone(), step: *step }),
        }
    }

    /// What is committed as a step.
    async fn committed_save(&self, job: &Job, step: Step) -> Result<SaveId, ArchiveError> {
        let found = read::<Checkpoint>(&*self.catalogue, &checkpoint_key(job, step)).await?;
        let saved = found.and_then(|(checkpoint, _)| checkpoint.committed);
        let saved = saved.ok_or_else(|| ArchiveError::NotFound { job: job.clone(), step })?;
        Ok(saved.save)
    }

    async fn archive_save(
        &self,
        claim: &ActiveRequest,
        left: &mut Remaining,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let &ActiveRequest { save, options, ref tenure, .. } = claim;
        let roots = shard_roots(&*self.catalogue, save).await?;
        let parallel = match options.parallel {
            0 => DEFAULT_PARALLEL,
            some => usize::from(some).min(MAX_PARALLEL),
        };
        let mut shards = Vec::with_capacity(roots.len());
        let mut jobs = Vec::new();
        let mut total_bytes = 0;
        for root in roots.into_iter().filter(|root| root.len_bytes > 0) {
            let shard = Arc::new(OwnedShard::take(self, root, options, tenure.lease).await?);
            for index in shard.unfinished().await {
                total_bytes += shard.stripe_bytes(index);
                jobs.push((shard.clone(), index));
            }
            shards.push(shard);
        }
        let result = self.run_jobs(jobs, (total_bytes, parallel), options, left, events).await;
        let mut stripes = 0;
        for shard in &shards {
            if let Err(error) = shard.release(self).await {
                tracing::info!(shard = %shard.root.name, %error, "its lease will end by itself");
            }
            for state in shard.states().await {
                if let StripeState::Archived { dropped, .. } = state {
                    stripes += 1;
                    left.undropped += u64::from(!dropped);
                }
            }
        }
        result?;
        let undropped = left.undropped;
        let _ = events.send(ArchiveEvent::Done { stripes, undropped }).await;
        Ok(())
    }

    async fn run_jobs(
        &self,
        jobs: Vec<(Arc<OwnedShard>, u32)>,
        (total_bytes, parallel): (u64, usize),
        options: ArchiveOptions,
        left: &mut Remaining,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let mut done_bytes = 0;
        let _ = events.send(ArchiveEvent::Progress { done_bytes, total_bytes }).await;
        let mut running = stream::iter(jobs)
            .map(|(shard, index)| async move {
                self.archive_stripe(&shard, index, options, events).await?;
                Ok::<u64, ArchiveError>(shard.stripe_bytes(index))
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
                // Other stripes are independent: they are finished, and the first failure is reported.
                Err(error) => {
                    // All stripes of a shard that is lost to us end in one way.
                    let text = error.to_string();
                    if text != told {
                        let _ = events.send(ArchiveEvent::Note(text.clone())).await;
                        told = text;
                    }
                    left.may_pass |= error.is_retryable();
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// The generation that orders of this coordinator carry never falls below the catalogue's epoch.
    pub(super) fn next_generation(&self, seen: Generation) -> Generation {
        seen.next(self.catalogue.epoch())
    }
}
