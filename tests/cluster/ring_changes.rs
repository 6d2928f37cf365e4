//! Nodes leave the rings of checkpoints, and others take their places (docs/semantics.md, 10, *Rings
//! that change*).

use std::collections::BTreeSet;
use std::time::Duration;

use rapidraid::client::{Client, SaveOptions};
use rapidraid::format::records::{LeaveState, RingChanges};
use rapidraid::id::{NodeId, PeerName, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::wire::calls::PlanChoice;

use crate::away::restore_by_record;
use crate::by_itself::{RULES, restart_server};
use crate::rebuild::{lose_catalogue, rebuild_on};
use crate::repair::{CHAIN, LEN, archived_world, give_up, saved_world};
use world::{World, content, job, options, quiet, read_file, restore, save, shard};

/// A length that gives one stripe.
const ONE_STRIPE: usize = 200_000;

fn name(machine: usize) -> PeerName {
    format!("node{machine:02}").parse().unwrap()
}

/// Asserts that nothing is missing of the step, that `losses` nodes may be lost, and that its bytes
/// are those that were saved.
async fn assert_whole(client: &Client, step: u64, losses: usize) {
    let report = client.verify(&job(), Some(Step(step)), quiet()).await.unwrap();
    assert_eq!(
        (&report.faults, report.survives),
        (&vec![], Some(losses)),
        "step {step}: {report:?}"
    );
    let (out, _) = restore(client, step).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), content(LEN, step), "step {step}");
}

/// Kills a machine for good, and lets a new one take its place.
async fn exchange(world: &mut World, client: &Client, dead: usize, steps: &[u64]) -> usize {
    world.kill(dead).await;
    world.grow(1);
    let new = world.machines.len() - 1;
    world.until_live(world.nodes.len() - 1).await;
    client.replace_node(&name(dead), &name(new)).await.unwrap();
    for &step in steps {
        let made = give_up(client, step, CHAIN, &[dead]).await;
        assert_eq!((made.summary.away, made.notes), (vec![], vec![]), "node {dead}, step {step}");
    }
    client.remove_node(&name(dead)).await.unwrap();
    new
}

/// All six nodes of a cluster are in the ring, and one dies for good. Another node takes its place
/// under another name.
#[tokio::test(start_paused = true)]
async fn a_new_node_takes_the_place_of_a_dead_one() {
    let (mut world, client) = archived_world(6, LEN).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    world.kill(3).await;
    world.grow(1);
    world.until_live(6).await;
    let refused = client.remove_node(&name(3)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert!(
        refused.to_string().contains("has 5 live storage nodes; its code needs 6"),
        "{refused}"
    );
    client.replace_node(&name(3), &name(7)).await.unwrap();
    let refused = client.remove_node(&name(3)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert!(refused.to_string().contains("parts of job/1 would be missing"), "{refused}");
    for step in [1, 2] {
        let made = give_up(&client, step, CHAIN, &[3]).await;
        assert_eq!((made.summary.away, made.notes), (vec![], vec![]), "step {step}");
    }
    client.remove_node(&name(3)).await.unwrap();
    let nodes = client.show_step(&job(), None).await.unwrap().nodes;
    assert!(nodes.iter().all(|view| view.node.name != name(3)));
    assert_whole(&client, 1, 2).await;
    assert_whole(&client, 2, 1).await;
    // A save from before the exchange is archived on the nodes that are left, and dropped.
    let report =
        client.archive(&job(), Some(Step(2)), options(PlanChoice::Chain), &mut |_| ()).await;
    assert_eq!(report.unwrap().undropped, 0);
    assert_whole(&client, 2, 2).await;
    assert_eq!(
        world.files(|path| path.ends_with(".rep")).iter().filter(|(at, _)| *at != 3).count(),
        0
    );
    // Another two nodes may be lost.
    for dead in [7, 1] {
        world.kill(dead).await;
    }
    for step in [1, 2] {
        let (out, _) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), content(LEN, step), "step {step}");
    }
}

