//! A lost catalogue is rebuilt from the nodes; an old or empty one does no harm (semantics, 8).

use std::sync::Arc;
use std::time::Duration;

use rapidraid::client::{Client, ClientError, SaveOptions};
use rapidraid::id::{Epoch, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Address, Role};
use rapidraid::store::{Disk, Kv, MemoryKv, RecordScope};
use rapidraid::wire::calls::{PlanChoice, RebuildAnswer, RenewLease};

use world::raw::block_call;
use world::{
    World, address, content, job, options, quiet, read_file, replace_and_die, restore,
    restore_error, save, shard,
};

pub const BLOCK: u64 = 64 << 10;
pub const LEN: usize = 5 * BLOCK as usize - 1000;

pub async fn rebuild_on(
    client: &Client,
    index: usize,
    accept_loss: bool,
) -> Result<RebuildAnswer, ClientError> {
    let on = Address { host_port: address(index), node: None };
    match accept_loss {
        false => client.rebuild_catalogue(Some(&on)).await,
        true => client.rebuild_catalogue_despite_loss(Some(&on)).await,
    }
}

/// Kills the catalogue server and deletes its catalogue database. Returns the database.
pub async fn lose_catalogue(world: &mut World) -> Option<Arc<MemoryKv>> {
    world.kill(0).await;
    let map = world.machines[0].catalogue.get();
    world.machines[0].catalogue.set(None);
    map
}

async fn archive(client: &Client, step: u64, plan: PlanChoice) {
    let report =
        client.archive(&job(), Some(Step(step)), options(plan), &mut |_| ()).await.unwrap();
    assert_eq!(report.undropped, 0);
}

pub async fn assert_exact(client: &Client, step: u64) {
    let (out, _) = restore(client, step).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, step), "step {step}");
}

pub async fn serves(world: &World, index: usize) {
    world.until("a catalogue", || world.nodes[&index].is_writable_catalogue_server()).await;
}

