//! Replacing a leaving node by a successor in the rings of shards (docs/semantics.md, 10).

use std::sync::Arc;

use super::catch_up_majority::catch_up_majority_without;
use super::error::CatalogueServerError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    SHARD_ROOTS, parse_record, read_record, read_ring_changes, ring_change_key,
};
use crate::catalogue::{Catalogue, SetOutcome};
use crate::format::records::{LeaveState, Record, RingChange};
use crate::format::ring_changes::MAX_RING_CHANGES;
use crate::id::{NodeId, PeerName};
use crate::node::context::NodeContext;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::ReplaceNode;

/// The service that replaces nodes.
pub(in crate::node) struct NodeReplacement {
    context: Arc<NodeContext>,
}

impl NodeReplacement {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Records a node as leaving, with a live storage node as its successor. Returns when more than
    /// half of the other storage nodes have stored the ring change.
    ///
    /// # Errors
    /// Fails with kind `NotFound` if the successor is not registered, or the node is neither
    /// registered nor in a ring; with kind `Invalid` if the two are the same or the successor
    /// stores no data; with kind `Exists` if there are too many ring changes or successors; and
    /// with kind `Unavailable` if the successor is not live or is leaving itself, or too few nodes
    /// catch up.
    pub(in crate::node) async fn replace_node(&self, call: ReplaceNode) -> Result<(), RemoteError> {
        let ReplaceNode { node, successor } = call;
        let catalogue = self.context.catalogue();
        if node == successor {
            return Err(CatalogueServerError::SuccessorOfItself { node }.into());
        }
        let views = catalogue.list_nodes().await?;
        let find = |name: &PeerName| views.iter().find(|view| view.node.name == *name);
        if find(&node).is_none() && !is_in_any_ring(&*catalogue, &node).await? {
            return Err(CatalogueServerError::NodeNotRegistered { node }.into());
        }
        match find(&successor) {
            None => return Err(CatalogueServerError::NodeNotRegistered { node: successor }.into()),
            Some(view) if !view.node.storage => {
                return Err(CatalogueServerError::SuccessorStoresNothing { node: successor }.into());
            }
            Some(view) if !view.live => {
                return Err(CatalogueServerError::SuccessorAway { node: successor }.into());
            }
            Some(_)
                if Directory::read(&*catalogue)
                    .await?
                    .is_leaving_or_left(NodeId::of(&successor)) =>
            {
                return Err(CatalogueServerError::SuccessorLeaving { node: successor }.into());
            }
            Some(_) => {}
        }
        record_leaving(&*catalogue, &node, Some(&successor)).await?;
        catch_up_majority_without(&self.context, &*catalogue, &node).await?;
        tracing::warn!(%node, %successor, "a node is leaving, and has a successor");
        Ok(())
    }
}

/// Returns whether the ring of any shard names the node, or has it as a successor of a node that it
/// names.
async fn is_in_any_ring(catalogue: &dyn Catalogue, name: &PeerName) -> Result<bool, RemoteError> {
    let directory = Directory::read(catalogue).await?;
    let mut roots = KeyScan::of_prefix(catalogue, SHARD_ROOTS);
    while let Some((key, entry)) = roots.next().await? {
        if directory.is_named_by(&parse_record(&key, &entry.value)?, NodeId::of(name)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Records a node as leaving, with a further successor, if any. The state *left* is kept. Returns
/// the ring change and its revision.
///
/// # Errors
/// Fails with kind `Exists` if there are too many ring changes or successors.
pub(super) async fn record_leaving(
    catalogue: &dyn Catalogue,
    node: &PeerName,
    successor: Option<&PeerName>,
) -> Result<(RingChange, u64), RemoteError> {
    let key = ring_change_key(node);
    loop {
        let known = read_record::<RingChange>(catalogue, &key).await?;
        if known.is_none() && read_ring_changes(catalogue).await?.changes.len() >= MAX_RING_CHANGES
        {
            return Err(CatalogueServerError::TooManyRingChanges {
                node: node.clone(),
                limit: MAX_RING_CHANGES,
            }
            .into());
        }
        let (before, revision) = known.unzip();
        let mut change = before.clone().unwrap_or_else(|| RingChange::leaving(node.clone()));
        change.state = change.state.max(LeaveState::Leaving);
        if let Some(successor) = successor
            && !change.add_successor(successor.clone())
        {
            return Err(CatalogueServerError::TooManySuccessors {
                node: node.clone(),
                successors: change.successors,
            }
            .into());
        }
        if let Some(revision) = revision.filter(|_| before.as_ref() == Some(&change)) {
            return Ok((change, revision));
        }
        let value = Some(change.to_bytes()?);
        trace_point(TracePoint::Leaving, node);
        if let SetOutcome::Set(revision) = catalogue.compare_and_set(&key, revision, value).await? {
            return Ok((change, revision));
        }
    }
}
