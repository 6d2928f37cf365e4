//! What a staging daemon keeps beside the segments, so that the next one finds it (docs/staging.md, 2).

use serde::{Deserialize, Serialize};

use super::core::{LoadAnswer, StepKey};
use crate::format::envelope::RecordKind;
use crate::format::records::Record;
use crate::id::{ClusterId, FillId, InstanceId, Job, LaunchId, MemberId, SaveId, SegmentId, Step};
use crate::trainer::protocol::{Place, Resumed};

/// Whose staging folder this is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// The folder's id.
    pub instance: InstanceId,
    /// The cluster that its daemon saves to.
    pub cluster: ClusterId,
    /// The boot of the host in which the folder was made: another one means that its memory is gone.
    pub boot: String,
}

/// Whose segment it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    /// The process that may write it.
    pub member: MemberId,
    /// Its rank.
    pub place: Place,
    /// Length of the segment.
    pub len_bytes: u64,
}

/// A step that all ranks have staged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The launch that staged it.
    pub launch: LaunchId,
    /// The filling.
    pub fill: FillId,
    /// The segment of each rank.
    pub segments: Vec<SegmentId>,
    /// How far its save has come.
    pub save: SaveState,
}

/// How far the save of a step has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveState {
    /// No save has begun.
    Unsaved,
    /// Saves may have begun under these ids; what became of each is not known.
    Begun {
        /// The ids, the last one last.
        saves: Vec<SaveId>,
    },
    /// It is committed.
    Committed {
        /// The save.
        save: SaveId,
    },
}

/// What is known of a job beside its steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job.
    pub job: Job,
    /// The launch that may write.
    pub newest: Option<LaunchRecord>,
    /// Launches that may not write any more: what they knew decides whether the steps that they staged may replace others.
    pub old: Vec<LaunchRecord>,
    /// Fillings that were dropped.
    pub dropped: Vec<FillId>,
    /// Saves that were abandoned: they are still to be aborted, or removed if they are committed.
    pub abandoned: Vec<(Step, SaveId)>,
    /// What was answered to loads.
    pub loads: Vec<LoadAnswer>,
}

/// What is known of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// The launch.
    pub launch: LaunchId,
    /// Its ranks.
    pub world: u32,
    /// When it was made.
    pub born_ns: u64,
    /// What it was resumed from.
    pub resumed: Resumed,
    /// How many committed steps are kept; 0: all.
    pub keep: u32,
    /// Committed steps that it did not abandon. `None`: nobody has looked yet.
    pub committed_before: Option<Vec<Step>>,
}

impl StepRecord {
    /// Its name.
    pub fn key(&self) -> StepKey {
        StepKey { job: self.job.clone(), step: self.step, launch: self.launch, fill: self.fill }
    }
}

impl Record for InstanceRecord {
    const KIND: RecordKind = RecordKind::StagingFolder;
}
impl Record for OwnerRecord {
    const KIND: RecordKind = RecordKind::SegmentOwner;
}
impl Record for StepRecord {
    const KIND: RecordKind = RecordKind::StagedStep;
}
impl Record for JobRecord {
    const KIND: RecordKind = RecordKind::StagedJob;
}
