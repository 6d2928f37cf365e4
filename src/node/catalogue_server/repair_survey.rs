//! The survey of a committed step: it finds the missing parts from the lists of its nodes, and
//! reads no file (docs/semantics.md, 11).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use crate::catalogue::CatalogueError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    parse_record, read_record, shard_roots_prefix, shard_state_key,
};
use crate::code::{Code, Layout, NodeShare, SurvivableLossCache, table};
use crate::format::geometry::{Geometry, StripeCut};
use crate::format::records::{ShardRoot, ShardState, StripeState};
use crate::id::{Attempt, NodeId, SaveId, ShardId};
use crate::net::call::address;
use crate::node::context::NodeContext;
use crate::pipeline::coordinator::StripesByShard;
use crate::topology::Directory;
use crate::wire::calls::{STRIPES_PER_SURVEY, ShardSurvey, StripeSurvey, SurveyShard};

/// Time limit for a node to say what it has of a page of stripes.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// The number of missing parts of a step, and the number of node losses that it survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) struct StepHealth {
    /// Number of nodes that may be lost, whichever they are; `None` if a stripe cannot be read, or
    /// if no node has the leaves of a shard or the record of a stripe.
    pub(in crate::node) survives: Option<u32>,
    /// Whether an archived stripe can still be read, but survives no further loss.
    pub(in crate::node) has_urgent_stripe: bool,
    /// Number of pieces and replicas that are missing.
    pub(in crate::node) missing: u64,
    /// Number of bytes of these pieces and replicas.
    pub(in crate::node) missing_bytes: u64,
    /// Number of records that nodes lack.
    pub(in crate::node) records: u64,
    /// Number of surplus copies: pieces of archived stripes that another storage node has, too.
    pub(in crate::node) surplus: u64,
}

impl StepHealth {
    /// The health of a step of which nothing has been surveyed.
    const WHOLE: StepHealth = StepHealth {
        survives: Some(u32::MAX),
        has_urgent_stripe: false,
        missing: 0,
        missing_bytes: 0,
        records: 0,
        surplus: 0,
    };

    /// Returns whether anything is missing.
    pub(in crate::node) fn is_degraded(&self) -> bool {
        self.missing > 0 || self.records > 0
    }

    /// Returns whether the step is to be repaired without a grace.
    pub(in crate::node) fn is_urgent(&self) -> bool {
        self.is_degraded() && self.has_urgent_stripe
    }

    /// Returns whether a repair has anything to do: to make missing parts, or to send receipts to
    /// nodes with surplus copies, which drop them then.
    pub(in crate::node) fn needs_repair(&self) -> bool {
        self.is_degraded() || self.surplus > 0
    }

    /// Lowers the number of losses that the step survives to `survives`, the number for one stripe
    /// or record of it, if that is lower.
    fn limit_losses(&mut self, survives: Option<usize>) {
        let survives = survives.map(|losses| u32::try_from(losses).unwrap_or(u32::MAX));
        self.survives = self.survives.min(survives);
    }
}

/// The survey of a step.
#[derive(Debug, Clone)]
pub(in crate::node) struct StepSurvey {
    pub(in crate::node) health: StepHealth,
    /// The stripes of which something is missing, by shard. A shard of which only its own records
    /// are missing is here without stripes.
    pub(in crate::node) stripes: StripesByShard,
    /// The stripes that have surplus copies, by shard.
    pub(in crate::node) with_surplus: StripesByShard,
}

impl StepSurvey {
    /// The survey of a step of which nothing has been surveyed.
    fn new() -> Self {
        let (stripes, with_surplus) = (StripesByShard::new(), StripesByShard::new());
        Self { health: StepHealth::WHOLE, stripes, with_surplus }
    }
}

/// The result of the survey of a step.
#[derive(Debug, Clone)]
pub(in crate::node) enum SurveyOutcome {
    Known(StepSurvey),
    /// The state of a shard changed meanwhile.
    Changing,
    /// The step could not be surveyed, for this reason.
    Unknown(String),
    /// The save was removed.
    Gone,
}

