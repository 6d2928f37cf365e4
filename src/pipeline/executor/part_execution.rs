//! A node's part of a plan: admission before the first byte, then all its hops at once, then the
//! proof of its pieces.
//!
//! An admitted part holds all the memory that it will use. It gives the memory back when it ends,
//! when it is released, or when it was not run within [`UNUSED_LIMIT`]. Streams may arrive from the
//! moment of admission.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::ADMISSION_LIMIT;
use super::hop_error::HopError;
use super::hop_execution::{
    HopContext, HopStreams, IncomingStream, OutgoingStream, input_stream, output_stream, run_hop,
    with_stall_limit,
};
use super::part_size::{order_disk_bytes, order_memory_bytes, pieces_to_store};
use super::part_table::{AdmittedPart, PartTable};
use super::proving_piece_writer::{GrainFingerprinter, ProvingPieceWriter};
use crate::budget::Budget;
use crate::clock::{Clock, deadline};
use crate::code::{Code, table};
use crate::format::file::{FileKey, FileName};
use crate::format::records::LAYOUT_STANDARD;
use crate::gf::{Fingerprint, FingerprintKey};
use crate::id::{Attempt, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::Caller;
use crate::net::frame::write_frame;
pub use crate::pipeline::executor::error::RunError;
use crate::plan::{Input, MAX_HOP_EDGES, MAX_HOPS, Output, StreamNo};
use crate::stage::{TracePoint, trace_point};
use crate::store::disk::AlignedBuffer;
use crate::store::{PieceSpec, Store, StoredFile};
use crate::units::{GRAIN_BYTES, grains};
use crate::wire::order::{HopOrder, Order, PieceProof, RunReport};
use crate::wire::{MAX_FRAME_BYTES, StreamHeader, message_to_bytes};
use crate::workers::Workers;

/// How long a coordinator tries to have all parts of a plan admitted before it releases all of
/// them.
pub const ADMIT_ALL_LIMIT: Duration = Duration::from_secs(30);
/// How long an admitted part may wait to be run. After this it is released, because its coordinator
/// is gone.
pub const UNUSED_LIMIT: Duration = Duration::from_secs(40);
const _: () = assert!(UNUSED_LIMIT.as_secs() > ADMIT_ALL_LIMIT.as_secs());
/// Maximum number of parts that are admitted and have not begun to run.
const MAX_PARTS: usize = 256;

/// The executor of a node: it admits and runs the node's parts of plans.
pub struct Executor {
    store: Store,
    workers: Workers,
    caller: Arc<Caller>,
    clock: Arc<dyn Clock>,
    memory: Arc<Budget>,
    table: Mutex<PartTable>,
}

/// The local files that an admitted part reads.
pub struct PartInputs {
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt that the pieces belong to.
    pub attempt: Attempt,
    /// The files: the inputs of the hops, and the replicas that stay as pieces.
    pub files: Vec<FileName>,
}

/// Returns the name of the file that an input reads; `None` for a stream.
pub fn local_file(input: Input, attempt: Attempt) -> Option<FileName> {
    match input {
        Input::Block(block) => Some(FileName::Replica { block }),
        Input::Piece(piece) => Some(FileName::Piece { piece, attempt }),
        Input::Stream(_) => None,
    }
}

fn check_order(order: &Order) -> Result<Code, RunError> {
    let refuse = |what| Err(RunError::Order { what });
    let Some(code) = table::by_id(order.code) else {
        return refuse("its code is not in this version's table");
    };
    let cut = order.cut;
    let grains = cut.grains();
    if usize::from(cut.k) != code.k()
        || cut.block_bytes == 0
        || cut.block_bytes > crate::units::MAX_BLOCK_BYTES
    {
        return refuse("its cut does not fit its code");
    }
    if cut.len_bytes > cut.block_bytes * u64::from(cut.k) || order.hops.len() > MAX_HOPS {
        return refuse("its numbers are out of bounds");
    }
    let is_kept =
        |&(piece, block): &(u8, u8)| usize::from(piece) < code.n() && usize::from(block) < code.k();
    if order.kept.len() > code.k() || !order.kept.iter().all(is_kept) {
        return refuse("what it keeps does not fit its code");
    }
    for hop in &order.hops {
        let range = hop.grains.0 < hop.grains.1 && hop.grains.1 <= grains;
        let edges = (1..=MAX_HOP_EDGES).contains(&hop.inputs.len())
            && (1..=MAX_HOP_EDGES).contains(&hop.outputs.len());
        let matrix = hop.matrix.len() == hop.outputs.len()
            && hop.matrix.iter().all(|row| row.len() == hop.inputs.len());
        let expected = |input: &crate::wire::order::InputOrder| {
            input.expected.len() as u64 == hop.grains.1.saturating_sub(hop.grains.0)
        };
        let outputs = hop.outputs.iter().all(|output| match output.output {
            Output::Store(piece) => usize::from(piece) < code.n(),
            Output::Stream(_) => output.to.is_some(),
            Output::Deliver(_) => false,
        });
        let inputs = hop.inputs.iter().all(|input| match input.input {
            Input::Block(block) => usize::from(block) < code.k(),
            Input::Piece(piece) => usize::from(piece) < code.n(),
            Input::Stream(_) => true,
        });
        if !(range && edges && matrix && inputs && outputs && hop.inputs.iter().all(expected)) {
            return refuse("a hop's numbers are out of bounds");
        }
    }
    Ok(code)
}

impl Executor {
    /// Returns an executor without parts. `memory` is the share of the daemon's memory budget that
    /// archiving has.
    pub fn new(
        store: Store,
        workers: Workers,
        caller: Arc<Caller>,
        clock: Arc<dyn Clock>,
        memory: Arc<Budget>,
    ) -> Self {
        Self { store, workers, caller, clock, memory, table: Mutex::default() }
    }

    fn lock_table(&self) -> std::sync::MutexGuard<'_, PartTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the parts that were not run within `UNUSED_LIMIT`. Each admission calls this; the
    /// daemon also calls it at intervals, for times without admissions.
    pub fn release_unused_parts(&self) {
        let now = self.clock.now();
        self.lock_table().remove_where(|part| now > part.admitted_at + UNUSED_LIMIT);
    }

    /// Releases the parts that earlier owners of the shard reserved and never ran. The node no
    /// longer obeys these owners.
    fn release_superseded_parts(&self, order: &Order) {
        self.lock_table().remove_where(|part| {
            part.order.stripe.shard == order.stripe.shard
                && part.order.generation < order.generation
        });
    }

    /// Admits a part and reserves all memory that it will ever use.
    ///
    /// # Errors
    /// [`RunError::Order`] if the order is out of bounds; [`RunError::Budget`] if the memory budget
    /// is too small for it; [`RunError::Busy`] if no memory was free within `ADMISSION_LIMIT`,
    /// too many parts are admitted, or the run is already known; [`RunError::NoRoom`] if the disk
    /// has no room for the pieces.
    pub async fn reserve_part(&self, order: Order) -> Result<(), RunError> {
        let code = check_order(&order)?;
        let needed_bytes = order_memory_bytes(&order);
        // Release unused parts first: they may hold all of the memory.
        self.release_unused_parts();
        self.release_superseded_parts(&order);
        // A second request for the same run must not wait for the memory that the first one has.
        if self.lock_table().is_known(order.run) {
            return Err(RunError::Busy { needed_bytes });
        }
        let memory = deadline(&*self.clock, ADMISSION_LIMIT, self.memory.reserve(needed_bytes))
            .await
            .map_err(|_| RunError::Busy { needed_bytes })??;
        let now = self.clock.now();
        // Check the disk only now, because other parts write while this one waits for memory.
        // Require one block more, so that the last piece does not fill the disk completely.
        // `check_order` has bounded the lengths.
        let room_bytes = order_disk_bytes(&order) + order.cut.block_bytes;
        let free_bytes = self.store.disk_space()?.free_bytes;
        let mut table = self.lock_table();
        if order_disk_bytes(&order) > 0 && free_bytes < table.reserved_disk_bytes() + room_bytes {
            return Err(RunError::NoRoom { node: self.store.node(), room_bytes });
        }
        if table.admitted.len() >= MAX_PARTS || table.is_known(order.run) {
            return Err(RunError::Busy { needed_bytes });
        }
        let mut waiting = BTreeMap::new();
        for stream in
            order.hops.iter().flat_map(|hop| &hop.inputs).filter_map(|i| input_stream(i.input))
        {
            let (sender, receiver) = oneshot::channel();
            table.arriving.insert((order.run, stream), sender);
            waiting.insert(stream, receiver);
        }
        table
            .admitted
            .insert(order.run, AdmittedPart { order, code, admitted_at: now, waiting, memory });
        Ok(())
    }

    /// Checks whether the disk has room for a recreated replica of `len_bytes` bytes.
    ///
    /// # Errors
    /// [`RunError::NoRoom`] if the replica would leave less free space than `len_bytes` plus the
    /// space that is promised to admitted parts.
    pub fn check_replica_room(&self, len_bytes: u64) -> Result<(), RunError> {
        let (free_bytes, room_bytes) = (self.store.disk_space()?.free_bytes, 2 * len_bytes);
        match free_bytes < self.lock_table().reserved_disk_bytes().saturating_add(room_bytes) {
            true => Err(RunError::NoRoom { node: self.store.node(), room_bytes }),
            false => Ok(()),
        }
    }

    /// Returns the stripe of an admitted part and the local files that it reads; `None` if the run
    /// is not admitted.
    pub fn part_input_files(&self, run_id: [u8; 16]) -> Option<PartInputs> {
        let table = self.lock_table();
        let order = &table.admitted.get(&run_id)?.order;
        let inputs = order.hops.iter().flat_map(|hop| &hop.inputs);
        let files = inputs.filter_map(|input| local_file(input.input, order.attempt));
        let kept = order.kept.iter().map(|(_, block)| FileName::Replica { block: *block });
        let files = files.chain(kept).collect();
        Some(PartInputs { stripe: order.stripe, attempt: order.attempt, files })
    }

    /// Releases an admitted part.
    pub fn release_part(&self, run_id: [u8; 16]) {
        self.lock_table().remove(run_id);
    }

    /// Passes a stream that arrived to the hop that waits for it. If no hop waits for it, the
    /// stream is stopped.
    pub fn accept_stream(&self, header: &StreamHeader, stream: IncomingStream) {
        let waiting = self.lock_table().arriving.remove(&(header.run, header.stream));
        let unwanted = match waiting {
            Some(hop) => hop.send(stream).err(),
            None => Some(stream),
        };
        if let Some(mut stream) = unwanted {
            stream.recv.stop(ErrorKind::NotFound.wire_code());
        }
    }

    /// Runs an admitted part to its end. Returns the report with the times of its hops and the
    /// proofs of its pieces.
    ///
    /// If `given_up` is cancelled while hops run, they end where they are. After all hops have
    /// ended, a cancellation has no effect: the pieces are finished, so that no file appears after
    /// this function has returned.
    ///
    /// # Errors
    /// [`RunError::Unknown`] if the run is not admitted; [`RunError::GivenUp`] if it was cancelled
    /// before all hops had ended; otherwise the failure of a hop, the store or a worker.
    pub async fn run_reserved(
        &self,
        run_id: [u8; 16],
        given_up: &CancellationToken,
    ) -> Result<RunReport, RunError> {
        let part = self.lock_table().admitted.remove(&run_id).ok_or(RunError::Unknown)?;
        let _forget = ForgetOnDrop { runs: self, run: run_id };
        self.run_part(part, given_up).await
    }

    async fn run_part(
        &self,
        part: AdmittedPart,
        given_up: &CancellationToken,
    ) -> Result<RunReport, RunError> {
        let AdmittedPart { order, code, mut waiting, memory, .. } = part;
        let began = self.clock.now();
        let shared = Arc::new(self.open_files(&order, code).await?);
        let hops = order.hops.iter().enumerate().map(|(number, hop)| {
            let arriving: Vec<_> = hop
                .inputs
                .iter()
                .filter_map(|input| input_stream(input.input))
                .filter_map(|stream| Some((stream, waiting.remove(&stream)?)))
                .collect();
            let shared = shared.clone();
            async move {
                let number = number as u32;
                let hop_error = |source| RunError::Hop { hop: number, source };
                let streams =
                    self.connect_streams(&order.run, hop, arriving).await.map_err(hop_error)?;
                run_hop(shared, number, hop.clone(), streams, &self.workers, &self.clock, began)
                    .await
                    .map_err(hop_error)
            }
        });
        let hops = tokio::select! {
            biased;
            () = given_up.cancelled() => return Err(RunError::GivenUp),
            hops = try_join_all(hops) => hops?,
        };
        let proofs = self.prove_pieces(&order, shared).await?;
        drop(memory);
        let total_us = (self.clock.now() - began).as_micros() as u64;
        Ok(RunReport { hops, proofs, total_us })
    }

    async fn open_files(&self, order: &Order, code: Code) -> Result<HopContext, RunError> {
        let (store, order) = (self.store.clone(), order.clone());
        let work = move || -> Result<HopContext, RunError> {
            let mut files = BTreeMap::new();
            for input in order.hops.iter().flat_map(|hop| &hop.inputs) {
                let open = |name| store.open_undamaged_file(FileKey { stripe: order.stripe, name });
                let file = match local_file(input.input, order.attempt) {
                    Some(FileName::Replica { block }) if order.cut.block_len(block) == 0 => None,
                    Some(name) => Some(Arc::new(open(name)?)),
                    None => continue,
                };
                files.insert(input.input, file);
            }
            let mut pieces = BTreeMap::new();
            for piece in pieces_to_store(&order) {
                let writer = store.create_piece_writer(PieceSpec {
                    stripe: order.stripe,
                    piece,
                    attempt: order.attempt,
                    code: order.code.0,
                    layout: LAYOUT_STANDARD,
                    len_bytes: order.cut.block_bytes,
                })?;
                pieces.insert(piece, ProvingPieceWriter::new(writer, order.cut.block_bytes));
            }
            let key = FingerprintKey::derive(&order.fingerprint_key);
            let Order { cut, codec, bytes_per_s, .. } = order;
            Ok(HopContext { cut, code, codec, bytes_per_s, key, files, pieces })
        };
        self.workers.run(work).await?
    }

    async fn connect_streams(
        &self,
        run: &[u8; 16],
        hop: &HopOrder,
        arriving: Vec<(StreamNo, oneshot::Receiver<IncomingStream>)>,
    ) -> Result<HopStreams, HopError> {
        let mut streams = HopStreams::default();
        for output in &hop.outputs {
            let (Some(stream), Some(to)) = (output_stream(output.output), &output.to) else {
                continue;
            };
            let downstream =
                |source| HopError::Downstream { stream, node: to.name.to_string(), source };
            let header = StreamHeader { run: *run, stream };
            let header = message_to_bytes(&header, "a stream header")
                .map_err(|_| HopError::Order { what: "its stream header is too long" })?;
            let open = async {
                let connection = self.caller.connection(to).await.map_err(downstream)?;
                let mut send = connection.open_uni().await.map_err(downstream)?;
                write_frame(&mut *send, MAX_FRAME_BYTES, header.into())
                    .await
                    .map_err(downstream)?;
                Ok::<_, HopError>(send)
            };
            let waiting_for = || format!("{} to accept stream {stream}", to.name);
            let send = with_stall_limit(&*self.clock, waiting_for, open).await?;
            streams.outgoing.insert(stream, OutgoingStream { to: to.name.to_string(), send });
        }
        for (stream, receiver) in arriving {
            let gone = |_| HopError::Order { what: "its reservation was given back" };
            let arrived = async { receiver.await.map_err(gone) };
            let waiting_for = || format!("the node before it to open stream {stream}");
            let arrived = with_stall_limit(&*self.clock, waiting_for, arrived).await?;
            streams.incoming.insert(stream, arrived);
        }
        Ok(streams)
    }

    /// Makes the pieces durable and reads them back. Also reads back the replicas that stay as
    /// pieces. Returns the proofs of all of these pieces.
    async fn prove_pieces(
        &self,
        order: &Order,
        shared: Arc<HopContext>,
    ) -> Result<Vec<PieceProof>, RunError> {
        let mut proofs = Vec::new();
        for piece in pieces_to_store(order) {
            let shared = shared.clone();
            trace_point(TracePoint::Piece, format_args!("{}/{piece}", order.stripe));
            let failed = |source| RunError::Hop { hop: 0, source };
            shared.piece_writer(piece).map_err(failed)?.wait_for_proofs().await.map_err(failed)?;
            let job = move || -> Result<PieceProof, RunError> {
                let slot = shared.piece_writer(piece).map_err(failed)?;
                let (stored, fingerprints) = slot.finish(&shared.key).map_err(failed)?;
                Ok(PieceProof { piece, kept_block: None, root: stored.root, fingerprints })
            };
            proofs.push(self.workers.run(job).await??);
        }
        for &(piece, block) in &order.kept {
            let (shared, store, stripe) = (shared.clone(), self.store.clone(), order.stripe);
            let job = move || -> Result<PieceProof, RunError> {
                let mut fingerprints = vec![Fingerprint::ZERO; shared.cut.grains() as usize];
                let root = if shared.cut.block_len(block) == 0 {
                    *blake3::hash(&[]).as_bytes()
                } else {
                    let file = store.open_undamaged_file(FileKey::replica(stripe, block))?;
                    read_back_fingerprints(&file, &shared.key, &mut fingerprints)?;
                    file.index_entry().root
                };
                Ok(PieceProof { piece, kept_block: Some(block), root, fingerprints })
            };
            proofs.push(self.workers.run(job).await??);
        }
        Ok(proofs)
    }
}

/// Reads a whole file from the medium, verifies it against its hash tree, and fingerprints it.
fn read_back_fingerprints(
    file: &StoredFile,
    key: &FingerprintKey,
    fingerprints: &mut [Fingerprint],
) -> Result<(), RunError> {
    let mut read_back = GrainFingerprinter { key, fingerprints, failed: None };
    let mut buffer = AlignedBuffer::new(GRAIN_BYTES as usize);
    for grain in 0..grains(file.index_entry().len_bytes) {
        let len = file.read_verified_past_cache(grain, buffer.bytes())?;
        read_back.fingerprint_grain(grain, &buffer.bytes()[..len]);
    }
    read_back.into_result().map_err(|source| RunError::Hop { hop: 0, source })
}

struct ForgetOnDrop<'a> {
    runs: &'a Executor,
    run: [u8; 16],
}

