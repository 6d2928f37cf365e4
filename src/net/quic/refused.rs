//! A log of refused connections: at most one line per minute and source, with a count, so that no
//! peer can fill the disk with log lines.

use std::collections::HashMap;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::Clock;

/// Minimum time between two lines about one source.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of sources that are counted separately. All others share one line.
const MAX_SOURCES: usize = 1024;
/// The address that stands for all sources that are not counted separately.
const OTHERS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Counts of refused connections by source.
pub(super) struct Refused {
    clock: Arc<dyn Clock>,
    sources: Mutex<HashMap<IpAddr, Source>>,
}

struct Source {
    told_at: Duration,
    untold: u64,
}

impl Refused {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, sources: Mutex::default() }
    }

    /// Logs a refused connection, or counts it for a later line.
    pub(super) fn note(&self, from: SocketAddr, why: &dyn Display) {
        if let Some(count) = self.count(from.ip()) {
            tracing::info!(%from, %why, count, "refused incoming connections: `from` and `why` are those of the last one");
        }
    }

    /// Counts a refused connection. Returns the number since the last line if it is time for
    /// another line.
    fn count(&self, from: IpAddr) -> Option<u64> {
        let now = self.clock.now();
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if sources.len() >= MAX_SOURCES {
            sources.retain(|_, source| now < source.told_at.saturating_add(TELL_EVERY));
        }
        let is_known = sources.contains_key(&from);
        let from = if is_known || sources.len() < MAX_SOURCES { from } else { OTHERS };
        let Some(source) = sources.get_mut(&from) else {
            sources.insert(from, Source { told_at: now, untold: 0 });
            return Some(1);
        };
        source.untold += 1;
        if now < source.told_at.saturating_add(TELL_EVERY) {
            return None;
        }
        source.told_at = now;
        Some(std::mem::take(&mut source.untold))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)] // time that a test lets pass

    use super::*;
    use crate::clock::SystemClock;

    #[tokio::test(start_paused = true)]
    async fn a_source_is_told_once_a_minute_with_its_number_and_many_share_one() {
        let refused = Refused::new(SystemClock::new());
        let at = |last: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
        assert_eq!(refused.count(at(1)), Some(1));
        for _ in 0..500 {
            assert_eq!(refused.count(at(1)), None);
        }
        assert_eq!(refused.count(at(2)), Some(1));
        tokio::time::sleep(TELL_EVERY).await;
        assert_eq!(refused.count(at(1)), Some(501));
        for high in 0..8 {
            for low in 0..=255 {
                refused.count(IpAddr::V4(Ipv4Addr::new(10, 1, high, low)));
            }
        }
        let known = refused.sources.lock().unwrap().len();
        assert!(known <= MAX_SOURCES + 1, "{known}");
    }
}
