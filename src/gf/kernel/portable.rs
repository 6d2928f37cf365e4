//! The kernel for any processor: plain loops over arrays, which the compiler turns into vector
//! instructions of the target. In these loops no table lookup and no branch depends on data; only
//! the last level of the fingerprint looks bytes up.

use std::ops::Range;

use super::Mode;
use super::group::{GROUP_OUTPUTS, Group, STEP_BYTES};
use crate::gf::field;
use crate::gf::fingerprint::FingerprintKey;
use crate::gf::line::{Line, Link, Operation, Source, Sum, Target};

/// Number of bytes that are processed at once: long enough to hide the branches on coefficients,
/// short enough for the nearest cache.
const STEP: usize = 256;

pub(super) fn apply(group: Group<'_, '_, '_>) {
    let Group { coefs, streams, inputs, outputs, range, mode, .. } = group;
    let mut sums = [[0; STEP]; GROUP_OUTPUTS];
    let sums = &mut sums[..streams.len() + outputs.len()];
    for start in range.clone().step_by(STEP) {
        let step = start..range.end.min(start + STEP);
        sums.fill([0; STEP]);
        let all = streams.iter().map(|stream| &**stream).chain(inputs.iter().copied());
        for (input, coefs) in all.zip(coefs) {
            let mut powers = [0; STEP];
            powers[..step.len()].copy_from_slice(&input[step.clone()]);
            add_products(sums, powers, coefs);
        }
        let streams = streams.iter_mut().map(|stream| &mut **stream);
        let outputs = outputs.iter_mut().map(|output| &mut **output);
        for (output, sum) in streams.chain(outputs).zip(&*sums) {
            put(&mut output[step.clone()], &sum[..step.len()], mode);
        }
    }
}

/// Applies a group with two rows or columns per buffer: the halves of its steps. The range must
/// consist of whole steps.
pub(super) fn apply_split(group: Group<'_, '_, '_>) {
    let Group { coefs, inputs, outputs, range, mode, .. } = group;
    let mut sums = [[0; STEP]; GROUP_OUTPUTS];
    let sums = &mut sums[..2 * outputs.len()];
    for start in range.clone().step_by(2 * STEP) {
        let part = start..range.end.min(start + 2 * STEP);
        sums.fill([0; STEP]);
        for (input, coefs) in inputs.iter().zip(coefs.chunks_exact(2)) {
            let mut planes = [[0; STEP]; 2];
            for (half, bytes) in input[part.clone()].chunks_exact(STEP_BYTES / 2).enumerate() {
                planes[half % 2][half / 2 * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
            }
            planes
                .into_iter()
                .zip(coefs)
                .for_each(|(plane, coefs)| add_products(sums, plane, coefs));
        }
        for (output, sums) in outputs.iter_mut().zip(sums.chunks_exact(2)) {
            let halves = output[part.clone()].chunks_exact_mut(STEP_BYTES / 2).enumerate();
            for (half, bytes) in halves {
                put(bytes, &sums[half % 2][half / 2 * bytes.len()..][..STEP_BYTES / 2], mode);
            }
        }
    }
}

/// Runs a straight-line program over a range of bytes.
pub(super) fn run(line: &Line, inputs: &[&[u8]], outputs: &mut [&mut [u8]], range: Range<usize>) {
    let mut slots = vec![[0; STEP]; line.outputs_of_slots.len()];
    let mut last = [0; STEP];
    for start in range.clone().step_by(STEP) {
        let step = start..range.end.min(start + STEP);
        let read = |input: usize| {
            let mut data = [0; STEP];
            data[..step.len()].copy_from_slice(&inputs[input][step.clone()]);
            data
        };
        let mut write = |slots: &mut [[u8; STEP]], target: Target, data: &[u8; STEP]| {
            if let Some(slot) = target.slot {
                slots[slot] = *data;
            }
            if let Some(output) = target.output {
                outputs[output][step.clone()].copy_from_slice(&data[..step.len()]);
            }
        };
        for operation in &line.operations {
            let mut sum = [0; STEP];
            let mut result = [0; STEP];
            match *operation {
                Operation::Sum(Sum { first, count, scale, target }) => {
                    for term in &line.terms[first..][..count] {
                        let data = match term.source {
                            Source::Input(input) => read(input),
                            Source::Slot(slot) => slots[slot],
                            Source::Last => last,
                        };
                        add_product(&mut sum, term.coef, data);
                    }
                    add_product(&mut result, scale, sum);
                    write(&mut slots, target, &result);
                    last = result;
                }
                Operation::Link(Link { input, goes_on, known, scale, forward, target, next }) => {
                    let mut x = if goes_on { last } else { [0; STEP] };
                    add(&mut sum, &read(input));
                    add(&mut sum, &x);
                    if let Some((slot, e, f)) = known {
                        add_product(&mut sum, e, slots[slot]);
                        add_product(&mut x, f, slots[slot]);
                    }
                    add_product(&mut result, scale, sum);
                    write(&mut slots, target, &result);
                    add_product(&mut x, forward, result);
                    write(&mut slots, next, &x);
                    last = x;
                }
            }
        }
    }
}

fn add_product(sum: &mut [u8; STEP], coef: u8, data: [u8; STEP]) {
    add_products(std::slice::from_mut(sum), data, &[coef]);
}

fn put(output: &mut [u8], sums: &[u8], mode: Mode) {
    match mode {
        Mode::Overwrite | Mode::Stream => output.copy_from_slice(sums),
        Mode::Accumulate => add(output, sums),
    }
}

/// Adds to each sum its coefficient times the input, bit by bit of the coefficients. The input is
/// doubled from one bit to the next, once for all outputs.
fn add_products(sums: &mut [[u8; STEP]], mut powers: [u8; STEP], coefs: &[u8]) {
    let all_bits = coefs.iter().fold(0, |all, coef| all | coef);
    for bit in 0..(8 - all_bits.leading_zeros()) {
        if bit > 0 {
            powers.iter_mut().for_each(|byte| *byte = double(*byte));
        }
        for (sum, _) in sums.iter_mut().zip(coefs).filter(|(_, coef)| *coef >> bit & 1 == 1) {
            add_step(sum, &powers);
        }
    }
}

/// Adds one step to another. The fixed length lets the compiler unroll the loop wherever it is used.
#[inline(always)]
fn add_step(sum: &mut [u8; STEP], terms: &[u8; STEP]) {
    for lane in 0..STEP {
        sum[lane] ^= terms[lane];
    }
}

fn add(sums: &mut [u8], terms: &[u8]) {
    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum ^= term);
}

