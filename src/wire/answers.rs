//! What comes back from calls, and the parts of which calls and answers are made.

use serde::{Deserialize, Serialize};

use super::NodeAddress;
#[cfg(doc)]
use super::calls::*;
use super::order::HopWork;
use crate::code::CodeId;
use crate::format::file::FileName;
use crate::format::grain_set::GrainSet;
use crate::format::records::{Node, Saved, ShardRoot, ShardState, Standing};
use crate::id::{
    Attempt, ClusterId, DbId, Epoch, Generation, Job, LeaseId, PeerName, SaveId, ShardId, Step,
    StripeId,
};

/// The beginning of the note in [`NodeStatusAnswer`] of a home that changes nothing.
pub const CHANGES_NOTHING: &str = "its catalogue changes nothing";

/// Answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAnswer {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node.
    pub node: PeerName,
    /// The highest epoch it knows.
    pub epoch: Epoch,
    /// The map of that epoch, if it knows it.
    pub map: Option<DbId>,
    /// The last change of that map that it has heard of.
    pub revision: u64,
    /// Where it believes the catalogue to be.
    pub catalogue: Option<NodeAddress>,
    /// Version of its software.
    pub version: String,
}

/// Answer to [`GetStanding`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandingAnswer {
    /// Whether it has caught up.
    pub standing: Standing,
    /// The highest epoch it knows.
    pub epoch: Epoch,
    /// The last change of the catalogue that it has heard of, of whichever map.
    pub revision: u64,
    /// The storage nodes that were registered then.
    pub listed: Vec<PeerName>,
}

/// Answer to [`RebuildCatalogue`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildAnswer {
    /// The new epoch.
    pub epoch: Epoch,
    /// Who serves it.
    pub home: String,
    /// Nodes that claimed it and were read.
    pub reached: Vec<PeerName>,
    /// Known storage nodes that were not reached.
    pub missing: Vec<PeerName>,
    /// Committed steps.
    pub steps: u32,
    /// Shards of these.
    pub shards: u32,
    /// Saves that will be removed: aborted, superseded, or removed before.
    pub orphans: u32,
    /// Committed steps that could not be brought back, and why; at most 1000.
    pub incomplete: Vec<String>,
    /// Stripes of which too little was found to be read now; at most 1000.
    pub damaged: Vec<StripeId>,
}

/// Answer to [`MoveCatalogue`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveCatalogueAnswer {
    /// The new epoch.
    pub epoch: Epoch,
    /// Who serves it.
    pub home: PeerName,
    /// Who served it before.
    pub from: PeerName,
    /// The entries that were copied.
    pub entries: u64,
}

/// What a map comes to: two maps of equal contents and history have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DbChecksum {
    /// The revision of the last change.
    pub revision: u64,
    /// XOR over all entries of the first 16 bytes of BLAKE3 of each with its key and revision.
    pub sum: [u8; 16],
}

/// A page of what a node holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryPage {
    /// By shard.
    pub shards: Vec<ShardHolding>,
    /// Where the next page begins; `None` when this was the last.
    pub next: Option<(ShardId, Option<u32>)>,
}

/// Answer to [`ListMarkedSaves`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedSavesPage {
    /// The saves, by id; one with several shards may come more than once.
    pub saves: Vec<MarkedSave>,
    /// Where the next page begins; `None` when this was the last.
    pub next: Option<ShardId>,
}

/// A save as its commit mark has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedSave {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// What was committed.
    pub saved: Saved,
    /// Pieces of its code.
    pub n: u8,
    /// Blocks of its code.
    pub k: u8,
}

/// What a node holds of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardHolding {
    /// The shard; its index is `u32::MAX` for what belongs to the save as a whole.
    pub shard: ShardId,
    /// The sealed commit mark.
    pub mark: Option<Vec<u8>>,
    /// The root out of the shard's leaves.
    pub root: Option<ShardRoot>,
    /// The sealed tombstone of the save.
    pub tombstone: Option<Vec<u8>>,
    /// Stripes, by index; a shard with many goes on in the next page.
    pub stripes: Vec<StripeHolding>,
}

