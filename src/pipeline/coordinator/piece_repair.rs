//! Making the missing pieces of an archived stripe from what is left of it.

use std::collections::BTreeSet;
use std::time::Duration;

use super::CoordinatorError;
use super::ensure_replicas::{FilesByNode, has_good_replica};
use super::moves::find_pieces;
use super::owned_stripe::OwnedStripe;
use super::receipts::{ArchivedAttempt, choose_receipt_that_counts};
use super::repair_task::RepairTask;
use super::step_repair::ends_the_repair;
use super::stripe_archiving::is_worth_a_retry;
use super::stripe_repair::StripeOutcome;
use crate::code::{Code, StripePart, table};
use crate::format::file::FileName;
use crate::format::records::{PieceForm, Receipt, ReceiptPiece};
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::plan::Plan;
use crate::plan::check::{Checked, Goal, check};
use crate::planner::{RepairSource, RepairSubject, RepairTarget, repair_chain, repair_star};
use crate::stage::{TracePoint, trace_point};
use crate::wire::calls::RepairPlan;
use crate::wire::order::Codec;

/// Maximum number of tries to make one piece.
const TRIES: u32 = 4;
/// Wait before the second try. It doubles for each further try.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Maximum number of times that spares are chosen for a stripe. A spare that failed is not chosen
/// again.
const MOVE_ROUNDS: u32 = 3;
/// Maximum number of pieces that one plan makes. It bounds the streams of a hop, and so the memory
/// of its node.
const PIECES_AT_ONCE: usize = 8;

/// An archived stripe, and the receipt that is to describe it after the repair.
struct ArchivedStripe<'a> {
    stripe: &'a OwnedStripe<'a>,
    receipt: Receipt,
    /// The pieces that no node has proven yet: each takes the place of a kept replica that was
    /// shorter than a piece. Until a node proves such a piece, its entry holds the replica's root.
    /// No piece file can match this root, so the piece is treated as missing.
    unproven: BTreeSet<u8>,
    code: &'a Code,
    task: RepairTask<'a>,
    /// Time by which limits of the rate have lengthened the plans so far.
    limit_delay: Duration,
}

/// The pieces of a receipt, by whether their nodes have them.
#[derive(Default)]
struct PieceSurvey {
    /// The sources: all pieces with the receipt's root, and one good replica of each block.
    sources: Vec<RepairSource>,
    /// Pieces whose nodes answer and do not have them.
    missing: Vec<RepairTarget>,
    /// Nodes that do not answer and should have a piece.
    away: BTreeSet<NodeId>,
    /// Nodes that answer and should have a replica that stays as a piece, and do not have it, with
    /// the block. Their replicas were there when the moves were planned, or no move was possible.
    without_kept_replica: Vec<(NodeId, u8)>,
}

/// The result of making the pieces of one survey.
#[derive(Default)]
struct RoundResult {
    /// Whether some try failed. A failed try may show that further pieces are missing.
    has_failed_tries: bool,
    /// The pieces that could not be made: the node of each, and the message.
    problems: Vec<(NodeId, String)>,
}

