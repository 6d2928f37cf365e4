//! Archivings that conflict with each other or with removals, replacements and restores of their
//! step, and archivings whose coordinator or nodes die in the middle.

use std::time::Duration;

use rapidraid::client::{Client, RestoreRequest, SaveOptions};
use rapidraid::format::file::FileKey;
use rapidraid::id::{Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::disk::{DiskEntry, DiskLock, Space};
use rapidraid::store::{Disk, DiskError, DiskFile, MemoryDisk};
use rapidraid::wire::calls::{ArchiveEvent, ArchiveOptions, PlanChoice};
use tokio::sync::mpsc;

use world::{World, content, job, options, quiet, read_file, restore, save, shard};

const BLOCK: u64 = 64 << 10;
const STRIPES: usize = 8;
const LEN: usize = STRIPES * 2 * BLOCK as usize - 1000;

fn one_by_one() -> ArchiveOptions {
    ArchiveOptions { parallel: 1, ..options(PlanChoice::Chain) }
}

/// Starts to archive step 1. Returns a receiver of its events, and its task.
fn archiving(
    client: Client,
) -> (
    mpsc::UnboundedReceiver<ArchiveEvent>,
    tokio::task::JoinHandle<Result<u64, rapidraid::client::ClientError>>,
) {
    let (tell, told) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        let mut on_event = |event: &ArchiveEvent| drop(tell.send(event.clone()));
        let report = client.archive(&job(), Some(Step(1)), one_by_one(), &mut on_event).await?;
        Ok(report.stripes)
    });
    (told, task)
}

/// Saves step 1 and archives it through node 2. Returns the task after `point` + 1 events.
async fn archiving_at(
    world: &World,
    client: &Client,
    point: usize,
) -> tokio::task::JoinHandle<Result<u64, rapidraid::client::ClientError>> {
    save(client, 1, &[("weights", &content(LEN, 1))]).await;
    let (mut told, task) = archiving(world.client_of(2));
    for _ in 0..=point {
        told.recv().await.unwrap();
    }
    task
}

async fn assert_exact(client: &Client, seed: u64) {
    let (out, _) = restore(client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, seed));
}

