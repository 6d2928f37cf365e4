//! The answers to calls, and the parts of calls and answers.

use serde::{Deserialize, Serialize};

use super::NodeAddress;
#[cfg(doc)]
use super::calls::*;
use super::order::HopWork;
use crate::code::CodeId;
use crate::format::file::FileName;
use crate::format::grain_set::GrainSet;
use crate::format::joint_save::JointSave;
use crate::format::launch_order::RegisteredLaunch;
use crate::format::records::{Node, Saved, ShardRoot, ShardState, Standing};
pub use crate::format::step_labels::LabelChange;
use crate::id::{
    Attempt, ClusterId, DbId, Epoch, Generation, Job, Label, LaunchId, LeaseId, PeerName, SaveId,
    ShardId, Step, StripeId,
};

/// The beginning of the note in [`NodeStatusAnswer`] that says that the catalogue is read-only.
pub const CHANGES_NOTHING: &str = "its catalogue changes nothing";

/// Answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAnswer {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node.
    pub node: PeerName,
    /// The highest epoch that the node knows.
    pub epoch: Epoch,
    /// The id of the database of that epoch, if the node knows it.
    pub map: Option<DbId>,
    /// The revision of the last change of that database that the node knows of.
    pub revision: u64,
    /// The catalogue server, as far as the node knows it.
    pub catalogue: Option<NodeAddress>,
    /// The version of the node's program.
    pub version: String,
}

/// Answer to [`GetStanding`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandingAnswer {
    /// The node's standing: whether it has caught up.
    pub standing: Standing,
    /// The highest epoch that the node knows.
    pub epoch: Epoch,
    /// The revision of the last catalogue change that the node knows of, in any database.
    pub revision: u64,
    /// The storage nodes on the node's stored list of members, which is at least as new as
    /// `revision`.
    pub listed: Vec<PeerName>,
}

/// Answer to [`RebuildCatalogue`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildAnswer {
    /// The catalogue's new epoch.
    pub epoch: Epoch,
    /// The name of the daemon that serves the catalogue now.
    pub home: String,
    /// Nodes that claimed the epoch and whose inventory was read.
    pub reached: Vec<PeerName>,
    /// Known storage nodes that were not reached.
    pub missing: Vec<PeerName>,
    /// Number of committed steps.
    pub steps: u32,
    /// Number of shards of the committed steps.
    pub shards: u32,
    /// Number of saves that will be removed: aborted, superseded, or removed before.
    pub orphans: u32,
    /// Committed steps that could not be recovered, with the reason; at most 1000.
    pub incomplete: Vec<String>,
    /// Stripes of which too little was found to read them now; at most 1000.
    pub damaged: Vec<StripeId>,
}

/// Answer to [`MoveCatalogue`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveCatalogueAnswer {
    /// The catalogue's new epoch.
    pub epoch: Epoch,
    /// The daemon that serves the catalogue now.
    pub home: PeerName,
    /// The daemon that served the catalogue before.
    pub from: PeerName,
    /// Number of entries that were copied.
    pub entries: u64,
}

/// The checksum of a catalogue database. Two databases with equal contents and history have equal
/// checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DbChecksum {
    /// The revision of the last change.
    pub revision: u64,
    /// XOR, over all entries, of the first 16 bytes of BLAKE3 over the entry with its key and
    /// revision.
    pub sum: [u8; 16],
}

/// A page of a node's holdings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryPage {
    /// The holdings, by shard.
    pub shards: Vec<ShardHolding>,
    /// The `after` of the call for the next page; `None` if this page is the last.
    pub next: Option<(ShardId, Option<u32>)>,
}

/// Answer to [`ListMarkedSaves`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedSavesPage {
    /// The saves, by id. A save with several shards may appear more than once.
    pub saves: Vec<MarkedSave>,
    /// The `after` of the call for the next page; `None` if this page is the last.
    pub next: Option<ShardId>,
}

/// A save as its commit mark describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedSave {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The committed save.
    pub saved: Saved,
    /// Number of pieces of its code.
    pub n: u8,
    /// Number of blocks of its code.
    pub k: u8,
}

