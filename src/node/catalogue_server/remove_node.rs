//! Removing a node from the cluster (docs/semantics.md, 10). Nodes join by themselves: they
//! register.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::catch_up_majority::catch_up_majority_without;
use super::cluster_inventory::InventoryReader;
use super::error::CatalogueServerError;
use super::repair_survey::{SurveyOutcome, survey_save};
use super::replace_node::record_leaving;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, NODES, ORPHANS, parse_checkpoint_key, parse_record, read_ring_changes,
    read_ring_of_open_save, ring_change_key, shard_roots_prefix,
};
use crate::catalogue::{Catalogue, SetOutcome};
use crate::code::SurvivableLossCache;
use crate::format::records::{
    Checkpoint, LeaveState, Record, RemoveReason, Removing, RingChange, Saved, ShardRoot, Writing,
};
use crate::id::{Job, NodeId, PeerName, SaveId, Step};
use crate::node::context::NodeContext;
use crate::node::quorum::majority;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{NodeView, RemoveNode};

/// Maximum number of attempts. An attempt begins anew when the node returns or its successors
/// change.
const MAX_ATTEMPTS: usize = 10;
/// Maximum number of times that the saves are listed and surveyed, while some of them are pending
/// or changing.
const MAX_PASSES: usize = 30;
/// The wait before the saves are listed again.
const PASS_WAIT: Duration = Duration::from_secs(2);

/// The service that takes nodes off the list of nodes.
pub(in crate::node) struct NodeRemoval {
    context: Arc<NodeContext>,
    inventory_reader: Arc<InventoryReader>,
}

/// A save and its step.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SaveRef {
    job: Job,
    step: Step,
    save: SaveId,
}

/// The saves that may use the node that is being removed.
#[derive(Default)]
struct Saves {
    /// The committed saves with a ring that names the node, or that has it as a successor.
    committed: BTreeSet<SaveRef>,
    /// The open and decided saves with such a ring.
    naming: BTreeSet<SaveRef>,
    /// The open saves whose ring is not known.
    unknown: BTreeSet<SaveRef>,
}

impl Saves {
    fn refuse_if_pending(&self) -> Result<(), RemoteError> {
        match self.naming.first().or(self.unknown.first()).cloned() {
            Some(SaveRef { job, step, .. }) => {
                Err(CatalogueServerError::SaveOpen { job, step }.into())
            }
            None => Ok(()),
        }
    }
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
    /// Fails with kind `Busy` while the node is live, if it comes back or its successors change
    /// during each attempt, while a save that is under way may use it, and while only the node may
    /// know whether a save was committed; with kind `Exists` while something of a checkpoint is
    /// missing without the node, or a checkpoint's ring has too few live storage nodes without it;
    /// with kind `Unavailable` if too few of the other nodes catch up or answer; and with kind
    /// `NotFound` if the node is neither on the list nor in a ring.
    pub(in crate::node) async fn remove_node(&self, call: RemoveNode) -> Result<(), RemoteError> {
        let (catalogue, name) = (self.context.catalogue(), call.name);
        let key = format!("{NODES}{name}");
        for _ in 0..MAX_ATTEMPTS {
            let entry = catalogue.get(&key).await?;
            refuse_if_live(&*catalogue, &name).await?;
            let saves = self.list_saves(&name).await?;
            if entry.is_none() && saves.committed.is_empty() {
                return Err(CatalogueServerError::NodeNotRegistered { node: name }.into());
            }
            if saves.committed.is_empty() {
                saves.refuse_if_pending()?;
                catch_up_majority_without(&self.context, &*catalogue, &name).await?;
                let saves = self.list_saves(&name).await?;
                saves.refuse_if_pending()?;
                if !saves.committed.is_empty() {
                    continue;
                }
            } else if !self.leave_rings(&*catalogue, &name).await? {
                continue;
            }
            // The checks took a while, and the node may have come back.
            refuse_if_live(&*catalogue, &name).await?;
            let is_off = match entry {
                None => true,
                Some(entry) => {
                    trace_point(TracePoint::Unlist, &name);
                    let set = catalogue.compare_and_set(&key, Some(entry.revision), None).await?;
                    // On a conflict, the node has registered anew, or another caller has removed
                    // it.
                    matches!(set, SetOutcome::Set(_))
                }
            };
            if is_off {
                tracing::warn!(node = %name, "a node was removed from the cluster");
                return Ok(());
            }
        }
        Err(CatalogueServerError::NodeChanging { node: name, attempts: MAX_ATTEMPTS }.into())
    }

