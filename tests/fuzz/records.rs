//! Targets for stored records: whole records, in which every change must be noticed, and hostile
//! bodies under a right checksum.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use rapidraid::catalogue::record_access::ArchiveRequest;
use rapidraid::format::envelope::{RecordKind, open_record, seal_record};
use rapidraid::format::file::FileHeader;
use rapidraid::format::records::{
    Checkpoint, CommitMark, Damage, Fence, JointSave, LaunchOrder, Leaves, Maintenance, Members,
    Node, Receipt, Record, Removing, RingChange, RingChanges, SaveHead, SaveRing, ShardRoot,
    ShardState, StepLabels, StripeRecord, StripeState, Tombstone,
};
use rapidraid::id::{ClusterId, NodeId, PeerName, SaveId, Step};
use rapidraid::store::kv::Batch;
use rapidraid::store::{Disk, Kv, LOCK_FILE, MemoryDisk, MemoryKv, Store, StoreError};
use rapidraid::topology::Directory;
use rapidraid::trainer::daemon::records::{
    InstanceRecord, JobRecord, LaunchHosts, OwnerRecord, StepRecord,
};

use crate::fixtures;
use crate::target::{Memory, Seen, Target, Verdict, round_trip, seen, within};
use crate::wire::MESSAGE;

const HEAD_BYTES: usize = 10;
const CHECKSUM_BYTES: usize = 16;
const SAVE: SaveId = SaveId([0x5a; 12]);

fn golden() -> Vec<Vec<u8>> {
    fixtures::lines("format/v1/records.txt").into_iter().map(|(_, bytes)| bytes).collect()
}

/// Returns `body` in an envelope of its own, with its checksum.
pub fn sealed(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = [b"rRd1", &[kind, 1][..], &(body.len() as u32).to_le_bytes(), body].concat();
    let sum = blake3::hash(&bytes);
    bytes.extend(&sum.as_bytes()[..CHECKSUM_BYTES]);
    bytes
}

/// Returns the body inside a record's envelope.
pub fn body_of(sealed: &[u8]) -> &[u8] {
    &sealed[HEAD_BYTES..sealed.len() - CHECKSUM_BYTES]
}

/// Returns the kind and body of each golden record.
fn bodies() -> Vec<Vec<u8>> {
    let of = |bytes: Vec<u8>| [&bytes[4..5], body_of(&bytes)].concat();
    // The target seals bodies of version 1.
    golden().into_iter().filter(|bytes| bytes[5] == 1).map(of).collect()
}

fn record<R: Record + PartialEq + Debug>(
    bytes: &[u8],
    used: impl Fn(R) -> Result<(), String>,
) -> Verdict {
    let (value, peak_bytes) = round_trip(MESSAGE, bytes, R::parse, R::to_bytes)?;
    let accepted = value.is_some();
    value.map_or(Ok(()), used)?;
    Ok(Seen { accepted, peak_bytes })
}

