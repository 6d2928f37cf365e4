//! The test suite of all kernels, which compares them with a reference implementation that
//! multiplies byte by byte.

use super::*;
use crate::entropy::{Entropy, SeededEntropy};
use crate::gf::{Line, LineStep, Operand, field};
use proptest::prelude::*;
use reed_solomon_erasure::galois_8;

/// Lengths around one vector, four vectors, a step of the portable kernel, and a tile.
const LENGTHS: [usize; 22] = [
    0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 319, 511, 513, 1000, 4095, 8191, 8192,
    8193, 20_000,
];

fn reference(matrix: &Matrix, inputs: &[&[u8]], outputs: &mut [Vec<u8>], mode: Mode) {
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

/// Returns a buffer with a copy of `bytes` that begins `apart` bytes after the start of a cache
/// line, and the offset of the copy. Allocations seldom begin at a cache line, which non-temporal
/// stores require.
fn beside_a_line(bytes: &[u8], apart: usize) -> (Vec<u8>, usize) {
    let mut copy = vec![0; bytes.len() + 128];
    let start = copy.as_ptr().align_offset(64) + apart;
    copy[start..][..bytes.len()].copy_from_slice(bytes);
    (copy, start)
}

/// Asserts that `write` produces the expected bytes and changes nothing else. The outputs lie
/// inside copies of `around`, `offset` bytes after the start of each. All copies start at a cache
/// line; in a second round every other copy starts 16 bytes after one.
fn assert_written(
    what: &str,
    around: &[Vec<u8>],
    offset: usize,
    expected: &[Vec<u8>],
    write: impl Fn(&mut [&mut [u8]]) -> Result<(), GfError>,
) {
    let len = expected.first().map_or(0, Vec::len);
    for apart in [0, 16] {
        let copy = |(index, bytes): (usize, &Vec<u8>)| beside_a_line(bytes, index % 2 * apart);
        let mut got: Vec<(Vec<u8>, usize)> = around.iter().enumerate().map(copy).collect();
        let mut outputs: Vec<&mut [u8]> =
            got.iter_mut().map(|(bytes, start)| &mut bytes[*start + offset..][..len]).collect();
        write(&mut outputs).unwrap();
        for (((got, start), around), expected) in got.iter().zip(around).zip(expected) {
            let got = &got[*start..][..around.len()];
            assert_eq!(&got[offset..][..len], expected, "{what}");
            assert_eq!(got[..offset], around[..offset], "{what}: wrote before its output");
            assert_eq!(got[offset + len..], around[offset + len..], "{what}: wrote past it");
        }
    }
}

/// Runs every kernel and the reference implementation on random data that starts at odd addresses,
/// and compares all bytes, including the bytes around the outputs.
fn compare(rows: usize, cols: usize, len: usize, seed: u64) {
    let entropy = SeededEntropy::new(seed);
    let mut entries = random(&entropy, rows * cols);
    entries.iter_mut().step_by(3).for_each(|coef| *coef &= 1);
    let matrix = Matrix::new(rows, cols, entries).unwrap();
    let offset = entropy.below(65) as usize;
    let inputs: Vec<Vec<u8>> = (0..cols).map(|_| random(&entropy, len + offset)).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[offset..]).collect();
    let around: Vec<Vec<u8>> = (0..rows).map(|_| random(&entropy, len + offset + 64)).collect();
    for mode in [Mode::Overwrite, Mode::Accumulate, Mode::Stream] {
        let mut expected: Vec<Vec<u8>> =
            around.iter().map(|bytes| bytes[offset..][..len].to_vec()).collect();
        reference(&matrix, &inputs, &mut expected, mode);
        for kernel in Kernel::available() {
            let what = format!("{} {rows}x{cols} {len} {mode:?}", kernel.name());
            assert_written(&what, &around, offset, &expected, |outputs| {
                kernel.apply(&matrix, &inputs, outputs, mode)
            });
        }
    }
}

