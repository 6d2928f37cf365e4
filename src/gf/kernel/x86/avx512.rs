//! The kernel for processors with AVX-512 (F, BW, VL, VBMI), GFNI and VPCLMULQDQ: Intel since Ice
//! Lake, AMD since Zen 4.
//!
//! Multiplication by a constant is linear over the bits of a byte, so it is an 8x8 bit matrix,
//! which one affine instruction applies to 64 bytes.

use std::arch::x86_64::*;

use super::super::Mode;
use super::super::group::{GROUP_INPUTS, GROUP_OUTPUTS, Group, STEP_BYTES};
use super::loops::PREFETCH_BYTES;
use super::tables::AFFINE;
use super::{LINE_BYTES, LineTask, Task, Way, fingerprint512};
use crate::gf::fingerprint::FingerprintKey;
use crate::gf::line::{Line, Operation, Source, Target};

type Vector = __m512i;
const VECTOR: usize = 64;
/// A single instruction sums three vectors: with many rows, sums cost as much as products.
const HAS_XOR3: bool = true;

/// A proof that this processor has the instructions: only [`Avx512Gfni::detect`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gf::kernel) struct Avx512Gfni(());

impl Avx512Gfni {
    pub fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("gfni")
            && is_x86_feature_detected!("vpclmulqdq");
        has_all.then_some(Self(()))
    }

    /// Applies a group, which must have whole steps.
    pub fn apply(self, group: Group<'_, '_, '_>) {
        // SAFETY: `self` proves that the processor has every feature that `apply` is compiled for.
        unsafe { apply(&Task::of(group, VECTOR)) }
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
        unsafe { run(&LineTask::of(line, inputs, outputs, bytes, mode)) }
    }

    pub fn fingerprint(self, key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
        // SAFETY: `self` proves that the processor has every feature that `fingerprint` is compiled
        // for.
        unsafe { fingerprint512::fingerprint(key, grain) }
    }
}

// Register use: twelve rows of two vectors, and for two columns their data, a factor and a product
// each, are 32 registers.
loops! {
    "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq", most 12,
    rows (1, 2, 1) (2, 2, 1) (3, 2, 1) (4, 2, 1) (5, 2, 1) (6, 2, 1)
         (7, 2, 1) (8, 2, 1) (9, 2, 1) (10, 2, 1) (11, 2, 1) (12, 2, 1),
    shapes (1, 1, 1, 1) (1, 2, 1, 1) (2, 1, 1, 1) (2, 2, 1, 1) (2, 2, 2, 1) (2, 4, 2, 1) (4, 2, 2, 1) (4, 4, 2, 1)
}

// With non-temporal stores, eight vectors at once took a third longer than four.
lines! { "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq", wide 8, stream 4 }

inline! {
    "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq"
    fn zero() -> Vector { _mm512_setzero_si512() }
    fn xor(a: Vector, b: Vector) -> Vector { _mm512_xor_si512(a, b) }
    fn xor3(a: Vector, b: Vector, c: Vector) -> Vector { _mm512_ternarylogic_epi64::<0x96>(a, b, c) }
    fn raw(coef: u8) -> u64 { AFFINE[usize::from(coef)] }
    fn from_raw(matrix: u64) -> Vector { _mm512_set1_epi64(matrix as i64) }
    fn factor(coef: u8) -> Vector { from_raw(raw(coef)) }
    fn product(factor: Vector, data: Vector) -> Vector { _mm512_gf2p8affine_epi64_epi8::<0>(data, factor) }
    /// # Safety
    /// `from` must be the address of `VECTOR` bytes that can be read.
    unsafe fn load(from: *const u8) -> Vector {
        // SAFETY: the caller guarantees it.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    /// # Safety
    /// `to` must be the address of `VECTOR` bytes that can be written.
    unsafe fn store(to: *mut u8, data: Vector) {
        // SAFETY: the caller guarantees it.
        unsafe { _mm512_storeu_si512(to.cast(), data) }
    }
    /// # Safety
    /// `to` must be the address of `VECTOR` bytes that can be written, and a multiple of `VECTOR`.
    unsafe fn stream(to: *mut u8, data: Vector) {
        // SAFETY: the caller guarantees it.
        unsafe { _mm512_stream_si512(to.cast(), data) }
    }
}
