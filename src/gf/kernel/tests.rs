//! One suite for every kernel, against a twin that multiplies byte by byte.

use super::*;
use crate::entropy::{Entropy, SeededEntropy};
use crate::gf::field;
use proptest::prelude::*;

/// Around one vector, four vectors, a step of the portable kernel, a tile.
const LENGTHS: [usize; 22] = [
    0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 319, 511, 513, 1000, 4095, 8191, 8192,
    8193, 20_000,
];

fn twin(matrix: &Matrix, inputs: &[&[u8]], outputs: &mut [Vec<u8>], mode: Mode) {
    for (output, row) in outputs.iter_mut().zip(matrix.iter()) {
        for (t, byte) in output.iter_mut().enumerate() {
            let start = if mode == Mode::Accumulate { *byte } else { 0 };
            *byte = row.iter().zip(inputs).fold(start, |sum, (&c, x)| sum ^ field::mul(c, x[t]));
        }
    }
}

fn random(entropy: &SeededEntropy, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    entropy.fill(&mut bytes);
    bytes
}

/// Runs every kernel and the twin on random data that starts at odd addresses, and compares all bytes, also
/// those around the outputs.
fn compare(rows: usize, cols: usize, len: usize, seed: u64) {
    let entropy = SeededEntropy::new(seed);
    let mut entries = random(&entropy, rows * cols);
    entries.iter_mut().step_by(3).for_each(|coef| *coef &= 1);
    let matrix = Matrix::new(rows, cols, entries).unwrap();
    let offset = entropy.below(65) as usize;
    let inputs: Vec<Vec<u8>> = (0..cols).map(|_| random(&entropy, len + offset)).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[offset..]).collect();
    let around: Vec<Vec<u8>> = (0..rows).map(|_| random(&entropy, len + offset + 64)).collect();
    for mode in [Mode::Overwrite, Mode::Accumulate] {
        let mut expected: Vec<Vec<u8>> =
            around.iter().map(|bytes| bytes[offset..][..len].to_vec()).collect();
        twin(&matrix, &inputs, &mut expected, mode);
        for kernel in Kernel::available() {
            let mut got = around.clone();
            let mut outputs: Vec<&mut [u8]> =
                got.iter_mut().map(|bytes| &mut bytes[offset..][..len]).collect();
            kernel.apply(&matrix, &inputs, &mut outputs, mode).unwrap();
            for ((got, around), expected) in got.iter().zip(&around).zip(&expected) {
                let name = kernel.name();
                assert_eq!(&got[offset..][..len], expected, "{name} {rows}x{cols} {len} {mode:?}");
                assert_eq!(got[..offset], around[..offset], "{name} wrote before its output");
                assert_eq!(got[offset + len..], around[offset + len..], "{name} wrote past it");
            }
        }
    }
}

#[test]
fn every_kernel_is_its_twin_on_hop_shapes() {
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        for (rows, cols) in [(1, 1), (2, 2), (2, 3), (1, 3)] {
            compare(rows, cols, len, seed as u64);
        }
    }
}

#[test]
fn every_kernel_is_its_twin_on_every_group_size() {
    for (seed, side) in (1..=12).chain([16, 17, 33]).enumerate() {
        for len in [1, 200, 8192 + 77] {
            compare(side, 34 - side, len, seed as u64);
        }
    }
}

#[test]
fn the_largest_matrix_works() {
    compare(Matrix::MAX_SIDE, Matrix::MAX_SIDE, 70, 1);
}

#[test]
fn every_product_is_the_fields() {
    let all: Vec<u8> = (0..=255).collect();
    for coef in 0..=255 {
        let matrix = Matrix::new(1, 1, vec![coef]).unwrap();
        for kernel in Kernel::available() {
            let mut out = [0; 256];
            kernel.apply(&matrix, &[&all], &mut [&mut out], Mode::Overwrite).unwrap();
            assert!(out.iter().zip(&all).all(|(&got, &x)| got == field::mul(coef, x)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_kernel_is_its_twin(
        rows in 1..20usize, cols in 1..40usize, len in 0..3000usize, seed: u64,
    ) {
        compare(rows, cols, len, seed);
    }
}

#[test]
fn wrong_shapes_and_lengths_are_errors() {
    let matrix = Matrix::zero(1, 2).unwrap();
    let (a, b, long) = ([0; 8], [0; 8], [0; 9]);
    let mut out = [0; 8];
    let mut short = [0; 7];
    for kernel in Kernel::available() {
        let mode = Mode::Overwrite;
        assert!(kernel.apply(&matrix, &[&a], &mut [&mut out], mode).is_err());
        assert!(kernel.apply(&matrix, &[&a, &b], &mut [], mode).is_err());
        let error = kernel.apply(&matrix, &[&a, &long], &mut [&mut out], mode).unwrap_err();
        assert_eq!(error, GfError::Length { side: "input", index: 1, expected: 8, actual: 9 });
        let error = kernel.apply(&matrix, &[&a, &b], &mut [&mut short], mode).unwrap_err();
        assert_eq!(error, GfError::Length { side: "output", index: 0, expected: 8, actual: 7 });
        assert!(kernel.apply(&matrix, &[&a, &b], &mut [&mut out], mode).is_ok());
    }
}

#[test]
fn the_environment_chooses_the_kernel() {
    assert_eq!(Kernel::available().last().map(|kernel| kernel.name()), Some("portable"));
    assert!(Kernel::named("quantum").is_err());
    if let Ok(name) = std::env::var(ENV) {
        assert_eq!(Kernel::active().name(), name, "{ENV} is not obeyed");
    } else {
        assert_eq!(Kernel::active(), Kernel::available()[0]);
    }
}
