//! Damaged files of this node: checking them, reporting them to readers, and mending them from
//! grains (docs/semantics.md, 6, *Damage*).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::error::StorageError;
use super::fencing::Fencing;
use super::put_block::PUT_MEMORY_BYTES;
use super::records_and_drops::ShardRecords;
use crate::catalogue::record_access::{read_record, shard_root_key};
use crate::format::file::{FileKey, FileName};
use crate::format::records::{LAYOUT_STANDARD, ShardRoot, StripeState};
use crate::gf::FingerprintKey;
use crate::id::StripeId;
use crate::node::budgets::{Budgets, reserve_memory};
use crate::node::context::NodeContext;
use crate::node::retry_schedule::backoff;
use crate::pipeline::executor::Executor;
use crate::pipeline::read::{
    NodesToAsk, ReadError, ReadSession, Sink, StripeReader, find_stripe_state,
};
use crate::pipeline::record_fetch;
use crate::stage::{TracePoint, trace_point};
use crate::store::{BlockSpec, BlockWriter, FileCheck};
use crate::topology::Directory;
use crate::units::grains;
use crate::wire::RemoteError;
use crate::wire::calls::{ListSources, SourceView, VerifyFile};

/// Maximum number of replicas that wait to be mended, and maximum number of files that wait to be
/// checked. Further ones are queued when they are reported again.
const MAX_WAITING: usize = 4096;
/// Maximum number of times that the sources of a block are looked up again after the known ones
/// have failed.
const MAX_LOOKS: u32 = 3;
/// Interval between checks of damaged files. A disk may have failed for a moment only.
const LOOK_AGAIN: Duration = Duration::from_secs(3600);
/// Wait before a mend that failed is tried again. It doubles with every failure in a row. A mend
/// often fails for a moment only: a source is away, or another node mends the same block.
const FIRST_RETRY: Duration = Duration::from_secs(2);
/// Maximum number of failures in a row of one mend, the last one about nine minutes after the
/// first. After that, only the next check of the file tries again.
const MAX_MEND_FAILURES: u32 = 9;

/// The queues of a node: files to check and damaged replicas to mend.
#[derive(Default)]
pub(in crate::node) struct MendQueue {
    /// Held during a check. Checks read whole files, and a later check must not overtake an earlier
    /// one.
    check_lock: Arc<tokio::sync::Mutex<()>>,
    mends: Mutex<BTreeMap<(StripeId, u8), QueuedMend>>,
    /// Files that wait to be checked.
    checks: Mutex<BTreeSet<FileKey>>,
    wake: Notify,
}

/// A replica that waits to be mended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct QueuedMend {
    due: Duration,
    /// Failures in a row.
    failures: u32,
}

impl MendQueue {
    /// Queues a replica that was reported as damaged. It is due at once.
    fn queue_replica(&self, stripe: StripeId, block: u8) {
        self.insert_with_earliest_due(
            stripe,
            block,
            QueuedMend { due: Duration::ZERO, failures: 0 },
        );
        self.wake.notify_one();
    }

    /// Queues a replica again after a failure, unless it was reported meanwhile and is due earlier.
    /// Returns the wait, or `None` if the replica has failed `MAX_MEND_FAILURES` times and is not
    /// queued.
    fn requeue_failed(
        &self,
        stripe: StripeId,
        block: u8,
        failed: QueuedMend,
        now: Duration,
    ) -> Option<Duration> {
        let failures = failed.failures.saturating_add(1);
        if failures >= MAX_MEND_FAILURES {
            return None;
        }
        let wait = backoff(FIRST_RETRY, failures);
        self.insert_with_earliest_due(
            stripe,
            block,
            QueuedMend { due: now.saturating_add(wait), failures },
        );
        Some(wait)
    }

