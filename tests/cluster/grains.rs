//! Restores from damaged files use exactly the good grains. A reference implementation that judges
//! grain by grain says what is recoverable, and exactly that must be restored (docs/semantics.md,
//! 6, *Damage*).

use std::collections::{BTreeMap, BTreeSet};

use rapidraid::client::{Client, SaveOptions};
use rapidraid::code::{Code, reconstruct, table};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::file::{FileKey, FileName};
use rapidraid::id::{Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::Disk;
use rapidraid::units::GRAIN_BYTES;
use rapidraid::wire::calls::PlanChoice;

use world::runs::number;
use world::{World, content, job, options, quiet, read_file, restore, shard};

const N: usize = 6;
const K: usize = 4;
/// Number of seeds in the test suite. `RAPIDRAID_GRAIN_SEEDS=2000` runs more.
const SEEDS: u64 = 120;
/// Number of seeds per cluster.
const PER_WORLD: u64 = 20;
/// Maximum number of grains in a block.
const MAX_GRAINS: u64 = 5;

/// A file of the stripe, with its machine.
#[derive(Debug, Clone)]
struct Held {
    machine: usize,
    path: String,
    key: FileKey,
    len_bytes: u64,
}

/// Damages a file in one place and removes the damaged grains from `good`. Returns a description of
/// the damage.
fn strike(world: &World, draw: &SeededEntropy, file: &Held, good: &mut BTreeSet<u64>) -> String {
    let disk = &world.machines[file.machine].disk;
    let file_bytes = disk.open(&file.path).unwrap().len_bytes().unwrap();
    let flip = |byte: u64| disk.flip_bit(&file.path, 8 * byte + draw.below(8)).unwrap();
    match draw.below(7) {
        // A sector anywhere in the file: data, table, header or trailer.
        6 if file_bytes > 0 => {
            let byte = draw.below(file_bytes);
            disk.make_sector_unreadable(&file.path, byte).unwrap();
            let first = byte / 512 * 512;
            if first < file.len_bytes {
                good.remove(&(first / GRAIN_BYTES));
            }
            format!("sector of byte {byte}")
        }
        // A byte after the data: table, header or trailer.
        0 if file_bytes > file.len_bytes => {
            let byte = file.len_bytes + draw.below(file_bytes - file.len_bytes);
            flip(byte);
            format!("byte {byte}, behind the data")
        }
        1 => {
            let cut = draw.below(file_bytes);
            disk.set_file_len(&file.path, cut).unwrap();
            good.retain(|grain| file.len_bytes.min((grain + 1) * GRAIN_BYTES) <= cut);
            format!("cut at {cut}")
        }
        _ if file_bytes >= file.len_bytes => {
            let byte = draw.below(file.len_bytes);
            flip(byte);
            good.remove(&(byte / GRAIN_BYTES));
            format!("byte {byte}")
        }
        _ => "nothing".to_owned(),
    }
}

/// Returns the files of stripe 0 of a step.
async fn files(world: &World, client: &Client, step: u64) -> Vec<Held> {
    let shown = client.show_step(&job(), Some(Step(step))).await.unwrap();
    let stripe = StripeId { shard: shown.shards[0].0.shard, index: 0 };
    let folder = format!("shards/{}/00000000/", stripe.shard);
    let mut held = Vec::new();
    for (machine, path) in world.files(|path| path.starts_with(&folder)) {
        let Ok(name) = path[folder.len()..].parse::<FileName>() else { continue };
        let key = FileKey { stripe, name };
        let info = world.nodes[&machine].store().open_undamaged_file(key).unwrap().index_entry();
        held.push(Held { machine, path, key, len_bytes: info.len_bytes });
    }
    held
}

/// Returns whether every grain of every block can be computed from the good grains.
fn is_recoverable(held: &[Held], good: &[BTreeSet<u64>], grains: &[u64; K]) -> bool {
    let code = Code::Chain(table::find(N, K).unwrap().clone());
    (0..*grains.iter().max().unwrap()).all(|grain| {
        let has = |at: usize| good[at].contains(&grain);
        let (mut blocks, mut pieces) = (BTreeMap::<usize, bool>::new(), Vec::new());
        for (at, file) in held.iter().enumerate().filter(|(at, _)| has(*at)) {
            match file.key.name {
                FileName::Replica { block } => drop(blocks.insert(block.into(), has(at))),
                FileName::Piece { piece, .. } => pieces.push(usize::from(piece)),
            }
        }
        let wanted = (0..K).filter(|&block| grains[block] > grain && !blocks.contains_key(&block));
        let wanted: Vec<usize> = wanted.collect();
        pieces.sort_unstable();
        wanted.is_empty() || reconstruct(&code, &pieces, &wanted).is_ok()
    })
}

async fn play(world: &mut World, seed: u64) -> bool {
    let draw = SeededEntropy::new(seed);
    let client = world.client();
    // One stripe: three full blocks and a shorter last one.
    let block = GRAIN_BYTES * (1 + draw.below(MAX_GRAINS));
    let len = 3 * block + 1 + draw.below(block);
    let bytes = content(len as usize, seed);
    let named = vec![shard("weights", &bytes)];
    let (job, how) = (job(), SaveOptions::default());
    client.save(&job, Step(seed), named, how, quiet()).await.unwrap();
    let is_archived = draw.below(2) == 0;
    if is_archived {
        let chain = options(PlanChoice::Chain);
        client.archive(&job, Some(Step(seed)), chain, &mut |_| ()).await.unwrap();
    }
    let held = files(world, &client, seed).await;
    let count = |len: u64| len.div_ceil(GRAIN_BYTES);
    let mut good: Vec<BTreeSet<u64>> =
        held.iter().map(|file| (0..count(file.len_bytes)).collect()).collect();
    let shown = client.show_step(&job, Some(Step(seed))).await.unwrap();
    let cut = shown.shards[0].0.geometry().unwrap().stripe(0).unwrap();
    let grains: [u64; K] = std::array::from_fn(|block| count(cut.block_len(block as u8)));
    let mut told = Vec::new();
    for _ in 0..1 + draw.below(N as u64) {
        let at = draw.below(held.len() as u64) as usize;
        for _ in 0..1 + draw.below(10) {
            told.push(format!(
                "{}: {}",
                held[at].path,
                strike(world, &draw, &held[at], &mut good[at])
            ));
        }
        match draw.below(3) {
            // The node has already found the damage.
            0 => drop(
                world.nodes[&held[at].machine].store().check_and_note_damage(held[at].key).unwrap(),
            ),
            1 => {
                world.kill(held[at].machine).await;
                world.boot(held[at].machine);
            }
            _ => {}
        }
    }
    world.until_live(N).await;
    let expected = is_recoverable(&held, &good, &grains);
    match restore(&client, seed).await {
        Ok((out, _)) => {
            assert!(read_file(&*out, "weights") == bytes, "seed {seed}");
            assert!(expected, "seed {seed}: restored from nothing? {told:?}");
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Lost, "seed {seed}: {error}");
            assert!(!expected, "seed {seed}: {error}: {told:#?}");
        }
    }
    expected
}

#[tokio::test(start_paused = true)]
async fn exactly_what_is_recoverable_is_restored() {
    let seeds = number("RAPIDRAID_GRAIN_SEEDS").unwrap_or(SEEDS);
    let (mut restored, mut lost) = (0, 0);
    for first in (0..seeds).step_by(PER_WORLD as usize) {
        let block = GRAIN_BYTES * MAX_GRAINS;
        let mut world = World::start(N, &[(N as u8, K as u8)], block).await;
        for seed in first..seeds.min(first + PER_WORLD) {
            match play(&mut world, seed).await {
                true => restored += 1,
                false => lost += 1,
            }
        }
    }
    println!("{restored} of {seeds} were recoverable");
    assert!(restored > 0 && lost > 0);
}
