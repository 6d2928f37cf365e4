//! The classical code: five parities of eleven blocks.

use anyhow::{Context, Result, ensure};
use rapidraid::code::RsCode;
use rapidraid::gf::{Kernel, Matrix};
use reed_solomon_erasure::galois_8::ReedSolomon as Plain;
use reed_solomon_erasure_simd::galois_8::ReedSolomon as Simd;
use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};

use super::{Cast, Planned, Shape, applied_at, by_isal_both, copies};
use crate::check::Check;
use crate::harness::{Contestant, Role, Run};
use crate::lanes::{Lanes, Place};

pub const ENCODE: &str = "Five parities of eleven blocks";
pub const RS_SIMD: &str = "reed-solomon-simd 3 (another code)";
pub const RS_ERASURE_SIMD_ENCODE: &str = "reed-solomon-erasure 5 with simd-accel";
const RS_ERASURE_ENCODE: &str = "reed-solomon-erasure 6";

const BLOCKS: usize = 11;
const PARITIES: usize = 5;

pub fn planned() -> Vec<Planned> {
    let shape = Shape { inputs: BLOCKS, outputs: BLOCKS, cache_bytes: 32 << 10 };
    let planned = |place| Planned { question: ENCODE, place, shape, make, counted_buffers: BLOCKS };
    [Place::Cache, Place::Memory].map(planned).into()
}

fn make(cast: &Cast, place: Place) -> Result<Vec<Contestant<'static>>> {
    let code = RsCode::new(BLOCKS + PARITIES, BLOCKS)?;
    let matrix = code.generator().select(&Vec::from_iter(BLOCKS..BLOCKS + PARITIES))?;
    let mut contestants = copies::contestants(BLOCKS, place)?;
    for kernel in Kernel::available() {
        contestants.extend(applied_at(kernel, &matrix, place));
    }
    for isal in &cast.isal {
        contestants.extend(by_isal_both(isal, &matrix));
    }
    let plain = Plain::new(BLOCKS, PARITIES)?;
    let encode = move |blocks: &[&[u8]], parities: &mut [&mut [u8]]| {
        plain.encode_sep(blocks, parities).context("reed-solomon-erasure 6")
    };
    contestants.push(peer(RS_ERASURE_ENCODE, &matrix, encode));
    if crate::has_simd_accel() {
        let simd = Simd::new(BLOCKS, PARITIES).context("reed-solomon-erasure 5")?;
        let encode = move |blocks: &[&[u8]], parities: &mut [&mut [u8]]| {
            simd.encode_sep(blocks, parities).context("reed-solomon-erasure 5")
        };
        contestants.push(peer(RS_ERASURE_SIMD_ENCODE, &matrix, encode));
    }
    contestants.push(leopard()?);
    Ok(contestants)
}

fn peer(
    name: &str,
    matrix: &Matrix,
    encode: impl Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<()> + 'static,
) -> Contestant<'static> {
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let (blocks, parities) = (&lanes.inputs[..BLOCKS], &mut lanes.outputs[..PARITIES]);
        (0..repetitions).try_for_each(|_| encode(blocks, parities))
    });
    Contestant {
        name: name.to_owned(),
        role: Role::Peer,
        check: Check::Outputs(matrix.clone()),
        run,
    }
}

/// Returns the contestant `reed-solomon-simd`. Its interface copies the blocks in and keeps the
/// parities, so both costs are part of the measurement.
fn leopard() -> Result<Contestant<'static>> {
    let mut encoder: Option<(usize, ReedSolomonEncoder)> = None;
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let bytes = lanes.bytes();
        if encoder.as_ref().is_none_or(|(of, _)| *of != bytes) {
            encoder = Some((bytes, ReedSolomonEncoder::new(BLOCKS, PARITIES, bytes)?));
        }
        let Some((_, encoder)) = &mut encoder else { return Ok(()) };
        for _ in 0..repetitions {
            for block in &lanes.inputs[..BLOCKS] {
                encoder.add_original_shard(block)?;
            }
            std::hint::black_box(encoder.encode()?.recovery(0));
        }
        Ok(())
    });
    let check = Check::Own(Box::new(decodes));
    Ok(Contestant { name: RS_SIMD.to_owned(), role: Role::Peer, check, run })
}

/// Checks the round trip of `reed-solomon-simd`. Its output equals that of no other code here, so
/// the check decodes five lost blocks instead of comparing parities.
fn decodes(lanes: &mut Lanes<'_>) -> Result<()> {
    let bytes = lanes.bytes().min(64 << 10);
    let blocks: Vec<&[u8]> = lanes.inputs[..BLOCKS].iter().map(|block| &block[..bytes]).collect();
    let mut encoder = ReedSolomonEncoder::new(BLOCKS, PARITIES, bytes)?;
    blocks.iter().try_for_each(|block| encoder.add_original_shard(block))?;
    let encoded = encoder.encode()?;
    let mut decoder = ReedSolomonDecoder::new(BLOCKS, PARITIES, bytes)?;
    for (index, block) in blocks.iter().enumerate().skip(PARITIES) {
        decoder.add_original_shard(index, block)?;
    }
    for (index, parity) in encoded.recovery_iter().enumerate() {
        decoder.add_recovery_shard(index, parity)?;
    }
    let decoded = decoder.decode()?;
    let is_back = |index: usize| decoded.restored_original(index) == Some(blocks[index]);
    ensure!((0..PARITIES).all(is_back), "reed-solomon-simd does not decode what it encoded");
    Ok(())
}
