//! Plans: archiving, repair and reading in one form, a linear dataflow between nodes.
//!
//! A [`Plan`] is a DAG of [`Hop`]s over one stripe. A hop reads local blocks or pieces and incoming
//! streams, multiplies them by a small matrix over the field, and forwards, stores or delivers the
//! results, grain by grain. Chain, star and degraded read differ in data, not in code.
//! [`check`](check::check) proves a plan by pushing unit vectors through it.

pub mod check;

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::code::CodeId;
use crate::format::geometry::StripeCut;
use crate::id::{Attempt, NodeId, StripeId};

/// Maximum number of hops in a plan. A striped star has up to n ranges with up to n hops each, and
/// n is at most 32.
pub const MAX_HOPS: usize = 1024;
/// Maximum number of inputs of a hop, and maximum number of its outputs.
pub const MAX_HOP_EDGES: usize = 64;

/// A stream between two hops, numbered within its plan.
pub type StreamNo = u16;

/// An input of a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Input {
    /// A local replica of this block (from 0).
    Block(u8),
    /// A local piece (from 0), or the replica that serves as this piece.
    Piece(u8),
    /// A stream from another hop.
    Stream(StreamNo),
}

/// An output of a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Output {
    /// A stream to the hop that reads it.
    Stream(StreamNo),
    /// The stored piece with this number (from 0).
    Store(u8),
    /// The block with this number (from 0), delivered to the reader.
    Deliver(u8),
}

/// A node's share of the work, over one range of grains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hop {
    /// The node that runs the hop. `None` is the reader that asked for the plan.
    pub node: Option<NodeId>,
    /// The first grain, and the one past the last.
    pub grains: (u64, u64),
    /// The inputs, one per column of the matrix.
    pub inputs: Vec<Input>,
    /// The outputs, one per row of the matrix.
    pub outputs: Vec<Output>,
    /// The coefficients: a row per output, a column per input.
    pub matrix: Vec<Vec<u8>>,
}

impl Hop {
    /// Returns the range of grains.
    pub fn range(&self) -> Range<u64> {
        self.grains.0..self.grains.1
    }
}

/// A plan for one stripe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt that its pieces belong to.
    pub attempt: Attempt,
    /// The code that its pieces belong to.
    pub code: CodeId,
    /// The cut of the stripe: its range in the shard and its block length.
    pub cut: StripeCut,
    /// The hops, in any order.
    pub hops: Vec<Hop>,
    /// Pieces that no hop stores because a replica that stays in place is that piece: (piece,
    /// node).
    pub kept: Vec<(u8, NodeId)>,
}

/// The traffic of a node in a plan, in payload bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes received over streams.
    pub in_bytes: u64,
    /// Bytes sent over streams.
    pub out_bytes: u64,
}

impl Plan {
    /// Returns the number of payload bytes that the grains in `range` take in a stream that is as
    /// long as a block.
    pub fn stream_bytes(&self, range: Range<u64>) -> u64 {
        let end = |grain: u64| (grain * crate::units::GRAIN_BYTES).min(self.cut.block_bytes);
        end(range.end).saturating_sub(end(range.start))
    }

    /// Returns the numbers of bytes that `node` receives and sends when the plan runs.
    pub fn traffic(&self, node: NodeId) -> Traffic {
        let mut traffic = Traffic::default();
        for hop in self.hops.iter().filter(|hop| hop.node == Some(node)) {
            let bytes = self.stream_bytes(hop.range());
            let streams_in = hop.inputs.iter().filter(|input| matches!(input, Input::Stream(_)));
            let streams_out = hop.outputs.iter().filter(|out| matches!(out, Output::Stream(_)));
            traffic.in_bytes += bytes * streams_in.count() as u64;
            traffic.out_bytes += bytes * streams_out.count() as u64;
        }
        traffic
    }

    /// Returns the nodes that run hops or keep pieces, each once, in node-id order, which is the
    /// order of admission.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.hops.iter().filter_map(|hop| hop.node).collect();
        nodes.extend(self.kept.iter().map(|(_, node)| *node));
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Returns the other nodes that send a stream to `node`.
    pub fn senders(&self, node: NodeId) -> BTreeSet<NodeId> {
        let of_node = self.hops.iter().filter(|hop| hop.node == Some(node));
        let read: BTreeSet<Input> = of_node.flat_map(|hop| hop.inputs.iter().copied()).collect();
        let sends = |hop: &&Hop| {
            let mut outputs = hop.outputs.iter();
            outputs.any(|o| matches!(o, Output::Stream(s) if read.contains(&Input::Stream(*s))))
        };
        let senders = self.hops.iter().filter(sends).filter_map(|hop| hop.node);
        senders.filter(|sender| *sender != node).collect()
    }

    /// Returns the nodes whose bytes reach `node`, directly or through others.
    pub fn upstream(&self, node: NodeId) -> BTreeSet<NodeId> {
        let mut all = self.senders(node);
        loop {
            let further: Vec<_> = all.iter().flat_map(|&sender| self.senders(sender)).collect();
            let known = all.len();
            all.extend(further);
            if all.len() == known {
                return all;
            }
        }
    }

    /// Returns the node that stores `piece`, written by a hop or kept as a replica.
    pub fn home(&self, piece: u8) -> Option<NodeId> {
        let stores = |hop: &&Hop| hop.outputs.contains(&Output::Store(piece));
        let kept = self.kept.iter().find(|(kept, _)| *kept == piece).map(|(_, node)| *node);
        kept.or_else(|| self.hops.iter().find(stores).and_then(|hop| hop.node))
    }
}
