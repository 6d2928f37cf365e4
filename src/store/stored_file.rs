//! An open replica or piece file. Its header and hash tree agree with each other, with its name and
//! with this cluster. Its data is verified grain by grain as it is read.

use super::StoreError;
use super::disk::{AlignedBuffer, Disk, DiskError, DiskFile};
use super::durable_paths::file_path;
use super::file_index::FileInfo;
use super::unverified_file::UnverifiedFile;
use crate::format::FormatError;
use crate::format::file::{FileHeader, FileKey, TRAILER_BYTES, Trailer, parse_tail};
use crate::format::grain_set::GrainSet;
use crate::format::tree::{GrainTree, grain_len};
use crate::id::ClusterId;
use crate::units::{GRAIN_BYTES, MIB, grains};

/// Length of one read of a scrub, in bytes.
const SCRUB_BYTES: u64 = MIB;

/// An open replica or piece file. It stays readable after its name is removed or taken by another
/// file.
pub struct StoredFile {
    file: Box<dyn DiskFile>,
    key: FileKey,
    header: FileHeader,
    tree: GrainTree,
    file_bytes: u64,
}

impl StoredFile {
    pub(super) fn open(
        disk: &dyn Disk,
        cluster: ClusterId,
        key: FileKey,
    ) -> Result<Self, StoreError> {
        let path = file_path(key);
        let file = disk.open(&path)?;
        let file_bytes = file.len_bytes()?;
        let (header, tree) = read_tail(file.as_ref(), file_bytes, &path)?;
        Self::check_header_matches(&header, cluster, key)?;
        Ok(Self { file, key, header, tree, file_bytes })
    }

    /// Returns a file whose tail was already read and checked.
    pub(super) fn from_parts(
        file: Box<dyn DiskFile>,
        key: FileKey,
        header: FileHeader,
        tree: GrainTree,
        file_bytes: u64,
    ) -> Self {
        Self { file, key, header, tree, file_bytes }
    }

    /// Refuses a header that does not belong to the file named `key` of this cluster.
    pub(super) fn check_header_matches(
        header: &FileHeader,
        cluster: ClusterId,
        key: FileKey,
    ) -> Result<(), StoreError> {
        if header.cluster == cluster && header.key() == key {
            return Ok(());
        }
        let found = format!("{} of cluster {}", header.key(), header.cluster);
        Err(StoreError::Misplaced { path: file_path(key), found })
    }

    /// Converts the file into a source for readers that verify the bytes themselves.
    pub fn into_source(self) -> UnverifiedFile {
        UnverifiedFile::new(self.file, Some((self.header, self.tree)), GrainSet::default())
    }

    /// Returns the header.
    pub fn header(&self) -> &FileHeader {
        &self.header
    }

    /// Returns the hash tree over its grains.
    pub fn tree(&self) -> &GrainTree {
        &self.tree
    }

    /// Returns its key.
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// Returns the entry that the index keeps for it.
    pub fn index_entry(&self) -> FileInfo {
        FileInfo::from_header(&self.header, self.file_bytes)
    }

    /// Reads a range of the data without verifying it, for callers that check the bytes in another
    /// way.
    pub fn read_unverified(&self, offset: u64, buf: &mut [u8]) -> Result<(), StoreError> {
        self.check_range(offset, buf.len())?;
        Ok(self.file.read_at(buf, offset)?)
    }

    /// Returns whether this is the same file as `other`, and not another file with the same name or
    /// bytes.
    pub(super) fn is_same_file(&self, other: &Self) -> Result<bool, StoreError> {
        Ok(self.file.inode_number()? == other.file.inode_number()?)
    }

