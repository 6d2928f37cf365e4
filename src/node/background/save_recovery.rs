//! The catalogue server's recovery of unfinished work: saves whose client is gone, saves that were
//! decided and not published, and removals. It also runs the rounds of the policy.
//!
//! It scans all checkpoints several times in a lease period. It aborts an open save when the save's
//! lease is over. A decided save or a removal has no lease. Its originator has one lease period,
//! from when this daemon first saw it, to finish it. After that this daemon continues it in a task
//! of its own, so that work that waits for unreachable nodes holds up no other work. All of this is
//! safe to repeat, also by several daemons at once.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::deferred_removals::DeferredRemovals;
use super::retention::{CheckpointCounts, Retention, RetentionCache};
use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, checkpoint_key, parse_checkpoint_key, parse_record, update_record,
};
use crate::format::records::{Checkpoint, RemoveReason, Removing, Saved, Writing};
use crate::id::{Job, LeaseId, NodeId, PeerName, SaveId, Step, StepRef};
use crate::node::active_saves::{ActiveSaveGuard, ActiveSaves};
use crate::node::context::NodeContext;
use crate::node::failure_log::FailureLog;
use crate::node::gateway::begin_save::SaveGateway;
use crate::node::gateway::removal::SaveRemoval;
use crate::node::retry_schedule::{SCANS_PER_LEASE, scan_interval};
use crate::wire::RemoteError;

/// Maximum number of decided saves and removals that this daemon continues at once.
const RECOVERED_AT_ONCE: usize = 16;

/// The state that is kept from scan to scan.
struct RecoveryState {
    /// The time since which each decided save and each removal has waited for its originator.
    since: HashMap<SaveId, Duration>,
    /// The nodes that were live in the last scan.
    live: BTreeSet<NodeId>,
    /// The keys of steps whose records did not parse in the last scan.
    damaged: BTreeSet<String>,
    turn: RemovalTurn,
    slots: Arc<Semaphore>,
}

impl RecoveryState {
    /// Returns the time since which this decided save or removal has waited: `now` if it is new.
    fn first_seen(&self, save: SaveId, now: Duration) -> Duration {
        self.since.get(&save).copied().unwrap_or(now)
    }

    /// Returns whether the originator of this decided save or removal has had one lease period to
    /// finish it.
    fn is_grace_period_over(&self, save: SaveId, now: Duration, lease: Duration) -> bool {
        self.since.get(&save).is_some_and(|since| now >= since.saturating_add(lease))
    }
}

/// The turns of the steps whose removals wait for a slot. Scans are in the order of the steps' keys.
/// Without turns, removals of the first steps that fail again and again would take all slots.
#[derive(Debug, Default)]
struct RemovalTurn {
    /// This scan passes over the steps up to this key: an earlier scan had slots for them.
    after: Option<String>,
    /// The last key for which this scan had a slot.
    served: Option<String>,
    has_run_out: bool,
}

impl RemovalTurn {
    /// Returns whether it is the turn of the step with this key.
    fn has_come(&self, key: &str) -> bool {
        !self.has_run_out && self.after.as_deref().is_none_or(|after| key > after)
    }

    /// Notes whether there was a slot for the step with this key.
    fn note_attempt(&mut self, key: &str, has_slot: bool) {
        match has_slot {
            true => self.served = Some(key.to_owned()),
            false => self.has_run_out = true,
        }
    }

    /// Ends a scan. The next one begins after the steps that had a slot in this one, or with the
    /// first step if there was a slot for all.
    fn end_scan(&mut self) {
        let served = self.served.take().or(self.after.take());
        self.after = if self.has_run_out { served } else { None };
        self.has_run_out = false;
    }
}

