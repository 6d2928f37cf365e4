//! The evidence about a save that the nodes hold, and the verdict that follows from it when there
//! is no catalogue (docs/semantics.md, 8).
//!
//! This module only judges. The node decides which nodes it asks and how it acts on the verdicts.

use std::collections::{BTreeMap, BTreeSet};

use crate::code::{Code, CodeId, table};
use crate::format::geometry::Geometry;
use crate::format::records::{
    CommitMark, MAX_RUNS, Record, RemoveReason, Removing, Run, Saved, ShardRoot, ShardState,
    StripeState, Tombstone, roots_hash,
};
use crate::id::{Attempt, ClusterId, Generation, Job, NodeId, SaveId, ShardId, Step};
use crate::wire::calls::{ShardHolding, StripeHolding};

/// The evidence found about one save.
#[derive(Debug, Default)]
pub struct SaveEvidence {
    tombstone: Option<Tombstone>,
    is_removed: bool,
    saved: Option<(Job, Step, Saved)>,
    /// Nodes whose mark of the save does not parse or does not fit the save, and so proves nothing.
    damaged_marks: BTreeSet<NodeId>,
    shards: BTreeMap<u32, ShardEvidence>,
}

#[derive(Debug, Default)]
struct ShardEvidence {
    root: Option<ShardRoot>,
    marked: BTreeSet<NodeId>,
    /// Nodes that hold valid leaves of the shard or anything of a stripe, whether or not they have its
    /// commit mark.
    holders: BTreeSet<NodeId>,
    stripes: BTreeMap<u32, StripeEvidence>,
}

#[derive(Debug, Default)]
struct StripeEvidence {
    blocks: BTreeSet<u8>,
    pieces: BTreeMap<Attempt, BTreeSet<u8>>,
    receipts: BTreeMap<Attempt, (CodeId, Generation, usize)>,
}

/// The verdict about a save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The save is committed, and the roots of all its shards were found. Some of its stripes may be
    /// unreadable.
    Committed(Box<Committed>),
    /// The save is to be removed from all nodes. No good commit mark names its step, or a tombstone
    /// says that it was aborted.
    Orphan(Removing),
    /// The save was committed and is to be removed from all nodes.
    Removing {
        /// The job.
        job: Job,
        /// The step that the save was of.
        step: Step,
        /// The save.
        removing: Removing,
    },
    /// The save is committed, but its shard roots were not all found or are inconsistent, or the states
    /// of a shard's stripes alternate too often for one record.
    Incomplete {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save.
        saved: Saved,
        /// Description of what is missing or inconsistent.
        why: String,
    },
}

/// A committed save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save.
    pub saved: Saved,
    /// Its shards, in order.
    pub shards: Vec<CommittedShard>,
}

/// A shard of a committed save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommittedShard {
    /// Its root.
    pub root: ShardRoot,
    /// The state of the shard, i.e. how far its archiving has come.
    pub state: ShardState,
    /// Nodes that have the shard's commit mark.
    pub marked: BTreeSet<NodeId>,
    /// Nodes that hold more of the shard than its mark.
    pub holders: BTreeSet<NodeId>,
    /// Indices of the stripes of which too little was found to read them.
    pub damaged: Vec<u32>,
    /// Whether the receipts of some stripe leave a doubt. This is so if no attempt has its receipt
    /// on enough nodes and, in addition, receipts of several attempts were found or too little was
    /// found to read the stripe.
    pub is_doubtful: bool,
}

impl SaveEvidence {
    /// Adds the holdings of `node`. A record that does not parse, or belongs to another cluster or
    /// shard, proves nothing.
    pub fn add_holdings(&mut self, cluster: ClusterId, node: NodeId, held: &ShardHolding) {
        let save = held.shard.save();
        if let Some(bytes) = &held.tombstone
            && let Ok(found) = Tombstone::parse(bytes)
            && found.cluster == cluster
            && found.save == save
            && self.tombstone.as_ref().is_none_or(|known| known.generation < found.generation)
        {
            self.tombstone = Some(found);
        }
        if held.shard.index() == u32::MAX {
            return;
        }
        let shard = self.shards.entry(held.shard.index()).or_default();
        if held.root.is_some() || !held.stripes.is_empty() {
            shard.holders.insert(node);
        }
        if let Some(mark) = parse_commit_mark(cluster, held) {
            shard.marked.insert(node);
            self.saved = Some((mark.root.job.clone(), mark.root.step, mark.saved));
            // The root in a mark was committed. Leaves may belong to a save that was never
            // committed.
            shard.root = Some(mark.root);
        } else {
            if held.mark.is_some() {
                self.damaged_marks.insert(node);
            }
            if let Some(root) = held.root.as_ref().filter(|root| is_root_of(root, held.shard))
                && shard.root.is_none()
            {
                shard.root = Some(root.clone());
            }
        }
        for stripe in &held.stripes {
            shard.stripes.entry(stripe.index).or_default().add_holdings(stripe);
        }
    }

