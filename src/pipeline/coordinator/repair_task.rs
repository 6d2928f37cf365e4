//! The task of a repair and its limits. A repair that a person requests has no limits; an automatic
//! one keeps to its stripes, to the nodes that are given up, and to a share of the links.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::error::CoordinatorError;
use super::node_loads::NodeLoads;
use super::repair_rate::{RepairRate, TransferLimit};
use crate::id::{NodeId, ShardId, StepRef};
use crate::repair_policy::GivenUp;
use crate::wire::calls::RepairOptions;

/// The stripes that are repaired, by shard. The records of each of these shards are repaired, too.
pub type StripesByShard = BTreeMap<ShardId, BTreeSet<u32>>;

/// The conditions of an automatic repair: its stripes, the nodes that are given up, its share of
/// the links, and the token that stops it.
#[derive(Debug, Clone, Default)]
pub struct RepairLimits {
    /// The nodes that are given up.
    pub given_up: GivenUp,
    /// The percentage of the rate of the links at which the repair sends. Work without a limit of
    /// its rate takes this percentage of the time; the repair pauses for the rest, and owns no
    /// shard meanwhile.
    pub share_percent: u8,
    /// The rate of the links, as automatic repairs have measured it.
    pub rate: Arc<RepairRate>,
    /// The stripes that are repaired.
    pub stripes: StripesByShard,
    /// Cancelled to end the repair before its next stripe, plan or copy.
    pub stop: CancellationToken,
}

impl RepairLimits {
    /// Returns the pause that a repair owes after a stripe which took this time, if it owed `owed`
    /// before. Limits of the rate have lengthened the stripe by `limit_delay`, which counts as
    /// pause.
    pub(super) fn add_owed_pause(
        &self,
        owed: Duration,
        took: Duration,
        limit_delay: Duration,
    ) -> Duration {
        let share = u32::from(self.share_percent.clamp(1, 100));
        let unlimited = took.saturating_sub(limit_delay);
        (owed + unlimited.saturating_mul(100 - share) / share).saturating_sub(limit_delay)
    }
}

/// The cause of a repair.
#[derive(Debug)]
pub enum RepairCause {
    /// A person's request. It gives up the pieces of these nodes, and the replicas of all nodes
    /// that are away.
    Request(BTreeSet<NodeId>),
    /// The catalogue server, after a survey.
    Survey(RepairLimits),
}

/// The request that a repair carries out.
#[derive(Debug, Clone, Copy)]
pub(super) struct RepairTask<'a> {
    pub step_ref: StepRef<'a>,
    pub options: RepairOptions,
    pub cause: &'a RepairCause,
    pub loads: &'a NodeLoads,
    /// The revision of the step's archive request when the repair began; `None` if there was none.
    pub request_revision: Option<u64>,
}

impl<'a> RepairTask<'a> {
    /// Returns the limits of an automatic repair; `None` if a person asked for the repair.
    pub fn limits(self) -> Option<&'a RepairLimits> {
        match self.cause {
            RepairCause::Request(_) => None,
            RepairCause::Survey(limits) => Some(limits),
        }
    }

    /// Returns the limit for a transfer of `bytes` through one link. `None` if it sends as fast as
    /// it can.
    pub fn choose_limit(self, bytes: u64, now: Duration) -> Option<TransferLimit> {
        let limits = self.limits()?;
        limits.rate.choose_limit(limits.share_percent, bytes, now)
    }

    /// Records the rate of a transfer that had no limit and succeeded. `now` is its end.
    pub fn record_rate(self, bytes: u64, took: Duration, now: Duration) {
        if let Some(limits) = self.limits() {
            limits.rate.record(bytes, took, now);
        }
    }

    /// Returns an error if the repair was stopped.
    pub fn ensure_not_stopped(self) -> Result<(), CoordinatorError> {
        match self.limits().is_some_and(|limits| limits.stop.is_cancelled()) {
            true => Err(CoordinatorError::RepairStopped { what: self.step_ref.to_string() }),
            false => Ok(()),
        }
    }

    /// Returns whether the replicas of a node that is away are copied to a spare.
    pub fn gives_up_replicas_of(self, node: NodeId) -> bool {
        self.limits().is_none_or(|limits| limits.given_up.replicas.contains(&node))
    }

    /// Returns whether the pieces of a node that is away are made on spares.
    pub fn gives_up_pieces_of(self, node: NodeId, is_urgent: bool) -> bool {
        match self.cause {
            RepairCause::Request(given_up) => given_up.contains(&node),
            RepairCause::Survey(RepairLimits { given_up, .. }) => match is_urgent {
                true => given_up.urgent_pieces.contains(&node),
                false => given_up.pieces.contains(&node),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owed_s(share_percent: u8, owed_s: u64, took_s: u64, limit_delay_s: u64) -> u64 {
        let limits = RepairLimits { share_percent, ..RepairLimits::default() };
        let [owed, took, limit_delay] = [owed_s, took_s, limit_delay_s].map(Duration::from_secs);
        limits.add_owed_pause(owed, took, limit_delay).as_secs()
    }

    #[test]
    fn work_without_a_limit_takes_its_share_of_the_time() {
        assert_eq!(owed_s(25, 0, 10, 0), 30);
        assert_eq!(owed_s(25, 7, 10, 0), 37);
        assert_eq!(owed_s(100, 0, 10, 0), 0);
        assert_eq!(owed_s(0, 0, 10, 0), 990);
    }

    #[test]
    fn the_time_that_limits_have_cost_counts_as_pause() {
        // Ten seconds at the full rate would pause for thirty.
        assert_eq!(owed_s(25, 0, 10 + 30, 30), 0);
        // The links were slower than the limit: twenty of fifty seconds count as work.
        assert_eq!(owed_s(25, 0, 20 + 30, 30), 30);
    }
}
