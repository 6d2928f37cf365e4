//! The errors of a node's part of a plan.

use super::ADMISSION_LIMIT;
use super::hop_error::HopError;
use crate::budget::BudgetError;
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::store::StoreError;
use crate::workers::WorkerDied;

/// The reason why a node refused its part of a plan, or why the part ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The order does not fit its code, or a number in it is out of bounds.
    #[error("the order is refused: {what}")]
    Order {
        /// The fault of the order, in words.
        what: &'static str,
    },
    /// No memory was free in time, or the node cannot admit this run now.
    #[error(
        "{needed_bytes} bytes of memory were not free within {ADMISSION_LIMIT:?}: archive fewer stripes at once, or raise the daemon's memory"
    )]
    Busy {
        /// The memory that the part needs, in bytes.
        needed_bytes: u64,
    },
    /// The disk has no room for the pieces of the part, or for a replica that is recreated here.
    #[error(
        "the disk of node {node} has fewer than {room_bytes} bytes free, besides those promised to other parts, for a plan's pieces or a replica that is recreated: remove checkpoints, or add disk"
    )]
    NoRoom {
        /// The node.
        node: NodeId,
        /// The disk space that has to be free besides what is promised to other parts, in bytes: the
        /// pieces and one block, or twice the replica.
        room_bytes: u64,
    },
    /// The part needs more memory than the budget has in total.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The run was not reserved here, or its reservation was released.
    #[error("this run is not admitted here: its reservation has expired or was released")]
    Unknown,
    /// The coordinator no longer waits for the run, or the daemon is stopping.
    #[error("its coordinator gave the run up, or the daemon is stopping")]
    GivenUp,
    /// A hop failed.
    #[error("hop {hop}: {source}")]
    Hop {
        /// The index of the hop in the order.
        hop: u32,
        /// The cause.
        source: HopError,
    },
    /// An operation on a local file failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A job on a worker thread panicked.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl RunError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            RunError::Order { .. } | RunError::Budget(_) => ErrorKind::Invalid,
            RunError::Busy { .. } => ErrorKind::Busy,
            // Waiting does not free disk space. So this is not `Busy`, which callers retry
            // silently: it has to be reported.
            RunError::NoRoom { .. } => ErrorKind::Unavailable,
            RunError::Unknown => ErrorKind::NotFound,
            RunError::GivenUp => ErrorKind::Unavailable,
            RunError::Hop { source, .. } => source.kind(),
            RunError::Store(error) => error.kind(),
            RunError::Worker(_) => ErrorKind::Internal,
        }
    }
}
