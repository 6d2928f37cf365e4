//! The time of a machine: its own date, which may jump, and its own clock, which runs a little fast
//! or slow.
//!
//! Both follow tokio's paused time. By default every machine has the same date and a clock of the
//! right speed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rapidraid::clock::Clock;
use rapidraid::entropy::{Entropy, SeededEntropy};

/// The default date, in seconds since 1970.
const DATE: u64 = 1_800_000_000;
/// Maximum error of a date: thirty years.
const MAX_OFF_SECONDS: u64 = 30 * 365 * 86_400;
/// Seconds on the clock per thousand real seconds: from 10 % slow to 10 % fast.
const SLOWEST: u64 = 900;
const FASTEST: u64 = 1100;
const RIGHT: u64 = 1000;
/// Maximum start value of a process's monotonic clock.
const MAX_BEGIN_MS: u64 = 1 << 40;

/// The date and the clock of a machine, which outlive its processes.
pub struct MachineTime {
    wall_seconds: AtomicU64,
    permille: u64,
    coin: Option<SeededEntropy>,
}

impl Default for MachineTime {
    fn default() -> Self {
        Self { wall_seconds: AtomicU64::new(DATE), permille: RIGHT, coin: None }
    }
}

impl MachineTime {
    /// Returns a wrong date and a clock of the wrong speed, drawn from `seed`.
    pub fn drawn(seed: u64) -> Self {
        let coin = SeededEntropy::new(seed);
        let wall_seconds = DATE - MAX_OFF_SECONDS + coin.below(2 * MAX_OFF_SECONDS);
        let permille = SLOWEST + coin.below(FASTEST - SLOWEST + 1);
        Self { wall_seconds: AtomicU64::new(wall_seconds), permille, coin: Some(coin) }
    }

    /// Moves the date by `by_seconds`, backwards if negative, but not to before 1970.
    pub fn jump(&self, by_seconds: i64) {
        let before = self.wall_seconds.load(Ordering::Relaxed);
        self.wall_seconds.store(before.saturating_add_signed(by_seconds), Ordering::Relaxed);
    }

    /// Returns the clock of a process that starts now.
    pub fn clock(self: &Arc<Self>) -> Arc<dyn Clock> {
        let begin = self.coin.as_ref().map_or(0, |coin| coin.below(MAX_BEGIN_MS));
        let begin = Duration::from_millis(begin);
        Arc::new(MachineClock { start: tokio::time::Instant::now(), begin, time: self.clone() })
    }
}

struct MachineClock {
    start: tokio::time::Instant,
    begin: Duration,
    time: Arc<MachineTime>,
}

/// Returns `duration` times `of` divided by `to`. The result is rounded up, so that a task that has
/// slept sees the full time as passed.
fn scaled(duration: Duration, of: u64, to: u64) -> Duration {
    let nanos = (duration.as_nanos() * u128::from(of)).div_ceil(u128::from(to));
    Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX))
}

#[async_trait::async_trait]
impl Clock for MachineClock {
    fn now(&self) -> Duration {
        self.begin + scaled(self.start.elapsed(), self.time.permille, RIGHT)
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(scaled(duration, RIGHT, self.time.permille)).await;
    }

    fn wall_seconds(&self) -> u64 {
        self.time.wall_seconds.load(Ordering::Relaxed)
    }
}
