//! Repair: what nodes have lost is made again on them (docs/semantics.md, 11).

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use rapidraid::catalogue::record_access::{ArchiveRequest, archive_request_key};
use rapidraid::client::{Client, RepairReport};
use rapidraid::format::records::{Leaves, Record, StripeState, stripes_root};
use rapidraid::id::{Generation, NodeId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::store::{Disk, PieceSpec};
use rapidraid::wire::calls::{
    CopyReplica, GetRecord, PlanChoice, PutLeaves, RecordName, RepairMode, RepairOptions,
    RepairPlan, RepairSummary, RunPart,
};
use tokio::time::Instant;

use crate::checks::{Liar, Lie};
use world::{World, content, job, options, quiet, read_file, restore, save};

const BLOCK: u64 = 128 << 10;
/// Two stripes of four blocks; the last block is shorter.
pub const LEN: usize = 8 * BLOCK as usize - 70_000;
pub const CHAIN: RepairOptions =
    RepairOptions { mode: RepairMode::Repair, plan: RepairPlan::Chain, parallel: 0 };

pub async fn repair(client: &Client, step: u64, options: RepairOptions) -> RepairReport {
    give_up(client, step, options, &[]).await
}

/// Repairs the step, and makes the pieces of these machines on others.
pub async fn give_up(
    client: &Client,
    step: u64,
    options: RepairOptions,
    machines: &[usize],
) -> RepairReport {
    let nodes: Vec<NodeId> = machines.iter().map(|&machine| node_id(machine)).collect();
    client.repair(&job(), Some(Step(step)), options, &nodes, &mut |_| ()).await.unwrap()
}

fn node_id(machine: usize) -> NodeId {
    NodeId::of(&format!("node{machine:02}").parse().unwrap())
}

pub async fn archive(client: &Client, step: u64, plan: PlanChoice) {
    client.archive(&job(), Some(Step(step)), options(plan), &mut |_| ()).await.unwrap();
}

/// Returns the files of all shards with their bytes, without fences and damage notes.
fn stored(world: &World) -> BTreeMap<(usize, String), Vec<u8>> {
    let is_ours = |path: &str| {
        path.starts_with("shards/") && !path.ends_with("/fence") && !path.contains("/damage-")
    };
    let read = |(machine, path): (usize, String)| {
        let bytes = read_file(&*world.machines[machine].disk, &path);
        ((machine, path), bytes)
    };
    world.files(is_ours).into_iter().map(read).collect()
}

/// Replaces the disks of these machines by empty ones, and waits until they are back.
pub async fn empty_disks(world: &mut World, machines: &[usize]) {
    for &machine in machines {
        world.kill(machine).await;
        world.replace(machine);
        world.boot(machine);
    }
    // Machine 0 serves the catalogue and stores nothing.
    world.until_live(world.machines.len() - 1).await;
    world.until_caught_up().await;
}

/// Asserts that the nodes examine the step as whole, and that it survives the loss of `losses`
/// nodes.
pub async fn assert_whole(client: &Client, step: u64, losses: u64) {
    let report = client.verify(&job(), Some(Step(step)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.lacking), (vec![], vec![]));
    assert_eq!(report.survives, Some(losses as usize));
}

/// Returns a cluster of `nodes` storage nodes with one committed step, which is not archived, of
/// `len` bytes.
pub async fn saved_world(nodes: usize, len: usize) -> (World, Client) {
    let world = World::start(nodes, &[(6, 4)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(len, 1)), ("empty", &Bytes::new())]).await;
    (world, client)
}

/// Returns the same with the step archived along a chain.
pub async fn archived_world(nodes: usize, len: usize) -> (World, Client) {
    let (world, client) = saved_world(nodes, len).await;
    archive(&client, 1, PlanChoice::Chain).await;
    (world, client)
}

