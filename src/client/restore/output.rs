//! Where a restore writes: below one folder, under temporary names until all of it is there.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::selection::ShardSelection;
use crate::client::ClientError;
use crate::id::ShardName;
use crate::pipeline::read::Sink;
use crate::store::{Disk, DiskError, DiskFile};

/// What to restore, and where to.
pub struct RestoreRequest {
    /// The folder that is written to.
    pub out: Arc<dyn Disk>,
    /// Overwrite files that exist.
    pub force: bool,
    /// Only this shard.
    pub shard: Option<ShardName>,
    /// Only these bytes of it; they are written as a file of their own length.
    pub range: Option<Range<u64>>,
}

/// Where the verified bytes of a read go.
pub(in crate::client) enum Output<'a> {
    /// Into files.
    Files(&'a RestoreRequest),
    /// Into what the caller brought, one for each part of the request.
    Sinks(&'a [Arc<dyn Sink>]),
    /// Nowhere: they are only verified.
    Nowhere,
}

impl<'a> Output<'a> {
    /// The files to write, if it is files.
    pub(in crate::client) fn files(&self) -> Option<&'a RestoreRequest> {
        match self {
            Output::Files(request) => Some(request),
            _ => None,
        }
    }
}

/// Counts what passes on its way to the caller's own sink.
pub(in crate::client) struct CountedSink {
    pub to: Arc<dyn Sink>,
    pub done: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Sink for CountedSink {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.to.write_at(offset, bytes)?;
        (self.done)(bytes.len() as u64);
        Ok(())
    }
}

/// Writes the range of a shard that begins at `start` to a file of its own.
pub(in crate::client) struct FileSink {
    pub file: Box<dyn DiskFile>,
    pub start: u64,
    pub done: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Sink for FileSink {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_at(bytes, offset - self.start).map_err(io::Error::other)?;
        (self.done)(bytes.len() as u64);
        Ok(())
    }
}

/// Counts what was verified, keeps nothing.
pub(in crate::client) struct NoSink {
    pub done: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Sink for NoSink {
    fn write_at(&self, _offset: u64, bytes: &[u8]) -> io::Result<()> {
        (self.done)(bytes.len() as u64);
        Ok(())
    }
}

/// Before anything is written: no file is in the way, and no shard's file is another's folder.
pub(in crate::client) fn check_output(
    output: &RestoreRequest,
    parts: &[ShardSelection],
) -> Result<(), ClientError> {
    let files: HashSet<&str> = parts.iter().map(|part| part.path.as_str()).collect();
    // What cannot be opened may be somebody's all the same.
    let exists = |path: &str| !matches!(output.out.open(path), Err(DiskError::NotFound { .. }));
    let is_folder = |path: &str| output.out.list(path).is_ok();
    for part in parts {
        let mut parent = part.path.as_str();
        while let Some((above, _)) = parent.rsplit_once('/') {
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

/// Syncs and renames what is whole, all or as much as the file system lets; no temporary file stays.
pub(in crate::client) fn finish_output(
    output: &RestoreRequest,
    parts: &[ShardSelection],
    opened: &[usize],
    whole: bool,
) -> Result<(), ClientError> {
    let parts: Vec<&ShardSelection> = opened.iter().filter_map(|&at| parts.get(at)).collect();
    let finished = if whole { publish(&*output.out, &parts) } else { Ok(()) };
    if !whole || finished.is_err() {
        for part in parts {
            // What has its final name is not there any more.
            let _ = output.out.remove(&part.temporary);
        }
    }
    finished
}

fn publish(out: &dyn Disk, parts: &[&ShardSelection]) -> Result<(), ClientError> {
    let mut folders: BTreeSet<String> = BTreeSet::from([String::new()]);
    let failed =
        |part: &ShardSelection, source| ClientError::Output { path: part.path.clone(), source };
    // What can fail for want of space, before the first file takes the place of an older one.
    for part in parts {
        let mut above = String::new();
        for folder in part.path.split('/').rev().skip(1).collect::<Vec<_>>().into_iter().rev() {
            above = if above.is_empty() { folder.to_owned() } else { format!("{above}/{folder}") };
            out.create_dir(&above).map_err(|source| failed(part, source))?;
            folders.insert(above.clone());
        }
        let synced = out.open(&part.temporary).and_then(|file| file.sync());
        synced.map_err(|source| failed(part, source))?;
    }
    for part in parts {
        let renamed = out.rename(&part.temporary, &part.path);
        renamed.map_err(|source| failed(part, source))?;
    }
    for folder in folders {
        let path = if folder.is_empty() { "the folder itself".into() } else { folder.clone() };
        let synced = out.sync_dir(&folder);
        synced.map_err(|source| ClientError::Output { path, source })?;
    }
    Ok(())
}
