//! Without a reachable catalogue server, committed steps are still listed, shown and restored from
//! their commit marks (docs/semantics.md, 6).

use std::sync::Arc;
use std::time::Duration;

use rapidraid::client::{Client, ClientError, RestoreReport, RestoreRequest, SaveOptions};
use rapidraid::format::records::{Node as NodeRecord, SaveHead, ShardState, StripeState};
use rapidraid::format::save_record::SaveRecord;
use rapidraid::id::{Attempt, ClusterId, NodeId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Address, Role};
use rapidraid::placement::place;
use rapidraid::store::{MemoryDisk, RecordScope};
use rapidraid::wire::calls::PlanChoice;

use world::raw::{block_call, finish_block};
use world::{
    CLUSTER, DISK_BYTES, World, address, content, job, options, quiet, read_file, replace_and_die,
    restore, restore_error, save, shard,
};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 5 * BLOCK as usize - 1000;

async fn assert_exact(client: &Client, step: u64, seed: u64) {
    let (out, report) = restore(client, step).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, seed), "step {step}");
    assert!(report.incidents.iter().any(|line| line.contains("commit marks")), "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn checkpoints_are_found_and_read_without_a_catalogue() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    for step in 1..=5 {
        save(&client, step, &[("weights", &content(LEN, step)), ("empty", &content(0, 1))]).await;
    }
    for (step, plan) in [(1, PlanChoice::Chain), (2, PlanChoice::BestStar)] {
        client.archive(&job(), Some(Step(step)), options(plan), &mut |_| ()).await.unwrap();
    }
    // Replace step 4. Remove step 5 while node 6 is down, so that node 6 still has the marks of
    // step 5.
    let replaced = vec![shard("weights", &content(LEN, 40))];
    client.save(&job(), Step(4), replaced, SaveOptions { replace: true }, quiet()).await.unwrap();
    world.until("the replaced save gone", || world.catalogue_keys("s/").len() == 5 + 4).await;
    world.kill(6).await;
    client.remove_step(&job(), Step(5)).await.unwrap();
    world.boot(6);
    world.until_live(6).await;
    let before = client.list_steps(None).await.unwrap();
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();

    world.kill(0).await;
    let client = world.client_of(1);
    let mut listed = client.list_steps(None).await.unwrap();
    assert!(listed.iter().all(|view| view.by_marks));
    listed.iter_mut().for_each(|view| view.by_marks = false);
    assert_eq!(listed, before);
    assert_eq!(client.list_steps(Some(&"other".parse().unwrap())).await.unwrap(), []);
    let found = client.show_step(&job(), Some(Step(1))).await.unwrap();
    for ((root, state), (known, before)) in found.shards.iter().zip(&shown.shards) {
        assert_eq!(root, known);
        let attempts = |state: &ShardState| -> Vec<Option<Attempt>> {
            let attempt = |state| match state {
                StripeState::Archived { attempt, .. } => Some(attempt),
                _ => None,
            };
            state.states().map(attempt).collect()
        };
        assert_eq!(attempts(state), attempts(before));
    }
    for (step, seed) in [(1, 1), (2, 2), (3, 3), (4, 40)] {
        assert_exact(&client, step, seed).await;
    }
    assert_eq!(restore_error(&client, 5).await.kind(), ErrorKind::NotFound);
    assert_eq!(client.show_step(&job(), None).await.unwrap().step.step, Step(4));

    // As many nodes as the code survives may be down: more than half of the nodes still know what
    // is committed.
    for index in [3, 2] {
        world.kill(index).await;
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_exact(&client, 1, 1).await;
    }
    world.kill(4).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    let refused = restore_error(&client, 1).await;
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    for name in ["node02", "node03", "node04", "3 of 6", "4 are needed"] {
        assert!(refused.to_string().contains(name), "{refused}");
    }
    // Changes need the catalogue.
    let refused = client.remove_step(&job(), Step(1)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    for index in [0, 2, 3, 4] {
        world.boot(index);
    }
    world.until_live(6).await;
    let client = world.client();
    assert_eq!(client.list_steps(None).await.unwrap(), before);
    let (_, report) = restore(&client, 1).await.unwrap();
    assert_eq!(report.incidents, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_state_from_before_an_archiving_leads_nobody_astray() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    // Node 1 cannot reach the catalogue server and remembers the present state of the step.
    world.network.partition(&address(0), &address(1));
    let astray = world.client_of(1);
    assert_exact(&astray, 1, 1).await;
    client.archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    let (_, report) = restore(&astray, 1).await.unwrap();
    assert!(report.decoded_stripes > 0 && report.replica_stripes == 0, "{report:?}");
}

/// A node without the catalogue answers each new call by marks that it reads after the call.
#[tokio::test(start_paused = true)]
async fn a_step_that_was_reported_before_a_call_is_in_its_answer() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    world.network.partition(&address(0), &address(1));
    let astray = world.client_of(1);
    // The snapshot of the call before is still cached at each of these calls.
    let begun = tokio::time::Instant::now();
    for round in 0..3 {
        let listed = astray.list_steps(Some(&job())).await.unwrap();
        assert!(listed.iter().all(|view| view.by_marks));
        assert_eq!(listed.last().unwrap().step, Step(2 + round));
        assert_eq!(astray.show_step(&job(), None).await.unwrap().step.step, Step(2 + round));
        save(&client, 3 + round, &[("weights", &content(LEN, 3 + round))]).await;
    }
    assert_eq!(astray.show_step(&job(), None).await.unwrap().step.step, Step(5));
    let replace = async |step, seed| {
        let shards = vec![shard("weights", &content(LEN, seed))];
        client
            .save(&job(), Step(step), shards, SaveOptions { replace: true }, quiet())
            .await
            .unwrap();
    };
    replace(2, 20).await;
    client.remove_step(&job(), Step(5)).await.unwrap();
    assert_exact(&astray, 2, 20).await;
    let steps: Vec<Step> =
        astray.list_steps(None).await.unwrap().into_iter().map(|view| view.step).collect();
    assert_eq!(steps, [1, 2, 3, 4].map(Step));

    assert!(begun.elapsed() < Duration::from_secs(5));

    // The catalogue answers again. A removal by this node finds the save that is committed now.
    world.network.heal(&address(0), &address(1));
    replace(2, 21).await;
    astray.remove_step(&job(), Step(2)).await.unwrap();
    save(&client, 6, &[("weights", &content(LEN, 6))]).await;
    assert_eq!(astray.list_steps(None).await.unwrap().last().unwrap().step, Step(6));
    let mut by_marks = true;
    for _ in 0..100 {
        by_marks = astray.list_steps(None).await.unwrap().iter().any(|view| view.by_marks);
        if !by_marks {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(!by_marks, "the catalogue is never asked again");
}

#[tokio::test(start_paused = true)]
async fn what_was_not_committed_is_not_found_and_one_mark_is_enough() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let root = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].0.clone();
    // A save of step 2 that has stored one block.
    let voice = world.voice(Role::Client, "slow");
    let to = world.node_address(1);
    let begun = voice.begin(&to, 2).await.unwrap();
    let bytes = content(60_000, 1);
    let mut exchange = voice.open_block(&to, &block_call(&begun, bytes.len())).await.unwrap();
    finish_block(&mut exchange, &bytes, &bytes).await.unwrap();

    let marked: Vec<usize> = (1..=6)
        .filter(|index| {
            let store = world.nodes[index].store();
            store.get_record_file(RecordScope::Shard(root.shard), "commit").unwrap().is_some()
        })
        .collect();
    world.kill(0).await;
    for index in &marked[1..] {
        world.nodes[index]
            .store()
            .remove_record_file(RecordScope::Shard(root.shard), "commit")
            .unwrap();
    }
    let client = world.client_of(2);
    let steps: Vec<Step> =
        client.list_steps(None).await.unwrap().into_iter().map(|view| view.step).collect();
    assert_eq!(steps, [Step(1)]);
    assert_exact(&client, 1, 1).await;
    assert_eq!(restore_error(&client, 2).await.kind(), ErrorKind::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_home_that_changes_nothing_is_asked_all_the_same() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    for index in [4, 5, 6] {
        world.kill(index).await;
    }
    world
        .until("a home that changes nothing", || !world.nodes[&0].is_writable_catalogue_server())
        .await;
    tokio::time::sleep(3 * world.lease).await;
    let client = world.client_of(1);
    let listed = client.list_steps(None).await.unwrap();
    assert!(listed.len() == 1 && !listed[0].by_marks, "{listed:?}");
}

#[tokio::test(start_paused = true)]
async fn what_a_removed_step_was_before_does_not_come_back() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    save(&world.client_of(1), 1, &[("weights", &content(LEN, 1))]).await;
    replace_and_die(&mut world, &content(LEN, 2)).await;
    let client = world.client_of(2);
    client.remove_step(&job(), Step(1)).await.unwrap();
    world.kill(0).await;
    assert_eq!(client.list_steps(None).await.unwrap(), []);
}