    /// Queues a replica. If the replica is queued already, the entry with the earlier due time
    /// stays. A full queue takes no further replica.
    fn insert_with_earliest_due(&self, stripe: StripeId, block: u8, attempt: QueuedMend) {
        let mut waiting = self.mends.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = waiting.len() >= MAX_WAITING;
        match waiting.entry((stripe, block)) {
            Entry::Occupied(mut queued) if attempt.due < queued.get().due => {
                queued.insert(attempt);
            }
            Entry::Vacant(place) if !is_full => {
                place.insert(attempt);
            }
            _ => {}
        }
    }

    fn queue_check(&self, key: FileKey) {
        let mut looks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
        if looks.len() < MAX_WAITING {
            looks.insert(key);
        }
        drop(looks);
        self.wake.notify_one();
    }

    fn pop_check(&self) -> Option<FileKey> {
        self.checks.lock().unwrap_or_else(PoisonError::into_inner).pop_first()
    }

    /// Removes and returns a replica that is due.
    fn pop_due(&self, now: Duration) -> Option<(StripeId, u8, QueuedMend)> {
        let mut waiting = self.mends.lock().unwrap_or_else(PoisonError::into_inner);
        let due = waiting.iter().find(|(_, attempt)| attempt.due <= now);
        let (&(stripe, block), &attempt) = due?;
        waiting.remove(&(stripe, block));
        Some((stripe, block, attempt))
    }

    /// Returns the time at which the next replica is due.
    fn earliest_due_time(&self) -> Option<Duration> {
        let waiting = self.mends.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.values().map(|attempt| attempt.due).min()
    }
}

/// The service that checks files of this node, and rebuilds damaged replicas.
pub(in crate::node) struct Mending {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    budgets: Arc<Budgets>,
    executor: Arc<Executor>,
    shard_records: Arc<ShardRecords>,
    mend_queue: MendQueue,
}

