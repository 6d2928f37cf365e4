//! Files as sources of shards.
#![allow(clippy::disallowed_methods)] // a trainer's files lie outside any store

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::pipeline::upload::ShardSource;

/// A file that is read in place. The length of the source is the file's length when it was opened.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    opened_as: FileStamp,
    may_change: bool,
}

/// The length and times of a file, which change when its bytes change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    len_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn from_metadata(metadata: &Metadata) -> Self {
        Self {
            len_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl FileSource {
    /// Opens a regular file. Refuses a file that reports a length of 0 and has bytes, as files in
    /// `/proc` do. Returns an error of kind `InvalidInput` for a file that is refused.
    pub fn open(path: &Path) -> io::Result<Self> {
        let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return refuse("not a regular file");
        }
        if metadata.len() == 0 && file.read_at(&mut [0], 0)? > 0 {
            return refuse("it has bytes and says that its length is 0: copy it to a disk first");
        }
        Ok(Self { file, opened_as: FileStamp::from_metadata(&metadata), may_change: false })
    }

    /// Returns the source with changes allowed: the file is saved even if it changes meanwhile, and
    /// some of the saved bytes may then be older than others.
    pub fn allow_changing(self) -> Self {
        Self { may_change: true, ..self }
    }

    /// Returns whether the file's length or times differ from those when it was opened.
    pub fn has_changed(&self) -> io::Result<bool> {
        Ok(FileStamp::from_metadata(&self.file.metadata()?) != self.opened_as)
    }
}

impl ShardSource for FileSource {
    fn len_bytes(&self) -> u64 {
        self.opened_as.len_bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn is_unchanged(&self) -> io::Result<bool> {
        Ok(self.may_change || !self.has_changed()?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_is_written_to_or_cut_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for change in [b"other".as_slice(), b"cut", b"longer than it was"] {
            fs::write(&path, "bytes").unwrap();
            let source = FileSource::open(&path).unwrap();
            assert!(source.is_unchanged().unwrap());
            // Some file systems store times with a coarse resolution.
            std::thread::sleep(std::time::Duration::from_millis(20));
            fs::write(&path, change).unwrap();
            assert!(!source.is_unchanged().unwrap());
            assert!(source.allow_changing().is_unchanged().unwrap());
        }
    }

    #[test]
    fn a_file_without_a_length_is_refused_and_an_empty_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("empty"), "").unwrap();
        assert_eq!(FileSource::open(&folder.path().join("empty")).unwrap().len_bytes(), 0);
        let refused = FileSource::open(Path::new("/proc/self/status")).unwrap_err().to_string();
        assert!(refused.contains("its length is 0"), "{refused}");
    }
}
