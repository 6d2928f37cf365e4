//! From the segments of a step to its shards: the tables of the ranks are merged, the extents are
//! hashed, and the step is cut into shards.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};

use super::core::StepKey;
use super::folder::Folder;
use super::hold::Hold;
use super::source::{HeldMemory, Pieces};
use crate::format::table::{Extent, MergeInput, Table, TableBuilder, TableError};
use crate::format::tree::{Hash, PartHasher, root_of_parts};
use crate::id::{FillId, SegmentId};
use crate::kind::ErrorKind;
use crate::pipeline::upload::ShardSource;
use crate::trainer::mapping::Readable;
use crate::trainer::protocol::Part;
use crate::trainer::segment::{EXTENT_ALIGN_BYTES, HEADER_BYTES, SegmentError, read_staged};
use crate::units::MIB;
use crate::workers::{WorkerDied, Workers};

/// Approximate number of bytes that one worker job hashes: a group of parts of extents.
const HASH_GROUP_BYTES: u64 = 32 * MIB;
/// Maximum length of a part of an extent. A power of two, as subtrees of BLAKE3 need.
const HASH_PART_BYTES: u64 = 8 * MIB;
/// Maximum number of groups that are hashed at once.
const HASHES_AT_ONCE: usize = 4;
/// Maximum number of stripes of a data shard, unless a single extent is longer.
pub const MAX_SHARD_STRIPES: u64 = 256;

/// The reason why the segments of a step do not form a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// A segment cannot be used.
    #[error("rank {rank}: {source}")]
    Segment {
        /// The rank.
        rank: u32,
        /// The cause.
        source: SegmentError,
    },
    /// The rank, number of ranks, step, launch or filling in the header of a segment is not the
    /// expected one.
    #[error(
        "the segment of rank {rank} is not a part of this step: its header, of rank {found}, has another rank, number of ranks, step, launch or filling"
    )]
    Stranger {
        /// The rank.
        rank: u32,
        /// The rank in its header.
        found: u32,
    },
    /// The tables contradict each other, or do not cover every tensor.
    #[error("{source}{ranks}")]
    Table {
        /// The ranks that are concerned, as the end of a sentence; may be empty.
        ranks: String,
        /// The cause.
        source: Box<TableError>,
    },
    /// A job on a worker thread panicked.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl AssembleError {
    /// Returns the kind of the error. `Invalid` and `Corrupt` mean that the step is at fault; a
    /// retry does not help.
    pub fn kind(&self) -> ErrorKind {
        use std::io::ErrorKind::{NotFound, UnexpectedEof};
        match self {
            AssembleError::Segment { source: SegmentError::Map { source, .. }, .. }
                if matches!(source.kind(), NotFound | UnexpectedEof) =>
            {
                ErrorKind::Invalid
            }
            AssembleError::Segment { source, .. } => source.kind(),
            AssembleError::Stranger { .. } | AssembleError::Table { .. } => ErrorKind::Invalid,
            AssembleError::Worker(_) => ErrorKind::Internal,
        }
    }
}

/// The segment of one rank in the assembled step.
#[derive(Debug, Clone, Copy)]
pub struct RankPart {
    /// The segment.
    pub segment: SegmentId,
    /// Length of the segment, in bytes.
    pub segment_bytes: u64,
    /// Offset of the rank's extents in the assembled step, in bytes.
    pub base: u64,
    /// Length of the rank's extents, in bytes.
    pub data_bytes: u64,
    /// The filling that the segment holds.
    pub fill: FillId,
}

/// A step in this host's memory, as one range of bytes with one table: the whole step, or the part
/// of this host's ranks.
#[derive(Debug, Clone)]
pub struct Assembled {
    /// The filling.
    pub fill: FillId,
    /// The extents of all ranks, in the order of the ranks.
    pub bytes: Pieces,
    /// The merged table, which has no hashes until those of [`hash`] are added.
    pub table: Table,
    /// The part of each rank.
    pub parts: Vec<RankPart>,
}

/// Returns the parts of a step as the protocol describes them to readers.
pub fn parts_of(parts: &[RankPart]) -> Vec<Part> {
    let part = |rank: &RankPart| Part {
        shard: 0,
        shard_offset: rank.base,
        file_offset: HEADER_BYTES,
        len_bytes: rank.data_bytes,
        file_bytes: rank.segment_bytes,
        fill: Some(rank.fill),
    };
    parts.iter().map(part).collect()
}

/// The part of a step that the segments of this host have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// The whole step: the segments must hold every tensor completely.
    Whole,
    /// The part of this host's ranks. Completeness is checked later, when the tables of all hosts
    /// are merged.
    OfOneHost,
}