/// Surveys a committed save.
///
/// # Errors
/// If the catalogue does not answer.
pub(in crate::node) async fn survey_save(
    context: &NodeContext,
    save: SaveId,
    directory: &Directory,
    cache: &mut SurvivableLossCache,
) -> Result<SurveyOutcome, CatalogueError> {
    let catalogue = context.catalogue();
    let mut survey = StepSurvey::new();
    let mut roots = KeyScan::of_prefix(&*catalogue, shard_roots_prefix(save));
    let mut is_empty = true;
    while let Some((key, entry)) = roots.next().await? {
        is_empty = false;
        let root = match parse_record::<ShardRoot>(&key, &entry.value) {
            Ok(root) => root,
            Err(error) => return Ok(SurveyOutcome::Unknown(error.to_string())),
        };
        let state_key = shard_state_key(root.shard);
        let read = || read_record::<ShardState>(&*catalogue, &state_key);
        let state = match read().await {
            // One damaged record must not end the survey of all other steps.
            Err(error @ CatalogueError::Record { .. }) => {
                return Ok(SurveyOutcome::Unknown(error.to_string()));
            }
            read => read?,
        };
        let Some((state, _)) = state.filter(|(state, _)| !state.deleting) else {
            return Ok(SurveyOutcome::Gone);
        };
        let mut shard = ShardSurveyor { context, root: Arc::new(root), directory };
        if let Err(why) = shard.survey_stripes(&state, &mut survey, cache).await {
            return Ok(SurveyOutcome::Unknown(why));
        }
        // The answers may belong to a newer state.
        if read().await?.is_none_or(|(now, _)| now.deleting || now.runs != state.runs) {
            return Ok(SurveyOutcome::Changing);
        }
    }
    Ok(if is_empty { SurveyOutcome::Gone } else { SurveyOutcome::Known(survey) })
}

/// The survey of one shard.
struct ShardSurveyor<'a> {
    context: &'a NodeContext,
    root: Arc<ShardRoot>,
    directory: &'a Directory,
}

/// The answer of a node. A node that is to store nothing is a source for readers, and counts as
/// away for everything else.
struct NodeAnswer {
    is_storage: bool,
    /// Whether the node is in the shard's current ring, and should have the shard's records.
    is_member: bool,
    survey: ShardSurvey,
}

