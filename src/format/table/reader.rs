//! Reads single names of a table: the footer and the directory once, then only the blocks that are
//! needed.
//!
//! The reader keeps the directory (at most 4 MiB) in memory, but no blocks: for many names of one
//! table, [`TableReader::read_all`] is faster. Each block is verified before its rows are used, and
//! the rows of a found name are checked against each other. A contradiction between rows of other
//! names is detected only when those names are read.

use std::io;
use std::ops::Range;

use super::blocks::{decode_extents, decode_names, decode_regions};
use super::columns::{Decoded, require};
use super::error::{Section, TableError, TablePart};
use super::layout::{Block, Directory, FOOTER_BYTES, Footer, malformed, table_range};
use super::rules::{check_extent, check_name, check_region};
use super::search::{ExtentCopy, SearchError, search_regions};
use super::{Extent, Form, Name, Path, Region, Space, Table};

/// A source of bytes that can be read at any offset.
pub trait ReadAt {
    /// Returns the `len_bytes` bytes from `offset_bytes` on, or an error if there are fewer.
    fn read_at(&self, offset_bytes: u64, len_bytes: usize) -> io::Result<Vec<u8>>;
}

impl ReadAt for [u8] {
    fn read_at(&self, offset_bytes: u64, len_bytes: usize) -> io::Result<Vec<u8>> {
        let range = || {
            let start = usize::try_from(offset_bytes).ok()?;
            self.get(start..start.checked_add(len_bytes)?)
        };
        range().map(<[u8]>::to_vec).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl<R: ReadAt + ?Sized> ReadAt for &R {
    fn read_at(&self, offset_bytes: u64, len_bytes: usize) -> io::Result<Vec<u8>> {
        (**self).read_at(offset_bytes, len_bytes)
    }
}

/// A reader of the table at the end of a shard, block by block.
#[derive(Debug)]
pub struct TableReader<R> {
    source: R,
    /// The range of the table in the shard.
    range: Range<u64>,
    footer: Footer,
    directory: Directory,
}

/// A name with its regions and their extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundName {
    /// The row of the name.
    pub row: u32,
    /// The name.
    pub name: Name,
    /// The regions of the name.
    pub regions: Vec<Region>,
    /// The extents of the regions with their rows, in ascending order.
    pub extents: Vec<(u32, Extent)>,
}

impl FoundName {
    /// Returns the extent in row `row` of the table, if a region of this name refers to it.
    pub fn extent(&self, row: u32) -> Option<&Extent> {
        let at = self.extents.binary_search_by_key(&row, |(row, _)| *row).ok()?;
        self.extents.get(at).map(|(_, extent)| extent)
    }

    /// Returns which bytes of which extents to copy to fill the part `wanted` of this name, with
    /// the same result as [`search`](super::search()).
    pub fn search(&self, wanted: &Form) -> Result<Vec<ExtentCopy>, SearchError> {
        let extent_bytes = |row| self.extent(row).map(|extent| extent.len_bytes);
        search_regions(&self.name, &self.regions, wanted, extent_bytes)
    }
}

fn read<R: ReadAt>(
    source: &R,
    part: TablePart,
    offset_bytes: u64,
    len_bytes: usize,
) -> Result<Vec<u8>, TableError> {
    let bytes = source
        .read_at(offset_bytes, len_bytes)
        .map_err(|error| TableError::Read { part, why: error.to_string() })?;
    if bytes.len() != len_bytes {
        let (expected_bytes, found_bytes) = (len_bytes as u64, bytes.len() as u64);
        return Err(TableError::Length { part, expected_bytes, found_bytes });
    }
    Ok(bytes)
}

/// Returns the number of the block that contains row `row`.
fn block_of_row<F>(blocks: &[Block<F>], row: u32) -> Option<usize> {
    blocks.partition_point(|block| block.first_row <= row as usize).checked_sub(1)
}

impl<R: ReadAt> TableReader<R> {
    /// Reads the footer and the directory of the table at the end of a shard of `shard_len_bytes`.
    pub fn open(source: R, shard_len_bytes: u64) -> Result<Self, TableError> {
        let footer_start =
            shard_len_bytes.checked_sub(FOOTER_BYTES as u64).ok_or(TableError::Length {
                part: TablePart::Footer,
                expected_bytes: FOOTER_BYTES as u64,
                found_bytes: shard_len_bytes,
            })?;
        let bytes = read(&source, TablePart::Footer, footer_start, FOOTER_BYTES)?;
        let range = table_range(shard_len_bytes, &bytes)?;
        let footer = Footer::parse(&bytes)?;
        let start = range.start + footer.directory_range().start;
        let bytes = read(&source, TablePart::Directory, start, footer.directory_bytes as usize)?;
        let directory = Directory::parse(&footer, &bytes)?;
        Ok(Self { source, range, footer, directory })
    }

