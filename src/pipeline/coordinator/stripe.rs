//! The archiving of one stripe, in this order: replicas, plan, admission, run, proof, receipts,
//! commit, drop.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::FuturesUnordered;

use super::orders::{NodeOrder, OrderContext, build_orders, verify_proofs};
use super::owned_shard::OwnedShard;
use super::{ArchiveError, Coordinator, Events};
use crate::clock::deadline;
use crate::code::{reconstruct, table};
use crate::entropy::Entropy;
use crate::format::file::FileName;
use crate::format::records::{PieceForm, Receipt, ReceiptPiece, Record, ShardRoot, StripeState};
use crate::id::{Attempt, Generation, NodeId};
use crate::kind::ErrorKind;
use crate::net::call::{CallError, address};
use crate::pipeline::busy_retry::BusyRetry;
use crate::pipeline::executor::ADMIT_ALL_LIMIT;
use crate::pipeline::shard_records::{self, StripeInfo};
use crate::placement::place;
use crate::plan::check::{Goal, check};
use crate::plan::{Output, Plan};
use crate::planner::{self, Subject};
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{
    ArchiveEvent, ArchiveOptions, DropReplicas, HopView, PlanChoice, PutReceipt, ReleasePart,
    ReservePart, RunPart, StripeReport,
};
use crate::wire::order::RunReport;

/// Maximum number of tries per stripe. Each try first recreates missing replicas.
const TRIES: u32 = 4;
/// Wait before the second try. It doubles for each further try.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Time limit for one run of a stripe's plan. A stalled hop ends much earlier.
const RUN_LIMIT: Duration = Duration::from_secs(3600);
/// How long the coordinator waits for the root cause after the first failure. A node may report the
/// failure of its neighbour before the neighbour itself reports.
const CAUSE_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for the reservation on one node. It is longer than a node waits for memory, so that
/// the node's own answer arrives first.
const RESERVE_LIMIT: Duration = Duration::from_secs(15);

impl Coordinator {
    /// Archives stripe `index`. Only completes the drop if the stripe is archived already.
    pub(super) async fn archive_stripe(
        &self,
        shard: &OwnedShard,
        index: u32,
        options: ArchiveOptions,
        events: &Events,
    ) -> Result<(), ArchiveError> {
        let mut wait = FIRST_WAIT;
        let mut tries = 0;
        loop {
            tries += 1;
            shard.ensure_owned()?;
            let error = match self.try_stripe(shard, index, options, events, tries == 1).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let again = matches!(
                error,
                ArchiveError::Call(_) | ArchiveError::Part { .. } | ArchiveError::Unproven { .. }
            );
            if !again
                || matches!(
                    error.kind(),
                    ErrorKind::Fenced | ErrorKind::Invalid | ErrorKind::Denied
                )
            {
                return Err(error);
            }
            tracing::warn!(shard = %shard.root.name, stripe = index, tries, %error, "archiving a stripe failed");
            if tries == TRIES {
                let stripe = crate::id::StripeId { shard: shard.root.shard, index };
                let kind = error.kind();
                return Err(ArchiveError::Stripe { stripe, tries, last: error.to_string(), kind });
            }
            let note = format!("stripe {index} of {}: {error}; trying again", shard.root.name);
            let _ = events.send(ArchiveEvent::Note(note)).await;
            self.clock.sleep(wait).await;
            wait *= 2;
        }
    }

