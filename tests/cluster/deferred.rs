//! Deferred removals (semantics, 5): a job that crashes again and again while a node is down.

use std::time::Duration;

use rapidraid::catalogue::record_access::{deferred_removal_key, save_ring_key, shard_state_key};
use rapidraid::format::records::{Checkpoint, CommitMark, Record, RemoveReason, Removing, Saved};
use rapidraid::id::{Epoch, SaveId, ShardId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::wire::calls::{
    AbortSave, BeginSaveAnswer, CommitSave, CompareAndSetKey, CompleteShard, PutMark,
};

use world::raw::{Voice, block_call, empty_root};
use world::{CLUSTER, World, content, job, read_file, restore, save};

/// More than the list of a step has room for.
const CRASHES: usize = 140;
const BLOCK: u64 = 64 << 10;
/// More saves than a page of a node's inventory has, so that removals end while it is read.
const MANY: u64 = 200;
/// The node that is away.
const AWAY: usize = 6;

async fn start() -> World {
    World::simulated(6, &[(4, 2)], BLOCK, 1).await
}

/// Begins a save of the step, and gives the node that will be away a block of it.
async fn begin_with_block(world: &World, voice: &Voice, step: u64) -> BeginSaveAnswer {
    let begun = voice.begin(&world.node_address(1), step).await.unwrap();
    let bytes = content(5000, step);
    let (to, call) = (world.node_address(AWAY), block_call(&begun, bytes.len()));
    voice.put_block(&to, &call, &bytes).await.unwrap();
    begun
}

async fn abort(world: &World, voice: &Voice, step: u64, save: SaveId) {
    let call = AbortSave { job: job(), step: Step(step), save };
    voice.ask(&world.node_address(1), &call).await.unwrap();
}

async fn until_deferred(world: &World, step: u64, count: usize) {
    let is_deferred = || {
        let Checkpoint { writing, removing, .. } = world.checkpoint(step);
        writing.is_none() && removing.is_empty() && world.catalogue_keys("d/").len() == count
    };
    let why = || format!("{:?} {:?}", world.checkpoint(step), world.catalogue_keys("d/").len());
    world.until_or("the removals are deferred", is_deferred, why).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_crashes_while_a_node_is_down_does_not_fill_its_step() {
    let mut world = start().await;
    let voice = world.voice(Role::Client, "crashing");
    let first = begin_with_block(&world, &voice, 1).await;
    world.kill(AWAY).await;
    world.until_live(5).await;
    abort(&world, &voice, 1, first.save).await;
    for _ in 1..CRASHES {
        let begun = voice.begin(&world.node_address(1), 1).await.unwrap();
        abort(&world, &voice, 1, begun.save).await;
        tokio::time::sleep(world.lease / 4).await;
    }
    until_deferred(&world, 1, CRASHES).await;
    let client = world.client();
    for prefix in ["o/", "s/", "t/", "c/", "x/"] {
        assert_eq!(world.catalogue_keys(prefix), [""; 0], "{prefix}");
    }
    assert!(world.files_of(first.save).iter().all(|(machine, _)| *machine == AWAY));
    tokio::time::sleep(2 * world.lease).await;
    let rules = client.status().await.unwrap().policy.unwrap();
    assert_eq!(rules.removing, CRASHES as u64, "`status` says how many saves wait");

    let bytes = content(200_000, 7);
    save(&client, 1, &[("weights", &bytes)]).await;
    world.boot(AWAY);
    world.until("nothing is deferred", || world.catalogue_keys("d/").is_empty()).await;
    assert_eq!(world.files_of(first.save), []);
    world.assert_swept(&client).await;
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), bytes);
    assert_eq!(world.catalogue_keys("nothing-forgotten").len(), 1, "it was never committed");
    world.assert_idle().await;
}

