//! Tests that each call of the store is atomic: a crash, a failure or a missing sync at any
//! operation leaves the whole effect or none of it.

use std::sync::Arc;

use rapidraid::format::file::FileKey;
use rapidraid::id::Epoch;
use rapidraid::store::{Disk, MemoryDisk, MemoryKv, RecordScope, Store, StoreError};

use super::{
    G, LEN, REPLICA, STRIPE, assert_whole, content, is_absent, new_store, open, open_with,
    piece_key, write_block, write_piece,
};

/// A store call whose effect must be complete or absent.
struct Call {
    what: &'static str,
    before: fn(&Store),
    run: fn(&Store) -> Result<(), StoreError>,
    /// Returns whether the effect is present; panics if only a part of it is.
    done: fn(&Store) -> bool,
}

fn done_file(store: &Store, key: FileKey) -> bool {
    if is_absent(store, key) {
        return false;
    }
    assert_whole(store, key, &content(LEN));
    true
}

fn small(store: &Store) -> Option<Vec<u8>> {
    store.get_record_file(RecordScope::Stripe(STRIPE), "record").unwrap()
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
        run: |store| store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"new"),
        done: |store| match small(store) {
            None => false,
            Some(bytes) => bytes == b"new" || panic!("half a record: {bytes:?}"),
        },
    },
    Call {
        what: "a small record over another",
        before: |store| {
            store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"old").unwrap()
        },
        run: |store| store.put_record_file(RecordScope::Stripe(STRIPE), "record", b"new"),
        done: |store| match small(store).unwrap().as_slice() {
            b"old" => false,
            bytes => bytes == b"new" || panic!("half a record: {bytes:?}"),
        },
    },
    Call {
        what: "the removal of a file",
        before: |store| _ = write_block(store, &content(LEN)).unwrap(),
        run: |store| store.remove_file(REPLICA).map(drop),
        done: |store| !done_file(store, REPLICA),
    },
    Call {
        what: "the removal of a small record",
        before: |store| {
            store.put_record_file(RecordScope::Shard(STRIPE.shard), "record", b"x").unwrap()
        },
        run: |store| store.remove_record_file(RecordScope::Shard(STRIPE.shard), "record").map(drop),
        done: |store| {
            store.get_record_file(RecordScope::Shard(STRIPE.shard), "record").unwrap().is_none()
        },
    },
    Call {
        what: "an epoch",
        before: |store| store.raise_highest_seen_epoch(Epoch(3)).unwrap(),
        run: |store| store.raise_highest_seen_epoch(Epoch(5)),
        done: |store| match store.highest_seen_epoch() {
            Epoch(3) => false,
            epoch => epoch == Epoch(5) || panic!("{epoch}"),
        },
    },
];

/// Crashes the disk and reopens the store. Returns two stores: one with the index as it was, one
/// with an empty index.
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
            let (operations, _) = disk.operation_and_sync_counts();
            disk.fail_once_after(operation);
            failed += u64::from(run(&store).is_err());
            if disk.operation_and_sync_counts().0 - operations <= operation {
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

/// Skips each sync in turn and checks that it matters: either the call fails, or a crash loses the
/// effect that the call acknowledged. A sync for which neither holds is unnecessary. A missing sync
/// that is necessary fails the crash test above.
#[test]
fn every_sync_is_needed() {
    for Call { what, before, run, done } in &CALLS {
        for sync in 0.. {
            let (disk, store) = new_store();
            before(&store);
            let (_, syncs) = disk.operation_and_sync_counts();
            disk.skip_sync_after(sync);
            let result = run(&store);
            if disk.operation_and_sync_counts().1 - syncs <= sync {
                assert!(sync > 0, "{what} syncs nothing");
                break;
            }
            // A partial effect and a folder that does not open also count as lost.
            let after = std::panic::AssertUnwindSafe(|| done(&open(&disk.crash()).0));
            let kept = || std::panic::catch_unwind(after).unwrap_or(false);
            assert!(result.is_err() || !kept(), "{what} does without sync {sync}");
        }
    }
}

#[test]
fn a_kill_leaves_names_that_the_next_start_makes_durable() {
    let (disk, store) = new_store();
    // The skipped sync is the one of the folder after the rename. The process dies there, and the
    // kernel loses nothing.
    disk.skip_sync_after(1);
    write_block(&store, &content(G)).unwrap();
    drop(store);
    let (store, _) = open(&disk);
    assert_whole(&store, REPLICA, &content(G));
    assert_whole(&open(&disk.crash()).0, REPLICA, &content(G));
}

#[test]
fn a_crash_on_the_way_to_quarantine_never_loses_the_file() {
    let mut ended = false;
    for operation in 0..20 {
        let (disk, store) = new_store();
        write_block(&store, &content(LEN)).unwrap();
        let judged = store.open_undamaged_file(REPLICA).ok();
        disk.stop_after(operation);
        let result = store.quarantine_file_if_unchanged(REPLICA, judged.as_ref(), "a test");
        let (after, _) = open(&disk.crash());
        if !done_file(&after, REPLICA) {
            assert_eq!(after.totals().quarantined, 1, "operation {operation}");
        }
        assert!(result.is_ok() || !ended, "operation {operation}");
        ended = result.is_ok();
    }
    assert!(ended);
}