#[test]
fn every_kernel_is_its_reference_on_hop_shapes() {
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        for (rows, cols) in [(1, 1), (2, 2), (2, 3), (1, 3)] {
            compare(rows, cols, len, seed as u64);
        }
    }
}

#[test]
fn every_kernel_is_its_reference_on_every_group_size() {
    for (seed, side) in (1..=12).chain([16, 17, 33]).enumerate() {
        for len in [1, 200, 8192 + 77] {
            compare(side, 34 - side, len, seed as u64);
        }
    }
}

/// Covers the amount of bytes that a restore decodes at once, which exceeds the caches of a core.
#[test]
fn every_kernel_is_its_reference_on_what_comes_from_memory() {
    compare(11, 11, 65_536 + 77, 1);
    compare(2, 3, (1 << 18) + 1, 2);
}

#[test]
fn the_largest_matrix_works() {
    compare(Matrix::MAX_SIDE, Matrix::MAX_SIDE, 70, 1);
}

/// The reference is another library over the same field, `reed-solomon-erasure`.
#[test]
fn every_product_is_the_peers() {
    let entropy = SeededEntropy::new(5);
    for coef in 0..=255 {
        let matrix = Matrix::new(1, 1, vec![coef]).unwrap();
        for len in LENGTHS.into_iter().chain([256]) {
            let offset = entropy.below(65) as usize;
            // 256 bytes: each value once.
            let all: Vec<u8> = (0..=255).collect();
            let input = if len == 256 { all } else { random(&entropy, len) };
            let around = vec![random(&entropy, len + offset + 64)];
            for (mode, peer) in [
                (Mode::Overwrite, galois_8::mul_slice as fn(u8, &[u8], &mut [u8])),
                (Mode::Accumulate, galois_8::mul_slice_xor),
            ] {
                let mut expected = around[0][offset..][..len].to_vec();
                peer(coef, &input, &mut expected);
                for kernel in Kernel::available() {
                    let what = format!("{} {coef} {len} {mode:?}", kernel.name());
                    assert_written(&what, &around, offset, &[expected.clone()], |outputs| {
                        kernel.apply(&matrix, &[&input], outputs, mode)
                    });
                }
            }
        }
    }
}

/// Asserts that every kernel writes the same bytes over its streams as it writes to separate
/// outputs, at any alignment.
fn compare_in_place(streams: usize, inputs: usize, outputs: usize, len: usize, seed: u64) {
    let entropy = SeededEntropy::new(seed);
    let (rows, cols) = (streams + outputs, streams + inputs);
    let mut entries = random(&entropy, rows * cols);
    entries.iter_mut().step_by(cols).take(seed as usize % 3 * rows).for_each(|coef| *coef = 1);
    let matrix = Matrix::new(rows, cols, entries).unwrap();
    let offset = entropy.below(65) as usize;
    let sources: Vec<Vec<u8>> = (0..cols).map(|_| random(&entropy, len + offset)).collect();
    let sources: Vec<&[u8]> = sources.iter().map(|source| &source[offset..]).collect();
    let mut expected = vec![vec![0; len]; rows];
    reference(&matrix, &sources, &mut expected, Mode::Overwrite);
    for kernel in Kernel::available() {
        let mut over: Vec<Vec<u8>> =
            sources[..streams].iter().map(|source| source.to_vec()).collect();
        let mut made = vec![vec![7; len]; outputs];
        let mut over_refs: Vec<&mut [u8]> = over.iter_mut().map(|bytes| &mut bytes[..]).collect();
        let mut made_refs: Vec<&mut [u8]> = made.iter_mut().map(|bytes| &mut bytes[..]).collect();
        kernel
            .apply_in_place(&matrix, &mut over_refs, &sources[streams..], &mut made_refs)
            .unwrap();
        over.append(&mut made);
        assert_eq!(over, expected, "{} {streams}+{inputs}+{outputs} {len}", kernel.name());
    }
}

#[test]
fn every_kernel_writes_over_its_streams() {
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        for (streams, inputs, outputs) in
            [(1, 1, 1), (1, 2, 1), (1, 0, 0), (1, 0, 3), (2, 1, 2), (4, 28, 0), (1, 31, 3)]
        {
            compare_in_place(streams, inputs, outputs, len, seed as u64);
        }
    }
}

