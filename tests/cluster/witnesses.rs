//! With the catalogue and n-k nodes lost, readers find every committed step or refuse; they never
//! return an older or a removed step (docs/semantics.md, 2, *Who knows of a save*).

use std::sync::Arc;
use std::time::Duration;

use rapidraid::client::{Client, RestoreRequest};
use rapidraid::format::records::{CommitMark, Record, RemoveReason, Standing, Tombstone};
use rapidraid::id::{Epoch, Generation, ShardId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Address, Role};
use rapidraid::store::{Disk, MemoryDisk, RecordScope};
use rapidraid::wire::calls::{
    CommitSave, CompleteShard, PlanChoice, PutMark, PutTombstone, StepView,
};

use world::raw::empty_root;
use world::{
    CLUSTER, DISK_BYTES, World, address, content, job, options, quiet, read_file, restore, save,
};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 70_000;
const NODES: usize = 16;

/// Returns every `every`-th of the sets of five of the sixteen nodes that contain node 1.
fn sets(every: usize) -> Vec<Vec<usize>> {
    let sets = (0u32..1 << NODES).filter(|set| set & 1 == 1 && set.count_ones() == 5);
    let members = |set: u32| (1..=NODES).filter(|node| set >> (node - 1) & 1 == 1).collect();
    sets.map(members).step_by(every).collect()
}

/// Returns all sets with `RAPIDRAID_SETS=1`, and one in 13 by default.
fn drawn() -> Vec<Vec<usize>> {
    let every = std::env::var("RAPIDRAID_SETS").map_or(13, |text| text.parse().unwrap());
    sets(every)
}

/// Restarts the daemon of a node outside `gone`, cut off from the nodes in `gone`. Returns the node,
/// a client of it that is cut off in the same way, and the client's address.
async fn reader_without(world: &mut World, gone: &[usize]) -> (usize, Client, String) {
    let asked = (1..=NODES).rev().find(|node| !gone.contains(node)).unwrap();
    world.kill(asked).await;
    let (client, number) = world.connect(vec![address(asked)]);
    let own = format!("client{number}:0");
    for node in gone {
        world.network.partition(&address(asked), &address(*node));
        world.network.partition(&own, &address(*node));
    }
    world.boot(asked);
    (asked, client, own)
}

fn reach_again(world: &World, asked: usize, own: &str, gone: &[usize]) {
    for node in gone {
        world.network.heal(&address(asked), &address(*node));
        world.network.heal(own, &address(*node));
    }
}

async fn archived(world: &World, step: u64) {
    let client = world.client();
    save(&client, step, &[("weights", &content(LEN, step))]).await;
    client
        .archive(&job(), Some(Step(step)), options(PlanChoice::Chain), &mut |_| ())
        .await
        .unwrap();
}

async fn sixteen() -> World {
    World::start(NODES, &[(16, 11), (12, 8), (6, 4)], BLOCK).await
}

/// Returns the nodes that have a mark of the shard's save.
fn marked(world: &World, shard: ShardId) -> Vec<usize> {
    let has = |index: &usize| {
        let store = world.nodes[index].store();
        store.get_record_file(RecordScope::Shard(shard), "commit").unwrap().is_some()
    };
    (1..=NODES).filter(has).collect()
}

#[tokio::test(start_paused = true)]
async fn any_five_of_sixteen_may_be_gone_with_the_catalogue() {
    let mut world = sixteen().await;
    archived(&world, 1).await;
    world.kill(0).await;
    for gone in drawn() {
        let (asked, client, own) = reader_without(&mut world, &gone).await;
        let (out, report) = restore(&client, 1).await.unwrap_or_else(|e| panic!("{gone:?}: {e}"));
        assert!(read_file(&*out, "weights") == content(LEN, 1), "{gone:?}");
        assert!(report.incidents.iter().any(|line| line.contains("commit marks")), "{report:?}");
        reach_again(&world, asked, &own, &gone);
    }
}

