//! The repair plans: missing pieces of an archived stripe are made from the pieces that are left.
//!
//! In a *chain*, each node of a source adds its piece or replica, times its coefficients, to one
//! stream for each missing piece, and the last of these nodes sends each stream to the node of its
//! piece. Every link carries at most one block for each missing piece, and all links work at the
//! same time, so that making one piece takes about as long as sending one block. (ECPipe: Li et
//! al., *Repair Pipelining for Erasure-Coded Storage*, USENIX ATC 2017.) In a *star*, the node of
//! the first missing piece receives all sources, which takes k times as long on its link.

use super::PlannerError;
use crate::code::{Code, StripePart, combine_pieces};
use crate::format::geometry::StripeCut;
use crate::id::{Attempt, NodeId, StripeId};
use crate::plan::{Hop, Input, Output, Plan, StreamNo};

/// The subject of a repair: an archived stripe.
#[derive(Debug, Clone, Copy)]
pub struct RepairSubject<'a> {
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt that names the pieces.
    pub attempt: Attempt,
    /// The cut of the stripe: its range in the shard and its block length.
    pub cut: StripeCut,
    /// The code of the pieces.
    pub code: &'a Code,
}

/// A piece or replica that is left, and its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairSource {
    /// The node.
    pub node: NodeId,
    /// The piece, or the block of the replica.
    pub part: StripePart,
}

/// A missing piece, and the node that stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairTarget {
    /// The node.
    pub node: NodeId,
    /// The piece, from 0.
    pub piece: usize,
}

/// The sources that a plan uses, and the coefficients: a row for each target.
type SourcesAndRows = (Vec<RepairSource>, Vec<Vec<u8>>);

impl RepairSubject<'_> {
    fn combine(
        &self,
        sources: &[RepairSource],
        targets: &[RepairTarget],
    ) -> Result<SourcesAndRows, PlannerError> {
        let parts: Vec<StripePart> = sources.iter().map(|source| source.part).collect();
        let wanted: Vec<usize> = targets.iter().map(|target| target.piece).collect();
        let made = combine_pieces(self.code, &parts, &wanted)?;
        Ok((made.sources.iter().map(|&at| sources[at]).collect(), made.rows))
    }

    fn hop(&self, node: NodeId, inputs: Vec<Input>, outputs: Vec<Output>) -> Hop {
        let matrix = vec![vec![0; inputs.len()]; outputs.len()];
        Hop { node: Some(node), grains: (0, self.cut.grains()), inputs, outputs, matrix }
    }

    /// Returns the hop that stores a missing piece as it arrives.
    fn store_hop(&self, target: &RepairTarget, stream: StreamNo) -> Hop {
        let outputs = vec![Output::Store(target.piece as u8)];
        let mut hop = self.hop(target.node, vec![Input::Stream(stream)], outputs);
        hop.matrix = vec![vec![1]];
        hop
    }

    fn plan(&self, hops: Vec<Hop>) -> Plan {
        let RepairSubject { stripe, attempt, cut, code } = *self;
        Plan { stripe, attempt, code: code.id(), cut, hops, kept: Vec::new() }
    }
}

fn source_input(source: &RepairSource) -> Input {
    match source.part {
        StripePart::Piece(piece) => Input::Piece(piece as u8),
        StripePart::Block(block) => Input::Block(block as u8),
    }
}

/// Builds the chain that makes the pieces of `targets`. The `sources` are considered in their order,
/// and the plan uses those that it needs.
///
/// # Errors
/// [`PlannerError::Pieces`] if the sources do not determine the missing pieces.
pub fn repair_chain(
    subject: &RepairSubject<'_>,
    sources: &[RepairSource],
    targets: &[RepairTarget],
) -> Result<Plan, PlannerError> {
    let (sources, rows) = subject.combine(sources, targets)?;
    let width = targets.len();
    let stream = |hop: usize, target: usize| (hop * width + target) as StreamNo;
    let mut hops = Vec::with_capacity(sources.len() + width);
    for (hop, source) in sources.iter().enumerate() {
        let mut inputs = vec![source_input(source)];
        if let Some(before) = hop.checked_sub(1) {
            inputs.extend((0..width).map(|target| Input::Stream(stream(before, target))));
        }
        let outputs = (0..width).map(|target| Output::Stream(stream(hop, target))).collect();
        let mut built = subject.hop(source.node, inputs, outputs);
        for (target, row) in built.matrix.iter_mut().enumerate() {
            row[0] = rows[target][hop];
            if let Some(incoming) = row.get_mut(1 + target) {
                *incoming = 1;
            }
        }
        hops.push(built);
    }
    let last = sources.len().saturating_sub(1);
    let stores = targets.iter().enumerate();
    hops.extend(stores.map(|(index, target)| subject.store_hop(target, stream(last, index))));
    Ok(subject.plan(hops))
}

/// Builds the star that makes the pieces of `targets` on the node of the first of them, which
/// forwards the others. Returns errors as [`repair_chain`] does.
pub fn repair_star(
    subject: &RepairSubject<'_>,
    sources: &[RepairSource],
    targets: &[RepairTarget],
) -> Result<Plan, PlannerError> {
    let (sources, rows) = subject.combine(sources, targets)?;
    let mut hops = Vec::with_capacity(sources.len() + targets.len());
    for (stream, source) in sources.iter().enumerate() {
        let outputs = vec![Output::Stream(stream as StreamNo)];
        let mut sends = subject.hop(source.node, vec![source_input(source)], outputs);
        sends.matrix = vec![vec![1]];
        hops.push(sends);
    }
    let Some((first, others)) = targets.split_first() else { return Ok(subject.plan(hops)) };
    let forwarded = |target: usize| (sources.len() + target) as StreamNo;
    let mut outputs = vec![Output::Store(first.piece as u8)];
    outputs.extend((0..others.len()).map(|target| Output::Stream(forwarded(target))));
    let inputs = (0..sources.len() as StreamNo).map(Input::Stream).collect();
    let mut gathers = subject.hop(first.node, inputs, outputs);
    gathers.matrix = rows;
    hops.push(gathers);
    let stores = others.iter().enumerate();
    hops.extend(stores.map(|(index, target)| subject.store_hop(target, forwarded(index))));
    Ok(subject.plan(hops))
}