#[test]
fn what_one_pass_cannot_do_is_not_done_in_place() {
    let (wide, tall) = (Matrix::zero(1, 33).unwrap(), Matrix::zero(5, 1).unwrap());
    let mut bytes = [[0; 8]; 5];
    for kernel in Kernel::available() {
        let error = kernel.apply_in_place(&wide, &mut [], &[&[0; 8][..]; 33], &mut [&mut bytes[0]]);
        assert!(matches!(error, Err(GfError::InPlace { rows: 1, cols: 33, .. })));
        let mut all = bytes.each_mut().map(|bytes| &mut bytes[..]);
        let (stream, outputs) = all.split_at_mut(1);
        let error = kernel.apply_in_place(&tall, stream, &[], outputs);
        assert!(matches!(error, Err(GfError::InPlace { rows: 5, cols: 1, .. })));
    }
}

/// Returns a program of random steps over inputs and earlier registers, and the registers of its
/// outputs.
fn random_line(
    entropy: &SeededEntropy,
    inputs: usize,
    steps: usize,
) -> (Vec<LineStep>, Vec<usize>) {
    let below = |limit: usize| entropy.below(limit as u64) as usize;
    let coef = |_| if below(3) == 0 { 1 } else { below(256) as u8 };
    let mut made: Vec<LineStep> = Vec::new();
    while made.len() < steps {
        let register = made.len();
        let operand = |_| match below(inputs + register) {
            earlier if earlier < register => Operand::Register(earlier),
            input => Operand::Input(input - register),
        };
        let terms = (0..1 + below(4)).map(|at| (coef(at), operand(at))).collect();
        let scale = coef(0);
        if below(3) == 0 {
            made.push(LineStep { scale, terms });
            continue;
        }
        // Two steps that form a link of a chain, sometimes with a change that breaks the link.
        let mut both = Vec::new();
        both.extend((register > 0 && below(4) > 0).then(|| (1, Operand::Register(register - 1))));
        both.extend((below(3) == 0).then(|| (coef(0), operand(0))));
        let one = [(1, Operand::Input(below(inputs)))].into_iter().chain(both.clone());
        let terms = one.collect();
        made.push(LineStep { scale, terms });
        if let Some((factor, _)) = both.last_mut().filter(|_| register > 0 && below(2) == 0) {
            *factor = coef(0);
        }
        both.push((coef(0), Operand::Register(register)));
        made.push(LineStep { scale: if below(9) == 0 { 2 } else { 1 }, terms: both });
    }
    let steps = made;
    let mut outputs: Vec<usize> = (0..steps.len()).filter(|_| below(2) == 0).collect();
    outputs.push(steps.len() - 1);
    outputs.dedup();
    let by = below(outputs.len());
    outputs.rotate_left(by);
    (steps, outputs)
}

fn line_reference(steps: &[LineStep], inputs: &[&[u8]], t: usize) -> Vec<u8> {
    let mut registers = Vec::new();
    for step in steps {
        let sum = step.terms.iter().fold(0, |sum, &(coef, operand)| {
            let byte = match operand {
                Operand::Input(input) => inputs[input][t],
                Operand::Register(register) => registers[register],
            };
            sum ^ field::mul(coef, byte)
        });
        registers.push(field::mul(step.scale, sum));
    }
    registers
}

