//! The client's side of saving one stripe. Each block is sent to its first holder, which forwards
//! it to the second. The client hashes and fingerprints the bytes that it reads from its source,
//! and both holders must agree (docs/semantics.md, 3.2).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;

use crate::clock::deadline;
use crate::code::Layout;
use crate::format::FormatError;
use crate::format::geometry::StripeCut;
use crate::format::records::{BlockInfo, Record, StripeFixed, StripeRecord};
use crate::format::tree::{GrainTree, grain_hash};
use crate::gf::{Fingerprint, FingerprintKey, GfError};
use crate::id::{Generation, NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Caller, Exchange, address};
use crate::placement::Spares;
use crate::topology::Directory;
use crate::units::GRAIN_BYTES;
use crate::wire::calls::{
    BlockAdmitted, BlockTrailer, PutBlock, PutBlockAnswer, PutRecord, RecordName,
};
use crate::wire::{RemoteError, message_to_bytes};
use crate::workers::{WorkerDied, Workers};

/// Number of bytes that are read from the source, and sent, at a time.
const CHUNK_BYTES: u64 = 4 * GRAIN_BYTES;
/// Maximum number of blocks of one stripe that are sent at once.
const BLOCKS_AT_ONCE: usize = 6;
/// How long a holder may take or answer nothing before it counts as failed.
const STALL_LIMIT: Duration = Duration::from_secs(20);
/// Wait before holders that refused are asked again.
const BUSY_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of consecutive retries while a holder reports that it is out of memory.
const BUSY_ROUNDS: usize = 30;
/// Maximum number of rounds in which failed holders are replaced.
const ROUNDS: usize = 3;

/// A source of a shard's bytes. The methods may block. Bytes are read more than once if a holder
/// fails.
pub trait ShardSource: Send + Sync + 'static {
    /// Returns the length in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `out` with the bytes from `offset` on.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Returns the `len` bytes from `offset` on, if the source has them in memory in one piece.
    /// They are then hashed and sent without a copy. The memory must not change before the save has
    /// ended, because a block whose holder fails is read again.
    fn bytes_in_memory(&self, _offset: u64, _len: usize) -> Option<Bytes> {
        None
    }

    /// Returns whether the source is the same as when it was opened, as far as it can tell. The
    /// caller asks after it has read all of the source.
    fn is_unchanged(&self) -> io::Result<bool> {
        Ok(true)
    }
}

impl ShardSource for Bytes {
    fn len_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let range = from.checked_add(out.len()).and_then(|to| self.get(from..to));
        out.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn bytes_in_memory(&self, offset: u64, len: usize) -> Option<Bytes> {
        let from = usize::try_from(offset).ok()?;
        (from.checked_add(len)? <= self.len()).then(|| self.slice(from..from + len))
    }
}

/// The error of a stripe that was not saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// Reading from the source failed.
    #[error("reading shard {shard} at byte {offset}: {source}")]
    Source {
        /// The shard's name.
        shard: String,
        /// The byte offset in the shard.
        offset: u64,
        /// The cause.
        source: io::Error,
    },
    /// The source returned different bytes when it was read again.
    #[error("shard {shard} changed while it was being saved: save it when no process writes to it")]
    Changed {
        /// The shard's name.
        shard: String,
    },
    /// Holders failed, and no other nodes are left.
    #[error("stripe {stripe}: {failed} failed and no spare node is live: {reason}")]
    NoHolders {
        /// The stripe.
        stripe: StripeId,
        /// The nodes that failed, in words.
        failed: String,
        /// The reason of the failure.
        reason: String,
    },
    /// A holder refused for a reason that applies to every holder.
    #[error(transparent)]
    Refused(CallError),
    /// A record is too long.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Fingerprinting failed.
    #[error(transparent)]
    Field(#[from] GfError),
    /// A worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl SaveError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SaveError::Source { .. } => ErrorKind::Io,
            SaveError::Changed { .. } => ErrorKind::Invalid,
            SaveError::NoHolders { .. } => ErrorKind::Unavailable,
            SaveError::Refused(error) => error.kind(),
            SaveError::Format(error) => error.kind(),
            SaveError::Field(_) | SaveError::Worker(_) => ErrorKind::Internal,
        }
    }
}

