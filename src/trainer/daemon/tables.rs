//! The tables at the end of a step's data shards, which are read without the rest of the shards.

use std::ops::Range;
use std::sync::Arc;

use crate::client::{ClientError, MemorySink, ReadRange};
use crate::format::table::{FOOTER_BYTES, MergeInput, Table, TableError, TablePart, table_range};
use crate::id::{Job, ShardName, Step};
use crate::trainer::load::MAX_TABLE_BYTES;

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
/// of the shards.
pub async fn read_tables<F>(
    shards: &[(ShardName, u64)],
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
    let tables = read_all(shards, ranges.map_err(TablesError::Table)?, &read).await?;
    let tables: Result<Vec<Table>, TableError> =
        tables.iter().map(|bytes| Table::parse(bytes)).collect();
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

/// Merges the tables of all data shards of a step, given in the order of their numbers.
pub fn merge_tables(tables: &[Table]) -> Result<Table, TableError> {
    let inputs: Vec<MergeInput<'_>> = (0..)
        .zip(tables)
        .map(|(shard, table)| MergeInput { table, shard, base_offset_bytes: 0 })
        .collect();
    Table::merge(&inputs)
}
