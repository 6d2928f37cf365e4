//! Small records beside the files: commit marks, fences, tombstones, receipts, stripe records.
//!
//! Each record is written and replaced as a whole, so that a crash leaves either the old or the new
//! one. The caller seals the contents (`format::envelope`).

use super::StoreError;
use super::damage_notes::is_damage_error;
use super::data_folder::Store;
use super::disk::{DiskError, DiskFile};
use super::durable_paths::{is_record_name, none_if_not_found, shard_dir, stripe_dir};
use crate::format::envelope::MAX_RECORD_BYTES;
use crate::id::{ShardId, StripeId};

/// Maximum length of a small record, in bytes.
pub const MAX_RECORD_FILE_BYTES: u64 = MAX_RECORD_BYTES as u64;

/// The shard or stripe that a small record belongs to.
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

    fn record_path(self, name: &str) -> Result<String, StoreError> {
        if !is_record_name(name) {
            return Err(StoreError::Name { name: name.chars().take(128).collect() });
        }
        Ok(format!("{}/{name}", self.folder()))
    }
}

/// Reads a whole small file.
pub(super) fn read_small_file(file: &dyn DiskFile) -> Result<Vec<u8>, StoreError> {
    read_small_file_with(file, |out| file.read_at(out, 0))
}

fn read_small_file_with(
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
    /// Stores a small record, replaces any record of the same name, and returns once it is durable.
    ///
    /// A name is 1 to 80 characters of `a-z 0-9 -`, and not 8 hexadecimal digits.
    pub fn put_record_file(
        &self,
        scope: RecordScope,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let path = scope.record_path(name)?;
        let old_bytes = self.put_record(&path, bytes)?;
        self.index().adjust_total_record_bytes(old_bytes, Some(bytes.len() as u64));
        Ok(())
    }

    /// Stores a small record like [`put_record_file`](Self::put_record_file), but replaces an
    /// existing record only if `may_replace` accepts its bytes.
    ///
    /// # Errors
    /// [`StoreError::ImmutableRecord`] if `may_replace` refuses; the existing record stays.
    pub fn put_record_file_if(
        &self,
        scope: RecordScope,
        name: &str,
        bytes: &[u8],
        may_replace: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        let path = scope.record_path(name)?;
        let old_bytes = self.put_record_checking_old(&path, bytes, |old| {
            // A file that is longer than the limit, or that the disk cannot read, is not a record, and
            // may be replaced.
            let fits = old.len_bytes()? > MAX_RECORD_FILE_BYTES
                || match read_small_file(old) {
                    Err(error) if is_damage_error(&error) => true,
                    bytes => may_replace(&bytes?),
                };
            if fits { Ok(()) } else { Err(StoreError::ImmutableRecord { path: path.clone() }) }
        })?;
        self.index().adjust_total_record_bytes(old_bytes, Some(bytes.len() as u64));
        Ok(())
    }

    /// Returns a small record, or `None` if there is none.
    pub fn get_record_file(
        &self,
        scope: RecordScope,
        name: &str,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.get_record(&scope.record_path(name)?)
    }

    /// Returns a small record like [`get_record_file`](Self::get_record_file), but an empty one if the
    /// disk cannot read its bytes, or if they are too many. Such a record does not parse, like one whose bytes are damaged: a
    /// bad sector below one record must not fail a call that reads many.
    pub fn get_record_file_or_empty(
        &self,
        scope: RecordScope,
        name: &str,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        match self.get_record_file(scope, name) {
            Err(error)
                if is_damage_error(&error) || matches!(error, StoreError::TooLong { .. }) =>
            {
                tracing::warn!(name, %error, "a record cannot be read");
                Ok(Some(Vec::new()))
            }
            read => read,
        }
    }

    /// Checks that the folder accepts writes, by writing a temporary file and removing it.
    pub fn probe_writable(&self) -> Result<(), StoreError> {
        let temporary = self.durable_names().next_temporary_path();
        let written = self.disk().create_new(&temporary).and_then(|file| file.write_at(&[1], 0));
        // If the file could not be created, there is nothing to remove.
        let _ = self.disk().remove(&temporary);
        Ok(written?)
    }

    /// Reads a small record like [`get_record_file`](Self::get_record_file), but from the medium
    /// instead of the page cache.
    pub fn get_record_file_past_cache(
        &self,
        scope: RecordScope,
        name: &str,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(file) = none_if_not_found(self.disk().open(&scope.record_path(name)?))? else {
            return Ok(None);
        };
        let read = |out: &mut [u8]| file.read_past_cache_at(out, 0);
        read_small_file_with(file.as_ref(), read).map(Some)
    }

    /// Removes a small record and returns once the removal is durable. Returns `false` if there was
    /// none.
    pub fn remove_record_file(&self, scope: RecordScope, name: &str) -> Result<bool, StoreError> {
        let path = scope.record_path(name)?;
        let bytes = match none_if_not_found(self.disk().open(&path))? {
            Some(file) => file.len_bytes()?,
            None => 0,
        };
        let removed = self.durable_names().remove_file_and_empty_dirs(&path)?;
        if removed {
            self.index().adjust_total_record_bytes(Some(bytes), None);
        }
        Ok(removed)
    }

    /// Returns the names and lengths in bytes of a scope's small records, ordered by name.
    pub fn list_record_files(&self, scope: RecordScope) -> Result<Vec<(String, u64)>, StoreError> {
        let entries = none_if_not_found(self.disk().list(&scope.folder()))?.unwrap_or_default();
        let small = entries.into_iter().filter(|e| !e.is_dir && is_record_name(&e.name));
        Ok(small.map(|entry| (entry.name, entry.len_bytes)).collect())
    }

    /// Writes a record at any path in the folder. Returns the length of the record that it
    /// replaced.
    pub(super) fn put_record(&self, path: &str, bytes: &[u8]) -> Result<Option<u64>, StoreError> {
        self.put_record_checking_old(path, bytes, |_| Ok(()))
    }

    /// Writes a record like [`put_record`](Self::put_record), but only if `check_locked`, which
    /// runs while no name can change, succeeds.
    pub(super) fn put_record_checked(
        &self,
        path: &str,
        bytes: &[u8],
        check_locked: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<Option<u64>, StoreError> {
        self.write_record(path, bytes, |path| {
            check_locked()?;
            let Some(file) = none_if_not_found(self.disk().open(path))? else { return Ok(None) };
            Ok(Some(file.len_bytes()?))
        })
    }

    /// Writes a record like [`put_record`](Self::put_record). If a record exists, `check_old`
    /// inspects it while no name can change; its error prevents the write.
    fn put_record_checking_old(
        &self,
        path: &str,
        bytes: &[u8],
        check_old: impl FnOnce(&dyn DiskFile) -> Result<(), StoreError>,
    ) -> Result<Option<u64>, StoreError> {
        self.write_record(path, bytes, |path| {
            let Some(file) = none_if_not_found(self.disk().open(path))? else { return Ok(None) };
            check_old(file.as_ref())?;
            Ok(Some(file.len_bytes()?))
        })
    }

    /// Writes a record unless `check_and_measure_old`, which runs while no name can change, returns
    /// an error. Returns the length that `check_and_measure_old` found.
    fn write_record(
        &self,
        path: &str,
        bytes: &[u8],
        check_and_measure_old: impl FnOnce(&str) -> Result<Option<u64>, StoreError>,
    ) -> Result<Option<u64>, StoreError> {
        if bytes.len() as u64 > MAX_RECORD_FILE_BYTES {
            return Err(StoreError::TooLong { bytes: bytes.len() as u64 });
        }
        let temporary = self.durable_names().next_temporary_path();
        let written = self.disk().create_new(&temporary).and_then(|file| {
            file.write_at(bytes, 0)?;
            file.sync()
        });
        let done = written.map_err(StoreError::from).and_then(|()| {
            self.durable_names().rename_durably(&temporary, path, || check_and_measure_old(path))
        });
        if done.is_err() {
            // A file that stays in `tmp/` is removed at the next open.
            let _ = self.disk().remove(&temporary);
        }
        done
    }

    /// Reads a record at any path in the folder. Returns `None` if there is none.
    pub(super) fn get_record(&self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        match none_if_not_found(self.disk().open(path))? {
            Some(file) => read_small_file(file.as_ref()).map(Some),
            None => Ok(None),
        }
    }
}