/// The nodes that failed while a save wrote to them. The other stripes and shards of the save avoid
/// these nodes where they can.
#[derive(Debug, Default)]
pub struct FailedNodes(Mutex<BTreeMap<NodeId, bool>>);

impl FailedNodes {
    fn record_failure(&self, failed: &NodeFailure) {
        let refused = failed.has_refused();
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A node that was silent once may be gone, even if it refused before.
        *nodes.entry(failed.node).or_insert(true) &= refused;
    }

    fn contains(&self, node: NodeId) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&node)
    }

    /// Returns the nodes that are alive and said that they cannot take blocks, for example because
    /// their disk is full. A new save does not count on them.
    pub fn refused_nodes(&self) -> Vec<NodeId> {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.iter().filter(|(_, refused)| **refused).map(|(node, _)| *node).collect()
    }

    /// Returns whether nodes failed and each of them refused. False if any did not answer.
    pub fn has_only_refusals(&self) -> bool {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        !nodes.is_empty() && nodes.values().all(|refused| *refused)
    }
}

/// The uploader of a shard's stripes: the state that all of them share.
pub struct StripeUploader {
    /// The client for calls to nodes.
    pub caller: Arc<Caller>,
    /// The workers that read and hash.
    pub workers: Workers,
    /// The nodes.
    pub directory: Directory,
    /// The shard's bytes.
    pub source: Arc<dyn ShardSource>,
    /// The shard's name, for errors.
    pub name: String,
    /// The shard's fingerprint key.
    pub key: Arc<FingerprintKey>,
    /// The bytes of this key, as in the shard's record.
    pub key_bytes: [u8; 32],
    /// The save's generation.
    pub generation: Generation,
    /// The layout of the stripes.
    pub layout: Layout,
    /// The nodes that failed in any part of the save.
    pub failures: Arc<FailedNodes>,
    /// Called with the length in bytes of each block that has become durable.
    pub progress: Arc<dyn Fn(u64) + Send + Sync>,
}

/// A holder of a block that failed, and its error.
struct NodeFailure {
    node: NodeId,
    error: CallError,
}

impl NodeFailure {
    /// Returns whether the holder said that it cannot take the block.
    fn has_refused(&self) -> bool {
        !self.error.is_unanswered() && self.error.kind() == ErrorKind::Unavailable
    }