    /// Returns the range of the table in the shard, including the footer.
    pub fn table_range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Returns the number of names.
    pub fn names_len(&self) -> u32 {
        self.footer.names
    }

    /// Returns the number of regions.
    pub fn regions_len(&self) -> u32 {
        self.footer.regions
    }

    /// Returns the number of extents.
    pub fn extents_len(&self) -> u32 {
        self.footer.extents
    }

    /// Returns whether the extents have hashes.
    pub fn has_hashes(&self) -> bool {
        self.footer.has_hashes
    }

    /// Reads the whole table.
    pub fn read_all(&self) -> Result<Table, TableError> {
        let part = TablePart::Table;
        let len = usize::try_from(self.footer.table_bytes).map_err(|_| TableError::TooLong {
            part,
            bytes: self.footer.table_bytes,
            limit_bytes: usize::MAX as u64,
        })?;
        Table::parse(&read(&self.source, part, self.range.start, len)?)
    }

    /// Reads one block, checks it and decodes its rows.
    fn rows<T, F>(
        &self,
        section: Section,
        blocks: &[Block<F>],
        number: usize,
        decode: impl Fn(&[u8], usize, &mut Vec<T>) -> Decoded<()>,
    ) -> Result<Vec<T>, TableError> {
        let Some(block) = blocks.get(number) else { return Ok(Vec::new()) };
        let part = TablePart::Block(section, number);
        let start = self.range.start + block.offset_bytes;
        let bytes = read(&self.source, part, start, block.len_bytes)?;
        block.verify(part, &bytes)?;
        let mut rows = Vec::new();
        decode(&bytes, block.rows, &mut rows).map_err(malformed(section, number))?;
        Ok(rows)
    }

    /// Reads block `number` of the names. Returns the row of its first name, and its names. After
    /// the last block, returns the number of all names, and no names.
    pub fn name_block(&self, number: usize) -> Result<(u32, Vec<Name>), TableError> {
        let blocks = &self.directory.names;
        let names = self.rows(Section::Names, blocks, number, decode_names)?;
        for name in &names {
            check_name(name).map_err(contradiction)?;
        }
        let fits = || {
            let place = |name: &Name| (name.space, name.path.clone());
            let first = blocks.get(number).map(|block| &block.first);
            require(
                names.first().map(place).as_ref() == first,
                "it begins with another name than the directory says",
            )?;
            let next = blocks.get(number + 1).map(|block| &block.first);
            let is_before = next.is_none_or(|next| names.last().map(place).as_ref() < Some(next));
            require(is_before, "names are not in order")
        };
        fits().map_err(malformed(Section::Names, number))?;
        let first_row =
            blocks.get(number).map_or(self.footer.names, |block| block.first_row as u32);
        Ok((first_row, names))
    }

    /// Returns an iterator over the blocks of names, each with the row of its first name. At most
    /// one block of names is in memory.
    pub fn name_blocks(&self) -> impl Iterator<Item = Result<(u32, Vec<Name>), TableError>> {
        (0..self.directory.names.len()).map(|number| self.name_block(number))
    }

