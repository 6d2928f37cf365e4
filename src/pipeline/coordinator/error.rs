//! Why an archiving stopped.

use crate::catalogue::CatalogueError;
use crate::id::{Job, NodeId, Step, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::pipeline::shard_records::RecordsError;
use crate::plan::check::PlanError;
use crate::planner::PlannerError;
use crate::wire::RemoteError;

/// Archiving stopped. What was committed before stays; running it again goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// There is no such step.
    #[error("{job}/{step} is not committed: `rapidraid ls` shows what is")]
    NotFound {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// Another coordinator has it.
    #[error("{what} is being archived by {owner}: wait for it, or for its lease to end")]
    Owned {
        /// The step or shard.
        what: String,
        /// The owner.
        owner: String,
    },
    /// Somebody took the shard from us, or it is being removed.
    #[error("shard {shard} has gone to a newer owner, or is being removed: stopped")]
    Fenced {
        /// The shard's name.
        shard: String,
    },
    /// The code has no plan of the kind.
    #[error("no certified code for n={n}, k={k}: `rapidraid code list` shows the ones there are")]
    NoCode {
        /// n.
        n: u8,
        /// k.
        k: u8,
    },
    /// A stripe lacks a node and no spare exists.
    #[error(
        "stripe {stripe}: {missing}, and no spare node is live; it waits as replicas until a node is back"
    )]
    NoSpare {
        /// The stripe.
        stripe: StripeId,
        /// What is missing where.
        missing: String,
    },
    /// A stripe could not be archived in several tries.
    #[error(
        "stripe {stripe} was not archived after {tries} tries: {last}. Its replicas are untouched; run it again"
    )]
    Stripe {
        /// The stripe.
        stripe: StripeId,
        /// How often.
        tries: u32,
        /// The last failure.
        last: String,
        /// Its kind.
        kind: ErrorKind,
    },
    /// Pieces do not prove.
    #[error("stripe {stripe}: {what} is not what the code says; nothing was dropped")]
    Unproven {
        /// The stripe.
        stripe: StripeId,
        /// Which piece, where.
        what: String,
    },
    /// A block has no good replica left.
    #[error("stripe {stripe}: no good replica of block {block} is left on its nodes")]
    BlockLost {
        /// The stripe.
        stripe: StripeId,
        /// The block, from 1.
        block: u32,
    },
    /// A block has no good replica on the nodes that answer, but others do not.
    #[error(
        "stripe {stripe}: no good replica of block {block} is on a node that answers, and {silent} do not; it waits until they are back"
    )]
    Away {
        /// The stripe.
        stripe: StripeId,
        /// The block, from 1.
        block: u32,
        /// Who does not answer.
        silent: String,
    },
    /// A node has no address.
    #[error("node {node} is not registered: start its daemon")]
    Unregistered {
        /// The node.
        node: NodeId,
    },
    /// A plan is wrong: a defect.
    #[error("stripe {stripe}: the plan fails its check: {source}")]
    Plan {
        /// The stripe.
        stripe: StripeId,
        /// Why.
        source: PlanError,
    },
    /// No plan of that kind.
    #[error(transparent)]
    Planner(#[from] PlannerError),
    /// The catalogue failed.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// Records are missing.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A node's part of a plan failed.
    #[error("node {node}{}: {failure}", behind_nodes(before))]
    Part {
        /// The node.
        node: String,
        /// Those that send it something in this plan.
        before: Vec<String>,
        /// What the node says.
        failure: RemoteError,
    },
    /// A record cannot be written or read.
    #[error("{0}")]
    Format(String),
}

fn behind_nodes(before: &[String]) -> String {
    if before.is_empty() { String::new() } else { format!(", behind {}", before.join(", ")) }
}

impl ArchiveError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ArchiveError::NotFound { .. } => ErrorKind::NotFound,
            ArchiveError::Owned { .. } => ErrorKind::Exists,
            ArchiveError::Fenced { .. } => ErrorKind::Fenced,
            ArchiveError::NoCode { .. } => ErrorKind::Invalid,
            ArchiveError::NoSpare { .. }
            | ArchiveError::Away { .. }
            | ArchiveError::Unregistered { .. } => ErrorKind::Unavailable,
            // Whoever did not answer may have what was not found.
            ArchiveError::Records(RecordsError::Lost { silent: 1.., .. }) => ErrorKind::Unavailable,
            ArchiveError::Stripe { kind, .. } => *kind,
            ArchiveError::Unproven { .. } => ErrorKind::Corrupt,
            ArchiveError::BlockLost { .. } => ErrorKind::Lost,
            ArchiveError::Plan { .. } => ErrorKind::Internal,
            ArchiveError::Planner(error) => error.kind(),
            ArchiveError::Catalogue(error) => error.kind(),
            ArchiveError::Records(error) => error.kind(),
            ArchiveError::Call(error) => error.kind(),
            ArchiveError::Part { failure, .. } => failure.kind,
            ArchiveError::Format(_) => ErrorKind::Corrupt,
        }
    }

    /// Whether it may go on later as it is: nodes come back, another owner ends, a newer epoch is heard, a disk works again, others make
    /// the pieces.
    pub(super) fn is_retryable(&self) -> bool {
        let kind = self.kind();
        kind.is_transient()
            || matches!(
                kind,
                ErrorKind::Exists | ErrorKind::Fenced | ErrorKind::Io | ErrorKind::Corrupt
            )
    }
}
