//! Reads a stripe back, from replicas or from any pieces that determine the wanted blocks, with every
//! grain verified.
//!
//! First [`StripeReader::probe_and_plan`] asks the nodes which files they have and decides whether
//! the stripe can be read at all; nothing is delivered before that. Then
//! [`StripeReader::read_into_sink`] streams grain by grain:
//!
//! - A grain that is damaged in one file is read from another one, and the stream continues after
//!   it.
//! - A source that fails is excluded, and reading continues at the same grain from others.
//! - A source that is slow, because it sends nothing or little, is deprioritized. From then on it
//!   comes last, and it is waited for only if the others are not enough.
//! - A busy node still has its files. The reader closes all files and opens them again later.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use futures_util::future::try_join_all;

use super::error::ReadError;
use super::file_probe::{HeldFiles, LONG_PROBE_LIMIT, PROBE_LIMIT, WantedFiles, probe_nodes};
use super::grain_decoding::{ReadTarget, Sink};
use super::read_cursor::ReadCursor;
use super::read_session::ReadSession;
use super::source_reader::{OpenFile, RoundEnd, try_join_reads};
use super::source_selection::{CodedPieces, ReadRequest, RemoteFile, UnreadableStripe};
use super::stripe_sources::{SourceFault, StripeSources};
use crate::code::{Code, Program, reconstruct};
use crate::format::records::{Receipt, ShardRoot, StripeState};
use crate::gf::{Fingerprint, FingerprintKey};
use crate::id::NodeId;
use crate::pipeline::busy_retry::BusyRetry;
use crate::pipeline::record_fetch::StripeInfo;
use crate::plan::check::{Goal, check};
use crate::planner::{Subject, direct_read};
use crate::units::GRAIN_BYTES;
use crate::workers::InOrder;

/// Maximum number of grains of a stripe that are decoded, verified and written at once, while the
/// next one is fetched.
const GRAINS_AT_ONCE: usize = 4;
/// Maximum number of damaged grains that a round reads from elsewhere. Then the round ends, and
/// other sources are chosen.
const MAX_REPAIRED_GRAINS: usize = 16;

/// Memory that a reader takes, apart from the fingerprints: the places and sources of a stripe.
const BASE_BYTES: usize = 4 << 10;

/// A reader of one stripe.
pub struct StripeReader {
    root: Arc<ShardRoot>,
    sources: StripeSources,
}

impl StripeReader {
    /// Finds the sources for grains `grains` of `blocks` of the stripe.
    ///
    /// # Errors
    /// [`ReadError::Lost`] if too few sources are found; the error names the missing ones.
    /// [`ReadError::Busy`] if it is unknown whether the stripe can be read until a busy node
    /// answers. [`ReadError::UnknownCode`] if only pieces of an unknown code are left.
    #[expect(clippy::too_many_arguments, reason = "a stripe is many things")]
    pub async fn probe_and_plan(
        reading: Arc<ReadSession>,
        root: Arc<ShardRoot>,
        key: Arc<FingerprintKey>,
        info: StripeInfo,
        state: StripeState,
        receipt: Option<Receipt>,
        blocks: &[u8],
        grains: Range<u64>,
    ) -> Result<Self, ReadError> {
        let info = Arc::new(info);
        let mut nodes: BTreeSet<NodeId> = info.places.iter().copied().collect();
        nodes.extend(receipt.iter().flat_map(|receipt| &receipt.pieces).map(|piece| piece.node));
        let known: BTreeSet<NodeId> =
            nodes.iter().copied().filter(|node| reading.directory.is_live(*node)).collect();
        let stripe = info.fixed.stripe;
        let is_leaving = reading.is_dropping_replicas(stripe);
        let receipt = receipt.as_ref();
        let wanted =
            ReadRequest { root: &root, info: &info, state, receipt, blocks, grains, is_leaving };
        let way = |held: &HeldFiles| wanted.find_sources(&reading.damage_of_stripe(stripe), held);
        let find = |held: &HeldFiles| way(&reading.without_unreadable(stripe, held));
        // An error is final. Waiting for more nodes does not help then.
        let is_enough = |held: &HeldFiles| find(held).map_or(true, |way| way.is_some());
        let mut held = HeldFiles::new();
        let counting = (stripe, WantedFiles::GoodCopies);
        probe_nodes(&reading, counting, &known, PROBE_LIMIT, &mut held, is_enough).await;
        let mut found = find(&held)?;
        let mut busy = None;
        if found.is_none() {
            // Ask all nodes of the ring, including the silent ones again, and accept damaged files.
            nodes.extend(reading.directory.nodes_to_ask(&root));
            let sources = (stripe, WantedFiles::Sources);
            busy = probe_nodes(&reading, sources, &nodes, LONG_PROBE_LIMIT, &mut held, is_enough)
                .await;
            found = find(&held)?;
        }
        if found.is_none() && busy.is_none() {
            // There is nothing else: include the files that could not be read before. They may be
            // readable now.
            found = way(&held)?;
        }
        let way = match (found, busy) {
            (Some(way), _) => way,
            (None, Some((node, reason))) => {
                let node = reading.directory.name(node);
                return Err(ReadError::Busy { stripe, node, reason });
            }
            (None, None) => {
                return Err(ReadError::Lost(wanted.explain_unreadable(&reading, &held)));
            }
        };
        Ok(Self { root, sources: StripeSources::new(reading, key, info, way) })
    }

