//! The disk as a trait, so that a test can crash it at every write, sync and rename.
//!
//! Paths are relative to the disk's root, `/` between components. All calls block. What the traits promise is
//! what POSIX promises and no more: bytes survive a crash after [`DiskFile::sync`], names after
//! [`Disk::sync_dir`] of the folder that holds them, and a rename within one disk is atomic.

use std::io;

use crate::kind::ErrorKind;

/// Offsets, lengths and addresses of direct reads are multiples of this.
pub const DIRECT_ALIGN_BYTES: usize = 4096;

/// Why the disk did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// No such file or folder.
    #[error("{path} does not exist")]
    NotFound {
        /// Where.
        path: String,
    },
    /// Something has that name already.
    #[error("{path} exists already")]
    Exists {
        /// Where.
        path: String,
    },
    /// No space left.
    #[error("no space left for {path}: free some, or add nodes")]
    Full {
        /// What was to grow.
        path: String,
    },
    /// Another process holds the lock.
    #[error("{path} is locked by another process: stop that one, or use another data folder")]
    InUse {
        /// The lock file.
        path: String,
    },
    /// The file ends before the range that was asked for.
    #[error("{path} ends before byte {end_bytes}: it was cut short, use another copy")]
    Short {
        /// Which file.
        path: String,
        /// Where the range would have ended.
        end_bytes: u64,
    },
    /// A path that leaves the root, or is none.
    #[error("{path:?} is not a path inside the data folder")]
    Path {
        /// The path.
        path: String,
    },
    /// The system refused.
    #[error("cannot {op} {path}: {source}")]
    Io {
        /// The verb.
        op: &'static str,
        /// On what.
        path: String,
        /// The system's words.
        source: io::Error,
    },
}

impl DiskError {
    /// The error behind what the system said when it was asked to `op` the `path`.
    pub fn from_io(op: &'static str, path: impl Into<String>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { path },
            io::ErrorKind::AlreadyExists => Self::Exists { path },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path },
            _ => Self::Io { op, path, source },
        }
    }

    /// Whether the process, or the system, has too many files open: that says nothing about the file.
    pub fn is_exhaustion(&self) -> bool {
        use rustix::io::Errno;
        let number = match self {
            Self::Io { source, .. } => source.raw_os_error(),
            _ => None,
        };
        number.is_some_and(|number| {
            [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error).contains(&number)
        })
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::Exists { .. } | Self::InUse { .. } => ErrorKind::Exists,
            // Waiting does not help: somebody has to free space.
            Self::Full { .. } => ErrorKind::Io,
            Self::Short { .. } => ErrorKind::Corrupt,
            Self::Path { .. } => ErrorKind::Invalid,
            Self::Io { .. } => ErrorKind::Io,
        }
    }
}

/// What a folder holds under one name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiskEntry {
    /// The name.
    pub name: String,
    /// Whether it is a folder.
    pub is_dir: bool,
    /// The length of a file; 0 for a folder.
    pub len_bytes: u64,
}

/// How large the disk is and how much of it can still be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// What is used and what is free for us.
    pub total_bytes: u64,
    /// What is free for us.
    pub free_bytes: u64,
}

/// An exclusive lock, held until this is dropped.
pub struct DiskLock(#[expect(dead_code, reason = "held for its drop")] Box<dyn Send + Sync>);

impl DiskLock {
    /// A lock that ends when `held` is dropped.
    pub fn new(held: impl Send + Sync + 'static) -> Self {
        Self(Box::new(held))
    }
}

impl std::fmt::Debug for DiskLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DiskLock")
    }
}

