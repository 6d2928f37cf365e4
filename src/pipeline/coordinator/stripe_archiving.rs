//! The archiving of one stripe, in this order: replicas, plan, admission, run, proof, receipts,
//! commit, drop.

use std::time::Duration;

use super::owned_shard::OwnedShard;
use super::owned_stripe::OwnedStripe;
use super::plan_execution::NodeOrder;
use super::receipts::{ArchivedAttempt, choose_receipt_that_counts};
use super::{ArchiveEventSender, Coordinator, CoordinatorError};
use crate::code::{Code, RsCode, table};
use crate::entropy::Entropy;
use crate::format::records::{Receipt, ShardRoot, StripeState};
use crate::id::{Attempt, Generation, NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::plan::check::{Goal, check};
use crate::plan::{Output, Plan};
use crate::planner::{self, Subject};
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions, HopView, PlanChoice, StripeReport};
use crate::wire::order::RunReport;

/// Maximum number of tries per stripe. Each try first recreates missing replicas.
const TRIES: u32 = 4;
/// Wait before the second try. It doubles for each further try.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Whether the receipt of an earlier owner may replace a run of the plan. Only the first try may
/// reuse such a receipt: if nodes reject it after all, the next try makes the pieces anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReceiptReuse {
    Allowed,
    Forbidden,
}

impl Coordinator {
    /// Archives stripe `index`. If the stripe is archived already, only completes the drop of its
    /// replicas.
    pub(super) async fn archive_stripe(
        &self,
        shard: &OwnedShard,
        index: u32,
        options: ArchiveOptions,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let mut wait = FIRST_WAIT;
        let mut reuse = ReceiptReuse::Allowed;
        let mut tries = 0;
        loop {
            tries += 1;
            shard.ensure_owned()?;
            let tried = async {
                let stripe = StripeArchiving::open(self, shard, index, options).await?;
                stripe.archive_or_drop(events, reuse).await
            };
            let Err(error) = tried.await else { return Ok(()) };
            if !is_worth_a_retry(&error) {
                return Err(error);
            }
            tracing::warn!(shard = %shard.root.name, stripe = index, tries, %error, "a try to archive a stripe failed");
            if tries == TRIES {
                let stripe = StripeId { shard: shard.root.shard, index };
                let kind = error.kind();
                return Err(CoordinatorError::Stripe {
                    stripe,
                    tries,
                    last: error.to_string(),
                    kind,
                });
            }
            let note = format!("stripe {index} of {}: {error}; trying again", shard.root.name);
            let _ = events.send(ArchiveEvent::Note(note)).await;
            self.clock.sleep(wait).await;
            wait *= 2;
            reuse = ReceiptReuse::Forbidden;
        }
    }
}

/// Returns whether another try may get past the error.
pub(super) fn is_worth_a_retry(error: &CoordinatorError) -> bool {
    let may_pass = matches!(
        error,
        CoordinatorError::Call(_)
            | CoordinatorError::Part { .. }
            | CoordinatorError::Unproven { .. }
    );
    let is_final =
        matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Invalid | ErrorKind::Denied);
    may_pass && !is_final
}

/// One try to archive a stripe.
struct StripeArchiving<'a> {
    stripe: OwnedStripe<'a>,
    /// The code of the pieces into which the stripe is archived.
    code: Code,
    options: ArchiveOptions,
}

/// Proven pieces, and how they were made.
struct ProvenPieces {
    receipt: Receipt,
    /// Empty if the receipt is an earlier owner's.
    reports: Vec<(NodeId, RunReport)>,
    /// The time at which all parts were reserved, or the earlier receipt was found.
    reserved_at: Duration,
}

impl<'a> StripeArchiving<'a> {
    async fn open(
        coordinator: &'a Coordinator,
        shard: &'a OwnedShard,
        index: u32,
        options: ArchiveOptions,
    ) -> Result<Self, CoordinatorError> {
        let stripe = OwnedStripe::open(coordinator, shard, index).await?;
        let code = code_for_plan(&shard.root, options.plan)?;
        Ok(Self { stripe, code, options })
    }

