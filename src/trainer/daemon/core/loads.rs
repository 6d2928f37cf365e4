//! The effects of loads on the state: the step that a launch is given, and the steps in memory that
//! become invalid.

use super::{Core, Effect, LoadAnswer, Phase, StepKey};
use crate::id::{FillId, Job, SaveId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::Failure;

/// Maximum number of answers to loads that are kept per job.
const MAX_LOADS: usize = 64;

impl Core {
    /// Records the answer to a load of a launch unless there is one already. Returns the recorded
    /// answer: ranks that ask at the same time may find different steps, and all must get the same
    /// one.
    pub fn answer_load(&mut self, job: &Job, answer: LoadAnswer) -> Option<Step> {
        let state = self.jobs.entry(job.clone()).or_default();
        let is_known =
            |known: &&LoadAnswer| (known.launch, known.number) == (answer.launch, answer.number);
        if let Some(known) = state.loads.iter().find(is_known) {
            return known.step;
        }
        if state.loads.len() == MAX_LOADS {
            state.loads.pop_front();
        }
        state.loads.push_back(answer);
        self.effects.push(Effect::KeepJob(job.clone()));
        answer.step
    }

    /// Returns the number of events after which a list of the job's committed steps may be outdated:
    /// this daemon has committed or removed a step, or has dealt with an abandoned save.
    pub fn changes(&self, job: &Job) -> u64 {
        self.jobs.get(job).map_or(0, |state| state.changes)
    }

    /// Releases the committed steps in memory whose saves are no longer the committed ones, because
    /// the saves were removed or replaced. Steps that an upload or a reader uses stay, but no new
    /// load gets them. `changes` is the value of [`Core::changes`] when the list of committed steps
    /// was requested. Returns whether the list is valid: it is outdated, and nothing is released,
    /// if a change happened since. Launches may save the steps again that the cluster no longer has.
    pub fn drop_replaced(
        &mut self,
        job: &Job,
        changes: u64,
        committed: &dyn Fn(Step) -> Option<SaveId>,
    ) -> bool {
        if self.changes(job) != changes {
            return false;
        }
        self.release_replaced(job, &|step, save| committed(step) != Some(save));
        self.allow_again(job, &|step, _| committed(step).is_none());
        true
    }

    /// Releases the committed steps for which `is_replaced` holds. Those that an upload or a reader
    /// uses are marked instead.
    pub(super) fn release_replaced(
        &mut self,
        job: &Job,
        is_replaced: &dyn Fn(Step, SaveId) -> bool,
    ) {
        let Some(state) = self.jobs.get(job) else { return };
        let replaced = state.keys(job, |step, _, found| match &found.phase {
            Phase::Committed { save, .. } => is_replaced(step, *save),
            _ => false,
        });
        for key in replaced {
            if !self.is_held(&key) {
                self.release_step(&key);
            } else if let Some(step) = self.step_mut(&key) {
                step.is_replaced = true;
            }
        }
    }

    /// Returns the step in memory that was committed as `save`. It may be the part of one host.
    pub fn find_committed_part(&self, job: &Job, step: Step, save: SaveId) -> Option<StepKey> {
        let is_it =
            |phase: &Phase| matches!(phase, Phase::Committed { save: of, .. } if *of == save);
        let state = self.jobs.get(job)?;
        state.keys(job, |at, _, found| at == step && is_it(&found.phase)).pop()
    }

    /// Returns the jobs that have abandoned saves.
    pub fn jobs_with_abandoned_saves(&self) -> Vec<Job> {
        let jobs = self.jobs.iter().filter(|(_, state)| !state.abandoned.is_empty());
        jobs.map(|(job, _)| job.clone()).collect()
    }

    /// Returns the job's abandoned save with the highest step.
    pub fn next_abandoned(&self, job: &Job) -> Option<(Step, SaveId)> {
        self.jobs.get(job)?.abandoned.iter().max().copied()
    }

    /// Releases the memory of a committed step that cannot be verified there; later loads read it
    /// from the cluster. Returns whether the step is committed.
    pub fn give_up_copy(&mut self, key: &StepKey) -> bool {
        let phase = self.step(key).map(|step| &step.phase);
        let is_committed = matches!(phase, Some(Phase::Committed { .. }));
        if is_committed {
            self.release_step(key);
        }
        is_committed
    }

    /// Gives up a step in memory whose bytes are not what was staged. If it is committed, later
    /// loads read it from the cluster; if not, it is lost.
    pub fn give_up_memory(&mut self, fill: FillId, name: &str) {
        let mut keys = Vec::new();
        for (job, state) in &self.jobs {
            keys.extend(state.keys(job, |_, _, found| found.fill == fill));
        }
        for key in keys {
            match self.step(&key).map(|step| &step.phase) {
                Some(Phase::Committed { .. }) => self.release_step(&key),
                Some(_) => {
                    let message = format!("step {}: {name} was damaged in memory", key.step);
                    self.drop_step(
                        &key,
                        Failure::new(ErrorKind::Corrupt, message, "save the next step"),
                    );
                }
                None => {}
            }
        }
    }
}