/// Creates every kind of state that a catalogue can hold, loses the catalogue and rebuilds it.
#[tokio::test(start_paused = true)]
async fn a_lost_catalogue_is_made_again_from_the_nodes() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    for step in 1..=5 {
        save(&client, step, &[("weights", &content(LEN, step)), ("empty", &content(0, 1))]).await;
    }
    archive(&client, 1, PlanChoice::Chain).await;
    archive(&client, 2, PlanChoice::BestStar).await;
    // Step 4 is replaced, and step 5 is removed while a node is down.
    let replaced = vec![shard("weights", &content(LEN, 40))];
    let replace = SaveOptions { replace: true };
    client.save(&job(), Step(4), replaced, replace, quiet()).await.unwrap();
    world.until("the replaced save gone", || world.catalogue_keys("s/").len() == 5 + 4).await;
    world.kill(6).await;
    client.remove_step(&job(), Step(5)).await.unwrap();
    let before = client.list_steps(None).await.unwrap();
    assert_eq!(before.len(), 4);
    world.boot(6);
    lose_catalogue(&mut world).await;
    let shards = vec![shard("w", &content(9, 1))];
    let refused = client.save(&job(), Step(6), shards, replace, quiet()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unavailable);

    let report = rebuild_on(&client, 3, false).await.unwrap();
    assert_eq!((report.epoch, report.steps, report.shards), (Epoch(2), 4, 7));
    assert_eq!((report.incomplete.len(), report.damaged.len()), (0, 0));
    assert_eq!(report.reached.len(), 6);
    assert_eq!(client.list_steps(None).await.unwrap(), before);
    for step in [1, 2, 3] {
        world.assert_invariant(&client, step).await;
        assert_exact(&client, step).await;
    }
    let (out, _) = restore(&client, 4).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 40));
    assert_eq!(restore_error(&client, 5).await.kind(), ErrorKind::NotFound);
    // The rebuilt catalogue allows new saves, archiving of earlier saves, and removals.
    archive(&client, 3, PlanChoice::Chain).await;
    save(&client, 6, &[("weights", &content(LEN, 6))]).await;
    assert_exact(&client, 3).await;
    assert_exact(&client, 6).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    world.until("orphans gone", || world.catalogue_keys("x/").is_empty()).await;
    world.assert_swept(&client).await;
    world.assert_idle().await;
    // The nodes find the new catalogue server again after its restart.
    world.kill(3).await;
    world.boot(3);
    serves(&world, 3).await;
    assert_exact(&client, 3).await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_or_old_catalogue_in_its_place_deletes_nothing_and_stands_down() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    archive(&client, 1, PlanChoice::Chain).await;
    let old = Arc::new(world.machines[0].catalogue.get().unwrap().copy());
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    lose_catalogue(&mut world).await;
    let files = world.files(|_| true);
    // Without its database, the old catalogue server does not begin a new catalogue.
    world.boot(0);
    tokio::time::sleep(5 * world.lease).await;
    assert!(!world.nodes[&0].is_writable_catalogue_server());
    assert!(world.machines[0].catalogue.get().is_none());
    assert_eq!(world.files(|_| true), files);

    world.kill(0).await;
    rebuild_on(&client, 2, false).await.unwrap();
    // With an old database, the old catalogue server finds out that its epoch is over.
    world.machines[0].catalogue.set(Some(old));
    world.boot(0);
    tokio::time::sleep(5 * world.lease).await;
    assert!(!world.nodes[&0].is_writable_catalogue_server());
    assert!(world.nodes[&2].is_writable_catalogue_server());
    let status = world.client_of(0).status().await.unwrap();
    let notes = |index: usize| {
        let name = &world.machines[index].name;
        let found = status.nodes.iter().find(|node| node.view.node.name == *name).unwrap();
        found.held.as_ref().unwrap().notes.clone()
    };
    assert!(notes(0).is_empty(), "it needs nothing, as another daemon serves: {:?}", notes(0));
    assert_eq!(world.files(|_| true), files);
    assert_exact(&client, 1).await;
    assert_exact(&client, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_without_enough_nodes_is_refused_with_the_list() {
    let mut world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    lose_catalogue(&mut world).await;
    for index in 3..=5 {
        world.kill(index).await;
    }
    let error = rebuild_on(&client, 1, false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for name in ["node03", "node04", "node05"] {
        assert!(error.to_string().contains(name), "{error}");
    }
    assert_eq!(world.nodes[&1].store().highest_seen_epoch(), Epoch(1), "nothing was claimed");
    // Two nodes may be missing.
    world.boot(3);
    let report = rebuild_on(&client, 1, false).await.unwrap();
    assert_eq!(report.missing.len(), 2);
    assert_exact(&client, 1).await;
    // The nodes that were down hear of the new epoch and serve as before.
    world.boot(4);
    world.boot(5);
    let late =
        || [4, 5].iter().all(|index| world.nodes[index].store().highest_seen_epoch() == Epoch(2));
    world.until("the late ones to hear", late).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
}

/// A gateway that has lost its database and its list of nodes: its lack of knowledge must not count
/// as an answer, and it cannot build a catalogue.
#[tokio::test(start_paused = true)]
async fn a_daemon_that_knows_no_storage_node_says_so() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    // The new catalogue server announces itself to the others three times per lease period. With
    // this lease the first announcement comes after the end of the test.
    world.kill(1).await;
    world.lease = Duration::from_secs(60);
    world.boot(1);
    lose_catalogue(&mut world).await;
    rebuild_on(&client, 1, false).await.unwrap();
    world.machines[0].disk.remove("members").unwrap();
    world.boot(0);
    let alone = world.client_of(0);
    for _ in 0..2 {
        let refused = alone.list_steps(None).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
        assert_eq!(restore_error(&alone, 1).await.kind(), ErrorKind::Unavailable);
        for accept_loss in [false, true] {
            let refused = rebuild_on(&alone, 0, accept_loss).await.unwrap_err();
            assert!(refused.to_string().contains("no storage node"), "{refused}");
        }
    }
    assert_eq!(world.nodes[&0].store().highest_seen_epoch(), Epoch(1), "nothing was claimed");
    assert_exact(&client, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_home_on_a_new_disk_stands_down_whether_it_or_the_rebuild_was_first() {
    for is_first in [true, false] {
        let mut world = World::start(6, &[(4, 2)], BLOCK).await;
        let client = world.client_of(1);
        save(&client, 1, &[("weights", &content(LEN, 1))]).await;
        lose_catalogue(&mut world).await;
        world.replace(0);
        // Nodes that still take machine 0 for the catalogue server have asked it in vain.
        tokio::time::sleep(world.lease).await;
        if is_first {
            world.boot(0);
            tokio::time::sleep(world.lease).await;
        }
        rebuild_on(&client, 2, false).await.unwrap();
        if !is_first {
            world.boot(0);
        }
        world.until("it stands down", || !world.nodes[&0].is_writable_catalogue_server()).await;
        world
            .until("it knows better", || world.nodes[&0].store().highest_seen_epoch() == Epoch(2))
            .await;
        assert_exact(&world.client_of(0), 1).await;
    }
}

/// The nodes still take the lost catalogue server for the current one, and a server answers at its
/// address.
#[tokio::test(start_paused = true)]
async fn an_empty_catalogue_at_the_address_of_the_lost_one_is_not_taken_for_it() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    lose_catalogue(&mut world).await;
    world.replace(0);
    world.boot(0);
    for _ in 0..20 {
        if let Ok(listed) = client.list_steps(None).await {
            assert_eq!(listed.len(), 1);
        }
        let again = vec![shard("weights", &content(LEN, 7))];
        let again = client.save(&job(), Step(1), again, SaveOptions::default(), quiet()).await;
        assert!(again.is_err(), "saved over without --replace");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let empty = world.machines[0].catalogue.get().unwrap();
    assert!(empty.scan(b"k/n/", None, 9).unwrap().len() == 1, "others registered with it");
    rebuild_on(&client, 2, false).await.unwrap();
    assert_exact(&client, 1).await;
}

#[tokio::test(start_paused = true)]
async fn what_a_node_that_missed_the_rebuild_holds_of_removed_saves_goes_when_it_is_back() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    for step in 1..=3 {
        save(&client, step, &[("weights", &content(LEN, step))]).await;
    }
    let gone = client.show_step(&job(), Some(Step(1))).await.unwrap().step.saved.save;
    world.kill(6).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    lose_catalogue(&mut world).await;
    rebuild_on(&client, 2, false).await.unwrap();
    world.boot(6);
    assert!(!world.files_of(gone).is_empty());
    world.until("its files are gone", || world.files_of(gone).is_empty()).await;
    world.until("it is forgotten", || world.catalogue_keys("x/").is_empty()).await;
    assert_exact(&client, 2).await;
    assert_exact(&client, 3).await;
}

#[tokio::test(start_paused = true)]
async fn what_a_step_was_before_a_rebuild_goes_before_the_step() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    save(&world.client_of(1), 1, &[("weights", &content(LEN, 1))]).await;
    replace_and_die(&mut world, &content(LEN, 2)).await;
    lose_catalogue(&mut world).await;
    let client = world.client_of(2);
    let report = rebuild_on(&client, 3, false).await.unwrap();
    assert_eq!((report.steps, report.orphans), (1, 1), "{report:?}");
    client.remove_step(&job(), Step(1)).await.unwrap();
    // Lose the catalogue again at once, so that only the nodes' records decide about the step.
    world.kill(3).await;
    world.machines[3].catalogue.set(None);
    world.boot(3);
    let report = rebuild_on(&client, 4, false).await.unwrap();
    assert_eq!(report.steps, 0, "{report:?}");
    world.boot(1);
    world.assert_swept(&client).await;
    let left = || world.catalogue_keys("c/").len() + world.catalogue_keys("x/").len();
    world.until("nothing left to remove", || left() == 0).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_superseded_and_is_not_whole_any_more_holds_up_no_rebuild() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("other", &content(9, 2)), ("weights", &content(LEN, 2))]).await;
    let lost = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].0.shard;
    replace_and_die(&mut world, &content(LEN, 1)).await;
    for index in 2..=6 {
        let store = world.nodes[&index].store();
        for (name, _) in store.list_record_files(RecordScope::Shard(lost)).unwrap() {
            store.remove_record_file(RecordScope::Shard(lost), &name).unwrap();
        }
    }
    lose_catalogue(&mut world).await;
    let client = world.client_of(2);
    let report = rebuild_on(&client, 3, false).await.unwrap();
    assert_eq!((report.steps, report.orphans), (1, 1), "{report:?}");
    world.boot(1);
    assert_exact(&client, 1).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    world.assert_swept(&client).await;
}

