//! Membership of the cluster: nodes that leave it, are replaced, or come back after a long time
//! (docs/semantics.md, 10).

use std::sync::Arc;
use std::time::Duration;

use rapidraid::catalogue::record_access::save_ring_key;
use rapidraid::id::{NodeId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::store::{MemoryDisk, MemoryKv};
use rapidraid::wire::calls::{CompleteShard, PlanChoice};

use world::raw::empty_root;
use world::{World, content, job, options, read_file, restore, save};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 5 * BLOCK as usize - 1000;
/// Longer than every lease and every delay between two attempts.
const LONG: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn a_node_leaves_only_when_nothing_may_lie_on_it() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    for step in [1, 2] {
        save(&client, step, &[("weights", &content(LEN, step))]).await;
    }
    let name = world.machines[6].name.clone();
    let refused = client.remove_node(&"nobody".parse().unwrap()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    let refused = client.remove_node(&name).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");

    // The catalogue server has compared what each node holds, and compares again when a removed
    // node has registered again.
    tokio::time::sleep(8 * world.lease).await;
    world.kill(6).await;
    tokio::time::sleep(2 * world.lease).await;
    let refused = client.remove_node(&name).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert!(refused.to_string().contains("parts of job/1 would be missing"), "{refused}");

    // The purge of removed steps waits for the stopped node. When the node leaves the cluster,
    // nothing waits any more.
    for step in [1, 2] {
        client.remove_step(&job(), Step(step)).await.unwrap();
    }
    save(&client, 3, &[("weights", &content(LEN, 3))]).await;
    tokio::time::sleep(2 * world.lease).await;
    assert!(world.catalogue_keys("s/").len() > 1);
    client.remove_node(&name).await.unwrap();
    world.until("nothing to remove", || world.catalogue_keys("s/").len() == 1).await;
    let nodes = client.show_step(&job(), None).await.unwrap().nodes;
    assert!(nodes.iter().all(|view| view.node.name != name));
    let (out, _) = restore(&client, 3).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 3));

    // The node comes back and is a member again, which harms nothing. Its files of removed saves
    // are purged.
    let old: Vec<_> = world.files(|path| path.ends_with(".rep")).into_iter().collect();
    assert!(old.iter().any(|(at, _)| *at == 6));
    world.boot(6);
    world.until_live(6).await;
    let is_gone = || world.files(|path| path.ends_with(".rep")).iter().all(|(at, _)| *at != 6);
    world.until("what it had of removed saves gone", is_gone).await;
    save(&client, 4, &[("weights", &content(LEN, 4))]).await;
    for step in [1, 2] {
        assert!(client.show_step(&job(), Some(Step(step))).await.is_err());
    }
    let (out, _) = restore(&client, 4).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 4));
}

/// Two nodes of a ring of (4,2) without a tombstone are one too many, until they have left.
#[tokio::test(start_paused = true)]
async fn a_removal_ends_when_the_nodes_that_it_waits_for_have_left() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    tokio::time::sleep(8 * world.lease).await;
    for index in [5, 6] {
        world.kill(index).await;
    }
    tokio::time::sleep(2 * world.lease).await;
    let error = client.remove_step(&job(), Step(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    for index in [5, 6] {
        let name = world.machines[index].name.clone();
        client.remove_node(&name).await.unwrap();
    }
    world.until("nothing to remove", || world.catalogue_keys("s/").len() == 1).await;
    let (out, _) = restore(&client, 2).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 2));
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_disk_is_lost_is_filled_again_before_archiving() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let before = world.files(|path| path.ends_with(".rep")).len();
    world.kill(2).await;
    let machine = &mut world.machines[2];
    (machine.disk, machine.index) = (Arc::new(MemoryDisk::new(1 << 30)), Arc::new(MemoryKv::new()));
    world.boot(2);
    world.until_live(4).await;
    assert!(world.files(|path| path.ends_with(".rep")).len() < before);
    let report =
        client.archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ()).await;
    assert_eq!(report.unwrap().undropped, 0);
    // All n pieces exist, so any two nodes may fail.
    for gone in [[1, 3], [3, 4]] {
        for index in gone {
            world.kill(index).await;
        }
        let (out, _) = restore(&client, 1).await.unwrap();
        assert!(read_file(&*out, "weights") == content(LEN, 1), "{gone:?}");
        for index in gone {
            world.boot(index);
        }
        world.until_live(4).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_away_for_long_brings_back_what_counts_and_nothing_else() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    for step in 1..=3 {
        save(&client, step, &[("weights", &content(LEN, step))]).await;
    }
    world.kill(5).await;
    tokio::time::sleep(2 * world.lease).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    client.archive(&job(), Some(Step(2)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    save(&client, 4, &[("weights", &content(LEN, 4))]).await;
    tokio::time::sleep(LONG).await;
    world.boot(5);
    world.until_live(6).await;
    // The steps that were removed meanwhile are purged from node 5 as well. Its replicas of step 3
    // count again.
    tokio::time::sleep(Duration::from_secs(11 * 60)).await;
    assert_eq!(world.catalogue_keys("s/").len(), 3);
    for step in 2..=4 {
        let (out, _) = restore(&client, step).await.unwrap();
        assert!(read_file(&*out, "weights") == content(LEN, step), "step {step}");
    }
    client.archive(&job(), Some(Step(3)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    client.archive(&job(), Some(Step(4)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    assert_eq!(world.files(|path| path.ends_with(".rep")), []);
    world.assert_idle().await;
}

/// A save of the command line uses the nodes that were chosen when it began, and no others.
#[tokio::test(start_paused = true)]
async fn a_node_that_an_open_save_does_not_use_can_be_removed() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let name = |world: &World, index: usize| world.machines[index].name.clone();
    let (client, to) = (world.client(), world.node_address(1));
    let (voice, node) = (world.voice(Role::Client, "writer"), world.voice(Role::Node, "node01"));
    world.kill(6).await;
    world.until_live(5).await;
    let begun = voice.begin(&to, 1).await.unwrap();
    let again = voice.begin_as(&world.node_address(2), 1, begun.save, false).await.unwrap();
    assert_eq!(again, begun);

    let mut foreign = empty_root(&begun, 1, "weights");
    foreign.ring[0].node = NodeId::of(&name(&world, 6));
    let refused = voice.ask(&to, &CompleteShard { root: foreign }).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");

    // The gateway of a program that knows no ring of a save leaves none.
    node.remove_key(&world.node_address(0), save_ring_key(begun.save)).await;
    let refused = client.remove_node(&name(&world, 6)).await.unwrap_err();
    assert!(refused.to_string().contains("job/1"), "its ring is not known: {refused}");
    voice.begin_as(&to, 1, begun.save, false).await.unwrap();
    client.remove_node(&name(&world, 6)).await.unwrap();

    world.kill(5).await;
    for _ in 0..10 {
        tokio::time::sleep(world.lease / 4).await;
        voice.begin_as(&to, 1, begun.save, false).await.unwrap();
    }
    let refused = client.remove_node(&name(&world, 5)).await.unwrap_err();
    assert!(refused.to_string().contains("job/1"), "it was chosen: {refused}");
}