/// What a node holds of a stripe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeHolding {
    /// Its index.
    pub index: u32,
    /// Blocks of which a replica is here.
    pub replicas: Vec<u8>,
    /// Pieces that are here.
    pub pieces: Vec<(u8, Attempt)>,
    /// Receipts that are here: attempt, code, and the generation that began the attempt.
    pub receipts: Vec<(Attempt, CodeId, Generation)>,
}

/// Answer to [`BeginSave`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginSaveAnswer {
    /// The save.
    pub save: SaveId,
    /// Its generation.
    pub generation: Generation,
    /// To be kept alive.
    pub lease: LeaseId,
    /// How long it lives without being kept, in milliseconds.
    pub lease_ms: u64,
    /// Pieces of the code that was chosen.
    pub n: u8,
    /// Blocks of the code that was chosen.
    pub k: u8,
    /// Padded bytes of a full block.
    pub block_bytes: u64,
    /// The live nodes that store data.
    pub nodes: Vec<Node>,
}

/// How to archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveOptions {
    /// Which plan.
    pub plan: PlanChoice,
    /// What multiplies.
    pub codec: super::order::Codec,
    /// Stripes at once; 0 is the daemon's default.
    pub parallel: u16,
}

/// Which plan archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlanChoice {
    /// RapidRAID's chain.
    Chain,
    /// The coder on a node with two blocks.
    BestStar,
    /// The paper's baseline.
    NaiveStar,
    /// The coder rotates over ranges.
    StripedStar,
    /// The paper's baseline, its coder drawn for each stripe from the nodes that keep parities.
    RandomStar,
}

/// What happens during [`ArchiveStep`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ArchiveEvent {
    /// Bytes archived so far, of all that were to be archived.
    Progress {
        /// So far.
        done_bytes: u64,
        /// In all.
        total_bytes: u64,
    },
    /// One stripe is committed as archived.
    Stripe(StripeReport),
    /// Something to tell the operator.
    Note(String),
    /// The end.
    Done {
        /// Stripes that are archived now.
        stripes: u64,
        /// Of these, stripes whose replicas are not all confirmed to be dropped.
        undropped: u64,
    },
}

/// How the archiving of one stripe went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeReport {
    /// The stripe.
    pub stripe: StripeId,
    /// The code.
    pub code: CodeId,
    /// Padded block length.
    pub block_bytes: u64,
    /// Per hop, in the plan's order.
    pub hops: Vec<HopView>,
    /// Microseconds: reserving, running with proof, receipts and commit, drop.
    pub phases_us: [u64; 4],
}

/// One hop of a [`StripeReport`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopView {
    /// The node.
    pub node: PeerName,
    /// Pieces that it stored.
    pub pieces: Vec<u8>,
    /// What it did.
    pub work: HopWork,
}

/// Answer to [`RemoveStep`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveAnswer {
    /// Nodes that have removed all files.
    pub confirmed: u32,
    /// Nodes that were not reached and will be asked again.
    pub waiting: Vec<PeerName>,
}

/// One line of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepView {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// What is committed.
    pub saved: Saved,
    /// Whether its commit marks say so, because no catalogue answers.
    pub by_marks: bool,
}

/// Answer to [`ListSteps`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListStepsAnswer {
    /// A page of steps.
    pub steps: Vec<StepView>,
    /// Ask again after this one for more.
    pub next: Option<(Job, Step)>,
}

/// Answer to [`ShowStep`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowStepAnswer {
    /// The step.
    pub step: StepView,
    /// A page of shards; an absent state is the fresh one.
    pub shards: Vec<(ShardRoot, Option<ShardState>)>,
}

/// A registered node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeView {
    /// The node.
    pub node: Node,
    /// Whether its lease lives.
    pub live: bool,
}

