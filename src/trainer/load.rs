//! Loading a step in a trainer's process: bytes are copied from mapped files to where they belong, and each extent is compared with its
//! hash on the way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::error::StagingError;
use super::mapping::Readable;
use super::protocol::{
    Answer, Load, LoadSource, Loadable, MAX_WINDOW_EXTENTS, Part, Request, WINDOW_BYTES,
};
use super::segment::still_holds;
use super::session::{Session, Wait};
use crate::format::table::{Extent, ExtentCopy, Table};
use crate::id::Step;
use crate::units::GRAIN_BYTES;

/// Bytes are copied and hashed in pieces that stay in a core's cache between the two.
const PIECE_BYTES: usize = 256 << 10;
/// The longest table that is taken from the daemon.
pub const MAX_TABLE_BYTES: u64 = 1 << 30;

struct MappedPart {
    part: Part,
    map: Arc<Readable>,
}

/// A step that can be loaded, held until [`Session::release`].
pub struct LoadedStep {
    /// What the daemon says of it.
    pub about: Loadable,
    /// Its table, with hashes.
    pub table: Table,
    parts: Vec<MappedPart>,
    /// Extents that can be read, ascending, when the load is by ranges; `None`: all.
    window: Option<Vec<u32>>,
    /// For each extent, once somebody has looked: whether it has its hash.
    verified: Vec<OnceLock<bool>>,
}

/// Where bytes go.
pub struct Target<'a> {
    /// Which bytes of which extents.
    pub copies: Vec<ExtentCopy>,
    /// The destination.
    pub bytes: &'a mut [u8],
}

impl Session {
    /// Opens a step for loading; `None` when the job has none. `on_progress` is told bytes done and bytes in all.
    pub fn load(
        &mut self,
        load: &Load,
        on_progress: &mut dyn FnMut(u64, u64),
        wait: &mut Wait<'_>,
    ) -> Result<Option<LoadedStep>, StagingError> {
        const WHAT: &str = "the step to load";
        let request = |limit_ms| Request::Load(Load { limit_ms, ..load.clone() });
        let mut pending = |pending: &super::protocol::Pending| {
            on_progress(pending.done_bytes, pending.total_bytes);
        };
        let (answer, mut descriptors) = self.ask_until(WHAT, request, &mut pending, wait)?;
        let about = match answer {
            Answer::Nothing => return Ok(None),
            Answer::Loadable(about) => about,
            _ => return Err(StagingError::Unexpected { what: WHAT }),
        };
        let unexpected = || StagingError::Unexpected { what: WHAT };
        let table = read_table(descriptors.pop_front().ok_or_else(unexpected)?, about.table_bytes)?;
        let mut parts: Vec<MappedPart> = Vec::new();
        while (parts.len() as u32) < about.parts {
            let first = parts.len() as u32;
            let open = Request::Open { ticket: about.ticket, first };
            let (answer, descriptors) = self.ask(WHAT, &open, wait)?;
            let Answer::Parts { parts: found } = answer else { return Err(unexpected()) };
            if found.is_empty() || found.len() != descriptors.len() {
                return Err(unexpected());
            }
            parts.extend(map_parts(found, descriptors)?);
        }
        let known = |row: usize| {
            let byte = about.verified.get(row / 8).copied().unwrap_or(0);
            match byte >> (row % 8) & 1 {
                1 => OnceLock::from(true),
                _ => OnceLock::new(),
            }
        };
        let verified = (0..table.extents().len()).map(known).collect();
        let window = (about.source == LoadSource::Ranges).then(Vec::new);
        Ok(Some(LoadedStep { about, table, parts, window, verified }))
    }

    /// Reads the extents of a window of [`LoadedStep::windows`] in a load by ranges; those of the window before cannot be read any more.
    /// `on_progress` is told bytes done and bytes in all of this window.
    pub fn read_extents(
        &mut self,
        step: &mut LoadedStep,
        extents: &[u32],
        on_progress: &mut dyn FnMut(u64, u64),
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        const WHAT: &str = "a part of the step";
        let ticket = step.about.ticket;
        let request =
            |limit_ms| Request::ReadExtents { ticket, extents: extents.to_vec(), limit_ms };
        let mut pending = |pending: &super::protocol::Pending| {
            on_progress(pending.done_bytes, pending.total_bytes);
        };
        // The memory of the window before goes first.
        (step.parts, step.window) = (Vec::new(), Some(Vec::new()));
        let (answer, mut descriptors) = self.ask_until(WHAT, request, &mut pending, wait)?;
        let unexpected = || StagingError::Unexpected { what: WHAT };
        let Answer::Parts { parts } = answer else { return Err(unexpected()) };
        let descriptor = descriptors.pop_front().ok_or_else(unexpected)?;
        if let Some(first) = parts.first() {
            let map = Arc::new(map_file(descriptor, first.file_bytes)?);
            step.parts =
                parts.into_iter().map(|part| MappedPart { part, map: map.clone() }).collect();
        }
        let mut window = extents.to_vec();
        window.sort_unstable();
        // A flag from an earlier window is about bytes in memory that is gone.
        for row in &window {
            if let Some(known) = step.verified.get_mut(*row as usize) {
                *known = OnceLock::new();
            }
        }
        step.window = Some(window);
        Ok(())
    }

