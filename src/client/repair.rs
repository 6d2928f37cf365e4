//! Repairs of committed steps.

use super::connection::Client;
use super::error::ClientError;
use crate::id::{Job, Step};
use crate::net::call::address;
use crate::wire::calls::{RepairEvent, RepairOptions, RepairStep, RepairSummary};

/// The report about the repair of one step.
#[derive(Debug, Clone)]
pub struct RepairReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// What was made, or is to be made after a dry run.
    pub summary: RepairSummary,
    /// Messages about what could not be made.
    pub notes: Vec<String>,
}

impl Client {
    /// Makes again what nodes have lost of a committed step (`None`: the latest), and watches the
    /// progress. A daemon does the work and continues it if this client goes away. `on_event` is
    /// called with each event. Returns the report when the repair has ended.
    ///
    /// # Errors
    /// Fails with kind `Exists` if the step is being archived or repaired already.
    pub async fn repair(
        &self,
        job: &Job,
        step: Option<Step>,
        options: RepairOptions,
        on_event: &mut (dyn FnMut(&RepairEvent) + Send),
    ) -> Result<RepairReport, ClientError> {
        let step = match step {
            Some(step) => step,
            None => self.fetch_step(job, None).await?.step.step,
        };
        let report = self.start_and_watch_repair(job, step, options, on_event).await;
        if let Err(ClientError::Call(error)) = &report
            && error.is_unanswered()
        {
            self.set_gateway(None);
        }
        report
    }

    async fn start_and_watch_repair(
        &self,
        job: &Job,
        step: Step,
        options: RepairOptions,
        on_event: &mut (dyn FnMut(&RepairEvent) + Send),
    ) -> Result<RepairReport, ClientError> {
        let gateway = self.find_gateway().await?;
        let call = RepairStep { job: job.clone(), step, options };
        let mut exchange = self.caller().open(&address(&gateway), &call).await?;
        exchange.finish().await?;
        let mut notes = Vec::new();
        loop {
            let event: RepairEvent = exchange.answer().await?;
            on_event(&event);
            match event {
                RepairEvent::Progress { .. } => {}
                RepairEvent::Note(note) => notes.push(note),
                RepairEvent::Done(summary) => {
                    return Ok(RepairReport { job: job.clone(), step, summary, notes });
                }
            }
        }
    }
}
