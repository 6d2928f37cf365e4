//! The directory of a table, which says where each block is and what it begins with, and the
//! footer, which says where the directory is.
//!
//! ```text
//! table     blocks of names | blocks of regions | blocks of extents | directory | footer
//! footer    0   4   magic "rRdX"
//!           4   4   version, 1
//!           8   4   flags; bit 0: extents have hashes
//!           12  4   D, length of the directory
//!           16  8   T, length of the table, footer included
//!           24  12  number of names, regions, extents, 4 bytes each
//!           36  16  first 16 bytes of BLAKE3 over the directory
//!           52  12  first 12 bytes of BLAKE3 over the 52 before
//! ```
//!
//! The footer's checksum is compared before its version is read, and it covers the same bytes in
//! all versions, so damage is never taken for a later version.

use std::ops::Range;

use super::Space;
use super::blocks::{space_number, space_of};
use super::columns::{Column, Decoded, Malformed, put_number, require};
use super::error::{Section, TableError, TablePart};
use super::limits::{
    MAX_BLOCK_ROWS, MAX_DIRECTORY_BYTES, MAX_EXTENTS, MAX_NAMES, MAX_PATH_BYTES, MAX_REGIONS,
    MAX_TABLE_BLOCK_BYTES, MAX_TABLE_BYTES,
};
use super::path::Path;

/// The length of the footer in bytes. The footer is the end of every shard that has a table.
pub const FOOTER_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"rRdX";
const FOOTER_VERSION: u32 = 1;
const HAS_HASHES: u32 = 1;
/// The number of bytes that the footer's own checksum covers.
const SEALED_BYTES: usize = 52;
pub(super) const CHECKSUM_BYTES: usize = 16;

/// Returns the first 16 bytes of the BLAKE3 hash.
pub(super) fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut out = [0; CHECKSUM_BYTES];
    out.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES]);
    out
}

/// The variable fields of the footer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Footer {
    pub has_hashes: bool,
    pub directory_bytes: u32,
    pub table_bytes: u64,
    pub names: u32,
    pub regions: u32,
    pub extents: u32,
    pub directory_sum: [u8; CHECKSUM_BYTES],
}

impl Footer {
    pub fn to_bytes(&self) -> [u8; FOOTER_BYTES] {
        let flags = if self.has_hashes { HAS_HASHES } else { 0 };
        let mut bytes = Vec::with_capacity(FOOTER_BYTES);
        bytes.extend(MAGIC);
        for number in [FOOTER_VERSION, flags, self.directory_bytes] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.table_bytes.to_le_bytes());
        for number in [self.names, self.regions, self.extents] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.directory_sum);
        let mut out = [0; FOOTER_BYTES];
        let (sealed, sum) = out.split_at_mut(SEALED_BYTES);
        sealed.copy_from_slice(&bytes);
        sum.copy_from_slice(&blake3::hash(&bytes).as_bytes()[..FOOTER_BYTES - SEALED_BYTES]);
        out
    }

    /// Parses the footer: magic, checksum, version, then each length against its limit.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        let part = TablePart::Footer;
        let whole: &[u8; FOOTER_BYTES] = bytes.try_into().map_err(|_| TableError::Length {
            part,
            expected_bytes: FOOTER_BYTES as u64,
            found_bytes: bytes.len() as u64,
        })?;
        let (sealed, sum) = whole.split_at(SEALED_BYTES);
        let malformed = |Malformed(why)| TableError::Malformed { part, why };
        let mut fields = Column(sealed);
        if fields.array().map_err(malformed)? != MAGIC {
            return Err(TableError::Magic);
        }
        if !blake3::hash(sealed).as_bytes().starts_with(sum) {
            return Err(TableError::Checksum { part });
        }
        let mut number = || fields.array().map(u32::from_le_bytes).map_err(malformed);
        let (found, flags, directory_bytes) = (number()?, number()?, number()?);
        if found == 0 {
            return Err(malformed(Malformed("there is no version 0")));
        }
        if found > FOOTER_VERSION {
            return Err(TableError::Version { found, newest: FOOTER_VERSION });
        }
        if flags & !HAS_HASHES != 0 {
            return Err(TableError::Flags { flags: flags & !HAS_HASHES });
        }
        let table_bytes = fields.array().map(u64::from_le_bytes).map_err(malformed)?;
        let mut number = || fields.array().map(u32::from_le_bytes).map_err(malformed);
        let (names, regions, extents) = (number()?, number()?, number()?);
        let directory_sum = fields.array().map_err(malformed)?;
        let limits = [
            (u64::from(directory_bytes), MAX_DIRECTORY_BYTES as u64),
            (table_bytes, MAX_TABLE_BYTES),
            (names.into(), MAX_NAMES as u64),
            (regions.into(), MAX_REGIONS as u64),
            (extents.into(), MAX_EXTENTS as u64),
        ];
        if limits.iter().any(|(number, limit)| number > limit)
            || u64::from(directory_bytes) + FOOTER_BYTES as u64 > table_bytes
        {
            return Err(malformed(Malformed("a length is over its limit")));
        }
        let has_hashes = flags & HAS_HASHES != 0;
        Ok(Self {
            has_hashes,
            directory_bytes,
            table_bytes,
            names,
            regions,
            extents,
            directory_sum,
        })
    }

    /// Returns the range of the directory in the table.
    pub fn directory_range(&self) -> Range<u64> {
        let end = self.table_bytes - FOOTER_BYTES as u64;
        end - u64::from(self.directory_bytes)..end
    }
}

