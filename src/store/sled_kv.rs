//! A [`Kv`] over sled. No other file uses sled.
//!
//! sled is beta software, and its own flush ends in `sync_file_range`, which is no barrier against
//! a power cut (`docs/decisions/0003-sled-as-a-cache.md`). This module therefore syncs sled's file
//! through its own descriptor after each batch. A database that has failed once may differ from
//! what is on disk, so it refuses all calls until it is opened again. A damaged database is never
//! repaired. A database that the operating system did not let us open stays in place.

use std::fs::{File, TryLockError};
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::disk::DiskLock;
use super::kv::{Batch, CatalogueStorage, Kv, KvError, MAX_PAGE, Pair, scan_lower_bound};

/// Maximum number of folders that are moved aside and kept: damaged ones, and older catalogue
/// databases. With this many, the next one is not moved aside, and the opening fails.
const MAX_ASIDE: u32 = 16;

/// Number of attempts to lock the database. A dropped database is not released at once, because
/// sled's threads notice the drop a little later.
const LOCK_TRIES: u32 = 300;
/// The wait between two attempts to lock the database.
const LOCK_WAIT: Duration = Duration::from_millis(10);

/// The result of opening a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SledOpening {
    /// There was none. The new database is empty.
    Created,
    /// The existing database was opened. It may be incomplete: if its log is damaged in the middle,
    /// sled returns the part before the damage and reports nothing.
    Recovered,
    /// The existing database is damaged and was moved aside. The new one is empty and has to be
    /// filled again.
    Rebuilt {
        /// The new path of the damaged database.
        moved_to: PathBuf,
    },
}

/// A key-value database in a folder, stored by sled.
pub struct SledKv {
    path: PathBuf,
    db: sled::Db,
    /// Our own descriptor of sled's file, for the sync that sled leaves out.
    file: File,
    sync_work: fn(&File) -> std::io::Result<()>,
    /// Held during a batch. With one writer at a time, a leaf never grows beyond what
    /// [`MAX_VALUE_BYTES`](super::kv::MAX_VALUE_BYTES) assumes.
    write_lock: Mutex<()>,
    /// Cancelled by the first failure, after which sled's memory may differ from what is on disk.
    failed: CancellationToken,
}

impl SledKv {
    /// Opens the database in the folder `path`, with a cache of `cache_capacity_bytes`.
    ///
    /// The caller holds the lock of the data folder that contains `path`, so that a database which
    /// another daemon has open is never moved aside. A damaged folder is moved aside and replaced
    /// by an empty one.
    ///
    /// # Errors
    /// [`KvError::InUse`] if another process has the database open; [`KvError::Io`] if the
    /// operating system refuses to open it, which leaves the folder in place; [`KvError::Damaged`]
    /// if it is damaged and 16 folders are beside it already.
    pub fn open(
        _held: &DiskLock,
        path: &Path,
        cache_capacity_bytes: u64,
    ) -> Result<(Self, SledOpening), KvError> {
        let existed = path.exists();
        wait_until_unlocked(path)?;
        let open = || open_reading_all(path, cache_capacity_bytes, CancellationToken::new());
        let damage = match open() {
            Ok(kv) if existed => return Ok((kv, SledOpening::Recovered)),
            Ok(kv) => return Ok((kv, SledOpening::Created)),
            Err(error @ KvError::Damaged { .. }) if existed => error,
            Err(error) => return Err(error),
        };
        let moved_to = move_aside(path)?;
        tracing::error!(%damage, ?moved_to, "the index is damaged and was moved aside: a new one is filled from the files");
        Ok((open()?, SledOpening::Rebuilt { moved_to }))
    }

    /// Returns a token that is cancelled when the database has failed and refuses all further
    /// calls.
    pub fn failure_token(&self) -> CancellationToken {
        self.failed.clone()
    }

    fn refuse_if_failed(&self) -> Result<(), KvError> {
        if self.failed.is_cancelled() {
            return Err(KvError::Failed { path: self.path.display().to_string() });
        }
        Ok(())
    }

    /// Records a failure of sled. From here on all reads and writes are refused.
    fn record_failure(&self, error: KvError) -> KvError {
        tracing::error!(%error, "a database has failed; it is not used until the daemon is started again");
        self.failed.cancel();
        error
    }

    fn fail_on_sled_error<T>(&self, result: sled::Result<T>) -> Result<T, KvError> {
        result.map_err(|error| self.record_failure(sled_error("use", &self.path, error)))
    }

