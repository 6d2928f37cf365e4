//! `verify`: the nodes check all their data of a checkpoint, and the report says how many more
//! nodes may be lost (docs/semantics.md, 6, *Verify*).

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use rapidraid::client::{Client, Fault, HeldItem, Problem, VerifyReport};
use rapidraid::code::table;
use rapidraid::id::{Step, StripeId};
use rapidraid::net::Role;
use rapidraid::store::{BlockSpec, Disk};
use rapidraid::wire::calls::{PlanChoice, VerifyFile};

use world::{World, content, job, options, quiet, read_file, restore, restore_error, save};

const BLOCK: u64 = 128 << 10;
/// Two stripes of four blocks; the last block is shorter.
const LEN: usize = 8 * BLOCK as usize - 70_000;

async fn verify(client: &Client, step: u64) -> VerifyReport {
    client.verify(&job(), Some(Step(step)), quiet()).await.unwrap()
}

async fn archive(client: &Client, step: u64) {
    client
        .archive(&job(), Some(Step(step)), options(PlanChoice::Chain), &mut |_| ())
        .await
        .unwrap();
}

fn flip(world: &World, (machine, path): &(usize, String), byte: u64) {
    world.machines[*machine].disk.flip_bit(path, 8 * byte).unwrap();
}

/// Returns every stored file with its bytes, except for damage notes.
fn stored(world: &World) -> BTreeSet<(usize, String, Vec<u8>)> {
    let files = world.files(|path| path.starts_with("shards/") && !path.contains("/damage-"));
    let read = |(machine, path): (usize, String)| {
        let bytes = read_file(&*world.machines[machine].disk, &path);
        (machine, path, bytes)
    };
    files.into_iter().map(read).collect()
}

fn found(report: &VerifyReport) -> Vec<(String, Option<u32>, HeldItem, Problem)> {
    let of = |fault: &Fault| (fault.node.clone(), fault.stripe, fault.held, fault.wrong);
    report.faults.iter().map(of).collect()
}

fn name(world: &World, machine: usize) -> String {
    world.machines[machine].name.to_string()
}

#[tokio::test(start_paused = true)]
async fn what_is_whole_is_found_whole_in_every_state() {
    let world = World::start(8, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 1);
    save(&client, 1, &[("weights", &bytes), ("empty", &Bytes::new())]).await;
    let report = verify(&client, 1).await;
    assert_eq!((found(&report), report.survives), (vec![], Some(1)));
    // Eight blocks with two replicas each; leaves and marks of two shards on eight nodes, and
    // records of two stripes on six.
    assert_eq!((report.files, report.records), (16, 2 * 2 * 8 + 2 * 6));
    assert_eq!((report.stripes, report.shards, report.nodes.len()), (2, 2, 8));
    assert_eq!(report.file_bytes, 2 * LEN as u64);
    archive(&client, 1).await;
    let report = verify(&client, 1).await;
    assert_eq!((found(&report), report.survives), (vec![], Some(2)));
    assert_eq!((report.files, report.away), (12, vec![]));
    // A classical code leaves replicas where they are.
    save(&client, 2, &[("weights", &bytes)]).await;
    let star = options(PlanChoice::BestStar);
    client.archive(&job(), Some(Step(2)), star, &mut |_| ()).await.unwrap();
    let report = verify(&client, 2).await;
    assert_eq!((found(&report), report.survives), (vec![], Some(2)));
    world.assert_idle().await;
}

/// The recipe: damage one byte in each of two of the six pieces. From then on every copy of the
/// rest is needed.
#[tokio::test(start_paused = true)]
async fn rotten_pieces_are_named_and_the_margin_is_told() {
    let mut world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN / 2, 1);
    save(&client, 1, &[("weights", &bytes)]).await;
    archive(&client, 1).await;
    let pieces = world.files_of_step(1, "00000000/piece-").await;
    assert_eq!(pieces.len(), 6);
    flip(&world, &pieces[3], 100);
    flip(&world, &pieces[4], 70_000);
    flip(&world, &pieces[4], 900);
    let before = stored(&world);
    let report = verify(&client, 1).await;
    let named: BTreeSet<_> = found(&report)
        .into_iter()
        .map(|(node, stripe, _, wrong)| (node, stripe, format!("{wrong:?}")))
        .collect();
    let expected = [(3, "Grains(1)"), (4, "Grains(2)")]
        .map(|(at, wrong)| (name(&world, pieces[at].0), Some(0), wrong.to_owned()));
    assert_eq!(named, expected.into());
    assert_eq!((report.fault_count, report.survives), (2, Some(0)));
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(stored(&world) == before, "verify changed a file");
    // The nodes report the damage from now on.
    for (at, _) in &pieces[3..5] {
        let status = client.status().await.unwrap();
        let of = status.nodes.iter().find(|node| node.view.node.name == world.machines[*at].name);
        let notes = of.unwrap().held.as_ref().unwrap().notes.join("\n");
        assert!(notes.contains("1 piece is damaged and not counted"), "{notes}");
    }
    // One more loss makes the step unreadable, and verify reports that too.
    world.kill(pieces[0].0).await;
    let report = verify(&client, 1).await;
    assert_eq!(report.survives, None);
    assert_eq!(report.away.len(), 1);
    assert_eq!(report.away[0].node, name(&world, pieces[0].0));
    restore_error(&client, 1).await;
}

