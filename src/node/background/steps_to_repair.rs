//! The steps that automatic repair is to repair, and those that it leaves alone (docs/semantics.md,
//! 11).

use std::time::Duration;

use crate::id::{Job, SaveId, Step};
use crate::node::catalogue_server::repair_survey::StepHealth;
use crate::repair_policy::RepairPriority;
use crate::wire::calls::DegradedStep;

/// Maximum number of steps to repair that a survey keeps: the first ones in the order of repair.
/// When these are repaired, a further survey finds more.
pub(super) const MAX_TO_REPAIR: usize = 4096;

/// A step that is degraded or has surplus copies.
#[derive(Debug, Clone)]
pub(super) struct StepToRepair {
    pub(super) job: Job,
    pub(super) step: Step,
    pub(super) save: SaveId,
    pub(super) saved_at: u64,
    pub(super) health: StepHealth,
    /// The time at which a survey first found that the step is to be repaired.
    pub(super) since: Duration,
    /// Whether the last survey could not determine the health of the step. Such a step is not
    /// repaired.
    pub(super) is_unknown: bool,
}

impl StepToRepair {
    /// Returns the priority of the step.
    pub(super) fn priority(&self) -> RepairPriority {
        let &Self { saved_at, save, ref health, .. } = self;
        let (is_whole, survives) = (!health.is_degraded(), health.survives);
        RepairPriority { is_whole, survives, saved_at, save }
    }

    /// Returns the step with this health. Missing parts and surplus copies have graces of their own:
    /// a step that goes from one to the other begins its grace `now`.
    pub(super) fn with_health(self, health: StepHealth, now: Duration) -> Self {
        let is_same = self.health.is_degraded() == health.is_degraded();
        Self { health, since: if is_same { self.since } else { now }, ..self }
    }
}

/// The list of nodes and the health of a step that is left alone until one of the two changes, or
/// for some time.
pub(super) struct Settled {
    /// The version of the list of nodes.
    pub(super) version: u64,
    /// The health of the step before the repair.
    pub(super) health: StepHealth,
    /// The time at which the step is tried again even without such a change.
    pub(super) until: Duration,
}

impl Settled {
    /// Returns whether a step with this health is left alone while the list of nodes has this
    /// version.
    pub(super) fn holds_for(&self, version: u64, health: StepHealth, now: Duration) -> bool {
        // Nodes drop surplus copies some time after the repair, so their number may fall.
        let has_more_surplus = health.surplus > self.health.surplus;
        let known = StepHealth { surplus: health.surplus, ..self.health };
        self.version == version && known == health && !has_more_surplus && now < self.until
    }
}

/// Sorts the steps into the order in which they are repaired, and drops all but the first
/// [`MAX_TO_REPAIR`].
pub(super) fn keep_worst(to_repair: &mut Vec<StepToRepair>) {
    to_repair.sort_by_key(StepToRepair::priority);
    to_repair.truncate(MAX_TO_REPAIR);
}

/// Returns what the repair status says about a degraded step.
pub(super) fn describe(step: &StepToRepair) -> DegradedStep {
    let StepHealth { survives, missing, missing_bytes, records, .. } = step.health;
    let (job, step) = (step.job.clone(), step.step);
    DegradedStep { job, step, survives, missing, missing_bytes, records }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: StepHealth = StepHealth {
        survives: Some(2),
        has_urgent_stripe: false,
        missing: 0,
        missing_bytes: 0,
        records: 0,
        surplus: 3,
    };
    const LATER: Duration = Duration::from_secs(60);

    #[test]
    fn a_settled_step_is_tried_again_when_it_has_more_surplus_copies_or_anything_is_missing() {
        let settled = Settled { version: 7, health: WHOLE, until: LATER };
        let holds = |health| settled.holds_for(7, health, Duration::ZERO);
        assert!(holds(WHOLE));
        assert!(holds(StepHealth { surplus: 1, ..WHOLE }), "a node has dropped copies");
        assert!(!holds(StepHealth { surplus: 4, ..WHOLE }));
        assert!(!holds(StepHealth { missing: 1, ..WHOLE }));
        assert!(!settled.holds_for(8, WHOLE, Duration::ZERO), "the list of nodes has changed");
        assert!(!settled.holds_for(7, WHOLE, LATER));
    }

    #[test]
    fn missing_parts_and_surplus_copies_have_graces_of_their_own() {
        let step = StepToRepair {
            job: "job".parse().unwrap(),
            step: Step(1),
            save: SaveId([1; 12]),
            saved_at: 0,
            health: WHOLE,
            since: Duration::ZERO,
            is_unknown: false,
        };
        let fewer = step.with_health(StepHealth { surplus: 1, ..WHOLE }, LATER);
        assert_eq!(fewer.since, Duration::ZERO);
        let degraded = fewer.with_health(StepHealth { missing: 1, ..WHOLE }, LATER);
        assert_eq!(degraded.since, LATER);
        let worse = degraded.with_health(StepHealth { missing: 2, ..WHOLE }, 2 * LATER);
        assert_eq!(worse.since, LATER);
        assert_eq!(worse.with_health(WHOLE, 2 * LATER).since, 2 * LATER);
    }
}
