//! The time since the writers of a joint save last made progress (docs/semantics.md, 3).

use std::sync::Arc;
use std::time::Duration;

use crate::client::ClientError;
use crate::clock::Clock;

/// The pauses between two checks of the other writers' progress: the first pause, and the longest.
pub(super) const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Maximum number of restarts of writers after which the bytes that they send once more count as
/// progress. Restarts are counted anew when the save gets further than ever before. Without this
/// limit, a writer that is killed again and again would keep all others waiting.
const MAX_REPEATS: u32 = 3;

/// The progress of all writers of the save, this one included.
#[derive(Clone, Copy)]
pub(super) struct SaveProgress {
    pub(super) announced: usize,
    pub(super) progress: u64,
    pub(super) complete: usize,
}

impl SaveProgress {
    /// Returns whether any of the numbers is greater than in `other`.
    fn exceeds(&self, other: &Self) -> bool {
        self.announced > other.announced
            || self.progress > other.progress
            || self.complete > other.complete
    }

    fn max(&self, other: &Self) -> Self {
        Self {
            announced: self.announced.max(other.announced),
            progress: self.progress.max(other.progress),
            complete: self.complete.max(other.complete),
        }
    }
}

/// The time since the writers of a save last made progress.
pub(super) struct StallTimer {
    clock: Arc<dyn Clock>,
    limit: Duration,
    /// The greatest value that was seen of each number.
    most: Option<SaveProgress>,
    /// The progress that all writers have reported, as seen last. It falls when a writer starts again.
    last_progress: u64,
    /// How often `last_progress` has fallen since some number last exceeded its greatest value.
    falls: u32,
    since: Duration,
    pause: Duration,
    longest_pause: Duration,
}

impl StallTimer {
    /// Creates a timer whose pauses are at most `longest_pause`.
    pub(super) fn new(clock: Arc<dyn Clock>, limit: Duration, longest_pause: Duration) -> Self {
        let (since, pause) = (clock.now(), PAUSES.0);
        let (most, last_progress, falls) = (None, 0, 0);
        Self { clock, limit, most, last_progress, falls, since, pause, longest_pause }
    }

    /// Notes the state of the writers. Returns the time since they last made progress.
    pub(super) fn note(&mut self, seen: SaveProgress) -> Duration {
        let now = self.clock.now();
        if self.is_progress(seen) {
            (self.since, self.pause) = (now, PAUSES.0);
        }
        now.saturating_sub(self.since)
    }

    fn is_progress(&mut self, seen: SaveProgress) -> bool {
        let before = std::mem::replace(&mut self.last_progress, seen.progress);
        let most = self.most.map_or(seen, |most| most.max(&seen));
        if self.most.replace(most).is_none_or(|most| seen.exceeds(&most)) {
            self.falls = 0;
            return true;
        }
        if seen.progress < before {
            self.falls += 1;
        }
        seen.progress != before && self.falls <= MAX_REPEATS
    }

    /// Pauses before the next check of the progress.
    ///
    /// # Errors
    /// [`ClientError::WritersMissing`] if there was no progress for too long.
    pub(super) async fn pause(&mut self, missing: Vec<u32>) -> Result<(), ClientError> {
        if self.clock.now().saturating_sub(self.since) >= self.limit {
            return Err(ClientError::WritersMissing { writers: missing, limit: self.limit });
        }
        self.clock.sleep(self.pause).await;
        self.pause = (self.pause * 2).min(self.longest_pause);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    const LIMIT: Duration = Duration::from_secs(10);

    fn sent(progress: u64) -> SaveProgress {
        SaveProgress { announced: 2, progress, complete: 0 }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_counts_from_the_last_progress() {
        let mut timer = StallTimer::new(SystemClock::new(), LIMIT, PAUSES.1);
        for progress in 0..5 {
            assert_eq!(timer.note(sent(progress)), Duration::ZERO);
            tokio::time::advance(LIMIT - PAUSES.0).await;
            timer.pause(vec![1]).await.unwrap();
        }
        assert!(timer.note(sent(4)) >= LIMIT);
        let stalled = timer.pause(vec![1]).await.unwrap_err();
        assert!(matches!(stalled, ClientError::WritersMissing { writers, .. } if writers == [1]));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_are_sent_again_count_a_few_times() {
        let second = Duration::from_secs(1);
        let mut timer = StallTimer::new(SystemClock::new(), LIMIT, PAUSES.1);
        let mut note_after_a_second = async |progress, complete| {
            tokio::time::advance(second).await;
            timer.note(SaveProgress { complete, ..sent(progress) })
        };
        // A shard that is completed is new, so writers may start again as often as before.
        for complete in 0..2 {
            assert_eq!(note_after_a_second(100, complete).await, Duration::ZERO);
            for _ in 0..MAX_REPEATS {
                for progress in [10, 50, 100] {
                    let unchanged = note_after_a_second(progress, complete).await;
                    assert_eq!(unchanged, Duration::ZERO, "{progress} MiB again");
                }
            }
            assert_eq!(note_after_a_second(10, complete).await, second);
            assert_eq!(note_after_a_second(99, complete).await, 2 * second);
        }
    }
}
