//! Executing a plan on its nodes: reserving all parts, running them, and finding the node that
//! caused a failure.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;

use super::{Coordinator, CoordinatorError};
use crate::clock::deadline;
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::pipeline::busy_retry::BusyRetry;
use crate::pipeline::executor::ADMIT_ALL_LIMIT;
use crate::plan::Plan;
use crate::topology::Directory;
use crate::wire::calls::{ReleasePart, ReservePart, RunPart};
use crate::wire::order::Order;
use crate::wire::order::RunReport;
use crate::wire::{NodeAddress, RemoteError};

/// Time limit for one run of a stripe's plan. A stalled hop ends much earlier.
const RUN_LIMIT: Duration = Duration::from_secs(3600);
/// How long the coordinator waits for the root cause after the first failure. A node may report the
/// failure of its neighbour before the neighbour itself reports.
const CAUSE_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for the reservation on one node. It is longer than a node waits for memory, so that
/// the node's own answer arrives first.
const RESERVE_LIMIT: Duration = Duration::from_secs(15);

/// An order, and the node that receives it.
pub(super) struct NodeOrder {
    /// The node.
    pub node: NodeId,
    /// The address of the node.
    pub address: NodeAddress,
    /// The order.
    pub order: Order,
}

impl Coordinator {
    /// Reserves the parts of the plan on all nodes. Retries while nodes are busy with other plans,
    /// because that is no failure of the stripe.
    pub(super) async fn reserve_parts(&self, orders: &[NodeOrder]) -> Result<(), CoordinatorError> {
        let mut patience = BusyRetry::new(self.clock.clone(), self.entropy.clone());
        loop {
            let error = match self.try_reserve_parts(orders).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            tracing::debug!(%error, "a plan was not admitted");
            if error.kind() != ErrorKind::Busy || !patience.wait_unless_expired().await {
                return Err(error.into());
            }
        }
    }

    /// Reserves in node-id order, on all nodes or none. A plan with a reservation on a node waits
    /// only for nodes with greater ids, so that plans never wait for one another in a circle
    /// (docs/semantics.md, 7).
    async fn try_reserve_parts(&self, orders: &[NodeOrder]) -> Result<(), CallError> {
        debug_assert!(orders.is_sorted_by_key(|order| order.node));
        let began = self.clock.now();
        for (at, NodeOrder { address: to, order, .. }) in orders.iter().enumerate() {
            let call = ReservePart { order: order.clone() };
            let left = ADMIT_ALL_LIMIT.saturating_sub(self.clock.now() - began);
            let busy = || {
                let message = format!("not all nodes were free within {ADMIT_ALL_LIMIT:?}");
                Err(RemoteError { kind: ErrorKind::Busy, message }.into())
            };
            let answer = match left.is_zero() {
                true => busy(),
                // The call is held, so that no node admits a part that nobody waits for.
                false => self.caller.call_held(to, &call, RESERVE_LIMIT.min(left)).await,
            };
            let answer = match answer {
                Err(CallError::Late { .. }) if left < RESERVE_LIMIT => busy(),
                answer => answer,
            };
            if let Err(error) = answer {
                self.release_parts(&orders[..=at]).await;
                return Err(error);
            }
        }
        Ok(())
    }

    async fn release_parts(&self, orders: &[NodeOrder]) {
        let calls = orders.iter().map(|NodeOrder { address, order, .. }| async move {
            // On a node that does not receive this call, the reservation expires.
            let _ = self.caller.call(address, &ReleasePart { run: order.run }).await;
        });
        join_all(calls).await;
    }

    /// Runs the reserved parts of the plan on all nodes. Returns the reports. If a part fails, the
    /// others are released, and the error is that of the node that caused the failure.
    pub(super) async fn run_parts(
        &self,
        orders: &[NodeOrder],
        plan: &Plan,
        directory: &Directory,
    ) -> Result<Vec<(NodeId, RunReport)>, CoordinatorError> {
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
        let find_root_cause = async {
            while can_be_secondary(&failed.1)
                && let Some(next) = running.next().await
            {
                if let Err(cause) = next
                    && is_better_cause(plan, &cause, &failed)
                {
                    failed = cause;
                }
            }
        };
        let _ = deadline(&*self.clock, CAUSE_LIMIT, find_root_cause).await;
        drop(running);
        self.release_parts(orders).await;
        Err(match failed {
            (node, CallError::Failed(failure)) => {
                let before = plan.senders(node).into_iter().map(|node| directory.name(node));
                let (node, before) = (directory.name(node), before.collect());
                CoordinatorError::Part { node, before, failure }
            }
            (_, unanswered) => unanswered.into(),
        })
    }
}

/// Returns whether a node may have failed only because its neighbour failed, or because both waited
/// for the same node.
fn can_be_secondary(error: &CallError) -> bool {
    let kinds = [ErrorKind::Unavailable, ErrorKind::Timeout];
    matches!(error, CallError::Failed(failure) if kinds.contains(&failure.kind))
}

/// Returns whether `candidate` explains the plan's failure better than `first`. When a node stalls,
/// every hop downstream times out at almost the same moment; the hop closest to it names the right
/// node.
fn is_better_cause(
    plan: &Plan,
    candidate: &(NodeId, CallError),
    first: &(NodeId, CallError),
) -> bool {
    match (candidate.1.kind(), first.1.kind()) {
        (ErrorKind::Unavailable, _) if can_be_secondary(&candidate.1) => false,
        (ErrorKind::Timeout, ErrorKind::Timeout) => plan.upstream(first.0).contains(&candidate.0),
        _ => true,
    }
}
