//! A [`Disk`] over a folder of the machine.
//!
//! Reads and writes past the page cache use `O_DIRECT` on a second descriptor of the same file. If
//! the file system refuses that, or the file was renamed before the second descriptor was opened, a
//! read drops the range from the cache with `posix_fadvise` and then reads it, and a write goes
//! through the cache. On tmpfs such a read proves nothing, because there is no medium.
#![allow(clippy::disallowed_methods)] // the one place that asks the system

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{Advice, FallocateFlags, OFlags};

use super::disk::{
    AlignedBuffer, DIRECT_ALIGN_BYTES, Disk, DiskEntry, DiskError, DiskFile, DiskLock, Space,
    check_path,
};

/// Length of the buffer for the unaligned ends of direct reads, in bytes.
const BOUNCE_BYTES: usize = 64 * 1024;

/// The disk below one folder of the machine.
#[derive(Debug, Clone)]
pub struct RealDisk {
    root: PathBuf,
}

impl RealDisk {
    /// Opens the disk below `root` and creates that folder if it is missing.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, DiskError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(|e| DiskError::from_io("create", text(&root), e))?;
        Ok(Self { root })
    }

    /// Returns the root folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn absolute_path(&self, path: &str) -> Result<PathBuf, DiskError> {
        check_path(path)?;
        Ok(self.root.join(path))
    }

    fn absolute_dir_path(&self, path: &str) -> Result<PathBuf, DiskError> {
        if path.is_empty() { Ok(self.root.clone()) } else { self.absolute_path(path) }
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Returns a function that adds the operation and the path to an error of the operating system.
fn io_error_mapper<'a>(op: &'static str, path: &'a Path) -> impl Fn(io::Error) -> DiskError + 'a {
    move |error| DiskError::from_io(op, text(path), error)
}

impl Disk for RealDisk {
    fn create_new(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        let path = self.absolute_path(path)?;
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        Ok(Box::new(RealFile::new(file.map_err(io_error_mapper("create", &path))?, path, true)))
    }

    fn open(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        let path = self.absolute_path(path)?;
        let file = File::open(&path).map_err(io_error_mapper("open", &path))?;
        Ok(Box::new(RealFile::new(file, path, false)))
    }

    fn open_to_write(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        let path = self.absolute_path(path)?;
        let file = OpenOptions::new().read(true).write(true).open(&path);
        Ok(Box::new(RealFile::new(file.map_err(io_error_mapper("open", &path))?, path, true)))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), DiskError> {
        let (from, to) = (self.absolute_path(from)?, self.absolute_path(to)?);
        fs::rename(&from, &to).map_err(io_error_mapper("rename", &from))
    }

    fn remove(&self, path: &str) -> Result<(), DiskError> {
        let path = self.absolute_path(path)?;
        fs::remove_file(&path).map_err(io_error_mapper("remove", &path))
    }

    fn create_dir(&self, path: &str) -> Result<bool, DiskError> {
        let path = self.absolute_path(path)?;
        match fs::create_dir(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(io_error_mapper("create", &path)(error)),
        }
    }

    fn remove_dir_if_empty(&self, path: &str) -> Result<bool, DiskError> {
        let path = self.absolute_path(path)?;
        match fs::remove_dir(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
            Err(error) => Err(io_error_mapper("remove", &path)(error)),
        }
    }

    fn list(&self, path: &str) -> Result<Vec<DiskEntry>, DiskError> {
        let path = self.absolute_dir_path(path)?;
        let fail = io_error_mapper("list", &path);
        let mut entries = Vec::new();
        for entry in fs::read_dir(&path).map_err(&fail)? {
            let entry = entry.map_err(&fail)?;
            let (is_dir, len_bytes) = match entry.metadata() {
                Ok(meta) => (meta.is_dir(), if meta.is_dir() { 0 } else { meta.len() }),
                // The entry was removed since the folder was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // The entry is there, and opening it fails: one bad inode must not hide all others.
                Err(error) if is_bad_inode(&error) => match entry.file_type() {
                    Ok(kind) => (kind.is_dir(), 0),
                    Err(_) => return Err(fail(error)),
                },
                Err(error) => return Err(fail(error)),
            };
            let name = entry.file_name().to_string_lossy().into_owned();
            entries.push(DiskEntry { name, is_dir, len_bytes });
        }
        entries.sort();
        Ok(entries)
    }

    fn list_folders(&self, path: &str) -> Result<Vec<String>, DiskError> {
        let path = self.absolute_dir_path(path)?;
        let fail = io_error_mapper("list", &path);
        let mut names = Vec::new();
        for entry in fs::read_dir(&path).map_err(&fail)? {
            let entry = entry.map_err(&fail)?;
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => {
                    names.push(entry.file_name().to_string_lossy().into_owned());
                }
                Ok(_) => {}
                // The entry was removed since the folder was read, on a file system that does not
                // report types in the listing.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(fail(error)),
            }
        }
        names.sort();
        Ok(names)
    }

    fn sync_dir(&self, path: &str) -> Result<(), DiskError> {
        let path = self.absolute_dir_path(path)?;
        File::open(&path).and_then(|dir| dir.sync_all()).map_err(io_error_mapper("sync", &path))
    }

    fn sync_all(&self) -> Result<(), DiskError> {
        let fail = io_error_mapper("sync", &self.root);
        let root = File::open(&self.root).map_err(&fail)?;
        rustix::fs::syncfs(&root).map_err(|errno| fail(errno.into()))
    }

    fn space(&self) -> Result<Space, DiskError> {
        let stat = rustix::fs::statvfs(&self.root)
            .map_err(|errno| io_error_mapper("measure", &self.root)(errno.into()))?;
        // Count as `df` does: blocks reserved for root are neither used nor available to us.
        let used = stat.f_blocks.saturating_sub(stat.f_bfree);
        Ok(Space {
            total_bytes: used.saturating_add(stat.f_bavail).saturating_mul(stat.f_frsize),
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }

    fn lock(&self, path: &str) -> Result<DiskLock, DiskError> {
        let path = self.absolute_path(path)?;
        let fail = io_error_mapper("lock", &path);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(&fail)?;
        match file.try_lock() {
            Ok(()) => Ok(DiskLock::new(file)),
            Err(TryLockError::WouldBlock) => Err(DiskError::InUse { path: text(&path) }),
            Err(TryLockError::Error(error)) => Err(fail(error)),
        }
    }
}

struct RealFile {
    file: File,
    path: PathBuf,
    is_writable: bool,
    /// The descriptor for direct reads and writes, opened on first use; `None` if there can be
    /// none.
    direct_file: OnceLock<Option<File>>,
}

impl RealFile {
    fn new(file: File, path: PathBuf, is_writable: bool) -> Self {
        Self { file, path, is_writable, direct_file: OnceLock::new() }
    }

    fn direct_io_file(&self) -> Option<&File> {
        let open = || {
            let flags = OFlags::DIRECT.bits() as i32;
            let mut options = OpenOptions::new();
            options.read(true).write(self.is_writable).custom_flags(flags);
            let direct = options.open(&self.path).ok()?;
            let (ours, found) = (self.file.metadata().ok()?, direct.metadata().ok()?);
            // Another file may have taken the name meanwhile.
            ((ours.dev(), ours.ino()) == (found.dev(), found.ino())).then_some(direct)
        };
        self.direct_file.get_or_init(open).as_ref()
    }

    fn read_error(&self, buf: &[u8], offset: u64, error: io::Error) -> DiskError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => DiskError::Short {
                path: text(&self.path),
                end_bytes: offset.saturating_add(buf.len() as u64),
            },
            _ => DiskError::from_io("read", text(&self.path), error),
        }
    }
}

