//! The store as a whole: every awkward size, every damage, a crash at every operation of every call.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::file::{Content, FileKey};
use rapidraid::format::tree::GrainTree;
use rapidraid::id::{Attempt, ClusterId, Epoch, PeerName, ShardId, StripeId};
use rapidraid::kind::Kind;
use rapidraid::store::sled_kv::Opened;
use rapidraid::store::{
    BlockSpec, Disk, Kv, MemoryDisk, MemoryKv, PieceSpec, RealDisk, Reconciled, Scope, Store,
    StoreError, Stored, StoredFile,
};
use rapidraid::units::{GRAIN_BYTES, grains};

const G: usize = GRAIN_BYTES as usize;
const CLUSTER: ClusterId = ClusterId([0xc1; 16]);
const STRIPE: StripeId = StripeId { shard: ShardId([0x5a; 16]), index: 3 };
const ATTEMPT: Attempt = Attempt([0xa7; 16]);
const REPLICA: FileKey =
    FileKey { stripe: STRIPE, name: rapidraid::format::file::FileName::Replica { block: 2 } };
const CACHE_BYTES: u64 = 1 << 20;

fn name(text: &str) -> PeerName {
    text.parse().unwrap()
}

fn open_with(disk: &dyn Disk, shared: Arc<dyn Disk>, kv: Arc<dyn Kv>) -> (Store, Reconciled) {
    let lock = disk.lock("lock").unwrap();
    Store::open(shared, lock, kv, CLUSTER, &name("n1")).unwrap()
}

/// The store of a memory disk, with an empty index.
fn open(disk: &MemoryDisk) -> (Store, Reconciled) {
    open_with(disk, Arc::new(disk.clone()), Arc::new(MemoryKv::new()))
}

fn new_store() -> (MemoryDisk, Store) {
    let disk = MemoryDisk::new(1 << 30);
    let (store, _) = open(&disk);
    (disk, store)
}

fn content(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SeededEntropy::new(len as u64).fill(&mut bytes);
    bytes
}

fn block_spec(len: usize) -> BlockSpec {
    BlockSpec { stripe: STRIPE, block: 2, layout: 1, len_bytes: len as u64 }
}

fn piece_spec(len: usize) -> PieceSpec {
    let len_bytes = len as u64;
    PieceSpec { stripe: STRIPE, piece: 7, attempt: ATTEMPT, code: 42, layout: 1, len_bytes }
}

fn piece_key() -> FileKey {
    FileKey::piece(STRIPE, 7, ATTEMPT)
}

fn write_block(store: &Store, data: &[u8]) -> Result<Stored, StoreError> {
    let mut writer = store.write_block(block_spec(data.len()), None)?;
    // Ragged on purpose: neither grains nor powers of two.
    data.chunks(50_021).try_for_each(|chunk| writer.write(chunk))?;
    writer.finish(Some(GrainTree::of(data).root()))
}

/// Writes the grains as if three hops sent them, syncing every two grains.
fn write_piece(store: &Store, data: &[u8]) -> Result<Stored, StoreError> {
    let mut back = BTreeMap::new();
    let mut readback = |grain: u64, bytes: &[u8]| {
        assert!(back.insert(grain, bytes.to_vec()).is_none(), "grain {grain} twice");
    };
    let mut writer = store.write_piece(piece_spec(data.len()))?;
    writer.set_extent_bytes(2 * GRAIN_BYTES);
    let all: Vec<(u64, &[u8])> = (0..).zip(data.chunks(G)).collect();
    for hop in [1, 2, 0] {
        for (index, grain) in all.iter().filter(|(index, _)| index % 3 == hop) {
            writer.write_grain(*index, grain)?;
            writer.advance(&mut readback)?;
        }
    }
    let stored = writer.finish(&mut readback)?;
    assert_eq!(back.into_values().flatten().collect::<Vec<u8>>(), data);
    Ok(stored)
}

/// Reads a range of the data; every grain that it touches has to prove itself.
fn read_verified(file: &StoredFile, from: usize, out: &mut [u8]) -> Result<(), StoreError> {
    let len_bytes = file.header().len_bytes;
    for grain in from as u64 / GRAIN_BYTES..grains((from + out.len()) as u64) {
        let first = grain * GRAIN_BYTES;
        let mut bytes = vec![0; (len_bytes.saturating_sub(first)).min(GRAIN_BYTES) as usize];
        file.read(first, &mut bytes)?;
        if !file.tree().verify_grain(grain, &bytes) {
            return Err(StoreError::Grain { key: file.key(), grain });
        }
    }
    file.read(from as u64, out)
}

