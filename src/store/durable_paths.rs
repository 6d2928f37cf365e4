//! Paths in the data folder, and how a name becomes durable or is durably removed.
//!
//! A rename is durable once the target folder is synced, *and* that folder's own name in its
//! parent, and so on up to the root. This module remembers each folder that it creates until the
//! parent is synced. A call that finds a folder which another call has just created therefore syncs
//! that name too before it acknowledges. Folders found at open are durable, because
//! [`Disk::sync_all`] ran first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::{Disk, DiskError, parent};
use crate::format::file::FileKey;
use crate::id::{ShardId, StripeId};

pub(super) const SHARDS: &str = "shards";
pub(super) const TMP: &str = "tmp";
pub(super) const GRAVES: &str = "graves";
pub(super) const QUARANTINE: &str = "quarantine";

pub(super) fn shard_dir(shard: ShardId) -> String {
    format!("{SHARDS}/{shard}")
}

pub(super) fn stripe_dir(stripe: StripeId) -> String {
    format!("{SHARDS}/{}/{:08x}", stripe.shard, stripe.index)
}

pub(super) fn file_path(key: FileKey) -> String {
    format!("{SHARDS}/{key}")
}

/// Returns the index of the stripe whose folder has this name. Each index has exactly one valid
/// name.
pub(super) fn parse_stripe_index(name: &str) -> Option<u32> {
    let index = u32::from_str_radix(name, 16).ok()?;
    (format!("{index:08x}") == name).then_some(index)
}

/// The names in a data folder, and the calls that change them durably.
pub(super) struct FileNames {
    disk: Arc<dyn Disk>,
    next_temporary: AtomicU64,
    /// Folders whose own name may not be durable yet, each with a creation number. The lock is held
    /// during every change of names that this type makes, and no sync runs under it. An entry outlives
    /// its operation only if a sync fails.
    new_dirs: Mutex<NewDirs>,
}

#[derive(Default)]
struct NewDirs {
    unsynced: HashMap<String, u64>,
    next_number: u64,
}

impl FileNames {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk, next_temporary: AtomicU64::new(0), new_dirs: Mutex::default() }
    }

    fn lock_new_dirs(&self) -> MutexGuard<'_, NewDirs> {
        self.new_dirs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a path in `tmp/` that is not used by any other call.
    pub(super) fn next_temporary_path(&self) -> String {
        format!("{TMP}/{:016x}", self.next_temporary.fetch_add(1, Ordering::Relaxed))
    }

    /// Renames `from` to `to`, replaces any file there, and returns once the new name is durable.
    /// Creates missing folders above `to`. `check` runs while no name can change; its error
    /// prevents the rename. Returns the value of `check`.
    pub(super) fn rename_durably<T, E: From<DiskError>>(
        &self,
        from: &str,
        to: &str,
        check: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let checked = {
            let mut made = self.lock_new_dirs();
            let checked = check()?;
            self.create_missing_dirs(parent(to), &mut made)?;
            self.disk.rename(from, to)?;
            checked
        };
        self.sync_dir_and_ancestors(parent(to))?;
        Ok(checked)
    }

    fn create_missing_dirs(&self, dir: &str, made: &mut NewDirs) -> Result<(), DiskError> {
        if dir.is_empty() {
            return Ok(());
        }
        self.create_missing_dirs(parent(dir), made)?;
        if self.disk.create_dir(dir)? {
            made.next_number += 1;
            made.unsynced.insert(dir.to_owned(), made.next_number);
        }
        Ok(())
    }

    /// Makes the names in `dir` durable, and then the names of `dir` and of the folders above it
    /// that are not durable yet. If another call has removed the published file together with its
    /// folder, this makes that removal durable.
    fn sync_dir_and_ancestors(&self, dir: &str) -> Result<(), DiskError> {
        let mut dir = self.sync_nearest_existing(dir)?;
        while !dir.is_empty() {
            let number = self.lock_new_dirs().unsynced.get(dir).copied();
            if number.is_some() {
                self.sync_nearest_existing(parent(dir))?;
                let mut made = self.lock_new_dirs();
                // The folder may have been removed and created again meanwhile: that entry stays.
                if made.unsynced.get(dir).copied() == number {
                    made.unsynced.remove(dir);
                }
            }
            dir = parent(dir);
        }
        Ok(())
    }

    /// Makes an existing name durable.
    pub(super) fn sync_name(&self, path: &str) -> Result<(), DiskError> {
        self.sync_dir_and_ancestors(parent(path))
    }

    /// Syncs a folder, or its nearest existing ancestor if another call has removed it. Returns the
    /// folder that was synced.
    fn sync_nearest_existing<'a>(&self, dir: &'a str) -> Result<&'a str, DiskError> {
        let mut dir = dir;
        loop {
            match self.disk.sync_dir(dir) {
                Err(DiskError::NotFound { .. }) if !dir.is_empty() => dir = parent(dir),
                done => return done.map(|()| dir),
            }
        }
    }

    /// Removes a file below `shards/`, together with the folders that become empty, and returns
    /// once the removal is durable. Returns `false` if there is no such file. The absence is synced
    /// even then, because an earlier call may have removed the file and failed before its sync.
    pub(super) fn remove_file_and_empty_dirs(&self, path: &str) -> Result<bool, DiskError> {
        self.remove_file_and_empty_dirs_if(path, || true)
    }

    /// Runs `work` while no name can change.
    pub(super) fn run_with_names_locked<T>(&self, work: impl FnOnce() -> T) -> T {
        let _made = self.lock_new_dirs();
        work()
    }

    /// Removes a file like [`remove_file_and_empty_dirs`](Self::remove_file_and_empty_dirs), but
    /// only if `may_remove`, which runs while no name can change, returns true.
    pub(super) fn remove_file_and_empty_dirs_if(
        &self,
        path: &str,
        may_remove: impl FnOnce() -> bool,
    ) -> Result<bool, DiskError> {
        let (removed, left) = {
            let mut made = self.lock_new_dirs();
            if !may_remove() {
                return Ok(false);
            }
            match self.disk.remove(path) {
                Ok(()) => (true, self.remove_empty_ancestors(parent(path), &mut made)),
                Err(DiskError::NotFound { .. }) => (false, parent(path)),
                Err(error) => return Err(error),
            }
        };
        self.sync_nearest_existing(left)?;
        Ok(removed)
    }

    /// Moves a file from below `shards/` to a folder outside, and returns once it is durable there
    /// and durably gone from its old place. Moves nothing and returns `false` if `may_move`, which runs
    /// while no name can change, returns false.
    pub(super) fn move_out_of_shards_if<E: From<DiskError>>(
        &self,
        from: &str,
        to: &str,
        may_move: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let left = {
            let mut made = self.lock_new_dirs();
            if !may_move()? {
                return Ok(false);
            }
            self.disk.rename(from, to)?;
            self.remove_empty_ancestors(parent(from), &mut made)
        };
        self.disk.sync_dir(parent(to))?;
        self.sync_nearest_existing(left)?;
        Ok(true)
    }

    /// Removes `dir` and the folders above it as long as they are empty. Returns the first folder
    /// that stays. An error leaves an empty folder behind, which is harmless.
    fn remove_empty_ancestors<'a>(&self, dir: &'a str, made: &mut NewDirs) -> &'a str {
        let mut dir = dir;
        while dir != SHARDS && self.disk.remove_dir_if_empty(dir).unwrap_or(false) {
            made.unsynced.remove(dir);
            dir = parent(dir);
        }
        dir
    }
}

