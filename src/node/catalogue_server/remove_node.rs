//! Removing a node from the cluster (docs/semantics.md, 10). Nodes join by themselves: they
//! register.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::catch_up_majority::catch_up_majority_without;
use super::cluster_inventory::InventoryReader;
use super::error::CatalogueServerError;
use super::replace_node::record_leaving;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, NODES, ORPHANS, joint_save_key, list_ring_changes, parse_checkpoint_key,
    parse_record, read_record, ring_change_key, shard_roots_prefix,
};
use crate::catalogue::{Catalogue, SetOutcome};
use crate::code::SurvivableLossCache;
use crate::format::records::{
    Checkpoint, JointSave, LeaveState, Record, RemoveReason, Removing, RingChange, ShardRoot,
    Writing,
};
use crate::id::{Job, NodeId, PeerName, SaveId, Step};
use crate::node::catalogue_server::repair_survey::{SurveyOutcome, survey_save};
use crate::node::context::NodeContext;
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::RemoveNode;

/// Number of times a save is surveyed of which a node did not answer, or whose state changed, and the
/// wait between them.
const SURVEY_TRIES: usize = 10;
const SURVEY_WAIT: Duration = Duration::from_secs(2);

/// The service that takes nodes off the list of nodes.
pub(in crate::node) struct NodeRemoval {
    context: Arc<NodeContext>,
    inventory_reader: Arc<InventoryReader>,
}

/// A committed save with the node in a ring.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SaveOnNode {
    job: Job,
    step: Step,
    save: SaveId,
}

impl NodeRemoval {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        inventory_reader: Arc<InventoryReader>,
    ) -> Self {
        Self { context, inventory_reader }
    }

    /// Takes a node off the list of nodes, and out of the rings that name it.
    ///
    /// # Errors
    /// Fails with kind `Busy` while the node is live or a save that may use it is under way, of kind
    /// `Exists` while something of a checkpoint is missing without it, of kind `Unavailable` if too
    /// few of the other nodes catch up or answer, and of kind `NotFound` if it is neither on the
    /// list nor in a ring.
    pub(in crate::node) async fn remove_node(&self, call: RemoveNode) -> Result<(), RemoteError> {
        let (catalogue, name) = (self.context.catalogue(), call.name);
        let key = format!("{NODES}{name}");
        loop {
            let entry = catalogue.get(&key).await?;
            refuse_if_live(&*catalogue, &name).await?;
            let is_in_ring = !self.list_saves_on(&name).await?.is_empty();
            if entry.is_none() && !is_in_ring {
                return Err(CatalogueServerError::NodeNotRegistered { node: name }.into());
            }
            if is_in_ring && !self.leave_rings(&*catalogue, &name).await? {
                continue;
            }
            if !is_in_ring {
                catch_up_majority_without(&self.context, &*catalogue, &name).await?;
                if !self.list_saves_on(&name).await?.is_empty() {
                    continue;
                }
            }
            // The checks took a while, and the node may have come back.
            refuse_if_live(&*catalogue, &name).await?;
            let Some(entry) = entry else { break };
            match catalogue.compare_and_set(&key, Some(entry.revision), None).await? {
                SetOutcome::Set(_) => break,
                // The node has registered anew meanwhile, or another caller has removed it.
                SetOutcome::Conflict(_) => {}
            }
        }
        tracing::warn!(node = %name, "a node was removed from the cluster");
        Ok(())
    }

    /// Makes the node leave the rings that name it: it gets nothing new, nothing is missing without
    /// it, and then it has left. Returns `false` if the node came back meanwhile, or if its
    /// successors changed.
    async fn leave_rings(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
    ) -> Result<bool, RemoteError> {
        let (change, revision) = record_leaving(catalogue, name, None).await?;
        catch_up_majority_without(&self.context, catalogue, name).await?;
        let (mut surveyed, mut losses) = (BTreeSet::new(), SurvivableLossCache::default());
        // A save that began before the node was to leave may have ended during the survey.
        loop {
            let saves = self.list_saves_on(name).await?;
            let rest: Vec<SaveOnNode> =
                saves.into_iter().filter(|save| !surveyed.contains(save)).collect();
            if rest.is_empty() {
                break;
            }
            for save in rest {
                self.ensure_whole_without(catalogue, name, &save, &mut losses).await?;
                surveyed.insert(save);
            }
        }
        refuse_if_live(catalogue, name).await?;
        let left = RingChange { state: LeaveState::Left, ..change }.to_bytes()?;
        let key = ring_change_key(name);
        let outcome = catalogue.compare_and_set(&key, Some(revision), Some(left)).await?;
        Ok(matches!(outcome, SetOutcome::Set(_)))
    }

    /// Checks that nothing is missing of a save on the nodes that stay.
    ///
    /// # Errors
    /// Fails with kind `Exists` if something is missing, and of kind `Unavailable` if a node does not
    /// answer.
    async fn ensure_whole_without(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
        on_node: &SaveOnNode,
        losses: &mut SurvivableLossCache,
    ) -> Result<(), RemoteError> {
        let SaveOnNode { job, step, save } = on_node.clone();
        let node = name.clone();
        for _ in 0..SURVEY_TRIES {
            let directory = read_directory_without(catalogue, name).await?;
            let health = match survey_save(&self.context, save, &directory, losses).await? {
                SurveyOutcome::Known(survey) => survey.health,
                SurveyOutcome::Gone => return Ok(()),
                // A node is slow, or the step is being archived.
                SurveyOutcome::Unknown => {
                    self.context.clock.sleep(SURVEY_WAIT).await;
                    continue;
                }
            };
            if health.is_degraded() {
                let (missing, records) = (health.missing, health.records);
                let missing =
                    CatalogueServerError::MissingWithoutNode { node, job, step, missing, records };
                return Err(missing.into());
            }
            return Ok(());
        }
        Err(CatalogueServerError::StepNotSurveyed { job, step }.into())
    }

    /// Returns the committed saves that name a node in a ring, or have it as a successor.
    ///
    /// # Errors
    /// Fails with kind `Busy` while a save that may use the node is under way, or waits for the
    /// node's answer, and of kind `Exists` if the rings without the node have too few nodes.
    async fn list_saves_on(&self, name: &PeerName) -> Result<BTreeSet<SaveOnNode>, RemoteError> {
        let (catalogue, node) = (self.context.catalogue(), NodeId::of(name));
        let catalogue = &*catalogue;
        let directory = read_directory_without(catalogue, name).await?;
        self.refuse_if_mark_unknown(catalogue, &directory, name).await?;
        let mut on_node = BTreeSet::new();
        let mut checkpoints = KeyScan::of_prefix(catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse_record(&key, &entry.value)?;
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            let is_under_way = match checkpoint.writing {
                Some(Writing::Open { save, .. }) => may_use_node(catalogue, save, node).await?,
                Some(Writing::Decided { saved }) => {
                    is_in_ring(catalogue, &directory, name, saved.save).await?
                }
                None => false,
            };
            if is_under_way {
                return Err(CatalogueServerError::SaveOpen { job, step }.into());
            }
            if let Some(saved) = checkpoint.committed
                && is_in_ring(catalogue, &directory, name, saved.save).await?
            {
                on_node.insert(SaveOnNode { job, step, save: saved.save });
            }
        }
        Ok(on_node)
    }

    /// Refuses while a save exists of which only this node may have a commit mark.
    async fn refuse_if_mark_unknown(
        &self,
        catalogue: &dyn Catalogue,
        directory: &Directory,
        name: &PeerName,
    ) -> Result<(), RemoteError> {
        let others = directory.views().filter(|view| view.node.storage);
        let others: Vec<_> = others.map(|view| view.node.clone()).collect();
        let mut orphans = KeyScan::of_prefix(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            let orphan: Removing = parse_record(&key, &entry.value)?;
            // A save was published only if more than half of the storage nodes have a mark. So if no
            // other node has one, this node has none that counts.
            if orphan.reason == RemoveReason::Aborted
                && self.inventory_reader.is_marked_on_any_of_all(&others, orphan.save).await
                    != Some(false)
            {
                let (save, node) = (orphan.save, name.clone());
                return Err(CatalogueServerError::MarkUnknown { save, node }.into());
            }
        }
        Ok(())
    }
}

