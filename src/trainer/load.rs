//! Loading a step in a trainer's process: the daemon opens it, and the trainer maps its bytes and
//! copies them to their destinations ([`copy`](super::copy)).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use super::error::StagingError;
use super::mapping::Readable;
use super::protocol::{
    Answer, Load, LoadFrom, LoadSource, Loadable, MAX_WINDOW_EXTENTS, Part, Request, WINDOW_BYTES,
};
use super::segment::still_holds;
use super::session::{Session, Wait};
use crate::format::table::{Extent, Table};
use crate::id::Step;
use crate::units::GRAIN_BYTES;

/// Maximum length of a table that the daemon may send, in bytes.
pub const MAX_TABLE_BYTES: u64 = 1 << 30;

struct MappedPart {
    part: Part,
    map: Arc<Readable>,
}

/// An open step, whose load lasts until [`Session::release`].
pub struct LoadedStep {
    /// The daemon's description of the load.
    pub about: Loadable,
    /// The table of the step, with hashes.
    pub table: Table,
    parts: Vec<MappedPart>,
    /// The extents of the current window, ascending, if the load is by ranges; `None` if all extents
    /// are readable. An empty list stands for the extents of `own`.
    window: Option<Vec<u32>>,
    /// The part of the step that is in this host's memory, if the load is by ranges.
    own: OwnPart,
    /// For each extent that was compared with its hash: whether it matched.
    pub(super) verified: Vec<OnceLock<bool>>,
}

/// The part of a step that a load by ranges finds in this host's memory.
#[derive(Default)]
struct OwnPart {
    parts: Vec<MappedPart>,
    /// Row numbers of its extents and of all empty ones, ascending.
    rows: Vec<u32>,
}

impl OwnPart {
    fn new(parts: Vec<MappedPart>, table: &Table) -> Self {
        let is_inside = |extent: &Extent| part_of(&parts, extent).is_some();
        let rows = (0u32..).zip(table.extents());
        let rows = rows.filter(|(_, extent)| extent.len_bytes == 0 || is_inside(extent));
        Self { rows: rows.map(|(row, _)| row).collect(), parts }
    }

    fn has(&self, row: u32) -> bool {
        self.rows.binary_search(&row).is_ok()
    }
}

/// Returns the part that contains an extent. `parts` are sorted by shard and offset, and do not
/// overlap.
fn part_of<'a>(parts: &'a [MappedPart], extent: &Extent) -> Option<&'a MappedPart> {
    let key = (extent.shard, extent.offset_bytes);
    let behind =
        parts.partition_point(|MappedPart { part, .. }| (part.shard, part.shard_offset) <= key);
    let before = behind.checked_sub(1).and_then(|at| parts.get(at));
    before.filter(|MappedPart { part, .. }| contains(part, extent))
}

/// Returns whether a part has all bytes of an extent.
fn contains(part: &Part, extent: &Extent) -> bool {
    let end = extent.offset_bytes.checked_add(extent.len_bytes);
    part.shard == extent.shard
        && part.shard_offset <= extent.offset_bytes
        && end.is_some_and(|end| end <= part.shard_offset.saturating_add(part.len_bytes))
}

impl Session {
    /// Opens a step for loading. Returns `None` if the job has no step. `on_progress` receives the
    /// bytes done and the total bytes.
    pub fn load(
        &mut self,
        load: &Load,
        from: LoadFrom,
        on_progress: &mut dyn FnMut(u64, u64),
        wait: &mut Wait<'_>,
    ) -> Result<Option<LoadedStep>, StagingError> {
        const WHAT: &str = "the step to load";
        let request = |limit_ms| {
            let load = Load { limit_ms, ..load.clone() };
            match from {
                LoadFrom::Anywhere => Request::Load(load),
                LoadFrom::Cluster => Request::LoadFromCluster(load),
            }
        };
        let mut pending = |pending: &super::protocol::Pending| {
            on_progress(pending.done_bytes, pending.total_bytes);
        };
        let (answer, mut descriptors) = self.ask_until(WHAT, request, &mut pending, wait)?;
        let about = match answer {
            Answer::Nothing => return Ok(None),
            Answer::Loadable(about) => about,
            _ => return Err(StagingError::Unexpected { what: WHAT }),
        };
        let ticket = about.ticket;
        let table = descriptors.pop_front();
        self.map_step(about, table, wait).inspect_err(|_| {
            // Otherwise the daemon holds the step's memory for as long as this connection lives.
            let _ = self.ask(WHAT, &Request::Release { ticket }, wait);
        })
    }