impl Mending {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        budgets: Arc<Budgets>,
        executor: Arc<Executor>,
        shard_records: Arc<ShardRecords>,
    ) -> Self {
        Self {
            context,
            fencing,
            budgets,
            executor,
            shard_records,
            mend_queue: MendQueue::default(),
        }
    }

    /// Returns all files of a stripe on this node that grains can be read from, damaged or not.
    pub(in crate::node) async fn list_sources(
        &self,
        call: ListSources,
    ) -> Result<Vec<SourceView>, RemoteError> {
        let sources =
            self.context.run_on_store(move |store| store.list_grain_sources(call.stripe)).await?;
        let mut views = Vec::with_capacity(sources.len());
        for source in sources {
            let key = FileKey { stripe: call.stripe, name: source.file };
            if source.damaged.is_some() && !self.context.store.is_damaged(key) {
                // The index does not have the file: it was put back by hand, or its damage is not
                // noted yet.
                self.mend_queue.queue_check(key);
            }
            views.push(SourceView {
                file: source.file,
                content: source.content,
                damaged: source.damaged,
            });
        }
        Ok(views)
    }

    /// Checks a file and notes its damage. Moves nothing. Returns the result.
    pub(in crate::node) async fn check_and_note_damage(
        &self,
        key: FileKey,
    ) -> Result<FileCheck, RemoteError> {
        let alone = self.mend_queue.check_lock.clone().lock_owned().await;
        self.context
            .run_on_store(move |store| {
                // If the caller is cancelled, the check continues and keeps the lock until it ends.
                let _alone = alone;
                store.check_and_note_damage(key)
            })
            .await
    }

    /// Verifies a file in which a reader found a fault. A damaged replica is queued to be mended; a
    /// file whose content is not that of its name is moved to quarantine. Returns `true` if the
    /// file is damaged, misplaced or missing.
    pub(in crate::node) async fn check_file_and_handle_damage(
        &self,
        call: VerifyFile,
    ) -> Result<bool, RemoteError> {
        let key = FileKey { stripe: call.stripe, name: call.file };
        let look = self.check_and_note_damage(key).await?;
        match (&look, call.file) {
            (FileCheck::Damaged(_), FileName::Replica { block }) => {
                self.mend_queue.queue_replica(call.stripe, block);
            }
            (FileCheck::Misplaced(why), _) => {
                let why = why.clone();
                self.context
                    .run_on_store(move |store| store.quarantine_file_if_unchanged(key, None, &why))
                    .await?;
            }
            _ => {}
        }
        Ok(look != FileCheck::Whole)
    }

    /// Mends the reported replicas, one after the other, and checks damaged files again at
    /// intervals. A mend that fails is tried again after a wait.
    pub(in crate::node) async fn run_mending(self: Arc<Self>) {
        for key in self.context.store.files_to_recheck() {
            self.recheck_file(key).await;
        }
        let mut next_round = self.context.clock.now() + LOOK_AGAIN;
        loop {
            let next =
                self.mend_queue.earliest_due_time().map_or(next_round, |due| due.min(next_round));
            let left = next.saturating_sub(self.context.clock.now());
            tokio::select! {
                () = self.mend_queue.wake.notified() => {}
                () = self.context.clock.sleep(left) => {}
            }
            if self.context.clock.now() >= next_round {
                for (key, _) in self.context.store.damaged_files() {
                    self.recheck_file(key).await;
                }
                next_round = self.context.clock.now() + LOOK_AGAIN;
            }
            while let Some(key) = self.mend_queue.pop_check() {
                self.recheck_file(key).await;
            }
            while let Some((stripe, block, attempt)) =
                self.mend_queue.pop_due(self.context.clock.now())
            {
                match self.mend_replica(stripe, block).await {
                    Ok(()) => tracing::info!(%stripe, block, "mended a damaged replica"),
                    Err(error) => {
                        let now = self.context.clock.now();
                        let retry_in = self.mend_queue.requeue_failed(stripe, block, attempt, now);
                        tracing::warn!(
                            %stripe, block, %error, ?retry_in, "failed to mend a damaged replica: if `retry_in` is None, the next check of the file tries again"
                        );
                    }
                }
            }
        }
    }

    /// Verifies a file. A failure is logged.
    async fn recheck_file(&self, key: FileKey) {
        let call = VerifyFile { stripe: key.stripe, file: key.name };
        if let Err(error) = self.check_file_and_handle_damage(call).await {
            tracing::warn!(%key, %error, "a damaged file cannot be checked");
        }
    }

    /// Recreates a damaged replica from the good grains of all sources, the damaged file among
    /// them.
    ///
    /// # Errors
    /// If no catalogue answers, if the stripe is archived or the save was removed, or if a grain of
    /// the block has no good source.
    pub(in crate::node) async fn mend_replica(
        &self,
        stripe: StripeId,
        block: u8,
    ) -> Result<(), RemoteError> {
        self.shard_records.drop_and_refuse_if_archived(stripe).await?;
        self.fencing.purge_and_refuse_if_removed(stripe.shard.save()).await?;
        self.rebuild_replica_from_grains(stripe, block).await?;
        self.shard_records.drop_and_refuse_if_archived(stripe).await
    }

    /// Gathers a block from all sources with good grains, and stores it on this node as a replica.
    pub(in crate::node) async fn rebuild_replica_from_grains(
        &self,
        stripe: StripeId,
        block: u8,
    ) -> Result<(), RemoteError> {
        let catalogue = self.context.catalogue();
        let key = shard_root_key(stripe.shard.save(), stripe.shard.index());
        let gone = || StorageError::ShardGone { shard: stripe.shard };
        let (root, _) = read_record::<ShardRoot>(&*catalogue, &key).await?.ok_or_else(gone)?;
        let directory = Directory::read(&*catalogue).await?;
        let leaves = record_fetch::fetch_leaves(&self.context.caller, &directory, &root).await?;
        let info = record_fetch::fetch_stripe_record(
            &self.context.caller,
            &directory,
            &root,
            &leaves,
            stripe.index,
        )
        .await?;
        let expected = info.fixed.blocks.get(usize::from(block)).cloned();
        let expected = expected
            .filter(|expected| expected.len_bytes > 0)
            .ok_or(StorageError::NoSuchBlock { stripe, block })?;
        self.executor.check_replica_room(expected.len_bytes)?;
        let _memory = reserve_memory(&self.context, &self.budgets.save, PUT_MEMORY_BYTES).await?;
        let (caller, entropy) = (self.context.caller.clone(), self.context.entropy.clone());
        let reading =
            ReadSession::new(caller, self.context.workers.clone(), entropy, directory, Vec::new());
        let start = info.fixed.cut.offset_bytes + info.fixed.cut.block_offset(block);
        let range = start..start + expected.len_bytes;
        let spec =
            BlockSpec { stripe, block, layout: LAYOUT_STANDARD, len_bytes: expected.len_bytes };
        let writer =
            self.context.run_on_store(move |store| store.create_block_writer(spec, None)).await?;
        let sink = Arc::new(ReorderingSink::new(start, writer));
        let (root, mut looks) = (Arc::new(root), 0);
        loop {
            let reader = self.plan_block_read(&reading, &root, &info, block).await?;
            let all = 0..grains(expected.len_bytes);
            match reader.read_into_sink(&[block], all, range.clone(), sink.clone()).await {
                // The sources planned first were enough until one of them turned out to be damaged,
                // too. Plan again with all sources.
                Err(ReadError::Lost(_)) if looks < MAX_LOOKS => looks += 1,
                read => break read.map_err(RemoteError::from)?,
            }
        }
        let writer = sink.take_complete_writer().ok_or(StorageError::BlockIncomplete)?;
        trace_point(TracePoint::Fetch, FileKey::replica(stripe, block));
        self.fencing
            .write_unless_removed(stripe.shard.save(), move |_| writer.finish(Some(expected.root)))
            .await?;
        Ok(())
    }

    /// Plans a read of a block from replicas or, if they are not enough, from proven pieces.
    /// Returns the reader.
    async fn plan_block_read(
        &self,
        session: &Arc<ReadSession>,
        root: &Arc<ShardRoot>,
        info: &record_fetch::StripeInfo,
        block: u8,
    ) -> Result<StripeReader, RemoteError> {
        let all = 0..grains(info.fixed.cut.block_len(block));
        let key = Arc::new(FingerprintKey::derive(&root.fingerprint_key));
        let plan = |state, receipt| {
            let (reading, root, key) = (session.clone(), root.clone(), key.clone());
            let (info, all) = (info.clone(), all.clone());
            async move {
                let blocks = &[block];
                StripeReader::probe_and_plan(reading, root, key, info, state, receipt, blocks, all)
                    .await
            }
        };
        match plan(StripeState::Replicated, None).await {
            Err(ReadError::Lost(lost)) => {
                // Pieces that were proven before the commit point are as good as those of an
                // archived stripe.
                let index = info.fixed.stripe.index;
                let state = find_stripe_state(session, root, index, NodesToAsk::All).await;
                let StripeState::Archived { attempt, .. } = state else {
                    return Err(ReadError::Lost(lost).into());
                };
                let at = (index, info.places.as_slice());
                let (caller, directory) = (&session.caller, &session.directory);
                let receipt =
                    record_fetch::fetch_receipt(caller, directory, root, at, attempt).await.ok();
                plan(state, receipt).await.map_err(RemoteError::from)
            }
            planned => planned.map_err(RemoteError::from),
        }
    }

    /// Returns a warning about the damaged files: how many replicas and pieces, and the first
    /// `max_names` names.
    pub(in crate::node) fn damage_warning(&self, max_names: usize) -> Option<String> {
        let files = self.context.store.damaged_files();
        let replicas =
            files.iter().filter(|(key, _)| matches!(key.name, FileName::Replica { .. })).count();
        let pieces = files.len() - replicas;
        let count = |count: usize, one: &str| match count {
            0 => None,
            1 => Some(format!("1 {one}")),
            many => Some(format!("{many} {one}s")),
        };
        let counts: Vec<String> =
            [count(replicas, "replica"), count(pieces, "piece")].into_iter().flatten().collect();
        let first: Vec<String> = files
            .iter()
            .take(max_names)
            .map(|(key, damage)| match damage.grains.len() {
                0 => key.to_string(),
                1 => format!("{key} (1 grain)"),
                many => format!("{key} ({many} grains)"),
            })
            .collect();
        let more = if files.len() > max_names { ", ..." } else { "" };
        (!files.is_empty()).then(|| {
            let is = if files.len() == 1 { "is" } else { "are" };
            format!(
                "{} {is} damaged and not counted: {}{more}",
                counts.join(" and "),
                first.join(", ")
            )
        })
    }
}

