//! The disk as a trait, so that a test can simulate a crash at every write, sync and rename.
//!
//! Paths are relative to the disk's root, with `/` between components. All calls block. The traits
//! promise what POSIX promises and no more: bytes survive a crash after [`DiskFile::sync`], names
//! survive it after [`Disk::sync_dir`] of the folder that holds them, and a rename within one disk
//! is atomic.

use std::io;

use crate::kind::ErrorKind;

/// The alignment of offsets, lengths and addresses of direct reads and writes, in bytes.
pub const DIRECT_ALIGN_BYTES: usize = 4096;

/// An error of the disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The file or folder does not exist.
    #[error("{path} does not exist")]
    NotFound {
        /// Its path.
        path: String,
    },
    /// A file or folder already has that name.
    #[error("{path} exists already")]
    Exists {
        /// Its path.
        path: String,
    },
    /// The disk or a quota is full.
    #[error("no space left for {path}: free some, or add nodes")]
    Full {
        /// The path of the file that could not grow.
        path: String,
    },
    /// Another process holds the lock.
    #[error("{path} is locked by another process: stop that one, or use another data folder")]
    InUse {
        /// The lock file.
        path: String,
    },
    /// The file ends before the end of the requested range.
    #[error("{path} ends before byte {end_bytes}: it was cut short, use another copy")]
    Short {
        /// The path of the file.
        path: String,
        /// The end of the requested range, in bytes.
        end_bytes: u64,
    },
    /// The path is malformed or leaves the root.
    #[error("{path:?} is not a path inside the data folder")]
    Path {
        /// The path.
        path: String,
    },
    /// The operating system reported another error.
    #[error("cannot {op} {path}: {source}")]
    Io {
        /// The operation, as a verb.
        op: &'static str,
        /// The path that was operated on.
        path: String,
        /// The error from the operating system.
        source: io::Error,
    },
}

impl DiskError {
    /// Returns the error for `source`, which the operating system reported while it performed `op`
    /// on `path`.
    pub fn from_io(op: &'static str, path: impl Into<String>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { path },
            io::ErrorKind::AlreadyExists => Self::Exists { path },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path },
            _ => Self::Io { op, path, source },
        }
    }

    /// Returns whether the process or the system has too many open files. Such an error says
    /// nothing about the file itself.
    pub fn is_too_many_open_files(&self) -> bool {
        use rustix::io::Errno;
        let number = match self {
            Self::Io { source, .. } => source.raw_os_error(),
            _ => None,
        };
        number.is_some_and(|number| {
            [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error).contains(&number)
        })
    }

    /// Returns whether the disk or the file system cannot read the bytes, now and later.
    pub fn is_bad_medium(&self) -> bool {
        use rustix::io::Errno;
        let number = match self {
            Self::Io { source, .. } => source.raw_os_error(),
            _ => None,
        };
        number.is_some_and(|number| {
            [Errno::IO, Errno::BADMSG, Errno::UCLEAN].map(Errno::raw_os_error).contains(&number)
        })
    }

    /// Returns the kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Exists { .. } | Self::InUse { .. } => ErrorKind::Exists,
            // A retry does not help: an operator has to free space.
            Self::Full { .. } => ErrorKind::Io,
            Self::Short { .. } => ErrorKind::Corrupt,
            Self::Path { .. } => ErrorKind::Invalid,
            Self::Io { .. } => ErrorKind::Io,
        }
    }
}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiskEntry {
    /// The name.
    pub name: String,
    /// Whether it is a folder.
    pub is_dir: bool,
    /// The length of a file, in bytes; 0 for a folder.
    pub len_bytes: u64,
}

/// The size of the disk and its free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// The sum of the used space and the space available to this process, in bytes.
    pub total_bytes: u64,
    /// The space available to this process, in bytes.
    pub free_bytes: u64,
}

/// An exclusive lock, held until it is dropped.
pub struct DiskLock(#[expect(dead_code, reason = "held for its drop")] Box<dyn Send + Sync>);

impl DiskLock {
    /// Returns a lock that owns `held`; dropping `held` releases it.
    pub fn new(held: impl Send + Sync + 'static) -> Self {
        Self(Box::new(held))
    }
}

impl std::fmt::Debug for DiskLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DiskLock")
    }
}