    /// Returns about how much memory the reader takes before it reads.
    pub fn memory_bytes(&self) -> usize {
        let fingerprints =
            self.sources.info.fixed.blocks.iter().map(|block| block.fingerprints.len());
        BASE_BYTES + fingerprints.sum::<usize>() * size_of::<Fingerprint>()
    }

    /// Returns whether the stripe has to be decoded from pieces.
    pub fn needs_decoding(&self) -> bool {
        self.sources.found.by_pieces
    }

    /// Streams grains `grains` of each of `blocks` into `sink`. Bytes outside `range` of the shard
    /// are not delivered.
    pub async fn read_into_sink(
        self,
        blocks: &[u8],
        grains: Range<u64>,
        range: Range<u64>,
        sink: Arc<dyn Sink>,
    ) -> Result<(), ReadError> {
        let target = ReadTarget { range, sink };
        if self.sources.found.by_pieces {
            return self.read_blocks_from_pieces(blocks, grains, &target).await;
        }
        // Read all replicas at once, as is done with pieces. One after the other, they would come
        // at the rate of one node's link.
        let reads = blocks
            .iter()
            .map(|&block| self.read_block_from_replicas(block, grains.clone(), &target));
        try_join_all(reads).await.map(|_| ())
    }

    async fn read_block_from_replicas(
        &self,
        block: u8,
        grains: Range<u64>,
        target: &ReadTarget,
    ) -> Result<(), ReadError> {
        let end =
            crate::units::grains(self.sources.info.fixed.cut.block_len(block)).min(grains.end);
        let mut progress = self.sources.reading.new_cursor(grains.start..end);
        let mut is_turned = false;
        while !progress.left.is_empty() {
            let from = progress.left.start;
            // Silent nodes come last, except that a silent node gets its turn after a busy one.
            // Among the silent nodes, those that were deprioritized in this stripe come last.
            let sources = self.ranked_replicas(block, &progress);
            let is_new = |source: &&RemoteFile| !progress.deprioritized.contains(&source.node);
            let is_heard =
                |source: &&RemoteFile| !self.sources.reading.directory.is_silent(source.node);
            let comes_first =
                |source: &&RemoteFile| is_turned || (is_heard(source) && is_new(source));
            let best = sources.iter().find(comes_first).or_else(|| sources.iter().find(is_new));
            let best = best.or(sources.first()).copied();
            let round = match best {
                Some(source) => self.read_replica_round(block, source, &mut progress, target).await,
                None => self.read_next_grain_elsewhere(&[block], &mut progress, target).await,
            };
            if progress.left.start > from {
                progress.patience = self.sources.reading.new_busy_retry();
            }
            is_turned = matches!(round, Err(RoundEnd::Busy { .. }));
            if let Err(end) = round {
                self.prepare_next_round(end, &mut progress).await?;
            }
        }
        Ok(())
    }

    /// Returns the sources of a block that have the next grain good, the best first: sources on
    /// nodes that are not busy come first; among these, files without known damage; then files with
    /// the fewest damaged grains; then files on nodes of which this restore reads the fewest files,
    /// because the files of one node share its link.
    fn ranked_replicas(&self, block: u8, progress: &ReadCursor) -> Vec<RemoteFile> {
        let sources = self.sources.found.replicas.get(&block).into_iter().flatten().copied();
        let is_good =
            |source: &RemoteFile| self.sources.has_good_grain(source, progress.left.start);
        let mut sources: Vec<RemoteFile> = sources.filter(is_good).collect();
        // Each key is computed once: the counts may change while other readers work.
        sources.sort_by_cached_key(|source| {
            (
                progress.busy == Some(source.node),
                !source.counts_as_copy,
                self.sources.damaged_grain_count(source),
                self.sources.reading.open_file_count(source.node),
            )
        });
        sources
    }

