//! The launch of a step in the order of its job's launches, which the catalogue keeps
//! (docs/semantics.md, 3).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::StagingDaemon;
use super::core::{StepKey, StepOfLaunch, launch_over_failure};
use super::trace::{StagingPoint, trace_point};
use super::upload::Attempt;
use crate::clock::deadline;
use crate::format::launch_order::{LaunchOrder, LaunchRank};
use crate::id::{Job, LaunchId, MemberId, SaveId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, Load, Place, Resumed};
use crate::wire::calls::LaunchClaim;

/// How long a load waits for the order of launches.
const ORDER_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of times that an outdated list of committed steps is read again.
const LIST_TRIES: u32 = 3;
/// Interval at which a host checks whether the first host has registered the launch.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The committed and staged steps, divided at the step from which a launch resumed.
struct LaterSteps {
    /// The later committed steps, ascending, with their saves.
    committed: Vec<(Step, SaveId)>,
    /// The committed steps that are not later.
    before: BTreeSet<Step>,
    /// The newest committed step.
    newest: Option<Step>,
}

impl StagingDaemon {
    /// Registers the launch as the newest one of its job. Before the registration, and again after
    /// it, looks for steps later than the resume point, committed or in memory on this host. They
    /// are removed if the launch abandons them, and are an error otherwise. Returns `None` when done,
    /// or at `until` a description of what it still waits for.
    pub(super) async fn check_resumed(
        self: &Arc<Self>,
        member: MemberId,
        until: Duration,
    ) -> Result<Option<String>, Failure> {
        let Some((place, resumed)) = self.with(|core| core.unchecked_resume_point(member)) else {
            return Ok(None);
        };
        let queue = self.queue_of(&place.job);
        let limit = until.saturating_sub(self.clock.now());
        let Ok(_turn) = deadline(&*self.clock, limit, queue.lock()).await else {
            return Ok(Some(format!("a step of {} is being saved", place.job)));
        };
        if self.with(|core| core.unchecked_resume_point(member)).is_none() {
            return Ok(None);
        }
        self.check_keep(&place).await?;
        // Compare before the launch is registered, so that a launch that cannot continue replaces
        // no other one. Compare again afterwards, because older launches can commit later steps
        // until the launch is registered.
        self.find_later_steps(&place, resumed).await?;
        if let Some(what) = self.register_launch(&place, resumed, until).await? {
            return Ok(Some(what));
        }
        let LaterSteps { committed, before, newest } =
            self.find_later_steps(&place, resumed).await?;
        if resumed.abandon_later {
            // Even if there is nothing later: a call before this one may have recorded saves that it
            // could not remove.
            self.abandon(&place, resumed.loaded, committed).await?;
        }
        self.with(|core| core.checked(&place, before, newest));
        Ok(None)
    }

