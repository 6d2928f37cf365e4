//! Taking a node out of the cluster (docs/semantics.md, 10). Members come by themselves: they register.

use super::Node;
use super::failure::failure;
use crate::catalogue::records::{
    CHECKPOINTS, NODES, ORPHANS, parse, parse_checkpoint_key, roots_prefix,
};
use crate::catalogue::{Catalogue, MAX_PAGE, SetOutcome};
use crate::format::records::{Checkpoint, RemoveReason, Removing, ShardRoot, Writing};
use crate::id::{Job, NodeId, PeerName, SaveId, Step};
use crate::kind::Kind;
use crate::wire::Failure;
use crate::wire::calls::RemoveNode;

/// Checkpoints that a refusal names.
const NAMED: usize = 8;

impl Node {
    /// Takes a member off the list. Refused while it is live, and while a checkpoint may lie on it.
    pub(super) async fn remove_node(&self, call: RemoveNode) -> Result<(), Failure> {
        let (catalogue, name) = (self.catalogue(), call.name);
        let key = format!("{NODES}{name}");
        loop {
            let Some(entry) = catalogue.get(&key).await? else {
                let text = format!("no node {name} is registered: `rapidraid status` shows all");
                return Err(failure(Kind::NotFound, text));
            };
            let nodes = catalogue.nodes().await?;
            if nodes.iter().any(|view| view.node.name == name && view.live) {
                let text = format!(
                    "node {name} is live: stop its daemon, and wait until its lease is over"
                );
                return Err(failure(Kind::Busy, text));
            }
            let (count, first) = self.lying_on(&*catalogue, &name).await?;
            if count > 0 {
                let more = if count > first.len() { " and others" } else { "" };
                let text = format!(
                    "{count} checkpoints may lie on node {name} ({}{more}): what is there may be their last copy",
                    first.join(", ")
                );
                return Err(failure(Kind::Exists, text));
            }
            match catalogue.set(&key, Some(entry.revision), None).await? {
                SetOutcome::Set(_) => break,
                // It has registered anew meanwhile, or somebody else was first.
                SetOutcome::Other(_) => {}
            }
        }
        tracing::warn!(node = %name, "a node was taken out of the cluster");
        Ok(())
    }

    /// How many steps have a shard with `name` in its ring, committed or under way, and the first of them.
    async fn lying_on(
        &self,
        catalogue: &dyn Catalogue,
        name: &PeerName,
    ) -> Result<(usize, Vec<String>), Failure> {
        let node = NodeId::of(name);
        // A save without a known mark is kept until all nodes have been asked for one.
        let orphans = catalogue.list(ORPHANS, None, MAX_PAGE).await?;
        let orphans = orphans.iter().map(|(key, entry)| parse::<Removing>(key, &entry.value));
        let unsure = |orphan: &Removing| orphan.reason == RemoveReason::Aborted;
        let orphans = orphans.collect::<Result<Vec<_>, _>>()?.into_iter().filter(unsure);
        let mut first: Vec<String> =
            orphans.map(|orphan| format!("save {}", orphan.save)).collect();
        let mut count = first.len();
        first.truncate(NAMED);
        let mut after = None::<String>;
        loop {
            let page = catalogue.list(CHECKPOINTS, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok((count, first)) };
            after = Some(last.clone());
            let mut saves: Vec<(SaveId, (Job, Step))> = Vec::new();
            for (key, entry) in &page {
                let checkpoint: Checkpoint = parse(key, &entry.value)?;
                let Some(step) = parse_checkpoint_key(key) else { continue };
                let writing = checkpoint.writing.map(|writing| match writing {
                    Writing::Open { save, .. } => save,
                    Writing::Decided { saved } => saved.save,
                });
                let committed = checkpoint.committed.map(|saved| saved.save);
                saves.extend(writing.into_iter().chain(committed).map(|save| (save, step.clone())));
            }
            for (save, (job, step)) in saves {
                if self.has_in_ring(catalogue, save, node).await? {
                    count += 1;
                    if first.len() < NAMED {
                        first.push(format!("{job}/{step}"));
                    }
                }
            }
        }
    }

    async fn has_in_ring(
        &self,
        catalogue: &dyn Catalogue,
        save: SaveId,
        node: NodeId,
    ) -> Result<bool, Failure> {
        let (prefix, mut after) = (roots_prefix(save), None::<String>);
        loop {
            let page = catalogue.list(&prefix, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(false) };
            after = Some(last.clone());
            for (key, entry) in &page {
                let root: ShardRoot = parse(key, &entry.value)?;
                if root.ring.iter().any(|member| member.node == node) {
                    return Ok(true);
                }
            }
        }
    }
}
