//! The record of a stripe: hashes and fingerprints that never change, and places that may.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::envelope::{self, RecordKind};
use super::geometry::StripeCut;
use super::records::{Leaves, ShardRoot};
use crate::gf::Fingerprint;
use crate::id::{NodeId, StripeId};

/// The hashes of one block, as the client read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// The length in bytes, without padding. It is 0 for a block past the end, which has no file.
    pub len_bytes: u64,
    /// The BLAKE3 hash of the block's bytes, without padding.
    pub root: [u8; 32],
    /// The linear fingerprints of its grains, up to its end without padding.
    pub fingerprints: Vec<Fingerprint>,
}

/// The part of a stripe record that the shard's root determines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeFixed {
    /// The stripe.
    pub stripe: StripeId,
    /// The division of the stripe into blocks.
    pub cut: StripeCut,
    /// The blocks of the stripe, in order.
    pub blocks: Vec<BlockInfo>,
}

impl StripeFixed {
    /// Returns the fingerprint of grain `grain` of block `block`, which is zero past the block's
    /// end.
    pub fn fingerprint(&self, block: usize, grain: u64) -> Fingerprint {
        let info = self.blocks.get(block);
        let grain = usize::try_from(grain).unwrap_or(usize::MAX);
        info.and_then(|info| info.fingerprints.get(grain)).copied().unwrap_or(Fingerprint::ZERO)
    }
}

/// The record of a stripe, which at least n-k+1 of the stripe's nodes hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeRecord {
    /// A [`StripeFixed`] in postcard. Its BLAKE3 hash is the stripe's leaf.
    pub fixed: Vec<u8>,
    /// The node of each position. This is a hint.
    pub places: Vec<NodeId>,
}

/// The error for a stripe record that does not fit its shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the record of stripe {stripe} {what}: another node's copy is needed")]
pub struct StripeRecordError {
    /// The stripe.
    pub stripe: StripeId,
    /// The defect of the record.
    pub what: &'static str,
}

impl StripeRecord {
    /// Returns a record with `fixed` in encoded form.
    pub fn new(fixed: &StripeFixed, places: Vec<NodeId>) -> Result<Self, FormatError> {
        let kind = RecordKind::StripeRecord;
        let fixed = postcard::to_stdvec(fixed)
            .map_err(|error| FormatError::Encode { kind, why: error.to_string() })?;
        Ok(Self { fixed, places })
    }

    /// Returns the leaf of this record.
    pub fn leaf(&self) -> [u8; 32] {
        blake3::hash(&self.fixed).into()
    }

    /// Decodes the fixed part after checking it against `leaves`, which the caller has found
    /// [admitted](ShardRoot::admits) by `root`. Returns an error if the record does not fit the
    /// shard.
    pub fn open(
        &self,
        root: &ShardRoot,
        leaves: &Leaves,
        index: u32,
    ) -> Result<StripeFixed, StripeRecordError> {
        let stripe = StripeId { shard: root.shard, index };
        let wrong = |what| StripeRecordError { stripe, what };
        if leaves.hashes.get(index as usize) != Some(&self.leaf()) {
            return Err(wrong("does not match the hash that the commit fixed"));
        }
        let fixed: StripeFixed = envelope::parse_body(RecordKind::StripeRecord, &self.fixed)
            .map_err(|_| wrong("does not parse"))?;
        let cut = root.geometry().ok().and_then(|geometry| geometry.stripe(index));
        if fixed.stripe != stripe
            || Some(fixed.cut) != cut
            || fixed.blocks.len() != usize::from(root.k)
        {
            return Err(wrong("describes another stripe"));
        }
        let fits = |(block, info): (u8, &BlockInfo)| {
            info.len_bytes == fixed.cut.block_len(block)
                && info.fingerprints.len() as u64 == crate::units::grains(info.len_bytes)
        };
        let distinct: HashSet<&NodeId> = self.places.iter().collect();
        if self.places.len() != usize::from(root.n) || distinct.len() != self.places.len() {
            return Err(wrong("does not name n different nodes"));
        }
        if !(0..root.k).zip(&fixed.blocks).all(fits) {
            return Err(wrong("has blocks of other lengths than its shard"));
        }
        Ok(fixed)
    }
}
