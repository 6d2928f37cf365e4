//! One value of every stored record, with all variants of its enumerations.

use std::sync::Arc;

use rapidraid::catalogue::record_access::ArchiveRequest;
use rapidraid::code::CodeId;
use rapidraid::format::FormatError;
use rapidraid::format::envelope::{RecordKind, open_record, seal_record};
use rapidraid::format::file::{Content, FileHeader};
use rapidraid::format::geometry::StripeCut;
use rapidraid::format::joint_save::{JointSave, WriterState};
use rapidraid::format::launch_order::{LaunchOrder, RegisteredLaunch};
use rapidraid::format::records::{
    BlockInfo, Checkpoint, CommitMark, Damage, FIELD_GF8, Fence, Home, LAYOUT_STANDARD, LeaveState,
    Leaves, Maintenance, Members, Node, Owner, PieceForm, Receipt, ReceiptPiece, Record,
    RemoveReason, Removing, RingChange, RingChanges, RingNode, Run, SaveHead, SaveRing, Saved,
    ShardRoot, ShardState, StripeFixed, StripeRecord, StripeState, Tombstone, Writing,
    stripes_root,
};
use rapidraid::format::step_labels::StepLabels;
use rapidraid::gf::Fingerprint;
use rapidraid::id::{
    Attempt, ClusterId, DbId, Epoch, FillId, Generation, InstanceId, LaunchId, LeaseId, MemberId,
    NodeId, PeerName, SaveId, SegmentId, ShardId, Step, StripeId,
};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, LOCK_FILE, MemoryDisk, MemoryKv, Store};
use rapidraid::trainer::daemon::core::LoadAnswer;
use rapidraid::trainer::daemon::records::{
    InstanceRecord, JobRecord, LaunchHosts, LaunchRecord, OwnerRecord, SaveState, StepRecord,
};
use rapidraid::trainer::protocol::{Hosts, Place, Resumed};
use rapidraid::wire::calls::{ArchiveOptions, PlanChoice};
use rapidraid::wire::order::Codec;

use crate::fixture::Case;

pub const CLUSTER: ClusterId = ClusterId([0xc1; 16]);
pub const SAVE: SaveId = SaveId([0x5a; 12]);
pub const ATTEMPT: Attempt = Attempt([0xa7; 16]);
pub const LEASE: LeaseId = LeaseId([0x1e; 16]);
pub const CODE: CodeId = CodeId(0x0102_0304_0506_0708);
pub const MAP: DbId = DbId([0x3c; 16]);
pub const GENERATION: Generation = Generation { epoch: Epoch(3), counter: 300 };

pub fn stripe() -> StripeId {
    StripeId { shard: ShardId::new(SAVE, 1), index: 258 }
}

pub fn cut() -> StripeCut {
    StripeCut { offset_bytes: 131_072, len_bytes: 100_000, block_bytes: 50_048, k: 2 }
}

pub fn node(name: &str) -> Node {
    Node {
        name: name.parse().unwrap(),
        address: format!("{name}.example.org:7440"),
        zone: "north".into(),
        rack: String::new(),
        storage: true,
    }
}

pub fn node_id(name: &str) -> NodeId {
    NodeId::of(&name.parse().unwrap())
}

fn leaves_of_root() -> Vec<[u8; 32]> {
    vec![[0x22; 32], stripe_record().leaf()]
}

pub fn root() -> ShardRoot {
    let ring = |number: u16| RingNode { node: node_id(&format!("node-{number}")), domain: number };
    ShardRoot {
        job: "gpt-2_small.v1".parse().unwrap(),
        step: Step(1000),
        save: SAVE,
        index: 1,
        shards: 2,
        shard: ShardId::new(SAVE, 1),
        name: "model/rank 7.bin".parse().unwrap(),
        len_bytes: 231_072,
        block_bytes: 65_536,
        n: 4,
        k: 2,
        layout: LAYOUT_STANDARD,
        field: FIELD_GF8,
        fingerprint_key: [0x0f; 32],
        ring: (1..=5).map(ring).collect(),
        stripes_root: stripes_root(&leaves_of_root()),
    }
}

