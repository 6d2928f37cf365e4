//! The launch of a step in the order of its job's launches, which the catalogue keeps
//! (docs/semantics.md, 3).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::StagingDaemon;
use super::core::{StepKey, overtaken_by};
use super::trace::{StagingPoint, trace_point};
use super::upload::Attempt;
use crate::clock::deadline;
use crate::format::launch_order::LaunchRank;
use crate::id::{Job, LaunchId, MemberId, SaveId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, Place, Resumed};
use crate::wire::calls::LaunchClaim;

/// The committed and staged steps, seen from the one that a launch was resumed from.
struct LaterSteps {
    /// The later committed steps, ascending, with their saves.
    committed: Vec<(Step, SaveId)>,
    /// The later steps that other launches have staged on this host.
    in_memory: Vec<Step>,
    /// The committed steps that are not later.
    before: BTreeSet<Step>,
    /// The newest committed step.
    newest: Option<Step>,
}

impl StagingDaemon {
    /// Compares the resume point of a launch with the committed steps, and registers the launch as the
    /// newest one of its job. Removes later steps if the launch asked for it; fails otherwise if there
    /// are any. Returns a description of what it
    /// still waits for at `until`, or `None` when done.
    pub(super) async fn check_resumed(
        self: &Arc<Self>,
        member: MemberId,
        until: Duration,
    ) -> Result<Option<String>, Failure> {
        let Some((place, resumed)) = self.with(|core| core.unchecked(member)) else {
            return Ok(None);
        };
        let queue = self.queue_of(&place.job);
        let limit = until.saturating_sub(self.clock.now());
        let Ok(_turn) = deadline(&*self.clock, limit, queue.lock()).await else {
            return Ok(Some(format!("a step of {} is being saved", place.job)));
        };
        if self.with(|core| core.unchecked(member)).is_none() {
            return Ok(None);
        }
        self.check_keep(&place).await?;
        // Compared before the launch is registered, so that a launch which cannot go on ends no other
        // one. Compared again afterwards, because only then older launches commit no later step any
        // more.
        self.find_later_steps(&place, resumed).await?;
        self.register_launch(&place, resumed).await?;
        let LaterSteps { committed, in_memory, before, newest } =
            self.find_later_steps(&place, resumed).await?;
        if !(committed.is_empty() && in_memory.is_empty()) {
            self.abandon(&place, resumed.loaded, committed).await?;
        }
        self.with(|core| core.checked(&place, before, newest));
        Ok(None)
    }

    /// Finds the steps later than the one that a launch was resumed from: those that are committed,
    /// also since the launch loaded, and those that other launches have staged here.
    ///
    /// # Errors
    /// Fails with kind `Exists` if there are any and the launch does not abandon them.
    async fn find_later_steps(
        self: &Arc<Self>,
        place: &Place,
        resumed: Resumed,
    ) -> Result<LaterSteps, Failure> {
        let saves = self.committed_saves(&place.job).await?;
        let newest = saves.last().map(|(step, _)| *step);
        let is_later = |step: Step| resumed.loaded.is_none_or(|loaded| step > loaded);
        let (committed, before): (Vec<_>, Vec<_>) =
            saves.into_iter().partition(|(step, _)| is_later(*step));
        let in_memory =
            self.with(|core| core.later_in_memory(&place.job, resumed.loaded, place.launch));
        let before = before.into_iter().map(|(step, _)| step).collect();
        let found = LaterSteps { committed, in_memory, before, newest };
        let mut later: Vec<Step> = found.committed.iter().map(|(step, _)| *step).collect();
        later.extend(&found.in_memory);
        later.sort_unstable();
        later.dedup();
        if let (Some(first), Some(last)) = (later.first(), later.last())
            && !resumed.abandon_later
        {
            let loaded = resumed.loaded.map_or("nothing".to_owned(), |step| format!("step {step}"));
            let message = format!(
                "{} was resumed from {loaded}, but later steps are there: {} from {first} to {last}",
                place.job,
                later.len()
            );
            let hint = "load the newest step, or pass abandon_later=True to remove the later ones";
            return Err(Failure::new(ErrorKind::Exists, message, hint));
        }
        Ok(found)
    }

    /// Abandons the steps later than the one that a launch was resumed from: first in memory, then
    /// in the cluster, newest first. The saves stay on record until they are removed, so that
    /// nothing resumes from them after a crash.
    async fn abandon(
        self: &Arc<Self>,
        place: &Place,
        loaded: Option<Step>,
        saves: Vec<(Step, SaveId)>,
    ) -> Result<(), Failure> {
        let job = &place.job;
        self.with(|core| core.abandon(job, loaded, place.launch, &saves));
        for (step, _) in &saves {
            trace_point(StagingPoint::Abandoning, job, *step);
        }
        self.settle_abandoned(job).await.map_err(|(step, error)| {
            let message = format!("abandoning step {step} of {job}: {error}");
            Failure::new(error.kind(), message, error.hint().unwrap_or_default())
        })
    }

