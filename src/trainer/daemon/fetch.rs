//! Loads from the cluster: the shards of a step are read once, in order, into files of the staging
//! folder, which readers use like segments. What this host's memory has of the step is copied from
//! there. For a load by ranges ([`super::ranges`]) this module reads only the table.
#![allow(clippy::disallowed_methods)] // shared memory lies outside any store

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::core::StepKey;
use super::held_part::{HeldPart, find_missing_ranges};
use super::tables::{TablesError, merge_tables, range_of_footer, range_of_table, read_tables};
use super::trace::{StagingPoint, trace_point};
use super::{StagingDaemon, lock};
use crate::client::{ClientError, CommittedStep, Progress, ReadRange, Sink};
use crate::format::table::{DATA_SHARD, INDEX_SHARD, Table, TableError};
use crate::id::{Job, SaveId, SegmentId, ShardName, Step};
use crate::kind::ErrorKind;
use crate::trainer::mapping;
use crate::trainer::protocol::{Failure, Part};

/// How long a step that was read from the cluster stays in memory after its last use. The ranks of
/// a launch do not ask at the same moment.
const KEPT: Duration = Duration::from_secs(60);

/// The part of a step that is read into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FetchScope {
    /// All data shards.
    Whole,
    /// The table alone.
    Table,
}

/// How long a fetch waits for memory that loads hold.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);
/// How long a step that did not fit into memory is not fetched again. Processes that wait for a
/// part of it ask every two seconds.
const REFUSED_KEPT: Duration = Duration::from_secs(5);

/// The steps that are being read from the cluster or are kept after that, by job, step, save and
/// scope.
pub type Fetches = BTreeMap<(Job, Step, SaveId, FetchScope), Arc<Fetch>>;

/// A step that is being read from the cluster, or was read.
pub struct Fetch {
    /// The step.
    pub step: Step,
    /// The save that was committed as the step when the read began.
    pub save: SaveId,
    scope: FetchScope,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// When the step was last requested or released.
    used_at: Mutex<Duration>,
    state: Mutex<Option<FetchEnd>>,
}

/// The result of a fetch.
pub type FetchEnd = Result<Arc<Fetched>, FetchFailure>;

/// The reason why a step was not read.
#[derive(Debug, Clone)]
pub enum FetchFailure {
    /// There is no room for the step in memory.
    NoRoom(Failure),
    /// Anything else.
    Other(Failure),
}

impl From<Failure> for FetchFailure {
    fn from(failure: Failure) -> Self {
        Self::Other(failure)
    }
}

impl From<FetchFailure> for Failure {
    fn from(failure: FetchFailure) -> Self {
        match failure {
            FetchFailure::NoRoom(failure) | FetchFailure::Other(failure) => failure,
        }
    }
}

/// A step that was read.
pub struct Fetched {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save that was read.
    pub save: SaveId,
    /// Names and lengths in bytes of the data shards, in the table's numbering.
    pub shards: Vec<(ShardName, u64)>,
    /// The table of the step, with hashes.
    pub table: Table,
    /// The files of the shards, with the part that each holds. Empty if only the table was read.
    pub files: Vec<(PathBuf, Part)>,
    /// The copy of this host's memory in the files, if there is one.
    pub copied: Option<Copied>,
}

/// A copy of this host's memory in the files of a fetch.
pub struct Copied {
    /// The step in memory.
    pub from: StepKey,
    /// The id of this copy. Another copy of the same bytes may be damaged.
    pub id: SegmentId,
}

/// Whether a fetch may copy from this host's memory. A segment that is being copied cannot be filled
/// again, so only the ranks of a launch may delay its trainers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryUse {
    /// Ranges that are in memory are copied from there, and all others are read from the cluster.
    Allowed,
    /// Everything is read from the cluster.
    Forbidden,
}