/// A sink that writes a block in order, whatever the order in which its grains arrive.
struct ReorderingSink {
    start: u64,
    state: Mutex<ReorderingSinkState>,
}

struct ReorderingSinkState {
    writer: Option<BlockWriter>,
    next: u64,
    /// Grains that arrived before their turn. A reader works on a few at once.
    early: BTreeMap<u64, Vec<u8>>,
}

impl ReorderingSink {
    fn new(start: u64, writer: BlockWriter) -> Self {
        let state =
            ReorderingSinkState { writer: Some(writer), next: start, early: BTreeMap::new() };
        Self { start, state: Mutex::new(state) }
    }

    /// Returns the writer, if it has the whole block.
    fn take_complete_writer(&self) -> Option<BlockWriter> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.writer.take().filter(|writer| writer.missing_bytes() == 0)
    }
}

impl Sink for ReorderingSink {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(shard_offset >= self.start);
        if shard_offset >= state.next {
            state.early.insert(shard_offset, bytes.to_vec());
        }
        while let Some(bytes) = {
            let next = state.next;
            state.early.remove(&next)
        } {
            state.next += bytes.len() as u64;
            let Some(writer) = &mut state.writer else { break };
            writer.write(&bytes).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ShardId;
    use crate::store::Store;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_failed_mend_is_tried_again_with_growing_waits() {
        let (queue, stripe) =
            (MendQueue::default(), StripeId { shard: ShardId([5; 16]), index: 0 });
        queue.queue_replica(stripe, 3);
        let mut tries = Vec::new();
        for at in 0..2000 {
            while let Some((stripe, block, attempt)) = queue.pop_due(at * SECOND) {
                tries.push(at);
                queue.requeue_failed(stripe, block, attempt, at * SECOND);
            }
        }
        assert_eq!(tries, [0, 2, 6, 14, 30, 62, 126, 254, 510]);
        assert_eq!(queue.earliest_due_time(), None);
    }

    #[test]
    fn a_report_brings_a_retry_forward_and_a_retry_delays_no_report() {
        let (queue, stripe) =
            (MendQueue::default(), StripeId { shard: ShardId([5; 16]), index: 0 });
        let failed = QueuedMend { due: Duration::ZERO, failures: 4 };
        queue.requeue_failed(stripe, 3, failed, SECOND);
        assert_eq!(queue.pop_due(2 * SECOND), None);
        queue.queue_replica(stripe, 3);
        queue.requeue_failed(stripe, 3, failed, SECOND);
        let reported = QueuedMend { due: Duration::ZERO, failures: 0 };
        assert_eq!(queue.pop_due(2 * SECOND), Some((stripe, 3, reported)));
    }

    #[test]
    fn grains_are_written_in_order() {
        let store = Store::new_in_memory();
        let stripe = StripeId { shard: ShardId([5; 16]), index: 0 };
        let spec = BlockSpec { stripe, block: 0, layout: 1, len_bytes: 6 };
        let sink = ReorderingSink::new(100, store.create_block_writer(spec, None).unwrap());
        for (offset, bytes) in
            [(102, b"cd"), (104, b"ef"), (102, b"cd"), (100, b"ab"), (100, b"ab")]
        {
            sink.write_at(offset, bytes).unwrap();
        }
        let stored = sink.take_complete_writer().unwrap().finish(None).unwrap();
        assert_eq!(stored.root, *blake3::hash(b"abcdef").as_bytes());
        assert!(sink.take_complete_writer().is_none());
    }
}
