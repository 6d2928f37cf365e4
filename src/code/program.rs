//! A straight-line program: how blocks come out of pieces, as a few sparse steps instead of one dense matrix.
//!
//! Coding is position-wise, so a program runs on any byte range of its pieces. It runs tile by tile, with
//! all registers of a tile in the nearest caches, and writes each output once, where it belongs. Where a
//! product is cheaper than loading its operand again, as it is with vector instructions, neighbouring steps
//! run as one small dense pass; the steps say what must be computed, the passes how.

use std::ops::Range;

use super::CodeError;
use crate::gf::{self, GfError, Matrix, Mode, field};

/// Bytes of each register that are worked on at a time: some 30 registers stay within a second-level cache.
pub const TILE_BYTES: usize = 16 * 1024;

/// What a step reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// An input, by its place in [`Program::pieces`].
    Piece(usize),
    /// The result of an earlier step, by its number.
    Register(usize),
}

/// One new register: `scale * sum of coef * operand`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The factor of the whole sum.
    pub scale: u8,
    /// The terms of the sum.
    pub terms: Vec<(u8, Operand)>,
}

impl Step {
    /// How many multiplications it takes: those by 0 and 1 are free.
    fn multiplications(&self) -> usize {
        let factors = self.terms.iter().map(|&(coef, _)| coef).chain([self.scale]);
        factors.filter(|&factor| factor > 1).count()
    }
}

/// How wanted blocks are made of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pieces: Vec<usize>,
    steps: Vec<Step>,
    outputs: Vec<usize>,
    passes: Vec<Pass>,
    /// The registers that exist while it runs, pass by pass: those that a later pass reads, and outputs.
    live: Vec<usize>,
}

/// Neighbouring steps that one pass of the kernel makes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pass {
    /// What it reads; registers by their place among the live ones.
    operands: Vec<Operand>,
    /// A row per live register that it makes.
    matrix: Matrix,
    /// The place of the first register that it makes; the others follow.
    first: usize,
}

impl Program {
    /// The program with these steps over the pieces with these numbers; output i is register `outputs[i]`. Each
    /// step reads pieces and earlier steps only, and no register is two outputs.
    pub(super) fn new(
        pieces: Vec<usize>,
        steps: Vec<Step>,
        outputs: Vec<usize>,
    ) -> Result<Self, CodeError> {
        let is_earlier = |register: usize, operand: Operand| match operand {
            Operand::Piece(piece) => piece < pieces.len(),
            Operand::Register(earlier) => earlier < register,
        };
        for (register, step) in steps.iter().enumerate() {
            if step.terms.is_empty() || !step.terms.iter().all(|&(_, of)| is_earlier(register, of))
            {
                return Err(CodeError::Defect { what: "a reconstruction program" });
            }
        }
        super::check_indices("block", &outputs, steps.len())?;
        let drafts = MERGED_OPERANDS.map(|limit| draft_passes(&steps, &outputs, limit));
        let cost = |passes: &Vec<PassDraft>| passes.iter().map(PassDraft::cost).sum::<usize>();
        let drafts = drafts.into_iter().min_by_key(cost).unwrap_or_default();
        let live: Vec<usize> =
            drafts.iter().flat_map(|draft| &draft.rows).map(|&(register, _)| register).collect();
        let passes =
            drafts.into_iter().map(|draft| draft.finish(&live)).collect::<Result<_, _>>()?;
        Ok(Self { pieces, steps, outputs, passes, live })
    }

    /// The pieces that it reads, in the order of its inputs.
    pub fn pieces(&self) -> &[usize] {
        &self.pieces
    }

    /// Its steps; step i makes register i.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The register of each wanted block.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }

    /// How many multiplications of whole blocks it takes.
    pub fn multiplications(&self) -> usize {
        self.steps.iter().map(Step::multiplications).sum()
    }

    /// The most bytes that [`Program::run`] needs as scratch.
    pub fn scratch_bytes(&self) -> usize {
        (self.live.len() - self.outputs.len()) * TILE_BYTES
    }

    /// What the program computes, from a run on unit vectors: a row per wanted block, a column per piece.
    pub fn to_matrix(&self) -> Result<Matrix, CodeError> {
        let mut registers: Vec<Vec<u8>> = Vec::new();
        for step in &self.steps {
            let mut row = vec![0; self.pieces.len()];
            for &(coef, operand) in &step.terms {
                let coef = field::mul(step.scale, coef);
                match operand {
                    Operand::Piece(piece) => row[piece] ^= coef,
                    Operand::Register(earlier) => {
                        gf::add_scaled(&mut row, coef, &registers[earlier])
                    }
                }
            }
            registers.push(row);
        }
        let rows: Vec<&[u8]> = self.outputs.iter().map(|&out| registers[out].as_slice()).collect();
        Ok(Matrix::from_rows(&rows)?)
    }