/// A disk: a folder of the machine, or a simulated one in memory.
pub trait Disk: Send + Sync + 'static {
    /// Creates a file that does not exist yet and opens it for reading and writing.
    fn create_new(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError>;

    /// Opens a file for reading.
    fn open(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError>;

    /// Opens an existing file for reading and writing.
    fn open_to_write(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError>;

    /// Renames a file and replaces any file that has the new name.
    fn rename(&self, from: &str, to: &str) -> Result<(), DiskError>;

    /// Removes a file.
    fn remove(&self, path: &str) -> Result<(), DiskError>;

    /// Creates one folder, whose parent must exist. Returns `false` if the folder already exists.
    fn create_dir(&self, path: &str) -> Result<bool, DiskError>;

    /// Removes a folder if it is empty. Returns whether it was removed.
    fn remove_dir_if_empty(&self, path: &str) -> Result<bool, DiskError>;

    /// Returns the entries of a folder, ordered by name.
    fn list(&self, path: &str) -> Result<Vec<DiskEntry>, DiskError>;

    /// Returns the names of the subfolders of a folder, in order. An implementation overrides this
    /// if it can tell folders from files without a separate call for each entry.
    fn list_folders(&self, path: &str) -> Result<Vec<String>, DiskError> {
        let entries = self.list(path)?.into_iter().filter(|entry| entry.is_dir);
        Ok(entries.map(|entry| entry.name).collect())
    }

    /// Makes the names in a folder durable (`""` is the root), but not the names in its subfolders.
    fn sync_dir(&self, path: &str) -> Result<(), DiskError>;

    /// Makes everything durable that is visible now. The store calls this when it opens a folder,
    /// because a killed process may have left names that were never synced.
    fn sync_all(&self) -> Result<(), DiskError>;

    /// Returns the size of the disk and its free space.
    fn space(&self) -> Result<Space, DiskError>;

    /// Takes an exclusive lock on a file and creates the file if it is missing. Does not wait.
    ///
    /// # Errors
    /// [`DiskError::InUse`] if another holder has the lock.
    fn lock(&self, path: &str) -> Result<DiskLock, DiskError>;
}

/// An open file.
pub trait DiskFile: Send + Sync {
    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// [`DiskError::Short`] if the file ends before the end of the range.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError>;

    /// Reads like [`read_at`](Self::read_at), but from the medium instead of the page cache. Only
    /// synced bytes are guaranteed to be there. Reads into an [`AlignedBuffer`] are the fastest.
    fn read_past_cache_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError>;

    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError>;

    /// Writes like [`write_at`](Self::write_at), but bypasses the page cache where the disk can,
    /// for bytes that are not read again soon. The bytes still become durable only with a sync.
    /// A write bypasses the cache only if its bytes are in an [`AlignedBuffer`], and if its offset and
    /// length are multiples of [`DIRECT_ALIGN_BYTES`].
    fn write_past_cache_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError> {
        self.write_at(bytes, offset)
    }

    /// Reserves space for `len_bytes`, so that no later write within them fails because the disk is
    /// full. The length of the file stays. Does nothing on a file system that cannot reserve space.
    fn reserve_space(&self, len_bytes: u64) -> Result<(), DiskError>;

    /// Makes the bytes and the length durable (not the name).
    fn sync(&self) -> Result<(), DiskError>;

    /// Returns the length of the file, in bytes.
    fn len_bytes(&self) -> Result<u64, DiskError>;

    /// Returns a number that no other file on the disk has while this one is open, regardless of
    /// its name.
    fn inode_number(&self) -> Result<u64, DiskError>;
}

/// A buffer of fixed length whose address suits direct reads.
#[derive(Debug)]
pub struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Returns a buffer of `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + DIRECT_ALIGN_BYTES];
        // Alignment matters for speed only: a reader checks the address and copies if it is not
        // aligned.
        let start = bytes.as_ptr().align_offset(DIRECT_ALIGN_BYTES).min(DIRECT_ALIGN_BYTES);
        Self { bytes, start, len }
    }

    /// Returns the whole buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Refuses malformed paths, and paths that could leave the root. Every [`Disk`] checks each path with
/// this before it uses the path, except `""`, which names the root in calls about folders.
pub fn check_path(path: &str) -> Result<(), DiskError> {
    let fine = !path.contains('\0')
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if fine { Ok(()) } else { Err(DiskError::Path { path: path.to_owned() }) }
}

/// Returns the folder that holds `path`; `""` is the root.
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MemoryDisk, RealDisk};

    /// Checks everything that both disks promise.
    fn conforms(disk: &dyn Disk) {
        assert!(disk.create_dir("a").unwrap());
        assert!(!disk.create_dir("a").unwrap());
        assert!(matches!(disk.create_dir("x/y"), Err(DiskError::NotFound { .. })));

        let file = disk.create_new("a/one").unwrap();
        assert!(matches!(disk.create_new("a/one"), Err(DiskError::Exists { .. })));
        file.reserve_space(20_000).unwrap();
        file.write_at(b"world", 9_995).unwrap();
        file.write_at(b"hello", 0).unwrap();
        file.sync().unwrap();
        assert_eq!(file.len_bytes().unwrap(), 10_000);
        writes_past_the_cache_meet_the_others(disk);

        let mut whole = vec![0; 10_000];
        file.read_at(&mut whole, 0).unwrap();
        assert_eq!(
            (&whole[..5], &whole[5..9_995]),
            (b"hello".as_slice(), vec![0; 9_990].as_slice())
        );
        let mut aligned = AlignedBuffer::new(10_000);
        for (offset, len) in [(0, 10_000), (0, 8192), (4096, 4096), (1, 9_999), (9_999, 1), (5, 0)]
        {
            let mut plain = vec![1; len];
            file.read_past_cache_at(&mut plain, offset as u64).unwrap();
            assert_eq!(plain, whole[offset..offset + len], "{offset}+{len}");
            file.read_past_cache_at(&mut aligned.bytes()[..len], offset as u64).unwrap();
            assert_eq!(aligned.bytes()[..len], whole[offset..offset + len], "{offset}+{len}");
        }
        for read in [DiskFile::read_at, DiskFile::read_past_cache_at] {
            let short = read(file.as_ref(), &mut [0; 8], 9_996);
            assert!(matches!(short, Err(DiskError::Short { end_bytes: 10_004, .. })), "{short:?}");
        }

        disk.rename("a/one", "two").unwrap();
        assert!(matches!(disk.open("a/one"), Err(DiskError::NotFound { .. })));
        file.read_past_cache_at(&mut whole, 0).unwrap();
        let other = disk.create_new("three").unwrap();
        other.write_at(b"three", 0).unwrap();
        disk.rename("three", "two").unwrap();
        let two = disk.open("two").unwrap();
        assert_eq!(two.len_bytes().unwrap(), 5);
        assert_eq!(two.inode_number().unwrap(), other.inode_number().unwrap());
        assert_ne!(two.inode_number().unwrap(), file.inode_number().unwrap());
        let listed = disk.list("").unwrap();
        let names: Vec<_> =
            listed.iter().map(|e| (e.name.as_str(), e.is_dir, e.len_bytes)).collect();
        assert_eq!(names, [("a", true, 0), ("two", false, 5)]);
        assert_eq!(disk.list_folders("").unwrap(), ["a"]);
        assert!(matches!(disk.list_folders("b"), Err(DiskError::NotFound { .. })));

        disk.create_new("a/more").unwrap();
        assert!(!disk.remove_dir_if_empty("a").unwrap());
        disk.remove("a/more").unwrap();
        assert!(matches!(disk.remove("a/more"), Err(DiskError::NotFound { .. })));
        assert!(disk.remove_dir_if_empty("a").unwrap());
        disk.sync_dir("").unwrap();
        disk.sync_all().unwrap();
        assert!(matches!(disk.sync_dir("a"), Err(DiskError::NotFound { .. })));
        let space = disk.space().unwrap();
        assert!(space.free_bytes <= space.total_bytes && space.total_bytes > 0);

        for bad in ["", "/a", "a//b", "../a", "a/./b", "a\0"] {
            assert!(matches!(disk.open(bad), Err(DiskError::Path { .. })), "{bad:?}");
        }

        let lock = disk.lock("lock").unwrap();
        assert!(matches!(disk.lock("lock"), Err(DiskError::InUse { .. })));
        drop(lock);
        disk.lock("lock").unwrap();
    }

    /// Checks that cached and direct reads both return the last bytes written, by cached or direct
    /// writes.
    fn writes_past_the_cache_meet_the_others(disk: &dyn Disk) {
        let file = disk.create_new("a/past").unwrap();
        let mut expected = vec![7; 20_000];
        file.write_at(&expected, 0).unwrap();
        let mut buffer = AlignedBuffer::new(12_288);
        for (byte, offset, len) in
            [(1, 4096, 8192), (2, 0, 4096), (3, 4096, 100), (4, 9_000, 4096), (5, 0, 12_288)]
        {
            buffer.bytes()[..len].fill(byte);
            expected[offset..offset + len].fill(byte);
            file.write_past_cache_at(&buffer.bytes()[..len], offset as u64).unwrap();
            let mut found = vec![0; expected.len()];
            file.read_at(&mut found, 0).unwrap();
            assert!(found == expected, "{offset}+{len}");
            file.sync().unwrap();
            file.read_past_cache_at(&mut found, 0).unwrap();
            assert!(found == expected, "{offset}+{len} past the cache");
        }
        // A cached write over directly written bytes, and a direct write past the end.
        expected[..4096].fill(6);
        file.write_at(&expected[..4096], 0).unwrap();
        expected.resize(24_576, 0);
        expected.resize(28_672, 8);
        buffer.bytes()[..4096].fill(8);
        file.write_past_cache_at(&buffer.bytes()[..4096], 24_576).unwrap();
        let mut found = vec![1; expected.len()];
        file.read_at(&mut found, 0).unwrap();
        assert!(found == expected && file.len_bytes().unwrap() == 28_672);
        disk.remove("a/past").unwrap();
    }

    #[test]
    fn the_memory_disk_conforms() {
        conforms(&MemoryDisk::new(1 << 30));
    }

    #[test]
    fn the_real_disk_conforms() {
        let folder = tempfile::tempdir().unwrap();
        conforms(&RealDisk::open(folder.path().join("deep/er")).unwrap());
    }

    /// On tmpfs, direct reads may be refused or have no effect.
    #[test]
    fn the_real_disk_conforms_on_tmpfs() {
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
        conforms(&RealDisk::open(folder.path()).unwrap());
    }
}
