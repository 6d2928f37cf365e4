//! A limit on the rate of one stream of bytes.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::units::GRAIN_BYTES;

/// Lowest rate, in bytes a second: one grain a second. A receiver that waits for the next grain must
/// not take a limited sender for a stalled one.
pub const MIN_BYTES_PER_S: u64 = GRAIN_BYTES;
/// Unused time that a limiter makes up for. It covers the waits that end late because the timer has
/// a resolution of a millisecond.
const CREDIT: Duration = Duration::from_millis(10);
/// Shortest wait. Below it, requests pass at once and the next ones wait longer.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// Delays its caller so that bytes pass at a limited rate. The limiter makes up for time that the
/// caller left unused: for the time of one request, or for 10 ms if that is longer.
pub struct RateLimiter {
    clock: Arc<dyn Clock>,
    bytes_per_s: Option<u64>,
    /// The time from which the next request may pass.
    free_at: Duration,
}

impl RateLimiter {
    /// Returns a limiter to `bytes_per_s`, or to [`MIN_BYTES_PER_S`] if that is more. Without a rate,
    /// everything passes at once.
    pub fn new(clock: Arc<dyn Clock>, bytes_per_s: Option<u64>) -> Self {
        let bytes_per_s = bytes_per_s.map(|rate| rate.max(MIN_BYTES_PER_S));
        let free_at = clock.now();
        Self { clock, bytes_per_s, free_at }
    }

    /// Waits until `bytes` may pass. The first request passes at once.
    pub async fn wait(&mut self, bytes: u64) {
        let Some(rate) = self.bytes_per_s else { return };
        let wait = self.free_at.saturating_sub(self.clock.now());
        if wait >= MIN_WAIT {
            self.clock.sleep(wait).await;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let earliest = self.clock.now().saturating_sub(cost.max(CREDIT));
        self.free_at = self.free_at.max(earliest) + cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    async fn pass(limiter: &mut RateLimiter, requests: u64) -> Duration {
        let begun_at = limiter.clock.now();
        for _ in 0..requests {
            limiter.wait(GRAIN_BYTES).await;
        }
        limiter.clock.now() - begun_at
    }

    #[tokio::test(start_paused = true)]
    async fn requests_pass_at_the_rate_and_idle_time_is_not_saved_up() {
        let clock = SystemClock::new();
        let mut limiter = RateLimiter::new(clock.clone(), Some(10 * GRAIN_BYTES));
        assert_eq!(pass(&mut limiter, 101).await.as_millis(), 10_000);
        clock.sleep(Duration::from_secs(60)).await;
        assert_eq!(pass(&mut limiter, 102).await.as_millis(), 10_000);
    }

    /// A request takes a sixteenth of a millisecond, which no timer measures.
    #[tokio::test(start_paused = true)]
    async fn high_rates_are_kept_too() {
        let mut limiter = RateLimiter::new(SystemClock::new(), Some(16_000 * GRAIN_BYTES));
        let took = pass(&mut limiter, 160_000).await;
        assert!((9_980..10_020).contains(&took.as_millis()), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_lowest_rate_is_a_grain_a_second_and_without_a_rate_nothing_waits() {
        let mut lowest = RateLimiter::new(SystemClock::new(), Some(0));
        assert_eq!(pass(&mut lowest, 11).await, Duration::from_secs(10));
        let mut unlimited = RateLimiter::new(SystemClock::new(), None);
        assert_eq!(pass(&mut unlimited, 1000).await, Duration::ZERO);
    }
}
