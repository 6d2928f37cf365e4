//! A hop of any plan: it reads its inputs, checks them, multiplies, and sends and stores its
//! outputs, grain by grain.
//!
//! Memory: one grain of each input and output, a few grains of each stream, and the windows of the
//! streams. All of it is reserved before the hop begins ([`hop_memory_bytes`]). Receiving, working
//! and sending run side by side; a hop waits only for its neighbours.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::hop_error::{HopError, STALL_LIMIT};
use super::hop_timing::{HopTiming, JobTime, Stopwatch, TimedBatch, as_micros};
use super::proving_piece_writer::ProvingPieceWriter;
use crate::clock::{Clock, deadline};
use crate::code::Code;
use crate::format::geometry::StripeCut;
use crate::gf::{self, FingerprintKey, Matrix};
use crate::net::SendStream;
use crate::net::frame::FramedRecv;
use crate::pipeline::rate_limiter::RateLimiter;
use crate::plan::{Input, Output, StreamNo};
use crate::store::{Extent, StoredFile};
use crate::units::GRAIN_BYTES;
use crate::wire::order::{Codec, HopOrder, HopReport, HopWork};
use crate::workers::Workers;

/// Number of bytes that an incoming stream may run ahead of its hop. The transport's stream window
/// is set to this.
pub const STREAM_WINDOW_BYTES: u64 = 512 << 10;
/// Number of bytes that an outgoing stream may have in flight. Its receiver grants no more.
pub const SEND_BYTES: u64 = STREAM_WINDOW_BYTES;

/// Number of grains of each incoming stream that may wait for work, and of each outgoing stream
/// that may wait to be sent. With these numbers, the coder of the widest star, with 31 streams,
/// fits into the archive share of the smallest memory.
const QUEUED_GRAINS: usize = 3;
/// Maximum number of grains that one job works on.
const BATCH_GRAINS: usize = 3;

/// Returns the memory, in bytes, that a hop works in.
pub fn hop_memory_bytes(hop: &HopOrder) -> u64 {
    let streams_in =
        hop.inputs.iter().filter(|i| matches!(i.input, Input::Stream(_))).count() as u64;
    let streams_out =
        hop.outputs.iter().filter(|o| matches!(o.output, Output::Stream(_))).count() as u64;
    let grains = (hop.inputs.len() + hop.outputs.len()) as u64;
    let queued = (streams_in + streams_out) * (QUEUED_GRAINS + BATCH_GRAINS) as u64;
    streams_in * STREAM_WINDOW_BYTES + streams_out * SEND_BYTES + (grains + queued) * GRAIN_BYTES
}

/// The local files that a hop reads. `None` is a block past the shard's end, which is all zero.
pub type OpenInputs = BTreeMap<Input, Option<Arc<StoredFile>>>;
/// The pieces that a node writes. Its hops share them.
pub type OpenPieces = BTreeMap<u8, ProvingPieceWriter>;

/// The state that all hops of one order share.
pub struct HopContext {
    /// The stripe's cut.
    pub cut: StripeCut,
    /// The code, for the classical codec.
    pub code: Code,
    /// The codec that multiplies.
    pub codec: Codec,
    /// The rate, in bytes a second, at which a hop without incoming streams sends.
    pub bytes_per_s: Option<u64>,
    /// The key of the fingerprints that the inputs are checked against.
    pub key: FingerprintKey,
    /// The local inputs.
    pub files: OpenInputs,
    /// The local outputs.
    pub pieces: OpenPieces,
}

impl HopContext {
    /// Returns the writer of a piece.
    pub fn piece_writer(&self, piece: u8) -> Result<&ProvingPieceWriter, HopError> {
        self.pieces.get(&piece).ok_or(HopError::Order { what: "a piece was not opened" })
    }

    /// Begins the proof of an extent. The hop receives and writes further grains meanwhile.
    async fn begin_extent_proof(
        self: &Arc<Self>,
        piece: u8,
        extent: Extent,
        workers: &Workers,
    ) -> Result<(), HopError> {
        let shared = self.clone();
        let job = move || shared.piece_writer(piece)?.prove_extent(&shared.key, extent);
        self.piece_writer(piece)?.begin_next_proof(|| workers.begin(job)).await
    }
}