impl Drop for Fetched {
    fn drop(&mut self) {
        for (path, _) in &self.files {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Fetch {
    /// Returns the bytes read so far, and the total.
    pub fn progress(&self) -> (u64, u64) {
        (self.done_bytes.load(Ordering::Relaxed), self.total_bytes.load(Ordering::Relaxed))
    }

    /// Records that the step is used at `now`.
    pub fn touch(&self, now: Duration) {
        *self.used_at.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Returns whether the step is being read from the cluster, is in use by a load, or is being
    /// waited for.
    fn is_used(self: &Arc<Self>) -> bool {
        // A clone beyond the one in [`Fetches`] means a waiting task. The fetched step itself has
        // two owners without any reader: `state`, and the clone that `end` returns.
        let is_read = |end: FetchEnd| end.is_ok_and(|fetched| Arc::strong_count(&fetched) > 2);
        Arc::strong_count(self) > 1 || self.end().is_none_or(is_read)
    }

    /// Returns whether the step is being read or used, or is to be kept for ranks that ask a little
    /// later.
    fn is_wanted(self: &Arc<Self>, now: Duration) -> bool {
        if self.is_used() {
            self.touch(now);
            return true;
        }
        let kept = match self.end() {
            Some(Ok(_)) => KEPT,
            Some(Err(FetchFailure::NoRoom(_))) => REFUSED_KEPT,
            _ => Duration::ZERO,
        };
        now.saturating_sub(self.used_at()) < kept
    }

    fn used_at(&self) -> Duration {
        *self.used_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the result once the fetch has ended.
    pub fn end(&self) -> Option<FetchEnd> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A sink that writes a shard to its file.
struct FileSink(Arc<File>);

impl Sink for FileSink {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, shard_offset)
    }
}

pub(super) fn failed(step: Step, error: &ClientError) -> Failure {
    Failure::new(
        error.kind(),
        format!("reading step {step} from the cluster: {error}"),
        error.hint().unwrap_or_default(),
    )
}

/// Returns the data shards of a step in the order of their numbers; `None` if no trainer saved the
/// step.
fn data_shards(shown: &CommittedStep) -> Option<Vec<(ShardName, u64)>> {
    let mut data = BTreeMap::new();
    let mut has_index = false;
    for (root, _) in &shown.shards {
        let name = root.name.as_str();
        has_index |= name.starts_with(INDEX_SHARD);
        if let Some(number) = name.strip_prefix(DATA_SHARD).and_then(|rest| rest.rsplit_once('/')) {
            data.insert(number.1.parse::<u32>().ok()?, (root.name.clone(), root.len_bytes));
        }
    }
    let is_whole = has_index && (0..).zip(data.keys()).all(|(at, number)| at == *number);
    (is_whole && !data.is_empty()).then(|| data.into_values().collect())
}

impl StagingDaemon {
    /// Begins to read a committed step from the cluster, or joins the fetch that reads or has read
    /// it. Does not wait for the end of the fetch.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        job: &Job,
        step: Step,
        save: SaveId,
        scope: FetchScope,
        memory_use: MemoryUse,
    ) -> Result<Arc<Fetch>, Failure> {
        let known = |fetches: &Fetches, save: SaveId| {
            let found = fetches.get(&(job.clone(), step, save, scope)).cloned()?;
            let counts = match found.end() {
                None | Some(Ok(_)) => true,
                Some(Err(FetchFailure::NoRoom(_))) => {
                    self.clock.now().saturating_sub(found.used_at()) < REFUSED_KEPT
                }
                Some(Err(FetchFailure::Other(_))) => false,
            };
            counts.then_some(found)
        };
        let is_read = |fetch: &Fetch| !matches!(fetch.end(), Some(Err(_)));
        if let Some(fetch) = known(&self.fetches(), save) {
            if is_read(&fetch) {
                fetch.touch(self.clock.now());
            }
            return Ok(fetch);
        }
        let shown = self.client.fetch_committed_step(job, Some(step)).await;
        let shown = shown.map_err(|error| failed(step, &error))?;
        let save = shown.step.saved.save;
        let mut fetches = self.fetches();
        if let Some(fetch) = known(&fetches, save) {
            return Ok(fetch);
        }
        let fetch = Arc::new(Fetch {
            step,
            save,
            scope,
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            used_at: Mutex::new(self.clock.now()),
            state: Mutex::new(None),
        });
        fetches.insert((job.clone(), step, save, scope), fetch.clone());
        drop(fetches);
        trace_point(StagingPoint::Fetching, job, step);
        let (daemon, job, running) = (self.clone(), job.clone(), fetch.clone());
        self.settings.background.spawn(async move {
            let end = daemon.read_step(&job, &shown, &running, memory_use).await;
            if end.is_err() {
                running.total_bytes.store(0, Ordering::Relaxed);
            }
            *running.state.lock().unwrap_or_else(PoisonError::into_inner) = Some(end.map(Arc::new));
            drop(running);
            daemon.account_fetches();
            daemon.bell.ring();
        });
        Ok(fetch)
    }

    /// Returns whether the whole step is in memory or is being read into it.
    pub(super) fn is_fetched(&self, job: &Job, step: Step, save: SaveId) -> bool {
        let fetches = self.fetches();
        let found = fetches.get(&(job.clone(), step, save, FetchScope::Whole));
        found.is_some_and(|fetch| !matches!(fetch.end(), Some(Err(_))))
    }

    /// Makes room for a fetch and reserves its memory in the same critical section. Returns whether
    /// there is room.
    fn take_room(self: &Arc<Self>, fetch: &Fetch, len_bytes: u64) -> bool {
        let fetches = self.fetches();
        let is_unmapped = |id: SegmentId| self.folder.is_unmapped(id);
        let has_room = self.with(|core| core.make_room(len_bytes, &is_unmapped));
        if has_room {
            fetch.total_bytes.store(len_bytes, Ordering::Relaxed);
            self.count_fetches(&fetches);
        }
        has_room
    }

    /// Makes room for a fetch. Waits a while for loads to release steps that can be evicted: ranks
    /// that will ask for the whole step first open it by ranges. Returns whether there is room.
    async fn wait_for_room(self: &Arc<Self>, fetch: &Fetch, len_bytes: u64) -> bool {
        let until = self.clock.now() + ROOM_PATIENCE;
        loop {
            let mut heard = self.bell.listen();
            if self.take_room(fetch, len_bytes)
                || self.free_fetches(None) > 0 && self.take_room(fetch, len_bytes)
            {
                return true;
            }
            let now = self.clock.now();
            if now >= until || !self.with(|core| core.is_evictable_step_held()) {
                return false;
            }
            self.wait_for_bell(&mut heard, until - now).await;
        }
    }

    /// Removes the fetched files that are no longer wanted, and updates the memory that the core
    /// counts for fetches.
    pub(super) fn account_fetches(&self) {
        let now = self.clock.now();
        let mut fetches = self.fetches();
        fetches.retain(|_, fetch| fetch.is_wanted(now));
        self.count_fetches(&fetches);
    }

    /// Removes the fetched files that are not in use, of one job or of all. Returns the number of
    /// bytes freed.
    pub(super) fn free_fetches(&self, job: Option<&Job>) -> u64 {
        let (mut fetches, mut bytes) = (self.fetches(), 0);
        fetches.retain(|(of, ..), fetch| {
            let stays = job.is_some_and(|job| of != job) || fetch.is_used();
            bytes += if stays { 0 } else { fetch.progress().1 };
            stays
        });
        self.count_fetches(&fetches);
        bytes
    }

    /// Forgets a fetched step whose bytes in memory are damaged. The next load reads it from the
    /// cluster again.
    pub(super) fn forget_fetched(&self, fetched: &Arc<Fetched>) {
        let mut fetches = self.fetches();
        let is_it = |fetch: &Fetch| match fetch.end() {
            Some(Ok(other)) => Arc::ptr_eq(&other, fetched),
            _ => false,
        };
        fetches.retain(|_, fetch| !is_it(fetch));
        self.count_fetches(&fetches);
    }

    /// Sets the memory that the core counts for fetches to the sum over `fetches`, whose lock the
    /// caller holds.
    fn count_fetches(&self, fetches: &Fetches) {
        let bytes = fetches.values().map(|fetch| fetch.progress().1).sum();
        lock(&self.core).set_fetched_bytes(bytes);
    }

    async fn read_step(
        self: &Arc<Self>,
        job: &Job,
        shown: &CommittedStep,
        fetch: &Arc<Fetch>,
        memory_use: MemoryUse,
    ) -> Result<Fetched, FetchFailure> {
        let step = fetch.step;
        let Some(shards) = data_shards(shown) else {
            let message = format!("{job}/{step} was not saved by a trainer: it has no index");
            let hint = "`rapidraid restore` writes it to files";
            return Err(Failure::new(ErrorKind::Invalid, message, hint).into());
        };
        let mut fetched = Fetched {
            job: job.clone(),
            step,
            save: fetch.save,
            shards,
            table: Table::default(),
            files: Vec::new(),
            copied: None,
        };
        let tables = match fetch.scope {
            FetchScope::Whole => self.read_shards(&mut fetched, fetch, memory_use).await?,
            FetchScope::Table => self.read_tables(&fetched).await?,
        };
        fetched.table = merge_tables(&tables).map_err(|error| bad_index(&fetched, &error))?;
        Ok(fetched)
    }

    /// Reads all data shards into files, in order. Long ranges that this host's memory has may be
    /// copied from there. Returns the tables of the shards.
    async fn read_shards(
        self: &Arc<Self>,
        fetched: &mut Fetched,
        fetch: &Arc<Fetch>,
        memory_use: MemoryUse,
    ) -> Result<Vec<Table>, FetchFailure> {
        let step = fetched.step;
        let len_bytes = fetched.shards.iter().fold(0u64, |sum, shard| sum.saturating_add(shard.1));
        if !self.wait_for_room(fetch, len_bytes).await {
            return Err(FetchFailure::NoRoom(self.with(|core| core.no_room(len_bytes))));
        }
        let io_failed = |error: io::Error| {
            let hint =
                "the staging folder needs room for the step; see staging.dir and staging.memory";
            let message = format!("memory for step {step}: {error}");
            FetchFailure::NoRoom(Failure::new(ErrorKind::Busy, message, hint))
        };
        let mut files = Vec::with_capacity(fetched.shards.len());
        for (number, (_, bytes)) in (0..).zip(fetched.shards.clone()) {
            let path = self.folder.fetched_path(SegmentId(self.entropy.id()));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let file = options.open(&path).map_err(io_failed)?;
            let (shard_offset, file_offset) = (0, 0);
            let part = Part {
                shard: number,
                shard_offset,
                file_offset,
                len_bytes: bytes,
                file_bytes: bytes,
                fill: None,
            };
            fetched.files.push((path, part));
            mapping::reserve(&file, bytes, || Ok(())).map_err(io_failed)?;
            files.push(Arc::new(file));
        }
        let held = match memory_use {
            MemoryUse::Allowed => self.find_part_to_copy(fetched).await,
            MemoryUse::Forbidden => None,
        };
        let copied_ranges = |number: u32| match &held {
            Some((part, _)) => part.copied_ranges(number),
            None => Vec::new(),
        };
        let (mut ranges, mut in_memory) = (Vec::new(), Vec::new());
        for (number, ((shard, bytes), file)) in (0..).zip(fetched.shards.iter().zip(&files)) {
            let sink: Arc<dyn Sink> = Arc::new(FileSink(file.clone()));
            let read = |range| ReadRange { shard: shard.clone(), range, sink: sink.clone() };
            let copied = copied_ranges(number);
            ranges.extend(find_missing_ranges(*bytes, &copied).into_iter().map(&read));
            in_memory.extend(copied.into_iter().map(&read));
        }
        let copied_bytes = Arc::new(AtomicU64::new(0));
        let (watched, beside) = (fetch.clone(), copied_bytes.clone());
        let progress = Arc::new(move |progress: Progress| {
            let done_bytes = progress.done_bytes + beside.load(Ordering::Relaxed);
            watched.done_bytes.store(done_bytes, Ordering::Relaxed);
        });
        let job = fetched.job.clone();
        let read = self.client.read_ranges(&job, Some(step), &ranges, progress);
        let copy = async {
            match &held {
                Some((part, _)) => self.copy_held_part(part, &files, &copied_bytes).await,
                None => Ok(()),
            }
        };
        let (read, copy) = tokio::join!(read, copy);
        read.map_err(|error| failed(step, &error))?;
        if let Err(error) = copy {
            tracing::warn!(%job, %step, %error, "this host's memory of a step could not be copied: it is read from the cluster");
            let read =
                self.client.read_ranges(&job, Some(step), &in_memory, Arc::new(|_| ())).await;
            read.map_err(|error| failed(step, &error))?;
        } else if let Some((part, tables)) = held {
            let bytes = copied_bytes.load(Ordering::Relaxed);
            tracing::info!(%job, %step, bytes, "copied a part of a step from this host's memory");
            fetched.copied =
                Some(Copied { from: part.key.clone(), id: SegmentId(self.entropy.id()) });
            return Ok(tables);
        }
        let table = |(path, part): &(PathBuf, Part)| -> Result<Table, FetchFailure> {
            let file = File::open(path).map_err(io_failed)?;
            let read = |range: Range<u64>| {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.read_exact_at(&mut bytes, range.start).map_err(io_failed)?;
                Ok::<_, FetchFailure>(bytes)
            };
            let footer = read(range_of_footer(part.len_bytes))?;
            let range = range_of_table(part.len_bytes, &footer)
                .map_err(|error| bad_index(fetched, &error))?;
            Ok(Table::parse(&read(range)?).map_err(|error| bad_index(fetched, &error))?)
        };
        fetched.files.iter().map(table).collect()
    }

    /// Returns the part of a step that this host's memory has, and the tables of the step. Returns
    /// `None` if memory has nothing of it, or if the tables cannot be read: the read of the shards
    /// then says why.
    async fn find_part_to_copy(
        self: &Arc<Self>,
        fetched: &Fetched,
    ) -> Option<(Arc<HeldPart>, Vec<Table>)> {
        let (job, step, save) = (&fetched.job, fetched.step, fetched.save);
        self.with(|core| core.find_committed_part(job, step, save))?;
        let tables = self.read_tables(fetched).await.ok()?;
        let with_table = Fetched {
            job: job.clone(),
            step,
            save,
            shards: fetched.shards.clone(),
            table: merge_tables(&tables).ok()?,
            files: Vec::new(),
            copied: None,
        };
        let part = self.find_held_part(&Arc::new(with_table)).await?;
        // A table that names bytes behind the end of a shard would make the files longer.
        let is_inside = |(_, range): &(SegmentId, Part)| {
            let shard = fetched.shards.get(range.shard as usize);
            let end = range.shard_offset.checked_add(range.len_bytes);
            shard.is_some_and(|(_, bytes)| end.is_some_and(|end| end <= *bytes))
        };
        part.ranges.iter().all(is_inside).then_some((part, tables))
    }

    /// Reads only the tables at the end of the shards. Returns them.
    async fn read_tables(&self, fetched: &Fetched) -> Result<Vec<Table>, Failure> {
        let (job, step) = (&fetched.job, fetched.step);
        let read = |ranges: Vec<ReadRange>| async move {
            self.client.read_ranges(job, Some(step), &ranges, Arc::new(|_| ())).await.map(drop)
        };
        read_tables(&fetched.shards, u64::MAX, read).await.map_err(|error| match error {
            TablesError::Read(error) => failed(step, &error),
            TablesError::Table(error) => bad_index(fetched, &error),
        })
    }
}

fn bad_index(Fetched { job, step, .. }: &Fetched, error: &TableError) -> Failure {
    let hint = "it was written by another version, or its trainer is at fault";
    Failure::new(ErrorKind::Corrupt, format!("the index of {job}/{step}: {error}"), hint)
}