/// Returns twice `byte`, without a branch that depends on it.
fn double(byte: u8) -> u8 {
    let overflow = if byte & 0x80 == 0 { 0 } else { field::POLYNOMIAL as u8 };
    (byte << 1) ^ overflow
}

/// Computes the fingerprint of a grain.
///
/// The first level of the definition, `A[r][b] = XOR over t of clmul(P[t][b], K[t+r])`, means for
/// byte lanes: wherever bit s of K[t+r] is set, lane l of vector t is added to lane l + s of half r
/// of w. The loop therefore adds up vectors per bit s (`sums`), and shifts each sum to its place
/// once at the end. Key word i belongs to vector i for r = 0 and to vector i - 1 for r = 1; both
/// vectors lie side by side in `pair`.
pub(super) fn fingerprint(key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
    let mut sums = [[0; 128]; 64];
    let mut pair = [0; 128];
    let vectors = grain.chunks(64).chain(std::iter::once(&[][..]));
    for (vector, &word) in vectors.zip(key.words()) {
        pair.copy_within(64.., 0);
        pair[64..].fill(0);
        pair[64..][..vector.len()].copy_from_slice(vector);
        let mut rest = word;
        while rest != 0 {
            let sum = &mut sums[rest.trailing_zeros() as usize];
            // A plain loop: a call of an iterator that is compiled in another unit would not be
            // inlined.
            for lane in 0..128 {
                sum[lane] ^= pair[lane];
            }
            rest &= rest - 1;
        }
    }
    let mut w = [0; 256];
    for (s, sum) in sums.iter().enumerate() {
        for l in 0..64 {
            w[s + l] ^= sum[64 + l];
            w[128 + s + l] ^= sum[l];
        }
    }
    last_level(key.tail(), &w)
}

/// Computes `F[j] = sum over m of H[m+j] * w[m]`.
fn last_level(h: &[u8; FingerprintKey::TAIL_BYTES], w: &[u8; 256]) -> [u8; 16] {
    std::array::from_fn(|j| {
        h[j..].iter().zip(w).fold(0, |sum, (&coef, &byte)| sum ^ field::mul(coef, byte))
    })
}