/// Asserts that the file is whole: found, opened, and every byte proven.
fn assert_whole(store: &Store, key: FileKey, data: &[u8]) {
    let file = store.open_file(key).unwrap();
    let mut bytes = vec![0; data.len()];
    read_verified(&file, 0, &mut bytes).unwrap();
    assert!(bytes == data, "{key} has other bytes");
    assert_eq!(file.scrub(), Vec::<u64>::new());
    assert!(store.find(key.stripe).unwrap().contains(&file.info()), "{key} is not in the index");
}

fn is_absent(store: &Store, key: FileKey) -> bool {
    let indexed = store.find(key.stripe).unwrap().iter().any(|info| info.key() == key);
    match store.open_file(key) {
        Ok(_) => false,
        Err(error) => error.kind() == Kind::NotFound && !indexed,
    }
}

fn awkward_sizes(store: &Store) {
    for len in [0, 1, 127, 128, G - 1, G, G + 1, 2 * G, 5 * G - 7, 8 * G + 128] {
        let data = content(len);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = seen.clone();
        let fingerprint = move |grain: u64, bytes: &[u8]| {
            let mut seen = sink.lock().unwrap();
            assert_eq!(grain, seen.len() as u64 / GRAIN_BYTES);
            seen.extend_from_slice(bytes);
        };
        let mut writer = store.write_block(block_spec(len), Some(Box::new(fingerprint))).unwrap();
        for chunk in data.chunks(G + 11) {
            writer.write(&chunk[..chunk.len() / 3]).unwrap();
            writer.write(&chunk[chunk.len() / 3..]).unwrap();
        }
        let stored = writer.finish(None).unwrap();
        assert_eq!(stored.root, *blake3::hash(&data).as_bytes());
        assert_eq!(*seen.lock().unwrap(), data);
        assert_whole(store, REPLICA, &data);

        let stored = write_piece(store, &data).unwrap();
        assert_eq!((stored.key, stored.len_bytes), (piece_key(), len as u64));
        assert_whole(store, piece_key(), &data);
        let file = store.open_file(piece_key()).unwrap();
        let header = file.header();
        assert_eq!(header.content, Content::Piece { piece: 7, attempt: ATTEMPT, code: 42 });
        assert_eq!((header.written_by, header.layout), (store.node(), 1));

        for (from, to) in
            [(0, 1), (1, len), (len / 2, len), (G, G + 1), (G - 1, 2 * G + 1), (len, len)]
        {
            let (from, to) = (from.min(len), to.min(len));
            let mut buf = vec![0; to.saturating_sub(from)];
            read_verified(&file, from, &mut buf).unwrap();
            assert_eq!(buf, data[from..from + buf.len()], "{len}: {from}..{to}");
        }
        assert!(file.read(len as u64, &mut [0]).is_err());
        assert!(file.read(u64::MAX, &mut [0]).is_err());
        assert!(store.remove(piece_key()).unwrap() && store.remove(REPLICA).unwrap());
        assert!(is_absent(store, REPLICA) && !store.remove(REPLICA).unwrap());
        assert_eq!(store.list_shards(None, 9).unwrap(), []);
    }
    assert_eq!(store.totals(), Default::default());
}

#[test]
fn every_awkward_size_on_a_memory_disk() {
    let (disk, store) = new_store();
    awkward_sizes(&store);
    assert_eq!(disk.list("tmp").unwrap(), []);
}

#[test]
fn every_awkward_size_on_a_real_disk() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (store, _, opened) =
        Store::open_folder(folder.path(), CACHE_BYTES, CLUSTER, &name("n1")).unwrap();
    assert_eq!(opened, Opened::Created);
    awkward_sizes(&store);
}