/// Returns the directory of the cluster as it is when the node has left.
async fn read_directory_without(
    catalogue: &dyn Catalogue,
    name: &PeerName,
) -> Result<Directory, RemoteError> {
    let mut views = catalogue.list_nodes().await?;
    views.retain(|view| view.node.name != *name);
    let mut changes = list_ring_changes(catalogue).await?;
    let change = changes.find(name).cloned();
    let change = change.unwrap_or_else(|| RingChange::leaving(name.clone()));
    changes.changes.retain(|other| other.node != *name);
    changes.merge(RingChange { state: LeaveState::Left, ..change });
    Ok(Directory::new(views, changes))
}

/// Returns whether node `name`, which has left according to `directory`, is named by a ring of a
/// save.
///
/// # Errors
/// Fails with kind `Exists` if the ring without the node has fewer than n live storage nodes.
async fn is_in_ring(
    catalogue: &dyn Catalogue,
    directory: &Directory,
    name: &PeerName,
    save: SaveId,
) -> Result<bool, RemoteError> {
    let node = NodeId::of(name);
    let mut is_named = false;
    let mut roots = KeyScan::of_prefix(catalogue, shard_roots_prefix(save));
    while let Some((key, entry)) = roots.next().await? {
        let root: ShardRoot = parse_record(&key, &entry.value)?;
        if !directory.is_named_by(&root, node) {
            continue;
        }
        is_named = true;
        let present = directory.present_ring(&root);
        let left = present.iter().filter(|member| directory.takes_data(member.node)).count();
        if left < usize::from(root.n) {
            let (node, needed) = (name.clone(), root.n);
            return Err(CatalogueServerError::RingTooSmall { node, left, needed }.into());
        }
    }
    Ok(is_named)
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