impl OwnedStripe<'_> {
    /// Makes the missing pieces of an archived stripe, and sends the records that nodes lack.
    pub(super) async fn repair_pieces(
        &self,
        archived: ArchivedAttempt,
        task: RepairTask<'_>,
    ) -> Result<StripeOutcome, CoordinatorError> {
        let (root, options) = (&self.shard.root, task.options);
        let found = self.fetch_all_receipts(archived.attempt).await;
        let unknown = || CoordinatorError::NoCode { n: root.n, k: root.k };
        let code = table::by_id(archived.code).ok_or_else(unknown)?;
        let Some(receipt) = choose_receipt_that_counts(&found.by_node, archived).cloned() else {
            let mut different: Vec<&Receipt> = Vec::new();
            for receipt in found.by_node.values() {
                if !different.contains(&receipt) {
                    different.push(receipt);
                }
            }
            let away = self.ring_nodes().filter(|node| !self.directory.is_live(*node));
            let (stripe, found, away) =
                (self.info.fixed.stripe, different.len(), self.name_nodes(away));
            return Err(CoordinatorError::NoReceipt { stripe, found, away });
        };
        let mut outcome = StripeOutcome::default();
        let (mut receipt, mut refused, mut spares) = (receipt, BTreeSet::new(), Vec::new());
        for round in 1..=MOVE_ROUNDS {
            let moves = self.plan_moves((&receipt, &found.answered), &code, &refused, task).await?;
            let intended = receipt.with_entries(&moves, self.shard.generation);
            let unproven = self.find_unproven(&receipt, &moves);
            let mut archived = ArchivedStripe {
                stripe: self,
                receipt: intended,
                unproven,
                code: &code,
                task,
                limit_delay: Duration::ZERO,
            };
            let mut made = StripeOutcome::default();
            archived.make_all_missing_pieces(&mut made).await?;
            made.limit_delay = archived.limit_delay;
            let (done, failed) = archived.split_by_success(&moves).await;
            let is_elsewhere =
                |moved: &ReceiptPiece| receipt.pieces[usize::from(moved.piece)].node != moved.node;
            let may_find_spares = failed.iter().any(is_elsewhere);
            receipt = receipt.with_entries(&done, self.shard.generation);
            spares.extend(done.iter().map(|moved| moved.node));
            refused.extend(failed.iter().map(|moved| moved.node));
            archived.report_unlisted(&failed, &mut made);
            outcome.add_round(made);
            if !may_find_spares || round == MOVE_ROUNDS || options.is_dry_run() {
                break;
            }
        }
        let mut holders: BTreeSet<NodeId> = self.info.places.iter().copied().collect();
        holders.extend(receipt.pieces.iter().map(|piece| piece.node));
        self.put_missing_stripe_records(&self.info.places, holders, options, &mut outcome).await;
        self.coordinator.ensure_may_go_on(self.shard, task).await?;
        self.put_missing_receipts(&receipt, &spares, &found.by_node, options, &mut outcome).await;
        Ok(outcome)
    }

    /// Returns the moved pieces whose roots no node has proven yet. A piece is padded with zeros to
    /// the length of a block, so a kept replica of a shorter block has another root.
    fn find_unproven(&self, receipt: &Receipt, moves: &[ReceiptPiece]) -> BTreeSet<u8> {
        let cut = self.info.fixed.cut;
        let is_short = |number: &u8| {
            receipt.pieces.get(usize::from(*number)).is_some_and(|piece| match piece.form {
                PieceForm::Replica { block } => cut.block_len(block) < cut.block_bytes,
                PieceForm::File => false,
            })
        };
        moves.iter().map(|moved| moved.piece).filter(is_short).collect()
    }
}

