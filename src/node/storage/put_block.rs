//! Stores blocks. A client sends a block to its first holder, which stores it and at the same time
//! forwards it to the second holder.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::StorageError;
use super::fencing::Fencing;
use crate::budget::Reservation;
use crate::clock::deadline;
use crate::format::records::LAYOUT_STANDARD;
use crate::gf::{Fingerprint, FingerprintKey};
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Exchange, address};
use crate::net::frame::FramedRecv;
use crate::node::budgets::{Budgets, reserve_memory};
use crate::node::context::NodeContext;
use crate::node::incoming_call::{IncomingCall, Request};
use crate::node::storage::full_disk::exceeds_high_water;
use crate::pipeline::executor::{SEND_BYTES, STREAM_WINDOW_BYTES};
use crate::stage::{TracePoint, trace_point};
use crate::store::{BLOCK_WRITER_BYTES, BlockSpec, BlockWriter};
use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES};
use crate::wire::calls::{BlockAdmitted, BlockTrailer, PutBlock, PutBlockAnswer};
use crate::wire::{BULK_CHUNK_BYTES, NodeAddress, RemoteError, message_to_bytes, parse_message};

/// Time without progress after which a peer counts as failed.
pub(super) const STALL_LIMIT: Duration = Duration::from_secs(15);
/// Maximum time that the first holder of a block waits until the second has stored it, after the
/// last byte. A slow disk that is to sync many blocks at once needs long, and a node that is gone is
/// noticed by its connection.
const SYNC_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time that the first holder of a block waits until the second has admitted it. It is
/// longer than [`MEMORY_LIMIT`](crate::node::budgets::MEMORY_LIMIT), so that the second holder's
/// own answer comes first.
const FORWARD_LIMIT: Duration = Duration::from_secs(8);
/// Maximum time that a block waits for a slot of its second holder. This, [`FORWARD_LIMIT`] and
/// [`MEMORY_LIMIT`](crate::node::budgets::MEMORY_LIMIT) together are shorter than a client waits.
const SLOT_LIMIT: Duration = Duration::from_secs(2);
/// Maximum number of blocks that a node forwards to one second holder at once. A connection carries
/// at most 256 calls at once. The rest is left for other calls, such as the renewal of the lease.
const FORWARDS_AT_ONCE: usize = 128;
/// Working memory of one incoming block, in bytes: its stream, the stream to its second holder, the
/// writer, the trailer, and chunks in transit.
pub(in crate::node) const PUT_MEMORY_BYTES: u64 = STREAM_WINDOW_BYTES
    + SEND_BYTES
    + BLOCK_WRITER_BYTES
    + MAX_TRAILER_BYTES
    + 3 * BULK_CHUNK_BYTES as u64;
/// Maximum length of a [`BlockTrailer`]: a root, a count, and 16 bytes for each grain.
const MAX_TRAILER_BYTES: u64 = 64 + 16 * (MAX_BLOCK_BYTES / GRAIN_BYTES);

/// An admitted block: the memory reserved for it, and the call to its second holder.
struct AdmittedBlock {
    memory: Reservation,
    forward: Option<BlockForward>,
}

/// The service that stores blocks which clients or first holders send, and forwards them to their
/// second holders.
pub(in crate::node) struct BlockWrites {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    budgets: Arc<Budgets>,
    forward_slots: ForwardSlots,
}

/// The slots for blocks on their way to second holders, [`FORWARDS_AT_ONCE`] for each holder.
#[derive(Default)]
struct ForwardSlots {
    holders: Mutex<HashMap<NodeAddress, Weak<Semaphore>>>,
}

impl ForwardSlots {
    /// Returns the slots of the second holder `to`. Unused slots are dropped.
    fn of(&self, to: &NodeAddress) -> Arc<Semaphore> {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|_, slots| slots.strong_count() > 0);
        if let Some(slots) = holders.get(to).and_then(Weak::upgrade) {
            return slots;
        }
        let slots = Arc::new(Semaphore::new(FORWARDS_AT_ONCE));
        holders.insert(to.clone(), Arc::downgrade(&slots));
        slots
    }
}