    /// Fills `buf` with as many whole grains as fit, beginning with grain `first_grain`, from the
    /// medium instead of the page cache, and verifies each. Returns the number of bytes read: 0
    /// past the end, or if `buf` is shorter than the grain.
    ///
    /// # Errors
    /// [`StoreError::Grain`] for the first grain that does not match its hash, or the error of the
    /// disk.
    pub fn read_verified_past_cache(
        &self,
        first_grain: u64,
        buf: &mut [u8],
    ) -> Result<usize, StoreError> {
        let start = first_grain.saturating_mul(GRAIN_BYTES);
        let left = self.header.len_bytes.saturating_sub(start);
        let len = if left <= buf.len() as u64 {
            left as usize
        } else {
            buf.len() - buf.len() % GRAIN_BYTES as usize
        };
        let Some(buf) = buf.get_mut(..len).filter(|buf| !buf.is_empty()) else { return Ok(0) };
        self.file.read_past_cache_at(buf, start)?;
        for (grain, bytes) in (first_grain..).zip(buf.chunks(GRAIN_BYTES as usize)) {
            debug_assert_eq!(bytes.len() as u64, grain_len(self.header.len_bytes, grain));
            if !self.tree.verify_grain(grain, bytes) {
                return Err(StoreError::Grain { key: self.key, grain });
            }
        }
        Ok(len)
    }

    /// Reads the whole file from the medium. Returns the numbers of the grains that are damaged or
    /// unreadable. Holds one buffer of 1 MiB.
    pub fn scrub(&self) -> Vec<u64> {
        let mut buffer = AlignedBuffer::new(SCRUB_BYTES as usize);
        let mut damaged = Vec::new();
        let all = grains(self.header.len_bytes);
        let step = SCRUB_BYTES / GRAIN_BYTES;
        for first in (0..all).step_by(step as usize) {
            if self.read_verified_past_cache(first, buffer.bytes()).is_ok() {
                continue;
            }
            // A grain in this run is damaged: read the run again grain by grain to find it.
            for grain in first..all.min(first + step) {
                let one = buffer.bytes().get_mut(..GRAIN_BYTES as usize).unwrap_or_default();
                if self.read_verified_past_cache(grain, one).is_err() {
                    damaged.push(grain);
                }
            }
        }
        damaged
    }

    fn check_range(&self, offset: u64, len: usize) -> Result<(), StoreError> {
        let end = offset.checked_add(len as u64);
        if end.is_some_and(|end| end <= self.header.len_bytes) {
            return Ok(());
        }
        Err(StoreError::Misuse { key: self.key, why: "the range ends behind the data" })
    }
}

/// Reads and parses the tail after the data, from the trailer backwards.
pub(super) fn read_tail(
    file: &dyn DiskFile,
    file_bytes: u64,
    path: &str,
) -> Result<(FileHeader, GrainTree), StoreError> {
    read_tail_with(file_bytes, path, |buf, offset| file.read_at(buf, offset))
}

/// Reads and parses the tail like [`read_tail`], but from the medium instead of the page cache.
pub(super) fn read_tail_past_cache(
    file: &dyn DiskFile,
    file_bytes: u64,
    path: &str,
) -> Result<(FileHeader, GrainTree), StoreError> {
    read_tail_with(file_bytes, path, |buf, offset| file.read_past_cache_at(buf, offset))
}

fn read_tail_with(
    file_bytes: u64,
    path: &str,
    read: impl Fn(&mut [u8], u64) -> Result<(), DiskError>,
) -> Result<(FileHeader, GrainTree), StoreError> {
    let fail = |source| StoreError::Format { path: path.to_owned(), source };
    let mut trailer = [0; TRAILER_BYTES as usize];
    let trailer_at = file_bytes.checked_sub(TRAILER_BYTES).ok_or_else(|| {
        fail(FormatError::Length {
            what: "replica or piece file",
            expected_bytes: TRAILER_BYTES,
            found_bytes: file_bytes,
        })
    })?;
    read(&mut trailer, trailer_at)?;
    let trailer = Trailer::parse(file_bytes, &trailer).map_err(fail)?;
    let mut tail = vec![0; trailer.tail_bytes() as usize];
    read(&mut tail, trailer.data_bytes())?;
    parse_tail(file_bytes, &tail).map_err(fail)
}
