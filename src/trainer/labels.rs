//! The trainer's side of labels: marks on committed steps (docs/semantics.md, 9).

use super::StagingError;
use super::protocol::{Answer, LABELS_SINCE, Request};
use super::session::{Session, Wait};
use crate::format::step_labels::LabelChange;
use crate::id::{Job, Label, Step};

impl Session {
    /// Adds a label to a committed step, or removes one.
    pub fn label_step(
        &mut self,
        job: Job,
        step: Step,
        label: Label,
        change: LabelChange,
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        self.require_labels()?;
        self.tell("the label", &Request::LabelStep { job, step, label, change }, wait)
    }

    /// Returns the labelled steps of a job, in order, with their labels.
    pub fn list_labels(
        &mut self,
        job: Job,
        wait: &mut Wait<'_>,
    ) -> Result<Vec<(Step, Vec<Label>)>, StagingError> {
        const WHAT: &str = "the labels";
        self.require_labels()?;
        match self.ask(WHAT, &Request::ListLabels { job }, wait)? {
            (Answer::Labels(labels), _) => Ok(labels),
            _ => Err(StagingError::Unexpected { what: WHAT }),
        }
    }

    fn require_labels(&self) -> Result<(), StagingError> {
        if self.hello.version >= LABELS_SINCE {
            return Ok(());
        }
        let reason = "it knows no labels: upgrade it".into();
        Err(StagingError::Refused { dir: self.dir.clone(), reason })
    }
}
