//! The symbolic check of a plan: it pushes unit vectors through the plan and compares the results
//! with the generator. The check runs before every execution of a plan. It also returns the vector
//! of each stream, from which the fingerprints on every edge follow.

use std::collections::{HashMap, HashSet};

use super::{Hop, Input, MAX_HOP_EDGES, MAX_HOPS, Output, Plan, StreamNo};
use crate::code::Code;
use crate::gf::field;
use crate::kind::ErrorKind;

/// The reason why a plan must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// There are too many hops, or a count, a matrix, a range or a number of a hop is out of bounds.
    #[error("hop {hop}: {what}")]
    Shape {
        /// Index of the hop; the number of hops if there are too many.
        hop: usize,
        /// Description of what is out of bounds.
        what: &'static str,
    },
    /// A stream does not have exactly one sender and one receiver over one range.
    #[error("stream {stream} {what}")]
    Stream {
        /// The stream.
        stream: StreamNo,
        /// Description of what is wrong with the stream.
        what: &'static str,
    },
    /// Hops wait for each other in a cycle.
    #[error("the hops wait for each other in a cycle")]
    Cycle,
    /// An output differs from what the code prescribes.
    #[error(
        "hop {hop} would make {output:?} as {found:?} of the blocks, the code says {expected:?}"
    )]
    Wrong {
        /// Index of the hop.
        hop: usize,
        /// The output.
        output: Output,
        /// The combination of the blocks that the plan computes.
        found: Vec<u8>,
        /// The combination that the code prescribes.
        expected: Vec<u8>,
    },
    /// An output that the goal needs is not made exactly once, on one node, over the whole length
    /// (a delivered block: over one range); or a repair makes or keeps an output that it must not.
    #[error("{output:?} is not made exactly once over all {grains} grains")]
    Coverage {
        /// The output.
        output: Output,
        /// Length of a whole piece or block in grains.
        grains: u64,
    },
    /// Two pieces lie on one node and would be lost together, or a piece has no node.
    #[error("{pieces} pieces would lie on {distinct} nodes")]
    Homes {
        /// Number of distinct nodes.
        distinct: usize,
        /// Number of pieces.
        pieces: usize,
    },
}

impl PlanError {
    /// Returns [`ErrorKind::Internal`]: this program builds all plans, so a wrong plan is a defect.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

/// The result of a check that a plan has passed: what each stream carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// The combination of the k blocks that each stream carries.
    pub streams: HashMap<StreamNo, Vec<u8>>,
}

