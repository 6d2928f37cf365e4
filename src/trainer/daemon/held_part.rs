//! The part of a committed step that is still in this host's memory. A load takes it from there, and
//! only the rest from the cluster: a load by ranges maps the segments, and a fetch of the whole step
//! copies from them.
#![allow(clippy::disallowed_methods)] // shared memory lies outside any store

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::StagingDaemon;
use super::assemble::{Assembled, assemble};
use super::core::StepKey;
use super::fetch::Fetched;
use super::hold::Hold;
use crate::format::table::{Extent, Table};
use crate::id::{SaveId, SegmentId};
use crate::trainer::protocol::Part;
use crate::trainer::segment::HEADER_BYTES;

/// Maximum number of ranges of a step's shards that are taken from memory. The others are read from
/// the cluster.
const MAX_HELD_RANGES: usize = 1024;
/// The number of bytes that are copied from a segment at a time.
const COPIED_AT_ONCE: usize = 1 << 20;
/// Minimum length of a range that is copied from memory into the file of a whole shard.
const MIN_COPIED_BYTES: u64 = 4 << 20;
/// Maximum number of bytes that one job of the workers copies, so that other jobs have their turn.
const COPIED_BY_ONE_JOB: u64 = 256 << 20;

/// The part of a step that is in this host's segments. The segments keep it as long as this value
/// lives.
pub struct HeldPart {
    /// The step in memory.
    pub key: StepKey,
    /// The ranges of the step's shards, in their order, each with the segment that has its bytes.
    pub ranges: Vec<(SegmentId, Part)>,
    _holds: Vec<Hold>,
}

impl HeldPart {
    /// Returns the ranges that are long enough to be copied. A short range would cut a read from the
    /// cluster in two, and blocks that both halves touch would be read twice.
    fn long_ranges(&self) -> impl Iterator<Item = &(SegmentId, Part)> {
        self.ranges.iter().filter(|(_, range)| range.len_bytes >= MIN_COPIED_BYTES)
    }

    /// Returns the ranges of a data shard that are copied from memory, in order of their starts.
    pub fn copied_ranges(&self, shard: u32) -> Vec<Range<u64>> {
        let ranges = self.long_ranges().filter(|(_, range)| range.shard == shard);
        let range = |part: &Part| part.shard_offset..part.shard_offset + part.len_bytes;
        let mut ranges: Vec<_> = ranges.map(|(_, part)| range(part)).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges
    }
}

/// The held parts that loads use now, by save. The ranks of a launch share them.
pub type HeldParts = BTreeMap<SaveId, Weak<HeldPart>>;

impl StagingDaemon {
    /// Returns the part of a committed step that is in this host's memory, if there is one.
    pub(super) async fn find_held_part(
        self: &Arc<Self>,
        fetched: &Arc<Fetched>,
    ) -> Option<Arc<HeldPart>> {
        let mut known = self.held_parts.lock().await;
        known.retain(|_, part| part.strong_count() > 0);
        let (job, step, save) = (&fetched.job, fetched.step, fetched.save);
        // A part that was given up must not be found again, although other ranks may still hold it.
        let key = self.with(|core| core.find_committed_part(job, step, save))?;
        let shared = known.get(&save).and_then(Weak::upgrade);
        if let Some(part) = shared.filter(|part| part.key == key) {
            return Some(part);
        }
        let holds = self.with(|core| core.hold_step(&key))?;
        let (daemon, fetched, of) = (self.clone(), fetched.clone(), key.clone());
        let work = move || {
            let step = daemon.assemble_committed(&of)?;
            Some(match_extents(&fetched.table, &step, MAX_HELD_RANGES))
        };
        let ranges = self.workers.run(work).await.ok().flatten()?;
        let _holds = holds.into_iter().map(|(_, hold, _)| hold).collect();
        let part = Arc::new(HeldPart { key, ranges, _holds });
        known.insert(save, Arc::downgrade(&part));
        Some(part)
    }

