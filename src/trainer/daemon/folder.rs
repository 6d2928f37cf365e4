//! The staging folder: access checks, its lock, and its files (docs/staging.md, 2).
#![allow(clippy::disallowed_methods)] // shared memory lies outside any store

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::core::StepKey;
use super::records::{InstanceRecord, JobRecord, LaunchHosts, OwnerRecord, StepRecord};
use crate::entropy::Entropy;
use crate::format::FormatError;
use crate::format::records::Record;
use crate::id::{ClusterId, FillId, InstanceId, Job, LaunchId, SegmentId};
use crate::kind::ErrorKind;
use crate::trainer::mapping;
use crate::trainer::segment::{self, State};
use crate::trainer::session::SOCKET;

/// Maximum length of a record or table that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// The folders in the staging folder that belong to the daemon.
const FOLDERS: [&str; 5] = ["segments", "steps", "jobs", "launches", "fetched"];
const LOCK: &str = "lock";
/// A file whose memory is freed when the daemon must write a record and the file system is full.
const RESERVE: &str = "reserve";
const RESERVE_BYTES: u64 = 1 << 20;
/// Suffix of the name of a file that is being written. No job's name has this character.
const TEMPORARY: &str = "~new";

/// The reason why the folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// The folder belongs to another user, or other users can access it.
    #[error("the staging folder {} {problem}: it must belong to this user and have mode 0700", path.display())]
    Untrusted {
        /// The folder.
        path: PathBuf,
        /// The problem, as the middle of a sentence about the folder.
        problem: String,
    },
    /// Another daemon uses the folder.
    #[error("another staging daemon runs in {}: `rapidraid stage --status` shows it", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The folder was made for another cluster.
    #[error("the staging folder {} belongs to cluster {found}, not to {expected}: name another one by staging.dir", path.display())]
    OtherCluster {
        /// The folder.
        path: PathBuf,
        /// The cluster that the folder belongs to.
        found: ClusterId,
        /// The cluster of this daemon.
        expected: ClusterId,
    },
    /// A record does not parse.
    #[error("{}: {source}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: FormatError,
    },
    /// A call to the operating system failed.
    #[error("{op} {}: {source}", path.display())]
    Io {
        /// The operation that failed.
        op: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl FolderError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            FolderError::Untrusted { .. } | FolderError::OtherCluster { .. } => ErrorKind::Denied,
            FolderError::InUse { .. } => ErrorKind::Exists,
            FolderError::Record { source, .. } => source.kind(),
            FolderError::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory => ErrorKind::Busy,
                _ => ErrorKind::Io,
            },
        }
    }
}

/// The staging folder of one daemon, locked as long as this value lives.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    instance: InstanceId,
    lock: File,
}

fn during<'a>(op: &'static str, path: &'a Path) -> impl Fn(io::Error) -> FolderError + 'a {
    move |source| FolderError::Io { op, path: path.to_owned(), source }
}

