//! Reads while no catalogue answers: committed saves are found by their commit marks on the nodes
//! (docs/semantics.md, 6).
//!
//! Nothing is changed, and results are cached for a short time only. Enough storage nodes are read
//! to include, for every committed save and every removal, a node that has a record of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::error::GatewayError;
use super::mark_snapshot::{CachedSnapshot, Cursor, Freshness, MarkSnapshot, SnapshotCache};
use super::page_limits::{SAVES_PER_PAGE, SHARDS_SHOWN};
use crate::catalogue::record_access::checkpoint_key;
use crate::catalogue::save_evidence::{Committed, SaveEvidence, Verdict};
use crate::clock::deadline;
use crate::format::records::{Node as NodeRecord, RingChanges, Saved, ShardState, Standing};
use crate::id::{Generation, NodeId, PeerName, SaveId};
use crate::kind::ErrorKind;
use crate::net::call::address;
use crate::node::catalogue_server::cluster_inventory::InventoryReader;
use crate::node::catalogue_server::membership::Membership;
use crate::node::context::NodeContext;
use crate::node::quorum::{Quorum, keep_nodes_with_seen_epoch};
use crate::node::standings::{fetch_standings, is_unknown_call};
use crate::node::storage::fencing::Fencing;
use crate::wire::calls::{
    FindRemovedSaves, GetShardState, ListDamagedMarks, ListMarkedSaves, ListSteps, ListStepsAnswer,
    MarkedSave, NodeView, ShardHolding, ShowStep, ShowStepAnswer, StandingAnswer, StepView,
};
use crate::wire::{NodeAddress, RemoteError};

/// How long the collected evidence of a save is cached. A large save takes long to collect and is
/// shown in many pages.
const SAVE_LASTS: Duration = Duration::from_secs(60);
/// How long a reader waits for a catalogue to answer the probe.
const CATALOGUE_LIMIT: Duration = Duration::from_secs(3);
/// How long after a failed probe no other probe is made.
const PROBE_PAUSE: Duration = Duration::from_secs(5);
/// The key that is read to find out whether a catalogue answers. No catalogue has it.
const PROBE: &str = "probe";
/// Time limit for one page of marks.
const PAGE_LIMIT: Duration = Duration::from_secs(20);
/// Maximum number of saves with good marks that are read, replaced and removed ones included. With
/// more, the catalogue must be rebuilt first.
const MAX_STEPS: usize = 16_384;
/// Maximum number of shards of a save that is read without a catalogue: the roots of all are in
/// memory together.
const MAX_SHARDS: u32 = 4096;
/// Maximum number of nodes read at once. Their answers are in memory until they are merged.
const NODES_AT_ONCE: usize = 4;

/// Maximum number of times that the marks are read while steps are being removed.
const MARK_READS: usize = 4;

/// The saves that have a good mark on some node, by id.
type MarkedSaves = BTreeMap<SaveId, MarkedSave>;
/// The saves of which only damaged marks were seen, with the nodes that have those.
type DamagedMarks = BTreeMap<SaveId, BTreeSet<PeerName>>;

/// A collected save, and the time at which its collection began.
struct CollectedSave {
    started_at: Duration,
    committed: Arc<Committed>,
}

/// The service that answers reads while no catalogue answers.
pub(in crate::node) struct OutageReader {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    membership: Arc<Membership>,
    inventory_reader: Arc<InventoryReader>,
    snapshots: SnapshotCache,
    /// The time at which the last probe failed, and the number of times that a catalogue had
    /// answered by then.
    failed_probe: Mutex<Option<(Duration, u64)>>,
    collected_save: tokio::sync::Mutex<Option<CollectedSave>>,
}

