//! The output of a restore: files below one folder, under temporary names until all of them are
//! complete.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::sync::Arc;

use super::restore_request::RestoreRequest;
use super::selection::ShardSelection;
use crate::client::ClientError;
use crate::pipeline::read::Sink;
use crate::store::{DiskError, DiskFile, Space};

/// The destination of the verified bytes of a read.
pub(in crate::client) enum Output<'a> {
    /// Files.
    Files(&'a RestoreRequest),
    /// The caller's sinks, one for each part of the request.
    Sinks(&'a [Arc<dyn Sink>]),
    /// No destination: the bytes are only verified.
    Nowhere,
}

impl<'a> Output<'a> {
    /// Returns the request for files, if files are the destination.
    pub(in crate::client) fn file_request(&self) -> Option<&'a RestoreRequest> {
        match self {
            Output::Files(request) => Some(request),
            _ => None,
        }
    }
}

/// A sink that counts the bytes on their way to the caller's sink.
pub(in crate::client) struct CountedSink {
    pub to: Arc<dyn Sink>,
    pub done: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Sink for CountedSink {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.to.write_at(shard_offset, bytes)?;
        (self.done)(bytes.len() as u64);
        Ok(())
    }
}

/// A sink that writes the range of a shard that begins at `start` to a file of its own.
pub(in crate::client) struct FileSink {
    pub file: Box<dyn DiskFile>,
    pub start: u64,
    pub done: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Sink for FileSink {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_at(bytes, shard_offset - self.start).map_err(io::Error::other)?;
        (self.done)(bytes.len() as u64);
        Ok(())
    }
}

/// A sink that counts the bytes and keeps none of them.
pub(in crate::client) struct DiscardSink {
    pub done: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Sink for DiscardSink {
    fn write_at(&self, _offset: u64, bytes: &[u8]) -> io::Result<()> {
        (self.done)(bytes.len() as u64);
        Ok(())
    }
}

/// Checks the output before anything is written. Returns an error if a file or folder is in the
/// way, or if the file of one shard would be a folder of another.
pub(in crate::client) fn refuse_output_conflicts(
    output: &RestoreRequest,
    parts: &[ShardSelection],
) -> Result<(), ClientError> {
    let files: HashSet<&str> = parts.iter().map(|part| part.path.as_str()).collect();
    // A file that cannot be opened counts as existing, because it may belong to another user.
    let exists = |path: &str| !matches!(output.out.open(path), Err(DiskError::NotFound { .. }));
    let is_folder = |path: &str| output.out.list(path).is_ok();
    // Each folder is looked at once: it may have many files.
    let mut checked = HashSet::new();
    for part in parts {
        let mut parent = part.path.as_str();
        while let Some((above, _)) = parent.rsplit_once('/') {
            if !checked.insert(above) {
                break;
            }
            if files.contains(above) {
                return Err(ClientError::PathConflict { path: above.to_owned() });
            }
            if exists(above) && !is_folder(above) {
                return Err(ClientError::InTheWay { path: above.to_owned(), found: "a file" });
            }
            parent = above;
        }
        let path = part.path.clone();
        if is_folder(&path) {
            return Err(ClientError::InTheWay { path, found: "a folder" });
        }
        if !output.force && exists(&path) {
            return Err(ClientError::FileExists { path });
        }
    }
    Ok(())
}

/// Returns an error if the disk of the output has less than `needed_bytes` free. Files that the
/// restore replaces still take their space until it ends.
pub(in crate::client) fn refuse_full_output(
    output: &RestoreRequest,
    needed_bytes: u64,
) -> Result<(), ClientError> {
    match output.out.space() {
        // A file system that reports no size at all does not know its free space.
        Ok(Space { free_bytes, total_bytes: 1.. }) if free_bytes < needed_bytes => {
            Err(ClientError::NoSpace { needed_bytes, free_bytes })
        }
        _ => Ok(()),
    }
}

/// The temporary files of a restore. Dropping this removes those that have not got their final
/// names, also when the restore is cancelled.
pub(in crate::client) struct TemporaryFiles<'a> {
    output: Option<&'a RestoreRequest>,
    parts: Vec<&'a ShardSelection>,
}

impl<'a> TemporaryFiles<'a> {
    /// Creates the list of the temporary files of `output`, which is empty.
    pub(in crate::client) fn new(output: &Output<'a>) -> Self {
        Self { output: output.file_request(), parts: Vec::new() }
    }

    /// Adds the temporary file of `part`, which the restore has created.
    pub(in crate::client) fn add(&mut self, part: &'a ShardSelection) {
        self.parts.push(part);
    }

    /// Syncs the files and renames them to their final names. All of them must be complete. If a
    /// rename fails, the files that were renamed before keep their final names.
    pub(in crate::client) fn publish(mut self) -> Result<(), ClientError> {
        if let Some(output) = self.output {
            publish_files(output, &self.parts)?;
        }
        self.parts.clear();
        Ok(())
    }
}

impl Drop for TemporaryFiles<'_> {
    fn drop(&mut self) {
        for part in &self.parts {
            // A file that has its final name has no temporary name any more, so this removal fails.
            let _ = self.output.map(|output| output.out.remove(&part.temporary));
        }
    }
}

fn publish_files(output: &RestoreRequest, parts: &[&ShardSelection]) -> Result<(), ClientError> {
    let out = &*output.out;
    let mut folders: BTreeSet<String> = BTreeSet::from([String::new()]);
    // Do everything that can fail for want of space before the first file replaces an older one.
    for part in parts {
        let mut above = String::new();
        for folder in part.path.split('/').rev().skip(1).collect::<Vec<_>>().into_iter().rev() {
            above = if above.is_empty() { folder.to_owned() } else { format!("{above}/{folder}") };
            out.create_dir(&above).map_err(|source| part.output_error(source))?;
            folders.insert(above.clone());
        }
        let synced = out.open(&part.temporary).and_then(|file| file.sync());
        synced.map_err(|source| part.output_error(source))?;
    }
    // Another program may have written files since the restore began.
    for part in parts.iter().filter(|_| !output.force) {
        if !matches!(out.open(&part.path), Err(DiskError::NotFound { .. })) {
            return Err(ClientError::FileExists { path: part.path.clone() });
        }
    }
    for part in parts {
        let renamed = out.rename(&part.temporary, &part.path);
        renamed.map_err(|source| part.output_error(source))?;
    }
    for folder in folders {
        let path = if folder.is_empty() { "the folder itself".into() } else { folder.clone() };
        let synced = out.sync_dir(&folder);
        synced.map_err(|source| ClientError::Output { path, source })?;
    }
    Ok(())
}
