//! Pieces of nodes that are given up are made on other nodes (docs/semantics.md, 11, *On another
//! node*).

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use rapidraid::format::records::{Receipt, Record};
use rapidraid::id::{Generation, Step};
use rapidraid::store::Disk;
use rapidraid::wire::calls::{
    CopyReplica, GetRecord, PlanChoice, RepairMode, RepairOptions, ReservePart,
};
use rapidraid::wire::{Call, answer_to_bytes, parse_answer};

use crate::repair::{CHAIN, LEN, archive, archived_world, give_up, repair, saved_world};
use world::between::Change;
use world::{World, content, job, quiet, read_file, restore};

/// Returns the machines that have pieces, each with their number.
fn pieces_by_machine(world: &World) -> BTreeMap<usize, usize> {
    let mut pieces = BTreeMap::new();
    for (machine, _) in world.files(|path| path.ends_with(".pc")) {
        *pieces.entry(machine).or_default() += 1;
    }
    pieces
}

async fn kill_all(world: &mut World, machines: &[usize]) {
    for &machine in machines {
        world.kill(machine).await;
    }
    let dead = world.machines.len() - world.nodes.len();
    world.until_live(world.machines.len() - 1 - dead).await;
}

/// Nodes die for good one after the other. Their pieces are made on others, as long as six are
/// left.
#[tokio::test(start_paused = true)]
async fn pieces_of_dead_nodes_are_made_on_others_until_too_few_are_left() {
    let (mut world, client) = archived_world(10, LEN).await;
    for dead in 1..=4 {
        kill_all(&mut world, &[dead]).await;
        let had = pieces_by_machine(&world).get(&dead).copied().unwrap_or(0);
        let waits = repair(&client, 1, CHAIN).await.summary;
        assert_eq!((waits.pieces, waits.unrepaired), (0, 0), "nobody has given the node up");
        let dry = RepairOptions { mode: RepairMode::DryRun, ..CHAIN };
        let missing = give_up(&client, 1, dry, &[dead]).await.summary;
        let made = give_up(&client, 1, CHAIN, &[dead]).await;
        assert_eq!((made.summary.pieces, made.notes), (had as u64, vec![]), "node {dead}");
        assert_eq!((missing.pieces, made.summary.away), (had as u64, vec![]));
        let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
        assert_eq!((report.faults, report.survives), (vec![], Some(2)), "node {dead}");
    }
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), content(LEN, 1));
    // With seven nodes there is one spare.
    let (mut world, client) = archived_world(7, LEN).await;
    for (dead, away) in [(1, 0), (2, 1)] {
        kill_all(&mut world, &[dead]).await;
        let made = give_up(&client, 1, CHAIN, &[dead]).await;
        assert_eq!((made.summary.away.len(), made.notes), (away, vec![]), "node {dead}");
    }
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), content(LEN, 1));
}

/// A spare whose disk is full takes no piece. Others take all of them.
#[tokio::test(start_paused = true)]
async fn a_spare_that_is_full_is_left_out() {
    let mut refusals = 0;
    for full in 1..=9 {
        let (mut world, client) = archived_world(9, LEN).await;
        let before = pieces_by_machine(&world);
        let others = before.iter().filter(|(machine, _)| **machine != full);
        let (&dead, &had) = others.max_by_key(|(_, pieces)| **pieces).unwrap();
        kill_all(&mut world, &[dead]).await;
        let disk = world.machines[full].disk.clone();
        let space = disk.space().unwrap();
        disk.set_capacity(space.total_bytes - space.free_bytes);
        world.requests.listen();
        let made = give_up(&client, 1, CHAIN, &[dead]).await;
        let asked = world.requests.of::<ReservePart>();
        let name = format!("node{full:02}");
        refusals += asked.iter().filter(|(_, to, _)| *to == name).count();
        assert_eq!(made.summary.pieces, had as u64, "node {full} is full");
        // It also has no room for the new receipt of its own piece.
        assert!(
            made.notes.iter().all(|note| note.contains("did not take the")),
            "{:?}",
            made.notes
        );
        assert_eq!(pieces_by_machine(&world).get(&full), before.get(&full), "node {full} is full");
        disk.set_capacity(1 << 30);
        assert_eq!(give_up(&client, 1, CHAIN, &[dead]).await.notes, [""; 0]);
        let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
        assert_eq!((report.faults, report.survives), (vec![], Some(2)), "node {full}");
    }
    assert!(refusals > 0);
}

