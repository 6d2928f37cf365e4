//! The layout of a segment: a header of one page, the extents, and the table that names them.
//!
//! ```text
//! 0           4096                     table_offset
//! | header    | extents, each at 64    | table (format::table) |
//! ```
//!
//! The trainer writes extents, table and header, then sets the state to [`State::Staged`] with a
//! release store. The header contains a hash over itself and the table, so a reader that finds this
//! state and a matching hash has a complete table. The daemon copies header and table once and
//! parses the copy, because the segment's owner could change the originals while they are parsed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};

use super::mapping::{Readable, Writable};
use crate::format::table::{Table, TableError};
use crate::id::{FillId, LaunchId, SegmentId, Step};
use crate::kind::ErrorKind;

/// Length of the header in bytes. The extents begin right after it.
pub const HEADER_BYTES: u64 = 4096;
/// Alignment of each extent, in bytes.
pub const EXTENT_ALIGN_BYTES: u64 = 64;
/// Maximum length of one rank's table, in bytes.
pub const MAX_TABLE_BYTES: u64 = 1 << 30;

const MAGIC: [u8; 8] = *b"rRdSEG\x01\0";
const STATE_AT: usize = 12;
const FILL_AT: usize = 64;
const HASHED_FROM: usize = 16;
const HASH_AT: usize = 96;
const USED_BYTES: usize = HASH_AT + 32;
const VERSION: u32 = 1;

/// The state in a segment's header. The owner sets [`State::Staged`]; the daemon sets the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// The content is meaningless.
    Free = 0,
    /// The owner is writing a step into it.
    Filling = 1,
    /// Header, table and extents are complete.
    Staged = 2,
}

/// The fields of a segment's header, without its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The id of the segment.
    pub segment: SegmentId,
    /// The launch of the trainer that wrote the segment.
    pub launch: LaunchId,
    /// Number of ranks of the launch.
    pub world: u32,
    /// The rank that wrote the segment.
    pub rank: u32,
    /// The staged step.
    pub step: Step,
    /// The filling that the content belongs to.
    pub fill: FillId,
    /// Offset of the table in the segment, in bytes.
    pub table_offset: u64,
    /// Length of the table, in bytes.
    pub table_bytes: u64,
}

/// The reason why a segment cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The segment has pages without memory, or cannot be mapped or read.
    #[error("segment {segment} cannot be read: {source}")]
    Map {
        /// The id of the segment.
        segment: SegmentId,
        /// The cause.
        source: io::Error,
    },
    /// The segment's state is not [`State::Staged`].
    #[error("segment {segment} is not staged")]
    NotStaged {
        /// The id of the segment.
        segment: SegmentId,
    },
    /// Header or table do not match their hash, or contain values that cannot be right.
    #[error(
        "segment {segment} is damaged ({what}): the step that it holds cannot be saved, save the next one"
    )]
    Damaged {
        /// The id of the segment.
        segment: SegmentId,
        /// The part that is wrong.
        what: &'static str,
    },
    /// The table does not parse.
    #[error("the table of segment {segment}: {source}")]
    Table {
        /// The id of the segment.
        segment: SegmentId,
        /// The cause.
        source: TableError,
    },
}

impl SegmentError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SegmentError::Map { .. } => ErrorKind::Io,
            SegmentError::NotStaged { .. } => ErrorKind::Invalid,
            SegmentError::Damaged { .. } => ErrorKind::Corrupt,
            SegmentError::Table { source, .. } => source.kind(),
        }
    }
}

impl Header {
    fn to_bytes(self, table: &[u8]) -> [u8; USED_BYTES] {
        let mut out = [0; USED_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(16, &self.segment.0);
        put(32, &self.launch.0);
        put(48, &self.world.to_le_bytes());
        put(52, &self.rank.to_le_bytes());
        put(56, &self.step.0.to_le_bytes());
        put(FILL_AT, &self.fill.0);
        put(80, &self.table_offset.to_le_bytes());
        put(88, &self.table_bytes.to_le_bytes());
        let hash = header_hash(&out, table);
        out[HASH_AT..].copy_from_slice(&hash);
        out
    }

    fn parse(bytes: &[u8; USED_BYTES]) -> Result<Self, &'static str> {
        let u32_at = |at: usize| u32::from_le_bytes(array(bytes, at));
        let u64_at = |at: usize| u64::from_le_bytes(array(bytes, at));
        if bytes[..8] != MAGIC {
            return Err("the magic bytes");
        }
        if u32_at(8) != VERSION {
            return Err("the version");
        }
        let (table_offset, table_bytes) = (u64_at(80), u64_at(88));
        if table_offset < HEADER_BYTES || table_bytes > MAX_TABLE_BYTES {
            return Err("the position of its table");
        }
        Ok(Self {
            segment: SegmentId(array(bytes, 16)),
            launch: LaunchId(array(bytes, 32)),
            world: u32_at(48),
            rank: u32_at(52),
            step: Step(u64_at(56)),
            fill: FillId(array(bytes, FILL_AT)),
            table_offset,
            table_bytes,
        })
    }
}

