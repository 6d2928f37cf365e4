//! The index of a checkpoint that trainers saved: its names, regions and extents, in a shard of its
//! own.

use std::sync::Arc;

use crate::client::{Client, ClientError, MemorySink, ProgressFn, ReadRange};
use crate::format::table::{FOOTER_BYTES, INDEX_SHARD, Table, TableError, TablePart, table_range};
use crate::id::{Job, Step};
use crate::wire::calls::StepView;

/// Maximum length of an index in bytes. It is read as a whole.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The names in a checkpoint, and the locations of their bytes.
#[derive(Debug, Clone)]
pub struct CheckpointIndex {
    /// The step.
    pub step: StepView,
    /// The merged tables. The shard number of an extent counts only the shards whose names begin
    /// with `data/`.
    pub table: Table,
}

impl Client {
    /// Reads and verifies the index of a committed step (`None`: the latest). Returns
    /// [`ClientError::NoIndex`] if no trainer saved the step, and [`ClientError::Index`] if the
    /// index does not parse or is too long.
    pub async fn read_index(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<CheckpointIndex, ClientError> {
        let found = self.fetch_step(job, step).await?;
        let (job, step) = (found.step.job.clone(), found.step.step);
        let roots = found.shards.iter().map(|(root, _)| root);
        let index = roots.into_iter().find(|root| root.name.as_str().starts_with(INDEX_SHARD));
        let Some(root) = index else { return Err(ClientError::NoIndex { job, step }) };
        let len_bytes = root.len_bytes;
        let failed =
            |source| ClientError::Index { job: job.clone(), step, source: Box::new(source) };
        if len_bytes > MAX_INDEX_BYTES {
            return Err(failed(TableError::TooLong {
                part: TablePart::Table,
                bytes: len_bytes,
                limit_bytes: MAX_INDEX_BYTES,
            }));
        }
        let memory = Arc::new(MemorySink::new(0..len_bytes));
        let range =
            ReadRange { shard: root.name.clone(), range: 0..len_bytes, sink: memory.clone() };
        let read = self.read_ranges(&job, Some(step), &[range], progress).await;
        match read {
            // A shard that is missing now means that another save replaced the step: its index has
            // another name.
            Err(ClientError::NoShard { .. }) => return Err(ClientError::Removed { job, step }),
            read => read?,
        };
        let bytes = memory.take_bytes();
        let footer = bytes.len().saturating_sub(FOOTER_BYTES);
        let range = table_range(len_bytes, bytes.get(footer..).unwrap_or_default());
        let range = range.map_err(failed)?;
        let table = bytes.get(range.start as usize..range.end as usize).unwrap_or_default();
        let table = Table::parse(table).map_err(failed)?;
        Ok(CheckpointIndex { step: found.step, table })
    }
}