impl ShardSurveyor<'_> {
    /// Asks the live nodes of the ring for what they have, and adds what is missing to `survey`.
    ///
    /// # Errors
    /// Returns the reason if one of the nodes did not say what it has, or if the shard's records
    /// contradict each other.
    async fn survey_stripes(
        &mut self,
        state: &ShardState,
        survey: &mut StepSurvey,
        cache: &mut SurvivableLossCache,
    ) -> Result<(), String> {
        let contradiction = || "the records of one of its shards contradict each other".to_owned();
        let geometry = self.root.geometry().map_err(|_| contradiction())?;
        let mut states = (0..geometry.stripes()).zip(state.states());
        for first in (0..geometry.stripes().max(1)).step_by(STRIPES_PER_SURVEY as usize) {
            let answers = self.ask_nodes(first).await?;
            if first == 0 {
                add_shard_records(self.root.shard, &answers, survey);
            }
            let page = states.by_ref().take(STRIPES_PER_SURVEY as usize).collect();
            // The search for survivable losses may take long for wide codes, so it runs on a worker
            // thread.
            let (root, known) = (self.root.clone(), std::mem::replace(survey, StepSurvey::new()));
            let known_losses = std::mem::take(cache);
            let judge = move || judge_page(&root, geometry, page, &answers, known, known_losses);
            let judged = self.context.workers.run(judge).await.map_err(|e| e.to_string())?;
            (*survey, *cache) = judged.ok_or_else(contradiction)?;
        }
        Ok(())
    }

    /// Returns what the live nodes of the ring have of a page of stripes.
    ///
    /// # Errors
    /// Returns the reason if one of the nodes does not say what it has. Fails at once if one of
    /// them left an earlier call with this directory unanswered: it is down or hangs, and each
    /// further call would take its whole time limit.
    async fn ask_nodes(&self, first: u32) -> Result<Vec<NodeAnswer>, String> {
        let directory = self.directory;
        let storage: BTreeSet<NodeId> = directory.storage().into_iter().collect();
        let asked = directory.nodes_to_ask(&self.root);
        let live: Vec<NodeId> = asked.filter(|node| directory.has_lease(*node)).collect();
        if let Some(silent) = live.iter().find(|node| directory.is_silent(**node)) {
            return Err(format!("node {} does not answer", directory.name(*silent)));
        }
        let call = &SurveyShard { shard: self.root.shard, first };
        let ring = directory.current_ring(&self.root);
        let members: BTreeSet<NodeId> = ring.iter().map(|member| member.node).collect();
        let (storage, members) = (&storage, &members);
        let asks = live.into_iter().map(|node| async move {
            let to = directory
                .address(node)
                .ok_or_else(|| format!("no address of node {} is known", directory.name(node)))?;
            let found = self.context.caller.call_within(&address(&to), call, ASK_LIMIT).await;
            let survey = found.map_err(|error| {
                // A node that cannot read one shard can still say what it has of the others.
                if error.is_unanswered() {
                    directory.heard(node, false);
                }
                format!("node {} does not say what it has: {error}", directory.name(node))
            })?;
            let (is_storage, is_member) = (storage.contains(&node), members.contains(&node));
            Ok(NodeAnswer { is_storage, is_member, survey })
        });
        join_all(asks).await.into_iter().collect()
    }
}

fn add_shard_records(shard: ShardId, answers: &[NodeAnswer], survey: &mut StepSurvey) {
    let all_leaves = answers.iter().filter(|answer| answer.survey.has_leaves).count();
    survey.health.limit_losses(all_leaves.checked_sub(1));
    let lacking = |answer: &NodeAnswer| match answer.is_storage && answer.is_member {
        true => u64::from(!answer.survey.has_leaves) + u64::from(!answer.survey.has_mark),
        false => 0,
    };
    let lacking: u64 = answers.iter().map(lacking).sum();
    survey.health.records += lacking;
    if lacking > 0 {
        survey.stripes.entry(shard).or_default();
    }
}

/// Adds what is missing, and what is surplus, of a page of stripes. Returns `None` if a stripe is not
/// one of the shard.
fn judge_page(
    root: &ShardRoot,
    geometry: Geometry,
    page: Vec<(u32, StripeState)>,
    answers: &[NodeAnswer],
    mut survey: StepSurvey,
    mut cache: SurvivableLossCache,
) -> Option<(StepSurvey, SurvivableLossCache)> {
    for (index, state) in page {
        let cut = geometry.stripe(index)?;
        let of_stripe = |answer: &NodeAnswer| {
            let stripes = &answer.survey.stripes;
            let at = stripes.binary_search_by_key(&index, |stripe| stripe.index).ok()?;
            Some((answer.is_storage, stripes.get(at)?.clone()))
        };
        let nodes = answers.iter().filter_map(of_stripe).collect();
        let health = &mut survey.health;
        let before = *health;
        SurveyedStripe { root, cut, state, nodes }.add_to(health, &mut cache);
        if (before.missing, before.records) != (health.missing, health.records) {
            survey.stripes.entry(root.shard).or_default().insert(index);
        }
        if before.surplus != health.surplus {
            survey.with_surplus.entry(root.shard).or_default().insert(index);
        }
    }
    Some((survey, cache))
}

/// A stripe, and what its nodes have of it.
struct SurveyedStripe<'a> {
    root: &'a ShardRoot,
    cut: StripeCut,
    state: StripeState,
    /// The answers of the nodes that have anything of the stripe, each with whether the node is to
    /// store data.
    nodes: Vec<(bool, StripeSurvey)>,
}