/// An incoming stream, and the name of the node that sends it.
pub struct IncomingStream {
    /// The name of the sending node.
    pub from: String,
    /// This node's end of the stream.
    pub recv: FramedRecv,
}

/// An outgoing stream, and the name of the node that receives it.
pub struct OutgoingStream {
    /// The name of the receiving node.
    pub to: String,
    /// This node's end of the stream.
    pub send: Box<dyn SendStream>,
}

/// The streams of one hop, by number.
#[derive(Default)]
pub struct HopStreams {
    /// The incoming streams.
    pub incoming: BTreeMap<StreamNo, IncomingStream>,
    /// The outgoing streams.
    pub outgoing: BTreeMap<StreamNo, OutgoingStream>,
}

/// The part of a hop that needs no network: it makes one grain of the outputs from one grain of the
/// inputs.
struct HopMath {
    shared: Arc<HopContext>,
    hop: HopOrder,
    matrix: Matrix,
    clock: Arc<dyn Clock>,
}

impl HopMath {
    fn read_local_grain_unverified(
        &self,
        input: Input,
        grain: u64,
        len: usize,
    ) -> Result<Bytes, HopError> {
        let missing = HopError::Order { what: "a local input was not opened" };
        let mut bytes = vec![0; len];
        if let Some(file) = self.shared.files.get(&input).ok_or(missing)? {
            // A block's bytes may end before the stripe's padded length.
            let from = grain * GRAIN_BYTES;
            let real = file.index_entry().len_bytes.saturating_sub(from).min(len as u64) as usize;
            if real > 0 {
                file.read_unverified(from, &mut bytes[..real])?;
            }
        }
        Ok(bytes.into())
    }

    fn multiply(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), HopError> {
        match (&self.shared.code, self.shared.codec) {
            (Code::Rs(code), Codec::ReedSolomonErasure) if inputs.len() == code.k() => {
                code.encode_with_crate(inputs, outputs)?;
            }
            _ => gf::apply(&self.matrix, inputs, outputs, gf::Mode::Overwrite)?,
        }
        Ok(())
    }

    /// Checks, multiplies and stores one grain. `streams` holds the grain of each incoming stream,
    /// in the order of the inputs. Returns the grains to send and the extents that are complete.
    fn process_grain(
        &self,
        grain: u64,
        streams: Vec<Bytes>,
        spent: &mut JobTime,
    ) -> Result<MultipliedGrain, HopError> {
        let mut laps = Stopwatch::start(&*self.clock);
        let len = self.shared.cut.grain_len(grain) as usize;
        let at = (grain - self.hop.grains.0) as usize;
        let mut streams = streams.into_iter();
        let mut inputs: Vec<Bytes> = Vec::with_capacity(self.hop.inputs.len());
        for order in &self.hop.inputs {
            let bytes = match order.input {
                Input::Stream(_) => streams.next().unwrap_or_default(),
                local => self.read_local_grain_unverified(local, grain, len)?,
            };
            spent.disk += laps.lap();
            let found = self.shared.key.fingerprint(&bytes)?;
            if order.expected.get(at) != Some(&found) {
                return Err(HopError::Corrupt { input: order.input, grain });
            }
            inputs.push(bytes);
            spent.computed += laps.lap();
        }
        let mut outputs: Vec<Vec<u8>> = vec![vec![0; len]; self.hop.outputs.len()];
        let sources: Vec<&[u8]> = inputs.iter().map(|bytes| &bytes[..]).collect();
        let mut targets: Vec<&mut [u8]> = outputs.iter_mut().map(|bytes| &mut bytes[..]).collect();
        self.multiply(&sources, &mut targets)?;
        spent.computed += laps.lap();
        let (mut sent, mut extents) = (Vec::new(), Vec::new());
        for (order, bytes) in self.hop.outputs.iter().zip(outputs) {
            match order.output {
                Output::Store(piece) => {
                    let whole = self.shared.piece_writer(piece)?.write(grain, &bytes)?;
                    extents.extend(whole.map(|extent| (piece, extent)));
                }
                Output::Stream(_) => sent.push(bytes.into()),
                Output::Deliver(_) => {
                    return Err(HopError::Order { what: "a node cannot deliver to the reader" });
                }
            }
        }
        spent.disk += laps.lap();
        Ok(MultipliedGrain { sent, extents })
    }

