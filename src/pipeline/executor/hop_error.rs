//! What ends a hop early.

use std::time::Duration;

use crate::code::CodeError;
use crate::gf::GfError;
use crate::kind::ErrorKind;
use crate::net::NetError;
use crate::plan::{Input, StreamNo};
use crate::store::StoreError;
use crate::workers::WorkerDied;

/// A hop that does not move for so long is ended. Nodes that vanish are noticed sooner, by their connections; this is for those
/// that answer and do not move. On slow links that many hops share, a coder needs ten seconds for a grain of each source, and
/// who waits for its grain must not take that for a fault.
pub const STALL_LIMIT: Duration = Duration::from_secs(30);

/// Why a hop ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HopError {
    /// An input is not what the plan says it must be.
    #[error(
        "{input:?} is corrupt in grain {grain}: its fingerprint is not the one that follows from the save"
    )]
    Corrupt {
        /// Which input.
        input: Input,
        /// The grain.
        grain: u64,
    },
    /// The node before this one failed.
    #[error("stream {stream} from {node}: {source}")]
    Upstream {
        /// The stream.
        stream: StreamNo,
        /// The node.
        node: String,
        /// What happened.
        source: NetError,
    },
    /// The node after this one failed.
    #[error("stream {stream} to {node}: {source}")]
    Downstream {
        /// The stream.
        stream: StreamNo,
        /// The node.
        node: String,
        /// What happened.
        source: NetError,
    },
    /// Nothing moved.
    #[error("no progress for {STALL_LIMIT:?}: waiting for {waiting_for}")]
    Stalled {
        /// The neighbour.
        waiting_for: String,
    },
    /// The order does not fit together.
    #[error("the order is wrong: {what}")]
    Order {
        /// What does not fit.
        what: &'static str,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The arithmetic refused.
    #[error(transparent)]
    Field(#[from] GfError),
    /// The classical codec refused.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl HopError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            HopError::Corrupt { .. } => ErrorKind::Corrupt,
            HopError::Upstream { .. } | HopError::Downstream { .. } => ErrorKind::Unavailable,
            HopError::Stalled { .. } => ErrorKind::Timeout,
            HopError::Order { .. } => ErrorKind::Invalid,
            HopError::Store(error) => error.kind(),
            HopError::Field(_) | HopError::Code(_) | HopError::Worker(_) => ErrorKind::Internal,
        }
    }
}
