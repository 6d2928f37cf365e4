//! The errors of the work that a node does without a request.

use crate::id::{Epoch, PeerName};

/// The reason why background work, or a question about it, was refused or failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum BackgroundError {
    /// This node is not registered, or registered anew meanwhile.
    #[error("node {node} is not registered")]
    NodeNotRegistered { node: PeerName },
    /// The catalogue forgot a removal during a round that did not ask the other nodes.
    #[error(
        "the catalogue forgot a removal meanwhile: the next try asks the other nodes for removals"
    )]
    RemovalForgotten,
    /// A node runs a program that is too old to report its standing.
    #[error("node {node} runs an older program: upgrade it")]
    ProgramOutdated { node: PeerName },
    /// A node has noted a later epoch than that of the round.
    #[error("node {node} has noted epoch {noted}: {epoch} is over")]
    EpochOver { node: PeerName, noted: Epoch, epoch: Epoch },
    /// The nodes that were heard are too few to know every removal.
    #[error("{reason}")]
    TooFewWitnesses { reason: String },
    /// Too many commit marks on this node do not parse.
    #[error(
        "the commit marks of {saves} saves on this node do not parse, so none of its marks counts: check its disk"
    )]
    TooManyDamagedMarks { saves: usize },
    /// This node does not serve the catalogue, and so it applies no policy.
    #[error("this node does not serve the catalogue, and applies no policy")]
    PolicyNotApplied,
    /// This node does not serve the catalogue, and so it repairs nothing automatically.
    #[error("this node does not serve the catalogue, and repairs nothing automatically")]
    NotRepairing,
}