impl Folder {
    /// Opens and locks the folder. Creates it if it is missing. Discards its contents if the host
    /// was rebooted since.
    pub fn open(
        path: &Path,
        cluster: ClusterId,
        entropy: &dyn Entropy,
    ) -> Result<Self, FolderError> {
        let make = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        make(path).map_err(during("making", path))?;
        check_owner(path)?;
        let lock_path = path.join(LOCK);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(&lock_path).map_err(during("opening", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(FolderError::InUse { path: path.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(during("locking", &lock_path)(error)),
        }
        for below in FOLDERS {
            let folder = path.join(below);
            make(&folder).map_err(during("making", &folder))?;
        }
        let mut folder = Self { path: path.to_owned(), instance: InstanceId([0; 16]), lock };
        let at = path.join("instance");
        let boot = boot_id();
        let mut record = folder.read_record::<InstanceRecord>(&at)?;
        if record.as_ref().is_some_and(|record| record.boot != boot) {
            tracing::warn!(
                "the host was rebooted since the staging folder was last used: the segments and steps in it are removed"
            );
            folder.clear()?;
            record = None;
        }
        let record = match record {
            Some(record) => record,
            None => {
                let record = InstanceRecord { instance: InstanceId(entropy.id()), cluster, boot };
                folder.write_record(&at, &record)?;
                record
            }
        };
        if record.cluster != cluster {
            let (path, found) = (path.to_owned(), record.cluster);
            return Err(FolderError::OtherCluster { path, found, expected: cluster });
        }
        folder.instance = record.instance;
        folder.keep_reserve();
        // Files that the previous daemon read from the cluster are read again on demand.
        let fetched = folder.path.join("fetched");
        for file in folder.list(&fetched)? {
            let _ = fs::remove_file(file);
        }
        Ok(folder)
    }

    /// Returns the folder's id.
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path for a new socket. Removes the socket of a previous daemon.
    pub fn new_socket(&self) -> Result<PathBuf, FolderError> {
        let path = self.path.join(SOCKET);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(during("removing", &path)(error))
            }
            _ => Ok(path),
        }
    }

    fn segment_path(&self, id: SegmentId) -> PathBuf {
        self.path.join("segments").join(format!("{id}.seg"))
    }

    fn owner_path(&self, id: SegmentId) -> PathBuf {
        self.path.join("segments").join(format!("{id}.own"))
    }

    /// Creates the file of a segment and writes its owner record. Returns a writable descriptor
    /// that holds a shared lock, by which the daemon knows that a process has the segment. The lock
    /// ends with the last copy of the descriptor, however its process ends.
    pub fn make_segment(&self, id: SegmentId, owner: &OwnerRecord) -> Result<OwnedFd, FolderError> {
        let path = self.segment_path(id);
        if !self.is_there() {
            return Err(during("making", &path)(io::ErrorKind::NotFound.into()));
        }
        self.write_record(&self.owner_path(id), owner)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(during("making", &path))?;
        file.lock_shared().map_err(during("locking", &path))?;
        Ok(file.into())
    }

    /// Marks a segment as free in its header.
    pub fn set_free(&self, id: SegmentId) -> io::Result<()> {
        self.with_header(id, |file| segment::set_state(file, State::Free))
    }

    /// Marks a segment as being filled in its header.
    pub fn set_filling(&self, id: SegmentId, fill: FillId) -> io::Result<()> {
        self.with_header(id, |file| segment::set_filling(file, fill))
    }

    fn with_header(
        &self,
        id: SegmentId,
        write: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.segment_path(id))?;
        if file.metadata()?.len() == 0 {
            // The owner has not reserved the segment's memory yet, so there is no header to
            // overwrite.
            return Ok(());
        }
        write(&file)
    }

    /// Returns the filling that a segment's header names; `None` if the segment is free or has no
    /// header.
    pub fn filling_of(&self, id: SegmentId) -> Option<FillId> {
        segment::filling_of(&self.open_segment(id).ok()?).ok()?
    }

    /// Opens a segment for reading.
    pub fn open_segment(&self, id: SegmentId) -> Result<File, FolderError> {
        let path = self.segment_path(id);
        File::open(&path).map_err(during("opening", &path))
    }