#[tokio::test(start_paused = true)]
async fn what_emptied_nodes_had_is_made_again_bit_for_bit() {
    for plan in [RepairPlan::Chain, RepairPlan::Star] {
        let (mut world, client) = archived_world(8, LEN).await;
        let before = stored(&world);
        empty_disks(&mut world, &[1, 2]).await;
        let lost = before.keys().filter(|(machine, _)| [1, 2].contains(machine));
        let pieces = lost.clone().filter(|(_, path)| path.ends_with(".pc")).count() as u64;
        assert!(pieces >= 2, "the disks had pieces");

        let dry = RepairOptions { mode: RepairMode::DryRun, ..CHAIN };
        let emptied = stored(&world);
        let missing = repair(&client, 1, dry).await.summary;
        assert_eq!((missing.pieces, missing.stripes), (pieces, 2));
        assert!(missing.records > 0);
        assert_eq!(stored(&world), emptied, "a dry run changes nothing");
        assert_eq!(repair(&client, 1, dry).await.summary, missing);

        let made = repair(&client, 1, RepairOptions { plan, ..CHAIN }).await;
        assert_eq!((made.summary.pieces, &made.notes[..]), (pieces, &[][..]));
        // The blocks of the second stripe are shorter.
        assert!((pieces * BLOCK / 2..pieces * BLOCK).contains(&made.summary.made_bytes));
        assert_eq!(made.summary.made_bytes, missing.made_bytes);
        // A dry run cannot know which receipts follow from pieces that are made.
        assert!(made.summary.records >= missing.records);
        assert_eq!(stored(&world), before);
        assert_whole(&client, 1, 2).await;
        let nothing = RepairSummary { stripes: 2, ..RepairSummary::default() };
        assert_eq!(repair(&client, 1, CHAIN).await.summary, nothing);
        world.assert_idle().await;
    }
}

/// The pieces that are made again carry the next loss.
#[tokio::test(start_paused = true)]
async fn disks_are_lost_one_after_the_other_until_none_of_the_first_is_left() {
    let (mut world, client) = archived_world(6, LEN).await;
    let before = stored(&world);
    for machine in 1..=6 {
        empty_disks(&mut world, &[machine]).await;
        let made = repair(&client, 1, CHAIN).await;
        assert_eq!((made.summary.pieces, made.notes), (2, vec![]), "machine {machine}");
    }
    assert_eq!(stored(&world), before);
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), content(LEN, 1));
}

/// One of six pieces is lost, and one of the other five is damaged without a note. The lost piece
/// is made from four of the five.
#[tokio::test(start_paused = true)]
async fn a_rotten_piece_is_made_again_also_if_it_was_to_be_a_source() {
    let mut sources = 0;
    for rotten in [1, 2, 4, 5, 6] {
        let (mut world, client) = archived_world(6, LEN / 2).await;
        let before = stored(&world);
        empty_disks(&mut world, &[3]).await;
        let pieces = world.files_of_step(1, "00000000/piece-").await;
        let (_, path) = pieces.iter().find(|(machine, _)| *machine == rotten).unwrap();
        world.machines[rotten].disk.flip_bit(path, 8 * 70_000).unwrap();
        let made = repair(&client, 1, CHAIN).await;
        assert_eq!(made.notes, [""; 0], "machine {rotten}");
        match made.summary.pieces {
            2 => sources += 1,
            made => {
                // The damaged piece was not among the sources: an examination finds it.
                assert_eq!(made, 1);
                client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
                assert_eq!(repair(&client, 1, CHAIN).await.summary.pieces, 1);
            }
        }
        assert_eq!(stored(&world), before);
        assert_whole(&client, 1, 2).await;
    }
    assert_eq!(sources, 4);
}

