//! The survey of a committed step: what is missing of it, by what its nodes list (docs/semantics.md,
//! 11). No file is read.

use std::collections::BTreeSet;

use futures_util::future::join_all;

use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    parse_record, read_record, shard_roots_prefix, shard_state_key,
};
use crate::code::{Code, Layout, NodeShare, SurvivableLossCache, table};
use crate::format::geometry::StripeCut;
use crate::format::records::{ShardRoot, ShardState, StripeState};
use crate::id::{Attempt, NodeId, SaveId};
use crate::node::context::NodeContext;
use crate::pipeline::coordinator::StripesByShard;
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{STRIPES_PER_SURVEY, ShardSurvey, StripeSurvey, SurveyShard};

/// Maximum number of degraded stripes of a step that a survey lists. A further survey lists more
/// when these are repaired.
const MAX_STRIPES: usize = 4096;

/// What is missing of a step, and how many nodes may be lost before it cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) struct StepHealth {
    /// Number of nodes that may be lost, whichever they are; `None` if a stripe cannot be read.
    pub(in crate::node) survives: Option<u32>,
    /// Whether an archived stripe survives no further loss.
    pub(in crate::node) is_urgent: bool,
    /// Number of pieces and replicas that are missing.
    pub(in crate::node) missing: u64,
    /// Number of bytes of these pieces and replicas.
    pub(in crate::node) missing_bytes: u64,
    /// Number of records that nodes lack.
    pub(in crate::node) records: u64,
}

impl StepHealth {
    /// The health of a step of which nothing has been surveyed.
    const WHOLE: StepHealth = StepHealth {
        survives: Some(u32::MAX),
        is_urgent: false,
        missing: 0,
        missing_bytes: 0,
        records: 0,
    };

    /// Returns whether anything is missing.
    pub(in crate::node) fn is_degraded(&self) -> bool {
        self.missing > 0 || self.records > 0
    }

    /// Reduces the losses that the step survives to those of a part of it.
    fn limit_losses(&mut self, survives: Option<usize>) {
        let survives = survives.map(|losses| u32::try_from(losses).unwrap_or(u32::MAX));
        self.survives = self.survives.min(survives);
    }
}

/// The survey of a step.
#[derive(Debug, Clone)]
pub(in crate::node) struct StepSurvey {
    pub(in crate::node) health: StepHealth,
    /// The stripes of which something is missing, at most [`MAX_STRIPES`], and the shards of which
    /// records are missing.
    pub(in crate::node) stripes: StripesByShard,
}

/// Surveys a committed save. Returns `None` if the save is gone, and if a live node does not answer.
pub(in crate::node) async fn survey_save(
    context: &NodeContext,
    save: SaveId,
    directory: &Directory,
    cache: &mut SurvivableLossCache,
) -> Result<Option<StepSurvey>, RemoteError> {
    let catalogue = context.catalogue();
    let mut survey = StepSurvey { health: StepHealth::WHOLE, stripes: StripesByShard::new() };
    let mut roots = KeyScan::of_prefix(&*catalogue, shard_roots_prefix(save));
    while let Some((key, entry)) = roots.next().await? {
        let root: ShardRoot = parse_record(&key, &entry.value)?;
        let state_key = shard_state_key(root.shard);
        let read = || read_record::<ShardState>(&*catalogue, &state_key);
        let Some((state, revision)) = read().await?.filter(|(state, _)| !state.deleting) else {
            return Ok(None);
        };
        let mut shard = ShardSurveyor { context, root: &root, directory, survey: &mut survey };
        if !shard.survey_stripes(&state, cache).await {
            return Ok(None);
        }
        // What was read from nodes may belong to a newer state.
        if read().await?.map(|(_, revision)| revision) != Some(revision) {
            return Ok(None);
        }
    }
    Ok(Some(survey))
}

/// The survey of one shard.
struct ShardSurveyor<'a> {
    context: &'a NodeContext,
    root: &'a ShardRoot,
    directory: &'a Directory,
    survey: &'a mut StepSurvey,
}

impl ShardSurveyor<'_> {
    /// Asks the live nodes of the ring for what they have, and adds what is missing. Returns whether
    /// all of them answered.
    async fn survey_stripes(
        &mut self,
        state: &ShardState,
        cache: &mut SurvivableLossCache,
    ) -> bool {
        let Ok(geometry) = self.root.geometry() else { return false };
        let mut states = (0..geometry.stripes()).zip(state.states());
        for first in (0..geometry.stripes().max(1)).step_by(STRIPES_PER_SURVEY as usize) {
            let Some(found) = self.ask_nodes(first).await else { return false };
            if first == 0 {
                self.add_shard_records(&found);
            }
            for (index, state) in states.by_ref().take(STRIPES_PER_SURVEY as usize) {
                let Some(cut) = geometry.stripe(index) else { return false };
                let of_stripe = |survey: &ShardSurvey| {
                    let stripes = &survey.stripes;
                    let at = stripes.binary_search_by_key(&index, |stripe| stripe.index).ok()?;
                    stripes.get(at).cloned()
                };
                let nodes = found.iter().filter_map(of_stripe).collect();
                self.add_stripe(index, SurveyedStripe { root: self.root, cut, state, nodes }, cache);
            }
        }
        true
    }

    /// Returns what the live nodes of the ring have of a page of stripes, or `None` if one of them
    /// does not answer.
    async fn ask_nodes(&self, first: u32) -> Option<Vec<ShardSurvey>> {
        let call = &SurveyShard { shard: self.root.shard, first };
        let storage: BTreeSet<NodeId> = self.directory.storage().into_iter().collect();
        let members = self.root.ring.iter().map(|member| member.node);
        let asks = members
            .filter(|node| storage.contains(node) && self.directory.is_live(*node))
            .filter_map(|node| self.directory.address(node))
            .map(|to| async move { self.context.caller.call(&to, call).await.ok() });
        join_all(asks).await.into_iter().collect()
    }

    fn add_shard_records(&mut self, found: &[ShardSurvey]) {
        let leaves = found.iter().filter(|survey| survey.has_leaves).count();
        let marks = found.iter().filter(|survey| survey.has_mark).count();
        let lacking = 2 * found.len() - leaves - marks;
        self.survey.health.records += lacking as u64;
        self.survey.health.limit_losses(leaves.checked_sub(1));
        if lacking > 0 {
            self.survey.stripes.entry(self.root.shard).or_default();
        }
    }

    fn add_stripe(
        &mut self,
        index: u32,
        stripe: SurveyedStripe<'_>,
        cache: &mut SurvivableLossCache,
    ) {
        let health = &mut self.survey.health;
        let before = (health.missing, health.records);
        stripe.add_to(health, cache);
        let listed: usize = self.survey.stripes.values().map(BTreeSet::len).sum();
        if before != (health.missing, health.records) && listed < MAX_STRIPES {
            self.survey.stripes.entry(self.root.shard).or_default().insert(index);
        }
    }
}