/// The node leaves the cluster instead of coming back.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_removed_ends_the_wait_for_it() {
    let mut world = start().await;
    let voice = world.voice(Role::Client, "crashing");
    let begun = begin_with_block(&world, &voice, 1).await;
    world.kill(AWAY).await;
    world.until_live(5).await;
    abort(&world, &voice, 1, begun.save).await;
    until_deferred(&world, 1, 1).await;
    // By now the waits between two tries are long.
    tokio::time::sleep(150 * world.lease).await;
    assert_eq!(world.catalogue_keys("d/").len(), 1);
    let name = world.machines[AWAY].name.clone();
    world.client().remove_node(&name).await.unwrap();
    tokio::time::sleep(2 * world.lease).await;
    assert_eq!(world.catalogue_keys("d/"), [""; 0]);
    // It comes back with its files, which the removed-save sets of the others explain.
    world.boot(AWAY);
    world.until("its files are gone", || world.files_of(begun.save).is_empty()).await;
    world.until("no orphan is left", || world.catalogue_keys("x/").is_empty()).await;
}

/// The catalogue server was restarted while the node was away, and compares what the node holds with
/// the steps when it is back. At the same time the deferred removals end.
#[tokio::test(start_paused = true)]
async fn what_a_node_brings_back_of_deferred_removals_is_no_orphan() {
    let mut world = start().await;
    let voice = world.voice(Role::Client, "crashing");
    let mut saves = Vec::new();
    for step in 1..=MANY {
        saves.push(begin_with_block(&world, &voice, step).await.save);
    }
    world.kill(AWAY).await;
    world.until_live(5).await;
    for (step, save) in (1..).zip(saves) {
        abort(&world, &voice, step, save).await;
    }
    world.until("all are deferred", || world.catalogue_keys("d/").len() == MANY as usize).await;
    world.kill(0).await;
    world.boot(0);
    // By then the server has compared all nodes that are live.
    tokio::time::sleep(8 * world.lease).await;
    world.boot(AWAY);
    // The inventory takes longer than a lease period, and an answer to a purge milliseconds.
    world.slow(AWAY, Duration::from_secs(120));
    world.until("nothing is deferred", || world.catalogue_keys("d/").is_empty()).await;
    for _ in 0..80 {
        tokio::time::sleep(world.lease / 20).await;
        assert_eq!(world.catalogue_keys("x/"), [""; 0]);
    }
    assert_eq!(world.catalogue_keys("nothing-forgotten").len(), 1, "none was ever committed");
}

/// A gateway that was paused in `begin` writes the ring of a save that is removed and forgotten.
#[tokio::test(start_paused = true)]
async fn a_ring_that_comes_too_late_is_removed() {
    let world = start().await;
    let (voice, gateway) = (world.voice(Role::Client, "late"), world.node_address(2));
    let save = SaveId([9; 12]);
    let held = world.requests.hold_write("node02", &save_ring_key(save));
    let paused = tokio::spawn(async move { voice.begin_as(&gateway, 1, save, false).await });
    held.has_come().await;
    abort(&world, &world.voice(Role::Client, "another"), 1, save).await;
    world.until("the step is free", || world.catalogue_keys("c/").is_empty()).await;
    held.let_go();
    paused.await.unwrap().unwrap();
    assert_eq!(world.catalogue_keys("o/").len(), 1);
    world.until("the ring is gone", || world.catalogue_keys("o/").is_empty()).await;
}