/// Waits until all stripes are archived. The invariant must hold in every state on the way.
async fn until_archived(world: &World, client: &Client) {
    for _ in 0..600 {
        let held = world.assert_invariant(client, 1).await;
        if held.archived == STRIPES {
            return;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    panic!("nobody went on");
}

/// Waits until all replicas are dropped and the archiving has ended, without a new request.
async fn until_dropped(world: &World) {
    let dropped = || {
        world.files(|path| path.ends_with(".rep")).is_empty()
            && world.catalogue_keys("a/").is_empty()
    };
    world.until("the drops", dropped).await;
}

#[tokio::test(start_paused = true)]
async fn another_daemon_goes_on_when_the_coordinator_died() {
    // The coordinator dies after this many events (one at the start, then two per stripe) and this
    // many turns of the scheduler. Disks and arithmetic run on their own threads, so some of the
    // late points may come after the end.
    let mut taken_over = 0;
    for point in 0..24u64 {
        let mut world = World::start(6, &[(4, 2)], BLOCK).await;
        let client = world.client_of(0);
        save(&client, 1, &[("weights", &content(LEN, point))]).await;
        let coordinator = 3;
        let (mut told, task) = archiving(world.client_of(coordinator));
        for _ in 0..=point / 3 {
            told.recv().await.unwrap();
        }
        for _ in 0..(point % 3) * 40 {
            tokio::task::yield_now().await;
        }
        world.kill(coordinator).await;
        let ended = task.await.unwrap();
        let held = world.assert_invariant(&client, 1).await;
        assert_exact(&client, point).await;
        if ended.is_ok() || held.archived == STRIPES {
            continue;
        }
        taken_over += 1;

        // No client repeats the request. After the lease has ended, another daemon resumes the
        // archiving.
        until_archived(&world, &client).await;
        assert_exact(&client, point).await;

        world.boot(coordinator);
        world.until_live(6).await;
        until_dropped(&world).await;
        let other = world.client_of(4);
        let report = other.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
        assert_eq!((report.stripes, report.undropped), (STRIPES as u64, 0));
        let held = world.assert_invariant(&client, 1).await;
        assert_eq!((held.archived, held.replicas), (STRIPES, 0));
        assert_eq!(world.files(|path| path.ends_with(".rep")), []);
        assert_exact(&client, point).await;
        world.assert_idle().await;
    }
    assert!(taken_over >= 8, "the coordinator died in the middle at {taken_over} of 24 points");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_dies_in_mid_archiving_costs_nothing() {
    for (point, victim) in [(0, 1), (1, 2), (2, 4), (4, 5), (7, 6)] {
        let mut world = World::start(6, &[(4, 2)], BLOCK).await;
        let client = world.client_of(0);
        save(&client, 1, &[("weights", &content(LEN, point))]).await;
        let (mut told, task) = archiving(world.client_of(3));
        for _ in 0..=point {
            told.recv().await.unwrap();
        }
        world.kill(victim).await;
        world.assert_invariant(&client, 1).await;
        assert_exact(&client, point).await;
        // The archiving ends by itself, either completely or with a list of the remaining work,
        // which is retried.
        let _ = task.await.unwrap();
        world.assert_invariant(&client, 1).await;
        until_archived(&world, &client).await;
        assert_exact(&client, point).await;
        world.boot(victim);
        world.until_live(6).await;
        until_dropped(&world).await;
        let report = client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
        assert_eq!((report.stripes, report.undropped), (STRIPES as u64, 0));
        let held = world.assert_invariant(&client, 1).await;
        assert_eq!((held.archived, held.replicas), (STRIPES, 0));
        world.assert_idle().await;
    }
}

/// The waits between two tries have grown to many lease periods when the node comes back.
#[tokio::test(start_paused = true)]
async fn a_drop_that_waits_for_a_node_is_ordered_as_soon_as_the_node_is_back() {
    let mut world = World::start(8, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    world.kill(2).await;
    let report = client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
    assert!(report.undropped > 0);
    tokio::time::sleep(40 * world.lease).await;
    world.boot(2);
    let began = tokio::time::Instant::now();
    until_dropped(&world).await;
    assert!(began.elapsed() < 4 * world.lease, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_drop_that_a_node_missed_is_ordered_when_it_is_back_and_pieces_are_seen() {
    let mut world = World::start(8, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let victim = 2;
    world.kill(victim).await;
    let report = client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
    assert_eq!(report.stripes, STRIPES as u64);
    assert!(report.undropped > 0);
    let of_victim = |world: &World, part: &str, end: &str| {
        let files = world.files(|path| path.contains(part) && path.ends_with(end));
        files.iter().filter(|(node, _)| *node == victim).count()
    };
    let (_, left) = world.files(|path| path.ends_with(".rep")).remove(0);
    let stripe = left.rsplit_once("block-").unwrap().0;
    let (all, replicas) = (of_victim(&world, "", ".rep"), of_victim(&world, stripe, ".rep"));
    assert!(replicas > 0 && all > replicas);
    // The run of an earlier owner left a piece on this node that the receipt ascribes to another
    // node.
    let pieces = world.files(|path| path.starts_with(&format!("{stripe}piece-")));
    let disks = [pieces[0].0, victim].map(|index| world.machines[index].disk.clone());
    let bytes = read_file(&*disks[0], &pieces[0].1);
    disks[1].create_new(&pieces[0].1).unwrap().write_at(&bytes, 0).unwrap();

    // Three of the stripe's four pieces are down: the rest is not enough to drop any replica.
    // Replicas of other stripes are dropped.
    let away: Vec<usize> = pieces.iter().map(|(index, _)| *index).take(3).collect();
    for index in &away {
        world.kill(*index).await;
    }
    // The holder of the remaining piece has its receipt, and still a replica.
    let last = pieces[3].0;
    world.kill(last).await;
    let replica = read_file(&*world.machines[victim].disk, &left);
    let disk = &world.machines[last].disk;
    disk.create_new(&left).unwrap().write_at(&replica, 0).unwrap();
    world.boot(last);
    world.boot(victim);
    world.until("other drops", || of_victim(&world, "", ".rep") < all).await;
    tokio::time::sleep(10 * world.lease).await;
    assert_eq!(of_victim(&world, stripe, ".rep"), replicas);
    assert!(world.files(|path| path == left).contains(&(last, left.clone())));
    for index in away {
        world.boot(index);
    }
    until_dropped(&world).await;
    // No receipt ascribes the piece to this node, whose own collection drops it.
    let stray = (victim, pieces[0].1.clone());
    world.until("the stray piece", || !world.files(|path| path == stray.1).contains(&stray)).await;
    let held = world.assert_invariant(&client, 1).await;
    assert_eq!((held.archived, held.pieces, held.replicas), (STRIPES, 4 * STRIPES, 0));
    assert_exact(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn what_nobody_asks_a_node_to_drop_goes_all_the_same() {
    let mut world = World::start(8, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    for step in 1..=2 {
        save(&client, step, &[("weights", &content(LEN, step))]).await;
    }
    let is_replica = |path: &str| path.ends_with(".rep");
    let newer = client.list_steps(None).await.unwrap().remove(1).saved.save.to_string();
    let kept = world.files(|path| is_replica(path) && path.contains(&newer));
    let (holder, left) = world.files(|path| is_replica(path) && !path.contains(&newer)).remove(0);
    let bytes = read_file(&*world.machines[holder].disk, &left);
    client.archive(&job(), Some(Step(1)), one_by_one(), &mut |_| ()).await.unwrap();
    assert_eq!(world.files(is_replica), kept);

    // Simulate spares of a stopped archiving that have been down since. One has a piece of the
    // stripe, the others have nothing of it.
    let folder = left.rsplit_once("block-").unwrap().0;
    for spare in (0..8).filter(|spare| *spare != holder) {
        world.kill(spare).await;
        let disk = &world.machines[spare].disk;
        for (end, _) in folder.match_indices('/') {
            disk.create_dir(&folder[..end]).unwrap();
        }
        disk.create_new(&left).unwrap().write_at(&bytes, 0).unwrap();
        world.boot(spare);
    }
    assert_eq!(world.files(|path| path == left).len(), 7);
    world.until("they are dropped", || world.files(|path| path == left).is_empty()).await;
    tokio::time::sleep(10 * world.lease).await;
    assert_eq!(world.files(is_replica), kept, "what is replicated stays");

    // A node without the receipt accepts another node's receipt only if all pieces are where it
    // says. While one of their nodes is down, it does not.
    let pieces = world.files(|path| path.starts_with(folder) && path.ends_with(".pc"));
    let away = pieces[0].0;
    let spare = (1..8).find(|spare| pieces.iter().all(|(node, _)| node != spare)).unwrap();
    for receipt in world.files(|path| path.starts_with(folder) && path.contains("/receipt-")) {
        if receipt.0 == spare {
            world.machines[spare].disk.remove(&receipt.1).unwrap();
        }
    }
    world.kill(away).await;
    world.kill(spare).await;
    world.machines[spare].disk.create_new(&left).unwrap().write_at(&bytes, 0).unwrap();
    world.boot(spare);
    tokio::time::sleep(10 * world.lease).await;
    assert_eq!(world.files(|path| path == left), [(spare, left.clone())]);
    world.boot(away);
    world.until("it is dropped", || world.files(|path| path == left).is_empty()).await;
    let held = world.assert_invariant(&client, 1).await;
    assert_eq!((held.archived, held.pieces), (STRIPES, 4 * STRIPES));
    assert_exact(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_block_both_of_whose_nodes_are_away_waits_for_them() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let holders = world.files(|path| path.ends_with("/00000000/block-00.rep"));
    assert_eq!(holders.len(), 2);
    for (index, _) in &holders {
        world.kill(*index).await;
    }
    let error = client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    world.assert_invariant(&client, 1).await;
    for (index, _) in &holders {
        world.boot(*index);
    }
    until_archived(&world, &client).await;
    until_dropped(&world).await;
    assert_exact(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_archiving_watches_the_first() {
    let world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let (mut told, task) = archiving(world.client_of(2));
    told.recv().await.unwrap();
    let second = world.client_of(3);
    let report = second.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
    assert_eq!((report.stripes, report.undropped, report.reports.len()), (STRIPES as u64, 0, 0));
    assert!(report.total_bytes > 0 && report.notes[0].contains("node02"), "{report:?}");
    assert_eq!(task.await.unwrap().unwrap(), STRIPES as u64);
    // A further archiving finds nothing to do and reports that.
    let report = second.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
    assert_eq!((report.stripes, report.undropped, report.reports.len()), (STRIPES as u64, 0, 0));
    world.assert_invariant(&client, 1).await;
    assert_exact(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_archiving_goes_on_when_the_first_coordinator_dies() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let (mut told, _task) = archiving(world.client_of(3));
    told.recv().await.unwrap();
    let second = world.client_of(4);
    let watching =
        tokio::spawn(async move { second.archive(&job(), None, one_by_one(), &mut |_| ()).await });
    world.kill(3).await;
    let report = watching.await.unwrap().unwrap();
    assert_eq!(report.stripes, STRIPES as u64, "{report:?}");
    assert!(report.notes[0].contains("node03"), "{report:?}");
    world.boot(3);
    until_dropped(&world).await;
    assert_exact(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_step_that_is_removed_in_mid_archiving_is_gone() {
    for point in 0..6 {
        let world = World::start(4, &[(4, 2)], BLOCK).await;
        let client = world.client();
        let task = archiving_at(&world, &client, point).await;
        client.remove_step(&job(), Step(1)).await.unwrap();
        let ended = task.await.unwrap();
        let kind = ended.unwrap_err().kind();
        assert!(
            matches!(kind, ErrorKind::Fenced | ErrorKind::NotFound | ErrorKind::Lost),
            "{kind:?}"
        );
        world.assert_swept(&client).await;
        world.assert_idle().await;
    }
}

/// The archive request concerned the replaced save, not its successor.
#[tokio::test(start_paused = true)]
async fn a_step_that_is_replaced_in_mid_archiving_stays_replicated() {
    let mut ended = 0;
    for point in 0..6 {
        let world = World::start(4, &[(4, 2)], BLOCK).await;
        let client = world.client();
        let task = archiving_at(&world, &client, point).await;
        let newer = vec![shard("weights", &content(9, 2))];
        client.save(&job(), Step(1), newer, SaveOptions { replace: true }, quiet()).await.unwrap();
        ended += u32::from(task.await.unwrap().is_err());
        tokio::time::sleep(10 * world.lease).await;
        let held = world.assert_invariant(&client, 1).await;
        assert_eq!((held.replicas, held.archived), (2, 0), "{held:?}");
        assert_eq!(world.catalogue_keys("a/"), [""; 0]);
        world.assert_idle().await;
    }
    assert!(ended > 0, "none was in the middle");
}

/// A waiting archive request belongs to the save for which it was made, not to the step.
#[tokio::test(start_paused = true)]
async fn what_replaces_a_step_whose_archiving_waits_stays_replicated() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    world.kill(6).await;
    let report = client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
    assert!(report.undropped > 0, "{report:?}");
    let newer = vec![shard("weights", &content(9, 2))];
    client.save(&job(), Step(1), newer, SaveOptions { replace: true }, quiet()).await.unwrap();
    assert_eq!(world.catalogue_keys("a/").len(), 1);
    world.boot(6);
    world.until("the wish gone", || world.catalogue_keys("a/").is_empty()).await;
    let held = world.assert_invariant(&client, 1).await;
    assert_eq!((held.replicas, held.archived), (2, 0), "{held:?}");
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn the_watcher_may_go() {
    let world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let (mut told, task) = archiving(world.client_of(2));
    told.recv().await.unwrap();
    let began = tokio::time::Instant::now();
    task.abort();
    let _ = task.await;
    world
        .until("archived without a watcher", || {
            world.files(|path| path.ends_with(".rep")).is_empty()
        })
        .await;
    assert!(began.elapsed() < world.lease, "it was the coordinator that went on");
    let held = world.assert_invariant(&client, 1).await;
    assert_eq!((held.archived, held.pieces), (STRIPES, 4 * STRIPES));
    assert_exact(&client, 1).await;
    world.assert_idle().await;
}

/// The moment of a change to the cluster during a restore.
#[derive(Clone, Copy, PartialEq)]
enum Moment {
    /// Before the restore asks the nodes for their holdings.
    BeforePlan,
    /// After the plan is made and before the first read.
    AfterPlan,
}

/// A destination that triggers the change: the restore inspects it before the plan and writes to it
/// after.
struct Hooked<F> {
    inner: MemoryDisk,
    moment: Moment,
    hook: std::sync::Mutex<Option<F>>,
}

impl<F: FnOnce() + Send + 'static> Hooked<F> {
    fn at(&self, moment: Moment) {
        if moment == self.moment
            && let Some(hook) = self.hook.lock().unwrap().take()
        {
            hook();
        }
    }
}

impl<F: FnOnce() + Send + 'static> Disk for Hooked<F> {
    fn create_new(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        self.at(Moment::AfterPlan);
        self.inner.create_new(path)
    }
    fn open(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        self.at(Moment::BeforePlan);
        self.inner.open(path)
    }
    fn open_to_write(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        self.inner.open_to_write(path)
    }
    fn rename(&self, from: &str, to: &str) -> Result<(), DiskError> {
        self.inner.rename(from, to)
    }
    fn remove(&self, path: &str) -> Result<(), DiskError> {
        self.inner.remove(path)
    }
    fn create_dir(&self, path: &str) -> Result<bool, DiskError> {
        self.inner.create_dir(path)
    }
    fn remove_dir_if_empty(&self, path: &str) -> Result<bool, DiskError> {
        self.inner.remove_dir_if_empty(path)
    }
    fn list(&self, path: &str) -> Result<Vec<DiskEntry>, DiskError> {
        self.inner.list(path)
    }
    fn sync_dir(&self, path: &str) -> Result<(), DiskError> {
        self.inner.sync_dir(path)
    }
    fn sync_all(&self) -> Result<(), DiskError> {
        self.inner.sync_all()
    }
    fn space(&self) -> Result<Space, DiskError> {
        self.inner.space()
    }
    fn lock(&self, path: &str) -> Result<DiskLock, DiskError> {
        self.inner.lock(path)
    }
}

/// Restores step 1 while `hook` runs at `moment`.
async fn restore_across<F>(
    client: &Client,
    moment: Moment,
    hook: F,
) -> Result<MemoryDisk, rapidraid::client::ClientError>
where
    F: Future<Output = ()> + Send + 'static,
{
    let inner = MemoryDisk::new(64 << 20);
    let runtime = tokio::runtime::Handle::current();
    let hook = move || tokio::task::block_in_place(|| runtime.block_on(hook));
    let out = Hooked { inner: inner.clone(), moment, hook: std::sync::Mutex::new(Some(hook)) };
    let request =
        RestoreRequest { out: std::sync::Arc::new(out), force: false, shard: None, range: None };
    client.restore(&job(), Some(Step(1)), request, quiet()).await?;
    Ok(inner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_goes_on_when_the_step_is_archived_under_it() {
    let world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 4))]).await;
    let archiver = world.client();
    let archive = async move {
        let report = archiver.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
        assert_eq!(report.undropped, 0);
    };
    let out = restore_across(&client, Moment::AfterPlan, archive).await.unwrap();
    assert!(read_file(&out, "weights") == content(LEN, 4));
    world.assert_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_goes_on_when_replicas_are_dropped_under_it() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 4))]).await;
    // The step is archived, and its replicas still exist.
    let replicas = world.files(|path| path.ends_with(".rep"));
    let bytes: Vec<_> = replicas
        .iter()
        .map(|(index, path)| read_file(&*world.machines[*index].disk, path))
        .collect();
    client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
    for ((index, path), bytes) in replicas.iter().zip(bytes) {
        let file = world.machines[*index].disk.create_new(path).unwrap();
        file.write_at(&bytes, 0).unwrap();
    }
    for index in 1..=4 {
        world.kill(index).await;
        world.boot(index);
    }
    world.until_live(4).await;
    let shown = client.show_step(&job(), None).await.unwrap();
    let shard = shown.shards[0].0.shard;
    let nodes: Vec<_> = world.nodes.values().cloned().collect();
    let drop = async move {
        let mut dropped = 0;
        for node in nodes {
            for index in 0..STRIPES as u32 {
                let stripe = StripeId { shard, index };
                for block in 0..2 {
                    let key = FileKey::replica(stripe, block);
                    dropped += usize::from(node.store().remove_file(key).unwrap());
                }
            }
        }
        assert_eq!(dropped, replicas.len());
    };
    let out = restore_across(&client, Moment::AfterPlan, drop).await.unwrap();
    assert!(read_file(&out, "weights") == content(LEN, 4));
    world.assert_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_says_so_when_the_step_is_removed_under_it() {
    for (archived, moment) in [
        (false, Moment::AfterPlan),
        (true, Moment::AfterPlan),
        (false, Moment::BeforePlan),
        (true, Moment::BeforePlan),
    ] {
        let world = World::start(4, &[(4, 2)], BLOCK).await;
        let client = world.client();
        save(&client, 1, &[("weights", &content(LEN, 5))]).await;
        if archived {
            client.archive(&job(), None, one_by_one(), &mut |_| ()).await.unwrap();
        }
        let remover = world.client();
        let remove = async move { drop(remover.remove_step(&job(), Step(1)).await.unwrap()) };
        let error = restore_across(&client, moment, remove).await.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains("removed or replaced meanwhile"), "{error}");
        world.assert_idle().await;
    }
}