/// The holdings of a node for one shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardHolding {
    /// The shard. Its index is `u32::MAX` for records that belong to the save as a whole.
    pub shard: ShardId,
    /// The sealed commit mark.
    pub mark: Option<Vec<u8>>,
    /// The root from the shard's leaves.
    pub root: Option<ShardRoot>,
    /// The sealed tombstone of the save.
    pub tombstone: Option<Vec<u8>>,
    /// The stripes, by index. A shard with many stripes continues on the next page.
    pub stripes: Vec<StripeHolding>,
}

/// The holdings of a node for one stripe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeHolding {
    /// Index of the stripe.
    pub index: u32,
    /// Blocks of which the node has a replica.
    pub replicas: Vec<u8>,
    /// Pieces that the node has, with their attempts.
    pub pieces: Vec<(u8, Attempt)>,
    /// Receipts that the node has: attempt, code, and the generation that began the attempt.
    pub receipts: Vec<(Attempt, CodeId, Generation)>,
}

/// Answer to [`BeginSave`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginSaveAnswer {
    /// The save.
    pub save: SaveId,
    /// The save's generation.
    pub generation: Generation,
    /// The save's lease, which the client must keep alive.
    pub lease: LeaseId,
    /// Lifetime of the lease without renewal, in milliseconds.
    pub lease_ms: u64,
    /// Number of pieces of the chosen code.
    pub n: u8,
    /// Number of blocks of the chosen code.
    pub k: u8,
    /// Padded length of a full block in bytes.
    pub block_bytes: u64,
    /// The storage nodes that the save may use.
    pub nodes: Vec<Node>,
}

/// A writer's report on its part of a joint save, sent in [`JoinSave`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriterReport {
    /// The writer takes part, and does not know its shards yet.
    Joins,
    /// The writer has joined the save, has so many shards of it, and has sent so many MiB. Older
    /// daemons send this.
    #[allow(missing_docs)] // the text above explains the fields
    Announces { save: SaveId, shards: u32, sent_mib: u32 },
    /// The writer has dropped the step. Older daemons send this.
    Drops,
    /// The writer has dropped the step, for a reason of at most `MAX_REASON_BYTES`. The launch
    /// cannot save it any more.
    DropsBecause(String),
    /// The writer has joined the save. The other fields are those of `WriterState::Reporting`.
    #[allow(missing_docs)] // `WriterState::Reporting` explains the fields
    Reports { save: SaveId, shards: u32, progress: u32, reports: u32 },
}

/// Answer to [`JoinSave`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinSaveAnswer {
    /// The save is open.
    Open(Box<JoinedSave>),
    /// The launch has committed the step.
    Committed {
        /// The save that is committed.
        save: SaveId,
    },
    /// The save that the writer reports on is not open any more.
    Over,
}

/// An open save of several writers, as a writer needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedSave {
    /// The save.
    pub joint: JointSave,
    /// The save's generation.
    pub generation: Generation,
    /// Lifetime of the lease without renewal, in milliseconds.
    pub lease_ms: u64,
    /// The nodes of the ring that are registered.
    pub nodes: Vec<Node>,
}

/// Answer to [`ListCompletedShards`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CompletedShards {
    /// The save is open.
    Open {
        /// The roots of completed shards, in order of their numbers. Some may be missing between
        /// them.
        roots: Vec<ShardRoot>,
    },
    /// The save is committed, or was committed and is being removed.
    Committed,
    /// The save is not open any more and is not known to have been committed.
    Over,
}

/// A save that is not committed yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSaveView {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save.
    pub save: SaveId,
    /// Whether the save is decided, and its commit marks are being written.
    pub is_decided: bool,
    /// Number of completed shards.
    pub complete_shards: u32,
    /// Number of shards, if it is known.
    pub shards: Option<u32>,
    /// Number of writers of a joint save; 0 for a save of one client.
    pub writers: u32,
    /// The writers for which a joint save waits: those that have not announced their shards or, when
    /// all have, those that have not completed them.
    pub late_writers: Vec<u32>,
    /// The writer of a joint save that has dropped the step.
    pub dropped_writer: Option<u32>,
}

/// The reason why a launch that is not registered is newer than all others of its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LaunchClaim {
    /// The launch registers for the first time, and no other launch has registered since it began.
    After {
        /// The newest launch of the job when this one began.
        newest: Option<LaunchId>,
    },
    /// The launch was registered before, and the catalogue has been rebuilt since. The newest step
    /// that a launch has committed after this launch's resume point is its own, or there is none.
    Again,
}

