//! The times of a hop, for reports and traces.

use std::time::Duration;

use crate::clock::Clock;
use crate::wire::order::{ChunkTimes, HopTimes};

/// Maximum number of jobs of a hop that its report samples.
const CHUNKS_REPORTED: u64 = 64;

/// The time that a worker spent on one job.
#[derive(Debug, Clone, Copy, Default)]
pub struct JobTime {
    /// Time for fingerprints and products.
    pub computed: Duration,
    /// Time for reading, hashing and writing.
    pub disk: Duration,
}

/// A stopwatch that measures laps.
pub struct Stopwatch<'a> {
    clock: &'a dyn Clock,
    last: Duration,
}

impl<'a> Stopwatch<'a> {
    /// Returns a stopwatch whose first lap starts now.
    pub fn start(clock: &'a dyn Clock) -> Self {
        Self { clock, last: clock.now() }
    }

    /// Ends the current lap and starts the next. Returns the length of the lap that ended.
    pub fn lap(&mut self) -> Duration {
        let now = self.clock.now();
        now.saturating_sub(std::mem::replace(&mut self.last, now))
    }
}

/// The times of one job of a hop, over neighbouring grains.
#[derive(Debug, Clone, Copy)]
pub struct TimedBatch {
    /// The first grain, and one past the last.
    pub grains: (u64, u64),
    /// Three times, in microseconds since the node began to run the order: the wait for input began,
    /// the work began, the work was done.
    pub at_us: [u64; 3],
    /// The time that the worker spent.
    pub spent: JobTime,
}

/// The accumulated times of a hop.
pub struct HopTiming {
    grains: (u64, u64),
    /// When the first job began, in microseconds since the node began to run the order.
    pub first_us: Option<u64>,
    /// The hop's time, by its use.
    pub times: HopTimes,
    /// A sample of the hop's jobs.
    pub chunks: Vec<ChunkTimes>,
}

impl HopTiming {
    /// Returns the times, all zero, of a hop over `grains`: the first, and one past the last.
    pub fn new(grains: (u64, u64)) -> Self {
        Self { grains, first_us: None, times: HopTimes::default(), chunks: Vec::new() }
    }

    /// Adds the times of a job.
    pub fn add_batch(&mut self, batch: TimedBatch) {
        let [waited, began, done] = batch.at_us;
        let (computed_us, disk_us) = (as_micros(batch.spent.computed), as_micros(batch.spent.disk));
        self.first_us.get_or_insert(began);
        self.times.upstream_us += began.saturating_sub(waited);
        self.times.computed_us += computed_us;
        self.times.disk_us += disk_us;
        self.times.queued_us += done.saturating_sub(began).saturating_sub(computed_us + disk_us);
        // Sample each job that passes the next sixty-fourth of the hop's grains.
        let all = self.grains.1.saturating_sub(self.grains.0).max(1);
        let part = |grain: u64| grain.saturating_sub(self.grains.0) * CHUNKS_REPORTED / all;
        if part(batch.grains.1) > part(batch.grains.0) {
            self.chunks.push(ChunkTimes { grains: batch.grains, span_us: (began, done) });
        }
    }
}

/// Returns a duration in whole microseconds.
pub fn as_micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_worker_spent_was_waiting_for_one() {
        let mut account = HopTiming::new((10, 20));
        let spent =
            JobTime { computed: Duration::from_micros(30), disk: Duration::from_micros(20) };
        account.add_batch(TimedBatch { grains: (10, 13), at_us: [5, 15, 100], spent });
        account.add_batch(TimedBatch { grains: (13, 14), at_us: [100, 100, 150], spent });
        let expected = HopTimes {
            upstream_us: 10,
            queued_us: 35,
            computed_us: 60,
            disk_us: 40,
            downstream_us: 0,
        };
        assert_eq!((account.first_us, account.times), (Some(15), expected));
        assert_eq!(account.chunks[1], ChunkTimes { grains: (13, 14), span_us: (100, 150) });
    }

    #[test]
    fn a_long_hop_reports_a_sample() {
        for grains in [1, 63, 64, 65, 1000, 2048] {
            let mut account = HopTiming::new((0, grains));
            for grain in 0..grains {
                let spent = JobTime::default();
                account.add_batch(TimedBatch { grains: (grain, grain + 1), at_us: [0; 3], spent });
            }
            assert_eq!(account.chunks.len() as u64, grains.min(CHUNKS_REPORTED), "{grains}");
            assert_eq!(account.chunks.last().unwrap().grains.1, grains);
        }
    }
}
