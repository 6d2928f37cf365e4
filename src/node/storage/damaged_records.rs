//! The records of this node that are damaged, and the check of a record.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::record_names::record_location;
use crate::format::records::{CommitMark, Leaves, Receipt, Record, StripeRecord};
use crate::format::{FormatError, digest};
use crate::id::ShardId;
use crate::kind::ErrorKind;
use crate::node::context::NodeContext;
use crate::store::{RecordScope, Store, StoreError};
use crate::wire::calls::RecordName;

/// Maximum number of damaged records that are kept for `status`.
const MAX_REMEMBERED: usize = 4096;
/// Maximum number of damaged records that `status` reads again each time. They may have been
/// rewritten.
const MAX_READ_AGAIN: usize = 64;

/// The damaged records found since the start, by the names that log lines and warnings print. They
/// are kept in memory only: after a restart, the next read of such a record finds the damage again.
#[derive(Default)]
pub(in crate::node) struct DamagedRecords(Mutex<BTreeMap<String, (ShardId, RecordName)>>);

impl DamagedRecords {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (ShardId, RecordName)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records whether a record is damaged.
    pub(in crate::node) fn set_or_clear_damaged(
        &self,
        shard: ShardId,
        record: RecordName,
        is_damaged: bool,
    ) {
        let name = record_display_name(shard, record);
        let mut records = self.lock();
        if !is_damaged {
            records.remove(&name);
        } else if records.len() < MAX_REMEMBERED
            && records.insert(name.clone(), (shard, record)).is_none()
        {
            tracing::warn!(record = name, "a record is damaged");
        }
    }

    /// Reads the first damaged records again, and forgets those that are not damaged any more.
    /// Returns a warning about the rest: their number, and the first `max_names` names; `None` if
    /// there are none.
    pub(in crate::node) async fn recheck_and_describe_damage(
        &self,
        context: &NodeContext,
        max_names: usize,
    ) -> Option<String> {
        let known: Vec<_> = self.lock().values().take(MAX_READ_AGAIN).copied().collect();
        for (shard, record) in known {
            let read =
                context.run_on_store(move |store| read_record_digest(store, shard, record)).await;
            self.set_or_clear_damaged(shard, record, matches!(read, Ok(Some(None))));
        }
        let records = self.lock();
        let first: Vec<&str> = records.keys().take(max_names).map(String::as_str).collect();
        let more = if records.len() > max_names { ", ..." } else { "" };
        match records.len() {
            0 => None,
            1 => Some(format!("1 record is damaged: {}", first.join(", "))),
            many => Some(format!("{many} records are damaged: {}{more}", first.join(", "))),
        }
    }
}

/// Returns the name of a record as log lines and warnings print it.
fn record_display_name(shard: ShardId, record: RecordName) -> String {
    match record_location(shard, record) {
        (RecordScope::Shard(shard), name) => format!("{shard}/{name}"),
        (RecordScope::Stripe(stripe), name) => format!("{stripe}/{name}"),
    }
}

/// Reads a record past the page cache. Returns its digest: `None` if there is no record,
/// `Some(None)` if it is damaged.
///
/// # Errors
/// If the record is of a later version, or if too many files are open.
pub(super) fn read_record_digest(
    store: &Store,
    shard: ShardId,
    record: RecordName,
) -> Result<Option<Option<[u8; 32]>>, StoreError> {
    let (scope, name) = record_location(shard, record);
    let bytes = match store.get_record_file_past_cache(scope, &name) {
        Ok(None) => return Ok(None),
        Ok(Some(bytes)) => bytes,
        Err(StoreError::Disk(error)) if error.is_too_many_open_files() => return Err(error.into()),
        Err(error) => {
            tracing::warn!(record = record_display_name(shard, record), %error, "a record cannot be read");
            return Ok(Some(None));
        }
    };
    match parse_record_digest(record, &bytes) {
        Ok(digest) => Ok(Some(digest)),
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(Some(None)),
        Err(source) => Err(StoreError::Format { path: record_display_name(shard, record), source }),
    }
}

/// Returns whether the bytes of a record are damaged. A record of a later format version does not
/// count as damaged.
pub(in crate::node) fn is_damaged_record(record: RecordName, bytes: &[u8]) -> bool {
    match parse_record_digest(record, bytes) {
        Ok(digest) => digest.is_none(),
        Err(error) => error.kind() == ErrorKind::Corrupt,
    }
}

/// Parses a record. Returns its digest, or `None` for leaves that do not match their root.
fn parse_record_digest(record: RecordName, bytes: &[u8]) -> Result<Option<[u8; 32]>, FormatError> {
    Ok(match record {
        RecordName::Leaves => {
            let leaves = Leaves::parse(bytes)?;
            // Leaves that do not match their own root count as damaged.
            leaves.root.admits(&leaves).then(|| digest::of_root(&leaves.root)).flatten()
        }
        RecordName::Mark => digest::of_root(&CommitMark::parse(bytes)?.root),
        RecordName::Stripe { .. } => Some(StripeRecord::parse(bytes)?.leaf()),
        RecordName::Receipt { .. } => digest::of_receipt(&Receipt::parse(bytes)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::stripes_root;
    use crate::format::samples::shard_root;

    #[test]
    fn leaves_that_do_not_match_their_root_are_damaged() {
        let mut root = shard_root(Vec::new());
        let hashes = vec![[1; 32], [2; 32]];
        root.stripes_root = stripes_root(&hashes);
        let good = Leaves { root: root.clone(), hashes };
        let other = Leaves { root, hashes: vec![[1; 32], [3; 32]] };
        let is_damaged =
            |leaves: &Leaves| is_damaged_record(RecordName::Leaves, &leaves.to_bytes().unwrap());
        assert!(!is_damaged(&good) && is_damaged(&other));
        assert!(is_damaged_record(RecordName::Leaves, b"no record"));
    }
}