/// A launch of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchView {
    /// The job.
    pub job: Job,
    /// The launch.
    pub registered: RegisteredLaunch,
}

/// A save with labels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabelledStep {
    /// The step.
    pub step: Step,
    /// The save. Its labels are valid only while it is the committed save of the step.
    pub save: SaveId,
    /// Its labels, ascending.
    pub labels: Vec<Label>,
}

/// The plan of an archiving and its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveOptions {
    /// The plan.
    pub plan: PlanChoice,
    /// The implementation that multiplies.
    pub codec: super::order::Codec,
    /// Number of stripes that are archived at once; 0 for the daemon's default.
    pub parallel: u16,
}

/// The kind of plan that archives a stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlanChoice {
    /// RapidRAID's chain.
    Chain,
    /// The best star: its coder runs on a node with two blocks.
    BestStar,
    /// The naive star, the paper's baseline.
    NaiveStar,
    /// The striped star: its coder rotates over ranges of grains.
    StripedStar,
    /// The naive star with a coder drawn at random, for each stripe, from the nodes that store
    /// parity pieces.
    RandomStar,
}

/// An event of [`ArchiveStep`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ArchiveEvent {
    /// The progress in bytes.
    Progress {
        /// Number of bytes archived so far.
        done_bytes: u64,
        /// Number of bytes that are to be archived in all.
        total_bytes: u64,
    },
    /// A stripe is committed as archived.
    Stripe(StripeReport),
    /// A message for the operator.
    Note(String),
    /// The end of the archiving.
    Done {
        /// Number of stripes that are archived now.
        stripes: u64,
        /// Number of archived stripes whose replicas are not all confirmed as dropped.
        undropped: u64,
    },
}

/// The report about the archiving of one stripe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeReport {
    /// The stripe.
    pub stripe: StripeId,
    /// The code.
    pub code: CodeId,
    /// Padded length of a block in bytes.
    pub block_bytes: u64,
    /// The hops, in the plan's order.
    pub hops: Vec<HopView>,
    /// Durations in microseconds: reservation; execution with proof; receipts and commit; drop.
    pub phases_us: [u64; 4],
}

/// A hop of a [`StripeReport`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopView {
    /// The node.
    pub node: PeerName,
    /// Pieces that the hop stored.
    pub pieces: Vec<u8>,
    /// The work of the hop.
    pub work: HopWork,
}

/// Answer to [`RemoveStep`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveAnswer {
    /// Number of nodes that have removed all files.
    pub confirmed: u32,
    /// Nodes that were not reached and will be asked again.
    pub waiting: Vec<PeerName>,
}

/// A committed step in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepView {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The committed save.
    pub saved: Saved,
    /// Whether commit marks are the source, because no catalogue answers.
    pub by_marks: bool,
}

/// Answer to [`ListSteps`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListStepsAnswer {
    /// A page of steps.
    pub steps: Vec<StepView>,
    /// The step after which the next page begins; `None` if this page is the last.
    pub next: Option<(Job, Step)>,
}

/// Answer to [`ShowStep`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowStepAnswer {
    /// The step.
    pub step: StepView,
    /// A page of shards. An absent state stands for the initial one.
    pub shards: Vec<(ShardRoot, Option<ShardState>)>,
}

/// A registered node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// The node.
    pub node: Node,
    /// Whether the node's lease is alive.
    pub live: bool,
}

/// Answer to [`GetNodeStatus`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatusAnswer {
    /// Number of replica files, and their bytes.
    pub replicas: (u64, u64),
    /// Number of piece files, and their bytes.
    pub pieces: (u64, u64),
    /// Number of bytes of records.
    pub record_bytes: u64,
    /// Number of files in quarantine.
    pub quarantined: u64,
    /// Total and free bytes of the disk.
    pub disk: (u64, u64),
    /// The memory budgets: name, used, peak and total bytes.
    pub budgets: Vec<(String, u64, u64, u64)>,
    /// Peak memory of the process in bytes (VmHWM); 0 if unknown.
    pub peak_memory_bytes: u64,
    /// Whether UDP segmentation offload is on.
    pub segmentation_offload: bool,
    /// Whether this daemon serves the catalogue.
    pub catalogue: bool,
    /// Messages that need an operator's attention.
    pub notes: Vec<String>,
}