/// A folder of the machine, or one that only exists in memory.
pub trait Disk: Send + Sync + 'static {
    /// Makes a file that is not there yet, to write and read it.
    fn create_new(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError>;

    /// Opens a file to read it.
    fn open(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError>;

    /// Opens a file to read it and to write in it.
    fn open_to_write(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError>;

    /// Gives a file another name, over whatever file has it.
    fn rename(&self, from: &str, to: &str) -> Result<(), DiskError>;

    /// Removes a file.
    fn remove(&self, path: &str) -> Result<(), DiskError>;

    /// Makes one folder; `false` when it is there already. Its parent must exist.
    fn create_dir(&self, path: &str) -> Result<bool, DiskError>;

    /// Removes a folder if nothing is in it; `false` when something is.
    fn remove_dir_if_empty(&self, path: &str) -> Result<bool, DiskError>;

    /// What the folder holds, by name.
    fn list(&self, path: &str) -> Result<Vec<DiskEntry>, DiskError>;

    /// The names of the folders in a folder, in order. A disk that can tell them without a look at each does.
    fn folders(&self, path: &str) -> Result<Vec<String>, DiskError> {
        let entries = self.list(path)?.into_iter().filter(|entry| entry.is_dir);
        Ok(entries.map(|entry| entry.name).collect())
    }

    /// Makes the names in a folder durable (`""` is the root). Not those in the folders below it.
    fn sync_dir(&self, path: &str) -> Result<(), DiskError>;

    /// Makes everything durable that can be seen now: for the start after a kill, which leaves names that
    /// nobody has synced.
    fn sync_all(&self) -> Result<(), DiskError>;

    /// How much space there is.
    fn space(&self) -> Result<Space, DiskError>;

    /// Takes an exclusive lock on a file, made when it is missing; refused at once when another has it.
    fn lock(&self, path: &str) -> Result<DiskLock, DiskError>;
}

/// One open file.
pub trait DiskFile: Send + Sync {
    /// Fills `buf` from `offset`; a file that ends before is [`DiskError::Short`].
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError>;

    /// As [`read_at`](Self::read_at), from the medium instead of the page cache. Only what was synced can be
    /// expected there. Fastest into an [`AlignedBuffer`].
    fn read_past_cache_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError>;

    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError>;

    /// As [`write_at`](Self::write_at), beside the page cache where the disk can: for what nobody reads soon. It is no more durable
    /// before a sync. Only whole multiples of [`DIRECT_ALIGN_BYTES`] out of an [`AlignedBuffer`] go that way.
    fn write_past_cache_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError> {
        self.write_at(bytes, offset)
    }

    /// Sets space for `len_bytes` aside, so that no later write finds the disk full; the length stays.
    /// File systems that cannot do it are let off.
    fn reserve(&self, len_bytes: u64) -> Result<(), DiskError>;

    /// Makes the bytes and the length durable (not the name).
    fn sync(&self) -> Result<(), DiskError>;

    /// The length.
    fn len_bytes(&self) -> Result<u64, DiskError>;

    /// A number that no other file of the disk has while this one is open, whatever its name.
    fn number(&self) -> Result<u64, DiskError>;
}

/// A buffer of fixed length whose address suits direct reads.
#[derive(Debug)]
pub struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + DIRECT_ALIGN_BYTES];
        // Alignment is speed only: a reader checks the address and copies when it does not suit.
        let start = bytes.as_ptr().align_offset(DIRECT_ALIGN_BYTES).min(DIRECT_ALIGN_BYTES);
        Self { bytes, start, len }
    }

    /// All of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Refuses paths that could leave the root. Every disk calls it first.
pub fn check_path(path: &str) -> Result<(), DiskError> {
    let fine = !path.contains('\0')
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if fine { Ok(()) } else { Err(DiskError::Path { path: path.to_owned() }) }
}

/// The folder that holds `path`; `""` is the root.
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MemoryDisk, RealDisk};

    /// What both disks promise, one after the other.
    fn conforms(disk: &dyn Disk) {
        assert!(disk.create_dir("a").unwrap());
        assert!(!disk.create_dir("a").unwrap());
        assert!(matches!(disk.create_dir("x/y"), Err(DiskError::NotFound { .. })));

        let file = disk.create_new("a/one").unwrap();
        assert!(matches!(disk.create_new("a/one"), Err(DiskError::Exists { .. })));
        file.reserve(20_000).unwrap();
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
        assert_eq!(two.number().unwrap(), other.number().unwrap());
        assert_ne!(two.number().unwrap(), file.number().unwrap());
        let listed = disk.list("").unwrap();
        let names: Vec<_> =
            listed.iter().map(|e| (e.name.as_str(), e.is_dir, e.len_bytes)).collect();
        assert_eq!(names, [("a", true, 0), ("two", false, 5)]);
        assert_eq!(disk.folders("").unwrap(), ["a"]);
        assert!(matches!(disk.folders("b"), Err(DiskError::NotFound { .. })));

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

    /// Whatever way bytes took, the last that were written are read, both ways.
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
        // The other way round, and behind the end.
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

    /// tmpfs is the file system on which direct reads may be refused or mean nothing.
    #[test]
    fn the_real_disk_conforms_on_tmpfs() {
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
        conforms(&RealDisk::open(folder.path()).unwrap());
    }
}