#[tokio::test(start_paused = true)]
async fn damaged_and_missing_records_are_named() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN / 2, 1);
    save(&client, 1, &[("weights", &bytes)]).await;
    archive(&client, 1).await;
    let kinds = [
        ("leaves", HeldItem::Leaves),
        ("commit", HeldItem::Mark),
        ("00000000/record", HeldItem::Record),
        ("00000000/receipt-", HeldItem::Receipt),
    ];
    let mut expected = BTreeSet::new();
    for (turn, (below, held)) in kinds.into_iter().enumerate() {
        let copies = world.files_of_step(1, below).await;
        assert_eq!(copies.len(), 6, "{below}");
        let stripe = below.contains('/').then_some(0);
        let (damaged, missing) = (&copies[turn], &copies[5 - turn]);
        flip(&world, damaged, 40);
        world.machines[missing.0].disk.remove(&missing.1).unwrap();
        for (at, wrong) in [(damaged.0, Problem::Damaged), (missing.0, Problem::Missing)] {
            expected.insert((name(&world, at), stripe, held.to_string(), wrong.to_string()));
        }
    }
    let report = verify(&client, 1).await;
    let (tolerated, expected): (BTreeSet<_>, BTreeSet<_>) = expected
        .into_iter()
        .partition(|(_, _, held, wrong)| held != "receipt" && wrong == "missing");
    let words = |faults: &[Fault]| -> BTreeSet<_> {
        let of = |f: &Fault| (f.node.clone(), f.stripe, f.held.to_string(), f.wrong.to_string());
        faults.iter().map(of).collect()
    };
    assert_eq!(words(&report.faults), expected);
    assert_eq!(words(&report.lacking), tolerated, "the commit asks for three copies of each");
    assert_eq!(report.survives, Some(2), "four copies of each record are left");
    let status = client.status().await.unwrap();
    let notes: Vec<String> =
        status.nodes.iter().flat_map(|node| node.held.clone().unwrap().notes).collect();
    let damaged = notes.iter().filter(|note| note.contains("record is damaged: ")).count();
    assert_eq!(damaged, 4, "{notes:?}");
    // The number of copies of a record limits the margin, even if all pieces are good.
    let copies = world.files_of_step(1, "00000000/record").await;
    for (machine, path) in &copies[1..] {
        let _ = world.machines[*machine].disk.remove(path);
    }
    let left = verify(&client, 1).await;
    assert_eq!(left.survives, Some(0));
    let missing =
        |fault: &&Fault| (fault.held, fault.wrong) == (HeldItem::Record, Problem::Missing);
    assert_eq!(left.faults.iter().filter(missing).count(), 5, "too few are left");
    world.machines[copies[0].0].disk.remove(&copies[0].1).unwrap();
    assert_eq!(verify(&client, 1).await.survives, None);
}

