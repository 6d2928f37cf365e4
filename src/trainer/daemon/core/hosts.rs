//! Launches that run on several hosts: which steps they may fill, and what this host knows of the
//! others (docs/staging.md, 10).

use std::time::Duration;

use super::{Core, Effect, Launch, StepKey, fail};
use crate::format::joint_save::MAX_WRITERS;
use crate::id::{Job, LaunchId, Step};
use crate::kind::ErrorKind;
use crate::trainer::daemon::records::LaunchHosts;
use crate::trainer::protocol::{Failure, Hosts, Place};

/// How long a load waits for the steps of older launches while no host makes progress. It is three
/// times the interval at which hosts report their progress.
const PROGRESS_PATIENCE: Duration = Duration::from_secs(15);
/// Maximum length of a host's name in bytes.
const MAX_HOST_NAME_BYTES: usize = 64;
/// Maximum number of launches of a job whose waits for older launches are timed.
const MAX_WAITING_LAUNCHES: usize = 16;

/// The steps of older launches that a load waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OlderSteps {
    /// The steps of which other hosts have a part. Every other step can be loaded from memory.
    OfSeveralHosts,
    /// All steps.
    All,
}

impl Launch {
    /// Returns whether the launch runs on several hosts, so that this one has only a part of each
    /// step.
    pub(super) fn is_on_several_hosts(&self) -> bool {
        self.hosts.is_some()
    }

    /// Fails unless the launch may fill the step. A launch of several hosts fills each step once
    /// and in ascending order: a step that was dropped here may be part of a save that other hosts
    /// still write. `is_begun` says that a rank of this host has already begun to fill the step.
    pub(super) fn check_may_fill(
        &self,
        place: &Place,
        step: Step,
        or_skip: bool,
        is_begun: bool,
    ) -> Result<(), Failure> {
        if !self.is_on_several_hosts() {
            return Ok(());
        }
        if or_skip {
            return fail(
                ErrorKind::Invalid,
                "a launch of several hosts skips no step, because each host would decide for itself",
                "pass when_full=\"wait\"",
            );
        }
        if !is_begun && self.filled == Some(step) {
            return fail(
                ErrorKind::Unavailable,
                format!("step {step} was dropped on this host"),
                "save the next step: a launch of several hosts fills no step twice",
            );
        }
        if !is_begun && self.filled.is_some_and(|filled| step < filled) {
            return fail(
                ErrorKind::Exists,
                format!("step {step} of {} was begun by this launch before", place.job),
                "save later steps, or make a new Checkpointer on all ranks to go back",
            );
        }
        Ok(())
    }
}

impl Core {
    /// Returns the hosts of a step's launch if it runs on several.
    pub fn hosts_of(&self, key: &StepKey) -> Option<&Hosts> {
        self.launch(key)?.hosts.as_ref()
    }

    /// Tells the other hosts of a step's launch, if there are any, that this host has dropped the
    /// step, and why.
    pub fn tell_dropped(&mut self, key: &StepKey, why: &str) {
        if let Some(hosts) = self.hosts_of(key).cloned() {
            let drop = Effect::DropOnOtherHosts(key.step_of_launch(), hosts, why.to_owned());
            self.effects.push(drop);
        }
    }

    /// Returns whether this host is the first one of a rank's launch, or the only one.
    pub fn is_on_first_host(&self, place: &Place) -> bool {
        let launches = self.jobs.get(&place.job).map(|state| &state.launches);
        let launch = launches.and_then(|launches| launches.get(&place.launch));
        let hosts = launch.and_then(|launch| launch.hosts.as_ref());
        hosts.is_none_or(|hosts| hosts.own == 0)
    }

    /// Restores the hosts of a launch. Returns false if the launch is not known.
    pub fn restore_hosts(&mut self, record: LaunchHosts) -> bool {
        let mut launches = self.jobs.values_mut().flat_map(|job| &mut job.launches);
        let Some((_, launch)) = launches.find(|(id, _)| **id == record.launch) else {
            return false;
        };
        (launch.hosts, launch.filled) = (Some(record.hosts), record.filled);
        true
    }

    /// Returns the record of a launch's hosts.
    pub fn hosts_record(&self, job: &Job, launch: LaunchId) -> Option<LaunchHosts> {
        let found = self.jobs.get(job)?.launches.get(&launch)?;
        Some(LaunchHosts { launch, hosts: found.hosts.clone()?, filled: found.filled })
    }

    /// Returns whether the launch is known on this host.
    pub fn knows_launch(&self, job: &Job, launch: LaunchId) -> bool {
        self.jobs.get(job).is_some_and(|state| state.launches.contains_key(&launch))
    }

    /// Records that a rank of the launch is about to be ordered to fill a step.
    pub(super) fn begin_filling(&mut self, place: &Place, step: Step) {
        let Some(launch) = self.launch_mut(place) else { return };
        if launch.is_on_several_hosts() && launch.filled.is_none_or(|filled| filled < step) {
            launch.filled = Some(step);
            self.effects.push(Effect::KeepHosts(place.job.clone(), place.launch));
        }
    }