    /// Returns whether the holder answered for itself, and not for another holder that it could not
    /// reach.
    fn is_own_answer(&self) -> bool {
        !self.error.is_unanswered()
            && !matches!(self.error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
    }
}

enum BlockError {
    Holder(NodeFailure),
    Fatal(SaveError),
}

impl<E: Into<SaveError>> From<E> for BlockError {
    fn from(error: E) -> Self {
        BlockError::Fatal(error.into())
    }
}

impl StripeUploader {
    /// Saves one stripe. Where a holder fails, puts one of `spares` in its place in `places`.
    /// Returns the fixed part of the stripe's record.
    pub async fn upload_stripe(
        &self,
        stripe: StripeId,
        cut: StripeCut,
        places: &mut [NodeId],
        mut spares: Spares,
    ) -> Result<StripeFixed, SaveError> {
        let (k, step) = (self.layout.k(), self.layout.n() - self.layout.k());
        self.avoid_failed_nodes(places, &mut spares);
        let mut blocks: Vec<Option<BlockInfo>> = vec![None; k];
        let mut todo: BTreeSet<usize> = (0..k).collect();
        let (mut round, mut busy_rounds) = (0, 0);
        while round <= ROUNDS {
            let now: &[NodeId] = places;
            let sends = todo.iter().map(|&block| async move {
                let holders = (now[block], now[block + step]);
                (block, self.upload_block(stripe, &cut, block as u8, holders).await)
            });
            let mut running =
                stream::iter(sends.collect::<Vec<_>>()).buffer_unordered(BLOCKS_AT_ONCE);
            let mut failures: Vec<NodeFailure> = Vec::new();
            let mut done = Vec::new();
            while let Some((block, result)) = running.next().await {
                match result {
                    Ok(info) if blocks[block].as_ref().is_some_and(|first| *first != info) => {
                        return Err(SaveError::Changed { shard: self.name.clone() });
                    }
                    Ok(info) => {
                        if blocks[block].is_none() {
                            (self.progress)(info.len_bytes);
                        }
                        blocks[block] = Some(info);
                        done.push(block);
                    }
                    Err(BlockError::Holder(failed)) => failures.push(failed),
                    Err(BlockError::Fatal(error)) => return Err(error),
                }
            }
            drop(running);
            if !done.is_empty() {
                busy_rounds = 0;
            }
            done.iter().for_each(|block| {
                todo.remove(block);
            });
            if todo.is_empty() {
                let blocks = blocks.into_iter().flatten().collect();
                return Ok(StripeFixed { stripe, cut, blocks });
            }
            // A holder that is busy with other work need not be replaced.
            if busy_rounds < BUSY_ROUNDS {
                failures.retain(|failed| failed.error.kind() != ErrorKind::Busy);
            }
            if failures.is_empty() {
                busy_rounds += 1;
                self.caller.clock().sleep(BUSY_WAIT).await;
                continue;
            }
            round += 1;
            if round == 1 && failures.iter().all(|failed| failed.is_own_answer()) {
                self.caller.clock().sleep(BUSY_WAIT).await;
                continue;
            }
            if round > ROUNDS {
                spares.retain(|_| false);
            }
            todo.extend(self.replace_failed_nodes(stripe, places, &mut spares, &failures)?);
        }
        Err(SaveError::NoHolders {
            stripe,
            failed: "several nodes".into(),
            reason: format!("{ROUNDS} rounds of replacing them did not help"),
        })
    }

    /// Puts spares in the places of nodes that failed in other stripes, before the first byte is
    /// sent. The replaced nodes become the last spares.
    fn avoid_failed_nodes(&self, places: &mut [NodeId], spares: &mut Spares) {
        let failed = |node| self.failures.contains(node);
        for position in 0..places.len() {
            if failed(places[position])
                && !spares.nodes().iter().all(|&spare| failed(spare))
                && let Some(spare) = spares.take(places, position, failed)
            {
                spares.give(std::mem::replace(&mut places[position], spare));
            }
        }
    }

    /// Puts a spare in the place of each node that failed. Returns the blocks of the changed
    /// positions, which have to be sent again.
    fn replace_failed_nodes(
        &self,
        stripe: StripeId,
        places: &mut [NodeId],
        spares: &mut Spares,
        failures: &[NodeFailure],
    ) -> Result<BTreeSet<usize>, SaveError> {
        failures.iter().for_each(|failed| self.failures.record_failure(failed));
        let nodes: BTreeSet<NodeId> = failures.iter().map(|failed| failed.node).collect();
        spares.retain(|spare| !nodes.contains(&spare));
        let mut again = BTreeSet::new();
        for position in 0..places.len() {
            if !nodes.contains(&places[position]) {
                continue;
            }
            let Some(spare) = spares.take(places, position, |node| self.failures.contains(node))
            else {
                let names: Vec<String> =
                    nodes.iter().map(|node| self.directory.name(*node)).collect();
                let reason =
                    failures.first().map(|failed| failed.error.to_string()).unwrap_or_default();
                return Err(SaveError::NoHolders { stripe, failed: names.join(", "), reason });
            };
            tracing::warn!(%stripe, failed = self.directory.name(places[position]), spare = self.directory.name(spare), "a failed holder is replaced by a spare");
            places[position] = spare;
            again.extend(self.layout.blocks_at(position));
        }
        Ok(again)
    }