    /// Returns whether a good commit mark was found.
    pub fn has_commit_mark(&self) -> bool {
        self.saved.is_some()
    }

    /// Returns the nodes whose damaged mark is the only evidence of a commit. Returns `None` if
    /// there is no such node, if a good mark was found, or if the save is known to be removed.
    pub fn unresolved_damaged_marks(&self) -> Option<&BTreeSet<NodeId>> {
        let is_known = self.saved.is_some() || self.tombstone.is_some() || self.is_removed;
        Some(&self.damaged_marks).filter(|nodes| !is_known && !nodes.is_empty())
    }

    /// Records that a node has removed the save. Whatever else was found of it must be removed too.
    pub fn record_removal(&mut self) {
        self.is_removed = true;
    }

    /// Returns the verdict about the save. `generation` is the generation for the new catalogue's
    /// records.
    pub fn judge(self, save: SaveId, generation: Generation) -> Verdict {
        let orphan = |reason| Verdict::Orphan(Removing { save, generation, reason });
        let reason = self.tombstone.map(|tombstone| tombstone.reason);
        let reason = reason.or(self.is_removed.then_some(RemoveReason::Deleted));
        let (job, step, saved) = match (self.saved, reason) {
            (None, reason) => return orphan(reason.unwrap_or(RemoveReason::Aborted)),
            // An aborted save was never decided, or no node reported a mark of it. Its tombstone
            // therefore outweighs the mark, and it belongs to no step.
            (Some(_), Some(RemoveReason::Aborted)) => return orphan(RemoveReason::Aborted),
            (Some((job, step, saved)), Some(reason)) => {
                let removing = Removing { save, generation: saved.generation, reason };
                return Verdict::Removing { job, step, removing };
            }
            (Some(saved), None) => saved,
        };
        let mut shards = Vec::new();
        let mut found = self.shards;
        for index in 0..saved.shards {
            let shard = found.remove(&index).unwrap_or_default();
            let Some(root) = shard.root.clone() else {
                let why =
                    format!("the root of shard {index} of {} was found nowhere", saved.shards);
                return Verdict::Incomplete { job, step, saved, why };
            };
            let Ok(geometry) = root.geometry() else {
                let why = format!("the geometry in the root of shard {} is invalid", root.name);
                return Verdict::Incomplete { job, step, saved, why };
            };
            let ShardJudgement { state, damaged, is_doubtful } =
                judge_stripes(&root, &geometry, &shard.stripes, generation);
            if state.runs.len() > MAX_RUNS {
                let why = format!(
                    "the states of the stripes of shard {} need more than {MAX_RUNS} spans",
                    root.name
                );
                return Verdict::Incomplete { job, step, saved, why };
            }
            let ShardEvidence { marked, holders, .. } = shard;
            shards.push(CommittedShard { root, state, marked, holders, damaged, is_doubtful });
        }
        if roots_hash(shards.iter().map(|shard| &shard.root)) != Some(saved.roots_hash) {
            let why = "its shard roots are not the ones that were committed".to_owned();
            return Verdict::Incomplete { job, step, saved, why };
        }
        Verdict::Committed(Box::new(Committed { job, step, saved, shards }))
    }
}

impl StripeEvidence {
    fn add_holdings(&mut self, held: &StripeHolding) {
        self.blocks.extend(&held.replicas);
        for (piece, attempt) in &held.pieces {
            self.pieces.entry(*attempt).or_default().insert(*piece);
        }
        for (attempt, code, generation) in &held.receipts {
            self.receipts.entry(*attempt).or_insert((*code, *generation, 0)).2 += 1;
        }
    }

    /// Returns whether the receipt of some attempt is on so many nodes that it is valid whatever
    /// the nodes that did not answer hold.
    fn has_enough_receipts(&self, root: &ShardRoot) -> bool {
        self.receipts.values().any(|(_, _, nodes)| is_on_enough_nodes(root, *nodes))
    }

