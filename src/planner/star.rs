//! The star plans: one node, or one per range of grains, gathers the k blocks and computes the n-k
//! parity pieces of the classical code.
//!
//! The first k pieces are one replica of each block, left in place. There are three variants:
//! - *naive* (the paper's baseline): the coder fetches all k blocks, even those it holds, and keeps
//!   one parity piece;
//! - *best*: the coder runs on a node with two blocks, fetches the other blocks and keeps one
//!   parity piece (at (16,11) it receives 9 blocks and sends 4);
//! - *striped*: the coder rotates over ranges of grains.

use super::{PlannerError, Subject};
use crate::code::{Code, Layout};
use crate::plan::{Hop, Input, Output, Plan, StreamNo};

/// The positions that hold the pieces: k systematic ones that stay and n-k parity pieces that are
/// sent.
struct Homes {
    /// For each block j, the position whose replica stays as piece j.
    kept: Vec<usize>,
    /// For each i from 0, the position that stores parity piece k+i.
    parity: Vec<usize>,
}

/// Chooses the positions of all pieces. Each block keeps the replica at its first free holder. The
/// position of `coder`, if given, stays free and stores the first parity piece.
fn homes(layout: Layout, coder: Option<usize>) -> Homes {
    let (n, k) = (layout.n(), layout.k());
    // A block whose first holder is `coder`, or is taken by an earlier block, keeps its second
    // holder.
    let mut taken = vec![false; n];
    if let Some(coder) = coder {
        taken[coder] = true;
    }
    let kept: Vec<usize> = (0..k)
        .map(|block| {
            let home = layout.holders(block).find(|&home| !taken[home]).unwrap_or(block);
            taken[home] = true;
            home
        })
        .collect();
    let mut parity: Vec<usize> = coder.into_iter().collect();
    parity.extend((0..n).filter(|&position| !taken[position]));
    parity.truncate(n - k);
    Homes { kept, parity }
}

struct Builder<'a> {
    subject: Subject<'a>,
    layout: Layout,
    hops: Vec<Hop>,
    next_stream: StreamNo,
}

impl Builder<'_> {
    fn stream(&mut self) -> StreamNo {
        self.next_stream += 1;
        self.next_stream - 1
    }

    /// Adds the hops of a coder at position `at` that computes all parity pieces over `grains`. The
    /// coder reads the blocks in `local` from its own disk and fetches the others.
    fn coder(&mut self, at: usize, homes: &Homes, grains: (u64, u64), local: &[usize]) {
        let (n, k) = (self.subject.code.n(), self.subject.code.k());
        let places = self.subject.places;
        let mut inputs = Vec::with_capacity(k);
        for block in 0..k {
            if local.contains(&block) {
                inputs.push(Input::Block(block as u8));
                continue;
            }
            let stream = self.stream();
            inputs.push(Input::Stream(stream));
            // Read the replica that stays: it is the one that is read back for the proof anyway.
            self.hops.push(Hop {
                node: Some(places[homes.kept[block]]),
                grains,
                inputs: vec![Input::Block(block as u8)],
                outputs: vec![Output::Stream(stream)],
                matrix: vec![vec![1]],
            });
        }
        let mut outputs = Vec::with_capacity(n - k);
        let mut matrix = Vec::with_capacity(n - k);
        for (parity, &home) in homes.parity.iter().enumerate() {
            let piece = (k + parity) as u8;
            matrix.push(self.subject.code.generator().row(k + parity).to_vec());
            if home == at {
                outputs.push(Output::Store(piece));
                continue;
            }
            let stream = self.stream();
            outputs.push(Output::Stream(stream));
            self.hops.push(Hop {
                node: Some(places[home]),
                grains,
                inputs: vec![Input::Stream(stream)],
                outputs: vec![Output::Store(piece)],
                matrix: vec![vec![1]],
            });
        }
        self.hops.push(Hop { node: Some(places[at]), grains, inputs, outputs, matrix });
    }

    fn finish(self, homes: &Homes) -> Plan {
        let Subject { stripe, attempt, cut, places, code } = self.subject;
        let kept = homes.kept.iter().enumerate();
        Plan {
            stripe,
            attempt,
            code: code.id(),
            cut,
            hops: self.hops,
            kept: kept.map(|(piece, &position)| (piece as u8, places[position])).collect(),
        }
    }
}

fn builder<'a>(subject: &Subject<'a>) -> Result<Builder<'a>, PlannerError> {
    let code = subject.code;
    let layout = match (code, Layout::new(code.n(), code.k())) {
        (Code::Rs(_), Ok(layout)) => layout,
        _ => return Err(PlannerError::Code { plan: "star", code: code.name().to_owned() }),
    };
    subject.check_places()?;
    Ok(Builder { subject: *subject, layout, hops: Vec::new(), next_stream: 0 })
}

/// Builds the naive star, the paper's baseline. `coder` is the index of the parity node that codes,
/// from 0, modulo the number of parity nodes. Returns [`PlannerError::Code`] unless the code is
/// classical, and [`PlannerError::Places`] unless the subject has n places.
pub fn naive_star(subject: &Subject<'_>, coder: usize) -> Result<Plan, PlannerError> {
    let mut builder = builder(subject)?;
    let homes = homes(builder.layout, None);
    let at = homes.parity[coder % homes.parity.len()];
    builder.coder(at, &homes, (0, subject.cut.grains()), &[]);
    Ok(builder.finish(&homes))
}

/// Returns the positions on which the coder of a best star may run: those that hold two blocks. If
/// n = 2k, no position holds two, and the first k positions, which hold one each, are returned.
fn coders(layout: Layout) -> Vec<usize> {
    let holding = |count| (0..layout.k()).filter(move |&at| layout.blocks_at(at).count() == count);
    let two: Vec<usize> = holding(2).collect();
    if two.is_empty() { holding(1).collect() } else { two }
}

/// Builds the best star: its coder runs on a node that has two blocks, or one if n = 2k. `coder`
/// chooses among these nodes, from 0, modulo their number. Returns errors as [`naive_star`] does.
pub fn best_star(subject: &Subject<'_>, coder: usize) -> Result<Plan, PlannerError> {
    let mut builder = builder(subject)?;
    let choices = coders(builder.layout);
    let at = choices[coder % choices.len()];
    let homes = homes(builder.layout, Some(at));
    let local: Vec<usize> = builder.layout.blocks_at(at).collect();
    builder.coder(at, &homes, (0, subject.cut.grains()), &local);
    Ok(builder.finish(&homes))
}

/// Builds the striped star: the coder rotates over the positions, with one range of grains for
/// each. Returns errors as [`naive_star`] does.
pub fn striped_star(subject: &Subject<'_>) -> Result<Plan, PlannerError> {
    let mut builder = builder(subject)?;
    let homes = homes(builder.layout, None);
    let grains = subject.cut.grains();
    let parts = (builder.layout.n() as u64).min(grains);
    for part in 0..parts {
        let range = (grains * part / parts, grains * (part + 1) / parts);
        let at = part as usize;
        let local: Vec<usize> = builder.layout.blocks_at(at).collect();
        builder.coder(at, &homes, range, &local);
    }
    Ok(builder.finish(&homes))
}
