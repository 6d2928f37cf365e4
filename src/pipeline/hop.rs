//! One hop of any plan: read what comes in, check it, multiply, send on and store, grain by grain.
//!
//! Memory: one grain of each input and output, plus the streams' windows; reserved before the hop begins
//! ([`hop_bytes`]). While grain g is sent on, grain g+1 is received; a hop waits only for its neighbours.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use crate::clock::{Clock, deadline};
use crate::code::{Code, CodeError};
use crate::format::geometry::StripeCut;
use crate::gf::{self, Fingerprint, FingerprintKey, GfError, Matrix};
use crate::kind::Kind;
use crate::net::frame::FramedRecv;
use crate::net::{NetError, SendStream};
use crate::plan::{Input, Output, StreamNo};
use crate::store::{PieceWriter, StoreError, Stored, StoredFile};
use crate::units::GRAIN_BYTES;
use crate::wire::order::{Codec, HopOrder, HopReport};
use crate::workers::{WorkerDied, Workers};

/// A hop that does not move for so long is ended.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);
/// How far an incoming stream may run ahead of its hop: what the transport's stream window is set to.
pub const STREAM_WINDOW_BYTES: u64 = 512 << 10;
/// What a stream that is sent may have on the way: its receiver grants no more.
pub const SEND_BYTES: u64 = STREAM_WINDOW_BYTES;

/// Why a hop ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HopError {
    /// An input is not what the plan says it must be.
    #[error(
        "{input:?} is corrupt in grain {grain}: its fingerprint is not the one that follows from the save"
    )]
    Corrupt {
        /// Which input.
        input: Input,
        /// The grain.
        grain: u64,
    },
    /// The node before this one failed.
    #[error("stream {stream} from {node}: {source}")]
    Upstream {
        /// The stream.
        stream: StreamNo,
        /// The node.
        node: String,
        /// What happened.
        source: NetError,
    },
    /// The node after this one failed.
    #[error("stream {stream} to {node}: {source}")]
    Downstream {
        /// The stream.
        stream: StreamNo,
        /// The node.
        node: String,
        /// What happened.
        source: NetError,
    },
    /// Nothing moved.
    #[error("no progress for {STALL_LIMIT:?}: waiting for {waiting_for}")]
    Stalled {
        /// The neighbour.
        waiting_for: String,
    },
    /// The order does not fit together.
    #[error("the order is wrong: {what}")]
    Order {
        /// What does not fit.
        what: &'static str,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The arithmetic refused.
    #[error(transparent)]
    Field(#[from] GfError),
    /// The classical codec refused.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl HopError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            HopError::Corrupt { .. } => Kind::Corrupt,
            HopError::Upstream { .. } | HopError::Downstream { .. } => Kind::Unavailable,
            HopError::Stalled { .. } => Kind::Timeout,
            HopError::Order { .. } => Kind::Invalid,
            HopError::Store(error) => error.kind(),
            HopError::Field(_) | HopError::Code(_) | HopError::Worker(_) => Kind::Internal,
        }
    }
}

/// The memory that a hop works in.
pub fn hop_bytes(hop: &HopOrder) -> u64 {
    let streams_in =
        hop.inputs.iter().filter(|i| matches!(i.input, Input::Stream(_))).count() as u64;
    let streams_out =
        hop.outputs.iter().filter(|o| matches!(o.output, Output::Stream(_))).count() as u64;
    let grains = 2 * (hop.inputs.len() + hop.outputs.len()) as u64;
    streams_in * STREAM_WINDOW_BYTES + streams_out * SEND_BYTES + grains * GRAIN_BYTES
}

/// Local blocks that a hop reads; `None` is a block past the shard's end, all zero.
pub type Blocks = BTreeMap<Input, Option<Arc<StoredFile>>>;
/// Pieces that a node writes, shared by its hops.
pub type Pieces = BTreeMap<u8, PieceSlot>;

/// A piece while it is written, with the fingerprints of what was read back so far.
pub struct PieceSlot(Mutex<(Option<PieceWriter>, Vec<Fingerprint>)>);

impl PieceSlot {
    /// The slot of a new piece of `grains` grains.
    pub fn new(writer: PieceWriter, grains: u64) -> Self {
        Self(Mutex::new((Some(writer), vec![Fingerprint::ZERO; grains as usize])))
    }

    fn lock(&self) -> MutexGuard<'_, (Option<PieceWriter>, Vec<Fingerprint>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a grain; whole extents behind it are synced and read back on the way.
    fn write(&self, key: &FingerprintKey, grain: u64, bytes: &[u8]) -> Result<(), HopError> {
        let (writer, fingerprints) = &mut *self.lock();
        let writer =
            writer.as_mut().ok_or(HopError::Order { what: "a piece was finished too early" })?;
        writer.write_grain(grain, bytes)?;
        let mut read_back = ReadBack { key, fingerprints, failed: None };
        writer.advance(&mut |grain, bytes| read_back.take(grain, bytes))?;
        read_back.result()
    }

