//! Decides when the ranks of a step are warned that attempts to save it fail.

use std::time::Duration;

/// How long attempts to save a step fail before its ranks are warned. Shorter failures are normal:
/// while the catalogue moves to another node, attempts fail.
const WARNED_AFTER: Duration = Duration::from_secs(3);
/// Minimum time between two such warnings about a step.
const WARNED_EVERY: Duration = Duration::from_secs(60);

/// The warnings about failed attempts to save a step.
#[derive(Default)]
pub(super) struct FailureWarnings {
    failing_since: Option<Duration>,
    /// The last reason of which the ranks were warned, and the time.
    last: Option<(String, Duration)>,
}

impl FailureWarnings {
    /// Returns whether the ranks are to be warned of a failure at `now`. Counts it as warned of then.
    pub(super) fn is_due(&mut self, reason: &str, now: Duration) -> bool {
        let since = *self.failing_since.get_or_insert(now);
        let is_new = self.last.as_ref().is_none_or(|(last, warned_at)| {
            last != reason && now.saturating_sub(*warned_at) >= WARNED_EVERY
        });
        let is_due = is_new && now.saturating_sub(since) >= WARNED_AFTER;
        if is_due {
            self.last = Some((reason.to_owned(), now));
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_failure_is_warned_of_once_and_another_one_later() {
        let mut warnings = FailureWarnings::default();
        let mut warned = |reason: &str, at_s| warnings.is_due(reason, Duration::from_secs(at_s));
        assert!(!warned("a", 100) && !warned("a", 102));
        assert!(warned("a", 103) && !warned("a", 170), "a reason is not repeated");
        assert!(warned("b", 180) && !warned("a", 239), "reasons that alternate do not flood");
        assert!(warned("a", 240));
    }
}
