//! Reading a stripe back, from replicas or from any pieces that span, every grain verified.
//!
//! First [`StripeReader::plan`] asks the nodes what they have and decides whether the stripe can be read at all; nothing is
//! delivered before that. Then [`StripeReader::read`] streams grain by grain. A source that fails or lies is left out, and reading goes on from the same grain with others.
//! One that is slow, because it gives nothing or little, is passed over, and comes last from then on: it is waited for only when the
//! others do not do without it.
//! A node that is busy has what is wanted: all files are let go, and opened again later.

mod flow;
mod inspect;
mod source;
mod state;
mod way;

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::try_join_all;
use inspect::{Held, INSPECT_LIMIT, PATIENT_LIMIT, inspect_all};
use source::{Fault, Stop, all};
pub use state::state_on_nodes;
pub use way::Lost;
use way::{Holding, Wanted, Way};

use super::patience::{BUSY_LIMIT, Patience};
use super::records::StripeInfo;
use crate::code::{Code, CodeError, Program, reconstruct};
use crate::entropy::Entropy;
use crate::format::file::FileName;
use crate::format::records::{Receipt, ShardRoot, StripeState};
use crate::gf::FingerprintKey;
use crate::id::{Attempt, NodeId, StripeId};
use crate::kind::Kind;
use crate::net::call::Caller;
use crate::plan::check::{Goal, PlanError, check};
use crate::planner::{Subject, direct_read};
use crate::topology::Directory;
use crate::wire::calls::Suspect;
use crate::workers::{WorkerDied, Workers};

/// Wrong files that one restore remembers; a cluster with more is past reading around them.
const MAX_ROTTEN: usize = 65_536;

/// How far a reading has come, and whom it has been patient with.
struct Progress {
    /// Grains that are not delivered yet.
    left: Range<u64>,
    /// Nodes that were passed over because they were slow: once each. Then they are waited for as long as it has to be.
    passed: BTreeSet<NodeId>,
    patience: Patience,
}

/// Where the bytes go that lie in `range` of the shard.
#[derive(Clone)]
struct Target {
    range: Range<u64>,
    sink: Arc<dyn Sink>,
}

/// Where restored bytes go. Blocking; ranges come in any order.
pub trait Sink: Send + Sync + 'static {
    /// Writes `bytes` at `offset` of the shard. The same bytes may come again when a stripe's reading begins anew.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// A stripe could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Too much is gone.
    #[error("{0}")]
    Lost(Lost),
    /// A node had no memory free for a reader, again and again.
    #[error(
        "stripe {stripe}: node {node} is busy with others for {BUSY_LIMIT:?} now ({reason}): try again later"
    )]
    Busy {
        /// The stripe.
        stripe: StripeId,
        /// The node.
        node: String,
        /// What it said last.
        reason: String,
    },
    /// The destination failed.
    #[error("writing at byte {offset}: {source}")]
    Sink {
        /// Where in the shard.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// The code of its pieces is unknown here.
    #[error(
        "stripe {stripe} is coded by {code}, which this version does not know: use a newer one"
    )]
    UnknownCode {
        /// The stripe.
        stripe: StripeId,
        /// The code's id.
        code: String,
    },
    /// Decoded bytes are not what was saved though every piece was what its receipt says.
    #[error("stripe {stripe}, grain {grain}: the decoded bytes are not what was saved")]
    Decoded {
        /// The stripe.
        stripe: StripeId,
        /// The grain.
        grain: u64,
    },
    /// Our own plan is wrong: a defect.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Our own arithmetic refused: a defect.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// A worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl ReadError {
    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        match self {
            ReadError::Lost(_) => Kind::Lost,
            ReadError::Busy { .. } => Kind::Busy,
            ReadError::Sink { .. } => Kind::Io,
            ReadError::UnknownCode { .. } => Kind::Invalid,
            ReadError::Decoded { .. } => Kind::Corrupt,
            ReadError::Plan(_) | ReadError::Code(_) | ReadError::Worker(_) => Kind::Internal,
        }
    }
}