/// Returns whether this is a valid name for a small record. No such name is the name of a replica
/// or piece file (those contain a dot) or of a stripe's folder (8 hexadecimal digits).
pub(super) fn is_record_name(name: &str) -> bool {
    (1..=80).contains(&name.len())
        && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && crate::store::durable_paths::parse_stripe_index(name).is_none()
}

/// Turns [`DiskError::NotFound`] into `None`.
pub(super) fn none_if_not_found<T>(result: Result<T, DiskError>) -> Result<Option<T>, DiskError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(DiskError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryDisk;

    fn put(disk: &MemoryDisk, names: &FileNames, to: &str) -> Result<(), DiskError> {
        let from = names.next_temporary_path();
        disk.create_new(&from)?.sync()?;
        names.rename_durably(&from, to, || Ok(()))
    }

    fn disk() -> (MemoryDisk, FileNames) {
        let disk = MemoryDisk::new(1 << 20);
        disk.create_dir(SHARDS).unwrap();
        disk.create_dir(TMP).unwrap();
        disk.sync_dir("").unwrap();
        let names = FileNames::new(Arc::new(disk.clone()));
        (disk, names)
    }

    #[test]
    fn a_folder_that_a_failed_call_has_made_is_synced_by_the_next_one() {
        for failing in 0..8 {
            let (disk, names) = disk();
            disk.fail_once_after(failing);
            let first = put(&disk, &names, "shards/a/b/one");
            put(&disk, &names, "shards/a/b/two").unwrap();
            let names: Vec<String> = disk
                .crash()
                .list("shards/a/b")
                .unwrap()
                .into_iter()
                .map(|entry| entry.name)
                .collect();
            assert!(names.contains(&"two".to_owned()), "operation {failing}: {names:?}");
            assert!(first.is_err() || names.contains(&"one".to_owned()));
        }
    }

    #[test]
    fn empty_folders_go_with_their_last_file_and_come_back() {
        let (disk, names) = disk();
        put(&disk, &names, "shards/a/b/one").unwrap();
        put(&disk, &names, "shards/a/b/two").unwrap();
        names.remove_file_and_empty_dirs("shards/a/b/one").unwrap();
        assert_eq!(disk.crash().list("shards/a/b").unwrap().len(), 1);
        names.remove_file_and_empty_dirs("shards/a/b/two").unwrap();
        assert_eq!(disk.crash().list(SHARDS).unwrap(), []);
        put(&disk, &names, "shards/a/b/one").unwrap();
        assert_eq!(disk.crash().list("shards/a/b").unwrap().len(), 1);
    }

    #[test]
    fn a_stripe_folder_has_one_name() {
        assert_eq!(parse_stripe_index("0000010a"), Some(0x10a));
        for bad in ["10a", "0000010A", "+000010a", "00000010a", "", "0000010g"] {
            assert_eq!(parse_stripe_index(bad), None, "{bad}");
        }
    }
}
