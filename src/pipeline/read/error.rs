//! The errors of reading a stripe.

use std::io;

use super::UnreadableStripe;
use crate::code::CodeError;
use crate::id::StripeId;
use crate::kind::ErrorKind;
use crate::plan::check::PlanError;
use crate::workers::WorkerDied;

/// The error of a stripe that could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Too few good sources are left.
    #[error("{0}")]
    Lost(UnreadableStripe),
    /// A node whose files are needed was busy until the retries ended.
    #[error("stripe {stripe}: node {node} is busy ({reason}): try again later")]
    Busy {
        /// The stripe.
        stripe: StripeId,
        /// The node.
        node: String,
        /// The node's last answer.
        reason: String,
    },
    /// Writing to the destination failed.
    #[error("writing at byte {offset}: {source}")]
    Sink {
        /// The byte offset in the shard.
        offset: u64,
        /// The cause.
        source: io::Error,
    },
    /// This version does not know the code of the stripe's pieces.
    #[error(
        "stripe {stripe} is coded by {code}, which this version does not know: use a newer one"
    )]
    UnknownCode {
        /// The stripe.
        stripe: StripeId,
        /// The code's id.
        code: String,
    },
    /// The decoded bytes are not what was saved, although every piece matched its hashes.
    #[error(
        "stripe {stripe}, grain {grain}: the decoded bytes are not what was saved, and no record says which piece is wrong: try again when the node with the receipt answers"
    )]
    Decoded {
        /// The stripe.
        stripe: StripeId,
        /// The grain.
        grain: u64,
    },
    /// The reader's own plan is wrong. This is a defect of the program.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The reader's own arithmetic failed. This is a defect of the program.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// A job on a worker thread panicked.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

impl ReadError {
    /// Returns the kind of the failure.
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
