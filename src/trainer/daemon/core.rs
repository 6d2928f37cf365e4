//! The state machine of segments, steps and launches: which member may fill, read or free which
//! segment. The states are those of docs/staging.md, sections 3 to 6.
//!
//! This module accesses no file, socket or clock. A method receives a request or an event, changes
//! the state, and appends to [`Core::effects`] the actions that the daemon must carry out. The
//! rules can therefore be tested alone, and a test can inspect every intermediate state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

mod deadlines;
mod hosts;
mod launches;
mod loads;
mod memory;
mod removed_steps;
mod restore;
mod steps;

pub use hosts::OlderSteps;
pub use launches::launch_over_failure;
pub use restore::RestoredStep;
pub(super) use steps::MAX_WHY_CHARS;

use super::hold::{Bell, Hold, Holds};
use crate::id::{FillId, Job, LaunchId, MemberId, SaveId, SegmentId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{
    Failure, Hosts, JobStatus, Notice, Place, Resumed, Sample, StepStatus,
};

/// Maximum number of ended launches that are remembered, per job.
pub const MAX_OLD_LAUNCHES: usize = 64;
/// Maximum number of notices kept for a rank that does not fetch them.
const MAX_NOTICES: usize = 64;
/// Number of segments that a rank gets if memory allows: one is filled while the other is saved.
const SEGMENTS_A_RANK: usize = 2;

/// The key of a step in memory: one filling of it by one launch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepKey {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The launch that fills the step, or filled it.
    pub launch: LaunchId,
    /// The filling.
    pub fill: FillId,
}

impl StepKey {
    /// Returns the step of the launch, without the filling.
    pub fn step_of_launch(&self) -> StepOfLaunch {
        StepOfLaunch { job: self.job.clone(), step: self.step, launch: self.launch }
    }
}

/// A step of one launch, regardless of the filling.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepOfLaunch {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The launch.
    pub launch: LaunchId,
}

/// An action that the daemon must carry out after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Mark the segment's header as being filled, with the filling's id: the owner is ordered to
    /// fill it, and the old content becomes invalid.
    MarkFilling(SegmentId, FillId),
    /// Mark the segment's header as free, because its step was dropped or released.
    MarkFree(SegmentId),
    /// Unlink the segment's files as soon as no process maps the segment.
    Unlink(SegmentId),
    /// Write the step's record. It says that no save of the step has begun.
    KeepStep(StepKey),
    /// Save the step, or resume its save.
    Save(StepKey),
    /// Remove the record and the table of a step that is no longer in memory.
    Forget(StepKey),
    /// Write the job's record.
    KeepJob(Job),
    /// Write the record of a launch's hosts.
    KeepHosts(Job, LaunchId),
    /// Remove the record of a launch's hosts.
    ForgetHosts(LaunchId),
    /// Abort these saves of the step if they are open. Committed ones stay.
    AbortIfOpen(StepKey, Vec<SaveId>),
    /// Tell the other hosts of the step's launch that this host has dropped the step.
    DropOnOtherHosts(StepOfLaunch, Hosts, String),
    /// Abort the saves that the job has abandoned, and remove those of them that are committed.
    Settle(Job),
}

/// A member: a process of a launch.
#[derive(Debug)]
struct Member {
    place: Place,
    notices: VecDeque<Notice>,
    /// Whether the process may be ordered to make another segment. It may not once it had no memory
    /// for one.
    may_grow: bool,
}

/// The way in which a member ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The member's process died.
    Died,
    /// The member left on its own request.
    Left,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ending::Died => "died",
            Ending::Left => "left",
        })
    }
}

/// The use of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Use {
    /// The owner may be ordered to fill the segment.
    Free,
    /// The owner fills the segment.
    Filling(StepKey),
    /// The segment holds a staged part of the step.
    Held(StepKey),
    /// The segment is no longer used. Its file is removed when no process maps it.
    Doomed,
}

