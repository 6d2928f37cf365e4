//! The entries of the catalogue in a key-value store, changed one at a time.
//!
//! An entry, the revision counter and a sum over all entries change in one durable batch. The sum
//! is checked at the start, because a database that silently lost entries must not be served; sled
//! can lose entries when its log is damaged. Functions that read or change entries block the
//! thread, and changes block until they are durable.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::database_format::{
    DATA, REVISION, SUM, entry_checksum, parse_entry, parse_number, verify_checksum,
};
use super::record_access::{NODES, RING_CHANGES};
use super::{
    CatalogueError, Entry, Guard, GuardedOutcome, MAX_KEY_BYTES, MAX_PAGE, MAX_VALUE_BYTES,
    SetOutcome,
};
use crate::kind::ErrorKind;
use crate::store::kv::{Batch, Kv};
use crate::wire::calls::DbChecksum;

/// The catalogue database: the entries and the counters that change with them.
pub(super) struct Database {
    kv: Arc<dyn Kv>,
    is_read_only: AtomicBool,
    /// The revision of the last durable change. It can be read while another change is being
    /// written.
    revision: AtomicU64,
    /// The revision of the last change of a node's record or of a ring change.
    members_revision: AtomicU64,
    writer: Mutex<WriterState>,
}

/// The counters that every batch changes besides an entry, and whether changes have ended.
struct WriterState {
    revision: u64,
    /// XOR of the first 16 bytes of BLAKE3 over each entry.
    sum: u128,
    /// Whether the catalogue is being or was transferred to a copy. Changes are refused then.
    is_transferred: bool,
}

impl WriterState {
    fn checksum(&self) -> DbChecksum {
        DbChecksum { revision: self.revision, sum: self.sum.to_be_bytes() }
    }
}

impl Database {
    /// Opens the database in `kv` and checks the sum of its entries. Returns
    /// [`CatalogueError::Incomplete`] if the sum is wrong.
    pub(super) fn open(kv: Arc<dyn Kv>) -> Result<Self, CatalogueError> {
        let revision = parse_number(kv.get(REVISION)?).unwrap_or(0);
        let sum = verify_checksum(&*kv)?;
        Ok(Self {
            kv,
            is_read_only: AtomicBool::new(false),
            revision: AtomicU64::new(revision),
            // The revision of the last change of these records is not stored. The database's
            // revision is not lower, so it differs from every value that was reported before that
            // change.
            members_revision: AtomicU64::new(revision),
            writer: Mutex::new(WriterState { revision, sum, is_transferred: false }),
        })
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.is_read_only.load(Ordering::Acquire)
    }

    pub(super) fn set_read_only(&self, is_read_only: bool) {
        self.is_read_only.store(is_read_only, Ordering::Release);
    }

    pub(super) fn refuse_if_read_only(&self) -> Result<(), CatalogueError> {
        if self.is_read_only() {
            let message = "the catalogue is read-only, because it hears from no more than half of the storage nodes: start more of them".to_owned();
            return Err(CatalogueError::Refused { kind: ErrorKind::Unavailable, message });
        }
        Ok(())
    }

