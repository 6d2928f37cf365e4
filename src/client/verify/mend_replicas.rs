//! Orders nodes to mend damaged replicas, and waits until they have.

use std::time::Duration;

use super::examine_stripes::{EXAMINE_LIMIT, StripeExam, Verification};
use super::judge_stripe::{HeldItem, Problem};
use super::report::Fault;
use crate::client::ClientError;
use crate::format::file::FileName;
use crate::format::records::StripeState;
use crate::id::StripeId;
use crate::wire::NodeAddress;
use crate::wire::calls::{ListSources, VerifyFile};

/// Time for which the client waits until all replicas are mended, to which 1 s is added for each
/// [`MEND_PACE_BYTES`] of them. Replicas that are not mended by then stay in the report.
const MEND_LIMIT: Duration = Duration::from_secs(30);
const MEND_PACE_BYTES: u64 = 4 << 20;
/// Interval between checks whether a replica is mended.
const MEND_LOOK: Duration = Duration::from_millis(500);

impl Verification<'_> {
    /// Makes the nodes mend damaged replicas, and examines their stripes again. Returns the defects
    /// that were mended.
    pub(super) async fn mend_replicas(
        &self,
        exams: &mut [StripeExam<'_>],
    ) -> Result<Vec<Fault>, ClientError> {
        let clock = self.reading.caller.clock();
        let mut reported = Vec::new();
        for (at, exam) in exams.iter().enumerate() {
            // Nodes mend only replicas of stripes that are not archived, and only while a catalogue
            // answers.
            let Some(state) = &exam.part.state else { continue };
            if matches!(state.stripe(exam.index), Some(StripeState::Archived { .. })) {
                continue;
            }
            let stripe = StripeId { shard: exam.part.root.shard, index: exam.index };
            for fault in &exam.judgement.faults {
                let (HeldItem::Replica(block), Problem::Grains(_) | Problem::Damaged) =
                    (fault.held, fault.wrong)
                else {
                    continue;
                };
                let Some(address) = self.reading.directory.address(fault.node) else { continue };
                let file = FileName::Replica { block };
                let call = VerifyFile { stripe, file };
                match self.reading.caller.call_held(&address, &call, EXAMINE_LIMIT).await {
                    Ok(_) => reported.push((at, fault.clone(), address, stripe, file)),
                    Err(error) => self.record_incident(error.to_string()),
                }
            }
        }
        let bytes: u64 = reported.iter().map(|(at, ..)| exams[*at].part.root.block_bytes).sum();
        let end = clock.now() + MEND_LIMIT + Duration::from_secs(bytes / MEND_PACE_BYTES);
        for (_, _, address, stripe, file) in &reported {
            self.wait_until_mended(address, *stripe, *file, end).await;
        }
        let mut mended = Vec::new();
        for of_stripe in reported.chunk_by(|a, b| a.0 == b.0) {
            let Some(exam) = of_stripe.first().and_then(|(at, ..)| exams.get_mut(*at)) else {
                continue;
            };
            let leaves = self.fetch_leaves(exam.part).await?;
            exam.judgement = self.examine_stripe(exam.part, leaves.as_ref(), exam.index).await?;
            for (_, fault, _, _, file) in of_stripe {
                if exam.judgement.good.contains(&(fault.node, *file)) {
                    mended.push(self.to_report_fault(exam, fault));
                }
            }
        }
        Ok(mended)
    }

    /// Waits until the node lists the replica without damage, or until `end`.
    async fn wait_until_mended(
        &self,
        node: &NodeAddress,
        stripe: StripeId,
        file: FileName,
        end: Duration,
    ) {
        let clock = self.reading.caller.clock();
        while clock.now() < end {
            let sources = self.reading.caller.call(node, &ListSources { stripe }).await;
            // A node that does not answer is asked again while there is time.
            let is_good = sources.is_ok_and(|sources| {
                sources.iter().any(|source| source.file == file && source.damaged.is_none())
            });
            if is_good {
                return;
            }
            clock.sleep(MEND_LOOK).await;
        }
    }
}
