//! The kernels for processors with AVX2. One uses the byte shuffle: two lookups in tables of
//! sixteen bytes. The other uses the affine instruction, for processors with GFNI but without
//! AVX-512 (Intel's client processors since Alder Lake).

use std::arch::x86_64::*;

use super::super::Mode;
use super::super::group::{GROUP_INPUTS, GROUP_OUTPUTS, Group, STEP_BYTES};
use super::loops::PREFETCH_BYTES;
use super::tables::{AFFINE, NIBBLES, Nibbles};
use super::{LINE_BYTES, LineTask, Task, Way, fingerprint256};
use crate::gf::fingerprint::FingerprintKey;
use crate::gf::line::{Line, Operation, Source, Target};

type Vector = __m256i;
const VECTOR: usize = 32;
/// Sums of three take two instructions here, and the data of two columns would not fit into the
/// registers beside six rows.
const HAS_XOR3: bool = false;

/// A proof that this processor has AVX2 and the carry-less product: only [`Avx2::detect`] makes
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gf::kernel) struct Avx2(());

/// A proof that this processor has AVX2, the carry-less product and GFNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gf::kernel) struct Avx2Gfni(Avx2);

impl Avx2 {
    pub fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("pclmulqdq");
        has_all.then_some(Self(()))
    }

    /// Applies a group, which must have whole steps of whole buffers.
    pub fn apply(self, group: Group<'_, '_, '_>) {
        // SAFETY: `self` proves that the processor has every feature that `apply` is compiled for.
        unsafe { shuffle::apply(&Task::of(group, VECTOR)) }
    }

    /// Runs a straight-line program over the first `bytes` of its buffers, as far as whole passes
    /// reach. Returns the number of bytes that are done.
    pub fn run(
        self,
        line: &Line,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        bytes: usize,
        mode: Mode,
    ) -> usize {
        // SAFETY: `self` proves that the processor has every feature that `run` is compiled for.
        unsafe { shuffle::run(&LineTask::of(line, inputs, outputs, bytes, mode)) }
    }

    pub fn fingerprint(self, key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
        // SAFETY: `self` proves that the processor has every feature that `fingerprint` is compiled
        // for.
        unsafe { fingerprint256::fingerprint(key, grain) }
    }
}

impl Avx2Gfni {
    pub fn detect() -> Option<Self> {
        Avx2::detect().filter(|_| is_x86_feature_detected!("gfni")).map(Self)
    }

    /// Applies a group, which must have whole steps of whole buffers.
    pub fn apply(self, group: Group<'_, '_, '_>) {
        // SAFETY: `self` proves that the processor has every feature that `apply` is compiled for.
        unsafe { affine::apply(&Task::of(group, VECTOR)) }
    }

    /// Runs a straight-line program over the first `bytes` of its buffers, as far as whole passes
    /// reach. Returns the number of bytes that are done.
    pub fn run(
        self,
        line: &Line,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        bytes: usize,
        mode: Mode,
    ) -> usize {
        // SAFETY: `self` proves that the processor has every feature that `run` is compiled for.
        unsafe { affine::run(&LineTask::of(line, inputs, outputs, bytes, mode)) }
    }

    pub fn fingerprint(self, key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
        self.0.fingerprint(key, grain)
    }
}

inline! {
    "avx2"
    fn zero() -> Vector { _mm256_setzero_si256() }
    fn xor(a: Vector, b: Vector) -> Vector { _mm256_xor_si256(a, b) }
    fn xor3(a: Vector, b: Vector, c: Vector) -> Vector { xor(a, xor(b, c)) }
    /// # Safety
    /// `from` must be the address of `VECTOR` bytes that can be read.
    unsafe fn load(from: *const u8) -> Vector {
        // SAFETY: the caller guarantees it.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    /// # Safety
    /// `to` must be the address of `VECTOR` bytes that can be written.
    unsafe fn store(to: *mut u8, data: Vector) {
        // SAFETY: the caller guarantees it.
        unsafe { _mm256_storeu_si256(to.cast(), data) }
    }
    /// # Safety
    /// `to` must be the address of `VECTOR` bytes that can be written, and a multiple of `VECTOR`.
    unsafe fn stream(to: *mut u8, data: Vector) {
        // SAFETY: the caller guarantees it.
        unsafe { _mm256_stream_si256(to.cast(), data) }
    }
}

/// Products by the byte shuffle. Four rows, their data in halves and a factor fit into sixteen
/// registers.
mod shuffle {
    use super::*;

    loops! {
        "avx2", most 4, rows (1, 2, 2) (2, 2, 2) (3, 1, 1) (4, 1, 1),
        shapes (1, 1, 1, 2) (1, 2, 1, 2) (2, 1, 1, 2) (2, 2, 1, 2)
    }

    lines! { "avx2", wide 4, stream 4 }

    type Factor = [Vector; 2];

    inline! {
        "avx2"
        fn raw(coef: u8) -> &'static Nibbles { &NIBBLES[usize::from(coef)] }
        fn from_raw([low, high]: &'static Nibbles) -> Factor {
            // SAFETY: each table is 16 bytes.
            let tables = unsafe {
                [_mm_loadu_si128(low.as_ptr().cast()), _mm_loadu_si128(high.as_ptr().cast())]
            };
            [_mm256_broadcastsi128_si256(tables[0]), _mm256_broadcastsi128_si256(tables[1])]
        }
        fn factor(coef: u8) -> Factor { from_raw(raw(coef)) }
        fn product([low, high]: Factor, data: Vector) -> Vector {
            let nibble = _mm256_set1_epi8(0x0f);
            let low = _mm256_shuffle_epi8(low, _mm256_and_si256(data, nibble));
            let above = _mm256_and_si256(_mm256_srli_epi64::<4>(data), nibble);
            xor(low, _mm256_shuffle_epi8(high, above))
        }
    }
}

/// Products by the affine instruction.
mod affine {
    use super::*;

    loops! {
        "avx2,gfni", most 6,
        rows (1, 2, 2) (2, 2, 2) (3, 2, 2) (4, 2, 1) (5, 2, 1) (6, 2, 1),
        shapes (1, 1, 1, 4) (1, 2, 1, 4) (2, 1, 1, 4) (2, 2, 1, 4)
    }

    lines! { "avx2,gfni", wide 4, stream 4 }

    inline! {
        "avx2,gfni"
        fn raw(coef: u8) -> u64 { AFFINE[usize::from(coef)] }
        fn from_raw(matrix: u64) -> Vector { _mm256_set1_epi64x(matrix as i64) }
        fn factor(coef: u8) -> Vector { from_raw(raw(coef)) }
        fn product(factor: Vector, data: Vector) -> Vector {
            _mm256_gf2p8affine_epi64_epi8::<0>(data, factor)
        }
    }
}