/// A copy of the call that began the save arrives after the removal was deferred.
#[tokio::test(start_paused = true)]
async fn a_save_whose_removal_is_deferred_is_neither_opened_nor_decided() {
    let mut world = start().await;
    let (voice, gateway) = (world.voice(Role::Client, "late"), world.node_address(1));
    world.kill(AWAY).await;
    world.until_live(5).await;
    let begun = voice.begin(&gateway, 1).await.unwrap();
    abort(&world, &voice, 1, begun.save).await;
    until_deferred(&world, 1, 1).await;
    let late = voice.begin_as(&gateway, 1, begun.save, false).await.unwrap_err();
    assert!(late.to_string().contains("over"), "{late}");

    // A gateway was paused between its look for the removal and its change of the step's record.
    let second = SaveId([9; 12]);
    let held = world.requests.hold_write("node02", "c/job/00000000000000000001");
    let (paused, to) = (world.voice(Role::Client, "paused"), world.node_address(2));
    let opens = tokio::spawn(async move { paused.begin_as(&to, 1, second, false).await });
    held.has_come().await;
    let again = voice.begin_as(&gateway, 1, second, false).await.unwrap();
    abort(&world, &voice, 1, second).await;
    until_deferred(&world, 1, 2).await;
    held.let_go();
    let reopened = opens.await.unwrap().unwrap();
    let root = empty_root(&reopened, 1, "weights");
    voice.ask(&gateway, &CompleteShard { root }).await.unwrap();
    let commit = CommitSave { job: job(), step: Step(1), save: again.save, shards: 1 };
    let error = voice.ask(&gateway, &commit).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    until_deferred(&world, 1, 2).await;
    world.boot(AWAY);
    world.assert_swept(&world.client()).await;
}

/// A live node that refuses the tombstone, because it has a commit mark, keeps the removal with its
/// step: an old copy of the catalogue may not know that the save was decided.
#[tokio::test(start_paused = true)]
async fn a_removal_that_a_live_node_refuses_is_not_deferred() {
    let mut world = start().await;
    let (voice, node) = (world.voice(Role::Client, "writer"), world.voice(Role::Node, "node01"));
    world.kill(AWAY).await;
    world.until_live(5).await;
    let begun = voice.begin(&world.node_address(1), 1).await.unwrap();
    let root = empty_root(&begun, 1, "weights");
    voice.ask(&world.node_address(1), &CompleteShard { root: root.clone() }).await.unwrap();
    let saved = Saved {
        save: begun.save,
        generation: begun.generation,
        shards: 1,
        len_bytes: 0,
        roots_hash: [0; 32],
        saved_at: 0,
    };
    let mark = CommitMark { cluster: CLUSTER, saved, root };
    let (bytes, epoch) = (mark.to_bytes().unwrap(), Epoch(1));
    node.ask(&world.node_address(2), &PutMark { bytes, epoch }).await.unwrap();
    abort(&world, &voice, 1, begun.save).await;
    tokio::time::sleep(20 * world.lease).await;
    let reason = RemoveReason::Aborted;
    let entry = Removing { save: begun.save, generation: begun.generation, reason };
    assert_eq!(world.checkpoint(1).removing, [entry]);
    assert_eq!(world.catalogue_keys("d/"), [""; 0]);
}

/// A catalogue server has died in the middle of the move: it has created the key, and removed none
/// of the others or the first of them. The next one completes it.
#[tokio::test(start_paused = true)]
async fn a_move_that_was_interrupted_is_completed() {
    for has_removed_state in [false, true] {
        let mut world = start().await;
        let (voice, node) = (world.voice(Role::Client, "crashing"), world.voice(Role::Node, "a"));
        let begun = begin_with_block(&world, &voice, 1).await;
        let root = empty_root(&begun, 1, "weights");
        voice.ask(&world.node_address(1), &CompleteShard { root }).await.unwrap();
        world.kill(AWAY).await;
        world.until_live(5).await;
        abort(&world, &voice, 1, begun.save).await;
        let entry = world.checkpoint(1).removing[0].clone();
        let (key, value) = (deferred_removal_key(begun.save), Some(entry.to_bytes().unwrap()));
        let create = CompareAndSetKey { key, expected: None, value };
        node.ask(&world.node_address(0), &create).await.unwrap();
        if has_removed_state {
            let key = shard_state_key(ShardId::new(begun.save, 0));
            node.remove_key(&world.node_address(0), key).await;
        }
        assert_eq!(world.checkpoint(1).removing, [entry]);
        until_deferred(&world, 1, 1).await;
        for prefix in ["s/", "t/", "o/"] {
            assert_eq!(world.catalogue_keys(prefix), [""; 0], "{prefix}");
        }
        world.boot(AWAY);
        world.assert_swept(&world.client()).await;
        assert_eq!(world.catalogue_keys("c/"), [""; 0]);
    }
}