#[tokio::test(start_paused = true)]
async fn grains_decide_what_is_lost_and_mending_makes_replicas_good() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 1);
    save(&client, 1, &[("weights", &bytes)]).await;
    let block = world.files_of_step(1, "00000001/block-01").await;
    assert_eq!(block.len(), 2);
    flip(&world, &block[0], 5);
    flip(&world, &block[1], 70_000);
    let before = stored(&world);
    let report = verify(&client, 1).await;
    assert_eq!((report.fault_count, report.survives), (2, Some(0)), "each grain has one copy");
    assert_eq!(report.weakest, Some(("weights".parse().unwrap(), 1)));
    assert!(stored(&world) == before, "verify changed a file");
    let report = client.verify_and_mend(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.fault_count, report.survives), (0, Some(1)), "{:?}", found(&report));
    assert_eq!(report.mended.len(), 2);
    // An unreadable sector, and a byte of the tail that is good only in the page cache.
    let sectors = world.files_of_step(1, "00000001/block-02").await;
    let disk = |at: usize| &world.machines[sectors[at].0].disk;
    disk(0).make_sector_unreadable(&sectors[0].1, 3).unwrap();
    let len = disk(1).open(&sectors[1].1).unwrap().len_bytes().unwrap();
    disk(1).flip_bit_below_page_cache(&sectors[1].1, 8 * (len - 20)).unwrap();
    let report = verify(&client, 1).await;
    let wrong: BTreeSet<String> = report.faults.iter().map(|f| f.wrong.to_string()).collect();
    assert_eq!(wrong, ["1 grain damaged", "damaged"].map(str::to_owned).into());
    let report = client.verify_and_mend(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.fault_count, report.mended.len()), (0, 2), "{:?}", report.faults);
    // A whole file with other bytes does not count as a replica.
    let other = world.files_of_step(1, "00000000/block-00").await.remove(0);
    let store = world.nodes[&other.0].store();
    world.machines[other.0].disk.remove(&other.1).unwrap();
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    let stripe = StripeId { shard: shown.shards[0].0.shard, index: 0 };
    let mut writer = store
        .create_block_writer(BlockSpec { stripe, block: 0, layout: 1, len_bytes: BLOCK }, None)
        .unwrap();
    writer.write(&vec![1; BLOCK as usize]).unwrap();
    writer.finish(None).unwrap();
    let report = verify(&client, 1).await;
    let expected = vec![(name(&world, other.0), Some(0), HeldItem::Replica(0), Problem::Other)];
    assert_eq!((found(&report), report.survives), (expected, Some(0)));
    // A grain without a good copy is lost and cannot be mended.
    flip(&world, &block[0], 5);
    flip(&world, &block[1], 6);
    let report = client.verify_and_mend(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.fault_count, report.survives), (3, None));
    assert_eq!(report.mended, vec![]);
    world.assert_idle().await;
}

/// A missing file, a file of other bytes under its name, and a truncated file.
#[tokio::test(start_paused = true)]
async fn missing_and_foreign_files_are_named_and_stay_where_they_are() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 1);
    save(&client, 1, &[("weights", &bytes)]).await;
    archive(&client, 1).await;
    let pieces = world.files_of_step(1, "00000000/piece-").await;
    let disk = |at: usize| &world.machines[pieces[at].0].disk;
    disk(0).remove(&pieces[0].1).unwrap();
    disk(1).set_file_len(&pieces[1].1, 10).unwrap();
    // The file of another stripe.
    let other = world.files_of_step(1, "00000001/piece-").await;
    let of_same = other.iter().find(|(machine, _)| *machine == pieces[2].0).unwrap();
    disk(2).rename(&of_same.1, &pieces[2].1).unwrap();
    let before = stored(&world);
    let report = verify(&client, 1).await;
    let mut wrong: Vec<String> = found(&report)
        .into_iter()
        .map(|(node, stripe, _, wrong)| format!("{node} {} {wrong}", stripe.unwrap()))
        .collect();
    wrong.sort();
    let mut expected = [
        format!("{} 0 missing", name(&world, pieces[0].0)),
        format!("{} 0 damaged", name(&world, pieces[1].0)),
        format!("{} 0 missing", name(&world, pieces[2].0)),
        format!("{} 1 missing", name(&world, pieces[2].0)),
    ];
    expected.sort();
    assert_eq!(wrong, expected);
    assert_eq!(report.survives, None, "three pieces of stripe 0 are left");
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(stored(&world) == before, "verify moved a file");
}

/// No receipt is left. The report names every damaged receipt; the pieces still count.
#[tokio::test(start_paused = true)]
async fn a_stripe_without_receipts_is_not_whole() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN / 2, 1))]).await;
    archive(&client, 1).await;
    for receipt in world.files_of_step(1, "00000000/receipt-").await {
        flip(&world, &receipt, 40);
    }
    let report = verify(&client, 1).await;
    let damaged =
        |fault: &Fault| (fault.held, fault.wrong) == (HeldItem::Receipt, Problem::Damaged);
    assert!(report.faults.iter().all(damaged), "{:?}", report.faults);
    assert_eq!((report.fault_count, report.survives), (6, Some(2)));
}

