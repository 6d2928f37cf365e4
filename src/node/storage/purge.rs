//! Purges removed saves, and files written for them too late (docs/semantics.md, 5).

use std::sync::Arc;
use std::time::Duration;

use super::error::StorageError;
use super::fencing::Fencing;
use crate::id::{SaveId, ShardId};
use crate::node::active_saves::ActiveSaveGuard;
use crate::stage::{TracePoint, trace_point};
use crate::store::{RecordScope, Store};
use crate::wire::RemoteError;

/// Maximum number of waits for another purge of the same save, of [`PURGE_WAIT`] each.
const PURGE_WAITS: u32 = 100;
const PURGE_WAIT: Duration = Duration::from_millis(100);
/// Number of shards or stripes listed at a time.
const PAGE: usize = 1024;

impl Fencing {
    /// Removes the files of a save that has a tombstone or a removed-save entry on this node.
    /// Returns their size in bytes. One purge of a save runs at a time: a further caller waits for
    /// it, and fails if the wait is too long.
    ///
    /// # Errors
    /// [`StorageError::PurgeRunning`] if another purge of the save still runs;
    /// [`StorageError::NoTombstone`] if this node has neither its tombstone nor its removed-save
    /// entry.
    pub(in crate::node) async fn purge_save(&self, save: SaveId) -> Result<u64, RemoteError> {
        match self.claim_purge(save).await {
            Some(mark) => self.run_purge(save, mark).await,
            None => Err(StorageError::PurgeRunning { save }.into()),
        }
    }

    /// Returns the guard of the only purge of a save, or `None` if another purge runs for longer than
    /// this waits.
    async fn claim_purge(&self, save: SaveId) -> Option<ActiveSaveGuard> {
        for _ in 0..PURGE_WAITS {
            if let Some(mark) = ActiveSaveGuard::try_claim(&self.purging, save) {
                return Some(mark);
            }
            self.context.clock.sleep(PURGE_WAIT).await;
        }
        ActiveSaveGuard::try_claim(&self.purging, save)
    }

    /// Purges a save in a task of its own, which keeps its place among the purges, and `mark`, if the
    /// caller is cancelled. A purge that has not begun when the node stops does not begin.
    async fn run_purge(&self, save: SaveId, mark: ActiveSaveGuard) -> Result<u64, RemoteError> {
        let (store, workers) = (self.context.store.clone(), self.purge_workers.clone());
        let stop = self.context.tasks.stop_token();
        let task = self.context.tasks.spawn(async move {
            let purge = move || {
                let _mark = mark;
                purge_and_record_removed(&store, save)
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => Err(StorageError::TaskLost { work: "purge" }.into()),
                purged = workers.run(purge) => purged?,
            }
        });
        task.await.map_err(|_| StorageError::TaskLost { work: "purge" })?
    }

    /// Runs `write`, which writes files or records of a save, and returns its result. Then purges the
    /// save if it was removed meanwhile, because the first purge may have run before the write. Both
    /// run in a task of their own: the caller may be cancelled between them.
    ///
    /// # Errors
    /// [`StorageError::SaveRemovedMeanwhile`] if the save was removed; otherwise those of `write`.
    pub(in crate::node) async fn write_unless_removed<T, E>(
        self: &Arc<Self>,
        save: SaveId,
        write: impl FnOnce(&Store) -> Result<T, E> + Send + 'static,
    ) -> Result<T, RemoteError>
    where
        T: Send + 'static,
        E: Into<RemoteError> + Send + 'static,
    {
        let fencing = self.clone();
        let task = self.context.tasks.spawn(async move {
            let written = fencing.context.run_on_store(write).await;
            // A write that failed may have left a file, too.
            fencing.purge_and_refuse_if_removed(save).await?;
            written
        });
        task.await.map_err(|_| StorageError::TaskLost { work: "write" })?
    }

    /// Checks that the save was not removed while something was written for it. If it was, purges
    /// it again, because the first purge may have run before the write.
    ///
    /// # Errors
    /// [`StorageError::SaveRemovedMeanwhile`] if the save was removed.
    pub(in crate::node) async fn purge_and_refuse_if_removed(
        &self,
        save: SaveId,
    ) -> Result<(), RemoteError> {
        if self.is_removed_save(save).await? {
            // A purge that runs may have passed the place of the write. So this waits until it has
            // ended, however long it takes.
            let mark = loop {
                if let Some(mark) = self.claim_purge(save).await {
                    break mark;
                }
            };
            self.run_purge(save, mark).await?;
            return Err(StorageError::SaveRemovedMeanwhile { save }.into());
        }
        Ok(())
    }
}

/// Removes all files of a save and adds it to the removed-save set. Returns the size of the removed
/// files in bytes.
fn purge_and_record_removed(store: &Store, save: SaveId) -> Result<u64, RemoteError> {
    // The tombstone, or the removed-save entry that replaced it, must be durable on this node: it
    // is the evidence.
    let has_tombstone = store.get_tombstone(save)?.is_some();
    if !has_tombstone && !store.is_recorded_removed(save)? {
        return Err(StorageError::NoTombstone { save }.into());
    }
    trace_point(TracePoint::Sweep, save);
    let mut bytes = 0;
    let mut after = ShardId::before(save);
    loop {
        let page = store.list_shards(after, PAGE)?;
        let ours: Vec<ShardId> = page.into_iter().filter(|shard| shard.save() == save).collect();
        let Some(last) = ours.last() else { break };
        after = Some(*last);
        for shard in ours.into_iter().filter(|shard| *shard != ShardId::new(save, u32::MAX)) {
            bytes += purge_shard(store, shard)?;
        }
    }
    trace_point(TracePoint::Grave, save);
    // No file is left. The removed-save entry replaces the tombstone, which is removed once the
    // entry is durable.
    if has_tombstone && store.try_record_removed(save)? {
        store.remove_tombstone(save)?;
    }
    Ok(bytes)
}

/// Removes all files and records of a shard. Returns their size in bytes.
fn purge_shard(store: &Store, shard: ShardId) -> Result<u64, RemoteError> {
    let mut bytes = 0;
    let mut after = None;
    loop {
        let page = store.list_stripes(shard, after, PAGE)?;
        let Some(last) = page.last() else { break };
        after = Some(last.index);
        for stripe in page {
            for (key, file_bytes) in store.list_all_files(stripe)? {
                if store.remove_file(key)? {
                    bytes += file_bytes;
                }
            }
            bytes += purge_records(store, RecordScope::Stripe(stripe))?;
        }
    }
    Ok(bytes + purge_records(store, RecordScope::Shard(shard))?)
}

/// Removes all records of `scope`. Returns their size in bytes.
fn purge_records(store: &Store, scope: RecordScope) -> Result<u64, RemoteError> {
    let mut bytes = 0;
    for (name, len) in store.list_record_files(scope)? {
        if store.remove_record_file(scope, &name)? {
            bytes += len;
        }
    }
    Ok(bytes)
}
