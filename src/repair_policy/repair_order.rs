//! The order in which degraded steps are repaired, and the time from which a step may be repaired.

use std::time::Duration;

use crate::id::SaveId;

/// The priority of a step that is to be repaired. The least is repaired first: of the degraded
/// steps the one that survives the fewest further losses, and of these the oldest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepairPriority {
    /// Whether nothing is missing, and only surplus copies are to be dropped.
    pub is_whole: bool,
    /// Number of further nodes that may be lost; `None` if a block cannot be read now.
    pub survives: Option<u32>,
    /// The time at which the step was saved, in seconds since 1970.
    pub saved_at: u64,
    /// The save.
    pub save: SaveId,
}

impl RepairPriority {
    /// Returns whether a repair of the other step is stopped for this one.
    pub fn interrupts(&self, other: &RepairPriority) -> bool {
        (self.is_whole, self.survives) < (other.is_whole, other.survives)
    }
}

/// Returns whether a step that was first seen degraded at `since` may be repaired now. An urgent
/// step, of which some stripe survives no further loss, need not wait for the grace.
pub fn is_repair_due(is_urgent: bool, since: Duration, now: Duration, grace: Duration) -> bool {
    is_urgent || now >= since.saturating_add(grace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_with_surplus_copies_comes_last_and_is_interrupted() {
        let of = |is_whole, survives, saved_at| RepairPriority {
            is_whole,
            survives,
            saved_at,
            save: SaveId([0; 12]),
        };
        let order = [
            of(false, None, 9),
            of(false, Some(0), 9),
            of(false, Some(3), 1),
            of(false, Some(3), 9),
            of(true, Some(0), 1),
            of(true, Some(3), 1),
        ];
        assert!(order.is_sorted());
        assert!(order[2].interrupts(&order[4]) && !order[4].interrupts(&order[2]));
        assert!(order[1].interrupts(&order[2]) && !order[2].interrupts(&order[3]));
    }
}