/// A spare whose disk is full takes no replica, neither for a repair nor for an archiving. Another
/// one takes it.
#[tokio::test(start_paused = true)]
async fn replicas_go_to_another_spare_if_one_is_full() {
    let (mut repairs, mut archivings) = (0, 0);
    for full in 1..=9 {
        for is_archived in [false, true] {
            // A single stripe leaves nodes without replicas.
            let len = if is_archived { LEN / 2 } else { LEN };
            let (mut world, client) = saved_world(9, len).await;
            let had = |world: &World, machine| {
                world
                    .files(|path| path.ends_with(".rep"))
                    .iter()
                    .filter(|(of, _)| *of == machine)
                    .count()
            };
            // A node of the stripe that is full cannot store its piece.
            if is_archived && had(&world, full) > 0 {
                continue;
            }
            let others = (1..=9).filter(|machine| *machine != full);
            let dead = others.max_by_key(|machine| had(&world, *machine)).unwrap();
            let replicas = had(&world, dead) as u64;
            kill_all(&mut world, &[dead]).await;
            let disk = world.machines[full].disk.clone();
            let space = disk.space().unwrap();
            disk.set_capacity(space.total_bytes - space.free_bytes);
            world.requests.listen();
            if is_archived {
                archive(&client, 1, PlanChoice::Chain).await;
            } else {
                let made = give_up(&client, 1, CHAIN, &[dead]).await;
                assert_eq!(
                    made.summary.replicas, replicas,
                    "node {full} is full: {:?}",
                    made.notes
                );
            }
            let name = format!("node{full:02}");
            let asked = world.requests.of::<CopyReplica>();
            let refusals = asked.iter().filter(|(_, to, _)| *to == name).count();
            *if is_archived { &mut archivings } else { &mut repairs } += refusals;
            disk.set_capacity(1 << 30);
            let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
            assert_eq!(report.faults, vec![], "node {full}");
        }
    }
    assert!(repairs > 0 && archivings > 0, "{repairs} {archivings}");
}

/// A proxy that hides its node's receipts of repairs.
pub struct NoMovedReceipts;

impl Change for NoMovedReceipts {
    fn answer(&self, number: u8, frame: Bytes) -> Bytes {
        let found = (number == GetRecord::NUMBER).then(|| parse_answer::<Option<Vec<u8>>>(&frame));
        let Some(Ok(Ok(Some(bytes)))) = found else { return frame };
        let is_moved = Receipt::parse(&bytes).is_ok_and(|it| it.order > Generation::default());
        if !is_moved {
            return frame;
        }
        answer_to_bytes::<Option<Vec<u8>>>(&Ok(None)).unwrap().into()
    }
}

/// A spare that is not seen to have the new receipt keeps the receipt from all other nodes.
#[tokio::test(start_paused = true)]
async fn a_receipt_goes_to_others_only_after_its_spare_has_it() {
    let (mut world, client) = archived_world(7, LEN).await;
    let dead = *pieces_by_machine(&world).keys().next().unwrap();
    let mut proxies = Vec::new();
    for machine in (1..=7).filter(|machine| *machine != dead) {
        proxies.push(world.between(machine, NoMovedReceipts).await);
    }
    kill_all(&mut world, &[dead]).await;
    world.until_caught_up().await;
    let made = give_up(&client, 1, CHAIN, &[dead]).await;
    assert!(made.summary.pieces > 0);
    assert!(made.notes.iter().all(|note| note.contains("did not take its new receipt")));
    let moved = world.files(|path| path.contains("/receipt-")).into_iter().filter(|file| {
        let bytes = read_file(&*world.machines[file.0].disk, &file.1);
        Receipt::parse(&bytes).unwrap().order > Generation::default()
    });
    assert_eq!(moved.count() as u64, made.summary.pieces, "one for each spare");
}