    async fn try_stripe(
        &self,
        shard: &OwnedShard,
        index: u32,
        options: ArchiveOptions,
        events: &Events,
        is_first: bool,
    ) -> Result<(), ArchiveError> {
        let directory = self.directory().await?;
        let leaves = shard.fetch_leaves(self, &directory).await?;
        let info = shard_records::fetch_stripe_record(
            &self.caller,
            &directory,
            &shard.root,
            leaves,
            index,
        )
        .await?;
        let (attempt, generation) = match shard.stripe(index).await {
            Some(StripeState::Archiving { attempt, generation, .. }) => (attempt, generation),
            Some(StripeState::Archived { attempt, generation, dropped: false, .. }) => {
                // This run did not prove the pieces. Drop the replicas only if the pieces found now
                // can rebuild every block.
                let at = (index, info.places.as_slice());
                let receipt = shard_records::fetch_receipt(
                    &self.caller,
                    &directory,
                    &shard.root,
                    at,
                    attempt,
                )
                .await?;
                let stands = receipt.generation == generation
                    && self.pieces_span(&info, &directory, &receipt).await;
                return match stands {
                    true => self.drop_replicas(shard, &info, &directory, &receipt, &[]).await,
                    false => {
                        let text = format!(
                            "stripe {index} of {}: too few of its pieces are reachable; its replicas are kept for now",
                            shard.root.name
                        );
                        let _ = events.send(ArchiveEvent::Note(text)).await;
                        Ok(())
                    }
                };
            }
            _ => return Ok(()),
        };
        trace_point(TracePoint::Replicas, info.fixed.stripe);
        let places = self.ensure_replicas(shard, &info, &directory).await?;
        let context = OrderContext { shard, fixed: &info.fixed, directory: &directory, options };
        let subject = Subject {
            stripe: info.fixed.stripe,
            attempt,
            cut: info.fixed.cut,
            places: &places,
            code: &shard.code,
        };
        let plan = build_plan(&subject, options.plan, &*self.entropy)?;
        let stripe = info.fixed.stripe;
        let checked = check(&plan, &shard.code, Goal::Archive)
            .map_err(|source| ArchiveError::Plan { stripe, source })?;
        let orders = build_orders(self, &context, &plan, &checked)?;

        let started = self.clock.now();
        let (mut reserved, mut reports) = (started, Vec::new());
        // Reuse an earlier receipt only on the first try. If its nodes reject it after all, the
        // next try makes the pieces anew.
        let earlier = match is_first && generation != shard.generation {
            true => self.find_previous_receipt(shard, &info, &directory, &plan, generation).await,
            false => None,
        };
        let receipt = match earlier {
            Some(receipt) => receipt,
            None => {
                trace_point(TracePoint::Reserve, stripe);
                self.reserve(&orders).await?;
                reserved = self.clock.now();
                trace_point(TracePoint::Run, stripe);
                reports = self.run(&orders, &plan, &directory).await?;
                trace_point(TracePoint::Proof, stripe);
                let pieces = verify_proofs(&context, &plan, &reports)?;
                let (cluster, code) = (self.cluster, plan.code);
                Receipt { cluster, stripe, attempt, generation, code, pieces }
            }
        };
        let proven = self.clock.now();
        self.put_receipts(shard, &orders, &receipt).await?;
        let archived =
            StripeState::Archived { attempt, code: plan.code, generation, dropped: false };
        trace_point(TracePoint::Archived, stripe);
        shard.set_stripes(self, index, archived).await?;
        let committed = self.clock.now();
        self.drop_replicas(shard, &info, &directory, &receipt, &places).await?;
        let phases_us = [
            reserved - started,
            proven - reserved,
            committed - proven,
            self.clock.now() - committed,
        ]
        .map(|phase| phase.as_micros() as u64);
        let hops = hop_views(&plan, &reports, &directory);
        let report = StripeReport {
            stripe,
            code: plan.code,
            block_bytes: plan.cut.block_bytes,
            hops,
            phases_us,
        };
        let _ = events.send(ArchiveEvent::Stripe(report)).await;
        Ok(())
    }

    /// Reserves the parts of the plan on all nodes. Retries while nodes are busy with other plans,
    /// because that is no failure of the stripe.
    async fn reserve(&self, orders: &[NodeOrder]) -> Result<(), ArchiveError> {
        let mut patience = BusyRetry::new(self.clock.clone(), self.entropy.clone());
        loop {
            let error = match self.reserve_all(orders).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            tracing::debug!(%error, "a plan was not admitted");
            if error.kind() != ErrorKind::Busy || !patience.wait().await {
                return Err(error.into());
            }
        }
    }