/// The purpose of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal<'a> {
    /// Archiving: all n pieces are stored or kept, over the whole stripe.
    Archive,
    /// Repair: these pieces are stored, and no others, over the whole stripe.
    Repair(&'a [u8]),
    /// Reading: each of these blocks is delivered over exactly one range of grains, which may be
    /// any range.
    Read(&'a [u8]),
}

/// Proves that `plan` achieves `goal` under `code`. Returns the combination that each stream
/// carries, or the first violation found.
pub fn check(plan: &Plan, code: &Code, goal: Goal<'_>) -> Result<Checked, PlanError> {
    check_shape(plan, code)?;
    let order = order(plan)?;
    let streams = evaluate(plan, code, &order)?;
    check_goal(plan, code, goal)?;
    Ok(Checked { streams })
}

fn check_shape(plan: &Plan, code: &Code) -> Result<(), PlanError> {
    let shape = |hop, what| Err(PlanError::Shape { hop, what });
    if plan.hops.len() > MAX_HOPS {
        return shape(plan.hops.len(), "too many hops");
    }
    for (index, hop) in plan.hops.iter().enumerate() {
        if hop.inputs.is_empty() || hop.outputs.is_empty() {
            return shape(index, "no input or no output");
        }
        if hop.inputs.len() > MAX_HOP_EDGES || hop.outputs.len() > MAX_HOP_EDGES {
            return shape(index, "too many inputs or outputs");
        }
        if hop.matrix.len() != hop.outputs.len()
            || hop.matrix.iter().any(|row| row.len() != hop.inputs.len())
        {
            return shape(index, "the matrix does not fit the inputs and outputs");
        }
        if hop.grains.0 >= hop.grains.1 || hop.grains.1 > plan.cut.grains() {
            return shape(index, "the range of grains is empty or past the end");
        }
        let block = |j: u8| usize::from(j) < code.k();
        let piece = |i: u8| usize::from(i) < code.n();
        let inputs = hop.inputs.iter().all(|input| match *input {
            Input::Block(j) => block(j),
            Input::Piece(i) => piece(i),
            Input::Stream(_) => true,
        });
        let outputs = hop.outputs.iter().all(|output| match *output {
            Output::Deliver(j) => block(j),
            Output::Store(i) => piece(i),
            Output::Stream(_) => true,
        });
        if !inputs || !outputs {
            return shape(index, "a block or piece that the code does not have");
        }
    }
    Ok(())
}

/// Returns the indices of the hops in an order in which every stream is produced before it is read.
/// Returns an error if a stream does not have one sender and one receiver of one range, or if the
/// hops form a cycle.
fn order(plan: &Plan) -> Result<Vec<usize>, PlanError> {
    let mut sender: HashMap<StreamNo, usize> = HashMap::new();
    let mut receiver: HashMap<StreamNo, usize> = HashMap::new();
    for (index, hop) in plan.hops.iter().enumerate() {
        for output in &hop.outputs {
            if let Output::Stream(stream) = *output
                && sender.insert(stream, index).is_some()
            {
                return Err(PlanError::Stream { stream, what: "is sent twice" });
            }
        }
        for input in &hop.inputs {
            if let Input::Stream(stream) = *input
                && receiver.insert(stream, index).is_some()
            {
                return Err(PlanError::Stream { stream, what: "is received twice" });
            }
        }
    }
    for (&stream, &from) in &sender {
        let Some(&to) = receiver.get(&stream) else {
            return Err(PlanError::Stream { stream, what: "is sent but not received" });
        };
        if plan.hops[from].grains != plan.hops[to].grains {
            return Err(PlanError::Stream { stream, what: "has ends of different range" });
        }
    }
    if let Some(&stream) = receiver.keys().find(|stream| !sender.contains_key(stream)) {
        return Err(PlanError::Stream { stream, what: "is received but not sent" });
    }
    let mut waiting: Vec<usize> = plan
        .hops
        .iter()
        .map(|hop| hop.inputs.iter().filter(|input| matches!(input, Input::Stream(_))).count())
        .collect();
    let mut ready: Vec<usize> = (0..waiting.len()).filter(|&hop| waiting[hop] == 0).collect();
    let mut order = Vec::with_capacity(waiting.len());
    while let Some(index) = ready.pop() {
        order.push(index);
        for output in &plan.hops[index].outputs {
            if let Output::Stream(stream) = output {
                let to = receiver[stream];
                waiting[to] -= 1;
                if waiting[to] == 0 {
                    ready.push(to);
                }
            }
        }
    }
    if order.len() == plan.hops.len() { Ok(order) } else { Err(PlanError::Cycle) }
}

fn unit(k: usize, j: u8) -> Vec<u8> {
    (0..k).map(|at| u8::from(at == usize::from(j))).collect()
}

fn evaluate(
    plan: &Plan,
    code: &Code,
    order: &[usize],
) -> Result<HashMap<StreamNo, Vec<u8>>, PlanError> {
    let k = code.k();
    let mut streams: HashMap<StreamNo, Vec<u8>> = HashMap::new();
    for &index in order {
        let hop = &plan.hops[index];
        let inputs: Vec<Vec<u8>> = hop
            .inputs
            .iter()
            .map(|input| match *input {
                Input::Block(j) => unit(k, j),
                Input::Piece(i) => code.generator().row(i.into()).to_vec(),
                Input::Stream(stream) => streams[&stream].clone(),
            })
            .collect();
        for (output, row) in hop.outputs.iter().zip(&hop.matrix) {
            let mut found = vec![0; k];
            for (input, &coefficient) in inputs.iter().zip(row) {
                for (sum, &value) in found.iter_mut().zip(input) {
                    *sum ^= field::mul(coefficient, value);
                }
            }
            let expected = match *output {
                Output::Stream(stream) => {
                    streams.insert(stream, found);
                    continue;
                }
                Output::Store(i) => code.generator().row(i.into()).to_vec(),
                Output::Deliver(j) => unit(k, j),
            };
            if found != expected {
                return Err(PlanError::Wrong { hop: index, output: *output, found, expected });
            }
        }
    }
    Ok(streams)
}

/// Returns the ranges over which hops produce `output`, in order.
fn output_ranges(plan: &Plan, output: Output) -> Vec<(u64, u64)> {
    let outputs = |hop: &'_ Hop| hop.outputs.iter().filter(|made| **made == output).count();
    let made = plan.hops.iter().flat_map(|hop| std::iter::repeat_n(hop.grains, outputs(hop)));
    let mut ranges: Vec<(u64, u64)> = made.collect();
    ranges.sort_unstable();
    ranges
}

/// Checks that a piece is stored exactly once over the whole stripe, on one node, or that a kept
/// replica is that piece.
fn check_piece_is_made(plan: &Plan, code: &Code, piece: u8) -> Result<(), PlanError> {
    let (output, whole) = (Output::Store(piece), plan.cut.grains());
    let coverage = PlanError::Coverage { output, grains: whole };
    let stored = output_ranges(plan, output);
    let kept = plan.kept.iter().filter(|(kept, _)| *kept == piece).count();
    if kept == 1 && stored.is_empty() {
        let row = code.generator().row(piece.into());
        let is_block = usize::from(piece) < code.k() && row == unit(code.k(), piece);
        return if is_block { Ok(()) } else { Err(coverage) };
    }
    let end = stored.iter().try_fold(0, |end, &(from, to)| (from == end).then_some(to));
    let home = plan.home(piece);
    let elsewhere = plan.hops.iter().any(|hop| hop.outputs.contains(&output) && hop.node != home);
    match kept != 0 || end != Some(whole) || home.is_none() || elsewhere {
        true => Err(coverage),
        false => Ok(()),
    }
}

/// Checks that each of the pieces has a node of its own.
fn check_homes_are_distinct(plan: &Plan, pieces: &[u8]) -> Result<(), PlanError> {
    let homes: HashSet<_> = pieces.iter().filter_map(|piece| plan.home(*piece)).collect();
    match homes.len() == pieces.len() {
        true => Ok(()),
        false => Err(PlanError::Homes { distinct: homes.len(), pieces: pieces.len() }),
    }
}

fn check_goal(plan: &Plan, code: &Code, goal: Goal<'_>) -> Result<(), PlanError> {
    match goal {
        Goal::Archive => {
            let all: Vec<u8> = (0..code.n() as u8).collect();
            check_homes_are_distinct(plan, &all)?;
            all.iter().try_for_each(|piece| check_piece_is_made(plan, code, *piece))?;
        }
        Goal::Repair(pieces) => {
            check_homes_are_distinct(plan, pieces)?;
            pieces.iter().try_for_each(|piece| check_piece_is_made(plan, code, *piece))?;
            let mut outputs = plan.hops.iter().flat_map(|hop| &hop.outputs);
            let is_other = |output: &&Output| match output {
                Output::Store(piece) => !pieces.contains(piece),
                Output::Deliver(_) => true,
                Output::Stream(_) => false,
            };
            if let Some(output) = outputs.find(is_other) {
                let grains = plan.cut.grains();
                return Err(PlanError::Coverage { output: *output, grains });
            }
            if let Some((piece, _)) = plan.kept.first() {
                let (output, grains) = (Output::Store(*piece), plan.cut.grains());
                return Err(PlanError::Coverage { output, grains });
            }
        }
        Goal::Read(blocks) => {
            for &block in blocks {
                let output = Output::Deliver(block);
                if output_ranges(plan, output).len() != 1 {
                    let grains = plan.cut.grains();
                    return Err(PlanError::Coverage { output, grains });
                }
            }
        }
    }
    Ok(())
}
