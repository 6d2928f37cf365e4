//! How fast is what a hop does to its bytes, beside memcpy and BLAKE3 on the same bytes?
//!
//! Rates count the bytes of one stream for a hop and for hashes, of all sources for encode and decode. `l2`
//! is what a live node meets (tiles that just arrived); `ram` streams 64 MiB buffers through one core.
#![allow(missing_docs, clippy::unwrap_used)] // criterion's macros document nothing; a bench may stop

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rapidraid::code::{Code, reconstruct, table};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::gf::{self, FingerprintKey, Kernel, Matrix, Mode, field};

/// What each buffer starts later in its pages than the one before.
const STAGGER_BYTES: usize = 4416;

/// A buffer whose start differs from its neighbours' by more than a page, so that streams do not alias.
fn buffers(count: usize, len: usize) -> Vec<Vec<u8>> {
    let entropy = SeededEntropy::new(len as u64);
    let mut bytes = vec![0; len];
    entropy.fill(&mut bytes);
    (0..count)
        .map(|i| {
            let mut buffer = vec![0; i * STAGGER_BYTES];
            buffer.extend_from_slice(&bytes);
            buffer
        })
        .collect()
}

fn views(buffers: &[Vec<u8>], len: usize) -> Vec<&[u8]> {
    buffers.iter().map(|buffer| &buffer[buffer.len() - len..]).collect()
}

fn apply(
    c: &mut Criterion,
    question: &str,
    (rows, cols): (usize, usize),
    place: &str,
    len: usize,
    counted: usize,
) {
    let mut group = c.benchmark_group(question);
    group.throughput(Throughput::Bytes((counted * len) as u64));
    let entries = (0..rows * cols).map(|i| field::exp(7 * i + 1)).collect();
    let matrix = Matrix::new(rows, cols, entries).unwrap();
    let (sources, mut targets) = (buffers(cols, len), buffers(rows, len));
    let inputs = views(&sources, len);
    for kernel in Kernel::available() {
        let starts = (0..).step_by(STAGGER_BYTES);
        let mut outputs: Vec<&mut [u8]> =
            targets.iter_mut().zip(starts).map(|(target, start)| &mut target[start..]).collect();
        group.bench_function(format!("{} {place}", kernel.name()), |b| {
            b.iter(|| kernel.apply(&matrix, &inputs, &mut outputs, Mode::Overwrite))
        });
    }
    group.finish();
}

fn hop(c: &mut Criterion) {
    for (place, len) in [("l2", 64 << 10), ("ram", 64 << 20)] {
        apply(c, "a hop with one local block", (2, 2), place, len, 1);
        apply(c, "a hop with two local blocks", (2, 3), place, len, 1);
        let mut group = c.benchmark_group("the floor: memcpy of one stream");
        group.throughput(Throughput::Bytes(len as u64));
        let (source, mut target) = (buffers(1, len), buffers(1, len));
        group
            .bench_function(place, |b| b.iter(|| target[0].copy_from_slice(black_box(&source[0]))));
        group.finish();
    }
    for (place, len) in [("l2", 32 << 10), ("ram", 16 << 20)] {
        apply(c, "five parities of eleven blocks", (5, 11), place, len, 11);
        apply(c, "eleven blocks from eleven pieces, dense", (11, 11), place, len, 11);
    }
}

fn grain(c: &mut Criterion) {
    let key = FingerprintKey::derive(&[7; 32]);
    for len in [4 << 10, 64 << 10] {
        let mut group = c.benchmark_group(format!("proof of {} KiB", len >> 10));
        group.throughput(Throughput::Bytes(len as u64));
        let grain = &buffers(1, len)[0];
        for kernel in Kernel::available() {
            group.bench_function(format!("fingerprint {}", kernel.name()), |b| {
                b.iter(|| key.fingerprint_by(kernel, black_box(grain)))
            });
        }
        group.bench_function("blake3", |b| b.iter(|| blake3::hash(black_box(grain))));
        group.finish();
    }
}

/// Is the sparse program faster than the dense matrix of the same reconstruction?
fn reconstruction(c: &mut Criterion) {
    let code = Code::Chain(table::find(16, 11).unwrap().clone());
    let blocks: Vec<usize> = (0..11).collect();
    let (len, mut scratch) = (64 << 10, Vec::new());
    let (sources, mut targets) = (buffers(11, len), buffers(11, len));
    let inputs = views(&sources, len);
    let starts = (0..).step_by(STAGGER_BYTES);
    let mut outputs: Vec<&mut [u8]> =
        targets.iter_mut().zip(starts).map(|(target, start)| &mut target[start..]).collect();
    let mut group = c.benchmark_group("eleven blocks from eleven pieces, by program");
    group.throughput(Throughput::Bytes((11 * len) as u64));
    for (name, missing) in [
        ("the first eleven", &[11, 12, 13, 14, 15][..]),
        ("one missing", &[4, 12, 13, 14, 15]),
        ("five missing", &[1, 3, 5, 7, 9]),
    ] {
        let available: Vec<usize> = (0..16).filter(|piece| !missing.contains(piece)).collect();
        let program = reconstruct(&code, &available, &blocks).unwrap();
        let dense = program.to_matrix().unwrap();
        group.bench_function(name, |b| b.iter(|| program.run(&inputs, &mut outputs, &mut scratch)));
        group.bench_function(format!("{name}, dense"), |b| {
            b.iter(|| gf::apply(&dense, &inputs, &mut outputs, Mode::Overwrite))
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20);
    targets = hop, grain, reconstruction
}
criterion_main!(benches);
