//! The catalogue server's recovery of unfinished work: saves whose client is gone, saves that were
//! decided and not published, and removals. It also runs the rounds of the policy.
//!
//! It scans all checkpoints several times in a lease period. It aborts an open save when the save's
//! lease is over. A decided save or a removal has no lease. Its originator has one lease period,
//! from when this daemon first saw it, to finish it. After that this daemon continues it, each in a
//! task of its own, so that work that waits for unreachable nodes holds up no other work. All of
//! this is safe to repeat, also by several daemons at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::retention::{RetentionCache, ScanCounts};
use super::retry::{SCANS_PER_LEASE, scan_interval};
use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::records::{CHECKPOINTS, checkpoint_key, parse, parse_checkpoint_key, update};
use crate::format::records::{Checkpoint, RemoveReason, Removing, Saved, Writing};
use crate::id::{Job, LeaseId, SaveId, Step};
use crate::node::Node;
use crate::node::active_saves::ActiveSave;
use crate::node::gateway::removal::RemovalOutcome;
use crate::wire::RemoteError;

/// Maximum number of decided saves and removals that this daemon continues at once.
const RECOVERED_AT_ONCE: usize = 16;

/// The state that is kept from scan to scan.
struct RecoveryState {
    /// The time since which each decided save and each removal has waited for its originator.
    since: HashMap<SaveId, Duration>,
    slots: Arc<Semaphore>,
}

impl RecoveryState {
    /// Returns whether the originator of this decided save or removal has had one lease period to
    /// finish it.
    fn is_unattended(&self, save: SaveId, now: Duration, lease: Duration) -> bool {
        self.since.get(&save).is_some_and(|since| now >= since.saturating_add(lease))
    }
}

impl Node {
    /// Scans for unfinished work, and runs a round of the policy once per lease period, while this
    /// daemon serves the catalogue. Runs until the node stops.
    pub(in crate::node) async fn run_save_recovery(self: Arc<Self>) {
        let slots = Arc::new(Semaphore::new(RECOVERED_AT_ONCE));
        let mut collector = RecoveryState { since: HashMap::new(), slots };
        let mut looked = RetentionCache::default();
        for number in (1..=SCANS_PER_LEASE).cycle() {
            self.context.clock.sleep(scan_interval(self.context.settings.lease)).await;
            if !self.serves_catalogue() {
                continue;
            }
            let survey = match self.recovery_round(&mut collector).await {
                Ok(survey) => survey,
                Err(error) => {
                    tracing::warn!(%error, "failed to scan for unfinished saves and removals");
                    continue;
                }
            };
            if number < SCANS_PER_LEASE {
                continue;
            }
            match self.run_retention_round(&survey, &mut looked).await {
                // This daemon began these removals itself, so there is no originator to wait for.
                Ok(retired) => {
                    collector.since.extend(retired.into_iter().map(|save| (save, Duration::ZERO)));
                }
                Err(error) => tracing::warn!(%error, "failed to apply the policy"),
            }
        }
    }

    /// Scans all checkpoints once. Aborts expired saves, and continues the removals and decided
    /// saves that are due. Returns the counts that the policy needs.
    async fn recovery_round(
        self: &Arc<Self>,
        collector: &mut RecoveryState,
    ) -> Result<ScanCounts, RemoteError> {
        let catalogue = self.context.catalogue();
        let (mut survey, mut since) = (ScanCounts::default(), HashMap::new());
        let mut note = |save: SaveId, at: Duration| {
            since.insert(save, at);
        };
        let mut checkpoints = KeyScan::over(&*catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse(&key, &entry.value)?;
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            let now = self.context.clock.now();
            let seen = |save| collector.since.get(&save).copied().unwrap_or(now);
            for entry in checkpoint.removing {
                survey.removing += 1;
                note(entry.save, seen(entry.save));
                let is_due = self.removals().is_due(entry.save, now);
                if is_due && collector.is_unattended(entry.save, now, self.context.settings.lease) {
                    self.resume_removal(&collector.slots, &job, step, entry);
                }
            }
            match checkpoint.writing {
                Some(Writing::Open { save, lease, .. }) => {
                    match self.abort_expired(&*catalogue, (&job, step), save, lease).await {
                        // No other daemon removes the files of this save, so there is no originator
                        // to wait for.
                        Ok(true) => note(save, Duration::ZERO),
                        Ok(false) => {}
                        Err(error) => {
                            tracing::warn!(%job, %step, %error, "failed to abort an open save; the next scan retries");
                        }
                    }
                }
                Some(Writing::Decided { saved }) => {
                    let is_left =
                        collector.is_unattended(saved.save, now, self.context.settings.lease);
                    let is_tried =
                        is_left && self.resume_publishing(&collector.slots, &job, step, &saved);
                    note(saved.save, if is_tried { now } else { seen(saved.save) });
                }
                None => {}
            }
            if checkpoint.committed.is_some() {
                *survey.committed.entry(job).or_default() += 1;
            }
        }
        collector.since = since;
        self.removals().end_round();
        Ok(survey)
    }

    /// Continues a removal in a task of its own, unless this node works on it already or too many
    /// such tasks run.
    fn resume_removal(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        job: &Job,
        step: Step,
        entry: Removing,
    ) {
        let Some(mark) = ActiveSave::begin(&self.recovering, entry.save) else { return };
        let Ok(slot) = slots.clone().try_acquire_owned() else { return };
        let job = job.clone();
        self.spawn(|node| async move {
            let _held = (mark, slot);
            let why = match node.finish_removal(&job, step, &entry).await {
                Ok(RemovalOutcome { is_complete: true, .. }) => {
                    node.removals().ended(entry.save);
                    return;
                }
                Ok(RemovalOutcome { answer, .. }) => {
                    let names: Vec<&str> =
                        answer.waiting.iter().map(|name| name.as_str()).collect();
                    format!("these nodes still have to remove its files: {}", names.join(", "))
                }
                Err(error) => error.to_string(),
            };
            tracing::info!(%job, %step, why, "removal deferred");
            node.removals().failed(entry.save, (&job, step), node.context.clock.now(), why);
        });
    }

    /// Publishes a decided save in a task of its own, unless this node works on it already or too
    /// many such tasks run. Returns whether the task was started.
    fn resume_publishing(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        job: &Job,
        step: Step,
        saved: &Saved,
    ) -> bool {
        let Some(mark) = ActiveSave::begin(&self.recovering, saved.save) else { return false };
        let Ok(slot) = slots.clone().try_acquire_owned() else { return false };
        let (job, saved) = (job.clone(), saved.clone());
        self.spawn(|node| async move {
            let _held = (mark, slot);
            if let Err(error) = node.publish(&job, step, saved).await {
                tracing::warn!(%job, %step, %error, "failed to publish a decided save; retrying after a lease period");
            }
        });
        true
    }

    /// Aborts an open save if its lease is over. Returns whether it aborted the save.
    async fn abort_expired(
        &self,
        catalogue: &dyn Catalogue,
        (job, step): (&Job, Step),
        of: SaveId,
        lease: LeaseId,
    ) -> Result<bool, RemoteError> {
        if catalogue.lease_touch(lease, false).await? {
            return Ok(false);
        }
        let mut is_aborted = false;
        let change = |mut checkpoint: Checkpoint| -> Result<Option<Checkpoint>, RemoteError> {
            match checkpoint.writing.take() {
                Some(Writing::Open { save, generation, lease: over })
                    if save == of && lease == over =>
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
        update(catalogue, &checkpoint_key(job, step), change).await?;
        Ok(is_aborted)
    }
}
