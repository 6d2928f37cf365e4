//! The contestants that most groups have: copying the same buffers, and adding them to each other.

use std::hint::black_box;

use anyhow::Result;
use rapidraid::gf::Matrix;

use crate::check::Check;
use crate::harness::{Contestant, Role, Run};
use crate::lanes::Place;
use crate::raw::floor::{self, Stores};

pub const COPY: &str = "memcpy";
const COPY_PAST_CACHES: &str = "copy, stores past the caches";
const XOR_INTO: &str = "XOR of one buffer into another";

/// Returns the contestants that copy the first `streams` inputs to as many outputs, stream by
/// stream, or add them to these.
pub fn contestants(streams: usize, place: Place) -> Result<Vec<Contestant<'static>>> {
    let identity = Matrix::identity(streams)?;
    let copy: Run<'static> = Box::new(move |lanes, repetitions| {
        for _ in 0..repetitions {
            for (output, input) in lanes.outputs.iter_mut().zip(&lanes.inputs).take(streams) {
                output.copy_from_slice(black_box(input));
            }
        }
        Ok(())
    });
    let xor: Run<'static> = Box::new(move |lanes, repetitions| {
        for _ in 0..repetitions {
            for (output, input) in lanes.outputs.iter_mut().zip(&lanes.inputs).take(streams) {
                floor::xor_into(output, black_box(input));
            }
        }
        Ok(())
    });
    let floor = |name: &str, check, run| Contestant {
        name: name.to_owned(),
        role: Role::Floor,
        check,
        run,
    };
    let mut contestants = vec![
        floor(COPY, Check::Outputs(identity.clone()), copy),
        // The loop has a unit test of its own. Its result here depends on how often it ran.
        floor(XOR_INTO, Check::Own(Box::new(|_| Ok(()))), xor),
    ];
    if place == Place::Memory && floor::has_non_temporal() {
        let past: Run<'static> = Box::new(move |lanes, repetitions| {
            for _ in 0..repetitions {
                for (output, input) in lanes.outputs.iter_mut().zip(&lanes.inputs).take(streams) {
                    floor::xor([black_box(input)], [output], Stores::NonTemporal);
                }
            }
            Ok(())
        });
        contestants.push(floor(COPY_PAST_CACHES, Check::Outputs(identity), past));
    }
    Ok(contestants)
}
