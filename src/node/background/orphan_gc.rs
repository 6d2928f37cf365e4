//! Saves that no step's record has: those that a rebuilt catalogue knows only as to be removed, those that nodes hold and the
//! catalogue does not know (docs/semantics.md, 5 and 8), and keys that a late gateway left.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::retry::backoff;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::records::{CHECKPOINTS, NODES, ORPHANS, ROOTS, STATES, orphan_key, parse};
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::{Checkpoint, Node as NodeRecord, Record, RemoveReason, Removing};
use crate::id::{Epoch, Generation, PeerName, SaveId};
use crate::node::Node;
use crate::node::catalogue_server::cluster_inventory::node_address;
use crate::node::gateway::removal::record_forgotten;
use crate::wire::RemoteError;
use crate::wire::calls::FindRemovedSaves;

/// Saves without a step that are judged in one round.
const JUDGED_A_ROUND: usize = 16;
/// Nodes whose saves are compared in one round: all that a node holds is walked over for it.
const COMPARED_A_ROUND: usize = 1;

/// Nodes whose saves were compared with the catalogue of an epoch, and those of their saves that wait for a judgement.
#[derive(Default)]
struct InventoryCursor {
    epoch: Epoch,
    /// With the revision of its record: one that has left the list and come back has another.
    nodes: BTreeMap<PeerName, u64>,
    waiting: BTreeMap<SaveId, UnknownSave>,
}

/// A save that a node holds and no step has; when it is judged, and how often it was.
#[derive(Default)]
struct UnknownSave {
    looks: u32,
    due: Duration,
}

/// Why a save that no step has is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) enum RetainReason {
    /// It has a mark: a rebuild with the nodes that have the rest of it brings it back.
    Marked,
    /// Nobody has a mark, and nothing says that it was given up.
    Unmarked,
    /// Not all nodes have said whether they have a mark.
    Unasked,
}

impl fmt::Display for RetainReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Marked => {
                "which has a commit mark: a rebuild of the catalogue with all nodes brings it back"
            }
            Self::Unmarked => {
                "of which no node has a commit mark: a rebuild of the catalogue removes it"
            }
            Self::Unasked => "until every storage node has said whether it has a commit mark of it",
        })
    }
}

/// How far the keys of shards were looked at.
#[derive(Default)]
struct StrayKeyScan {
    after: [Option<String>; 2],
}

/// What is to become of a save that no step has.
enum OrphanVerdict {
    Goes(RemoveReason),
    Stays(RetainReason),
}

impl Node {
    /// Once per lease period, while this daemon hosts the catalogue.
    pub(in crate::node) async fn run_orphan_gc(self: Arc<Self>) {
        let (mut compared, mut strays) = (InventoryCursor::default(), StrayKeyScan::default());
        loop {
            self.context.clock.sleep(self.context.settings.lease).await;
            if !self.serves_catalogue() {
                continue;
            }
            let catalogue = self.context.catalogue();
            if let Err(error) = self.forget_stray_keys(&*catalogue, &mut strays).await {
                tracing::warn!(%error, "taking away keys that no step has");
            }
            if let Err(error) = self.compare_with_catalogue(&*catalogue, &mut compared).await {
                tracing::warn!(%error, "comparing what nodes hold with the catalogue");
            }
            if let Err(error) = self.collect_orphans(&*catalogue).await {
                tracing::warn!(%error, "removing what a lost catalogue left");
            }
        }
    }

    /// The home looks once at what each node holds, and again when a node has come back to the list: a catalogue that was rebuilt
    /// without a node does not know what is there. A save that no step has is an orphan when some node has buried
    /// it. When all say that it has no mark it is one in a rebuilt catalogue, which began without what was never decided; in the first
    /// epoch nothing explains it, and it is kept. Nothing goes because the catalogue does not know it.
    async fn compare_with_catalogue(
        &self,
        catalogue: &dyn Catalogue,
        compared: &mut InventoryCursor,
    ) -> Result<(), RemoteError> {
        let epoch = catalogue.epoch();
        if compared.epoch != epoch {
            *compared = InventoryCursor { epoch, ..InventoryCursor::default() };
            self.retained().clear();
        }
        let mut storage: Vec<NodeRecord> = Vec::new();
        let mut fresh = Vec::new();
        let mut nodes = KeyScan::over(catalogue, NODES);
        while let Some((key, entry)) = nodes.next().await? {
            let node: NodeRecord = parse(&key, &entry.value)?;
            if node.storage {
                if compared.nodes.get(&node.name) != Some(&entry.revision) {
                    fresh.push((node.clone(), entry.revision));
                }
                storage.push(node);
            }
        }
        compared.nodes.retain(|name, _| storage.iter().any(|node| node.name == *name));
        let mut looks = 0;
        for (node, revision) in &fresh {
            if looks == COMPARED_A_ROUND {
                break;
            }
            let Ok(held) = self.saves_on(node).await else { continue };
            looks += 1;
            // A save is in its step's record before its first file is anywhere: what is looked at later knows it.
            let known = known_saves(catalogue).await?;
            for save in held.difference(&known) {
                compared.waiting.entry(*save).or_default();
            }
            compared.nodes.insert(node.name.clone(), *revision);
        }
        let now = self.context.clock.now();
        let due = compared.waiting.iter().filter(|(_, unknown)| unknown.due <= now);
        let due: Vec<SaveId> = due.map(|(save, _)| *save).take(JUDGED_A_ROUND).collect();
        for save in due {
            let reason = match self.judge_orphan(&storage, save).await {
                OrphanVerdict::Goes(RemoveReason::Aborted) if epoch <= Epoch(1) => {
                    Err(RetainReason::Unmarked)
                }
                OrphanVerdict::Goes(reason) => Ok(reason),
                OrphanVerdict::Stays(why) => Err(why),
            };
            match reason {
                Ok(reason) => {
                    let generation = Generation { epoch, counter: 0 };
                    let bytes = Removing { save, generation, reason }.to_bytes()?;
                    catalogue.compare_and_set(&orphan_key(save), None, Some(bytes)).await?;
                    compared.waiting.remove(&save);
                    self.retained().remove(&save);
                }
                Err(why) => {
                    if self.retained().insert(save, why) != Some(why) {
                        tracing::warn!(%save, %why, "a save that no step has is kept");
                    }
                    let unknown = compared.waiting.entry(save).or_default();
                    unknown.looks = unknown.looks.saturating_add(1);
                    unknown.due =
                        now.saturating_add(backoff(self.context.settings.lease, unknown.looks));
                }
            }
        }
        Ok(())
    }