    fn flush_and_sync(&self) -> Result<(), KvError> {
        self.fail_on_sled_error(self.db.flush())?;
        (self.sync_work)(&self.file)
            .map_err(|error| self.record_failure(io_error("sync", &self.path, error)))
    }

    #[cfg(test)]
    pub(crate) fn fail_syncs(&mut self) {
        self.sync_work = |_| Err(std::io::Error::other("a test"));
    }
}

/// The catalogue database in its own folder below the data folder.
pub struct SledCatalogueStorage {
    path: PathBuf,
    cache_capacity_bytes: u64,
    failed: CancellationToken,
}

impl SledCatalogueStorage {
    /// Returns the place of the database at `path`. `_held` is the lock of the data folder that
    /// contains it.
    pub fn new(_held: &DiskLock, path: PathBuf, cache_capacity_bytes: u64) -> Self {
        Self { path, cache_capacity_bytes, failed: CancellationToken::new() }
    }

    /// Returns a token that is cancelled when a database that was opened here has failed and
    /// refuses all further calls.
    pub fn failure_token(&self) -> CancellationToken {
        self.failed.clone()
    }

    fn open_database(&self) -> Result<Arc<dyn Kv>, KvError> {
        let kv = open_reading_all(&self.path, self.cache_capacity_bytes, self.failed.clone())?;
        Ok(Arc::new(kv))
    }
}

impl CatalogueStorage for SledCatalogueStorage {
    fn open_existing(&self) -> Result<Option<Arc<dyn Kv>>, KvError> {
        if !self.path.exists() {
            return Ok(None);
        }
        wait_until_unlocked(&self.path)?;
        self.open_database().map(Some)
    }

    fn move_aside_and_create(&self) -> Result<Arc<dyn Kv>, KvError> {
        if self.path.exists() {
            let moved_to = move_aside(&self.path)?;
            tracing::warn!(path = ?self.path, ?moved_to, "moved the existing catalogue database aside");
        }
        self.open_database()
    }

    fn is_folder_gone(&self) -> bool {
        matches!(self.path.try_exists(), Ok(false))
    }
}

fn io_error(op: &'static str, path: &Path, source: std::io::Error) -> KvError {
    KvError::Io { op, path: path.display().to_string(), source }
}

fn damaged_error(path: &Path, why: String) -> KvError {
    KvError::Damaged { path: path.display().to_string(), why }
}

/// Maps an error of sled. An error of the operating system (no space, a failing disk) is not
/// damage: the same folder may open later. sled's own findings are damage, even when they come as
/// I/O errors; their kinds differ from those of the operating system.
fn sled_error(op: &'static str, path: &Path, error: sled::Error) -> KvError {
    use std::io::ErrorKind::{Other, UnexpectedEof};
    match error {
        sled::Error::Io(source) if !matches!(source.kind(), Other | UnexpectedEof) => {
            io_error(op, path, source)
        }
        other => damaged_error(path, other.to_string()),
    }
}

#[allow(clippy::disallowed_methods)] // sled's folder is not behind the disk trait
fn open_file(path: &Path) -> std::io::Result<File> {
    File::open(path)
}

/// Waits a few seconds for the database to be released, and refuses it if another process still has
/// it open. sled locks its file with `flock`; trying the same lock distinguishes a database in use
/// from a broken one.
#[allow(clippy::disallowed_methods)] // sled's threads run on the machine's clock
fn wait_until_unlocked(path: &Path) -> Result<(), KvError> {
    let Ok(file) = open_file(&path.join("db")) else { return Ok(()) };
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_WAIT),
            _ => return Ok(()),
        }
    }
    Err(KvError::InUse { path: path.display().to_string() })
}

