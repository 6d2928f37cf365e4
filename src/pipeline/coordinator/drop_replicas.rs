//! Dropping the replicas of an archived stripe, once its pieces are proven (docs/semantics.md, 4).

use std::collections::BTreeSet;

use futures_util::future::join_all;

use super::CoordinatorError;
use super::owned_stripe::OwnedStripe;
use crate::format::records::{Receipt, StripeState};
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::pipeline::record_fetch::RecordsError;
use crate::placement::place;
use crate::stage::{TracePoint, trace_point};
use crate::wire::NodeAddress;
use crate::wire::calls::{DropReplicas, PutReceipt};

impl OwnedStripe<'_> {
    /// Orders all nodes that may hold replicas of the stripe to drop them: the possible holders,
    /// which include `places`, the nodes of this run's plan; and also the other live nodes of the
    /// ring. If a possible holder does not confirm and has not left the cluster, the stripe's state
    /// stays "not dropped", and a later run orders the drop again.
    pub(super) async fn drop_replicas(
        &self,
        receipt: &Receipt,
        places: &[NodeId],
    ) -> Result<(), CoordinatorError> {
        let holders = self.possible_holders(receipt, places)?;
        // Other nodes of the ring may have files that an earlier owner left there. The drop counts
        // as complete without their answers.
        let ring = self.directory.nodes_to_ask(&self.shard.root);
        let mut nodes = holders.clone();
        nodes.extend(ring.filter(|node| self.directory.is_live(*node)));
        let call = DropReplicas {
            stripe: self.info.fixed.stripe,
            attempt: receipt.attempt,
            generation: receipt.generation,
        };
        let (call, receipt_call) = (&call, &self.build_put_receipt(receipt)?);
        let drops = nodes.iter().map(|&node| {
            let is_needed = holders.contains(&node);
            async move {
                match self.directory.address(node) {
                    // A dead node would cost a timeout for each stripe. A later run orders the drop.
                    Some(_) if !self.directory.is_live(node) => !is_needed,
                    Some(address) => {
                        self.order_node_drop(&address, call, receipt_call).await || !is_needed
                    }
                    // A node that has left and comes back drops its replicas by itself.
                    None => !is_needed || self.directory.has_left(node),
                }
            }
        });
        match join_all(drops).await.into_iter().all(|is_dropped| is_dropped) {
            true => self.record_replicas_dropped(receipt).await,
            false => Ok(()),
        }
    }

    /// Returns the nodes that may hold replicas of the stripe, or hold its pieces. The places in
    /// the record are a hint and may predate the use of a spare; the receipt names the nodes of the
    /// pieces.
    fn possible_holders(
        &self,
        receipt: &Receipt,
        places: &[NodeId],
    ) -> Result<BTreeSet<NodeId>, CoordinatorError> {
        let root = &self.shard.root;
        let placed = place(&root.ring, root.n.into(), root.k.into(), self.index())
            .map_err(RecordsError::from)?;
        let mut holders: BTreeSet<NodeId> = placed.into_iter().collect();
        holders.extend(self.info.places.iter().chain(places));
        holders.extend(receipt.pieces.iter().map(|piece| piece.node));
        Ok(holders)
    }

    /// Orders one node to drop its replicas. A node that refuses because it has no receipt gets the
    /// receipt and is ordered again; a node without a piece may have none. Returns whether the node
    /// has dropped its replicas.
    async fn order_node_drop(
        &self,
        address: &NodeAddress,
        call: &DropReplicas,
        receipt_call: &PutReceipt,
    ) -> bool {
        let caller = &self.coordinator.caller;
        let mut answer = caller.call(address, call).await;
        if let Err(CallError::Failed(failure)) = &answer
            && failure.kind == ErrorKind::NotFound
            && caller.call(address, receipt_call).await.is_ok()
        {
            answer = caller.call(address, call).await;
        }
        if let Err(error) = &answer {
            tracing::warn!(node = %address.name, %error, "a node has not confirmed that it dropped its replicas: they are dropped later");
        }
        answer.is_ok()
    }

    /// Records in the shard's state that all replicas of the stripe are dropped.
    async fn record_replicas_dropped(&self, receipt: &Receipt) -> Result<(), CoordinatorError> {
        let state = StripeState::Archived {
            attempt: receipt.attempt,
            code: receipt.code,
            generation: receipt.generation,
            dropped: true,
        };
        trace_point(TracePoint::Dropped, self.info.fixed.stripe);
        match self.shard.set_stripe_state(self.coordinator, self.index(), state).await {
            // The change does not fit into the shard's state now. A later run orders the drop
            // again.
            Err(error @ CoordinatorError::Format(_)) => {
                tracing::info!(%error, "the drop of a stripe's replicas was not recorded: a later run orders it again");
                Ok(())
            }
            recorded => recorded,
        }
    }
}
