//! Loads by ranges. If a process wants little of a step, or memory does not suffice for all of it,
//! the requested extents are read from the cluster into a window, whose memory then belongs to the
//! process.
#![allow(clippy::disallowed_methods)] // shared memory lies outside any store

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::fetch::{Fetched, failed};
use super::{StagingDaemon, lock};
use crate::client::{Progress, ReadRange, Sink};
use crate::clock::deadline;
use crate::format::table::Extent;
use crate::id::ShardName;
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, MAX_WINDOW_EXTENTS, Part, WINDOW_BYTES};
use crate::units::GRAIN_BYTES;

/// Maximum number of windows that occupy the daemon's memory at once. Others wait.
pub const MAX_WINDOWS: usize = 2;
/// How long a finished window waits for its process.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);

/// A window that is being read or waits for its process. Dropping it aborts the read.
pub struct Window {
    /// The extents, as requested.
    pub extents: Vec<u32>,
    shared: Arc<Shared>,
    task: AbortHandle,
}

/// A window that was read from the cluster: its parts of shards, and the memory file with their
/// bytes.
pub type Filled = (Vec<Part>, File);

#[derive(Default)]
struct Shared {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    end: Mutex<Option<Result<Filled, Failure>>>,
    taken: Notify,
    /// Set if no process took the result in time.
    has_expired: AtomicBool,
}

impl Drop for Window {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Window {
    /// Returns the bytes read so far, and the total.
    pub fn progress(&self) -> (u64, u64) {
        let read = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        (read(&self.shared.done_bytes), read(&self.shared.total_bytes))
    }

    /// Returns whether the window was read and not taken in time, so that it must be read again.
    pub fn has_expired(&self) -> bool {
        self.shared.has_expired.load(Ordering::Relaxed)
    }

    /// Returns the result once the read has ended, and lets the next window begin.
    pub fn take(&self) -> Option<Result<Filled, Failure>> {
        let end = lock(&self.shared.end).take();
        end.inspect(|_| self.shared.taken.notify_one())
    }
}

/// A sink that writes a range of a shard to its place in the window.
struct WindowSink {
    file: Arc<File>,
    part: Part,
}

impl Sink for WindowSink {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        let inside = shard_offset.checked_sub(self.part.shard_offset);
        let inside = inside.ok_or(io::ErrorKind::InvalidInput)?;
        self.file.write_all_at(bytes, self.part.file_offset + inside)
    }
}

/// Returns the parts of a window for the given extents, and its length in bytes. Extents that are
/// neighbours in a shard share a part. Fails if there are too many extents, if several of them are
/// together longer than a window, or if one does not exist.
fn parts_of(
    table: &[Extent],
    shards: &[(ShardName, u64)],
    extents: &[u32],
) -> Result<(Vec<Part>, u64), Failure> {
    let refused = |message: String| Failure::new(ErrorKind::Invalid, message, "");
    if extents.len() > MAX_WINDOW_EXTENTS {
        let message = format!("{} extents at once, at most {MAX_WINDOW_EXTENTS}", extents.len());
        return Err(refused(message));
    }
    let (mut ranges, mut len_bytes) = (Vec::with_capacity(extents.len()), 0u64);
    for &row in extents {
        let extent = table.get(row as usize);
        let found = extent.filter(|extent| {
            let shard = shards.get(extent.shard as usize);
            let end = extent.offset_bytes.checked_add(extent.len_bytes);
            shard.is_some_and(|shard| end.is_some_and(|end| end <= shard.1))
        });
        let extent = found.ok_or_else(|| refused(format!("the step has no extent {row}")))?;
        len_bytes = len_bytes.saturating_add(extent.len_bytes);
        ranges.push((extent.shard, extent.offset_bytes, extent.offset_bytes + extent.len_bytes));
    }
    if len_bytes > WINDOW_BYTES && extents.len() > 1 {
        return Err(refused(format!("{len_bytes} bytes at once, at most {WINDOW_BYTES}")));
    }
    ranges.retain(|(_, start, end)| start < end);
    ranges.sort_unstable();
    let mut joined: Vec<(u32, u64, u64)> = Vec::new();
    for (shard, start, end) in ranges {
        match joined.last_mut() {
            // The cluster is read in whole grains, so including a gap of up to a grain adds at most
            // one grain.
            Some(last) if last.0 == shard && start <= last.2 + GRAIN_BYTES => {
                last.2 = last.2.max(end);
            }
            _ => joined.push((shard, start, end)),
        }
    }
    let file_bytes = joined.iter().map(|(_, start, end)| end - start).sum();
    let mut file_offset = 0;
    let part = |(shard, start, end): (u32, u64, u64)| {
        let len_bytes = end - start;
        let part =
            Part { shard, shard_offset: start, file_offset, len_bytes, file_bytes, fill: None };
        file_offset += len_bytes;
        part
    };
    Ok((joined.into_iter().map(part).collect(), file_bytes))
}