pub fn state() -> ShardState {
    let (attempt, code, generation) = (ATTEMPT, CODE, GENERATION);
    let states = [
        StripeState::Replicated,
        StripeState::Archiving { attempt, code, generation },
        StripeState::Archived { attempt, code, generation, dropped: true },
    ];
    ShardState {
        generation: GENERATION,
        owner: Some(Owner { node: node_id("node-1"), lease: LEASE }),
        deleting: false,
        runs: (1u32..).zip(states).map(|(n, state)| Run { count: n * 100, state }).collect(),
    }
}

pub fn saved() -> Saved {
    Saved {
        save: SAVE,
        generation: GENERATION,
        shards: 2,
        len_bytes: 1 << 40,
        roots_hash: [0x44; 32],
        saved_at: 1_700_000_000,
    }
}

fn head() -> SaveHead {
    SaveHead { cluster: CLUSTER, saved: saved(), nodes: vec![node("node-1"), node("node-2")] }
}

fn removing(reason: RemoveReason) -> Removing {
    Removing { save: SaveId([reason as u8; 12]), generation: GENERATION, reason }
}

fn checkpoint_open() -> Checkpoint {
    let reasons = [RemoveReason::Aborted, RemoveReason::Deleted, RemoveReason::Superseded];
    Checkpoint {
        committed: Some(saved()),
        writing: Some(Writing::Open { save: SAVE, generation: GENERATION, lease: LEASE }),
        removing: reasons.map(removing).to_vec(),
    }
}

pub fn joint_save() -> JointSave {
    let ring = |number: u16| RingNode { node: node_id(&format!("node-{number}")), domain: number };
    let announced = WriterState::Announced { shards: 300, sent_mib: 70_000 };
    JointSave {
        save: SAVE,
        launch: LAUNCH,
        lease: LEASE,
        seed: [0x55; 32],
        n: 16,
        k: 11,
        block_bytes: 64 << 20,
        ring: vec![ring(1), ring(2)],
        writers: vec![WriterState::Unknown, announced, WriterState::Dropped],
    }
}

fn dropped_joint_save() -> JointSave {
    JointSave { writers: vec![WriterState::DroppedLater, WriterState::Dropped], ..joint_save() }
}

fn reported_joint_save() -> JointSave {
    let state = WriterState::Reporting { shards: 300, progress: 70_000, reports: 400 };
    JointSave { writers: vec![state], ..joint_save() }
}

fn joint_save_dropped_for_a_reason() -> JointSave {
    let first = WriterState::DroppedBecause { reason: "rank 3 died".into() };
    JointSave { writers: vec![first, WriterState::DroppedLater], ..joint_save() }
}

fn stripe_record() -> StripeRecord {
    let block = |len_bytes, byte| BlockInfo {
        len_bytes,
        root: [byte; 32],
        fingerprints: vec![Fingerprint([byte + 1; 16])],
    };
    let stripe = StripeId { shard: ShardId::new(SAVE, 1), index: 1 };
    let blocks = vec![block(50_048, 0x60), block(49_952, 0x70)];
    let fixed = StripeFixed { stripe, cut: cut(), blocks };
    let places = (1..=4).map(|number| node_id(&format!("node-{number}"))).collect();
    StripeRecord::new(&fixed, places).unwrap()
}

fn receipt() -> Receipt {
    let piece = |piece: u8, form| ReceiptPiece {
        piece,
        node: node_id("node-1"),
        form,
        root: [0x80 + piece; 32],
    };
    let (attempt, generation, code) = (ATTEMPT, GENERATION, CODE);
    let pieces = vec![piece(0, PieceForm::Replica { block: 0 }), piece(1, PieceForm::File)];
    let order = Generation::default();
    Receipt { cluster: CLUSTER, stripe: stripe(), attempt, generation, code, pieces, order }
}