/// The lost catalogue's daemon on a new disk: it has heard of the later epoch from a node, and died
/// before it heard the address of the new catalogue server.
#[tokio::test(start_paused = true)]
async fn who_knows_an_epoch_and_no_home_is_found_by_the_home() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    lose_catalogue(&mut world).await;
    rebuild_on(&client, 3, false).await.unwrap();
    world.replace(0);
    world.boot(0);
    let seen = world.nodes[&3].store();
    world.nodes[&0]
        .store()
        .record_db_id(seen.highest_seen_epoch(), seen.db_id_of_highest_epoch().unwrap())
        .unwrap();
    world.kill(0).await;
    world.boot(0);
    tokio::time::sleep(3 * world.lease).await;
    assert_eq!(world.nodes[&0].store().server_of_highest_epoch(), None, "it was told after all");
    assert_exact(&world.client_of(0), 1).await;
    save(&world.client_of(0), 2, &[("weights", &content(LEN, 2))]).await;
}

/// The catalogue server checks the holdings of a node that the rebuild lacked, while a save in
/// progress writes to that node.
#[tokio::test(start_paused = true)]
async fn a_save_under_way_is_no_orphan_of_a_rebuild() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    world.kill(6).await;
    lose_catalogue(&mut world).await;
    rebuild_on(&client, 2, false).await.unwrap();
    world.boot(6);
    world.until_live(6).await;
    let (voice, to) = (world.voice(Role::Client, "slow"), world.node_address(6));
    let begun = voice.begin(&to, 1).await.unwrap();
    let bytes = content(60_000, 1);
    voice.put_block(&to, &block_call(&begun, bytes.len()), &bytes).await.unwrap();
    let files = world.files_of(begun.save);
    assert!(!files.is_empty());
    for _ in 0..20 {
        voice.ask(&to, &RenewLease { lease: begun.lease }).await.unwrap();
        tokio::time::sleep(world.lease / 3).await;
    }
    assert_eq!(world.files_of(begun.save), files);
}

