//! Bulk data: blocks that come in and are forwarded, files that are read, replicas made again, parts of plans.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use super::fencing::receipt_name;
use crate::budget::{Budget, Reservation};
use crate::clock::deadline;
use crate::format::file::{FileKey, FileName};
use crate::format::records::LAYOUT_STANDARD;
use crate::gf::{Fingerprint, FingerprintKey};
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Exchange, address};
use crate::net::frame::FramedRecv;
use crate::node::Node;
use crate::node::rpc::dispatch::{OpenCall, Request};
use crate::node::rpc::failure::remote_error;
use crate::pipeline::executor::HopError;
use crate::pipeline::executor::RunError;
use crate::pipeline::executor::{SEND_BYTES, STREAM_WINDOW_BYTES};
use crate::pipeline::read::report_damage;
use crate::plan::Input;
use crate::stage::{TracePoint, trace_point};
use crate::store::{
    BLOCK_WRITER_BYTES, BlockSpec, BlockWriter, FileInfo, RecordScope, SourceFile, Store,
    StoreError,
};
use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES};
use crate::wire::calls::{
    BlockAdmitted, BlockTrailer, CopyReplica, FileView, ListFiles, PutBlock, PutBlockAnswer,
    ReadFile, ReadFileAnswer, ReadSource, ReleasePart, ReservePart, RunPart, VerifyFile,
};
use crate::wire::order::RunReport;
use crate::wire::{BULK_CHUNK_BYTES, NodeAddress, RemoteError, message_to_bytes, parse_message};

/// A peer that sends or takes nothing for so long has failed.
const STALL_LIMIT: Duration = Duration::from_secs(15);
/// How long a block or a read waits for memory.
const MEMORY_LIMIT: Duration = Duration::from_secs(6);
/// How long the first holder of a block waits until the second has admitted it. Longer than [`MEMORY_LIMIT`], so that the
/// second's own answer comes first; with it, shorter than a client waits.
const FORWARD_LIMIT: Duration = Duration::from_secs(8);
/// What one incoming block works in: its stream, the one to its second holder, the writer, the trailer, and chunks on their way.
pub(in crate::node) const PUT_BYTES: u64 = STREAM_WINDOW_BYTES
    + SEND_BYTES
    + BLOCK_WRITER_BYTES
    + MAX_TRAILER_BYTES
    + 3 * BULK_CHUNK_BYTES as u64;
/// The longest [`BlockTrailer`]: a root, a count, and 16 bytes a grain.
const MAX_TRAILER_BYTES: u64 = 64 + 16 * (MAX_BLOCK_BYTES / GRAIN_BYTES);
/// What one read works in.
const READ_BYTES: u64 = 4 * BULK_CHUNK_BYTES as u64;

/// A block that may come in: the memory for it, and the way to its second holder.
struct AdmittedBlock {
    memory: Reservation,
    forward: Option<Forward>,
}

/// A part of a file that is sent to a reader.
struct OpenRead {
    file: Arc<SourceFile>,
    from: u64,
    end: u64,
    memory: Reservation,
}

impl Node {
    pub(in crate::node) async fn reserve_memory(
        &self,
        share: &Arc<Budget>,
        bytes: u64,
    ) -> Result<Reservation, RemoteError> {
        match deadline(&*self.context.clock, MEMORY_LIMIT, share.reserve(bytes)).await {
            Ok(Ok(reservation)) => Ok(reservation),
            Ok(Err(never)) => Err(remote_error(ErrorKind::Invalid, never.to_string())),
            Err(_) => Err(remote_error(
                ErrorKind::Busy,
                format!(
                    "node {} has no memory free for this now: try again",
                    self.context.settings.name
                ),
            )),
        }
    }

    async fn next_chunk(&self, recv: &mut FramedRecv, left: u64) -> Result<Bytes, RemoteError> {
        let want = left.min(BULK_CHUNK_BYTES as u64) as usize;
        Ok(deadline(&*self.context.clock, STALL_LIMIT, recv.read_exact(want)).await??)
    }

