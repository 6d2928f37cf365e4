//! Files that no record explains are never deleted, and `status` reports them (docs/semantics.md,
//! 5).

use std::time::Duration;

use rapidraid::client::{Client, SaveOptions};
use rapidraid::format::records::{CommitMark, Record, Saved, ShardRoot};
use rapidraid::id::{SaveId, ShardId, Step};
use rapidraid::net::Role;
use rapidraid::store::{Disk, RecordScope};
use rapidraid::wire::calls::RenewLease;

use world::raw::{block_call, finish_block};
use world::{CLUSTER, World, content, job, quiet, read_file, restore, save, shard};

use crate::rebuild::{lose_catalogue, rebuild_on, serves};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 5 * BLOCK as usize - 1000;

/// Returns the notes about a node in the answer of `status`.
async fn notes(world: &World, client: &Client, index: usize) -> Vec<String> {
    let status = client.status().await.unwrap();
    let name = &world.machines[index].name;
    let found = status.nodes.into_iter().find(|node| node.view.node.name == *name).unwrap();
    found.held.unwrap().notes
}

#[tokio::test(start_paused = true)]
async fn a_save_with_a_commit_mark_that_no_step_has_is_kept_and_named() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let unknown = SaveId([9; 12]);
    let scope = RecordScope::Shard(ShardId::new(unknown, 0));
    world.nodes[&2].store().put_record_file(scope, "commit", b"a mark").unwrap();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    // Long enough for the catalogue server to inspect all six nodes.
    tokio::time::sleep(10 * world.lease).await;
    let told = notes(&world, &client, 0).await;
    let is_told = |note: &String| {
        note.starts_with("1 save that no step has is kept")
            && note.contains(&unknown.to_string())
            && note.contains("which has a commit mark: a rebuild")
    };
    assert!(told.len() == 1 && is_told(&told[0]), "{told:?}");
    assert_eq!(notes(&world, &client, 2).await, Vec::<String>::new());
    assert_eq!(world.catalogue_keys("x/"), Vec::<String>::new());
    assert!(!world.files_of(unknown).is_empty(), "it is kept");
}

/// Saves step 1. Returns its save, and the scope of the commit mark that storage nodes have of it.
async fn save_first_step(world: &World) -> (SaveId, RecordScope) {
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    (shown.step.saved.save, RecordScope::Shard(shown.shards[0].0.shard))
}

fn has_commit_mark(world: &World, node: usize, scope: RecordScope) -> bool {
    world.nodes[&node].store().get_record_file(scope, "commit").unwrap().is_some()
}

/// A rebuild does not read the only node with a commit mark of a save. Then the step is saved again.
#[tokio::test(start_paused = true)]
async fn a_save_that_a_rebuild_missed_is_superseded_by_the_next_save_of_its_step() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let (missed, scope) = save_first_step(&world).await;
    let marked: Vec<usize> = (1..=6).filter(|node| has_commit_mark(&world, *node, scope)).collect();
    let (away, others) = marked.split_last().unwrap();
    for index in others {
        world.nodes[index].store().remove_record_file(scope, "commit").unwrap();
    }
    world.kill(*away).await;
    lose_catalogue(&mut world).await;
    let client = world.client_of(others[0]);
    let answer = rebuild_on(&client, others[0], false).await.unwrap();
    assert_eq!((answer.steps, answer.orphans), (0, 1), "{answer:?}");
    save(&client, 1, &[("weights", &content(LEN, 2))]).await;
    assert!(!world.files_of(missed).is_empty());
    world.boot(*away);
    world.until("the files are gone", || world.files_of(missed).is_empty()).await;
    world.until("it is forgotten", || world.catalogue_keys("x/").is_empty()).await;
    world.until("its removal ends", || world.checkpoint(1).removing.is_empty()).await;
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 2));
}

/// The only node that holds anything of a save is away during a rebuild.
#[tokio::test(start_paused = true)]
async fn a_save_that_a_returned_node_alone_holds_goes_only_if_its_step_was_saved_since() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    for step in [1, 3] {
        save(&world.client_of(1), step, &[("weights", &content(LEN, 1))]).await;
    }
    let shown = world.client_of(1).show_step(&job(), Some(Step(1))).await.unwrap();
    let (root, saved) = (shown.shards[0].0.clone(), shown.step.saved.clone());
    let mark_of = |save: SaveId, step: u64| {
        let shard = ShardId::new(save, 0);
        let root = ShardRoot { shard, save, step: Step(step), ..root.clone() };
        let saved = Saved { save, ..saved.clone() };
        (shard, CommitMark { cluster: CLUSTER, saved, root }.to_bytes().unwrap())
    };
    let saved_since = SaveId([7; 12]);
    // Step 2 has no other save, and the one of step 3 was committed in the same epoch.
    let kept = [SaveId([8; 12]), SaveId([9; 12])];
    for (save, step) in [(saved_since, 1), (kept[0], 2), (kept[1], 3)] {
        let (shard, mark) = mark_of(save, step);
        let scope = RecordScope::Shard(shard);
        world.nodes[&2].store().put_record_file(scope, "commit", &mark).unwrap();
    }
    world.kill(2).await;
    lose_catalogue(&mut world).await;
    let client = world.client_of(3);
    rebuild_on(&client, 3, false).await.unwrap();
    let replace = SaveOptions { replace: true };
    let named = vec![shard("weights", &content(LEN, 2))];
    client.save(&job(), Step(1), named, replace, quiet()).await.unwrap();
    world.boot(2);
    world.until("its files are gone", || world.files_of(saved_since).is_empty()).await;
    world.until("its removal ends", || world.checkpoint(1).removing.is_empty()).await;
    tokio::time::sleep(20 * world.lease).await;
    let told = notes(&world, &client, 3).await;
    for save in kept {
        assert!(!world.files_of(save).is_empty(), "{save} is kept");
        assert!(told.len() == 1 && told[0].contains(&save.to_string()), "{told:?}");
    }
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 2));
}