#[test]
fn what_was_not_announced_is_refused_and_leaves_nothing() {
    let (disk, store) = new_store();
    let data = content(G + 9);
    let mut writer = store.write_block(block_spec(data.len()), None).unwrap();
    writer.write(&data[1..]).unwrap();
    assert_eq!(writer.write(&data[..2]).unwrap_err().kind(), Kind::Invalid);
    assert!(writer.finish(None).is_err(), "a byte is missing");
    let mut writer = store.write_block(block_spec(data.len()), None).unwrap();
    writer.write(&data).unwrap();
    assert_eq!(writer.finish(Some([1; 32])).unwrap_err().kind(), Kind::Corrupt);

    let mut writer = store.write_piece(piece_spec(data.len())).unwrap();
    writer.write_grain(1, &data[G..]).unwrap();
    for (index, bytes) in [(1, &data[G..]), (0, &data[..G - 1]), (2, &data[..1]), (u64::MAX, &[])] {
        assert_eq!(writer.write_grain(index, bytes).unwrap_err().kind(), Kind::Invalid);
    }
    assert!(writer.finish(&mut |_, _| {}).is_err(), "a grain is missing");
    drop(store.write_block(block_spec(5), None).unwrap());
    assert!(store.write_block(block_spec(usize::MAX / 2), None).is_err());
    assert_eq!((disk.list("tmp").unwrap(), disk.list("shards").unwrap()), (vec![], vec![]));
}

#[test]
fn the_same_again_is_fine_another_one_is_not_and_a_broken_one_makes_room() {
    let (disk, store) = new_store();
    let data = content(3 * G);
    assert!(!write_block(&store, &data).unwrap().was_there);
    let path = format!("shards/{REPLICA}");
    disk.flip_bit(&path, 77).unwrap();
    assert!(write_block(&store, &data).unwrap().was_there);
    assert_whole(&store, REPLICA, &data);

    let error = write_block(&store, &content(3 * G - 1)).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }) && error.kind() == Kind::Exists);
    assert_whole(&store, REPLICA, &data);

    disk.truncate(&path, 1000).unwrap();
    assert!(!write_block(&store, &data).unwrap().was_there);
    assert_whole(&store, REPLICA, &data);
    assert_eq!(store.totals().quarantined, 1);
    assert_eq!(disk.list("quarantine").unwrap().len(), 2, "the file and its note");
}

#[test]
fn flipped_bits_and_cut_files_are_found_and_not_used() {
    let data = content(3 * G + 500);
    let (disk, store) = new_store();
    write_block(&store, &data).unwrap();
    let path = format!("shards/{REPLICA}");
    disk.flip_bit(&path, (G as u64 + 5) * 8).unwrap();
    let file = store.open_file(REPLICA).unwrap();
    let mut buf = vec![0; data.len()];
    read_verified(&file, 0, &mut buf[..G]).unwrap();
    let error = read_verified(&file, 0, &mut buf).unwrap_err();
    assert!(matches!(error, StoreError::Grain { grain: 1, .. }) && error.kind() == Kind::Corrupt);
    assert_eq!(file.scrub(), [1]);
    disk.flip_bit_on_medium(&path, 3 * G as u64 * 8).unwrap();
    assert_eq!(file.scrub(), [1, 3], "scrub asks the medium");
    read_verified(&file, 3 * G, &mut buf[3 * G..]).expect("the page cache does not know yet");

    let file_bytes = file.info().file_bytes;
    for byte in data.len() as u64..file_bytes {
        disk.flip_bit(&path, byte * 8).unwrap();
        assert_eq!(store.open_file(REPLICA).err().unwrap().kind(), Kind::Corrupt, "byte {byte}");
        disk.flip_bit(&path, byte * 8).unwrap();
    }
    assert!(store.open_file(REPLICA).is_ok());
    for len in [file_bytes - 1, file_bytes - 32, data.len() as u64, 31, 0] {
        disk.truncate(&path, len).unwrap();
        assert_eq!(store.open_file(REPLICA).err().unwrap().kind(), Kind::Corrupt, "cut to {len}");
    }
    drop(store);
    let (store, report) = open(&disk);
    assert_eq!(report, Reconciled { quarantined: 1, ..Default::default() });
    assert!(is_absent(&store, REPLICA));
    assert_eq!(open(&disk.crash()).0.totals().quarantined, 1);
}