    /// Notes that the save of a step made progress at `now`.
    pub fn note_progress(&mut self, key: &StepKey, now: Duration) {
        if let Some(step) = self.step_mut(key) {
            step.progressed_at = step.progressed_at.max(now);
        }
    }

    /// Notes the hosts that the save of a step waits for; an empty text if it waits for none.
    pub fn note_missing(&mut self, key: &StepKey, names: String) {
        let Some(step) = self.step_mut(key) else { return };
        if step.missing != names {
            step.missing = names;
            self.bell.ring();
        }
    }

    /// Notes the hosts from which the save of the step gets no report; an empty text if there are none.
    /// Warns the ranks of the step when these hosts change.
    pub fn note_silent(&mut self, key: &StepKey, names: String) {
        let Some(step) = self.step_mut(key) else { return };
        if step.silent == names {
            return;
        }
        let warning =
            format!("the save of the step gets no report from {names}, which may be lost");
        let is_warning = !names.is_empty();
        step.silent = names;
        if is_warning {
            self.warn(key, warning);
        }
        self.bell.ring();
    }

    /// Returns a description of why the step is not saved yet, or `None` if nothing is known.
    pub fn describe_obstacle(&self, key: &StepKey) -> Option<String> {
        let step = self.step(key)?;
        match step.missing.as_str() {
            "" => step.trouble.as_ref().map(|trouble| format!("an attempt failed: {trouble}")),
            missing => Some(format!("it waited for {missing}")),
        }
    }

    /// Counts one more save of the step that ended because other hosts made no progress. Returns
    /// the number of such saves of the step.
    pub fn count_stall(&mut self, key: &StepKey) -> u32 {
        let Some(step) = self.step_mut(key) else { return 0 };
        step.stalls += 1;
        step.stalls
    }

    /// Returns whether the launch of the step has an earlier step here that is not committed. The
    /// hosts of a launch save their steps in order. Otherwise two hosts could wait for each other,
    /// each in the save of another step.
    pub fn has_earlier_uncommitted(&self, key: &StepKey) -> bool {
        let Some(state) = self.jobs.get(&key.job) else { return false };
        let earlier = state.keys(&key.job, |step, launch, found| {
            launch == key.launch && step < key.step && found.is_uncommitted()
        });
        !earlier.is_empty()
    }

    /// Returns a description of the first uncommitted step of another launch for which a load of
    /// `launch` should wait. `counts` says which launches are considered. Returns `None` if none of
    /// their uncommitted steps makes progress.
    pub fn describe_awaited_step(
        &mut self,
        job: &Job,
        launch: LaunchId,
        counts: OlderSteps,
        now: Duration,
    ) -> Option<String> {
        let state = self.jobs.get_mut(job)?;
        let awaited = state.keys(job, |_, of, step| {
            let counts = counts == OlderSteps::All || !state.has_whole_steps(of);
            of != launch && counts && step.is_uncommitted()
        });
        let first = awaited.first()?;
        // This daemon may have been started again just now, by the launch that loads, so a step has
        // the full [`PROGRESS_PATIENCE`] from the launch's first request on.
        let known = state.awaited_since.iter().find(|(of, _)| *of == launch);
        let since = known.map_or(now, |(_, since)| *since);
        if known.is_none() {
            state.awaited_since.truncate(MAX_WAITING_LAUNCHES - 1);
            state.awaited_since.push_front((launch, now));
        }
        let makes_progress = awaited
            .iter()
            .filter_map(|key| self.step(key))
            .any(|step| now.saturating_sub(step.progressed_at.max(since)) <= PROGRESS_PATIENCE);
        makes_progress.then(|| self.progress_of(first))
    }

    /// Drops the uncommitted steps of older launches of several hosts: a newer launch has begun, and
    /// it does not load them.
    pub(super) fn drop_uncommitted_joint_steps(&mut self, job: &Job, newest: LaunchId) {
        let Some(state) = self.jobs.get(job) else { return };
        let left = state.keys(job, |_, launch, step| {
            launch != newest && !state.has_whole_steps(launch) && step.is_uncommitted()
        });
        for key in left {
            let why = Failure::new(
                ErrorKind::Fenced,
                format!("step {} was not committed when a newer launch of {job} began", key.step),
                "end this process; its successor has taken over",
            );
            self.drop_step(&key, why);
        }
    }
}

/// Checks the hosts that a rank names.
pub(super) fn check_hosts(hosts: &Hosts) -> Result<(), Failure> {
    let count = hosts.names.len();
    let fits = (2..=MAX_WRITERS).contains(&count)
        && (hosts.own as usize) < count
        && hosts.names.iter().all(|name| name.len() <= MAX_HOST_NAME_BYTES);
    match fits {
        true => Ok(()),
        false => fail(
            ErrorKind::Invalid,
            format!(
                "the list of hosts is invalid: {count} names, of which this host has number {}",
                hosts.own
            ),
            format!(
                "use 2 to {MAX_WRITERS} hosts, and names of at most {MAX_HOST_NAME_BYTES} bytes"
            ),
        ),
    }
}