    /// Reads and returns the regions of the name in row `name_row`.
    pub fn regions_of(&self, name_row: u32) -> Result<Vec<Region>, TableError> {
        let blocks = &self.directory.regions;
        let first = blocks.partition_point(|block| block.first.1 < name_row);
        let mut regions: Vec<Region> = Vec::new();
        for (number, block) in blocks.iter().enumerate().skip(first) {
            if block.first.0 > name_row {
                break;
            }
            let rows = self.rows(Section::Regions, blocks, number, decode_regions)?;
            let fits = |row: Option<&Region>, name| row.map(|region| region.name) == Some(name);
            let is_right = fits(rows.first(), block.first.0) && fits(rows.last(), block.first.1);
            let mut own = rows.into_iter().filter(|region| region.name == name_row).peekable();
            let in_order = match (regions.last(), own.peek()) {
                (Some(before), Some(next)) => before.form < next.form,
                _ => true,
            };
            require(is_right, "it has regions of other names than the directory says")
                .and_then(|()| require(in_order, "regions are not in order"))
                .map_err(malformed(Section::Regions, number))?;
            regions.extend(own);
        }
        Ok(regions)
    }

    /// Reads the extents in `rows`. Returns them in the order of their rows, each once.
    pub fn extents(&self, rows: &[u32]) -> Result<Vec<(u32, Extent)>, TableError> {
        let mut wanted = rows.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        let blocks = &self.directory.extents;
        let has_hashes = self.footer.has_hashes;
        let mut out = Vec::with_capacity(wanted.len());
        for same in wanted.chunk_by(|a, b| block_of_row(blocks, *a) == block_of_row(blocks, *b)) {
            let Some(number) = same.first().and_then(|row| block_of_row(blocks, *row)) else {
                break;
            };
            let decode = |block: &[u8], rows: usize, out: &mut Vec<Extent>| {
                decode_extents(block, rows, has_hashes, out)
            };
            let extents = self.rows(Section::Extents, blocks, number, decode)?;
            let mut before = None;
            for extent in &extents {
                check_extent(before, extent).map_err(contradiction)?;
                before = Some(extent);
            }
            let first_row = blocks.get(number).map_or(0, |block| block.first_row);
            for row in same {
                let extent = (*row as usize).checked_sub(first_row).and_then(|at| extents.get(at));
                out.push((*row, *extent.ok_or_else(|| self.no_extent(*row))?));
            }
        }
        match wanted.get(out.len()) {
            Some(row) => Err(self.no_extent(*row)),
            None => Ok(out),
        }
    }

    fn no_extent(&self, row: u32) -> TableError {
        let rows = self.footer.extents as usize;
        TableError::Row { section: Section::Extents, row, rows }
    }

    /// Finds a name, and reads its regions and their extents. Returns `None` if there is no such
    /// name.
    pub fn find(&self, space: Space, path: &Path) -> Result<Option<FoundName>, TableError> {
        let blocks = &self.directory.names;
        let after = |block: &Block<(Space, Path)>| (block.first.0, &block.first.1) <= (space, path);
        let Some(number) = blocks.partition_point(after).checked_sub(1) else { return Ok(None) };
        let (first_row, names) = self.name_block(number)?;
        let at = names.binary_search_by(|name| (name.space, &name.path).cmp(&(space, path)));
        let Some((at, name)) = at.ok().and_then(|at| Some((at, names.into_iter().nth(at)?))) else {
            return Ok(None);
        };
        let row = first_row + at as u32;
        let regions = self.regions_of(row)?;
        let rows: Vec<u32> = regions.iter().map(|region| region.extent).collect();
        let extents = self.extents(&rows).map_err(contradiction)?;
        let found = FoundName { row, name, regions, extents };
        for region in &found.regions {
            let extent = found.extent(region.extent).ok_or_else(|| self.no_extent(region.extent));
            check_region(&found.name, &region.form, extent?).map_err(contradiction)?;
        }
        Ok(Some(found))
    }
}

/// Returns the error for rows that break a rule. Errors of damage and of the source are returned
/// unchanged.
fn contradiction(error: TableError) -> TableError {
    match error.kind() {
        crate::kind::ErrorKind::Invalid => TableError::Contradiction(Box::new(error)),
        _ => error,
    }
}
