//! Reading while no catalogue answers: what is committed is found by its commit marks on the nodes (docs/semantics.md, 6).
//!
//! Nothing is changed and nothing is remembered beyond a moment. The rule is that of a rebuild: all storage nodes but so few are read that
//! every committed save, and every removal, has left a record on one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use futures_util::stream;

use super::Node;
use super::census::node_address;
use super::failure::failure;
use super::gateway::SHARDS_PER_PAGE as SHARDS_SHOWN;
use super::hosting::tolerated;
use super::marks::marked_save;
use super::rebuild::been_here;
use crate::catalogue::evidence::{Committed, SaveEvidence, Verdict};
use crate::clock::deadline;
use crate::format::records::{Node as NodeRecord, ShardState};
use crate::id::{Generation, Job, NodeId, SaveId, Step};
use crate::kind::Kind;
use crate::net::call::address;
use crate::store::StoreError;
use crate::wire::Failure;
use crate::wire::calls::{
    Buried, GetState, List, ListAnswer, Marked, MarkedAnswer, MarkedSave, NodeView, ShardHolding,
    Show, ShowAnswer, StepView,
};

/// So long a look at the nodes is used again, and the catalogue is not asked again.
const LOOK_LASTS: Duration = Duration::from_secs(5);
/// A catalogue that does not answer a reader within this is looked for no longer.
const CATALOGUE_LIMIT: Duration = Duration::from_secs(3);
/// One page of marks comes within this.
const PAGE_LIMIT: Duration = Duration::from_secs(20);
/// Shards that are looked at for a page of marks.
const SHARDS_PER_PAGE: usize = 256;
/// Saves in a page of steps, and saves that are asked about at once.
const SAVES_PER_PAGE: usize = 256;
/// Committed steps that are found by marks; with more, the catalogue must be made again first.
const MAX_STEPS: usize = 16_384;
/// Shards of a save that is read without a catalogue, likewise: the roots of all are looked at together.
const MAX_SHARDS: u32 = 4096;
/// Nodes that are asked at once what they hold: what they say is in memory until it is put together.
const NODES_AT_ONCE: usize = 4;

type Saves = BTreeMap<SaveId, MarkedSave>;

/// What was seen of the nodes, and of the save that was looked at last.
#[derive(Default)]
pub(super) struct Away {
    /// No catalogue answered the last time that this node wanted something of it: whoever reads need not wait for the same.
    is_unheard: AtomicBool,
    look: Mutex<Option<(Duration, Arc<Look>)>>,
    /// Held by whoever looks; the others wait for what it finds.
    looking: tokio::sync::Mutex<()>,
    save: Mutex<Option<(Arc<Look>, Arc<Committed>)>>,
}

/// The nodes at one moment, and the committed steps that they have marks of.
struct Look {
    nodes: Vec<NodeView>,
    storage: Vec<NodeRecord>,
    /// Storage nodes whose marks are known, and how many others there may be.
    heard: Vec<NodeRecord>,
    may_miss: usize,
    steps: BTreeMap<(Job, Step), MarkedSave>,
}

impl Look {
    /// Refuses when something that was committed, or removed, could be known to none of `heard`.
    fn enough(&self, heard: &[NodeRecord]) -> Result<(), Failure> {
        if self.storage.is_empty() {
            let text =
                "no catalogue answers, and this daemon knows no storage node: ask another one";
            return Err(failure(Kind::Unavailable, text));
        }
        let is_heard = |node: &&NodeRecord| heard.iter().any(|other| other.name == node.name);
        let missing = self.storage.iter().filter(|node| !is_heard(node));
        let missing: Vec<&str> = missing.map(|node| node.name.as_str()).collect();
        if missing.len() <= self.may_miss {
            return Ok(());
        }
        let text = format!(
            "no catalogue answers, and {} of {} storage nodes do not either: at most {} may be missing to find what is committed by its marks. Start {}",
            missing.len(),
            self.storage.len(),
            self.may_miss,
            missing.join(", ")
        );
        Err(failure(Kind::Unavailable, text))
    }
}

