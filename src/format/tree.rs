//! The BLAKE3 tree of a block or piece, cut at grains: each grain verifies alone, and the root is
//! the plain BLAKE3 hash of all bytes.
//!
//! The tree keeps BLAKE3's own chaining value of every 64 KiB subtree (BLAKE3 paper, section 2.1: a
//! left subtree is complete and its length a power of two, so cutting at any power of two cuts at
//! subtrees). Content of one grain or less *is* the root node, and its single hash is the root
//! itself.

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use crate::format::FormatError;
use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES, grains};

/// A BLAKE3 hash, or the chaining value of a subtree.
pub type Hash = [u8; 32];

/// The length of a hash in bytes.
pub const HASH_BYTES: u64 = 32;

/// Returns the length in bytes of grain `index` of content of `len_bytes`, which is 0 past the end.
pub fn grain_len(len_bytes: u64, index: u64) -> u64 {
    let start = index.saturating_mul(GRAIN_BYTES);
    len_bytes.saturating_sub(start).min(GRAIN_BYTES)
}

/// Returns the hash of grain `index` of content of `len_bytes`. Returns `None` when `bytes` does
/// not have exactly the length of that grain, or when there is no such grain.
pub fn grain_hash(len_bytes: u64, index: u64, bytes: &[u8]) -> Option<Hash> {
    if bytes.is_empty() || bytes.len() as u64 != grain_len(len_bytes, index) {
        return None;
    }
    let mut hasher = PartHasher::new(len_bytes, GRAIN_BYTES, index);
    hasher.update(bytes);
    Some(hasher.finish())
}

/// Hashes one part of content that is divided into parts of equal length, of which the last may be
/// shorter. [`root_of_parts`] makes the hash of the content from the hashes of all parts, so that
/// several threads can hash it.
///
/// # Panics
/// `finish`, if one of several parts has no bytes; `update`, if a part after the first has more
/// than `part_bytes`.
pub struct PartHasher {
    hasher: blake3::Hasher,
    is_only: bool,
}

impl PartHasher {
    /// Returns the hasher of part `index` of content of `len_bytes`. `part_bytes` is a power of two
    /// of at least 1,024, the same for all parts of the content.
    pub fn new(len_bytes: u64, part_bytes: u64, index: u64) -> Self {
        debug_assert!(part_bytes.is_power_of_two() && part_bytes >= blake3::CHUNK_LEN as u64);
        let mut hasher = blake3::Hasher::new();
        let is_only = len_bytes <= part_bytes;
        if !is_only {
            hasher.set_input_offset(index * part_bytes);
        }
        Self { hasher, is_only }
    }

    /// Appends bytes of the part.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// Returns the hash of the part: the chaining value of its subtree, or the hash of the content
    /// if it has no other part.
    pub fn finish(&self) -> Hash {
        match self.is_only {
            true => *self.hasher.finalize().as_bytes(),
            false => self.hasher.finalize_non_root(),
        }
    }
}

/// Returns the BLAKE3 hash of content from the hashes of its parts ([`PartHasher`]), in order.
/// Without parts, returns the hash of empty content.
pub fn root_of_parts(hashes: &[Hash]) -> Hash {
    match hashes {
        [] => *blake3::hash(&[]).as_bytes(),
        [only] => *only,
        many => {
            let (left, right) = many.split_at(left_parts(many.len()));
            *merge_subtrees_root(&merge(left), &merge(right), Mode::Hash).as_bytes()
        }
    }
}

/// The hashes of all grains of one block or piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrainTree {
    len_bytes: u64,
    hashes: Vec<Hash>,
}

