//! The linear fingerprint of a grain: 16 bytes that are GF(2^8)-linear in the grain's bytes. The
//! fingerprints of source blocks therefore determine that of every combination of them (after
//! Hendricks, Ganger, Reiter, *Verifying distributed erasure-coded data*, PODC 2007). The
//! fingerprint is part of the format.
//!
//! A fingerprint detects faults. Two grains that differ by an error which does not depend on the
//! key have the same fingerprint with probability at most 2^-127, whatever the error's shape. A
//! fingerprint does not detect malice: an attacker who knows the key finds a collision by solving a
//! linear equation. A fingerprint identifies nothing; BLAKE3 does that.
//!
//! # Definition
//!
//! BLAKE3's key derivation (context `rapidraid fingerprint v1`) expands the 32-byte key. Its output
//! is read as 1025 little-endian words K[0..1025] of 64 bits, then 271 bytes H[0..271]. A grain
//! shorter than 64 KiB is padded with zeros. For its vector t of 64 bytes, bit l of the word
//! `P[t][b]` is bit b of byte l.
//!
//! 1. For r in {0, 1} and bits b: `A[r][b] = XOR over t of clmul(P[t][b], K[t+r])`, carry-less
//!    products of 127 bits.
//! 2. Bit b of byte `w[128 r + i]` is bit i of `A[r][b]`.
//! 3. `F[j] = sum over m of H[m+j] * w[m]` in GF(2^8), for j in 0..16.
//!
//! Levels 1 and 2 act on positions with weights in GF(2), the same for every bit plane, and so
//! commute with any byte factor. Any error, even in one bit plane alone, changes the 254 bytes of
//! their image except with probability 2^-128. The last level, Toeplitz over the code's own field,
//! reduces the image to 16 bytes at the same probability.

use std::fmt;
use std::ops::Add;

use serde::{Deserialize, Serialize};

use super::kernel::Kernel;
use super::{GfError, field};
use crate::units::GRAIN_BYTES;

/// The fingerprint of a grain. It is zero for a grain of zeros and for an empty grain.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 16]);

impl Fingerprint {
    /// The fingerprint of a grain of zeros.
    pub const ZERO: Self = Self([0; 16]);

    /// Returns the fingerprint of `coef` times a grain.
    #[must_use]
    pub fn scale(self, coef: u8) -> Self {
        Self(self.0.map(|byte| field::mul(coef, byte)))
    }

    /// Returns the fingerprint of the sum of all `coefs[i]` times grain i.
    pub fn combine(coefs: &[u8], of: &[Fingerprint]) -> Result<Self, GfError> {
        if coefs.len() != of.len() {
            let what = "fingerprints to combine";
            return Err(GfError::Count { what, expected: coefs.len(), actual: of.len() });
        }
        let terms = coefs.iter().zip(of).filter(|(coef, _)| **coef != 0);
        Ok(terms.fold(Self::ZERO, |sum, (&coef, term)| sum + term.scale(coef)))
    }
}

/// Returns the fingerprint of the sum of two grains.
impl Add for Fingerprint {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|j| self.0[j] ^ other.0[j]))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// The number of 64-byte vectors in a grain.
const VECTORS: usize = GRAIN_BYTES as usize / 64;

/// An expanded key. It takes about 16 KiB and is made once per shard.
#[derive(Clone)]
pub struct FingerprintKey(Box<Expanded>);

#[derive(Clone)]
struct Expanded {
    words: [u64; VECTORS + 1],
    mirrored: [u64; VECTORS + 1],
    tail: [u8; FingerprintKey::TAIL_BYTES],
}

impl FingerprintKey {
    /// The length of the last level's key in bytes: 256 weights for the first byte, and one more
    /// for each of the 15 others.
    pub(super) const TAIL_BYTES: usize = 256 + 15;

    /// Expands the 32-byte key that a shard's record holds.
    pub fn derive(key: &[u8; 32]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("rapidraid fingerprint v1");
        hasher.update(key);
        let mut stream = hasher.finalize_xof();
        let mut expanded = Box::new(Expanded {
            words: [0; VECTORS + 1],
            mirrored: [0; VECTORS + 1],
            tail: [0; Self::TAIL_BYTES],
        });
        let Expanded { words, mirrored, tail } = &mut *expanded;
        for (word, mirrored) in words.iter_mut().zip(mirrored) {
            let mut bytes = [0; 8];
            stream.fill(&mut bytes);
            *word = u64::from_le_bytes(bytes);
            *mirrored = word.reverse_bits();
        }
        stream.fill(tail);
        Self(expanded)
    }