impl Away {
    /// Notes whether a catalogue answers.
    pub(super) fn heard(&self, answers: bool) {
        self.is_unheard.store(!answers, Ordering::Relaxed);
        if answers {
            *self.look.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

impl Node {
    /// What the catalogue says; `None` when none answers, now or a moment ago.
    pub(super) async fn unless_away<T>(
        &self,
        known: impl Future<Output = Result<T, Failure>>,
    ) -> Option<Result<T, Failure>> {
        if self.hosted_catalogue().is_some() {
            return Some(known.await);
        }
        if self.away.is_unheard.load(Ordering::Relaxed) || self.last_look().is_some() {
            return None;
        }
        let known = deadline(&*self.clock, CATALOGUE_LIMIT, known).await.ok()?;
        let is_away = known.as_ref().is_err_and(|error| error.kind == Kind::Unavailable);
        (!is_away).then_some(known)
    }

    fn last_look(&self) -> Option<Arc<Look>> {
        let look = self.away.look.lock().unwrap_or_else(PoisonError::into_inner);
        let is_fresh = |at: &Duration| self.clock.now() < at.saturating_add(LOOK_LASTS);
        look.as_ref().filter(|(at, _)| is_fresh(at)).map(|(_, look)| look.clone())
    }

    /// Committed steps, in order.
    pub(super) async fn list_away(&self, call: List) -> Result<ListAnswer, Failure> {
        let look = self.look_around().await?;
        let is_wanted = |job: &Job| call.job.as_ref().is_none_or(|wanted| wanted == job);
        let is_behind = |key: &(Job, Step)| call.after.as_ref().is_none_or(|after| key > after);
        let found = look.steps.iter().filter(|(key, _)| is_wanted(&key.0) && is_behind(key));
        let steps: Vec<StepView> =
            found.take(SAVES_PER_PAGE).map(|(_, marked)| view(marked)).collect();
        let last = steps.last().filter(|_| steps.len() == SAVES_PER_PAGE);
        let next = last.map(|last| (last.job.clone(), last.step));
        Ok(ListAnswer { steps, next })
    }

    /// A page of one committed step.
    pub(super) async fn show_away(&self, call: Show) -> Result<ShowAnswer, Failure> {
        let look = self.look_around().await?;
        let marked = match call.step {
            Some(step) => look.steps.get(&(call.job.clone(), step)),
            None => {
                let of_job =
                    (call.job.clone(), Step(u64::MIN))..=(call.job.clone(), Step(u64::MAX));
                look.steps.range(of_job).next_back().map(|(_, marked)| marked)
            }
        };
        let Some(marked) = marked else {
            let text = format!("no node has a commit mark of that step of {}", call.job);
            return Err(failure(Kind::NotFound, text));
        };
        let committed = self.committed(&look, marked.saved.save).await?;
        let page = committed.shards.iter().skip(call.first_shard as usize);
        let shards = page
            .take(SHARDS_SHOWN)
            .map(|shard| (shard.root.clone(), Some(shard.state.clone())))
            .collect();
        Ok(ShowAnswer { step: view(marked), shards })
    }

    /// The state of a shard, as the receipts tell it.
    pub(super) async fn state_away(&self, call: GetState) -> Result<Option<ShardState>, Failure> {
        let look = self.look_around().await?;
        let committed = self.committed(&look, call.shard.save()).await?;
        let shard = committed.shards.iter().find(|shard| shard.root.shard == call.shard);
        Ok(shard.map(|shard| shard.state.clone()))
    }

    /// The nodes that are known here, and which of them answer.
    pub(super) async fn nodes_away(&self) -> Result<Vec<NodeView>, Failure> {
        Ok(self.look_around().await?.nodes.clone())
    }

    async fn look_around(&self) -> Result<Arc<Look>, Failure> {
        if let Some(look) = self.last_look() {
            return Ok(look);
        }
        let _alone = self.away.looking.lock().await;
        if let Some(look) = self.last_look() {
            return Ok(look);
        }
        let look = Arc::new(self.look_anew().await?);
        let steps = look.steps.len();
        tracing::warn!(steps, nodes = look.heard.len(), "no catalogue answers: reading by marks");
        let mut last = self.away.look.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some((self.clock.now(), look.clone()));
        Ok(look)
    }

    async fn look_anew(&self) -> Result<Look, Failure> {
        let (members, hellos) = self.gather_members().await?;
        let heard = been_here(hellos.clone()).into_iter().filter(|node| node.storage);
        let asks: Vec<_> = heard
            .map(|node| async move {
                let saves = self.marked_on(&node).await;
                let saves = saves.inspect_err(|error| {
                    tracing::info!(node = %node.name, %error, "its marks are not known");
                });
                Some((node, saves.ok()?))
            })
            .collect();
        let mut look = Look {
            nodes: Vec::new(),
            storage: members.iter().filter(|node| node.storage).cloned().collect(),
            heard: Vec::new(),
            may_miss: 0,
            steps: BTreeMap::new(),
        };
        let mut marked: Saves = BTreeMap::new();
        let mut answers = stream::iter(asks).buffered(NODES_AT_ONCE);
        while let Some(answer) = answers.next().await {
            let Some((node, saves)) = answer else { continue };
            look.heard.push(node);
            marked.extend(saves);
            if marked.len() > MAX_STEPS {
                return Err(too_many("checkpoints"));
            }
        }
        let codes = marked.values().map(|found| (found.n, found.k));
        look.may_miss = tolerated(codes.chain(self.settings.codes.iter().copied()));
        look.enough(&look.heard)?;
        self.leave_out_buried(&look.heard, &mut marked).await?;
        for found in marked.into_values() {
            let key = (found.job.clone(), found.step);
            let is_newer = |other: &MarkedSave| found.saved.generation > other.saved.generation;
            if look.steps.get(&key).is_none_or(is_newer) {
                look.steps.insert(key, found);
            }
        }
        let live = |node: &NodeRecord| hellos.iter().any(|(other, _)| other.name == node.name);
        look.nodes =
            members.iter().map(|node| NodeView { node: node.clone(), live: live(node) }).collect();
        Ok(look)
    }

    /// All saves that a node has marks of.
    async fn marked_on(&self, node: &NodeRecord) -> Result<Saves, Failure> {
        let (mut saves, mut after) = (Saves::new(), None);
        loop {
            let to = address(&node_address(node));
            let page = self.caller.call_within(&to, &Marked { after }, PAGE_LIMIT).await?;
            saves.extend(page.saves.into_iter().map(|found| (found.saved.save, found)));
            // A page goes on behind the one before; anything else would never end.
            match page.next.filter(|next| after.is_none_or(|after| *next > after)) {
                Some(next) if saves.len() <= MAX_STEPS => after = Some(next),
                Some(_) => return Err(too_many("checkpoints")),
                None => return Ok(saves),
            }
        }
    }

    /// A removal that was reported has left a tombstone, or a grave, on one of the nodes that are heard.
    async fn leave_out_buried(
        &self,
        heard: &[NodeRecord],
        marked: &mut Saves,
    ) -> Result<(), Failure> {
        let all: Vec<SaveId> = marked.keys().copied().collect();
        for saves in all.chunks(SAVES_PER_PAGE) {
            let call = Buried { saves: saves.to_vec() };
            let asks = heard.iter().map(|node| {
                let call = &call;
                async move {
                    let to = address(&node_address(node));
                    self.caller.call_within(&to, call, PAGE_LIMIT).await
                }
            });
            let gone: BTreeSet<SaveId> = try_join_all(asks).await?.into_iter().flatten().collect();
            marked.retain(|save, _| !gone.contains(save));
        }
        Ok(())
    }

    /// The roots and states of a committed save.
    async fn committed(&self, look: &Arc<Look>, save: SaveId) -> Result<Arc<Committed>, Failure> {
        let last = || self.away.save.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, committed)) = &*last()
            && Arc::ptr_eq(of, look)
            && committed.saved.save == save
        {
            return Ok(committed.clone());
        }
        let marked = look.steps.values().find(|marked| marked.saved.save == save);
        if marked.is_some_and(|marked| marked.saved.shards > MAX_SHARDS) {
            return Err(too_many("shards of one checkpoint"));
        }
        let cluster = self.settings.cluster;
        let evidence = Mutex::new(SaveEvidence::default());
        let add = |node: &NodeRecord, held: &ShardHolding| {
            let mut evidence = evidence.lock().unwrap_or_else(PoisonError::into_inner);
            evidence.add(cluster, NodeId::of(&node.name), held);
        };
        let add = &add;
        let asks: Vec<_> = look
            .heard
            .iter()
            .map(|node| async move {
                let read = self.each_holding(node, save, |held| add(node, held)).await;
                read.is_ok().then(|| node.clone())
            })
            .collect();
        let answers: Vec<_> = stream::iter(asks).buffered(NODES_AT_ONCE).collect().await;
        let heard: Vec<NodeRecord> = answers.into_iter().flatten().collect();
        look.enough(&heard)?;
        let evidence = evidence.into_inner().unwrap_or_else(PoisonError::into_inner);
        let committed = match evidence.judge(save, Generation::default()) {
            Verdict::Committed(committed) => Arc::new(*committed),
            Verdict::Orphan(_) => {
                let text = format!("save {save} was removed, or never committed");
                return Err(failure(Kind::NotFound, text));
            }
            Verdict::Incomplete { job, step, why } => {
                let text = format!("{job}/{step} cannot be read without a catalogue: {why}");
                return Err(failure(Kind::Lost, text));
            }
        };
        *last() = Some((look.clone(), committed.clone()));
        Ok(committed)
    }

    /// Saves that this node has a mark of, by shard: one that has several may come more than once.
    pub(super) async fn marked(&self, call: Marked) -> Result<MarkedAnswer, Failure> {
        let cluster = self.settings.cluster;
        self.on_store(move |store| {
            let shards = store.list_shards(call.after, SHARDS_PER_PAGE)?;
            let next = shards.last().copied().filter(|_| shards.len() == SHARDS_PER_PAGE);
            let mut saves: Vec<MarkedSave> = Vec::new();
            for shard in shards {
                if saves.last().is_none_or(|found| found.saved.save != shard.save()) {
                    saves.extend(marked_save(store, cluster, shard)?);
                }
            }
            Ok::<_, StoreError>(MarkedAnswer { saves, next })
        })
        .await
    }

    /// Those of the given saves that this node has removed, or is to.
    pub(super) async fn buried(&self, call: Buried) -> Result<Vec<SaveId>, Failure> {
        if call.saves.len() > SAVES_PER_PAGE {
            let text = format!(
                "{} saves are asked about, at most {SAVES_PER_PAGE} may be",
                call.saves.len()
            );
            return Err(failure(Kind::Invalid, text));
        }
        let mut gone = Vec::new();
        for save in call.saves {
            if self.is_tombstoned(save).await? {
                gone.push(save);
            }
        }
        Ok(gone)
    }
}

fn view(marked: &MarkedSave) -> StepView {
    StepView {
        job: marked.job.clone(),
        step: marked.step,
        saved: marked.saved.clone(),
        by_marks: true,
    }
}

fn too_many(what: &str) -> Failure {
    let text = format!(
        "no catalogue answers, and there are too many {what} to find them by their marks: start its daemon, or `rapidraid catalogue rebuild`"
    );
    failure(Kind::Unavailable, text)
}
