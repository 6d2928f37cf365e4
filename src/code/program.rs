//! A straight-line program: how blocks come out of pieces, as a few sparse steps instead of one dense matrix.
//!
//! Coding is position-wise, so a program runs on any byte range of its pieces. It runs tile by tile, with
//! all registers of a tile in the nearest caches, and writes each output once, where it belongs.

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
}

/// Neighbouring steps that read the same operands and not each other: one pass of the kernel makes them all.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pass {
    operands: Vec<Operand>,
    /// A row per step.
    matrix: Matrix,
    /// The registers that it makes, which follow each other.
    registers: Range<usize>,
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
        let passes = passes(&steps)?;
        Ok(Self { pieces, steps, outputs, passes })
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
        (self.steps.len() - self.outputs.len()) * TILE_BYTES
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
        let tile = bytes.min(TILE_BYTES).max(1);
        let inner = self.steps.len() - self.outputs.len();
        if scratch.len() < inner * tile {
            scratch.resize(inner * tile, 0);
        }
        for start in (0..bytes).step_by(tile) {
            let range = start..bytes.min(start + tile);
            let mut registers = self.registers(outputs, scratch, &range, tile)?;
            for pass in &self.passes {
                let (done, rest) = registers.split_at_mut(pass.registers.start);
                let operand = |operand: &Operand| match *operand {
                    Operand::Piece(piece) => &inputs[piece][range.clone()],
                    Operand::Register(register) => &*done[register],
                };
                let operands: Vec<&[u8]> = pass.operands.iter().map(operand).collect();
                let targets = &mut rest[..pass.registers.len()];
                gf::apply(&pass.matrix, &operands, targets, Mode::Overwrite)?;
            }
        }
        Ok(())
    }

    /// The memory of each register for one range: part of an output, or scratch.
    fn registers<'a>(
        &self,
        outputs: &'a mut [&mut [u8]],
        scratch: &'a mut [u8],
        range: &Range<usize>,
        tile: usize,
    ) -> Result<Vec<&'a mut [u8]>, CodeError> {
        let mut registers: Vec<Option<&mut [u8]>> = Vec::new();
        registers.resize_with(self.steps.len(), || None);
        for (&register, output) in self.outputs.iter().zip(outputs) {
            registers[register] = Some(&mut output[range.clone()]);
        }
        let mut tiles = scratch.chunks_exact_mut(tile).map(|tile| &mut tile[..range.len()]);
        let memory = registers.into_iter().map(|register| register.or_else(|| tiles.next()));
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

/// Puts neighbouring steps into one pass where that saves loads: no step reads another of its pass, and they
/// share operands.
fn passes(steps: &[Step]) -> Result<Vec<Pass>, CodeError> {
    let mut groups: Vec<(Range<usize>, Vec<Operand>)> = Vec::new();
    for (register, step) in steps.iter().enumerate() {
        let reads = |operand: &Operand| step.terms.iter().any(|(_, other)| other == operand);
        if let Some((registers, operands)) = groups.last_mut() {
            let is_free = !registers.clone().any(|earlier| reads(&Operand::Register(earlier)));
            if is_free && operands.iter().any(reads) {
                let new = step.terms.iter().map(|&(_, operand)| operand);
                let new: Vec<Operand> = new.filter(|operand| !operands.contains(operand)).collect();
                operands.extend(new);
                registers.end = register + 1;
                continue;
            }
        }
        let operands = step.terms.iter().map(|&(_, operand)| operand).collect();
        groups.push((register..register + 1, operands));
    }
    groups.into_iter().map(|(registers, operands)| pass(steps, registers, operands)).collect()
}

fn pass(
    steps: &[Step],
    registers: Range<usize>,
    operands: Vec<Operand>,
) -> Result<Pass, CodeError> {
    let mut matrix = Matrix::zero(registers.len(), operands.len())?;
    for (row, step) in steps[registers.clone()].iter().enumerate() {
        for &(coef, operand) in &step.terms {
            let column = operands.iter().position(|&other| other == operand);
            if let Some(entry) = column.and_then(|column| matrix.row_mut(row).get_mut(column)) {
                *entry ^= field::mul(step.scale, coef);
            }
        }
    }
    Ok(Pass { operands, matrix, registers })
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
        assert_eq!((program.multiplications(), program.passes.len()), (4, 2));
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
