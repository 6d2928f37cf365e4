//! Digests of records, by which a node states the content of its copy of a record without sending
//! it.
//!
//! A digest covers the content that all copies share. The digest of a stripe record is its leaf
//! ([`StripeRecord::leaf`](super::records::StripeRecord::leaf)).

use serde::Serialize;

use super::records::{Receipt, ShardRoot};

fn digest(context: &str, value: &impl Serialize) -> Option<[u8; 32]> {
    let bytes = postcard::to_stdvec(value).ok()?;
    Some(blake3::derive_key(context, &bytes))
}

/// Returns the digest of the leaves and of the commit mark of a shard, i.e. of the root that both
/// hold. Returns `None` if the root cannot be encoded.
pub fn of_root(root: &ShardRoot) -> Option<[u8; 32]> {
    digest("rapidraid digest of a shard root v1", root)
}

/// Returns the digest of a receipt, i.e. of its attempt and pieces. Returns `None` if it cannot be
/// encoded.
pub fn of_receipt(receipt: &Receipt) -> Option<[u8; 32]> {
    digest("rapidraid digest of a receipt v1", &(receipt.attempt, &receipt.pieces))
}
