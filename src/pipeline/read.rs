//! Reading a stripe back, from replicas or from any pieces that span, every grain verified.
//!
//! First [`StripeReader::plan`] asks the nodes what they have and decides whether the stripe can be read at all; nothing is
//! delivered before that. Then [`StripeReader::read`] streams grain by grain. A source that fails or lies is left out, and reading
//! goes on from the same grain with others.
//! One that is slow, because it gives nothing or little, is passed over, and comes last from then on: it is waited for only when the
//! others do not do without it.
//! A node that is busy has what is wanted: all files are let go, and opened again later.

mod error;
mod flow;
mod inspect;
mod reading;
mod source;
mod state;
mod way;

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

pub use error::ReadError;
use futures_util::future::try_join_all;
use inspect::{Held, INSPECT_LIMIT, PATIENT_LIMIT, inspect_all};
pub use reading::Reading;
use reading::{MAX_BAD_FILES, lock};
use source::{Fault, Stop, all};
pub use state::state_on_nodes;
pub use way::Lost;
use way::{Holding, Wanted, Way};

use super::patience::Patience;
use super::records::StripeInfo;
use crate::code::{Code, Program, reconstruct};
use crate::format::file::FileName;
use crate::format::records::{Receipt, ShardRoot, StripeState};
use crate::gf::FingerprintKey;
use crate::id::{Attempt, NodeId};
use crate::plan::check::{Goal, check};
use crate::planner::{Subject, direct_read};
use crate::wire::calls::Suspect;

/// How far a reading has come, and whom it has been patient with.
struct Progress {
    /// Grains that are not delivered yet.
    left: Range<u64>,
    /// Nodes that were passed over because they were slow: once each. Then they are waited for as long as it has to be.
    passed: BTreeSet<NodeId>,
    /// The node that was busy last: others come first.
    busy: Option<NodeId>,
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

/// Reads one stripe.
pub struct StripeReader {
    reading: Arc<Reading>,
    root: Arc<ShardRoot>,
    key: Arc<FingerprintKey>,
    info: Arc<StripeInfo>,
    way: Way,
}

impl StripeReader {
    /// Finds a way to read `blocks` of the stripe, or says what is missing; busy: nobody knows before a node has time.
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
        let find = |held: &Held| wanted.find_way(&reading.readable(stripe, held));
        // An error is no way, and none that waiting mends.
        let is_enough = |held: &Held| find(held).map_or(true, |way| way.is_some());
        let mut held = Held::new();
        inspect_all(&reading, stripe, &known, INSPECT_LIMIT, &mut held, is_enough).await;
        let mut found = find(&held)?;
        let mut busy = None;
        if found.is_none() {
            // Everybody else of the ring, and the silent ones again.
            nodes.extend(root.ring.iter().map(|member| member.node));
            let rest = nodes.iter().copied().filter(|node| !held.contains_key(node)).collect();
            busy = inspect_all(&reading, stripe, &rest, PATIENT_LIMIT, &mut held, is_enough).await;
            found = find(&held)?;
        }
        if found.is_none() && busy.is_none() {
            // What could not be read once may be read now, when there is nothing else.
            found = wanted.find_way(&held)?;
        }
        let way = match (found, busy) {
            (Some(way), _) => way,
            (None, Some((node, reason))) => {
                let node = reading.directory.name(node);
                return Err(ReadError::Busy { stripe, node, reason });
            }
            (None, None) => return Err(ReadError::Lost(wanted.explain(&reading, &held))),
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
        let (mut is_turned, mut failed) = (false, Vec::new());
        while !progress.left.is_empty() {
            // Who was silent comes last, but for its turn after one that is busy; and of those, who was passed over in this stripe.
            let is_new = |source: &&Holding| !progress.passed.contains(&source.node);
            let is_heard = |source: &&Holding| !self.reading.directory.is_silent(source.node);
            let comes_first = |source: &&Holding| is_turned || (is_heard(source) && is_new(source));
            let best = sources.iter().find(comes_first).or_else(|| sources.iter().find(is_new));
            let Some(&source) = best.or(sources.first()) else {
                return Err(ReadError::Lost(Lost {
                    shard: self.root.name.to_string(),
                    stripe: self.info.fixed.stripe.index,
                    needs: format!("a good replica of block {}", block + 1),
                    missing: vec![
                        "every holder failed while it was read (see the incidents)".into(),
                    ],
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
                    let node = self.reading.directory.name(holding.node);
                    failed.push(format!("that on {node}, which was left out: {reason}"));
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
                    progress.busy = Some(holding.node);
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
        let node = |piece: &usize| pieces[piece].node;
        let is_busy = |piece: &usize| progress.busy == Some(node(piece));
        let is_passed = |piece: &usize| progress.passed.contains(&node(piece));
        let is_heard = |piece: &usize| !self.reading.directory.is_silent(node(piece));
        let is_ready = |piece: &usize| is_heard(piece) && !is_busy(piece) && !is_passed(piece);
        let (mut chosen, mut others): (Vec<usize>, Vec<usize>) =
            available.iter().copied().partition(is_ready);
        let mut program = reconstruct(code, &chosen, &wanted);
        // No more of the silent and the busy than it takes; last who was passed over.
        others.sort_by_key(|piece| (is_passed(piece), is_busy(piece)));
        for piece in others {
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
            let mut leaving = lock(&self.reading.leaving);
            if leaving.len() < MAX_BAD_FILES {
                leaving.insert(stripe);
            }
        }
        let known = match fault {
            Fault::Silent => return,
            Fault::Gone => &self.reading.unreadable,
            Fault::Rotten => &self.reading.rotten,
        };
        let mut known = lock(known);
        if known.len() < MAX_BAD_FILES {
            known.insert((stripe, holding.node, holding.file));
        }
        drop(known);
        if let Some(to) = self.reading.directory.address(holding.node) {
            // The node looks for itself: it sets the file aside if it is rotten, and takes it off its list if it is gone. Nobody waits
            // for that.
            let (caller, file) = (self.reading.caller.clone(), holding.file);
            tokio::spawn(async move {
                let _ = caller.call(&to, &Suspect { stripe, file }).await;
            });
        }
    }
}
