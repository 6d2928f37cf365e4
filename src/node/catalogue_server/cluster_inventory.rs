//! The cluster inventory: what all nodes hold, read save by save (docs/semantics.md, 8).
//!
//! A node's inventory is ordered by shard id, and the shards of a save are neighbours. The pages of
//! all nodes are merged, so that only one save is in memory at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;

use crate::catalogue::save_evidence::{Committed, SaveEvidence, Verdict, parse_commit_mark};
use crate::format::records::{
    CommitMark, Node as NodeRecord, RemoveReason, Removing, Saved, ShardRoot,
};
use crate::id::{Generation, Job, NodeId, SaveId, ShardId, Step};
use crate::net::call::address;
use crate::node::context::NodeContext;
use crate::wire::calls::{FindRemovedSaves, ListInventory, ShardHolding};
use crate::wire::{NodeAddress, RemoteError};

/// Time limit for one page of an inventory.
const PAGE_LIMIT: Duration = Duration::from_secs(60);

/// A node, and the position in its inventory: the rest of the current page, and where the next page
/// begins.
struct NodeInventoryPager {
    node: NodeRecord,
    page: VecDeque<ShardHolding>,
    next: Option<(ShardId, Option<u32>)>,
    is_done: bool,
}

/// The conclusions from everything that a set of nodes holds.
#[derive(Debug, Default)]
pub(in crate::node) struct ClusterInventory {
    /// The committed saves. Of several saves of one step, the newest.
    pub steps: BTreeMap<(Job, Step), Box<Committed>>,
    /// Saves to be removed that were committed once, oldest first. Their steps may have a newer
    /// save.
    pub removing: BTreeMap<(Job, Step), Vec<Removing>>,
    /// Saves to be removed that belong to no step, as far as is known.
    pub orphans: Vec<Removing>,
    /// Saves of which only marks that do not parse were found, and the nodes that hold these marks.
    pub doubts: Vec<(SaveId, BTreeSet<NodeId>)>,
    /// Committed saves that cannot be brought back, and the reason.
    incomplete: Vec<(Job, Step, Saved, String)>,
}

impl ClusterInventory {
    fn add_verdict(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Orphan(removing) => self.orphans.push(removing),
            Verdict::Removing { job, step, removing } => {
                self.removing.entry((job, step)).or_default().push(removing);
            }
            Verdict::Incomplete { job, step, saved, why } => {
                self.incomplete.push((job, step, saved, why));
            }
            Verdict::Committed(committed) => {
                let key = (committed.job.clone(), committed.step);
                let Some(other) = self.steps.remove(&key) else {
                    self.steps.insert(key, committed);
                    return;
                };
                let is_newer = committed.saved.generation > other.saved.generation;
                let (newer, older) = if is_newer { (committed, other) } else { (other, committed) };
                self.record_superseded(key.clone(), &older.saved);
                self.steps.insert(key, newer);
            }
        }
    }

    fn record_superseded(&mut self, step: (Job, Step), older: &Saved) {
        let &Saved { save, generation, .. } = older;
        let removing = Removing { save, generation, reason: RemoveReason::Superseded };
        self.removing.entry(step).or_default().push(removing);
    }

    /// Completes the inventory after all saves are judged. An incomplete save that a newer one
    /// superseded is not needed any more, and becomes a removal.
    fn settle_superseded(&mut self) {
        for (job, step, saved, why) in std::mem::take(&mut self.incomplete) {
            let key = (job, step);
            let newer = self.steps.get(&key).map(|committed| committed.saved.generation);
            if newer.is_some_and(|newer| newer > saved.generation) {
                self.record_superseded(key, &saved);
            } else {
                let (job, step) = key;
                self.incomplete.push((job, step, saved, why));
            }
        }
        for removing in self.removing.values_mut() {
            removing.sort_by_key(|removing| removing.generation);
        }
    }

    /// Returns the committed steps that cannot be brought back, each with the reason.
    pub(in crate::node) fn describe_incomplete_steps(&self) -> impl Iterator<Item = String> + '_ {
        self.incomplete.iter().map(|(job, step, _, why)| format!("{job}/{step}: {why}"))
    }

    /// Returns the number of saves that are to be removed.
    pub(in crate::node) fn count_to_remove(&self) -> usize {
        self.orphans.len() + self.removing.values().map(Vec::len).sum::<usize>()
    }

    /// Returns the roots of the committed shards.
    pub(in crate::node) fn committed_roots(&self) -> impl Iterator<Item = &ShardRoot> {
        let shards = self.steps.values().flat_map(|committed| &committed.shards);
        shards.map(|shard| &shard.root)
    }

    /// Returns the codes of the committed shards.
    pub(in crate::node) fn codes(&self) -> impl Iterator<Item = (u8, u8)> + '_ {
        let shards = self.steps.values().flat_map(|committed| &committed.shards);
        shards.map(|shard| (shard.root.n, shard.root.k))
    }
}

/// The service that reads the inventories of all nodes.
pub(in crate::node) struct InventoryReader {
    context: Arc<NodeContext>,
}