    /// Takes away roots and states of saves that no step has, a page of each a round. A gateway that was paused in a seal makes them after the
    /// save is removed and forgotten; it takes them back itself, unless it dies.
    async fn forget_stray_keys(
        &self,
        catalogue: &dyn Catalogue,
        strays: &mut StrayKeyScan,
    ) -> Result<(), RemoteError> {
        let mut found = Vec::new();
        for (prefix, after) in [ROOTS, STATES].into_iter().zip(&mut strays.after) {
            let page = catalogue.list(prefix, after.as_deref(), MAX_PAGE).await?;
            *after = page.last().map(|(key, _)| key.clone());
            let save =
                |key: &str| key.get(prefix.len()..)?.get(..2 * size_of::<SaveId>())?.parse().ok();
            found.extend(
                page.into_iter().filter_map(|(key, entry)| Some((save(&key)?, key, entry))),
            );
        }
        if found.is_empty() {
            return Ok(());
        }
        // A save is in its step's record before it has keys, and as long as it has: what is looked at later knows it.
        let known = known_saves(catalogue).await?;
        for (save, key, entry) in found {
            if !known.contains(&save) {
                tracing::info!(%save, key, "a key of a save that no step has is taken away");
                catalogue.compare_and_set(&key, Some(entry.revision), None).await?;
            }
        }
        Ok(())
    }

    async fn judge_orphan(&self, storage: &[NodeRecord], save: SaveId) -> OrphanVerdict {
        for node in storage {
            let call = FindRemovedSaves { saves: vec![save] };
            let buried = self.context.caller.call(&node_address(node), &call).await;
            if buried.is_ok_and(|buried| !buried.is_empty()) {
                return OrphanVerdict::Goes(RemoveReason::Deleted);
            }
        }
        match self.is_marked_on_any(storage, save).await {
            Some(true) => OrphanVerdict::Stays(RetainReason::Marked),
            Some(false) => OrphanVerdict::Goes(RemoveReason::Aborted),
            None => OrphanVerdict::Stays(RetainReason::Unasked),
        }
    }

    /// Goes on with them, as far as that goes now. One stays on the list until every node has removed it.
    async fn collect_orphans(&self, catalogue: &dyn Catalogue) -> Result<(), RemoteError> {
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<_> = nodes.filter(|node| node.storage).collect();
        let mut orphans = KeyScan::over(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            let mut removing: Removing = parse(&key, &entry.value)?;
            // That nobody has a mark is evidence only when everybody has said so; that somebody has buried it always is.
            if removing.reason == RemoveReason::Aborted {
                match self.judge_orphan(&storage, removing.save).await {
                    OrphanVerdict::Goes(reason) => removing.reason = reason,
                    OrphanVerdict::Stays(why) => {
                        tracing::info!(save = %removing.save, %why, "an orphan is kept");
                        self.retained().insert(removing.save, why);
                        continue;
                    }
                }
                self.retained().remove(&removing.save);
            }
            match self.finish_orphan_removal(&removing).await {
                Ok(true) => {
                    record_forgotten(catalogue).await?;
                    catalogue.compare_and_set(&key, Some(entry.revision), None).await?;
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::info!(save = %removing.save, %error, "a removal goes on later")
                }
            }
        }
        Ok(())
    }
}

/// The saves that a step's record has, or that are orphans already.
async fn known_saves(catalogue: &dyn Catalogue) -> Result<BTreeSet<SaveId>, RemoteError> {
    let mut known = BTreeSet::new();
    let mut checkpoints = KeyScan::over(catalogue, CHECKPOINTS);
    while let Some((key, entry)) = checkpoints.next().await? {
        let checkpoint: Checkpoint = parse(&key, &entry.value)?;
        known.extend(checkpoint.committed.map(|saved| saved.save));
        known.extend(checkpoint.removing.iter().map(|removing| removing.save));
        known.extend(checkpoint.writing.map(|writing| writing.save()));
    }
    let mut orphans = KeyScan::over(catalogue, ORPHANS);
    while let Some((key, entry)) = orphans.next().await? {
        known.insert(parse::<Removing>(&key, &entry.value)?.save);
    }
    Ok(known)
}
