//! The log lines of work that is tried again and again. During an outage each try fails in the same
//! way, so only the first failure is logged, and then one at most every ten minutes.

use std::time::Duration;

/// Shortest time between two log lines about failures in a row.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// The time of the last log line about the failures in a row of one kind of work, and the number of
/// failures since that line.
#[derive(Debug, Default)]
pub(in crate::node) struct FailureLog {
    /// The time of the last log line about the current failures in a row. `None` after a success.
    logged_at: Option<Duration>,
    /// Number of failures since that line.
    unlogged: u64,
}

impl FailureLog {
    /// Records a failure at the time `now` of the node's clock. Returns the number of failures
    /// since the last line, with this one, if a line is due; otherwise `None`.
    pub(in crate::node) fn record_failure(&mut self, now: Duration) -> Option<u64> {
        self.unlogged += 1;
        if self.logged_at.is_some_and(|at| now < at.saturating_add(LOG_INTERVAL)) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }

    /// Records a success: the next failure is logged at once. Returns whether failures preceded
    /// this success.
    pub(in crate::node) fn record_success(&mut self) -> bool {
        self.unlogged = 0;
        self.logged_at.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_logged_when_it_begins_and_every_ten_minutes() {
        let mut log = FailureLog::default();
        assert!(!log.record_success());
        // A try every second for half an hour.
        let lines: Vec<(u64, u64)> = (0..1800)
            .filter_map(|second| Some((second, log.record_failure(Duration::from_secs(second))?)))
            .collect();
        assert_eq!(lines, [(0, 1), (600, 600), (1200, 600)]);
        assert!(log.record_success() && !log.record_success());
        assert_eq!(log.record_failure(Duration::from_secs(1801)), Some(1));
    }
}