fn archiving(failures: u32, waiting: Option<String>) -> ArchiveRequest {
    let (plan, codec) = (PlanChoice::StripedStar, Codec::ReedSolomonErasure);
    let options = ArchiveOptions { plan, codec, parallel: 300 };
    ArchiveRequest { node: node_id("node-1"), lease: LEASE, save: SAVE, options, failures, waiting }
}

fn record<R: Record + PartialEq + 'static>(name: &str, value: R) -> Case {
    let bytes = value.to_bytes().unwrap();
    let parse = move |bytes: &[u8]| match R::parse(bytes) {
        Ok(found) => Ok(found == value),
        Err(error) => Err(error.kind()),
    };
    Case { name: name.to_owned(), bytes, parse: Box::new(parse) }
}

fn file_header(name: &str, content: Content) -> Case {
    let header = FileHeader {
        cluster: CLUSTER,
        stripe: stripe(),
        content,
        len_bytes: 65_665,
        root: [0x33; 32],
        written_by: node_id("node-1"),
        layout: LAYOUT_STANDARD,
    };
    let bytes = seal_record(RecordKind::FileHeader, 1, &header).unwrap();
    let parse = move |bytes: &[u8]| {
        let found: Result<FileHeader, FormatError> =
            open_record(RecordKind::FileHeader, 1..=1, bytes);
        found.map(|found| found == header).map_err(|error| error.kind())
    };
    Case { name: name.to_owned(), bytes, parse: Box::new(parse) }
}

const SEEN: Epoch = Epoch(300);
const REVISION: u64 = 70_000;
/// The file that records [`SAVE`] as removed.
const GRAVES: &str = "graves/5a";

fn open(disk: &Arc<MemoryDisk>) -> Result<Store, ErrorKind> {
    let name: PeerName = "node-1".parse().unwrap();
    let lock = disk.lock(LOCK_FILE).unwrap();
    let store = Store::open(disk.clone(), lock, Arc::new(MemoryKv::new()), CLUSTER, &name);
    store.map(|(store, _)| store).map_err(|error| error.kind())
}

/// Returns the case of a record at the top of the data folder, whose body is private to the store.
/// Opening a folder writes and reads it.
fn folder_record(name: &str, path: &'static str) -> Case {
    let disk = Arc::new(MemoryDisk::new(1 << 20));
    let home = Home { name: "node-1".parse().unwrap(), address: "node-1.example.org:7440".into() };
    let store = open(&disk).unwrap();
    store.claim_epoch(SEEN, MAP, home.clone()).unwrap();
    store.record_revision(MAP, REVISION).unwrap();
    assert!(store.try_record_removed(SAVE).unwrap());
    store.record_caught_up(SEEN, REVISION).unwrap();
    let file = disk.open(path).unwrap();
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let parse = move |bytes: &[u8]| {
        let home = home.clone();
        let disk = Arc::new(MemoryDisk::new(1 << 20));
        disk.create_dir("graves").unwrap();
        disk.create_new(path).unwrap().write_at(bytes, 0).unwrap();
        let store = open(&disk)?;
        match path {
            "epoch" => Ok(store.highest_seen_epoch() == SEEN),
            "catch-up" => {
                // A new folder has a record of its own from the start.
                disk.remove(path).unwrap();
                disk.create_new(path).unwrap().write_at(bytes, 0).unwrap();
                // A record that does not open means that the node is behind.
                match store.caught_up_registration() {
                    None => Err(ErrorKind::Corrupt),
                    Some(revision) => Ok(revision == REVISION),
                }
            }
            "heard" => {
                store.claim_epoch(SEEN, MAP, home).unwrap();
                // A record that does not open counts as missing.
                match store.revision_of_current_db() {
                    0 => Err(ErrorKind::Corrupt),
                    revision => Ok(revision == REVISION),
                }
            }
            // A damaged record is set aside when the folder is opened.
            GRAVES if store.totals().quarantined > 0 => Err(ErrorKind::Corrupt),
            GRAVES => store.is_recorded_removed(SAVE).map_err(|error| error.kind()),
            _ => Ok(true),
        }
    };
    Case { name: name.to_owned(), bytes, parse: Box::new(parse) }
}