impl BlockWrites {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        budgets: Arc<Budgets>,
    ) -> Self {
        Self { context, fencing, budgets, forward_slots: ForwardSlots::default() }
    }

    /// Reads the next chunk of at most `left_bytes` bytes.
    pub(super) async fn read_next_chunk(
        &self,
        recv: &mut FramedRecv,
        left_bytes: u64,
    ) -> Result<Bytes, RemoteError> {
        let want = left_bytes.min(BULK_CHUNK_BYTES as u64) as usize;
        Ok(deadline(&*self.context.clock, STALL_LIMIT, recv.read_exact(want)).await??)
    }

    /// Stores a block that a client or its first holder sends, and forwards it to its second holder
    /// if the call names one.
    pub(in crate::node) async fn put_block(
        self: &Arc<Self>,
        request: Request,
        mut served: IncomingCall,
    ) {
        let answer = match request.parse::<PutBlock>() {
            Ok(call) => match self.receive_and_store_block(call, &mut served).await {
                Ok(Some(answer)) => Ok(answer),
                Ok(None) => return,
                Err(failure) => Err(failure),
            },
            Err(error) => Err(error.into()),
        };
        if let Err(failure) = &answer {
            tracing::warn!(peer = %served.peer, %failure, "a block was not stored");
        }
        let stored = answer.is_ok();
        if served.answer(answer).await {
            let _ = served.send.finish().await;
        }
        if !stored {
            served.recv.stop(ErrorKind::Invalid.wire_code());
        }
    }

    /// Checks that a new block of `bytes` bytes keeps the disk under its high-water mark.
    ///
    /// # Errors
    /// [`StorageError::HighWaterReached`] if it does not.
    fn check_below_high_water(&self, bytes: u64) -> Result<(), RemoteError> {
        let space = self.context.store.disk_space()?;
        let percent = self.context.settings.high_water_percent;
        if exceeds_high_water(space, bytes, percent) {
            let node = self.context.settings.name.clone();
            return Err(StorageError::HighWaterReached { node, percent }.into());
        }
        Ok(())
    }

    /// Admits and stores a block. Returns `None` if the second holder did not admit the block,
    /// which the sender has been told, or if the sender is gone.
    async fn receive_and_store_block(
        self: &Arc<Self>,
        call: PutBlock,
        served: &mut IncomingCall,
    ) -> Result<Option<PutBlockAnswer>, RemoteError> {
        if call.len_bytes == 0 || call.len_bytes > MAX_BLOCK_BYTES {
            return Err(StorageError::BlockLengthInvalid { len_bytes: call.len_bytes }.into());
        }
        self.fencing.check_client_may_write(call.stripe.shard, call.generation).await?;
        self.check_below_high_water(call.len_bytes)?;
        let AdmittedBlock { memory: _memory, mut forward } =
            match self.admit_on_both_holders(&call).await? {
                Ok(admitted) => admitted,
                Err(refused) => {
                    let second_refused = Some((refused.kind.wire_code(), refused.message));
                    if served.answer(Ok(BlockAdmitted { second_refused })).await {
                        let _ = served.send.finish().await;
                    }
                    return Ok(None);
                }
            };
        if !served.answer(Ok(BlockAdmitted { second_refused: None })).await {
            return Ok(None);
        }
        let fingerprints: Arc<Mutex<Vec<Fingerprint>>> = Arc::default();
        let writer = self.create_fingerprinting_writer(&call, fingerprints.clone()).await?;
        let recv = &mut served.recv;
        let writer =
            self.receive_write_and_forward(recv, call.len_bytes, writer, forward.as_mut()).await?;
        let frame = recv.read_frame(MAX_TRAILER_BYTES as usize);
        let frame = deadline(&*self.context.clock, STALL_LIMIT, frame).await??;
        let trailer: BlockTrailer =
            parse_message(&frame.ok_or(StorageError::TrailerMissing)?, "a block's trailer")?;
        if *fingerprints.lock().unwrap_or_else(PoisonError::into_inner) != trailer.fingerprints {
            let PutBlock { stripe, block, .. } = call;
            return Err(StorageError::FingerprintMismatch { block, stripe }.into());
        }
        let root = trailer.root;
        let forwarding = async {
            match forward {
                Some(forward) => {
                    Some(forward.send_trailer_and_finish(&self.context, &trailer).await)
                }
                None => None,
            }
        };
        trace_point(TracePoint::Block, format_args!("{}/{}", call.stripe, call.block));
        let finishing = self
            .fencing
            .write_unless_removed(call.stripe.shard.save(), move |_| writer.finish(Some(root)));
        let (stored, forwarded) = tokio::join!(finishing, forwarding);
        stored?;
        Ok(Some(PutBlockAnswer { forwarded }))
    }

    /// Creates the writer of the block. It adds the fingerprint of each grain to `fingerprints`.
    async fn create_fingerprinting_writer(
        &self,
        call: &PutBlock,
        fingerprints: Arc<Mutex<Vec<Fingerprint>>>,
    ) -> Result<BlockWriter, RemoteError> {
        let key = FingerprintKey::derive(&call.fingerprint_key);
        let spec = BlockSpec {
            stripe: call.stripe,
            block: call.block,
            layout: LAYOUT_STANDARD,
            len_bytes: call.len_bytes,
        };
        let fingerprint = Box::new(move |_, grain: &[u8]| {
            // The writer cuts the block into grains, so a grain is at most 64 KiB here.
            let value = key.fingerprint(grain).unwrap_or(Fingerprint::ZERO);
            fingerprints.lock().unwrap_or_else(PoisonError::into_inner).push(value);
        });
        self.context
            .run_on_store(move |store| store.create_block_writer(spec, Some(fingerprint)))
            .await
    }

    /// Receives the bytes of a block, writes them, and forwards them to the second holder at the
    /// same time. Returns the writer.
    async fn receive_write_and_forward(
        &self,
        recv: &mut FramedRecv,
        len_bytes: u64,
        mut writer: BlockWriter,
        mut forward: Option<&mut BlockForward>,
    ) -> Result<BlockWriter, RemoteError> {
        let mut left = len_bytes;
        while left > 0 {
            let chunk = self.read_next_chunk(recv, left).await?;
            left -= chunk.len() as u64;
            let forwarding = async {
                if let Some(forward) = &mut forward {
                    forward.send_chunk(&self.context, chunk.clone()).await;
                }
            };
            let (stored, ()) = tokio::join!(self.write_chunk(writer, chunk.clone()), forwarding);
            writer = stored?;
        }
        Ok(writer)
    }

    /// Reserves the memory of a block on this node and on its second holder, in node-id order, so
    /// that blocks from A to B and blocks from B to A never wait for each other. Returns the
    /// admitted block. The inner error is that of the second holder, or of the call to it.
    async fn admit_on_both_holders(
        &self,
        call: &PutBlock,
    ) -> Result<Result<AdmittedBlock, RemoteError>, RemoteError> {
        let mine = || reserve_memory(&self.context, &self.budgets.save, PUT_MEMORY_BYTES);
        let Some(to) = &call.forward else {
            return Ok(Ok(AdmittedBlock { memory: mine().await?, forward: None }));
        };
        let (memory, forward);
        if self.context.id < NodeId::of(&to.name) {
            memory = mine().await?;
            forward = self.open_forward(to, call).await;
        } else {
            forward = self.open_forward(to, call).await;
            memory = mine().await?;
        }
        Ok(forward.map(|forward| AdmittedBlock { memory, forward: Some(forward) }))
    }

    /// Takes a slot and opens the call that forwards a block to its second holder.
    async fn open_forward(
        &self,
        to: &NodeAddress,
        call: &PutBlock,
    ) -> Result<BlockForward, RemoteError> {
        let (node, second) = (self.context.settings.name.clone(), to.name.clone());
        let slot = self.forward_slots.of(to).acquire_owned();
        match deadline(&*self.context.clock, SLOT_LIMIT, slot).await {
            Ok(Ok(slot)) => BlockForward::open(&self.context, to, call, slot).await,
            _ => Err(StorageError::TooManyForwards { node, second }.into()),
        }
    }

    /// Appends a chunk to a block. Returns the writer.
    pub(super) async fn write_chunk(
        &self,
        mut writer: BlockWriter,
        chunk: Bytes,
    ) -> Result<BlockWriter, RemoteError> {
        self.context.run_on_store(move |_| writer.write(&chunk).map(|()| writer)).await
    }
}