/// All nodes of a cluster leave for good, one after the other, until none of the first ring is left.
/// After each exchange the catalogue is rebuilt from the nodes, and the checkpoints are read by
/// commit marks and by the record of their first hour. Then all old nodes come back. The suite has
/// eight nodes, and `RAPIDRAID_EXCHANGE_NODES` sets another number.
#[tokio::test(start_paused = true)]
async fn every_node_of_a_cluster_is_exchanged() {
    let nodes = std::env::var("RAPIDRAID_EXCHANGE_NODES").map_or(8, |text| text.parse().unwrap());
    let (mut world, client) = archived_world(nodes, LEN).await;
    let shards = vec![shard("weights", &content(LEN, 2))];
    let replicated = client.save(&job(), Step(2), shards, SaveOptions::default(), quiet()).await;
    let record = replicated.unwrap().record;
    save(&client, 3, &[("weights", &content(LEN, 3))]).await;
    for dead in 1..=nodes {
        let steps = if dead <= nodes / 2 { &[1, 2, 3][..] } else { &[1, 2] };
        exchange(&mut world, &client, dead, steps).await;
        if dead == nodes / 2 {
            client.remove_step(&job(), Step(3)).await.unwrap();
        }
        for (step, losses) in [(1, 2), (2, 1)] {
            assert_whole(&client, step, losses).await;
        }
        // The nodes store the new list when they register next.
        tokio::time::sleep(world.lease).await;
        lose_catalogue(&mut world).await;
        let reader = world.client_of(nodes + 1);
        for step in [1, 2] {
            let (out, report) = restore(&reader, step).await.unwrap();
            assert_eq!(read_file(&*out, "weights"), content(LEN, step), "step {step} by marks");
            assert!(report.incidents.iter().any(|text| text.contains("marks")), "{report:?}");
        }
        let (out, _) = restore_by_record(&reader, &record).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), content(LEN, 2), "by the first record");
        world.boot(0);
        rebuild_on(&reader, 0, false).await.unwrap();
        world.until_live(world.nodes.len() - 1).await;
        world.until_caught_up().await;
    }
    for old in 1..=nodes {
        world.boot(old);
    }
    world.until_live(2 * nodes).await;
    tokio::time::sleep(20 * world.lease).await;
    // The files of these steps on the old nodes are surplus.
    for step in [1, 2] {
        let report = client.verify(&job(), Some(Step(step)), quiet()).await.unwrap();
        assert!(report.faults.is_empty() && report.survives >= Some(2), "{report:?}");
        let (out, _) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), content(LEN, step), "step {step}");
    }
    assert!(client.show_step(&job(), Some(Step(3))).await.is_err());
}

/// A node that runs and is to leave is asked, and gets nothing new. When it starts again, it stays.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_to_leave_gets_nothing_new() {
    let (mut world, client) = saved_world(8, LEN).await;
    client.replace_node(&name(2), &name(8)).await.unwrap();
    let files = |world: &World| world.files(|path| path.starts_with("shards/")).into_iter();
    let on_two = |world: &World| files(world).filter(|(at, _)| *at == 2).count();
    let before = on_two(&world);
    assert!(before > 0);
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    // Its replicas of the first step are copied to a spare before the archiving.
    for step in [1, 2] {
        let archived =
            client.archive(&job(), Some(Step(step)), options(PlanChoice::Chain), &mut |_| ()).await;
        assert_eq!(archived.unwrap().undropped, 0, "step {step}");
    }
    let pieces = files(&world).filter(|(at, path)| *at == 2 && path.ends_with(".pc")).count();
    assert_eq!((pieces, on_two(&world) <= before + 4), (0, true), "a commit mark of each step");
    let refused = client.remove_node(&name(2)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");

    world.kill(2).await;
    tokio::time::sleep(2 * world.lease).await;
    world.boot(2);
    world.until_live(8).await;
    let changes = client.fetch_ring_changes().await.unwrap();
    assert_eq!(changes.find(&name(2)).unwrap().state, LeaveState::Returned);
    save(&client, 3, &[("weights", &content(LEN, 3))]).await;
    let shown = client.show_step(&job(), Some(Step(3))).await.unwrap();
    let mut rings = shown.shards.iter().map(|(root, _)| &root.ring);
    assert!(rings.all(|ring| ring.iter().any(|member| member.node == NodeId::of(&name(2)))));
    for step in [1, 2] {
        assert_whole(&client, step, 2).await;
    }
    assert_whole(&client, 3, 1).await;
}

/// Automatic repair makes the parts of a dead node on its successor after the graces. Then the dead
/// node can be removed.
#[tokio::test(start_paused = true)]
async fn a_successor_is_filled_by_itself() {
    let (mut world, client) = archived_world(6, LEN).await;
    restart_server(&mut world, RULES).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    world.kill(5).await;
    world.grow(1);
    world.until_live(6).await;
    client.replace_node(&name(5), &name(7)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20 * 60)).await;
    client.remove_node(&name(5)).await.unwrap();
    assert_whole(&client, 1, 2).await;
    assert_whole(&client, 2, 1).await;
}

