//! Steps that were removed from the cluster: their launch may save them again.

use super::steps::saved_twice;
use super::{Core, Effect, FillOutcome, Launch};
use crate::id::{Job, SaveId, Step};
use crate::trainer::protocol::{Failure, Place};

impl Launch {
    /// Returns whether the launch has committed the step and, as far as is known, the cluster still
    /// has it.
    pub(super) fn has_saved(&self, step: Step) -> bool {
        matches!(self.over.get(&step), Some(Ok(_))) && !self.removed.contains(&step)
    }
}

impl Core {
    /// Notes that this daemon has removed a save of a step of the job from the cluster. Launches may
    /// save the step again. Another save of the step, which was committed meanwhile, stays.
    pub fn note_removal(&mut self, job: &Job, step: Step, save: SaveId) {
        let Some(state) = self.jobs.get_mut(job) else { return };
        state.changes += 1;
        self.release_replaced(job, &|other, of| (other, of) == (step, save));
        self.allow_again(job, &|other, of| other == step && of.is_none_or(|of| of == save));
    }

    /// Lets the launches of a job save the steps again for which `is_gone` holds; the save is not
    /// known for a step that another launch committed. The hosts of a launch on several would
    /// disagree, because only this one knows, so such a launch may not.
    pub(super) fn allow_again(
        &mut self,
        job: &Job,
        is_gone: &dyn Fn(Step, Option<SaveId>) -> bool,
    ) {
        let Some(state) = self.jobs.get_mut(job) else { return };
        let mut is_changed = false;
        for launch in state.launches.values_mut().filter(|of| !of.is_on_several_hosts()) {
            let saved = launch
                .over
                .iter()
                .filter_map(|(step, how)| Some((*step, Some(how.as_ref().ok()?.0))));
            let gone = saved.filter(|(step, save)| is_gone(*step, *save));
            launch.removed.extend(gone.map(|(step, _)| step));
            if let Some(before) = &mut launch.committed_before {
                let count = before.len();
                before.retain(|step| !is_gone(*step, None));
                is_changed |= before.len() < count;
            }
        }
        self.effects.extend(is_changed.then(|| Effect::KeepJob(job.clone())));
    }

    /// Checks that neither the launch nor an earlier one has saved the step. Returns the outcome of
    /// the fill if it cannot begin now.
    pub(super) fn check_not_saved(
        &mut self,
        place: &Place,
        step: Step,
    ) -> Result<Option<FillOutcome>, Failure> {
        let launch = self.jobs.get(&place.job).and_then(|job| job.launches.get(&place.launch));
        let Some(launch) = launch else { return Ok(None) };
        let Some(committed_before) = &launch.committed_before else {
            return Ok(Some(FillOutcome::Unchecked));
        };
        let is_on_several_hosts = launch.is_on_several_hosts();
        if committed_before.contains(&step) || launch.has_saved(step) {
            let failure = saved_twice(place, step);
            return Err(match is_on_several_hosts {
                true => Failure { hint: "save another step".to_owned(), ..failure },
                false => failure,
            });
        }
        if is_on_several_hosts {
            return Ok(None);
        }
        Ok(self.release_removed(place, step).map(FillOutcome::Full))
    }

    /// Releases the launch's own copy of a step that the cluster no longer has. Returns what still
    /// holds the copy, if anything does.
    fn release_removed(&mut self, place: &Place, step: Step) -> Option<String> {
        let key = self.key_of(&place.job, step, place.launch)?;
        if !self.step(&key)?.is_replaced {
            return None;
        }
        if self.is_held(&key) {
            return Some(format!("step {step}, which was removed, is still being loaded"));
        }
        self.release_step(&key);
        None
    }
}
