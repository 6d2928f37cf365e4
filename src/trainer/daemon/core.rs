//! Who may do what with which segment: the states of docs/staging.md, sections 3 to 6, and nothing else.
//!
//! No file, socket or clock is touched here. A method takes what somebody asks or reports, changes the state, and leaves in
//! [`Core::effects`] what the daemon then has to do. So the rules can be tested alone, and a test can see every state between two steps.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

mod launches;
mod loads;
mod memory;
mod restore;
mod steps;

pub use restore::RestoredStep;

use super::hold::{Bell, Hold, Holds};
use crate::id::{FillId, Job, LaunchId, MemberId, SaveId, SegmentId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, JobStatus, Notice, Place, Resumed, Sample, StepStatus};

/// Launches that are over and remembered, for each job.
pub const MAX_OLD_LAUNCHES: usize = 64;
/// Messages kept for a rank that does not call.
const MAX_NOTICES: usize = 64;
/// Segments that a rank gets when memory allows: one is filled while the other is saved.
const SEGMENTS_A_RANK: usize = 2;

/// Names a step in memory: one filling of it by one launch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepKey {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The launch that fills it, or filled it.
    pub launch: LaunchId,
    /// The filling.
    pub fill: FillId,
}

/// What the daemon has to do after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Write into the segment's header that its content does not count any more, and the filling: its owner is told to fill it.
    MarkFilling(SegmentId, FillId),
    /// Write into the segment's header that its content does not count any more: the step was dropped.
    MarkFree(SegmentId),
    /// Unlink the segment's files, when no process maps it any more.
    Unlink(SegmentId),
    /// Keep the step's record: no save of it has begun.
    KeepStep(StepKey),
    /// Save the step, or go on with its save.
    Save(StepKey),
    /// Remove the record and the table of a step that is over.
    Forget(StepKey),
    /// Keep the job's record.
    KeepJob(Job),
    /// Find out what became of the saves that the job has abandoned, and remove those that are committed.
    Settle(Job),
}

/// One process of a launch.
#[derive(Debug)]
struct Member {
    place: Place,
    notices: VecDeque<Notice>,
}

/// How a member ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Its process did.
    Died,
    /// It said so.
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

/// What a segment is used for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Use {
    /// Its owner may be told to fill it.
    Free,
    /// Its owner fills it.
    Filling(StepKey),
    /// It is a part of the step.
    Held(StepKey),
    /// Nobody fills or reads it any more; its file goes when no process maps it.
    Doomed,
}

#[derive(Debug)]
struct Segment {
    owner: MemberId,
    place: Place,
    len_bytes: u64,
    state: Use,
    /// Its owner fills it again when it is free: it has not prepared anew since it got it.
    is_current: bool,
    /// Counts uploads and readers.
    holds: Holds,
}

/// How far a step has come. The order is that of the page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Some ranks have not staged it.
    Filling,
    /// All ranks have.
    Staged,
    /// Its hashes are kept.
    Hashed,
    /// Saves of it have begun, or may have.
    Saving {
        /// Under these ids. What became of each is asked before another one is drawn.
        saves: Vec<SaveId>,
    },
    /// It is committed.
    Committed {
        /// The save.
        save: SaveId,
        /// Things worth knowing.
        notes: Vec<String>,
    },
}

/// One step of one launch in memory.
#[derive(Debug)]
pub struct StagedStep {
    /// The filling.
    pub fill: FillId,
    /// How far it has come.
    pub phase: Phase,
    /// When the first rank began to fill it.
    pub began_at: Duration,
    /// Ranks of the launch.
    pub world: u32,
    /// The segment of each rank that has staged it.
    pub parts: BTreeMap<u32, SegmentId>,
    /// What each rank says of the replicated content.
    pub samples: BTreeMap<u32, Vec<Sample>>,
    /// Bytes of its segments.
    pub len_bytes: u64,
    /// When it was committed, for the order in which steps are evicted.
    pub committed_at: Duration,
    /// Why the last attempt to save it failed.
    pub trouble: Option<String>,
}

/// A step that all ranks of a launch skip.
#[derive(Debug, Clone)]
struct Skipped {
    why: String,
    /// Ranks that were told.
    told: BTreeSet<u32>,
}

/// What is remembered of a launch.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Its ranks.
    pub world: u32,
    /// When it was made.
    pub born_ns: u64,
    /// What it was resumed from.
    pub resumed: Resumed,
    /// How many committed steps are kept; 0: all.
    pub keep: u32,
    /// Committed steps that it did not abandon, as they were when it began to write. `None`: nobody has looked yet.
    pub committed_before: Option<BTreeSet<Step>>,
    members: BTreeMap<u32, MemberId>,
    segments_a_rank: usize,
    /// Length of one segment of each rank together, for which memory was promised.
    launch_bytes: u64,
    /// Memory that its ranks have not taken yet.
    reserved_bytes: u64,
    /// Ranks that have taken theirs.
    taken: BTreeSet<u32>,
    /// The last steps that it skipped.
    skipped: BTreeMap<Step, Skipped>,
    /// The last load of each rank.
    loads: BTreeMap<u32, u32>,
    /// How its last steps ended, for ranks that ask.
    over: BTreeMap<Step, Result<(SaveId, Vec<String>), Failure>>,
}

/// One job on this host.
#[derive(Debug, Default)]
pub struct JobState {
    /// The launch that may write.
    pub newest: Option<LaunchId>,
    /// Launches that may not write any more, the last ones.
    pub old: VecDeque<LaunchId>,
    /// Fillings that were dropped, the last ones: a header that names one does not bring its step back.
    pub dropped: VecDeque<FillId>,
    /// Saves that were abandoned: they are still to be aborted, or removed if they are committed.
    pub abandoned: Vec<(Step, SaveId)>,
    /// What was answered to the loads of a launch.
    pub loads: VecDeque<LoadAnswer>,
    launches: BTreeMap<LaunchId, Launch>,
    /// Number of commits and removals by this daemon. A list of committed steps that was asked for before the last one may be too old.
    changes: u64,
    /// Steps in memory.
    pub steps: BTreeMap<(Step, LaunchId), StagedStep>,
}

