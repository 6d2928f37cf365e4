//! What a hop's time goes into, for reports and traces.

use std::time::Duration;

use crate::clock::Clock;
use crate::wire::order::{ChunkTimes, HopTimes};

/// Chunks that a report samples of a hop.
const CHUNKS_REPORTED: u64 = 64;

/// Time spent on one job.
#[derive(Debug, Clone, Copy, Default)]
pub struct JobTime {
    /// Fingerprints and products.
    pub computed: Duration,
    /// Reading, hashing and writing.
    pub disk: Duration,
}

/// Time since the last lap.
pub struct Stopwatch<'a> {
    clock: &'a dyn Clock,
    last: Duration,
}

impl<'a> Stopwatch<'a> {
    /// The first lap begins now.
    pub fn start(clock: &'a dyn Clock) -> Self {
        Self { clock, last: clock.now() }
    }

    /// Ends a lap, and begins the next.
    pub fn lap(&mut self) -> Duration {
        let now = self.clock.now();
        now.saturating_sub(std::mem::replace(&mut self.last, now))
    }
}

/// One job of a hop, on neighbouring grains.
#[derive(Debug, Clone, Copy)]
pub struct TimedBatch {
    /// The first grain, and one past the last.
    pub grains: (u64, u64),
    /// Microseconds of the hop: waiting began, work began, work was done.
    pub at_us: [u64; 3],
    /// What the worker spent.
    pub spent: JobTime,
}

/// The sums of a hop.
pub struct HopTiming {
    grains: (u64, u64),
    /// When it began to work.
    pub first_us: Option<u64>,
    /// Where its time went.
    pub times: HopTimes,
    /// Some of its jobs.
    pub chunks: Vec<ChunkTimes>,
}

impl HopTiming {
    /// Of a hop over these grains: the first, and one past the last.
    pub fn new(grains: (u64, u64)) -> Self {
        Self { grains, first_us: None, times: HopTimes::default(), chunks: Vec::new() }
    }

    /// Adds a job.
    pub fn add(&mut self, batch: TimedBatch) {
        let [waited, began, done] = batch.at_us;
        let (computed_us, disk_us) = (as_micros(batch.spent.computed), as_micros(batch.spent.disk));
        self.first_us.get_or_insert(began);
        self.times.upstream_us += began.saturating_sub(waited);
        self.times.computed_us += computed_us;
        self.times.disk_us += disk_us;
        self.times.queued_us += done.saturating_sub(began).saturating_sub(computed_us + disk_us);
        // Whoever passes the next sixty-fourth is reported.
        let all = self.grains.1.saturating_sub(self.grains.0).max(1);
        let part = |grain: u64| grain.saturating_sub(self.grains.0) * CHUNKS_REPORTED / all;
        if part(batch.grains.1) > part(batch.grains.0) {
            self.chunks.push(ChunkTimes { grains: batch.grains, span_us: (began, done) });
        }
    }
}

/// Whole microseconds.
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
        account.add(TimedBatch { grains: (10, 13), at_us: [5, 15, 100], spent });
        account.add(TimedBatch { grains: (13, 14), at_us: [100, 100, 150], spent });
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
                account.add(TimedBatch { grains: (grain, grain + 1), at_us: [0; 3], spent });
            }
            assert_eq!(account.chunks.len() as u64, grains.min(CHUNKS_REPORTED), "{grains}");
            assert_eq!(account.chunks.last().unwrap().grains.1, grains);
        }
    }
}
