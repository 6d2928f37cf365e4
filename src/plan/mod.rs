//! Plans: archiving, repair and reading as one thing, a linear dataflow between nodes.
//!
//! A [`Plan`] is a DAG of [`Hop`]s over one stripe. A hop reads local blocks or pieces and incoming streams, multiplies
//! them with one small matrix over the field, and sends on, stores or delivers the results, grain by grain. Chain, star
//! and degraded read differ in data, not in code. [`check`](check::check) proves a plan by pushing unit vectors through it.

pub mod check;

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::code::CodeId;
use crate::format::geometry::StripeCut;
use crate::id::{Attempt, NodeId, StripeId};

/// The most hops of one plan: n nodes with one hop for each of n ranges, and a coder's besides.
pub const MAX_HOPS: usize = 1024;
/// The most inputs or outputs of one hop.
pub const MAX_HOP_EDGES: usize = 64;

/// A stream between two hops, numbered within its plan.
pub type StreamNo = u16;

/// What a hop reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Input {
    /// A local replica of this block (from 0).
    Block(u8),
    /// A local piece (from 0), or the replica that is it.
    Piece(u8),
    /// What another hop sends.
    Stream(StreamNo),
}

/// What a hop makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Output {
    /// Sent to the hop that reads this stream.
    Stream(StreamNo),
    /// Stored as this piece (from 0).
    Store(u8),
    /// Handed to the reader as this block (from 0).
    Deliver(u8),
}

/// One node's share of the work, over one range of grains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hop {
    /// The node; `None` is the reader that asked for the plan.
    pub node: Option<NodeId>,
    /// First grain and the one past the last.
    pub grains: (u64, u64),
    /// What it reads.
    pub inputs: Vec<Input>,
    /// What it makes.
    pub outputs: Vec<Output>,
    /// One row an output, one coefficient an input.
    pub matrix: Vec<Vec<u8>>,
}

impl Hop {
    /// The range of grains.
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
    /// The stripe's cut.
    pub cut: StripeCut,
    /// The hops, in any order.
    pub hops: Vec<Hop>,
    /// Pieces that are not stored by a hop because the replica of a block is that piece and stays: (piece, node).
    pub kept: Vec<(u8, NodeId)>,
}

/// What each node moves in a plan, in payload bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes received over streams.
    pub in_bytes: u64,
    /// Bytes sent over streams.
    pub out_bytes: u64,
}

impl Plan {
    /// Payload bytes of grains `range` of one block-long stream.
    pub fn stream_bytes(&self, range: Range<u64>) -> u64 {
        let end = |grain: u64| (grain * crate::units::GRAIN_BYTES).min(self.cut.block_bytes);
        end(range.end).saturating_sub(end(range.start))
    }

    /// What `node` receives and sends when the plan runs.
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

    /// The nodes that run hops or keep pieces, each once, in node-id order: the order of admission.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.hops.iter().filter_map(|hop| hop.node).collect();
        nodes.extend(self.kept.iter().map(|(_, node)| *node));
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// The nodes that send `node` something.
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

    /// The nodes whose bytes reach `node`, straight or through others.
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

    /// Which node stores `piece`, by a hop or by keeping a replica.
    pub fn home(&self, piece: u8) -> Option<NodeId> {
        let stores = |hop: &&Hop| hop.outputs.contains(&Output::Store(piece));
        let kept = self.kept.iter().find(|(kept, _)| *kept == piece).map(|(_, node)| *node);
        kept.or_else(|| self.hops.iter().find(stores).and_then(|hop| hop.node))
    }
}