    /// Ends a load that went well, and tells the other ranks what was verified.
    pub fn release(&mut self, step: LoadedStep, wait: &mut Wait<'_>) -> Result<(), StagingError> {
        const ROWS: usize = 32_768;
        let ticket = step.about.ticket;
        // Each process has windows of its own, so its flags mean nothing to other ranks.
        let shared = if step.is_by_ranges() { &[][..] } else { &step.verified };
        let verified: Vec<u32> = (0u32..)
            .zip(shared)
            .filter(|(_, known)| known.get() == Some(&true))
            .map(|(row, _)| row)
            .collect();
        drop(step);
        for extents in verified.chunks(ROWS) {
            let request = Request::Verified { ticket, extents: extents.to_vec() };
            self.tell("what was verified", &request, wait)?;
        }
        self.tell("the end of a load", &Request::Release { ticket }, wait)
    }

    /// Ends a load in which `error` happened, and says so when bytes are damaged.
    pub fn give_up_load(
        &mut self,
        step: LoadedStep,
        error: &StagingError,
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        let ticket = step.about.ticket;
        drop(step);
        let request = match error {
            StagingError::Corrupt { name } => Request::Corrupt { ticket, name: name.clone() },
            _ => Request::Release { ticket },
        };
        self.tell("the end of a load", &request, wait)
    }
}

fn read_table(descriptor: OwnedFd, len_bytes: u64) -> Result<Table, StagingError> {
    let failed = |source| StagingError::Io { what: "reading the table of a step".into(), source };
    if len_bytes > MAX_TABLE_BYTES {
        return Err(StagingError::Unexpected { what: "the step to load" });
    }
    // Its position is where the daemon's writing ended.
    let mut file = File::from(descriptor);
    std::io::Seek::rewind(&mut file).map_err(failed)?;
    let mut bytes = Vec::with_capacity(len_bytes as usize);
    file.take(len_bytes).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Table::parse(&bytes)?)
}

fn map_parts(
    parts: Vec<Part>,
    descriptors: VecDeque<OwnedFd>,
) -> Result<Vec<MappedPart>, StagingError> {
    let map = |(part, descriptor): (Part, OwnedFd)| {
        Ok(MappedPart { part, map: Arc::new(map_file(descriptor, part.file_bytes)?) })
    };
    parts.into_iter().zip(descriptors).map(map).collect()
}

fn map_file(descriptor: OwnedFd, len_bytes: u64) -> Result<Readable, StagingError> {
    Readable::map(&File::from(descriptor), len_bytes)
        .map_err(|source| StagingError::Io { what: "mapping a part of the step".into(), source })
}

/// Extents that are read together, and which of the wanted lists have some of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadWindow {
    /// Rows of extents.
    pub extents: Vec<u32>,
    /// Places in the list of what is wanted.
    pub wanted: Vec<usize>,
}

impl LoadedStep {
    /// The step.
    pub fn step(&self) -> Step {
        self.about.step
    }

    /// Whether it is read from this host's memory as its trainers left it.
    pub fn is_from_memory(&self) -> bool {
        self.about.source == LoadSource::Memory
    }

    /// Returns whether extents are read from the cluster when they are asked for.
    pub fn is_by_ranges(&self) -> bool {
        self.window.is_some()
    }

