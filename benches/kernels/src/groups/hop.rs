//! The computation of a hop. From the incoming stream x and the local blocks o it computes
//!
//! ```text
//! x' = x + sum psi o     forwarded
//! c  = x + sum xi  o     stored
//! ```

use std::hint::black_box;

use anyhow::Result;
use rapidraid::gf::{Kernel, Matrix, Matrix16, Mode, field};
use reed_solomon_erasure::galois_8 as plain;
use reed_solomon_erasure_simd::galois_8 as simd;

use super::{Cast, Planned, Shape, applied_at, by_isal, copies, ours_in_place, ours_wide, suited};
use crate::check::Check;
use crate::harness::{Contestant, Role, Run};
use crate::lanes::Place;
use crate::raw::floor::{self, Stores};

/// The questions for one and for two local blocks.
pub const HOP: [&str; 2] = ["A hop with one local block", "A hop with two local blocks"];
pub const FLOOR: &str = "XOR-only loop over the same streams";
pub const FLOOR_PAST_CACHES: &str = "XOR-only loop, stores past the caches";
pub const RS_ERASURE: &str = "reed-solomon-erasure 6, passes";
pub const RS_ERASURE_SIMD: &str = "reed-solomon-erasure 5 with simd-accel, passes";

pub fn planned() -> Vec<Planned> {
    let mut planned = Vec::new();
    for (question, locals) in HOP.into_iter().zip(1..) {
        for place in [Place::Cache, Place::Memory] {
            let make = if locals == 1 { make::<2> } else { make::<3> };
            let shape = Shape { inputs: locals + 1, outputs: 2, cache_bytes: 64 << 10 };
            planned.push(Planned { question, place, shape, make, counted_buffers: 1 });
        }
    }
    planned
}

/// Returns the matrix of a hop. Both outputs contain the incoming stream unchanged.
pub fn matrix(locals: usize) -> Result<Matrix> {
    let row =
        |first: usize| (0..=locals).map(move |i| if i == 0 { 1 } else { field::exp(first + i) });
    let rows: [Vec<u8>; 2] = [row(100).collect(), row(200).collect()];
    Ok(Matrix::from_rows(&rows)?)
}

/// Returns the contestants of a hop. `I` is the number of local blocks plus one.
fn make<const I: usize>(cast: &Cast, place: Place) -> Result<Vec<Contestant<'static>>> {
    let matrix = matrix(I - 1)?;
    let mut contestants = copies::contestants(1, place)?;
    contestants.push(floor_of::<I>(FLOOR, Stores::Plain)?);
    if place == Place::Memory && floor::has_non_temporal() {
        contestants.push(floor_of::<I>(FLOOR_PAST_CACHES, Stores::NonTemporal)?);
    }
    for kernel in Kernel::available() {
        contestants.extend(applied_at(kernel, &matrix, place));
    }
    contestants.push(in_place(cast.kernel, &matrix));
    contestants.push(wide(cast.kernel, I - 1, place)?);
    contestants.extend(cast.isal.iter().map(|isal| by_isal(isal, &matrix, None)));
    contestants.push(passes(RS_ERASURE, &matrix, plain::mul_slice_xor));
    if crate::has_simd_accel() {
        contestants.push(passes(RS_ERASURE_SIMD, &matrix, simd::mul_slice_xor));
    }
    Ok(contestants)
}

fn floor_of<const I: usize>(name: &str, stores: Stores) -> Result<Contestant<'static>> {
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let inputs = std::array::from_fn::<&[u8], I, _>(|input| lanes.inputs[input]);
        let [first, second, ..] = &mut lanes.outputs[..] else { return Ok(()) };
        for _ in 0..repetitions {
            floor::xor(black_box(inputs), [&mut **first, &mut **second], stores);
        }
        Ok(())
    });
    let check = Check::Outputs(Matrix::from_rows(&[[1; I]; 2])?);
    Ok(Contestant { name: name.to_owned(), role: Role::Floor, check, run })
}

fn in_place(kernel: Kernel, matrix: &Matrix) -> Contestant<'static> {
    let (check, matrix) = (Check::InPlace(matrix.clone()), matrix.clone());
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let locals = &lanes.inputs[1..matrix.cols()];
        let [stored, ..] = &mut lanes.outputs[..] else { return Ok(()) };
        for _ in 0..repetitions {
            let streams = &mut [&mut *lanes.stream];
            kernel.apply_in_place(&matrix, streams, locals, &mut [&mut **stored])?;
        }
        Ok(())
    });
    Contestant { name: ours_in_place(kernel), role: Role::Ours, check, run }
}

/// Returns the same hop over GF(2^16). The coefficients are in no smaller field.
fn wide(kernel: Kernel, locals: usize, place: Place) -> Result<Contestant<'static>> {
    let row = |seed: u8| {
        let others =
            (1..=locals as u8).map(move |i| [seed.wrapping_mul(2 * i + 1), seed.wrapping_add(i)]);
        std::iter::once([1, 0]).chain(others)
    };
    let entries = row(0x35).chain(row(0x67)).collect();
    let matrix = Matrix16::new(2, locals + 1, entries)?;
    let (mode, copy) = (suited(kernel, place).0, matrix.clone());
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let (inputs, outputs) = (&lanes.inputs[..=locals], &mut lanes.outputs[..2]);
        (0..repetitions).try_for_each(|_| kernel.apply16(&matrix, inputs, outputs, mode))?;
        Ok(())
    });
    // The expected bytes are those of the portable kernel.
    let check = Check::Own(Box::new(move |lanes| {
        let bytes = lanes.bytes().min(64 << 10);
        let inputs: Vec<&[u8]> =
            lanes.inputs[..=locals].iter().map(|input| &input[..bytes]).collect();
        let mut made = Vec::new();
        for kernel in [Kernel::named("portable")?, kernel] {
            let mut outputs = vec![vec![0; bytes]; 2];
            let mut views: Vec<&mut [u8]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
            kernel.apply16(&copy, &inputs, &mut views, Mode::Overwrite)?;
            made.push(outputs);
        }
        anyhow::ensure!(made[0] == made[1], "GF(2^16) differs from the portable kernel");
        Ok(())
    }));
    Ok(Contestant { name: ours_wide(kernel), role: Role::Ours, check, run })
}

/// Returns a hop that uses functions which multiply one slice: two copies, then one pass for each
/// coefficient other than the ones of the incoming stream.
fn passes(
    name: &str,
    matrix: &Matrix,
    mul_slice_xor: fn(u8, &[u8], &mut [u8]),
) -> Contestant<'static> {
    let (check, matrix) = (Check::Outputs(matrix.clone()), matrix.clone());
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        for _ in 0..repetitions {
            for (row, output) in matrix.iter().zip(&mut lanes.outputs) {
                output.copy_from_slice(lanes.inputs[0]);
                for (&coef, local) in row.iter().zip(&lanes.inputs).skip(1) {
                    mul_slice_xor(coef, local, output);
                }
            }
        }
        Ok(())
    });
    Contestant { name: name.to_owned(), role: Role::Peer, check, run }
}