/// The call that forwards a block to its second holder. Once both holders have admitted the block,
/// a failure of this call does not prevent the first holder from storing it.
struct BlockForward {
    exchange: Result<Exchange, String>,
    _slot: OwnedSemaphorePermit,
}

impl BlockForward {
    /// Opens the call to the second holder. Returns when that node has reserved the memory for the
    /// block.
    async fn open(
        context: &NodeContext,
        to: &NodeAddress,
        call: &PutBlock,
        slot: OwnedSemaphorePermit,
    ) -> Result<Self, RemoteError> {
        let call = PutBlock { forward: None, ..call.clone() };
        let open = async {
            let mut exchange = context.caller.open(&address(to), &call).await?;
            let _: BlockAdmitted = exchange.answer().await?;
            Ok::<_, CallError>(exchange)
        };
        match deadline(&*context.clock, FORWARD_LIMIT, open).await {
            Ok(Ok(exchange)) => Ok(Self { exchange: Ok(exchange), _slot: slot }),
            Ok(Err(CallError::Failed(refusal))) => Err(refusal),
            // The call to the second holder failed. This must not look like a refusal by that node,
            // so the error has a kind of its own, `Timeout`.
            Ok(Err(error)) => Err(StorageError::ForwardUnanswered(error).into()),
            Err(late) => Err(StorageError::ForwardLate { node: to.name.clone(), late }.into()),
        }
    }