/// Maps the segments of a step and merges their tables. `segments` has for each rank the segment, a
/// [`Hold`] on it, and its length in bytes.
pub fn assemble(
    folder: &Folder,
    key: &StepKey,
    segments: Vec<(SegmentId, Hold, u64)>,
    coverage: Coverage,
) -> Result<Assembled, AssembleError> {
    let world = segments.len() as u32;
    let (mut bytes, mut tables, mut parts, mut base) =
        (Pieces::default(), Vec::new(), Vec::new(), 0);
    for (rank, (segment, hold, segment_bytes)) in (0..).zip(segments) {
        let failed = |source| AssembleError::Segment { rank, source };
        let opened = folder.open_segment(segment).map_err(|error| match error.kind() {
            ErrorKind::NotFound => std::io::Error::new(std::io::ErrorKind::NotFound, error),
            _ => std::io::Error::other(error),
        });
        let map = opened
            .and_then(|file| Readable::map(&file, segment_bytes))
            .map_err(|source| failed(SegmentError::Map { segment, source }))?;
        let (header, table) = read_staged(segment, &map).map_err(failed)?;
        if header.rank != rank
            || header.world != world
            || header.step != key.step
            || header.launch != key.launch
            || header.fill != key.fill
        {
            return Err(AssembleError::Stranger { rank, found: header.rank });
        }
        let data_bytes = header.table_offset - HEADER_BYTES;
        let memory = HeldMemory::bytes(map, hold);
        let data = memory.slice(HEADER_BYTES as usize..header.table_offset as usize);
        bytes.push(base, data);
        parts.push(RankPart { segment, segment_bytes, base, data_bytes, fill: key.fill });
        tables.push(table);
        base = (base + data_bytes).next_multiple_of(EXTENT_ALIGN_BYTES);
    }
    let inputs: Vec<MergeInput<'_>> = tables
        .iter()
        .zip(&parts)
        .map(|(table, part)| MergeInput { table, shard: 0, base_offset_bytes: part.base })
        .collect();
    let wrong = |source: TableError| AssembleError::Table {
        ranks: holders(&tables, &source),
        source: Box::new(source),
    };
    let table = Table::merge(&inputs).map_err(wrong)?;
    if coverage == Coverage::Whole {
        table.check_coverage().map_err(wrong)?;
    }
    Ok(Assembled { fill: key.fill, bytes, table, parts })
}

/// Returns a description of the ranks that hold parts of the tensor that an error names; empty if
/// there are none.
fn holders(tables: &[Table], error: &TableError) -> String {
    let text = error.to_string();
    let has = |table: &Table| table.names().iter().any(|name| text.contains(&name.to_string()));
    let ranks: Vec<String> = (0..)
        .zip(tables)
        .filter(|(_, table)| has(table))
        .map(|(rank, _): (u32, _)| rank.to_string())
        .collect();
    if ranks.is_empty() { ranks.concat() } else { format!(" (held by ranks {})", ranks.join(", ")) }
}

/// A part of an extent, which is hashed on its own.
#[derive(Clone, Copy)]
struct ExtentPart {
    extent: Extent,
    index: u64,
}

/// Hashes each extent with BLAKE3. Calls `report_progress` for each group of parts that is hashed.
/// Returns the hashes in the order of the table.
pub async fn hash(
    step: &Assembled,
    workers: &Workers,
    report_progress: impl Fn(),
) -> Result<Vec<[u8; 32]>, WorkerDied> {
    let parts_of = |extent: &Extent| extent.len_bytes.div_ceil(HASH_PART_BYTES);
    let mut groups: Vec<Vec<ExtentPart>> = Vec::new();
    let mut group_bytes = HASH_GROUP_BYTES;
    for extent in step.table.extents() {
        for index in 0..parts_of(extent) {
            if group_bytes >= HASH_GROUP_BYTES {
                groups.push(Vec::new());
                group_bytes = 0;
            }
            if let Some(group) = groups.last_mut() {
                group.push(ExtentPart { extent: *extent, index });
            }
            group_bytes += extent.len_bytes.min(HASH_PART_BYTES);
        }
    }
    let jobs = groups.into_iter().map(|group| {
        let bytes = step.bytes.clone();
        workers.run(move || group.iter().map(|part| hash_part(&bytes, part)).collect::<Vec<_>>())
    });
    let hashes: Vec<Vec<Hash>> = stream::iter(jobs.collect::<Vec<_>>())
        .buffered(HASHES_AT_ONCE)
        .inspect_ok(|_| report_progress())
        .try_collect()
        .await?;
    let mut hashes = hashes.concat().into_iter();
    let root = |extent: &Extent| {
        let parts: Vec<Hash> = hashes.by_ref().take(parts_of(extent) as usize).collect();
        root_of_parts(&parts)
    };
    Ok(step.table.extents().iter().map(root).collect())
}