/// A node that was given up comes back with all that it had, and the spare that has its piece dies.
/// Each stripe has n pieces on n nodes at the end.
#[tokio::test(start_paused = true)]
async fn a_node_that_was_given_up_comes_back() {
    let (mut world, client) = archived_world(7, LEN).await;
    let all: Vec<usize> = (1..=7).collect();
    let dead = *pieces_by_machine(&world).keys().next().unwrap();
    kill_all(&mut world, &[dead]).await;
    let made = give_up(&client, 1, CHAIN, &[dead]).await.summary.pieces;
    assert!(made > 0);
    world.boot(dead);
    world.until_live(7).await;
    world.until_caught_up().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let again = give_up(&client, 1, CHAIN, &all).await;
    assert_eq!((again.summary.pieces, again.notes), (0, vec![]), "the node answers");
    assert_eq!(pieces_by_machine(&world).values().sum::<usize>() as u64, 12 + made, "surplus");
    // Another node dies. The one that came back is the only spare, and may still have the surplus piece.
    let next = all.iter().copied().find(|at| *at != dead).unwrap();
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), content(LEN, 1));
    kill_all(&mut world, &[next]).await;
    let moved = give_up(&client, 1, CHAIN, &[next]).await;
    assert_eq!((moved.summary.away, moved.notes), (vec![], vec![]));
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(2)));
    // The collection of the nodes that have two pieces of a stripe drops the surplus ones.
    tokio::time::sleep(Duration::from_secs(120)).await;
    let live: usize = pieces_by_machine(&world)
        .iter()
        .filter(|(at, _)| **at != next)
        .map(|(_, count)| count)
        .sum();
    assert_eq!(live, 12, "two stripes with six pieces");
    world.assert_idle().await;
}

/// A node that had a receipt as a former spare keeps a piece that was made on it, also before it
/// has the receipt that names it.
#[tokio::test(start_paused = true)]
async fn a_piece_without_its_receipt_is_kept_and_used() {
    let (mut world, client) = archived_world(7, LEN).await;
    let dead = *pieces_by_machine(&world).keys().next().unwrap();
    kill_all(&mut world, &[dead]).await;
    assert!(give_up(&client, 1, CHAIN, &[dead]).await.summary.pieces > 0);
    let before = pieces_by_machine(&world);
    // Every trace of the new receipts is lost: each node has again the receipt of the archiving.
    let machines: Vec<usize> = world.nodes.keys().copied().filter(|at| *at > 0).collect();
    let receipts = world.files(|path| path.contains("/receipt-"));
    let read = |(machine, path): &(usize, String)| {
        Receipt::parse(&read_file(&*world.machines[*machine].disk, path)).unwrap()
    };
    let of_dead = receipts
        .iter()
        .filter(|(machine, _)| *machine == dead)
        .map(|file| (file.1.clone(), read(file)));
    let first: BTreeMap<String, Receipt> = of_dead.collect();
    assert!(!first.is_empty());
    for &machine in &machines {
        world.kill(machine).await;
        let disk = &world.machines[machine].disk;
        for (path, receipt) in &first {
            let stripe = path.rsplit_once('/').unwrap().0;
            if disk.list(stripe).is_ok() {
                let _ = disk.remove(path);
                let file = disk.create_new(path).unwrap();
                file.write_at(&receipt.to_bytes().unwrap(), 0).unwrap();
                file.sync().unwrap();
            }
        }
        world.boot(machine);
    }
    world.until_live(6).await;
    world.until_caught_up().await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(pieces_by_machine(&world), before, "the collection keeps the pieces");
    let again = give_up(&client, 1, CHAIN, &[dead]).await;
    assert_eq!((again.summary.pieces, again.notes), (0, vec![]), "no piece is made again");
    assert!(again.summary.records > 0);
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(2)));
}

/// A record below a bad sector is like one with wrong bytes: a repair goes on and writes it again.
#[tokio::test(start_paused = true)]
async fn records_that_the_disk_cannot_read_are_written_again() {
    let (mut world, client) = archived_world(8, LEN).await;
    let mut bad = Vec::new();
    for name in ["/receipt-", "/leaves", "/commit"] {
        let found = world.files(|path| path.contains(name));
        let (machine, path) = found.iter().find(|(machine, _)| !bad.contains(machine)).unwrap();
        world.machines[*machine].disk.make_sector_unreadable(path, 3).unwrap();
        bad.push(*machine);
    }
    let pieces = pieces_by_machine(&world);
    let (&dead, &had) = pieces.iter().find(|(machine, _)| !bad.contains(machine)).unwrap();
    kill_all(&mut world, &[dead]).await;
    let made = give_up(&client, 1, CHAIN, &[dead]).await;
    assert_eq!((made.summary.pieces, made.notes), (had as u64, vec![]));
    assert!(made.summary.records >= 3, "{}", made.summary.records);
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(2)));
}
