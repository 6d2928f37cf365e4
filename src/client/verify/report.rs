//! The result of a verification.

use super::judge_stripe::{HeldItem, Problem};
use crate::id::{Job, PeerName, ShardName, Step};

/// A defective or missing file or record of a checkpoint, on a node that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The node.
    pub node: String,
    /// The shard.
    pub shard: ShardName,
    /// The stripe; `None` for a record of the shard.
    pub stripe: Option<u32>,
    /// The file or record.
    pub held: HeldItem,
    /// The defect.
    pub wrong: Problem,
}

/// A node that may hold a part of the checkpoint and was not examined, or that could not examine a
/// stripe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbsentNode {
    /// The node.
    pub node: String,
    /// The reason why it was not examined.
    pub reason: String,
}

/// The report about the state of a checkpoint.
#[derive(Debug, Clone)]
pub struct VerifyReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Number of shards.
    pub shards: u32,
    /// Number of stripes.
    pub stripes: u64,
    /// Number of files that were read.
    pub files: u64,
    /// Number of data bytes of these files. A file whose tail cannot be read counts as 0.
    pub file_bytes: u64,
    /// Number of records that were read.
    pub records: u64,
    /// Nodes that answered.
    pub nodes: Vec<PeerName>,
    /// Nodes of the rings that did not answer, are not registered, or do not support the call.
    pub away: Vec<AbsentNode>,
    /// Nodes that answered but could not examine a stripe, for example because of disk errors.
    pub failures: Vec<AbsentNode>,
    /// Records that nodes lack although no copy is required there, because as many copies exist as
    /// the commit promised; at most 10,000.
    pub lacking: Vec<Fault>,
    /// The defects that were found; at most 10,000.
    pub faults: Vec<Fault>,
    /// The number of defects.
    pub fault_count: u64,
    /// The defects that were mended; at most 10,000.
    pub mended: Vec<Fault>,
    /// The largest number m such that every stripe can still be read after the loss of any m of the
    /// nodes that answered. `None` if the files and records found good do not prove that every
    /// stripe can be read.
    pub survives: Option<usize>,
    /// The first stripe that survives no more losses than that: its shard and index.
    pub weakest: Option<(ShardName, u32)>,
    /// Errors that did not end the verification.
    pub incidents: Vec<String>,
}
