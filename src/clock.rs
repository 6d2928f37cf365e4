//! The only source of time is a [`Clock`], so that a simulated run controls time.
#![allow(clippy::disallowed_methods)] // the only place that reads the system's clocks

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

/// A monotonic clock, a way to wait on it, and the wall-clock time.
#[async_trait]
pub trait Clock: Send + Sync + 'static {
    /// Returns the time since a fixed moment in the life of this process. It never goes back.
    /// Leases and deadlines use this time alone.
    fn now(&self) -> Duration;

    /// Waits until `duration` has passed.
    async fn sleep(&self, duration: Duration);

    /// Returns the seconds since 1970 by the machine's wall clock, which may jump in both
    /// directions.
    ///
    /// The value is recorded and displayed. Two decisions depend on it: when a maintenance ends,
    /// and the order of equally urgent repairs.
    fn wall_seconds(&self) -> u64;
}

/// The clock of the machine, over tokio's timer (which tests may pause).
#[derive(Debug)]
pub struct SystemClock {
    start: tokio::time::Instant,
}

impl SystemClock {
    /// Returns a clock that starts at zero now.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { start: tokio::time::Instant::now() })
    }
}

#[async_trait]
impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }

    fn wall_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

/// The error for work that did not end within its time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no answer within {limit:?}")]
pub struct Elapsed {
    /// The limit that was exceeded.
    pub limit: Duration,
}

/// Runs `work` for at most `limit` and returns its output. When the limit passes, `work` is dropped
/// at its current await point and the result is [`Elapsed`].
pub async fn deadline<T>(
    clock: &dyn Clock,
    limit: Duration,
    work: impl Future<Output = T>,
) -> Result<T, Elapsed> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = clock.sleep(limit) => Err(Elapsed { limit }),
    }
}

/// Returns the peak resident memory of this process in bytes, or 0 if the system does not report
/// it.
pub fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|kib| kib.trim().parse().ok());
    kib.map_or(0, |kib: u64| kib * 1024)
}