#[derive(Debug)]
struct Segment {
    owner: MemberId,
    place: Place,
    len_bytes: u64,
    state: Use,
    /// Whether the owner fills the segment again when it is free. False once the owner has prepared
    /// new segments.
    is_current: bool,
    /// Counts the uploads and readers that use the segment.
    holds: Holds,
}

/// The phase of a step, in the order of docs/staging.md.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Some ranks have not staged the step.
    Filling,
    /// All ranks have staged the step.
    Staged,
    /// The hashes of the step are written.
    Hashed,
    /// Saves of the step have begun, or may have.
    Saving {
        /// The ids of these saves. The outcome of each is determined before another id is drawn.
        saves: Vec<SaveId>,
    },
    /// The step is committed.
    Committed {
        /// The id of the save.
        save: SaveId,
        /// Remarks for people.
        notes: Vec<String>,
    },
}

/// A step of a launch in memory.
#[derive(Debug)]
pub struct StagedStep {
    /// The filling.
    pub fill: FillId,
    /// The phase of the step.
    pub phase: Phase,
    /// When the first rank began to fill the step.
    pub began_at: Duration,
    /// Number of ranks of the launch.
    pub world: u32,
    /// The segments of the ranks that have staged the step, by rank.
    pub parts: BTreeMap<u32, SegmentId>,
    /// The hashes that each rank sent over samples of the replicated tensors, by rank.
    pub samples: BTreeMap<u32, Vec<Sample>>,
    /// Total length of the step's segments, in bytes.
    pub len_bytes: u64,
    /// When the step was committed, which decides the order in which steps are evicted.
    pub committed_at: Duration,
    /// The reason why the last attempt to save the step failed.
    pub trouble: Option<String>,
    /// The hosts that the save of the step waits for, for messages; empty if there are none.
    pub missing: String,
    /// The hosts from which the save of the step gets no report, for messages; empty if there are
    /// none.
    pub silent: String,
    /// When the step last made progress: the first rank began to fill it, or a part of it was
    /// hashed or sent. Zero for a step that was restored at the daemon's start.
    pub progressed_at: Duration,
    /// The number of saves that ended because other hosts made no progress.
    pub stalls: u32,
    /// Whether the cluster no longer has the save as which the step was committed, because it was
    /// removed or replaced. No new load gets the step; it is released when nobody uses it.
    pub is_replaced: bool,
}

impl StagedStep {
    /// Returns whether all ranks have staged the step and new loads may get it.
    pub(super) fn is_loadable(&self) -> bool {
        self.phase.is_complete() && !self.is_replaced
    }

    /// Returns whether all ranks have staged the step and it is not committed.
    pub(super) fn is_uncommitted(&self) -> bool {
        self.phase.is_complete() && !matches!(self.phase, Phase::Committed { .. })
    }
}

/// A step that all ranks of a launch skip.
#[derive(Debug, Clone)]
struct Skipped {
    why: String,
    /// The ranks that were told to skip the step.
    told: BTreeSet<u32>,
}

/// The state of a launch.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Number of ranks of the launch.
    pub world: u32,
    /// When the launch was made, in nanoseconds since the host's boot.
    pub born_ns: u64,
    /// The resume point of the launch.
    pub resumed: Resumed,
    /// How many committed steps are kept; 0 means all.
    pub keep: u32,
    /// Steps that were committed when the launch began to write and that it did not abandon. `None`
    /// until the resume point is compared with the cluster.
    pub committed_before: Option<BTreeSet<Step>>,
    /// The hosts of the launch if it runs on several. In that case `world` and the numbers of the
    /// ranks count the ranks of this host.
    pub hosts: Option<Hosts>,
    /// The reason why the launch may no longer write, although no newer launch is known on this
    /// host.
    fenced: Option<Failure>,
    /// The latest step that the launch has begun to fill on this host, kept for a launch of several
    /// hosts.
    filled: Option<Step>,
    members: BTreeMap<u32, MemberId>,
    segments_a_rank: usize,
    /// Sum over all ranks of the length of one segment, in bytes, for which memory was reserved.
    launch_bytes: u64,
    /// Reserved memory that the ranks have not taken yet, in bytes.
    reserved_bytes: u64,
    /// The ranks that have taken their share of the reserved memory.
    taken: BTreeSet<u32>,
    /// The last steps that the launch skipped.
    skipped: BTreeMap<Step, Skipped>,
    /// The number of each rank's last load.
    loads: BTreeMap<u32, u32>,
    /// The outcomes of the highest steps that were committed (the save, and remarks for people) or
    /// dropped, for ranks that ask for them.
    over: BTreeMap<Step, Result<(SaveId, Vec<String>), Failure>>,
    /// The steps of `over` that were committed and that the cluster no longer has. A launch on one
    /// host may save them again.
    removed: BTreeSet<Step>,
}