    /// Maps the table and the parts of the step that a load has found.
    fn map_step(
        &mut self,
        about: Loadable,
        table: Option<OwnedFd>,
        wait: &mut Wait<'_>,
    ) -> Result<Option<LoadedStep>, StagingError> {
        const WHAT: &str = "the step to load";
        let unexpected = || StagingError::Unexpected { what: WHAT };
        let table = read_table(table.ok_or_else(unexpected)?, about.table_bytes)?;
        let mut parts: Vec<MappedPart> = Vec::new();
        let mut known = BTreeMap::new();
        while (parts.len() as u32) < about.parts {
            let first = parts.len() as u32;
            let open = Request::Open { ticket: about.ticket, first };
            let (answer, descriptors) = self.ask(WHAT, &open, wait)?;
            let Answer::Parts { parts: found } = answer else { return Err(unexpected()) };
            if found.is_empty() || found.len() != descriptors.len() {
                return Err(unexpected());
            }
            parts.extend(map_parts(found, descriptors, &mut known)?);
        }
        let known = |row: usize| {
            let byte = about.verified.get(row / 8).copied().unwrap_or(0);
            match byte >> (row % 8) & 1 {
                1 => OnceLock::from(true),
                _ => OnceLock::new(),
            }
        };
        let verified = (0..table.extents().len()).map(known).collect();
        let (mut window, mut own) = (None, OwnPart::default());
        if about.source == LoadSource::Ranges {
            window = Some(Vec::new());
            own = OwnPart::new(std::mem::take(&mut parts), &table);
        }
        Ok(Some(LoadedStep { about, table, parts, window, own, verified }))
    }

    /// Reads the extents of one window of [`LoadedStep::windows`] in a load by ranges. The extents
    /// of the previous window become unreadable. A window without extents is the part of the step in
    /// this host's memory, of which nothing needs to be read. `on_progress` receives the bytes done
    /// and the total bytes of this window.
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
        // Free the memory of the previous window before the next one is requested.
        (step.parts, step.window) = (Vec::new(), Some(Vec::new()));
        if extents.is_empty() {
            return Ok(());
        }
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
        // A flag from an earlier window describes bytes in memory that is unmapped now.
        for row in &window {
            if let Some(known) = step.verified.get_mut(*row as usize) {
                *known = OnceLock::new();
            }
        }
        step.window = Some(window);
        Ok(())
    }

    /// Ends a successful load and shares with the other ranks which extents were verified.
    pub fn release(&mut self, step: LoadedStep, wait: &mut Wait<'_>) -> Result<(), StagingError> {
        const ROWS: usize = 32_768;
        let ticket = step.about.ticket;
        // In a load by ranges each process has windows of its own, so its flags mean nothing to
        // other ranks.
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

    /// Ends a load that failed with `error`. Reports damaged bytes to the daemon.
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
    // The file's position is where the daemon stopped writing.
    let mut file = File::from(descriptor);
    std::io::Seek::rewind(&mut file).map_err(failed)?;
    let mut bytes = Vec::with_capacity(len_bytes as usize);
    file.take(len_bytes).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Table::parse(&bytes)?)
}

fn map_parts(
    parts: Vec<Part>,
    descriptors: VecDeque<OwnedFd>,
    known: &mut BTreeMap<(u64, u64), Arc<Readable>>,
) -> Result<Vec<MappedPart>, StagingError> {
    let failed = |source| StagingError::Io { what: "opening a part of the step".into(), source };
    let mut mapped = Vec::with_capacity(parts.len());
    for (part, descriptor) in parts.into_iter().zip(descriptors) {
        // Several parts may lie in one file, of which one mapping is enough.
        let about = rustix::fs::fstat(&descriptor).map_err(|error| failed(error.into()))?;
        let map = match known.entry((about.st_dev, about.st_ino)) {
            Entry::Occupied(found) => found.get().clone(),
            Entry::Vacant(new) => {
                new.insert(Arc::new(map_file(descriptor, part.file_bytes)?)).clone()
            }
        };
        mapped.push(MappedPart { part, map });
    }
    Ok(mapped)
}

