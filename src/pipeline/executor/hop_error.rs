//! The errors that end a hop early.

use std::time::Duration;

use crate::code::CodeError;
use crate::gf::GfError;
use crate::kind::ErrorKind;
use crate::net::NetError;
use crate::plan::{Input, StreamNo};
use crate::store::StoreError;
use crate::workers::WorkerDied;

/// How long a hop may make no progress before it is ended. Nodes that vanish are noticed sooner, by
/// their connections; this limit is for nodes that answer and make no progress. On slow links that
/// many hops share, a coder needs ten seconds for a grain of each source, and a hop that waits for
/// the coder's grain must not take that for a fault.
pub const STALL_LIMIT: Duration = Duration::from_secs(30);

/// The reason why a hop ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HopError {
    /// An input does not have the fingerprint that the order prescribes.
    #[error(
        "{input:?} is corrupt in grain {grain}: its fingerprint is not the one that follows from the save"
    )]
    Corrupt {
        /// The input.
        input: Input,
        /// The grain.
        grain: u64,
    },
    /// The stream from an upstream node failed.
    #[error("stream {stream} from {node}: {source}")]
    Upstream {
        /// The stream.
        stream: StreamNo,
        /// The node.
        node: String,
        /// The network's error.
        source: NetError,
    },
    /// The stream to a downstream node failed.
    #[error("stream {stream} to {node}: {source}")]
    Downstream {
        /// The stream.
        stream: StreamNo,
        /// The node.
        node: String,
        /// The network's error.
        source: NetError,
    },
    /// The hop made no progress for `STALL_LIMIT`.
    #[error("no progress for {STALL_LIMIT:?}: waiting for {waiting_for}")]
    Stalled {
        /// The neighbour, and what it was to do.
        waiting_for: String,
    },
    /// The order is inconsistent.
    #[error("the order is wrong: {what}")]
    Order {
        /// The inconsistency, in words.
        what: &'static str,
    },
    /// The local store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The arithmetic failed.
    #[error(transparent)]
    Field(#[from] GfError),
    /// The classical codec failed.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// A job on a worker thread panicked.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl HopError {
    /// Returns the kind of the failure.
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
