//! Archive requests, and watching their progress.

use super::connection::Client;
use super::error::ClientError;
use crate::id::{Job, Step};
use crate::wire::calls::{ArchiveEvent, ArchiveOptions, ArchiveStep, StripeReport};

/// The report about an archiving.
#[derive(Debug, Clone)]
pub struct ArchiveReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Number of stripes that are archived now.
    pub stripes: u64,
    /// Number of these stripes whose replicas are not all confirmed as dropped.
    pub undropped: u64,
    /// Reports about the stripes that this call archived.
    pub reports: Vec<StripeReport>,
    /// Number of bytes of the stripes that were not archived, or not dropped, at the beginning.
    pub total_bytes: u64,
    /// Messages for the operator.
    pub notes: Vec<String>,
}

impl Client {
    /// Archives a committed step (`None`: the latest) and watches the progress. A daemon does the
    /// work and continues it if this client goes away. `on_event` is called with each event.
    /// Returns the report when the archiving has ended.
    pub async fn archive(
        &self,
        job: &Job,
        step: Option<Step>,
        options: ArchiveOptions,
        on_event: &mut (dyn FnMut(&ArchiveEvent) + Send),
    ) -> Result<ArchiveReport, ClientError> {
        let step = self.resolve_step(job, step).await?;
        let mut report = ArchiveReport {
            job: job.clone(),
            step,
            stripes: 0,
            undropped: 0,
            reports: Vec::new(),
            total_bytes: 0,
            notes: Vec::new(),
        };
        let add_event = |event: ArchiveEvent| {
            on_event(&event);
            match event {
                ArchiveEvent::Progress { total_bytes, .. } => {
                    report.total_bytes = report.total_bytes.max(total_bytes);
                }
                ArchiveEvent::Stripe(mut stripe) => {
                    // The times of single jobs are for traces, which receive them as they come. For
                    // thousands of stripes they would fill the memory.
                    stripe.hops.iter_mut().for_each(|hop| hop.work.chunks = Vec::new());
                    report.reports.push(stripe);
                }
                ArchiveEvent::Note(note) => report.notes.push(note),
                ArchiveEvent::Done { stripes, undropped } => return Some((stripes, undropped)),
            }
            None
        };
        let call = ArchiveStep { job: job.clone(), step, options };
        let (stripes, undropped) = self.watch_gateway_call(&call, add_event).await?;
        Ok(ArchiveReport { stripes, undropped, ..report })
    }
}
