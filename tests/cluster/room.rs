//! The space above a disk's high-water mark is reserved for saved data and closed to new saves
//! (docs/semantics.md, 7).

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::client::{Client, ClientError, NewShard, SaveCode, SaveDecisions, SaveOptions};
use rapidraid::format::file::FileKey;
use rapidraid::id::{SaveId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, MemoryDisk};
use rapidraid::wire::calls::PlanChoice;

use world::power::Leaves;
use world::{World, content, job, options, quiet, read_file, restore, save, shard};

const MARK_PERCENT: u64 = 85;

fn used_bytes(disk: &dyn Disk) -> u64 {
    let space = disk.space().unwrap();
    space.total_bytes - space.free_bytes
}

/// Shrinks the disks so that their present contents stay just below the mark.
fn shrink_disks(world: &World) {
    for machine in &world.machines[1..] {
        machine.disk.set_capacity(used_bytes(&*machine.disk) * 100 / (MARK_PERCENT - 1));
    }
}

/// Fills each disk with an unrelated file until it is over the mark.
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
    let began = tokio::time::Instant::now();
    let refused = save_step_2(&client, 1_000_000).await.unwrap_err();
    assert!(refused.to_string().contains("high-water mark"), "{refused}");
    assert!(began.elapsed().as_secs() < 2, "it took {:?} to say so", began.elapsed());
    archive(&world, &client).await;
    // The pieces take three quarters of the space that the replicas took.
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
    let shard = client.show_step(&job(), None).await.unwrap().shards[0].0.shard;
    let lost = FileKey::replica(StripeId { shard, index: 0 }, 0);
    assert!(world.nodes.values().any(|node| node.store().remove_file(lost).unwrap()));
    fill_disks(&world);
    let refused = save_step_2(&client, 1000).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("high-water mark"), "{refused}");
    for node in client.status().await.unwrap().nodes.into_iter().skip(1) {
        let notes = node.held.unwrap().notes.concat();
        assert!(notes.contains("at its high-water mark of 85 %"), "{notes}");
    }
    archive(&world, &client).await;
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "a") == bytes);
    world.assert_swept(&client).await;
    world.assert_idle().await;
}

/// An unrelated file takes the last byte of one node's disk.
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
    // Space becomes free, and a daemon resumes the archiving by itself.
    disk.set_capacity(1 << 30);
    world.until("archived", || world.catalogue_keys("a/").is_empty()).await;
}

/// No disk but the catalogue server's has room for one more byte. A step is still removed
/// everywhere, and the removal survives a power cut.
#[tokio::test(start_paused = true)]
async fn full_disks_are_emptied_by_removals() {
    let mut world = World::start(6, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(1_000_000, 1);
    for step in 1..=3 {
        save(&client, step, &[("a", &bytes)]).await;
    }
    for machine in &world.machines[1..] {
        machine.disk.set_capacity(used_bytes(&*machine.disk));
    }
    let before: Vec<u64> = world.machines[1..].iter().map(|m| used_bytes(&*m.disk)).collect();
    let answer = client.remove_step(&job(), Step(1)).await.unwrap();
    assert_eq!((answer.confirmed, answer.waiting), (6, vec![]));
    for (machine, before) in world.machines[1..].iter().zip(before) {
        assert!(used_bytes(&*machine.disk) < before, "{} has removed nothing", machine.name);
    }
    // Remove again, with one node down and another node that loses its power right afterwards.
    for machine in &world.machines[1..] {
        machine.disk.set_capacity(used_bytes(&*machine.disk));
    }
    world.kill(5).await;
    let removed = client.remove_step(&job(), Step(2)).await.unwrap();
    assert_eq!(removed.waiting.len(), 1);
    world.lose_unsynced(4, Leaves::Synced).await;
    world.boot(4);
    world.boot(5);
    world.until_live(6).await;
    for machine in &world.machines {
        machine.disk.set_capacity(1 << 30);
    }
    world.until("both are swept", || world.catalogue_keys("s/").len() == 1).await;
    let (out, _) = restore(&client, 3).await.unwrap();
    assert!(read_file(&*out, "a") == bytes);
    world.assert_swept(&client).await;
    world.assert_idle().await;
}

/// The list of the cluster's nodes does not fit on a node's disk. The node stays registered and
/// stores the list when there is room.
#[tokio::test(start_paused = true)]
async fn a_node_whose_disk_is_full_stays_registered() {
    let mut world = World::start(6, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    save(&client, 1, &[("a", &content(300_000, 1))]).await;
    let disk = world.machines[3].disk.clone();
    disk.set_capacity(used_bytes(&*disk));
    world.grow(1);
    world.until_live(7).await;
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    let status = client.status().await.unwrap();
    assert!(status.nodes.iter().all(|node| node.view.live), "{:?}", status.nodes);
    let notes = status.nodes[3].held.as_ref().unwrap().notes.join("\n");
    assert!(notes.contains("takes no writes") && notes.contains("no space left"), "{notes}");
    disk.set_capacity(1 << 30);
    let store = world.nodes[&3].store().clone();
    world.until("the list is stored", || store.read_members().unwrap().nodes.len() == 7).await;
    world.assert_idle().await;
}

/// Decisions that save one shard and fill the disks before the save is decided.
struct FillsDisks {
    bytes: Bytes,
    disks: Vec<Arc<MemoryDisk>>,
}

#[async_trait]
impl SaveDecisions for FillsDisks {
    fn assign_save_id(&self, attempt: u32) -> io::Result<SaveId> {
        Ok(SaveId([attempt as u8 + 1; 12]))
    }

    fn shards_for_code(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        Ok(vec![shard("a", &self.bytes)])
    }

    async fn approve_commit(&self) -> Result<(), String> {
        self.disks.iter().for_each(|disk| disk.set_capacity(used_bytes(&**disk)));
        Ok(())
    }
}

/// The commit marks fit on one node only. The save reports this and waits, and becomes visible when
/// there is room.
#[tokio::test(start_paused = true)]
async fn a_save_whose_marks_fit_nowhere_waits_and_says_so() {
    let world = World::start(6, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(500_000, 1);
    let disks = world.machines[1..].iter().map(|machine| machine.disk.clone()).collect();
    let decisions = Arc::new(FillsDisks { bytes: bytes.clone(), disks });
    let saved = client
        .save_with_decisions(&job(), Step(1), SaveOptions::default(), decisions, quiet())
        .await;
    let refused = saved.unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("no commit mark") && text.contains("no space left"), "{text}");
    assert!(text.contains("becomes visible"), "{text}");
    assert_eq!(client.list_steps(Some(&job())).await.unwrap().len(), 0);
    world.machines.iter().for_each(|machine| machine.disk.set_capacity(1 << 30));
    let mut listed = 0;
    for _ in 0..100 {
        listed = client.list_steps(Some(&job())).await.unwrap().len();
        if listed > 0 {
            break;
        }
        tokio::time::sleep(world.lease).await;
    }
    assert_eq!(listed, 1, "it is decided, and is never visible");
    let (out, _) = restore(&client, 1).await.unwrap();
    assert!(read_file(&*out, "a") == bytes);
    world.assert_idle().await;
}
