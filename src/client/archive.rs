//! Asking for an archiving, and watching it.

use super::connection::Client;
use super::error::ClientError;
use crate::id::{Job, Step};
use crate::net::call::address;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions, ArchiveStep, StripeReport};

/// How an archiving went.
#[derive(Debug, Clone)]
pub struct ArchiveReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Stripes that are archived now.
    pub stripes: u64,
    /// Of these, stripes whose replicas are not all confirmed to be dropped.
    pub undropped: u64,
    /// Stripes archived by this call.
    pub reports: Vec<StripeReport>,
    /// Things worth knowing.
    pub notes: Vec<String>,
}

impl Client {
    /// Archives a committed step (`None`: the latest) and watches; the work is a daemon's and goes on without us.
    pub async fn archive(
        &self,
        job: &Job,
        step: Option<Step>,
        options: ArchiveOptions,
        on_event: &mut (dyn FnMut(&ArchiveEvent) + Send),
    ) -> Result<ArchiveReport, ClientError> {
        let step = match step {
            Some(step) => step,
            None => self.fetch_step(job, None).await?.step.step,
        };
        let report = self.watch_archive(job, step, options, on_event).await;
        if let Err(ClientError::Call(error)) = &report
            && error.is_unanswered()
        {
            self.set_gateway(None);
        }
        report
    }

    async fn watch_archive(
        &self,
        job: &Job,
        step: Step,
        options: ArchiveOptions,
        on_event: &mut (dyn FnMut(&ArchiveEvent) + Send),
    ) -> Result<ArchiveReport, ClientError> {
        let gateway = self.find_gateway().await?;
        let call = ArchiveStep { job: job.clone(), step, options };
        let mut exchange = self.caller().open(&address(&gateway), &call).await?;
        exchange.finish().await?;
        let mut report = ArchiveReport {
            job: job.clone(),
            step,
            stripes: 0,
            undropped: 0,
            reports: Vec::new(),
            notes: Vec::new(),
        };
        loop {
            let event: ArchiveEvent = exchange.answer().await?;
            on_event(&event);
            match event {
                ArchiveEvent::Progress { .. } => {}
                ArchiveEvent::Stripe(mut stripe) => {
                    // For traces, as they come: of thousands of stripes they would fill the memory.
                    stripe.hops.iter_mut().for_each(|hop| hop.work.chunks = Vec::new());
                    report.reports.push(stripe);
                }
                ArchiveEvent::Note(note) => report.notes.push(note),
                ArchiveEvent::Done { stripes, undropped } => {
                    report.stripes = stripes;
                    report.undropped = undropped;
                    return Ok(report);
                }
            }
        }
    }
}