/// A successor takes one piece of each stripe. The pieces of a second node need another one.
#[tokio::test(start_paused = true)]
async fn one_successor_takes_the_place_of_one_node() {
    let (mut world, client) = archived_world(6, LEN).await;
    for dead in [1, 2] {
        world.kill(dead).await;
    }
    world.grow(1);
    world.until_live(5).await;
    for dead in [1, 2] {
        client.replace_node(&name(dead), &name(7)).await.unwrap();
    }
    give_up(&client, 1, CHAIN, &[1, 2]).await;
    for dead in [1, 2] {
        let refused = client.remove_node(&name(dead)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    }
    world.grow(1);
    world.until_live(6).await;
    client.replace_node(&name(2), &name(8)).await.unwrap();
    assert_eq!(give_up(&client, 1, CHAIN, &[1, 2]).await.notes, [""; 0]);
    for dead in [1, 2] {
        client.remove_node(&name(dead)).await.unwrap();
    }
    assert_whole(&client, 1, 2).await;
}

/// A receipt names a node that has left, because its piece was also on another one. When that copy
/// is lost, the piece is made again, although nobody gives up the node that has left.
#[tokio::test(start_paused = true)]
async fn a_piece_that_a_node_that_left_should_have_is_made_again() {
    let (mut world, client) = archived_world(8, ONE_STRIPE).await;
    let with_pieces = |world: &World| -> BTreeSet<usize> {
        world.files(|path| path.ends_with(".pc")).into_iter().map(|(machine, _)| machine).collect()
    };
    let before = with_pieces(&world);
    let holder = *before.first().unwrap();
    // The piece moves to a spare; then its first node comes back with its copy.
    world.kill(holder).await;
    world.until_live(7).await;
    give_up(&client, 1, CHAIN, &[holder]).await;
    let spare = *with_pieces(&world).difference(&before).next().unwrap();
    world.boot(holder);
    world.until_live(8).await;
    world.kill(spare).await;
    world.until_live(7).await;
    client.remove_node(&name(spare)).await.unwrap();
    world.kill(holder).await;
    world.until_live(6).await;
    let made = give_up(&client, 1, CHAIN, &[holder]).await;
    assert_eq!((made.summary.pieces, made.summary.away, made.notes), (1, vec![], vec![]));
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(2)));
}

#[tokio::test(start_paused = true)]
async fn a_replacement_that_makes_no_sense_is_refused() {
    let (mut world, client) = archived_world(6, LEN).await;
    let replace = async |node: &str, by: &str| {
        let by = by.parse().unwrap();
        client.replace_node(&node.parse().unwrap(), &by).await.unwrap_err()
    };
    assert_eq!(replace("nobody", "node01").await.kind(), ErrorKind::NotFound);
    assert_eq!(replace("node01", "nobody").await.kind(), ErrorKind::NotFound);
    assert_eq!(replace("node01", "node01").await.kind(), ErrorKind::Invalid);
    // Machine 0 serves the catalogue and stores nothing.
    let refused = replace("node01", "node00").await;
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    world.kill(6).await;
    world.until_live(5).await;
    assert_eq!(replace("node01", "node06").await.kind(), ErrorKind::Unavailable);
    assert_eq!(client.fetch_ring_changes().await.unwrap(), RingChanges::default());
    // More than half of the others must know of it.
    for machine in [4, 5] {
        world.kill(machine).await;
    }
    world.until_live(3).await;
    let refused = replace("node06", "node02").await;
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    for machine in [4, 5, 6] {
        world.boot(machine);
    }
    world.until_live(6).await;
    assert_whole(&client, 1, 2).await;
}

/// A node is down while another one is removed, and takes part in the rebuild after that. What it
/// stores of the removal is old, and holds nothing up.
#[tokio::test(start_paused = true)]
async fn a_node_that_has_missed_a_removal_does_not_undo_it() {
    let (mut world, client) = archived_world(8, LEN).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    world.kill(1).await;
    world.until_live(7).await;
    // Node 1 is to leave, as far as node 7 knows; then node 7 is down.
    for step in [1, 2] {
        assert_eq!(give_up(&client, step, CHAIN, &[1]).await.notes, [""; 0], "step {step}");
    }
    client.replace_node(&name(1), &name(2)).await.unwrap();
    world.kill(7).await;
    world.until_live(6).await;
    for step in [1, 2] {
        assert_eq!(give_up(&client, step, CHAIN, &[7]).await.notes, [""; 0], "step {step}");
    }
    client.remove_node(&name(1)).await.unwrap();
    tokio::time::sleep(world.lease).await;
    lose_catalogue(&mut world).await;
    world.boot(7);
    world.boot(0);
    let reader = world.client_of(3);
    rebuild_on(&reader, 3, false).await.unwrap();
    world.until_live(7).await;
    world.until_caught_up().await;
    let change = reader.fetch_ring_changes().await.unwrap();
    assert_eq!(change.find(&name(1)).unwrap().state, LeaveState::Left);
    let nodes = reader.show_step(&job(), None).await.unwrap().nodes;
    assert!(nodes.iter().all(|view| view.node.name != name(1)));
    let archived =
        reader.archive(&job(), Some(Step(2)), options(PlanChoice::Chain), &mut |_| ()).await;
    assert_eq!(archived.unwrap().undropped, 0);
    for step in [1, 2] {
        let (out, _) = restore(&reader, step).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), content(LEN, step), "step {step}");
    }
}