pub const LAUNCH: LaunchId = LaunchId([0x1a; 16]);
const FILL: FillId = FillId([0xf1; 16]);

fn damage() -> Damage {
    Damage { number: 300, has_tail: true, grains: [0, 9].into_iter().collect() }
}

fn staging_folder() -> InstanceRecord {
    let boot = "0f1e2d3c-0000-4000-8000-000000000001".to_owned();
    InstanceRecord { instance: InstanceId([0x15; 16]), cluster: CLUSTER, boot }
}

fn segment_owner() -> OwnerRecord {
    let place = Place { job: "gpt".parse().unwrap(), launch: LAUNCH, world: 8, rank: 3 };
    OwnerRecord { member: MemberId([0x3e; 16]), place, len_bytes: 1 << 30 }
}

fn staged_step(save: SaveState) -> StepRecord {
    let segments = vec![SegmentId([0x5e; 16]), SegmentId([0x5f; 16])];
    let (job, step) = ("gpt".parse().unwrap(), Step(1200));
    StepRecord { job, step, launch: LAUNCH, fill: FILL, segments, save }
}

fn staged_job() -> JobRecord {
    let resumed =
        Resumed { loaded: Some(Step(1100)), newest_seen: Some(Step(1200)), abandon_later: true };
    let newest = LaunchRecord {
        launch: LAUNCH,
        world: 8,
        born_ns: 1 << 50,
        resumed,
        keep: 3,
        committed_before: Some(vec![Step(1000), Step(1100)]),
    };
    let old = LaunchRecord {
        launch: LaunchId([0x1b; 16]),
        resumed: Resumed::default(),
        committed_before: None,
        ..newest.clone()
    };
    let answer = |number, step| LoadAnswer { launch: LAUNCH, number, step };
    JobRecord {
        job: "gpt".parse().unwrap(),
        newest: Some(newest),
        old: vec![old],
        dropped: vec![FILL],
        abandoned: vec![(Step(1200), SAVE)],
        loads: vec![answer(1, Some(Step(1100))), answer(2, None)],
    }
}

fn launch_hosts() -> LaunchHosts {
    let hosts = Hosts { own: 1, names: vec!["host-a".into(), "host-b".into()] };
    LaunchHosts { launch: LAUNCH, hosts, filled: Some(Step(1200)) }
}

fn launch_order() -> LaunchOrder {
    let entry = |number: u8, resumed| RegisteredLaunch {
        launch: LaunchId([number; 16]),
        number: number.into(),
        registered_at: 1_800_000_000,
        resumed,
    };
    LaunchOrder { launches: vec![entry(1, None), entry(2, Some(Step(1200)))] }
}

fn step_labels() -> StepLabels {
    let labels = ["a", "trusted"].map(|label| label.parse().unwrap());
    StepLabels { save: SAVE, labels: labels.to_vec() }
}

/// Returns a ring change of each state.
pub fn ring_changes() -> RingChanges {
    let change = |node: &str, state, successors: &[&str]| {
        let successors = successors.iter().map(|node| node.parse().unwrap()).collect();
        RingChange { node: node.parse().unwrap(), state, successors }
    };
    RingChanges {
        changes: vec![
            change("node-1", LeaveState::Returned, &["node-3"]),
            change("node-2", LeaveState::Leaving, &[]),
            change("node-3", LeaveState::Left, &["node-4", "node-5"]),
        ],
    }
}

