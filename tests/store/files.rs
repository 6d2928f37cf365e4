//! Tests of writes: every awkward size, data of an unannounced length, the same data again, a full
//! disk, and the totals that follow.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rapidraid::format::file::{Content, FileKey};
use rapidraid::id::{ShardId, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::sled_kv::SledOpening;
use rapidraid::store::{
    BlockSpec, Disk, Extent, MemoryDisk, MemoryKv, RealDisk, ReconcileCounts, RecordScope, Store,
    StoreError,
};
use rapidraid::units::{GRAIN_BYTES, grains};

use super::{
    ATTEMPT, CACHE_BYTES, CLUSTER, G, LEN, REPLICA, STRIPE, assert_whole, block_spec, content,
    is_absent, name, new_store, open, open_with, piece_key, piece_spec, read_verified, write_block,
    write_piece,
};

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
        let mut writer =
            store.create_block_writer(block_spec(len), Some(Box::new(fingerprint))).unwrap();
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
        let file = store.open_undamaged_file(piece_key()).unwrap();
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
        assert!(file.read_unverified(len as u64, &mut [0]).is_err());
        assert!(file.read_unverified(u64::MAX, &mut [0]).is_err());
        assert!(store.remove_file(piece_key()).unwrap() && store.remove_file(REPLICA).unwrap());
        assert!(is_absent(store, REPLICA) && !store.remove_file(REPLICA).unwrap());
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
    assert_eq!(opened, SledOpening::Created);
    awkward_sizes(&store);
}

#[test]
fn what_was_not_announced_is_refused_and_leaves_nothing() {
    let (disk, store) = new_store();
    let data = content(G + 9);
    let mut writer = store.create_block_writer(block_spec(data.len()), None).unwrap();
    writer.write(&data[1..]).unwrap();
    assert_eq!(writer.write(&data[..2]).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(writer.finish(None).is_err(), "a byte is missing");
    let mut writer = store.create_block_writer(block_spec(data.len()), None).unwrap();
    writer.write(&data).unwrap();
    assert_eq!(writer.finish(Some([1; 32])).unwrap_err().kind(), ErrorKind::Corrupt);

    let mut writer = store.create_piece_writer(piece_spec(data.len())).unwrap();
    writer.write_grain(1, &data[G..]).unwrap();
    for (index, bytes) in [(1, &data[G..]), (0, &data[..G - 1]), (2, &data[..1]), (u64::MAX, &[])] {
        assert_eq!(writer.write_grain(index, bytes).unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert!(writer.finish(&mut |_, _| {}).is_err(), "a grain is missing");
    drop(store.create_block_writer(block_spec(5), None).unwrap());
    assert!(store.create_block_writer(block_spec(usize::MAX / 2), None).is_err());
    assert_eq!((disk.list("tmp").unwrap(), disk.list("shards").unwrap()), (vec![], vec![]));
}

#[test]
fn the_same_again_is_fine_another_one_is_not_and_a_broken_one_makes_room() {
    let (disk, store) = new_store();
    let data = content(3 * G);
    assert!(!write_block(&store, &data).unwrap().already_existed);
    let path = format!("shards/{REPLICA}");
    disk.flip_bit(&path, 77).unwrap();
    assert!(write_block(&store, &data).unwrap().already_existed);
    assert_whole(&store, REPLICA, &data);

    let error = write_block(&store, &content(3 * G - 1)).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }) && error.kind() == ErrorKind::Exists);
    assert_whole(&store, REPLICA, &data);

    disk.set_file_len(&path, 1000).unwrap();
    assert!(!write_block(&store, &data).unwrap().already_existed);
    assert_whole(&store, REPLICA, &data);
    assert_eq!(store.totals().quarantined, 1);
    assert_eq!(disk.list("quarantine").unwrap().len(), 2, "the file and its note");
    let named = store.first_quarantined_files().unwrap();
    assert!(named.len() == 1 && named[0].contains("block-"), "{named:?}");
    assert!(named[0].contains(".rep (") && named[0].ends_with(')'), "{named:?}");
}

/// Runs on a real disk, where proving an extent and writing the next one overlap.
#[test]
fn extents_are_proven_while_the_next_ones_are_written() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = RealDisk::open(folder.path()).unwrap();
    let (store, _) = open_with(&disk, Arc::new(disk.clone()), Arc::new(MemoryKv::new()));
    let data = content(70 * G + 1000);
    let back = Mutex::new(BTreeMap::new());
    let take = |grain: u64, bytes: &[u8]| {
        assert!(
            back.lock().unwrap().insert(grain, bytes.to_vec()).is_none(),
            "grain {grain} twice"
        );
    };
    let mut writer = store.create_piece_writer(piece_spec(data.len())).unwrap();
    writer.set_min_extent_bytes(5 * GRAIN_BYTES);
    std::thread::scope(|scope| {
        for (index, grain) in (0..).zip(data.chunks(G)) {
            writer.write_grain(index, grain).unwrap();
            if let Some(extent) = writer.take_extent_to_prove().unwrap() {
                let len_bytes = data.len() as u64;
                let mut take = take;
                scope.spawn(move || {
                    extent.sync_and_verify_read_back(
                        &mut Extent::new_read_back_buffer(len_bytes),
                        &mut take,
                    )
                });
            }
        }
    });
    assert_eq!(back.lock().unwrap().len(), 70, "all but the last grain");
    writer.finish(&mut |grain, bytes| take(grain, bytes)).unwrap();
    assert!(back.into_inner().unwrap().into_values().flatten().eq(data.iter().copied()));
}