/// The name of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RecordName {
    /// A shard's leaves.
    Leaves,
    /// A stripe's record.
    Stripe {
        /// Index of the stripe in its shard.
        index: u32,
    },
    /// A stripe's receipt.
    Receipt {
        /// Index of the stripe in its shard.
        index: u32,
        /// The attempt.
        attempt: Attempt,
    },
    /// A shard's commit mark.
    Mark,
}

/// The first answer to [`PutBlock`]. If `second_refused` is `None`, all holders have reserved
/// memory for the block, and the client sends its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockAdmitted {
    /// Set if the second holder did not admit the block: error code
    /// ([`ErrorKind::wire_code`](crate::kind::ErrorKind::wire_code)) and message. Nothing is stored
    /// then, and the call ends here.
    pub second_refused: Option<(u32, String)>,
}

/// The frame after the bytes of [`PutBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTrailer {
    /// BLAKE3 hash of the bytes as the client read them.
    pub root: [u8; 32],
    /// Fingerprints of the grains.
    pub fingerprints: Vec<crate::gf::Fingerprint>,
}

/// The last answer to [`PutBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutBlockAnswer {
    /// The outcome at the second holder: durable there, or the reason why not; `None` if the block
    /// was not forwarded.
    pub forwarded: Option<Result<(), String>>,
}

/// A data file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileView {
    /// The name of the file.
    pub file: FileName,
    /// Number of data bytes.
    pub len_bytes: u64,
    /// BLAKE3 hash of the data bytes.
    pub root: [u8; 32],
}

/// A file from which grains can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceView {
    /// The name of the file.
    pub file: FileName,
    /// Number of data bytes and their BLAKE3 hash; `None` if the file's tail is broken.
    pub content: Option<(u64, [u8; 32])>,
    /// The grains that are known to be damaged; `None` if the file counts as a copy: it is complete
    /// and has no damage note.
    pub damaged: Option<GrainSet>,
}

/// Answer to [`ExamineStripe`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExamineAnswer {
    /// The files of the stripe. A file whose `damaged` is `None` was read completely and found
    /// good.
    pub files: Vec<SourceView>,
    /// The records of the stripe, and those of its shard if they were requested.
    pub records: Vec<RecordView>,
}

/// A record on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordView {
    /// The name of the record.
    pub record: RecordName,
    /// The digest of the record ([`crate::format::digest`]); `None` if the record is damaged.
    pub digest: Option<[u8; 32]>,
}

/// Answer to [`ReadFile`] and [`ReadSource`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFileAnswer {
    /// Number of data bytes of the whole file; 0 if the file's tail is broken.
    pub len_bytes: u64,
    /// Grain hashes of the whole file, if requested: the leaves of a BLAKE3 tree whose root the
    /// reader knows.
    pub hashes: Vec<[u8; 32]>,
}

/// Answer to [`RegisterNode`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterAnswer {
    /// The catalogue's epoch.
    pub epoch: Epoch,
    /// The id of the catalogue database.
    pub map: DbId,
    /// The revision of the last change of that database.
    pub revision: u64,
    /// A number that changes whenever the list of nodes or a ring change changes.
    pub members: u64,
    /// Lifetime of the registration in milliseconds. The node must register again before it ends.
    pub lease_ms: u64,
}

/// Answer to [`CompareAndSetKey`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CompareAndSetAnswer {
    /// The change is durable. Holds the key's new revision.
    Set(u64),
    /// The key has another revision, and nothing was changed. Holds the key's value and revision, or
    /// `None` if the key does not exist.
    Conflict(Option<(Vec<u8>, u64)>),
}

/// Answer to [`CompareAndSetKeyGuarded`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuardedSetAnswer {
    /// The change is durable. Holds the key's new revision.
    Set(u64),
    /// The key has another revision, and nothing was changed. Holds the key's value and revision, or
    /// `None` if the key does not exist.
    Conflict(Option<(Vec<u8>, u64)>),
    /// The second key has another revision. Nothing was changed.
    GuardConflict,
}

/// Answer to [`DropReplicas`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropReplicasAnswer {
    /// Number of replica files removed by this call.
    pub files: u32,
    /// Number of bytes of the removed replica files.
    pub bytes: u64,
}