#[test]
fn a_file_under_another_name_is_not_taken_for_it() {
    let data = content(G);
    let other_attempt = FileKey::piece(STRIPE, 7, Attempt([9; 16]));
    let other_stripe = FileKey::piece(StripeId { index: 4, ..STRIPE }, 7, ATTEMPT);
    for key in [other_attempt, other_stripe, FileKey::piece(STRIPE, 8, ATTEMPT)] {
        let (disk, store) = new_store();
        write_piece(&store, &data).unwrap();
        store.put_small(Scope::Stripe(key.stripe), "record", b"x").unwrap();
        disk.rename(&format!("shards/{}", piece_key()), &format!("shards/{key}")).unwrap();
        let error = store.open_file(key).err().unwrap();
        assert!(matches!(error, StoreError::Misplaced { .. }) && error.kind() == Kind::Corrupt);
        drop(store);
        let (store, report) = open(&disk);
        assert_eq!(report, Reconciled { quarantined: 1, ..Default::default() });
        assert!(is_absent(&store, key) && is_absent(&store, piece_key()));
    }
    let (disk, store) = new_store();
    write_piece(&store, &data).unwrap();
    drop(store);
    disk.remove("node.id").unwrap();
    let lock = disk.lock("lock").unwrap();
    let foreign = Store::open(
        Arc::new(disk.clone()),
        lock,
        Arc::new(MemoryKv::new()),
        ClusterId([1; 16]),
        &name("n1"),
    );
    assert!(foreign.is_err(), "files without an identity belong to nobody");
}

#[test]
fn what_the_medium_changes_before_the_read_back_is_noticed() {
    let data = content(4 * G);
    for grain in 0..4u64 {
        let (disk, store) = new_store();
        let mut writer = store.write_piece(piece_spec(data.len())).unwrap();
        for (index, bytes) in (0..).zip(data.chunks(G)) {
            writer.write_grain(index, bytes).unwrap();
        }
        // Make it durable without the writer's knowledge, then let the medium rot under the page cache.
        disk.sync_all().unwrap();
        let path = format!("tmp/{}", disk.list("tmp").unwrap()[0].name);
        disk.flip_bit_on_medium(&path, grain * GRAIN_BYTES * 8 + 1).unwrap();
        if grain < 3 {
            // Found on the way or at the end; who goes on regardless gets nothing for it.
            writer.set_extent_bytes(1);
            let error = writer.advance(&mut |seen, _| assert!(seen < grain)).unwrap_err();
            assert!(matches!(error, StoreError::ReadBack { grain: found, .. } if found == grain));
            assert!(writer.finish(&mut |_, _| {}).is_err());
        } else {
            let error = writer.finish(&mut |seen, _| assert!(seen < grain)).unwrap_err();
            assert!(matches!(error, StoreError::ReadBack { grain: found, .. } if found == grain));
        }
        assert_eq!(disk.list("tmp").unwrap(), []);
        assert!(is_absent(&store, piece_key()));
    }
}

#[test]
fn what_any_sync_of_a_piece_spoils_is_noticed() {
    for len in [0, 1, 4 * G, 4 * G + 3, 5 * G - 4096] {
        for sync in 0.. {
            let (disk, store) = new_store();
            let (_, before) = disk.operations();
            disk.spoil_sync_after(sync);
            let result = write_piece(&store, &content(len));
            let (_, after) = disk.operations();
            if result.is_ok() {
                // The last three are those of folders, which this fault leaves alone.
                assert!(sync > 0 && sync + 3 == after - before, "{len}, sync {sync}");
                break;
            }
            let error = result.expect_err("a spoilt sync");
            assert!(matches!(error, StoreError::ReadBack { .. }), "{len}, sync {sync}: {error}");
            assert!(is_absent(&store, piece_key()));
        }
    }
}

#[test]
fn a_crash_on_the_way_to_quarantine_never_loses_the_file() {
    let mut ended = false;
    for operation in 0..20 {
        let (disk, store) = new_store();
        write_block(&store, &content(LEN)).unwrap();
        let judged = store.open_file(REPLICA).ok();
        disk.stop_after(operation);
        let result = store.quarantine(REPLICA, judged.as_ref(), "a test");
        let (after, _) = open(&disk.crash());
        if !done_file(&after, REPLICA) {
            assert_eq!(after.totals().quarantined, 1, "operation {operation}");
        }
        assert!(result.is_ok() || !ended, "operation {operation}");
        ended = result.is_ok();
    }
    assert!(ended);
}