    /// Reserves in node-id order, on all nodes or none. A plan that holds a node waits only for
    /// nodes with greater ids, so that plans never wait for one another in a circle
    /// (docs/semantics.md, 7).
    async fn reserve_all(&self, orders: &[NodeOrder]) -> Result<(), CallError> {
        debug_assert!(orders.is_sorted_by_key(|order| order.node));
        let began = self.clock.now();
        for (at, NodeOrder { address: to, order, .. }) in orders.iter().enumerate() {
            let call = ReservePart { order: order.clone() };
            let left = ADMIT_ALL_LIMIT.saturating_sub(self.clock.now() - began);
            let mut answer =
                self.caller.call_within(&address(to), &call, RESERVE_LIMIT.min(left)).await;
            if let Err(CallError::Late { .. }) = answer
                && left < RESERVE_LIMIT
            {
                let message = format!("not all nodes were free within {ADMIT_ALL_LIMIT:?}");
                answer = Err(RemoteError { kind: ErrorKind::Busy, message }.into());
            }
            if let Err(error) = answer {
                self.release(&orders[..=at]).await;
                return Err(error);
            }
        }
        Ok(())
    }

    async fn release(&self, orders: &[NodeOrder]) {
        let calls = orders.iter().map(|NodeOrder { address, order, .. }| async move {
            // On a node that does not receive this call, the reservation expires.
            let _ = self.caller.call(address, &ReleasePart { run: order.run }).await;
        });
        join_all(calls).await;
    }

    async fn run(
        &self,
        orders: &[NodeOrder],
        plan: &Plan,
        directory: &Directory,
    ) -> Result<Vec<(NodeId, RunReport)>, ArchiveError> {
        let calls = orders.iter().map(|NodeOrder { node, address: to, order }| async move {
            let run = RunPart { run: order.run };
            let report = self.caller.call_held(to, &run, RUN_LIMIT).await;
            report.map(|report| (*node, report)).map_err(|error| (*node, error))
        });
        let mut running: FuturesUnordered<_> = calls.collect();
        let mut reports = Vec::with_capacity(orders.len());
        let mut failed = loop {
            match running.next().await {
                Some(Ok(report)) => reports.push(report),
                Some(Err(failed)) => break failed,
                None => return Ok(reports),
            }
        };
        let look_for_the_cause = async {
            while is_reached_by_others(&failed.1)
                && let Some(next) = running.next().await
            {
                if let Err(cause) = next
                    && is_root_cause(plan, &cause, &failed)
                {
                    failed = cause;
                }
            }
        };
        let _ = deadline(&*self.clock, CAUSE_LIMIT, look_for_the_cause).await;
        drop(running);
        self.release(orders).await;
        Err(match failed {
            (node, CallError::Failed(failure)) => {
                let before = plan.senders(node).into_iter().map(|node| directory.name(node));
                let (node, before) = (directory.name(node), before.collect());
                ArchiveError::Part { node, before, failure }
            }
            (_, unanswered) => unanswered.into(),
        })
    }

    fn receipt_call(
        &self,
        shard: &OwnedShard,
        receipt: &Receipt,
    ) -> Result<PutReceipt, ArchiveError> {
        let bytes = receipt.to_bytes().map_err(|error| ArchiveError::Format(error.to_string()))?;
        Ok(PutReceipt { bytes, owner: shard.generation, coordinator: self.me })
    }

    async fn put_receipts(
        &self,
        shard: &OwnedShard,
        orders: &[NodeOrder],
        receipt: &Receipt,
    ) -> Result<(), ArchiveError> {
        let call = self.receipt_call(shard, receipt)?;
        let holders = orders
            .iter()
            .filter(|order| receipt.pieces.iter().any(|piece| piece.node == order.node));
        try_join_all(holders.map(|order| self.caller.call(&order.address, &call))).await?;
        Ok(())
    }

    /// Returns the receipt of an earlier owner's run, if all of its pieces are on the nodes that
    /// this plan assigns to them. These pieces were proven, so the plan need not run again.
    async fn find_previous_receipt(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
        plan: &Plan,
        generation: Generation,
    ) -> Option<Receipt> {
        let (root, attempt) = (&shard.root, plan.attempt);
        let at = (info.fixed.stripe.index, info.places.as_slice());
        let found = shard_records::fetch_receipt(&self.caller, directory, root, at, attempt).await;
        let receipt = found.ok().filter(|receipt| {
            let is_home = |piece: &ReceiptPiece| plan.home(piece.piece) == Some(piece.node);
            receipt.generation == generation
                && receipt.code == plan.code
                && receipt.pieces.iter().all(is_home)
        })?;
        let held = self.count_pieces(info, directory, &receipt).await;
        (held.len() == receipt.pieces.len()).then_some(receipt)
    }