/// What readers of one restore share.
pub struct Reading {
    /// Calls to nodes.
    pub caller: Arc<Caller>,
    /// Verifying and decoding.
    pub workers: Workers,
    /// Tells readers apart that wait for the same node.
    pub entropy: Arc<dyn Entropy>,
    /// The nodes.
    pub directory: Directory,
    /// What went wrong and was survived, for the report.
    pub incidents: Mutex<Vec<String>>,
    /// Files that gave wrong bytes, whatever their nodes say: no further way leads over them.
    pub rotten: Mutex<BTreeSet<(StripeId, NodeId, FileName)>>,
    /// Stripes of which a replica was gone though its node has it on its list. A node takes a file off its list after the file is gone, so
    /// that while replicas are dropped their lists lead nowhere: pieces come first from now on.
    pub leaving: Mutex<BTreeSet<StripeId>>,
}

impl Reading {
    fn begin(&self, left: Range<u64>) -> Progress {
        Progress { left, passed: BTreeSet::new(), patience: self.patience() }
    }

    fn patience(&self) -> Patience {
        Patience::new(self.caller.clock().clone(), self.entropy.clone())
    }

    fn is_rotten(&self, stripe: StripeId, node: NodeId, file: FileName) -> bool {
        let rotten = self.rotten.lock().unwrap_or_else(PoisonError::into_inner);
        rotten.contains(&(stripe, node, file))
    }

    fn is_leaving(&self, stripe: StripeId) -> bool {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner).contains(&stripe)
    }

    fn note(&self, incident: String) {
        tracing::warn!("{incident}");
        let mut incidents = self.incidents.lock().unwrap_or_else(PoisonError::into_inner);
        if incidents.len() < 1000 {
            incidents.push(incident);
        }
    }
}

/// Reads one stripe.
pub struct StripeReader {
    reading: Arc<Reading>,
    root: Arc<ShardRoot>,
    key: Arc<FingerprintKey>,
    info: Arc<StripeInfo>,
    way: Way,
}

impl StripeReader {
    /// Finds a way to read `blocks` of the stripe, or says what is missing.
    pub async fn plan(
        reading: Arc<Reading>,
        root: Arc<ShardRoot>,
        key: Arc<FingerprintKey>,
        info: StripeInfo,
        state: StripeState,
        receipt: Option<Receipt>,
        blocks: &[u8],
    ) -> Result<Self, ReadError> {
        let info = Arc::new(info);
        let mut nodes: BTreeSet<NodeId> = info.places.iter().copied().collect();
        nodes.extend(receipt.iter().flat_map(|receipt| &receipt.pieces).map(|piece| piece.node));
        let known: BTreeSet<NodeId> =
            nodes.iter().copied().filter(|node| reading.directory.is_live(*node)).collect();
        let stripe = info.fixed.stripe;
        let is_leaving = reading.is_leaving(stripe);
        let receipt = receipt.as_ref();
        let wanted = Wanted { root: &root, info: &info, state, receipt, blocks, is_leaving };
        // An error is no way, and none that waiting mends.
        let is_enough = |held: &Held| wanted.find_way(held).map_or(true, |way| way.is_some());
        let mut held = Held::new();
        inspect_all(&reading, stripe, &known, INSPECT_LIMIT, &mut held, is_enough).await;
        let mut found = wanted.find_way(&held)?;
        if found.is_none() {
            // Everybody else of the ring, and the silent ones again.
            nodes.extend(root.ring.iter().map(|member| member.node));
            let rest = nodes.iter().copied().filter(|node| !held.contains_key(node)).collect();
            inspect_all(&reading, stripe, &rest, PATIENT_LIMIT, &mut held, is_enough).await;
            found = wanted.find_way(&held)?;
        }
        let Some(way) = found else {
            return Err(ReadError::Lost(wanted.explain(&reading.directory, &held)));
        };
        Ok(Self { reading, root, key, info, way })
    }

    /// Whether pieces have to be decoded.
    pub fn decodes(&self) -> bool {
        matches!(self.way, Way::Pieces { .. })
    }

