//! Plans in mid-run: one of their nodes falls silent, or their coordinator dies after the run
//! (docs/semantics.md, 4 and 7).

use std::collections::BTreeSet;
use std::time::Duration;

use rapidraid::client::Client;
use rapidraid::format::file::FileName;
use rapidraid::id::{Step, StripeId};
use rapidraid::plan::Output;
use rapidraid::store::FileInfo;
use rapidraid::wire::calls::{ArchiveEvent, ArchiveOptions, PlanChoice, ReservePart, RunPart};
use rapidraid::wire::order::OutputOrder;
use tokio::time::Instant;

use world::look::files_below;
use world::{World, content, job, options, read_file, restore, save};

const BLOCK: u64 = 1 << 20;
const LEN: usize = 2 * BLOCK as usize - 1000;

fn one_by_one() -> ArchiveOptions {
    ArchiveOptions { parallel: 1, ..options(PlanChoice::Chain) }
}

/// Returns the machines that are writing a piece now.
fn writing(world: &World) -> Vec<usize> {
    let has = |index: &usize| !files_below(&*world.machines[*index].disk, "tmp").is_empty();
    (1..world.machines.len()).filter(has).collect()
}

/// Returns the bytes of memory that plans hold on machine `index`.
fn plans(world: &World, index: usize) -> u64 {
    world.nodes[&index].used_memory_by_share()[0]
}

/// Returns whether the reserved plan lets this node send a stream to another node.
fn sends(world: &World, name: &str) -> bool {
    let is_stream = |output: &OutputOrder| matches!(output.output, Output::Stream(_));
    let mut reserved = world.requests.of::<ReservePart>().into_iter();
    let (_, _, ReservePart { order }) = reserved.find(|(_, to, _)| to == name).unwrap();
    order.hops.iter().flat_map(|hop| &hop.outputs).any(is_stream)
}

async fn step_by_step(reached: impl Fn() -> bool) {
    for _ in 0..100_000 {
        if reached() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("never came");
}

#[tokio::test(start_paused = true)]
async fn a_hop_that_waits_for_a_silent_node_ends_and_names_it() {
    let mut seen = 0;
    for silent in 1..=4 {
        let mut world = World::simulated(4, &[(4, 2)], BLOCK, 1).await;
        world.set_lag(2);
        let client = world.client_of(0);
        let bytes = content(LEN, silent as u64);
        save(&client, 1, &[("weights", &bytes)]).await;
        world.requests.listen();
        let (asks, mut notes) = (world.client_of(0), Vec::new());
        let task = tokio::spawn(async move {
            let mut on_event = |event: &ArchiveEvent| {
                if let ArchiveEvent::Note(text) = event {
                    notes.push(text.clone());
                }
            };
            let ended = asks.archive(&job(), Some(Step(1)), one_by_one(), &mut on_event).await;
            (ended.map(drop), notes)
        });
        step_by_step(|| writing(&world).len() == 4).await;
        let name = format!("node{silent:02}");
        if !sends(&world, &name) {
            // Only the coordinator waits for the last node of a chain.
            continue;
        }
        seen += 1;
        world.mute(silent);
        let began = Instant::now();
        let others = || (1..=4).filter(|index| *index != silent);
        assert!(others().any(|index| plans(&world, index) > 0), "too late for the run");
        step_by_step(|| others().all(|index| plans(&world, index) == 0)).await;
        let lasted = began.elapsed();
        assert!((29..=31).contains(&lasted.as_secs()), "{lasted:?}");
        step_by_step(|| plans(&world, silent) == 0).await;
        assert!(began.elapsed().as_secs() <= 31, "the silent one's own part");

        let (ended, notes) = task.await.unwrap();
        let error = ended.unwrap_err();
        let waited = |text: &&String| text.contains("no progress for 30s: waiting for");
        let first = notes.iter().find(waited).unwrap_or_else(|| panic!("{notes:?}, {error}"));
        // The node may have been muted before it opened the stream. Then only the order tells which
        // node should have sent.
        let named = [format!("waiting for {name} to "), format!("behind {name}:")];
        assert!(named.iter().any(|words| first.contains(words)), "{first}");
        // By the next try the node's lease is over. No other node can take its place, and the
        // archiving names the node that it waits for.
        assert!(error.to_string().contains(&name), "{error}");
        world.kill(silent).await;
        world.boot(silent);
        until_archived(&world, &client, &bytes).await;
    }
    assert_eq!(seen, 3);
}

/// Waits until the only stripe of step 1 is archived. It must then have four pieces and no
/// replicas, and read as `bytes`.
async fn until_archived(world: &World, client: &Client, bytes: &[u8]) {
    let archived = || {
        world.files(|path| path.ends_with(".rep")).is_empty()
            && world.catalogue_keys("a/").is_empty()
    };
    world.until("the archiving", archived).await;
    let held = world.assert_invariant(client, 1).await;
    assert_eq!((held.archived, held.pieces, held.replicas), (1, 4, 0));
    let (out, _) = restore(client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == bytes);
    world.assert_idle().await;
}

/// Kills a coordinator when the first receipt is durable, and then, if `loses_a_piece`, removes a
/// piece. Returns how many parts of plans the nodes ran in total until another daemon has archived
/// the step.
async fn runs_with_a_takeover(loses_a_piece: bool) -> usize {
    let mut world = World::simulated(6, &[(4, 2)], BLOCK, 7).await;
    let client = world.client_of(0);
    let bytes = content(LEN, 7);
    save(&client, 1, &[("weights", &bytes)]).await;
    let holders: BTreeSet<usize> =
        world.files(|path| path.ends_with(".rep")).into_iter().map(|(index, _)| index).collect();
    let coordinator = (1..=6).find(|index| !holders.contains(index)).unwrap();
    world.set_lag(20);
    world.requests.listen();
    let asks = world.client_of(coordinator);
    let task = tokio::spawn(async move {
        asks.archive(&job(), Some(Step(1)), one_by_one(), &mut |_| ()).await.map(drop)
    });
    step_by_step(|| !world.files(|path| path.contains("receipt-")).is_empty()).await;
    world.kill(coordinator).await;
    task.await.unwrap().unwrap_err();
    assert!(world.files(|path| path.contains("receipt-")).len() < 4, "too late");
    if loses_a_piece {
        let (index, _) = world.files(|path| path.contains("receipt-")).remove(0);
        let shard = client.show_step(&job(), None).await.unwrap().shards[0].0.shard;
        let store = world.nodes[&index].store();
        let files = store.list_undamaged_files(StripeId { shard, index: 0 }).unwrap();
        let is_piece = |info: &&FileInfo| matches!(info.key().name, FileName::Piece { .. });
        assert!(store.remove_file(files.iter().find(is_piece).unwrap().key()).unwrap());
    }
    until_archived(&world, &client, &bytes).await;
    world.requests.of::<RunPart>().len()
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_owner_proved_is_computed_again_only_when_a_piece_is_gone() {
    assert_eq!(runs_with_a_takeover(false).await, 4);
    assert_eq!(runs_with_a_takeover(true).await, 8);
}