/// Returns the cases of all records.
pub fn cases() -> Vec<Case> {
    let (saved, stripe_record) = (saved(), stripe_record());
    let decided = Some(Writing::Decided { saved: saved.clone() });
    let decided = Checkpoint { committed: None, writing: decided, removing: Vec::new() };
    let retired =
        Checkpoint { removing: vec![removing(RemoveReason::Retired)], ..Checkpoint::default() };
    let mark = CommitMark { cluster: CLUSTER, saved, root: root() };
    let (generation, holder, reason) = (GENERATION, node_id("node-2"), RemoveReason::Deleted);
    vec![
        record("shard root", root()),
        record("shard state", state()),
        record("shard state of an empty shard", ShardState::fresh(GENERATION, 0)),
        record("checkpoint, open", checkpoint_open()),
        record("checkpoint, decided", decided),
        record("stripe record", stripe_record),
        record("commit mark", mark),
        record("receipt", receipt()),
        record("receipt of a repair", Receipt { order: GENERATION, ..receipt() }),
        record("tombstone", Tombstone { cluster: CLUSTER, save: SAVE, generation, reason }),
        record("fence", Fence { generation, holder }),
        folder_record("node identity", "node.id"),
        file_header("file header of a replica", Content::Replica { block: 3 }),
        file_header(
            "file header of a piece",
            Content::Piece { piece: 7, attempt: ATTEMPT, code: CODE.0 },
        ),
        record("node", node("node-1")),
        folder_record("epoch", "epoch"),
        record("removing", Removing { save: SAVE, generation, reason }),
        record("members", Members { nodes: vec![node("node-1"), node("node-2")] }),
        record("leaves", Leaves { root: root(), hashes: leaves_of_root() }),
        record("archiving", archiving(0, None)),
        record("archiving that waits", archiving(300, Some("node-3 is away".into()))),
        record("checkpoint, retired", retired),
        folder_record("graves", GRAVES),
        folder_record("heard revision", "heard"),
        folder_record("catch-up", "catch-up"),
        record("damage note", damage()),
        record("save's head", head()),
        record("joint save", joint_save()),
        record("joint save, dropped by two", dropped_joint_save()),
        record("joint save, dropped for a reason", joint_save_dropped_for_a_reason()),
        record("joint save, of writers that report", reported_joint_save()),
        record("staging folder", staging_folder()),
        record("segment owner", segment_owner()),
        record("staged step", staged_step(SaveState::Unsaved)),
        record("staged step, begun", staged_step(SaveState::Begun { saves: vec![SAVE] })),
        record("staged step, committed", staged_step(SaveState::Committed { save: SAVE })),
        record("staged job", staged_job()),
        record("hosts of a launch", launch_hosts()),
        record("order of launches", launch_order()),
        record("labels of a step", step_labels()),
        record("ring change", RingChange::leaving("node-9".parse().unwrap())),
        record("ring changes", ring_changes()),
        record("save's ring", SaveRing::from(joint_save())),
        record("maintenance", Maintenance { node: "node-9".parse().unwrap(), until: 1 << 40 }),
    ]
}

/// Uses a record whose checksum is right and whose content is wrong. Nothing may panic.
pub fn use_hostile(bytes: &[u8]) {
    if let Ok(mut state) = ShardState::parse(bytes) {
        let _ = (state.stripe(u32::MAX), state.set(100, StripeState::Replicated));
    }
    if let Ok(root) = ShardRoot::parse(bytes) {
        let cut = root.geometry().ok().and_then(|geometry| geometry.stripe(0));
        let _ = cut.map(|cut| (cut.grains(), cut.block_len(1)));
    }
    if let Ok(record) = StripeRecord::parse(bytes) {
        let leaves = Leaves { root: root(), hashes: vec![[0; 32], record.leaf()] };
        let _ = record.open(&root(), &leaves, 1);
    }
    if let Ok(leaves) = Leaves::parse(bytes) {
        let _ = root().admits(&leaves);
    }
}

/// Returns `sealed` with byte `at` of its body set to `byte` and the checksum recomputed.
pub fn resealed(sealed: &[u8], at: usize, byte: u8) -> Vec<u8> {
    let mut bytes = sealed[..sealed.len() - 16].to_vec();
    bytes[10 + at] = byte;
    let sum = blake3::hash(&bytes);
    bytes.extend(&sum.as_bytes()[..16]);
    bytes
}

#[test]
fn the_root_of_the_fixture_admits_its_leaves_and_its_stripe() {
    let leaves = Leaves { root: root(), hashes: leaves_of_root() };
    assert!(root().admits(&leaves));
    let opened = stripe_record().open(&root(), &leaves, 1).unwrap();
    assert_eq!(opened.cut, cut());
}