    /// Streams grains `grains` of each of `blocks` into `sink`; bytes outside `range` of the shard are not delivered.
    pub async fn read(
        mut self,
        blocks: &[u8],
        grains: Range<u64>,
        range: Range<u64>,
        sink: Arc<dyn Sink>,
    ) -> Result<(), ReadError> {
        let target = Target { range, sink };
        match self.way.clone() {
            Way::Replicas(replicas) => {
                // All at once, as pieces are: one after the other they would come at the rate of one node's link.
                let reads = blocks.iter().map(|&block| {
                    let sources = replicas.get(&block).cloned().unwrap_or_default();
                    self.read_replica(block, sources, grains.clone(), &target)
                });
                try_join_all(reads).await.map(|_| ())
            }
            Way::Pieces { .. } => self.read_pieces(blocks, grains, &target).await,
        }
    }

    async fn read_replica(
        &self,
        block: u8,
        mut sources: Vec<Holding>,
        grains: Range<u64>,
        target: &Target,
    ) -> Result<(), ReadError> {
        let end = crate::units::grains(self.info.fixed.cut.block_len(block)).min(grains.end);
        let mut progress = self.reading.begin(grains.start..end);
        let mut is_turned = false;
        while !progress.left.is_empty() {
            // Who was silent comes last, but for its turn after one that is busy.
            let comes_first =
                |source: &&Holding| is_turned || !self.reading.directory.is_silent(source.node);
            let Some(&source) = sources.iter().find(comes_first).or(sources.first()) else {
                return Err(ReadError::Lost(Lost {
                    shard: self.root.name.to_string(),
                    stripe: self.info.fixed.stripe.index,
                    needs: format!("a good replica of block {}", block + 1),
                    missing: vec!["every holder failed while it was read".into()],
                }));
            };
            let from = progress.left.start;
            is_turned = false;
            let round = self.replica_round(block, source, &mut progress, target).await;
            if progress.left.start > from {
                progress.patience = self.reading.patience();
            }
            match round {
                Ok(()) => {}
                Err(Stop::Fatal(error)) => return Err(error),
                Err(Stop::Busy { holding, reason }) => {
                    self.wait(&mut progress.patience, &holding, reason).await?;
                    sources.sort_by_key(|source| *source == holding);
                    is_turned = true;
                }
                Err(Stop::Slow { holdings }) => self.passed_over(&holdings, &mut progress.passed),
                Err(Stop::Source { holding, reason, fault }) => {
                    self.left_out(&holding, &reason, fault);
                    sources.retain(|source| *source != holding);
                }
            }
        }
        Ok(())
    }

    async fn replica_round(
        &self,
        block: u8,
        source: Holding,
        progress: &mut Progress,
        target: &Target,
    ) -> Result<(), Stop> {
        let file = self.open(source, progress).await?;
        match self.read_grains(vec![file], None, &[block], progress, target).await {
            Err(Stop::Fatal(ReadError::Decoded { .. })) => {
                let reason = "its bytes are not what was saved".into();
                Err(Stop::Source { holding: source, reason, fault: Fault::Rotten })
            }
            done => done,
        }
    }

    async fn read_pieces(
        &mut self,
        blocks: &[u8],
        grains: Range<u64>,
        target: &Target,
    ) -> Result<(), ReadError> {
        let mut progress = self.reading.begin(grains);
        loop {
            let from = progress.left.start;
            let round = self.pieces_round(blocks, &mut progress, target).await;
            if progress.left.start > from {
                progress.patience = self.reading.patience();
            }
            match round {
                Ok(()) => return Ok(()),
                Err(Stop::Fatal(error)) => return Err(error),
                Err(Stop::Busy { holding, reason }) => {
                    self.wait(&mut progress.patience, &holding, reason).await?;
                }
                Err(Stop::Slow { holdings }) => self.passed_over(&holdings, &mut progress.passed),
                Err(Stop::Source { holding, reason, fault }) => {
                    self.left_out(&holding, &reason, fault);
                    if let Way::Pieces { pieces, .. } = &mut self.way {
                        pieces.retain(|_, piece| *piece != holding);
                    }
                }
            }
        }
    }

