//! The index: which files the folder holds, without opening them, and their totals. It is a cache
//! of the folders.
//!
//! An entry is written after its file is durable, and deleted after the file is gone. Both updates
//! check under one lock whether the file exists, so that a late update cannot bring back the entry
//! of a removed file.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::disk::Disk;
use super::durable_paths::file_path;
use super::durable_paths::none_if_not_found;
use super::kv::{Batch, Kv, MAX_PAGE};
use crate::format::file::{Content, FileHeader, FileKey, FileName};
use crate::format::tree::Hash;
use crate::id::{ShardId, StripeId};

/// The first byte of an entry. An entry with another version was written by another release; its
/// file is read again.
const ENTRY_VERSION: u8 = 1;
const PREFIX: &[u8] = b"f/";
const STRIPE_KEY_BYTES: usize = PREFIX.len() + 16 + 4;

/// The index entry of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    /// Its stripe.
    pub stripe: StripeId,
    /// The replica or piece that it holds.
    pub content: Content,
    /// The length of the data, in bytes.
    pub len_bytes: u64,
    /// The length of the file, in bytes.
    pub file_bytes: u64,
    /// BLAKE3 of the data.
    pub root: Hash,
}

impl FileInfo {
    /// Returns the key under which
    /// [`Store::open_undamaged_file`](super::Store::open_undamaged_file) opens the file.
    pub fn key(&self) -> FileKey {
        FileKey { stripe: self.stripe, name: self.content.name() }
    }

    pub(super) fn from_header(header: &FileHeader, file_bytes: u64) -> Self {
        Self {
            stripe: header.stripe,
            content: header.content,
            len_bytes: header.len_bytes,
            file_bytes,
            root: header.root,
        }
    }
}

/// The stored value of an entry.
#[derive(Serialize, Deserialize)]
struct Entry {
    version: u8,
    content: Content,
    len_bytes: u64,
    file_bytes: u64,
    root: Hash,
}

/// The totals of a data folder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Number of replica files.
    pub replica_files: u64,
    /// Bytes of the replica files, including hash tables and headers.
    pub replica_bytes: u64,
    /// Number of piece files.
    pub piece_files: u64,
    /// Bytes of the piece files, including hash tables and headers.
    pub piece_bytes: u64,
    /// Bytes in small records of shards and stripes.
    pub small_bytes: u64,
    /// Number of files in quarantine.
    pub quarantined: u64,
}

impl Totals {
    fn counters_of(&mut self, content: &Content) -> (&mut u64, &mut u64) {
        match content {
            Content::Replica { .. } => (&mut self.replica_files, &mut self.replica_bytes),
            Content::Piece { .. } => (&mut self.piece_files, &mut self.piece_bytes),
        }
    }

    fn add_file(&mut self, info: &FileInfo) {
        let (files, bytes) = self.counters_of(&info.content);
        *files = files.saturating_add(1);
        *bytes = bytes.saturating_add(info.file_bytes);
    }

    fn subtract_file(&mut self, info: &FileInfo) {
        let (files, bytes) = self.counters_of(&info.content);
        *files = files.saturating_sub(1);
        *bytes = bytes.saturating_sub(info.file_bytes);
    }
}

pub(super) struct Index {
    disk: Arc<dyn Disk>,
    kv: Arc<dyn Kv>,
    totals: Mutex<Totals>,
}

fn stripe_key_prefix(stripe: StripeId) -> Vec<u8> {
    let mut key = Vec::with_capacity(STRIPE_KEY_BYTES + 48);
    key.extend(PREFIX);
    key.extend(stripe.shard.0);
    key.extend(stripe.index.to_be_bytes());
    key
}

fn file_key(key: FileKey) -> Vec<u8> {
    let mut out = stripe_key_prefix(key.stripe);
    out.extend(key.name.to_string().bytes());
    out
}

/// Returns the stripe and the file name that a key of the index stands for.
fn parse_key(key: &[u8]) -> Option<FileKey> {
    let (shard, rest) = key.strip_prefix(PREFIX)?.split_first_chunk::<16>()?;
    let (index, name) = rest.split_first_chunk::<4>()?;
    let stripe = StripeId { shard: ShardId(*shard), index: u32::from_be_bytes(*index) };
    let name: FileName = std::str::from_utf8(name).ok()?.parse().ok()?;
    Some(FileKey { stripe, name })
}

fn parse_entry(key: &[u8], value: &[u8]) -> Option<FileInfo> {
    let key = parse_key(key)?;
    if value.first() != Some(&ENTRY_VERSION) {
        return None;
    }
    let entry: Entry = postcard::from_bytes(value).ok()?;
    let Entry { content, len_bytes, file_bytes, root, .. } = entry;
    let info = FileInfo { stripe: key.stripe, content, len_bytes, file_bytes, root };
    (info.key() == key).then_some(info)
}

fn entry_bytes(info: &FileInfo) -> Vec<u8> {
    let FileInfo { content, len_bytes, file_bytes, root, .. } = *info;
    let entry = Entry { version: ENTRY_VERSION, content, len_bytes, file_bytes, root };
    // Serializing plain numbers into a growing buffer cannot fail. An empty value would count as an
    // entry of another release, so that the file would be read again.
    postcard::to_extend(&entry, Vec::with_capacity(96)).unwrap_or_default()
}