fn hash_part(bytes: &Pieces, part: &ExtentPart) -> Hash {
    let from = part.index * HASH_PART_BYTES;
    let len_bytes = part.extent.len_bytes.saturating_sub(from).min(HASH_PART_BYTES);
    // An extent is always inside the memory of one rank.
    let found = bytes.bytes_in_memory(part.extent.offset_bytes + from, len_bytes as usize);
    // No bytes have this hash, so the extent is treated as changed.
    let Some(found) = found else { return Hash::default() };
    let mut hasher = PartHasher::new(part.extent.len_bytes, HASH_PART_BYTES, part.index);
    hasher.update(&found);
    hasher.finish()
}

/// Returns the name of the first extent whose bytes no longer match its hash; `None` if all match.
/// Calls `report_progress` when some of the bytes have been hashed.
pub async fn find_changed(
    step: &Assembled,
    workers: &Workers,
    report_progress: &(dyn Fn() + Sync),
) -> Result<Option<String>, WorkerDied> {
    let now = hash(step, workers, report_progress).await?;
    let changed =
        step.table.extents().iter().zip(now).position(|(extent, now)| extent.hash != Some(now));
    Ok(changed.map(|row| name_of(&step.table, row as u32)))
}

/// Returns the name of a tensor that the extent belongs to, for messages.
pub fn name_of(table: &Table, extent: u32) -> String {
    let region = table.regions().iter().find(|region| region.extent == extent);
    let name = region.and_then(|region| table.names().get(region.name as usize));
    name.map_or_else(|| format!("extent {extent}"), ToString::to_string)
}

/// A data shard of a step.
#[derive(Debug, Clone)]
pub struct DataShard {
    /// The shard's range of the step's bytes.
    pub range: Range<u64>,
    /// The shard's table, with footer.
    pub table: Bytes,
}

/// The shards of a step, as they are saved.
#[derive(Debug, Clone)]
pub struct Shards {
    /// The data shards.
    pub data: Vec<DataShard>,
    /// The index.
    pub index: Bytes,
}

/// Returns the content of each data shard: its extents, and its table.
pub fn shard_sources(step: &Assembled, data: Vec<DataShard>) -> Vec<Arc<dyn ShardSource>> {
    let source = |shard: DataShard| {
        let mut bytes = step.bytes.slice(shard.range.start, shard.range.end);
        let table_at = bytes.len_bytes().next_multiple_of(EXTENT_ALIGN_BYTES);
        bytes.push(table_at, shard.table);
        Arc::new(bytes) as Arc<dyn ShardSource>
    };
    data.into_iter().map(source).collect()
}

/// Cuts a step into data shards whose extents take at most `max_bytes`, at the boundaries of
/// extents. A shard with a single extent may be longer.
pub fn cut(table: &Table, max_bytes: u64) -> Result<Shards, TableError> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut shard_of = Vec::with_capacity(table.extents().len());
    for extent in table.extents() {
        let end = extent.offset_bytes + extent.len_bytes;
        match ranges.last_mut() {
            Some(last) if end - last.start <= max_bytes => last.end = last.end.max(end),
            _ => ranges.push(extent.offset_bytes..end),
        }
        shard_of.push(ranges.len() - 1);
    }
    if ranges.is_empty() {
        ranges.push(0..0);
    }
    let mut index = TableBuilder::new();
    let mut shards: Vec<TableBuilder> = ranges.iter().map(|_| TableBuilder::new()).collect();
    for name in table.names() {
        index.add_name(name.clone());
    }
    let mut rows = vec![0; shard_of.len()];
    for ((extent, &shard), row) in table.extents().iter().zip(&shard_of).zip(&mut rows) {
        let offset_bytes = extent.offset_bytes - ranges[shard].start;
        index.add_extent(Extent { shard: shard as u32, offset_bytes, hash: None, ..*extent });
        *row = shards[shard].add_extent(Extent { shard: 0, offset_bytes, ..*extent });
    }
    let mut names: Vec<BTreeMap<u32, u32>> = ranges.iter().map(|_| BTreeMap::new()).collect();
    for region in table.regions() {
        index.add_region(region.name, region.form.clone(), region.extent);
        let (Some(&shard), Some(&row), Some(name)) = (
            shard_of.get(region.extent as usize),
            rows.get(region.extent as usize),
            table.names().get(region.name as usize),
        ) else {
            continue;
        };
        let builder = &mut shards[shard];
        let number =
            *names[shard].entry(region.name).or_insert_with(|| builder.add_name(name.clone()));
        builder.add_region(number, region.form.clone(), row);
    }
    let data = ranges.into_iter().zip(shards).map(|(range, builder)| {
        Ok(DataShard { range, table: builder.build()?.to_bytes()?.into() })
    });
    let data = data.collect::<Result<Vec<_>, TableError>>()?;
    Ok(Shards { data, index: index.build()?.to_bytes()?.into() })
}
