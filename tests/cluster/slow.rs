//! Restores from nodes with slow links: all nodes are read alike. If one of them is slower, other
//! nodes are read instead, and a slow node is waited for if its data is needed (docs/semantics.md,
//! 6).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rapidraid::client::{Client, RestoreRequest};
use rapidraid::id::Step;
use rapidraid::store::{Disk, MemoryDisk};
use rapidraid::units::GRAIN_BYTES;
use rapidraid::wire::calls::{PlanChoice, ReadFile, VerifyFile};
use tokio::time::Instant;

use world::{World, content, job, options, quiet, read_file, restore, save};

/// Time per 64 KiB at a trickling node. Each grain arrives before a reader would treat the node as
/// silent.
const TRICKLE: Duration = Duration::from_millis(900);
/// Time in which a reader notices that a node trickles.
const NOTICED: Duration = Duration::from_millis(1100);
/// Time per 64 KiB at a healthy node.
const HEALTHY: Duration = Duration::from_millis(55);

/// Starts a cluster with paced sending and one step in eight stripes of eight grains. Returns the
/// world, a client and the step's length in bytes.
async fn saved(nodes: usize, code: (u8, u8), archived: bool) -> (World, Client, usize) {
    let world = World::simulated(nodes, &[code], 512 << 10, 3).await;
    let client = world.client();
    let len = 8 * usize::from(code.1) * (512 << 10) - 1000;
    save(&client, 1, &[("a", &content(len, 1))]).await;
    if archived {
        let chain = options(PlanChoice::Chain);
        let archived = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await.unwrap();
        assert_eq!(archived.undropped, 0);
    }
    for index in 0..=nodes {
        world.slow(index, HEALTHY);
    }
    (world, client, len)
}