    pub(in crate::node) async fn put_block(
        self: &Arc<Self>,
        request: Request,
        mut served: OpenCall,
    ) {
        let answer = match request.parse::<PutBlock>() {
            Ok(call) => match self.store_block(call, &mut served).await {
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
        if self.answer(&mut served, answer).await {
            let _ = served.send.finish().await;
        }
        if !stored {
            served.recv.stop(ErrorKind::Invalid.wire_code());
        }
    }

    fn check_room(&self, bytes: u64) -> Result<(), RemoteError> {
        let space = self.context.store.space()?;
        let used = space.total_bytes.saturating_sub(space.free_bytes).saturating_add(bytes);
        let limit = space.total_bytes / 100 * u64::from(self.context.settings.high_water_percent);
        if used > limit {
            let text = format!(
                "the disk of node {} is over its high-water mark of {} %: archive or remove checkpoints, or add disk",
                self.context.settings.name, self.context.settings.high_water_percent
            );
            // Not busy: this will not pass while somebody waits, and another node takes the block.
            return Err(remote_error(ErrorKind::Unavailable, text));
        }
        Ok(())
    }

    /// `None`: it was not admitted, which the sender knows.
    async fn store_block(
        self: &Arc<Self>,
        call: PutBlock,
        served: &mut OpenCall,
    ) -> Result<Option<PutBlockAnswer>, RemoteError> {
        if call.len_bytes == 0 || call.len_bytes > MAX_BLOCK_BYTES {
            let text =
                format!("a block of {} bytes: expected 1 to {MAX_BLOCK_BYTES}", call.len_bytes);
            return Err(remote_error(ErrorKind::Invalid, text));
        }
        self.fencing.check_writable(call.stripe.shard, call.generation).await?;
        self.check_room(call.len_bytes)?;
        let AdmittedBlock { memory: _memory, mut forward } = match self.admit_block(&call).await? {
            Ok(admitted) => admitted,
            Err(refused) => {
                let answer = BlockAdmitted {
                    second_refused: Some((refused.kind.wire_code(), refused.message)),
                };
                if self.answer(served, Ok(answer)).await {
                    let _ = served.send.finish().await;
                }
                return Ok(None);
            }
        };
        if !self.answer(served, Ok(BlockAdmitted { second_refused: None })).await {
            return Ok(None);
        }
        let recv = &mut served.recv;
        let key = Arc::new(FingerprintKey::derive(&call.fingerprint_key));
        let found: Arc<Mutex<Vec<Fingerprint>>> = Arc::default();
        let collect = found.clone();
        let spec = BlockSpec {
            stripe: call.stripe,
            block: call.block,
            layout: LAYOUT_STANDARD,
            len_bytes: call.len_bytes,
        };
        let fingerprint = Box::new(move |_, grain: &[u8]| {
            // A grain is at most 64 KiB here: the writer cuts it.
            let value = key.fingerprint(grain).unwrap_or(Fingerprint::ZERO);
            collect.lock().unwrap_or_else(PoisonError::into_inner).push(value);
        });
        let mut writer =
            self.context.on_store(move |store| store.write_block(spec, Some(fingerprint))).await?;
        let mut left = call.len_bytes;
        while left > 0 {
            let chunk = self.next_chunk(recv, left).await?;
            left -= chunk.len() as u64;
            let forwarding = async {
                if let Some(forward) = &mut forward {
                    forward.write(self, chunk.clone()).await;
                }
            };
            let (stored, ()) = tokio::join!(self.write_chunk(writer, chunk.clone()), forwarding);
            writer = stored?;
        }
        let frame = recv.read_frame(MAX_TRAILER_BYTES as usize);
        let frame = deadline(&*self.context.clock, STALL_LIMIT, frame).await??;
        let missing = || remote_error(ErrorKind::Invalid, "the block's trailer is missing");
        let trailer: BlockTrailer =
            parse_message(&frame.ok_or_else(missing)?, "a block's trailer")?;
        if *found.lock().unwrap_or_else(PoisonError::into_inner) != trailer.fingerprints {
            let text = format!(
                "block {} of stripe {} came with other fingerprints than its sender computed: send it again",
                call.block, call.stripe
            );
            return Err(remote_error(ErrorKind::Corrupt, text));
        }
        let root = trailer.root;
        let forwarding = async {
            match forward {
                Some(forward) => Some(forward.finish(self, &trailer).await),
                None => None,
            }
        };
        trace_point(TracePoint::Block, format_args!("{}/{}", call.stripe, call.block));
        let finishing = self.context.on_store(move |_| writer.finish(Some(root)));
        let (stored, forwarded) = tokio::join!(finishing, forwarding);
        stored?;
        self.fencing.ensure_not_removed(call.stripe.shard.save()).await?;
        Ok(Some(PutBlockAnswer { forwarded }))
    }

    /// Takes the memory of a block here and at its second holder, in node-id order: blocks on their way from A to B never wait
    /// for those from B to A while these wait for them. The inner error is the second holder's.
    async fn admit_block(
        &self,
        call: &PutBlock,
    ) -> Result<Result<AdmittedBlock, RemoteError>, RemoteError> {
        let mine = || self.reserve_memory(&self.budgets.save, PUT_BYTES);
        let Some(to) = &call.forward else {
            return Ok(Ok(AdmittedBlock { memory: mine().await?, forward: None }));
        };
        let (memory, forward);
        if self.context.id < NodeId::of(&to.name) {
            memory = mine().await?;
            forward = Forward::open(self, to, call).await;
        } else {
            forward = Forward::open(self, to, call).await;
            memory = mine().await?;
        }
        Ok(forward.map(|forward| AdmittedBlock { memory, forward: Some(forward) }))
    }

    async fn write_chunk(
        &self,
        mut writer: BlockWriter,
        chunk: Bytes,
    ) -> Result<BlockWriter, RemoteError> {
        self.context.on_store(move |_| writer.write(&chunk).map(|()| writer)).await
    }

    pub(in crate::node) async fn read_file(self: &Arc<Self>, request: Request, served: OpenCall) {
        let prepared = match request.parse::<ReadFile>() {
            Ok(call) => self.open_read(call).await,
            Err(error) => Err(error.into()),
        };
        self.send_file(prepared, served).await;
    }

    pub(in crate::node) async fn read_source(self: &Arc<Self>, request: Request, served: OpenCall) {
        let prepared = match request.parse::<ReadSource>() {
            Ok(call) => self.open_source(call).await,
            Err(error) => Err(error.into()),
        };
        self.send_file(prepared, served).await;
    }

    async fn send_file(
        self: &Arc<Self>,
        prepared: Result<(OpenRead, ReadFileAnswer), RemoteError>,
        mut served: OpenCall,
    ) {
        let (OpenRead { file, mut from, end, memory: _memory }, answer) = match prepared {
            Ok(prepared) => prepared,
            Err(refusal) => return self.refuse(served, refusal).await,
        };
        if !self.answer(&mut served, Ok(answer)).await {
            return;
        }
        while from < end {
            let len = (end - from).min(BULK_CHUNK_BYTES as u64);
            let source = file.clone();
            let read = move |_: &Store| {
                let mut chunk = vec![0; len as usize];
                source.read(from, &mut chunk);
                Ok::<_, StoreError>(chunk)
            };
            let Ok(chunk) = self.context.on_store(read).await else {
                return served.send.reset(ErrorKind::Io.wire_code());
            };
            match deadline(&*self.context.clock, STALL_LIMIT, served.send.write(chunk.into())).await
            {
                Ok(Ok(())) => from += len,
                _ => return served.send.reset(ErrorKind::Timeout.wire_code()),
            }
        }
        let _ = served.send.finish().await;
    }

    async fn open_read(&self, call: ReadFile) -> Result<(OpenRead, ReadFileAnswer), RemoteError> {
        let key = FileKey { stripe: call.stripe, name: call.file };
        let memory = self.reserve_memory(&self.budgets.restore, READ_BYTES).await?;
        let file = self.context.on_store(move |store| store.open_file(key)).await?;
        let len_bytes = file.info().len_bytes;
        let end = call.from.checked_add(call.len_bytes).filter(|end| *end <= len_bytes);
        let Some(end) = end else {
            let text = format!(
                "{key} has {len_bytes} bytes; asked for {} from {}",
                call.len_bytes, call.from
            );
            return Err(remote_error(ErrorKind::Invalid, text));
        };
        let hashes = if call.hashes { file.tree().hashes().to_vec() } else { Vec::new() };
        let file = Arc::new(file.into_source());
        let sending = OpenRead { file, from: call.from, end, memory };
        Ok((sending, ReadFileAnswer { len_bytes, hashes }))
    }

    async fn open_source(
        &self,
        call: ReadSource,
    ) -> Result<(OpenRead, ReadFileAnswer), RemoteError> {
        let key = FileKey { stripe: call.stripe, name: call.file };
        let end = call.from.checked_add(call.len_bytes).filter(|end| *end <= MAX_BLOCK_BYTES);
        let end = end.ok_or_else(|| {
            let text =
                format!("{} bytes from {} on are more than a block", call.len_bytes, call.from);
            remote_error(ErrorKind::Invalid, text)
        })?;
        let memory = self.reserve_memory(&self.budgets.restore, READ_BYTES).await?;
        let file = self.context.on_store(move |store| store.open_source(key)).await?;
        let answer = match file.tail() {
            Some((header, tree)) => {
                let hashes = if call.hashes { tree.hashes().to_vec() } else { Vec::new() };
                ReadFileAnswer { len_bytes: header.len_bytes, hashes }
            }
            None => ReadFileAnswer { len_bytes: 0, hashes: Vec::new() },
        };
        Ok((OpenRead { file: Arc::new(file), from: call.from, end, memory }, answer))
    }

    pub(in crate::node) async fn list_files(
        &self,
        call: ListFiles,
    ) -> Result<Vec<FileView>, RemoteError> {
        let files = self.context.on_store(move |store| store.find(call.stripe)).await?;
        let view = |info: &FileInfo| FileView {
            file: info.content.name(),
            len_bytes: info.len_bytes,
            root: info.root,
        };
        Ok(files.iter().map(view).collect())
    }

    pub(in crate::node) async fn copy_replica(&self, call: CopyReplica) -> Result<(), RemoteError> {
        self.ensure_replicated(call.stripe).await?;
        self.fencing.check_order(call.stripe.shard, call.generation, call.coordinator).await?;
        let copied = self.store_copy(&call).await;
        let is_bad =
            |error: &RemoteError| matches!(error.kind, ErrorKind::Corrupt | ErrorKind::NotFound);
        match copied {
            Err(error) if is_bad(&error) => {
                // The source looks for itself, so that the next coordinator finds it damaged.
                let file = FileName::Replica { block: call.block };
                report_damage(&self.context.caller, &call.from, call.stripe, file).await;
                tracing::info!(stripe = %call.stripe, %error, "a replica is gathered from grains");
                self.rebuild_from_grains(call.stripe, call.block).await?;
            }
            copied => copied?,
        }
        self.fencing.ensure_not_removed(call.stripe.shard.save()).await?;
        self.ensure_replicated(call.stripe).await
    }

    async fn store_copy(&self, call: &CopyReplica) -> Result<(), RemoteError> {
        if call.len_bytes == 0 || call.len_bytes > MAX_BLOCK_BYTES {
            return Err(remote_error(
                ErrorKind::Invalid,
                format!("a block of {} bytes", call.len_bytes),
            ));
        }
        // Above the high-water mark too: what was saved has the room that is kept from new saves.
        self.executor.check_room(call.len_bytes)?;
        let key = FileKey::replica(call.stripe, call.block);
        // What lies there under the name is missing or was found damaged, which is noted before the good copy takes the name.
        let _ = self.check_file(key).await;
        let _memory = self.reserve_memory(&self.budgets.save, PUT_BYTES).await?;
        let read = ReadFile {
            stripe: call.stripe,
            file: key.name,
            from: 0,
            len_bytes: call.len_bytes,
            hashes: false,
        };
        let to = address(&call.from);
        let mut exchange = self.context.caller.open(&to, &read).await?;
        exchange.finish().await?;
        let answer: ReadFileAnswer =
            deadline(&*self.context.clock, STALL_LIMIT, exchange.answer()).await??;
        if answer.len_bytes != call.len_bytes {
            let text = format!("{key} on node {} is not the block of the record", call.from.name);
            return Err(remote_error(ErrorKind::Corrupt, text));
        }
        let spec = BlockSpec {
            stripe: call.stripe,
            block: call.block,
            layout: LAYOUT_STANDARD,
            len_bytes: call.len_bytes,
        };
        let mut writer = self.context.on_store(move |store| store.write_block(spec, None)).await?;
        let mut left = call.len_bytes;
        while left > 0 {
            let chunk = self.next_chunk(&mut exchange.recv, left).await?;
            left -= chunk.len() as u64;
            writer = self.write_chunk(writer, chunk).await?;
        }
        // Whatever the source is or says: the bytes are those of the record, or none.
        let root = call.root;
        trace_point(TracePoint::Fetch, key);
        self.context.on_store(move |_| writer.finish(Some(root))).await?;
        Ok(())
    }

    pub(in crate::node) async fn reserve_part(&self, call: ReservePart) -> Result<(), RemoteError> {
        let order = call.order;
        self.fencing.check_order(order.stripe.shard, order.generation, order.coordinator).await?;
        Ok(self.executor.reserve(order).await?)
    }

    /// The run is a task of its own: its coordinator gives it up as soon as it hears of any failure, perhaps that of a neighbour, and
    /// what was written here, or found rotten, has to be looked after all the same.
    pub(in crate::node) async fn run_part(
        self: &Arc<Self>,
        call: RunPart,
    ) -> Result<RunReport, RemoteError> {
        let given_up = self.stop.child_token();
        let _when_dropped = given_up.clone().drop_guard();
        let node = self.clone();
        let work = self.tasks.spawn(async move { node.execute_part(call.run, &given_up).await });
        work.await.map_err(|_| remote_error(ErrorKind::Internal, "the run's task did not end"))?
    }

    async fn execute_part(
        &self,
        run: [u8; 16],
        given_up: &CancellationToken,
    ) -> Result<RunReport, RemoteError> {
        let Some((stripe, blocks)) = self.executor.inputs(run) else {
            return Err(RunError::Unknown.into());
        };
        let result = self.executor.run(run, given_up).await;
        self.fencing.ensure_not_removed(stripe.shard.save()).await?;
        if let Err(error) = &result {
            tracing::warn!(node = %self.context.settings.name, %error, "a part of a plan failed");
            if let RunError::Store(StoreError::Conflict { key })
            | RunError::Hop { source: HopError::Store(StoreError::Conflict { key }), .. } = error
            {
                self.quarantine_unproven(*key).await?;
            }
            let rotten = match error {
                RunError::Hop {
                    source: HopError::Corrupt { input: Input::Block(block), .. },
                    ..
                } => vec![*block],
                RunError::Store(_) | RunError::Hop { source: HopError::Store(_), .. } => blocks,
                _ => Vec::new(),
            };
            for block in rotten {
                // A damaged replica is noted, so that the coordinator has it made again.
                let file = FileName::Replica { block };
                let _ = self.verify_file(VerifyFile { stripe, file }).await;
            }
        }
        Ok(result?)
    }

    /// An unequal piece of an attempt without a receipt was never proven: it makes room for the next try.
    async fn quarantine_unproven(&self, key: FileKey) -> Result<(), RemoteError> {
        let FileName::Piece { attempt, .. } = key.name else { return Ok(()) };
        self.context
            .on_store(move |store| {
                let judged = store.open_file(key)?;
                let receipt = store
                    .get_record_file(RecordScope::Stripe(key.stripe), &receipt_name(attempt))?;
                if receipt.is_none() {
                    let why = "another piece of the same attempt, never proven";
                    store.quarantine(key, Some(&judged), why)?;
                }
                Ok::<_, StoreError>(())
            })
            .await
    }

    pub(in crate::node) async fn release_part(&self, call: ReleasePart) -> Result<(), RemoteError> {
        self.executor.release(call.run);
        Ok(())
    }
}

/// A block on its way to its second holder. It fails for itself: the first copy is stored all the same.
struct Forward {
    exchange: Result<Exchange, String>,
}

impl Forward {
    /// Returns when the second holder has taken the memory for it.
    async fn open(node: &Node, to: &NodeAddress, call: &PutBlock) -> Result<Self, RemoteError> {
        let call = PutBlock { forward: None, ..call.clone() };
        let open = async {
            let mut exchange = node.context.caller.open(&address(to), &call).await?;
            let _: BlockAdmitted = exchange.answer().await?;
            Ok::<_, CallError>(exchange)
        };
        match deadline(&*node.context.clock, FORWARD_LIMIT, open).await {
            Ok(Ok(exchange)) => Ok(Self { exchange: Ok(exchange) }),
            Ok(Err(CallError::Failed(refusal))) => Err(refusal),
            // The error is this node's, not the second holder's, which must not count as having refused.
            Ok(Err(error)) => Err(remote_error(ErrorKind::Timeout, error.to_string())),
            Err(late) => Err(remote_error(ErrorKind::Timeout, format!("{}: {late}", to.name))),
        }
    }

    async fn write(&mut self, node: &Node, chunk: Bytes) {
        if let Ok(exchange) = &mut self.exchange {
            let failed =
                match deadline(&*node.context.clock, STALL_LIMIT, exchange.write(chunk)).await {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(late) => late.to_string(),
                };
            self.exchange = Err(self.explain(node, failed).await);
        }
    }

    /// A holder that refuses says why before it stops the stream.
    async fn explain(&mut self, node: &Node, failed: String) -> String {
        let Ok(exchange) = &mut self.exchange else { return failed };
        match deadline(
            &*node.context.clock,
            Duration::from_secs(1),
            exchange.answer::<PutBlockAnswer>(),
        )
        .await
        {
            Ok(Err(error)) if !error.is_unanswered() => error.to_string(),
            _ => failed,
        }
    }

    async fn finish(self, node: &Node, trailer: &BlockTrailer) -> Result<(), String> {
        let mut exchange = self.exchange?;
        let frame =
            message_to_bytes(trailer, "a block's trailer").map_err(|error| error.to_string())?;
        let work = async {
            exchange.write_frame(frame).await?;
            exchange.finish().await?;
            exchange.answer::<PutBlockAnswer>().await
        };
        match deadline(&*node.context.clock, STALL_LIMIT, work).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(late) => Err(late.to_string()),
        }
    }
}
