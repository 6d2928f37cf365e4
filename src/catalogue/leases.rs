//! The leases of the catalogue: those of saves and archivings, and those of nodes.
//!
//! Leases exist only in memory and follow the monotonic clock of the catalogue server's process. Two
//! events must not end them, because no lease can be renewed meanwhile: a restart of the server, and a
//! time in which its process does not run, such as a pause of its virtual machine.

use std::collections::HashMap;
use std::time::Duration;

use super::CatalogueError;
use crate::id::{LeaseId, NodeId};
use crate::kind::ErrorKind;

/// Maximum number of leases of saves, archivings and repairs in memory at once. The registrations
/// of nodes are not counted.
const MAX_LEASES: usize = 65_536;

/// The leases, and how long each of them lasts.
#[derive(Debug)]
pub(super) struct Leases {
    period: Duration,
    /// The time at which this catalogue was opened, or the end of a time in which the process did not
    /// run, if that began in the first period. A lease that is not in memory counts as alive for one
    /// period from then on.
    started: Duration,
    /// The end of each lease; zero if it was revoked.
    ends: HashMap<LeaseId, Duration>,
    live_until: HashMap<NodeId, Duration>,
    /// The last time at which the process is known to have run; `None` before the first heartbeat: a
    /// catalogue that is not served has none, and its leases end by the clock.
    last_heartbeat: Option<Duration>,
}

impl Leases {
    /// Returns a table without leases. `period` is the lifetime of each lease.
    pub(super) fn new(period: Duration, started: Duration) -> Self {
        Self {
            period,
            started,
            ends: HashMap::new(),
            live_until: HashMap::new(),
            last_heartbeat: None,
        }
    }

    /// Returns the lifetime of a lease.
    pub(super) fn period(&self) -> Duration {
        self.period
    }

    /// Records that the process runs. The server calls this four times in each period.
    pub(super) fn note_heartbeat(&mut self, now: Duration) {
        self.extend_if_not_run(now);
        self.last_heartbeat = Some(now);
    }

    /// Extends the leases that were alive when the process last ran by one period from `now`, if it
    /// has not run for more than half a period. All functions that depend on the time call this
    /// first: after a pause a request may be faster than the heartbeat. A lease that was found to be
    /// over stays over, because each call shows that the process runs.
    fn extend_if_not_run(&mut self, now: Duration) {
        let Some(last) = self.last_heartbeat else { return };
        let gap = now.saturating_sub(last);
        self.last_heartbeat = Some(now.max(last));
        if gap <= self.period / 2 {
            return;
        }
        tracing::warn!(
            seconds = gap.as_secs(),
            "the catalogue server did not run for a time: every lease that was alive lasts one more period"
        );
        let until = now + self.period;
        for end in self.ends.values_mut().chain(self.live_until.values_mut()) {
            if *end > last {
                *end = until;
            }
        }
        if self.started + self.period > last {
            self.started = now;
        }
    }

    /// Adds a lease.
    ///
    /// # Errors
    /// Fails with kind `Busy` if there are too many leases.
    pub(super) fn grant(&mut self, lease: LeaseId, now: Duration) -> Result<(), CatalogueError> {
        self.extend_if_not_run(now);
        // During the first period after the start, unknown leases count as alive. Revoked leases
        // must stay in memory until that period has passed.
        if now >= self.started + self.period {
            self.ends.retain(|_, end| *end > now);
        }
        self.set_end(lease, now + self.period)
    }

    /// Renews a lease. Returns false if the lease is over.
    ///
    /// # Errors
    /// Fails with kind `Busy` if the lease is not in memory and there are too many leases.
    pub(super) fn renew(&mut self, lease: LeaseId, now: Duration) -> Result<bool, CatalogueError> {
        if !self.is_alive(lease, now) {
            return Ok(false);
        }
        self.set_end(lease, now + self.period)?;
        Ok(true)
    }

    /// Returns whether a lease is alive.
    pub(super) fn is_alive(&mut self, lease: LeaseId, now: Duration) -> bool {
        self.extend_if_not_run(now);
        now < self.ends.get(&lease).copied().unwrap_or(self.started + self.period)
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// Fails with kind `Busy` if the lease is not in memory and there are too many leases.
    pub(super) fn revoke(&mut self, lease: LeaseId, now: Duration) -> Result<(), CatalogueError> {
        match self.ends.contains_key(&lease) || self.is_alive(lease, now) {
            true => self.set_end(lease, Duration::ZERO),
            false => Ok(()),
        }
    }

    fn set_end(&mut self, lease: LeaseId, end: Duration) -> Result<(), CatalogueError> {
        if !self.ends.contains_key(&lease) && self.ends.len() >= MAX_LEASES {
            let message = format!("{MAX_LEASES} saves and archivings are under way: try later");
            return Err(CatalogueError::Refused { kind: ErrorKind::Busy, message });
        }
        self.ends.insert(lease, end);
        Ok(())
    }

    /// Renews the lease of a registered node, or grants it.
    pub(super) fn renew_node(&mut self, node: NodeId, now: Duration) {
        self.extend_if_not_run(now);
        self.live_until.insert(node, now + self.period);
    }

    /// Returns whether a registered node is live. A node that has not registered with this catalogue
    /// since it was opened counts as live for one period.
    pub(super) fn is_node_live(&mut self, node: NodeId, now: Duration) -> bool {
        self.extend_if_not_run(now);
        now < self.live_until.get(&node).copied().unwrap_or(self.started + self.period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(8);
    const LEASES: [LeaseId; 3] = [LeaseId([1; 16]), LeaseId([2; 16]), LeaseId([3; 16])];

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Runs the server for some seconds, with a heartbeat in each.
    fn run(leases: &mut Leases, seconds: std::ops::RangeInclusive<u64>) {
        seconds.for_each(|second| leases.note_heartbeat(at(second)));
    }

    #[test]
    fn a_lease_ends_by_the_time_in_which_the_server_runs() {
        let mut leases = Leases::new(PERIOD, at(0));
        let node = NodeId::of(&"node".parse().unwrap());
        run(&mut leases, 0..=20);
        let [kept, revoked, over] = LEASES;
        leases.grant(over, at(20)).unwrap();
        run(&mut leases, 21..=30);
        assert!(!leases.is_alive(over, at(30)), "nobody renewed it");
        leases.grant(kept, at(30)).unwrap();
        leases.grant(revoked, at(30)).unwrap();
        leases.revoke(revoked, at(31)).unwrap();
        leases.renew_node(node, at(31));
        run(&mut leases, 31..=32);
        // The process does not run until second 100.
        assert!(leases.is_alive(kept, at(100)) && leases.is_node_live(node, at(100)));
        assert!(!leases.is_alive(revoked, at(100)) && !leases.is_alive(over, at(100)));
        assert!(!leases.is_alive(LeaseId([9; 16]), at(100)), "it is unknown");
        run(&mut leases, 101..=107);
        assert!(leases.renew(kept, at(107)).unwrap());
        run(&mut leases, 108..=109);
        assert!(!leases.is_node_live(node, at(109)), "it has had its period");
        assert!(leases.is_alive(kept, at(109)));
    }

    #[test]
    fn a_pause_in_the_first_period_begins_it_anew() {
        let mut leases = Leases::new(PERIOD, at(0));
        run(&mut leases, 0..=5);
        assert!(leases.is_alive(LEASES[0], at(50)), "it may be one of before the start");
        run(&mut leases, 51..=58);
        assert!(!leases.is_alive(LEASES[0], at(58)));
    }
}
