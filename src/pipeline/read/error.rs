//! Why a stripe could not be read.

use std::io;

use super::Lost;
use crate::code::CodeError;
use crate::id::StripeId;
use crate::kind::ErrorKind;
use crate::pipeline::busy_retry::BUSY_LIMIT;
use crate::plan::check::PlanError;
use crate::workers::WorkerDied;

/// A stripe could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Too much is gone.
    #[error("{0}")]
    Lost(Lost),
    /// A node had no memory free for a reader, again and again.
    #[error(
        "stripe {stripe}: node {node} is busy with others for {BUSY_LIMIT:?} now ({reason}): try again later"
    )]
    Busy {
        /// The stripe.
        stripe: StripeId,
        /// The node.
        node: String,
        /// What it said last.
        reason: String,
    },
    /// The destination failed.
    #[error("writing at byte {offset}: {source}")]
    Sink {
        /// Where in the shard.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// The code of its pieces is unknown here.
    #[error(
        "stripe {stripe} is coded by {code}, which this version does not know: use a newer one"
    )]
    UnknownCode {
        /// The stripe.
        stripe: StripeId,
        /// The code's id.
        code: String,
    },
    /// Decoded bytes are not what was saved though every piece was what its receipt says.
    #[error(
        "stripe {stripe}, grain {grain}: the decoded bytes are not what was saved, and nothing says which piece is wrong: try again when the node with the receipt answers"
    )]
    Decoded {
        /// The stripe.
        stripe: StripeId,
        /// The grain.
        grain: u64,
    },
    /// Our own plan is wrong: a defect.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Our own arithmetic refused: a defect.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// A worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl ReadError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ReadError::Lost(_) => ErrorKind::Lost,
            ReadError::Busy { .. } => ErrorKind::Busy,
            ReadError::Sink { .. } => ErrorKind::Io,
            ReadError::UnknownCode { .. } => ErrorKind::Invalid,
            ReadError::Decoded { .. } => ErrorKind::Corrupt,
            ReadError::Plan(_) | ReadError::Code(_) | ReadError::Worker(_) => ErrorKind::Internal,
        }
    }
}