    /// Archives a stripe whose archiving has begun. Completes the drop of one that is archived
    /// already. Does nothing to a stripe that is only replicated.
    async fn archive_or_drop(
        &self,
        events: &ArchiveEventSender,
        reuse: ReceiptReuse,
    ) -> Result<(), CoordinatorError> {
        let OwnedStripe { shard, .. } = &self.stripe;
        match shard.stripe_state(self.stripe.index()).await {
            Some(StripeState::Archiving { attempt, generation, .. }) => {
                self.archive_and_drop(attempt, generation, events, reuse).await
            }
            Some(StripeState::Archived { attempt, generation, code, dropped: false }) => {
                let archived = ArchivedAttempt { attempt, generation, code };
                self.drop_replicas_if_rebuildable(archived, events).await
            }
            _ => Ok(()),
        }
    }

    /// Drops the replicas of a stripe that was archived before. This run did not prove the pieces,
    /// so the replicas stay unless the pieces found now can rebuild every block.
    async fn drop_replicas_if_rebuildable(
        &self,
        archived: ArchivedAttempt,
        events: &ArchiveEventSender,
    ) -> Result<(), CoordinatorError> {
        let stripe = &self.stripe;
        let found = stripe.fetch_all_receipts(archived.attempt).await;
        if let Some(receipt) = choose_receipt_that_counts(&found.by_node, archived)
            && stripe.can_rebuild_blocks(receipt).await
        {
            return stripe.drop_replicas(receipt, &[]).await;
        }
        let text = format!(
            "stripe {} of {}: too few of its pieces are reachable; its replicas are kept for now",
            stripe.index(),
            stripe.shard.root.name
        );
        let _ = events.send(ArchiveEvent::Note(text)).await;
        Ok(())
    }

    async fn archive_and_drop(
        &self,
        attempt: Attempt,
        generation: Generation,
        events: &ArchiveEventSender,
        reuse: ReceiptReuse,
    ) -> Result<(), CoordinatorError> {
        let OwnedStripe { coordinator, shard, info, directory } = &self.stripe;
        let (clock, stripe) = (&coordinator.clock, info.fixed.stripe);
        trace_point(TracePoint::Replicas, stripe);
        let places = self.stripe.ensure_replicas().await?;
        let plan = self.build_plan(attempt, &places)?;
        let checked = check(&plan, &self.code, Goal::Archive)
            .map_err(|source| CoordinatorError::Plan { stripe, source })?;
        let orders =
            self.stripe.build_orders(&plan, &checked, &self.code, self.options.codec, None)?;

        let started_at = clock.now();
        let proven = self.reuse_or_run_plan(&plan, &orders, generation, reuse).await?;
        let proven_at = clock.now();
        let receipt = self.put_above_others(proven.receipt.clone(), reuse).await;
        let proven = ProvenPieces { receipt, ..proven };
        self.stripe.put_receipts(&orders, &proven.receipt).await?;
        let archived =
            StripeState::Archived { attempt, code: plan.code, generation, dropped: false };
        trace_point(TracePoint::Archived, stripe);
        shard.set_stripe_state(coordinator, stripe.index, archived).await?;
        let committed_at = clock.now();
        self.stripe.drop_replicas(&proven.receipt, &places).await?;
        let phases = [
            proven.reserved_at - started_at,
            proven_at - proven.reserved_at,
            committed_at - proven_at,
            clock.now() - committed_at,
        ];
        let report = StripeReport {
            stripe,
            code: plan.code,
            block_bytes: plan.cut.block_bytes,
            hops: build_hop_views(&plan, &proven.reports, directory),
            phases_us: phases.map(|phase| phase.as_micros() as u64),
        };
        let _ = events.send(ArchiveEvent::Stripe(report)).await;
        Ok(())
    }

