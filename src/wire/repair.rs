//! The messages about repairs: options and events of a repair, the parts that nodes have of a
//! shard, and the state of automatic repair.

use serde::{Deserialize, Serialize};

use super::policy::PolicyWait;
use crate::id::{Attempt, Job, PeerName, Step};

/// Number of stripes that an answer to [`SurveyShard`](super::calls::SurveyShard) covers.
pub const STRIPES_PER_SURVEY: u32 = 1024;

/// The plan by which a repair makes pieces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepairPlan {
    /// A chain of the sources.
    #[default]
    Chain,
    /// A star: the node of the first missing piece receives all sources.
    Star,
}

/// Whether a repair changes anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepairMode {
    /// Missing pieces, replicas and records are made again.
    #[default]
    Repair,
    /// Missing pieces, replicas and records are only counted.
    DryRun,
}

/// The options of [`RepairStep`](super::calls::RepairStep).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairOptions {
    /// Whether anything is changed.
    pub mode: RepairMode,
    /// The kind of plan.
    pub plan: RepairPlan,
    /// Number of stripes that are repaired at once; 0 lets the node choose.
    pub parallel: u16,
}

/// An event of [`RepairStep`](super::calls::RepairStep).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RepairEvent {
    /// The progress in bytes.
    Progress {
        /// Number of bytes of the stripes that were examined, and repaired where something was
        /// missing.
        done_bytes: u64,
        /// Number of bytes of all stripes of the step.
        total_bytes: u64,
        /// Number of bytes of the pieces and replicas that were made so far.
        made_bytes: u64,
    },
    /// A message for the operator.
    Note(String),
    /// The end of the repair.
    Done(RepairSummary),
}

/// The result of a repair. After a dry run, the numbers say what a repair would make.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairSummary {
    /// Number of stripes of the step.
    pub stripes: u64,
    /// Number of pieces that were made.
    pub pieces: u64,
    /// Number of replicas that were made.
    pub replicas: u64,
    /// Number of bytes of the pieces and replicas that were made.
    pub made_bytes: u64,
    /// Number of records that were written.
    pub records: u64,
    /// Number of stripes with a missing piece, replica or record that could not be made.
    pub unrepaired: u64,
    /// The nodes that do not answer, each with the number of pieces and replicas that it should
    /// have.
    pub away: Vec<(PeerName, u64)>,
}

/// Answer to [`SurveyShard`](super::calls::SurveyShard): what a node has of a shard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSurvey {
    /// Whether the node has the shard's leaves.
    pub has_leaves: bool,
    /// Whether the node has the shard's commit mark.
    pub has_mark: bool,
    /// The stripes of which the node has anything, in order.
    pub stripes: Vec<StripeSurvey>,
}

/// The undamaged files and the records of a stripe on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeSurvey {
    /// Index of the stripe.
    pub index: u32,
    /// Blocks of which the node has a replica.
    pub replicas: Vec<u8>,
    /// Pieces that the node has, with their attempts.
    pub pieces: Vec<(u8, Attempt)>,
    /// Whether the node has the stripe record.
    pub has_record: bool,
    /// The attempts of which the node has a receipt.
    pub receipts: Vec<Attempt>,
}

/// Answer to [`GetRepairStatus`](super::calls::GetRepairStatus).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairStatus {
    /// The percentage of the links' rate at which automatic repair sends; 0: it is turned off.
    pub share_percent: u8,
    /// The result of the last survey; `None` before the first one has ended.
    pub survey: Option<SurveyResult>,
    /// The repair that runs now.
    pub running: Option<RunningRepair>,
    /// The reason why the brake is on, in words for the operator; `None` if it is off.
    pub brake: Option<String>,
    /// The nodes in maintenance, each with the seconds that are left.
    pub maintenance: Vec<(PeerName, u64)>,
    /// Steps that could not be repaired; the first 64. Each step is tried three times, and again
    /// when nodes come back, go away or are given up, or when other parts of the step are missing.
    pub waiting: Vec<PolicyWait>,
}

/// The result of a survey of all committed steps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurveyResult {
    /// The time since the survey ended, in milliseconds.
    pub age_ms: u64,
    /// Number of committed steps.
    pub steps: u64,
    /// Number of committed steps that could not be surveyed, because a node did not answer or the
    /// step changed.
    pub unknown: u64,
    /// The number of nodes, in any selection, that may be lost while every surveyed step can still
    /// be read; `None` if a surveyed step cannot be read from the nodes that answer, or if no step
    /// was surveyed.
    pub survives: Option<u32>,
    /// Number of steps of which something is missing.
    pub degraded: u64,
    /// Number of pieces and replicas that are missing.
    pub missing: u64,
    /// Number of bytes of the missing pieces and replicas.
    pub missing_bytes: u64,
    /// Number of records that nodes lack.
    pub records: u64,
    /// The degraded steps that survive the fewest losses; at most 16.
    pub worst: Vec<DegradedStep>,
}

/// A step of which something is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DegradedStep {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The number of nodes, in any selection, that may be lost while the step can still be read;
    /// `None` if it cannot be read from the nodes that answer.
    pub survives: Option<u32>,
    /// Number of pieces and replicas that are missing.
    pub missing: u64,
    /// Number of bytes of the missing pieces and replicas.
    pub missing_bytes: u64,
    /// Number of records that nodes lack.
    pub records: u64,
}

/// A repair that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningRepair {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Number of bytes of the stripes that were examined.
    pub done_bytes: u64,
    /// Number of bytes of all stripes of the step.
    pub total_bytes: u64,
    /// Number of bytes of the pieces and replicas that were made so far.
    pub made_bytes: u64,
}
