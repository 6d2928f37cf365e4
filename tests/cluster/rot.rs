//! Bytes that rot on disks are found, bypassed grain by grain, reported and mended. They never
//! become part of restored or archived data.

use std::time::Duration;

use bytes::Bytes;
use rapidraid::client::ArchiveReport;
use rapidraid::format::file::FileKey;
use rapidraid::id::{Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::store::Disk;
use rapidraid::wire::calls::{PlanChoice, VerifyFile};

use world::{World, content, job, options, read_file, restore, restore_error, save};

const BLOCK: u64 = 128 << 10;
/// Two stripes of four blocks; the last block is shorter.
const LEN: usize = 8 * BLOCK as usize - 70_000;

/// The damage to a file.
#[derive(Debug, Clone, Copy)]
enum Damage {
    /// One bit of the data.
    FirstBit,
    LastDataBit,
    /// One bit of the hashes after the data.
    Hashes,
    /// One bit of the trailer.
    LastBit,
    Truncated,
    Emptied,
    Gone,
}

const DAMAGES: [Damage; 7] = [
    Damage::FirstBit,
    Damage::LastDataBit,
    Damage::Hashes,
    Damage::LastBit,
    Damage::Truncated,
    Damage::Emptied,
    Damage::Gone,
];

impl Damage {
    fn strike(self, world: &World, (machine, path): &(usize, String)) {
        let disk = &world.machines[*machine].disk;
        let len = disk.open(path).unwrap().len_bytes().unwrap();
        match self {
            Damage::FirstBit => disk.flip_bit(path, 0).unwrap(),
            Damage::LastDataBit => disk.flip_bit(path, 8 * 58_000 + 5).unwrap(),
            Damage::Hashes => disk.flip_bit(path, 8 * (len - 250)).unwrap(),
            Damage::LastBit => disk.flip_bit(path, 8 * len - 1).unwrap(),
            Damage::Truncated => disk.set_file_len(path, len - 1).unwrap(),
            Damage::Emptied => disk.set_file_len(path, 0).unwrap(),
            Damage::Gone => disk.remove(path).unwrap(),
        }
    }

    fn is_gone(self) -> bool {
        matches!(self, Damage::Gone)
    }
}

/// Returns the key of the file at `shards/SHARD/INDEX/NAME`.
fn key_of(path: &str) -> FileKey {
    let parts: Vec<&str> = path.split('/').collect();
    let index = u32::from_str_radix(parts[2], 16).unwrap();
    let stripe = StripeId { shard: parts[1].parse().unwrap(), index };
    FileKey { stripe, name: parts[3].parse().unwrap() }
}

async fn archive(world: &World, step: u64, plan: PlanChoice) -> ArchiveReport {
    let client = world.client();
    client.archive(&job(), Some(Step(step)), options(plan), &mut |_| ()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_damaged_replica_is_found_by_restore_named_and_mended() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 1);
    for (round, damage) in (0..).zip(DAMAGES) {
        let mut named = 0;
        // A restore asks one of the two holders first. Damage each in turn.
        for holder in 0..2 {
            let step = 2 * round + holder as u64;
            save(&client, step, &[("weights", &bytes)]).await;
            let victim = world.files_of_step(step, "00000001/block-02").await.remove(holder);
            damage.strike(&world, &victim);
            let (out, report) = restore(&client, step).await.unwrap();
            assert!(read_file(&*out, "weights") == bytes, "{damage:?}");
            let node = world.machines[victim.0].name.as_str();
            let all_named = report.incidents.iter().all(|text| text.contains(node));
            assert!(report.incidents.len() < 2 && all_named, "{damage:?}: {:?}", report.incidents);
            if !report.incidents.is_empty() {
                named += 1;
                let key = key_of(&victim.1);
                let store = world.nodes[&victim.0].store().clone();
                let is_whole = || {
                    let is_clean =
                        store.open_undamaged_file(key).is_ok_and(|file| file.scrub().is_empty());
                    is_clean && !store.is_damaged(key)
                };
                if !damage.is_gone() {
                    world.until("the file mended", is_whole).await;
                }
                assert_eq!(is_whole(), !damage.is_gone());
                assert_eq!(store.totals().quarantined, 0, "{damage:?}");
            }
            world.assert_invariant(&client, step).await;
        }
        assert!(named >= 1, "{damage:?} was not noticed");
    }
    world.assert_idle().await;
}

/// A block has two damaged replicas, each with a grain that only the other one has. The node that
/// is told of its damage cannot mend it while the other node is away. It tries again by itself.
#[tokio::test(start_paused = true)]
async fn a_mend_that_failed_is_tried_again() {
    let mut world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 8);
    save(&client, 0, &[("weights", &bytes)]).await;
    let holders = world.files_of_step(0, "00000000/block-02").await;
    for ((machine, path), bit) in holders.iter().zip([0, 8 * 100_000]) {
        world.machines[*machine].disk.flip_bit(path, bit).unwrap();
    }
    let (told, away) =
        if holders[0].0 == 0 { (&holders[0], &holders[1]) } else { (&holders[1], &holders[0]) };
    world.kill(away.0).await;
    let store = world.nodes[&told.0].store().clone();
    let key = key_of(&told.1);
    let report = VerifyFile { stripe: key.stripe, file: key.name };
    let reader = world.voice(Role::Client, "reader");
    assert!(reader.ask(&world.node_address(told.0), &report).await.unwrap());
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(store.is_damaged(key), "one of its grains is on the node that is away");
    let returned = tokio::time::Instant::now();
    world.boot(away.0);
    world.until("the replica mended", || !store.is_damaged(key)).await;
    let minutes = returned.elapsed().as_secs() / 60;
    assert!(minutes < 10, "the hourly check came first: {minutes} minutes");
    let (out, _) = restore(&client, 0).await.unwrap();
    assert!(read_file(&*out, "weights") == bytes);
}

