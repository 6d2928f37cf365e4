//! The repair of a committed step: it takes the shards, several at once, and makes again what nodes
//! have lost of them (docs/semantics.md, 11).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::sync::{Semaphore, mpsc};

use super::archive_request::OWNER_POLL;
use super::error::CoordinatorError;
use super::lease_keeper::LeaseKeeper;
use super::node_loads::NodeLoads;
use super::owned_shard::OwnedShard;
use super::repair_task::{RepairCause, RepairLimits, RepairTask};
use super::stripe_counts::StripeCounts;
use super::stripe_repair::StripeOutcome;
use super::{Coordinator, list_shard_roots};
use crate::catalogue::record_access::{ArchiveRequest, archive_request_key, read_record};
use crate::format::records::{Saved, ShardRoot};
use crate::id::{LeaseId, NodeId, SaveId, StepRef};
use crate::kind::ErrorKind;
use crate::wire::calls::{RepairEvent, RepairMode, RepairOptions, RepairSummary};

/// Number of stripes that a requested repair works on at once unless its options set another
/// number. An automatic repair works on one at a time.
const DEFAULT_PARALLEL: usize = 4;
/// Maximum number of stripes that are repaired at once.
const MAX_PARALLEL: usize = 64;
/// Maximum number of notes about one step that are sent as events. All notes are logged.
const MAX_NOTES: u64 = 1000;

/// The channel for the events of a repair. If no receiver listens, the events are lost and the work
/// continues.
pub type RepairEventSender = mpsc::Sender<RepairEvent>;

/// Work on a shard after which an automatic repair pauses even if it owes no pause.
const WORK_BEFORE_PAUSE: Duration = Duration::from_secs(1);
/// How long a repair waits for an archiving that only completes drops to give a shard back.
const DROPS_WAIT: Duration = Duration::from_secs(600);
/// Longest pause of an automatic repair.
const MAX_PAUSE: Duration = Duration::from_secs(600);
/// Shortest pause of an automatic repair. An archiving or a requested repair that waits for the
/// shard looks at it at least once meanwhile. A shorter pause that is owed is added to the next one.
const MIN_PAUSE: Duration = Duration::from_millis(500);
const _: () = assert!(MIN_PAUSE.as_millis() >= 2 * OWNER_POLL.as_millis());
/// How long a requested repair waits for another repair to give a shard back. An automatic repair
/// does so after each stripe that takes longer than [`WORK_BEFORE_PAUSE`].
const OWNER_WAIT: Duration = Duration::from_secs(180);

/// The owner of a shard that a repair wants to take.
enum ShardOwner {
    /// An archiving of the step that has stripes of the shard to archive.
    Archiving,
    /// An archiving of the step that only completes drops of the shard.
    CompletingDrops,
    /// A repair, or an owner that has just given the shard back.
    Other,
}

/// The repair of one step.
struct StepRepair<'a> {
    coordinator: &'a Coordinator,
    task: RepairTask<'a>,
    saved: Saved,
    lease: LeaseId,
    events: &'a RepairEventSender,
    /// Number of stripes, and of shards, that are repaired at once.
    parallel: usize,
    stripe_slots: Semaphore,
    tally: Mutex<RepairTally>,
}

/// The counts of a repair so far.
#[derive(Default)]
struct RepairTally {
    summary: RepairSummary,
    away: BTreeMap<NodeId, u64>,
    done_bytes: u64,
    total_bytes: u64,
    notes: u64,
    /// The pause that an automatic repair owes.
    owed_pause: Duration,
}

impl Coordinator {
    /// Makes again what nodes have lost of a committed step, or, in a dry run, counts it. Sends
    /// [`RepairEvent::Done`] at the end, also if some stripes could not be repaired.
    ///
    /// # Errors
    /// [`CoordinatorError::NotFound`] if the step is not committed; [`CoordinatorError::Owned`] if a
    /// live coordinator archives or repairs it; [`CoordinatorError::ArchivingRequested`] if the
    /// archiving was asked for meanwhile; [`CoordinatorError::Fenced`] if the step was removed;
    /// [`CoordinatorError::RepairStopped`] if the limits stopped it.
    pub async fn repair_step(
        &self,
        step_ref: StepRef<'_>,
        options: RepairOptions,
        cause: &RepairCause,
        events: &RepairEventSender,
    ) -> Result<(), CoordinatorError> {
        let saved = self.find_committed(step_ref).await?;
        let request = self.find_archive_request(step_ref).await?;
        if let Some((request, _)) = &request
            && request.has_coordinator(&*self.catalogue).await?
            && self.has_unarchived_stripes(saved.save).await?
        {
            let owner = self.fetch_directory().await?.name(request.node);
            return Err(CoordinatorError::Owned { what: step_ref.to_string(), owner });
        }
        let keeper = LeaseKeeper::start(self).await?;
        let request_revision = request.map(|(_, revision)| revision);
        let loads = &NodeLoads::default();
        let task = RepairTask { step_ref, options, cause, loads, request_revision };
        let parallel = match (task.limits(), options.parallel) {
            (Some(_), _) => 1,
            (None, 0) => DEFAULT_PARALLEL,
            (None, some) => usize::from(some).min(MAX_PARALLEL),
        };
        let repair = StepRepair {
            coordinator: self,
            task,
            saved,
            lease: keeper.lease,
            events,
            parallel,
            stripe_slots: Semaphore::new(parallel),
            tally: Mutex::default(),
        };
        let result = repair.repair_shards().await;
        let revoked = self.catalogue.revoke_lease(keeper.lease).await;
        let summary = repair.finish_summary().await;
        result?;
        // The lease ends by itself if it could not be revoked.
        let _ = revoked;
        let _ = events.send(RepairEvent::Done(summary?)).await;
        Ok(())
    }