/// The state of a job on this host.
#[derive(Debug, Default)]
pub struct JobState {
    /// The launch that may write.
    pub newest: Option<LaunchId>,
    /// The most recent launches that may no longer write.
    pub old: VecDeque<LaunchId>,
    /// The most recently dropped fillings. A header that names one of them does not bring its step
    /// back.
    pub dropped: VecDeque<FillId>,
    /// Pairs of one of the last launches, and the launch that was the job's newest in the cluster
    /// when the first of the two began.
    predecessors: VecDeque<(LaunchId, Option<LaunchId>)>,
    /// Abandoned saves that are still to be aborted, or removed if they are committed.
    pub abandoned: Vec<(Step, SaveId)>,
    /// The answers that were given to the loads of launches.
    pub loads: VecDeque<LoadAnswer>,
    launches: BTreeMap<LaunchId, Launch>,
    /// The last launches whose loads waited for steps of older launches, and since when.
    awaited_since: VecDeque<(LaunchId, Duration)>,
    /// Number of commits and removals by this daemon, and of abandoned saves that it has aborted or
    /// removed. A list of committed steps that was requested before the last change may be
    /// outdated.
    changes: u64,
    /// The steps in memory.
    pub steps: BTreeMap<(Step, LaunchId), StagedStep>,
}

/// The step that the ranks of a launch get for one of their loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadAnswer {
    /// The launch.
    pub launch: LaunchId,
    /// The number of the load within the launch.
    pub number: u32,
    /// The step; `None` if there was nothing to load.
    pub step: Option<Step>,
}

/// The answer to a request for a segment to fill.
#[derive(Debug, PartialEq, Eq)]
pub enum FillOutcome {
    /// The segment to fill, and the id of the filling.
    Segment(SegmentId, FillId),
    /// None of the rank's segments can be filled now: each holds a step that is uncommitted, or
    /// has an upload or a reader. The text describes the steps, for people.
    Full(String),
    /// The launch's resume point is not compared with the cluster yet.
    Unchecked,
    /// The launch skips the step, for the given reason.
    Skipped(String),
    /// Another segment is to be made. It is already counted as used memory.
    Grow {
        /// The id of the segment.
        segment: SegmentId,
        /// Length of the segment, in bytes.
        len_bytes: u64,
    },
}

/// The memory limit of a daemon, and the time limit for filling a step.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Memory limit for all segments and all shards read from the cluster together, in bytes.
    pub memory_bytes: u64,
    /// How long the ranks may fill a step, counted from the first rank that began.
    pub fill: Duration,
}

impl JobState {
    fn drop_filling(&mut self, fill: FillId) {
        if self.dropped.len() == steps::MAX_DROPPED {
            self.dropped.pop_front();
        }
        self.dropped.push_back(fill);
    }

    /// Returns whether this host has all ranks of a launch.
    fn has_whole_steps(&self, launch: LaunchId) -> bool {
        !self.launches.get(&launch).is_some_and(Launch::is_on_several_hosts)
    }

    /// Returns the keys of the steps for which `is_it` holds, in order of step and launch.
    fn keys(&self, job: &Job, is_it: impl Fn(Step, LaunchId, &StagedStep) -> bool) -> Vec<StepKey> {
        let found =
            self.steps.iter().filter(|((step, launch), found)| is_it(*step, *launch, found));
        let key = |((step, launch), found): (&(Step, LaunchId), &StagedStep)| StepKey {
            job: job.clone(),
            step: *step,
            launch: *launch,
            fill: found.fill,
        };
        found.map(key).collect()
    }

