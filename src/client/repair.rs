//! Repairs of committed steps.

use super::connection::Client;
use super::error::ClientError;
use crate::id::{Job, NodeId, Step};
use crate::wire::calls::{RepairEvent, RepairOptions, RepairStep, RepairSummary};

/// The report about the repair of one step.
#[derive(Debug, Clone)]
pub struct RepairReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The counts of what was made; after a dry run, of what is missing.
    pub summary: RepairSummary,
    /// Messages about what could not be made.
    pub notes: Vec<String>,
}

impl Client {
    /// Makes again what nodes have lost of a committed step (`None`: the latest), or counts it in a
    /// dry run, and watches the progress. Replicas of nodes that do not answer are made on other
    /// nodes; pieces of such a node only if it is in `given_up`. A daemon does the work and continues
    /// it if this client goes away. `on_event` is called with each event. Returns the report when
    /// the repair has ended.
    ///
    /// # Errors
    /// Fails with kind `Exists` if another coordinator archives the step, if another one repairs it
    /// and does not give a shard back within three minutes, or if its archiving is requested
    /// meanwhile.
    pub async fn repair(
        &self,
        job: &Job,
        step: Option<Step>,
        options: RepairOptions,
        given_up: &[NodeId],
        on_event: &mut (dyn FnMut(&RepairEvent) + Send),
    ) -> Result<RepairReport, ClientError> {
        let step = self.resolve_step(job, step).await?;
        let mut notes = Vec::new();
        let add_event = |event: RepairEvent| {
            on_event(&event);
            match event {
                RepairEvent::Progress { .. } => None,
                RepairEvent::Note(note) => {
                    notes.push(note);
                    None
                }
                RepairEvent::Done(summary) => Some(summary),
            }
        };
        let given_up = given_up.to_vec();
        let call = RepairStep { job: job.clone(), step, options, given_up };
        let summary = self.watch_gateway_call(&call, add_event).await?;
        Ok(RepairReport { job: job.clone(), step, summary, notes })
    }
}