    /// Runs the grains of `batch`, from `first` on, one after the other. Returns their results and
    /// the time that they took.
    fn read_encode_and_store_batch(
        &self,
        first: u64,
        batch: Vec<Vec<Bytes>>,
    ) -> Result<(Vec<MultipliedGrain>, JobTime), HopError> {
        let mut spent = JobTime::default();
        let all = (first..).zip(batch);
        let done = all.map(|(grain, streams)| self.process_grain(grain, streams, &mut spent));
        let done: Result<Vec<MultipliedGrain>, HopError> = done.collect();
        Ok((done?, spent))
    }
}

/// The result of one grain.
struct MultipliedGrain {
    /// The grain of each outgoing stream.
    sent: Vec<Bytes>,
    /// The extents that are complete and have to be proven, each with its piece.
    extents: Vec<(u8, Extent)>,
}

/// Waits for `work`, which depends on other nodes, and returns its result. After [`STALL_LIMIT`],
/// returns [`HopError::Stalled`] with the text of `waiting_for`, which names the node that is
/// waited for.
pub(in crate::pipeline) async fn with_stall_limit<T>(
    clock: &dyn Clock,
    waiting_for: impl FnOnce() -> String,
    work: impl Future<Output = Result<T, HopError>>,
) -> Result<T, HopError> {
    let stalled = |_| HopError::Stalled { waiting_for: waiting_for() };
    deadline(clock, STALL_LIMIT, work).await.map_err(stalled)?
}

/// Runs one hop to its end. `hop_index` is the hop's index in the order; `order_taken_at` is the
/// time when the node began to run the order. Returns the hop's report.
///
/// Receiving, working and sending run side by side. A job takes all grains that have arrived by
/// then, up to `BATCH_GRAINS`. On a busy machine a job waits long for a processor, and a hop that
/// is behind must not have such a wait for each grain.
pub async fn run_hop(
    shared: Arc<HopContext>,
    hop_index: u32,
    hop: HopOrder,
    streams: HopStreams,
    workers: &Workers,
    clock: &Arc<dyn Clock>,
    order_taken_at: Duration,
) -> Result<HopReport, HopError> {
    let matrix = Matrix::from_rows(&hop.matrix)?;
    let since = || as_micros(clock.now().saturating_sub(order_taken_at));
    let cut = shared.cut;
    let HopStreams { incoming, outgoing } = streams;
    let (to_work, arrived) = mpsc::channel(QUEUED_GRAINS);
    let (to_send, done) = mpsc::channel(QUEUED_GRAINS);
    let bytes_per_s = shared.bytes_per_s.filter(|_| incoming.is_empty());
    let limiter = RateLimiter::new(clock.clone(), bytes_per_s);
    let receiving = receive_grains(&hop, cut, incoming, to_work, limiter, &**clock);
    let sending = send_grains(&hop, outgoing, done, &**clock);
    let step = Arc::new(HopMath { shared, hop: hop.clone(), matrix, clock: clock.clone() });
    let working = process_grains(&step, arrived, to_send, workers, &since);
    let (in_bytes, account, out_bytes) = tokio::try_join!(receiving, working, sending)?;
    let HopTiming { first_us, times, chunks, .. } = account;
    let span_us = (first_us.unwrap_or_else(since), since());
    let work = HopWork { in_bytes, out_bytes, span_us, times, chunks };
    Ok(HopReport { hop: hop_index, work })
}

/// Reads the grains of all incoming streams, in the order of the inputs. Returns the number of
/// bytes. The limiter sets the rate at which the hop's outgoing streams get grains.
async fn receive_grains(
    hop: &HopOrder,
    cut: StripeCut,
    mut incoming: BTreeMap<StreamNo, IncomingStream>,
    to_work: mpsc::Sender<Vec<Bytes>>,
    mut limiter: RateLimiter,
    clock: &dyn Clock,
) -> Result<u64, HopError> {
    let inputs: Vec<StreamNo> = hop.inputs.iter().filter_map(|i| input_stream(i.input)).collect();
    let outputs = hop.outputs.iter().filter_map(|o| output_stream(o.output)).count() as u64;
    let mut in_bytes = 0;
    for grain in hop.grains.0..hop.grains.1 {
        let mut received = Vec::with_capacity(inputs.len());
        for &stream in &inputs {
            let missing = HopError::Order { what: "an incoming stream was not connected" };
            let IncomingStream { from, recv } = incoming.get_mut(&stream).ok_or(missing)?;
            let work = async {
                let read = recv.read_exact(cut.grain_len(grain) as usize).await;
                let node = || from.clone();
                read.map_err(|source| HopError::Upstream { stream, node: node(), source })
            };
            let waiting_for = || format!("{from} to send stream {stream}");
            let bytes = with_stall_limit(clock, waiting_for, work).await?;
            in_bytes += bytes.len() as u64;
            received.push(bytes);
        }
        limiter.wait(outputs * cut.grain_len(grain)).await;
        // The channel closes only if the work or the sending failed. That failure is the hop's
        // error.
        if to_work.send(received).await.is_err() {
            break;
        }
    }
    Ok(in_bytes)
}

