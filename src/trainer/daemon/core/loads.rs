//! What loads change: which step a launch was given, and which steps in memory count no more.

use super::{Core, Effect, LoadAnswer, Phase, StepKey};
use crate::id::{FillId, Job, SaveId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::Failure;

/// Answers to loads that are kept for each job.
const MAX_LOADS: usize = 64;

impl Core {
    /// Keeps the answer to a load of a launch, if it is the first. Returns the one that counts: ranks that ask at the same moment may find
    /// different steps.
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

    /// Returns how often this daemon has changed what is committed of a job, by a commit or a removal.
    pub fn changes(&self, job: &Job) -> u64 {
        self.jobs.get(job).map_or(0, |state| state.changes)
    }

    /// Gives up committed steps in memory whose saves are not what is committed: they were removed or replaced. `changes`: the number of
    /// changes when the list of committed steps was asked for. Returns whether the list counts: one from before a change does not know it.
    pub fn drop_replaced(
        &mut self,
        job: &Job,
        changes: u64,
        committed: &dyn Fn(Step) -> Option<SaveId>,
    ) -> bool {
        if self.changes(job) != changes {
            return false;
        }
        let Some(state) = self.jobs.get(job) else { return true };
        let replaced = state.keys(job, |step, _, found| match &found.phase {
            Phase::Committed { save, .. } => committed(step) != Some(*save),
            _ => false,
        });
        for key in replaced {
            if !self.is_held(&key) {
                self.release_step(&key);
            }
        }
        true
    }

    /// Jobs that have abandoned saves.
    pub fn with_abandoned(&self) -> Vec<Job> {
        let jobs = self.jobs.iter().filter(|(_, state)| !state.abandoned.is_empty());
        jobs.map(|(job, _)| job.clone()).collect()
    }

    /// The latest save that the job has abandoned.
    pub fn next_abandoned(&self, job: &Job) -> Option<(Step, SaveId)> {
        self.jobs.get(job)?.abandoned.iter().max().copied()
    }

    /// A committed step in memory cannot be verified: it is read from the cluster from now on. Returns whether it is committed.
    pub fn give_up_copy(&mut self, key: &StepKey) -> bool {
        let phase = self.step(key).map(|step| &step.phase);
        let is_committed = matches!(phase, Some(Phase::Committed { .. }));
        if is_committed {
            self.release_step(key);
        }
        is_committed
    }

    /// A step in memory has bytes that are not what was staged. A committed one is read from the cluster from now on; one that is not
    /// committed is lost.
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