    /// Returns whether an archiving of this save would make pieces. If not, it would only complete
    /// drops.
    async fn has_unarchived_stripes(&self, save: SaveId) -> Result<bool, CoordinatorError> {
        for root in list_shard_roots(&*self.catalogue, save).await? {
            let counts = self.fetch_stripe_counts(&root).await?;
            if counts.is_some_and(|counts| counts.unarchived > 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn find_archive_request(
        &self,
        step_ref: StepRef<'_>,
    ) -> Result<Option<(ArchiveRequest, u64)>, CoordinatorError> {
        Ok(read_record(&*self.catalogue, &archive_request_key(step_ref)).await?)
    }
}

impl StepRepair<'_> {
    fn lock_tally(&self) -> MutexGuard<'_, RepairTally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn repair_shards(&self) -> Result<(), CoordinatorError> {
        let mut roots = list_shard_roots(&*self.coordinator.catalogue, self.saved.save).await?;
        if let Some(limits) = self.task.limits() {
            roots.retain(|root| limits.stripes.contains_key(&root.shard));
        }
        let mut shards = Vec::new();
        for root in roots {
            let stripes = self.list_stripes(&root)?;
            self.lock_tally().total_bytes += stripes.iter().map(|(_, bytes)| bytes).sum::<u64>();
            shards.push((root, stripes.into_iter().map(|(index, _)| index).collect()));
        }
        self.send_progress().await;
        let mut running = stream::iter(shards)
            .map(|(root, stripes)| self.repair_shard(root, stripes))
            .buffer_unordered(self.parallel);
        while let Some(repaired) = running.next().await {
            repaired?;
        }
        Ok(())
    }

    /// Returns the stripes of a shard that are repaired, each with its length in bytes.
    fn list_stripes(&self, root: &ShardRoot) -> Result<Vec<(u32, u64)>, CoordinatorError> {
        let geometry =
            root.geometry().map_err(|error| CoordinatorError::Format(error.to_string()))?;
        let only = self.task.limits().map(|limits| &limits.stripes);
        let is_repaired = |index: &u32| {
            only.and_then(|only| only.get(&root.shard)).is_none_or(|only| only.contains(index))
        };
        let stripes = (0..geometry.stripes()).filter(is_repaired);
        Ok(stripes.filter_map(|at| Some((at, geometry.stripe(at)?.len_bytes))).collect())
    }

    /// Repairs these stripes of a shard, and then the shard's records. The shard has no owner
    /// during pauses.
    async fn repair_shard(
        &self,
        root: ShardRoot,
        mut stripes: VecDeque<u32>,
    ) -> Result<(), CoordinatorError> {
        let mut lacking = BTreeSet::new();
        loop {
            let shard = self.take_shard(&root).await?;
            let mut result = self.repair_until_pause(&shard, &mut stripes, &mut lacking).await;
            if let Ok(None) = result {
                result = self.repair_records(&shard, &lacking).await.map(|()| None);
            }
            if let Err(error) = shard.release_ownership(self.coordinator).await {
                tracing::info!(shard = %shard.root.name, %error, "a shard was not released: it becomes free when its owner's lease ends");
            }
            match result? {
                None => return Ok(()),
                Some(pause) => self.pause(pause).await,
            }
        }
    }

    /// Takes a shard. Waits for up to [`DROPS_WAIT`] while an archiving completes drops of it, and
    /// for up to [`OWNER_WAIT`], if a person asked for this repair, while another repair has it.
    async fn take_shard(&self, root: &ShardRoot) -> Result<OwnedShard, CoordinatorError> {
        let coordinator = self.coordinator;
        let begun_at = coordinator.clock.now();
        let waits_for_repairs = self.task.limits().is_none() && !self.task.options.is_dry_run();
        loop {
            let taken = OwnedShard::take_ownership(coordinator, root.clone(), self.lease).await;
            if !matches!(taken, Err(CoordinatorError::Owned { .. })) {
                return taken;
            }
            let waited = coordinator.clock.now().saturating_sub(begun_at);
            let limit = match coordinator.find_owner(self.task.step_ref, root).await? {
                ShardOwner::Archiving => Duration::ZERO,
                ShardOwner::CompletingDrops => DROPS_WAIT,
                ShardOwner::Other if waits_for_repairs => OWNER_WAIT,
                ShardOwner::Other => Duration::ZERO,
            };
            if waited >= limit {
                return taken;
            }
            self.task.ensure_not_stopped()?;
            coordinator.clock.sleep(OWNER_POLL).await;
        }
    }

    /// Waits for this time, or until the repair is stopped.
    async fn pause(&self, pause: Duration) {
        let Some(limits) = self.task.limits() else { return };
        tokio::select! {
            () = self.coordinator.clock.sleep(pause) => {}
            () = limits.stop.cancelled() => {}
        }
    }

    /// Repairs stripes from the front of `stripes`, and removes them from it, until a pause is due.
    /// Returns the length of the pause, or `None` if no stripe is left and no pause is due. Adds
    /// the nodes that still lack something to `lacking`.
    async fn repair_until_pause(
        &self,
        shard: &OwnedShard,
        stripes: &mut VecDeque<u32>,
        lacking: &mut BTreeSet<NodeId>,
    ) -> Result<Option<Duration>, CoordinatorError> {
        let (coordinator, task) = (self.coordinator, self.task);
        let mut running = stream::iter(std::iter::from_fn(|| stripes.pop_front()))
            .map(|index| async move {
                // The semaphore is never closed.
                let _slot = self.stripe_slots.acquire().await;
                let begun_at = coordinator.clock.now();
                let outcome = coordinator.repair_stripe(shard, index, task).await;
                (shard.stripe_bytes(index), coordinator.clock.now() - begun_at, outcome)
            })
            .buffer_unordered(self.parallel);
        let mut worked = Duration::ZERO;
        while let Some((bytes, took, outcome)) = running.next().await {
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) if ends_the_repair(&error) => return Err(error),
                Err(error) => {
                    let mut outcome = StripeOutcome::default();
                    outcome.problems.push(error.to_string());
                    // No node is known to have all that it should have.
                    outcome.lacking.extend(coordinator.fetch_nodes_to_ask(shard).await?);
                    outcome
                }
            };
            self.lock_tally().done_bytes += bytes;
            worked += took;
            let pause = task.limits().and_then(|limits| {
                self.take_due_pause(limits, (worked, took), outcome.limit_delay)
            });
            self.add_outcome(&shard.root, outcome, lacking).await;
            self.send_progress().await;
            if pause.is_some() {
                return Ok(pause);
            }
        }
        Ok(None)
    }

    /// Adds the pause for a stripe that took this time to the one that is owed. Returns the pause to
    /// make now, if it is long enough or if the repair has worked on the shard for long enough.
    fn take_due_pause(
        &self,
        limits: &RepairLimits,
        (worked, took): (Duration, Duration),
        limit_delay: Duration,
    ) -> Option<Duration> {
        if limits.share_percent >= 100 {
            return None;
        }
        let owed = &mut self.lock_tally().owed_pause;
        *owed = limits.add_owed_pause(*owed, took, limit_delay);
        let is_due = *owed >= MIN_PAUSE || worked >= WORK_BEFORE_PAUSE;
        is_due.then(|| std::mem::take(owed).clamp(MIN_PAUSE, MAX_PAUSE))
    }

    /// Makes sure that the nodes of a shard have its records.
    async fn repair_records(
        &self,
        shard: &OwnedShard,
        lacking: &BTreeSet<NodeId>,
    ) -> Result<(), CoordinatorError> {
        let (coordinator, task) = (self.coordinator, self.task);
        coordinator.ensure_may_go_on(shard, task).await?;
        // An automatic repair opens only the stripes that its survey lists. If it lists any, each
        // node of the ring may lack data of one of them, so no node gets the leaves.
        let stripes = task.limits().and_then(|only| only.stripes.get(&shard.root.shard));
        let mut lacking = lacking.clone();
        if stripes.is_some_and(|stripes| !stripes.is_empty()) {
            lacking.extend(coordinator.fetch_nodes_to_ask(shard).await?);
        }
        let outcome =
            coordinator.repair_shard_records(shard, &self.saved, &lacking, task.options).await;
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) if ends_the_repair(&error) => return Err(error),
            Err(error) => {
                self.note(format!("shard {}: {error}", shard.root.name)).await;
                return Ok(());
            }
        };
        self.lock_tally().summary.records += outcome.records;
        for problem in outcome.problems {
            self.note(format!("shard {}: {problem}", shard.root.name)).await;
        }
        Ok(())
    }

    /// Adds the result for one stripe to the summary, and its nodes that still lack something to
    /// `lacking`.
    async fn add_outcome(
        &self,
        root: &ShardRoot,
        outcome: StripeOutcome,
        lacking: &mut BTreeSet<NodeId>,
    ) {
        lacking.extend(outcome.lacking);
        lacking.extend(outcome.away.keys());
        {
            let RepairTally { summary, away, .. } = &mut *self.lock_tally();
            summary.stripes += 1;
            summary.pieces += outcome.pieces;
            summary.replicas += outcome.replicas;
            summary.made_bytes += outcome.made_bytes;
            summary.records += outcome.records;
            summary.unrepaired += u64::from(!outcome.problems.is_empty());
            for (node, parts) in outcome.away {
                *away.entry(node).or_default() += parts;
            }
        }
        for problem in outcome.problems {
            self.note(format!("shard {}: {problem}", root.name)).await;
        }
    }

    async fn note(&self, text: String) {
        tracing::warn!(step = %self.task.step_ref, problem = text, "a part of the step was not repaired");
        let number = {
            let mut tally = self.lock_tally();
            tally.notes += 1;
            tally.notes
        };
        if number <= MAX_NOTES {
            let _ = self.events.send(RepairEvent::Note(text)).await;
        }
    }

    async fn send_progress(&self) {
        let progress = {
            let tally = self.lock_tally();
            RepairEvent::Progress {
                done_bytes: tally.done_bytes,
                total_bytes: tally.total_bytes,
                made_bytes: tally.summary.made_bytes,
            }
        };
        let _ = self.events.send(progress).await;
    }

    async fn finish_summary(self) -> Result<RepairSummary, CoordinatorError> {
        let directory = self.coordinator.fetch_directory().await?;
        let away = std::mem::take(&mut self.lock_tally().away);
        for (node, parts) in away {
            match directory.peer_name(node) {
                Some(name) => self.lock_tally().summary.away.push((name, parts)),
                None => {
                    let text =
                        format!("node {node}, which is not registered, should have {parts} parts");
                    self.note(text).await;
                }
            }
        }
        let tally = self.tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(tally.summary)
    }
}

