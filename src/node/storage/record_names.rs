//! The names of the records that a node keeps beside the data of a shard or stripe.

use crate::id::{Attempt, ShardId, StripeId};
use crate::store::RecordScope;
use crate::wire::calls::RecordName;

/// The name of the record with the leaves of a shard.
pub(in crate::node) const LEAVES: &str = "leaves";

/// The name of the commit mark of a shard.
pub(in crate::node) const MARK: &str = "commit";

/// The name of the record of a stripe.
pub(in crate::node) const RECORD: &str = "record";

/// The prefix of the names of receipts.
pub(in crate::node) const RECEIPT_PREFIX: &str = "receipt-";

/// Returns the name of a receipt.
pub(in crate::node) fn receipt_name(attempt: Attempt) -> String {
    format!("{RECEIPT_PREFIX}{attempt}")
}

/// Returns the scope and the name under which a record is stored.
pub(in crate::node) fn record_location(
    shard: ShardId,
    record: RecordName,
) -> (RecordScope, String) {
    let stripe = |index| RecordScope::Stripe(StripeId { shard, index });
    match record {
        RecordName::Leaves => (RecordScope::Shard(shard), LEAVES.into()),
        RecordName::Mark => (RecordScope::Shard(shard), MARK.into()),
        RecordName::Stripe { index } => (stripe(index), RECORD.into()),
        RecordName::Receipt { index, attempt } => (stripe(index), receipt_name(attempt)),
    }
}
