//! Orders: one node's part of a plan, as its coordinator sends it.

use serde::{Deserialize, Serialize};

use super::NodeAddress;
use crate::code::CodeId;
use crate::format::geometry::StripeCut;
use crate::gf::Fingerprint;
use crate::id::{Attempt, Generation, NodeId, StripeId};
use crate::plan::{Input, Output};

/// What multiplies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Codec {
    /// Our fused kernels.
    #[default]
    Kernel,
    /// The crate `reed-solomon-erasure`; only for a classical coder's hop.
    ReedSolomonErasure,
}

/// All hops of one node in one run of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Names this run of the plan; streams carry it.
    pub run: [u8; 16],
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt of its pieces.
    pub attempt: Attempt,
    /// The owner's generation; older than the node's fence: refused.
    pub generation: Generation,
    /// The coordinator's node.
    pub coordinator: NodeId,
    /// The code of its pieces.
    pub code: CodeId,
    /// The stripe's cut.
    pub cut: StripeCut,
    /// Key of the fingerprints.
    pub fingerprint_key: [u8; 32],
    /// What multiplies.
    pub codec: Codec,
    /// The hops.
    pub hops: Vec<HopOrder>,
    /// Replicas that stay as systematic pieces and are to be read back and proven: (piece, block).
    pub kept: Vec<(u8, u8)>,
}

/// One hop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopOrder {
    /// First grain and the one past the last.
    pub grains: (u64, u64),
    /// What it reads.
    pub inputs: Vec<InputOrder>,
    /// What it makes.
    pub outputs: Vec<OutputOrder>,
    /// One row an output, one coefficient an input.
    pub matrix: Vec<Vec<u8>>,
}

/// One input and what it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputOrder {
    /// What to read.
    pub input: Input,
    /// The fingerprint of each grain of the hop's range. Every grain is checked.
    pub expected: Vec<Fingerprint>,
}

/// One output and where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputOrder {
    /// What to make.
    pub output: Output,
    /// The next node, for a stream.
    pub to: Option<NodeAddress>,
}

/// What a node proves about a piece that it holds: read back past the page cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceProof {
    /// The piece.
    pub piece: u8,
    /// The replica's block when the piece is a replica left in place.
    pub kept_block: Option<u8>,
    /// BLAKE3 of its bytes.
    pub root: [u8; 32],
    /// Fingerprints of its grains.
    pub fingerprints: Vec<Fingerprint>,
}

/// How one hop went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopReport {
    /// Place of the hop in the order.
    pub hop: u32,
    /// What it did.
    pub work: HopWork,
}

/// What a hop did, and what its time went into.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopWork {
    /// Payload bytes received over streams.
    pub in_bytes: u64,
    /// Payload bytes sent over streams.
    pub out_bytes: u64,
    /// Microseconds since the node took the order: first grain begun, last grain done.
    pub span_us: (u64, u64),
    /// Where the time between went.
    pub times: HopTimes,
    /// When it worked on which grains, in order: a sample of at most 64.
    pub chunks: Vec<ChunkTimes>,
}

/// Microseconds of a hop. Receiving, working and sending go on side by side: these are the worker's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopTimes {
    /// Waiting for input.
    pub upstream_us: u64,
    /// Waiting for a thread and a processor.
    pub queued_us: u64,
    /// Fingerprints and products.
    pub computed_us: u64,
    /// Reading blocks, hashing and writing pieces, and waiting for what is written to be proven.
    pub disk_us: u64,
    /// Waiting for room towards the next hop.
    pub downstream_us: u64,
}

/// Some neighbouring grains that a hop worked on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkTimes {
    /// The first, and one past the last.
    pub grains: (u64, u64),
    /// Microseconds since the node took the order: begun, done.
    pub span_us: (u64, u64),
}

/// How a node's part went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    /// The hops.
    pub hops: Vec<HopReport>,
    /// The pieces that the node now holds, proven.
    pub proofs: Vec<PieceProof>,
    /// Microseconds from the order to the last durable byte and its proof.
    pub total_us: u64,
}