    async fn read_replica_round(
        &self,
        block: u8,
        source: RemoteFile,
        progress: &mut ReadCursor,
        target: &ReadTarget,
    ) -> Result<(), RoundEnd> {
        let file = self.sources.open_source(source, progress).await?;
        match self.read_grains(vec![file], None, &[block], progress, target).await {
            Err(RoundEnd::Fatal(ReadError::Decoded { .. })) => {
                let reason = "its bytes are not what was saved".into();
                Err(RoundEnd::Source { holding: source, reason, fault: SourceFault::Corrupt })
            }
            done => done,
        }
    }

    async fn read_blocks_from_pieces(
        &self,
        blocks: &[u8],
        grains: Range<u64>,
        target: &ReadTarget,
    ) -> Result<(), ReadError> {
        let mut progress = self.sources.reading.new_cursor(grains);
        while !progress.left.is_empty() {
            let from = progress.left.start;
            let round = match self.choose_pieces(blocks, &progress) {
                Some((program, sources)) => {
                    self.read_pieces_round(blocks, program, &sources, &mut progress, target).await
                }
                None => self.read_next_grain_elsewhere(blocks, &mut progress, target).await,
            };
            if progress.left.start > from {
                progress.patience = self.sources.reading.new_busy_retry();
            }
            if let Err(end) = round {
                self.prepare_next_round(end, &mut progress).await?;
            }
        }
        Ok(())
    }

    /// Chooses pieces that have the next grain good, if possible on the nodes of which this restore
    /// reads the fewest files. Returns a program that decodes `blocks` from them, and the sources of
    /// these pieces; `None` if such pieces do not determine `blocks`.
    fn choose_pieces(
        &self,
        blocks: &[u8],
        progress: &ReadCursor,
    ) -> Option<(Arc<Program>, Vec<RemoteFile>)> {
        let coded = self.sources.found.coded.as_ref()?;
        let mut sources: BTreeMap<usize, RemoteFile> = BTreeMap::new();
        for (&piece, holders) in &coded.pieces {
            let good = holders
                .iter()
                .find(|source| self.sources.has_good_grain(source, progress.left.start));
            if let Some(source) = good {
                sources.insert(piece, *source);
            }
        }
        let wanted: Vec<usize> = blocks.iter().map(|&block| block.into()).collect();
        let node = |piece: &usize| sources[piece].node;
        let is_busy = |piece: &usize| progress.busy == Some(node(piece));
        let is_passed = |piece: &usize| progress.deprioritized.contains(&node(piece));
        let is_heard = |piece: &usize| !self.sources.reading.directory.is_silent(node(piece));
        let is_sound = |piece: &usize| {
            let source = &sources[piece];
            source.counts_as_copy && self.sources.damaged_grain_count(source) <= MAX_REPAIRED_GRAINS
        };
        let is_ready = |piece: &usize| {
            is_heard(piece) && !is_busy(piece) && !is_passed(piece) && is_sound(piece)
        };
        let (mut chosen, mut others): (Vec<usize>, Vec<usize>) =
            sources.keys().copied().partition(is_ready);
        let mut program =
            reconstruct(&coded.code, &self.least_used(&coded.code, &chosen, &node), &wanted);
        if program.is_err() {
            program = reconstruct(&coded.code, &chosen, &wanted);
        }
        // Add damaged, silent and busy sources only as far as they are needed. Deprioritized nodes
        // come last.
        others.sort_by_key(|piece| (is_passed(piece), is_busy(piece), !is_heard(piece)));
        for piece in others {
            if program.is_ok() {
                break;
            }
            chosen.push(piece);
            chosen.sort_unstable();
            program = reconstruct(&coded.code, &chosen, &wanted);
        }
        let program = program.ok()?;
        let sources = program.pieces().iter().map(|piece| sources[piece]).collect();
        Some((Arc::new(program), sources))
    }

    /// Returns the `k` of `pieces` on whose nodes the fewest files are open. Pieces of equally used
    /// nodes come in their order, because the first ones are the cheapest to decode from. Returns all
    /// pieces of a classical code, where most blocks are pieces themselves.
    fn least_used(
        &self,
        code: &Code,
        pieces: &[usize],
        node: &dyn Fn(&usize) -> NodeId,
    ) -> Vec<usize> {
        let mut least = pieces.to_vec();
        if matches!(code, Code::Chain(_)) {
            least.sort_by_cached_key(|piece| self.sources.reading.open_file_count(node(piece)));
            least.truncate(code.k());
        }
        least
    }