/// Opens the database, reads every entry once and makes the folder itself durable. The full read
/// reveals damage now, while the database can still be replaced.
fn open_reading_all(
    path: &Path,
    cache_capacity_bytes: u64,
    failed: CancellationToken,
) -> Result<SledKv, KvError> {
    let open = || -> sled::Result<sled::Db> {
        let db = sled::Config::new()
            .path(path)
            .cache_capacity(cache_capacity_bytes)
            .flush_every_ms(None)
            .open()?;
        db.iter().try_for_each(|pair| pair.map(drop))?;
        Ok(db)
    };
    remove_unfinished_snapshots(path)?;
    // sled panics on some kinds of damage.
    let opened = catch_unwind(AssertUnwindSafe(open))
        .map_err(|_| damaged_error(path, "it panicked while it was opened".to_owned()))
        .and_then(|opened| opened.map_err(|error| sled_error("open", path, error)));
    if opened.is_err() {
        remove_unfinished_snapshots(path)?;
    }
    let db = opened?;
    let file_path = path.join("db");
    let file = open_file(&file_path).map_err(|error| io_error("open", &file_path, error))?;
    let folders = [Some(path), path.parent()].into_iter().flatten();
    for folder in folders.filter(|folder| !folder.as_os_str().is_empty()) {
        open_file(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| io_error("sync", folder, error))?;
    }
    let (path, sync) = (path.to_owned(), File::sync_data);
    let kv = SledKv { path, db, file, sync_work: sync, write_lock: Mutex::new(()), failed };
    kv.flush_and_sync()?;
    Ok(kv)
}

