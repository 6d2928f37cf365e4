//! The linear fingerprint: compared with BLAKE3, and as a part of a hop that checks its inputs.

use std::hint::black_box;

use anyhow::{Result, ensure};
use rapidraid::gf::{FingerprintKey, Kernel};
use rapidraid::units::GRAIN_BYTES;

use super::{Cast, Planned, Shape, copies, hop, ours, suited};
use crate::check::Check;
use crate::harness::{Contestant, Role, Run};
use crate::lanes::{Lanes, Place};

pub const FINGERPRINT: &str = "The fingerprint of a grain (64 KiB)";
/// The questions for one and for two local blocks.
pub const HOP_CHECKED: [&str; 2] = [
    "A hop with one local block that checks the fingerprints of its inputs",
    "A hop with two local blocks that checks the fingerprints of its inputs",
];
pub const BLAKE3: &str = "BLAKE3, one thread";
pub const TOGETHER: &str = "rapidraid, fingerprints and hop, grain by grain";
pub const HOP_ALONE: &str = "rapidraid, the hop alone";
pub const FINGERPRINTS_ALONE: &str = "rapidraid, the fingerprints alone";

const GRAIN: usize = GRAIN_BYTES as usize;

pub fn planned() -> Vec<Planned> {
    let mut planned = Vec::new();
    for place in [Place::Cache, Place::Memory] {
        let shape = Shape { inputs: 1, outputs: 1, cache_bytes: GRAIN };
        let (question, make) = (FINGERPRINT, of_a_grain);
        planned.push(Planned { question, place, shape, make, counted_buffers: 1 });
    }
    for (question, locals) in HOP_CHECKED.into_iter().zip(1..) {
        for place in [Place::Cache, Place::Memory] {
            let make = if locals == 1 { checked::<1> } else { checked::<2> };
            let shape = Shape { inputs: locals + 1, outputs: 2, cache_bytes: GRAIN };
            planned.push(Planned { question, place, shape, make, counted_buffers: 1 });
        }
    }
    planned
}

fn key() -> FingerprintKey {
    FingerprintKey::derive(&[7; 32])
}

fn of_a_grain(_: &Cast, place: Place) -> Result<Vec<Contestant<'static>>> {
    let mut contestants = copies::contestants(1, place)?;
    for kernel in Kernel::available() {
        let key = key();
        let run: Run<'static> = Box::new(move |lanes, repetitions| {
            for _ in 0..repetitions {
                for grain in lanes.inputs[0].chunks(GRAIN) {
                    black_box(key.fingerprint_by(kernel, black_box(grain))?);
                }
            }
            Ok(())
        });
        let check = Check::Own(Box::new(move |lanes| same_as_portable(kernel, lanes)));
        contestants.push(Contestant { name: ours(kernel), role: Role::Ours, check, run });
    }
    let run: Run<'static> = Box::new(|lanes, repetitions| {
        for _ in 0..repetitions {
            for grain in lanes.inputs[0].chunks(GRAIN) {
                black_box(blake3::hash(black_box(grain)));
            }
        }
        Ok(())
    });
    let check = Check::Own(Box::new(|_| {
        let known = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        ensure!(blake3::hash(&[]).to_hex().as_str() == known, "BLAKE3 of nothing is wrong");
        Ok(())
    }));
    contestants.push(Contestant { name: BLAKE3.to_owned(), role: Role::Peer, check, run });
    Ok(contestants)
}

fn same_as_portable(kernel: Kernel, lanes: &mut Lanes<'_>) -> Result<()> {
    let (key, portable) = (key(), Kernel::named("portable")?);
    for grain in lanes.inputs.iter().flat_map(|input| input.chunks(GRAIN).take(2)) {
        let [got, expected] = [kernel, portable].map(|kernel| key.fingerprint_by(kernel, grain));
        ensure!(got? == expected?, "the fingerprint differs from the portable kernel's");
    }
    Ok(())
}

/// Returns contestants for a hop over grains whose inputs are fingerprinted first, while they are
/// in a near cache, and for each of the two parts alone.
fn checked<const LOCALS: usize>(cast: &Cast, place: Place) -> Result<Vec<Contestant<'static>>> {
    let kernel = cast.kernel;
    let mode = suited(kernel, place).0;
    let contestant = |name: &str, fingerprints: bool, hop: bool| -> Result<Contestant<'static>> {
        let (key, matrix) = (key(), hop::matrix(LOCALS)?);
        let check = if hop {
            Check::Outputs(matrix.clone())
        } else {
            Check::Own(Box::new(move |lanes| same_as_portable(kernel, lanes)))
        };
        let run: Run<'static> = Box::new(move |lanes, repetitions| {
            let Lanes { inputs, outputs, .. } = lanes;
            for _ in 0..repetitions {
                for start in (0..inputs[0].len()).step_by(GRAIN) {
                    let range = start..start + GRAIN;
                    for input in inputs[..=LOCALS].iter().filter(|_| fingerprints) {
                        black_box(key.fingerprint_by(kernel, &input[range.clone()])?);
                    }
                    if hop && let [first, second, ..] = &mut outputs[..] {
                        let mut grains = [&[][..]; 3];
                        for (grain, input) in grains.iter_mut().zip(&inputs[..=LOCALS]) {
                            *grain = &input[range.clone()];
                        }
                        let mut made = [&mut first[range.clone()], &mut second[range]];
                        kernel.apply(&matrix, &grains[..=LOCALS], &mut made, mode)?;
                    }
                }
            }
            Ok(())
        });
        Ok(Contestant { name: name.to_owned(), role: Role::Ours, check, run })
    };
    let mut contestants = copies::contestants(1, place)?;
    contestants.push(contestant(HOP_ALONE, false, true)?);
    contestants.push(contestant(FINGERPRINTS_ALONE, true, false)?);
    contestants.push(contestant(TOGETHER, true, true)?);
    Ok(contestants)
}