    /// Fetches the receipt of an archived stripe from a node that has it. Returns the receipt if
    /// all of its pieces are on their nodes now.
    ///
    /// An attempt that was continued on other nodes may have an earlier receipt as well. Either
    /// receipt serves: once all pieces of one receipt are in place, no other file of the stripe is
    /// needed.
    pub(crate) async fn find_complete_receipt(
        &self,
        root: &ShardRoot,
        index: u32,
        attempt: Attempt,
    ) -> Result<Option<Receipt>, ArchiveError> {
        let directory = self.directory().await?;
        let leaves = shard_records::fetch_leaves(&self.caller, &directory, root).await?;
        let info =
            shard_records::fetch_stripe_record(&self.caller, &directory, root, &leaves, index)
                .await?;
        let at = (index, info.places.as_slice());
        let receipt =
            shard_records::fetch_receipt(&self.caller, &directory, root, at, attempt).await?;
        let held = self.count_pieces(&info, &directory, &receipt).await;
        Ok((held.len() == receipt.pieces.len()).then_some(receipt))
    }

    /// Returns whether the receipt's pieces that nodes have now are enough to read every block.
    async fn pieces_span(
        &self,
        info: &StripeInfo,
        directory: &Directory,
        receipt: &Receipt,
    ) -> bool {
        let Some(code) = table::by_id(receipt.code) else { return false };
        let available = self.count_pieces(info, directory, receipt).await;
        let all: Vec<usize> = (0..code.k()).collect();
        reconstruct(&code, &available, &all).is_ok()
    }

    /// Returns the numbers of the receipt's pieces that their nodes have now.
    async fn count_pieces(
        &self,
        info: &StripeInfo,
        directory: &Directory,
        receipt: &Receipt,
    ) -> Vec<usize> {
        let nodes: BTreeSet<NodeId> = receipt.pieces.iter().map(|piece| piece.node).collect();
        let held = self.list_files(directory, info, nodes).await;
        let is_there = |piece: &&ReceiptPiece| {
            let file = match piece.form {
                PieceForm::File => FileName::Piece { piece: piece.piece, attempt: receipt.attempt },
                // A block past the shard's end has no file.
                PieceForm::Replica { block } if info.fixed.cut.block_len(block) == 0 => {
                    return true;
                }
                PieceForm::Replica { block } => FileName::Replica { block },
            };
            let files = held.get(&piece.node).and_then(Option::as_ref);
            files.into_iter().flatten().any(|view| view.file == file && view.root == piece.root)
        };
        receipt.pieces.iter().filter(is_there).map(|piece| piece.piece.into()).collect()
    }