    /// Returns the revision of the last durable change. Does not block.
    pub(super) fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Returns the checksum of the entries.
    pub(super) fn checksum(&self) -> DbChecksum {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).checksum()
    }

    /// Refuses changes from now on, provided that `copy_checksum` is the checksum of the current
    /// entries. Returns an error of kind `Exists` if it is not.
    pub(super) fn stop_writes_for_transfer(
        &self,
        copy_checksum: DbChecksum,
    ) -> Result<(), CatalogueError> {
        let mut written = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if written.checksum() != copy_checksum {
            let message = "the catalogue has changed since it was copied, and stays where it is: move it again".to_owned();
            return Err(CatalogueError::Refused { kind: ErrorKind::Exists, message });
        }
        written.is_transferred = true;
        Ok(())
    }

    /// Allows changes again after a transfer that failed.
    pub(super) fn cancel_transfer(&self) {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).is_transferred = false;
    }

    /// Returns a number that differs after each change of a node's record or of a ring change.
    pub(super) fn members_revision(&self) -> u64 {
        self.members_revision.load(Ordering::Acquire)
    }

    pub(super) fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
        let bytes = self.kv.get(format!("{DATA}{key}").as_bytes())?;
        Ok(bytes.as_deref().and_then(parse_entry))
    }

    /// See [`Catalogue::compare_and_set`](super::Catalogue::compare_and_set).
    pub(super) fn compare_and_set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError> {
        self.check_lengths(key, value.as_deref())?;
        let mut written = self.lock_for_change()?;
        self.change(&mut written, key, expected, value)
    }

    /// See [`Catalogue::compare_and_set_guarded`](super::Catalogue::compare_and_set_guarded).
    pub(super) fn compare_and_set_guarded(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Vec<u8>,
        guard: &Guard,
    ) -> Result<GuardedOutcome, CatalogueError> {
        self.check_lengths(key, Some(&value))?;
        // Nothing changes while the lock is held.
        let mut written = self.lock_for_change()?;
        let now = self.get(key)?;
        if now.as_ref().map(|entry| entry.revision) != expected {
            return Ok(GuardedOutcome::Conflict(now));
        }
        if self.get(&guard.key)?.map(|entry| entry.revision) != guard.revision {
            return Ok(GuardedOutcome::GuardConflict);
        }
        Ok(match self.change(&mut written, key, expected, Some(value))? {
            SetOutcome::Set(revision) => GuardedOutcome::Set(revision),
            SetOutcome::Conflict(entry) => GuardedOutcome::Conflict(entry),
        })
    }

    fn check_lengths(&self, key: &str, value: Option<&[u8]>) -> Result<(), CatalogueError> {
        if key.len() > MAX_KEY_BYTES {
            let what = key.chars().take(64).collect();
            return Err(CatalogueError::TooLong { what, bytes: key.len(), limit: MAX_KEY_BYTES });
        }
        let bytes = value.map_or(0, <[u8]>::len);
        if bytes > MAX_VALUE_BYTES {
            let what = format!("value of {key}");
            return Err(CatalogueError::TooLong { what, bytes, limit: MAX_VALUE_BYTES });
        }
        Ok(())
    }

    fn lock_for_change(&self) -> Result<MutexGuard<'_, WriterState>, CatalogueError> {
        self.refuse_if_read_only()?;
        let written = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        match written.is_transferred {
            true => Err(transfer_error()),
            false => Ok(written),
        }
    }

    fn change(
        &self,
        written: &mut WriterState,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError> {
        let full_key = format!("{DATA}{key}");
        let before = self.kv.get(full_key.as_bytes())?;
        let now = before.as_deref().and_then(parse_entry);
        if now.as_ref().map(|entry| entry.revision) != expected {
            return Ok(SetOutcome::Conflict(now));
        }
        let revision = written.revision + 1;
        let after = value.map(|value| [&revision.to_be_bytes()[..], &value].concat());
        let change = |stored: &Option<Vec<u8>>| {
            stored.as_deref().map_or(0, |stored| entry_checksum(&full_key, stored))
        };
        let sum = written.sum ^ change(&before) ^ change(&after);
        let mut batch = Batch::new();
        batch.put(REVISION, revision.to_be_bytes()).put(SUM, sum.to_be_bytes());
        match after {
            Some(stored) => batch.put(full_key, stored),
            None => batch.delete(full_key),
        };
        self.kv.apply(&batch)?;
        *written = WriterState { revision, sum, is_transferred: false };
        self.revision.store(revision, Ordering::Release);
        if key.starts_with(NODES) || key.starts_with(RING_CHANGES) {
            self.members_revision.store(revision, Ordering::Release);
        }
        Ok(SetOutcome::Set(revision))
    }

    /// See [`Catalogue::list_entries`](super::Catalogue::list_entries).
    pub(super) fn list_entries(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError> {
        let after = after.map(|key| format!("{DATA}{key}"));
        let page = self.kv.scan(
            format!("{DATA}{prefix}").as_bytes(),
            after.as_deref().map(str::as_bytes),
            limit.min(MAX_PAGE) as usize,
        )?;
        let named = page.into_iter().filter_map(|(key, value)| {
            let key = String::from_utf8(key).ok()?;
            Some((key.strip_prefix(DATA)?.to_owned(), parse_entry(&value)?))
        });
        Ok(named.collect())
    }
}

/// Returns the error for a caller that wants to change a key during a transfer.
pub(super) fn transfer_error() -> CatalogueError {
    let message = "the catalogue is being moved to another daemon: try again".to_owned();
    CatalogueError::Refused { kind: ErrorKind::Busy, message }
}
