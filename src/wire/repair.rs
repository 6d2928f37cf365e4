//! The options of a repair, and the events that answer it.

use serde::{Deserialize, Serialize};

use crate::id::PeerName;

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
    /// They are only counted.
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

/// The result of a repair. After a dry run, the counts of what was made are counts of what is to be
/// made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairSummary {
    /// Number of stripes of the step.
    pub stripes: u64,
    /// Number of pieces that were made.
    pub pieces: u64,
    /// Number of replicas that were made.
    pub replicas: u64,
    /// Number of bytes of these pieces and replicas.
    pub made_bytes: u64,
    /// Number of records that were written.
    pub records: u64,
    /// Number of stripes of which something could not be made that should be there.
    pub unrepaired: u64,
    /// The nodes that do not answer, each with the number of pieces and replicas that it should
    /// have.
    pub away: Vec<(PeerName, u64)>,
}