/// A stripe, and what its nodes have of it.
struct SurveyedStripe<'a> {
    root: &'a ShardRoot,
    cut: StripeCut,
    state: StripeState,
    /// The answers of the nodes that have anything of it.
    nodes: Vec<StripeSurvey>,
}

impl SurveyedStripe<'_> {
    /// Adds what is missing of the stripe.
    fn add_to(&self, health: &mut StepHealth, cache: &mut SurvivableLossCache) {
        let with_record = self.nodes.iter().filter(|held| held.has_record).count();
        health.limit_losses(with_record.checked_sub(1));
        // A commit promises the stripe record on this many nodes.
        let promised = usize::from(self.root.n - self.root.k) + 1;
        health.records += promised.saturating_sub(with_record) as u64;
        let wanted: Vec<u8> =
            (0..self.root.k).filter(|block| self.cut.block_len(*block) > 0).collect();
        match self.state {
            StripeState::Archived { attempt, code, .. } => match table::by_id(code) {
                Some(code) => self.add_pieces(wanted, &code, attempt, health, cache),
                // This program cannot read the stripe.
                None => health.limit_losses(None),
            },
            StripeState::Replicated | StripeState::Archiving { .. } => {
                self.add_replicas(wanted, health, cache);
            }
        }
    }

    fn add_replicas(
        &self,
        wanted: Vec<u8>,
        health: &mut StepHealth,
        cache: &mut SurvivableLossCache,
    ) {
        let layout = Layout::new(self.root.n.into(), self.root.k.into());
        for &block in &wanted {
            let holders = self.nodes.iter().filter(|held| held.replicas.contains(&block));
            let copies = layout.as_ref().map_or(0, |layout| layout.holders(block.into()).count());
            let missing = copies.saturating_sub(holders.count()) as u64;
            health.missing += missing;
            health.missing_bytes += missing * self.cut.block_len(block);
        }
        let share = |held: &StripeSurvey| {
            NodeShare { blocks: held.replicas.clone(), pieces: Vec::new() }
        };
        let shares = self.nodes.iter().map(share);
        health.limit_losses(cache.survivable_losses(wanted, None, shares.collect()));
    }

    fn add_pieces(
        &self,
        wanted: Vec<u8>,
        code: &Code,
        attempt: Attempt,
        health: &mut StepHealth,
        cache: &mut SurvivableLossCache,
    ) {
        let past_end: Vec<u8> = match code {
            // In the classical code a replica is the systematic piece of the same number, and a
            // block past the shard's end is known without a file.
            Code::Rs(_) => (0..self.root.k).filter(|block| !wanted.contains(block)).collect(),
            Code::Chain(_) => Vec::new(),
        };
        let pieces_of = |held: &StripeSurvey| -> Vec<u8> {
            let of_attempt = held.pieces.iter().filter(|(_, of)| *of == attempt);
            let mut pieces: Vec<u8> = of_attempt.map(|(piece, _)| *piece).collect();
            if matches!(code, Code::Rs(_)) {
                pieces.extend(&held.replicas);
            }
            pieces
        };
        let mut present: BTreeSet<u8> = past_end.iter().copied().collect();
        let shares: Vec<NodeShare> = self
            .nodes
            .iter()
            .map(|held| {
                let mut pieces = pieces_of(held);
                present.extend(&pieces);
                if !pieces.is_empty() {
                    pieces.extend(&past_end);
                }
                NodeShare { blocks: Vec::new(), pieces }
            })
            .collect();
        let missing = (0..self.root.n).filter(|piece| !present.contains(piece)).count() as u64;
        health.missing += missing;
        health.missing_bytes += missing * self.cut.block_bytes;
        let with_receipt =
            self.nodes.iter().filter(|held| held.receipts.contains(&attempt)).count();
        let with_file = present.len() - past_end.len();
        health.records += with_file.saturating_sub(with_receipt) as u64;
        let survives = cache.survivable_losses(wanted, Some(code), shares);
        health.is_urgent |= survives == Some(0);
        health.limit_losses(survives);
    }
}