    /// Sends one block to its two holders and waits until it is durable on both. Returns the
    /// block's length, root and fingerprints.
    async fn upload_block(
        &self,
        stripe: StripeId,
        cut: &StripeCut,
        block: u8,
        holders: (NodeId, NodeId),
    ) -> Result<BlockInfo, BlockError> {
        let len_bytes = cut.block_len(block);
        if len_bytes == 0 {
            let root = *blake3::hash(&[]).as_bytes();
            return Ok(BlockInfo { len_bytes, root, fingerprints: Vec::new() });
        }
        let unknown = |node: NodeId| SaveError::NoHolders {
            stripe,
            failed: node.to_string(),
            reason: "it is not registered".into(),
        };
        let first = self.directory.address(holders.0).ok_or_else(|| unknown(holders.0))?;
        let second = self.directory.address(holders.1).ok_or_else(|| unknown(holders.1))?;
        let call = PutBlock {
            stripe,
            block,
            len_bytes,
            generation: self.generation,
            fingerprint_key: self.key_bytes,
            forward: Some(second),
        };
        let to = address(&first);
        let failed = |node: NodeId, error: CallError| {
            // Every other holder would refuse in the same way. Silence, damage or shortage may
            // affect this holder only.
            let fatal =
                matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Denied | ErrorKind::Invalid);
            if fatal && !error.is_unanswered() {
                BlockError::Fatal(SaveError::Refused(error))
            } else {
                BlockError::Holder(NodeFailure { node, error })
            }
        };
        let holder = |error| failed(holders.0, error);
        let late = |source| CallError::Late { call: "PutBlock", to: to.to_string(), source };
        let clock = &**self.caller.clock();
        let opened = deadline(clock, STALL_LIMIT, self.caller.open(&to, &call)).await;
        let mut exchange = opened.map_err(late).and_then(|opened| opened).map_err(holder)?;
        let admitted = deadline(clock, STALL_LIMIT, exchange.answer::<BlockAdmitted>()).await;
        let admitted = admitted.map_err(late).and_then(|admitted| admitted).map_err(holder)?;
        if let Some((code, message)) = admitted.second_refused {
            let refusal = RemoteError { kind: ErrorKind::from_wire_code(code), message };
            return Err(failed(holders.1, refusal.into()));
        }
        let start = cut.offset_bytes + cut.block_offset(block);
        let (info, refused) = self.send_block(&mut exchange, start, len_bytes).await?;
        // If sending failed, the answer names the reason, if there is an answer.
        let answer = deadline(clock, STALL_LIMIT, exchange.answer::<PutBlockAnswer>()).await;
        let answer = match (answer.map_err(late).and_then(|answer| answer), refused) {
            (Err(error), Some(refused)) if error.is_unanswered() => Err(refused),
            (answer, _) => answer,
        };
        match answer.map_err(holder)?.forwarded {
            Some(Ok(())) => Ok(info),
            Some(Err(message)) => {
                // The first holder does not say whether the second one refused or is gone.
                let error = CallError::Failed(RemoteError { kind: ErrorKind::Timeout, message });
                Err(BlockError::Holder(NodeFailure { node: holders.1, error }))
            }
            None => {
                let message = format!("{} did not forward the block", first.name);
                let error = CallError::Failed(RemoteError { kind: ErrorKind::Internal, message });
                Err(BlockError::Holder(NodeFailure { node: holders.0, error }))
            }
        }
    }