    async fn read_pieces_round(
        &self,
        blocks: &[u8],
        program: Arc<Program>,
        sources: &[RemoteFile],
        progress: &mut ReadCursor,
        target: &ReadTarget,
    ) -> Result<(), RoundEnd> {
        self.check_read_plan(&program, sources, blocks, progress.left.clone())?;
        // Open all sources or none. A busy node ends the round and closes the other files, so that
        // this reader holds nothing that others wait for.
        let files = try_join_reads(
            sources.iter().map(|&source| self.sources.open_source(source, progress)),
        )
        .await?;
        self.read_grains(files, Some(program), blocks, progress, target).await
    }

    /// Fetches the remaining grains one by one. While the next grain arrives, the grains that have
    /// arrived are decoded, verified and written, each on a core of its own. Without a `program`,
    /// the files are replicas of `blocks`.
    ///
    /// Returns early, with grains left in `progress`, after [`MAX_REPAIRED_GRAINS`] grains had to
    /// be read from other sources.
    async fn read_grains(
        &self,
        mut files: Vec<OpenFile>,
        program: Option<Arc<Program>>,
        blocks: &[u8],
        progress: &mut ReadCursor,
        target: &ReadTarget,
    ) -> Result<(), RoundEnd> {
        let mut begun = InOrder::new(GRAINS_AT_ONCE);
        let (mut fetched, mut patches) = (Ok(()), 0);
        for grain in progress.left.clone() {
            let inputs = match self.sources.read_grain_from_all(&mut files, grain).await {
                Ok(Some(inputs)) => inputs,
                Ok(None) => {
                    while let Some(done) = begun.next().await? {
                        done?;
                        progress.left.start += 1;
                    }
                    self.read_next_grain_elsewhere(blocks, progress, target).await?;
                    patches += 1;
                    // End the round: other sources may have less damage.
                    if patches == MAX_REPAIRED_GRAINS {
                        return Ok(());
                    }
                    continue;
                }
                Err(stop) => {
                    fetched = Err(stop);
                    break;
                }
            };
            let work = self.sources.decode_verify_and_write_job(
                inputs,
                program.clone(),
                blocks,
                grain,
                target,
            );
            if let Some(done) = begun.push(|| self.sources.reading.workers.begin(work)).await? {
                done?;
                progress.left.start += 1;
            }
        }
        while let Some(done) = begun.next().await? {
            done?;
            progress.left.start += 1;
        }
        fetched
    }

    /// Reads the next grain of each block from a source that has it good: a replica, or pieces. Then
    /// moves `progress` past this grain.
    async fn read_next_grain_elsewhere(
        &self,
        blocks: &[u8],
        progress: &mut ReadCursor,
        target: &ReadTarget,
    ) -> Result<(), RoundEnd> {
        let grain = progress.left.start;
        let left = grain..grain + 1;
        let (passed, patience) =
            (progress.deprioritized.clone(), self.sources.reading.new_busy_retry());
        let alone = ReadCursor { left, deprioritized: passed, busy: progress.busy, patience };
        let mut coded = Vec::new();
        for &block in blocks {
            if self.sources.info.fixed.cut.block_len(block) <= grain * GRAIN_BYTES {
                continue;
            }
            loop {
                let mut sources = self.ranked_replicas(block, &alone);
                sources.sort_by_key(|source| alone.deprioritized.contains(&source.node));
                let Some(&source) = sources.first() else {
                    coded.push(block);
                    break;
                };
                if self.try_read_grain(&[source], None, &[block], &alone, target).await? {
                    break;
                }
            }
        }
        while !coded.is_empty() {
            let Some((program, sources)) = self.choose_pieces(&coded, &alone) else {
                return Err(ReadError::Lost(self.describe_lost_grain(&coded, grain)).into());
            };
            self.check_read_plan(&program, &sources, &coded, alone.left.clone())?;
            if self.try_read_grain(&sources, Some(program), &coded, &alone, target).await? {
                break;
            }
        }
        progress.left.start += 1;
        Ok(())
    }

