//! The errors of the services that serve, move, rebuild and maintain the catalogue.

use crate::id::{Epoch, Job, PeerName, SaveId, Step};

/// The reason why a call of the catalogue server, or a change of it, was refused or failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum CatalogueServerError {
    /// This node does not serve the catalogue.
    #[error("this node does not serve the catalogue")]
    CatalogueNotServed,
    /// A rebuild is under way on this node.
    #[error("a rebuild is under way here: wait for it")]
    RebuildUnderWay,
    /// The daemon stops while it rebuilds the catalogue.
    #[error("the daemon is stopping: rebuild again, here or elsewhere")]
    StoppingDuringRebuild,
    /// A known node serves the catalogue, so that nothing is to be rebuilt.
    #[error("the catalogue is served by {server}: there is nothing to rebuild")]
    CatalogueServed { server: PeerName },
    /// A node of unknown name serves the catalogue, so that nothing is to be rebuilt.
    #[error("the catalogue is served by another daemon: there is nothing to rebuild")]
    CatalogueServedElsewhere,
    /// This node knows no storage node.
    #[error("this daemon knows no storage node: rebuild on another one")]
    NoKnownStorageNode,
    /// A rebuild reached too few storage nodes.
    #[error("{reason}; or use --accept-loss")]
    TooFewNodesReached { reason: String },
    /// A rebuild reached too few storage nodes whose commit marks of a save are intact.
    #[error(
        "the commit mark of save {save} on {nodes} does not parse; without these nodes, {reason}; or use --accept-loss"
    )]
    CommitMarkDamaged { save: SaveId, nodes: String, reason: String },
    /// Nodes hold checkpoints, but no node that was reached knows their names.
    #[error(
        "{count} nodes that hold checkpoints are known to none of those that were reached: start them, wait until they have made themselves known, or use --accept-loss"
    )]
    HoldersUnknown { count: usize },
    /// The receipts of a shard leave a doubt, and too many nodes of its ring are missing.
    #[error(
        "{missing} nodes of the ring of {job}/{step}, shard {shard}, are not reached or empty ({nodes}): what is archived of it is not certain from the others; start them, or use --accept-loss"
    )]
    ShardStateUncertain { missing: usize, job: Job, step: Step, shard: String, nodes: String },
    /// Committed steps cannot be brought back whole from the nodes that were reached.
    #[error(
        "{count} committed steps cannot be brought back whole from the nodes that were reached, the first is {first}; start the missing nodes, or use --accept-loss"
    )]
    StepsIncomplete { count: usize, first: String },
    /// The catalogue database could not be created.
    #[error("failed to create the catalogue database: {reason}")]
    DatabaseNotCreated { reason: String },
    /// A node refuses the epoch that a rebuild claims.
    #[error("node {node} refuses epoch {epoch}: {reason}")]
    EpochRefused { node: PeerName, epoch: Epoch, reason: String },
    /// Half or fewer of the storage nodes have a commit mark of a step.
    #[error(
        "{marked} of {all} storage nodes have a commit mark of {job}/{step}, {needed} are needed: rebuild again"
    )]
    TooFewCommitMarks { marked: usize, all: usize, job: Job, step: Step, needed: usize },
    /// A move or rebuild of the catalogue is under way on this node.
    #[error("a move or rebuild is under way here: wait for it")]
    ChangeUnderWay,
    /// The daemon stops while it moves the catalogue to itself.
    #[error("the daemon is stopping: `rapidraid status` says where the catalogue is")]
    StoppingDuringMove,
    /// The daemon stops while it gives up the catalogue.
    #[error("the daemon is stopping: ask it again")]
    StoppingDuringTransfer,
    /// This node serves the catalogue already.
    #[error("the catalogue is served here already")]
    CatalogueServedHere,
    /// The catalogue moved between two questions about its place.
    #[error("the catalogue has just moved: try again")]
    CatalogueJustMoved,
    /// This node has not noted yet the catalogue that is to be moved.
    #[error(
        "this daemon has not heard yet of the catalogue that {server} serves: try again in some seconds"
    )]
    CatalogueNotNoted { server: PeerName },
    /// A node has heard of another catalogue, which is later or of the same epoch.
    #[error(
        "node {node} has heard of a catalogue of epoch {epoch}, other than the one that {server} serves: run `rapidraid status` to see which daemon serves the catalogue"
    )]
    OtherCatalogueKnown { node: PeerName, epoch: Epoch, server: PeerName },
    /// Half or fewer of the storage nodes are reached from the new catalogue server.
    #[error(
        "{reached} of {all} storage nodes are reached from here, more than half must be: start {nodes}"
    )]
    MajorityNotReached { reached: usize, all: usize, nodes: String },
    /// The old catalogue server did not say whether it has ended its catalogue.
    #[error(
        "{server} did not say whether it has transferred the catalogue ({reason}): start it, and check `rapidraid status`; if no daemon serves the catalogue then, run `rapidraid catalogue rebuild`"
    )]
    TransferOutcomeUnknown { server: PeerName, reason: String },
    /// This node serves no catalogue of an epoch before that of the transfer.
    #[error("the catalogue of an epoch before {epoch} is not served here")]
    OlderCatalogueNotServed { epoch: Epoch },
    /// The catalogue hears too few nodes to change anything.
    #[error("the catalogue here hears too few nodes to know that it is the latest")]
    CatalogueReadOnly,
    /// The node that a call names is not registered.
    #[error("no node {node} is registered: `rapidraid status` shows all")]
    NodeNotRegistered { node: PeerName },
    /// The node that is to be removed is live.
    #[error("node {node} is live: stop its daemon, and wait until its lease is over")]
    NodeLive { node: PeerName },
    /// Something of a checkpoint is missing on the nodes that stay.
    #[error(
        "parts of {job}/{step} would be missing without node {node}: {missing} of its pieces or replicas, and {records} of its records"
    )]
    MissingWithoutNode { node: PeerName, job: Job, step: Step, missing: u64, records: u64 },
    /// The nodes that stay are too few for the code of a checkpoint.
    #[error(
        "without node {node}, the ring of {checkpoint} has {remaining} live storage nodes; its code needs {needed}{away}"
    )]
    RingTooSmall { node: PeerName, checkpoint: String, remaining: usize, needed: u8, away: String },
    /// The survey of a step was not complete.
    #[error("what nodes have of {job}/{step} is not known: {why}; try again")]
    StepNotSurveyed { job: Job, step: Step, why: String },
    /// Too few of the other storage nodes report that they have no commit mark of a save: the node
    /// that is to be removed may have one.
    #[error(
        "cannot tell without node {node} whether save {save} was committed: {unmarked} of {all} storage nodes report no commit mark, {needed} must{silent}"
    )]
    MarkUnknown {
        save: SaveId,
        node: PeerName,
        unmarked: usize,
        all: usize,
        needed: usize,
        silent: String,
    },
    /// A maintenance lasts too long.
    #[error("maintenance may last at most 7 days: for a longer absence, remove the node")]
    MaintenanceTooLong,
    /// The node came back, or its successors changed, at each attempt to remove it.
    #[error("node {node} changed {attempts} times during its removal: try again")]
    NodeChanging { node: PeerName, attempts: usize },
    /// A node cannot be its own successor.
    #[error("node {node} cannot be its own successor: name another node")]
    SuccessorOfItself { node: PeerName },
    /// The successor is not configured to store data.
    #[error("node {node} stores no data (node.storage = false): name a storage node")]
    SuccessorStoresNothing { node: PeerName },
    /// The successor is not live.
    #[error("the successor {node} is not live: start its daemon")]
    SuccessorAway { node: PeerName },
    /// The successor is leaving, too.
    #[error("the successor {node} is itself leaving: name another node")]
    SuccessorLeaving { node: PeerName },
    /// A node has too many successors.
    #[error("node {node} has the maximum number of successors: {}", successors.iter().map(PeerName::as_str).collect::<Vec<_>>().join(", "))]
    TooManySuccessors { node: PeerName, successors: Vec<PeerName> },
    /// The cluster has as many ring changes as it may have.
    #[error(
        "the cluster has {limit} ring changes, the maximum: node {node} cannot leave; start a machine with its name instead"
    )]
    TooManyRingChanges { node: PeerName, limit: usize },
    /// A step is being saved, so that the nodes of its ring are not known.
    #[error("{job}/{step} is being saved: wait until it is done")]
    SaveOpen { job: Job, step: Step },
    /// Half or fewer of the other storage nodes have caught up before a removal.
    #[error(
        "{caught_up} of the {others} storage nodes besides {node} know what is committed, {needed} are needed before it leaves ({reason})"
    )]
    TooFewCaughtUp {
        caught_up: usize,
        others: usize,
        node: PeerName,
        needed: usize,
        reason: String,
    },
}
