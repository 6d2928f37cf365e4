//! Saves that no step's record has: those that a rebuilt catalogue knows only as to be removed, those that nodes hold and the
//! catalogue does not know (docs/semantics.md, 5 and 8), and keys that a late gateway left.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::retry::grown;
use crate::catalogue::key_scan::Walk;
use crate::catalogue::records::{CHECKPOINTS, NODES, ORPHANS, ROOTS, STATES, orphan_key, parse};
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::{Checkpoint, Node as NodeRecord, Record, RemoveReason, Removing};
use crate::id::{Epoch, Generation, PeerName, SaveId};
use crate::node::Node;
use crate::node::catalogue_server::cluster_inventory::node_address;
use crate::node::gateway::removal::note_forgotten;
use crate::wire::Failure;
use crate::wire::calls::Buried;

/// Saves without a step that are judged in one round.
const JUDGED_A_ROUND: usize = 16;
/// Nodes whose saves are compared in one round: all that a node holds is walked over for it.
const COMPARED_A_ROUND: usize = 1;

/// Nodes whose saves were compared with the catalogue of an epoch, and those of their saves that wait for a judgement.
#[derive(Default)]
struct Compared {
    epoch: Epoch,
    /// With the revision of its record: one that has left the list and come back has another.
    nodes: BTreeMap<PeerName, u64>,
    waiting: BTreeMap<SaveId, Unknown>,
}

/// A save that a node holds and no step has; when it is judged, and how often it was.
#[derive(Default)]
struct Unknown {
    looks: u32,
    due: Duration,
}

/// Why a save that no step has is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) enum Kept {
    /// It has a mark: a rebuild with the nodes that have the rest of it brings it back.
    Marked,
    /// Nobody has a mark, and nothing says that it was given up.
    Unmarked,
    /// Not all nodes have said whether they have a mark.
    Unasked,
}

impl fmt::Display for Kept {
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
struct Strays {
    after: [Option<String>; 2],
}

/// What is to become of a save that no step has.
enum Fate {
    Goes(RemoveReason),
    Stays(Kept),
}

impl Node {
    /// Once per lease period, while this daemon hosts the catalogue.
    pub(in crate::node) async fn keep_orphans(self: Arc<Self>) {
        let (mut compared, mut strays) = (Compared::default(), Strays::default());
        loop {
            self.clock.sleep(self.settings.lease).await;
            if !self.serves() {
                continue;
            }
            let catalogue = self.catalogue();
            if let Err(error) = self.forget_strays(&*catalogue, &mut strays).await {
                tracing::warn!(%error, "taking away keys that no step has");
            }
            if let Err(error) = self.compare_holdings(&*catalogue, &mut compared).await {
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
    async fn compare_holdings(
        &self,
        catalogue: &dyn Catalogue,
        compared: &mut Compared,
    ) -> Result<(), Failure> {
        let epoch = catalogue.epoch();
        if compared.epoch != epoch {
            *compared = Compared { epoch, ..Compared::default() };
            self.kept().clear();
        }
        let mut storage: Vec<NodeRecord> = Vec::new();
        let mut fresh = Vec::new();
        let mut nodes = Walk::over(catalogue, NODES);
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
        let now = self.clock.now();
        let due = compared.waiting.iter().filter(|(_, unknown)| unknown.due <= now);
        let due: Vec<SaveId> = due.map(|(save, _)| *save).take(JUDGED_A_ROUND).collect();
        for save in due {
            let reason = match self.fate(&storage, save).await {
                Fate::Goes(RemoveReason::Aborted) if epoch <= Epoch(1) => Err(Kept::Unmarked),
                Fate::Goes(reason) => Ok(reason),
                Fate::Stays(why) => Err(why),
            };
            match reason {
                Ok(reason) => {
                    let generation = Generation { epoch, counter: 0 };
                    let bytes = Removing { save, generation, reason }.to_bytes()?;
                    catalogue.set(&orphan_key(save), None, Some(bytes)).await?;
                    compared.waiting.remove(&save);
                    self.kept().remove(&save);
                }
                Err(why) => {
                    if self.kept().insert(save, why) != Some(why) {
                        tracing::warn!(%save, %why, "a save that no step has is kept");
                    }
                    let unknown = compared.waiting.entry(save).or_default();
                    unknown.looks = unknown.looks.saturating_add(1);
                    unknown.due = now.saturating_add(grown(self.settings.lease, unknown.looks));
                }
            }
        }
        Ok(())
    }

    /// Takes away roots and states of saves that no step has, a page of each a round. A gateway that was paused in a seal makes them after the
    /// save is removed and forgotten; it takes them back itself, unless it dies.
    async fn forget_strays(
        &self,
        catalogue: &dyn Catalogue,
        strays: &mut Strays,
    ) -> Result<(), Failure> {
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
                catalogue.set(&key, Some(entry.revision), None).await?;
            }
        }
        Ok(())
    }

    async fn fate(&self, storage: &[NodeRecord], save: SaveId) -> Fate {
        for node in storage {
            let call = Buried { saves: vec![save] };
            let buried = self.caller.call(&node_address(node), &call).await;
            if buried.is_ok_and(|buried| !buried.is_empty()) {
                return Fate::Goes(RemoveReason::Deleted);
            }
        }
        match self.is_marked(storage, save).await {
            Some(true) => Fate::Stays(Kept::Marked),
            Some(false) => Fate::Goes(RemoveReason::Aborted),
            None => Fate::Stays(Kept::Unasked),
        }
    }

    /// Goes on with them, as far as that goes now. One stays on the list until every node has removed it.
    async fn collect_orphans(&self, catalogue: &dyn Catalogue) -> Result<(), Failure> {
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<_> = nodes.filter(|node| node.storage).collect();
        let mut orphans = Walk::over(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            let mut removing: Removing = parse(&key, &entry.value)?;
            // That nobody has a mark is evidence only when everybody has said so; that somebody has buried it always is.
            if removing.reason == RemoveReason::Aborted {
                match self.fate(&storage, removing.save).await {
                    Fate::Goes(reason) => removing.reason = reason,
                    Fate::Stays(why) => {
                        tracing::info!(save = %removing.save, %why, "an orphan is kept");
                        self.kept().insert(removing.save, why);
                        continue;
                    }
                }
                self.kept().remove(&removing.save);
            }
            match self.removal_of_orphan(&removing).await {
                Ok(true) => {
                    note_forgotten(catalogue).await?;
                    catalogue.set(&key, Some(entry.revision), None).await?;
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
async fn known_saves(catalogue: &dyn Catalogue) -> Result<BTreeSet<SaveId>, Failure> {
    let mut known = BTreeSet::new();
    let mut checkpoints = Walk::over(catalogue, CHECKPOINTS);
    while let Some((key, entry)) = checkpoints.next().await? {
        let checkpoint: Checkpoint = parse(&key, &entry.value)?;
        known.extend(checkpoint.committed.map(|saved| saved.save));
        known.extend(checkpoint.removing.iter().map(|removing| removing.save));
        known.extend(checkpoint.writing.map(|writing| writing.save()));
    }
    let mut orphans = Walk::over(catalogue, ORPHANS);
    while let Some((key, entry)) = orphans.next().await? {
        known.insert(parse::<Removing>(&key, &entry.value)?.save);
    }
    Ok(known)
}