/// Returns the range of the table in a shard of `shard_len_bytes`, including the footer. `footer`
/// is the last [`FOOTER_BYTES`] of the shard.
pub fn table_range(shard_len_bytes: u64, footer: &[u8]) -> Result<Range<u64>, TableError> {
    let footer = Footer::parse(footer)?;
    let start = shard_len_bytes.checked_sub(footer.table_bytes).ok_or(TableError::Length {
        part: TablePart::Table,
        expected_bytes: footer.table_bytes,
        found_bytes: shard_len_bytes,
    })?;
    Ok(start..shard_len_bytes)
}

/// A block as described by the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block<F> {
    /// The offset of the block in the table.
    pub offset_bytes: u64,
    pub len_bytes: usize,
    pub first_row: usize,
    pub rows: usize,
    pub sum: [u8; CHECKSUM_BYTES],
    /// The first key of the block.
    pub first: F,
}

/// The first and the last name of a block of regions.
pub(super) type NameRows = (u32, u32);

/// All blocks, in the order of their rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Directory {
    pub names: Vec<Block<(Space, Path)>>,
    pub regions: Vec<Block<NameRows>>,
    pub extents: Vec<Block<()>>,
}

fn put_blocks<F>(
    out: &mut Vec<u8>,
    blocks: &[Block<F>],
    mut put_first: impl FnMut(&mut Vec<u8>, &F),
) {
    put_number(out, blocks.len() as u64);
    for block in blocks {
        put_number(out, block.rows as u64);
        put_number(out, block.len_bytes as u64);
        put_first(out, &block.first);
        out.extend(block.sum);
    }
}