    /// Orders the nodes to drop their replicas of the stripe. If a holder does not answer, the
    /// stripe's state stays "not dropped", and a later run orders the drop again.
    async fn drop_replicas(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
        receipt: &Receipt,
        places: &[NodeId],
    ) -> Result<(), ArchiveError> {
        let (n, k) = (shard.root.n.into(), shard.root.k.into());
        let (index, attempt, generation) =
            (info.fixed.stripe.index, receipt.attempt, receipt.generation);
        let placed =
            place(&shard.root.ring, n, k, index).map_err(shard_records::RecordsError::from)?;
        // The places are a hint and may predate the use of a spare. The receipt names the nodes
        // that hold the pieces.
        let mut holders: BTreeSet<NodeId> = placed.into_iter().collect();
        holders.extend(info.places.iter().chain(places));
        holders.extend(receipt.pieces.iter().map(|piece| piece.node));
        // Other nodes of the ring may have files that an earlier owner left there. The drop counts
        // as complete without their answers.
        let ring = shard.root.ring.iter().map(|member| member.node);
        let mut nodes = holders.clone();
        nodes.extend(ring.filter(|node| directory.is_live(*node)));
        let holders = &holders;
        // A node that held a replica and has no piece also needs the receipt before it drops
        // anything.
        let code = receipt.code;
        let receipt = self.receipt_call(shard, receipt)?;
        let call = DropReplicas { stripe: info.fixed.stripe, attempt, generation };
        let drops = nodes.iter().map(|&node| {
            let (call, receipt) = (&call, &receipt);
            async move {
                let Some(address) = directory.address(node) else {
                    return !holders.contains(&node);
                };
                let mut answer = self.caller.call(&address, call).await;
                if let Err(CallError::Failed(failure)) = &answer
                    && failure.kind == ErrorKind::NotFound
                    && self.caller.call(&address, receipt).await.is_ok()
                {
                    answer = self.caller.call(&address, call).await;
                }
                if let Err(error) = &answer {
                    tracing::warn!(node = %address.name, %error, "replicas not dropped: a later run tries again");
                }
                answer.is_ok() || !holders.contains(&node)
            }
        });
        if join_all(drops).await.into_iter().all(|dropped| dropped) {
            let state = StripeState::Archived { attempt, code, generation, dropped: true };
            trace_point(TracePoint::Dropped, call.stripe);
            match shard.set_stripes(self, index, state).await {
                // The change does not fit into the shard's state now. A later run orders the drop
                // again.
                Err(error @ ArchiveError::Format(_)) => {
                    tracing::info!(%error, "a drop was not recorded: a later run tries again")
                }
                recorded => recorded?,
            }
        }
        Ok(())
    }
}

/// Returns whether a node may have failed only because its neighbour failed, or because both waited
/// for the same node.
fn is_reached_by_others(error: &CallError) -> bool {
    let kinds = [ErrorKind::Unavailable, ErrorKind::Timeout];
    matches!(error, CallError::Failed(failure) if kinds.contains(&failure.kind))
}

/// Returns whether `cause` explains the plan's failure better than `first`. When a node stalls,
/// every hop downstream times out at almost the same moment; the hop closest to it names the right
/// node.
fn is_root_cause(plan: &Plan, cause: &(NodeId, CallError), first: &(NodeId, CallError)) -> bool {
    match (cause.1.kind(), first.1.kind()) {
        (ErrorKind::Unavailable, _) if is_reached_by_others(&cause.1) => false,
        (ErrorKind::Timeout, ErrorKind::Timeout) => plan.upstream(first.0).contains(&cause.0),
        _ => true,
    }
}

fn build_plan(
    subject: &Subject<'_>,
    plan: PlanChoice,
    entropy: &dyn Entropy,
) -> Result<Plan, planner::PlannerError> {
    // The coder of a star is always at the same position. Placement rotates the ring from stripe to
    // stripe, so that all nodes encode equally often.
    match plan {
        PlanChoice::Chain => planner::chain(subject),
        PlanChoice::NaiveStar => planner::naive_star(subject, 0),
        PlanChoice::BestStar => planner::best_star(subject, 0),
        PlanChoice::StripedStar => planner::striped_star(subject),
        PlanChoice::RandomStar => {
            let homes = subject.code.n() - subject.code.k();
            planner::naive_star(subject, entropy.below(homes as u64) as usize)
        }
    }
}

fn hop_views(plan: &Plan, reports: &[(NodeId, RunReport)], directory: &Directory) -> Vec<HopView> {
    let mut views = Vec::with_capacity(plan.hops.len());
    let mut next: std::collections::HashMap<NodeId, u32> = std::collections::HashMap::new();
    for hop in &plan.hops {
        let Some(node) = hop.node else { continue };
        let number = next.entry(node).or_default();
        let report = reports
            .iter()
            .find(|(reporter, _)| *reporter == node)
            .and_then(|(_, report)| report.hops.iter().find(|hop| hop.hop == *number));
        *number += 1;
        let (Some(report), Some(name)) = (report, directory.peer_name(node)) else { continue };
        let pieces = hop.outputs.iter().filter_map(|output| match output {
            Output::Store(piece) => Some(*piece),
            _ => None,
        });
        views.push(HopView { node: name, pieces: pieces.collect(), work: report.work.clone() });
    }
    views
}
