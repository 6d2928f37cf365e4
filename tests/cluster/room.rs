//! The room that a disk keeps above its high-water mark: for what was saved, not for what is new (docs/semantics.md, 7).

use rapidraid::client::{Client, ClientError, SaveOptions};
use rapidraid::format::file::FileKey;
use rapidraid::id::{Step, StripeId};
use rapidraid::kind::Kind;
use rapidraid::store::Disk;
use rapidraid::wire::calls::PlanChoice;

use crate::world::{World, content, job, options, quiet, read_file, restore, save, shard};

const MARK_PERCENT: u64 = 85;

fn used_bytes(disk: &dyn Disk) -> u64 {
    let space = disk.space().unwrap();
    space.total_bytes - space.free_bytes
}

/// Makes the disks so small that what lies there takes just less than the mark.
fn shrink_disks(world: &World) {
    for machine in &world.machines[1..] {
        machine.disk.set_capacity(used_bytes(&*machine.disk) * 100 / (MARK_PERCENT - 1));
    }
}

/// Somebody else's file takes each disk over the mark.
fn fill_disks(world: &World) {
    for machine in &world.machines[1..] {
        let total_bytes = machine.disk.space().unwrap().total_bytes;
        let missing = total_bytes * MARK_PERCENT / 100 + 1 - used_bytes(&*machine.disk);
        let full = machine.disk.create_new("full").unwrap();
        full.write_at(&content(missing as usize, 9), 0).unwrap();
    }
}

async fn save_step_2(client: &Client, len: usize) -> Result<(), ClientError> {
    let shards = vec![shard("b", &content(len, 2))];
    client.save(&job(), Step(2), shards, SaveOptions::default(), quiet()).await.map(drop)
}

async fn archive(world: &World, client: &Client) {
    let chain = options(PlanChoice::Chain);
    let report = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await.unwrap();
    assert_eq!((report.undropped, report.notes), (0, Vec::new()));
    let held = world.assert_invariant(client, 1).await;
    assert_eq!((held.archived, held.pieces, held.replicas), (held.stripes, 6 * held.stripes, 0));
}

#[tokio::test(start_paused = true)]
async fn disks_full_of_replicas_up_to_the_mark_are_archived() {
    let world = World::start(7, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(10_000_000, 1);
    save(&client, 1, &[("a", &bytes)]).await;
    shrink_disks(&world);
    let refused = save_step_2(&client, 1_000_000).await.unwrap_err();
    assert!(refused.to_string().contains("high-water mark"), "{refused}");
    archive(&world, &client).await;
    // The pieces take three quarters of what the replicas took.
    save_step_2(&client, 1_000_000).await.unwrap();
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "a") == bytes);
    world.assert_swept(&client).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn above_the_mark_a_lost_replica_is_made_again_and_archived() {
    let world = World::start(7, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(10_000_000, 1);
    save(&client, 1, &[("a", &bytes)]).await;
    shrink_disks(&world);
    let shard = client.show(&job(), None).await.unwrap().shards[0].0.shard;
    let lost = FileKey::replica(StripeId { shard, index: 0 }, 0);
    assert!(world.nodes.values().any(|node| node.store().remove(lost).unwrap()));
    fill_disks(&world);
    let refused = save_step_2(&client, 1000).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("high-water mark"), "{refused}");
    archive(&world, &client).await;
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "a") == bytes);
    world.assert_swept(&client).await;
    world.assert_idle().await;
}

/// A foreign file takes the last byte of one node's disk.
#[tokio::test(start_paused = true)]
async fn an_archiving_that_meets_a_full_disk_ends_at_once_and_names_the_node() {
    let world = World::start(6, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(1_000_000, 1);
    save(&client, 1, &[("a", &bytes)]).await;
    let disk = world.machines[3].disk.clone();
    disk.set_capacity(used_bytes(&*disk));
    let began = tokio::time::Instant::now();
    let chain = options(PlanChoice::Chain);
    let refused = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await.unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("node03") && text.contains("no space left"), "{text}");
    assert!(text.contains("free some"), "{text}");
    assert!(began.elapsed().as_secs() < 30, "{:?}: {text}", began.elapsed());
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "a") == bytes);
    // Somebody makes room, and a daemon goes on by itself.
    disk.set_capacity(1 << 30);
    world.until("archived", || world.catalogue_keys("a/").is_empty()).await;
}
