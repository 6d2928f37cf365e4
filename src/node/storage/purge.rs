//! Removes the files of removed saves, and what was written for them too late (docs/semantics.md, 5).

use std::time::Duration;

use super::fencing::Fencing;
use crate::id::{SaveId, ShardId};
use crate::kind::ErrorKind;
use crate::node::active_saves::ActiveSave;
use crate::node::rpc::failure::remote_error;
use crate::stage::{TracePoint, trace_point};
use crate::store::{RecordScope, Store};
use crate::wire::RemoteError;

/// How often, and how long each time, a sweep waits for another one of the same save.
const PURGE_WAITS: u32 = 100;
const PURGE_WAIT: Duration = Duration::from_millis(100);
/// Shards or stripes listed at a time.
const PAGE: usize = 1024;

impl Fencing {
    /// Removes a tombstoned save's files; answers with their bytes. One at a time per save: a long one is waited for by asking again.
    pub(in crate::node) async fn purge_save(&self, save: SaveId) -> Result<u64, RemoteError> {
        let mut waits = 0;
        let mark = loop {
            match ActiveSave::begin(&self.purging, save) {
                Some(mark) => break mark,
                None if waits == PURGE_WAITS => {
                    let text = format!("save {save} is being swept here: ask again");
                    return Err(remote_error(ErrorKind::Busy, text));
                }
                None => waits += 1,
            }
            self.context.clock.sleep(PURGE_WAIT).await;
        };
        // The mark goes with the job, which runs on when nobody waits for it any more, or with the wait for its turn.
        self.context
            .on_store(move |store| {
                let _mark = mark;
                purge_files(store, save)
            })
            .await
    }

    /// For what was written on admission: when its save was buried meanwhile it goes again, because the sweep may have come first.
    pub(in crate::node) async fn ensure_not_removed(
        &self,
        save: SaveId,
    ) -> Result<(), RemoteError> {
        if self.is_tombstoned(save).await? {
            self.purge_save(save).await?;
            return Err(remote_error(
                ErrorKind::Fenced,
                format!("save {save} was removed meanwhile"),
            ));
        }
        Ok(())
    }
}

fn purge_files(store: &Store, save: SaveId) -> Result<u64, RemoteError> {
    // The tombstone, or the grave that it left, must be durable here: it is the evidence.
    let has_tombstone = store.tombstone(save)?.is_some();
    if !has_tombstone && !store.is_recorded_removed(save)? {
        let text = format!("no tombstone of save {save} is here: nothing is removed");
        return Err(remote_error(ErrorKind::Denied, text));
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
    // Nothing is left to remove. The fence stays, in its small form; the tombstone goes when that is durable.
    if has_tombstone && store.record_removed(save)? {
        store.remove_tombstone(save)?;
    }
    Ok(bytes)
}

fn purge_shard(store: &Store, shard: ShardId) -> Result<u64, RemoteError> {
    let mut bytes = 0;
    let mut after = None;
    loop {
        let page = store.list_stripes(shard, after, PAGE)?;
        let Some(last) = page.last() else { break };
        after = Some(last.index);
        for stripe in page {
            for (key, file_bytes) in store.every_file(stripe)? {
                if store.remove(key)? {
                    bytes += file_bytes;
                }
            }
            bytes += purge_records(store, RecordScope::Stripe(stripe))?;
        }
    }
    Ok(bytes + purge_records(store, RecordScope::Shard(shard))?)
}

fn purge_records(store: &Store, scope: RecordScope) -> Result<u64, RemoteError> {
    let mut bytes = 0;
    for (name, len) in store.list_record_files(scope)? {
        if store.remove_record_file(scope, &name)? {
            bytes += len;
        }
    }
    Ok(bytes)
}