fn map_file(descriptor: OwnedFd, len_bytes: u64) -> Result<Readable, StagingError> {
    Readable::map(&File::from(descriptor), len_bytes)
        .map_err(|source| StagingError::Io { what: "mapping a part of the step".into(), source })
}

/// Extents that are read together, and the wanted lists that need some of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadWindow {
    /// Row numbers of the extents.
    pub extents: Vec<u32>,
    /// Indexes into the `wanted` argument of [`LoadedStep::windows`].
    pub wanted: Vec<usize>,
}

impl LoadedStep {
    /// Returns the step.
    pub fn step(&self) -> Step {
        self.about.step
    }

    /// Returns whether the step is read from this host's memory as its trainers left it.
    pub fn is_from_memory(&self) -> bool {
        self.about.source == LoadSource::Memory
    }

    /// Returns whether extents are read from the cluster on request.
    pub fn is_by_ranges(&self) -> bool {
        self.window.is_some()
    }

    /// Returns how many bytes a load by ranges reads from the cluster for `wanted`: the grains of
    /// the extents that are not in this host's memory, each counted once and whole.
    pub fn wanted_bytes(&self, wanted: &[Vec<u32>]) -> u64 {
        let rows: BTreeSet<u32> = wanted.iter().flatten().copied().collect();
        let rows = rows.into_iter().filter(|row| !self.own.has(*row));
        let extents = rows.filter_map(|row| self.table.extents().get(row as usize));
        let (mut bytes, mut last) = (0, None);
        for extent in extents.filter(|extent| extent.len_bytes > 0) {
            let grain = |at: u64| (extent.shard, at / GRAIN_BYTES);
            let (from, to) = (extent.offset_bytes, extent.offset_bytes + extent.len_bytes - 1);
            // Extents are sorted by shard and offset.
            let is_new = last.is_none_or(|last| last < grain(from));
            bytes += (to / GRAIN_BYTES - from / GRAIN_BYTES + u64::from(is_new)) * GRAIN_BYTES;
            last = Some(grain(to));
        }
        bytes
    }