/// A single mark is enough to recover a step. Afterwards the step has as many marks again as a
/// further rebuild needs.
#[tokio::test(start_paused = true)]
async fn a_rebuild_marks_again_what_it_brings_back() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let root = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].0.clone();
    let scope = RecordScope::Shard(root.shard);
    let marked = |world: &World| -> Vec<usize> {
        let has = |index: &usize| {
            world.nodes[index].store().get_record_file(scope, "commit").unwrap().is_some()
        };
        (1..=6).filter(has).collect()
    };
    let before = marked(&world);
    lose_catalogue(&mut world).await;
    for index in &before[1..] {
        world.nodes[index].store().remove_record_file(scope, "commit").unwrap();
    }
    rebuild_on(&client, 2, false).await.unwrap();
    assert_eq!(marked(&world), before);
}

#[tokio::test(start_paused = true)]
async fn blocks_past_the_end_of_a_shard_are_no_damage() {
    let mut world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client_of(1);
    for (step, len) in [(1, 1), (2, 1000), (3, 3 * BLOCK as usize)] {
        save(&client, step, &[("weights", &content(len, 1))]).await;
        archive(&client, step, PlanChoice::BestStar).await;
    }
    lose_catalogue(&mut world).await;
    let report = rebuild_on(&client, 2, false).await.unwrap();
    assert_eq!(report.damaged, []);
}