/// Parses the record of a step. Returns `None` and adds the key to `damaged` if it does not parse:
/// one damaged record must not end the recovery of all other steps. Logs a key that is not `known`.
fn parse_or_report(
    key: &str,
    value: &[u8],
    known: &BTreeSet<String>,
    damaged: &mut BTreeSet<String>,
) -> Option<Checkpoint> {
    let error = match parse_record(key, value) {
        Ok(checkpoint) => return Some(checkpoint),
        Err(error) => error,
    };
    if damaged.insert(key.to_owned()) && !known.contains(key) {
        tracing::error!(key, %error, "the record of a step does not parse: nothing that is unfinished in this step continues");
    }
    None
}

/// The service that continues unfinished saves and removals.
pub(in crate::node) struct SaveRecovery {
    context: Arc<NodeContext>,
    saves: Arc<SaveGateway>,
    removal: Arc<SaveRemoval>,
    deferred_removals: Arc<DeferredRemovals>,
    retention: Arc<Retention>,
    /// The saves that this service works on now.
    recovering: ActiveSaves,
}

impl SaveRecovery {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        saves: Arc<SaveGateway>,
        removal: Arc<SaveRemoval>,
        deferred_removals: Arc<DeferredRemovals>,
        retention: Arc<Retention>,
    ) -> Self {
        let recovering = ActiveSaves::default();
        Self { context, saves, removal, deferred_removals, retention, recovering }
    }

    /// Scans for unfinished work [`SCANS_PER_LEASE`] times per lease period, and runs a round of the
    /// policy once per lease period, while this daemon serves the catalogue. Runs until the node
    /// stops.
    pub(in crate::node) async fn run_recovery_and_retention(self: Arc<Self>) {
        let slots = Arc::new(Semaphore::new(RECOVERED_AT_ONCE));
        let mut collector = RecoveryState {
            since: HashMap::new(),
            live: BTreeSet::new(),
            damaged: BTreeSet::new(),
            turn: RemovalTurn::default(),
            slots,
        };
        let mut looked = RetentionCache::default();
        let (mut scan_failures, mut policy_failures) =
            (FailureLog::default(), FailureLog::default());
        for number in (1..=SCANS_PER_LEASE).cycle() {
            self.context.clock.sleep(scan_interval(self.context.settings.lease)).await;
            if !self.context.is_writable_catalogue_server() {
                continue;
            }
            let survey = match self.run_recovery_round(&mut collector).await {
                Ok(survey) => {
                    scan_failures.record_success();
                    survey
                }
                Err(error) => {
                    if let Some(failures) = scan_failures.record_failure(self.context.clock.now()) {
                        tracing::warn!(%error, failures, "failed to scan for unfinished saves and removals; the next scan retries");
                    }
                    continue;
                }
            };
            if number < SCANS_PER_LEASE {
                continue;
            }
            match self.retention.run_policy_round(&survey, &mut looked).await {
                // This daemon began these removals itself, so there is no originator to wait for.
                Ok(retired) => {
                    policy_failures.record_success();
                    collector.since.extend(retired.into_iter().map(|save| (save, Duration::ZERO)));
                }
                Err(error) => {
                    if let Some(failures) = policy_failures.record_failure(self.context.clock.now())
                    {
                        tracing::warn!(%error, failures, "failed to apply the policy; the next round retries");
                    }
                }
            }
        }
    }

    /// Scans all checkpoints once. Aborts expired saves, and continues the removals and decided
    /// saves that are due. Returns the counts that the policy needs.
    async fn run_recovery_round(
        self: &Arc<Self>,
        state: &mut RecoveryState,
    ) -> Result<CheckpointCounts, RemoteError> {
        let catalogue = self.context.catalogue();
        self.note_live_nodes(&*catalogue, state).await?;
        let (mut survey, mut since) = (CheckpointCounts::default(), HashMap::new());
        let mut damaged = BTreeSet::new();
        let mut note = |save: SaveId, at: Duration| {
            since.insert(save, at);
        };
        let mut checkpoints = KeyScan::of_prefix(&*catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let Some(checkpoint) =
                parse_or_report(&key, &entry.value, &state.damaged, &mut damaged)
            else {
                continue;
            };
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            let now = self.context.clock.now();
            for entry in checkpoint.removing {
                survey.removing += 1;
                note(entry.save, state.first_seen(entry.save, now));
                self.resume_removal_if_due(state, (&key, job.at(step)), entry);
            }
            match checkpoint.writing {
                Some(Writing::Open { save, lease, .. }) => {
                    match self.abort_if_lease_expired(&*catalogue, (&job, step), save, lease).await
                    {
                        // No other daemon removes the files of this save, so there is no originator
                        // to wait for.
                        Ok(true) => note(save, Duration::ZERO),
                        Ok(false) => {}
                        Err(error) => {
                            tracing::warn!(%job, %step, %error, "failed to check whether an open save is alive, or to abort it; the next scan retries");
                        }
                    }
                }
                Some(Writing::Decided { saved }) => {
                    let is_left =
                        state.is_grace_period_over(saved.save, now, self.context.settings.lease);
                    let is_tried =
                        is_left && self.try_resume_publishing(&state.slots, job.at(step), &saved);
                    note(
                        saved.save,
                        if is_tried { now } else { state.first_seen(saved.save, now) },
                    );
                }
                None => {}
            }
            if checkpoint.committed.is_some() {
                *survey.committed.entry(job).or_default() += 1;
            }
        }
        survey.removing += self.deferred_removals.count();
        (state.since, state.damaged) = (since, damaged);
        state.turn.end_scan();
        self.retention.lock_removal_retries().forget_unseen();
        Ok(survey)
    }

    /// Notes which nodes are live. If a node is live that was not live at the last scan, makes all
    /// removals due: they may wait for that node.
    async fn note_live_nodes(
        &self,
        catalogue: &dyn Catalogue,
        state: &mut RecoveryState,
    ) -> Result<(), RemoteError> {
        let nodes = catalogue.list_nodes().await?.into_iter().filter(|view| view.live);
        let live = nodes.map(|view| NodeId::of(&view.node.name)).collect();
        let before = std::mem::replace(&mut state.live, live);
        if !state.live.is_subset(&before) {
            self.retention.lock_removal_retries().make_all_due();
        }
        Ok(())
    }

    /// Continues the removal of a save of the step with this key, if it is due and if it is the
    /// step's turn.
    fn resume_removal_if_due(
        self: &Arc<Self>,
        state: &mut RecoveryState,
        (key, step_ref): (&str, StepRef<'_>),
        entry: Removing,
    ) {
        let (now, lease) = (self.context.clock.now(), self.context.settings.lease);
        let is_due = self.retention.lock_removal_retries().mark_seen_and_check_due(entry.save, now);
        if is_due && state.is_grace_period_over(entry.save, now, lease) && state.turn.has_come(key)
        {
            let has_slot = self.resume_removal(&state.slots, step_ref, entry);
            state.turn.note_attempt(key, has_slot);
        }
    }

    /// Continues a removal in a task of its own, unless this node works on it already or too many
    /// such tasks run. Returns `false` if too many run.
    fn resume_removal(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        step_ref: StepRef<'_>,
        entry: Removing,
    ) -> bool {
        let StepRef { job, step } = step_ref;
        let Some(mark) = ActiveSaveGuard::try_claim(&self.recovering, entry.save) else {
            return true;
        };
        let Ok(slot) = slots.clone().try_acquire_owned() else { return false };
        let job = job.clone();
        let service = self.clone();
        self.context.tasks.spawn_until_stop(async move {
            let _held = (mark, slot);
            let why = match service.remove_or_defer(job.at(step), &entry).await {
                Ok(None) => {
                    service.retention.lock_removal_retries().forget_finished(entry.save);
                    return;
                }
                Ok(Some(waiting)) => {
                    let names: Vec<&str> = waiting.iter().map(|name| name.as_str()).collect();
                    format!("these nodes still have to remove its files: {}", names.join(", "))
                }
                Err(error) => error.to_string(),
            };
            tracing::info!(%job, %step, why, "a removal is not complete; retrying");
            service.retention.lock_removal_retries().record_failure(
                entry.save,
                (&job, step),
                service.context.clock.now(),
                why,
            );
        });
        true
    }

    /// Continues a removal as far as possible now. Returns `None` if it is complete or deferred;
    /// otherwise the nodes that have still to purge the save.
    async fn remove_or_defer(
        &self,
        step_ref: StepRef<'_>,
        entry: &Removing,
    ) -> Result<Option<Vec<PeerName>>, RemoteError> {
        let outcome = self.removal.advance_removal(step_ref, entry).await?;
        let is_done = outcome.is_complete
            || self.deferred_removals.try_defer(step_ref, entry, &outcome).await?;
        Ok((!is_done).then_some(outcome.answer.waiting))
    }

    /// Publishes a decided save in a task of its own, unless this node works on it already or too
    /// many such tasks run. Returns whether the task was started.
    fn try_resume_publishing(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        step_ref: StepRef<'_>,
        saved: &Saved,
    ) -> bool {
        let StepRef { job, step } = step_ref;
        let Some(mark) = ActiveSaveGuard::try_claim(&self.recovering, saved.save) else {
            return false;
        };
        let Ok(slot) = slots.clone().try_acquire_owned() else { return false };
        let (job, saved) = (job.clone(), saved.clone());
        let service = self.clone();
        self.context.tasks.spawn_until_stop(async move {
            let _held = (mark, slot);
            if let Err(error) = service.saves.mark_and_publish(job.at(step), saved).await {
                tracing::warn!(%job, %step, %error, "failed to publish a decided save; retrying after a lease period");
            }
        });
        true
    }

    /// Aborts an open save if its lease is over. Returns whether it aborted the save.
    async fn abort_if_lease_expired(
        &self,
        catalogue: &dyn Catalogue,
        (job, step): (&Job, Step),
        expired_save: SaveId,
        lease: LeaseId,
    ) -> Result<bool, RemoteError> {
        if catalogue.is_lease_alive(lease).await? {
            return Ok(false);
        }
        let mut is_aborted = false;
        let change = |mut checkpoint: Checkpoint| -> Result<Option<Checkpoint>, RemoteError> {
            match checkpoint.writing.take() {
                Some(Writing::Open { save, generation, lease: over })
                    if save == expired_save && lease == over =>
                {
                    let reason = RemoveReason::Aborted;
                    checkpoint.removing.push(Removing { save, generation, reason });
                    is_aborted = true;
                    Ok(Some(checkpoint))
                }
                _ => {
                    is_aborted = false;
                    Ok(None)
                }
            }
        };
        update_record(catalogue, &checkpoint_key(job.at(step)), change).await?;
        Ok(is_aborted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a scan with two slots. Returns the steps that had one.
    fn scan(turn: &mut RemovalTurn, steps: &[&str]) -> String {
        let (mut slots, mut served) = (2, String::new());
        for &step in steps {
            if turn.has_come(step) {
                turn.note_attempt(step, slots > 0);
                if slots > 0 {
                    (slots, served) = (slots - 1, served + step);
                }
            }
        }
        turn.end_scan();
        served
    }

    #[test]
    fn removals_that_fail_do_not_take_the_slots_of_others() {
        let (mut turn, steps) = (RemovalTurn::default(), ["a", "b", "c", "d", "e"]);
        let served: Vec<String> = (0..5).map(|_| scan(&mut turn, &steps)).collect();
        assert_eq!(served, ["ab", "cd", "e", "ab", "cd"]);
        assert_eq!(scan(&mut turn, &["b", "c"]), "");
        assert_eq!(scan(&mut turn, &["b", "c"]), "bc");
        turn.note_attempt("b", false);
        turn.end_scan();
        assert_eq!(scan(&mut turn, &steps), "ab", "no slot was free at all");
    }
}
