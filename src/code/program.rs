//! A straight-line program: how blocks come out of pieces, as a few sparse steps instead of one dense matrix.
//!
//! Coding is position-wise, so a program runs on any byte range of its pieces. It runs as its steps say, or, where these are not cheaper, as
//! the dense matrix that they come to.

pub use crate::gf::{Operand, Step};

use super::CodeError;
use crate::gf::{self, Line, Matrix, Mode, field};

/// How wanted blocks are made of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pieces: Vec<usize>,
    steps: Vec<Step>,
    outputs: Vec<usize>,
    how: How,
    /// What its steps cost, and what the matrix.
    costs: (usize, usize),
}

/// How a program runs: whichever is cheaper.
#[derive(Debug, Clone, PartialEq, Eq)]
enum How {
    Line(Line),
    Dense(Matrix),
}

impl Program {
    /// The program with these steps over the pieces with these numbers; output i is register `outputs[i]`. Each
    /// step reads pieces and earlier steps only, and no register is two outputs.
    pub(super) fn new(
        pieces: Vec<usize>,
        steps: Vec<Step>,
        outputs: Vec<usize>,
    ) -> Result<Self, CodeError> {
        let defect = CodeError::Defect { what: "a reconstruction program" };
        let line = Line::new(pieces.len(), &steps, &outputs).ok_or(defect)?;
        let costs = (line.cost(), Line::dense_cost(outputs.len(), pieces.len()));
        // Near the middle either may be faster: the matrix, whose speed depends on nothing, has it then.
        let how = match 10 * costs.0 < 9 * costs.1 || outputs.is_empty() {
            true => How::Line(line),
            false => How::Dense(matrix_of(pieces.len(), &steps, &outputs)?),
        };
        Ok(Self { pieces, steps, outputs, how, costs })
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

    /// How many multiplications of whole blocks its steps take.
    pub fn multiplications(&self) -> usize {
        self.steps.iter().map(Step::multiplications).sum()
    }

    /// Whether it runs as its steps say; otherwise as the matrix that they come to.
    pub fn is_sparse(&self) -> bool {
        matches!(self.how, How::Line(_))
    }

    /// What its steps cost, and what the dense matrix: products of a vector with a constant, for a vector of each piece ([`Line::cost`]).
    pub fn costs(&self) -> (usize, usize) {
        self.costs
    }

    /// What the program computes: a row per wanted block, a column per piece.
    pub fn to_matrix(&self) -> Result<Matrix, CodeError> {
        matrix_of(self.pieces.len(), &self.steps, &self.outputs)
    }

    /// Makes the wanted blocks, or one byte range of them, from the same range of [`Program::pieces`].
    pub fn run(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    ) -> Result<(), CodeError> {
        match &self.how {
            How::Line(line) => gf::run(line, inputs, outputs, mode)?,
            How::Dense(matrix) => gf::apply(matrix, inputs, outputs, mode)?,
        }
        Ok(())
    }
}

/// From a run on unit vectors.
fn matrix_of(pieces: usize, steps: &[Step], outputs: &[usize]) -> Result<Matrix, CodeError> {
    let mut registers: Vec<Vec<u8>> = Vec::new();
    for step in steps {
        let mut row = vec![0; pieces];
        for &(coef, operand) in &step.terms {
            let coef = field::mul(step.scale, coef);
            match operand {
                Operand::Input(piece) => row[piece] ^= coef,
                Operand::Register(earlier) => gf::add_scaled(&mut row, coef, &registers[earlier]),
            }
        }
        registers.push(row);
    }
    let rows: Vec<&[u8]> = outputs.iter().map(|&out| registers[out].as_slice()).collect();
    Ok(Matrix::from_rows(&rows)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Operand::{Input, Register};

    fn step(scale: u8, terms: &[(u8, Operand)]) -> Step {
        Step { scale, terms: terms.to_vec() }
    }

    #[test]
    fn programs_that_read_ahead_are_refused() {
        for bad in [Register(0), Register(1), Input(1)] {
            assert!(Program::new(vec![0], vec![step(1, &[(1, bad)])], vec![0]).is_err());
        }
        let good = vec![step(1, &[(1, Input(0))])];
        assert!(Program::new(vec![0], good.clone(), vec![1]).is_err());
        assert!(Program::new(vec![0], good.clone(), vec![0, 0]).is_err());
        assert!(Program::new(vec![0], vec![step(1, &[])], vec![0]).is_err());
        assert!(Program::new(vec![0], good, vec![0]).is_ok());
    }

    /// r0 = 2 (3 a + b), r1 = a + 5 b, r2 = r0 + 7 r1, of which r2 and r0 are wanted.
    #[test]
    fn the_matrix_is_what_the_steps_come_to() {
        let steps = vec![
            step(2, &[(3, Input(0)), (1, Input(1))]),
            step(1, &[(1, Input(0)), (5, Input(1))]),
            step(1, &[(1, Register(0)), (7, Register(1))]),
        ];
        let program = Program::new(vec![4, 9], steps, vec![2, 0]).unwrap();
        assert_eq!(program.multiplications(), 4);
        let m = field::mul;
        let expected = [m(2, 3) ^ 7, 2 ^ m(7, 5), m(2, 3), 2];
        assert_eq!(program.to_matrix().unwrap(), Matrix::new(2, 2, expected.to_vec()).unwrap());
        let (mut x, mut y) = ([0], [0]);
        program.run(&[&[9], &[4]], &mut [&mut x, &mut y], Mode::Overwrite).unwrap();
        let of = |row: &[u8]| m(row[0], 9) ^ m(row[1], 4);
        assert_eq!([x[0], y[0]], [of(&expected[..2]), of(&expected[2..])]);
    }
}