    /// Returns the receipt with an order that nodes with another receipt of the attempt accept. Such
    /// nodes exist only if an earlier owner, or an earlier try of this one, began the attempt.
    ///
    /// A request of an earlier try may still arrive, and nodes accept it, because it is of the same
    /// owner. So the receipt of a later try has a greater order than that of the first.
    async fn put_above_others(&self, receipt: Receipt, reuse: ReceiptReuse) -> Receipt {
        let owner = self.stripe.shard.generation;
        if reuse == ReceiptReuse::Forbidden {
            return Receipt { order: owner, ..receipt };
        }
        if receipt.generation == owner {
            return receipt;
        }
        let found = self.stripe.fetch_all_receipts(receipt.attempt).await;
        match found.by_node.values().any(|other| other.order > receipt.order) {
            true => Receipt { order: owner, ..receipt },
            false => receipt,
        }
    }

    fn build_plan(&self, attempt: Attempt, places: &[NodeId]) -> Result<Plan, CoordinatorError> {
        let OwnedStripe { coordinator, info, .. } = &self.stripe;
        let (stripe, cut, code) = (info.fixed.stripe, info.fixed.cut, &self.code);
        let subject = Subject { stripe, attempt, cut, places, code };
        Ok(build_plan(&subject, self.options.plan, &*coordinator.entropy)?)
    }

    /// Returns proven pieces: those of an earlier owner's receipt if it can be reused, or else
    /// those that a run of the plan makes.
    async fn reuse_or_run_plan(
        &self,
        plan: &Plan,
        orders: &[NodeOrder],
        generation: Generation,
        reuse: ReceiptReuse,
    ) -> Result<ProvenPieces, CoordinatorError> {
        let OwnedStripe { coordinator, shard, info, directory } = &self.stripe;
        let stripe = info.fixed.stripe;
        if reuse == ReceiptReuse::Allowed
            && generation != shard.generation
            && let Some(receipt) = self.stripe.find_reusable_receipt(plan, generation).await
        {
            let reserved_at = coordinator.clock.now();
            return Ok(ProvenPieces { receipt, reports: Vec::new(), reserved_at });
        }
        trace_point(TracePoint::Reserve, stripe);
        coordinator.reserve_parts(orders).await?;
        let reserved_at = coordinator.clock.now();
        trace_point(TracePoint::Run, stripe);
        let reports = coordinator.run_parts(orders, plan, directory).await?;
        trace_point(TracePoint::Proof, stripe);
        let pieces = self.stripe.verify_all_pieces(plan, &self.code, &reports)?;
        let (cluster, attempt, code) = (coordinator.cluster, plan.attempt, plan.code);
        let receipt = Receipt {
            cluster,
            stripe,
            attempt,
            generation,
            code,
            pieces,
            order: Generation::default(),
        };
        Ok(ProvenPieces { receipt, reports, reserved_at })
    }
}

/// Returns the code into which a shard is archived by this kind of plan.
pub(super) fn code_for_plan(root: &ShardRoot, plan: PlanChoice) -> Result<Code, CoordinatorError> {
    let (n, k) = (usize::from(root.n), usize::from(root.k));
    let code = match plan {
        PlanChoice::Chain => table::find(n, k).cloned().map(Code::Chain),
        PlanChoice::BestStar
        | PlanChoice::NaiveStar
        | PlanChoice::StripedStar
        | PlanChoice::RandomStar => RsCode::new(n, k).ok().map(Code::Rs),
    };
    code.ok_or(CoordinatorError::NoCode { n: root.n, k: root.k })
}

fn build_plan(
    subject: &Subject<'_>,
    choice: PlanChoice,
    entropy: &dyn Entropy,
) -> Result<Plan, planner::PlannerError> {
    // The coder of a naive or best star is always at the same position. Placement rotates the ring
    // from stripe to stripe, so that all nodes encode equally often.
    match choice {
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

fn build_hop_views(
    plan: &Plan,
    reports: &[(NodeId, RunReport)],
    directory: &Directory,
) -> Vec<HopView> {
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