/// One call whose effect must be there whole, or not at all.
struct Call {
    what: &'static str,
    before: fn(&Store),
    run: fn(&Store) -> Result<(), StoreError>,
    /// Whether the effect is there; panics when half of it is.
    done: fn(&Store) -> bool,
}

const LEN: usize = 4 * G + 3;

fn done_file(store: &Store, key: FileKey) -> bool {
    if is_absent(store, key) {
        return false;
    }
    assert_whole(store, key, &content(LEN));
    true
}

fn small(store: &Store) -> Option<Vec<u8>> {
    store.get_small(Scope::Stripe(STRIPE), "record").unwrap()
}

const CALLS: [Call; 7] = [
    Call {
        what: "a replica",
        before: |_| {},
        run: |store| write_block(store, &content(LEN)).map(drop),
        done: |store| done_file(store, REPLICA),
    },
    Call {
        what: "a piece",
        before: |_| {},
        run: |store| write_piece(store, &content(LEN)).map(drop),
        done: |store| done_file(store, piece_key()),
    },
    Call {
        what: "a first small record",
        before: |_| {},
        run: |store| store.put_small(Scope::Stripe(STRIPE), "record", b"new"),
        done: |store| match small(store) {
            None => false,
            Some(bytes) => bytes == b"new" || panic!("half a record: {bytes:?}"),
        },
    },
    Call {
        what: "a small record over another",
        before: |store| store.put_small(Scope::Stripe(STRIPE), "record", b"old").unwrap(),
        run: |store| store.put_small(Scope::Stripe(STRIPE), "record", b"new"),
        done: |store| match small(store).unwrap().as_slice() {
            b"old" => false,
            bytes => bytes == b"new" || panic!("half a record: {bytes:?}"),
        },
    },
    Call {
        what: "the removal of a file",
        before: |store| _ = write_block(store, &content(LEN)).unwrap(),
        run: |store| store.remove(REPLICA).map(drop),
        done: |store| !done_file(store, REPLICA),
    },
    Call {
        what: "the removal of a small record",
        before: |store| store.put_small(Scope::Shard(STRIPE.shard), "record", b"x").unwrap(),
        run: |store| store.remove_small(Scope::Shard(STRIPE.shard), "record").map(drop),
        done: |store| store.get_small(Scope::Shard(STRIPE.shard), "record").unwrap().is_none(),
    },
    Call {
        what: "an epoch",
        before: |store| store.raise_epoch(Epoch(3)).unwrap(),
        run: |store| store.raise_epoch(Epoch(5)),
        done: |store| match store.epoch() {
            Epoch(3) => false,
            epoch => epoch == Epoch(5) || panic!("{epoch}"),
        },
    },
];

/// What a restart finds: with the index as it was, and without any.
fn restarts(disk: &MemoryDisk, kv: &Arc<MemoryKv>) -> [Store; 2] {
    let copy = disk.crash();
    [open_with(disk, Arc::new(disk.clone()), kv.clone()).0, open(&copy).0]
}

#[test]
fn a_crash_at_any_operation_leaves_all_or_nothing() {
    for Call { what, before, run, done } in &CALLS {
        for operation in 0.. {
            let (disk, kv) = (MemoryDisk::new(1 << 30), Arc::new(MemoryKv::new()));
            let (store, _) = open_with(&disk, Arc::new(disk.clone()), kv.clone());
            before(&store);
            disk.stop_after(operation);
            let result = run(&store);
            let mut after = vec![disk.crash()];
            after.extend((0..4).map(|seed| disk.crash_torn(seed)));
            for (image, disk) in after.iter().enumerate() {
                for store in restarts(disk, &kv) {
                    let done = done(&store);
                    let lost = result.is_ok() && !done;
                    assert!(!lost, "{what}: acknowledged and lost, image {image}");
                    assert_eq!(disk.list("tmp").unwrap(), []);
                    run(&store).unwrap();
                }
            }
            if result.is_ok() {
                assert!(operation > 2, "{what} did nothing");
                break;
            }
        }
    }
}

