//! Small records beside the files: commit marks, fences, tombstones, receipts, stripe records.
//!
//! They are written whole and replaced whole: after a crash the old or the new one is there. What is in them is
//! sealed by whoever writes them (`format::envelope`).

use super::StoreError;
use super::data_folder::Store;
use super::disk::{DiskError, DiskFile};
use super::paths::{if_found, is_record_name, shard_dir, stripe_dir};
use crate::format::envelope::MAX_RECORD_BYTES;
use crate::id::{ShardId, StripeId};

/// The longest small record.
pub const MAX_RECORD_FILE_BYTES: u64 = MAX_RECORD_BYTES as u64;

/// What a small record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordScope {
    /// A shard.
    Shard(ShardId),
    /// One stripe of a shard.
    Stripe(StripeId),
}

impl RecordScope {
    fn folder(self) -> String {
        match self {
            Self::Shard(shard) => shard_dir(shard),
            Self::Stripe(stripe) => stripe_dir(stripe),
        }
    }

    fn path(self, name: &str) -> Result<String, StoreError> {
        if !is_record_name(name) {
            return Err(StoreError::Name { name: name.chars().take(128).collect() });
        }
        Ok(format!("{}/{name}", self.folder()))
    }
}

/// Reads a whole small file.
pub(super) fn read_all(file: &dyn DiskFile) -> Result<Vec<u8>, StoreError> {
    read_with(file, |out| file.read_at(out, 0))
}

fn read_with(
    file: &dyn DiskFile,
    read: impl FnOnce(&mut [u8]) -> Result<(), DiskError>,
) -> Result<Vec<u8>, StoreError> {
    let bytes = file.len_bytes()?;
    if bytes > MAX_RECORD_FILE_BYTES {
        return Err(StoreError::TooLong { bytes });
    }
    let mut out = vec![0; bytes as usize];
    read(&mut out)?;
    Ok(out)
}

impl Store {
    /// Stores a small record, over the one that has its name, and returns when it is durable.
    ///
    /// A name is 1 to 80 of `a-z 0-9 -`, and not 8 hexadecimal digits.
    pub fn put_record_file(
        &self,
        scope: RecordScope,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let path = scope.path(name)?;
        let old_bytes = self.put_record(&path, bytes)?;
        self.index().count_small(old_bytes, Some(bytes.len() as u64));
        Ok(())
    }

    /// As [`put_record_file`](Self::put_record_file), but over an older record only if `may_replace` says so; otherwise
    /// [`StoreError::Fixed`], and the older one stays.
    pub fn put_record_file_if(
        &self,
        scope: RecordScope,
        name: &str,
        bytes: &[u8],
        may_replace: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        let path = scope.path(name)?;
        let old_bytes = self.put_record_if(&path, bytes, |old| {
            // What is longer than a record can be is none.
            let fits = old.len_bytes()? > MAX_RECORD_FILE_BYTES || may_replace(&read_all(old)?);
            if fits { Ok(()) } else { Err(StoreError::Fixed { path: path.clone() }) }
        })?;
        self.index().count_small(old_bytes, Some(bytes.len() as u64));
        Ok(())
    }

    /// A small record, or `None`.
    pub fn get_record_file(
        &self,
        scope: RecordScope,
        name: &str,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.get_record(&scope.path(name)?)
    }

    /// Writes a temporary file and removes it: whether the folder takes writes.
    pub fn try_to_write(&self) -> Result<(), StoreError> {
        let temporary = self.names().temporary();
        let written = self.disk().create_new(&temporary).and_then(|file| file.write_at(&[1], 0));
        // Where it was not made there is nothing to remove.
        let _ = self.disk().remove(&temporary);
        Ok(written?)
    }

    /// As [`get_record_file`](Self::get_record_file), from the medium instead of the page cache.
    pub fn get_record_file_past_cache(
        &self,
        scope: RecordScope,
        name: &str,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(file) = if_found(self.disk().open(&scope.path(name)?))? else { return Ok(None) };
        let read = |out: &mut [u8]| file.read_past_cache_at(out, 0);
        read_with(file.as_ref(), read).map(Some)
    }

    /// Removes a small record and returns when that is durable; `false` when there was none.
    pub fn remove_record_file(&self, scope: RecordScope, name: &str) -> Result<bool, StoreError> {
        let path = scope.path(name)?;
        let bytes = match if_found(self.disk().open(&path))? {
            Some(file) => file.len_bytes()?,
            None => 0,
        };
        let removed = self.names().remove(&path)?;
        if removed {
            self.index().count_small(Some(bytes), None);
        }
        Ok(removed)
    }

    /// The names and lengths of a scope's small records, by name.
    pub fn list_record_files(&self, scope: RecordScope) -> Result<Vec<(String, u64)>, StoreError> {
        let entries = if_found(self.disk().list(&scope.folder()))?.unwrap_or_default();
        let small = entries.into_iter().filter(|e| !e.is_dir && is_record_name(&e.name));
        Ok(small.map(|entry| (entry.name, entry.len_bytes)).collect())
    }

    /// Writes a record anywhere in the folder; gives the length of the one that was there.
    pub(super) fn put_record(&self, path: &str, bytes: &[u8]) -> Result<Option<u64>, StoreError> {
        self.put_record_if(path, bytes, |_| Ok(()))
    }

    /// As [`put_record`](Self::put_record), if `check` agrees when no name can change.
    pub(super) fn put_record_when(
        &self,
        path: &str,
        bytes: &[u8],
        check: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<Option<u64>, StoreError> {
        self.write_record(path, bytes, |path| {
            check()?;
            let Some(file) = if_found(self.disk().open(path))? else { return Ok(None) };
            Ok(Some(file.len_bytes()?))
        })
    }

    /// `check` sees the record that is there, when no other name can change.
    fn put_record_if(
        &self,
        path: &str,
        bytes: &[u8],
        check: impl FnOnce(&dyn DiskFile) -> Result<(), StoreError>,
    ) -> Result<Option<u64>, StoreError> {
        self.write_record(path, bytes, |path| {
            let Some(file) = if_found(self.disk().open(path))? else { return Ok(None) };
            check(file.as_ref())?;
            Ok(Some(file.len_bytes()?))
        })
    }

    /// Writes a record where `old_len`, which runs when no name can change, finds no reason against it.
    fn write_record(
        &self,
        path: &str,
        bytes: &[u8],
        old_len: impl FnOnce(&str) -> Result<Option<u64>, StoreError>,
    ) -> Result<Option<u64>, StoreError> {
        if bytes.len() as u64 > MAX_RECORD_FILE_BYTES {
            return Err(StoreError::TooLong { bytes: bytes.len() as u64 });
        }
        let temporary = self.names().temporary();
        let written = self.disk().create_new(&temporary).and_then(|file| {
            file.write_at(bytes, 0)?;
            file.sync()
        });
        let done = written
            .map_err(StoreError::from)
            .and_then(|()| self.names().publish(&temporary, path, || old_len(path)));
        if done.is_err() {
            // Whatever is left of it goes at the next open.
            let _ = self.disk().remove(&temporary);
        }
        done
    }

    /// Reads a record from anywhere in the folder.
    pub(super) fn get_record(&self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        match if_found(self.disk().open(path))? {
            Some(file) => read_all(file.as_ref()).map(Some),
            None => Ok(None),
        }
    }
}
