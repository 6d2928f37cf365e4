//! How fast is what a hop does to its bytes, beside memcpy and BLAKE3 on the same bytes?
//!
//! Rates count the bytes of one stream for a hop and for hashes, of all sources for encode and decode. `l2`
//! is what a live node meets (tiles that just arrived); `ram` streams 64 MiB buffers through one core.
#![allow(missing_docs)] // criterion's macros make undocumented items

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::gf::{FingerprintKey, Kernel, Matrix, Mode, field};

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

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20);
    targets = hop, grain
}
criterion_main!(benches);