/// Multiplies and stores the grains that have arrived. Returns the times of the jobs.
async fn process_grains(
    math: &Arc<HopMath>,
    mut arrived: mpsc::Receiver<Vec<Bytes>>,
    to_send: mpsc::Sender<Vec<Bytes>>,
    workers: &Workers,
    elapsed_us: &impl Fn() -> u64,
) -> Result<HopTiming, HopError> {
    let mut account = HopTiming::new(math.hop.grains);
    let mut grain = math.hop.grains.0;
    loop {
        let waits_from = elapsed_us();
        let mut batch = Vec::new();
        let count = arrived.recv_many(&mut batch, BATCH_GRAINS).await as u64;
        if count == 0 {
            return Ok(account);
        }
        let works_from = elapsed_us();
        let job = math.clone();
        let (results, spent) =
            workers.run(move || job.read_encode_and_store_batch(grain, batch)).await??;
        let worked = elapsed_us();
        let (grains, at_us) = ((grain, grain + count), [waits_from, works_from, worked]);
        account.add_batch(TimedBatch { grains, at_us, spent });
        grain += count;
        let mut extents = Vec::new();
        for MultipliedGrain { sent, extents: whole } in results {
            extents.extend(whole);
            // The channel closes only if sending failed. That failure is the hop's error.
            if to_send.send(sent).await.is_err() {
                return Ok(account);
            }
        }
        let proves_from = elapsed_us();
        account.times.downstream_us += proves_from - worked;
        for (piece, extent) in extents {
            math.shared.begin_extent_proof(piece, extent, workers).await?;
        }
        account.times.disk_us += elapsed_us() - proves_from;
    }
}

/// Sends the grains of all outgoing streams, and finishes the streams. Returns the number of bytes.
async fn send_grains(
    hop: &HopOrder,
    mut outgoing: BTreeMap<StreamNo, OutgoingStream>,
    mut done: mpsc::Receiver<Vec<Bytes>>,
    clock: &dyn Clock,
) -> Result<u64, HopError> {
    let outputs: Vec<StreamNo> =
        hop.outputs.iter().filter_map(|o| output_stream(o.output)).collect();
    let mut out_bytes = 0;
    while let Some(ready) = done.recv().await {
        for (&stream, bytes) in outputs.iter().zip(ready) {
            let missing = HopError::Order { what: "an outgoing stream was not connected" };
            let OutgoingStream { to, send } = outgoing.get_mut(&stream).ok_or(missing)?;
            out_bytes += bytes.len() as u64;
            let work = async {
                let written = send.write(bytes).await;
                let node = || to.clone();
                written.map_err(|source| HopError::Downstream { stream, node: node(), source })
            };
            with_stall_limit(clock, || format!("{to} to take stream {stream}"), work).await?;
        }
    }
    for (stream, OutgoingStream { to, mut send }) in outgoing {
        let work = async {
            let finished = send.finish().await;
            let node = || to.clone();
            finished.map_err(|source| HopError::Downstream { stream, node: node(), source })
        };
        with_stall_limit(clock, || format!("{to} to take stream {stream}"), work).await?;
    }
    Ok(out_bytes)
}

/// Returns the stream of an input, if the input is a stream.
pub fn input_stream(input: Input) -> Option<StreamNo> {
    match input {
        Input::Stream(stream) => Some(stream),
        _ => None,
    }
}

/// Returns the stream of an output, if the output is a stream.
pub fn output_stream(output: Output) -> Option<StreamNo> {
    match output {
        Output::Stream(stream) => Some(stream),
        _ => None,
    }
}