    /// Returns the incomplete steps of the rank's launch of which the rank has not staged its part.
    fn not_staged_by(&self, place: &Place) -> Vec<StepKey> {
        self.keys(&place.job, |_, launch, step| {
            launch == place.launch
                && !step.phase.is_complete()
                && !step.parts.contains_key(&place.rank)
        })
    }
}

/// The state of one daemon.
#[derive(Debug)]
pub struct Core {
    limits: Limits,
    bell: Bell,
    /// The time of the host's boot, in seconds since 1970.
    booted_at: u64,
    members: BTreeMap<MemberId, Member>,
    segments: BTreeMap<SegmentId, Segment>,
    /// The owners of segments that a previous daemon made. They attach at their next request.
    unattached: BTreeSet<MemberId>,
    jobs: BTreeMap<Job, JobState>,
    /// Memory of files that were read from the cluster, in bytes.
    fetched_bytes: u64,
    /// The actions to carry out; the daemon takes them after each call.
    pub effects: Vec<Effect>,
    is_stopping: bool,
}

fn fail<T>(
    kind: ErrorKind,
    message: impl Into<String>,
    hint: impl Into<String>,
) -> Result<T, Failure> {
    Err(Failure::new(kind, message, hint))
}

impl Core {
    /// Creates an empty state. `booted_at` is the time of the host's boot, in seconds since 1970.
    pub fn new(limits: Limits, bell: Bell, booted_at: u64) -> Self {
        Self {
            limits,
            bell,
            booted_at,
            members: BTreeMap::new(),
            segments: BTreeMap::new(),
            unattached: BTreeSet::new(),
            jobs: BTreeMap::new(),
            fetched_bytes: 0,
            effects: Vec::new(),
            is_stopping: false,
        }
    }

    /// Refuses new steps from now on.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Returns a step in memory.
    pub fn step(&self, key: &StepKey) -> Option<&StagedStep> {
        let step = self.jobs.get(&key.job)?.steps.get(&(key.step, key.launch))?;
        (step.fill == key.fill).then_some(step)
    }

    fn step_mut(&mut self, key: &StepKey) -> Option<&mut StagedStep> {
        let step = self.jobs.get_mut(&key.job)?.steps.get_mut(&(key.step, key.launch))?;
        (step.fill == key.fill).then_some(step)
    }

    /// Returns the key of a step of a launch, if the step is in memory.
    pub fn key_of(&self, job: &Job, step: Step, launch: LaunchId) -> Option<StepKey> {
        let fill = self.jobs.get(job)?.steps.get(&(step, launch))?.fill;
        Some(StepKey { job: job.clone(), step, launch, fill })
    }

    /// Returns the launch of a step.
    pub fn launch(&self, key: &StepKey) -> Option<&Launch> {
        self.jobs.get(&key.job)?.launches.get(&key.launch)
    }

    /// Returns the state of a job.
    pub fn job(&self, job: &Job) -> Option<&JobState> {
        self.jobs.get(job)
    }

    /// Returns the rank of a member.
    pub fn place(&self, member: MemberId) -> Option<&Place> {
        self.members.get(&member).map(|member| &member.place)
    }

    /// Returns a hold on a segment, and the segment's length in bytes.
    pub fn hold(&self, segment: SegmentId) -> Option<(Hold, u64)> {
        self.segments.get(&segment).map(|found| (found.holds.hold(), found.len_bytes))
    }

    /// Takes the pending notices of a member.
    pub fn take_notices(&mut self, member: MemberId) -> Vec<Notice> {
        self.members
            .get_mut(&member)
            .map(|member| member.notices.drain(..).collect())
            .unwrap_or_default()
    }

