//! Saves that a rebuilt catalogue knows only as to be removed (docs/semantics.md, 8).

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use super::Node;
use super::census::node_address;
use super::walk::Walk;
use crate::catalogue::Catalogue;
use crate::catalogue::records::{CHECKPOINTS, ORPHANS, orphan_key, parse};
use crate::format::records::{Checkpoint, Node as NodeRecord, Record, RemoveReason, Removing};
use crate::id::{Epoch, Generation, PeerName, SaveId};
use crate::wire::Failure;
use crate::wire::calls::Buried;

/// Saves without a step that are judged in one round.
const JUDGED_A_ROUND: usize = 16;

/// Nodes whose saves were compared with the catalogue of an epoch, and those of their saves that wait for a judgement.
#[derive(Default)]
struct Compared {
    epoch: Epoch,
    nodes: BTreeSet<PeerName>,
    waiting: BTreeSet<SaveId>,
    /// The last one that was looked at: all of them have their turn.
    turn: Option<SaveId>,
}

/// What is to become of a save that no step has.
enum Fate {
    Goes(RemoveReason),
    /// It has a mark: a rebuild with the nodes that have the rest of it brings it back.
    Stays,
    /// Not all nodes have said whether they have a mark.
    Waits,
}

impl Node {
    /// Once per lease period, while this daemon hosts the catalogue.
    pub(super) async fn keep_orphans(self: Arc<Self>) {
        let mut compared = Compared::default();
        loop {
            self.clock.sleep(self.settings.lease).await;
            if !self.serves() {
                continue;
            }
            let catalogue = self.catalogue();
            if let Err(error) = self.compare_holdings(&*catalogue, &mut compared).await {
                tracing::warn!(%error, "comparing what nodes hold with the catalogue");
            }
            if let Err(error) = self.collect_orphans(&*catalogue).await {
                tracing::warn!(%error, "removing what a lost catalogue left");
            }
        }
    }

    /// A catalogue that was rebuilt without a node does not know what that node holds: the home looks once at each. A save that no step
    /// has is an orphan when some node has buried it, or all say that it has no mark.
    async fn compare_holdings(
        &self,
        catalogue: &dyn Catalogue,
        compared: &mut Compared,
    ) -> Result<(), Failure> {
        let epoch = catalogue.epoch();
        if epoch <= Epoch(1) {
            return Ok(());
        }
        if compared.epoch != epoch {
            *compared = Compared { epoch, ..Compared::default() };
        }
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<NodeRecord> = nodes.filter(|node| node.storage).collect();
        for node in &storage {
            if compared.nodes.contains(&node.name) {
                continue;
            }
            let Ok(held) = self.saves_on(node).await else { continue };
            // A save is in its step's record before its first file is anywhere: what is looked at later knows it.
            let known = known_saves(catalogue).await?;
            compared.waiting.extend(held.difference(&known));
            compared.nodes.insert(node.name.clone());
        }
        let from = compared.turn.map_or(Bound::Unbounded, Bound::Excluded);
        let next = compared.waiting.range((from, Bound::Unbounded)).copied();
        let now: Vec<SaveId> = next.take(JUDGED_A_ROUND).collect();
        compared.turn = now.last().copied();
        for save in now {
            let reason = match self.fate(&storage, save).await {
                Fate::Goes(reason) => reason,
                Fate::Waits => continue,
                Fate::Stays => {
                    tracing::warn!(%save, "a committed save that the catalogue does not know is kept");
                    compared.waiting.remove(&save);
                    continue;
                }
            };
            let generation = Generation { epoch, counter: 0 };
            let bytes = Removing { save, generation, reason }.to_bytes()?;
            catalogue.set(&orphan_key(save), None, Some(bytes)).await?;
            compared.waiting.remove(&save);
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
            Some(true) => Fate::Stays,
            Some(false) => Fate::Goes(RemoveReason::Aborted),
            None => Fate::Waits,
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
                let Fate::Goes(reason) = self.fate(&storage, removing.save).await else {
                    tracing::info!(save = %removing.save, "a save without a known mark is kept until all nodes have been asked");
                    continue;
                };
                removing.reason = reason;
            }
            match self.removal_of_orphan(&removing).await {
                Ok(true) => {
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