    /// Notes the newest launch of the job in the cluster for a launch that begins. The launch can
    /// register only as long as this one stays the newest. Drops the staged steps that older launches
    /// may no longer save.
    pub(super) async fn heed_launch_order(
        self: &Arc<Self>,
        job: &Job,
        launch: Option<LaunchId>,
    ) -> Result<(), Failure> {
        let order = self.client.fetch_launch_order(job).await.map_err(|error| {
            let message = format!("the cluster does not say which launches {job} has: {error}");
            Failure::new(error.kind(), message, error.hint().unwrap_or_default())
        })?;
        self.with(|core| {
            if let Some(launch) = launch {
                let newest = order.newest().map(|newest| newest.launch);
                core.note_predecessor(job, launch, newest);
            }
            core.drop_overtaken_steps(job, &order);
        });
        Ok(())
    }

    /// Notes the newest launch of the job for a launch that has prepared and perhaps loads nothing.
    /// If the cluster does not answer now, its first fill asks again.
    pub(super) fn heed_launch_order_soon(self: &Arc<Self>, place: &Place) {
        let (daemon, place) = (self.clone(), place.clone());
        if !self.with(|core| core.predecessor(&place.job, place.launch).is_some()) {
            drop(tokio::spawn(async move {
                let heeded = daemon.heed_launch_order(&place.job, Some(place.launch)).await;
                if let Err(failure) = heeded {
                    tracing::info!(job = %place.job, "{failure}");
                }
            }));
        }
    }

    /// Registers the launch of a rank as the newest one of its job. If another one is newer, the
    /// launch may fill no further step here.
    async fn register_launch(
        self: &Arc<Self>,
        place: &Place,
        resumed: Resumed,
    ) -> Result<(), Failure> {
        let (job, launch) = (&place.job, place.launch);
        let predecessor = || self.with(|core| core.predecessor(job, launch));
        if predecessor().is_none() {
            self.heed_launch_order(job, Some(launch)).await?;
        }
        let claim = LaunchClaim::After { newest: predecessor().flatten() };
        let registered = self.client.register_launch(job, launch, resumed.loaded, claim).await;
        registered.map_err(|error| {
            let failure =
                Failure::new(error.kind(), error.to_string(), error.hint().unwrap_or_default());
            if error.kind() == ErrorKind::Fenced {
                self.with(|core| core.fence_launch(job, launch, failure.clone()));
            }
            failure
        })
    }

    /// Finds out why a save was refused as fenced. Drops the step if its launch may no longer save
    /// it. Registers the launch again if the catalogue was rebuilt.
    pub(super) async fn find_out_why_fenced(
        self: &Arc<Self>,
        key: &StepKey,
        reason: String,
    ) -> Attempt {
        let (job, launch) = (&key.job, key.launch);
        let order = match self.client.fetch_launch_order(job).await {
            Ok(order) => order,
            Err(error) => return Attempt::Later(error.to_string()),
        };
        let is_unknown = order.rank_of(launch) == LaunchRank::Unknown;
        if is_unknown && self.with(|core| core.is_newest_here(job, launch)) {
            let resumed =
                self.with(|core| core.launch(key).and_then(|launch| launch.resumed.loaded));
            let registered =
                self.client.register_launch(job, launch, resumed, LaunchClaim::Again).await;
            match registered {
                Err(error) if error.kind() == ErrorKind::Fenced => {}
                _ => return Attempt::Later(reason),
            }
        } else if order.may_save(key.launch, key.step) || order.launches.is_empty() {
            return Attempt::Later(reason);
        }
        let failure = overtaken_by(key, &order);
        tracing::error!(%job, step = %key.step, "{failure}");
        self.with(|core| {
            core.fence_launch(job, launch, failure.clone());
            core.drop_overtaken_step(key, failure);
        });
        Attempt::Gone
    }

    /// Returns whether the launch of a step is known to be over for this step.
    pub(super) async fn is_overtaken(&self, key: &StepKey) -> bool {
        let order = self.client.fetch_launch_order(&key.job).await;
        order.is_ok_and(|order| {
            order.rank_of(key.launch) == LaunchRank::Older && !order.may_save(key.launch, key.step)
        })
    }
}