    /// Makes the wanted blocks, or one byte range of them, from the same range of [`Program::pieces`]. `scratch`
    /// grows to at most [`Program::scratch_bytes`] and can be used again.
    pub fn run(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        scratch: &mut Vec<u8>,
    ) -> Result<(), CodeError> {
        let bytes = self.check(inputs, outputs)?;
        let tile = bytes.clamp(1, TILE_BYTES);
        let inner = self.live.len() - self.outputs.len();
        if scratch.len() < inner * tile {
            scratch.resize(inner * tile, 0);
        }
        for start in (0..bytes).step_by(tile) {
            let range = start..bytes.min(start + tile);
            let mut registers = self.registers(outputs, scratch, &range, tile)?;
            for pass in &self.passes {
                let (done, rest) = registers.split_at_mut(pass.first);
                let operand = |operand: &Operand| match *operand {
                    Operand::Piece(piece) => &inputs[piece][range.clone()],
                    Operand::Register(place) => &*done[place],
                };
                let operands: Vec<&[u8]> = pass.operands.iter().map(operand).collect();
                let targets = &mut rest[..pass.matrix.rows()];
                gf::apply(&pass.matrix, &operands, targets, Mode::Overwrite)?;
            }
        }
        Ok(())
    }

    /// The memory of each live register for one range: part of an output, or scratch.
    fn registers<'a>(
        &self,
        outputs: &'a mut [&mut [u8]],
        scratch: &'a mut [u8],
        range: &Range<usize>,
        tile: usize,
    ) -> Result<Vec<&'a mut [u8]>, CodeError> {
        let mut outputs: Vec<Option<&mut [u8]>> =
            outputs.iter_mut().map(|output| Some(&mut output[range.clone()])).collect();
        let mut tiles = scratch.chunks_exact_mut(tile).map(|tile| &mut tile[..range.len()]);
        let memory = self.live.iter().map(|register| {
            match self.outputs.iter().position(|output| output == register) {
                Some(output) => outputs[output].take(),
                None => tiles.next(),
            }
        });
        memory.collect::<Option<_>>().ok_or(CodeError::Defect { what: "scratch of a program" })
    }

    /// The common length of all buffers, if their numbers fit.
    fn check(&self, inputs: &[&[u8]], outputs: &[&mut [u8]]) -> Result<usize, GfError> {
        let counts = [
            ("pieces for a program", self.pieces.len(), inputs.len()),
            ("blocks of a program", self.outputs.len(), outputs.len()),
        ];
        if let Some(&(what, expected, actual)) = counts.iter().find(|count| count.1 != count.2) {
            return Err(GfError::Count { what, expected, actual });
        }
        let expected = inputs.first().map_or(0, |input| input.len());
        let inputs = inputs.iter().map(|input| ("input", input.len())).enumerate();
        let outputs = outputs.iter().map(|output| ("output", output.len())).enumerate();
        for (index, (side, actual)) in inputs.chain(outputs) {
            if actual != expected {
                return Err(GfError::Length { side, index, expected, actual });
            }
        }
        Ok(expected)
    }
}

/// Operands of a pass up to which steps that read each other are merged. Merging saves loads and stores and costs
/// products; of these limits, the last of which makes one dense matrix, the cheapest is taken.
const MERGED_OPERANDS: [usize; 3] = [5, 8, usize::MAX];

/// A pass while steps are still added to it.
struct PassDraft {
    operands: Vec<Operand>,
    /// The registers that it makes, and their coefficients per operand; shorter ones end in zeros.
    rows: Vec<(usize, Vec<u8>)>,
}

/// Cuts the steps into passes. A step joins the pass before it when it reads something that the pass loads, or
/// when what it reads of the pass's own results can be computed anew from at most `limit` operands.
fn draft_passes(steps: &[Step], outputs: &[usize], limit: usize) -> Vec<PassDraft> {
    let mut passes: Vec<PassDraft> = Vec::new();
    for (register, step) in steps.iter().enumerate() {
        if !passes.last_mut().is_some_and(|pass| pass.join(register, step, limit)) {
            let mut pass = PassDraft { operands: Vec::new(), rows: Vec::new() };
            pass.add(register, step);
            passes.push(pass);
        }
    }
    // Registers that only their own pass read are computed within it, and kept nowhere.
    let mut live: Vec<usize> = outputs.to_vec();
    for pass in passes.iter_mut().rev() {
        pass.rows.retain(|(register, _)| live.contains(register));
        live.extend(pass.operands.iter().filter_map(|operand| match operand {
            Operand::Register(register) => Some(register),
            Operand::Piece(_) => None,
        }));
    }
    passes.retain(|pass| !pass.rows.is_empty());
    passes
}

impl PassDraft {
    fn row_of(&self, operand: Operand) -> Option<&[u8]> {
        let row = self.rows.iter().find(|(register, _)| operand == Operand::Register(*register));
        row.map(|(_, row)| row.as_slice())
    }

    /// What it costs, in halves of a product of a vector: a load or store takes five, measured with AVX-512.
    fn cost(&self) -> usize {
        let (operands, rows) = (self.operands.len(), self.rows.len());
        2 * operands * rows + 5 * (operands + rows)
    }