fn compare_line(inputs: usize, steps: usize, len: usize, seed: u64) {
    let entropy = SeededEntropy::new(seed);
    let (steps, wanted) = random_line(&entropy, inputs, steps);
    let line = Line::new(inputs, &steps, &wanted).unwrap();
    let offset = entropy.below(3) as usize * 32;
    let inputs: Vec<Vec<u8>> = (0..inputs).map(|_| random(&entropy, len + offset)).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[offset..]).collect();
    let registers: Vec<Vec<u8>> = (0..len).map(|t| line_reference(&steps, &inputs, t)).collect();
    let around: Vec<Vec<u8>> =
        wanted.iter().map(|_| random(&entropy, len + offset + 512)).collect();
    let of = |register: &usize| registers.iter().map(|of| of[*register]).collect();
    let expected: Vec<Vec<u8>> = wanted.iter().map(of).collect();
    for kernel in Kernel::available() {
        for mode in [Mode::Overwrite, Mode::Stream] {
            let what = format!("{} {len} {seed} {mode:?}", kernel.name());
            assert_written(&what, &around, offset, &expected, |outputs| {
                kernel.run(&line, &inputs, outputs, mode)
            });
        }
    }
}

#[test]
fn every_kernel_runs_a_straight_line_as_its_reference() {
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        compare_line(1 + seed % 7, 1 + 2 * seed, len, seed as u64);
        compare_line(1 + seed % 7, 9, 300, 100 + seed as u64);
    }
    // More bytes than the caches of a core hold, as with the grains of a restore.
    compare_line(60, 21, 20_077, 200);
    let line =
        Line::new(1, &[LineStep { scale: 1, terms: vec![(1, Operand::Input(0))] }], &[0]).unwrap();
    for kernel in Kernel::available() {
        let outputs = &mut [&mut [0; 8][..]];
        assert_eq!(kernel.run(&line, &[&[0; 8]], outputs, Mode::Accumulate), Err(GfError::NoSum));
        assert!(kernel.run(&line, &[&[0; 8], &[0; 8]], outputs, Mode::Overwrite).is_err());
        assert!(kernel.run(&line, &[&[0; 9]], outputs, Mode::Overwrite).is_err());
    }
}

#[test]
fn what_is_no_straight_line_is_refused() {
    let step = |operand| LineStep { scale: 1, terms: vec![(1, operand)] };
    for bad in [Operand::Register(0), Operand::Register(1), Operand::Input(1)] {
        assert_eq!(Line::new(1, &[step(bad)], &[0]), None);
    }
    let good = [step(Operand::Input(0))];
    assert_eq!(Line::new(1, &good, &[1]), None);
    assert_eq!(Line::new(1, &good, &[0, 0]), None);
    assert_eq!(Line::new(1, &[LineStep { scale: 1, terms: vec![] }], &[0]), None);
    assert!(Line::new(1, &good, &[0]).is_some());
    // The last step reads all registers again, so each of them needs a slot.
    let many = |count: usize| {
        let mut steps = vec![good[0].clone(); count];
        let all = (0..count).map(|register| (1, Operand::Register(register)));
        steps.push(LineStep { scale: 1, terms: all.collect() });
        steps
    };
    assert!(Line::new(1, &many(Line::MAX_SLOTS + 1), &[Line::MAX_SLOTS + 1]).is_some());
    assert_eq!(Line::new(1, &many(Line::MAX_SLOTS + 2), &[Line::MAX_SLOTS + 2]), None);
}

/// The reference implementation of GF(2^16), symbol by symbol.
fn reference16(matrix: &Matrix16, inputs: &[&[u8]], outputs: &mut [Vec<u8>], mode: Mode) {
    let len = inputs[0].len();
    let places = |symbol: usize| {
        let group = symbol / 64 * 128;
        let half = 64.min((len - group) / 2);
        [group + symbol % 64, group + half + symbol % 64]
    };
    for (output, row) in outputs.iter_mut().zip(matrix.iter()) {
        for [low, high] in (0..len / 2).map(places) {
            let start = if mode == Mode::Accumulate { [output[low], output[high]] } else { [0; 2] };
            let sum = row.iter().zip(inputs).fold(start, |sum, (&coef, input)| {
                let product = field16::mul(coef, [input[low], input[high]]);
                [sum[0] ^ product[0], sum[1] ^ product[1]]
            });
            [output[low], output[high]] = sum;
        }
    }
}