impl Index {
    pub(super) fn new(disk: Arc<dyn Disk>, kv: Arc<dyn Kv>) -> Self {
        Self { disk, kv, totals: Mutex::default() }
    }

    fn lock_totals(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn totals(&self) -> Totals {
        *self.lock_totals()
    }

    /// Runs `compute` to compute new totals while no other call can change the index. Returns its
    /// result and keeps the new totals if it succeeds.
    pub(super) fn recompute_totals<T, E>(
        &self,
        compute: impl FnOnce(&mut Totals) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut held = self.lock_totals();
        let mut totals = Totals::default();
        let result = compute(&mut totals)?;
        *held = totals;
        Ok(result)
    }

    pub(super) fn increment_quarantined(&self) {
        let mut totals = self.lock_totals();
        totals.quarantined = totals.quarantined.saturating_add(1);
    }

    pub(super) fn adjust_total_record_bytes(&self, old_bytes: Option<u64>, new_bytes: Option<u64>) {
        let mut totals = self.lock_totals();
        let small = totals.small_bytes.saturating_add(new_bytes.unwrap_or(0));
        totals.small_bytes = small.saturating_sub(old_bytes.unwrap_or(0));
    }

    /// Updates the entry of `key` to match the disk: writes `info` if the file exists, deletes the
    /// entry if it does not. `None` for an existing file changes nothing.
    pub(super) fn reconcile_entry(
        &self,
        key: FileKey,
        info: Option<FileInfo>,
    ) -> Result<(), StoreError> {
        let index_key = file_key(key);
        let mut totals = self.lock_totals();
        let there = none_if_not_found(self.disk.open(&file_path(key)))?.is_some();
        let old = self.kv.get(&index_key)?;
        let old_info = old.as_ref().and_then(|value| parse_entry(&index_key, value));
        let mut batch = Batch::new();
        match info {
            Some(info) if there => batch.put(index_key, entry_bytes(&info)),
            // Another call has created the file again since it was removed, and has written or will
            // write the entry.
            None if there => return Ok(()),
            _ => batch.delete(index_key),
        };
        self.kv.apply(&batch)?;
        old_info.iter().for_each(|info| totals.subtract_file(info));
        info.iter().filter(|_| there).for_each(|info| totals.add_file(info));
        Ok(())
    }

    /// Returns the entries of one stripe that parse.
    pub(super) fn list_stripe_files(&self, stripe: StripeId) -> Result<Vec<FileInfo>, StoreError> {
        let pairs = self.kv.scan(&stripe_key_prefix(stripe), None, MAX_PAGE)?;
        Ok(pairs.iter().filter_map(|(key, value)| parse_entry(key, value)).collect())
    }

    /// Replaces the entries of one stripe with those of `files` and adds them to `totals`. Writes
    /// nothing if the entries are already the same.
    pub(super) fn replace_stripe_entries(
        &self,
        stripe: StripeId,
        files: &[FileInfo],
        totals: &mut Totals,
    ) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        let old = self.kv.scan(&stripe_key_prefix(stripe), None, MAX_PAGE)?;
        for (key, _) in &old {
            batch.delete(key.clone());
        }
        for info in files {
            totals.add_file(info);
            batch.put(file_key(info.key()), entry_bytes(info));
        }
        let same = old.len() == files.len() && old.iter().all(|(k, v)| batch.contains_put(k, v));
        if !same {
            self.kv.apply(&batch)?;
        }
        Ok(())
    }

    /// Deletes the entries of all stripes for which `keep` returns false, and entries whose key does
    /// not parse. Returns the number of deleted entries.
    pub(super) fn retain_stripes(
        &self,
        keep: impl Fn(StripeId) -> bool,
    ) -> Result<u64, StoreError> {
        let (mut dropped, mut after) = (0, None::<Vec<u8>>);
        loop {
            let page = self.kv.scan(PREFIX, after.as_deref(), MAX_PAGE)?;
            let mut batch = Batch::new();
            for (key, _) in &page {
                if !parse_key(key).is_some_and(|key| keep(key.stripe)) {
                    batch.delete(key.clone());
                }
            }
            dropped += batch.len() as u64;
            self.kv.apply(&batch)?;
            match page.into_iter().last() {
                Some((last, _)) => after = Some(last),
                None => return Ok(dropped),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Attempt;

    #[test]
    fn entries_read_back_and_foreign_ones_do_not() {
        let info = FileInfo {
            stripe: StripeId { shard: ShardId([3; 16]), index: 0x0102_0304 },
            content: Content::Piece { piece: 9, attempt: Attempt([4; 16]), code: u64::MAX },
            len_bytes: 1 << 27,
            file_bytes: (1 << 27) + 70_000,
            root: [5; 32],
        };
        let (key, value) = (file_key(info.key()), entry_bytes(&info));
        assert_eq!(parse_entry(&key, &value), Some(info));
        let mut later = value.clone();
        later[0] = 2;
        assert_eq!(parse_entry(&key, &later), None);
        let other = file_key(FileKey::replica(info.stripe, 9));
        assert_eq!(parse_entry(&other, &value), None);
        assert_eq!(parse_entry(&key, &value[..value.len() - 1]), None);
        assert_eq!(parse_key(b"f/short"), None);
    }
}
