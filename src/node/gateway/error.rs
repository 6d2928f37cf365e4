//! The errors of the calls that any daemon serves for a client.

use super::page_limits::SAVES_PER_PAGE;
use crate::format::step_labels::MAX_LABELS;
use crate::id::{Job, LaunchId, NodeId, SaveId, ShardName, Step};
use crate::units::date;

/// The reason why a client's request was refused or failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum GatewayError {
    /// No storage node is live.
    #[error(
        "no storage node has a lease: none runs, or the catalogue server hears from too few of them to change anything"
    )]
    NoLiveStorageNode,
    /// The live storage nodes are too few for every configured code.
    #[error(
        "{live} storage nodes are live, the smallest configured code needs {needed}: start more nodes, or configure a smaller code"
    )]
    TooFewStorageNodes { live: usize, needed: u8 },
    /// Another client saves the step.
    #[error(
        "{job}/{step} is being saved by another client: wait for it (if that client is gone, its save is aborted within {abort_seconds} s), or save another step"
    )]
    StepBeingSaved { job: Job, step: Step, abort_seconds: u64 },
    /// The step is committed, and the save is not to replace it.
    #[error("{job}/{step} is committed: save another step, or use --replace")]
    StepCommitted { job: Job, step: Step },
    /// The save was opened before and is over.
    #[error("save {save} is over: save again")]
    SaveOver { save: SaveId },
    /// Too many removals of older saves of the step are pending.
    #[error(
        "{job}/{step} waits for nodes to remove older saves: start, remove or replace the nodes that are down"
    )]
    TooManyRemovals { job: Job, step: Step },
    /// A newer launch of the job has registered.
    #[error(
        "launch {launch} of job {job} is over: launch {number} ({newest}) has been saving for the job since {}",
        date(*since)
    )]
    LaunchReplaced { launch: LaunchId, job: Job, number: u64, newest: LaunchId, since: u64 },
    /// The launch is not known: it never registered, or the catalogue was rebuilt.
    #[error("launch {launch} of job {job} is not registered: it may save no step")]
    LaunchUnregistered { launch: LaunchId, job: Job },
    /// A launch that registers again was overtaken: another launch has committed a later step than
    /// its resume point.
    #[error(
        "launch {launch} of job {job} is over: launch {other} has committed step {step}, which launch {launch} has not loaded"
    )]
    LaunchOvertaken { launch: LaunchId, job: Job, step: Step, other: LaunchId },
    /// The lease of the save is over.
    #[error("the save's lease is over: it was aborted; save again")]
    LeaseOver,
    /// The fields of a shard's root contradict each other or the save, or are over a limit.
    #[error(
        "the fields of the root of shard {shard} contradict each other or the save, or exceed a limit: client and daemon may be of different versions"
    )]
    RootInconsistent { shard: ShardName },
    /// A node of a shard's ring is not registered, or is leaving and not live: it may have left
    /// since the save began. Another save gets another ring.
    #[error(
        "node {node} of the ring of shard {shard} is not registered or is about to leave: save again"
    )]
    RingNodeUnregistered { node: NodeId, shard: ShardName },
    /// The save is not the open one of its step.
    #[error("save {save} is not open: save again")]
    SaveNotOpen { save: SaveId },
    /// The daemon stopped while it committed a save.
    #[error("the daemon is stopping: ask another one whether the step is committed")]
    CommitInterrupted,
    /// The save was aborted, or another save of the step took its place.
    #[error("save {save} of {job}/{step} was aborted, or another one took its place: save again")]
    SaveAbortedOrReplaced { save: SaveId, job: Job, step: Step },
    /// Some shards of the save are not complete.
    #[error(
        "save {save} lacks {missing} of its {shards} shards ({first}): complete them, then commit again"
    )]
    ShardsIncomplete { missing: usize, shards: u32, first: String, save: SaveId },
    /// A commit names another number of shards than a complete shard of the save.
    #[error(
        "shard {index} of save {save} is one of {of}, and the commit names {shards} shards: save again"
    )]
    ShardCountDiffers { index: u32, of: u32, shards: u32, save: SaveId },
    /// A commit names no shard.
    #[error("the commit of save {save} names no shard: a checkpoint has at least one")]
    NoShards { save: SaveId },
    /// Two shards of the save have one name.
    #[error("two shards of save {save} are called {shard}: give each shard a name of its own")]
    ShardNamesEqual { shard: ShardName, save: SaveId },
    /// A writer's call contradicts the record of its joint save, or exceeds a limit.
    #[error(
        "writer {writer} contradicts the save of {job}/{step}: {reason}; start the job again on all hosts"
    )]
    WriterUnfit { writer: u32, job: Job, step: Step, reason: String },
    /// A shard root that was read cannot be encoded.
    #[error("a shard root that was read cannot be encoded")]
    RootNotEncodable,
    /// Too many nodes of a shard's ring have no commit mark of the decided save.
    #[error(
        "{missed} nodes have no commit mark of shard {shard} ({reason}): the save is decided, and becomes visible when they are back"
    )]
    RingMarksMissing { missed: usize, shard: ShardName, reason: String },
    /// Too few storage nodes have a commit mark of the decided save.
    #[error(
        "{marked} of {storage} storage nodes have a commit mark of the save, {needed} are needed ({reason}): the save is decided, and becomes visible when they are back"
    )]
    MajorityMarksMissing { marked: usize, storage: usize, needed: usize, reason: String },
    /// The save is decided and can no longer be aborted.
    #[error("save {save} is decided: it can no longer be aborted")]
    SaveDecided { save: SaveId },
    /// The catalogue has another record under the key.
    #[error("{key} exists with other content: save again")]
    RecordConflict { key: String },
    /// The step is not committed.
    #[error("{job}/{step} is not committed: `rapidraid ls` shows what is")]
    StepNotCommitted { job: Job, step: Step },
    /// No step of the job is committed.
    #[error("no step of {job} is committed: `rapidraid ls` shows what is")]
    NoStepCommitted { job: Job },
    /// Another save of the step was committed before the removal.
    #[error(
        "{job}/{step} was saved anew meanwhile: nothing was removed; remove it again if that save is to be removed as well"
    )]
    StepSavedAnew { job: Job, step: Step },
    /// Another save of the step was committed before it was labelled.
    #[error("{job}/{step} was saved anew meanwhile: label that save, if it is the one")]
    StepLabelledLate { job: Job, step: Step },
    /// The save has as many labels as it may.
    #[error("{job}/{step} has {MAX_LABELS} labels: remove one of them first")]
    TooManyLabels { job: Job, step: Step },
    /// The daemon stopped while it removed a step.
    #[error("the daemon is stopping: the removal continues later")]
    RemovalInterrupted,
    /// Too many nodes have no tombstone of the removed save.
    #[error(
        "{label} is no longer visible, but too many nodes are away to make the removal permanent: {nodes}; the removal continues when they are back"
    )]
    TombstonesMissing { label: String, nodes: String },
    /// The daemon stopped while it archived a step.
    #[error("the daemon is stopping: another daemon resumes the archiving")]
    ArchivingInterrupted,
    /// The daemon stopped while it repaired a step.
    #[error("the daemon is stopping: repair the step again, through another one")]
    RepairInterrupted,
    /// The daemon stopped while it read from the nodes.
    #[error("the daemon is stopping: ask another one")]
    ReadInterrupted,
    /// Too few nodes were heard to know what is committed.
    #[error("no catalogue answers, and {reason}")]
    NoQuorum { reason: String },
    /// This daemon knows no storage node.
    #[error("no catalogue answers, and this daemon knows no storage node: ask another one")]
    NoKnownStorageNode,
    /// Too few nodes were heard without those that have a damaged commit mark.
    #[error(
        "no catalogue answers, and the commit mark of save {save} on {nodes} does not parse; without these nodes, {reason}"
    )]
    MarkDamaged { save: SaveId, nodes: String, reason: String },
    /// Steps were removed during every read of the commit marks.
    #[error("no catalogue answers, and steps are removed while their marks are read: ask again")]
    RemovalsUnderWay,
    /// The nodes have marks of more checkpoints than are read without a catalogue.
    #[error(
        "no catalogue answers, and there are too many checkpoints to find them by their marks: start the catalogue server, or run `rapidraid catalogue rebuild`"
    )]
    TooManyCheckpoints,
    /// The checkpoint has more shards than are read without a catalogue.
    #[error(
        "no catalogue answers, and there are too many shards of one checkpoint to find them by their marks: start the catalogue server, or run `rapidraid catalogue rebuild`"
    )]
    TooManyShards,
    /// No node has a commit mark of the step.
    #[error("no node has a commit mark of that step of {job}")]
    StepNotMarked { job: Job },
    /// The save was removed, or was never committed.
    #[error("save {save} was removed, or never committed")]
    SaveNotCommitted { save: SaveId },
    /// The nodes' records of the committed save are incomplete or inconsistent.
    #[error("{job}/{step} cannot be read without a catalogue: {reason}")]
    EvidenceIncomplete { job: Job, step: Step, reason: String },
    /// The request names more saves than are allowed.
    #[error("a request names {saves} saves, at most {SAVES_PER_PAGE} are allowed")]
    TooManySaves { saves: usize },
}