/// A drop that a node missed leaves replicas. They do not count for the margin, their damage is no
/// fault, and the node keeps them while too few good pieces exist.
#[tokio::test(start_paused = true)]
async fn replicas_that_wait_for_their_drop_stay_while_pieces_are_missing() {
    let mut world = World::start(8, &[(6, 4)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN / 2, 1))]).await;
    let replicas = world.files_of_step(1, "00000000/block-").await;
    let victim = replicas.iter().map(|(machine, _)| *machine).find(|machine| *machine > 1).unwrap();
    world.kill(victim).await;
    archive(&client, 1).await;
    let report = verify(&client, 1).await;
    assert_eq!((report.fault_count, report.survives), (0, Some(2)), "{:?}", report.faults);
    let pieces = world.files_of_step(1, "00000000/piece-").await;
    let others: Vec<_> = pieces.iter().filter(|(machine, _)| *machine > 0).collect();
    for piece in &others[1..4] {
        flip(&world, piece, 10);
    }
    let report = verify(&client, 1).await;
    assert_eq!((report.fault_count, report.survives), (3, None), "three pieces are left");
    // The holder of a good piece and its receipt has missed the drop as well.
    let holder = others[0].0;
    world.kill(holder).await;
    let missed: Vec<_> = replicas.iter().filter(|(machine, _)| *machine == victim).collect();
    for (machine, path) in &missed {
        let bytes = read_file(&*world.machines[*machine].disk, path);
        world.machines[holder].disk.create_new(path).unwrap().write_at(&bytes, 0).unwrap();
    }
    let at_holder = |path: &str| (holder, path.to_owned());
    flip(&world, &at_holder(&missed[0].1), 10);
    world.boot(holder);
    world.until_live(7).await;
    client.verify_and_mend(&job(), Some(Step(1)), quiet()).await.unwrap();
    let stripe = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].0.shard;
    let file = missed[0].1.rsplit('/').next().unwrap().parse().unwrap();
    let suspect = VerifyFile { stripe: StripeId { shard: stripe, index: 0 }, file };
    let voice = world.voice(Role::Client, "reader");
    assert!(voice.ask(&world.node_address(holder), &suspect).await.unwrap(), "it is damaged");
    tokio::time::sleep(Duration::from_secs(4000)).await;
    for (_, path) in &missed {
        let there = world.files(|found| found == path);
        assert!(there.contains(&at_holder(path)), "{path} was dropped");
    }
}

/// A node's failure to read its own disk is reported as its failure. An unanswered call is reported
/// as a missing node.
#[tokio::test(start_paused = true)]
async fn nodes_that_come_and_go_are_judged_by_what_they_say_last() {
    let mut world = World::start(7, &[(6, 4)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    archive(&client, 1).await;
    let pieces = world.files_of_step(1, "00000000/piece-").await;
    let gone = pieces.iter().map(|(machine, _)| *machine).find(|machine| *machine > 0).unwrap();
    let disk = world.machines[gone].disk.clone();
    disk.set_call_guard(|_| false);
    let report = verify(&client, 1).await;
    assert_eq!((report.away, report.fault_count, report.failures.len()), (vec![], 0, 2));
    assert!(report.failures.iter().all(|failure| failure.node == name(&world, gone)));
    assert_eq!(report.survives, Some(1));
    world.kill(gone).await;
    let report = verify(&client, 1).await;
    assert_eq!((report.away.len(), report.fault_count, report.survives), (1, 0, Some(1)));
    assert!(!report.nodes.contains(&world.machines[gone].name));
}

/// A restore succeeds while no more nodes are lost than the margin says, and fails with one more.
#[tokio::test(start_paused = true)]
async fn the_margin_is_what_restores_survive() {
    let code = table::find(8, 4).unwrap();
    for rotten in 0..3_usize {
        let mut world = World::start(8, &[(8, 4)], BLOCK).await;
        let bytes = content(LEN / 2, 1);
        save(&world.client(), 1, &[("weights", &bytes)]).await;
        archive(&world.client(), 1).await;
        let pieces = world.files_of_step(1, "00000000/piece-").await;
        pieces[..rotten].iter().for_each(|piece| flip(&world, piece, 9));
        let report = verify(&world.client(), 1).await;
        let margin = code.n() - code.k() - rotten;
        assert_eq!((report.survives, report.fault_count), (Some(margin), rotten as u64));
        let asked = pieces[7].0;
        for (at, piece) in pieces[rotten..7].iter().take(margin + 1).enumerate() {
            world.kill(piece.0).await;
            let client = world.client_of(asked);
            let report = verify(&client, 1).await;
            assert_eq!(report.survives, margin.checked_sub(at + 1), "{at}");
            assert_eq!(report.away.len(), at + 1);
            match restore(&client, 1).await {
                Ok((out, _)) => assert!(at < margin && read_file(&*out, "weights") == bytes),
                Err(error) => assert!(at == margin, "{error}"),
            }
        }
    }
}