#[tokio::test(start_paused = true)]
async fn rotten_replicas_are_made_again_before_they_are_archived() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 2);
    for (step, damage) in (0..).zip(DAMAGES) {
        for (step, plan) in [(2 * step, PlanChoice::Chain), (2 * step + 1, PlanChoice::BestStar)] {
            save(&client, step, &[("weights", &bytes)]).await;
            // Two blocks of one stripe and one block of the other stripe, on three nodes.
            let victims = [
                world.files_of_step(step, "00000000/block-00").await.remove(0),
                world.files_of_step(step, "00000000/block-03").await.remove(1),
                world.files_of_step(step, "00000001/block-01").await.remove(1),
            ];
            victims.iter().for_each(|victim| damage.strike(&world, victim));
            let report = archive(&world, step, plan).await;
            assert_eq!((report.stripes, report.undropped), (2, 0), "{damage:?} {plan:?}");
            let held = world.assert_invariant(&client, step).await;
            assert_eq!(held.archived, 2);
            if plan == PlanChoice::Chain {
                assert_eq!((held.pieces, held.replicas), (12, 0), "{damage:?}");
            }
            let (out, report) = restore(&client, step).await.unwrap();
            assert!(read_file(&*out, "weights") == bytes, "{damage:?} {plan:?}");
            assert_eq!(report.incidents, Vec::<String>::new());
        }
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_block_whose_two_replicas_rotted_is_named_and_nothing_is_dropped() {
    for damages in [
        [Damage::FirstBit; 2],
        [Damage::Gone; 2],
        [Damage::Gone, Damage::LastDataBit],
        [Damage::FirstBit, Damage::Emptied],
    ] {
        for plan in [PlanChoice::Chain, PlanChoice::BestStar] {
            let world = World::start(6, &[(6, 4)], BLOCK).await;
            let client = world.client();
            let bytes = content(LEN, 3);
            save(&client, 1, &[("weights", &bytes)]).await;
            let victims = world.files_of_step(1, "00000000/block-02").await;
            assert_eq!(victims.len(), 2);
            for (victim, damage) in victims.iter().zip(damages) {
                damage.strike(&world, victim);
            }
            let others =
                |path: &str| path.ends_with(".rep") && !path.ends_with("00000000/block-02.rep");
            let before: Vec<_> = world.files(|path| others(path) && path.contains("/00000000/"));
            let ended = client.archive(&job(), None, options(plan), &mut |_| ()).await;
            let error = ended.unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Lost | ErrorKind::Corrupt),
                "{damages:?}: {error}"
            );
            let text = error.to_string();
            assert!(text.contains("no good replica of block 2"), "{damages:?} {plan:?}: {text}");
            let after: Vec<_> = world.files(|path| others(path) && path.contains("/00000000/"));
            assert_eq!(after, before, "{damages:?}");
            // The other stripe is still archived.
            let shown = client.show_step(&job(), None).await.unwrap();
            let states: Vec<String> =
                shown.shards[0].1.states().map(|state| format!("{state:?}")).collect();
            assert!(
                states[0].starts_with("Archiving") && states[1].starts_with("Archived"),
                "{states:?}"
            );
            let error = restore_error(&client, 1).await;
            assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
            assert!(error.to_string().contains("block 2"), "{error}");
            world.assert_idle().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_medium_that_spoils_what_it_syncs_archives_nothing_wrong() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 4);
    for step in 0..8 {
        save(&client, step, &[("weights", &bytes)]).await;
        for (index, machine) in world.machines.iter().enumerate().skip(1) {
            machine.disk.corrupt_sync_after((step + index as u64) % 4);
        }
        let report = archive(&world, step, PlanChoice::Chain).await;
        assert_eq!((report.stripes, report.undropped), (2, 0));
        // The invariant concerns data files. A record that is spoilt later is one of n copies.
        let held = world.assert_invariant(&client, step).await;
        assert_eq!((held.pieces, held.replicas), (12, 0), "step {step}");
        let (out, _) = restore(&client, step).await.unwrap();
        assert!(read_file(&*out, "weights") == bytes);
    }
    world.assert_idle().await;
}

