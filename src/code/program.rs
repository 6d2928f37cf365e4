//! Straight-line programs: they compute blocks from pieces in a few sparse steps instead of by one
//! dense matrix.
//!
//! Coding is position-wise, so a program runs on any byte range of its pieces. It executes its
//! steps or, where these are not clearly cheaper, the equivalent dense matrix.

pub use crate::gf::{LineStep, Operand};

use super::CodeError;
use crate::gf::{self, Line, Matrix, Mode, field};

/// A program that computes wanted blocks from pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pieces: Vec<usize>,
    steps: Vec<LineStep>,
    outputs: Vec<usize>,
    how: How,
    /// The cost of the steps, and of the equivalent matrix.
    costs: (usize, usize),
}

/// The way in which a program is executed: the steps if they are clearly cheaper, otherwise the
/// matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
enum How {
    Line(Line),
    Dense(Matrix),
}

impl Program {
    /// Returns the program with these steps over the pieces with these numbers; output i is
    /// register `outputs[i]`. Each step must read only pieces and earlier steps, and no register
    /// may be two outputs; otherwise the result is [`CodeError::Defect`].
    pub(super) fn new(
        pieces: Vec<usize>,
        steps: Vec<LineStep>,
        outputs: Vec<usize>,
    ) -> Result<Self, CodeError> {
        let defect = CodeError::Defect { what: "a reconstruction program" };
        let line = Line::new(pieces.len(), &steps, &outputs).ok_or(defect)?;
        let costs = (line.cost(), Line::dense_cost(outputs.len(), pieces.len()));
        // When the costs are close, either way may be faster. The matrix wins then, because its
        // speed does not depend on the program.
        let how = match 10 * costs.0 < 9 * costs.1 || outputs.is_empty() {
            true => How::Line(line),
            false => How::Dense(matrix_of(pieces.len(), &steps, &outputs)?),
        };
        Ok(Self { pieces, steps, outputs, how, costs })
    }

    /// Returns the pieces that the program reads, in the order of its inputs.
    pub fn pieces(&self) -> &[usize] {
        &self.pieces
    }

    /// Returns the steps. Step i computes register i.
    pub fn steps(&self) -> &[LineStep] {
        &self.steps
    }

    /// Returns the register of each wanted block.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }

    /// Returns the number of multiplications of whole blocks in the steps.
    pub fn multiplications(&self) -> usize {
        self.steps.iter().map(LineStep::multiplications).sum()
    }

    /// Returns whether the program executes its steps. Otherwise it executes the equivalent matrix.
    pub fn is_sparse(&self) -> bool {
        matches!(self.how, How::Line(_))
    }

    /// Returns the cost of the steps and of the dense matrix, in products of a vector with a
    /// constant, for one vector of each piece ([`Line::cost`]).
    pub fn costs(&self) -> (usize, usize) {
        self.costs
    }

    /// Returns the matrix that the program computes: a row per wanted block, a column per piece.
    pub fn to_matrix(&self) -> Result<Matrix, CodeError> {
        matrix_of(self.pieces.len(), &self.steps, &self.outputs)
    }

    /// Computes the wanted blocks, or one byte range of them, from the same range of
    /// [`Program::pieces`].
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

/// Computes the equivalent matrix by running the steps on unit vectors.
fn matrix_of(pieces: usize, steps: &[LineStep], outputs: &[usize]) -> Result<Matrix, CodeError> {
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

    fn step(scale: u8, terms: &[(u8, Operand)]) -> LineStep {
        LineStep { scale, terms: terms.to_vec() }
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

    /// The steps are r0 = 2 (3 a + b), r1 = a + 5 b and r2 = r0 + 7 r1; the outputs are r2 and r0.
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