    /// Finds the steps later than the one that a launch was resumed from: those that are committed,
    /// also since the launch loaded, and those that are staged here, also by the launch itself.
    ///
    /// # Errors
    /// Fails with kind `Exists` if there are any and the launch does not abandon them.
    async fn find_later_steps(
        self: &Arc<Self>,
        place: &Place,
        resumed: Resumed,
    ) -> Result<LaterSteps, Failure> {
        // A removed or replaced step stays in memory until it is compared with the committed ones. A
        // load does that, but no rank of this host has to load.
        let mut tries = 0..LIST_TRIES;
        let saves = loop {
            let changes = self.with(|core| core.changes(&place.job));
            let saves = self.committed_saves(&place.job).await?;
            let save_of = |step: Step| {
                let at = saves.binary_search_by_key(&step, |save| save.0).ok()?;
                saves.get(at).map(|save| save.1)
            };
            // With an outdated list nothing is released, and a removed or replaced step in memory
            // would be taken for a later step.
            if self.with(|core| core.drop_replaced(&place.job, changes, &save_of))
                || tries.next().is_none()
            {
                break saves;
            }
        };
        let newest = saves.last().map(|(step, _)| *step);
        let is_later = |step: Step| resumed.loaded.is_none_or(|loaded| step > loaded);
        let (committed, before): (Vec<_>, Vec<_>) =
            saves.into_iter().partition(|(step, _)| is_later(*step));
        let in_memory =
            self.with(|core| core.later_in_memory(&place.job, resumed.loaded, place.launch));
        let before = before.into_iter().map(|(step, _)| step).collect();
        let found = LaterSteps { committed, before, newest };
        let mut later: Vec<Step> = found.committed.iter().map(|(step, _)| *step).collect();
        later.extend(in_memory);
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

    /// Reads the order of the job's launches. Drops the staged steps that their launches may no longer
    /// save. Notes the newest launch as the predecessor of `begins`, which can register only as long
    /// as its predecessor stays the newest.
    pub(super) async fn read_launch_order(
        self: &Arc<Self>,
        job: &Job,
        begins: LaunchId,
    ) -> Result<LaunchOrder, Failure> {
        let order = self.client.fetch_launch_order(job).await.map_err(|error| {
            let message = format!("the cluster does not say which launches {job} has: {error}");
            Failure::new(error.kind(), message, error.hint().unwrap_or_default())
        })?;
        self.with(|core| {
            core.note_predecessor(job, begins, order.newest().map(|newest| newest.launch));
            core.drop_unsavable_steps(job, &order);
        });
        Ok(order)
    }

    /// Reads the order of launches for a launch's load that names no step and is not offline. The
    /// load continues without the order if the catalogue does not answer in time.
    pub(super) async fn read_launch_order_before(self: &Arc<Self>, load: &Load) {
        let Some((launch, _)) = load.launch.filter(|_| load.step.is_none() && !load.offline) else {
            return;
        };
        let read = deadline(&*self.clock, ORDER_LIMIT, self.read_launch_order(&load.job, launch));
        match read.await {
            Ok(Ok(_)) => {}
            Ok(Err(failure)) => {
                tracing::info!(job = %load.job, %failure, "the order of launches was not read: the load goes on without it")
            }
            Err(_) => {
                tracing::info!(job = %load.job, "the order of launches was not read in time: the load goes on without it")
            }
        }
    }

    /// Reads the order of launches in the background, for a launch that has prepared and perhaps
    /// loads nothing. If the cluster does not answer now, its first fill asks again.
    pub(super) fn spawn_launch_order_read(self: &Arc<Self>, place: &Place) {
        let (daemon, place) = (self.clone(), place.clone());
        if !self.with(|core| core.predecessor(&place.job, place.launch).is_some()) {
            drop(tokio::spawn(async move {
                if let Err(failure) = daemon.read_launch_order(&place.job, place.launch).await {
                    tracing::info!(job = %place.job, %failure, "the order of launches was not read: the first fill reads it again");
                }
            }));
        }
    }

    /// Registers the launch of a rank as the newest one of its job. Of a launch of several hosts, host
    /// 0 claims to be the newest, and the others wait for that. If another launch is newer, the launch
    /// may fill no further step here. Returns a description of what it waits for at `until`.
    async fn register_launch(
        self: &Arc<Self>,
        place: &Place,
        resumed: Resumed,
        until: Duration,
    ) -> Result<Option<String>, Failure> {
        let (job, launch) = (&place.job, place.launch);
        let is_first_host = self.with(|core| core.is_on_first_host(place));
        loop {
            let order = self.read_launch_order(job, launch).await?;
            if is_first_host || order.rank_of(launch) != LaunchRank::Unknown {
                let claim = LaunchClaim::After { newest: self.choose_predecessor(place, &order) };
                let registered =
                    self.client.register_launch(job, launch, resumed.loaded, claim).await;
                return registered.map(|()| None).map_err(|error| {
                    let hint = error.hint().unwrap_or_default();
                    let failure = Failure::new(error.kind(), error.to_string(), hint);
                    if error.kind() == ErrorKind::Fenced {
                        self.with(|core| core.fence_launch(job, launch, failure.clone()));
                    }
                    failure
                });
            }
            if self.clock.now() >= until {
                return Ok(Some("the first host has not begun to save yet".to_owned()));
            }
            self.clock.sleep(LOOK_AGAIN).await;
        }
    }

    /// Returns the launch that the launch of `place` claims to follow: the one that was the newest
    /// when it began. If the launch that is the newest now has run on this host, returns that one:
    /// it is older than the launch of `place` even if it has registered later, as launches do after
    /// the catalogue was rebuilt.
    fn choose_predecessor(
        self: &Arc<Self>,
        place: &Place,
        order: &LaunchOrder,
    ) -> Option<LaunchId> {
        let newest = order.newest().map(|newest| newest.launch);
        self.with(|core| match newest {
            Some(newest) if core.has_run_here(&place.job, newest) => Some(newest),
            _ => core.predecessor(&place.job, place.launch).flatten(),
        })
    }

    /// Finds out why a save was refused as fenced. Drops the step if its launch may no longer save
    /// it. Registers the launch again if the catalogue was rebuilt.
    pub(super) async fn judge_fenced(self: &Arc<Self>, key: &StepKey, reason: String) -> Attempt {
        let (job, launch) = (&key.job, key.launch);
        let order = match self.client.fetch_launch_order(job).await {
            Ok(order) => order,
            Err(error) => return Attempt::Later(error.to_string()),
        };
        if order.may_save(launch, key.step) {
            return Attempt::Later(reason);
        }
        let mut failure = launch_over_failure(key, &order);
        // A launch without living ranks registers again only if the job has no other launch.
        let registers_again = order.rank_of(launch) == LaunchRank::Unknown
            && (order.launches.is_empty() || self.with(|core| core.has_members(job, launch)));
        if registers_again {
            let resumed = self.with(|core| core.launch(key).and_then(|found| found.resumed.loaded));
            let claim = LaunchClaim::Again;
            match self.client.register_launch(job, launch, resumed, claim).await {
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    let hint = error.hint().unwrap_or_default();
                    failure = Failure::new(error.kind(), error.to_string(), hint);
                }
                _ => return Attempt::Later(reason),
            }
        }
        tracing::error!(%job, step = %key.step, "{failure}");
        self.with(|core| {
            core.fence_launch(job, launch, failure.clone());
            core.drop_unsavable_step(key, failure);
        });
        Attempt::Gone
    }

    /// Returns whether the launch of a step is known to be over for this step.
    pub(super) async fn may_no_longer_save(&self, of: &StepOfLaunch) -> bool {
        let order = self.client.fetch_launch_order(&of.job).await;
        order.is_ok_and(|order| {
            order.rank_of(of.launch) == LaunchRank::Older && !order.may_save(of.launch, of.step)
        })
    }
}