#[test]
fn a_failing_operation_fails_the_call_and_the_next_one_succeeds() {
    for Call { what, before, run, done } in &CALLS {
        let mut failed = 0;
        for operation in 0.. {
            let (disk, store) = new_store();
            before(&store);
            let (operations, _) = disk.operations();
            disk.fail_after(operation);
            failed += u64::from(run(&store).is_err());
            if disk.operations().0 - operations <= operation {
                break;
            }
            run(&store).unwrap_or_else(|error| panic!("{what}, operation {operation}: {error}"));
            assert!(done(&store), "{what}, operation {operation}");
            let [store, fresh] = restarts(&disk.crash(), &Arc::new(MemoryKv::new()));
            assert!(done(&store) && done(&fresh), "{what}, operation {operation}");
        }
        assert!(failed > 0, "{what}");
    }
}

/// Takes each sync out in turn: the call must fail, or a crash must take back what it acknowledged. A sync
/// for which neither holds is not needed; a needed one that is missing fails the crash test above.
#[test]
fn every_sync_is_needed() {
    for Call { what, before, run, done } in &CALLS {
        for sync in 0.. {
            let (disk, store) = new_store();
            before(&store);
            let (_, syncs) = disk.operations();
            disk.skip_sync_after(sync);
            let result = run(&store);
            if disk.operations().1 - syncs <= sync {
                assert!(sync > 0, "{what} syncs nothing");
                break;
            }
            // Half an effect, or a folder that does not open, is a loss as well.
            let after = std::panic::AssertUnwindSafe(|| done(&open(&disk.crash()).0));
            let kept = || std::panic::catch_unwind(after).unwrap_or(false);
            assert!(result.is_err() || !kept(), "{what} does without sync {sync}");
        }
    }
}

#[test]
fn a_kill_leaves_names_that_the_next_start_makes_durable() {
    let (disk, store) = new_store();
    // Stops between the rename and the sync of the folder, and loses nothing that the kernel knows.
    disk.skip_sync_after(1);
    write_block(&store, &content(G)).unwrap();
    drop(store);
    let (store, _) = open(&disk);
    assert_whole(&store, REPLICA, &content(G));
    assert_whole(&open(&disk.crash()).0, REPLICA, &content(G));
}

#[test]
fn a_full_disk_is_noticed_before_the_first_byte() {
    let disk = MemoryDisk::new(10 * G as u64);
    let (store, _) = open(&disk);
    write_block(&store, &content(6 * G)).unwrap();
    let error = store.write_piece(piece_spec(6 * G)).err().unwrap();
    assert_eq!(error.kind(), Kind::Busy);
    assert_eq!(disk.list("tmp").unwrap(), []);
    disk.set_capacity(20 * G as u64);
    write_piece(&store, &content(6 * G)).unwrap();
    assert!(store.space().unwrap().free_bytes < 8 * GRAIN_BYTES);
}

