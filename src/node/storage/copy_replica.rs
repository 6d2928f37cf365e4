//! Stores a missing or damaged replica again from another node.

use std::sync::Arc;

use super::damage_mending::Mending;
use super::error::StorageError;
use super::fencing::Fencing;
use super::put_block::{BlockWrites, PUT_MEMORY_BYTES, STALL_LIMIT};
use super::records_and_drops::ShardRecords;
use crate::clock::deadline;
use crate::format::file::{FileKey, FileName};
use crate::format::records::LAYOUT_STANDARD;
use crate::kind::ErrorKind;
use crate::net::call::{CallError, address};
use crate::node::budgets::{Budgets, reserve_memory};
use crate::node::context::NodeContext;
use crate::pipeline::executor::Executor;
use crate::pipeline::rate_limiter::RateLimiter;
use crate::pipeline::read::request_verification;
use crate::stage::{TracePoint, trace_point};
use crate::store::BlockSpec;
use crate::units::MAX_BLOCK_BYTES;
use crate::wire::RemoteError;
use crate::wire::calls::{CopyReplica, ReadFile, ReadFileAnswer};

/// The service that copies replicas from other nodes to this one.
pub(in crate::node) struct ReplicaCopies {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    budgets: Arc<Budgets>,
    executor: Arc<Executor>,
    block_writes: Arc<BlockWrites>,
    mending: Arc<Mending>,
    shard_records: Arc<ShardRecords>,
}

impl ReplicaCopies {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        budgets: Arc<Budgets>,
        executor: Arc<Executor>,
        block_writes: Arc<BlockWrites>,
        mending: Arc<Mending>,
        shard_records: Arc<ShardRecords>,
    ) -> Self {
        Self { context, fencing, budgets, executor, block_writes, mending, shard_records }
    }

    /// Recreates a replica on this node from the copy on another node. If that copy is damaged or
    /// missing, rebuilds the replica from good grains.
    pub(in crate::node) async fn copy_replica(&self, call: CopyReplica) -> Result<(), RemoteError> {
        self.shard_records.drop_and_refuse_if_archived(call.stripe).await?;
        self.fencing
            .check_and_raise_fence(call.stripe.shard, call.generation, call.coordinator)
            .await?;
        let copied = self.fetch_and_store_replica(&call).await;
        let is_bad =
            |error: &RemoteError| matches!(error.kind, ErrorKind::Corrupt | ErrorKind::NotFound);
        match copied {
            Err(error) if is_bad(&error) => {
                // The source verifies its file itself, so that the next coordinator finds it
                // damaged.
                let file = FileName::Replica { block: call.block };
                request_verification(&self.context.caller, &call.from, call.stripe, file).await;
                tracing::info!(stripe = %call.stripe, %error, "cannot copy a replica: rebuilding it from grains");
                self.mending.rebuild_replica_from_grains(call.stripe, call.block).await?;
            }
            copied => copied?,
        }
        self.shard_records.drop_and_refuse_if_archived(call.stripe).await
    }

    /// Copies a replica from another node and stores it if its root is that of the stripe's record.
    async fn fetch_and_store_replica(&self, call: &CopyReplica) -> Result<(), RemoteError> {
        if call.len_bytes == 0 || call.len_bytes > MAX_BLOCK_BYTES {
            return Err(StorageError::ReplicaLengthInvalid { len_bytes: call.len_bytes }.into());
        }
        // Allowed above the high-water mark too: that room is kept free of new saves for data that
        // is already saved.
        self.executor.check_replica_room(call.len_bytes)?;
        let key = FileKey::replica(call.stripe, call.block);
        // A file of that name on this node is missing or was found damaged. Check it, so that its
        // damage is noted before the good copy takes the name.
        let _ = self.mending.check_and_note_damage(key).await;
        let _memory = reserve_memory(&self.context, &self.budgets.save, PUT_MEMORY_BYTES).await?;
        let read = ReadFile {
            stripe: call.stripe,
            file: key.name,
            from: 0,
            len_bytes: call.len_bytes,
            hashes: false,
        };
        let to = address(&call.from);
        let open = async {
            let mut exchange = self.context.caller.open(&to, &read).await?;
            exchange.finish().await?;
            let answer: ReadFileAnswer = exchange.answer().await?;
            Ok::<_, CallError>((exchange, answer))
        };
        let (mut exchange, answer) = deadline(&*self.context.clock, STALL_LIMIT, open).await??;
        if answer.len_bytes != call.len_bytes {
            let node = call.from.name.clone();
            return Err(StorageError::ReplicaLengthMismatch { key, node }.into());
        }
        let spec = BlockSpec {
            stripe: call.stripe,
            block: call.block,
            layout: LAYOUT_STANDARD,
            len_bytes: call.len_bytes,
        };
        let mut writer =
            self.context.run_on_store(move |store| store.create_block_writer(spec, None)).await?;
        let mut limiter = RateLimiter::new(self.context.clock.clone(), call.bytes_per_s);
        let mut left = call.len_bytes;
        while left > 0 {
            let chunk = self.block_writes.read_next_chunk(&mut exchange.recv, left).await?;
            left -= chunk.len() as u64;
            limiter.wait(chunk.len() as u64).await;
            writer = self.block_writes.write_chunk(writer, chunk).await?;
        }
        // Whatever the source sends, only bytes with the root of the record are stored.
        let root = call.root;
        trace_point(TracePoint::Fetch, key);
        self.fencing
            .write_unless_removed(call.stripe.shard.save(), move |_| writer.finish(Some(root)))
            .await?;
        Ok(())
    }
}