/// Answer to [`GetNodeStatus`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatusAnswer {
    /// Replica files and their bytes.
    pub replicas: (u64, u64),
    /// Piece files and their bytes.
    pub pieces: (u64, u64),
    /// Bytes of records.
    pub record_bytes: u64,
    /// Files set aside.
    pub quarantined: u64,
    /// Disk: total and free bytes.
    pub disk: (u64, u64),
    /// Memory budgets: name, used, peak and total bytes.
    pub budgets: Vec<(String, u64, u64, u64)>,
    /// Process peak memory in bytes (VmHWM), 0 where unknown.
    pub peak_memory_bytes: u64,
    /// Whether UDP segmentation offload is on.
    pub segmentation_offload: bool,
    /// Whether this daemon hosts the catalogue.
    pub catalogue: bool,
    /// Things an operator should look at.
    pub notes: Vec<String>,
}

/// Which record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RecordName {
    /// A shard's leaves.
    Leaves,
    /// A stripe's record.
    Stripe {
        /// The stripe.
        index: u32,
    },
    /// A stripe's receipt.
    Receipt {
        /// The stripe.
        index: u32,
        /// The attempt.
        attempt: Attempt,
    },
    /// A shard's commit mark.
    Mark,
}

/// First answer to [`PutBlock`]: both holders have the memory for it, and its bytes may come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockAdmitted {
    /// Why the second holder did not admit it ([`Kind::wire_code`](crate::kind::ErrorKind::wire_code), text): nothing is stored, and
    /// the call ends here.
    pub second_refused: Option<(u32, String)>,
}

/// Comes behind the bytes of [`PutBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTrailer {
    /// BLAKE3 of the bytes as the client read them.
    pub root: [u8; 32],
    /// Fingerprints of their grains.
    pub fingerprints: Vec<crate::gf::Fingerprint>,
}

/// Last answer to [`PutBlock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutBlockAnswer {
    /// Whether the block is durable where it was forwarded to; the reason if not.
    pub forwarded: Option<Result<(), String>>,
}

/// A data file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileView {
    /// Which.
    pub file: FileName,
    /// Its data bytes.
    pub len_bytes: u64,
    /// Its BLAKE3.
    pub root: [u8; 32],
}

/// A file that grains can be read from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceView {
    /// Which.
    pub file: FileName,
    /// Its data bytes and their BLAKE3; `None` when its tail is broken.
    pub content: Option<(u64, [u8; 32])>,
    /// The grains that are known to be damaged; `None` when the file counts.
    pub damaged: Option<GrainSet>,
}

/// Answer to [`ExamineStripe`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExamineAnswer {
    /// The files of the stripe; one counts if all of it was read and found good.
    pub files: Vec<SourceView>,
    /// The records of the stripe, and of its shard if these were wanted.
    pub records: Vec<RecordView>,
}

/// A record on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordView {
    /// Which.
    pub record: RecordName,
    /// Its digest ([`crate::format::digest`]); `None` when the record is damaged.
    pub digest: Option<[u8; 32]>,
}

/// Answer to [`ReadFile`] and [`ReadSource`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFileAnswer {
    /// Data bytes of the whole file; 0 when its tail is broken.
    pub len_bytes: u64,
    /// Grain hashes of the whole file, if wanted: a BLAKE3 tree whose root the reader knows.
    pub hashes: Vec<[u8; 32]>,
}

/// Answer to [`RegisterNode`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterAnswer {
    /// The catalogue's epoch.
    pub epoch: Epoch,
    /// Its map.
    pub map: DbId,
    /// The last change of that map.
    pub revision: u64,
    /// Another number when the list of nodes is another one.
    pub members: u64,
    /// Register again within so many milliseconds.
    pub lease_ms: u64,
}

/// Answer to [`CompareAndSetKey`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CompareAndSetAnswer {
    /// Done; the key's new revision.
    Set(u64),
    /// The key has another revision and value; nothing was changed.
    Conflict(Option<(Vec<u8>, u64)>),
}

/// Answer to [`DropReplicas`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropReplicasAnswer {
    /// Replica files removed now.
    pub files: u32,
    /// Their bytes.
    pub bytes: u64,
}
