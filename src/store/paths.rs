//! Where things lie, and how a name becomes or ceases to be durable.
//!
//! A rename is durable when the folder it went to is synced, *and* that folder's own name in its parent, and so
//! on up. Folders made here are remembered until their parent was synced, so that whoever finds a folder that
//! somebody else has just made syncs it too before it acknowledges. Folders found at open are durable:
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

/// The index of a stripe from the name of its folder; one index has one name.
pub(super) fn parse_stripe_index(name: &str) -> Option<u32> {
    let index = u32::from_str_radix(name, 16).ok()?;
    (format!("{index:08x}") == name).then_some(index)
}

/// The names of the folder.
pub(super) struct FileNames {
    disk: Arc<dyn Disk>,
    temporary: AtomicU64,
    /// Folders whose own name may not be durable yet, each with the number of its making. Held over every
    /// change of names, none of which syncs; an entry outlives its operation only when a sync fails.
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    unsynced: HashMap<String, u64>,
    next: u64,
}

impl FileNames {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk, temporary: AtomicU64::new(0), made: Mutex::default() }
    }

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name in `tmp/` that nobody else has.
    pub(super) fn temporary(&self) -> String {
        format!("{TMP}/{:016x}", self.temporary.fetch_add(1, Ordering::Relaxed))
    }

    /// Moves `from` to `to`, over whatever file is there, and returns when the new name is durable. Missing
    /// folders above `to` are made. `check` runs when no other name can change.
    pub(super) fn publish<T, E: From<DiskError>>(
        &self,
        from: &str,
        to: &str,
        check: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let checked = {
            let mut made = self.made();
            let checked = check()?;
            self.make_dirs(parent(to), &mut made)?;
            self.disk.rename(from, to)?;
            checked
        };
        self.sync_up(parent(to))?;
        Ok(checked)
    }

    fn make_dirs(&self, dir: &str, made: &mut Made) -> Result<(), DiskError> {
        if dir.is_empty() {
            return Ok(());
        }
        self.make_dirs(parent(dir), made)?;
        if self.disk.create_dir(dir)? {
            made.next += 1;
            made.unsynced.insert(dir.to_owned(), made.next);
        }
        Ok(())
    }

    /// Makes the names in `dir` durable, and `dir` itself where it is not. When others have removed what was
    /// published, and the folder with it, that is what is made durable.
    fn sync_up(&self, dir: &str) -> Result<(), DiskError> {
        let mut dir = self.sync_or_above(dir)?;
        while !dir.is_empty() {
            let number = self.made().unsynced.get(dir).copied();
            if number.is_some() {
                self.sync_or_above(parent(dir))?;
                let mut made = self.made();
                // Unless it was removed and made again meanwhile.
                if made.unsynced.get(dir).copied() == number {
                    made.unsynced.remove(dir);
                }
            }
            dir = parent(dir);
        }
        Ok(())
    }

    /// Makes a name that is there durable.
    pub(super) fn sync(&self, path: &str) -> Result<(), DiskError> {
        self.sync_up(parent(path))
    }

    /// Syncs a folder, or the nearest above it when others have removed it; gives which.
    fn sync_or_above<'a>(&self, dir: &'a str) -> Result<&'a str, DiskError> {
        let mut dir = dir;
        loop {
            match self.disk.sync_dir(dir) {
                Err(DiskError::NotFound { .. }) if !dir.is_empty() => dir = parent(dir),
                done => return done.map(|()| dir),
            }
        }
    }

    /// Removes a file below `shards/`, with the folders that it leaves empty, and returns when that is
    /// durable; `false` when there is none. That is made durable too: an earlier call may have removed it and
    /// failed before its sync.
    pub(super) fn remove(&self, path: &str) -> Result<bool, DiskError> {
        self.remove_if(path, || true)
    }

    /// Runs `work` while no name can change.
    pub(super) fn hold<T>(&self, work: impl FnOnce() -> T) -> T {
        let _made = self.made();
        work()
    }

    /// As [`remove`](Self::remove), if `is_it` still says so when no name can change.
    pub(super) fn remove_if(
        &self,
        path: &str,
        is_it: impl FnOnce() -> bool,
    ) -> Result<bool, DiskError> {
        let (removed, left) = {
            let mut made = self.made();
            if !is_it() {
                return Ok(false);
            }
            match self.disk.remove(path) {
                Ok(()) => (true, self.remove_empty_dirs(parent(path), &mut made)),
                Err(DiskError::NotFound { .. }) => (false, parent(path)),
                Err(error) => return Err(error),
            }
        };
        self.sync_or_above(left)?;
        Ok(removed)
    }

    /// Moves a file below `shards/` to a folder outside and returns when it is durable there, and gone here. `false`: nothing was
    /// moved, because `is_it`, which looks when no name can change, says that another file is there.
    pub(super) fn move_out<E: From<DiskError>>(
        &self,
        from: &str,
        to: &str,
        is_it: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let left = {
            let mut made = self.made();
            if !is_it()? {
                return Ok(false);
            }
            self.disk.rename(from, to)?;
            self.remove_empty_dirs(parent(from), &mut made)
        };
        self.disk.sync_dir(parent(to))?;
        self.sync_or_above(left)?;
        Ok(true)
    }

    /// Removes `dir` and the folders above it as far as they are empty; gives the first that stays. An error
    /// leaves an empty folder behind, which hurts nobody.
    fn remove_empty_dirs<'a>(&self, dir: &'a str, made: &mut Made) -> &'a str {
        let mut dir = dir;
        while dir != SHARDS && self.disk.remove_dir_if_empty(dir).unwrap_or(false) {
            made.unsynced.remove(dir);
            dir = parent(dir);
        }
        dir
    }
}

/// Whether a small record can have this name. None of them is the name of a replica or piece file (those have
/// a dot), nor of a stripe's folder (8 hexadecimal digits).
pub(super) fn is_record_name(name: &str) -> bool {
    (1..=80).contains(&name.len())
        && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && crate::store::paths::parse_stripe_index(name).is_none()
}

/// Turns "not there" into `None`.
pub(super) fn if_found<T>(result: Result<T, DiskError>) -> Result<Option<T>, DiskError> {
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
        let from = names.temporary();
        disk.create_new(&from)?.sync()?;
        names.publish(&from, to, || Ok(()))
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
            disk.fail_after(failing);
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
        names.remove("shards/a/b/one").unwrap();
        assert_eq!(disk.crash().list("shards/a/b").unwrap().len(), 1);
        names.remove("shards/a/b/two").unwrap();
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