    /// Adds the step if it fits.
    fn join(&mut self, register: usize, step: &Step, limit: usize) -> bool {
        let reads = || step.terms.iter().map(|&(_, operand)| operand);
        let is_new =
            |operand: &Operand| self.row_of(*operand).is_none() && !self.operands.contains(operand);
        let fits = if reads().any(|operand| self.row_of(operand).is_some()) {
            self.operands.len() + reads().filter(is_new).count() <= limit
        } else {
            reads().any(|operand| self.operands.contains(&operand))
        };
        if fits {
            self.add(register, step);
        }
        fits
    }

    /// Adds the step, with results of this pass replaced by what they are made of.
    fn add(&mut self, register: usize, step: &Step) {
        let mut row = vec![0; self.operands.len()];
        for &(coef, operand) in &step.terms {
            let coef = field::mul(step.scale, coef);
            if let Some(made_of) = self.row_of(operand) {
                gf::add_scaled(&mut row, coef, made_of);
            } else if let Some(column) = self.operands.iter().position(|&other| other == operand) {
                row[column] ^= coef;
            } else {
                self.operands.push(operand);
                row.push(coef);
            }
        }
        self.rows.push((register, row));
    }

    fn finish(self, live: &[usize]) -> Result<Pass, CodeError> {
        let place_of = |register| live.iter().position(|&other| other == register);
        let place = |operand| match operand {
            Operand::Register(register) => place_of(register).map(Operand::Register),
            piece => Some(piece),
        };
        let first = self.rows.first().and_then(|&(register, _)| place_of(register));
        let operands: Option<Vec<Operand>> = self.operands.iter().copied().map(place).collect();
        let defect = CodeError::Defect { what: "a pass of a program" };
        let mut matrix = Matrix::zero(self.rows.len(), self.operands.len())?;
        for (target, (_, row)) in self.rows.iter().enumerate() {
            gf::add_scaled(matrix.row_mut(target), 1, row);
        }
        Ok(Pass { operands: operands.ok_or(defect.clone())?, matrix, first: first.ok_or(defect)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Operand::{Piece, Register};

    fn step(scale: u8, terms: &[(u8, Operand)]) -> Step {
        Step { scale, terms: terms.to_vec() }
    }

    /// r0 = 2 (3 a + b), r1 = a + 5 b, r2 = r0 + 7 r1, of which r2 and r0 are wanted.
    fn sample() -> Program {
        let steps = vec![
            step(2, &[(3, Piece(0)), (1, Piece(1))]),
            step(1, &[(1, Piece(0)), (5, Piece(1))]),
            step(1, &[(1, Register(0)), (7, Register(1))]),
        ];
        Program::new(vec![4, 9], steps, vec![2, 0]).unwrap()
    }

    #[test]
    fn a_run_on_bytes_is_the_symbolic_run() {
        let program = sample();
        assert_eq!((program.multiplications(), program.passes.len()), (4, 1));
        let matrix = program.to_matrix().unwrap();
        let m = field::mul;
        let expected = [m(2, 3) ^ 7, 2 ^ m(7, 5), m(2, 3), 2];
        assert_eq!(matrix, Matrix::new(2, 2, expected.to_vec()).unwrap());
        let mut scratch = Vec::new();
        for len in [0, 1, TILE_BYTES - 1, TILE_BYTES, 3 * TILE_BYTES + 5] {
            let a: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let b: Vec<u8> = (0..len).map(|i| (i % 239) as u8).collect();
            let (mut x, mut y) = (vec![0; len], vec![0; len]);
            program.run(&[&a, &b], &mut [&mut x, &mut y], &mut scratch).unwrap();
            for t in 0..len {
                assert_eq!(x[t], m(expected[0], a[t]) ^ m(expected[1], b[t]));
                assert_eq!(y[t], m(expected[2], a[t]) ^ m(expected[3], b[t]));
            }
            assert!(scratch.len() <= program.scratch_bytes());
        }
    }

    #[test]
    fn wrong_buffers_are_refused() {
        let (program, mut scratch) = (sample(), Vec::new());
        let (a, mut x, mut y) = ([0; 4], [0; 4], [0; 3]);
        assert!(program.run(&[&a], &mut [&mut x, &mut [0; 4]], &mut scratch).is_err());
        assert!(program.run(&[&a, &a], &mut [&mut x], &mut scratch).is_err());
        assert!(program.run(&[&a, &a], &mut [&mut x, &mut y], &mut scratch).is_err());
    }

    #[test]
    fn programs_that_read_ahead_are_refused() {
        for bad in [Register(0), Register(1), Piece(1)] {
            assert!(Program::new(vec![0], vec![step(1, &[(1, bad)])], vec![0]).is_err());
        }
        let good = vec![step(1, &[(1, Piece(0))])];
        assert!(Program::new(vec![0], good.clone(), vec![1]).is_err());
        assert!(Program::new(vec![0], good, vec![0, 0]).is_err());
        assert!(Program::new(vec![0], vec![step(1, &[])], vec![0]).is_err());
    }
}