    /// Returns the segments in the folder with their owners. Removes segments that have no readable
    /// owner record, and owner records that have no segment.
    pub fn segments(&self) -> Result<Vec<(SegmentId, OwnerRecord)>, FolderError> {
        let mut found = Vec::new();
        for path in self.list(&self.path.join("segments"))? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some((id, kind)) = name.split_once('.') else { continue };
            let Ok(id) = id.parse::<SegmentId>() else { continue };
            let owner = self.owner_path(id);
            match kind {
                "own" if !self.segment_path(id).exists() => drop(fs::remove_file(&path)),
                "seg" => match self.read_record::<OwnerRecord>(&owner) {
                    Ok(Some(record)) => found.push((id, record)),
                    _ => {
                        tracing::warn!(segment = %id, "removing a segment that has no readable owner record");
                        let _ = fs::remove_file(&path);
                        let _ = fs::remove_file(&owner);
                    }
                },
                _ => {}
            }
        }
        Ok(found)
    }

    /// Returns whether no process has the segment. The daemon's own descriptors hold no lock.
    pub fn is_unmapped(&self, id: SegmentId) -> bool {
        match self.open_segment(id) {
            Ok(file) => file.try_lock().is_ok(),
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }

    /// Unlinks a segment if no process has it. Returns whether it is unlinked.
    pub fn unlink_segment(&self, id: SegmentId) -> bool {
        if !self.is_unmapped(id) {
            return false;
        }
        let _ = fs::remove_file(self.segment_path(id));
        let _ = fs::remove_file(self.owner_path(id));
        true
    }

    /// Returns whether the folder is still the one that was locked. A cleaner of the host's shared
    /// memory may remove it while the daemon runs.
    pub fn is_there(&self) -> bool {
        let now = fs::symlink_metadata(self.path.join(LOCK));
        match (now, self.lock.metadata()) {
            (Ok(now), Ok(locked)) => (now.dev(), now.ino()) == (locked.dev(), locked.ino()),
            _ => false,
        }
    }

    fn step_path(&self, key: &StepKey) -> PathBuf {
        let folder = self.path.join("steps").join(key.job.as_str());
        folder.join(format!("{:020}-{}-{}", key.step.0, key.launch, key.fill))
    }

    fn table_path(&self, key: &StepKey) -> PathBuf {
        self.step_path(key).with_extension("table")
    }

    /// Writes a step's record.
    pub fn keep_step(&self, record: &StepRecord) -> Result<(), FolderError> {
        if !self.is_there() {
            return Ok(());
        }
        let path = self.step_path(&record.key());
        if let Some(folder) = path.parent() {
            make_last(folder)?;
        }
        self.write_record(&path, record)
    }

    /// Returns the records of all steps. Removes tables without a record and records that do not
    /// parse.
    pub fn steps(&self) -> Result<Vec<StepRecord>, FolderError> {
        let mut found = Vec::new();
        for job in self.list(&self.path.join("steps"))? {
            for path in self.list(&job)? {
                let is_table = path.extension().is_some();
                match self.read_record::<StepRecord>(&path.with_extension("")) {
                    Ok(Some(_)) if is_table => {}
                    Ok(Some(record)) => found.push(record),
                    _ => drop(fs::remove_file(&path)),
                }
            }
        }
        Ok(found)
    }

    /// Writes the table of a step, with hashes. The reserve is not used for it, because records need
    /// the reserve. Without its table, a committed step is loaded from the cluster.
    pub fn keep_table(&self, key: &StepKey, table: &[u8]) -> Result<(), FolderError> {
        self.try_write(&self.table_path(key), table)
    }

    /// Returns the table of a step, or `None` if there is none.
    pub fn table(&self, key: &StepKey) -> Result<Option<Vec<u8>>, FolderError> {
        self.read(&self.table_path(key))
    }

    /// Removes the record and the table of a step.
    pub fn forget_step(&self, key: &StepKey) {
        self.forget(&self.table_path(key));
        self.forget(&self.step_path(key));
    }

    fn forget(&self, path: &Path) {
        if self.is_there() {
            let _ = fs::remove_file(path);
        }
    }

    fn job_path(&self, job: &Job) -> PathBuf {
        self.path.join("jobs").join(job.as_str())
    }

    /// Writes a job's record.
    pub fn keep_job(&self, record: &JobRecord) -> Result<(), FolderError> {
        self.write_record(&self.job_path(&record.job), record)
    }

    /// Returns the records of all jobs.
    pub fn jobs(&self) -> Result<Vec<JobRecord>, FolderError> {
        let mut found = Vec::new();
        for path in self.list(&self.path.join("jobs"))? {
            found.extend(self.read_record::<JobRecord>(&path)?);
        }
        Ok(found)
    }

    fn hosts_path(&self, launch: LaunchId) -> PathBuf {
        self.path.join("launches").join(launch.to_string())
    }

    /// Writes the record of a launch's hosts.
    pub fn keep_hosts(&self, record: &LaunchHosts) -> Result<(), FolderError> {
        self.write_record(&self.hosts_path(record.launch), record)
    }

    /// Removes the record of a launch's hosts.
    pub fn forget_hosts(&self, launch: LaunchId) {
        self.forget(&self.hosts_path(launch));
    }

    /// Returns the records of the hosts of all launches.
    pub fn hosts(&self) -> Result<Vec<LaunchHosts>, FolderError> {
        let mut found = Vec::new();
        for path in self.list(&self.path.join("launches"))? {
            found.extend(self.read_record::<LaunchHosts>(&path)?);
        }
        Ok(found)
    }

    /// Returns the path of a file below `fetched/`.
    pub fn fetched_path(&self, id: SegmentId) -> PathBuf {
        self.path.join("fetched").join(id.to_string())
    }

    fn list(&self, folder: &Path) -> Result<Vec<PathBuf>, FolderError> {
        let entries = fs::read_dir(folder).map_err(during("listing", folder))?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        // Remove files that a killed daemon was writing.
        paths.retain(|path| {
            let is_temporary = path.to_string_lossy().ends_with(TEMPORARY);
            if is_temporary {
                let _ = fs::remove_file(path);
            }
            !is_temporary
        });
        paths.sort();
        Ok(paths)
    }

    fn read(&self, path: &Path) -> Result<Option<Vec<u8>>, FolderError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(during("opening", path)(error)),
        };
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(during("reading", path))?;
        Ok(Some(bytes))
    }

    fn read_record<R: Record>(&self, path: &Path) -> Result<Option<R>, FolderError> {
        let failed = |source| FolderError::Record { path: path.to_owned(), source };
        self.read(path)?.map(|bytes| R::parse(&bytes).map_err(failed)).transpose()
    }

    fn write_record<R: Record>(&self, path: &Path, record: &R) -> Result<(), FolderError> {
        let failed = |source| FolderError::Record { path: path.to_owned(), source };
        self.write(path, &record.to_bytes().map_err(failed)?)
    }

    /// Writes a file under a temporary name and renames it, so that a killed daemon leaves either
    /// the old or the new file. If trainers have filled the file system, frees the reserve and
    /// tries again. The callers write each file from one task at a time, because two would share
    /// the temporary name.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
        match self.try_write(path, bytes) {
            Err(error) if error.kind() == ErrorKind::Busy => {
                let _ = fs::remove_file(self.path.join(RESERVE));
                self.try_write(path, bytes)
            }
            result => result,
        }
    }

    /// Creates the reserve if it is missing and there is room for it.
    pub fn keep_reserve(&self) {
        let path = self.path.join(RESERVE);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let Ok(file) = options.open(&path) else { return };
        if mapping::reserve(&file, RESERVE_BYTES, || Ok(())).is_err() {
            let _ = fs::remove_file(&path);
        }
    }

    /// Empties the daemon's folders in the staging folder.
    fn clear(&self) -> Result<(), FolderError> {
        for below in FOLDERS {
            let folder = self.path.join(below);
            fs::remove_dir_all(&folder).map_err(during("removing", &folder))?;
            fs::create_dir(&folder).map_err(during("making", &folder))?;
        }
        Ok(())
    }

    /// Does nothing if the folder was removed: the steps that are still mapped are saved without
    /// records, and the folder at the same path may be that of another daemon.
    fn try_write(&self, path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
        if !self.is_there() {
            return Ok(());
        }
        let mut name = path.as_os_str().to_owned();
        name.push(TEMPORARY);
        let temporary = PathBuf::from(name);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options
            .open(&temporary)
            .and_then(|mut file| io::Write::write_all(&mut file, bytes))
            .and_then(|()| fs::rename(&temporary, path));
        written.map_err(|error| {
            // On a full file system the incomplete file would take the space that records need.
            let _ = fs::remove_file(&temporary);
            during("writing", path)(error)
        })
    }
}