    /// Makes the piece durable; answers with the fingerprints of all that was read back past the page cache.
    pub fn finish(&self, key: &FingerprintKey) -> Result<(Stored, Vec<Fingerprint>), HopError> {
        let (writer, fingerprints) = &mut *self.lock();
        let writer = writer.take().ok_or(HopError::Order { what: "a piece was finished twice" })?;
        let mut read_back = ReadBack { key, fingerprints, failed: None };
        let stored = writer.finish(&mut |grain, bytes| read_back.take(grain, bytes))?;
        read_back.result()?;
        Ok((stored, std::mem::take(fingerprints)))
    }
}

/// Fingerprints grains that come back from the medium.
pub struct ReadBack<'a> {
    /// The shard's key.
    pub key: &'a FingerprintKey,
    /// One slot a grain.
    pub fingerprints: &'a mut [Fingerprint],
    /// The first failure.
    pub failed: Option<GfError>,
}

impl ReadBack<'_> {
    /// One grain.
    pub fn take(&mut self, grain: u64, bytes: &[u8]) {
        match (self.key.fingerprint(bytes), self.fingerprints.get_mut(grain as usize)) {
            (Ok(found), Some(slot)) => *slot = found,
            (Err(error), _) => self.failed = Some(error),
            // Past the end: the writer has refused it before.
            (Ok(_), None) => {}
        }
    }

    /// Whether all went well.
    pub fn result(self) -> Result<(), HopError> {
        self.failed.map_or(Ok(()), |error| Err(error.into()))
    }
}

/// What all hops of one order share.
pub struct Shared {
    /// The stripe's cut.
    pub cut: StripeCut,
    /// The code, for the classical codec.
    pub code: Code,
    /// What multiplies.
    pub codec: Codec,
    /// Checks the inputs.
    pub key: FingerprintKey,
    /// Local inputs.
    pub blocks: Blocks,
    /// Local outputs.
    pub pieces: Pieces,
}

/// A stream, and the name of the node at its other end.
pub struct Incoming {
    /// Who sends.
    pub from: String,
    /// The bytes.
    pub recv: FramedRecv,
}

/// The same towards another node.
pub struct Outgoing {
    /// Who reads.
    pub to: String,
    /// The bytes.
    pub send: Box<dyn SendStream>,
}

/// The streams of one hop, by number.
#[derive(Default)]
pub struct Streams {
    /// Incoming.
    pub incoming: BTreeMap<StreamNo, Incoming>,
    /// Outgoing.
    pub outgoing: BTreeMap<StreamNo, Outgoing>,
}

/// The part of a hop that needs no network: one grain in, one grain out.
struct Step {
    shared: Arc<Shared>,
    hop: HopOrder,
    matrix: Matrix,
}

