//! The labels of committed steps (docs/semantics.md, 9).

use std::collections::BTreeSet;
use std::sync::Arc;

use super::committed_steps::CommittedSteps;
use super::error::GatewayError;
use super::page_limits::LABELLED_STEPS_SHOWN;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    RecordSetOutcome, checkpoint_key, compare_and_set_record_guarded, labels_key, labels_prefix,
    parse_labels_key, parse_record, read_record,
};
use crate::catalogue::{Catalogue, Guard};
use crate::format::records::Checkpoint;
use crate::format::step_labels::{MAX_LABELS, StepLabels};
use crate::id::{Job, Label, SaveId, Step, StepRef};
use crate::wire::RemoteError;
use crate::wire::calls::{LabelChange, LabelStep, LabelledStep, ListLabels};

impl CommittedSteps {
    /// Adds a label to a committed save, or removes one. Returns the save's labels. Repeating it is
    /// safe.
    ///
    /// # Errors
    /// [`GatewayError::StepNotCommitted`] if nothing is committed as the step;
    /// [`GatewayError::StepLabelledLate`] if another save of the step is committed;
    /// [`GatewayError::TooManyLabels`] if the save has as many labels as it may.
    pub(in crate::node) async fn label_step(
        self: &Arc<Self>,
        call: LabelStep,
    ) -> Result<Vec<Label>, RemoteError> {
        let catalogue = self.catalogue();
        let step_ref = call.job.at(call.step);
        let key = labels_key(step_ref);
        loop {
            let guard = require_committed(&*catalogue, step_ref, call.save).await?;
            let found = read_record::<StepLabels>(&*catalogue, &key).await?;
            let revision = found.as_ref().map(|(_, revision)| *revision);
            let own = found.map(|(record, _)| record).filter(|record| record.save == call.save);
            let mut labels: BTreeSet<Label> =
                own.map(|record| record.labels).unwrap_or_default().into_iter().collect();
            let has_changed = match call.change {
                LabelChange::Add => labels.insert(call.label.clone()),
                LabelChange::Remove => labels.remove(&call.label),
            };
            if labels.len() > MAX_LABELS {
                let (job, step) = (call.job.clone(), call.step);
                return Err(GatewayError::TooManyLabels { job, step }.into());
            }
            let labels: Vec<Label> = labels.into_iter().collect();
            if !has_changed {
                return Ok(labels);
            }
            let record = StepLabels { save: call.save, labels };
            let guard = Some(&guard);
            let set =
                compare_and_set_record_guarded(&*catalogue, &key, revision, &record, guard).await?;
            if let RecordSetOutcome::Set(_) = set {
                tracing::info!(step = %step_ref, label = %call.label, change = ?call.change, "a label was added to a step or removed from it");
                return Ok(record.labels);
            }
        }
    }

    /// Lists the labelled saves of a job, in order of their steps, by pages. A save that is not
    /// committed any more may be among them.
    pub(in crate::node) async fn list_labels(
        self: &Arc<Self>,
        call: ListLabels,
    ) -> Result<Vec<LabelledStep>, RemoteError> {
        let catalogue = self.catalogue();
        let prefix = labels_prefix(&call.job);
        let after = call.after.map(|step| labels_key(call.job.at(step)));
        let limit = LABELLED_STEPS_SHOWN as u32;
        let page = catalogue.list_entries(&prefix, after.as_deref(), limit).await?;
        let mut listed = Vec::with_capacity(page.len());
        for (key, entry) in page {
            let StepLabels { save, labels } = parse_record(&key, &entry.value)?;
            let step = parse_labels_key(&key).map(|(_, step)| step);
            listed.extend(step.map(|step| LabelledStep { step, save, labels }));
        }
        Ok(listed)
    }
}

/// Checks that the save is committed as the step. Returns the condition that the step's record is
/// unchanged.
async fn require_committed(
    catalogue: &dyn Catalogue,
    step_ref: StepRef<'_>,
    save: SaveId,
) -> Result<Guard, RemoteError> {
    let key = checkpoint_key(step_ref);
    let found = read_record::<Checkpoint>(catalogue, &key).await?;
    let (job, step) = (step_ref.job.clone(), step_ref.step);
    match found.and_then(|(checkpoint, revision)| Some((checkpoint.committed?, revision))) {
        None => Err(GatewayError::StepNotCommitted { job, step }.into()),
        Some((saved, revision)) if saved.save == save => {
            Ok(Guard { key, revision: Some(revision) })
        }
        Some(_) => Err(GatewayError::StepLabelledLate { job, step }.into()),
    }
}

/// Returns a label of a committed save that no committed save of a later step of the job has, or
/// `None`. A save with such a label is not retired. Also returns the condition that the save's
/// labels are unchanged.
pub(in crate::node) async fn find_label_to_keep(
    catalogue: &dyn Catalogue,
    step_ref: StepRef<'_>,
    save: SaveId,
) -> Result<(Option<Label>, Guard), RemoteError> {
    let key = labels_key(step_ref);
    let found = read_record::<StepLabels>(catalogue, &key).await?;
    let guard = Guard { key, revision: found.as_ref().map(|(_, revision)| *revision) };
    let own = found.map(|(record, _)| record).filter(|record| record.save == save);
    let mut only_here: BTreeSet<Label> =
        own.map(|record| record.labels).unwrap_or_default().into_iter().collect();
    let mut newer = KeyScan::of_prefix(catalogue, labels_prefix(step_ref.job))
        .starting_after(guard.key.clone());
    while !only_here.is_empty()
        && let Some((key, entry)) = newer.next().await?
    {
        let record: StepLabels = parse_record(&key, &entry.value)?;
        let Some((job, step)) = parse_labels_key(&key) else { continue };
        if is_committed(catalogue, (&job, step), record.save).await? {
            record.labels.iter().for_each(|label| {
                only_here.remove(label);
            });
        }
    }
    Ok((only_here.pop_first(), guard))
}

async fn is_committed(
    catalogue: &dyn Catalogue,
    (job, step): (&Job, Step),
    save: SaveId,
) -> Result<bool, RemoteError> {
    let found = read_record::<Checkpoint>(catalogue, &checkpoint_key(job.at(step))).await?;
    let committed = found.and_then(|(checkpoint, _)| checkpoint.committed);
    Ok(committed.is_some_and(|saved| saved.save == save))
}
