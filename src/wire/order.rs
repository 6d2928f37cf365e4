//! Orders: a node's part of a plan, as its coordinator sends it.

use serde::{Deserialize, Serialize};

use super::NodeAddress;
use crate::code::CodeId;
use crate::format::geometry::StripeCut;
use crate::gf::Fingerprint;
use crate::id::{Attempt, Generation, NodeId, StripeId};
use crate::plan::{Input, Output};

/// The implementation that multiplies blocks by coefficients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Codec {
    /// This program's fused kernels.
    #[default]
    Kernel,
    /// The crate `reed-solomon-erasure`. It serves only the hop of a classical code's coder.
    ReedSolomonErasure,
}

/// All hops of one node in one execution of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The id of this execution of the plan. The headers of its streams carry the id.
    pub run: [u8; 16],
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt that its pieces belong to.
    pub attempt: Attempt,
    /// The generation of the shard's owner. The node refuses one that is below its fence.
    pub generation: Generation,
    /// The node of the coordinator.
    pub coordinator: NodeId,
    /// The code of its pieces.
    pub code: CodeId,
    /// The cut of the stripe: its range in the shard and its block length.
    pub cut: StripeCut,
    /// The key of the fingerprints.
    pub fingerprint_key: [u8; 32],
    /// The implementation that multiplies.
    pub codec: Codec,
    /// The rate, in bytes a second, at which a hop without incoming streams sends, all its streams
    /// together. `None`: as fast as it can.
    pub bytes_per_s: Option<u64>,
    /// The hops of the node.
    pub hops: Vec<HopOrder>,
    /// Replicas that stay in place as systematic pieces and must be read back and proven: (piece,
    /// block).
    pub kept: Vec<(u8, u8)>,
}

/// A hop of an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopOrder {
    /// The first grain, and the one past the last.
    pub grains: (u64, u64),
    /// The inputs, one per column of the matrix.
    pub inputs: Vec<InputOrder>,
    /// The outputs, one per row of the matrix.
    pub outputs: Vec<OutputOrder>,
    /// The coefficients: a row per output, a column per input.
    pub matrix: Vec<Vec<u8>>,
}

/// An input of a hop, and the fingerprints that it must have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputOrder {
    /// The data to read.
    pub input: Input,
    /// The fingerprint of each grain of the hop's range. The node checks every grain.
    pub expected: Vec<Fingerprint>,
}

/// An output of a hop, and its destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputOrder {
    /// The data to produce.
    pub output: Output,
    /// The node that receives the output, if it is a stream.
    pub to: Option<NodeAddress>,
}

/// A node's proof of a piece that it holds. The node reads the piece back past the page cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceProof {
    /// The piece.
    pub piece: u8,
    /// The block of the replica, if the piece is a replica left in place.
    pub kept_block: Option<u8>,
    /// BLAKE3 hash of the piece.
    pub root: [u8; 32],
    /// Fingerprints of the piece's grains.
    pub fingerprints: Vec<Fingerprint>,
}

/// The report about one hop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopReport {
    /// Index of the hop in the order.
    pub hop: u32,
    /// The work of the hop.
    pub work: HopWork,
}

/// The work of a hop and the use of its time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopWork {
    /// Number of payload bytes received over streams.
    pub in_bytes: u64,
    /// Number of payload bytes sent over streams.
    pub out_bytes: u64,
    /// When work on the first grain began, and when the last grain was stored and its streams were
    /// finished, in microseconds since the node began to run the order.
    pub span_us: (u64, u64),
    /// The use of the worker's time, including the wait for the first grain.
    pub times: HopTimes,
    /// A sample of at most 64 jobs of the hop, in order: their grains and times.
    pub chunks: Vec<ChunkTimes>,
}

/// The time of a hop's worker, by its use, in microseconds. Receiving and sending run beside the
/// worker and are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopTimes {
    /// Time waiting for input.
    pub upstream_us: u64,
    /// Time waiting for a thread and a processor.
    pub queued_us: u64,
    /// Time computing fingerprints and products.
    pub computed_us: u64,
    /// Time reading blocks, hashing and writing pieces, and waiting until the written bytes are
    /// proven.
    pub disk_us: u64,
    /// Time waiting for buffer space towards the next hop.
    pub downstream_us: u64,
}

/// Neighbouring grains that a hop processed in one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkTimes {
    /// The first grain, and the one past the last.
    pub grains: (u64, u64),
    /// Start and end of the job, in microseconds since the node began to run the order.
    pub span_us: (u64, u64),
}

/// The report about a node's part of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    /// The reports of the hops.
    pub hops: Vec<HopReport>,
    /// The proofs of the pieces that the node now holds.
    pub proofs: Vec<PieceProof>,
    /// Time from the start of the run until the last byte was durable and proven, in microseconds.
    pub total_us: u64,
}
