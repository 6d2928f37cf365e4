//! Every call: its number, who may make it, what it carries and what comes back.

use serde::{Deserialize, Serialize};

pub use super::answers::*;
use super::order::{Order, RunReport};
use super::policy::PolicyAnswer;
use super::{AllowedCaller, Call, NodeAddress};
use crate::format::file::FileName;
use crate::format::records::{Node, Saved, ShardRoot, ShardState};
use crate::id::{
    Attempt, DbId, Epoch, Generation, Job, LeaseId, NodeId, PeerName, SaveId, ShardId, Step,
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
                const WHO: AllowedCaller = AllowedCaller::$who;
                type Answer = $answer;
            }
        )*

        /// Number, name and caller of every call, for the dispatcher and the protocol page.
        pub const ALL: &[(u8, &str, AllowedCaller)] = &[$(($number, stringify!($name), AllowedCaller::$who)),*];
    };
}

calls! {
    /// Who are you, and where is the catalogue?
    1 Anyone Hello {
        /// Who asks, if it is a node: it may be known to nobody else when the catalogue is lost.
        me: Option<Node>,
    } -> HelloAnswer;
    /// Opens a save (semantics 3.1). Again, with the same `save`: the same answer.
    2 Anyone BeginSave {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// Whether a committed step may be replaced.
        replace: bool,
        /// The save's id, drawn by the client: a repeat of a call whose answer was lost opens no second save.
        save: SaveId,
        /// Nodes to do without, if a configured code fits without them.
        avoid: Vec<NodeId>,
    } -> BeginSaveAnswer;
    /// Keeps a lease alive.
    3 Anyone RenewLease {
        /// The lease.
        lease: LeaseId,
    } -> ();
    /// Records one shard of an open save.
    4 Anyone CompleteShard {
        /// The shard.
        root: ShardRoot,
    } -> ();
    /// Decides, marks and publishes a save (semantics 3.4, 3.5).
    5 Anyone CommitSave {
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
    6 Anyone AbortSave {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save.
        save: SaveId,
    } -> ();
    /// Archives a committed step; answers with [`ArchiveEvent`]s until `Done`.
    7 Anyone ArchiveStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// How.
        options: ArchiveOptions,
    } -> ArchiveEvent;
    /// Removes a committed step (semantics 5).
    8 Anyone RemoveStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save that it was when the caller looked: no other one is removed.
        save: SaveId,
    } -> RemoveAnswer;
    /// Committed steps, in order.
    9 Anyone ListSteps {
        /// Only this job.
        job: Option<Job>,
        /// Those after this one.
        after: Option<(Job, Step)>,
    } -> ListStepsAnswer;
    /// One committed step with its shards, by pages.
    10 Anyone ShowStep {
        /// The job.
        job: Job,
        /// The step; `None` is the latest.
        step: Option<Step>,
        /// First shard of the page.
        first_shard: u32,
    } -> ShowStepAnswer;
    /// The state of one shard.
    11 Anyone GetShardState {
        /// The shard.
        shard: ShardId,
    } -> Option<ShardState>;
    /// The registered nodes, and which are live.
    12 Anyone ListNodes {} -> Vec<NodeView>;
    /// What this node holds and uses.
    13 Anyone GetNodeStatus {} -> NodeStatusAnswer;
    /// Makes a lost catalogue again from what the nodes hold; this daemon serves it afterwards (semantics 8).
    14 Anyone RebuildCatalogue {
        /// Whether to go on when too few nodes are reached, or roots are missing.
        accept_loss: bool,
    } -> RebuildAnswer;
    /// The policy that the catalogue's host applies, and what of it waits.
    15 Anyone GetPolicyStatus {} -> PolicyAnswer;
    /// Takes a node off the list of members (semantics 10).
    16 Anyone RemoveNode {
        /// Its name.
        name: PeerName,
    } -> ();
    /// Moves the catalogue from the daemon that serves it to this one (semantics 8).
    17 Anyone MoveCatalogue {} -> MoveCatalogueAnswer;

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
    23 Anyone ListFiles {
        /// The stripe.
        stripe: StripeId,
    } -> Vec<FileView>;
    /// Reads a range of a file; its bytes follow the answer.
    24 Anyone ReadFile {
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
    } -> ReadFileAnswer;
    /// Reports that a file's bytes are not what they should be. The node looks at it, notes damage, and mends a replica. Answers whether it
    /// is damaged or gone.
    25 Anyone VerifyFile {
        /// The stripe.
        stripe: StripeId,
        /// Which file.
        file: FileName,
    } -> bool;
    /// Those of some saves (at most 256) that this node has removed, or is to.
    26 Anyone FindRemovedSaves {
        /// The saves.
        saves: Vec<SaveId>,
    } -> Vec<SaveId>;
    /// The nodes of the cluster, as this one last heard of them.
    27 Anyone ListMembers {} -> Vec<Node>;
    /// Names the files of a stripe that grains can be read from, damaged ones among them.
    28 Anyone ListSources {
        /// The stripe.
        stripe: StripeId,
    } -> Vec<SourceView>;
    /// As [`ReadFile`], also of a damaged file: what cannot be read comes as zeros.
    29 Anyone ReadSource {
        /// The stripe.
        stripe: StripeId,
        /// Which file.
        file: FileName,
        /// First byte.
        from: u64,
        /// Number of bytes; with `from` at most the longest block.
        len_bytes: u64,
        /// Whether the grain hashes are wanted; there are none when the file's tail is broken.
        hashes: bool,
    } -> ReadFileAnswer;
    /// Reads all that the node has of a stripe from its disk, checks it and notes what is damaged. Moves and mends nothing.
    30 Anyone ExamineStripe {
        /// The stripe.
        stripe: StripeId,
        /// Whether the records of its shard are examined, too.
        with_shard: bool,
    } -> ExamineAnswer;

    /// Registers a node and keeps its lease.
    40 Nodes RegisterNode {
        /// The node.
        node: Node,
    } -> RegisterAnswer;
    /// Reads a key of the catalogue.
    41 Nodes GetKey {
        /// The key.
        key: String,
    } -> Option<(Vec<u8>, u64)>;
    /// Compare-and-set of a key; synced before the answer.
    42 Nodes CompareAndSetKey {
        /// The key.
        key: String,
        /// The revision that it must have; `None`: it must not exist.
        expected: Option<u64>,
        /// The new value; `None` removes the key.
        value: Option<Vec<u8>>,
    } -> CompareAndSetAnswer;
    /// Keys of a prefix, in order, by pages.
    43 Nodes ListKeys {
        /// The prefix.
        prefix: String,
        /// Keys after this one.
        after: Option<String>,
        /// At most so many.
        limit: u32,
    } -> Vec<(String, Vec<u8>, u64)>;
    /// Grants a lease.
    44 Nodes GrantLease {} -> (LeaseId, u64);
    /// Whether a lease lives; `keep` extends it.
    45 Nodes TouchLease {
        /// The lease.
        lease: LeaseId,
        /// Whether to extend it.
        keep: bool,
    } -> bool;
    /// Gives a lease back.
    46 Nodes RevokeLease {
        /// The lease.
        lease: LeaseId,
    } -> ();

    /// Admits a node's part of a plan: reserves all that it will need.
    50 Nodes ReservePart {
        /// The part.
        order: Order,
    } -> ();
    /// Runs a reserved part; the answer comes when its pieces are durable and read back.
    51 Nodes RunPart {
        /// The run.
        run: [u8; 16],
    } -> RunReport;
    /// Gives a reservation back.
    52 Nodes ReleasePart {
        /// The run.
        run: [u8; 16],
    } -> ();
    /// Stores a sealed commit mark.
    53 Nodes PutMark {
        /// The sealed [`CommitMark`](crate::format::records::CommitMark).
        bytes: Vec<u8>,
        /// The epoch of the catalogue that the sender obeys; the mark's own may be older.
        epoch: Epoch,
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
    /// Stores a sealed tombstone: the save takes no order any more, and its files wait for [`PurgeSave`].
    55 Nodes PutTombstone {
        /// The sealed [`Tombstone`](crate::format::records::Tombstone).
        bytes: Vec<u8>,
    } -> ();
    /// Drops the replicas of an archived stripe; the node asks the catalogue itself.
    56 Nodes DropReplicas {
        /// The stripe.
        stripe: StripeId,
        /// The attempt that was committed.
        attempt: Attempt,
        /// The generation that began the attempt.
        generation: Generation,
    } -> DropReplicasAnswer;
    /// Makes a missing or rotten replica again from another node's.
    57 Nodes CopyReplica {
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
    59 Nodes PurgeSave {
        /// The save.
        save: SaveId,
    } -> u64;
    /// Takes this node for the catalogue of an epoch: it obeys no older one from here on.
    60 Nodes ClaimEpoch {
        /// The epoch.
        epoch: Epoch,
        /// Its catalogue's map.
        map: DbId,
        /// Who serves it.
        home: NodeAddress,
    } -> ();
    /// What this node holds, by shard: the evidence that a catalogue is rebuilt from.
    62 Nodes ListInventory {
        /// Where the page begins: behind this shard, or behind this stripe of it.
        after: Option<(ShardId, Option<u32>)>,
        /// Only this save.
        only: Option<SaveId>,
    } -> InventoryPage;
    /// Saves that this node has a commit mark of, by pages.
    64 Nodes ListMarkedSaves {
        /// Where the page begins: behind this shard.
        after: Option<ShardId>,
    } -> MarkedSavesPage;
    /// Has the catalogue's home change nothing for ten seconds; what its entries come to.
    65 Nodes PauseWrites {} -> DbChecksum;
    /// Ends the catalogue of this home for a copy of it, if the copy is whole (semantics 8).
    66 Nodes TransferCatalogue {
        /// What the copy comes to.
        copied: DbChecksum,
        /// The epoch of the copy.
        epoch: Epoch,
        /// The copy.
        map: DbId,
        /// Who serves it.
        home: NodeAddress,
    } -> ();
    /// Whether this node knows of all commits and removals (semantics 2).
    67 Nodes GetStanding {} -> StandingAnswer;
    /// Removed saves that this node knows of, in order, by pages.
    68 Nodes ListRemovedSaves {
        /// Where the page begins: behind this save.
        after: Option<SaveId>,
    } -> Vec<SaveId>;
    /// Has this node catch up, now; the answer comes when it has.
    69 Nodes CatchUp {
        /// A node that is about to leave: it is not asked, and does not count.
        without: Option<PeerName>,
    } -> ();
    /// Saves of which this node has commit marks that do not parse, and none that does.
    70 Nodes ListDamagedMarks {} -> Vec<SaveId>;
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
            assert_eq!(*who == AllowedCaller::Nodes, *number >= 40, "{name}");
        }
    }
}
