//! The fingerprint with AVX2 and the carry-less product of two words.

use std::arch::x86_64::*;

use super::tables::NIBBLES;
use crate::gf::fingerprint::FingerprintKey;

const VECTOR: usize = 64;

/// Computes the fingerprint of a grain. Level 1 of the definition is computed plane by plane: the
/// sign bits of a vector's bytes, shifted by 7-b, are its bit plane b.
#[target_feature(enable = "avx2,pclmulqdq")]
pub(super) fn fingerprint(key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
    let words = key.words();
    // The sums A[r][b] of the definition.
    let mut sums = [[_mm_setzero_si128(); 8]; 2];
    let mut t = 0;
    while t * VECTOR < grain.len() {
        let rest = &grain[t * VECTOR..];
        let mut padded = [0; VECTOR];
        let mut vector = rest.as_ptr();
        if rest.len() < VECTOR {
            padded[..rest.len()].copy_from_slice(rest);
            vector = padded.as_ptr();
        }
        // SAFETY: `vector` points to 64 bytes, of the grain or of the padded copy; the slice of
        // words is 16 bytes.
        let (mut low, mut high, words) = unsafe {
            (
                _mm256_loadu_si256(vector.cast()),
                _mm256_loadu_si256(vector.wrapping_add(VECTOR / 2).cast()),
                _mm_loadu_si128(words[t..t + 2].as_ptr().cast()),
            )
        };
        let mut b = 8;
        while b > 0 {
            b -= 1;
            let plane = u64::from(_mm256_movemask_epi8(low) as u32)
                | u64::from(_mm256_movemask_epi8(high) as u32) << 32;
            let plane = _mm_cvtsi64_si128(plane as i64);
            sums[0][b] = _mm_xor_si128(sums[0][b], _mm_clmulepi64_si128::<0x00>(plane, words));
            sums[1][b] = _mm_xor_si128(sums[1][b], _mm_clmulepi64_si128::<0x10>(plane, words));
            (low, high) = (_mm256_add_epi8(low, low), _mm256_add_epi8(high, high));
        }
        t += 1;
    }
    // The bytes of w, eight in a word, the first in the low byte. Plain loops: a call of an iterator
    // that is compiled in another unit would not be inlined.
    let mut w = [0; 32];
    let mut at = 0;
    while at < 2 * 8 {
        let (r, b) = (at / 8, at % 8);
        let mut bits = [0_u8; 16];
        // SAFETY: `bits` is 16 bytes.
        unsafe { _mm_storeu_si128(bits.as_mut_ptr().cast(), sums[r][b]) };
        let mut i = 0;
        while i < 16 {
            w[16 * r + i] |= spread(bits[i]) << b;
            i += 1;
        }
        at += 1;
    }
    last_level(key.tail(), &w)
}

/// Returns a word whose byte i is bit i of `bits`.
#[inline]
fn spread(bits: u8) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // Bit i alone is left in byte i. Adding 127 to a byte sets its highest bit unless it is 0.
    let single = (u64::from(bits) * ONES) & 0x8040_2010_0804_0201;
    (single + 127 * ONES) >> 7 & ONES
}

/// Computes `F[j] = sum over m of H[m+j] * w[m]`, for all 16 j at once, for one m after the other.
#[target_feature(enable = "avx2,pclmulqdq")]
fn last_level(h: &[u8; FingerprintKey::TAIL_BYTES], w: &[u64; 32]) -> [u8; 16] {
    const { assert!(FingerprintKey::TAIL_BYTES >= 255 + 16) };
    let nibble = _mm_set1_epi8(0x0f);
    let mut sum = _mm_setzero_si128();
    let mut m = 0;
    while m < 256 {
        let coef = (w[m / 8] >> (8 * (m % 8))) as u8;
        let [low, high] = &NIBBLES[usize::from(coef)];
        // SAFETY: 16 bytes of `h` follow each m below 256, and the tables are 16 bytes.
        let (window, low, high) = unsafe {
            (
                _mm_loadu_si128(h.as_ptr().wrapping_add(m).cast()),
                _mm_loadu_si128(low.as_ptr().cast()),
                _mm_loadu_si128(high.as_ptr().cast()),
            )
        };
        let low = _mm_shuffle_epi8(low, _mm_and_si128(window, nibble));
        let above = _mm_and_si128(_mm_srli_epi64::<4>(window), nibble);
        sum = _mm_xor_si128(sum, _mm_xor_si128(low, _mm_shuffle_epi8(high, above)));
        m += 1;
    }
    let mut fingerprint = [0; 16];
    // SAFETY: `fingerprint` is 16 bytes.
    unsafe { _mm_storeu_si128(fingerprint.as_mut_ptr().cast(), sum) };
    fingerprint
}