#[test]
fn numbers_and_lists_follow_what_is_there() {
    let (disk, store) = new_store();
    let shard = |byte| ShardId([byte; 16]);
    for byte in [3, 1, 2] {
        for index in [7, 0, 255] {
            let stripe = StripeId { shard: shard(byte), index };
            let spec = BlockSpec { stripe, ..block_spec(100) };
            let mut writer = store.write_block(spec, None).unwrap();
            writer.write(&content(100)).unwrap();
            writer.finish(None).unwrap();
        }
        store.put_small(Scope::Shard(shard(byte)), "commit", b"12345").unwrap();
    }
    write_piece(&store, &content(LEN)).unwrap();
    store.put_small(Scope::Stripe(STRIPE), "record", b"123").unwrap();
    store.put_small(Scope::Stripe(STRIPE), "record", b"1").unwrap();

    assert_eq!(store.list_shards(None, 2).unwrap(), [shard(1), shard(2)]);
    assert_eq!(store.list_shards(Some(shard(2)), 9).unwrap(), [shard(3), STRIPE.shard]);
    assert_eq!(store.shards(Some(shard(1))).unwrap().next(), Some(shard(2)));
    let indexes = |after, limit| -> Vec<u32> {
        let stripes = store.list_stripes(shard(1), after, limit).unwrap();
        stripes.into_iter().map(|stripe| stripe.index).collect()
    };
    assert_eq!((indexes(None, 9), indexes(Some(0), 1)), (vec![0, 7, 255], vec![7]));
    assert_eq!(store.list_stripes(ShardId([9; 16]), None, 9).unwrap(), []);
    assert_eq!(store.list_small(Scope::Stripe(STRIPE)).unwrap(), [("record".to_owned(), 1)]);
    assert_eq!(store.list_small(Scope::Shard(shard(1))).unwrap(), [("commit".to_owned(), 5)]);
    assert_eq!(store.get_small(Scope::Shard(shard(8)), "commit").unwrap(), None);
    for bad in ["", "a.b", "../x", "A", "0000002a", &"x".repeat(81)] {
        assert!(store.put_small(Scope::Shard(shard(1)), bad, b"").is_err(), "{bad:?}");
    }

    let totals = store.totals();
    let files = |stripe| store.find(stripe).unwrap().into_iter().map(|info| info.file_bytes);
    let all: u64 = store
        .list_shards(None, 99)
        .unwrap()
        .into_iter()
        .flat_map(|shard| store.list_stripes(shard, None, 999).unwrap())
        .flat_map(files)
        .sum();
    assert_eq!((totals.replica_files, totals.piece_files), (9, 1));
    assert_eq!(totals.replica_bytes + totals.piece_bytes, all);
    assert!(
        totals.replica_bytes > 900 && totals.piece_bytes > LEN as u64,
        "tables and headers count"
    );
    assert_eq!((totals.small_bytes, totals.quarantined), (16, 0));
    disk.create_new("shards/stranger").unwrap();
    disk.create_new(&format!("shards/{}/Stranger", STRIPE.shard)).unwrap();
    drop(store);
    let (store, report) = open(&disk);
    assert_eq!(report, Reconciled { added: 10, strangers: 2, ..Default::default() });
    assert_eq!(store.totals(), totals);

    let judged = store.open_file(piece_key()).unwrap();
    assert!(store.quarantine(piece_key(), Some(&judged), "a test").unwrap());
    store.remove(FileKey::replica(StripeId { shard: shard(1), index: 7 }, 2)).unwrap();
    assert!(store.remove_small(Scope::Shard(shard(1)), "commit").unwrap());
    assert!(!store.remove_small(Scope::Shard(shard(1)), "commit").unwrap());
    let totals = store.totals();
    assert_eq!((totals.replica_files, totals.piece_files), (8, 0));
    assert_eq!((totals.small_bytes, totals.quarantined), (11, 1));
    drop(store);
    assert_eq!(open(&disk).0.totals(), totals);
}

#[test]
fn the_folder_knows_whose_it_is_and_which_epoch_it_has_seen() {
    let (disk, store) = new_store();
    store.raise_epoch(Epoch(4)).unwrap();
    store.raise_epoch(Epoch(4)).unwrap();
    assert_eq!(store.raise_epoch(Epoch(3)).unwrap_err().kind(), Kind::Fenced);
    drop(store);
    for (cluster, node) in [(ClusterId([2; 16]), "n1"), (CLUSTER, "n2")] {
        let lock = disk.lock("lock").unwrap();
        let kv = Arc::new(MemoryKv::new());
        let error =
            Store::open(Arc::new(disk.clone()), lock, kv, cluster, &name(node)).err().unwrap();
        assert!(
            matches!(error, StoreError::Foreign { .. }) && error.kind() == Kind::Denied,
            "{error}"
        );
    }
    let crashed = disk.crash();
    assert_eq!(open(&crashed).0.epoch(), Epoch(4));
    crashed.flip_bit("epoch", 90).unwrap();
    let lock = crashed.lock("lock").unwrap();
    let kv = Arc::new(MemoryKv::new());
    let error =
        Store::open(Arc::new(crashed.clone()), lock, kv, CLUSTER, &name("n1")).err().unwrap();
    assert_eq!(error.kind(), Kind::Corrupt, "an epoch is not guessed");
}

#[test]
fn a_crash_while_a_folder_becomes_a_nodes_leaves_it_open_to_that_node() {
    for operation in 0.. {
        let disk = MemoryDisk::new(1 << 30);
        disk.stop_after(operation);
        let lock = disk.lock("lock").unwrap();
        let kv = Arc::new(MemoryKv::new());
        let first = Store::open(Arc::new(disk.clone()), lock, kv, CLUSTER, &name("n1"));
        for image in [disk.crash(), disk.crash_torn(1), disk.crash_torn(2)] {
            let lock = image.lock("lock").unwrap();
            let kv = Arc::new(MemoryKv::new());
            if first.is_ok() {
                assert!(Store::open(Arc::new(image), lock, kv, CLUSTER, &name("n2")).is_err());
            } else {
                Store::open(Arc::new(image), lock, kv, CLUSTER, &name("n1")).unwrap();
            }
        }
        if first.is_ok() {
            assert!(operation > 5);
            break;
        }
    }
    // A folder that somebody has cleaned too well.
    let (disk, store) = new_store();
    drop(store);
    for dir in ["shards", "tmp", "quarantine"] {
        disk.remove_dir_if_empty(dir).unwrap();
    }
    disk.sync_dir("").unwrap();
    let (store, _) = open(&disk);
    write_block(&store, &content(G)).unwrap();
    assert_whole(&open(&disk.crash()).0, REPLICA, &content(G));
}