    /// Returns the fingerprint of a grain, in time proportional to its length. Returns
    /// [`GfError::GrainTooLong`] for more than [`GRAIN_BYTES`].
    pub fn fingerprint(&self, grain: &[u8]) -> Result<Fingerprint, GfError> {
        self.fingerprint_by(Kernel::active(), grain)
    }

    /// Returns the fingerprint as a chosen kernel computes it, for tests and measurements.
    pub fn fingerprint_by(&self, kernel: Kernel, grain: &[u8]) -> Result<Fingerprint, GfError> {
        if grain.len() as u64 > GRAIN_BYTES {
            return Err(GfError::GrainTooLong { bytes: grain.len() });
        }
        Ok(Fingerprint(kernel.fingerprint(self, grain)))
    }

    /// Returns the words K of the definition.
    pub(super) fn words(&self) -> &[u64] {
        &self.0.words
    }

    /// Returns the words K, each with its bits in reverse order.
    pub(super) fn mirrored_words(&self) -> &[u64] {
        &self.0.mirrored
    }

    /// Returns the bytes H of the definition.
    pub(super) fn tail(&self) -> &[u8; Self::TAIL_BYTES] {
        &self.0.tail
    }
}

impl fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FingerprintKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::{Entropy, SeededEntropy};

    const LENGTHS: [usize; 16] =
        [0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096, 16_383, 16_385, 65_472, 65_535, 65_536];

    fn key(seed: u64) -> FingerprintKey {
        let mut key = [0; 32];
        SeededEntropy::new(seed).fill(&mut key);
        FingerprintKey::derive(&key)
    }

    fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        SeededEntropy::new(seed).fill(&mut bytes);
        bytes
    }

    /// Computes levels 1 and 2 directly from the definition, one bit at a time.
    fn slow_image(key: &FingerprintKey, grain: &[u8]) -> [u8; 256] {
        let mut padded = grain.to_vec();
        padded.resize(GRAIN_BYTES as usize, 0);
        let mut w = [0; 256];
        for r in 0..2 {
            for b in 0..8 {
                let mut sum = 0u128;
                for (t, vector) in padded.chunks(64).enumerate() {
                    let word = u128::from(key.words()[t + r]);
                    for (l, byte) in vector.iter().enumerate() {
                        sum ^= if byte >> b & 1 == 1 { word << l } else { 0 };
                    }
                }
                (0..128).for_each(|i| w[128 * r + i] |= ((sum >> i & 1) as u8) << b);
            }
        }
        w
    }

    fn slow_reference(key: &FingerprintKey, grain: &[u8]) -> Fingerprint {
        let w = slow_image(key, grain);
        let mut fingerprint = Fingerprint::ZERO;
        for j in 0..16 {
            for (m, &byte) in w.iter().enumerate() {
                fingerprint.0[j] ^= field::mul(key.tail()[m + j], byte);
            }
        }
        fingerprint
    }

    #[test]
    fn every_kernel_is_the_definition() {
        let key = key(1);
        for len in LENGTHS {
            let grain = bytes(2, len);
            let expected = slow_reference(&key, &grain);
            for kernel in Kernel::available() {
                let got = key.fingerprint_by(kernel, &grain).unwrap();
                assert_eq!(got, expected, "{} on {len} bytes", kernel.name());
            }
        }
    }

    #[test]
    fn every_kernel_agrees_at_every_short_length_and_alignment() {
        let (key, grain) = (key(3), bytes(4, 400));
        for start in 0..65 {
            for end in start..grain.len() {
                let part = &grain[start..end];
                let expected = key.fingerprint_by(Kernel::named("portable").unwrap(), part);
                for kernel in Kernel::available() {
                    assert_eq!(key.fingerprint_by(kernel, part), expected, "{}", kernel.name());
                }
            }
        }
    }

    /// Pins the format. These values change only with a version of the format.
    #[test]
    fn golden_values() {
        let counting: Vec<u8> = (0..GRAIN_BYTES).map(|i| (i % 251) as u8).collect();
        let key = FingerprintKey::derive(&std::array::from_fn(|i| i as u8));
        for (len, expected) in [
            (0, "00000000000000000000000000000000"),
            (2, "a1e3172497d6c535e8e78db464c2c67d"),
            (1000, "de335cb08ebaf01cb3b2341e0f6684ca"),
            (65_536, "5b097b6fcb0087e2493043baf54df577"),
        ] {
            let got = key.fingerprint(&counting[..len]).unwrap();
            assert_eq!(got.to_string(), expected, "{len} bytes");
        }
    }

    #[test]
    fn the_first_levels_alone_are_linear() {
        let (key, u, v) = (key(5), bytes(6, 3000), bytes(7, 3000));
        let (a, b) = (0x53, 0xca);
        let mixed: Vec<u8> =
            u.iter().zip(&v).map(|(&u, &v)| field::mul(a, u) ^ field::mul(b, v)).collect();
        let (of_u, of_v) = (slow_image(&key, &u), slow_image(&key, &v));
        let expected: [u8; 256] =
            std::array::from_fn(|m| field::mul(a, of_u[m]) ^ field::mul(b, of_v[m]));
        assert_eq!(slow_image(&key, &mixed), expected);
    }

    #[test]
    fn the_whole_is_linear_and_blind_to_zeros_behind() {
        let key = key(8);
        for len in LENGTHS {
            let grains = [bytes(9, len), bytes(10, len / 2), bytes(11, len.saturating_sub(1))];
            let coefs = [1, 0x1d, 0xfe];
            let mut mixed = vec![0; len];
            for (grain, coef) in grains.iter().zip(coefs) {
                mixed.iter_mut().zip(grain).for_each(|(sum, &x)| *sum ^= field::mul(coef, x));
            }
            let of = grains.map(|grain| key.fingerprint(&grain).unwrap());
            let expected = Fingerprint::combine(&coefs, &of).unwrap();
            assert_eq!(key.fingerprint(&mixed), Ok(expected), "{len} bytes");
            mixed.resize(GRAIN_BYTES as usize, 0);
            assert_eq!(key.fingerprint(&mixed), Ok(expected), "{len} bytes and zeros");
        }
    }

    /// An error in a single bit plane must spread over all bit planes of the fingerprint. With
    /// weights in GF(2) at the last level, too, it would stay in that plane and escape with
    /// probability 2^-16.
    #[test]
    fn an_error_in_one_bit_plane_is_seen_in_all_planes() {
        for plane in 0..8 {
            let mut seen = [0; 16];
            for seed in 0..16 {
                let error: Vec<u8> = bytes(seed, 4096).iter().map(|x| (x & 1) << plane).collect();
                let found = key(seed).fingerprint(&error).unwrap();
                assert_ne!(found, Fingerprint::ZERO, "plane {plane}, seed {seed}");
                seen.iter_mut().zip(found.0).for_each(|(seen, byte)| *seen |= byte);
            }
            assert_eq!(seen, [0xff; 16], "plane {plane}");
        }
    }

    #[test]
    fn each_single_bit_and_each_burst_is_seen_once() {
        let key = key(12);
        let mut seen = std::collections::HashSet::from([Fingerprint::ZERO]);
        for offset in (0..65_536).step_by(509).chain([65_535]) {
            for bit in 0..8 {
                let mut error = vec![0; offset + 1];
                error[offset] = 1 << bit;
                assert!(seen.insert(key.fingerprint(&error).unwrap()), "bit {bit} of {offset}");
            }
            let mut burst = vec![0; offset + 1];
            burst[offset.saturating_sub(511)..].fill(0xff);
            assert!(seen.insert(key.fingerprint(&burst).unwrap()), "512 bytes to {offset}");
        }
    }

    #[test]
    fn more_than_a_grain_is_refused() {
        let bytes = GRAIN_BYTES as usize + 1;
        assert_eq!(key(1).fingerprint(&vec![0; bytes]), Err(GfError::GrainTooLong { bytes }));
        assert!(Fingerprint::combine(&[1, 2], &[Fingerprint::ZERO]).is_err());
    }
}
