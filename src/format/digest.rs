//! Digests of records: a node says by them what its copy of a record holds, without sending it.
//!
//! A digest covers what all copies have in common. The digest of a stripe record is its leaf
//! ([`StripeRecord::leaf`](super::records::StripeRecord::leaf)).

use serde::Serialize;

use super::records::{Receipt, ShardRoot};

fn digest(context: &str, value: &impl Serialize) -> Option<[u8; 32]> {
    let bytes = postcard::to_stdvec(value).ok()?;
    Some(blake3::derive_key(context, &bytes))
}

/// The digest of the leaves and of the commit mark of a shard: of the root that both hold. `None` if it cannot be encoded.
pub fn of_root(root: &ShardRoot) -> Option<[u8; 32]> {
    digest("rapidraid digest of a shard root v1", root)
}

/// The digest of a receipt: of its attempt and pieces. `None` if it cannot be encoded.
pub fn of_receipt(receipt: &Receipt) -> Option<[u8; 32]> {
    digest("rapidraid digest of a receipt v1", &(receipt.attempt, &receipt.pieces))
}