impl OutageReader {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        membership: Arc<Membership>,
        inventory_reader: Arc<InventoryReader>,
    ) -> Self {
        Self {
            context,
            fencing,
            membership,
            inventory_reader,
            snapshots: SnapshotCache::default(),
            failed_probe: Mutex::default(),
            collected_save: tokio::sync::Mutex::default(),
        }
    }

    /// Runs `catalogue_read` if a catalogue answers. Returns its result. Returns `None` if no
    /// catalogue answers; if none answered the last registration or a recent probe, returns `None`
    /// without asking.
    pub(in crate::node) async fn read_if_catalogue_answers<T>(
        &self,
        catalogue_read: impl Future<Output = Result<T, RemoteError>>,
    ) -> Option<Result<T, RemoteError>> {
        if self.context.local_catalogue().is_some() {
            return Some(catalogue_read.await);
        }
        let contact = &self.context.catalogue_contact;
        if contact.is_silent() || self.has_probe_failed_recently() {
            return None;
        }
        // A short probe finds out whether a catalogue answers; the read itself may take its time.
        let catalogue = self.context.catalogue();
        let probe = catalogue.get(PROBE);
        let answers = deadline(&*self.context.clock, CATALOGUE_LIMIT, probe).await;
        if !answers.is_ok_and(|answer| answer.is_ok()) {
            let failed = Some((self.context.clock.now(), contact.answers()));
            *self.failed_probe.lock().unwrap_or_else(PoisonError::into_inner) = failed;
            return None;
        }
        let known = catalogue_read.await;
        if known.as_ref().is_err_and(|error| error.kind == ErrorKind::Unavailable) {
            return None;
        }
        // This keeps older snapshots of the nodes from serving further pages.
        contact.record_answer();
        Some(known)
    }

    /// Returns whether a probe has failed in the last seconds and no catalogue has answered since.
    fn has_probe_failed_recently(&self) -> bool {
        let failed = *self.failed_probe.lock().unwrap_or_else(PoisonError::into_inner);
        failed.is_some_and(|(at, answers)| {
            self.context.clock.now() < at.saturating_add(PROBE_PAUSE)
                && answers == self.context.catalogue_contact.answers()
        })
    }

    /// Returns the result of the last collection if it is recent enough.
    fn cached_snapshot(
        &self,
        freshness: &Freshness,
    ) -> Option<Result<Arc<MarkSnapshot>, RemoteError>> {
        let answers = self.context.catalogue_contact.answers();
        self.snapshots.get(freshness, self.context.clock.now(), answers)
    }

    /// Returns a page of the committed steps, in order.
    pub(super) async fn list_steps_by_marks(
        self: &Arc<Self>,
        call: ListSteps,
        asked_at: Duration,
    ) -> Result<ListStepsAnswer, RemoteError> {
        let after = call.after.map(|(job, step)| checkpoint_key(job.at(step)));
        let cursor = after.clone().map(Cursor::Steps);
        let look = self.get_or_take_snapshot(Freshness { asked_at, cursor }).await?;
        let is_wanted =
            |found: &MarkedSave| call.job.as_ref().is_none_or(|wanted| *wanted == found.job);
        let behind =
            look.steps.iter().filter(|(key, _)| after.as_ref().is_none_or(|after| *key > after));
        let found = behind.map(|(_, found)| found).filter(|found| is_wanted(found));
        let steps: Vec<StepView> = found.take(SAVES_PER_PAGE).map(step_view_of_mark).collect();
        let last = steps.last().filter(|_| steps.len() == SAVES_PER_PAGE);
        let next = last.map(|last| (last.job.clone(), last.step));
        if let Some((job, step)) = &next {
            self.snapshots.add_cursor(&look, Cursor::Steps(checkpoint_key(job.at(*step))));
        }
        Ok(ListStepsAnswer { steps, next })
    }

    /// Returns a committed step with a page of its shards.
    pub(super) async fn show_step_by_marks(
        self: &Arc<Self>,
        call: ShowStep,
        asked_at: Duration,
    ) -> Result<ShowStepAnswer, RemoteError> {
        let is_first_page = call.first_shard == 0;
        let step = call.step.filter(|_| !is_first_page);
        let cursor = step.map(|step| Cursor::Shards(checkpoint_key(call.job.at(step))));
        let look = self.get_or_take_snapshot(Freshness { asked_at, cursor }).await?;
        let marked = match call.step {
            Some(step) => look.steps.get(&checkpoint_key(call.job.at(step))),
            None => look.steps.values().rfind(|found| found.job == call.job),
        };
        let Some(marked) = marked else {
            return Err(GatewayError::StepNotMarked { job: call.job.clone() }.into());
        };
        let after = self.context.clock.now().saturating_sub(SAVE_LASTS);
        let committed = self.get_or_read_committed(&look, marked, after).await?;
        let page = committed.shards.iter().skip(call.first_shard as usize);
        let shards = page
            .take(SHARDS_SHOWN)
            .map(|shard| (shard.root.clone(), Some(shard.state.clone())))
            .collect();
        let key = checkpoint_key(marked.job.at(marked.step));
        self.snapshots.add_cursor(&look, Cursor::Shards(key));
        Ok(ShowStepAnswer { step: step_view_of_mark(marked), shards })
    }

    /// Returns the state of a shard according to the receipts, or `None` if its save is not
    /// committed. The caller found no way to read in the state that it knew, so evidence collected
    /// before this call is not used: it could give the same state.
    pub(in crate::node) async fn read_shard_state_from_receipts(
        self: &Arc<Self>,
        call: GetShardState,
    ) -> Result<Option<ShardState>, RemoteError> {
        let asked_at = self.context.clock.now();
        let save = call.shard.save();
        let look = self.get_or_take_snapshot(Freshness { asked_at, cursor: None }).await?;
        let marked = look.steps.values().find(|marked| marked.saved.save == save);
        let Some(marked) = marked else { return Ok(None) };
        let committed = self.get_or_read_committed(&look, marked, asked_at).await?;
        let shard = committed.shards.iter().find(|shard| shard.root.shard == call.shard);
        Ok(shard.map(|shard| shard.state.clone()))
    }

    /// Returns the members that this node and the nodes it reaches know. A member is live if it
    /// answers.
    pub(in crate::node) async fn list_members_with_liveness(
        self: &Arc<Self>,
    ) -> Result<Vec<NodeView>, RemoteError> {
        let (members, hellos) = self.membership.discover_members().await?;
        let live = |node: &NodeRecord| hellos.iter().any(|(other, _)| other.name == node.name);
        Ok(members.into_iter().map(|node| NodeView { live: live(&node), node }).collect())
    }

    /// Returns the ring changes that this node stores, and those that it has heard of from other
    /// nodes.
    pub(in crate::node) async fn list_stored_and_heard_ring_changes(
        &self,
    ) -> Result<RingChanges, RemoteError> {
        self.membership.list_stored_and_heard_ring_changes().await
    }

    /// Returns the cached snapshot if it is recent enough, or takes a new one. The work runs in a
    /// task of its own, so that the other waiting calls get its result even if this call is
    /// cancelled.
    async fn get_or_take_snapshot(
        self: &Arc<Self>,
        freshness: Freshness,
    ) -> Result<Arc<MarkSnapshot>, RemoteError> {
        if let Some(result) = self.cached_snapshot(&freshness) {
            return result;
        }
        let reader = self.clone();
        let work = self.context.tasks.spawn(async move {
            let _alone = reader.snapshots.collecting.lock().await;
            if let Some(result) = reader.cached_snapshot(&freshness) {
                return result;
            }
            let started_at = reader.context.clock.now();
            let catalogue_answers = reader.context.catalogue_contact.answers();
            let result = reader.collect_mark_snapshot().await.map(Arc::new);
            if let Ok(look) = &result {
                let (steps, nodes) = (look.steps.len(), look.heard.len());
                tracing::warn!(steps, nodes, "no catalogue answers: reading by commit marks");
            }
            reader.snapshots.put(CachedSnapshot {
                started_at,
                ended_at: reader.context.clock.now(),
                catalogue_answers,
                result: result.clone(),
                cursors: BTreeSet::new(),
            });
            result
        });
        work.await.map_err(|_| GatewayError::ReadInterrupted)?
    }

    /// Reads the marks of all known storage nodes. Returns the committed steps.
    ///
    /// # Errors
    /// [`GatewayError::NoQuorum`] or [`GatewayError::MarkDamaged`] if too few nodes were read;
    /// [`GatewayError::NoKnownStorageNode`] if this node knows no storage node.
    async fn collect_mark_snapshot(&self) -> Result<MarkSnapshot, RemoteError> {
        let (members, hellos) = self.membership.discover_members().await?;
        let storage = hellos.iter().map(|(node, _)| node.clone()).filter(|node| node.storage);
        let mut standings = fetch_standings(&self.context, &storage.collect::<Vec<_>>()).await;
        // An empty node proves nothing. It reports that it is behind, unless its program is too old
        // to report a standing. Then it is recognised here: it has seen no epoch.
        let been_here = keep_nodes_with_seen_epoch(hellos.clone());
        standings.retain(|(node, answer)| {
            answer.standing != Standing::Unknown
                || been_here.iter().any(|other| other.name == node.name)
        });
        let mut look = MarkSnapshot {
            heard: standings.iter().map(|(node, _)| node.clone()).collect(),
            quorum: Quorum::new(&members, &standings),
            steps: BTreeMap::new(),
        };
        if look.quorum.has_no_storage_nodes() {
            return Err(GatewayError::NoKnownStorageNode.into());
        }
        let (marked, damaged) = self.read_unremoved_marks(&mut look).await?;
        // A node whose disk was emptied meanwhile may have answered with no marks.
        let after = fetch_standings(&self.context, &look.heard).await;
        let standing = |answers: &[(NodeRecord, StandingAnswer)], name: &PeerName| {
            answers.iter().find(|(node, _)| node.name == *name).map(|(_, answer)| answer.standing)
        };
        look.heard.retain(|node| {
            let now = standing(&after, &node.name);
            now.is_some() && now == standing(&standings, &node.name)
        });
        let codes = marked.values().map(|found| (found.n, found.k));
        look.quorum.set_max_missing(codes.chain(self.context.settings.codes.iter().copied()));
        look.check_quorum(&look.heard)?;
        for (save, nodes) in &damaged {
            // If the nodes without the damaged mark are enough, they prove that the save was never
            // committed.
            look.check_quorum_without(&look.heard, nodes).map_err(|too_few| {
                let names: Vec<&str> = nodes.iter().map(PeerName::as_str).collect();
                let (nodes, reason) = (names.join(", "), too_few.to_string());
                GatewayError::MarkDamaged { save: *save, nodes, reason }
            })?;
        }
        for found in marked.into_values() {
            let key = checkpoint_key(found.job.at(found.step));
            let is_newer = |other: &MarkedSave| found.saved.generation > other.saved.generation;
            if look.steps.get(&key).is_none_or(is_newer) {
                look.steps.insert(key, found);
            }
        }
        Ok(look)
    }

    /// Reads the marks of all nodes in `snapshot.heard`, and removes from `snapshot.heard` the
    /// nodes that do not return all of their marks. Returns the marked saves that no node has
    /// recorded as removed, and the saves of which only damaged marks were seen.
    async fn read_unremoved_marks(
        &self,
        snapshot: &mut MarkSnapshot,
    ) -> Result<(MarkedSaves, DamagedMarks), RemoteError> {
        let mut removed = BTreeSet::new();
        for _ in 0..MARK_READS {
            let asks: Vec<_> = std::mem::take(&mut snapshot.heard)
                .into_iter()
                .map(|node| async move {
                    let saves = self.fetch_marks_of_node(&node).await;
                    let saves = saves.inspect_err(|error| {
                        tracing::info!(node = %node.name, %error, "cannot read the commit marks of this node");
                    });
                    Some((node, saves.ok()?))
                })
                .collect();
            let (mut marked, mut damaged): (MarkedSaves, DamagedMarks) = Default::default();
            let mut answers = stream::iter(asks).buffered(NODES_AT_ONCE);
            while let Some(answer) = answers.next().await {
                let Some((node, (saves, unread))) = answer else { continue };
                for save in unread {
                    damaged.entry(save).or_default().insert(node.name.clone());
                }
                snapshot.heard.push(node);
                marked.extend(saves);
                if marked.len() > MAX_STEPS {
                    return Err(GatewayError::TooManyCheckpoints.into());
                }
            }
            drop(answers);
            damaged.retain(|save, _| !marked.contains_key(save));
            let known = removed.len();
            removed.extend(self.fetch_removed_among_marked(snapshot, &marked, &damaged).await);
            // If a step was replaced meanwhile, its new mark may be on a node that was read before.
            // If this round found a further removal, all marks are read again.
            if removed.len() == known {
                marked.retain(|save, _| !removed.contains(save));
                damaged.retain(|save, _| !removed.contains(save));
                return Ok((marked, damaged));
            }
        }
        Err(GatewayError::RemovalsUnderWay.into())
    }

    /// Returns the saves that `node` has good marks of, and those of which it has damaged marks
    /// only.
    async fn fetch_marks_of_node(
        &self,
        node: &NodeRecord,
    ) -> Result<(MarkedSaves, Vec<SaveId>), RemoteError> {
        let (mut saves, mut after) = (MarkedSaves::new(), None);
        let to = address(&NodeAddress::of(node));
        let damaged =
            match self.context.caller.call_within(&to, &ListDamagedMarks {}, PAGE_LIMIT).await {
                Err(error) if is_unknown_call(&error) => Vec::new(),
                damaged => damaged?,
            };
        loop {
            let page = self
                .context
                .caller
                .call_within(&to, &ListMarkedSaves { after }, PAGE_LIMIT)
                .await?;
            saves.extend(page.saves.into_iter().map(|found| (found.saved.save, found)));
            // Every page must continue after the one before; otherwise the loop would never end.
            match page.next.filter(|next| after.is_none_or(|after| *next > after)) {
                Some(next) if saves.len() <= MAX_STEPS => after = Some(next),
                Some(_) => return Err(GatewayError::TooManyCheckpoints.into()),
                None => return Ok((saves, damaged)),
            }
        }
    }

    /// Returns which of the marked saves some node has recorded as removed. A removal that was
    /// confirmed to its caller has left a tombstone or a removed-save entry on at least one of the
    /// nodes that were heard. A node that does not answer is removed from `snapshot.heard`.
    async fn fetch_removed_among_marked(
        &self,
        snapshot: &mut MarkSnapshot,
        marked: &MarkedSaves,
        damaged: &DamagedMarks,
    ) -> Vec<SaveId> {
        let all: Vec<SaveId> = marked.keys().chain(damaged.keys()).copied().collect();
        let asks: Vec<_> = std::mem::take(&mut snapshot.heard)
            .into_iter()
            .map(|node| {
                let all = &all;
                async move {
                    let to = address(&NodeAddress::of(&node));
                    let mut gone = Vec::new();
                    for saves in all.chunks(SAVES_PER_PAGE) {
                        let call = FindRemovedSaves { saves: saves.to_vec() };
                        gone.extend(
                            self.context.caller.call_within(&to, &call, PAGE_LIMIT).await.ok()?,
                        );
                    }
                    Some((node, gone))
                }
            })
            .collect();
        let mut removed = Vec::new();
        let mut answers = stream::iter(asks).buffered(NODES_AT_ONCE);
        while let Some(answer) = answers.next().await {
            let Some((node, gone)) = answer else { continue };
            snapshot.heard.push(node);
            removed.extend(gone);
        }
        removed
    }

    /// Returns the roots and states of a committed save, collected from the nodes after the time
    /// `min_collected_at`.
    async fn get_or_read_committed(
        self: &Arc<Self>,
        snapshot: &Arc<MarkSnapshot>,
        marked: &MarkedSave,
        min_collected_at: Duration,
    ) -> Result<Arc<Committed>, RemoteError> {
        let (node, look, saved) = (self.clone(), snapshot.clone(), marked.saved.clone());
        let work = self.context.tasks.spawn(async move {
            let mut last = node.collected_save.lock().await;
            if let Some(CollectedSave { started_at: at, committed }) = &*last
                && *at > min_collected_at
                && committed.saved == saved
            {
                return Ok(committed.clone());
            }
            let at = node.context.clock.now();
            let committed = Arc::new(node.read_committed_save(&look, &saved).await?);
            *last = Some(CollectedSave { started_at: at, committed: committed.clone() });
            Ok(committed)
        });
        work.await.map_err(|_| GatewayError::ReadInterrupted)?
    }

    /// Collects the roots and states of a committed save from the nodes.
    ///
    /// # Errors
    /// [`GatewayError::NoQuorum`] if too few nodes answer; [`GatewayError::TooManyShards`] if the
    /// save has too many shards; [`GatewayError::SaveNotCommitted`] if it was removed or never
    /// committed; [`GatewayError::EvidenceIncomplete`] if the evidence is incomplete.
    async fn read_committed_save(
        &self,
        snapshot: &MarkSnapshot,
        saved: &Saved,
    ) -> Result<Committed, RemoteError> {
        let save = saved.save;
        if saved.shards > MAX_SHARDS {
            return Err(GatewayError::TooManyShards.into());
        }
        let cluster = self.context.settings.cluster;
        let evidence = Mutex::new(SaveEvidence::default());
        let add = |node: &NodeRecord, held: &ShardHolding| {
            let mut evidence = evidence.lock().unwrap_or_else(PoisonError::into_inner);
            evidence.add_holdings(cluster, NodeId::of(&node.name), held);
        };
        let add = &add;
        let asks: Vec<_> = snapshot
            .heard
            .iter()
            .map(|node| async move {
                let read = self
                    .inventory_reader
                    .for_each_holding(node, save, |held| add(node, held))
                    .await;
                read.is_ok().then(|| node.clone())
            })
            .collect();
        let answers: Vec<_> = stream::iter(asks).buffered(NODES_AT_ONCE).collect().await;
        let heard: Vec<NodeRecord> = answers.into_iter().flatten().collect();
        snapshot.check_quorum(&heard)?;
        let evidence = evidence.into_inner().unwrap_or_else(PoisonError::into_inner);
        match evidence.judge(save, Generation::default()) {
            Verdict::Committed(committed) => Ok(*committed),
            Verdict::Orphan(_) | Verdict::Removing { .. } => {
                Err(GatewayError::SaveNotCommitted { save }.into())
            }
            Verdict::Incomplete { job, step, why: reason, .. } => {
                Err(GatewayError::EvidenceIncomplete { job, step, reason }.into())
            }
        }
    }

    /// Returns the given saves of which this node has a tombstone or a removed-save entry.
    pub(in crate::node) async fn find_removed_saves(
        &self,
        call: FindRemovedSaves,
    ) -> Result<Vec<SaveId>, RemoteError> {
        if call.saves.len() > SAVES_PER_PAGE {
            return Err(GatewayError::TooManySaves { saves: call.saves.len() }.into());
        }
        let mut gone = Vec::new();
        for save in call.saves {
            if self.fencing.is_removed_save(save).await? {
                gone.push(save);
            }
        }
        Ok(gone)
    }
}

fn step_view_of_mark(marked: &MarkedSave) -> StepView {
    StepView {
        job: marked.job.clone(),
        step: marked.step,
        saved: marked.saved.clone(),
        by_marks: true,
    }
}