    /// Returns how many bytes a load by ranges reads of the cluster for what is wanted: whole grains, each once.
    pub fn wanted_bytes(&self, wanted: &[Vec<u32>]) -> u64 {
        let rows: BTreeSet<u32> = wanted.iter().flatten().copied().collect();
        let extents = rows.into_iter().filter_map(|row| self.table.extents().get(row as usize));
        let (mut bytes, mut last) = (0, None);
        for extent in extents.filter(|extent| extent.len_bytes > 0) {
            let grain = |at: u64| (extent.shard, at / GRAIN_BYTES);
            let (from, to) = (extent.offset_bytes, extent.offset_bytes + extent.len_bytes - 1);
            // Extents are in the order of their places.
            let is_new = last.is_none_or(|last| last < grain(from));
            bytes += (to / GRAIN_BYTES - from / GRAIN_BYTES + u64::from(is_new)) * GRAIN_BYTES;
            last = Some(grain(to));
        }
        bytes
    }

    /// Returns the bytes of all extents.
    pub fn len_bytes(&self) -> u64 {
        self.table.extents().iter().map(|extent| extent.len_bytes).sum()
    }

    /// Cuts what is wanted into windows in the order of the shards, each for [`Session::read_extents`]. `wanted` has a list of extents for
    /// each thing that is wanted. A step that is not loaded by ranges is one window, without extents.
    pub fn windows(&self, wanted: &[Vec<u32>]) -> Vec<ReadWindow> {
        if !self.is_by_ranges() {
            return vec![ReadWindow { extents: Vec::new(), wanted: (0..wanted.len()).collect() }];
        }
        let mut users: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, rows) in wanted.iter().enumerate() {
            rows.iter().for_each(|row| users.entry(*row).or_default().push(at));
        }
        // Extents of a table are sorted by their place.
        let (mut windows, mut len_bytes) = (Vec::<ReadWindow>::new(), 0);
        for (row, users) in users {
            let row_bytes = self.len_of(row);
            match windows.last_mut() {
                Some(last)
                    if len_bytes + row_bytes <= WINDOW_BYTES
                        && last.extents.len() < MAX_WINDOW_EXTENTS =>
                {
                    len_bytes += row_bytes;
                    last.extents.push(row);
                    last.wanted.extend(users);
                }
                _ => {
                    len_bytes = row_bytes;
                    windows.push(ReadWindow { extents: vec![row], wanted: users });
                }
            }
        }
        for window in &mut windows {
            window.wanted.sort_unstable();
            window.wanted.dedup();
        }
        windows
    }

    fn len_of(&self, row: u32) -> u64 {
        self.table.extents().get(row as usize).map_or(0, |extent| extent.len_bytes)
    }

    /// Returns whether an extent can be read now.
    fn is_here(&self, row: u32) -> bool {
        self.window.as_ref().is_none_or(|window| window.binary_search(&row).is_ok())
    }

    /// The bytes of an extent as they lie in memory, not verified.
    fn extent_bytes(&self, extent: &Extent) -> Option<&[u8]> {
        if extent.len_bytes == 0 {
            return Some(&[]);
        }
        let end = extent.offset_bytes.checked_add(extent.len_bytes)?;
        let found = self.parts.iter().find(|MappedPart { part, .. }| {
            let part_end = part.shard_offset.saturating_add(part.len_bytes);
            part.shard == extent.shard
                && part.shard_offset <= extent.offset_bytes
                && end <= part_end
        })?;
        let inside = extent.offset_bytes - found.part.shard_offset;
        let from = usize::try_from(found.part.file_offset.checked_add(inside)?).ok()?;
        let to = from.checked_add(usize::try_from(extent.len_bytes).ok()?)?;
        (*found.map).as_ref().get(from..to)
    }

    fn extent(&self, row: u32) -> Result<(&Extent, &[u8]), StagingError> {
        let found = self.table.extents().get(row as usize);
        let bytes = found.and_then(|extent| Some((extent, self.extent_bytes(extent)?)));
        bytes.ok_or(StagingError::Unexpected { what: "an extent of the step" })
    }

    /// What people call an extent.
    fn name_of(&self, row: u32) -> String {
        let region = self.table.regions().iter().find(|region| region.extent == row);
        let name = region.and_then(|region| self.table.names().get(region.name as usize));
        name.map_or_else(|| format!("extent {row}"), ToString::to_string)
    }

    /// The bytes of an extent, verified.
    pub fn bytes(&self, row: u32) -> Result<Vec<u8>, StagingError> {
        let (extent, bytes) = self.extent(row)?;
        let copy = bytes.to_vec();
        let is_good = extent.hash == Some(*blake3::hash(&copy).as_bytes());
        self.ensure_intact(row, is_good)?;
        self.check_held()?;
        Ok(copy)
    }

    fn ensure_intact(&self, row: u32, is_good: bool) -> Result<(), StagingError> {
        if is_good {
            return Ok(());
        }
        // A segment that is being filled again has other bytes for a good reason.
        self.check_held()?;
        Err(StagingError::Corrupt { name: self.name_of(row) })
    }

    /// Whether all segments still hold the step. What was copied before counts only then.
    fn check_held(&self) -> Result<(), StagingError> {
        for MappedPart { part, map } in &self.parts {
            if let Some(fill) = part.fill
                && !still_holds(map, fill).unwrap_or(false)
            {
                return Err(StagingError::Stale { step: self.about.step });
            }
        }
        Ok(())
    }

    /// Copies everything to its target on `threads` threads, and verifies each extent that is used and was not verified before. In a load
    /// by ranges that is what is in the window. `proceed` is asked often; when it returns false the work ends.
    pub fn copy(
        &self,
        mut targets: Vec<Target<'_>>,
        threads: usize,
        proceed: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), StagingError> {
        // The longest come first, so that the threads end together.
        targets.sort_by_key(|target| target.bytes.len());
        let (queue, is_over) = (Mutex::new(targets), AtomicBool::new(false));
        let work = || -> Result<(), StagingError> {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let Some(target) = next else { return Ok(()) };
                if is_over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if !proceed() {
                    return Err(StagingError::Interrupted { what: "a load" });
                }
                self.copy_one(target)?;
            }
        };
        let guarded = || work().inspect_err(|_| is_over.store(true, Ordering::Relaxed));
        std::thread::scope(|scope| {
            // With fewer threads than asked for it takes longer.
            let start = |_| std::thread::Builder::new().spawn_scoped(scope, guarded).ok();
            let others: Vec<_> = (1..threads.max(1)).map_while(start).collect();
            let mut result = guarded();
            for other in others {
                let ended = other.join();
                result =
                    result.and(ended.unwrap_or(Err(StagingError::Unexpected { what: "a load" })));
            }
            result
        })?;
        self.check_held()
    }

    fn copy_one(&self, target: Target<'_>) -> Result<(), StagingError> {
        let Target { copies, bytes: out } = target;
        for copy in copies.iter().filter(|copy| self.is_here(copy.extent)) {
            let (extent, from) = self.extent(copy.extent)?;
            let known = self.verified.get(copy.extent as usize);
            let known = known.ok_or(StagingError::Unexpected { what: "an extent of the step" })?;
            let is_whole = copy.dims.is_empty() && copy.run_bytes == extent.len_bytes;
            if is_whole && known.get().is_none() {
                let to = run(out, copy.to_bytes, copy.run_bytes)?;
                let mut own = None;
                let is_good = *known.get_or_init(|| {
                    let is_good = extent.hash == Some(copy_and_hash(from, to));
                    own = Some(is_good);
                    is_good
                });
                if own.is_none() {
                    // Another thread was quicker, for another target.
                    run(out, copy.to_bytes, copy.run_bytes)?.copy_from_slice(from);
                }
                self.ensure_intact(copy.extent, is_good)?;
                continue;
            }
            let is_good =
                *known.get_or_init(|| extent.hash == Some(*blake3::hash(from).as_bytes()));
            self.ensure_intact(copy.extent, is_good)?;
            for (from_at, to_at, len) in copy.runs() {
                let from = usize::try_from(from_at).ok().and_then(|at| from.get(at..));
                let from = from.and_then(|rest| rest.get(..usize::try_from(len).ok()?));
                let from =
                    from.ok_or(StagingError::Unexpected { what: "an extent of the step" })?;
                run(out, to_at, len)?.copy_from_slice(from);
            }
        }
        Ok(())
    }
}

/// The bytes `at..at + len` of a destination.
fn run(out: &mut [u8], at: u64, len: u64) -> Result<&mut [u8], StagingError> {
    let outside = || StagingError::Unexpected { what: "a destination" };
    let (at, len) = (usize::try_from(at).ok(), usize::try_from(len).ok());
    let (at, len) = (at.ok_or_else(outside)?, len.ok_or_else(outside)?);
    let end = at.checked_add(len).ok_or_else(outside)?;
    out.get_mut(at..end).ok_or_else(outside)
}

/// Copies and returns the hash of the copy: each piece is hashed while it is in the cache.
fn copy_and_hash(from: &[u8], to: &mut [u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for (from, to) in from.chunks(PIECE_BYTES).zip(to.chunks_mut(PIECE_BYTES)) {
        to.copy_from_slice(from);
        hasher.update(to);
    }
    *hasher.finalize().as_bytes()
}
