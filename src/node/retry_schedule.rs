//! The waits before a node does something again: the interval between renewals of a lease, the
//! interval between scans for unfinished work, and the wait before failed work is retried, which
//! grows with every failure in a row.
//!
//! The schedule is in memory only. After a restart, everything is tried once without a wait.

use std::collections::HashMap;
use std::time::Duration;

use crate::id::{Job, SaveId, Step};
use crate::wire::policy::PolicyWait;

/// Longest wait between two tries.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// Maximum number of saves that a schedule remembers. Further failures are not remembered, and the
/// callers bound how many saves they try in a round.
const MAX_RETRIES: usize = 4096;

/// Number of scans for unfinished work in a lease period. Work whose owner has vanished is found
/// within one lease period and one scan interval.
pub(in crate::node) const SCANS_PER_LEASE: u32 = 4;

/// Returns the time between two scans for unfinished work.
pub(in crate::node) fn scan_interval(lease: Duration) -> Duration {
    lease / SCANS_PER_LEASE
}

/// Returns the interval at which a lease is renewed.
pub(in crate::node) fn renewal_interval(lease: Duration) -> Duration {
    lease / 3
}

/// Returns the wait after this many failures in a row: `first_wait` after one failure, then twice
/// as long each time, up to `MAX_WAIT`. Without a failure there is no wait.
pub(in crate::node) fn backoff(first_wait: Duration, failures: u32) -> Duration {
    match failures.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => {
            first_wait.saturating_mul(1u32.checked_shl(doublings).unwrap_or(u32::MAX)).min(MAX_WAIT)
        }
    }
}

/// The schedule of retries of failed work on saves. A round calls
/// [`RetrySchedule::mark_seen_and_check_due`] for each save that still needs work;
/// [`RetrySchedule::forget_unseen`] forgets the other saves.
pub(in crate::node) struct RetrySchedule {
    first: Duration,
    waits: HashMap<SaveId, Retry>,
}

struct Retry {
    job: Job,
    step: Step,
    failures: u32,
    why: String,
    due: Duration,
    is_asked_for: bool,
}

impl RetrySchedule {
    /// Creates an empty schedule. `first_wait` is the wait after one failure.
    pub(in crate::node) fn new(first_wait: Duration) -> Self {
        Self { first: first_wait, waits: HashMap::new() }
    }

    /// Returns whether the save may be tried now. Notes that the round has asked for it.
    pub(in crate::node) fn mark_seen_and_check_due(&mut self, save: SaveId, now: Duration) -> bool {
        self.waits.get_mut(&save).is_none_or(|wait| {
            wait.is_asked_for = true;
            wait.due <= now
        })
    }

    /// Records that work on the save was tried and did not finish, and `why`. Returns the number of
    /// failures in a row. A full schedule records nothing and returns 1.
    pub(in crate::node) fn record_failure(
        &mut self,
        save: SaveId,
        (job, step): (&Job, Step),
        now: Duration,
        why: String,
    ) -> u32 {
        if self.waits.len() >= MAX_RETRIES && !self.waits.contains_key(&save) {
            return 1;
        }
        let failures = self.waits.get(&save).map_or(0, |wait| wait.failures).saturating_add(1);
        let due = now.saturating_add(backoff(self.first, failures));
        // The round that is under way may have passed this save already.
        let is_asked_for = true;
        let wait = Retry { job: job.clone(), step, failures, why, due, is_asked_for };
        self.waits.insert(save, wait);
        failures
    }

    /// Makes all failed work due now and sets its failures to 0, because the reason of the failures
    /// may be gone. If a try that is under way fails, it is repeated after the first wait.
    pub(in crate::node) fn make_all_due(&mut self) {
        for wait in self.waits.values_mut() {
            (wait.due, wait.failures) = (Duration::ZERO, 0);
        }
    }

    /// Forgets the save, because its work is done.
    pub(in crate::node) fn forget_finished(&mut self, save: SaveId) {
        self.waits.remove(&save);
    }

    /// Forgets the saves for which neither [`RetrySchedule::mark_seen_and_check_due`] nor
    /// [`RetrySchedule::record_failure`] was called since the last call of this function.
    pub(in crate::node) fn forget_unseen(&mut self) {
        self.waits.retain(|_, wait| std::mem::take(&mut wait.is_asked_for));
    }

    /// Returns the failed work that will be retried, as the status calls report it.
    pub(in crate::node) fn pending_retries(&self) -> impl Iterator<Item = PolicyWait> {
        self.waits.values().map(|wait| PolicyWait {
            job: wait.job.clone(),
            step: wait.step,
            failures: wait.failures,
            why: wait.why.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn waits_double_up_to_their_limit() {
        let waits: Vec<u64> =
            [0, 1, 2, 3, 9, 10, 11, 40, u32::MAX].map(|n| backoff(SECOND, n).as_secs()).to_vec();
        assert_eq!(waits, [0, 1, 2, 4, 256, 512, 600, 600, 600]);
    }

    #[test]
    fn what_failed_is_due_later_and_what_nobody_asks_for_is_forgotten() {
        let mut waits = RetrySchedule::new(10 * SECOND);
        let (job, save): (Job, SaveId) = ("a".parse().unwrap(), SaveId([1; 12]));
        let mut tries = Vec::new();
        for at in 0..200 {
            let now = at * SECOND;
            if waits.mark_seen_and_check_due(save, now) {
                tries.push(at);
                waits.record_failure(save, (&job, Step(1)), now, "away".into());
            } else {
                waits.forget_unseen();
            }
        }
        assert_eq!(tries, [0, 10, 30, 70, 150]);
        assert!(!waits.mark_seen_and_check_due(save, 200 * SECOND));
        waits.make_all_due();
        assert!(waits.mark_seen_and_check_due(save, 200 * SECOND));
        waits.record_failure(save, (&job, Step(1)), 200 * SECOND, "away".into());
        let seen: Vec<u32> = waits.pending_retries().map(|view| view.failures).collect();
        assert_eq!(seen, [1], "the waits begin anew");
        waits.forget_unseen();
        waits.forget_unseen();
        assert!(waits.mark_seen_and_check_due(save, 201 * SECOND), "it is forgotten");
    }
}