    async fn pieces_round(
        &self,
        blocks: &[u8],
        progress: &mut Progress,
        target: &Target,
    ) -> Result<(), Stop> {
        let Way::Pieces { code, attempt, pieces } = &self.way else { return Ok(()) };
        let available: Vec<usize> = pieces.keys().copied().collect();
        let wanted: Vec<usize> = blocks.iter().map(|&block| block.into()).collect();
        let too_few = |_| Lost {
            shard: self.root.name.to_string(),
            stripe: self.info.fixed.stripe.index,
            needs: format!("{} good pieces that span", code.k()),
            missing: vec![format!("only {} pieces are left", available.len())],
        };
        let is_heard = |piece: &usize| !self.reading.directory.is_silent(pieces[piece].node);
        let (mut chosen, silent): (Vec<usize>, Vec<usize>) =
            available.iter().copied().partition(is_heard);
        let mut program = reconstruct(code, &chosen, &wanted);
        // No more of the silent than it takes.
        for piece in silent {
            if program.is_ok() {
                break;
            }
            chosen.push(piece);
            chosen.sort_unstable();
            program = reconstruct(code, &chosen, &wanted);
        }
        let program = program.map_err(too_few).map_err(ReadError::Lost)?;
        let program = Arc::new(program);
        let sources: Vec<Holding> = program.pieces().iter().map(|piece| pieces[piece]).collect();
        self.prove(code, *attempt, &program, &sources, blocks, progress.left.clone())?;
        // All or none: who is busy ends the round, and with it the other files, which somebody else may be waiting for.
        let files = all(sources.iter().map(|&source| self.open(source, progress))).await?;
        self.read_grains(files, Some(program), blocks, progress, target).await
    }

    /// The symbolic check of what is about to be decoded.
    fn prove(
        &self,
        code: &Code,
        attempt: Attempt,
        program: &Program,
        sources: &[Holding],
        blocks: &[u8],
        grains: Range<u64>,
    ) -> Result<(), ReadError> {
        let homes: Vec<NodeId> = sources.iter().map(|source| source.node).collect();
        let fixed = &self.info.fixed;
        let subject = Subject {
            stripe: fixed.stripe,
            attempt,
            cut: fixed.cut,
            places: &self.info.places,
            code,
        };
        let plan = direct_read(&subject, program, &homes, blocks, (grains.start, grains.end))?;
        check(&plan, code, Goal::Read(blocks))?;
        Ok(())
    }

    /// Waits for a node that is busy, holding nothing.
    async fn wait(
        &self,
        patience: &mut Patience,
        holding: &Holding,
        reason: String,
    ) -> Result<(), ReadError> {
        let (stripe, node) = (self.info.fixed.stripe, self.reading.directory.name(holding.node));
        tracing::debug!(%stripe, node, reason, "a reader waits");
        match patience.wait().await {
            true => Ok(()),
            false => Err(ReadError::Busy { stripe, node, reason }),
        }
    }

    /// Others come first, in this stripe and in the rest of the restore. That is no incident: it may be busy.
    fn passed_over(&self, slow: &[Holding], passed: &mut BTreeSet<NodeId>) {
        for node in slow.iter().map(|holding| holding.node) {
            passed.insert(node);
            if self.reading.directory.heard(node, false) {
                let node = self.reading.directory.name(node);
                tracing::info!(node, "slow: others are read first");
            }
        }
    }

    fn left_out(&self, holding: &Holding, reason: &str, fault: Fault) {
        if fault == Fault::Silent {
            self.reading.directory.heard(holding.node, false);
        }
        let name = self.reading.directory.name(holding.node);
        let stripe = self.info.fixed.stripe;
        self.reading
            .note(format!("{} of stripe {stripe} on {name} is left out: {reason}", holding.file));
        if fault == Fault::Gone && matches!(holding.file, FileName::Replica { .. }) {
            let mut leaving = self.reading.leaving.lock().unwrap_or_else(PoisonError::into_inner);
            if leaving.len() < MAX_ROTTEN {
                leaving.insert(stripe);
            }
        }
        if fault != Fault::Rotten {
            return;
        }
        let mut known = self.reading.rotten.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < MAX_ROTTEN {
            known.insert((stripe, holding.node, holding.file));
        }
        drop(known);
        if let Some(to) = self.reading.directory.address(holding.node) {
            // The node looks for itself, and sets the file aside if it is rotten. Nobody waits for that.
            let (caller, file) = (self.reading.caller.clone(), holding.file);
            tokio::spawn(async move {
                let _ = caller.call(&to, &Suspect { stripe, file }).await;
            });
        }
    }
}