/// Removes snapshots that sled could not finish, for example on a full disk. sled would take one
/// for the newest snapshot and report the database as damaged.
#[allow(clippy::disallowed_methods)] // sled's folder is not behind the disk trait
fn remove_unfinished_snapshots(path: &Path) -> Result<(), KvError> {
    let failed = |error| io_error("clear", path, error);
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("snap.") && name.ends_with(".generating") {
            std::fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    Ok(())
}

/// Renames a broken folder to the first free name beside it. Returns the new path.
fn move_aside(path: &Path) -> Result<PathBuf, KvError> {
    let free = (1..=MAX_ASIDE)
        .map(|number| path.with_added_extension(format!("broken-{number}")))
        .find(|aside| !aside.exists());
    let aside = free.ok_or_else(|| {
        damaged_error(
            path,
            format!(
                "and {MAX_ASIDE} folders that were moved aside are beside it: remove those that are not needed; damage that often is a failing disk"
            ),
        )
    })?;
    #[allow(clippy::disallowed_methods)] // sled's folder is not behind the disk trait
    std::fs::rename(path, &aside).map_err(|error| io_error("move aside", path, error))?;
    Ok(aside)
}

impl Kv for SledKv {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        self.refuse_if_failed()?;
        let value = self.fail_on_sled_error(self.db.get(key))?;
        Ok(value.map(|value| value.to_vec()))
    }

    fn apply(&self, batch: &Batch) -> Result<(), KvError> {
        batch.check_lengths()?;
        if batch.is_empty() {
            return Ok(());
        }
        let mut changes = sled::Batch::default();
        for (key, value) in &batch.changes {
            match value {
                Some(value) => changes.insert(key.as_slice(), value.as_slice()),
                None => changes.remove(key.as_slice()),
            }
        }
        let _one = self.write_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.refuse_if_failed()?;
        self.fail_on_sled_error(self.db.apply_batch(changes))?;
        self.flush_and_sync()
    }

    fn scan(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<Pair>, KvError> {
        self.refuse_if_failed()?;
        let range = (scan_lower_bound(prefix, after), Bound::Unbounded);
        let mut page = Vec::new();
        for pair in self.db.range::<&[u8], _>(range).take(limit.min(MAX_PAGE)) {
            let (key, value) = self.fail_on_sled_error(pair)?;
            if !key.starts_with(prefix) {
                break;
            }
            page.push((key.to_vec(), value.to_vec()));
        }
        Ok(page)
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // damages sled's folder from outside
mod tests {
    use super::*;
    use crate::kind::ErrorKind;
    use crate::store::MemoryKv;
    use crate::store::kv::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
    use crate::store::{Disk, RealDisk};

    fn held(folder: &Path) -> DiskLock {
        RealDisk::open(folder).unwrap().lock("lock").unwrap()
    }

    fn conforms(kv: &dyn Kv) {
        let mut batch = Batch::new();
        for key in ["a", "b/1", "b/2", "b/3", "c"] {
            batch.put(key, key.to_uppercase());
        }
        batch.put("gone", "x").delete("gone").delete("never");
        kv.apply(&batch).unwrap();
        assert_eq!(kv.get(b"b/2").unwrap().unwrap(), b"B/2");
        assert_eq!(kv.get(b"gone").unwrap(), None);
        let keys = |prefix: &str, after: Option<&str>, limit| -> Vec<String> {
            let page = kv.scan(prefix.as_bytes(), after.map(str::as_bytes), limit).unwrap();
            page.into_iter().map(|(key, _)| String::from_utf8(key).unwrap()).collect()
        };
        assert_eq!(keys("b/", None, 10), ["b/1", "b/2", "b/3"]);
        assert_eq!(keys("b/", Some("b/1"), 1), ["b/2"]);
        assert_eq!(keys("b/", Some("a"), 1), ["b/1"]);
        assert_eq!(keys("b/", Some("c"), 10), Vec::<String>::new());
        assert_eq!(keys("", None, 10).len(), 5);
        let long = kv.apply(Batch::new().put("k", vec![0; MAX_VALUE_BYTES + 1]));
        assert!(matches!(long, Err(KvError::TooLong { part: "value", .. })));
        let long = kv.apply(Batch::new().put(vec![0; MAX_KEY_BYTES + 1], ""));
        assert!(matches!(long, Err(KvError::TooLong { part: "key", .. })));
    }

    /// docs/semantics.md, 7, derives the size of the reserve from this number.
    #[test]
    fn a_removal_takes_less_of_the_disk_than_the_reserve_has_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, path) = (held(folder.path()), folder.path().join("map"));
        let (kv, _) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        let key = |number: u32| format!("f/{:064x}", number.wrapping_mul(0x9e37_79b9));
        let entries = 3000;
        for first in (0..entries).step_by(100) {
            let mut batch = Batch::new();
            for number in first..first + 100 {
                batch.put(key(number), vec![7; 70]);
            }
            kv.apply(&batch).unwrap();
        }
        let bytes = || std::fs::metadata(path.join("db")).unwrap().len();
        let before = bytes();
        for number in 0..entries {
            kv.apply(Batch::new().delete(key(number))).unwrap();
        }
        let each = (bytes() - before) / u64::from(entries);
        assert!(each <= 300, "{each} bytes a removal");
    }

    /// Simulates a snapshot that did not fit on the disk.
    #[test]
    fn an_unfinished_snapshot_is_no_damage() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, path) = (held(folder.path()), folder.path().join("map"));
        let (kv, _) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        kv.apply(Batch::new().put("a", "1")).unwrap();
        drop(kv);
        std::fs::write(path.join("snap.FFFFFFFFFFFFFFFF.generating"), b"cut").unwrap();
        let (kv, opened) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        assert_eq!(opened, SledOpening::Recovered);
        assert_eq!(kv.get(b"a").unwrap().unwrap(), b"1");
    }

    #[test]
    fn both_maps_conform() {
        conforms(&MemoryKv::new());
        let folder = tempfile::tempdir().unwrap();
        let (kv, opened) =
            SledKv::open(&held(folder.path()), &folder.path().join("kv"), 1 << 20).unwrap();
        assert_eq!(opened, SledOpening::Created);
        conforms(&kv);
    }

    #[test]
    fn a_map_that_is_let_go_in_a_moment_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, path) = (held(folder.path()), folder.path().join("kv"));
        let (kv, _) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        kv.apply(Batch::new().put("k", "v")).unwrap();
        let drops = std::thread::spawn(move || {
            std::thread::sleep(LOCK_WAIT * 5);
            drop(kv);
        });
        let (kv, opened) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        drops.join().unwrap();
        assert_eq!(opened, SledOpening::Recovered);
        assert_eq!(kv.get(b"k").unwrap().unwrap(), b"v");
    }

    #[test]
    fn what_was_applied_is_there_again_and_a_second_opening_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, path) = (held(folder.path()), folder.path().join("kv"));
        let (kv, _) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        kv.apply(Batch::new().put("k", "v")).unwrap();
        let second = SledKv::open(&lock, &path, 1 << 20);
        assert!(matches!(second, Err(KvError::InUse { .. })));
        drop(kv);
        let (kv, opened) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        assert_eq!(opened, SledOpening::Recovered);
        assert_eq!(kv.get(b"k").unwrap().unwrap(), b"v");
    }

    #[test]
    fn values_of_the_longest_kind_never_leave_sleds_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv");
        let (kv, _) = SledKv::open(&held(folder.path()), &path, 1 << 20).unwrap();
        let key = |at: u32| [vec![7; MAX_KEY_BYTES - 4], at.to_be_bytes().to_vec()].concat();
        for round in 0..3 {
            for at in 0..200u32 {
                kv.apply(Batch::new().put(key(at * 37 % 200), vec![round; MAX_VALUE_BYTES]))
                    .unwrap();
            }
        }
        let blobs: Vec<_> = std::fs::read_dir(path.join("blobs")).unwrap().collect();
        assert!(blobs.is_empty(), "{blobs:?}");
    }

    #[test]
    fn a_damaged_folder_is_moved_aside() {
        for damage in ["db", "conf"] {
            let folder = tempfile::tempdir().unwrap();
            let (lock, path) = (held(folder.path()), folder.path().join("kv"));
            let (kv, _) = SledKv::open(&lock, &path, 1 << 20).unwrap();
            for at in 0..500u32 {
                kv.apply(Batch::new().put(at.to_be_bytes(), vec![1; 300])).unwrap();
            }
            drop(kv);
            let file = path.join(damage);
            let mut bytes = std::fs::read(&file).unwrap();
            for byte in bytes.iter_mut().skip(20) {
                *byte ^= 0x5a;
            }
            bytes.truncate(bytes.len() - 1);
            std::fs::write(&file, bytes).unwrap();
            let (kv, opened) = SledKv::open(&lock, &path, 1 << 20).unwrap();
            // sled takes some damage for an empty log and opens an empty database. The
            // reconciliation refills it in both cases.
            if let SledOpening::Rebuilt { moved_to } = &opened {
                assert!(moved_to.ends_with("kv.broken-1") && moved_to.exists());
            }
            assert!(
                damage != "conf" || matches!(opened, SledOpening::Rebuilt { .. }),
                "{opened:?}"
            );
            kv.apply(Batch::new().put("k", "v")).unwrap();
            assert_eq!(kv.get(b"k").unwrap().unwrap(), b"v");
        }
    }

    #[test]
    fn what_the_system_refuses_moves_nothing_and_a_damaged_map_of_the_catalogue_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, path) = (held(folder.path()), folder.path().join("kv"));
        let maps = SledCatalogueStorage::new(&lock, path.clone(), 1 << 20);
        std::fs::write(&path, b"not a folder").unwrap();
        for refused in [SledKv::open(&lock, &path, 1 << 20).err(), maps.open_existing().err()] {
            assert!(matches!(refused, Some(KvError::Io { .. })), "{refused:?}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"not a folder");
        std::fs::remove_file(&path).unwrap();
        drop(SledKv::open(&lock, &path, 1 << 20).unwrap());
        std::fs::write(path.join("conf"), vec![0x5a; 40]).unwrap();
        assert!(matches!(maps.open_existing().err(), Some(KvError::Damaged { .. })));
        assert!(path.join("conf").exists());
        maps.move_aside_and_create().unwrap().apply(Batch::new().put("k", "v")).unwrap();
        assert!(folder.path().join("kv.broken-1/conf").exists());
    }

    #[test]
    fn errors_of_the_system_are_no_damage() {
        let system = [28, 5].map(std::io::Error::from_raw_os_error);
        for error in system.map(sled::Error::Io) {
            // sled returns copies of an error that it has kept; a copy lacks the error number.
            for error in [error.clone(), error] {
                assert_eq!(sled_error("use", Path::new("kv"), error).kind(), ErrorKind::Io);
            }
        }
        let short = sled::Error::Io(std::io::ErrorKind::UnexpectedEof.into());
        assert_eq!(sled_error("use", Path::new("kv"), short).kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn a_map_that_could_not_sync_does_nothing_until_it_is_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, path) = (held(folder.path()), folder.path().join("kv"));
        let (mut kv, _) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        kv.apply(Batch::new().put("k", "old")).unwrap();
        let failed = kv.failure_token();
        kv.fail_syncs();
        let error = kv.apply(Batch::new().put("k", "new")).unwrap_err();
        assert!(matches!(error, KvError::Io { op: "sync", .. }) && failed.is_cancelled());
        kv.sync_work = File::sync_data;
        let refused = [
            kv.get(b"k").err(),
            kv.scan(b"", None, 1).err(),
            kv.apply(Batch::new().put("k", "newer")).err(),
        ];
        for error in refused {
            assert!(matches!(error, Some(KvError::Failed { .. })), "{error:?}");
        }
        drop(kv);
        let (kv, opened) = SledKv::open(&lock, &path, 1 << 20).unwrap();
        assert_eq!(opened, SledOpening::Recovered);
        let now = kv.get(b"k").unwrap().unwrap();
        assert!(now == b"old" || now == b"new", "{now:?}");
    }
}