fn compare16(rows: usize, cols: usize, len: usize, seed: u64) {
    let entropy = SeededEntropy::new(seed);
    let entries = random(&entropy, 2 * rows * cols);
    let mut entries: Vec<[u8; 2]> = entries.chunks_exact(2).map(|e| [e[0], e[1]]).collect();
    entries.iter_mut().step_by(cols).take(seed as usize % 3 * rows).for_each(|e| *e = [1, 0]);
    let matrix = Matrix16::new(rows, cols, entries).unwrap();
    let offset = entropy.below(65) as usize;
    let inputs: Vec<Vec<u8>> = (0..cols).map(|_| random(&entropy, len + offset)).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[offset..]).collect();
    let around: Vec<Vec<u8>> = (0..rows).map(|_| random(&entropy, len + offset + 128)).collect();
    for mode in [Mode::Overwrite, Mode::Accumulate, Mode::Stream] {
        let mut expected: Vec<Vec<u8>> =
            around.iter().map(|bytes| bytes[offset..][..len].to_vec()).collect();
        reference16(&matrix, &inputs, &mut expected, mode);
        for kernel in Kernel::available() {
            let what = format!("{} {rows}x{cols} {len} {mode:?}", kernel.name());
            assert_written(&what, &around, offset, &expected, |outputs| {
                kernel.apply16(&matrix, &inputs, outputs, mode)
            });
        }
    }
}

#[test]
fn every_kernel_is_its_reference_over_the_large_field() {
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        for (rows, cols) in [(1, 1), (1, 2), (2, 2), (2, 3), (1, 3), (5, 11), (7, 17)] {
            compare16(rows, cols, len & !1, seed as u64);
        }
    }
    let matrix = Matrix16::new(1, 1, vec![[1, 0]]).unwrap();
    for kernel in Kernel::available() {
        let odd = kernel.apply16(&matrix, &[&[0; 7]], &mut [&mut [0; 7]], Mode::Overwrite);
        assert_eq!(odd, Err(GfError::OddLength { bytes: 7 }));
    }
}

/// Pins the coded bytes. These hashes change only with a version of the format.
#[test]
fn golden_hashes_of_coded_bytes() {
    let inputs: Vec<Vec<u8>> =
        (0..3).map(|i| (0..1000).map(|t| ((i + 1) * t % 251) as u8).collect()).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[..]).collect();
    let matrix = Matrix::new(2, 3, vec![1, 2, 0x1d, 1, 0x8e, 0xff]).unwrap();
    let entries = vec![[1, 0], [0, 1], [2, 3], [1, 0], [0x80, 0xff], [7, 0x1d]];
    let matrix16 = Matrix16::new(2, 3, entries).unwrap();
    for kernel in Kernel::available() {
        let hash = |outputs: &[Vec<u8>]| blake3::hash(&outputs.concat()).to_hex()[..32].to_owned();
        let mut outputs = vec![vec![0; 1000]; 2];
        let mut refs: Vec<&mut [u8]> = outputs.iter_mut().map(|bytes| &mut bytes[..]).collect();
        kernel.apply(&matrix, &inputs, &mut refs, Mode::Overwrite).unwrap();
        assert_eq!(hash(&outputs), "f61ae0c89076d1ca29d8053c18f3bde2", "{}", kernel.name());
        let mut refs: Vec<&mut [u8]> = outputs.iter_mut().map(|bytes| &mut bytes[..]).collect();
        kernel.apply16(&matrix16, &inputs, &mut refs, Mode::Overwrite).unwrap();
        assert_eq!(hash(&outputs), "25446880bfd86876f75950233c5ffa73", "{}", kernel.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_kernel_is_its_reference_everywhere_else(
        streams in 1..5usize, inputs in 0..29usize, outputs in 0..4usize, symbols in 0..900usize, seed: u64,
    ) {
        compare_in_place(streams, inputs, outputs.min(4 - streams), symbols, seed);
        compare16(1 + outputs, 1 + inputs, 2 * symbols, seed);
        compare_line(1 + inputs, 1 + 3 * streams, symbols, seed);
    }

    #[test]
    fn every_kernel_is_its_reference(
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