    /// Reads from `sources` the grain at which `grain_cursor` starts. Returns `false` if a source
    /// failed and is now excluded, or if the grain is damaged in one of the sources.
    async fn try_read_grain(
        &self,
        sources: &[RemoteFile],
        program: Option<Arc<Program>>,
        blocks: &[u8],
        grain_cursor: &ReadCursor,
        target: &ReadTarget,
    ) -> Result<bool, RoundEnd> {
        let grain = grain_cursor.left.start;
        let read = async {
            let mut files = try_join_reads(
                sources.iter().map(|&source| self.sources.open_source(source, grain_cursor)),
            )
            .await?;
            self.sources.read_grain_from_all(&mut files, grain).await
        };
        match read.await {
            Ok(Some(inputs)) => {
                let is_decoded = program.is_some();
                let work = self
                    .sources
                    .decode_verify_and_write_job(inputs, program, blocks, grain, target);
                match (self.sources.reading.workers.run(work).await?, sources) {
                    (Err(ReadError::Decoded { .. }), [source]) if !is_decoded => {
                        self.sources.exclude_and_report_source(
                            source,
                            "its bytes are not what was saved",
                            SourceFault::Corrupt,
                        );
                        Ok(false)
                    }
                    (done, _) => Ok(done.map(|()| true)?),
                }
            }
            Ok(None) => Ok(false),
            Err(RoundEnd::Source { holding, reason, fault }) => {
                self.sources.exclude_and_report_source(&holding, &reason, fault);
                Ok(false)
            }
            Err(stop) => Err(stop),
        }
    }

    fn describe_lost_grain(&self, blocks: &[u8], grain: u64) -> UnreadableStripe {
        let named: Vec<String> = blocks.iter().map(u8::to_string).collect();
        UnreadableStripe {
            shard: self.root.name.to_string(),
            stripe: self.sources.info.fixed.stripe.index,
            needs: format!("grain {grain} of block {}", named.join(", ")),
            missing: vec!["every source failed while it was read (see the incidents)".into()],
        }
    }

    /// Runs the symbolic check of the plan by which the blocks will be decoded.
    fn check_read_plan(
        &self,
        program: &Program,
        sources: &[RemoteFile],
        blocks: &[u8],
        grains: Range<u64>,
    ) -> Result<(), ReadError> {
        let Some(CodedPieces { code, attempt, .. }) = &self.sources.found.coded else {
            return Ok(());
        };
        let homes: Vec<NodeId> = sources.iter().map(|source| source.node).collect();
        let fixed = &self.sources.info.fixed;
        let subject = Subject {
            stripe: fixed.stripe,
            attempt: *attempt,
            cut: fixed.cut,
            places: &self.sources.info.places,
            code,
        };
        let plan = direct_read(&subject, program, &homes, blocks, (grains.start, grains.end))?;
        check(&plan, code, Goal::Read(blocks))?;
        Ok(())
    }

    /// Draws the conclusion from a round that ended early: excludes or deprioritizes sources, or
    /// waits for a busy node.
    ///
    /// # Errors
    /// The error that ends the read, or [`ReadError::Busy`] if the node stays busy.
    async fn prepare_next_round(
        &self,
        end: RoundEnd,
        progress: &mut ReadCursor,
    ) -> Result<(), ReadError> {
        match end {
            RoundEnd::Fatal(error) => return Err(error),
            RoundEnd::Busy { holding, reason } => {
                progress.busy = Some(holding.node);
                self.wait_for_busy_node(&mut progress.patience, &holding, reason).await?;
            }
            RoundEnd::Slow { holdings } => {
                self.deprioritize(&holdings, &mut progress.deprioritized);
            }
            RoundEnd::Source { holding, reason, fault } => {
                self.sources.exclude_and_report_source(&holding, &reason, fault);
            }
        }
        Ok(())
    }

    /// Waits for a busy node. The reader holds no open files meanwhile.
    async fn wait_for_busy_node(
        &self,
        patience: &mut BusyRetry,
        holding: &RemoteFile,
        reason: String,
    ) -> Result<(), ReadError> {
        let (stripe, node) =
            (self.sources.info.fixed.stripe, self.sources.reading.directory.name(holding.node));
        tracing::debug!(%stripe, node, reason, "a reader waits for a busy node");
        match patience.wait_unless_expired().await {
            true => Ok(()),
            false => Err(ReadError::Busy { stripe, node, reason }),
        }
    }

    /// Puts slow nodes behind the others, in this stripe and in the rest of the restore. This is no
    /// incident, because the nodes may be busy.
    fn deprioritize(&self, slow: &[RemoteFile], deprioritized: &mut BTreeSet<NodeId>) {
        for node in slow.iter().map(|holding| holding.node) {
            deprioritized.insert(node);
            if self.sources.reading.directory.heard(node, false) {
                let node = self.sources.reading.directory.name(node);
                tracing::info!(node, "a node is slow: other nodes are read first");
            }
        }
    }
}
