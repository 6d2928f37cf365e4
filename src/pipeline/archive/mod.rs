//! Archiving: a coordinator takes the shards of a committed step and turns each stripe's replicas into n proven pieces
//! (docs/semantics.md, section 4).
//!
//! Split by idea: `error` says why it stops; `shard` owns a shard and commits stripes; `stripe` archives one; `orders` turns a plan into orders and
//! proofs into verdicts; `replicas` makes missing replicas again.

mod error;
mod orders;
mod replicas;
mod shard;
mod stripe;

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::catalogue::records::{
    Archiving, MAX_WHY_CHARS, Waiting, Written, archiving_key, checkpoint_key, parse, read,
    roots_prefix, write,
};
use crate::catalogue::{Catalogue, CatalogueError, MAX_PAGE};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::format::records::{Checkpoint, Record, ShardRoot, StripeState};
use crate::id::{ClusterId, Generation, Job, LeaseId, NodeId, SaveId, Step};
use crate::net::call::Caller;
use crate::stage::{Stage, about_to};
use crate::topology::Directory;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions};
pub use error::ArchiveError;
use shard::OwnedShard;

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
struct Tenure {
    lease: LeaseId,
    keeper: JoinHandle<()>,
}

impl Tenure {
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

impl Drop for Tenure {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// An archiving that this coordinator has, or is about to have, under its lease.
struct Claim {
    key: String,
    job: Job,
    step: Step,
    options: ArchiveOptions,
    /// How often it failed before.
    failures: u32,
    tenure: Tenure,
}

impl Claim {
    async fn begin(
        coordinator: &Coordinator,
        job: &Job,
        step: Step,
        options: ArchiveOptions,
    ) -> Result<Self, CatalogueError> {
        let (key, tenure) = (archiving_key(job, step), Tenure::begin(coordinator).await?);
        Ok(Self { key, job: job.clone(), step, options, failures: 0, tenure })
    }

    /// What the catalogue has while `node` is at it.
    fn record(&self, node: NodeId) -> Archiving {
        Archiving { node, lease: self.tenure.lease, options: self.options, waiting: None }
    }
}

/// How an archiving ended.
struct Ended {
    result: Result<(), ArchiveError>,
    /// Stripes whose replicas are not all confirmed to be dropped.
    undropped: u64,
    /// The save is not committed any more.
    is_gone: bool,
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
        let claim = self.claim(job, step, options).await?;
        self.carry_out(&claim, events).await
    }

    /// Goes on with the archiving that was `found` under `revision`, unless somebody else has been at it since: what he left waits anew.
    pub async fn take_over(
        &self,
        job: &Job,
        step: Step,
        (found, revision): (Archiving, u64),
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let mut claim = Claim::begin(self, job, step, found.options).await?;
        claim.failures = found.failures();
        about_to(Stage::Wish, format_args!("{job}/{step}"));
        match write(&*self.catalogue, &claim.key, Some(revision), &claim.record(self.me)).await? {
            Written::Set(_) => self.carry_out(&claim, events).await,
            Written::Other(_) => Ok(self.catalogue.lease_revoke(claim.tenure.lease).await?),
        }
    }

    /// Archives what is claimed, and ends the claim or leaves it to wait.
    async fn carry_out(&self, claim: &Claim, events: &Events) -> Result<(), ArchiveError> {
        let Ended { result, undropped, is_gone } = self.archive_claimed(claim, events).await;
        let why = match &result {
            _ if is_gone => None,
            Err(error) if error.may_pass() => Some(error.to_string()),
            _ if undropped == 0 => None,
            _ => Some(format!("replicas of {undropped} stripes wait to be dropped")),
        };
        let waiting = why.map(|why| Waiting {
            failures: claim.failures.saturating_add(1),
            why: why.chars().take(MAX_WHY_CHARS).collect(),
        });
        // Where this fails, the lease ends by itself, and the record stands as if its coordinator had died.
        let ended = self.unclaim(claim, waiting).await;
        result.and(ended)
    }