impl SurveyedStripe<'_> {
    /// Returns the answers of the nodes that are to store data.
    fn storing(&self) -> impl Iterator<Item = &StripeSurvey> {
        self.nodes.iter().filter(|(is_storage, _)| *is_storage).map(|(_, held)| held)
    }

    /// Adds what is missing, and what is surplus, of the stripe.
    fn add_to(&self, health: &mut StepHealth, cache: &mut SurvivableLossCache) {
        let all_records = self.nodes.iter().filter(|(_, held)| held.has_record).count();
        health.limit_losses(all_records.checked_sub(1));
        // A commit promises the stripe record on this many nodes.
        let promised = usize::from(self.root.n.saturating_sub(self.root.k)) + 1;
        let with_record = self.storing().filter(|held| held.has_record).count();
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
            let copies = self.storing().filter(|held| held.replicas.contains(&block)).count();
            let expected = layout.as_ref().map_or(0, |layout| layout.holders(block.into()).count());
            let missing = expected.saturating_sub(copies) as u64;
            health.missing += missing;
            health.missing_bytes += missing * self.cut.block_len(block);
        }
        let share =
            |held: &StripeSurvey| NodeShare { blocks: held.replicas.clone(), pieces: Vec::new() };
        let shares = self.nodes.iter().map(|(_, held)| share(held));
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
        let is_classical = matches!(code, Code::Rs(_));
        let past_end: Vec<u8> = match is_classical {
            // In the classical code a replica is the systematic piece of the same number, and a
            // block past the shard's end is known without a file.
            true => (0..self.root.k).filter(|block| !wanted.contains(block)).collect(),
            false => Vec::new(),
        };
        let pieces_of = |held: &StripeSurvey| -> BTreeSet<u8> {
            let of_attempt = held.pieces.iter().filter(|(_, of)| *of == attempt);
            let mut pieces: BTreeSet<u8> = of_attempt.map(|(piece, _)| *piece).collect();
            if is_classical {
                pieces.extend(&held.replicas);
            }
            pieces
        };
        let mut present: BTreeSet<u8> = self.storing().flat_map(pieces_of).collect();
        let with_file = present.len();
        // Before the drops are complete, the other replicas of a classical code are copies, too.
        // Without a piece file, the copies of a block are kept replicas: none of them is surplus.
        if matches!(self.state, StripeState::Archived { dropped: true, .. }) {
            let is_file =
                |piece: &&u8| self.storing().any(|held| held.pieces.contains(&(**piece, attempt)));
            for piece in present.iter().filter(is_file) {
                let copies = self.storing().filter(|held| pieces_of(held).contains(piece)).count();
                health.surplus += copies as u64 - 1;
            }
        }
        present.extend(&past_end);
        let missing = (0..self.root.n).filter(|piece| !present.contains(piece)).count() as u64;
        health.missing += missing;
        health.missing_bytes += missing * self.cut.block_bytes;
        let with_receipt = self.storing().filter(|held| held.receipts.contains(&attempt)).count();
        health.records += with_file.saturating_sub(with_receipt) as u64;
        let shares = |has_blocks: bool| -> Vec<NodeShare> {
            let share = |held: &StripeSurvey| {
                let mut pieces: Vec<u8> = pieces_of(held).into_iter().collect();
                if !pieces.is_empty() {
                    pieces.extend(&past_end);
                }
                let blocks = if has_blocks { held.replicas.clone() } else { Vec::new() };
                NodeShare { blocks, pieces }
            };
            self.nodes.iter().map(|(_, held)| share(held)).collect()
        };
        // Replicas of an archived stripe may be dropped at any time. They are taken into account
        // only if the blocks cannot be computed from the pieces alone.
        let survives = cache
            .survivable_losses(wanted.clone(), Some(code), shares(false))
            .or_else(|| cache.survivable_losses(wanted, Some(code), shares(true)));
        health.has_urgent_stripe |= survives == Some(0);
        health.limit_losses(survives);
    }
}