impl InventoryReader {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Reads the whole inventories of `nodes`, and judges each save. Returns the conclusions.
    ///
    /// # Errors
    /// If any of the inventories cannot be read to its end.
    pub(in crate::node) async fn read_and_judge_inventories(
        &self,
        nodes: &[NodeRecord],
        generation: Generation,
    ) -> Result<ClusterInventory, RemoteError> {
        let mut sources: Vec<NodeInventoryPager> = nodes
            .iter()
            .map(|node| NodeInventoryPager {
                node: node.clone(),
                page: VecDeque::new(),
                next: None,
                is_done: false,
            })
            .collect();
        try_join_all(sources.iter_mut().map(|source| self.fetch_page_if_empty(source))).await?;
        let mut census = ClusterInventory::default();
        while let Some((save, evidence)) = self.collect_evidence_of_next_save(&mut sources).await? {
            census
                .doubts
                .extend(evidence.unresolved_damaged_marks().map(|nodes| (save, nodes.clone())));
            census.add_verdict(evidence.judge(save, generation));
        }
        census.settle_superseded();
        Ok(census)
    }

    /// Fetches the next page of a source whose current page is empty.
    async fn fetch_page_if_empty(
        &self,
        source: &mut NodeInventoryPager,
    ) -> Result<(), RemoteError> {
        while source.page.is_empty() && !source.is_done {
            let call = ListInventory { after: source.next, only: None };
            let to = address(&NodeAddress::of(&source.node));
            let page = self.context.caller.call_within(&to, &call, PAGE_LIMIT).await?;
            source.is_done = page.next.is_none();
            source.next = page.next;
            source.page = page.shards.into();
        }
        Ok(())
    }

    /// Reads all that the sources hold of the next save. Returns the evidence, or `None` at the
    /// end.
    async fn collect_evidence_of_next_save(
        &self,
        sources: &mut [NodeInventoryPager],
    ) -> Result<Option<(SaveId, SaveEvidence)>, RemoteError> {
        let first = sources.iter().filter_map(|source| source.page.front()).map(|held| held.shard);
        let Some(save) = first.min().map(ShardId::save) else { return Ok(None) };
        let mut evidence = SaveEvidence::default();
        let asked: Vec<NodeRecord> = sources.iter().map(|source| source.node.clone()).collect();
        for source in sources {
            let node = NodeId::of(&source.node.name);
            while let Some(held) = source.page.pop_front_if(|held| held.shard.save() == save) {
                evidence.add_holdings(self.context.settings.cluster, node, &held);
                self.fetch_page_if_empty(source).await?;
            }
        }
        // A node that has purged a removed save lists nothing of it, so the removed-save sets are
        // read, too.
        if evidence.has_commit_mark() || evidence.unresolved_damaged_marks().is_some() {
            let asks = asked.iter().map(|node| async move {
                let to = address(&NodeAddress::of(node));
                self.context
                    .caller
                    .call_within(&to, &FindRemovedSaves { saves: vec![save] }, PAGE_LIMIT)
                    .await
            });
            if try_join_all(asks).await?.iter().any(|gone| !gone.is_empty()) {
                evidence.record_removal();
            }
        }
        Ok(Some((save, evidence)))
    }

    /// Calls `visit` for each shard of `save` of which `node` holds anything.
    pub(in crate::node) async fn for_each_holding(
        &self,
        node: &NodeRecord,
        save: SaveId,
        mut visit: impl FnMut(&ShardHolding),
    ) -> Result<(), RemoteError> {
        let mut after = None;
        loop {
            let call = ListInventory { after, only: Some(save) };
            let to = address(&NodeAddress::of(node));
            let page = self.context.caller.call_within(&to, &call, PAGE_LIMIT).await?;
            page.shards.iter().for_each(&mut visit);
            match page.next.filter(|next| after.is_none_or(|after| *next > after)) {
                Some(next) => after = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// Returns the saves of which `node` holds anything.
    pub(in crate::node) async fn fetch_saves_on(
        &self,
        node: &NodeRecord,
    ) -> Result<BTreeSet<SaveId>, RemoteError> {
        let (mut saves, mut after) = (BTreeSet::new(), None);
        loop {
            let to = address(&NodeAddress::of(node));
            let page = ListInventory { after, only: None };
            let page = self.context.caller.call_within(&to, &page, PAGE_LIMIT).await?;
            saves.extend(page.shards.iter().map(|held| held.shard.save()));
            match page.next.filter(|next| after.is_none_or(|after| *next > after)) {
                Some(next) => after = Some(next),
                None => return Ok(saves),
            }
        }
    }

    /// Returns the commit marks of `save` on `nodes`, or `None` if not all of them answer.
    pub(in crate::node) async fn fetch_marks_from_all(
        &self,
        nodes: &[NodeRecord],
        save: SaveId,
    ) -> Option<SaveMarks> {
        let cluster = self.context.settings.cluster;
        let asks = nodes.iter().map(|node| async move {
            let (mut is_marked, mut mark) = (false, None);
            let read = |held: &ShardHolding| {
                is_marked |= held.mark.is_some();
                mark = mark.take().or_else(|| parse_commit_mark(cluster, held));
            };
            self.for_each_holding(node, save, read).await?;
            Ok::<_, RemoteError>((is_marked, mark))
        });
        let mut marks = SaveMarks::default();
        for (is_marked, mark) in try_join_all(asks).await.ok()? {
            marks.nodes += usize::from(is_marked);
            marks.good = marks.good.or(mark);
        }
        Some(marks)
    }
}

/// The commit marks of one save on some nodes.
#[derive(Debug, Default)]
pub(in crate::node) struct SaveMarks {
    /// Number of nodes with a mark, even one that does not parse.
    pub nodes: usize,
    /// One of the marks that parse.
    pub good: Option<CommitMark>,
}
