//! Eleven blocks from eleven pieces: with a dense matrix, as for any code, and with the sparse
//! program of a chain code.

use anyhow::{Context, Result};
use rapidraid::code::{Code, Program, reconstruct, table};
use rapidraid::gf::Kernel;

use super::{
    Cast, Planned, Shape, applied, applied_at, by_isal_both, copies, dense_matrix, suited,
};
use crate::check::Check;
use crate::harness::{Contestant, Role, Run};
use crate::lanes::Place;

pub const RECONSTRUCT: &str = "Eleven blocks from eleven pieces";
pub const ANY_FIVE: &str = "Eleven blocks with any five of sixteen pieces missing";

const PIECES: usize = 16;
const BLOCKS: usize = 11;

/// The missing ones of the chain's first eleven pieces, fewest first; later pieces replace them.
const MISSING: [&[usize]; 4] = [&[], &[5], &[2, 5, 8], &[1, 3, 5, 7, 9]];

/// Returns the name of the row for the program with `missing` of the first pieces missing.
pub fn sparse_of(missing: usize) -> String {
    match missing {
        0 => "rapidraid, program, the first eleven pieces".to_owned(),
        _ => format!("rapidraid, program, {missing} of the first pieces missing"),
    }
}

/// Returns the name of the row for the dense matrix of the same pieces.
pub fn dense_of(missing: usize) -> String {
    sparse_of(missing).replace("program", "dense")
}

pub fn planned() -> Vec<Planned> {
    let shape = Shape { inputs: BLOCKS, outputs: BLOCKS, cache_bytes: 32 << 10 };
    let planned =
        |question, place, make| Planned { question, place, shape, make, counted_buffers: BLOCKS };
    vec![
        planned(RECONSTRUCT, Place::Cache, make),
        planned(RECONSTRUCT, Place::Memory, make),
        planned(ANY_FIVE, Place::Cache, any_five),
    ]
}

fn make(cast: &Cast, place: Place) -> Result<Vec<Contestant<'static>>> {
    let matrix = dense_matrix(BLOCKS, BLOCKS)?;
    let mut contestants = copies::contestants(BLOCKS, place)?;
    for kernel in Kernel::available() {
        contestants.extend(applied_at(kernel, &matrix, place));
    }
    for isal in &cast.isal {
        contestants.extend(by_isal_both(isal, &matrix));
    }
    for missing in MISSING {
        let available: Vec<usize> =
            (0..BLOCKS + missing.len()).filter(|piece| !missing.contains(piece)).collect();
        let names = (sparse_of(missing.len()), dense_of(missing.len()));
        contestants.extend(pair(cast.kernel, &available, names, place)?);
    }
    Ok(contestants)
}

/// Returns the program for these pieces, and the program's matrix applied densely.
fn pair(
    kernel: Kernel,
    available: &[usize],
    (sparse, dense): (String, String),
    place: Place,
) -> Result<[Contestant<'static>; 2]> {
    let program = program(available)?;
    let matrix = program.to_matrix()?;
    let check = Check::Outputs(matrix.clone());
    let mode = suited(kernel, place).0;
    let dense = applied(dense, kernel, &matrix, mode);
    let inputs = matrix.cols();
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let (inputs, outputs) = (&lanes.inputs[..inputs], &mut lanes.outputs[..BLOCKS]);
        (0..repetitions).try_for_each(|_| program.run(inputs, outputs, mode))?;
        Ok(())
    });
    Ok([Contestant { name: sparse, role: Role::Ours, check, run }, dense])
}

fn any_five(cast: &Cast, place: Place) -> Result<Vec<Contestant<'static>>> {
    let all: Vec<Vec<usize>> = (0..1_u32 << PIECES)
        .filter(|mask| mask.count_ones() as usize == BLOCKS)
        .map(|mask| (0..PIECES).filter(|piece| mask >> piece & 1 == 1).collect())
        .collect();
    let mut contestants = Vec::new();
    // The draws are spread evenly over all sets and include the first and the last.
    for draw in 0..cast.draws {
        let available = &all[draw * (all.len() - 1) / (cast.draws - 1).max(1)];
        let missing: Vec<String> = (0..PIECES)
            .filter(|piece| !available.contains(piece))
            .map(|piece| (piece + 1).to_string())
            .collect();
        let missing = missing.join(" ");
        let names = (format!("program without {missing}"), format!("dense without {missing}"));
        contestants.extend(pair(cast.kernel, available, names, place)?);
    }
    Ok(contestants)
}

fn program(available: &[usize]) -> Result<Program> {
    let code =
        table::find(PIECES, BLOCKS).context("there is no chain code of 16 pieces, 11 blocks")?;
    Ok(reconstruct(&Code::Chain(code.clone()), available, &Vec::from_iter(0..BLOCKS))?)
}

/// Returns how many times fewer multiplications the program needs for the first eleven pieces than
/// the kernel does with the dense matrix. The kernel multiplies by the zeros and ones of a matrix
/// as by any other coefficient.
pub fn fewer_multiplications() -> Result<f64> {
    let program = program(&Vec::from_iter(0..BLOCKS))?;
    let matrix = program.to_matrix()?;
    Ok((matrix.rows() * matrix.cols()) as f64 / program.multiplications() as f64)
}