    /// Records the node as leaving, checks that nothing is missing without it, and then records it
    /// as left. Returns `false` if the node came back meanwhile, or if its successors changed.
    async fn leave_rings(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
    ) -> Result<bool, RemoteError> {
        let (change, revision) = record_leaving(catalogue, name, None).await?;
        // Saves that begin from now on do not use the node.
        let before = self.list_saves(name).await?.unknown;
        catch_up_majority_without(&self.context, catalogue, name).await?;
        self.wait_until_complete_without(catalogue, name, &before).await?;
        refuse_if_live(catalogue, name).await?;
        let left = RingChange { state: LeaveState::Left, ..change }.to_bytes()?;
        let key = ring_change_key(name);
        trace_point(TracePoint::Left, name);
        let outcome = catalogue.compare_and_set(&key, Some(revision), Some(left)).await?;
        Ok(matches!(outcome, SetOutcome::Set(_)))
    }

    /// Checks that nothing is missing without the node of the committed saves whose rings have it.
    /// Waits for the open and decided saves whose rings have it, for the saves in `before` while
    /// they are open and their rings are not known, and for committed saves that cannot be surveyed
    /// yet.
    async fn wait_until_complete_without(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
        before: &BTreeSet<SaveRef>,
    ) -> Result<(), RemoteError> {
        let (mut complete, mut losses) = (BTreeSet::new(), SurvivableLossCache::default());
        let (mut saves, mut unsettled) = (Saves::default(), None);
        for _ in 0..MAX_PASSES {
            saves = self.list_saves(name).await?;
            saves.unknown.retain(|save| before.contains(save));
            let rest = &saves.committed - &complete;
            let mut is_waiting = !saves.naming.is_empty() || !saves.unknown.is_empty();
            unsettled =
                rest.first().map(|save| (save.clone(), "it has just been saved".to_owned()));
            for save in rest {
                match self.check_complete_without(catalogue, name, &save, &mut losses).await? {
                    None => drop(complete.insert(save)),
                    Some(why) => (is_waiting, unsettled) = (true, Some((save, why))),
                }
            }
            if is_waiting {
                self.context.clock.sleep(PASS_WAIT).await;
            } else if unsettled.is_none() {
                return Ok(());
            }
            // Further saves may have been committed during the survey, so the list is read once
            // more.
        }
        saves.refuse_if_pending()?;
        match unsettled {
            Some((SaveRef { job, step, .. }, why)) => {
                Err(CatalogueServerError::StepNotSurveyed { job, step, why }.into())
            }
            None => Ok(()),
        }
    }

    /// Checks that nothing of the save is missing without the node. Returns the reason if this could
    /// not be determined.
    ///
    /// # Errors
    /// Fails with kind `Exists` if something is missing.
    async fn check_complete_without(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
        save: &SaveRef,
        losses: &mut SurvivableLossCache,
    ) -> Result<Option<String>, RemoteError> {
        let directory = read_directory_without(catalogue, name).await?;
        let health = match survey_save(&self.context, save.save, &directory, losses).await? {
            SurveyOutcome::Known(survey) => survey.health,
            SurveyOutcome::Gone => return Ok(None),
            SurveyOutcome::Changing => return Ok(Some("the step is changing".to_owned())),
            SurveyOutcome::Unknown(why) => return Ok(Some(why)),
        };
        if health.is_degraded() {
            let SaveRef { job, step, .. } = save.clone();
            let (node, missing, records) = (name.clone(), health.missing, health.records);
            let missing =
                CatalogueServerError::MissingWithoutNode { node, job, step, missing, records };
            return Err(missing.into());
        }
        Ok(None)
    }