/// Returns the time that a restore takes. Checks that the bytes are right and each was written
/// once.
async fn timed(world: &World, client: &Client, len: usize) -> Duration {
    let (began, writes) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let out = Arc::new(MemoryDisk::new(1 << 30));
    let request = RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
    let count = writes.clone();
    let progress = Arc::new(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let report = client.restore(&job(), Some(Step(1)), request, progress).await.unwrap();
    let lasted = began.elapsed();
    assert!(read_file(&*out, "a") == content(len, 1));
    // Writes are counted by grain: a source that takes over begins where the previous one ended,
    // not earlier.
    assert_eq!(writes.load(Ordering::Relaxed), len.div_ceil(GRAIN_BYTES as usize));
    assert_eq!(report.incidents, Vec::<String>::new(), "slow is no incident");
    world.assert_idle().await;
    lasted
}

/// Returns the number of files that were read from each node.
fn files_read(world: &World) -> BTreeMap<usize, usize> {
    let asked = world.requests.of::<ReadFile>();
    let files = |index: usize| {
        let name = format!("node{index:02}");
        (index, asked.iter().filter(|(_, to, _)| *to == name).count())
    };
    (1..world.machines.len()).map(files).collect()
}

/// Returns the node that was asked for the most files, after all files were read.
fn busiest(world: &World) -> usize {
    files_read(world).into_iter().max_by_key(|(_, count)| *count).unwrap().0
}

#[tokio::test(start_paused = true)]
async fn replicas_and_pieces_are_read_from_all_nodes_alike() {
    for archived in [false, true] {
        let (world, client, len) = saved(6, (6, 4), archived).await;
        world.requests.listen();
        timed(&world, &client, len).await;
        let files = files_read(&world);
        // Eight stripes have 32 blocks. Each node has 10 or 11 of their replicas, or eight of their 48
        // pieces, and is asked for about five.
        assert_eq!(files.values().sum::<usize>(), 32);
        assert!(files.values().all(|count| (4..=7).contains(count)), "{archived}: {files:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_source_of_eleven_that_trickles_is_passed_over() {
    for (nodes, code, archived) in [(16, (16, 11), true), (5, (4, 2), false)] {
        let (world, client, len) = saved(nodes, code, archived).await;
        world.requests.listen();
        let healthy = timed(&world, &client, len).await;
        let slow = busiest(&world);
        world.slow(slow, TRICKLE);
        world.requests.listen();
        let lasted = timed(&world, &client, len).await;
        let limit = 2 * healthy + NOTICED;
        assert!(lasted < limit, "{lasted:?}, and {healthy:?} when all are well");
        let asked = world.requests.of::<ReadFile>();
        let in_the_middle: Vec<_> = asked.iter().filter(|(_, _, read)| read.from > 0).collect();
        let slow = format!("node{slow:02}");
        assert!(!in_the_middle.is_empty() && in_the_middle.iter().all(|(_, to, _)| *to != slow));
        for (_, _, ReadFile { stripe, file, from, .. }) in &in_the_middle {
            // Every replacement source is asked from the same grain on in a stripe or block,
            // however much it had delivered before.
            let same = |read: &ReadFile| read.stripe == *stripe && (archived || read.file == *file);
            assert!(from % GRAIN_BYTES == 0);
            assert!(in_the_middle.iter().all(|(_, _, read)| !same(read) || read.from == *from));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn when_all_that_is_left_is_slow_it_is_waited_for() {
    // With pieces, four are left and are read in parallel. With replicas, one node's are missing
    // and the rest is read one after the other.
    for (archived, killed, in_a_row) in [(true, 1..=2, 8 * 8), (false, 1..=1, 4 * 8 * 8)] {
        let (mut world, client, len) = saved(6, (6, 4), archived).await;
        for index in killed {
            world.kill(index).await;
        }
        for index in 3..=6 {
            world.slow(index, TRICKLE);
        }
        let lasted = timed(&world, &client, len).await;
        // Four stripes are read at the same time.
        let needed = TRICKLE * in_a_row / 4;
        assert!(lasted < needed + Duration::from_secs(10), "{lasted:?} of {needed:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_holder_is_asked_when_the_quick_one_cannot_give_its_file() {
    let world = World::simulated(4, &[(4, 2)], 128 << 10, 3).await;
    let client = world.client();
    save(&client, 1, &[("a", &content(200_000, 1))]).await;
    // The file is removed without the node's knowledge, so the node still lists the block.
    let holders = world.files(|path| path.ends_with("block-00.rep"));
    let [(quick, path), (slow, _)] = &holders[..] else { panic!("{holders:?}") };
    world.machines[*quick].disk.remove(path).unwrap();
    // Even a short answer of this node arrives long after the other nodes have delivered enough.
    world.slow(*slow, Duration::from_secs(200));
    world.requests.listen();
    let listed = format!("node{quick:02}");
    let suspected = || world.requests.of::<VerifyFile>().iter().any(|(_, to, _)| *to == listed);
    let recovers = async {
        world.until("the node is told that it lists what it does not give", suspected).await;
        world.slow(*slow, Duration::ZERO);
    };
    let (restored, ()) = tokio::join!(restore(&client, 1), recovers);
    let (out, report) = restored.unwrap();
    assert!(read_file(&*out, "a") == content(200_000, 1));
    assert!(report.incidents.iter().any(|text| text.contains("left out")), "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn nobody_is_slow_when_all_are() {
    // A reader behind a thin link: 22 streams of 0.2 MB/s.
    for archived in [true, false] {
        let (world, client, len) = saved(16, (16, 11), archived).await;
        for index in 1..=16 {
            world.slow(index, Duration::from_millis(300));
        }
        world.requests.listen();
        timed(&world, &client, len).await;
        let asked = world.requests.of::<ReadFile>();
        assert!(asked.iter().all(|(_, _, read)| read.from == 0), "a source was passed over");
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_is_the_only_one_does_not_excuse_itself() {
    let (world, client, _) = saved(5, (4, 2), false).await;
    let read = async || {
        let (began, out) = (Instant::now(), Arc::new(MemoryDisk::new(1 << 30)));
        let (shard, range) = (Some("a".parse().unwrap()), Some(0..450_000));
        let request = RestoreRequest { out, force: false, shard, range };
        client.restore(&job(), Some(Step(1)), request, quiet()).await.unwrap();
        began.elapsed()
    };
    world.requests.listen();
    read().await;
    world.slow(busiest(&world), TRICKLE);
    let lasted = read().await;
    assert!(lasted < Duration::from_secs(4), "{lasted:?} for seven grains of one block");
}