    /// Sends a chunk. After a failure it does nothing.
    async fn send_chunk(&mut self, context: &NodeContext, chunk: Bytes) {
        if let Ok(exchange) = &mut self.exchange {
            let failed = match deadline(&*context.clock, STALL_LIMIT, exchange.write(chunk)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(late) => late.to_string(),
            };
            self.exchange = Err(self.fetch_failure_reason(context, failed).await);
        }
    }

    /// Returns why the second holder ended the stream: its own error if it sent one, otherwise
    /// `fallback`. A holder that refuses answers before it stops the stream.
    async fn fetch_failure_reason(&mut self, context: &NodeContext, fallback: String) -> String {
        let Ok(exchange) = &mut self.exchange else { return fallback };
        match deadline(&*context.clock, Duration::from_secs(1), exchange.answer::<PutBlockAnswer>())
            .await
        {
            Ok(Err(error)) if !error.is_unanswered() => error.to_string(),
            _ => fallback,
        }
    }

    /// Sends the trailer and waits until the second holder has stored the block.
    async fn send_trailer_and_finish(
        self,
        context: &NodeContext,
        trailer: &BlockTrailer,
    ) -> Result<(), String> {
        let mut exchange = self.exchange?;
        let frame =
            message_to_bytes(trailer, "a block's trailer").map_err(|error| error.to_string())?;
        let finish = async {
            exchange.write_frame(frame).await?;
            exchange.finish().await
        };
        let finished = deadline(&*context.clock, STALL_LIMIT, finish).await;
        finished.map_err(|late| late.to_string())?.map_err(|error| error.to_string())?;
        let answer = exchange.answer::<PutBlockAnswer>();
        match deadline(&*context.clock, SYNC_LIMIT, answer).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(late) => Err(late.to_string()),
        }
    }
}