    /// Lists the saves that may use the node.
    ///
    /// # Errors
    /// Fails with kind `Busy` if only the node may know whether a save was committed, and with kind
    /// `Exists` if a ring without the node has too few live storage nodes.
    async fn list_saves(&self, name: &PeerName) -> Result<Saves, RemoteError> {
        let (catalogue, node) = (self.context.catalogue(), NodeId::of(name));
        let catalogue = &*catalogue;
        let directory = read_directory_without(catalogue, name).await?;
        self.refuse_if_mark_unknown(catalogue, &directory, name).await?;
        let mut saves = Saves::default();
        let mut checkpoints = KeyScan::of_prefix(catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse_record(&key, &entry.value)?;
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            let save_ref = |save| SaveRef { job: job.clone(), step, save };
            match checkpoint.writing {
                Some(Writing::Open { save, .. }) => {
                    match read_ring_of_open_save(catalogue, save).await? {
                        None => drop(saves.unknown.insert(save_ref(save))),
                        // A gateway with an older program may have named other nodes to the client.
                        Some(ring)
                            if ring.contains(node)
                                || is_in_ring(catalogue, &directory, name, save).await? =>
                        {
                            saves.naming.insert(save_ref(save));
                        }
                        Some(_) => {}
                    }
                }
                Some(Writing::Decided { saved: Saved { save, .. } })
                    if is_in_ring(catalogue, &directory, name, save).await? =>
                {
                    saves.naming.insert(save_ref(save));
                }
                _ => {}
            }
            if let Some(saved) = checkpoint.committed
                && is_in_ring(catalogue, &directory, name, saved.save).await?
            {
                saves.committed.insert(save_ref(saved.save));
            }
        }
        Ok(saves)
    }

    /// Refuses while an orphan may have been committed and only the node `name` may have its mark.
    /// An orphan was not committed if enough other storage nodes report no commit mark: the
    /// remaining nodes are then no majority, and a save is published only with marks on a majority.
    async fn refuse_if_mark_unknown(
        &self,
        catalogue: &dyn Catalogue,
        directory: &Directory,
        name: &PeerName,
    ) -> Result<(), RemoteError> {
        let mut registered: HashMap<String, u64> = HashMap::new();
        let mut nodes = KeyScan::of_prefix(catalogue, NODES);
        while let Some((key, entry)) = nodes.next().await? {
            registered.insert(key, entry.revision);
        }
        let mut orphans = KeyScan::of_prefix(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            let Removing { save, reason, .. } = parse_record(&key, &entry.value)?;
            if reason != RemoveReason::Aborted {
                continue;
            }
            // A node that registered after the orphan was recorded never had a mark.
            let is_older = |view: &&NodeView| {
                let revision = registered.get(&format!("{NODES}{}", view.node.name));
                view.node.storage && revision.is_some_and(|revision| *revision < entry.revision)
            };
            let others: Vec<&NodeView> = directory.views().filter(is_older).collect();
            let all = others.len() + 1;
            let needed = (all + 1).saturating_sub(majority(all));
            let (mut unmarked, mut silent) = (0, Vec::new());
            for view in &others {
                let one = std::slice::from_ref(&view.node);
                match self.inventory_reader.fetch_marks_from_all(one, save).await {
                    Some(marks) => unmarked += usize::from(marks.nodes == 0),
                    None => silent.push(view.node.name.as_str()),
                }
            }
            if unmarked < needed {
                let start = format!("; start {}", silent.join(", "));
                let silent = if silent.is_empty() { String::new() } else { start };
                let node = name.clone();
                let unknown =
                    CatalogueServerError::MarkUnknown { save, node, unmarked, all, needed, silent };
                return Err(unknown.into());
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
    let mut changes = read_ring_changes(catalogue).await?;
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
        let present = directory.current_ring(&root);
        let remaining =
            present.iter().filter(|member| directory.can_receive_data(member.node)).count();
        if remaining < usize::from(root.n) {
            let silent = present.iter().filter(|member| !directory.is_live(member.node));
            let silent: Vec<String> = silent.map(|member| directory.name(member.node)).collect();
            let away = match silent.is_empty() {
                true => String::new(),
                false => format!("; these do not answer: {}", silent.join(", ")),
            };
            let (node, checkpoint) = (name.clone(), format!("{}/{}", root.job, root.step));
            let needed = root.n;
            let few =
                CatalogueServerError::RingTooSmall { node, checkpoint, remaining, needed, away };
            return Err(few.into());
        }
    }
    Ok(is_named)
}

async fn refuse_if_live(catalogue: &dyn Catalogue, name: &PeerName) -> Result<(), RemoteError> {
    let nodes = catalogue.list_nodes().await?;
    if nodes.iter().any(|view| view.node.name == *name && view.live) {
        return Err(CatalogueServerError::NodeLive { node: name.clone() }.into());
    }
    Ok(())
}