/// The newest step is on twelve nodes, and its marks are on as few as the rule allows.
#[tokio::test(start_paused = true)]
async fn a_newest_step_that_few_nodes_know_is_never_passed_over() {
    let mut world = sixteen().await;
    archived(&world, 1).await;
    // Four nodes are down while the next step is saved with a smaller code.
    for index in 1..=4 {
        world.kill(index).await;
    }
    tokio::time::sleep(2 * world.lease).await;
    save(&world.client(), 2, &[("weights", &content(LEN, 2))]).await;
    let shown = world.client().show_step(&job(), Some(Step(2))).await.unwrap();
    let root = shown.shards[0].0.clone();
    assert_eq!((root.n, root.k), (12, 8));
    let with_mark = marked_live(&world, root.shard);
    // Remove three marks, as if their nodes had not answered. The remaining nine are more than half
    // of sixteen.
    for index in with_mark.iter().skip(9) {
        world.nodes[index]
            .store()
            .remove_record_file(RecordScope::Shard(root.shard), "commit")
            .unwrap();
    }
    world.kill(0).await;
    for index in 1..=4 {
        world.boot(index);
    }
    assert!(marked(&world, root.shard).len() == 9);
    let (mut refused, mut restored) = (0, 0);
    for gone in drawn() {
        let (asked, client, own) = reader_without(&mut world, &gone).await;
        let latest = client.show_step(&job(), None).await;
        match latest {
            Ok(found) => {
                assert_eq!(found.step.step, Step(2), "{gone:?}");
                // Both replicas of a block may be lost. Then the restore reports the loss and does
                // not return an older step.
                let out = Arc::new(MemoryDisk::new(DISK_BYTES));
                let request =
                    RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
                match client.restore(&job(), None, request, quiet()).await {
                    Ok(report) => {
                        assert_eq!(report.step, Step(2), "{gone:?}");
                        assert!(read_file(&*out, "weights") == content(LEN, 2), "{gone:?}");
                        restored += 1;
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Lost, "{gone:?}: {error}"),
                }
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{gone:?}: {error}");
                refused += 1;
            }
        }
        reach_again(&world, asked, &own, &gone);
    }
    assert_eq!(refused, 0);
    assert!(restored > 0);
}

fn marked_live(world: &World, shard: ShardId) -> Vec<usize> {
    let live = world.nodes.iter().filter(|(index, _)| **index != 0);
    let has = live.filter(|(_, node)| {
        node.store().get_record_file(RecordScope::Shard(shard), "commit").unwrap().is_some()
    });
    has.map(|(index, _)| *index).collect()
}

/// The removal of the newest step has reached as few nodes as the rule allows, and its files there
/// are purged.
#[tokio::test(start_paused = true)]
async fn a_removed_step_never_comes_back() {
    let mut world = sixteen().await;
    for step in [1, 2] {
        archived(&world, step).await;
    }
    // Seven nodes are down. The remaining nine are more than half.
    for index in 10..=16 {
        world.kill(index).await;
    }
    world.client().remove_step(&job(), Step(2)).await.unwrap();
    world.kill(0).await;
    for index in 10..=16 {
        world.boot(index);
    }
    for gone in drawn() {
        let (asked, client, own) = reader_without(&mut world, &gone).await;
        let latest =
            client.show_step(&job(), None).await.unwrap_or_else(|e| panic!("{gone:?}: {e}"));
        assert_eq!(latest.step.step, Step(1), "{gone:?}");
        reach_again(&world, asked, &own, &gone);
    }
}

