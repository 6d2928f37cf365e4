//! The errors of the upload of stripes and blocks.

use std::io;

use crate::format::FormatError;
use crate::gf::GfError;
use crate::id::{NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::workers::WorkerDied;

/// The error of a stripe that was not saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// Reading from the source failed.
    #[error("reading shard {shard} at byte {offset}: {source}")]
    Source {
        /// The shard's name.
        shard: String,
        /// The byte offset in the shard.
        offset: u64,
        /// The cause.
        source: io::Error,
    },
    /// The source returned different bytes when it was read again.
    #[error("shard {shard} changed while it was being saved: save it when no process writes to it")]
    Changed {
        /// The shard's name.
        shard: String,
    },
    /// Holders failed, and no other nodes are left.
    #[error("stripe {stripe}: {failed} failed and no spare node is live: {reason}")]
    NoHolders {
        /// The stripe.
        stripe: StripeId,
        /// The nodes that failed, in words.
        failed: String,
        /// The reason of the failure.
        reason: String,
    },
    /// A holder refused for a reason that applies to every holder.
    #[error(transparent)]
    Refused(CallError),
    /// A record or a hash tree could not be built.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Fingerprinting failed.
    #[error(transparent)]
    Field(#[from] GfError),
    /// A job on a worker thread panicked.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl SaveError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SaveError::Source { .. } => ErrorKind::Io,
            SaveError::Changed { .. } => ErrorKind::Corrupt,
            SaveError::NoHolders { .. } => ErrorKind::Unavailable,
            SaveError::Refused(error) => error.kind(),
            SaveError::Format(error) => error.kind(),
            SaveError::Field(_) | SaveError::Worker(_) => ErrorKind::Internal,
        }
    }
}

/// A holder of a block that failed, and its error.
pub(super) struct NodeFailure {
    pub node: NodeId,
    pub error: CallError,
}

impl NodeFailure {
    /// Returns whether the holder said that it cannot take the block.
    pub fn has_refused(&self) -> bool {
        !self.error.is_unanswered() && self.error.kind() == ErrorKind::Unavailable
    }

    /// Returns whether the holder answered for itself, and not for another holder that it could not
    /// reach.
    pub fn is_own_answer(&self) -> bool {
        !self.error.is_unanswered()
            && !matches!(self.error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
    }
}

pub(super) enum BlockError {
    Holder(NodeFailure),
    Fatal(SaveError),
}

impl<E: Into<SaveError>> From<E> for BlockError {
    fn from(error: E) -> Self {
        BlockError::Fatal(error.into())
    }
}
