//! The fingerprint with AVX-512: bit planes by one affine instruction and one permutation, products
//! by VPCLMULQDQ.

use std::arch::x86_64::*;

use super::tables::AFFINE;
use crate::gf::fingerprint::FingerprintKey;

const VECTOR: usize = 64;

/// Returns a mask of the first `count` of 64 lanes, or of all lanes if `count` is larger.
fn first_lanes(count: usize) -> u64 {
    u64::MAX >> (VECTOR - count.clamp(1, VECTOR))
}

/// Bytes 1, 2, 4 to 128 in each quadword. As the operand of an affine instruction whose matrix is
/// the data, they transpose and mirror 8x8 bits: bit i of byte j of the result is bit j of byte 7-i
/// of the data.
const UNIT_BYTES: i64 = 0x8040_2010_0804_0201_u64 as i64;

/// A permutation that collects bit plane b in quadword b and mirrors the quadwords, too: byte 8b +
/// y is byte b of quadword 7-y.
const PLANES: [u8; 64] = {
    let mut permutation = [0; 64];
    let mut i = 0;
    while i < 64 {
        permutation[i] = (8 * (7 - i % 8) + i / 8) as u8;
        i += 1;
    }
    permutation
};

/// A permutation over the first eight bytes of the sums: byte 8c + y is byte c of the 128-bit sum
/// of plane 7-y. The first operand holds the four even planes, the second the four odd ones.
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

/// Computes the fingerprint of a grain.
///
/// The transposition mirrors the 64 lanes of a plane. Instead of mirroring them back, the key words
/// are mirrored as well: a carry-less product of mirrored factors is the mirrored product, i.e. its
/// bit d is bit 126 - d of the true product. The last level needs w mirrored anyway.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,gfni,vpclmulqdq")]
pub(super) fn fingerprint(key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
    let units = _mm512_set1_epi64(UNIT_BYTES);
    // SAFETY: both arrays are 64 bytes.
    let (planes, columns) = unsafe {
        (_mm512_loadu_si512(PLANES.as_ptr().cast()), _mm512_loadu_si512(COLUMNS.as_ptr().cast()))
    };
    let words = key.mirrored_words();
    let planes_of =
        |data| _mm512_permutexvar_epi8(planes, _mm512_gf2p8affine_epi64_epi8::<0>(units, data));
    // SAFETY: the slice is 16 bytes.
    let words_at = |t: usize| unsafe {
        _mm512_broadcast_i32x4(_mm_loadu_si128(words[t..t + 2].as_ptr().cast()))
    };
    // The sums of products with K[t] and with K[t+1], each for even and for odd planes.
    let mut sums = [[_mm512_setzero_si512(); 2]; 2];
    // Two vectors a and b together take three products instead of four: K[t] a + K[t+1] b = (K[t] +
    // K[t+1]) a + K[t+1] (a + b), and K[t+1] a + K[t+2] b = (K[t+1] + K[t+2]) b + K[t+1] (a + b).
    let mut shared = [_mm512_setzero_si512(); 2];
    let mut pairs = grain.chunks_exact(2 * VECTOR);
    let mut t = 0;
    for pair in &mut pairs {
        // SAFETY: the chunk is two vectors.
        let (a, b) = unsafe {
            let second = pair[VECTOR..].as_ptr();
            (_mm512_loadu_si512(pair.as_ptr().cast()), _mm512_loadu_si512(second.cast()))
        };
        let (a, b) = (planes_of(a), planes_of(b));
        let both = _mm512_xor_si512(a, b);
        let middle = words_at(t + 1);
        let outer = _mm512_xor_si512(words_at(t), middle);
        let [first, second] = &mut sums;
        first[0] = _mm512_xor_si512(first[0], _mm512_clmulepi64_epi128::<0x00>(a, outer));
        first[1] = _mm512_xor_si512(first[1], _mm512_clmulepi64_epi128::<0x01>(a, outer));
        second[0] = _mm512_xor_si512(second[0], _mm512_clmulepi64_epi128::<0x10>(b, outer));
        second[1] = _mm512_xor_si512(second[1], _mm512_clmulepi64_epi128::<0x11>(b, outer));
        shared[0] = _mm512_xor_si512(shared[0], _mm512_clmulepi64_epi128::<0x00>(both, middle));
        shared[1] = _mm512_xor_si512(shared[1], _mm512_clmulepi64_epi128::<0x01>(both, middle));
        t += 2;
    }
    for vector in pairs.remainder().chunks(VECTOR) {
        let mask = first_lanes(vector.len());
        // SAFETY: `mask` has no lane past the end of `vector`, which is not empty.
        let data = unsafe { _mm512_maskz_loadu_epi8(mask, vector.as_ptr().cast()) };
        let (data, words) = (planes_of(data), words_at(t));
        let [first, second] = &mut sums;
        first[0] = _mm512_xor_si512(first[0], _mm512_clmulepi64_epi128::<0x00>(data, words));
        first[1] = _mm512_xor_si512(first[1], _mm512_clmulepi64_epi128::<0x01>(data, words));
        second[0] = _mm512_xor_si512(second[0], _mm512_clmulepi64_epi128::<0x10>(data, words));
        second[1] = _mm512_xor_si512(second[1], _mm512_clmulepi64_epi128::<0x11>(data, words));
        t += 1;
    }
    for [even, odd] in &mut sums {
        *even = _mm512_xor_si512(*even, shared[0]);
        *odd = _mm512_xor_si512(*odd, shared[1]);
    }
    // The bytes of w in reverse with 15 zeros on either side: w[m] is at 270 - m, so bit d of half
    // r is at 144 - 128 r + d.
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

/// Computes `F[j] = sum over s of H[s] * w[s-j]`, for all 16 j at once, for one s after the other.
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
