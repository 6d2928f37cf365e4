//! The table at the end of a shard: the names of a checkpoint, the regions of each, and the extents
//! that hold their bytes.
//!
//! ```text
//! names     (space, path), kind, element type, shape, flags     sorted, unique
//! regions   name, form, extent                                  sorted by name and form, unique
//! extents   source, shard, offset, length, hash                 sorted, not overlapping
//! ```
//!
//! A [`Table`] is always valid: [`TableBuilder`] and [`Table::parse`] refuse everything else. The
//! bytes are blocks of columns, a directory, and a footer of fixed length (docs/format.md, "The
//! index of a checkpoint"). [`TableReader`] reads single blocks. The caller finds the shard and
//! fetches its bytes.

mod blocks;
mod build;
mod columns;
mod coverage;
mod encode;
mod error;
mod layout;
pub mod limits;
mod merge;
mod parse;
mod path;
mod path_text;
mod reader;
mod rules;
mod search;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::id::{LaunchId, ShardName};
pub use build::TableBuilder;
pub use error::{Section, TableError, TablePart};
pub use layout::{FOOTER_BYTES, table_range};
pub use merge::MergeInput;
pub use path::{Key, Path, PathError};
pub use reader::{FoundName, ReadAt, TableReader};
pub use search::{CopyDim, ExtentCopy, SearchError, Wanted, search};

/// The start of the name of a data shard in a trainer's checkpoint. The launch and the shard's
/// number follow.
pub const DATA_SHARD: &str = "data/";
/// The start of the name of the index shard. The launch follows.
pub const INDEX_SHARD: &str = "index/";

/// Returns the launch in the name of an index shard. Returns `None` for other names.
pub fn launch_of_index(name: &ShardName) -> Option<LaunchId> {
    name.as_str().strip_prefix(INDEX_SHARD)?.parse().ok()
}

/// The set of names in which a path is unique. The shared space sorts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// The space that all ranks share.
    Shared,
    /// The space of one rank.
    Rank(u32),
}

/// The kind of a name: a tensor, or other content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NameKind {
    /// An array of elements with a shape.
    Tensor,
    /// Opaque bytes.
    Bytes,
    /// A plain value (number, text, flag), encoded by the trainer's side.
    Value,
}

impl fmt::Display for NameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tensor => "tensor",
            Self::Bytes => "bytes",
            Self::Value => "value",
        })
    }
}

/// The type of a tensor's elements. Its name is text, so that new types need no new version of the
/// format.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ElementType {
    /// The name, as in `float32` or `float8_e4m3fn`: 1 to 64 visible ASCII characters. Names that
    /// are decoded from one block share the text.
    pub name: Arc<str>,
    /// The number of bits of one element, at least 1. Elements whose number of bits is not a
    /// multiple of 8 are packed.
    pub bits: u16,
    /// Whether the most significant byte comes first.
    pub big_endian: bool,
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.big_endian { ", big-endian" } else { "" };
        write!(f, "{} of {} bits{order}", self.name, self.bits)
    }
}

/// A name and its properties, which are known before any of its bytes are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The space in which the path is unique.
    pub space: Space,
    /// The path of nested keys.
    pub path: Path,
    /// The kind: tensor, bytes or plain value.
    pub kind: NameKind,
    /// The type of an element. For bytes and plain values it has 8 bits.
    pub element: ElementType,
    /// The size of each dimension, at most 64 of them. Empty for a scalar, for bytes and for plain
    /// values.
    pub shape: Vec<u64>,
    /// Bits with a meaning that the trainer's side defines. They are stored unchanged.
    pub flags: u32,
}

impl Name {
    /// Returns the number of elements, or `None` when it overflows.
    pub fn elements(&self) -> Option<u64> {
        volume(&self.shape)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.space {
            Space::Shared => self.path.fmt(f),
            Space::Rank(rank) => write!(f, "rank {rank}: {}", self.path),
        }
    }
}

/// Returns the product of `sizes`, or `None` when it overflows. A size of 0 gives 0 without
/// overflow.
pub(crate) fn volume(sizes: &[u64]) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes.iter().try_fold(1u64, |product, size| product.checked_mul(*size))
}

/// One number for each dimension. Up to two are stored without an allocation: a step may have
/// millions of boxes, and most tensors have at most two dimensions.
pub type Dims = SmallVec<[u64; 2]>;

/// The part of a named tensor that a region holds. Elements lie in the extent in row-major order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// The whole tensor, or the whole content of another name.
    Whole,
    /// A box: in each dimension, `size` elements from `start` on. An empty box is allowed.
    Box {
        /// The first index of each dimension.
        start: Dims,
        /// The number of elements in each dimension.
        size: Dims,
    },
    /// A form of a later release. The rest of the table can still be read.
    Unknown {
        /// The number of the form: 2 flat, 3 index set, 4 rows, or one that is not reserved yet.
        number: u8,
        /// The content of the form, at most 1 MiB.
        payload: Vec<u8>,
    },
}

