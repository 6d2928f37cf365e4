//! The repair of one stripe (docs/semantics.md, 11).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::ensure_replicas::FilesByNode;
use super::owned_shard::OwnedShard;
use super::owned_stripe::OwnedStripe;
use super::receipts::ArchivedAttempt;
use super::repair_task::RepairTask;
use super::{Coordinator, CoordinatorError};
use crate::format::records::StripeState;
use crate::id::NodeId;

/// The waits before a node that is live and does not answer is asked again for its files.
const ASK_AGAIN_AFTER: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];

/// The result of the repair of one stripe. After a dry run, the numbers say what a repair would
/// make.
#[derive(Debug, Default)]
pub(super) struct StripeOutcome {
    /// Number of pieces that were made.
    pub pieces: u64,
    /// Number of replicas that were made.
    pub replicas: u64,
    /// Number of bytes of these pieces and replicas.
    pub made_bytes: u64,
    /// Time by which limits of the rate have lengthened the repair.
    pub limit_delay: Duration,
    /// Number of records that were written.
    pub records: u64,
    /// The nodes that do not answer, with the number of pieces and replicas that each should have.
    pub away: BTreeMap<NodeId, u64>,
    /// The nodes that answer and still lack something.
    pub lacking: BTreeSet<NodeId>,
    /// The reasons why something could not be made.
    pub problems: Vec<String>,
}

impl StripeOutcome {
    /// Adds the result of a further round. Its nodes and problems replace those of the earlier
    /// rounds, because the pieces that the earlier problems were about were made elsewhere or tried
    /// again.
    pub fn add_round(&mut self, round: StripeOutcome) {
        self.pieces += round.pieces;
        self.made_bytes += round.made_bytes;
        self.limit_delay += round.limit_delay;
        (self.away, self.lacking, self.problems) = (round.away, round.lacking, round.problems);
    }

    /// Adds the reason why something could not be made on `node`.
    pub fn add_problem(&mut self, node: Option<NodeId>, problem: String) {
        self.lacking.extend(node);
        self.problems.push(problem);
    }
}

impl Coordinator {
    /// Makes again what nodes have lost of stripe `index`, or, in a dry run, counts it.
    ///
    /// # Errors
    /// Returns the error that kept the stripe from being examined, or that ends the repair of the
    /// whole step. A part that could not be made is a problem in the outcome, not an error.
    pub(super) async fn repair_stripe(
        &self,
        shard: &OwnedShard,
        index: u32,
        task: RepairTask<'_>,
    ) -> Result<StripeOutcome, CoordinatorError> {
        self.ensure_may_go_on(shard, task).await?;
        let fenced = || CoordinatorError::Fenced { shard: shard.root.name.to_string() };
        let stripe = OwnedStripe::open(self, shard, index).await?;
        match shard.stripe_state(index).await.ok_or_else(fenced)? {
            StripeState::Archived { attempt, generation, code, .. } => {
                stripe.repair_pieces(ArchivedAttempt { attempt, generation, code }, task).await
            }
            StripeState::Replicated | StripeState::Archiving { .. } => {
                stripe.repair_replicas(task).await
            }
        }
    }
}

impl OwnedStripe<'_> {
    /// Asks all nodes of the ring, and those in the stripe's record, for their files of the stripe.
    /// A node that is to store nothing any more counts as one that does not answer.
    pub(super) async fn list_ring_files(&self) -> FilesByNode {
        let mut nodes: BTreeSet<NodeId> = self.ring_nodes().collect();
        nodes.extend(&self.info.places);
        let storage = self.directory.storage();
        let mut files = self.list_files(nodes).await;
        // The first call to a node that has just been restarted fails, because the pooled connection
        // is that of the earlier process. The node counts as silent then, although it is live.
        for wait in ASK_AGAIN_AFTER {
            let unanswered = files.iter().filter(|(_, held)| held.is_none());
            let silent: Vec<NodeId> = unanswered.map(|(node, _)| *node).collect();
            for &node in &silent {
                self.directory.heard(node, true);
            }
            if !silent.iter().any(|node| self.directory.is_live(*node)) {
                break;
            }
            self.coordinator.clock.sleep(wait).await;
            let again = self.list_files(silent).await;
            for (&node, _) in again.iter().filter(|(_, held)| held.is_none()) {
                self.directory.heard(node, false);
            }
            files.extend(again);
        }
        for (_, held) in files.iter_mut().filter(|(node, _)| !storage.contains(node)) {
            *held = None;
        }
        files
    }

    /// Returns the names of these nodes for messages.
    pub(super) fn name_nodes(&self, nodes: impl IntoIterator<Item = NodeId>) -> String {
        let names = nodes.into_iter().map(|node| self.directory.name(node));
        names.collect::<Vec<_>>().join(", ")
    }
}
