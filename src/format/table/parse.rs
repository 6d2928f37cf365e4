//! Parses a whole table. Every length is checked before it is used, and every row takes bytes of
//! the input, so memory is bounded by a small multiple of the input (docs/format.md).

use super::Table;
use super::blocks::{
    LEAST_EXTENT_BYTES, LEAST_NAME_BYTES, LEAST_REGION_BYTES, decode_extents, decode_names,
    decode_regions,
};
use super::columns::{Decoded, Malformed};
use super::error::{Section, TableError, TablePart};
use super::layout::{Block, Directory, FOOTER_BYTES, Footer, malformed};

/// Decodes all blocks of a section into one list of rows.
fn read_section<T, F>(
    table: &[u8],
    section: Section,
    blocks: &[Block<F>],
    least_row_bytes: usize,
    decode: impl Fn(&[u8], usize, &mut Vec<T>) -> Decoded<()>,
) -> Result<Vec<T>, TableError> {
    let bytes: usize = blocks.iter().map(|block| block.len_bytes).sum();
    let rows: usize = blocks.iter().map(|block| block.rows).sum();
    if rows > bytes / least_row_bytes {
        return Err(malformed(section, 0)(Malformed("its blocks have fewer bytes than rows")));
    }
    let mut out = Vec::with_capacity(rows);
    for (number, block) in blocks.iter().enumerate() {
        let part = TablePart::Block(section, number);
        let start = usize::try_from(block.offset_bytes).unwrap_or(usize::MAX);
        let bytes = table.get(start..start.saturating_add(block.len_bytes)).unwrap_or_default();
        block.verify(part, bytes)?;
        decode(bytes, block.rows, &mut out).map_err(malformed(section, number))?;
    }
    Ok(out)
}

impl Table {
    /// Parses a whole table. `bytes` must be exactly the table with its footer
    /// ([`table_range`](super::table_range) returns its range in a shard).
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        let found_bytes = bytes.len() as u64;
        let length =
            |part, expected_bytes| TableError::Length { part, expected_bytes, found_bytes };
        let (rest, footer) = bytes
            .split_last_chunk::<FOOTER_BYTES>()
            .ok_or(length(TablePart::Footer, FOOTER_BYTES as u64))?;
        let footer = Footer::parse(footer)?;
        if footer.table_bytes != found_bytes {
            return Err(length(TablePart::Table, footer.table_bytes));
        }
        let start = footer.directory_range().start as usize;
        let directory = Directory::parse(&footer, rest.get(start..).unwrap_or_default())?;
        let names =
            read_section(rest, Section::Names, &directory.names, LEAST_NAME_BYTES, decode_names)?;
        let regions = read_section(
            rest,
            Section::Regions,
            &directory.regions,
            LEAST_REGION_BYTES,
            decode_regions,
        )?;
        let extents = read_section(
            rest,
            Section::Extents,
            &directory.extents,
            LEAST_EXTENT_BYTES,
            |block, rows, out| decode_extents(block, rows, footer.has_hashes, out),
        )?;
        for (number, block) in directory.names.iter().enumerate() {
            let first = names.get(block.first_row);
            if first.is_none_or(|name| (name.space, &name.path) != (block.first.0, &block.first.1))
            {
                return Err(malformed(Section::Names, number)(Malformed(
                    "it begins with another name than the directory says",
                )));
            }
        }
        for (number, block) in directory.regions.iter().enumerate() {
            let name = |row: usize| regions.get(row).map(|region| region.name);
            let ends = (name(block.first_row), name(block.first_row + block.rows - 1));
            if ends != (Some(block.first.0), Some(block.first.1)) {
                return Err(malformed(Section::Regions, number)(Malformed(
                    "it has regions of other names than the directory says",
                )));
            }
        }
        Self::checked(names, regions, extents)
            .map_err(|error| TableError::Contradiction(Box::new(error)))
    }
}
