//! Every call: its number, who may make it, what it carries and what comes back.

use serde::{Deserialize, Serialize};

use super::order::{Order, RunReport};
use super::policy::PolicyAnswer;
use super::{Call, NodeAddress, Who};
use crate::code::CodeId;
use crate::format::file::FileName;
use crate::format::records::{Node, Saved, ShardRoot, ShardState};
use crate::id::{
    Attempt, ClusterId, Epoch, Generation, Job, LeaseId, NodeId, PeerName, SaveId, ShardId, Step,
    StripeId,
};

macro_rules! calls {
    ($($(#[$doc:meta])* $number:literal $who:ident $name:ident {
        $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? } -> $answer:ty;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
            pub struct $name { $($(#[$field_doc])* pub $field: $type),* }

            impl Call for $name {
                const NUMBER: u8 = $number;
                const NAME: &'static str = stringify!($name);
                const WHO: Who = Who::$who;
                type Answer = $answer;
            }
        )*

        /// Number, name and caller of every call, for the dispatcher and the protocol page.
        pub const ALL: &[(u8, &str, Who)] = &[$(($number, stringify!($name), Who::$who)),*];
    };
}

calls! {
    /// Who are you, and where is the catalogue?
    1 Anyone Hello {} -> HelloAnswer;
    /// Opens a save (semantics 3.1).
    2 Anyone Begin {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// Whether a committed step may be replaced.
        replace: bool,
    } -> BeginAnswer;
    /// Keeps a lease alive.
    3 Anyone Keep {
        /// The lease.
        lease: LeaseId,
    } -> ();
    /// Records one shard of an open save.
    4 Anyone Seal {
        /// The shard.
        root: ShardRoot,
    } -> ();
    /// Decides, marks and publishes a save (semantics 3.4, 3.5).
    5 Anyone Commit {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save.
        save: SaveId,
        /// Number of sealed shards.
        shards: u32,
    } -> Saved;
    /// Gives an open save up.
    6 Anyone Abort {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save.
        save: SaveId,
    } -> ();
    /// Archives a committed step; answers with [`ArchiveEvent`]s until `Done`.
    7 Anyone Archive {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// How.
        options: ArchiveOptions,
    } -> ArchiveEvent;
    /// Removes a committed step (semantics 5).
    8 Anyone Remove {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    } -> RemoveAnswer;
    /// Committed steps, in order.
    9 Anyone List {
        /// Only this job.
        job: Option<Job>,
        /// Those after this one.
        after: Option<(Job, Step)>,
    } -> ListAnswer;
    /// One committed step with its shards, by pages.
    10 Anyone Show {
        /// The job.
        job: Job,
        /// The step; `None` is the latest.
        step: Option<Step>,
        /// First shard of the page.
        first_shard: u32,
    } -> ShowAnswer;
    /// The state of one shard.
    11 Anyone GetState {
        /// The shard.
        shard: ShardId,
    } -> Option<ShardState>;
    /// The registered nodes, and which are live.
    12 Anyone Nodes {} -> Vec<NodeView>;
    /// What this node holds and uses.
    13 Anyone NodeStatus {} -> NodeStatusAnswer;
    /// The policy that the catalogue's host applies, and what of it waits.
    14 Anyone PolicyStatus {} -> PolicyAnswer;

    /// Stores a block. After a first answer, [`BlockAdmitted`], its bytes follow, then a [`BlockTrailer`] frame.
    20 Anyone PutBlock {
        /// The stripe.
        stripe: StripeId,
        /// The block, from 0.
        block: u8,
        /// Its real bytes.
        len_bytes: u64,
        /// The save's generation.
        generation: Generation,
        /// Key of the fingerprints.
        fingerprint_key: [u8; 32],
        /// Where to forward it while storing.
        forward: Option<NodeAddress>,
    } -> PutBlockAnswer;
    /// Stores a stripe record, or a shard's leaves, of an uncommitted save.
    21 Anyone PutRecord {
        /// The shard.
        shard: ShardId,
        /// Which.
        record: RecordName,
        /// The save's generation.
        generation: Generation,
        /// The sealed record.
        bytes: Vec<u8>,
    } -> ();
    /// Reads a record.
    22 Anyone GetRecord {
        /// The shard.
        shard: ShardId,
        /// Which.
        record: RecordName,
    } -> Option<Vec<u8>>;
    /// Names the files of a stripe.
    23 Anyone Inspect {
        /// The stripe.
        stripe: StripeId,
    } -> Vec<FileView>;
    /// Reads a range of a file; its bytes follow the answer.
    24 Anyone Read {
        /// The stripe.
        stripe: StripeId,
        /// Which file.
        file: FileName,
        /// First byte.
        from: u64,
        /// Number of bytes.
        len_bytes: u64,
        /// Whether the grain hashes are wanted.
        hashes: bool,
    } -> ReadAnswer;
    /// Reports that a file's bytes are not what they should be; the node checks it and sets it aside.
    25 Anyone Suspect {
        /// The stripe.
        stripe: StripeId,
        /// Which file.
        file: FileName,
    } -> bool;

    /// Registers a node and keeps its lease.
    40 Nodes Register {
        /// The node.
        node: Node,
    } -> RegisterAnswer;
    /// Reads a key of the catalogue.
    41 Nodes CatalogueGet {
        /// The key.
        key: String,
    } -> Option<(Vec<u8>, u64)>;
    /// Compare-and-set of a key; synced before the answer.
    42 Nodes CatalogueSet {
        /// The key.
        key: String,
        /// The revision that it must have; `None`: it must not exist.
        expected: Option<u64>,
        /// The new value; `None` removes the key.
        value: Option<Vec<u8>>,
    } -> SetAnswer;
    /// Keys of a prefix, in order, by pages.
    43 Nodes CatalogueList {
        /// The prefix.
        prefix: String,
        /// Keys after this one.
        after: Option<String>,
        /// At most so many.
        limit: u32,
    } -> Vec<(String, Vec<u8>, u64)>;
    /// Grants a lease.
    44 Nodes LeaseGrant {} -> (LeaseId, u64);
    /// Whether a lease lives; `keep` extends it.
    45 Nodes LeaseTouch {
        /// The lease.
        lease: LeaseId,
        /// Whether to extend it.
        keep: bool,
    } -> bool;
    /// Gives a lease back.
    46 Nodes LeaseRevoke {
        /// The lease.
        lease: LeaseId,
    } -> ();

    /// Admits a node's part of a plan: reserves all that it will need.
    50 Nodes Reserve {
        /// The part.
        order: Order,
    } -> ();
    /// Runs a reserved part; the answer comes when its pieces are durable and read back.
    51 Nodes Run {
        /// The run.
        run: [u8; 16],
    } -> RunReport;
    /// Gives a reservation back.
    52 Nodes Release {
        /// The run.
        run: [u8; 16],
    } -> ();
    /// Stores a sealed commit mark.
    53 Nodes PutMark {
        /// The sealed [`CommitMark`](crate::format::records::CommitMark).
        bytes: Vec<u8>,
    } -> ();
    /// Stores a sealed receipt.
    54 Nodes PutReceipt {
        /// The sealed [`Receipt`](crate::format::records::Receipt).
        bytes: Vec<u8>,
        /// The owner's generation.
        owner: Generation,
        /// The coordinator's node.
        coordinator: NodeId,
    } -> ();
    /// Stores a sealed tombstone: the save takes no order any more, and its files wait for [`Sweep`].
    55 Nodes PutTombstone {
        /// The sealed [`Tombstone`](crate::format::records::Tombstone).
        bytes: Vec<u8>,
    } -> ();
    /// Drops the replicas of an archived stripe; the node asks the catalogue itself.
    56 Nodes Drop {
        /// The stripe.
        stripe: StripeId,
        /// The attempt that was committed.
        attempt: Attempt,
        /// The generation that began the attempt.
        generation: Generation,
    } -> DropAnswer;
    /// Makes a missing or rotten replica again from another node's.
    57 Nodes Fetch {
        /// The stripe.
        stripe: StripeId,
        /// The block.
        block: u8,
        /// Its real bytes.
        len_bytes: u64,
        /// Its BLAKE3.
        root: [u8; 32],
        /// The coordinator's generation.
        generation: Generation,
        /// The coordinator's node.
        coordinator: NodeId,
        /// Who has it.
        from: NodeAddress,
    } -> ();
    /// Removes all files of a save whose tombstone is durable on enough nodes; answers with the bytes removed.
    59 Nodes Sweep {
        /// The save.
        save: SaveId,
    } -> u64;
    /// Adds a place to a stripe record after a block has moved.
    58 Nodes PutPlaces {
        /// The stripe.
        stripe: StripeId,
        /// The coordinator's generation.
        generation: Generation,
        /// The coordinator's node.
        coordinator: NodeId,
        /// The sealed stripe record with its new places.
        bytes: Vec<u8>,
    } -> ();
}

/// Answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAnswer {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node.
    pub node: PeerName,
    /// The highest epoch it knows.
    pub epoch: Epoch,
    /// Where it believes the catalogue to be.
    pub catalogue: Option<NodeAddress>,
    /// Version of its software.
    pub version: String,
}

/// Answer to [`Begin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginAnswer {
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
}

/// What happens during [`Archive`].
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
    /// Payload bytes received.
    pub in_bytes: u64,
    /// Payload bytes sent.
    pub out_bytes: u64,
    /// Microseconds from the run's start: first grain begun, last grain done.
    pub span_us: (u64, u64),
    /// Microseconds: waiting for upstream, computing and storing, waiting for downstream.
    pub waited_us: (u64, u64, u64),
}