/// Creates a folder unless it exists. Does not create the folders above it: the staging folder may
/// have been removed, and must not come back with another mode.
fn make_last(path: &Path) -> Result<(), FolderError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(during("making", path)(error))
        }
        _ => Ok(()),
    }
}

fn check_owner(path: &Path) -> Result<(), FolderError> {
    let metadata = fs::symlink_metadata(path).map_err(during("looking at", path))?;
    let own = rustix::process::geteuid().as_raw();
    let untrusted = |problem: String| FolderError::Untrusted { path: path.to_owned(), problem };
    if !metadata.is_dir() {
        return Err(untrusted("is no folder".into()));
    }
    if metadata.uid() != own {
        return Err(untrusted(format!("belongs to user {}, not to user {own}", metadata.uid())));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(untrusted(format!("has mode {:04o}", metadata.mode() & 0o7777)));
    }
    Ok(())
}

/// Returns the boot id of this host; empty if the system has none.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::SeededEntropy;
    use crate::trainer::daemon::records::SaveState;

    fn open(path: &Path) -> Folder {
        Folder::open(path, ClusterId([1; 16]), &SeededEntropy::new(1)).unwrap()
    }

    fn job_record(name: &str) -> JobRecord {
        let (newest, old, dropped) = (None, Vec::new(), vec![crate::id::FillId([1; 16])]);
        let job = name.parse().unwrap();
        JobRecord { job, newest, old, dropped, abandoned: Vec::new(), loads: Vec::new() }
    }

    #[test]
    fn records_of_every_job_are_found_and_what_was_being_written_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("staging");
        let folder = open(&path);
        let names = ["gpt", "gpt.new", "table", "a.b-c_d"];
        names.iter().for_each(|name| folder.keep_job(&job_record(name)).unwrap());
        let half = path.join("jobs/half~new");
        fs::write(&half, b"half").unwrap();
        drop(folder);
        let mut found: Vec<String> =
            open(&path).jobs().unwrap().into_iter().map(|record| record.job.to_string()).collect();
        found.sort();
        assert_eq!(found, ["a.b-c_d", "gpt", "gpt.new", "table"]);
        assert!(!half.exists());
    }

    fn step_record() -> StepRecord {
        let (job, step, fill) = ("gpt".parse().unwrap(), crate::id::Step(10), FillId([1; 16]));
        let (segments, save) = (Vec::new(), SaveState::Unsaved);
        StepRecord { job, step, launch: LaunchId([1; 16]), fill, segments, save }
    }

    #[test]
    fn a_folder_that_was_removed_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("staging");
        let folder = open(&path);
        folder.keep_step(&step_record()).unwrap();
        fs::remove_dir_all(&path).unwrap();
        let keep_all = || {
            folder.keep_step(&step_record()).unwrap();
            folder.keep_table(&step_record().key(), b"table").unwrap();
            folder.keep_job(&job_record("gpt")).unwrap();
        };
        keep_all();
        assert!(!path.exists(), "the next daemon would refuse it because of its mode");
        // The next daemon's files are not this one's.
        let next = open(&path);
        keep_all();
        assert!(next.steps().unwrap().is_empty() && next.jobs().unwrap().is_empty());
        next.keep_step(&step_record()).unwrap();
        assert_eq!(fs::metadata(path.join("steps/gpt")).unwrap().mode() & 0o777, 0o700);
        folder.forget_step(&step_record().key());
        assert_eq!(next.steps().unwrap().len(), 1);
    }
}
