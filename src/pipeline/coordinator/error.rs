//! The errors that stop the archiving or the repair of a step.

use crate::catalogue::CatalogueError;
use crate::id::{Job, NodeId, Step, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::pipeline::record_fetch::RecordsError;
use crate::plan::check::PlanError;
use crate::planner::PlannerError;
use crate::wire::RemoteError;

/// An error that stopped the archiving or the repair of a step. Stripes that were committed before
/// stay archived, and the next run continues with the others.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// The step is not committed.
    #[error("{job}/{step} is not committed: `rapidraid ls` shows what is")]
    NotFound {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// Another coordinator owns the step or the shard.
    #[error(
        "{what} is being archived or repaired by {owner}: wait for it, or for its lease to end"
    )]
    Owned {
        /// The step or shard.
        what: String,
        /// The owner.
        owner: String,
    },
    /// The coordinator that was watched has failed, and the nodes will try again.
    #[error("{owner} could not archive {what} now ({reason}); the nodes try again by themselves")]
    Deferred {
        /// The step.
        what: String,
        /// The node whose coordinator failed.
        owner: String,
        /// The reason.
        reason: String,
    },
    /// A newer owner took the shard, or the shard is being removed.
    #[error("shard {shard} has a newer owner, or is being removed: work on it stopped")]
    Fenced {
        /// The shard's name.
        shard: String,
    },
    /// No code for this n and k fits the kind of plan.
    #[error("no certified code for n={n}, k={k}: `rapidraid code list` shows the certified codes")]
    NoCode {
        /// The number of pieces of a stripe.
        n: u8,
        /// The number of blocks of a stripe.
        k: u8,
    },
    /// A node of the stripe does not answer, and no live spare can take its place.
    #[error(
        "stripe {stripe}: {missing}, and no spare node is live; the stripe keeps its replicas until a node is back"
    )]
    NoSpare {
        /// The stripe.
        stripe: StripeId,
        /// The node that does not answer, in words.
        missing: String,
    },
    /// The archiving of the step was requested while the step was being repaired.
    #[error(
        "an archiving of {what} was requested, so the repair has ended: run the repair again after the archiving"
    )]
    ArchivingRequested {
        /// The step.
        what: String,
    },
    /// The automatic repair of the step was stopped: the list of nodes has changed, another step is
    /// more urgent, or this daemon serves the catalogue no longer.
    #[error("the repair of {what} was stopped")]
    RepairStopped {
        /// The step.
        what: String,
    },
    /// No receipt says reliably where the pieces are: the receipts on the nodes contradict each
    /// other, or none belongs to the archived attempt, or no receipt was found.
    #[error(
        "stripe {stripe}: {found} different receipts were found and do not say where its pieces are{}; nothing was written. `rapidraid verify` shows what the nodes have",
        format_away(away)
    )]
    NoReceipt {
        /// The stripe.
        stripe: StripeId,
        /// The number of different receipts.
        found: usize,
        /// The names of the nodes that do not answer.
        away: String,
    },
    /// A node answers which files of the stripe it has, and does not answer whether it has a receipt.
    #[error(
        "stripe {stripe}: {node} does not answer for its receipt; its pieces are moved when it does"
    )]
    ReceiptUnanswered {
        /// The stripe.
        stripe: StripeId,
        /// The name of the node.
        node: String,
    },
    /// A piece that was made again is not the one that was archived.
    #[error(
        "stripe {stripe}: piece {piece}, made again on {node}, does not have the hash in the receipt: check the memory of the nodes"
    )]
    UnequalPiece {
        /// The stripe.
        stripe: StripeId,
        /// The piece.
        piece: u8,
        /// The name of the node.
        node: String,
    },
    /// All tries to archive the stripe failed.
    #[error(
        "stripe {stripe} was not archived after {tries} tries: {last}. Its replicas are untouched; archive the step again"
    )]
    Stripe {
        /// The stripe.
        stripe: StripeId,
        /// The number of tries.
        tries: u32,
        /// The last failure.
        last: String,
        /// The kind of the last failure.
        kind: ErrorKind,
    },
    /// A piece has no proof, or its proof does not have the fingerprints that the code prescribes.
    #[error("stripe {stripe}: {what} does not match the code; no replica was dropped")]
    Unproven {
        /// The stripe.
        stripe: StripeId,
        /// The piece, with its node and the grain if they are known.
        what: String,
    },
    /// All nodes answered, and none of them has a good replica of the block.
    #[error("stripe {stripe}: no good replica of block {block} is left on its nodes")]
    BlockLost {
        /// The stripe.
        stripe: StripeId,
        /// The index of the block in the stripe, counted from 0.
        block: u32,
    },
    /// No node that answers has a good replica of the block, but some nodes do not answer.
    #[error(
        "stripe {stripe}: no good replica of block {block} is on a node that answers, and {silent} do not answer; the stripe waits until they are back"
    )]
    BlockUnreachable {
        /// The stripe.
        stripe: StripeId,
        /// The index of the block in the stripe, counted from 0.
        block: u32,
        /// The names of the nodes that do not answer.
        silent: String,
    },
    /// The node is not registered, so its address is unknown.
    #[error("node {node} is not registered: start its daemon")]
    Unregistered {
        /// The node.
        node: NodeId,
    },
    /// The plan failed its check. This is a defect of the program.
    #[error("stripe {stripe}: the plan fails its check: {source}")]
    Plan {
        /// The stripe.
        stripe: StripeId,
        /// The failure of the check.
        source: PlanError,
    },
    /// The planner cannot make a plan of the requested kind.
    #[error(transparent)]
    Planner(#[from] PlannerError),
    /// The catalogue failed.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// A record cannot be fetched.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// A call to a node failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A node's part of a plan failed.
    #[error("node {node}{}: {failure}", format_sending_nodes(before))]
    Part {
        /// The node.
        node: String,
        /// The names of the nodes that send it streams in this plan.
        before: Vec<String>,
        /// The failure that the node reported.
        failure: RemoteError,
    },
    /// A record cannot be written or read.
    #[error("{0}")]
    Format(String),
}