    /// Copies the long ranges of a part into `files`, one for each data shard, and adds their bytes
    /// to `copied_bytes`. The bytes are not verified here; the readers of the files verify them.
    pub(super) async fn copy_held_part(
        self: &Arc<Self>,
        part: &Arc<HeldPart>,
        files: &[Arc<File>],
        copied_bytes: &AtomicU64,
    ) -> io::Result<()> {
        for (segment, range) in part.long_ranges() {
            let from = self.folder.open_segment(*segment).map_err(io::Error::other)?;
            let to = files.get(range.shard as usize).ok_or(io::ErrorKind::NotFound)?;
            let mut at = 0;
            while at < range.len_bytes {
                let (from, to) = (from.try_clone()?, to.clone());
                let len_bytes = (range.len_bytes - at).min(COPIED_BY_ONE_JOB);
                let (source, target) = (range.file_offset + at, range.shard_offset + at);
                let copy = move || copy_range((&from, source), (&to, target), len_bytes);
                self.workers.run(copy).await.map_err(io::Error::other)??;
                at += len_bytes;
                copied_bytes.fetch_add(len_bytes, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Returns a committed step in memory with its hashes, or `None` if they are missing.
    fn assemble_committed(self: &Arc<Self>, key: &StepKey) -> Option<Assembled> {
        let segments = self.with(|core| core.hold_step(key))?;
        let mut step = assemble(&self.folder, key, segments, self.coverage_of(key)).ok()?;
        step.table = self.stored_hashes(key, &step.table).ok()??;
        Some(step)
    }
}

/// Copies bytes between two places, each a file and an offset.
fn copy_range(from: (&File, u64), to: (&File, u64), len_bytes: u64) -> io::Result<()> {
    let mut buffer = vec![0; COPIED_AT_ONCE];
    let mut at = 0;
    while at < len_bytes {
        let count = (len_bytes - at).min(COPIED_AT_ONCE as u64);
        let bytes = buffer.get_mut(..count as usize).ok_or(io::ErrorKind::InvalidInput)?;
        from.0.read_exact_at(bytes, from.1 + at)?;
        to.0.write_all_at(bytes, to.1 + at)?;
        at += count;
    }
    Ok(())
}

/// Returns the ranges of a shard of `len_bytes` bytes that are not in `copied`, whose ranges are in
/// order.
pub fn find_missing_ranges(len_bytes: u64, copied: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut missing, mut at) = (Vec::new(), 0);
    for range in copied {
        if at < range.start {
            missing.push(at..range.start);
        }
        at = at.max(range.end);
    }
    if at < len_bytes {
        missing.push(at..len_bytes);
    }
    missing
}

/// Returns ranges of `table` whose extents are in memory. Extents with equal hashes are equal.
/// Extents that follow each other in both places share a range. If there are more than `most`
/// ranges, returns the longest.
fn match_extents(table: &Table, step: &Assembled, most: usize) -> Vec<(SegmentId, Part)> {
    let held = step.table.extents();
    let is_same =
        |a: &Extent, b: &Extent| a.hash.is_some() && (a.hash, a.len_bytes) == (b.hash, b.len_bytes);
    let known: HashMap<([u8; 32], u64), &Extent> =
        held.iter().filter_map(|extent| Some(((extent.hash?, extent.len_bytes), extent))).collect();
    // In memory, all extents are in shard 0.
    let at_offset = |offset: u64| {
        let row = held.partition_point(|of| (of.offset_bytes, of.len_bytes) < (offset, 1));
        held.get(row).filter(|extent| extent.offset_bytes == offset)
    };
    let mut ranges: Vec<(SegmentId, Part)> = Vec::new();
    // The offset in memory minus the offset in the shard, for the previous extent; `None` if that
    // extent is not in memory.
    let mut distance: Option<i128> = None;
    for extent in table.extents().iter().filter(|extent| extent.len_bytes > 0) {
        // Several extents may be equal, such as counters. The one behind the previous extent in
        // memory is preferred, so that the range goes on.
        let next = distance.and_then(|distance| {
            u64::try_from(i128::from(extent.offset_bytes) + distance).ok().and_then(at_offset)
        });
        let next = next.filter(|next| is_same(next, extent));
        let any = || known.get(&(extent.hash?, extent.len_bytes)).copied();
        let Some(found) = next.or_else(any) else {
            distance = None;
            continue;
        };
        let rank =
            step.parts.partition_point(|rank| rank.base + rank.data_bytes <= found.offset_bytes);
        let Some(rank) = step.parts.get(rank) else {
            distance = None;
            continue;
        };
        let file_offset = HEADER_BYTES + (found.offset_bytes - rank.base);
        let last = ranges.last_mut().filter(|(segment, range)| {
            // A range covers no byte of an extent that is not in memory.
            next.is_some() && (*segment, range.shard) == (rank.segment, extent.shard)
        });
        match last {
            Some((_, range)) => {
                range.len_bytes = extent.offset_bytes + extent.len_bytes - range.shard_offset;
            }
            None => {
                let range = Part {
                    shard: extent.shard,
                    shard_offset: extent.offset_bytes,
                    file_offset,
                    len_bytes: extent.len_bytes,
                    file_bytes: rank.segment_bytes,
                    fill: Some(rank.fill),
                };
                ranges.push((rank.segment, range));
            }
        }
        distance = Some(i128::from(found.offset_bytes) - i128::from(extent.offset_bytes));
    }
    if ranges.len() > most {
        tracing::info!(
            found = ranges.len(),
            most,
            "only the longest ranges of a step are loaded from memory"
        );
        ranges.sort_by_key(|(_, range)| std::cmp::Reverse(range.len_bytes));
        ranges.truncate(most);
        ranges.sort_by_key(|(_, range)| (range.shard, range.shard_offset));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::table::TableBuilder;
    use crate::id::FillId;
    use crate::trainer::daemon::assemble::RankPart;
    use crate::trainer::daemon::source::Pieces;

    /// Returns a table of extents of 64 bytes: shard, number of 64 bytes before it, content. Those
    /// with content 0 are empty.
    fn table(extents: &[(u32, u64, u8)]) -> Table {
        let mut builder = TableBuilder::new();
        for &(shard, number, content) in extents {
            let len_bytes = if content == 0 { 0 } else { 64 };
            let (offset_bytes, hash) = (64 * number, Some([content; 32]));
            builder.add_extent(Extent { source: 0, shard, offset_bytes, len_bytes, hash });
        }
        builder.build().unwrap()
    }

    /// Returns a step of two ranks with 128 bytes each.
    fn in_memory(contents: [u8; 4]) -> Assembled {
        let extents: Vec<(u32, u64, u8)> =
            (0..).zip(contents).map(|(row, content)| (0, row, content)).collect();
        let part = |rank: u8| RankPart {
            segment: SegmentId([rank; 16]),
            segment_bytes: 8192,
            base: 128 * u64::from(rank),
            data_bytes: 128,
            fill: FillId([9; 16]),
        };
        let (fill, bytes) = (FillId([9; 16]), Pieces::default());
        Assembled { fill, bytes, table: table(&extents), parts: vec![part(0), part(1)] }
    }

    /// Returns the ranges: rank, shard, numbers of 64 bytes in the shard and in the rank's segment,
    /// and how many.
    fn found(table: &Table, step: &Assembled, most: usize) -> Vec<(u8, u32, u64, u64, u64)> {
        let one = |(segment, part): &(SegmentId, Part)| {
            let offset = part.file_offset - HEADER_BYTES;
            (segment.0[0], part.shard, part.shard_offset / 64, offset / 64, part.len_bytes / 64)
        };
        match_extents(table, step, most).iter().map(one).collect()
    }

    #[test]
    fn what_was_not_copied_is_missing() {
        let missing = |copied: &[Range<u64>]| -> Vec<(u64, u64)> {
            let missing = find_missing_ranges(100, copied).into_iter();
            missing.map(|range| (range.start, range.end)).collect()
        };
        assert_eq!(missing(&[]), [(0, 100)]);
        assert_eq!(missing(&[10..20, 20..30, 25..28, 40..50]), [(0, 10), (30, 40), (50, 100)]);
        assert_eq!(missing(&[0..60, 60..100]), []);
    }

    #[test]
    fn neighbours_of_one_rank_share_a_range() {
        // Shard 1 has the four extents of this host behind one of another host.
        let all = table(&[(0, 0, 50), (1, 0, 51), (1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4)]);
        let expected = [(0, 1, 1, 0, 2), (1, 1, 3, 0, 2)];
        assert_eq!(found(&all, &in_memory([1, 2, 3, 4]), 9), expected);
        assert_eq!(found(&all, &in_memory([1, 2, 3, 4]), 1).len(), 1);
        // An empty extent lies where the next one begins.
        let with_empty = table(&[(1, 1, 1), (1, 2, 0), (1, 2, 2), (1, 3, 3), (1, 4, 4)]);
        assert_eq!(found(&with_empty, &in_memory([1, 2, 3, 4]), 9), expected);
    }

    #[test]
    fn a_range_covers_nothing_that_is_not_in_memory() {
        // The extent between two known ones is of another host, or differs.
        let all = table(&[(0, 0, 1), (0, 1, 60), (0, 2, 3), (0, 3, 4)]);
        let step = in_memory([1, 2, 3, 4]);
        assert_eq!(found(&all, &step, 9), [(0, 0, 0, 0, 1), (1, 0, 2, 0, 2)]);
        assert_eq!(found(&table(&[(0, 0, 61)]), &step, 9), []);
    }

    #[test]
    fn equal_extents_do_not_break_a_range() {
        let step = in_memory([7, 7, 8, 7]);
        let own = table(&[(3, 0, 7), (3, 1, 7), (3, 2, 8), (3, 3, 7)]);
        let ranges = found(&own, &step, 9);
        // The first one may be found anywhere; from the second on, they are where memory goes on.
        assert!(ranges.len() <= 3, "{ranges:?}");
        assert_eq!(ranges.iter().map(|range| range.4).sum::<u64>(), 4, "{ranges:?}");
        for (rank, _, at, from, count) in ranges {
            for row in 0..count {
                let held = [7, 7, 8, 7][(u64::from(rank) * 2 + from + row) as usize];
                assert_eq!(held, [7, 7, 8, 7][(at + row) as usize]);
            }
        }
    }
}
