//! Files as sources of shards.
#![allow(clippy::disallowed_methods)] // a trainer's files lie outside any store

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::pipeline::save::Source;

/// A file, read where it lies. Its length is what it was when it was opened.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    len_bytes: u64,
}

impl FileSource {
    /// Opens a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(Self { file, len_bytes: metadata.len() })
    }
}

impl Source for FileSource {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }
}
