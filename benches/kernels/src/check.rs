//! Checks of contestants: before a contestant is timed, its output is compared with that of the
//! portable kernel.

use std::ops::Range;

use anyhow::{Result, ensure};
use rapidraid::gf::{Kernel, Matrix, Mode};

use crate::harness::Run;
use crate::lanes::Lanes;

/// Bytes that are compared at both ends and in the middle of long buffers.
const WINDOW_BYTES: usize = 64 << 10;
/// The content of outputs before the work is done.
const UNTOUCHED: u8 = 0x5a;

/// A check that inspects the buffers itself and returns an error if they are wrong.
pub type OwnCheck<'a> = Box<dyn Fn(&mut Lanes<'_>) -> Result<()> + 'a>;

/// The result that a contestant must produce.
pub enum Check<'a> {
    /// The first outputs are this matrix applied to the first inputs.
    Outputs(Matrix),
    /// As `Outputs`, but the stream is both the first input and the first output.
    InPlace(Matrix),
    /// A check of the contestant's own.
    Own(OwnCheck<'a>),
}

impl Check<'_> {
    /// Does the work once and checks its result.
    pub fn run(&self, run: &mut Run<'_>, lanes: &mut Lanes<'_>) -> Result<()> {
        let matrix = match self {
            Check::Own(check) => return check(lanes),
            Check::Outputs(matrix) | Check::InPlace(matrix) => matrix,
        };
        let in_place = matches!(self, Check::InPlace(_));
        lanes.outputs.iter_mut().for_each(|output| output.fill(UNTOUCHED));
        lanes.stream.copy_from_slice(lanes.inputs[0]);
        run(lanes, 1)?;
        for window in windows(lanes.bytes()) {
            let expected = expected(matrix, lanes, window.clone())?;
            for (row, expected) in expected.iter().enumerate() {
                let got: &[u8] = match row.checked_sub(usize::from(in_place)) {
                    Some(output) => &lanes.outputs[output][window.clone()],
                    None => &lanes.stream[window.clone()],
                };
                let at = got.iter().zip(expected).position(|(got, expected)| got != expected);
                ensure!(at.is_none(), "output {row} is wrong at byte {:?} of {window:?}", at);
            }
        }
        Ok(())
    }
}

fn expected(matrix: &Matrix, lanes: &Lanes<'_>, window: Range<usize>) -> Result<Vec<Vec<u8>>> {
    let portable = Kernel::named("portable")?;
    let inputs: Vec<&[u8]> =
        lanes.inputs[..matrix.cols()].iter().map(|input| &input[window.clone()]).collect();
    let mut expected = vec![vec![0; window.len()]; matrix.rows()];
    let mut outputs: Vec<&mut [u8]> = expected.iter_mut().map(Vec::as_mut_slice).collect();
    portable.apply(matrix, &inputs, &mut outputs, Mode::Overwrite)?;
    Ok(expected)
}

fn windows(bytes: usize) -> Vec<Range<usize>> {
    if bytes <= 3 * WINDOW_BYTES {
        return std::iter::once(0..bytes).collect();
    }
    [0, (bytes - WINDOW_BYTES) / 2, bytes - WINDOW_BYTES].map(|at| at..at + WINDOW_BYTES).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::memory::Arena;

    #[test]
    fn wrong_bytes_are_seen() {
        let bytes = 1 << 20;
        let mut arena = Arena::new(Lanes::count(2, 2), bytes).unwrap();
        let mut lanes = Lanes::new(&mut arena, 2, 2, bytes).unwrap();
        let sum = Matrix::from_rows(&[[1, 1]]).unwrap();
        for (flip, is_right) in [(bytes, true), (0, false), (bytes / 2, false), (bytes - 1, false)]
        {
            let mut run: Run<'_> = Box::new(move |lanes, _| {
                let (inputs, output) = (&lanes.inputs, &mut lanes.outputs[0]);
                for t in 0..bytes {
                    output[t] = inputs[0][t] ^ inputs[1][t] ^ u8::from(t == flip);
                }
                Ok(())
            });
            let outcome = Check::Outputs(sum.clone()).run(&mut run, &mut lanes);
            assert_eq!(outcome.is_ok(), is_right, "{flip}");
        }
        let mut idle: Run<'_> = Box::new(|_, _| Ok(()));
        assert!(Check::InPlace(sum).run(&mut idle, &mut lanes).is_err());
    }
}