fn law(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// Parses a record by the law of its kind, and uses the value.
fn parsed(bytes: &[u8]) -> Verdict {
    let plain = |_: &dyn Debug| Ok(());
    match bytes.get(4) {
        Some(1) => record(bytes, use_root),
        Some(2) => record(bytes, use_state),
        Some(3) => record(bytes, |value: Checkpoint| plain(&value)),
        Some(4) => record(bytes, use_stripe),
        Some(5) => record(bytes, |mark: CommitMark| use_root(mark.root)),
        Some(6) => record(bytes, |value: Receipt| plain(&value)),
        Some(7) => record(bytes, |value: Tombstone| plain(&value)),
        Some(8) => record(bytes, |value: Fence| plain(&value)),
        Some(10) => {
            let kind = RecordKind::FileHeader;
            let parse = |bytes: &[u8]| open_record::<FileHeader>(kind, 1..=1, bytes);
            round_trip(MESSAGE, bytes, parse, |value| seal_record(kind, 1, value)).map(seen)
        }
        Some(11) => record(bytes, |value: Node| plain(&value)),
        Some(13) => record(bytes, |leaves: Leaves| use_root(leaves.root)),
        Some(14) => record(bytes, |value: ArchiveRequest| plain(&value)),
        Some(15) => record(bytes, |value: Removing| plain(&value)),
        Some(16) => record(bytes, |value: Members| plain(&value)),
        Some(25) => record(bytes, |value: Damage| plain(&value)),
        Some(19) => record(bytes, |value: SaveHead| plain(&value)),
        Some(26) => record(bytes, |joint: JointSave| {
            let _ = (joint.name_of(0), joint.ring_of(u32::MAX), joint.progress());
            plain(&joint)
        }),
        Some(20) => record(bytes, |value: InstanceRecord| plain(&value)),
        Some(21) => record(bytes, |value: OwnerRecord| plain(&value)),
        Some(22) => record(bytes, |value: StepRecord| plain(&value)),
        Some(23) => record(bytes, |value: JobRecord| plain(&value)),
        Some(29) => record(bytes, |value: StepLabels| plain(&value)),
        Some(28) => record(bytes, |order: LaunchOrder| {
            for entry in &order.launches {
                let _ = order.may_save(entry.launch, Step(0));
            }
            plain(&order)
        }),
        Some(32) => record(bytes, |value: Maintenance| plain(&value)),
        Some(33) => record(bytes, |value: SaveRing| plain(&value)),
        Some(30) => record(bytes, |value: RingChange| plain(&value)),
        Some(31) => record(bytes, |value: RingChanges| {
            let mut merged = RingChanges::default();
            value.changes.iter().cloned().for_each(|change| merged.merge(change));
            let _ = Directory::new(Vec::new(), merged).all_successors_of(&[NodeId(0)]);
            plain(&value)
        }),
        Some(27) => record(bytes, |value: LaunchHosts| plain(&value)),
        _ => Ok(Seen::default()),
    }
}

fn use_root(root: ShardRoot) -> Result<(), String> {
    let Ok(geometry) = root.geometry() else { return Ok(()) };
    let stripes = geometry.stripes();
    law(geometry.stripe(stripes).is_none(), "there is a stripe past the last")?;
    let last = stripes.checked_sub(1).and_then(|index| geometry.stripe(index));
    let end = last.map_or(0, |cut| cut.offset_bytes + cut.len_bytes);
    law(end == root.len_bytes, "the last stripe does not end where the shard does")?;
    let blocks = |cut: rapidraid::format::geometry::StripeCut| {
        (0..cut.k).map(|block| cut.block_len(block)).sum::<u64>() == cut.len_bytes
    };
    law(last.is_none_or(blocks), "the blocks are not the stripe")
}

fn use_state(state: ShardState) -> Result<(), String> {
    let _ = state.stripe(u32::MAX);
    let was = state.stripe(100);
    let mut set = state.clone();
    let done = set.set(100, StripeState::Replicated);
    law(was.is_some() || !done, "a stripe was set that is not there")?;
    let expected = if done { Some(StripeState::Replicated) } else { was };
    law(set.stripe(100) == expected && set.stripe(99) == state.stripe(99), "set sets another")
}

/// Opens the fixed part as if the commit had recorded its hash, so that the checks of its content
/// run too.
fn use_stripe(record: StripeRecord) -> Result<(), String> {
    let parse = |(_, bytes): (String, Vec<u8>)| ShardRoot::parse(&bytes).ok();
    let root = fixtures::lines("format/v1/records.txt").into_iter().find_map(parse);
    let root = root.ok_or("no golden root")?;
    let leaves = Leaves { root: root.clone(), hashes: vec![[0; 32], record.leaf()] };
    let Ok(fixed) = record.open(&root, &leaves, 1) else { return Ok(()) };
    law(fixed.blocks.len() == usize::from(root.k), "a stripe of another number of blocks")?;
    law(record.places.len() == usize::from(root.n), "a stripe in another number of places")
}

/// Fuzzes whole records: only a golden record is accepted, whatever was changed.
pub fn records() -> Target {
    // The records of the data folder have kinds without a type of their own; the target `folders`
    // opens them with their folder.
    let corpus: Vec<Vec<u8>> =
        golden().into_iter().filter(|bytes| ![9, 12, 17, 18, 24].contains(&bytes[4])).collect();
    let whole: BTreeSet<Vec<u8>> = corpus.iter().cloned().collect();
    let check = move |bytes: &[u8]| match parsed(bytes)? {
        Seen { accepted: true, .. } if !whole.contains(bytes) => {
            Err("a damaged record is believed".into())
        }
        seen => Ok(seen),
    };
    Target { name: "records", cases: 150_000, corpus, words: Vec::new(), check: Box::new(check) }
}

/// Fuzzes record bodies: the input is a kind and a body, and the target seals the body with a right
/// checksum.
pub fn record_bodies() -> Target {
    let mut corpus: Vec<Vec<u8>> =
        bodies().into_iter().filter(|bytes| ![9, 12, 17, 18, 24].contains(&bytes[0])).collect();
    // A record with one place more or less differs by more than one byte, so mutation does not find
    // it.
    let record = golden().iter().find_map(|bytes| StripeRecord::parse(bytes).ok()).unwrap();
    for places in 3..7 {
        let places = record.places.iter().copied().cycle().take(places).collect();
        let body = postcard::to_stdvec(&StripeRecord { places, ..record.clone() }).unwrap();
        corpus.push([&[RecordKind::StripeRecord as u8][..], &body].concat());
    }
    let check = |bytes: &[u8]| match bytes.split_first() {
        Some((kind, body)) => parsed(&sealed(*kind, body)),
        None => Ok(Seen::default()),
    };
    Target {
        name: "record_bodies",
        cases: 150_000,
        corpus,
        words: Vec::new(),
        check: Box::new(check),
    }
}

/// The places in the data folder that an input can fill before the folder is opened. The first byte
/// of the input selects one.
const PLACES: [&str; 8] =
    ["node.id", "epoch", "members", "graves/5a", "heard", "catch-up", "slots", "index"];
/// The flag in the first byte that makes the target seal the body as kind [`KINDS`] first.
const SEAL: u8 = 0x80;
const KINDS: [u8; 8] = [9, 12, 16, 17, 18, 24, 7, 0];

fn open_folder(place: &str, bytes: &[u8]) -> Result<(), StoreError> {
    let disk = Arc::new(MemoryDisk::new(1 << 20));
    let kv = Arc::new(MemoryKv::new());
    if place == "index" {
        let (key, value) = bytes.split_at(bytes.len().min(34));
        kv.apply(Batch::new().put([b"f/", key].concat(), value))?;
    } else {
        disk.create_dir("graves")?;
        disk.create_new(place)?.write_at(bytes, 0)?;
    }
    let name: PeerName = "node-1".parse().unwrap();
    let lock = disk.lock(LOCK_FILE)?;
    let (store, _) = Store::open(disk, lock, kv, ClusterId([0xc1; 16]), &name)?;
    let _ = (
        store.highest_seen_epoch(),
        store.server_of_highest_epoch(),
        store.db_id_of_highest_epoch(),
        store.totals(),
    );
    let _ = (store.read_catch_up_standing(), store.caught_up_registration());
    store.read_members()?;
    if store.try_record_removed(SAVE)? && !store.is_recorded_removed(SAVE)? {
        return Err(StoreError::NoIdentity);
    }
    Ok(())
}

/// Fuzzes the records and the index of a data folder by opening the folder.
pub fn folders() -> Target {
    let place = |kind: u8| KINDS.iter().position(|of| *of == kind);
    let mut corpus: Vec<Vec<u8>> = Vec::new();
    for bytes in golden() {
        let Some(place) = place(bytes[4]) else { continue };
        corpus.push([&[place as u8][..], &bytes].concat());
        corpus.push([&[SEAL | place as u8][..], body_of(&bytes)].concat());
    }
    let graves: Vec<SaveId> = [0, 0x5a, 0xff]
        .map(|byte| SaveId(std::array::from_fn(|at| if at == 0 { 0x5a } else { byte })))
        .to_vec();
    corpus.push([&[SEAL | 3][..], &postcard::to_stdvec(&graves).unwrap()].concat());
    let entry =
        [&[7u8][..], &[0x5a; 16], &[0, 0, 0, 1], b"block-03.rep", &[1, 0, 3, 9, 99], &[7; 32]];
    corpus.push(entry.concat());
    // Memory of the store's folder, its index, and several copies of each record; 64 KiB of slots,
    // in memory and in both images.
    let memory = Memory { base_bytes: 320 << 10, per_byte: 100 };
    let check = move |input: &[u8]| {
        let Some((first, bytes)) = input.split_first() else { return Ok(Seen::default()) };
        let at = usize::from(first & !SEAL);
        let Some(place) = PLACES.get(at) else { return Ok(Seen::default()) };
        let bytes = if first & SEAL == 0 { bytes.to_vec() } else { sealed(KINDS[at], bytes) };
        let (opened, peak_bytes) = within(memory, bytes.len(), || open_folder(place, &bytes))?;
        match opened {
            Err(StoreError::NoIdentity) => Err("an entombed save is not entombed".into()),
            opened => Ok(Seen { accepted: opened.is_ok(), peak_bytes }),
        }
    };
    Target { name: "folders", cases: 40_000, corpus, words: Vec::new(), check: Box::new(check) }
}
