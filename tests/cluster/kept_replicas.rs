//! Repair of the replicas that a classical code keeps as pieces (docs/semantics.md, 11, *On another
//! node*).

use std::collections::BTreeSet;

use rapidraid::client::Client;
use rapidraid::store::Disk;
use rapidraid::wire::calls::{PlanChoice, RepairMode, RepairOptions};

use crate::repair::{CHAIN, LEN, archive, assert_whole, empty_disks, give_up, repair, saved_world};
use world::{World, content, read_file, restore};

/// The shorter block, which is the last one of the last stripe.
const SHORT: &str = "00000001/block-03";

/// Returns a cluster of `nodes` storage nodes with a step that is archived by a classical code.
async fn classical_world(nodes: usize) -> (World, Client) {
    let (world, client) = saved_world(nodes, LEN).await;
    archive(&client, 1, PlanChoice::BestStar).await;
    (world, client)
}

/// Returns the storage nodes that have a file of the step with this part in its path.
async fn machines_with(world: &World, part: &str) -> Vec<usize> {
    let files = world.files_of_step(1, "").await;
    let machines: BTreeSet<usize> =
        files.into_iter().filter(|(_, path)| path.contains(part)).map(|(at, _)| at).collect();
    machines.into_iter().filter(|machine| *machine > 0).collect()
}

async fn assert_restores(client: &Client) {
    let (out, _) = restore(client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 1));
}

#[tokio::test(start_paused = true)]
async fn a_lost_kept_replica_is_made_again_as_a_piece() {
    let (mut world, client) = classical_world(8).await;
    let holders: BTreeSet<usize> = machines_with(&world, "/block-").await.into_iter().collect();
    assert!(holders.len() >= 4, "{holders:?}");
    let parity = machines_with(&world, "/piece-").await.into_iter();
    for machine in holders.into_iter().chain(parity) {
        empty_disks(&mut world, &[machine]).await;
        let dry = RepairOptions { mode: RepairMode::DryRun, ..CHAIN };
        let missing = repair(&client, 1, dry).await.summary;
        let made = repair(&client, 1, CHAIN).await;
        assert_eq!(made.notes, Vec::<String>::new());
        assert!(made.summary.pieces > 0);
        assert_eq!(made.summary.pieces, missing.pieces);
        assert_whole(&client, 1, 2).await;
        assert_restores(&client).await;
        let again = repair(&client, 1, CHAIN).await.summary;
        assert_eq!((again.pieces, again.records, again.unrepaired), (0, 0, 0));
    }
    assert_eq!(machines_with(&world, "/block-").await, [0; 0], "all are pieces now");
}

#[tokio::test(start_paused = true)]
async fn a_kept_replica_of_a_node_that_is_gone_is_made_on_a_spare() {
    for part in [SHORT, "00000000/block-00"] {
        let (mut world, client) = classical_world(8).await;
        let [gone] = machines_with(&world, part).await[..] else { panic!("one has {part}") };
        world.kill(gone).await;
        world.until_live(7).await;
        let made = give_up(&client, 1, CHAIN, &[gone]).await;
        assert_eq!(made.notes, Vec::<String>::new());
        assert_whole(&client, 1, 2).await;
        // The replica that comes back is surplus.
        world.boot(gone);
        world.until_live(8).await;
        world.until_caught_up().await;
        assert_whole(&client, 1, 2).await;
        assert_eq!(repair(&client, 1, CHAIN).await.summary.pieces, 0);
        assert_restores(&client).await;
        // Without it the step is whole, so the node may leave the cluster.
        world.kill(gone).await;
        world.until_live(7).await;
        client.remove_node(&format!("node{gone:02}").parse().unwrap()).await.unwrap();
        assert_whole(&client, 1, 2).await;
        assert_restores(&client).await;
    }
}

/// A node that was away during a repair has a receipt that names the replica. A reader may take this
/// receipt, and must find the piece all the same.
#[tokio::test(start_paused = true)]
async fn an_older_receipt_hides_no_piece() {
    for away in 1..=6 {
        let (mut world, client) = classical_world(6).await;
        let [emptied] = machines_with(&world, SHORT).await[..] else { panic!("one has it") };
        if away == emptied {
            continue;
        }
        world.kill(away).await;
        world.kill(emptied).await;
        world.replace(emptied);
        world.boot(emptied);
        world.until_live(5).await;
        world.until_caught_up().await;
        let made = repair(&client, 1, CHAIN).await;
        assert!(made.summary.pieces > 0, "{:?}", made.notes);
        world.boot(away);
        world.until_live(6).await;
        world.until_caught_up().await;
        let others: Vec<usize> = (1..=6).filter(|at| ![away, emptied].contains(at)).collect();
        for (at, first) in others.iter().enumerate() {
            for second in &others[at + 1..] {
                world.kill(*first).await;
                world.kill(*second).await;
                assert_restores(&client).await;
                world.boot(*first);
                world.boot(*second);
                world.until_live(6).await;
            }
        }
        repair(&client, 1, CHAIN).await;
        assert_whole(&client, 1, 2).await;
    }
}

/// The repairer dies after the piece is durable and before any node has its receipt.
#[tokio::test(start_paused = true)]
async fn a_piece_without_its_receipt_is_proven_again() {
    let (mut world, client) = classical_world(8).await;
    let [emptied] = machines_with(&world, SHORT).await[..] else { panic!("one has it") };
    let receipts = |world: &World| -> Vec<(usize, String, Vec<u8>)> {
        let found = world.files(|path| path.contains("/receipt-")).into_iter();
        let found = found.filter(|(machine, _)| *machine > 0);
        found
            .map(|(at, path)| (at, path.clone(), read_file(&*world.machines[at].disk, &path)))
            .collect()
    };
    let before = receipts(&world);
    empty_disks(&mut world, &[emptied]).await;
    repair(&client, 1, CHAIN).await;
    for (machine, path, _) in receipts(&world) {
        world.machines[machine].disk.remove(&path).unwrap();
    }
    for (machine, path, bytes) in before.iter().filter(|(machine, ..)| *machine != emptied) {
        world.machines[*machine].disk.create_new(path).unwrap().write_at(bytes, 0).unwrap();
    }
    for machine in 1..=8 {
        world.kill(machine).await;
        world.boot(machine);
    }
    world.until_live(8).await;
    world.until_caught_up().await;
    assert_restores(&client).await;
    let made = repair(&client, 1, CHAIN).await;
    assert_eq!(made.notes, Vec::<String>::new());
    assert_whole(&client, 1, 2).await;
    assert_restores(&client).await;
}
