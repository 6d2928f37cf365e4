//! The kernel for x86-64 processors with AVX-512 (F, BW, VL, VBMI), GFNI and VPCLMULQDQ: Intel since Ice
//! Lake, AMD since Zen 4.
//!
//! Multiplication by a constant is linear over the bits of a byte, so it is an 8x8 bit matrix, and one
//! affine instruction applies it to 64 bytes; this works for any field polynomial.

use std::arch::x86_64::*;

use super::{GROUP_INPUTS, GROUP_OUTPUTS, Group, Mode};
use crate::gf::field;
use crate::gf::fingerprint::FingerprintKey;

const VECTOR: usize = 64;
/// How far ahead of the loads each input is fetched: with many streams the hardware's own prefetch gives up.
const PREFETCH_BYTES: usize = 512;

/// `AFFINE[c]` is the bit matrix that multiplies by c, as the affine instruction reads it: bit i of the
/// result is the parity of byte 7-i of the matrix AND the operand.
static AFFINE: [u64; 256] = affine_matrices();

const fn affine_matrices() -> [u64; 256] {
    let mut matrices = [0; 256];
    let mut c = 0;
    while c < 256 {
        let mut bit = 0;
        while bit < 8 {
            let product = field::mul(c as u8, 1 << bit) as u64;
            let mut i = 0;
            while i < 8 {
                matrices[c] |= (product >> i & 1) << (8 * (7 - i) + bit);
                i += 1;
            }
            bit += 1;
        }
        c += 1;
    }
    matrices
}

/// Proof that this processor has the instructions: only [`Avx512Gfni::detect`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx512Gfni(());