impl StagingDaemon {
    /// Begins to read extents of a step into a window.
    pub(super) fn open_window(
        self: &Arc<Self>,
        fetched: &Arc<Fetched>,
        extents: Vec<u32>,
    ) -> Result<Window, Failure> {
        let (parts, len_bytes) = parts_of(fetched.table.extents(), &fetched.shards, &extents)?;
        let shared = Arc::new(Shared::default());
        shared.total_bytes.store(len_bytes, Ordering::Relaxed);
        let (daemon, fetched, ours) = (self.clone(), fetched.clone(), shared.clone());
        let task = self.settings.background.spawn(async move {
            // The semaphore is never closed.
            let _turn = daemon.windows.acquire().await;
            let end = daemon.read_window(&fetched, parts, &ours).await;
            *lock(&ours.end) = Some(end);
            daemon.bell.ring();
            if deadline(&*daemon.clock, TAKEN_WITHIN, ours.taken.notified()).await.is_err() {
                let gone = lock(&ours.end).take();
                ours.has_expired.store(gone.is_some(), Ordering::Relaxed);
                drop(gone);
                daemon.bell.ring();
            }
        });
        Ok(Window { extents, shared, task: task.abort_handle() })
    }

    async fn read_window(
        &self,
        fetched: &Fetched,
        parts: Vec<Part>,
        shared: &Arc<Shared>,
    ) -> Result<Filled, Failure> {
        let file = rustix::fs::memfd_create("rapidraid-window", MemfdFlags::CLOEXEC);
        let file = Arc::new(File::from(file.map_err(|error| {
            Failure::new(ErrorKind::Io, format!("memory for a part of a step: {error}"), "")
        })?));
        let mut ranges = Vec::with_capacity(parts.len());
        for part in &parts {
            let shard = fetched.shards.get(part.shard as usize);
            let (shard, _) =
                shard.ok_or_else(|| Failure::new(ErrorKind::Internal, "no shard", ""))?;
            let range = part.shard_offset..part.shard_offset + part.len_bytes;
            let to = Arc::new(WindowSink { file: file.clone(), part: *part });
            ranges.push(ReadRange { shard: shard.clone(), range, sink: to });
        }
        if !ranges.is_empty() {
            let watched = shared.clone();
            let progress = Arc::new(move |progress: Progress| {
                watched.done_bytes.store(progress.done_bytes, Ordering::Relaxed);
            });
            let read = self.client.read_ranges(&fetched.job, Some(fetched.step), &ranges, progress);
            read.await.map_err(|error| failed(fetched.step, &error))?;
        }
        drop(ranges);
        let again = |error: io::Error| Failure::new(ErrorKind::Io, error.to_string(), "");
        let file = match Arc::try_unwrap(file) {
            Ok(file) => file,
            Err(shared) => shared.try_clone().map_err(again)?,
        };
        Ok((parts, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(extents: &[(u32, u64, u64)]) -> Vec<Extent> {
        let extent = |&(shard, offset_bytes, len_bytes): &(u32, u64, u64)| Extent {
            source: 0,
            shard,
            offset_bytes,
            len_bytes,
            hash: None,
        };
        extents.iter().map(extent).collect()
    }

    fn shards() -> Vec<(ShardName, u64)> {
        vec![("data/a/0".parse().unwrap(), 1 << 40), ("data/a/1".parse().unwrap(), 1000)]
    }

    #[test]
    fn neighbours_are_one_part() {
        let far = 192 + GRAIN_BYTES + 64;
        let table = table(&[(0, 0, 100), (0, 128, 64), (0, far, 10), (1, 0, 50), (1, 64, 0)]);
        let (parts, bytes) = parts_of(&table, &shards(), &[3, 1, 0, 2, 4, 0]).unwrap();
        let found: Vec<_> =
            parts.iter().map(|p| (p.shard, p.shard_offset, p.len_bytes, p.file_offset)).collect();
        assert_eq!(found, [(0, 0, 192, 0), (0, far, 10, 192), (1, 0, 50, 202)]);
        assert_eq!(bytes, 252);
        assert!(parts.iter().all(|part| part.file_bytes == 252));
        assert_eq!(parts_of(&table, &shards(), &[]).unwrap(), (vec![], 0));
    }

    #[test]
    fn requests_that_are_too_long_or_outside_are_refused() {
        let table = table(&[
            (0, 0, WINDOW_BYTES),
            (0, WINDOW_BYTES, 1),
            (0, 1 << 32, 1 << 35),
            (1, 960, 41),
            (2, 0, 1),
        ]);
        let refused = |rows: &[u32]| parts_of(&table, &shards(), rows).unwrap_err().message;
        assert!(refused(&[0, 1]).contains("at most 33554432"));
        assert!(refused(&[3]).contains("no extent 3"), "it ends behind its shard");
        assert!(refused(&[4]).contains("no extent 4"), "there is no such shard");
        assert!(refused(&[5]).contains("no extent 5"));
        assert!(refused(&vec![1; MAX_WINDOW_EXTENTS + 1]).contains("at most 512"));
        // A single extent may be longer than a window.
        assert_eq!(parts_of(&table, &shards(), &[2]).unwrap().1, 1 << 35);
    }
}
