//! The order in which degraded steps are repaired, and the time from which a step may be repaired.

use std::time::Duration;

use crate::id::SaveId;

/// The priority of a degraded step. The least is repaired first: the step that survives the fewest
/// further losses, and of these the oldest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepairPriority {
    /// Number of further nodes that may be lost; `None` if a block cannot be read now.
    pub survives: Option<u32>,
    /// The time at which the step was saved, in seconds since 1970.
    pub saved_at: u64,
    /// The save.
    pub save: SaveId,
}

/// Returns whether a step that was first seen degraded at `since` may be repaired now. An urgent
/// step, of which some stripe survives no further loss, need not wait for the grace.
pub fn is_repair_due(is_urgent: bool, since: Duration, now: Duration, grace: Duration) -> bool {
    is_urgent || now >= since.saturating_add(grace)
}