/// A rebuild that accepts losses does without all nodes that have a commit mark of a save.
#[tokio::test(start_paused = true)]
async fn a_save_that_was_reported_is_not_superseded_without_a_rebuild() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let (reported, scope) = save_first_step(&world).await;
    for index in 1..=3 {
        world.nodes[&index].store().remove_record_file(scope, "commit").unwrap();
        world.kill(3 + index).await;
    }
    lose_catalogue(&mut world).await;
    let client = world.client_of(1);
    let answer = rebuild_on(&client, 1, true).await.unwrap();
    assert_eq!((answer.steps, answer.orphans), (0, 1), "{answer:?}");
    (4..=6).for_each(|index| world.boot(index));
    serves(&world, 1).await;
    world.until_live(6).await;
    let marked = (4..=6).filter(|node| has_commit_mark(&world, *node, scope));
    assert_eq!(marked.count(), 3, "one more than n-k");
    save(&client, 1, &[("weights", &content(LEN, 2))]).await;
    tokio::time::sleep(20 * world.lease).await;
    assert!(!world.files_of(reported).is_empty());
    assert_eq!(world.catalogue_keys("x/").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn in_the_first_epoch_a_save_without_marks_is_kept_and_one_under_way_is_not_unknown() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let voice = world.voice(Role::Client, "stray");
    let to = world.node_address(1);
    let bytes = content(60_000, 1);
    // A save that was begun, and one that was never begun.
    let begun = voice.begin(&to, 1).await.unwrap();
    let mut call = block_call(&begun, bytes.len());
    let mut exchange = voice.open_block(&to, &call).await.unwrap();
    finish_block(&mut exchange, &bytes, &bytes).await.unwrap();
    let stray = SaveId([9; 12]);
    call.stripe.shard = ShardId::new(stray, 0);
    let mut exchange = voice.open_block(&to, &call).await.unwrap();
    finish_block(&mut exchange, &bytes, &bytes).await.unwrap();
    world.kill(0).await;
    world.kill(6).await;
    world.boot(0);
    let client = world.client_of(1);
    for _ in 0..30 {
        let _ = voice.ask(&to, &RenewLease { lease: begun.lease }).await;
        tokio::time::sleep(world.lease / 2).await;
    }
    let told = notes(&world, &client, 0).await;
    let of_stray = |why: &str| {
        told.len() == 1 && told[0].contains(&stray.to_string()) && told[0].contains(why)
    };
    assert!(of_stray("until every storage node has said"), "{told:?}");
    world.boot(6);
    // The save is judged again after a delay that has grown meanwhile.
    tokio::time::sleep(Duration::from_secs(11 * 60)).await;
    let told = notes(&world, &client, 0).await;
    assert!(told.len() == 1 && told[0].contains("no node has a commit mark"), "{told:?}");
    assert!(!world.files_of(stray).is_empty(), "it is kept");
    assert!(world.files_of(begun.save).is_empty(), "its lease is over: it was given up");
}

#[tokio::test(start_paused = true)]
async fn a_node_tells_of_strange_names_and_of_what_is_in_quarantine() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    world.kill(3).await;
    let disk = world.machines[3].disk.clone();
    disk.create_new("shards/somebody's").unwrap();
    let (_, rotten) =
        world.files(|path| path.ends_with(".rep")).into_iter().find(|(at, _)| *at == 3).unwrap();
    disk.set_file_len(&rotten, 10).unwrap();
    // A whole file under another file's name goes to quarantine.
    let (folder, name) = rotten.rsplit_once('/').unwrap();
    let other = world.files(|path| path.starts_with(folder) && path.ends_with(".rep"));
    let (at, other) = other.into_iter().find(|(_, path)| !path.ends_with(name)).unwrap();
    let bytes = read_file(&*world.machines[at].disk, &other);
    let file = disk.create_new(&format!("{folder}/block-09.rep")).unwrap();
    file.write_at(&bytes, 0).unwrap();
    world.boot(3);
    world.until_live(6).await;
    let told = notes(&world, &client, 3).await;
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told[0].starts_with("1 file in quarantine/") && told[0].contains(".rep ("), "{told:?}");
    assert!(told[1].starts_with("1 replica is damaged") && told[1].ends_with(name), "{told:?}");
    assert!(
        told[2].starts_with("1 file under shards/") && told[2].ends_with("shards/somebody's"),
        "{told:?}"
    );
    assert!(disk.open("shards/somebody's").is_ok(), "it is left alone");
}