    /// Returns the number of pieces of an attempt that can be read. With a systematic code,
    /// replicas left in place count as pieces, and so do the `empty_blocks`, which have no file.
    fn count_readable_pieces(
        &self,
        attempt: Attempt,
        code: CodeId,
        empty_blocks: &BTreeSet<u8>,
    ) -> usize {
        let pieces = self.pieces.get(&attempt);
        let is_systematic = matches!(table::by_id(code), Some(Code::Rs(_)));
        let kept = self.blocks.union(empty_blocks);
        let kept = kept.filter(|block| pieces.is_none_or(|of| !of.contains(block)));
        pieces.map_or(0, BTreeSet::len) + if is_systematic { kept.count() } else { 0 }
    }
}

/// Returns the commit mark among the holdings of a shard, if it parses and is of that shard and of
/// this cluster. Any other mark proves nothing.
pub fn parse_commit_mark(cluster: ClusterId, held: &ShardHolding) -> Option<CommitMark> {
    let mark = CommitMark::parse(held.mark.as_ref()?).ok()?;
    let is_of_save = mark.cluster == cluster && mark.saved.save == held.shard.save();
    (is_of_save && is_root_of(&mark.root, held.shard)).then_some(mark)
}

fn is_root_of(root: &ShardRoot, shard: ShardId) -> bool {
    root.shard == shard && root.save == shard.save()
}

/// The judgement of a shard: the states of its stripes, the stripes that cannot be read, and
/// whether receipts leave a doubt.
struct ShardJudgement {
    state: ShardState,
    damaged: Vec<u32>,
    is_doubtful: bool,
}

/// Judges the stripes of a shard. Returns their states, the stripes of which too little was found to
/// read them, and whether receipts leave a doubt.
fn judge_stripes(
    root: &ShardRoot,
    geometry: &Geometry,
    found: &BTreeMap<u32, StripeEvidence>,
    generation: Generation,
) -> ShardJudgement {
    let mut state = ShardState { generation, owner: None, deleting: false, runs: Vec::new() };
    let (mut damaged, mut is_doubtful) = (Vec::new(), false);
    let nothing = StripeEvidence::default();
    for index in 0..geometry.stripes() {
        let stripe = found.get(&index).unwrap_or(&nothing);
        let Some(cut) = geometry.stripe(index) else { continue };
        let empty: BTreeSet<u8> = (0..root.k).filter(|&block| cut.block_len(block) == 0).collect();
        let (judged, is_readable) = judge_stripe(root, stripe, &empty);
        is_doubtful |=
            !stripe.has_enough_receipts(root) && (!is_readable || stripe.receipts.len() > 1);
        if !is_readable {
            damaged.push(index);
        }
        match state.runs.last_mut() {
            Some(last) if last.state == judged => last.count += 1,
            _ => state.runs.push(Run { count: 1, state: judged }),
        }
    }
    ShardJudgement { state, damaged, is_doubtful }
}

/// Returns whether a receipt or mark on `nodes` nodes of a shard's ring is on at least one of any k of
/// them. That takes n-k+1 nodes.
pub fn is_on_enough_nodes(root: &ShardRoot, nodes: usize) -> bool {
    nodes > usize::from(root.n).saturating_sub(root.k.into())
}