impl GrainTree {
    /// Returns the tree of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let len_bytes = bytes.len() as u64;
        let hashes = bytes
            .chunks(GRAIN_BYTES as usize)
            .zip(0..)
            .filter_map(|(grain, index)| grain_hash(len_bytes, index, grain))
            .collect();
        Self { len_bytes, hashes }
    }

    /// Returns the tree of content of `len_bytes` whose grains have these hashes. Returns an error
    /// when the number of hashes is wrong or the content is longer than a block can be.
    pub fn from_hashes(len_bytes: u64, hashes: Vec<Hash>) -> Result<Self, FormatError> {
        if len_bytes > MAX_BLOCK_BYTES {
            return Err(FormatError::TooLong {
                what: "content",
                bytes: len_bytes,
                limit_bytes: MAX_BLOCK_BYTES,
            });
        }
        if hashes.len() as u64 != grains(len_bytes) {
            return Err(FormatError::Length {
                what: "grain hash table",
                expected_bytes: grains(len_bytes) * HASH_BYTES,
                found_bytes: hashes.len() as u64 * HASH_BYTES,
            });
        }
        Ok(Self { len_bytes, hashes })
    }

    /// Returns the length of the content in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the hash of each grain, in order.
    pub fn hashes(&self) -> &[Hash] {
        &self.hashes
    }

    /// Returns the BLAKE3 hash of all bytes.
    pub fn root(&self) -> Hash {
        root_of_parts(&self.hashes)
    }

    /// Returns whether `bytes` are exactly grain `index`.
    pub fn verify_grain(&self, index: u64, bytes: &[u8]) -> bool {
        let expected = usize::try_from(index).ok().and_then(|at| self.hashes.get(at));
        expected.is_some() && grain_hash(self.len_bytes, index, bytes).as_ref() == expected
    }
}

/// Returns how many of `parts` (at least two) are below the left child: the greatest power of two
/// that is smaller than `parts`.
fn left_parts(parts: usize) -> usize {
    parts.next_power_of_two() / 2
}

/// Returns the chaining value over one or more neighbouring subtrees. The recursion depth is the
/// logarithm of their number.
fn merge(hashes: &[Hash]) -> Hash {
    match hashes {
        [only] => *only,
        many => {
            let (left, right) = many.split_at(left_parts(many.len()));
            merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::{Entropy, SeededEntropy};

    const G: usize = GRAIN_BYTES as usize;

    fn content(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        SeededEntropy::new(len as u64).fill(&mut bytes);
        bytes
    }

    /// Returns lengths at which an off-by-one error in the tree's structure would show.
    fn awkward_lengths() -> Vec<usize> {
        let mut lengths = vec![0, 1, 2, 127, 128, 1023, 1024, 1025, 2048, 2049, 63 * 1024 + 1];
        for grains in [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33] {
            lengths.extend([grains * G - 1, grains * G, grains * G + 1, grains * G + 128]);
        }
        lengths
    }

    #[test]
    fn the_root_is_plain_blake3() {
        for len in awkward_lengths() {
            let bytes = content(len);
            assert_eq!(GrainTree::of(&bytes).root(), *blake3::hash(&bytes).as_bytes(), "{len}");
        }
    }

    #[test]
    fn parts_of_any_length_give_plain_blake3() {
        for part in [1024, 4096, 2 * G] {
            for len in awkward_lengths() {
                let bytes = content(len);
                let hash = |(index, part_of_content): (u64, &[u8])| {
                    let mut hasher = PartHasher::new(len as u64, part as u64, index);
                    part_of_content.chunks(1000).for_each(|piece| hasher.update(piece));
                    hasher.finish()
                };
                let hashes: Vec<Hash> = (0..).zip(bytes.chunks(part)).map(hash).collect();
                assert_eq!(
                    root_of_parts(&hashes),
                    *blake3::hash(&bytes).as_bytes(),
                    "{len}/{part}"
                );
            }
        }
    }

    #[test]
    fn a_grain_verifies_alone_in_its_own_place_only() {
        for len in [1, G, G + 1, 3 * G, 5 * G - 7] {
            let mut bytes = content(len);
            let tree = GrainTree::of(&bytes);
            for (index, grain) in bytes.chunks(G).enumerate() {
                assert!(tree.verify_grain(index as u64, grain));
                assert!(!tree.verify_grain(index as u64 + 1, grain));
                assert!(!tree.verify_grain(index as u64, &grain[1..]));
            }
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            let tail = bytes.chunks(G).last().unwrap();
            assert!(!tree.verify_grain((len.div_ceil(G) - 1) as u64, tail));
        }
        assert!(!GrainTree::of(&[]).verify_grain(0, &[]));
        assert!(!GrainTree::of(&[1]).verify_grain(u64::MAX, &[1]));
    }

    #[test]
    fn a_table_of_the_wrong_size_is_refused() {
        assert!(GrainTree::from_hashes(GRAIN_BYTES, vec![[0; 32]; 2]).is_err());
        assert!(GrainTree::from_hashes(GRAIN_BYTES + 1, vec![[0; 32]; 1]).is_err());
        assert!(GrainTree::from_hashes(u64::MAX, Vec::new()).is_err());
        let tree = GrainTree::of(&content(3 * G + 5));
        assert_eq!(GrainTree::from_hashes(tree.len_bytes(), tree.hashes().to_vec()), Ok(tree));
    }
}