fn format_away(away: &str) -> String {
    if away.is_empty() { String::new() } else { format!(" ({away} do not answer)") }
}

fn format_sending_nodes(before: &[String]) -> String {
    if before.is_empty() { String::new() } else { format!(", behind {}", before.join(", ")) }
}

impl CoordinatorError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CoordinatorError::NotFound { .. } => ErrorKind::NotFound,
            CoordinatorError::Owned { .. } | CoordinatorError::ArchivingRequested { .. } => {
                ErrorKind::Exists
            }
            CoordinatorError::NoReceipt { .. } | CoordinatorError::UnequalPiece { .. } => {
                ErrorKind::Corrupt
            }
            CoordinatorError::Fenced { .. } => ErrorKind::Fenced,
            CoordinatorError::NoCode { .. } => ErrorKind::Invalid,
            CoordinatorError::Deferred { .. }
            | CoordinatorError::RepairStopped { .. }
            | CoordinatorError::ReceiptUnanswered { .. }
            | CoordinatorError::NoSpare { .. }
            | CoordinatorError::BlockUnreachable { .. }
            | CoordinatorError::Unregistered { .. } => ErrorKind::Unavailable,
            // A node that did not answer may have the record.
            CoordinatorError::Records(RecordsError::Lost { silent: 1.., .. }) => {
                ErrorKind::Unavailable
            }
            CoordinatorError::Stripe { kind, .. } => *kind,
            CoordinatorError::Unproven { .. } => ErrorKind::Corrupt,
            CoordinatorError::BlockLost { .. } => ErrorKind::Lost,
            CoordinatorError::Plan { .. } => ErrorKind::Internal,
            CoordinatorError::Planner(error) => error.kind(),
            CoordinatorError::Catalogue(error) => error.kind(),
            CoordinatorError::Records(error) => error.kind(),
            CoordinatorError::Call(error) => error.kind(),
            CoordinatorError::Part { failure, .. } => failure.kind,
            CoordinatorError::Format(_) => ErrorKind::Corrupt,
        }
    }

    /// Returns whether a later run of the same request may succeed: nodes return, another owner's
    /// lease ends, a newer epoch arrives, a disk recovers, or other nodes make the pieces.
    pub(super) fn is_retryable(&self) -> bool {
        let kind = self.kind();
        kind.is_transient()
            || matches!(
                kind,
                ErrorKind::Exists | ErrorKind::Fenced | ErrorKind::Io | ErrorKind::Corrupt
            )
    }
}
