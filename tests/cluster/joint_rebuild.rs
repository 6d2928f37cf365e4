//! Joint saves across a rebuild of the catalogue (semantics, 3): an open one becomes an orphan and
//! is begun anew, and a committed one stays, known by the name of its last shard.

use std::sync::Arc;
use std::time::Duration;

use rapidraid::client::{Client, ClientError};
use rapidraid::format::launch_order::LaunchOrder;
use rapidraid::format::records::Writing;
use rapidraid::id::{LaunchId, SaveId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::wire::calls::{LaunchClaim, RebuildAnswer};

use crate::joint::{LAUNCH, Moment, Saving, Writer, assert_exact, start, world};
use crate::rebuild::{lose_catalogue, rebuild_on, serves};
use world::{World, job};

/// The longest delay of a message while a test looks for a moment of a commit, in milliseconds.
const LAG_MS: u64 = 20;

fn writers() -> [Arc<Writer>; 2] {
    [(0, 2), (1, 1)].map(|(number, count)| Arc::new(Writer::new(LAUNCH, number, count)))
}

/// Loses the catalogue and rebuilds it on node 3. Returns the answer.
async fn lose_and_rebuild(world: &mut World) -> RebuildAnswer {
    lose_catalogue(world).await;
    let answer = rebuild_on(&world.client_of(4), 3, false).await.unwrap();
    assert_eq!((answer.incomplete.len(), answer.damaged.len()), (0, 0), "{answer:?}");
    serves(world, 3).await;
    answer
}

/// Registers a launch that has saved before.
async fn register_again(client: &Client, launch: LaunchId) -> Result<(), ClientError> {
    client.register_launch(&job(), launch, None, LaunchClaim::Again).await
}

async fn assert_fenced(saving: Saving) {
    let error = saving.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
}

/// Checks that the open save `orphan` has become an orphan, that its writers are refused because
/// their launch is unknown, and that they save the step anew when it has registered again.
async fn assert_begun_anew(world: &World, orphan: SaveId, answer: RebuildAnswer, old: [Saving; 2]) {
    assert_eq!((answer.steps, answer.orphans), (0, 1), "{answer:?}");
    let client = world.client_of(5);
    let order = client.fetch_launch_order(&job()).await.unwrap();
    assert_eq!(order, LaunchOrder::default());
    for saving in old {
        assert_fenced(saving).await;
    }
    assert!(world.committed(1).is_none());
    register_again(&client, LAUNCH).await.unwrap();
    let again = writers();
    let saving = [start(world, 1, 1, 2, &again[0]), start(world, 2, 1, 2, &again[1])];
    for saving in saving {
        assert_ne!(saving.await.unwrap().unwrap(), orphan);
    }
    assert_exact(world, 1, &again.each_ref()).await;
    world.until("the orphan gone", || world.catalogue_keys("x/").is_empty()).await;
    world.assert_swept(&client).await;
    assert!(world.files_of(orphan).is_empty());
    assert_exact(world, 1, &again.each_ref()).await;
}

#[tokio::test(start_paused = true)]
async fn a_joint_save_whose_bytes_are_sent_is_begun_anew_after_a_rebuild() {
    let mut world = world().await;
    world.until_acquainted().await;
    let both = [(0, 2), (1, 1)].map(|(number, count)| {
        Arc::new(Writer::new(LAUNCH, number, count).waiting_at(Moment::Sent))
    });
    let saving = [start(&world, 1, 1, 2, &both[0]), start(&world, 2, 1, 2, &both[1])];
    for writer in &both {
        writer.has_reached(Moment::Sent).await;
    }
    let orphan = both[0].saves.lock().unwrap()[0];
    let answer = lose_and_rebuild(&mut world).await;
    for writer in &both {
        writer.may_go.send_replace(true);
    }
    assert_begun_anew(&world, orphan, answer, saving).await;
}

#[tokio::test(start_paused = true)]
async fn a_joint_save_whose_index_is_complete_is_begun_anew_after_a_rebuild() {
    let mut world = world().await;
    world.until_acquainted().await;
    let merges = Arc::new(Writer::new(LAUNCH, 0, 2).waiting_at(Moment::Index));
    let waits = Arc::new(Writer::new(LAUNCH, 1, 1));
    let saving = [start(&world, 1, 1, 2, &merges), start(&world, 2, 1, 2, &waits)];
    merges.has_reached(Moment::Index).await;
    assert_eq!(world.catalogue_keys("s/").len(), 3, "the roots of the data");
    world.set_lag(LAG_MS);
    merges.may_go.send_replace(true);
    while world.catalogue_keys("s/").len() < 4 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(matches!(world.checkpoint(1).writing, Some(Writing::Open { .. })), "decided already");
    world.set_lag(0);
    let orphan = merges.saves.lock().unwrap()[0];
    let answer = lose_and_rebuild(&mut world).await;
    assert_begun_anew(&world, orphan, answer, saving).await;
}

#[tokio::test(start_paused = true)]
async fn a_committed_joint_save_is_known_by_its_last_shard_after_a_rebuild() {
    let mut world = world().await;
    world.until_acquainted().await;
    let both = writers();
    let saving = [start(&world, 1, 1, 2, &both[0]), start(&world, 2, 1, 2, &both[1])];
    let mut saves = Vec::new();
    for saving in saving {
        saves.push(saving.await.unwrap().unwrap());
    }
    assert_eq!(saves[0], saves[1]);
    let answer = lose_and_rebuild(&mut world).await;
    assert_eq!((answer.steps, answer.orphans), (1, 0), "{answer:?}");
    assert_eq!(world.catalogue_keys("j/"), [""; 0], "lost with the catalogue");
    assert_exact(&world, 1, &both.each_ref()).await;
    let client = world.client_of(5);
    // The last shard names the launch, which was not overtaken, and overtakes all others.
    let refused = register_again(&client, LaunchId([8; 16])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    register_again(&client, LAUNCH).await.unwrap();
    // A writer that was restarted asks by the id that it has noted. A join does not know the save.
    let committed = client.is_joint_save_committed(job().at(Step(1)), saves[0]).await;
    assert!(committed.unwrap());
    let refused = start(&world, 2, 1, 2, &both[1]).await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert_exact(&world, 1, &both.each_ref()).await;
    // The launch goes on with the next step.
    let next = writers();
    let saving = [start(&world, 1, 2, 2, &next[0]), start(&world, 2, 2, 2, &next[1])];
    for saving in saving {
        saving.await.unwrap().unwrap();
    }
    assert_exact(&world, 2, &next.each_ref()).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    world.assert_swept(&client).await;
}

/// Writer 0 is about to send the index when writer 1 has committed the save.
#[tokio::test(start_paused = true)]
async fn a_late_writer_of_a_committed_joint_save_changes_nothing_after_a_rebuild() {
    let mut world = world().await;
    world.until_acquainted().await;
    let late = Arc::new(Writer::new(LAUNCH, 0, 2).waiting_at(Moment::Index));
    let commits = Arc::new(Writer::new(LAUNCH, 1, 1));
    let saving = start(&world, 1, 1, 2, &late);
    let save = start(&world, 2, 1, 2, &commits).await.unwrap().unwrap();
    late.has_reached(Moment::Index).await;
    let answer = lose_and_rebuild(&mut world).await;
    assert_eq!((answer.steps, answer.orphans), (1, 0), "{answer:?}");
    let client = world.client_of(5);
    late.may_go.send_replace(true);
    // It finds the step committed, or its launch unknown.
    match saving.await.unwrap() {
        Ok(found) => assert_eq!(found, save),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced, "{error}"),
    }
    assert_eq!(late.saves.lock().unwrap().as_slice(), [save]);
    assert!(client.is_joint_save_committed(job().at(Step(1)), save).await.unwrap());
    assert_exact(&world, 1, &[&late, &commits]).await;
    world.assert_swept(&client).await;
}