    /// Returns the total length of all extents, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.table.extents().iter().map(|extent| extent.len_bytes).sum()
    }

    /// Divides the wanted extents into windows for [`Session::read_extents`], in the order of the
    /// shards. `wanted` has a list of extents for each destination. If some of the wanted extents
    /// are in this host's memory, the first window stands for them, and its `extents` is empty. A
    /// step that is not loaded by ranges is one window without extents.
    pub fn windows(&self, wanted: &[Vec<u32>]) -> Vec<ReadWindow> {
        if !self.is_by_ranges() {
            return vec![ReadWindow { extents: Vec::new(), wanted: (0..wanted.len()).collect() }];
        }
        let mut users: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, rows) in wanted.iter().enumerate() {
            rows.iter().for_each(|row| users.entry(*row).or_default().push(at));
        }
        // Extents of a table are sorted by their place, so ascending rows are in the order of the
        // shards.
        let (own, users): (BTreeMap<_, _>, BTreeMap<_, _>) =
            users.into_iter().partition(|(row, _)| self.own.has(*row));
        let (mut windows, mut len_bytes) = (Vec::<ReadWindow>::new(), 0);
        if !own.is_empty() {
            let wanted = own.into_values().flatten().collect();
            windows.push(ReadWindow { extents: Vec::new(), wanted });
        }
        for (row, users) in users {
            let row_bytes = self.len_of(row);
            match windows.last_mut().filter(|last| !last.extents.is_empty()) {
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
    pub(super) fn is_here(&self, row: u32) -> bool {
        match self.window.as_deref() {
            None => true,
            Some([]) => self.own.has(row),
            Some(window) => window.binary_search(&row).is_ok(),
        }
    }

    /// Returns the parts of the current window.
    fn window_parts(&self) -> &[MappedPart] {
        match self.window.as_deref() {
            Some([]) => &self.own.parts,
            _ => &self.parts,
        }
    }

    /// Returns the bytes of an extent as they are in memory, unverified. Returns `None` if no
    /// mapped part contains them.
    fn extent_bytes(&self, extent: &Extent) -> Option<&[u8]> {
        if extent.len_bytes == 0 {
            return Some(&[]);
        }
        let found = match self.window.as_deref() {
            Some([]) => part_of(&self.own.parts, extent)?,
            _ => self.parts.iter().find(|MappedPart { part, .. }| contains(part, extent))?,
        };
        let inside = extent.offset_bytes - found.part.shard_offset;
        let from = usize::try_from(found.part.file_offset.checked_add(inside)?).ok()?;
        let to = from.checked_add(usize::try_from(extent.len_bytes).ok()?)?;
        (*found.map).as_ref().get(from..to)
    }

    /// Returns an extent and its bytes, unverified.
    pub(super) fn extent(&self, row: u32) -> Result<(&Extent, &[u8]), StagingError> {
        let found = self.table.extents().get(row as usize);
        let bytes = found.and_then(|extent| Some((extent, self.extent_bytes(extent)?)));
        bytes.ok_or(StagingError::Unexpected { what: "an extent of the step" })
    }

    /// Returns the name of a tensor that the extent belongs to, for messages.
    fn name_of(&self, row: u32) -> String {
        let region = self.table.regions().iter().find(|region| region.extent == row);
        let name = region.and_then(|region| self.table.names().get(region.name as usize));
        name.map_or_else(|| format!("extent {row}"), ToString::to_string)
    }

    /// Returns a copy of an extent's bytes, verified. Fails with [`StagingError::Corrupt`] or
    /// [`StagingError::Stale`], or with [`StagingError::Unexpected`] if the extent is not mapped.
    pub fn bytes(&self, row: u32) -> Result<Vec<u8>, StagingError> {
        let (extent, bytes) = self.extent(row)?;
        let copy = bytes.to_vec();
        let is_good = extent.hash == Some(*blake3::hash(&copy).as_bytes());
        self.ensure_intact(row, is_good)?;
        self.check_held()?;
        Ok(copy)
    }

    /// Compares the hash of an extent's bytes with the expected one, and remembers the result. Fails
    /// as [`ensure_intact`](Self::ensure_intact).
    pub(super) fn compare(&self, row: u32, hash: &[u8; 32]) -> Result<(), StagingError> {
        let unknown = || StagingError::Unexpected { what: "an extent of the step" };
        let extent = self.table.extents().get(row as usize).ok_or_else(unknown)?;
        let is_good = extent.hash.as_ref() == Some(hash);
        if let Some(known) = self.verified.get(row as usize) {
            // Another call at the same time may have compared the extent, too.
            let _ = known.set(is_good);
        }
        self.ensure_intact(row, is_good)
    }

    /// Fails unless an extent matched its hash: with [`StagingError::Stale`] if a segment no longer
    /// holds the step, otherwise with [`StagingError::Corrupt`].
    pub(super) fn ensure_intact(&self, row: u32, is_good: bool) -> Result<(), StagingError> {
        if is_good {
            return Ok(());
        }
        // A segment that is being filled again differs without being damaged.
        self.check_held()?;
        Err(StagingError::Corrupt { name: self.name_of(row) })
    }

    /// Fails with [`StagingError::Stale`] unless all segments still hold the step. Bytes copied
    /// earlier are valid only after this check.
    pub(super) fn check_held(&self) -> Result<(), StagingError> {
        for MappedPart { part, map } in self.window_parts() {
            if let Some(fill) = part.fill
                && !still_holds(map, fill).unwrap_or(false)
            {
                return Err(StagingError::Stale { step: self.about.step });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
impl LoadedStep {
    /// Returns a step whose only shard is `file`, as a load from the cluster gives it.
    pub(super) fn of_file(table: Table, file: &File) -> Self {
        let len_bytes = file.metadata().unwrap().len();
        let part = Part {
            shard: 0,
            shard_offset: 0,
            file_offset: 0,
            len_bytes,
            file_bytes: len_bytes,
            fill: None,
        };
        let about = Loadable {
            ticket: 1,
            step: Step(1),
            table_bytes: 0,
            parts: 1,
            source: LoadSource::Cluster,
            verified: Vec::new(),
            newest_committed: None,
            world: 1,
            why_by_ranges: String::new(),
        };
        let parts =
            vec![MappedPart { part, map: Arc::new(Readable::map(file, len_bytes).unwrap()) }];
        let verified = table.extents().iter().map(|_| OnceLock::new()).collect();
        Self { about, table, parts, window: None, own: OwnPart::default(), verified }
    }
}