    /// Reads, hashes and sends a block and its trailer. Returns the block's length, root and
    /// fingerprints, and the error if sending failed.
    async fn send_block(
        &self,
        exchange: &mut Exchange,
        block_start: u64,
        len_bytes: u64,
    ) -> Result<(BlockInfo, Option<CallError>), BlockError> {
        let clock = self.caller.clock().clone();
        let mut hashes = Vec::new();
        let mut fingerprints = Vec::new();
        let mut refused = None;
        let mut offset = 0;
        let mut ready = None;
        while offset < len_bytes || ready.is_some() {
            let read = async {
                if offset == len_bytes {
                    return Ok(None);
                }
                let len = CHUNK_BYTES.min(len_bytes - offset);
                self.read_hashed_chunk(block_start, offset, len, len_bytes).await.map(Some)
            };
            let write = async {
                if let (Some(chunk), None) = (ready.take(), &refused) {
                    match deadline(&*clock, STALL_LIMIT, exchange.write(chunk)).await {
                        Ok(written) => refused = written.err(),
                        Err(source) => {
                            let (call, to) = ("PutBlock", "the block's holder".to_owned());
                            refused = Some(CallError::Late { call, to, source });
                        }
                    }
                }
            };
            let (chunk, ()) = tokio::join!(read, write);
            if let Some(chunk) = chunk? {
                offset += chunk.bytes.len() as u64;
                hashes.extend(chunk.hashes);
                fingerprints.extend(chunk.fingerprints);
                ready = Some(chunk.bytes);
            }
        }
        let root = GrainTree::from_hashes(len_bytes, hashes)?.root();
        let info = BlockInfo { len_bytes, root, fingerprints };
        let trailer = BlockTrailer { root, fingerprints: info.fingerprints.clone() };
        if refused.is_none() {
            let frame = message_to_bytes(&trailer, "a block's trailer").map_err(|source| {
                SaveError::Refused(CallError::Wire { call: "PutBlock", to: String::new(), source })
            })?;
            refused = exchange.write_frame(frame).await.err();
        }
        if refused.is_none() {
            refused = exchange.finish().await.err();
        }
        Ok((info, refused))
    }

    async fn read_hashed_chunk(
        &self,
        block_start: u64,
        offset_in_block: u64,
        len: u64,
        block_len_bytes: u64,
    ) -> Result<HashedChunk, SaveError> {
        let (source, key, name) = (self.source.clone(), self.key.clone(), self.name.clone());
        let job = move || {
            let bytes = match source.bytes_in_memory(block_start + offset_in_block, len as usize) {
                Some(bytes) => bytes,
                None => {
                    let mut bytes = vec![0; len as usize];
                    let read = source.read_at(block_start + offset_in_block, &mut bytes);
                    read.map_err(|source| SaveError::Source {
                        shard: name,
                        offset: block_start + offset_in_block,
                        source,
                    })?;
                    Bytes::from(bytes)
                }
            };
            let first = offset_in_block / GRAIN_BYTES;
            let mut chunk =
                HashedChunk { bytes: Bytes::new(), hashes: Vec::new(), fingerprints: Vec::new() };
            for (grain, index) in bytes.chunks(GRAIN_BYTES as usize).zip(first..) {
                chunk.hashes.extend(grain_hash(block_len_bytes, index, grain));
                chunk.fingerprints.push(key.fingerprint(grain)?);
            }
            chunk.bytes = bytes;
            Ok(chunk)
        };
        self.workers.run(job).await?
    }

    /// Makes the stripe's record durable on all of its nodes that can be reached.
    ///
    /// # Errors
    /// [`SaveError::NoHolders`] if fewer than n-k+1 nodes have the record.
    pub async fn put_stripe_record(
        &self,
        fixed: &StripeFixed,
        record: &StripeRecord,
        places: &[NodeId],
    ) -> Result<(), SaveError> {
        let stripe = fixed.stripe;
        let call = PutRecord {
            shard: stripe.shard,
            record: RecordName::Stripe { index: stripe.index },
            generation: self.generation,
            bytes: record.to_bytes()?,
        };
        let puts = places.iter().map(|&node| {
            let call = &call;
            async move {
                let Some(to) = self.directory.address(node) else {
                    return Err(format!("node {node} is not registered"));
                };
                self.caller.call(&to, call).await.map_err(|error| error.to_string())
            }
        });
        let results = join_all(puts).await;
        let failures: Vec<String> = results.into_iter().filter_map(Result::err).collect();
        let needed = self.layout.n() - self.layout.k() + 1;
        if places.len() - failures.len() < needed {
            let failed =
                format!("{} of the {} holders of its record", failures.len(), places.len());
            return Err(SaveError::NoHolders { stripe, failed, reason: failures.join("; ") });
        }
        Ok(())
    }
}

struct HashedChunk {
    bytes: Bytes,
    hashes: Vec<[u8; 32]>,
    fingerprints: Vec<Fingerprint>,
}
