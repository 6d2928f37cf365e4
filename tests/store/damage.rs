//! Tests of damage: flipped bits, truncated and misnamed files, and a medium that changes what was
//! written.

use std::sync::Arc;

use rapidraid::format::file::FileKey;
use rapidraid::id::{Attempt, ClusterId, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{
    Disk, Extent, FileCheck, MemoryKv, ReconcileCounts, RecordScope, Store, StoreError,
};
use rapidraid::units::GRAIN_BYTES;

use super::{
    ATTEMPT, G, REPLICA, STRIPE, content, is_absent, name, new_store, open, piece_key, piece_spec,
    read_verified, write_block, write_piece,
};

#[test]
fn flipped_bits_and_cut_files_are_found_and_not_used() {
    let data = content(3 * G + 500);
    let (disk, store) = new_store();
    write_block(&store, &data).unwrap();
    let path = format!("shards/{REPLICA}");
    disk.flip_bit(&path, (G as u64 + 5) * 8).unwrap();
    let file = store.open_undamaged_file(REPLICA).unwrap();
    let mut buf = vec![0; data.len()];
    read_verified(&file, 0, &mut buf[..G]).unwrap();
    let error = read_verified(&file, 0, &mut buf).unwrap_err();
    assert!(
        matches!(error, StoreError::Grain { grain: 1, .. }) && error.kind() == ErrorKind::Corrupt
    );
    assert_eq!(file.scrub(), [1]);
    disk.flip_bit_below_page_cache(&path, 3 * G as u64 * 8).unwrap();
    assert_eq!(file.scrub(), [1, 3], "scrub asks the medium");
    read_verified(&file, 3 * G, &mut buf[3 * G..]).expect("the page cache does not know yet");

    let file_bytes = file.index_entry().file_bytes;
    for byte in data.len() as u64..file_bytes {
        disk.flip_bit(&path, byte * 8).unwrap();
        assert_eq!(
            store.open_undamaged_file(REPLICA).err().unwrap().kind(),
            ErrorKind::Corrupt,
            "byte {byte}"
        );
        disk.flip_bit(&path, byte * 8).unwrap();
    }
    assert!(store.open_undamaged_file(REPLICA).is_ok());
    for len in [file_bytes - 1, file_bytes - 32, data.len() as u64, 31, 0] {
        disk.set_file_len(&path, len).unwrap();
        assert_eq!(
            store.open_undamaged_file(REPLICA).err().unwrap().kind(),
            ErrorKind::Corrupt,
            "cut to {len}"
        );
    }
    drop(store);
    let (store, report) = open(&disk);
    assert_eq!(report, ReconcileCounts { damaged: 1, ..Default::default() });
    assert!(store.is_damaged(REPLICA) && store.list_undamaged_files(STRIPE).unwrap().is_empty());
    assert!(matches!(store.open_undamaged_file(REPLICA), Err(StoreError::Damaged { .. })));
    let again = open(&disk.crash()).0;
    assert!(again.is_damaged(REPLICA) && again.files_to_recheck().is_empty());
}

#[test]
fn a_damaged_file_is_noted_stays_a_source_and_gives_way_to_a_good_one() {
    let data = content(3 * G + 500);
    let (disk, store) = new_store();
    write_block(&store, &data).unwrap();
    let path = format!("shards/{REPLICA}");
    assert_eq!(store.check_and_note_damage(REPLICA).unwrap(), FileCheck::Whole);
    disk.flip_bit(&path, (G as u64 + 5) * 8).unwrap();
    let FileCheck::Damaged(damage) = store.check_and_note_damage(REPLICA).unwrap() else {
        panic!("not found")
    };
    assert_eq!((damage.grains.iter().collect::<Vec<_>>(), damage.has_tail), (vec![1], true));
    assert!(matches!(store.open_undamaged_file(REPLICA), Err(StoreError::Damaged { .. })));
    assert_eq!(
        (store.list_undamaged_files(STRIPE).unwrap(), store.damaged_files_of_stripe(STRIPE)),
        (vec![], vec![REPLICA.name])
    );
    let sources = store.list_grain_sources(STRIPE).unwrap();
    assert_eq!(sources.len(), 1);
    assert_eq!(sources[0].damaged.as_ref().unwrap().iter().collect::<Vec<_>>(), [1]);
    let mut bytes = vec![7; data.len()];
    store.open_grain_source(REPLICA).unwrap().read_or_zero(0, &mut bytes);
    assert!(bytes[..G] == data[..G] && bytes[2 * G..] == data[2 * G..]);
    assert!(bytes[G..2 * G].iter().all(|byte| *byte == 0), "a damaged grain comes as zeros");

    // The damage note survives a power failure and the loss of the index.
    let (again, _) = open(&disk.crash());
    assert!(again.is_damaged(REPLICA) && again.files_to_recheck().is_empty());
    assert_eq!(again.list_undamaged_files(STRIPE).unwrap(), []);

    // A write of other content under this name is refused. A write of the same content succeeds and
    // removes the damage note.
    let other = write_block(&store, &content(3 * G + 499)).unwrap_err();
    assert!(matches!(other, StoreError::Conflict { .. }), "{other}");
    write_block(&store, &data).unwrap();
    assert!(
        !store.is_damaged(REPLICA)
            && store.open_undamaged_file(REPLICA).unwrap().scrub().is_empty()
    );
    let (again, _) = open(&disk.crash());
    assert!(!again.is_damaged(REPLICA) && again.list_undamaged_files(STRIPE).unwrap().len() == 1);
}

/// Power fails after a good file took the name and before the damage note is removed: the node
/// checks the file before it counts as a copy.
#[test]
fn a_note_about_another_file_says_nothing_until_somebody_has_looked() {
    let data = content(2 * G);
    let (disk, store) = new_store();
    write_block(&store, &data).unwrap();
    let path = format!("shards/{REPLICA}");
    disk.flip_bit(&path, 5).unwrap();
    assert!(matches!(store.check_and_note_damage(REPLICA).unwrap(), FileCheck::Damaged(_)));
    let (folder, _) = path.rsplit_once('/').unwrap();
    let notes = disk.list(folder).unwrap();
    let note = notes.into_iter().find(|entry| entry.name == "damage-block-02").unwrap();
    let at = format!("{folder}/{}", note.name);
    let mut bytes = vec![0; note.len_bytes as usize];
    disk.open(&at).unwrap().read_at(&mut bytes, 0).unwrap();
    write_block(&store, &data).unwrap();
    drop(store);
    let file = disk.create_new(&at).unwrap();
    file.write_at(&bytes, 0).unwrap();
    file.sync().unwrap();

    let (store, _) = open(&disk);
    assert_eq!(store.files_to_recheck(), [REPLICA]);
    assert!(store.list_undamaged_files(STRIPE).unwrap().is_empty(), "until then it does not count");
    assert_eq!(store.check_and_note_damage(REPLICA).unwrap(), FileCheck::Whole);
    assert_eq!(store.list_undamaged_files(STRIPE).unwrap().len(), 1);
    assert!(store.remove_file(REPLICA).unwrap());
    // A damage note without its file is removed when the store opens.
    disk.create_dir(folder.rsplit_once('/').unwrap().0).unwrap();
    disk.create_dir(folder).unwrap();
    disk.create_new(&at).unwrap().write_at(&bytes, 0).unwrap();
    drop(store);
    let (store, _) = open(&disk);
    assert!(!store.is_damaged(REPLICA) && disk.open(&at).is_err());
}

#[test]
fn a_file_under_another_name_is_not_taken_for_it() {
    let data = content(G);
    let other_attempt = FileKey::piece(STRIPE, 7, Attempt([9; 16]));
    let other_stripe = FileKey::piece(StripeId { index: 4, ..STRIPE }, 7, ATTEMPT);
    for key in [other_attempt, other_stripe, FileKey::piece(STRIPE, 8, ATTEMPT)] {
        let (disk, store) = new_store();
        write_piece(&store, &data).unwrap();
        store.put_record_file(RecordScope::Stripe(key.stripe), "record", b"x").unwrap();
        disk.rename(&format!("shards/{}", piece_key()), &format!("shards/{key}")).unwrap();
        let error = store.open_undamaged_file(key).err().unwrap();
        assert!(
            matches!(error, StoreError::Misplaced { .. }) && error.kind() == ErrorKind::Corrupt
        );
        drop(store);
        let (store, report) = open(&disk);
        assert_eq!(report, ReconcileCounts { quarantined: 1, ..Default::default() });
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
        let mut writer = store.create_piece_writer(piece_spec(data.len())).unwrap();
        for (index, bytes) in (0..).zip(data.chunks(G)) {
            writer.write_grain(index, bytes).unwrap();
        }
        writer.set_min_extent_bytes(1);
        let extent = writer.take_extent_to_prove().unwrap().unwrap();
        // Make the data durable without the writer's knowledge, then corrupt the medium below the
        // page cache.
        disk.sync_all().unwrap();
        let path = format!("tmp/{}", disk.list("tmp").unwrap()[0].name);
        disk.flip_bit_below_page_cache(&path, grain * GRAIN_BYTES * 8 + 1).unwrap();
        let proven = extent.sync_and_verify_read_back(
            &mut Extent::new_read_back_buffer(4 * GRAIN_BYTES),
            &mut |seen, _| assert!(seen < grain),
        );
        // `finish` proves the last grain. A writer that continues after a failed proof still gets
        // an error from `finish`.
        let finished = writer.finish(&mut |_, _| {});
        let finished = finished.unwrap_err();
        let error = if grain < 3 { proven.unwrap_err() } else { finished };
        assert!(matches!(error, StoreError::ReadBack { grain: found, .. } if found == grain));
        assert_eq!(disk.list("tmp").unwrap(), []);
        assert!(is_absent(&store, piece_key()));
    }
}

#[test]
fn what_any_sync_of_a_piece_spoils_is_noticed() {
    for len in [0, 1, 4 * G, 4 * G + 3, 5 * G - 4096] {
        for sync in 0.. {
            let (disk, store) = new_store();
            let (_, before) = disk.operation_and_sync_counts();
            disk.corrupt_sync_after(sync);
            let result = write_piece(&store, &content(len));
            let (_, after) = disk.operation_and_sync_counts();
            if result.is_ok() {
                // The last three syncs are those of folders, which this fault does not affect.
                assert!(sync > 0 && sync + 3 == after - before, "{len}, sync {sync}");
                break;
            }
            let error = result.expect_err("a spoilt sync");
            assert!(matches!(error, StoreError::ReadBack { .. }), "{len}, sync {sync}: {error}");
            assert!(is_absent(&store, piece_key()));
        }
    }
}
