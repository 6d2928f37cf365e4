//! Saves and removals go on where one part of the cluster is away or damaged: the catalogue server,
//! a node of the ring, one record of the catalogue.

use std::sync::Arc;
use std::time::Duration;

use rapidraid::catalogue::record_access::{checkpoint_key, launch_order_key};
use rapidraid::client::{NewShard, SaveOptions};
use rapidraid::id::{Job, LaunchId, Step};
use rapidraid::pipeline::upload::ShardSource;
use rapidraid::store::kv::Batch;
use rapidraid::store::{Kv, RecordScope};
use rapidraid::wire::calls::LaunchClaim;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::rebuild::{BLOCK, LEN, assert_exact, rebuild_on, serves};
use crate::saves::Gated;
use world::look::files_below;
use world::{World, content, job, quiet, read_file, register, restore, save, shard};

/// An empty source that says when it is asked whether it has changed: all of its shard is stored then.
#[derive(Default)]
struct Last {
    stored: Arc<Notify>,
}

impl ShardSource for Last {
    fn len_bytes(&self) -> u64 {
        0
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }

    fn is_unchanged(&self) -> std::io::Result<bool> {
        self.stored.notify_one();
        Ok(true)
    }
}

#[tokio::test(start_paused = true)]
async fn a_save_waits_for_a_catalogue_server_that_restarts() {
    let mut world = World::start(5, &[(4, 2)], 64 << 10).await;
    let (client, data) = (world.client_of(1), content(600_000, 1));
    let last = Last::default();
    let stored = last.stored.clone();
    let shards = vec![
        shard("weights", &data),
        NewShard { name: "last".parse().unwrap(), source: Arc::new(last) },
    ];
    let saver = client.clone();
    let options = SaveOptions { replace: false };
    let saving =
        tokio::spawn(async move { saver.save(&job(), Step(7), shards, options, quiet()).await });
    stored.notified().await;
    world.kill(0).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!saving.is_finished(), "it waits");
    world.boot(0);
    saving.await.unwrap().unwrap();
    let (out, _) = restore(&client, 7).await.unwrap();
    assert!(read_file(&*out, "weights") == *data);
}

/// The time is that of the world: a node that does not answer costs one timeout, not one a shard.
#[tokio::test(start_paused = true)]
async fn a_silent_node_does_not_hold_up_every_shard_of_a_save() {
    let mut world = World::start(6, &[(4, 2)], 64 << 10).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(100, 1))]).await;
    let _silent = world.silence(6).await;
    let names: Vec<String> = (0..100).map(|number| format!("shard-{number}")).collect();
    let data = content(1000, 2);
    let shards: Vec<_> = names.iter().map(|name| (name.as_str(), &data)).collect();
    let began = Instant::now();
    save(&client, 2, &shards).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(90), "{took:?}: each shard waits ten seconds for the node");
}

/// The copy of a node that was silent may be needed later, when another node is down.
#[tokio::test(start_paused = true)]
async fn a_silent_node_is_asked_again_when_its_copy_is_needed() {
    let mut world = World::start(6, &[(4, 2)], 64 << 10).await;
    let client = world.client_of(1);
    world.kill(6).await;
    let gate = Gated::new(&content(1000, 2), 0);
    let shards = vec![
        shard("first", &content(1000, 1)),
        NewShard { name: "second".parse().unwrap(), source: gate.clone() },
    ];
    let (saver, options) = (client.clone(), SaveOptions { replace: false });
    let saving =
        tokio::spawn(async move { saver.save(&job(), Step(1), shards, options, quiet()).await });
    gate.reached.notified().await;
    while world.catalogue_keys("s/").is_empty() {
        tokio::task::yield_now().await;
    }
    world.boot(6);
    world.kill(5).await;
    gate.open();
    saving.await.unwrap().unwrap();
    let shown = client.show_step(&job(), None).await.unwrap();
    let (root, _) = shown.shards.iter().find(|(root, _)| root.name.as_str() == "second").unwrap();
    let scope = RecordScope::Shard(root.shard);
    let leaves = world.nodes[&6].store().get_record_file(scope, "leaves").unwrap();
    assert!(leaves.is_some(), "k-1 nodes may lack the leaves, and one is down");
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_of_one_step_holds_up_no_removal_of_another() {
    let mut world = World::start(5, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let files = |world: &World| files_below(&*world.machines[1].disk, "shards").len();
    save(&client, 1, &[("weights", &content(100_000, 1))]).await;
    let of_first = files(&world);
    save(&client, 2, &[("weights", &content(100_000, 2))]).await;
    assert!(files(&world) > of_first);
    world.kill(1).await;
    let _ = client.remove_step(&job(), Step(2)).await;
    damage_record(&world, &checkpoint_key(job().at(Step(1))));
    world.boot(1);
    world.until_live(5).await;
    tokio::time::sleep(100 * world.lease).await;
    assert_eq!(files(&world), of_first, "the removal went on");
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_of_one_step_or_job_holds_up_no_launch_of_another() {
    let world = World::start(5, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let launch = |number| LaunchId([number; 16]);
    register(&client, launch(1), None).await.unwrap();
    save(&client, 1, &[("weights", &content(100_000, 1))]).await;
    damage_record(&world, &checkpoint_key(job().at(Step(1))));
    register(&client, launch(2), None).await.unwrap();

    let other: Job = "another".parse().unwrap();
    let claim = LaunchClaim::After { newest: None };
    client.register_launch(&other, launch(3), None, claim).await.unwrap();
    damage_record(&world, &launch_order_key(&job()));
    let listed = client.list_newest_launches().await.unwrap();
    assert_eq!(listed.iter().map(|view| &view.job).collect::<Vec<_>>(), [&other]);
}

/// The disk of the catalogue server is replaced. It must not answer that there are no checkpoints.
#[tokio::test(start_paused = true)]
async fn a_catalogue_server_with_an_empty_disk_stands_down_and_can_be_rebuilt() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    world.kill(0).await;
    world.replace(0);
    world.boot(0);
    tokio::time::sleep(5 * world.lease).await;
    assert!(!world.nodes[&0].is_writable_catalogue_server());
    let client = world.client_of_all(&[0, 1]);
    assert_exact(&client, 1).await;
    let status = client.status().await.unwrap();
    let mut notes =
        status.nodes.iter().flat_map(|node| node.held.iter().flat_map(|held| &held.notes));
    assert!(
        notes.any(|note| note.contains("new") && note.contains("catalogue rebuild")),
        "{status:?}"
    );
    rebuild_on(&client, 0, false).await.unwrap();
    serves(&world, 0).await;
    world.until_live(6).await;
    assert_exact(&client, 1).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
}

/// Overwrites the end of a record in the catalogue.
fn damage_record(world: &World, key: &str) {
    let key = format!("k/{key}");
    let stored = world.map().get(key.as_bytes()).unwrap().unwrap();
    let damaged = [&stored[..8], &[0xff; 20]].concat();
    world.map().apply(Batch::new().put(key, damaged)).unwrap();
}