impl Form {
    /// Returns the box with `size` elements from `start` on in each dimension.
    pub fn new_box(start: &[u64], size: &[u64]) -> Self {
        Self::Box { start: Dims::from_slice(start), size: Dims::from_slice(size) }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Box { start, size } => write!(f, "box of {size:?} at {start:?}"),
            Self::Unknown { number: 2, .. } => f.write_str("flat (form 2)"),
            Self::Unknown { number: 3, .. } => f.write_str("index set (form 3)"),
            Self::Unknown { number: 4, .. } => f.write_str("rows (form 4)"),
            Self::Unknown { number, .. } => write!(f, "form {number}"),
        }
    }
}

/// A part of a name, and the extent that holds it. Several regions may refer to one extent (tied
/// weights).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// The row of the name.
    pub name: u32,
    /// The part of the name.
    pub form: Form,
    /// The row of the extent.
    pub extent: u32,
}

/// A range of bytes of a shard with one content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The save that holds the content: 0 for this save. Other numbers are reserved for content
    /// taken from older saves.
    pub source: u32,
    /// The number of the shard. The table of a data shard refers to its own shard as 0.
    pub shard: u32,
    /// The offset in the shard in bytes, a multiple of 64.
    pub offset_bytes: u64,
    /// The length in bytes.
    pub len_bytes: u64,
    /// The BLAKE3 hash of the bytes. Either all extents of a table have one, or none has.
    pub hash: Option<[u8; 32]>,
}

impl Extent {
    /// Returns the key by which extents are sorted.
    pub(crate) fn place(&self) -> (u32, u32, u64, u64) {
        (self.source, self.shard, self.offset_bytes, self.len_bytes)
    }
}

/// A valid table: sorted, unique, and with every row number in range.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    names: Vec<Name>,
    regions: Vec<Region>,
    extents: Vec<Extent>,
}

impl Table {
    /// Returns the names, sorted by space and path.
    pub fn names(&self) -> &[Name] {
        &self.names
    }

    /// Returns the regions, sorted by name and form.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Returns the extents, sorted by source, shard and offset.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Returns the row of a name, or `None` if there is no such name.
    pub fn find(&self, space: Space, path: &Path) -> Option<u32> {
        let row = self.names.binary_search_by(|name| (name.space, &name.path).cmp(&(space, path)));
        row.ok().map(|row| row as u32)
    }

    /// Returns the regions of the name in row `name_row`, which are none when there is no such row.
    pub fn regions_of(&self, name_row: u32) -> &[Region] {
        self.regions.get(self.region_rows(name_row)).unwrap_or_default()
    }

    fn region_rows(&self, name_row: u32) -> Range<usize> {
        let start = self.regions.partition_point(|region| region.name < name_row);
        let rest = self.regions.get(start..).unwrap_or_default();
        start..start + rest.partition_point(|region| region.name == name_row)
    }

    /// Returns whether the extents have hashes.
    pub fn has_hashes(&self) -> bool {
        self.extents.first().is_some_and(|extent| extent.hash.is_some())
    }

    /// Returns the table without the hashes of its extents, as an index stores it.
    pub fn without_hashes(mut self) -> Self {
        self.extents.iter_mut().for_each(|extent| extent.hash = None);
        self
    }

    /// Returns the table with a hash for each extent, in the order of the extents. Returns an error
    /// when there are more or fewer hashes than extents.
    pub fn with_hashes(mut self, hashes: &[[u8; 32]]) -> Result<Self, TableError> {
        if hashes.len() != self.extents.len() {
            let (row, rows) = (hashes.len() as u32, self.extents.len());
            return Err(TableError::Row { section: Section::Extents, row, rows });
        }
        for (extent, hash) in self.extents.iter_mut().zip(hashes) {
            extent.hash = Some(*hash);
        }
        Ok(self)
    }

    /// Returns the end of the last extent of this save in `shard`, which is the smallest possible
    /// length of the shard's data.
    pub fn data_end_bytes(&self, shard: u32) -> u64 {
        let end =
            self.extents.partition_point(|extent| (extent.source, extent.shard) <= (0, shard));
        let last = end.checked_sub(1).and_then(|row| self.extents.get(row));
        let last = last.filter(|extent| (extent.source, extent.shard) == (0, shard));
        last.map_or(0, |extent| extent.offset_bytes + extent.len_bytes)
    }
}
