//! Why a node refuses its part of a plan, or why the part ended early.

use super::hop_error::HopError;
use super::run::ADMISSION_LIMIT;
use crate::budget::BudgetError;
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::store::StoreError;
use crate::workers::WorkerDied;

/// Why a part was refused or ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The order is out of bounds.
    #[error("the order is refused: {what}")]
    Order {
        /// What is out of bounds.
        what: &'static str,
    },
    /// No memory was free in time.
    #[error(
        "{needed_bytes} bytes of memory were not free within {ADMISSION_LIMIT:?}: archive fewer stripes at once, or raise the daemon's memory"
    )]
    Busy {
        /// What it needs.
        needed_bytes: u64,
    },
    /// No room for its pieces.
    #[error(
        "the disk of node {node} has no {room_bytes} bytes free for a plan's pieces, or a replica that is made again: remove checkpoints, or add disk"
    )]
    NoRoom {
        /// The node.
        node: NodeId,
        /// What has to be free.
        room_bytes: u64,
    },
    /// It never will be.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Nobody reserved it, or it was given back.
    #[error("this run is not admitted here: its reservation has expired or was released")]
    Unknown,
    /// Its coordinator waits for it no more, or the daemon stops.
    #[error("its coordinator gave the run up, or the daemon is stopping")]
    GivenUp,
    /// A hop failed.
    #[error("hop {hop}: {source}")]
    Hop {
        /// Its place in the order.
        hop: u32,
        /// Why.
        source: HopError,
    },
    /// A local file failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl RunError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            RunError::Order { .. } | RunError::Budget(_) => ErrorKind::Invalid,
            RunError::Busy { .. } => ErrorKind::Busy,
            // Room does not come back by waiting: whoever watches is told.
            RunError::NoRoom { .. } => ErrorKind::Unavailable,
            RunError::Unknown => ErrorKind::NotFound,
            RunError::GivenUp => ErrorKind::Unavailable,
            RunError::Hop { source, .. } => source.kind(),
            RunError::Store(error) => error.kind(),
            RunError::Worker(_) => ErrorKind::Internal,
        }
    }
}
