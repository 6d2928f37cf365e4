//! Removing a node from the cluster (docs/semantics.md, 10). Nodes join by themselves: they
//! register.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::error::CatalogueServerError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, NODES, ORPHANS, joint_save_key, parse_checkpoint_key, parse_record, read_record,
    shard_roots_prefix,
};
use crate::catalogue::{Catalogue, SetOutcome};
use crate::format::records::{Checkpoint, JointSave, RemoveReason, Removing, ShardRoot, Writing};
use crate::id::{NodeId, PeerName, SaveId};
use crate::net::call::address;
use crate::node::context::NodeContext;
use crate::node::quorum::majority;
use crate::wire::calls::{CatchUp, RemoveNode};
use crate::wire::{NodeAddress, RemoteError};

/// Time limit for a node to catch up.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of nodes that catch up at once.
const AT_ONCE: usize = 32;
/// Maximum number of checkpoints, or of nodes that failed to catch up, that a refusal names.
const NAMED: usize = 8;

/// The service that takes nodes off the list of nodes.
pub(in crate::node) struct NodeRemoval {
    context: Arc<NodeContext>,
}

impl NodeRemoval {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Takes a node off the list of nodes.
    ///
    /// # Errors
    /// Fails with kind `Busy` while the node is live or a save is open, of kind `Exists` while a
    /// checkpoint may lie on it, of kind `Unavailable` if too few of the other nodes catch up, and
    /// of kind `NotFound` if it is not on the list.
    pub(in crate::node) async fn remove_node(&self, call: RemoveNode) -> Result<(), RemoteError> {
        let (catalogue, name) = (self.context.catalogue(), call.name);
        let key = format!("{NODES}{name}");
        loop {
            let Some(entry) = catalogue.get(&key).await? else {
                return Err(CatalogueServerError::NodeNotRegistered { node: name }.into());
            };
            refuse_if_live(&*catalogue, &name).await?;
            self.catch_up_majority_without(&*catalogue, &name).await?;
            let (count, first) = self.list_checkpoints_on(&*catalogue, &name).await?;
            if count > 0 {
                let more = if count > first.len() { " and others" } else { "" };
                let (node, checkpoints) = (name, format!("{}{more}", first.join(", ")));
                let kept = CatalogueServerError::CheckpointsOnNode { count, node, checkpoints };
                return Err(kept.into());
            }
            // The checks took a while, and the node may have come back.
            refuse_if_live(&*catalogue, &name).await?;
            match catalogue.compare_and_set(&key, Some(entry.revision), None).await? {
                SetOutcome::Set(_) => break,
                // The node has registered anew meanwhile, or another caller has removed it.
                SetOutcome::Conflict(_) => {}
            }
        }
        tracing::warn!(node = %name, "a node was removed from the cluster");
        Ok(())
    }

    /// Has more than half of the other storage nodes catch up, so that with one node less they
    /// still overlap with the nodes that a reader without a catalogue asks.
    ///
    /// # Errors
    /// Fails with kind `Unavailable` if half or fewer of them catch up.
    async fn catch_up_majority_without(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
    ) -> Result<(), RemoteError> {
        let nodes = catalogue.list_nodes().await?.into_iter().map(|view| view.node);
        let others: Vec<_> = nodes.filter(|node| node.storage && node.name != *name).collect();
        let call = CatchUp { without: Some(name.clone()) };
        let asks: Vec<_> = others
            .iter()
            .map(|node| async {
                let to = address(&NodeAddress::of(node));
                let caught_up = self.context.caller.call_within(&to, &call, CATCH_UP_LIMIT).await;
                caught_up.map_err(|error| format!("{}: {error}", node.name))
            })
            .collect();
        let mut answers = stream::iter(asks).buffer_unordered(AT_ONCE);
        let (mut caught_up, mut why) = (0, Vec::new());
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(()) => caught_up += 1,
                Err(error) if why.len() < NAMED => why.push(error),
                Err(_) => {}
            }
        }
        if others.is_empty() || caught_up >= majority(others.len()) {
            return Ok(());
        }
        let too_few = CatalogueServerError::TooFewCaughtUp {
            caught_up,
            others: others.len(),
            node: name.clone(),
            needed: majority(others.len()),
            reason: why.join("; "),
        };
        Err(too_few.into())
    }

    /// Returns the number of checkpoints that may lie on node `name`, and the first of them. These
    /// are the steps, committed or decided, with a shard that has the node in its ring, and the
    /// orphans that are kept until all nodes were asked for a mark.
    ///
    /// # Errors
    /// Fails with kind `Busy` while a save is open.
    async fn list_checkpoints_on(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
    ) -> Result<(usize, Vec<String>), RemoteError> {
        let node = NodeId::of(name);
        let (mut count, mut first) = (0, Vec::new());
        let mut note = |what: String| {
            count += 1;
            if first.len() < NAMED {
                first.push(what);
            }
        };
        // A save without a known mark is kept until all nodes have been asked for a mark.
        let mut orphans = KeyScan::of_prefix(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            let orphan: Removing = parse_record(&key, &entry.value)?;
            if orphan.reason == RemoveReason::Aborted {
                note(format!("save {}", orphan.save));
            }
        }
        let mut checkpoints = KeyScan::of_prefix(catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse_record(&key, &entry.value)?;
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            let saves = match checkpoint.writing {
                Some(Writing::Open { save, .. }) => {
                    if may_use_node(catalogue, save, node).await? {
                        return Err(CatalogueServerError::SaveOpen { job, step }.into());
                    }
                    Vec::new()
                }
                Some(Writing::Decided { saved }) => vec![saved],
                None => Vec::new(),
            };
            for saved in saves.into_iter().chain(checkpoint.committed) {
                if self.is_in_save_ring(catalogue, saved.save, node).await? {
                    note(format!("{job}/{step}"));
                }
            }
        }
        Ok((count, first))
    }

    async fn is_in_save_ring(
        &self,
        catalogue: &dyn Catalogue,
        save: SaveId,
        node: NodeId,
    ) -> Result<bool, RemoteError> {
        let mut roots = KeyScan::of_prefix(catalogue, shard_roots_prefix(save));
        while let Some((key, entry)) = roots.next().await? {
            let root: ShardRoot = parse_record(&key, &entry.value)?;
            if root.ring.iter().any(|member| member.node == node) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns whether an open save may put blocks on a node. Only the client of a save that belongs to no
/// launch knows which nodes it uses.
async fn may_use_node(
    catalogue: &dyn Catalogue,
    save: SaveId,
    node: NodeId,
) -> Result<bool, RemoteError> {
    let joint = read_record::<JointSave>(catalogue, &joint_save_key(save)).await?;
    let is_in_ring =
        |(joint, _): (JointSave, u64)| joint.ring.iter().any(|member| member.node == node);
    Ok(joint.is_none_or(is_in_ring))
}

async fn refuse_if_live(catalogue: &dyn Catalogue, name: &PeerName) -> Result<(), RemoteError> {
    let nodes = catalogue.list_nodes().await?;
    if nodes.iter().any(|view| view.node.name == *name && view.live) {
        return Err(CatalogueServerError::NodeLive { node: name.clone() }.into());
    }
    Ok(())
}