/// Fills `buf` through a descriptor that accepts aligned reads only.
fn read_direct(direct: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
    const ALIGN: usize = DIRECT_ALIGN_BYTES;
    let mut bounce: Option<AlignedBuffer> = None;
    let mut done = 0;
    while done < buf.len() {
        let (at, rest) = (offset + done as u64, &mut buf[done..]);
        let skip = (at % ALIGN as u64) as usize;
        let suits = skip == 0 && rest.as_ptr().align_offset(ALIGN) == 0 && rest.len() >= ALIGN;
        let step = if suits {
            let whole = rest.len() / ALIGN * ALIGN;
            direct.read_at(&mut rest[..whole], at)
        } else {
            let through = bounce.get_or_insert_with(|| AlignedBuffer::new(BOUNCE_BYTES)).bytes();
            let want = (skip + rest.len()).next_multiple_of(ALIGN).min(BOUNCE_BYTES);
            direct.read_at(&mut through[..want], at - skip as u64).map(|got| {
                let usable = got.saturating_sub(skip).min(rest.len());
                rest[..usable].copy_from_slice(&through[skip..skip + usable]);
                usable
            })
        };
        match step {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl DiskFile for RealFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError> {
        let read = self.file.read_exact_at(buf, offset);
        read.map_err(|error| self.read_error(buf, offset, error))
    }

    fn read_past_cache_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError> {
        if let Some(direct) = self.direct_io_file() {
            match read_direct(direct, buf, offset) {
                // The file system accepted the flag, but not this read.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                done => return done.map_err(|error| self.read_error(buf, offset, error)),
            }
        }
        // Only whole pages are dropped: extend the range to page boundaries.
        let start = offset - offset % DIRECT_ALIGN_BYTES as u64;
        let len = (offset - start + buf.len() as u64).next_multiple_of(DIRECT_ALIGN_BYTES as u64);
        rustix::fs::fadvise(&self.file, start, NonZeroU64::new(len), Advice::DontNeed)
            .map_err(|errno| io_error_mapper("read past the cache", &self.path)(errno.into()))?;
        self.read_at(buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError> {
        self.file.write_all_at(bytes, offset).map_err(io_error_mapper("write", &self.path))
    }

    fn write_past_cache_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError> {
        const ALIGN: usize = DIRECT_ALIGN_BYTES;
        let suits = bytes.as_ptr().align_offset(ALIGN) == 0
            && bytes.len().is_multiple_of(ALIGN)
            && offset.is_multiple_of(ALIGN as u64);
        if suits && let Some(direct) = self.direct_io_file() {
            match direct.write_all_at(bytes, offset) {
                // The file system accepted the flag, but not this write.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                done => return done.map_err(io_error_mapper("write", &self.path)),
            }
        }
        self.write_at(bytes, offset)
    }

    fn reserve_space(&self, len_bytes: u64) -> Result<(), DiskError> {
        use rustix::io::Errno;
        if len_bytes == 0 {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, len_bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(io_error_mapper("reserve space for", &self.path)(errno.into())),
        }
    }

    fn sync(&self) -> Result<(), DiskError> {
        self.file.sync_data().map_err(io_error_mapper("sync", &self.path))
    }

    fn len_bytes(&self) -> Result<u64, DiskError> {
        let meta = self.file.metadata().map_err(io_error_mapper("measure", &self.path))?;
        Ok(meta.len())
    }

    fn inode_number(&self) -> Result<u64, DiskError> {
        let meta = self.file.metadata().map_err(io_error_mapper("measure", &self.path))?;
        Ok(meta.ino())
    }
}

/// Returns whether the file system cannot read the inode of a file.
fn is_bad_inode(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let bad = [Errno::IO, Errno::UCLEAN].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|number| bad.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a read past the cache is a direct one where the file system supports it. The
    /// fallback would hide a wrong flag.
    #[test]
    fn direct_reads_are_direct_where_they_can_be() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let probe = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(folder.path().join("probe"));
        if probe.is_err() {
            return;
        }
        let disk = RealDisk::open(folder.path()).unwrap();
        let path = disk.absolute_path("file").unwrap();
        let file = RealFile::new(File::create_new(&path).unwrap(), path.clone(), true);
        file.write_at(&[7; 5000], 0).unwrap();
        file.sync().unwrap();
        let mut buf = [0; 5000];
        read_direct(file.direct_io_file().unwrap(), &mut buf, 0).unwrap();
        assert_eq!(buf, [7; 5000]);

        let moved = RealFile::new(File::open(&path).unwrap(), path.clone(), false);
        fs::rename(&path, folder.path().join("else")).unwrap();
        File::create_new(&path).unwrap();
        assert!(moved.direct_io_file().is_none(), "another file has the name now");
        moved.read_past_cache_at(&mut buf, 0).unwrap();
    }
}