/// Reads the directory entries of one section, whose blocks begin at `offset_bytes` and have `rows`
/// rows in all. Returns the entries and the offset of the section's end.
fn read_blocks<F>(
    column: &mut Column<'_>,
    mut offset_bytes: u64,
    rows: u32,
    mut read_first: impl FnMut(&mut Column<'_>) -> Decoded<F>,
) -> Decoded<(Vec<Block<F>>, u64)> {
    let count = column.number_to(column.0.len() / (2 + CHECKSUM_BYTES))?;
    let (mut blocks, mut first_row) = (Vec::with_capacity(count), 0);
    for _ in 0..count {
        let rows = column.number_to(MAX_BLOCK_ROWS)?;
        require(rows > 0, "a block has no rows")?;
        let len_bytes = column.number_to(MAX_TABLE_BLOCK_BYTES)?;
        let first = read_first(column)?;
        let sum = column.array()?;
        blocks.push(Block { offset_bytes, len_bytes, first_row, rows, sum, first });
        offset_bytes += len_bytes as u64;
        first_row += rows;
    }
    require(
        first_row == rows as usize,
        "the blocks have another number of rows than the footer says",
    )?;
    Ok((blocks, offset_bytes))
}

fn read_first_name(column: &mut Column<'_>) -> Decoded<(Space, Path)> {
    let space = space_of(column.number()?)?;
    let len = column.number_to(MAX_PATH_BYTES)?;
    let path = Path::from_bytes(column.bytes(len)?);
    Ok((space, path.map_err(|_| Malformed("a path does not decode"))?))
}

impl Directory {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_blocks(&mut out, &self.names, |out, (space, path)| {
            put_number(out, space_number(*space));
            put_number(out, path.as_bytes().len() as u64);
            out.extend(path.as_bytes());
        });
        let mut before = 0;
        put_blocks(&mut out, &self.regions, |out, (first, last)| {
            put_number(out, (first - before).into());
            put_number(out, (last - first).into());
            before = *last;
        });
        put_blocks(&mut out, &self.extents, |_, ()| ());
        out
    }

    /// Parses the directory and checks it: its blocks must fill the table up to the directory, and
    /// have as many rows as the footer states.
    pub fn parse(footer: &Footer, bytes: &[u8]) -> Result<Self, TableError> {
        let part = TablePart::Directory;
        let expected_bytes = u64::from(footer.directory_bytes);
        if bytes.len() as u64 != expected_bytes {
            let found_bytes = bytes.len() as u64;
            return Err(TableError::Length { part, expected_bytes, found_bytes });
        }
        if checksum(bytes) != footer.directory_sum {
            return Err(TableError::Checksum { part });
        }
        Self::decode(footer, bytes).map_err(|Malformed(why)| TableError::Malformed { part, why })
    }

    fn decode(footer: &Footer, bytes: &[u8]) -> Decoded<Self> {
        let mut column = Column(bytes);
        let (names, end) = read_blocks(&mut column, 0, footer.names, read_first_name)?;
        require(names.is_sorted_by(|a, b| a.first < b.first), "names are not in order")?;
        let mut before = 0u32;
        let (regions, end) = read_blocks(&mut column, end, footer.regions, |column| {
            let absent = Malformed("there is no such name");
            let first = before.checked_add(column.number32()?).ok_or(absent)?;
            let last = first.checked_add(column.number32()?).ok_or(absent)?;
            before = last;
            Ok((first, last))
        })?;
        let (extents, end) = read_blocks(&mut column, end, footer.extents, |_| Ok(()))?;
        column.end()?;
        require(end == footer.directory_range().start, "the blocks do not fill the table")?;
        Ok(Self { names, regions, extents })
    }
}

impl<F> Block<F> {
    /// Returns an error unless `bytes` are the bytes of the block.
    pub fn verify(&self, part: TablePart, bytes: &[u8]) -> Result<(), TableError> {
        if bytes.len() != self.len_bytes {
            return Err(TableError::Length {
                part,
                expected_bytes: self.len_bytes as u64,
                found_bytes: bytes.len() as u64,
            });
        }
        if checksum(bytes) != self.sum {
            return Err(TableError::Checksum { part });
        }
        Ok(())
    }
}

/// Returns the error for a block that does not decode.
pub(super) fn malformed(section: Section, number: usize) -> impl Fn(Malformed) -> TableError {
    move |Malformed(why)| TableError::Malformed { part: TablePart::Block(section, number), why }
}