async fn save_with_record(client: &Client, step: u64, len: usize, replace: bool) -> SaveRecord {
    let shards = vec![shard("weights", &content(len, step)), shard("empty", &content(0, 1))];
    let options = SaveOptions { replace };
    let saved = client.save(&job(), Step(step), shards, options, quiet()).await.unwrap();
    let record = SaveRecord::parse(&saved.record.to_bytes().unwrap()).unwrap();
    assert_eq!(record, saved.record);
    record
}

pub async fn restore_by_record(
    client: &Client,
    record: &SaveRecord,
) -> Result<(Arc<MemoryDisk>, RestoreReport), ClientError> {
    let out = Arc::new(MemoryDisk::new(DISK_BYTES));
    let request = RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
    let report = client.restore_by_record(record, request, quiet()).await?;
    Ok((out, report))
}

async fn assert_by_record(client: &Client, record: &SaveRecord, len: usize) -> RestoreReport {
    let (out, report) = restore_by_record(client, record).await.unwrap();
    let step = record.step();
    assert!(read_file(&*out, "weights") == content(len, step.0), "step {step}");
    assert!(read_file(&*out, "empty").is_empty());
    assert!(report.incidents[0].contains("by its record"), "{report:?}");
    report
}

/// Returns the record with another cluster id and other nodes.
fn with_head(record: &SaveRecord, cluster: ClusterId, nodes: Vec<NodeRecord>) -> SaveRecord {
    let head = SaveHead { cluster, saved: record.saved().clone(), nodes };
    SaveRecord::new(head, record.roots().to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_record_restores_when_too_many_nodes_are_away_to_find_the_marks() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let small = 2 * BLOCK as usize;
    let replicated = save_with_record(&client, 1, small, false).await;
    let mut archived = Vec::new();
    for (step, plan) in [(2, PlanChoice::Chain), (3, PlanChoice::BestStar)] {
        archived.push(save_with_record(&client, step, LEN, false).await);
        client.archive(&job(), Some(Step(step)), options(plan), &mut |_| ()).await.unwrap();
    }
    // First restore by record while all nodes run.
    assert_eq!(assert_by_record(&client, &replicated, small).await.decoded_stripes, 0);
    assert_eq!(assert_by_record(&client, &archived[0], LEN).await.replica_stripes, 0);

    // Stop two nodes that hold replicas of two different blocks. The other replica of each block
    // remains.
    let places = place(&replicated.roots()[0].ring, 4, 2, 0).unwrap();
    let index_of = |id: NodeId| (1..=6).find(|&index| world.nodes[&index].id() == id).unwrap();
    let gone = [index_of(places[0]), index_of(places[1])];
    for index in [0, gone[0], gone[1]] {
        world.kill(index).await;
    }
    let left: Vec<usize> = (1..=6).filter(|index| !gone.contains(index)).collect();
    // With a third node behind, the other half of the nodes is too few to find the step by its
    // marks.
    world.nodes[&left[1]].store().record_behind().unwrap();
    let client = world.client_of(left[0]);
    assert_eq!(restore_error(&client, 1).await.kind(), ErrorKind::Unavailable);
    assert_by_record(&client, &replicated, small).await;
    for record in &archived {
        assert_by_record(&client, record, LEN).await;
    }
    // The record names the nodes to ask, so no seed has to answer.
    assert_by_record(&world.client_of(0), &archived[0], LEN).await;

    // With more nodes down than the code survives, the restore fails as lost.
    for &index in &left[..3] {
        world.kill(index).await;
    }
    let client = world.client_of(left[3]);
    for record in [&replicated, &archived[0]] {
        let lost = restore_by_record(&client, record).await.map(|(_, report)| report).unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_of_a_removed_or_replaced_save_says_so() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let removed = save_with_record(&client, 1, LEN, false).await;
    let replaced = save_with_record(&client, 2, LEN, false).await;
    // Node 6 is down during the removals and knows nothing of them. Other nodes do.
    world.kill(6).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    let newer = save_with_record(&client, 2, LEN, true).await;
    world.boot(6);
    world.kill(0).await;
    let client = world.client_of(6);
    for record in [&removed, &replaced] {
        let error = restore_by_record(&client, record).await.map(|(_, report)| report).unwrap_err();
        assert!(matches!(error, ClientError::Removed { .. }), "{error}");
    }
    assert_by_record(&client, &newer, LEN).await;
}

#[tokio::test(start_paused = true)]
async fn nodes_say_where_the_others_of_a_record_are_and_no_catalogue_is_waited_for() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    world.until_acquainted().await;
    let record = save_with_record(&world.client(), 1, LEN, false).await;
    world.kill(0).await;
    // Only one node still has its recorded address, and alone it holds no whole stripe.
    let mut nodes = record.nodes().to_vec();
    for node in &mut nodes[1..] {
        node.address = format!("old-{}:7440", node.name);
    }
    let began = tokio::time::Instant::now();
    let nowhere = world.connect(vec!["nowhere:7440".into()]).0;
    assert_by_record(&nowhere, &with_head(&record, CLUSTER, nodes), LEN).await;
    // The restore waited for a single unanswered hello and for nothing else.
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_record_is_read_where_its_nodes_are_now_and_only_in_its_cluster() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let record = save_with_record(&client, 1, LEN, false).await;
    let mut moved = record.nodes().to_vec();
    for node in &mut moved {
        node.address = format!("old-{}:7440", node.name);
    }
    assert_by_record(&client, &with_head(&record, CLUSTER, moved), LEN).await;
    let other = with_head(&record, ClusterId([8; 16]), record.nodes().to_vec());
    let error = restore_by_record(&client, &other).await.map(|(_, report)| report).unwrap_err();
    assert!(matches!(error, ClientError::OtherCluster { .. }), "{error}");
    let nowhere = with_head(&record, CLUSTER, Vec::new());
    let error = restore_by_record(&client, &nowhere).await.map(|(_, report)| report).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test(start_paused = true)]
async fn members_that_nobody_knows_keep_a_rebuild_from_going_on() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    world.kill(0).await;
    world.machines[0].catalogue.set(None);
    for index in [5, 6] {
        world.kill(index).await;
    }
    let gone: Vec<_> = [0, 5, 6].map(|index| world.machines[index].name.clone()).into();
    for index in 1..=4 {
        world.kill(index).await;
        world.boot(index);
        let store = world.nodes[&index].store();
        let mut members = store.read_members().unwrap();
        members.nodes.retain(|node| !gone.contains(&node.name));
        store.put_members(&members).unwrap();
    }
    let on = Address { host_port: address(1), node: None };
    let refused = world.client_of(1).rebuild_catalogue(Some(&on)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("known to none"), "{refused}");
}