#[tokio::test(start_paused = true)]
async fn losses_beyond_the_promise_are_accepted_only_when_told_and_are_listed() {
    let mut world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    lose_catalogue(&mut world).await;
    for index in 3..=6 {
        world.kill(index).await;
    }
    rebuild_on(&client, 1, false).await.unwrap_err();
    let report = rebuild_on(&client, 1, true).await.unwrap();
    assert_eq!((report.steps, report.missing.len()), (1, 4));
    assert!(!report.damaged.is_empty());
    for index in 3..=6 {
        world.boot(index);
    }
    world.until_live(6).await;
    assert_exact(&client, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_that_died_is_done_again_elsewhere() {
    for turns in (0..400).step_by(40) {
        let mut world = World::start(6, &[(4, 2)], BLOCK).await;
        let client = world.client_of(4);
        save(&client, 1, &[("weights", &content(LEN, 1))]).await;
        lose_catalogue(&mut world).await;
        let (other, on) = (world.client_of(5), world.client_of(2));
        let task = tokio::spawn(async move { rebuild_on(&on, 2, false).await });
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        world.kill(2).await;
        let _ = task.await.unwrap();
        let again = rebuild_on(&other, 3, false).await;
        match again {
            Ok(report) => assert!(report.epoch >= Epoch(2), "{turns}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{turns}: {error}"),
        }
        // Node 2 comes back with a database of an older epoch, with none, or with an unfinished
        // one.
        world.boot(2);
        world
            .until("one home", || {
                world.nodes.values().any(|node| node.is_writable_catalogue_server())
            })
            .await;
        tokio::time::sleep(3 * world.lease).await;
        let homes = world.nodes.values().filter(|node| node.is_writable_catalogue_server()).count();
        assert_eq!(homes, 1, "{turns}");
        assert_exact(&client, 1).await;
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_rebuilds_at_once_one_ends() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let (one, two) = (world.client_of(1), world.client_of(2));
    save(&one, 1, &[("weights", &content(LEN, 1))]).await;
    lose_catalogue(&mut world).await;
    let (first, second) = tokio::join!(rebuild_on(&one, 1, false), rebuild_on(&two, 2, false));
    let ended = [first, second].into_iter().filter(Result::is_ok).count();
    assert!(ended <= 1, "{ended}");
    if ended == 0 {
        rebuild_on(&one, 1, false).await.unwrap();
    }
    tokio::time::sleep(3 * world.lease).await;
    assert_eq!(world.nodes.values().filter(|node| node.is_writable_catalogue_server()).count(), 1);
    assert_exact(&two, 1).await;
}

#[tokio::test(start_paused = true)]
async fn an_old_home_that_was_cut_off_commits_nothing_and_stands_down() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    // The old catalogue server reaches only node 6, and one client reaches only these two.
    for index in 1..=5 {
        world.network.partition(&address(0), &address(index));
    }
    let (cut_off, number) = world.numbered_client();
    for index in 1..=5 {
        world.network.partition(&format!("client{number}:0"), &address(index));
    }
    tokio::time::sleep(2 * world.lease).await;
    assert!(!world.nodes[&0].is_writable_catalogue_server(), "it hears one of six");
    let report = rebuild_on(&client, 1, false).await.unwrap();
    assert_eq!(report.missing.len(), 0, "node 6 is reached from both sides");
    let late = vec![shard("weights", &content(LEN, 7))];
    let step = job();
    let saving = cut_off.save(&step, Step(7), late, SaveOptions::default(), quiet());
    let saved = tokio::time::timeout(Duration::from_secs(300), saving).await;
    assert!(!matches!(saved, Ok(Ok(_))), "a save through the old catalogue");
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    for index in 1..=5 {
        world.network.heal(&address(0), &address(index));
    }
    world
        .until("the old home stands down", || !world.nodes[&0].is_writable_catalogue_server())
        .await;
    assert_exact(&client, 1).await;
    assert_exact(&client, 2).await;
    assert_eq!(client.list_steps(None).await.unwrap().len(), 2);
}

/// The catalogue is lost at many points of an archiving, a save and a removal.
#[tokio::test(start_paused = true)]
async fn whatever_was_under_way_is_whole_or_was_never_reported() {
    for turns in (0..2400).step_by(80) {
        let mut world = World::start(6, &[(4, 2)], BLOCK).await;
        let client = world.client_of(1);
        save(&client, 1, &[("weights", &content(LEN, 1))]).await;
        save(&client, 2, &[("weights", &content(LEN, 2))]).await;
        let worker = world.client_of(2);
        let task = tokio::spawn(async move {
            let archived = worker
                .archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ())
                .await;
            let third = vec![shard("weights", &content(LEN, 3))];
            let third = worker.save(&job(), Step(3), third, SaveOptions::default(), quiet()).await;
            let removed = worker.remove_step(&job(), Step(2)).await;
            (archived.is_ok(), third.is_ok(), removed.is_ok())
        });
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        lose_catalogue(&mut world).await;
        let (_, third, removed) = task.await.unwrap();
        rebuild_on(&client, 3, false).await.unwrap();
        let steps: Vec<u64> =
            client.list_steps(None).await.unwrap().iter().map(|step| step.step.0).collect();
        assert!(steps.contains(&1), "{turns}: {steps:?}");
        assert!(!third || steps.contains(&3), "{turns}: reported and lost");
        assert!(!removed || !steps.contains(&2), "{turns}: removed and back");
        for step in &steps {
            world.assert_invariant(&client, *step).await;
            assert_exact(&client, *step).await;
        }
        let wishes = || world.catalogue_keys("a/").is_empty();
        world.until("archiving to go on", wishes).await;
        world.assert_swept(&client).await;
        for step in &steps {
            world.assert_invariant(&client, *step).await;
            assert_exact(&client, *step).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_save_whose_one_mark_is_on_a_node_that_is_away_is_kept() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let shard = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].0.shard;
    let marked: Vec<usize> = (1..=6)
        .filter(|index| {
            let mark =
                world.nodes[index].store().get_record_file(RecordScope::Shard(shard), "commit");
            mark.unwrap().is_some()
        })
        .collect();
    let (away, others) = marked.split_last().unwrap();
    for index in others {
        world.nodes[index].store().remove_record_file(RecordScope::Shard(shard), "commit").unwrap();
    }
    world.kill(*away).await;
    lose_catalogue(&mut world).await;
    let on = others[0];
    let client = world.client_of(on);
    let answer = rebuild_on(&client, on, false).await.unwrap();
    assert_eq!((answer.steps, answer.orphans), (0, 1), "{answer:?}");
    tokio::time::sleep(20 * world.lease).await;
    world.boot(*away);
    tokio::time::sleep(20 * world.lease).await;
    // Another rebuild that includes the missing node recovers the step whole.
    world.kill(on).await;
    world.machines[on].catalogue.set(None);
    let on = others[1];
    world.boot(others[0]);
    let client = world.client_of(on);
    let answer = rebuild_on(&client, on, false).await.unwrap();
    assert_eq!(answer.steps, 1, "{answer:?}");
    assert_exact(&client, 1).await;
}