impl ArchivedStripe<'_> {
    /// Returns two lists of the receipt's entries: those for the moves whose node has the piece
    /// now, and those for the other moves. In a dry run, both are empty.
    async fn split_by_success(
        &self,
        moves: &[ReceiptPiece],
    ) -> (Vec<ReceiptPiece>, Vec<ReceiptPiece>) {
        if moves.is_empty() || self.task.options.is_dry_run() {
            return (Vec::new(), Vec::new());
        }
        let held = find_pieces(&self.stripe.list_ring_files().await, &self.receipt);
        let entries =
            moves.iter().filter_map(|moved| self.receipt.pieces.get(usize::from(moved.piece)));
        entries.cloned().partition(|entry| held.has(entry.node, entry.piece))
    }

    /// Adds a problem for each failed move whose node is neither away nor has a problem: such a
    /// node proved its piece and does not list it.
    fn report_unlisted(&self, failed: &[ReceiptPiece], made: &mut StripeOutcome) {
        for &ReceiptPiece { piece, node, .. } in failed {
            if !made.lacking.contains(&node) && !made.away.contains_key(&node) {
                let (index, name) = (self.stripe.index(), self.stripe.directory.name(node));
                let problem = format!("stripe {index}: {name} does not list its new piece {piece}");
                made.add_problem(Some(node), problem);
            }
        }
    }

    fn survey(&self, held: &FilesByNode) -> PieceSurvey {
        let (stripe, receipt) = (self.stripe, &self.receipt);
        let mut survey = PieceSurvey::default();
        let attempt = receipt.attempt;
        let answers = |node: NodeId| held.get(&node).is_some_and(Option::is_some);
        let has_piece = |node: NodeId, piece: &ReceiptPiece| {
            let file = FileName::Piece { piece: piece.piece, attempt };
            let files = held.get(&node).and_then(Option::as_ref);
            files.into_iter().flatten().any(|view| view.file == file && view.root == piece.root)
        };
        for piece in &receipt.pieces {
            let (node, number) = (piece.node, usize::from(piece.piece));
            match piece.form {
                PieceForm::Replica { block } => {
                    let is_empty = stripe.info.fixed.cut.block_len(block) == 0;
                    if !is_empty && !answers(node) {
                        survey.away.insert(node);
                    } else if !is_empty && !has_good_replica(&stripe.info, held, node, block.into())
                    {
                        survey.without_kept_replica.push((node, block));
                    }
                }
                PieceForm::File if !answers(node) => {
                    survey.away.insert(node);
                }
                PieceForm::File if !has_piece(node, piece) => {
                    survey.missing.push(RepairTarget { node, piece: number });
                }
                PieceForm::File => {}
            }
        }
        survey.sources = self.list_sources(held, has_piece);
        survey
    }

    /// Returns everything that pieces can be made from: first pieces on other nodes than the receipt
    /// names, then pieces on their nodes, then replicas. The first piece that is on its node rotates
    /// with the number of the stripe.
    fn list_sources(
        &self,
        held: &FilesByNode,
        has_piece: impl Fn(NodeId, &ReceiptPiece) -> bool,
    ) -> Vec<RepairSource> {
        let (info, receipt) = (&self.stripe.info, &self.receipt);
        let nodes: Vec<NodeId> =
            held.iter().filter(|(_, files)| files.is_some()).map(|(node, _)| *node).collect();
        let (mut copies, mut sources) = (Vec::new(), Vec::new());
        for &node in &nodes {
            for piece in receipt.pieces.iter().filter(|piece| has_piece(node, piece)) {
                let source = RepairSource { node, part: StripePart::Piece(piece.piece.into()) };
                match piece.node == node {
                    true => sources.push(source),
                    false => copies.push(source),
                }
            }
        }
        if !sources.is_empty() {
            let first = self.stripe.rotation() % sources.len();
            sources.rotate_left(first);
        }
        for block in 0..info.fixed.blocks.len() {
            let is_empty = info.fixed.blocks[block].len_bytes == 0;
            // Every node has a block past the shard's end: it is zero and has no file.
            let holder =
                nodes.iter().find(|node| is_empty || has_good_replica(info, held, **node, block));
            let part = StripePart::Block(block);
            sources.extend(holder.map(|&node| RepairSource { node, part }));
        }
        copies.extend(sources);
        copies
    }

    /// Makes the missing pieces, or counts them in a dry run.
    ///
    /// A failed try may have found a damaged source, which is then a missing piece, too. Therefore
    /// the stripe is surveyed again after each round that made a piece and in which some try
    /// failed.
    async fn make_all_missing_pieces(
        &mut self,
        outcome: &mut StripeOutcome,
    ) -> Result<(), CoordinatorError> {
        loop {
            let survey = self.survey(&self.stripe.list_ring_files().await);
            let made_before = outcome.pieces;
            let round = match self.task.options.is_dry_run() {
                true => self.count_missing_pieces(&survey, outcome),
                false => self.make_pieces_of_round(&survey, outcome).await?,
            };
            if round.has_failed_tries && outcome.pieces > made_before {
                continue;
            }
            outcome.away = survey.away.iter().map(|node| (*node, 1)).collect();
            for (node, problem) in round.problems {
                outcome.add_problem(Some(node), problem);
            }
            for (node, block) in survey.without_kept_replica {
                let (index, name) = (self.stripe.index(), self.stripe.directory.name(node));
                let problem = format!(
                    "stripe {index}: {name} has no replica of block {block}, which is a piece of a classical code, and the piece was not made"
                );
                outcome.add_problem(Some(node), problem);
            }
            return Ok(());
        }
    }

    /// Counts the missing pieces of a survey, and finds those that cannot be made.
    fn count_missing_pieces(
        &self,
        survey: &PieceSurvey,
        outcome: &mut StripeOutcome,
    ) -> RoundResult {
        let mut round = RoundResult::default();
        self.count_made(&survey.missing, outcome);
        for &target in &survey.missing {
            if let Err(error) = self.build_plan(&survey.sources, &[target]) {
                round.problems.push((target.node, self.describe(&error, target, &survey.away)));
            }
        }
        round
    }

    /// Makes the missing pieces of a survey: up to [`PIECES_AT_ONCE`] by one plan and, after a plan
    /// for several pieces has failed, the others one by one.
    async fn make_pieces_of_round(
        &mut self,
        survey: &PieceSurvey,
        outcome: &mut StripeOutcome,
    ) -> Result<RoundResult, CoordinatorError> {
        let mut round = RoundResult::default();
        let mut left = survey.missing.as_slice();
        let mut sources = survey.sources.clone();
        while left.len() > 1 {
            let (some, rest) = left.split_at(left.len().min(PIECES_AT_ONCE));
            match self.make_pieces(&sources, some).await {
                Ok(()) => self.count_made(some, outcome),
                Err(error) if ends_the_repair(&error) => return Err(error),
                Err(error) => {
                    let stripe = self.stripe.info.fixed.stripe;
                    tracing::info!(%stripe, %error, "making several pieces at once failed");
                    round.has_failed_tries = true;
                    sources = self.survey(&self.stripe.list_ring_files().await).sources;
                    break;
                }
            }
            left = rest;
        }
        for &target in left {
            match self.make_piece_with_retries(&mut sources, target, &mut round).await {
                Ok(()) => self.count_made(&[target], outcome),
                Err(error) if ends_the_repair(&error) => return Err(error),
                Err(error) => {
                    let problem = self.describe(&error, target, &survey.away);
                    round.problems.push((target.node, problem));
                }
            }
        }
        Ok(round)
    }

    async fn make_piece_with_retries(
        &mut self,
        sources: &mut Vec<RepairSource>,
        target: RepairTarget,
        round: &mut RoundResult,
    ) -> Result<(), CoordinatorError> {
        let (mut tries, mut wait) = (0, FIRST_WAIT);
        loop {
            tries += 1;
            let Err(error) = self.make_pieces(sources, &[target]).await else { return Ok(()) };
            round.has_failed_tries = true;
            if tries == TRIES || !is_worth_a_retry(&error) {
                return Err(error);
            }
            let stripe = self.stripe.info.fixed.stripe;
            tracing::info!(%stripe, %error, failed_tries = tries, "making a piece failed: trying again");
            self.stripe.coordinator.clock.sleep(wait).await;
            wait *= 2;
            // A source that failed may be damaged or gone.
            *sources = self.survey(&self.stripe.list_ring_files().await).sources;
        }
    }

    fn count_made(&self, made: &[RepairTarget], outcome: &mut StripeOutcome) {
        outcome.pieces += made.len() as u64;
        outcome.made_bytes += made.len() as u64 * self.stripe.info.fixed.cut.block_bytes;
    }

    /// Returns the message about a piece that could not be made.
    fn describe(
        &self,
        error: &CoordinatorError,
        target: RepairTarget,
        away: &BTreeSet<NodeId>,
    ) -> String {
        let (index, name) = (self.stripe.index(), self.stripe.directory.name(target.node));
        let away = self.stripe.name_nodes(away.iter().copied());
        let hint = match (error.kind(), away.is_empty()) {
            (ErrorKind::Lost, false) => format!("; {away} do not answer and may have them"),
            _ => String::new(),
        };
        format!("stripe {index}: piece {} was not made on {name}: {error}{hint}", target.piece)
    }

    /// Builds the plan that makes these pieces, and checks it.
    fn build_plan(
        &self,
        sources: &[RepairSource],
        targets: &[RepairTarget],
    ) -> Result<(Plan, Checked), CoordinatorError> {
        let fixed = &self.stripe.info.fixed;
        let (stripe, cut, code) = (fixed.stripe, fixed.cut, &self.code);
        let subject = RepairSubject { stripe, attempt: self.receipt.attempt, cut, code };
        let pieces: Vec<u8> = targets.iter().map(|target| target.piece as u8).collect();
        self.task.loads.build_plan(|load_of| {
            let mut sources = sources.to_vec();
            sources.sort_by_key(|source| (self.source_preference(source), load_of(source.node)));
            let plan = match self.task.options.plan {
                RepairPlan::Chain => repair_chain(&subject, &sources, targets)?,
                RepairPlan::Star => repair_star(&subject, &sources, targets)?,
            };
            let checked = check(&plan, code, Goal::Repair(&pieces))
                .map_err(|source| CoordinatorError::Plan { stripe, source })?;
            Ok((plan, checked))
        })
    }

    /// Returns the rank of a source; plans prefer sources of lower rank. Pieces on other nodes than
    /// the receipt names come first, because to copy such a piece costs one transfer. Pieces on the
    /// receipt's nodes come next, and replicas come last.
    fn source_preference(&self, source: &RepairSource) -> u8 {
        match source.part {
            StripePart::Piece(piece) => {
                let home = self.receipt.pieces.get(piece).map(|piece| piece.node);
                u8::from(home == Some(source.node))
            }
            StripePart::Block(_) => 2,
        }
    }

    /// Makes these pieces by one plan, and proves them. Enters in the receipt the roots of the
    /// pieces that were unproven.
    async fn make_pieces(
        &mut self,
        sources: &[RepairSource],
        targets: &[RepairTarget],
    ) -> Result<(), CoordinatorError> {
        let OwnedStripe { coordinator, shard, info, directory } = self.stripe;
        let (stripe, code) = (info.fixed.stripe, self.code);
        coordinator.ensure_may_go_on(shard, self.task).await?;
        let (plan, checked) = self.build_plan(sources, targets)?;
        // Each link of the chain carries a block for each piece that the plan makes.
        let bytes = targets.len() as u64 * info.fixed.cut.block_bytes;
        let limit = self.task.choose_limit(bytes, coordinator.clock.now());
        let bytes_per_s = limit.map(|limit| limit.bytes_per_s);
        let orders = self.stripe.build_orders(&plan, &checked, code, Codec::Kernel, bytes_per_s)?;
        trace_point(TracePoint::Reserve, stripe);
        coordinator.reserve_parts(&orders).await?;
        trace_point(TracePoint::Run, stripe);
        let begun_at = coordinator.clock.now();
        let reports = coordinator.run_parts(&orders, &plan, directory).await;
        let now = coordinator.clock.now();
        let took = now.saturating_sub(begun_at);
        self.limit_delay += limit.map_or(Duration::ZERO, |limit| limit.delay_of(took));
        let reports = reports?;
        if limit.is_none() {
            self.task.record_rate(bytes, took, now);
        }
        trace_point(TracePoint::Proof, stripe);
        for piece in targets.iter().map(|target| target.piece as u8) {
            let (node, root) = self.stripe.verify_piece(&plan, code, &reports, piece)?;
            let entry = self.receipt.pieces.get_mut(usize::from(piece));
            match entry {
                Some(entry) if self.unproven.remove(&piece) => entry.root = root,
                Some(entry) if entry.root == root => {}
                _ => {
                    let node = directory.name(node);
                    return Err(CoordinatorError::UnequalPiece { stripe, piece, node });
                }
            }
        }
        Ok(())
    }
}
