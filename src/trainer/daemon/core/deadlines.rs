//! The time limit for filling a step on all ranks.

use std::time::Duration;

use super::{Core, StagedStep, Use};
use crate::id::LaunchId;
use crate::kind::ErrorKind;
use crate::trainer::protocol::Failure;

impl Core {
    /// Returns whether a step is late, so that [`Core::check_deadlines`] would drop it.
    pub fn has_late(&self, now: Duration) -> bool {
        let mut steps = self.jobs.values().flat_map(|job| job.steps.values());
        steps.any(|step| {
            !step.phase.is_complete() && now.saturating_sub(step.began_at) > self.limits.fill
        })
    }

    /// Drops the steps that not all ranks have staged in time, counted from the first rank that
    /// began, or from the last time at which a rank waited until an earlier step is saved.
    pub fn check_deadlines(&mut self, now: Duration) {
        let limit = self.limits.fill;
        self.renew_deadlines_of_waiting_ranks(now);
        let mut late = Vec::new();
        for (job, state) in &self.jobs {
            late.extend(state.keys(job, |_, _, step| {
                !step.phase.is_complete() && now.saturating_sub(step.began_at) > limit
            }));
        }
        for key in late {
            let message = format!("{} after {} s", self.progress_of(&key), limit.as_secs());
            tracing::warn!(job = %key.job, "{message}: the step is dropped");
            let hint = "see whether the process is stopped; staging.fill_s is the limit";
            self.drop_step(&key, Failure::new(ErrorKind::Timeout, message, hint));
        }
    }

    /// Begins the time limit of a step anew if a rank that has not staged it has no free segment,
    /// because earlier steps are still being saved from all that it has.
    fn renew_deadlines_of_waiting_ranks(&mut self, now: Duration) {
        let mut waiting = Vec::new();
        for (job, state) in &self.jobs {
            let is_waiting = |rank: u32, launch: LaunchId| {
                let member = state.launches.get(&launch).and_then(|of| of.members.get(&rank));
                let own = member.map(|member| self.owned(*member)).unwrap_or_default();
                let mut own = own.iter().filter_map(|id| self.segments.get(id)).peekable();
                own.peek().is_some()
                    && own.all(|segment| match &segment.state {
                        Use::Held(key) => self.step(key).is_some_and(StagedStep::is_uncommitted),
                        _ => !segment.is_current,
                    })
            };
            waiting.extend(state.keys(job, |_, launch, step| {
                !step.phase.is_complete()
                    && (0..step.world)
                        .any(|rank| !step.parts.contains_key(&rank) && is_waiting(rank, launch))
            }));
        }
        for key in waiting {
            if let Some(step) = self.step_mut(&key) {
                step.began_at = now;
            }
        }
    }
}
