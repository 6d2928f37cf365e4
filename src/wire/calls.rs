//! The calls: number, allowed callers, request and answer of each.

use serde::{Deserialize, Serialize};

pub use super::answers::*;
use super::order::{Order, RunReport};
use super::policy::{PolicyAnswer, RetentionChange};
pub use super::repair::*;
use super::{AllowedCaller, Call, NodeAddress};
use crate::format::file::FileName;
use crate::format::records::{Node, RingChanges, Saved, ShardRoot, ShardState};
use crate::id::{
    Attempt, DbId, Epoch, Generation, Job, Label, LaunchId, LeaseId, NodeId, PeerName, SaveId,
    ShardId, Step, StripeId,
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

        /// Number, name and allowed callers of every call, for the dispatcher and the protocol
        /// page.
        pub const ALL: &[(u8, &str, AllowedCaller)] = &[$(($number, stringify!($name), AllowedCaller::$who)),*];
    };
}

calls! {
    /// Asks a daemon who it is and where the catalogue is.
    1 Anyone Hello {
        /// The caller, if it is a node. When the catalogue is lost, there may be no other record of
        /// that node.
        me: Option<Node>,
    } -> HelloAnswer;
    /// Opens a save (semantics 3.1). A repeated call with the same `save` returns the same answer.
    2 Anyone BeginSave {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// Whether a committed step may be replaced.
        replace: bool,
        /// The save's id, drawn by the client, so that a repeated call whose first answer was lost
        /// opens no second save.
        save: SaveId,
        /// Nodes that the save leaves out if the other nodes suffice for a configured code.
        avoid: Vec<NodeId>,
    } -> BeginSaveAnswer;
    /// Renews a lease.
    3 Anyone RenewLease {
        /// The lease.
        lease: LeaseId,
    } -> ();
    /// Records that one shard of an open save is complete.
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
        /// Number of completed shards.
        shards: u32,
    } -> Saved;
    /// Aborts an open save.
    6 Anyone AbortSave {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save.
        save: SaveId,
    } -> ();
    /// Archives a committed step. Answers with [`ArchiveEvent`]s until `Done`.
    7 Anyone ArchiveStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The kind of plan, the implementation that multiplies, and how many stripes are archived
        /// at once.
        options: ArchiveOptions,
    } -> ArchiveEvent;
    /// Removes a committed step (semantics 5).
    8 Anyone RemoveStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save that the caller saw committed as the step. No other save is removed.
        save: SaveId,
    } -> RemoveAnswer;
    /// Lists committed steps, in order, by pages.
    9 Anyone ListSteps {
        /// The job whose steps are listed; `None` for all jobs.
        job: Option<Job>,
        /// The page begins after this step.
        after: Option<(Job, Step)>,
    } -> ListStepsAnswer;
    /// Returns one committed step with its shards, by pages.
    10 Anyone ShowStep {
        /// The job.
        job: Job,
        /// The step; `None` is the latest.
        step: Option<Step>,
        /// First shard of the page.
        first_shard: u32,
    } -> ShowStepAnswer;
    /// Returns the state of one shard.
    11 Anyone GetShardState {
        /// The shard.
        shard: ShardId,
    } -> Option<ShardState>;
    /// Returns the registered nodes, and which are live.
    12 Anyone ListNodes {} -> Vec<NodeView>;
    /// Returns what this node stores and which resources it uses.
    13 Anyone GetNodeStatus {} -> NodeStatusAnswer;
    /// Rebuilds a lost catalogue from the contents of the nodes. The called daemon serves it
    /// afterwards (semantics 8).
    14 Anyone RebuildCatalogue {
        /// Whether to continue if too few nodes are reached or roots are missing.
        accept_loss: bool,
    } -> RebuildAnswer;
    /// Returns the policy that the catalogue server applies, and the work that is pending.
    15 Anyone GetPolicyStatus {} -> PolicyAnswer;
    /// Removes a node from the list of members (semantics 10).
    16 Anyone RemoveNode {
        /// The node's name.
        name: PeerName,
    } -> ();
    /// Transfers the catalogue from the daemon that serves it to the called one (semantics 8).
    17 Anyone MoveCatalogue {} -> MoveCatalogueAnswer;
    /// Joins the open save of a launch's step, and opens it if there is none (semantics 3). A
    /// repeated call returns the same save.
    18 Anyone JoinSave {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The launch.
        launch: LaunchId,
        /// The number of the caller among the writers, from 0.
        writer: u32,
        /// The number of writers.
        writers: u32,
        /// The writer's report on its part.
        report: WriterReport,
        /// The committed save of another launch that this save may replace.
        replace: Option<SaveId>,
        /// Nodes that a new save leaves out if the other nodes suffice for a configured code.
        avoid: Vec<NodeId>,
    } -> JoinSaveAnswer;
    /// Lists the completed shards of an open save, in order, by pages.
    19 Anyone ListCompletedShards {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save.
        save: SaveId,
        /// The page begins with this shard.
        first: u32,
    } -> CompletedShards;
    /// Lists saves that are not committed yet, in order of job and step; at most 64.
    31 Anyone ListOpenSaves {
        /// The job whose saves are listed; `None` for all jobs.
        job: Option<Job>,
    } -> Vec<OpenSaveView>;
    /// Registers a launch of a job, or confirms that it is the newest one (semantics 3). Then, for
    /// the steps after `resumed`, publishes decided saves and aborts open saves of older launches.
    32 Anyone RegisterLaunch {
        /// The job.
        job: Job,
        /// The launch.
        launch: LaunchId,
        /// The step that the launch has resumed from; `None` if it loaded nothing.
        resumed: Option<Step>,
        /// The reason why an unknown launch is newer than all others.
        claim: LaunchClaim,
    } -> ();
    /// Opens a save of a launch that one client writes. Otherwise as [`BeginSave`].
    33 Anyone BeginLaunchSave {
        /// The save.
        begin: BeginSave,
        /// The launch.
        launch: LaunchId,
    } -> BeginSaveAnswer;
    /// Lists the newest launch of each job, in order of the jobs, by pages of at most 64. For one
    /// job, lists its last launches instead, the newest last.
    34 Anyone ListLaunches {
        /// The job whose launches are listed; `None` for the newest launch of each job.
        job: Option<Job>,
        /// The page begins after this job.
        after: Option<Job>,
    } -> Vec<LaunchView>;
    /// Removes a committed step for a launch, if the launch is the newest one of the job.
    35 Anyone RemoveLaunchStep {
        /// The step.
        remove: RemoveStep,
        /// The launch.
        launch: LaunchId,
    } -> RemoveAnswer;
    /// Adds a label to a committed save, or removes one (semantics 9). Returns the save's labels.
    36 Anyone LabelStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The save that the caller saw committed as the step. No other save is labelled.
        save: SaveId,
        /// The label.
        label: Label,
        /// The change.
        change: LabelChange,
    } -> Vec<Label>;
    /// Lists the labelled saves of a job, in order of their steps, by pages of at most 64.
    37 Anyone ListLabels {
        /// The job.
        job: Job,
        /// The page begins after this step.
        after: Option<Step>,
    } -> Vec<LabelledStep>;

    /// Makes again what nodes have lost of a committed step (semantics 11). Answers with
    /// [`RepairEvent`]s until `Done`.
    38 Anyone RepairStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The options.
        options: RepairOptions,
        /// Nodes whose pieces are made on other nodes if those nodes do not answer.
        given_up: Vec<NodeId>,
    } -> RepairEvent;
    /// Returns how many nodes may be lost, and what is repaired automatically (semantics 11).
    39 Anyone GetRepairStatus {} -> RepairStatus;

    /// Stores a block. The node first answers with [`BlockAdmitted`]. Then the client sends the
    /// block's bytes and a [`BlockTrailer`] frame, and the node sends its last answer.
    20 Anyone PutBlock {
        /// The stripe.
        stripe: StripeId,
        /// The block, from 0.
        block: u8,
        /// Length of the block in bytes, without padding.
        len_bytes: u64,
        /// The save's generation.
        generation: Generation,
        /// The key of the fingerprints.
        fingerprint_key: [u8; 32],
        /// The second holder, to which this node forwards the block while storing it.
        forward: Option<NodeAddress>,
    } -> PutBlockAnswer;
    /// Stores a stripe record, or a shard's leaves, of an uncommitted save.
    21 Anyone PutRecord {
        /// The shard.
        shard: ShardId,
        /// The record.
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
        /// The record.
        record: RecordName,
    } -> Option<Vec<u8>>;
    /// Lists the files of a stripe.
    23 Anyone ListFiles {
        /// The stripe.
        stripe: StripeId,
    } -> Vec<FileView>;
    /// Reads a range of a file. The bytes follow the answer.
    24 Anyone ReadFile {
        /// The stripe.
        stripe: StripeId,
        /// The file.
        file: FileName,
        /// Offset of the first byte.
        from: u64,
        /// Number of bytes.
        len_bytes: u64,
        /// Whether the grain hashes are wanted.
        hashes: bool,
    } -> ReadFileAnswer;
    /// Reports that the bytes of a file seem wrong. The node checks the file and notes damage. It
    /// mends a damaged replica later, and moves a misplaced file to quarantine. Returns `true` if
    /// the file is damaged, misplaced or missing, and `false` if it is good.
    25 Anyone VerifyFile {
        /// The stripe.
        stripe: StripeId,
        /// The file.
        file: FileName,
    } -> bool;
    /// Returns those of the given saves (at most 256 per call) that this node has removed or is to
    /// remove.
    26 Anyone FindRemovedSaves {
        /// The saves.
        saves: Vec<SaveId>,
    } -> Vec<SaveId>;
    /// Returns the nodes of the cluster, as far as this node knows them.
    27 Anyone ListMembers {} -> Vec<Node>;
    /// Lists the files of a stripe whose grains can be read, damaged files among them.
    28 Anyone ListSources {
        /// The stripe.
        stripe: StripeId,
    } -> Vec<SourceView>;
    /// Reads a range of a file as [`ReadFile`] does, and also of a damaged file: bytes that cannot
    /// be read are zeros.
    29 Anyone ReadSource {
        /// The stripe.
        stripe: StripeId,
        /// The file.
        file: FileName,
        /// Offset of the first byte.
        from: u64,
        /// Number of bytes. `from` plus this number is at most the longest block.
        len_bytes: u64,
        /// Whether the grain hashes are wanted. There are none if the file's tail is broken.
        hashes: bool,
    } -> ReadFileAnswer;
    /// Reads all files and records of a stripe from this node's disk, checks them and notes damage.
    /// Moves and mends nothing.
    30 Anyone ExamineStripe {
        /// The stripe.
        stripe: StripeId,
        /// Whether the records of the stripe's shard are examined too.
        with_shard: bool,
    } -> ExamineAnswer;

    /// Registers a node and renews its lease.
    40 Nodes RegisterNode {
        /// The node.
        node: Node,
    } -> RegisterAnswer;
    /// Reads a key of the catalogue. Returns its value and revision, or `None` if it does not exist.
    41 Nodes GetKey {
        /// The key.
        key: String,
    } -> Option<(Vec<u8>, u64)>;
    /// Sets or removes a key by compare-and-set. The change is durable before the answer.
    42 Nodes CompareAndSetKey {
        /// The key.
        key: String,
        /// The revision that the key must have; `None`: the key must not exist.
        expected: Option<u64>,
        /// The new value; `None` removes the key.
        value: Option<Vec<u8>>,
    } -> CompareAndSetAnswer;
    /// Lists the keys of a prefix, in order, by pages.
    43 Nodes ListKeys {
        /// The prefix.
        prefix: String,
        /// The page begins after this key.
        after: Option<String>,
        /// Maximum number of keys.
        limit: u32,
    } -> Vec<(String, Vec<u8>, u64)>;
    /// Grants a lease. Returns the lease, and its lifetime without renewal in milliseconds.
    44 Nodes GrantLease {} -> (LeaseId, u64);
    /// Returns whether a lease is alive. With `keep` the lease is extended.
    45 Nodes TouchLease {
        /// The lease.
        lease: LeaseId,
        /// Whether to extend it.
        keep: bool,
    } -> bool;
    /// Ends a lease.
    46 Nodes RevokeLease {
        /// The lease.
        lease: LeaseId,
    } -> ();

    /// Sets a key by compare-and-set, but only if a second key has a given revision at the same
    /// time. The change is durable before the answer.
    47 Nodes CompareAndSetKeyGuarded {
        /// The key.
        key: String,
        /// The revision that the key must have; `None`: the key must not exist.
        expected: Option<u64>,
        /// The new value.
        value: Vec<u8>,
        /// The second key.
        guard_key: String,
        /// The revision that the second key must have; `None`: it must not exist.
        guard_revision: Option<u64>,
    } -> GuardedSetAnswer;

    /// Admits a node's part of a plan: reserves all memory and disk space that it will need.
    50 Nodes ReservePart {
        /// The part.
        order: Order,
    } -> ();
    /// Runs a reserved part. The answer comes when its pieces are durable and have been read back.
    51 Nodes RunPart {
        /// The id of the execution, from its [`Order`].
        run: [u8; 16],
    } -> RunReport;
    /// Releases a reservation.
    52 Nodes ReleasePart {
        /// The id of the execution, from its [`Order`].
        run: [u8; 16],
    } -> ();
    /// Stores a sealed commit mark.
    53 Nodes PutMark {
        /// The sealed [`CommitMark`](crate::format::records::CommitMark).
        bytes: Vec<u8>,
        /// The epoch of the catalogue that the sender obeys. The epoch in the mark may be older.
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
    /// Stores a sealed tombstone. The node refuses all further orders for the save, whose files
    /// stay until [`PurgeSave`].
    55 Nodes PutTombstone {
        /// The sealed [`Tombstone`](crate::format::records::Tombstone).
        bytes: Vec<u8>,
    } -> ();
    /// Drops the replicas of an archived stripe. The node itself reads the catalogue first.
    56 Nodes DropReplicas {
        /// The stripe.
        stripe: StripeId,
        /// The attempt that was committed.
        attempt: Attempt,
        /// The generation that began the attempt.
        generation: Generation,
    } -> DropReplicasAnswer;
    /// Copies a missing or damaged replica from another node.
    57 Nodes CopyReplica {
        /// The stripe.
        stripe: StripeId,
        /// The block.
        block: u8,
        /// Length of the block in bytes, without padding.
        len_bytes: u64,
        /// BLAKE3 hash of the block.
        root: [u8; 32],
        /// The coordinator's generation.
        generation: Generation,
        /// The coordinator's node.
        coordinator: NodeId,
        /// The node that holds the block.
        from: NodeAddress,
        /// The rate, in bytes a second, at which the node reads the block. `None`: as fast as it can.
        bytes_per_s: Option<u64>,
    } -> ();
    /// Removes all files of a save whose tombstone is durable on enough nodes. Returns the number
    /// of bytes removed.
    59 Nodes PurgeSave {
        /// The save.
        save: SaveId,
    } -> u64;
    /// Claims this node for the catalogue of an epoch. From then on the node obeys no older
    /// catalogue.
    60 Nodes ClaimEpoch {
        /// The epoch.
        epoch: Epoch,
        /// The id of the catalogue database of that epoch.
        map: DbId,
        /// The daemon that serves it.
        home: NodeAddress,
    } -> ();
    /// Lists the holdings of this node, by shard, by pages: the evidence from which a catalogue is
    /// rebuilt.
    62 Nodes ListInventory {
        /// The page begins after this shard, or after this stripe of it.
        after: Option<(ShardId, Option<u32>)>,
        /// The save to list; `None` for all saves.
        only: Option<SaveId>,
    } -> InventoryPage;
    /// Lists the saves of which this node has a commit mark that parses, by pages.
    64 Nodes ListMarkedSaves {
        /// The page begins after this shard.
        after: Option<ShardId>,
    } -> MarkedSavesPage;
    /// Pauses all changes of the catalogue on its server for ten seconds. Returns the checksum of the
    /// catalogue database.
    65 Nodes PauseWrites {} -> DbChecksum;
    /// Ends this server's catalogue in favour of a copy, if the copy is complete (semantics 8).
    66 Nodes TransferCatalogue {
        /// The checksum of the copy.
        copied: DbChecksum,
        /// The epoch of the copy.
        epoch: Epoch,
        /// The id of the copied database.
        map: DbId,
        /// The daemon that serves the copy.
        home: NodeAddress,
    } -> ();
    /// Returns whether this node knows of all commits and removals, and what it knows of the catalogue
    /// and of the nodes (semantics 2).
    67 Nodes GetStanding {} -> StandingAnswer;
    /// Lists the removed saves that this node knows of, in order, by pages.
    68 Nodes ListRemovedSaves {
        /// The page begins after this save.
        after: Option<SaveId>,
    } -> Vec<SaveId>;
    /// Makes this node catch up now. The answer comes when the node has caught up.
    69 Nodes CatchUp {
        /// A node that is about to leave. The called node neither asks it nor counts it as a
        /// storage node.
        without: Option<PeerName>,
    } -> ();
    /// Lists the saves of which this node has commit marks that do not parse, and none that does.
    70 Nodes ListDamagedMarks {} -> Vec<SaveId>;
    /// Stores the leaves of a committed shard on a node that has lost them, on the order of the
    /// shard's owner.
    71 Nodes PutLeaves {
        /// The sealed [`Leaves`](crate::format::records::Leaves).
        bytes: Vec<u8>,
        /// The owner's generation.
        owner: Generation,
        /// The repairer's node.
        coordinator: NodeId,
    } -> ();
    /// Returns what this node has of a shard: its leaves, its commit mark, and the files and
    /// records of 1,024 stripes.
    72 Nodes SurveyShard {
        /// The shard.
        shard: ShardId,
        /// The first of the stripes.
        first: u32,
    } -> ShardSurvey;
    /// Returns the ring changes (semantics 10).
    100 Anyone ListRingChanges {
        /// If set, the node returns the ring changes that it stores, and asks no catalogue.
        only_stored: bool,
    } -> RingChanges;
    /// Records a node as leaving, with a successor. The answer comes when more than half of the
    /// storage nodes have stored the ring change.
    101 Anyone ReplaceNode {
        /// The node that leaves.
        node: PeerName,
        /// The node that takes its place.
        successor: PeerName,
    } -> ();

    /// Sets the maintenance of a node. Until its end, automatic repair ignores the node's absence
    /// (semantics 11).
    102 Anyone SetMaintenance {
        /// The node.
        node: PeerName,
        /// The length of the maintenance from now on, in seconds, at most seven days; 0 ends it.
        seconds: u64,
    } -> ();
    /// Pauses or resumes retention, or leaves it as it is (semantics 9). Returns whether it is
    /// paused afterwards.
    103 Anyone SetRetention {
        /// The change.
        change: RetentionChange,
    } -> bool;

    /// Stores a stripe record with an added place, after a block has moved.
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
mod tests;