fn array<const N: usize>(bytes: &[u8; USED_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn header_hash(header: &[u8; USED_BYTES], table: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid segment header v1");
    hasher.update(&header[..STATE_AT]);
    hasher.update(&header[HASHED_FROM..HASH_AT]);
    hasher.update(table);
    *hasher.finalize().as_bytes()
}

/// Sets the state in the header of a segment's file. The daemon does this before it orders the
/// owner to fill the segment, and when it drops or releases the step that the segment holds. From
/// then on no reader and no later daemon accepts the old header.
pub fn set_state(file: &File, state: State) -> io::Result<()> {
    file.write_all_at(&(state as u32).to_le_bytes(), STATE_AT as u64)
}

/// Marks the segment as being filled and writes the filling's id into the header. A later daemon
/// learns from it which filling was not finished.
pub fn set_filling(file: &File, fill: FillId) -> io::Result<()> {
    set_state(file, State::Filling)?;
    file.write_all_at(&fill.0, FILL_AT as u64)
}

/// Reads the filling's id from a header, which need not be complete. Returns `None` if the segment
/// is free. The header is not verified, so callers must not use the segment's content.
pub fn filling_of(file: &File) -> io::Result<Option<FillId>> {
    let mut bytes = [0; USED_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    let is_free = array::<4>(&bytes, STATE_AT) == (State::Free as u32).to_le_bytes();
    Ok((!is_free).then(|| FillId(array(&bytes, FILL_AT))))
}

/// Writes table and header and marks the segment as staged. The extents must already be written.
pub fn stage(map: &Writable, header: Header, table: &[u8]) -> io::Result<()> {
    let table_at = usize::try_from(header.table_offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    map.write(table_at, table)?;
    let bytes = header.to_bytes(table);
    map.write(0, &bytes[..STATE_AT])?;
    map.write(HASHED_FROM, &bytes[HASHED_FROM..])?;
    map.store_release(STATE_AT, State::Staged as u32)
}

/// Returns whether a segment still holds the complete filling `fill`. A reader calls this after it
/// has copied; the copy is valid only if the result is true.
pub fn still_holds(map: &Readable, fill: FillId) -> io::Result<bool> {
    fence(Ordering::Acquire);
    let mut bytes = [0; USED_BYTES];
    map.copy_to(0, &mut bytes)?;
    let state = map.load_acquire(STATE_AT)?;
    Ok(state == State::Staged as u32 && array::<16>(&bytes, FILL_AT) == fill.0)
}

/// Returns the header of a staged segment, after checking the hash of header and table.
pub fn read_header(segment: SegmentId, map: &Readable) -> Result<Header, SegmentError> {
    read_checked(segment, map).map(|(header, _)| header)
}

/// Returns the header and the bytes of the table, from one copy of each, after checking their hash.
fn read_checked(segment: SegmentId, map: &Readable) -> Result<(Header, Vec<u8>), SegmentError> {
    let failed = |source| SegmentError::Map { segment, source };
    let damaged = |what| SegmentError::Damaged { segment, what };
    if map.load_acquire(STATE_AT).map_err(failed)? != State::Staged as u32 {
        return Err(SegmentError::NotStaged { segment });
    }
    let mut bytes = [0; USED_BYTES];
    map.copy_to(0, &mut bytes).map_err(failed)?;
    let header = Header::parse(&bytes).map_err(damaged)?;
    let end = header.table_offset.checked_add(header.table_bytes);
    if end.is_none_or(|end| end > map.as_ref().len() as u64) {
        return Err(damaged("the position of its table"));
    }
    let mut table = vec![0; header.table_bytes as usize];
    map.copy_to(header.table_offset as usize, &mut table).map_err(failed)?;
    if header_hash(&bytes, &table) != bytes[HASH_AT..] {
        return Err(damaged("the hash of header and table"));
    }
    if header.segment != segment {
        return Err(damaged("the segment id in its header"));
    }
    Ok((header, table))
}

/// Returns header and table of a staged segment, from one copy of each, after checking that all
/// extents lie between them.
pub fn read_staged(segment: SegmentId, map: &Readable) -> Result<(Header, Table), SegmentError> {
    let damaged = |what| SegmentError::Damaged { segment, what };
    let (header, table) = read_checked(segment, map)?;
    let table = Table::parse(&table).map_err(|source| SegmentError::Table { segment, source })?;
    let data_bytes = header.table_offset - HEADER_BYTES;
    let is_inside = |extent: &crate::format::table::Extent| {
        extent.shard == 0
            && extent.source == 0
            && extent
                .offset_bytes
                .checked_add(extent.len_bytes)
                .is_some_and(|end| end <= data_bytes)
    };
    if !table.extents().iter().all(is_inside) {
        return Err(damaged("the position of an extent"));
    }
    Ok((header, table))
}

impl From<SegmentError> for io::Error {
    fn from(error: SegmentError) -> Self {
        io::Error::other(error)
    }
}