#[tokio::test(start_paused = true)]
async fn a_stripe_with_too_few_pieces_is_reported_with_the_nodes_that_would_help() {
    let (mut world, client) = archived_world(6, LEN / 2).await;
    let before = stored(&world);
    empty_disks(&mut world, &[3]).await;
    for machine in [4, 5] {
        world.kill(machine).await;
    }
    world.until_live(4).await;
    let report = repair(&client, 1, CHAIN).await;
    assert_eq!((report.summary.pieces, report.summary.unrepaired), (0, 1));
    assert_eq!(report.summary.away.len(), 2);
    let note = report.notes.join("\n");
    assert!(note.contains("find 1 more") && note.contains("do not answer"), "{note}");
    for machine in [4, 5] {
        assert!(note.contains(world.machines[machine].name.as_str()), "{note}");
    }
    for machine in [4, 5] {
        world.boot(machine);
    }
    world.until_live(6).await;
    assert_eq!(repair(&client, 1, CHAIN).await.summary.pieces, 1);
    assert_eq!(stored(&world), before);
}

/// A whole file of other bytes has the name of a piece, beside its receipt or without one.
#[tokio::test(start_paused = true)]
async fn a_piece_of_other_bytes_is_moved_to_quarantine_and_made_again() {
    for has_receipt in [true, false] {
        let (mut world, client) = archived_world(6, LEN / 2).await;
        let before = stored(&world);
        let (machine, path) = world.files_of_step(1, "00000000/piece-").await.remove(2);
        if has_receipt {
            world.machines[machine].disk.remove(&path).unwrap();
        } else {
            empty_disks(&mut world, &[machine]).await;
        }
        let store = world.nodes[&machine].store();
        let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
        let stripe = StripeId { shard: shown.shards[0].0.shard, index: 0 };
        let StripeState::Archived { attempt, code, .. } = shown.shards[0].1.stripe(0).unwrap()
        else {
            panic!("the stripe is archived");
        };
        let name = path.rsplit('/').next().unwrap();
        let piece = name["piece-".len()..].split('-').next().unwrap().parse().unwrap();
        let len_bytes = BLOCK;
        let spec = PieceSpec { stripe, piece, attempt, code: code.0, layout: 1, len_bytes };
        let mut writer = store.create_piece_writer(spec).unwrap();
        for grain in 0..len_bytes / 65_536 {
            writer.write_grain(grain, &[7; 65_536]).unwrap();
        }
        writer.finish(&mut |_, _| ()).unwrap();
        let made = repair(&client, 1, CHAIN).await;
        assert_eq!((made.summary.pieces, made.notes), (1, vec![]));
        assert_eq!(stored(&world), before);
        assert_eq!(world.quarantined(".pc"), [machine]);
        assert_whole(&client, 1, 2).await;
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_come_back_on_their_node_or_on_a_spare() {
    let (mut world, client) = saved_world(8, LEN).await;
    let before = stored(&world);
    empty_disks(&mut world, &[2]).await;
    let lost = |machine: usize| {
        let of_machine = move |key: &&(usize, String)| key.0 == machine && key.1.ends_with(".rep");
        before.keys().filter(of_machine).count() as u64
    };
    assert!(lost(2) > 0 && lost(3) > 0);
    let made = repair(&client, 1, CHAIN).await;
    assert_eq!((made.summary.replicas, made.notes), (lost(2), vec![]));
    assert_eq!(stored(&world), before);
    assert_whole(&client, 1, 1).await;

    world.kill(3).await;
    world.until_live(7).await;
    let made = repair(&client, 1, CHAIN).await;
    assert_eq!((made.summary.replicas, made.notes), (lost(3), vec![]));
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(1)));
    // It may be archived on the new places, and the old node is told so when it is back.
    archive(&client, 1, PlanChoice::Chain).await;
    world.boot(3);
    world.until_live(8).await;
    archive(&client, 1, PlanChoice::Chain).await;
    assert_whole(&client, 1, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_replica_without_a_spare_is_reported_and_keeps_no_other_from_being_made() {
    let (mut world, client) = saved_world(6, LEN / 2).await;
    let before = stored(&world);
    empty_disks(&mut world, &[2]).await;
    world.kill(5).await;
    world.until_live(5).await;
    let report = repair(&client, 1, CHAIN).await;
    assert!(report.summary.replicas > 0);
    assert!(
        report.notes.iter().any(|note| note.contains("no spare is live")),
        "{:?}",
        report.notes
    );
    world.boot(5);
    world.until_live(6).await;
    assert_eq!(repair(&client, 1, CHAIN).await.notes, [""; 0]);
    assert_eq!(stored(&world), before);
}

#[tokio::test(start_paused = true)]
async fn one_repair_works_at_a_time_and_an_archiving_comes_first() {
    let (mut world, client) = archived_world(8, LEN).await;
    let before = stored(&world);
    empty_disks(&mut world, &[1]).await;
    let (job, mut quiet) = (job(), |_: &_| ());
    let mut also_quiet = quiet;
    let (first, second) = tokio::join!(
        client.repair(&job, Some(Step(1)), CHAIN, &[], &mut quiet),
        client.repair(&job, Some(Step(1)), CHAIN, &[], &mut also_quiet),
    );
    assert!(first.is_ok() || second.is_ok());
    for result in [first, second] {
        if let Err(error) = result {
            assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
        }
    }
    assert_eq!(stored(&world), before);

    // An archiving that is asked for while a repair works gets the shard.
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    empty_disks(&mut world, &[2]).await;
    world.slow(2, Duration::from_millis(500));
    world.requests.listen();
    let archiving = async {
        while world.requests.of::<CopyReplica>().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        client.archive(&job, Some(Step(2)), options(PlanChoice::Chain), &mut |_| ()).await
    };
    let one_by_one = RepairOptions { parallel: 1, ..CHAIN };
    let mut quiet = |_: &_| ();
    let (repaired, archived) =
        tokio::join!(client.repair(&job, Some(Step(2)), one_by_one, &[], &mut quiet), archiving);
    archived.unwrap();
    let error = repaired.unwrap_err();
    assert!(error.to_string().contains("an archiving of job/2 was requested"), "{error}");
    assert_eq!(repair(&client, 2, CHAIN).await.notes, [""; 0]);
    assert_whole(&client, 2, 2).await;
}

/// A target that proves another piece than the archived one, and one that proves nothing.
#[tokio::test(start_paused = true)]
async fn a_piece_that_is_not_the_archived_one_gets_no_receipt() {
    let lies: [(Lie, &str); 3] = [
        (|report| report.proofs.iter_mut().for_each(|proof| proof.root[0] ^= 1), "the hash in"),
        (|report| report.proofs.iter_mut().for_each(|p| p.fingerprints.clear()), "match the code"),
        (|report| report.proofs.clear(), "which no node proved"),
    ];
    for (lie, named) in lies {
        let (mut world, client) = archived_world(6, LEN / 2).await;
        empty_disks(&mut world, &[2]).await;
        let _liar = world.between(2, Liar(lie)).await;
        world.until_live(6).await;
        let report = repair(&client, 1, CHAIN).await;
        assert_eq!((report.summary.pieces, report.summary.unrepaired), (0, 1));
        assert!(report.notes[0].contains(named), "{:?}", report.notes);
        let receipts = world.files_of_step(1, "00000000/receipt-").await;
        assert!(receipts.iter().all(|(machine, _)| *machine != 2), "{receipts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn leaves_are_taken_from_an_owner_and_never_replaced_by_others() {
    let (world, client) = saved_world(6, LEN).await;
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    let shard = shown.shards[0].0.shard;
    let (node, to) = (world.voice(Role::Node, "boss"), world.node_address(2));
    let get = GetRecord { shard, record: RecordName::Leaves };
    let kept = node.ask(&to, &get).await.unwrap().unwrap();
    let coordinator = NodeId(1);
    let owner = |counter| Generation { counter, ..shown.shards[0].1.generation };
    let put = |bytes: &[u8], counter| PutLeaves {
        bytes: bytes.to_vec(),
        owner: owner(counter),
        coordinator,
    };
    node.ask(&to, &put(&kept, 50)).await.unwrap();
    let older = node.ask(&to, &put(&kept, 49)).await.unwrap_err();
    assert_eq!(older.kind(), ErrorKind::Fenced, "{older}");
    let mut other = Leaves::parse(&kept).unwrap();
    other.hashes[0][0] ^= 1;
    let unfit = node.ask(&to, &put(&other.to_bytes().unwrap(), 50)).await.unwrap_err();
    assert!(unfit.to_string().contains("leaves"), "{unfit}");
    // Leaves of another commit fit the root that is in them.
    other.root.stripes_root = stripes_root(&other.hashes);
    let replaced = node.ask(&to, &put(&other.to_bytes().unwrap(), 50)).await;
    assert!(replaced.is_err(), "{replaced:?}");
    assert_eq!(node.ask(&to, &get).await.unwrap().unwrap(), kept);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_repaired_is_said() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let error = client.repair(&job(), Some(Step(7)), CHAIN, &[], &mut |_| ()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

/// An archive request that waits for drops on a dead node is run again and again.
#[tokio::test(start_paused = true)]
async fn an_archiving_that_only_completes_drops_ends_no_repair() {
    let (mut world, client) = saved_world(8, LEN).await;
    world.kill(3).await;
    let report =
        client.archive(&job(), None, options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    assert!(report.undropped > 0);
    let losing = world.files(|path| path.ends_with(".pc"))[0].0;
    world.kill(losing).await;
    world.replace(losing);
    world.boot(losing);
    world.until_live(7).await;
    world.until_caught_up().await;
    for source in (1..=8).filter(|&machine| machine != 3) {
        world.slow(source, Duration::from_millis(500));
    }

    let key = archive_request_key(job().at(Step(1)));
    let waits = || world.record::<ArchiveRequest>(&key).is_some_and(|it| it.waiting.is_some());
    world.until("the request waits", waits).await;
    world.requests.listen();
    let archiving = async {
        while world.requests.of::<RunPart>().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(waits(), "the archiving begins during the repair");
        let chain = options(PlanChoice::Chain);
        let report = client.archive(&job(), None, chain, &mut |_| ()).await.unwrap();
        (report, Instant::now())
    };
    let repairing = async {
        let report = repair(&client, 1, CHAIN).await;
        (report, Instant::now())
    };
    let ((repaired, repaired_at), (archived, archived_at)) = tokio::join!(repairing, archiving);
    assert!(archived_at < repaired_at, "the archiving does not wait for the repair");
    assert!(repaired.summary.pieces > 0);
    assert_eq!((archived.stripes, archived.undropped), (report.stripes, report.undropped));
    world.boot(3);
    world.until("the drops", || world.catalogue_keys("a/").is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn a_damaged_fence_is_written_again_and_still_refuses_earlier_owners() {
    let (mut world, client) = archived_world(6, LEN).await;
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    let (root, state) = &shown.shards[0];
    let fence = format!("shards/{}/fence", root.shard);
    let (node, to) = (world.voice(Role::Node, "boss"), world.node_address(2));
    let get = GetRecord { shard: root.shard, record: RecordName::Leaves };
    let bytes = node.ask(&to, &get).await.unwrap().unwrap();
    let put = |counter| PutLeaves {
        bytes: bytes.clone(),
        owner: Generation { counter, ..state.generation },
        coordinator: NodeId(1),
    };
    let newest = state.generation.counter;
    for damaged in [&b""[..], b"no fence"] {
        world.kill(2).await;
        let disk = &world.machines[2].disk;
        disk.set_file_len(&fence, 0).unwrap();
        disk.open(&fence).unwrap().write_at(damaged, 0).unwrap();
        world.boot(2);
        world.until_live(6).await;
        let older = node.ask(&to, &put(newest - 1)).await.unwrap_err();
        assert_eq!(older.kind(), ErrorKind::Fenced, "{older}");
        node.ask(&to, &put(newest)).await.unwrap();
    }
    empty_disks(&mut world, &[1]).await;
    repair(&client, 1, CHAIN).await;
    assert_whole(&client, 1, 2).await;
}