#[tokio::test(start_paused = true)]
async fn six_nodes_with_one_away_save_remove_and_grow_to_sixteen() {
    let mut world = World::start(6, &[(5, 3), (4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    world.kill(6).await;
    tokio::time::sleep(2 * world.lease).await;
    save(&client, 3, &[("weights", &content(LEN, 3))]).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    // All six nodes run again and catch up. Then ten nodes join.
    world.boot(6);
    world.until_live(6).await;
    world.until_caught_up().await;
    world.grow(10);
    world.until_live(16).await;
    world.until_caught_up().await;
    // Two of the first six nodes and the catalogue are lost.
    world.kill(0).await;
    for index in [1, 2] {
        world.kill(index).await;
    }
    let client = world.client_of(12);
    let steps: Vec<Step> =
        client.list_steps(None).await.unwrap().into_iter().map(|view| view.step).collect();
    assert_eq!(steps, [Step(2), Step(3)]);
    for index in 3..=6 {
        world.kill(index).await;
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    // No node that held the steps is left. The new nodes still know what is committed.
    let steps: Vec<Step> =
        client.list_steps(None).await.unwrap().into_iter().map(|view| view.step).collect();
    assert_eq!(steps, [Step(2), Step(3)]);
}

#[tokio::test(start_paused = true)]
async fn an_emptied_node_counts_as_missing_until_it_has_caught_up() {
    let mut world = World::start(5, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    let shard = client.show_step(&job(), Some(Step(2))).await.unwrap().shards[0].0.shard;
    let mark = world.nodes[&5]
        .store()
        .get_record_file(RecordScope::Shard(shard), "commit")
        .unwrap()
        .unwrap();
    client.remove_step(&job(), Step(2)).await.unwrap();
    world.until("forgotten", || world.catalogue_keys("nothing").is_empty()).await;
    world.kill(0).await;
    world.kill(5).await;
    world.replace(5);
    world.boot(5);
    let client = world.client_of(1);
    assert_eq!(client.list_steps(None).await.unwrap().len(), 1);
    world.kill(4).await;
    world.kill(3).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    let refused = client.list_steps(None).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let text = refused.to_string();
    assert!(text.contains("2 of 5") && text.contains("start node03, node04"), "{text}");
    assert!(text.contains("behind") && text.contains("node05"), "{text}");
    // With the catalogue the node catches up and counts again. It then also knows of the removed
    // step.
    world.boot(0);
    for index in [3, 4] {
        world.boot(index);
    }
    world.until_live(5).await;
    world.until_caught_up().await;
    // A gateway that was paused before the removal sends its mark now.
    let node = world.voice(Role::Node, "node00");
    let late = PutMark { bytes: mark, epoch: Epoch(1) };
    let refused = node.ask(&world.node_address(5), &late).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    for index in [0, 3, 4] {
        world.kill(index).await;
    }
    let client = world.client_of(5);
    let listed = client.list_steps(None).await.unwrap();
    assert_eq!(listed.iter().map(|view| view.step).collect::<Vec<_>>(), [Step(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_does_not_parse_is_missing_for_its_save_and_written_again() {
    let mut world = World::start(5, &[(4, 2)], BLOCK).await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    let shard = world.client().show_step(&job(), None).await.unwrap().shards[0].0.shard;
    world.kill(0).await;
    let spoil = |world: &World, index: usize| {
        let path = format!("shards/{shard}/commit");
        let file = world.machines[index].disk.open(&path).unwrap();
        file.write_at(b"?", 20).unwrap();
    };
    for index in 1..=3 {
        spoil(&world, index);
    }
    // Two nodes have a good mark.
    assert_eq!(world.client_of(1).list_steps(None).await.unwrap().len(), 1);
    for index in [4, 5] {
        spoil(&world, index);
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    let refused = world.client_of(1).list_steps(None).await.unwrap_err().to_string();
    assert!(
        refused.contains("does not parse") && refused.contains(&shard.save().to_string()),
        "{refused}"
    );
    world.boot(0);
    world.until_live(5).await;
    let good = || (1..=5).all(|index| mark_parses(&world, index, shard));
    world.until("marks written again", good).await;
}

fn mark_parses(world: &World, index: usize, shard: ShardId) -> bool {
    let bytes =
        world.nodes[&index].store().get_record_file(RecordScope::Shard(shard), "commit").unwrap();
    bytes.is_some_and(|bytes| CommitMark::parse(&bytes).is_ok())
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_taken_off_the_list_catches_up_anew() {
    let mut world = World::start(5, &[(4, 2)], BLOCK).await;
    world.kill(5).await;
    tokio::time::sleep(8 * world.lease).await;
    let name = world.machines[5].name.clone();
    world.client().remove_node(&name).await.unwrap();
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    tokio::time::sleep(world.lease).await;
    // Without a catalogue the node's catch-up record does not count.
    world.kill(0).await;
    world.boot(5);
    tokio::time::sleep(3 * world.lease).await;
    for index in [1, 2, 3] {
        world.kill(index).await;
    }
    let refused = world.client_of(5).list_steps(None).await.unwrap_err().to_string();
    assert!(refused.contains("behind") && refused.contains("node05"), "{refused}");
    for index in 0..=3 {
        world.boot(index);
    }
    world.until_live(5).await;
    world.until_caught_up().await;
    for index in 0..=2 {
        world.kill(index).await;
    }
    assert_eq!(world.client_of(5).list_steps(None).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_save_that_half_of_the_nodes_know_is_not_published() {
    // The rule for rings alone would allow marks to be missing on five nodes.
    let mut world = World::start(8, &[(8, 6)], BLOCK).await;
    let (voice, gateway) = (world.voice(Role::Client, "marks"), world.node_address(1));
    let begun = voice.begin(&gateway, 1).await.unwrap();
    voice.ask(&gateway, &CompleteShard { root: empty_root(&begun, 1, "empty") }).await.unwrap();
    for index in 5..=8 {
        world.kill(index).await;
    }
    let commit = CommitSave { job: job(), step: Step(1), save: begun.save, shards: 1 };
    let refused = voice.ask(&gateway, &commit).await.unwrap_err().to_string();
    assert!(refused.contains("4 of 8") && refused.contains("5 are needed"), "{refused}");
    assert_eq!(world.client().list_steps(None).await.unwrap(), []);
    world.boot(5);
    world.until_live(5).await;
    voice.ask(&gateway, &commit).await.unwrap();
    assert_eq!(world.client().list_steps(None).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_half_of_the_nodes_know_is_not_reported() {
    let mut world = World::start(8, &[(8, 6)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    for index in 5..=8 {
        world.kill(index).await;
    }
    let refused = client.remove_step(&job(), Step(1)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    for index in 5..=8 {
        world.boot(index);
    }
    world.until("all of it removed", || world.catalogue_keys("s/").is_empty()).await;
}

/// Data folders from before the catch-up record, and a newest step with another code whose marks
/// few nodes have.
#[tokio::test(start_paused = true)]
async fn older_folders_go_by_the_older_bound() {
    let mut world = World::start(7, &[(7, 4), (4, 2)], BLOCK).await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    for index in 5..=7 {
        world.kill(index).await;
    }
    tokio::time::sleep(2 * world.lease).await;
    save(&world.client(), 2, &[("weights", &content(LEN, 2))]).await;
    let root = world.client().show_step(&job(), Some(Step(2))).await.unwrap().shards[0].0.clone();
    assert_eq!((root.n, root.k, root.ring.len()), (4, 2, 4));
    // By the older rule, one node of the ring may have missed the mark.
    world.nodes[&4].store().remove_record_file(RecordScope::Shard(root.shard), "commit").unwrap();
    world.kill(0).await;
    for index in 5..=7 {
        world.boot(index);
    }
    for machine in &world.machines[1..] {
        machine.disk.remove("catch-up").unwrap();
    }
    for gone in [vec![7], vec![1], vec![1, 2, 3], vec![4, 5, 6]] {
        for index in &gone {
            world.kill(*index).await;
        }
        tokio::time::sleep(Duration::from_secs(6)).await;
        let asked = if gone.contains(&7) { 6 } else { 7 };
        match world.client_of(asked).show_step(&job(), None).await {
            Ok(found) => assert!(found.step.step == Step(2) && gone.len() == 1, "{gone:?}"),
            Err(error) => {
                assert!(gone.len() == 3, "{gone:?}: {error}");
                assert!(error.to_string().contains("at most 1 may be"), "{error}");
            }
        }
        for index in gone {
            world.boot(index);
        }
    }
}

/// A removal that reached one node and was never reported. The catalogue is lost and rebuilt
/// without that node.
#[tokio::test(start_paused = true)]
async fn a_removal_that_a_rebuild_undid_spreads_no_further() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let save_id = client.show_step(&job(), None).await.unwrap().step.saved.save;
    let generation = Generation { epoch: Epoch(1), counter: 900 };
    let reason = RemoveReason::Deleted;
    let tombstone = Tombstone { cluster: CLUSTER, save: save_id, generation, reason };
    let call = PutTombstone { bytes: tombstone.to_bytes().unwrap() };
    let node = world.voice(Role::Node, "node00");
    node.ask(&world.node_address(6), &call).await.unwrap();
    world.kill(0).await;
    world.kill(6).await;
    let on = Address { host_port: address(2), node: None };
    world.client_of(2).rebuild_catalogue(Some(&on)).await.unwrap();
    world.boot(6);
    world.until_live(6).await;
    // All of these nodes catch up again.
    for index in [1, 3, 4, 5] {
        world.kill(index).await;
        world.boot(index);
    }
    tokio::time::sleep(4 * world.lease).await;
    for index in 1..=5 {
        assert!(!world.nodes[&index].store().is_recorded_removed(save_id).unwrap(), "node {index}");
    }
    let (out, _) = restore(&world.client_of(2), 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 1));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_taken_off_takes_its_note_back_before_anything_else() {
    let mut world = World::start(5, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    world.until("forgotten", || world.catalogue_keys("nothing").is_empty()).await;
    world.kill(5).await;
    tokio::time::sleep(8 * world.lease).await;
    let name = world.machines[5].name.clone();
    client.remove_node(&name).await.unwrap();
    // The node registers and cannot learn from the others what was removed.
    for other in 1..=4 {
        world.network.partition(&address(5), &address(other));
    }
    world.boot(5);
    world.until_live(5).await;
    tokio::time::sleep(3 * world.lease).await;
    assert_eq!(world.nodes[&5].store().read_catch_up_standing(), Standing::Behind);
    for other in 1..=4 {
        world.network.heal(&address(5), &address(other));
    }
    world.until_caught_up().await;
}

/// A rebuild makes its nodes claim an epoch before it reads their lists for the last time.
#[tokio::test(start_paused = true)]
async fn the_list_that_counts_is_the_latest_one_also_after_a_claim() {
    let mut world = World::start(7, &[(4, 2)], BLOCK).await;
    let client = world.client();
    world.kill(6).await;
    tokio::time::sleep(8 * world.lease).await;
    client.remove_node(&world.machines[6].name).await.unwrap();
    tokio::time::sleep(world.lease).await;
    // Node 7 stops with a list that does not contain node 6.
    world.kill(7).await;
    world.boot(6);
    world.until_live(6).await;
    world.until_caught_up().await;
    tokio::time::sleep(world.lease).await;
    for index in 0..=3 {
        world.kill(index).await;
    }
    world.boot(7);
    let on = Address { host_port: address(4), node: None };
    let rebuilt = world.client_of(4).rebuild_catalogue(Some(&on)).await.unwrap();
    assert_eq!(rebuilt.missing.len(), 3, "{rebuilt:?}");
}

/// Retention removes old steps while one of six nodes is down. They do not come back with that
/// node.
#[tokio::test(start_paused = true)]
async fn retention_goes_on_with_one_of_six_away() {
    let mut world = World::start(6, &[(5, 3), (4, 2)], BLOCK).await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    world.policy.rule.keep_newest = Some(2);
    world.kill(0).await;
    world.boot(0);
    world.until_live(6).await;
    world.kill(6).await;
    tokio::time::sleep(2 * world.lease).await;
    for step in 2..=4 {
        save(&world.client(), step, &[("weights", &content(LEN, step))]).await;
    }
    tokio::time::sleep(4 * world.lease).await;
    let steps = |listed: Vec<StepView>| listed.iter().map(|view| view.step.0).collect::<Vec<_>>();
    assert_eq!(steps(world.client().list_steps(None).await.unwrap()), [3, 4]);
    // The node with the marks of step 1 is back, and the catalogue is lost.
    world.kill(0).await;
    world.boot(6);
    for index in [1, 2] {
        world.kill(index).await;
    }
    assert_eq!(steps(world.client_of(6).list_steps(None).await.unwrap()), [3, 4]);
}

/// The codes in a reader's configuration say nothing about the steps that others saved.
#[tokio::test(start_paused = true)]
async fn a_list_of_codes_that_changes_hides_no_step() {
    let mut world = World::start(8, &[(8, 5)], BLOCK).await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    for codes in [vec![(4, 2)], vec![(6, 4), (4, 2)], vec![(8, 5)]] {
        world.codes = codes;
        for index in 0..=8 {
            world.kill(index).await;
            world.boot(index);
        }
        world.until_live(8).await;
        let newest = world.client().list_steps(None).await.unwrap().len() as u64 + 1;
        save(&world.client(), newest, &[("weights", &content(LEN, newest))]).await;
        for index in 0..=3 {
            world.kill(index).await;
        }
        let listed = world.client_of(8).list_steps(None).await.unwrap();
        assert_eq!(listed.last().map(|view| view.step), Some(Step(newest)), "{:?}", world.codes);
        assert_eq!(listed.len() as u64, newest, "{:?}", world.codes);
        for index in 0..=3 {
            world.boot(index);
        }
        world.until_live(8).await;
        world.until_caught_up().await;
    }
}