    fn notify(&mut self, job: &Job, launch: LaunchId, notice: &Notice) {
        for member in self.members.values_mut() {
            if member.place.job == *job && member.place.launch == launch {
                if member.notices.len() == MAX_NOTICES {
                    member.notices.pop_front();
                }
                member.notices.push_back(notice.clone());
            }
        }
    }

    /// Sends a warning to all ranks of a step's launch.
    pub fn warn(&mut self, key: &StepKey, warning: String) {
        let notice = Notice { step: key.step, failure: None, warning };
        self.notify(&key.job, key.launch, &notice);
    }

    /// Returns the outcome of a step of the member's launch; `Ok(None)` while it is in progress.
    pub fn outcome(
        &self,
        member: MemberId,
        step: Step,
    ) -> Result<Option<(SaveId, Vec<String>)>, Failure> {
        let not_saved = || {
            Failure::new(
                ErrorKind::NotFound,
                format!("step {step} is not being saved by this launch"),
                "call save first",
            )
        };
        let place = self.place(member).ok_or_else(not_saved)?;
        let job = self.jobs.get(&place.job).ok_or_else(not_saved)?;
        if let Some(found) = job.steps.get(&(step, place.launch)) {
            return Ok(match &found.phase {
                Phase::Committed { save, notes } => Some((*save, notes.clone())),
                _ => None,
            });
        }
        let over = job.launches.get(&place.launch).and_then(|launch| launch.over.get(&step));
        match over {
            Some(Ok(saved)) => Ok(Some(saved.clone())),
            Some(Err(failure)) => Err(failure.clone()),
            None => Err(not_saved()),
        }
    }

    /// Returns a description of a step's progress, for people.
    pub fn progress_of(&self, key: &StepKey) -> String {
        let Some(step) = self.step(key) else { return "nothing".into() };
        let missing = || {
            let ranks = (0..step.world).filter(|rank| !step.parts.contains_key(rank));
            ranks.take(8).map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ")
        };
        let what = match step.phase {
            Phase::Filling => format!("rank {} has not staged step {}", missing(), key.step),
            Phase::Staged => format!("step {} is being hashed", key.step),
            Phase::Hashed | Phase::Saving { .. } if !step.missing.is_empty() => {
                format!("step {} waits for {}", key.step, step.missing)
            }
            Phase::Hashed | Phase::Saving { .. } if !step.silent.is_empty() => {
                format!("step {} is being saved; no report comes from {}", key.step, step.silent)
            }
            Phase::Hashed | Phase::Saving { .. } => format!("step {} is being saved", key.step),
            Phase::Committed { .. } => format!("step {} is committed", key.step),
        };
        match &step.trouble {
            Some(trouble) => format!("{what}; the last attempt failed: {trouble}"),
            None => what,
        }
    }

    /// Returns the status of all jobs.
    pub fn status(&self) -> Vec<JobStatus> {
        let jobs = self.jobs.iter().map(|(job, state)| JobStatus {
            job: job.clone(),
            launch: state.newest,
            members: self.members.values().filter(|m| m.place.job == *job).count() as u32,
            segment_bytes: self
                .segments
                .values()
                .filter(|segment| segment.place.job == *job)
                .map(|segment| segment.len_bytes)
                .sum(),
            steps: state
                .steps
                .iter()
                .map(|((step, _), found)| StepStatus {
                    step: *step,
                    state: match found.missing.as_str() {
                        "" => found.phase.name().to_owned(),
                        missing => format!("waits for {missing}"),
                    },
                    len_bytes: found.len_bytes,
                    staged: found.parts.len() as u32,
                    world: found.world,
                })
                .collect(),
        });
        jobs.collect()
    }
}

impl Phase {
    /// Returns the name of the phase, one word.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Filling => "filling",
            Phase::Staged => "staged",
            Phase::Hashed => "hashed",
            Phase::Saving { .. } => "saving",
            Phase::Committed { .. } => "committed",
        }
    }

    /// Returns whether all ranks have staged the step.
    pub fn is_complete(&self) -> bool {
        *self != Phase::Filling
    }
}

#[cfg(test)]
mod tests;
