//! The division of a shard's bytes into stripes and blocks. This is pure arithmetic, and every
//! length that comes from a record is checked here.

use serde::{Deserialize, Serialize};

use crate::kind::ErrorKind;
use crate::units::{BLOCK_ALIGN_BYTES, GRAIN_BYTES, MAX_BLOCK_BYTES};

/// Maximum number of pieces of a stripe, n. The number of blocks, k, is always smaller.
pub const MAX_N: usize = 32;

/// Maximum number of stripes of one shard, so that their hashes fit into one record. At (16,11) and
/// 64 MiB blocks this is 67 TiB.
pub const MAX_STRIPES: u64 = 100_000;
/// Maximum number of shards of one save.
pub const MAX_SHARDS: u32 = 65_536;

/// The division of one shard into stripes of `k` blocks of `block_bytes` each. The last stripe may
/// be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// The length of the shard in bytes.
    pub len_bytes: u64,
    /// The length of a block in bytes, in every stripe but the last.
    pub block_bytes: u64,
    /// The number of blocks of a stripe.
    pub k: u8,
    /// The number of pieces of a stripe.
    pub n: u8,
}

/// The error for a record whose numbers do not describe a shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {found}, expected {expected}: the record is damaged or of another version")]
pub struct GeometryError {
    /// The name of the wrong number.
    pub what: &'static str,
    /// The value that was found.
    pub found: u64,
    /// The values that are allowed.
    pub expected: &'static str,
}

impl GeometryError {
    /// Returns the kind of the error, which is [`ErrorKind::Corrupt`].
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Corrupt
    }
}

/// The division of one stripe into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeCut {
    /// The offset of the stripe in the shard, in bytes.
    pub offset_bytes: u64,
    /// The length of the stripe in bytes, without padding.
    pub len_bytes: u64,
    /// The padded length of each block and piece, in bytes.
    pub block_bytes: u64,
    /// The number of blocks of the stripe.
    pub k: u8,
}

impl Geometry {
    /// Checks numbers from outside and returns the geometry that they describe.
    pub fn checked(len_bytes: u64, block_bytes: u64, n: u8, k: u8) -> Result<Self, GeometryError> {
        let error = |what, found, expected| Err(GeometryError { what, found, expected });
        if k == 0 || n <= k || usize::from(n) > MAX_N || n > 2 * k {
            return error("n", n.into(), "k < n <= 2k, at most 32");
        }
        if block_bytes == 0
            || !block_bytes.is_multiple_of(GRAIN_BYTES)
            || block_bytes > MAX_BLOCK_BYTES
        {
            return error("block length", block_bytes, "a multiple of 64 KiB, at most 128 MiB");
        }
        if len_bytes.div_ceil(block_bytes * u64::from(k)) > MAX_STRIPES {
            return error(
                "shard length",
                len_bytes,
                "at most 100,000 stripes: cut it into shards, or use longer blocks",
            );
        }
        Ok(Self { len_bytes, block_bytes, k, n })
    }

    /// Returns the length of a full stripe in bytes.
    pub fn stripe_bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.k)
    }

    /// Returns the number of stripes, which is 0 for an empty shard.
    pub fn stripes(&self) -> u32 {
        // `checked` keeps the result at MAX_STRIPES or less.
        self.len_bytes.div_ceil(self.stripe_bytes()) as u32
    }

    /// Returns the division of stripe `index`, or `None` after the last stripe.
    pub fn stripe(&self, index: u32) -> Option<StripeCut> {
        let offset_bytes = u64::from(index) * self.stripe_bytes();
        let rest = self.len_bytes.checked_sub(offset_bytes).filter(|&rest| rest > 0)?;
        let len_bytes = rest.min(self.stripe_bytes());
        let block_bytes = if len_bytes == self.stripe_bytes() {
            self.block_bytes
        } else {
            len_bytes.div_ceil(self.k.into()).next_multiple_of(BLOCK_ALIGN_BYTES)
        };
        Some(StripeCut { offset_bytes, len_bytes, block_bytes, k: self.k })
    }
}

impl StripeCut {
    /// Returns the offset in the stripe of block `block` (from 0).
    pub fn block_offset(&self, block: u8) -> u64 {
        self.block_bytes * u64::from(block)
    }

    /// Returns the length of block `block` without padding. Near the end it is shorter than the
    /// padded length, and 0 past the end.
    pub fn block_len(&self, block: u8) -> u64 {
        self.len_bytes.saturating_sub(self.block_offset(block)).min(self.block_bytes)
    }

    /// Returns the number of grains of a piece of this stripe.
    pub fn grains(&self) -> u64 {
        crate::units::grains(self.block_bytes)
    }

    /// Returns the length of grain `grain` of a piece. The last grain may be shorter.
    pub fn grain_len(&self, grain: u64) -> u64 {
        self.block_bytes.saturating_sub(grain * GRAIN_BYTES).min(GRAIN_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(len: u64) -> Geometry {
        Geometry::checked(len, 128 * 1024, 16, 11).unwrap()
    }

    #[test]
    fn every_byte_lies_in_exactly_one_block() {
        let full = geometry(1).stripe_bytes();
        for len in [0, 1, 127, 128, 129, 65_535, full - 1, full, full + 1, 3 * full + 77_777] {
            let cut = geometry(len);
            let mut next = 0;
            for index in 0..cut.stripes() {
                let stripe = cut.stripe(index).unwrap();
                assert_eq!(stripe.block_bytes % BLOCK_ALIGN_BYTES, 0);
                for block in 0..11 {
                    let bytes = stripe.block_len(block);
                    if bytes > 0 {
                        assert_eq!(stripe.offset_bytes + stripe.block_offset(block), next);
                    }
                    next += bytes;
                }
            }
            assert_eq!(next, len);
            assert!(cut.stripe(cut.stripes()).is_none());
        }
    }

    #[test]
    fn numbers_from_outside_are_checked() {
        for (len, block, n, k) in [
            (1, 0, 16, 11),
            (1, 65_537, 16, 11),
            (1, 1 << 28, 16, 11),
            (1, 65_536, 11, 11),
            (1, 65_536, 5, 2),
            (1, 65_536, 4, 0),
            (1, 65_536, 40, 30),
            (u64::MAX, 65_536, 4, 2),
        ] {
            assert!(Geometry::checked(len, block, n, k).is_err(), "{len} {block} {n} {k}");
        }
    }
}
