//! Encodes a table: blocks, directory, footer.

use super::blocks::{encode_extents, encode_names, encode_regions};
use super::error::{TableError, TablePart};
use super::layout::{Block, Directory, FOOTER_BYTES, Footer, checksum};
use super::limits::{MAX_BLOCK_ROWS, MAX_DIRECTORY_BYTES, MAX_TABLE_BYTES};
use super::{Name, Region, Table};

/// Appends the blocks of `rows` to `out` and returns their directory entries. `encode` takes as
/// many rows as fit into one block, and `first` returns the part of them that the directory keeps.
fn put_section<T, F>(
    out: &mut Vec<u8>,
    rows: &[T],
    encode: impl Fn(&[T]) -> (usize, Vec<u8>),
    first: impl Fn(&[T]) -> Option<F>,
) -> Vec<Block<F>> {
    let (mut blocks, mut first_row) = (Vec::new(), 0);
    while let Some(rest) = rows.get(first_row..).filter(|rest| !rest.is_empty()) {
        let (count, bytes) = encode(rest);
        let Some(first) = rest.get(..count).and_then(&first) else { break };
        blocks.push(Block {
            offset_bytes: out.len() as u64,
            len_bytes: bytes.len(),
            first_row,
            rows: count,
            sum: checksum(&bytes),
            first,
        });
        out.extend(bytes);
        first_row += count;
    }
    blocks
}

fn bounded(part: TablePart, bytes: usize, limit_bytes: u64) -> Result<(), TableError> {
    let bytes = bytes as u64;
    if bytes > limit_bytes {
        return Err(TableError::TooLong { part, bytes, limit_bytes });
    }
    Ok(())
}

impl Table {
    /// Returns the bytes of the table with its footer, exactly as they are at the end of its shard.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TableError> {
        self.to_bytes_in_blocks(MAX_BLOCK_ROWS)
    }

    /// Returns the bytes of the table in blocks of at most `block_rows` rows (1 to 65,536). With
    /// shorter blocks the table takes more space, and a lookup of one name reads less.
    pub fn to_bytes_in_blocks(&self, block_rows: usize) -> Result<Vec<u8>, TableError> {
        let block_rows = block_rows.clamp(1, MAX_BLOCK_ROWS);
        let mut out = Vec::new();
        let names = put_section(
            &mut out,
            &self.names,
            |rows| encode_names(rows, block_rows),
            |rows: &[Name]| rows.first().map(|name| (name.space, name.path.clone())),
        );
        let regions = put_section(
            &mut out,
            &self.regions,
            |rows| encode_regions(rows, block_rows),
            |rows: &[Region]| Some((rows.first()?.name, rows.last()?.name)),
        );
        let extents = put_section(
            &mut out,
            &self.extents,
            |rows| encode_extents(rows, block_rows),
            |_| Some(()),
        );
        let directory = Directory { names, regions, extents }.to_bytes();
        bounded(TablePart::Directory, directory.len(), MAX_DIRECTORY_BYTES as u64)?;
        out.extend(&directory);
        bounded(TablePart::Table, out.len() + FOOTER_BYTES, MAX_TABLE_BYTES)?;
        // In every valid table the numbers of rows are below their limits, so the casts lose
        // nothing.
        let footer = Footer {
            has_hashes: self.has_hashes(),
            directory_bytes: directory.len() as u32,
            table_bytes: (out.len() + FOOTER_BYTES) as u64,
            names: self.names.len() as u32,
            regions: self.regions.len() as u32,
            extents: self.extents.len() as u32,
            directory_sum: checksum(&directory),
        };
        out.extend(footer.to_bytes());
        Ok(out)
    }
}