impl Avx512Gfni {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("gfni")
            && is_x86_feature_detected!("vpclmulqdq");
        has_all.then_some(Self(()))
    }

    pub(super) fn apply(self, group: Group<'_, '_>) {
        // SAFETY: `self` proves that the processor has every feature that `apply` is compiled for.
        unsafe { apply(group) }
    }

    pub(super) fn fingerprint(self, key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
        // SAFETY: `self` proves that the processor has every feature that `fingerprint` is compiled for.
        unsafe { fingerprint(key, grain) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq")]
fn apply(group: Group<'_, '_>) {
    // Fewer outputs leave registers for more vectors of each, which share the loads of coefficients.
    match group.outputs.len() {
        1 => apply_rows::<1, 4>(group),
        2 => apply_rows::<2, 4>(group),
        3 => apply_rows::<3, 4>(group),
        4 => apply_rows::<4, 4>(group),
        5 => apply_rows::<5, 2>(group),
        6 => apply_rows::<6, 2>(group),
        7 => apply_rows::<7, 2>(group),
        _ => apply_rows::<GROUP_OUTPUTS, 2>(group),
    }
}

/// The loop for `R` outputs, `W` vectors of each at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq")]
fn apply_rows<const R: usize, const W: usize>(group: Group<'_, '_>) {
    let Group { coefs, inputs, outputs, range, mode } = group;
    let mut matrices = [[0; R]; GROUP_INPUTS];
    for (matrices, coefs) in matrices.iter_mut().zip(coefs) {
        *matrices = std::array::from_fn(|row| AFFINE[usize::from(coefs[row])]);
    }
    let matrices = &matrices[..inputs.len()];
    let accumulate = mode == Mode::Accumulate;
    let mut at = range.start;
    while range.end - at >= W * VECTOR {
        let mut sums = [[_mm512_setzero_si512(); W]; R];
        if accumulate {
            for (sums, output) in sums.iter_mut().zip(outputs.iter()) {
                for (w, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: at + W * VECTOR <= range.end, which is within every output (`Group`).
                    *sum =
                        unsafe { _mm512_loadu_si512(output.as_ptr().add(at + w * VECTOR).cast()) };
                }
            }
        }
        for (input, matrices) in inputs.iter().zip(matrices) {
            let source = input.as_ptr().wrapping_add(at);
            let mut data = [_mm512_setzero_si512(); W];
            for (w, data) in data.iter_mut().enumerate() {
                // SAFETY: at + W * VECTOR <= range.end, which is within every input (`Group`).
                *data = unsafe { _mm512_loadu_si512(source.add(w * VECTOR).cast()) };
                // May point past the input: fetching ahead of an address that is not mapped does nothing.
                let ahead = source.wrapping_add(w * VECTOR + PREFETCH_BYTES);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            }
            for (sums, &matrix) in sums.iter_mut().zip(matrices) {
                let matrix = _mm512_set1_epi64(matrix as i64);
                for (sum, &data) in sums.iter_mut().zip(&data) {
                    let product = _mm512_gf2p8affine_epi64_epi8::<0>(data, matrix);
                    *sum = _mm512_xor_si512(*sum, product);
                }
            }
        }
        for (sums, output) in sums.iter().zip(outputs.iter_mut()) {
            for (w, &sum) in sums.iter().enumerate() {
                // SAFETY: at + W * VECTOR <= range.end, which is within every output (`Group`).
                unsafe {
                    _mm512_storeu_si512(output.as_mut_ptr().add(at + w * VECTOR).cast(), sum)
                };
            }
        }
        at += W * VECTOR;
    }
    while at < range.end {
        let mask = first_lanes(range.end - at);
        for (row, output) in outputs.iter_mut().enumerate() {
            let target = output.as_mut_ptr().wrapping_add(at);
            let mut sum = _mm512_setzero_si512();
            if accumulate {
                // SAFETY: `mask` has no lane at or past range.end, which is within every output (`Group`).
                sum = unsafe { _mm512_maskz_loadu_epi8(mask, target.cast()) };
            }
            for (input, matrices) in inputs.iter().zip(matrices) {
                let source = input.as_ptr().wrapping_add(at);
                // SAFETY: `mask` has no lane at or past range.end, which is within every input (`Group`).
                let data = unsafe { _mm512_maskz_loadu_epi8(mask, source.cast()) };
                let matrix = _mm512_set1_epi64(matrices[row] as i64);
                sum = _mm512_xor_si512(sum, _mm512_gf2p8affine_epi64_epi8::<0>(data, matrix));
            }
            // SAFETY: `mask` has no lane at or past range.end, which is within every output (`Group`).
            unsafe { _mm512_mask_storeu_epi8(target.cast(), mask, sum) };
        }
        at += VECTOR;
    }
}

/// A mask of the first `count` of 64 lanes; of all when there are more.
fn first_lanes(count: usize) -> u64 {
    u64::MAX >> (VECTOR - count.clamp(1, VECTOR))
}

/// Bytes 1, 2, 4 to 128 in each quadword. As the operand of an affine whose matrix is the data it
/// transposes 8x8 bits and mirrors them: bit i of byte j of the result is bit j of byte 7-i of the data.
const UNIT_BYTES: i64 = 0x8040_2010_0804_0201_u64 as i64;

/// Byte 8b + y is byte b of quadword 7-y: collects bit plane b in quadword b, quadwords mirrored too.
const PLANES: [u8; 64] = {
    let mut permutation = [0; 64];
    let mut i = 0;
    while i < 64 {
        permutation[i] = (8 * (7 - i % 8) + i / 8) as u8;
        i += 1;
    }
    permutation
};

/// Byte 8c + y is byte c of the 128-bit sum of plane 7-y, of the first eight c; even planes lie in the
/// first operand, odd ones in the second, four each.
const COLUMNS: [u8; 64] = {
    let mut permutation = [0; 64];
    let mut i = 0;
    while i < 64 {
        let plane = 7 - i % 8;
        permutation[i] = (64 * (plane % 2) + 16 * (plane / 2) + i / 8) as u8;
        i += 1;
    }
    permutation
};

/// The transposition mirrors the 64 lanes of a plane. Instead of turning them back, the key words are
/// mirrored as well: a carry-less product of mirrored factors is the mirrored product, bit d of it being bit
/// 126 - d of the true one. The last level wants w mirrored anyway.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq")]
fn fingerprint(key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
    let units = _mm512_set1_epi64(UNIT_BYTES);
    // SAFETY: both arrays are 64 bytes.
    let (planes, columns) = unsafe {
        (_mm512_loadu_si512(PLANES.as_ptr().cast()), _mm512_loadu_si512(COLUMNS.as_ptr().cast()))
    };
    // Sums of products with K[t] and K[t+1], for even and for odd planes.
    let mut sums = [[_mm512_setzero_si512(); 2]; 2];
    for (vector, words) in grain.chunks(VECTOR).zip(key.mirrored_words().windows(2)) {
        let mask = first_lanes(vector.len());
        // SAFETY: `mask` has no lane past the end of `vector`, which is not empty.
        let data = unsafe { _mm512_maskz_loadu_epi8(mask, vector.as_ptr().cast()) };
        // SAFETY: `words` is 16 bytes.
        let words = unsafe { _mm_loadu_si128(words.as_ptr().cast()) };
        let words = _mm512_broadcast_i32x4(words);
        let data = _mm512_gf2p8affine_epi64_epi8::<0>(units, data);
        let data = _mm512_permutexvar_epi8(planes, data);
        let products = [
            [
                _mm512_clmulepi64_epi128::<0x00>(data, words),
                _mm512_clmulepi64_epi128::<0x01>(data, words),
            ],
            [
                _mm512_clmulepi64_epi128::<0x10>(data, words),
                _mm512_clmulepi64_epi128::<0x11>(data, words),
            ],
        ];
        for (sums, products) in sums.iter_mut().zip(&products) {
            for (sum, &product) in sums.iter_mut().zip(products) {
                *sum = _mm512_xor_si512(*sum, product);
            }
        }
    }
    // w backwards with 15 zeros on either side: w[m] is at 270 - m, so bit d of half r is at 144 - 128 r + d.
    let mut mirrored_w = [0; 15 + 256 + 15];
    for (r, [even, odd]) in sums.into_iter().enumerate() {
        for half in 0..2 {
            let columns = _mm512_add_epi8(columns, _mm512_set1_epi8(8 * half as i8));
            let bits = _mm512_permutex2var_epi8(even, columns, odd);
            let bytes = _mm512_gf2p8affine_epi64_epi8::<0>(units, bits);
            let target: &mut [u8] = &mut mirrored_w[144 - 128 * r + 64 * half..][..VECTOR];
            // SAFETY: `target` is 64 bytes.
            unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), bytes) };
        }
    }
    last_level(key.tail(), &mirrored_w)
}

/// `F[j] = sum over s of H[s] * w[s-j]`: all 16 j at once, for one s after the other.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq")]
fn last_level(h: &[u8; FingerprintKey::TAIL_BYTES], mirrored_w: &[u8; 286]) -> [u8; 16] {
    let mut sum = _mm_setzero_si128();
    for (&coef, window) in h.iter().zip(mirrored_w.windows(16).rev()) {
        // SAFETY: `window` is 16 bytes.
        let window = unsafe { _mm_loadu_si128(window.as_ptr().cast()) };
        let matrix = _mm_set1_epi64x(AFFINE[usize::from(coef)] as i64);
        sum = _mm_xor_si128(sum, _mm_gf2p8affine_epi64_epi8::<0>(window, matrix));
    }
    let mut fingerprint = [0; 16];
    // SAFETY: `fingerprint` is 16 bytes.
    unsafe { _mm_storeu_si128(fingerprint.as_mut_ptr().cast(), sum) };
    fingerprint
}