/// Answer to [`Remove`].
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
}

/// Answer to [`List`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListAnswer {
    /// A page of steps.
    pub steps: Vec<StepView>,
    /// Ask again after this one for more.
    pub next: Option<(Job, Step)>,
}

/// Answer to [`Show`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowAnswer {
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

/// Answer to [`NodeStatus`].
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
    /// Why the second holder did not admit it ([`Kind::wire_code`](crate::kind::Kind::wire_code), text): nothing is stored, and
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

/// Answer to [`Read`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadAnswer {
    /// Data bytes of the whole file.
    pub len_bytes: u64,
    /// Grain hashes of the whole file, if wanted: a BLAKE3 tree whose root the reader knows.
    pub hashes: Vec<[u8; 32]>,
}

/// Answer to [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterAnswer {
    /// The catalogue's epoch.
    pub epoch: Epoch,
    /// Register again within so many milliseconds.
    pub lease_ms: u64,
}

/// Answer to [`CatalogueSet`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetAnswer {
    /// Done; the key's new revision.
    Set(u64),
    /// The key has another revision and value; nothing was changed.
    Other(Option<(Vec<u8>, u64)>),
}

/// Answer to [`Drop`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropAnswer {
    /// Replica files removed now.
    pub files: u32,
    /// Their bytes.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_a_number_of_its_own() {
        let mut numbers: Vec<u8> = ALL.iter().map(|(number, _, _)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), ALL.len());
    }

    #[test]
    fn what_orders_nodes_or_the_catalogue_is_not_for_clients() {
        for (number, name, who) in ALL {
            assert_eq!(*who == Who::Nodes, *number >= 40, "{name}");
        }
    }
}
