//! Tests of the data folder: its owner, its lock, and the loss of its index.

use std::path::Path;
use std::sync::Arc;

use rapidraid::id::{ClusterId, Epoch};
use rapidraid::kind::ErrorKind;
use rapidraid::store::sled_kv::SledOpening;
use rapidraid::store::{
    Disk, MemoryDisk, MemoryKv, RealDisk, ReconcileCounts, RecordScope, Store, StoreError,
};

use super::{
    CACHE_BYTES, CLUSTER, G, LEN, REPLICA, STRIPE, assert_whole, content, is_absent, name,
    new_store, open, piece_key, write_block, write_piece,
};

#[test]
fn the_folder_knows_whose_it_is_and_which_epoch_it_has_seen() {
    let (disk, store) = new_store();
    store.raise_highest_seen_epoch(Epoch(4)).unwrap();
    store.raise_highest_seen_epoch(Epoch(4)).unwrap();
    assert_eq!(store.raise_highest_seen_epoch(Epoch(3)).unwrap_err().kind(), ErrorKind::Fenced);
    drop(store);
    for (cluster, node) in [(ClusterId([2; 16]), "n1"), (CLUSTER, "n2")] {
        let lock = disk.lock("lock").unwrap();
        let kv = Arc::new(MemoryKv::new());
        let error =
            Store::open(Arc::new(disk.clone()), lock, kv, cluster, &name(node)).err().unwrap();
        assert!(
            matches!(error, StoreError::Foreign { .. }) && error.kind() == ErrorKind::Denied,
            "{error}"
        );
    }
    let crashed = disk.crash();
    assert_eq!(open(&crashed).0.highest_seen_epoch(), Epoch(4));
    crashed.flip_bit("epoch", 90).unwrap();
    let lock = crashed.lock("lock").unwrap();
    let kv = Arc::new(MemoryKv::new());
    let error =
        Store::open(Arc::new(crashed.clone()), lock, kv, CLUSTER, &name("n1")).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "an epoch is not guessed");
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
    // The store recreates folders that an operator has removed by mistake.
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

fn open_folder(folder: &Path) -> Result<(Store, ReconcileCounts, SledOpening), StoreError> {
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
    store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"123").unwrap();
    let (totals, found) = (store.totals(), store.list_undamaged_files(STRIPE).unwrap());
    let second = open_folder(folder.path()).err().unwrap();
    assert_eq!(second.kind(), ErrorKind::Exists);
    assert!(second.to_string().contains("locked by another process"), "{second}");
    drop(store);

    let (store, report, opened) = open_folder(folder.path()).unwrap();
    assert_eq!((report, opened), (ReconcileCounts::default(), SledOpening::Recovered));
    assert_eq!(store.list_undamaged_files(STRIPE).unwrap(), found);
    drop(store);

    std::fs::remove_dir_all(folder.path().join("index")).unwrap();
    let (store, report, opened) = open_folder(folder.path()).unwrap();
    assert_eq!((report.added, opened), (2, SledOpening::Created));
    assert_eq!(
        (store.totals(), store.list_undamaged_files(STRIPE).unwrap()),
        (totals, found.clone())
    );
    drop(store);

    // If its log is damaged in the middle, sled returns the part before the damage and reports no
    // error.
    let log = folder.path().join("index/db");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes.iter_mut().take(4096).for_each(|byte| *byte ^= 0x5a);
    std::fs::write(&log, bytes).unwrap();
    let (store, report, _) = open_folder(folder.path()).unwrap();
    assert_eq!(report.added, 2);
    assert_eq!((store.totals(), store.list_undamaged_files(STRIPE).unwrap()), (totals, found));
    drop(store);

    // A file that is removed while the store is closed leaves an index entry, which the next open
    // drops.
    RealDisk::open(folder.path()).unwrap().remove(&format!("shards/{REPLICA}")).unwrap();
    let (store, report, _) = open_folder(folder.path()).unwrap();
    assert_eq!(report, ReconcileCounts { dropped: 1, ..Default::default() });
    assert!(is_absent(&store, REPLICA));
    assert_whole(&store, piece_key(), &data);
    std::fs::remove_dir_all(folder.path().join("shards")).unwrap();
    drop(store);
    let (store, report, _) = open_folder(folder.path()).unwrap();
    assert_eq!((report.dropped, store.totals()), (1, Default::default()));
}
