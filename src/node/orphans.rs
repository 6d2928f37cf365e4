//! Saves that a rebuilt catalogue knows only as to be removed (docs/semantics.md, 8).

use std::collections::BTreeSet;

use super::Node;
use super::census::node_address;
use crate::catalogue::records::{CHECKPOINTS, ORPHANS, orphan_key, parse};
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::{
    Checkpoint, Node as NodeRecord, Record, RemoveReason, Removing, Writing,
};
use crate::id::{Epoch, Generation, PeerName, SaveId};
use crate::wire::Failure;
use crate::wire::calls::Buried;

/// Nodes whose saves were compared with the catalogue of an epoch.
#[derive(Default)]
pub(super) struct Compared {
    epoch: Epoch,
    nodes: BTreeSet<PeerName>,
}

impl Node {
    /// A catalogue that was rebuilt without a node does not know what that node holds: the home looks once at each. A save that no step
    /// has is an orphan when some node has buried it, or all say that it has no mark.
    pub(super) async fn compare_holdings(
        &self,
        catalogue: &dyn Catalogue,
        compared: &mut Compared,
    ) -> Result<(), Failure> {
        let epoch = catalogue.epoch();
        if epoch <= Epoch(1) {
            return Ok(());
        }
        if compared.epoch != epoch {
            *compared = Compared { epoch, nodes: BTreeSet::new() };
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
            let mut is_judged = true;
            for &save in held.difference(&known) {
                let Some(reason) = self.reason_to_go(&storage, save).await else {
                    tracing::info!(%save, node = %node.name, "a save that the catalogue does not know is kept");
                    is_judged = false;
                    continue;
                };
                let generation = Generation { epoch, counter: 0 };
                let bytes = Removing { save, generation, reason }.to_bytes()?;
                catalogue.set(&orphan_key(save), None, Some(bytes)).await?;
            }
            if is_judged {
                compared.nodes.insert(node.name.clone());
            }
        }
        Ok(())
    }

    /// Why a save that no step has may go: somebody has removed it, or it was never decided.
    async fn reason_to_go(&self, storage: &[NodeRecord], save: SaveId) -> Option<RemoveReason> {
        for node in storage {
            let call = Buried { saves: vec![save] };
            let buried = self.caller.call(&node_address(node), &call).await;
            if buried.is_ok_and(|buried| !buried.is_empty()) {
                return Some(RemoveReason::Deleted);
            }
        }
        let is_unmarked = self.is_marked(storage, save).await == Some(false);
        is_unmarked.then_some(RemoveReason::Aborted)
    }

    /// Goes on with them, as far as that goes now. One stays on the list until every node has removed it.
    pub(super) async fn collect_orphans(&self, catalogue: &dyn Catalogue) -> Result<(), Failure> {
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<_> = nodes.filter(|node| node.storage).collect();
        let mut after: Option<String> = None;
        loop {
            let page = catalogue.list(ORPHANS, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = Some(last.clone());
            for (key, entry) in &page {
                let removing: Removing = parse(key, &entry.value)?;
                // That nobody has a mark is evidence only when everybody has said so.
                if removing.reason == RemoveReason::Aborted
                    && self.is_marked(&storage, removing.save).await != Some(false)
                {
                    tracing::info!(save = %removing.save, "a save without a known mark is kept until all nodes have been asked");
                    continue;
                }
                match self.removal_of_orphan(&removing).await {
                    Ok(true) => {
                        catalogue.set(key, Some(entry.revision), None).await?;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        tracing::info!(save = %removing.save, %error, "a removal goes on later")
                    }
                }
            }
        }
    }
}

/// The saves that a step's record has, or that are orphans already.
async fn known_saves(catalogue: &dyn Catalogue) -> Result<BTreeSet<SaveId>, Failure> {
    let mut known = BTreeSet::new();
    let mut after: Option<String> = None;
    loop {
        let page = catalogue.list(CHECKPOINTS, after.as_deref(), MAX_PAGE).await?;
        let Some((last, _)) = page.last() else { break };
        after = Some(last.clone());
        for (key, entry) in &page {
            let checkpoint: Checkpoint = parse(key, &entry.value)?;
            known.extend(checkpoint.committed.map(|saved| saved.save));
            known.extend(checkpoint.removing.iter().map(|removing| removing.save));
            known.extend(checkpoint.writing.map(|writing| match writing {
                Writing::Open { save, .. } => save,
                Writing::Decided { saved } => saved.save,
            }));
        }
    }
    let mut after: Option<String> = None;
    loop {
        let page = catalogue.list(ORPHANS, after.as_deref(), MAX_PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(known) };
        after = Some(last.clone());
        for (key, entry) in &page {
            known.insert(parse::<Removing>(key, &entry.value)?.save);
        }
    }
}