#[test]
fn a_full_disk_is_noticed_before_the_first_byte() {
    let disk = MemoryDisk::new(10 * G as u64);
    let (store, _) = open(&disk);
    write_block(&store, &content(6 * G)).unwrap();
    let error = store.create_piece_writer(piece_spec(6 * G)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert_eq!(disk.list("tmp").unwrap(), []);
    disk.set_capacity(20 * G as u64);
    write_piece(&store, &content(6 * G)).unwrap();
    assert!(store.disk_space().unwrap().free_bytes < 8 * GRAIN_BYTES);
}

#[test]
fn numbers_and_lists_follow_what_is_there() {
    let (disk, store) = new_store();
    let shard = |byte| ShardId([byte; 16]);
    for byte in [3, 1, 2] {
        for index in [7, 0, 255] {
            let stripe = StripeId { shard: shard(byte), index };
            let spec = BlockSpec { stripe, ..block_spec(100) };
            let mut writer = store.create_block_writer(spec, None).unwrap();
            writer.write(&content(100)).unwrap();
            writer.finish(None).unwrap();
        }
        store.put_record_file(RecordScope::Shard(shard(byte)), "commit", b"12345").unwrap();
    }
    write_piece(&store, &content(LEN)).unwrap();
    store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"123").unwrap();
    store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"1").unwrap();

    assert_eq!(store.list_shards(None, 2).unwrap(), [shard(1), shard(2)]);
    assert_eq!(store.list_shards(Some(shard(2)), 9).unwrap(), [shard(3), STRIPE.shard]);
    assert_eq!(store.shards_after(Some(shard(1))).unwrap().next(), Some(shard(2)));
    let indexes = |after, limit| -> Vec<u32> {
        let stripes = store.list_stripes(shard(1), after, limit).unwrap();
        stripes.into_iter().map(|stripe| stripe.index).collect()
    };
    assert_eq!((indexes(None, 9), indexes(Some(0), 1)), (vec![0, 7, 255], vec![7]));
    assert_eq!(store.list_stripes(ShardId([9; 16]), None, 9).unwrap(), []);
    assert_eq!(
        store.list_record_files(RecordScope::Stripe(STRIPE)).unwrap(),
        [("record".to_owned(), 1)]
    );
    assert_eq!(
        store.list_record_files(RecordScope::Shard(shard(1))).unwrap(),
        [("commit".to_owned(), 5)]
    );
    assert_eq!(store.get_record_file(RecordScope::Shard(shard(8)), "commit").unwrap(), None);
    for bad in ["", "a.b", "../x", "A", "0000002a", &"x".repeat(81)] {
        assert!(store.put_record_file(RecordScope::Shard(shard(1)), bad, b"").is_err(), "{bad:?}");
    }

    let totals = store.totals();
    let files = |stripe| {
        store.list_undamaged_files(stripe).unwrap().into_iter().map(|info| info.file_bytes)
    };
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
    assert_eq!(report, ReconcileCounts { added: 10, strangers: 2, ..Default::default() });
    let found = store.open_findings();
    let strangers = ["shards/stranger".to_owned(), format!("shards/{}/Stranger", STRIPE.shard)];
    assert_eq!((found.counts, found.unknown_files.len()), (report, 2));
    assert!(strangers.iter().all(|name| found.unknown_files.contains(name)), "{found:?}");
    assert_eq!(store.totals(), totals);

    let judged = store.open_undamaged_file(piece_key()).unwrap();
    assert!(store.quarantine_file_if_unchanged(piece_key(), Some(&judged), "a test").unwrap());
    store.remove_file(FileKey::replica(StripeId { shard: shard(1), index: 7 }, 2)).unwrap();
    assert!(store.remove_record_file(RecordScope::Shard(shard(1)), "commit").unwrap());
    assert!(!store.remove_record_file(RecordScope::Shard(shard(1)), "commit").unwrap());
    let totals = store.totals();
    assert_eq!((totals.replica_files, totals.piece_files), (8, 0));
    assert_eq!((totals.small_bytes, totals.quarantined), (11, 1));
    drop(store);
    assert_eq!(open(&disk).0.totals(), totals);
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
                        store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"x").unwrap();
                    } else {
                        store.remove_file(REPLICA).unwrap();
                        store.remove_record_file(RecordScope::Stripe(STRIPE), "record").unwrap();
                    }
                }
            });
        }
    });
    let there = disk.open(&format!("shards/{REPLICA}")).is_ok();
    assert_eq!(store.list_undamaged_files(STRIPE).unwrap().len(), usize::from(there));
    assert_eq!(store.totals().replica_files, u64::from(there));
    write_block(&store, &data).unwrap();
    assert_whole(&open(&disk.crash()).0, REPLICA, &data);
    assert_eq!(grains(data.len() as u64), 2);
}