impl Coordinator {
    /// Returns the kind of owner that a shard of the step has, after it was found to have one.
    async fn find_owner(
        &self,
        step_ref: StepRef<'_>,
        root: &ShardRoot,
    ) -> Result<ShardOwner, CoordinatorError> {
        let Some((request, _)) = self.find_archive_request(step_ref).await? else {
            return Ok(ShardOwner::Other);
        };
        let Some(state) = self.fetch_shard_state(root).await? else {
            return Ok(ShardOwner::Other);
        };
        if state.owner.as_ref().is_none_or(|owner| owner.lease != request.lease) {
            return Ok(ShardOwner::Other);
        }
        Ok(match StripeCounts::of_shard(root, &state)?.unarchived {
            0 => ShardOwner::CompletingDrops,
            _ => ShardOwner::Archiving,
        })
    }

    /// Returns an error if the repair was stopped, if it does not own the shard any more, or if the
    /// step's archiving was asked for since the repair began and the shard has stripes to archive. A
    /// repair calls this before each stripe, each plan, each copy, and the records of a shard.
    pub(super) async fn ensure_may_go_on(
        &self,
        shard: &OwnedShard,
        task: RepairTask<'_>,
    ) -> Result<(), CoordinatorError> {
        task.ensure_not_stopped()?;
        shard.confirm_ownership(self).await?;
        let now = self.find_archive_request(task.step_ref).await?.map(|(_, revision)| revision);
        // A request that is no longer in the catalogue has ended, and does not stop the repair. Drops
        // can wait until the repair has ended.
        let is_asked_for = now.is_some() && now != task.request_revision;
        match is_asked_for && shard.count_stripes().await.unarchived > 0 {
            true => Err(CoordinatorError::ArchivingRequested { what: task.step_ref.to_string() }),
            false => Ok(()),
        }
    }
}

/// Returns whether an error concerns the whole step, not only one of its stripes.
pub(super) fn ends_the_repair(error: &CoordinatorError) -> bool {
    let is_for_step = matches!(
        error,
        CoordinatorError::ArchivingRequested { .. }
            | CoordinatorError::RepairStopped { .. }
            | CoordinatorError::Owned { .. }
            | CoordinatorError::Catalogue(_)
    );
    is_for_step || error.kind() == ErrorKind::Fenced
}

impl RepairOptions {
    /// Returns whether the repair only counts what is missing.
    pub(super) fn is_dry_run(&self) -> bool {
        self.mode == RepairMode::DryRun
    }
}