impl Drop for ForgetOnDrop<'_> {
    fn drop(&mut self) {
        self.runs.lock_table().remove(self.run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::format::geometry::Geometry;
    use crate::id::{Attempt, ClusterId, Generation, NodeId, ShardId};
    use crate::net::memory::MemoryNetwork;
    use crate::net::pool::Pool;
    use crate::net::{Peer, Role};
    use crate::store::{Disk, LOCK_FILE, MemoryDisk, MemoryKv};
    use crate::wire::order::{Codec, InputOrder, OutputOrder};

    fn order(run: u8) -> Order {
        let cut = Geometry::checked(1000, GRAIN_BYTES, 6, 4).unwrap().stripe(0).unwrap();
        let input = InputOrder { input: Input::Block(0), expected: vec![Fingerprint::ZERO] };
        let output = OutputOrder { output: Output::Store(0), to: None };
        let hop = HopOrder {
            grains: (0, 1),
            inputs: vec![input],
            outputs: vec![output],
            matrix: vec![vec![1]],
        };
        Order {
            run: [run; 16],
            stripe: StripeId { shard: ShardId([1; 16]), index: 0 },
            attempt: Attempt([2; 16]),
            generation: Generation::default(),
            coordinator: NodeId(1),
            code: table::find(6, 4).unwrap().id(),
            cut,
            fingerprint_key: [3; 32],
            codec: Codec::Kernel,
            bytes_per_s: None,
            hops: vec![hop],
            kept: Vec::new(),
        }
    }

    /// Returns an executor with memory for one part, and its memory budget.
    fn runs(disk: &Arc<MemoryDisk>) -> (Executor, Arc<Budget>) {
        let lock = disk.lock(LOCK_FILE).unwrap();
        let (name, kv) = ("node-1".parse().unwrap(), Arc::new(MemoryKv::new()));
        let (store, _) = Store::open(disk.clone(), lock, kv, ClusterId([4; 16]), &name).unwrap();
        let transport = MemoryNetwork::new().join(Peer { role: Role::Node, name }, "node-1:7440");
        let clock = SystemClock::new();
        let pool = Pool::new(Arc::new(transport), clock.clone());
        let caller = Caller::new(pool, clock.clone(), ADMISSION_LIMIT);
        let memory = Budget::new("archive", order_memory_bytes(&order(1)).next_multiple_of(4096));
        (Executor::new(store, Workers::inline(), caller, clock, memory.clone()), memory)
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_fills_while_a_part_waits_for_memory_refuses_it() {
        let disk = Arc::new(MemoryDisk::new(1 << 20));
        let (runs, _) = runs(&disk);
        runs.reserve_part(order(1)).await.unwrap();
        let meanwhile = async {
            disk.set_capacity(1);
            runs.release_part([1; 16]);
        };
        let (refused, ()) = tokio::join!(runs.reserve_part(order(2)), meanwhile);
        let refused = refused.unwrap_err();
        assert!(matches!(refused, RunError::NoRoom { .. }), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_lost_coordinator_reserved_is_given_to_the_next() {
        let (runs, memory) = runs(&Arc::new(MemoryDisk::new(1 << 20)));
        runs.reserve_part(order(1)).await.unwrap();
        assert!(matches!(runs.reserve_part(order(2)).await, Err(RunError::Busy { .. })));
        tokio::time::advance(UNUSED_LIMIT).await;
        runs.reserve_part(order(3)).await.unwrap();
        assert!(matches!(
            runs.run_reserved([1; 16], &CancellationToken::new()).await,
            Err(RunError::Unknown)
        ));
        runs.release_part([3; 16]);
        assert_eq!(memory.used_bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_request_for_a_run_is_refused_at_once() {
        let (runs, _) = runs(&Arc::new(MemoryDisk::new(1 << 20)));
        runs.reserve_part(order(1)).await.unwrap();
        let began = runs.clock.now();
        assert!(matches!(runs.reserve_part(order(1)).await, Err(RunError::Busy { .. })));
        assert_eq!(runs.clock.now(), began);
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_earlier_owner_of_the_shard_reserved_goes_to_the_next_at_once() {
        let (runs, memory) = runs(&Arc::new(MemoryDisk::new(1 << 20)));
        runs.reserve_part(order(1)).await.unwrap();
        let generation = Generation::default().next(crate::id::Epoch::default());
        runs.reserve_part(Order { generation, ..order(2) }).await.unwrap();
        // An order for another shard releases no part of this shard.
        let stripe = StripeId { shard: ShardId([9; 16]), index: 0 };
        let other = Order { generation: generation.next(generation.epoch), stripe, ..order(3) };
        assert!(matches!(runs.reserve_part(other).await, Err(RunError::Busy { .. })));
        runs.release_part([2; 16]);
        assert_eq!(memory.used_bytes(), 0);
    }
}
