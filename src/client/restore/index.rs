//! The index of a checkpoint that trainers saved: its names, regions and extents, in a shard of its own.

use std::sync::Arc;

use crate::client::{Client, ClientError, MemorySink, ProgressFn, ReadRange};
use crate::format::table::{FOOTER_BYTES, INDEX_SHARD, Part, Table, TableError, table_range};
use crate::id::{Job, Step};
use crate::wire::calls::StepView;

/// The longest index that is read at once.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The names in a checkpoint, and where their bytes are.
#[derive(Debug, Clone)]
pub struct Index {
    /// The step.
    pub step: StepView,
    /// Its tables, merged. An extent's shard counts the shards whose names begin with `data/`.
    pub table: Table,
}

impl Client {
    /// Reads and verifies the index of a committed step (`None`: the latest). Fails with [`ClientError::NoIndex`] when the step was not
    /// saved by a trainer.
    pub async fn read_index(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<Index, ClientError> {
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
                part: Part::Table,
                bytes: len_bytes,
                limit_bytes: MAX_INDEX_BYTES,
            }));
        }
        let memory = Arc::new(MemorySink::new(0..len_bytes));
        let range = ReadRange { shard: root.name.clone(), range: 0..len_bytes, to: memory.clone() };
        let read = self.read_ranges(&job, Some(step), &[range], progress).await;
        match read {
            // Another save of the step has an index of another name.
            Err(ClientError::NoShard { .. }) => return Err(ClientError::Removed { job, step }),
            read => read?,
        };
        let bytes = memory.take();
        let footer = bytes.len().saturating_sub(FOOTER_BYTES);
        let range = table_range(len_bytes, bytes.get(footer..).unwrap_or_default());
        let range = range.map_err(failed)?;
        let table = bytes.get(range.start as usize..range.end as usize).unwrap_or_default();
        let table = Table::parse(table).map_err(failed)?;
        Ok(Index { step: found.step, table })
    }
}