/// The step that the ranks of a launch get for one of their loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadAnswer {
    /// The launch.
    pub launch: LaunchId,
    /// Its how-manieth load it is.
    pub number: u32,
    /// The step. `None`: there was nothing to load.
    pub step: Option<Step>,
}

/// The answer to a request for a segment to fill.
#[derive(Debug, PartialEq, Eq)]
pub enum FillOutcome {
    /// This one, for this filling.
    Segment(SegmentId, FillId),
    /// All of the rank's segments hold what is not committed yet; in words.
    Full(String),
    /// What the launch resumed from was not compared with the cluster yet.
    Unchecked,
    /// The launch skips the step; in words.
    Skipped(String),
    /// A further segment is to be made. It counts already.
    Grow {
        /// Its id.
        segment: SegmentId,
        /// Its length.
        len_bytes: u64,
    },
}

/// The limits of a daemon.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Of all segments together.
    pub memory_bytes: u64,
    /// How long a rank may fill a segment.
    pub fill: Duration,
}

impl JobState {
    fn drop_filling(&mut self, fill: FillId) {
        if self.dropped.len() == steps::MAX_DROPPED {
            self.dropped.pop_front();
        }
        self.dropped.push_back(fill);
    }

    /// The names of the steps for which `is_it` holds, in their order.
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

    /// Steps of the rank's launch that are not complete, and of which the rank has not staged its part.
    fn not_staged_by(&self, place: &Place) -> Vec<StepKey> {
        self.keys(&place.job, |_, launch, step| {
            launch == place.launch
                && !step.phase.is_complete()
                && !step.parts.contains_key(&place.rank)
        })
    }
}

/// All state of one daemon.
#[derive(Debug)]
pub struct Core {
    limits: Limits,
    bell: Bell,
    members: BTreeMap<MemberId, Member>,
    segments: BTreeMap<SegmentId, Segment>,
    jobs: BTreeMap<Job, JobState>,
    /// Memory of files that were read from the cluster.
    fetched_bytes: u64,
    /// What is to be done; the daemon takes it after each call.
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
    /// A daemon that knows nothing.
    pub fn new(limits: Limits, bell: Bell) -> Self {
        Self {
            limits,
            bell,
            members: BTreeMap::new(),
            segments: BTreeMap::new(),
            jobs: BTreeMap::new(),
            fetched_bytes: 0,
            effects: Vec::new(),
            is_stopping: false,
        }
    }

    /// No step begins any more.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// A step in memory.
    pub fn step(&self, key: &StepKey) -> Option<&StagedStep> {
        let step = self.jobs.get(&key.job)?.steps.get(&(key.step, key.launch))?;
        (step.fill == key.fill).then_some(step)
    }

    fn step_mut(&mut self, key: &StepKey) -> Option<&mut StagedStep> {
        let step = self.jobs.get_mut(&key.job)?.steps.get_mut(&(key.step, key.launch))?;
        (step.fill == key.fill).then_some(step)
    }

    /// The name of a step of a launch, if it is in memory.
    pub fn key_of(&self, job: &Job, step: Step, launch: LaunchId) -> Option<StepKey> {
        let fill = self.jobs.get(job)?.steps.get(&(step, launch))?.fill;
        Some(StepKey { job: job.clone(), step, launch, fill })
    }

    /// The launch of a step.
    pub fn launch(&self, key: &StepKey) -> Option<&Launch> {
        self.jobs.get(&key.job)?.launches.get(&key.launch)
    }

    /// The job's record.
    pub fn job(&self, job: &Job) -> Option<&JobState> {
        self.jobs.get(job)
    }

    /// The rank that a connected process has.
    pub fn place(&self, member: MemberId) -> Option<&Place> {
        self.members.get(&member).map(|member| &member.place)
    }

    /// A share in a segment, and the segment's length.
    pub fn hold(&self, segment: SegmentId) -> Option<(Hold, u64)> {
        self.segments.get(&segment).map(|found| (found.holds.hold(), found.len_bytes))
    }

    /// Takes what was to be told to a rank.
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

    /// Tells all ranks of a step's launch something that is no failure.
    pub fn warn(&mut self, key: &StepKey, warning: String) {
        let notice = Notice { step: key.step, failure: None, warning };
        self.notify(&key.job, key.launch, &notice);
    }

    /// How a step of the member's launch stands: `Ok(None)` while it is under way.
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

    /// What is under way for a step, in words.
    pub fn progress_of(&self, key: &StepKey) -> String {
        let Some(step) = self.step(key) else { return "nothing".into() };
        let missing = || {
            let ranks = (0..step.world).filter(|rank| !step.parts.contains_key(rank));
            ranks.take(8).map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ")
        };
        let what = match step.phase {
            Phase::Filling => format!("rank {} has not staged step {}", missing(), key.step),
            Phase::Staged => format!("step {} is being hashed", key.step),
            Phase::Hashed | Phase::Saving { .. } => format!("step {} is being saved", key.step),
            Phase::Committed { .. } => format!("step {} is committed", key.step),
        };
        match &step.trouble {
            Some(trouble) => format!("{what}; the last attempt failed: {trouble}"),
            None => what,
        }
    }

    /// All jobs, for people.
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
                    state: found.phase.name().to_owned(),
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
    /// In one word.
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
