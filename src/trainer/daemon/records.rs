//! The records that a staging daemon keeps beside the segments, for the next daemon
//! (docs/staging.md, 2).

use serde::{Deserialize, Serialize};

use super::core::{LoadAnswer, StepKey};
use crate::format::envelope::RecordKind;
use crate::format::records::Record;
use crate::id::{ClusterId, FillId, InstanceId, Job, LaunchId, MemberId, SaveId, SegmentId, Step};
use crate::trainer::protocol::{Hosts, Place, Resumed};

/// The identity of a staging folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRecord {
    /// The folder's id.
    pub instance: InstanceId,
    /// The cluster that the folder's daemon saves to.
    pub cluster: ClusterId,
    /// The host's boot id when the folder was made. A different one means that the memory's
    /// contents are lost.
    pub boot: String,
}

/// The owner of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    /// The process that may write the segment.
    pub member: MemberId,
    /// The rank of that process.
    pub place: Place,
    /// Length of the segment, in bytes.
    pub len_bytes: u64,
}

/// A step that all ranks of this host have staged.
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
    /// The segments, in the order of the ranks.
    pub segments: Vec<SegmentId>,
    /// The state of the step's save.
    pub save: SaveState,
}

/// The state of a step's save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveState {
    /// No save has begun.
    Unsaved,
    /// Saves may have begun under these ids; the outcome of each is unknown.
    Begun {
        /// The save ids, oldest first.
        saves: Vec<SaveId>,
    },
    /// The step is committed.
    Committed {
        /// The id of the save.
        save: SaveId,
    },
}

/// The state of a job, without its steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job.
    pub job: Job,
    /// The launch that may write.
    pub newest: Option<LaunchRecord>,
    /// Launches that may no longer write. The resume point of each decides whether a step that it
    /// staged may replace the save that an older launch of this host committed as the same step.
    pub old: Vec<LaunchRecord>,
    /// Fillings that were dropped.
    pub dropped: Vec<FillId>,
    /// Abandoned saves that are still to be aborted, or removed if they are committed.
    pub abandoned: Vec<(Step, SaveId)>,
    /// The answers that were given to loads.
    pub loads: Vec<LoadAnswer>,
}

/// The recorded state of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// The launch.
    pub launch: LaunchId,
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
    pub committed_before: Option<Vec<Step>>,
}

/// The hosts of a launch that runs on several of them (docs/staging.md, 10).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchHosts {
    /// The launch.
    pub launch: LaunchId,
    /// The hosts, and which of them this one is.
    pub hosts: Hosts,
    /// The latest step that a rank of this host was ordered to fill. No step up to and including it
    /// is begun again.
    pub filled: Option<Step>,
}

impl StepRecord {
    /// Returns the key of the step.
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
impl Record for LaunchHosts {
    const KIND: RecordKind = RecordKind::LaunchHosts;
}
