//! The tables at the end of a step's data shards, which are read without the rest of the shards.

use std::ops::Range;
use std::sync::Arc;

use crate::client::{ClientError, MemorySink, ReadRange};
use crate::format::table::{FOOTER_BYTES, MergeInput, Table, TableError, TablePart, table_range};
use crate::id::{Job, ShardName, Step};
use crate::trainer::load::MAX_TABLE_BYTES;

/// Maximum total length of the tables of a step that are merged into its index, in bytes. While they
/// are merged, the daemon has about three times as much in memory.
pub const MAX_TABLES_BYTES: u64 = 1 << 30;

/// The reason why the tables cannot be read.
pub enum TablesError {
    /// The shards cannot be read.
    Read(ClientError),
    /// A table does not parse, or is too long.
    Table(TableError),
}

impl TablesError {
    /// Returns the error as one of a client that works on a step.
    pub fn of_step(self, job: &Job, step: Step) -> ClientError {
        match self {
            TablesError::Read(error) => error,
            TablesError::Table(error) => {
                ClientError::Index { job: job.clone(), step, source: Box::new(error) }
            }
        }
    }
}

/// Reads the tables of data shards, whose names and lengths in bytes are given. `read` reads ranges
/// of the shards. Fails before it reads them if they have more than `max_bytes` together.
pub async fn read_tables<F>(
    shards: &[(ShardName, u64)],
    max_bytes: u64,
    read: impl Fn(Vec<ReadRange>) -> F,
) -> Result<Vec<Table>, TablesError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let footers = shards.iter().map(|(_, len_bytes)| range_of_footer(*len_bytes)).collect();
    let footers = read_all(shards, footers, &read).await?;
    let ranges: Result<Vec<_>, TableError> = shards
        .iter()
        .zip(&footers)
        .map(|((_, len_bytes), footer)| range_of_table(*len_bytes, footer))
        .collect();
    let ranges = ranges.map_err(TablesError::Table)?;
    check_total(&ranges, max_bytes).map_err(TablesError::Table)?;
    let tables = read_all(shards, ranges, &read).await?;
    // Each table's bytes are freed as soon as it is parsed.
    let tables: Result<Vec<Table>, TableError> =
        tables.into_iter().map(|bytes| Table::parse(&bytes)).collect();
    tables.map_err(TablesError::Table)
}

/// Reads one range of each shard.
async fn read_all<F>(
    shards: &[(ShardName, u64)],
    wanted: Vec<Range<u64>>,
    read: &impl Fn(Vec<ReadRange>) -> F,
) -> Result<Vec<Vec<u8>>, TablesError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let sinks: Vec<_> =
        wanted.iter().map(|range| Arc::new(MemorySink::new(range.clone()))).collect();
    let ranges = shards.iter().zip(wanted).zip(&sinks).map(|(((shard, _), range), sink)| {
        ReadRange { shard: shard.clone(), range, sink: sink.clone() }
    });
    read(ranges.collect()).await.map_err(TablesError::Read)?;
    Ok(sinks.iter().map(|sink| sink.take_bytes()).collect())
}

/// Returns the range of the footer in a shard of this length. A shard may be too short for one.
pub fn range_of_footer(len_bytes: u64) -> Range<u64> {
    len_bytes.saturating_sub(FOOTER_BYTES as u64)..len_bytes
}

/// Returns the range of the table in a shard of this length. Fails if the table is too long.
pub fn range_of_table(len_bytes: u64, footer: &[u8]) -> Result<Range<u64>, TableError> {
    let range = table_range(len_bytes, footer)?;
    let (part, bytes) = (TablePart::Table, range.end - range.start);
    if bytes > MAX_TABLE_BYTES {
        return Err(TableError::TooLong { part, bytes, limit_bytes: MAX_TABLE_BYTES });
    }
    Ok(range)
}

fn check_total(ranges: &[Range<u64>], limit_bytes: u64) -> Result<(), TableError> {
    let bytes = ranges.iter().fold(0u64, |sum, range| sum.saturating_add(range.end - range.start));
    match bytes <= limit_bytes {
        true => Ok(()),
        false => {
            let part = TablePart::Table;
            Err(TableError::TooLong { part, bytes, limit_bytes })
        }
    }
}

/// Merges the tables of all data shards of a step, given in the order of their numbers.
pub fn merge_tables(tables: &[Table]) -> Result<Table, TableError> {
    let inputs: Vec<MergeInput<'_>> = (0..)
        .zip(tables)
        .map(|(shard, table)| MergeInput { table, shard, base_offset_bytes: 0 })
        .collect();
    Table::merge(&inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_are_too_long_together_are_refused_before_they_are_read() {
        let half = 0..MAX_TABLES_BYTES / 2;
        let check = |ranges: &[Range<u64>]| check_total(ranges, MAX_TABLES_BYTES);
        assert!(check(&[half.clone(), half.clone()]).is_ok());
        let refused = check(&[half.clone(), half, 0..1]).unwrap_err();
        assert!(
            matches!(refused, TableError::TooLong { bytes, .. } if bytes == MAX_TABLES_BYTES + 1)
        );
    }
}