    /// Records the archiving, or takes over one whose coordinator is gone.
    async fn claim(
        &self,
        job: &Job,
        step: Step,
        options: ArchiveOptions,
    ) -> Result<Claim, ArchiveError> {
        let mut claim = Claim::begin(self, job, step, options).await?;
        let mut current = read::<Archiving>(&*self.catalogue, &claim.key).await?;
        loop {
            if let Some((other, _)) = &current
                && self.catalogue.lease_touch(other.lease, false).await?
            {
                let owner = self.directory().await?.name(other.node);
                return Err(ArchiveError::Owned { what: format!("{job}/{step}"), owner });
            }
            claim.failures = current.as_ref().map_or(0, |(other, _)| other.failures());
            let revision = current.map(|(_, revision)| revision);
            about_to(Stage::Wish, format_args!("{job}/{step}"));
            match write(&*self.catalogue, &claim.key, revision, &claim.record(self.me)).await? {
                Written::Set(_) => return Ok(claim),
                Written::Other(other) => current = other,
            }
        }
    }

    /// Ends the claim, or leaves it for whoever tries again, and gives the lease back.
    async fn unclaim(&self, claim: &Claim, waiting: Option<Waiting>) -> Result<(), ArchiveError> {
        let Claim { key, job, step, tenure, .. } = claim;
        about_to(Stage::Done, format_args!("{job}/{step}"));
        if let Some((found, revision)) = read::<Archiving>(&*self.catalogue, key).await?
            && found.lease == tenure.lease
        {
            // Somebody who took over meanwhile keeps it.
            let left = waiting.map(|waiting| Archiving { waiting: Some(waiting), ..found });
            let left = left.map(|left| left.to_bytes()).transpose();
            let left = left.map_err(|error| ArchiveError::Format(error.to_string()))?;
            self.catalogue.set(key, Some(revision), left).await?;
        }
        Ok(self.catalogue.lease_revoke(tenure.lease).await?)
    }

    async fn archive_claimed(&self, claim: &Claim, events: &Events) -> Ended {
        let mut undropped = 0;
        let save = match self.committed(claim).await {
            Ok(Some(save)) => save,
            Ok(None) => {
                let (job, step) = (claim.job.clone(), claim.step);
                let result = Err(ArchiveError::NotFound { job, step });
                return Ended { result, undropped, is_gone: true };
            }
            Err(error) => return Ended { result: Err(error), undropped, is_gone: false },
        };
        let result = self.archive_save(save, claim, &mut undropped, events).await;
        // Another save in its place is not what was asked for.
        let is_gone = result.is_err()
            && self.committed(claim).await.is_ok_and(|committed| committed != Some(save));
        Ended { result, undropped, is_gone }
    }

    /// What is committed as the claimed step.
    async fn committed(&self, claim: &Claim) -> Result<Option<SaveId>, ArchiveError> {
        let key = checkpoint_key(&claim.job, claim.step);
        let found = read::<Checkpoint>(&*self.catalogue, &key).await?;
        Ok(found.and_then(|(checkpoint, _)| checkpoint.committed).map(|saved| saved.save))
    }

    /// Counts the stripes whose replicas are not all confirmed to be dropped.
    async fn archive_save(
        &self,
        save: SaveId,
        claim: &Claim,
        undropped: &mut u64,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let Claim { options, tenure, .. } = claim;
        let options = *options;
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
        let result = self.run_jobs(jobs, total_bytes, parallel, options, events).await;
        let mut stripes = 0;
        for shard in &shards {
            if let Err(error) = shard.release(self).await {
                tracing::info!(shard = %shard.root.name, %error, "its lease will end by itself");
            }
            for state in shard.states().await {
                if let StripeState::Archived { dropped, .. } = state {
                    stripes += 1;
                    *undropped += u64::from(!dropped);
                }
            }
        }
        result?;
        let _ = events.send(ArchiveEvent::Done { stripes, undropped: *undropped }).await;
        Ok(())
    }

    async fn run_jobs(
        &self,
        jobs: Vec<(Arc<OwnedShard>, u32)>,
        total_bytes: u64,
        parallel: usize,
        options: ArchiveOptions,
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
                // Other stripes are independent: they are finished, and the first failure is reported, before it one that may pass.
                Err(error) => {
                    // All stripes of a shard that is lost to us end in one way.
                    let text = error.to_string();
                    if text != told {
                        let _ = events.send(ArchiveEvent::Note(text.clone())).await;
                        told = text;
                    }
                    let is_first = first_error
                        .as_ref()
                        .is_none_or(|first: &ArchiveError| !first.may_pass() && error.may_pass());
                    if is_first {
                        first_error = Some(error);
                    }
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// The generation that orders of this coordinator carry never falls below the catalogue's epoch.
    fn next_generation(&self, seen: Generation) -> Generation {
        seen.next(self.catalogue.epoch())
    }
}