/// Replaces the bytes of a file.
fn overwrite(world: &World, (machine, path): &(usize, String), bytes: &[u8]) {
    let disk = &world.machines[*machine].disk;
    disk.remove(path).unwrap();
    let file = disk.create_new(path).unwrap();
    file.write_at(bytes, 0).unwrap();
    file.sync().unwrap();
    let (folder, _) = path.rsplit_once('/').unwrap();
    disk.sync_dir(folder).unwrap();
}

async fn archived(world: &World, step: u64, bytes: &Bytes) {
    save(&world.client(), step, &[("weights", bytes)]).await;
    assert_eq!(archive(world, step, PlanChoice::Chain).await.undropped, 0);
}

#[tokio::test(start_paused = true)]
async fn rotten_pieces_are_left_out_and_reported() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 5);
    for (round, damage) in (0..).zip(DAMAGES) {
        let mut incidents = 0;
        for pair in 0..3 {
            let step = 3 * round + pair as u64;
            archived(&world, step, &bytes).await;
            let victims = &world.files_of_step(step, "00000000/piece-").await[2 * pair..][..2];
            victims.iter().for_each(|victim| damage.strike(&world, victim));
            let (out, report) = restore(&client, step).await.unwrap();
            assert!(read_file(&*out, "weights") == bytes, "{damage:?}");
            for text in &report.incidents {
                let nodes = victims.iter().map(|victim| world.machines[victim.0].name.as_str());
                assert!(nodes.into_iter().any(|node| text.contains(node)), "{text}");
                assert!(text.contains("piece-"), "{text}");
            }
            incidents += report.incidents.len();
            world.assert_invariant(&client, step).await;
        }
        // Four of the six pieces are read, so at least one piece of each damage is among them.
        assert!(incidents >= 2, "{damage:?}: {incidents}");
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn pieces_of_other_stripes_or_attempts_are_not_used() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 6);
    let foreign = content(LEN, 7);
    for pair in 0..3 {
        let (step, other) = (10 + pair as u64, 20 + pair as u64);
        archived(&world, step, &bytes).await;
        archived(&world, other, &foreign).await;
        let victims = world.files_of_step(step, "00000000/piece-").await[2 * pair..][..2].to_vec();
        for victim in &victims {
            // Use the file of the same piece: from the other save on the first node, from the other
            // stripe on the second.
            let (from, stripe) = if victim == &victims[0] { (other, 0) } else { (step, 1) };
            let number = &victim.1.rsplit('/').next().unwrap()[.."piece-00".len()];
            let source =
                world.files_of_step(from, &format!("{stripe:08x}/{number}")).await.remove(0);
            let strange = read_file(&*world.machines[source.0].disk, &source.1);
            overwrite(&world, victim, &strange);
        }
        let (out, report) = restore(&client, step).await.unwrap();
        assert!(read_file(&*out, "weights") == bytes);
        assert!(!report.incidents.is_empty() || pair > 0, "the first pieces of a chain are read");
        world.assert_invariant(&client, step).await;
    }
    // Pieces of an attempt that the catalogue does not name exist and are not read.
    save(&client, 1, &[("weights", &bytes)]).await;
    let stale = world.files_of_step(20, "00000000/piece-").await;
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    let shard = shown.shards[0].0.shard;
    for (machine, path) in stale {
        let name = path.rsplit('/').next().unwrap();
        let bytes = read_file(&*world.machines[machine].disk, &path);
        let to = format!("shards/{shard}/00000000/{name}");
        let disk = &world.machines[machine].disk;
        disk.create_new(&to).unwrap().write_at(&bytes, 0).unwrap();
    }
    assert_eq!(archive(&world, 1, PlanChoice::Chain).await.undropped, 0);
    let (out, report) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == bytes);
    assert_eq!(report.incidents, Vec::<String>::new());
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn more_rotten_pieces_than_the_code_bears_are_told_and_nothing_is_left() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    archived(&world, 1, &content(LEN, 8)).await;
    for victim in &world.files_of_step(1, "00000001/piece-").await[..3] {
        Damage::FirstBit.strike(&world, victim);
    }
    let error = restore_error(&client, 1).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn of_each_record_one_good_copy_is_enough() {
    let world = World::start(6, &[(6, 4)], BLOCK).await;
    let client = world.client();
    let bytes = content(LEN, 9);
    for (round, damage) in (0..).zip([
        Damage::FirstBit,
        Damage::LastBit,
        Damage::Truncated,
        Damage::Emptied,
        Damage::Gone,
    ]) {
        for kept in [0, 5] {
            let step = 2 * round + u64::from(kept == 0);
            archived(&world, step, &bytes).await;
            let shown = client.show_step(&job(), Some(Step(step))).await.unwrap();
            let folder = format!("shards/{}/", shown.shards[0].0.shard);
            for record in ["leaves", "00000000/record", "00000001/record", "00000000/receipt-"] {
                let copies = world.files(|path| path.starts_with(&format!("{folder}{record}")));
                assert_eq!(copies.len(), 6, "{record}");
                for (at, copy) in copies.iter().enumerate() {
                    if at != kept {
                        damage.strike(&world, copy);
                    }
                }
            }
            let (out, _) = restore(&client, step).await.unwrap();
            assert!(read_file(&*out, "weights") == bytes, "{damage:?}");
        }
    }
    // Without any receipt the pieces still decode, and the record checks the decoded bytes.
    archived(&world, 90, &bytes).await;
    for receipt in world.files_of_step(90, "00000000/receipt-").await {
        Damage::Emptied.strike(&world, &receipt);
    }
    let (out, _) = restore(&client, 90).await.unwrap();
    assert!(read_file(&*out, "weights") == bytes);
    // Without any record the bytes cannot be checked, so the restore is refused.
    archived(&world, 91, &bytes).await;
    for record in world.files_of_step(91, "00000001/record").await {
        Damage::LastBit.strike(&world, &record);
    }
    let error = restore_error(&client, 91).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(error.to_string().contains("its record"), "{error}");
    world.assert_idle().await;
}