impl Step {
    fn local(&self, input: Input, grain: u64, len: usize) -> Result<Bytes, HopError> {
        let missing = HopError::Order { what: "a local input was not opened" };
        let mut bytes = vec![0; len];
        if let Some(file) = self.shared.blocks.get(&input).ok_or(missing)? {
            // A block's real bytes may end before the stripe's padded length.
            let from = grain * GRAIN_BYTES;
            let real = file.info().len_bytes.saturating_sub(from).min(len as u64) as usize;
            if real > 0 {
                file.read(from, &mut bytes[..real])?;
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

    /// `streams` holds the grain of each incoming stream, in the order of the inputs.
    fn run(&self, grain: u64, streams: Vec<Bytes>) -> Result<Vec<Bytes>, HopError> {
        let len = self.shared.cut.grain_len(grain) as usize;
        let at = (grain - self.hop.grains.0) as usize;
        let mut streams = streams.into_iter();
        let mut inputs: Vec<Bytes> = Vec::with_capacity(self.hop.inputs.len());
        for order in &self.hop.inputs {
            let bytes = match order.input {
                Input::Stream(_) => streams.next().unwrap_or_default(),
                local => self.local(local, grain, len)?,
            };
            let found = self.shared.key.fingerprint(&bytes)?;
            if order.expected.get(at) != Some(&found) {
                return Err(HopError::Corrupt { input: order.input, grain });
            }
            inputs.push(bytes);
        }
        let mut outputs: Vec<Vec<u8>> = vec![vec![0; len]; self.hop.outputs.len()];
        let sources: Vec<&[u8]> = inputs.iter().map(|bytes| &bytes[..]).collect();
        let mut targets: Vec<&mut [u8]> = outputs.iter_mut().map(|bytes| &mut bytes[..]).collect();
        self.multiply(&sources, &mut targets)?;
        let mut sent = Vec::new();
        for (order, bytes) in self.hop.outputs.iter().zip(outputs) {
            match order.output {
                Output::Store(piece) => {
                    let missing = HopError::Order { what: "a piece was not opened" };
                    let slot = self.shared.pieces.get(&piece).ok_or(missing)?;
                    slot.write(&self.shared.key, grain, &bytes)?;
                }
                Output::Stream(_) => sent.push(bytes.into()),
                Output::Deliver(_) => {
                    return Err(HopError::Order { what: "a node cannot deliver to the reader" });
                }
            }
        }
        Ok(sent)
    }
}

/// The end of `work`, which waits for others; too long, and the hop is ended and says whom it waited for.
pub(super) async fn moved<T>(
    clock: &dyn Clock,
    waiting_for: impl FnOnce() -> String,
    work: impl Future<Output = Result<T, HopError>>,
) -> Result<T, HopError> {
    let stalled = |_| HopError::Stalled { waiting_for: waiting_for() };
    deadline(clock, STALL_LIMIT, work).await.map_err(stalled)?
}

/// Runs one hop to its end. `number` is its place in the order, `began` when the node took the order.
pub async fn run_hop(
    shared: Arc<Shared>,
    number: u32,
    hop: HopOrder,
    mut streams: Streams,
    workers: &Workers,
    clock: &dyn Clock,
    began: Duration,
) -> Result<HopReport, HopError> {
    let matrix = Matrix::from_rows(&hop.matrix)?;
    let inputs: Vec<StreamNo> = hop.inputs.iter().filter_map(|i| stream_in(i.input)).collect();
    let outputs: Vec<StreamNo> = hop.outputs.iter().filter_map(|o| stream_out(o.output)).collect();
    let cut = shared.cut;
    let step = Arc::new(Step { shared, hop: hop.clone(), matrix });
    let since = || (clock.now() - began).as_micros() as u64;
    let mut waited = (0, 0, 0);
    let (mut in_bytes, mut out_bytes) = (0, 0);
    let mut first = None;
    let mut ready: Vec<Bytes> = Vec::new();
    let Streams { incoming, outgoing } = &mut streams;
    for grain in hop.grains.0..=hop.grains.1 {
        let waits_from = since();
        let receive = async {
            let mut bytes = Vec::with_capacity(inputs.len());
            for &stream in inputs.iter().filter(|_| grain < hop.grains.1) {
                let missing = HopError::Order { what: "an incoming stream was not connected" };
                let Incoming { from, recv } = incoming.get_mut(&stream).ok_or(missing)?;
                let work = async {
                    let read = recv.read_exact(cut.grain_len(grain) as usize).await;
                    let node = || from.clone();
                    read.map_err(|source| HopError::Upstream { stream, node: node(), source })
                };
                let waiting_for = || format!("{from} to send stream {stream}");
                bytes.push(moved(clock, waiting_for, work).await?);
            }
            Ok::<_, HopError>((bytes, since()))
        };
        let send = async {
            for (&stream, bytes) in outputs.iter().zip(std::mem::take(&mut ready)) {
                let missing = HopError::Order { what: "an outgoing stream was not connected" };
                let Outgoing { to, send } = outgoing.get_mut(&stream).ok_or(missing)?;
                out_bytes += bytes.len() as u64;
                let work = async {
                    let written = send.write(bytes).await;
                    let node = || to.clone();
                    written.map_err(|source| HopError::Downstream { stream, node: node(), source })
                };
                moved(clock, || format!("{to} to take stream {stream}"), work).await?;
            }
            Ok::<_, HopError>(since())
        };
        let ((received, received_at), sent_at) = tokio::try_join!(receive, send)?;
        waited.0 += received_at - waits_from;
        waited.2 += sent_at - waits_from;
        if grain == hop.grains.1 {
            break;
        }
        first.get_or_insert(since());
        in_bytes += received.iter().map(|bytes| bytes.len() as u64).sum::<u64>();
        let works_from = since();
        let job = step.clone();
        ready = workers.run(move || job.run(grain, received)).await??;
        waited.1 += since() - works_from;
    }
    for (&stream, Outgoing { to, send }) in outgoing.iter_mut() {
        let work = async {
            let finished = send.finish().await;
            let node = || to.clone();
            finished.map_err(|source| HopError::Downstream { stream, node: node(), source })
        };
        moved(clock, || format!("{to} to take stream {stream}"), work).await?;
    }
    let span_us = (first.unwrap_or_else(since), since());
    Ok(HopReport { hop: number, in_bytes, out_bytes, span_us, waited_us: waited })
}

/// The stream behind an input, if it is one.
pub fn stream_in(input: Input) -> Option<StreamNo> {
    match input {
        Input::Stream(stream) => Some(stream),
        _ => None,
    }
}

/// The stream behind an output, if it is one.
pub fn stream_out(output: Output) -> Option<StreamNo> {
    match output {
        Output::Stream(stream) => Some(stream),
        _ => None,
    }
}