fn open_folder(folder: &Path) -> Result<(Store, Reconciled, Opened), StoreError> {
    Store::open_folder(folder, CACHE_BYTES, CLUSTER, &name("n1"))
}

#[test]
#[allow(clippy::disallowed_methods)] // takes the index away from outside
fn a_second_daemon_is_refused_and_a_lost_index_is_made_again() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (store, ..) = open_folder(folder.path()).unwrap();
    let data = content(LEN);
    write_block(&store, &data).unwrap();
    write_piece(&store, &data).unwrap();
    store.put_small(Scope::Stripe(STRIPE), "record", b"123").unwrap();
    let (totals, found) = (store.totals(), store.find(STRIPE).unwrap());
    let second = open_folder(folder.path()).err().unwrap();
    assert_eq!(second.kind(), Kind::Exists);
    assert!(second.to_string().contains("locked by another process"), "{second}");
    drop(store);

    let (store, report, opened) = open_folder(folder.path()).unwrap();
    assert_eq!((report, opened), (Reconciled::default(), Opened::Recovered));
    assert_eq!(store.find(STRIPE).unwrap(), found);
    drop(store);

    std::fs::remove_dir_all(folder.path().join("index")).unwrap();
    let (store, report, opened) = open_folder(folder.path()).unwrap();
    assert_eq!((report.added, opened), (2, Opened::Created));
    assert_eq!((store.totals(), store.find(STRIPE).unwrap()), (totals, found.clone()));
    drop(store);

    // Damage in the middle makes sled give back the part before it, and say nothing.
    let log = folder.path().join("index/db");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes.iter_mut().take(4096).for_each(|byte| *byte ^= 0x5a);
    std::fs::write(&log, bytes).unwrap();
    let (store, report, _) = open_folder(folder.path()).unwrap();
    assert_eq!(report.added, 2);
    assert_eq!((store.totals(), store.find(STRIPE).unwrap()), (totals, found));
    drop(store);

    // A file that goes while nobody looks leaves an entry that goes too.
    RealDisk::open(folder.path()).unwrap().remove(&format!("shards/{REPLICA}")).unwrap();
    let (store, report, _) = open_folder(folder.path()).unwrap();
    assert_eq!(report, Reconciled { dropped: 1, ..Default::default() });
    assert!(is_absent(&store, REPLICA));
    assert_whole(&store, piece_key(), &data);
    std::fs::remove_dir_all(folder.path().join("shards")).unwrap();
    drop(store);
    let (store, report, _) = open_folder(folder.path()).unwrap();
    assert_eq!((report.dropped, store.totals()), (1, Default::default()));
}

#[test]
fn writers_and_removers_of_one_file_leave_index_and_disk_agreed() {
    let (disk, store) = new_store();
    let data = content(G + 1);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (store, data) = (store.clone(), &data);
            scope.spawn(move || {
                for _ in 0..60 {
                    if thread % 2 == 0 {
                        write_block(&store, data).unwrap();
                        store.put_small(Scope::Stripe(STRIPE), "record", b"x").unwrap();
                    } else {
                        store.remove(REPLICA).unwrap();
                        store.remove_small(Scope::Stripe(STRIPE), "record").unwrap();
                    }
                }
            });
        }
    });
    let there = disk.open(&format!("shards/{REPLICA}")).is_ok();
    assert_eq!(store.find(STRIPE).unwrap().len(), usize::from(there));
    assert_eq!(store.totals().replica_files, u64::from(there));
    write_block(&store, &data).unwrap();
    assert_whole(&open(&disk.crash()).0, REPLICA, &data);
    assert_eq!(grains(data.len() as u64), 2);
}