/// Judges one stripe. Returns its state, and whether enough was found to read it.
fn judge_stripe(
    root: &ShardRoot,
    stripe: &StripeEvidence,
    empty_blocks: &BTreeSet<u8>,
) -> (StripeState, bool) {
    let is_there = |block: &u8| empty_blocks.contains(block) || stripe.blocks.contains(block);
    let has_all_blocks = (0..root.k).all(|block| is_there(&block));
    // An older attempt may have left receipts, and a newer one that was never committed may have
    // left a few. A receipt that enough nodes have takes precedence.
    let is_enough = |nodes| is_on_enough_nodes(root, nodes);
    let best = stripe
        .receipts
        .iter()
        .max_by_key(|(_, (_, generation, nodes))| (is_enough(*nodes), *generation));
    let Some((&attempt, &(code, generation, nodes))) = best else {
        return (StripeState::Replicated, has_all_blocks);
    };
    if has_all_blocks && !is_enough(nodes) {
        return (StripeState::Archiving { attempt, code, generation }, true);
    }
    let state = StripeState::Archived { attempt, code, generation, dropped: false };
    let pieces = stripe.count_readable_pieces(attempt, code, empty_blocks);
    // Replicas that are not dropped yet are read, too.
    (state, has_all_blocks || pieces >= usize::from(root.k))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::{FIELD_GF8, LAYOUT_STANDARD, RingNode, stripes_root};
    use crate::id::Epoch;

    const CLUSTER: ClusterId = ClusterId([1; 16]);
    const SAVE: SaveId = SaveId([7; 12]);
    const GENERATION: Generation = Generation { epoch: Epoch(2), counter: 0 };

    /// Returns a committed save of one empty shard, as one of its nodes holds it.
    fn marked() -> ShardHolding {
        let shard = ShardId::new(SAVE, 0);
        let member = |node| RingNode { node: NodeId(node), domain: 0 };
        let root = ShardRoot {
            job: "job".parse().unwrap(),
            step: Step(1),
            save: SAVE,
            index: 0,
            shards: 1,
            shard,
            name: "weights".parse().unwrap(),
            len_bytes: 0,
            block_bytes: 65_536,
            n: 4,
            k: 2,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key: [3; 32],
            ring: (1..=4).map(member).collect(),
            stripes_root: stripes_root(&[]),
        };
        let saved = Saved {
            save: SAVE,
            generation: Generation { epoch: Epoch(1), counter: 1 },
            shards: 1,
            len_bytes: 0,
            roots_hash: roots_hash([&root].into_iter()).unwrap(),
            saved_at: 0,
        };
        let mark = CommitMark { cluster: CLUSTER, saved, root: root.clone() };
        let mark = Some(mark.to_bytes().unwrap());
        ShardHolding { shard, mark, root: Some(root), tombstone: None, stripes: vec![] }
    }

    fn tombstone(cluster: ClusterId, save: SaveId) -> ShardHolding {
        let (generation, reason) = (GENERATION, RemoveReason::Retired);
        let tombstone = Tombstone { cluster, save, generation, reason };
        let tombstone = Some(tombstone.to_bytes().unwrap());
        let shard = ShardId::new(SAVE, u32::MAX);
        ShardHolding { shard, mark: None, root: None, tombstone, stripes: vec![] }
    }

    #[test]
    fn an_archived_stripe_is_readable_from_pieces_or_from_replicas() {
        let root = marked().root.unwrap();
        let attempt = Attempt([5; 16]);
        let receipts = BTreeMap::from([(attempt, (CodeId(1), GENERATION, 4))]);
        let readable = |blocks: &[u8], pieces: &[u8]| {
            let stripe = StripeEvidence {
                blocks: blocks.iter().copied().collect(),
                pieces: BTreeMap::from([(attempt, pieces.iter().copied().collect())]),
                receipts: receipts.clone(),
            };
            let (state, is_readable) = judge_stripe(&root, &stripe, &BTreeSet::new());
            assert!(matches!(state, StripeState::Archived { dropped: false, .. }), "{state:?}");
            is_readable
        };
        assert!(readable(&[], &[0, 2]));
        assert!(readable(&[0, 1], &[2]));
        assert!(!readable(&[1], &[2]));
    }

    fn judged(held: &[ShardHolding], is_removed: bool) -> Verdict {
        let mut evidence = SaveEvidence::default();
        for (node, held) in (1..).zip(held) {
            evidence.add_holdings(CLUSTER, NodeId(node), held);
        }
        if is_removed {
            evidence.record_removal();
        }
        evidence.judge(SAVE, GENERATION)
    }

    #[test]
    fn one_tombstone_or_grave_outweighs_every_mark() {
        let orphan =
            |reason| Verdict::Orphan(Removing { save: SAVE, generation: GENERATION, reason });
        let removing = |reason| {
            let generation = Generation { epoch: Epoch(1), counter: 1 };
            let removing = Removing { save: SAVE, generation, reason };
            Verdict::Removing { job: "job".parse().unwrap(), step: Step(1), removing }
        };
        let marks = vec![marked(); 3];
        let with = |other: ShardHolding| [marks.clone(), vec![other]].concat();
        assert!(matches!(judged(&marks, false), Verdict::Committed(_)));
        assert_eq!(judged(&with(tombstone(CLUSTER, SAVE)), false), removing(RemoveReason::Retired));
        assert_eq!(judged(&marks, true), removing(RemoveReason::Deleted));
        assert_eq!(judged(&[tombstone(CLUSTER, SAVE)], true), orphan(RemoveReason::Retired));
        // A tombstone of another cluster or another save is no evidence.
        for other in [tombstone(ClusterId([2; 16]), SAVE), tombstone(CLUSTER, SaveId([8; 12]))] {
            assert!(matches!(judged(&with(other), false), Verdict::Committed(_)));
        }
        let unmarked = ShardHolding { mark: None, ..marked() };
        assert_eq!(judged(&[unmarked], false), orphan(RemoveReason::Aborted));
    }
}
