//! All loss patterns of a (16,11) stripe: restores survive the loss of every set of up to five
//! nodes, and refuse every set of six cleanly. This also holds after five machines were replaced.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits until it is up

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use rapidraid::client::{Client, ClientError};
use rapidraid::id::{NodeId, PeerName, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, MemoryDisk};
use rapidraid::wire::calls::{PlanChoice, RepairOptions};
use world::{World, address, content, job, options, read_file, save};

const N: usize = 16;
const WORKERS: usize = 4;
/// Size of the data in bytes: two stripes. The blocks of the last one are slightly longer than 64
/// KiB, and padded.
const LEN: usize = 11 * (128 << 10) + 11 * (64 << 10) + 1;

/// Returns all sets of `lost` nodes, as node numbers from 1.
fn patterns(lost: usize) -> Vec<Vec<usize>> {
    (0u32..1 << N)
        .filter(|set| set.count_ones() as usize == lost)
        .map(|set| (1..=N).filter(|node| set >> (node - 1) & 1 == 1).collect())
        .collect()
}

async fn archived_world() -> (World, Bytes) {
    let world = World::start(N, &[(16, 11)], 128 << 10).await;
    let bytes = content(LEN, 11);
    let client = world.client();
    save(&client, 1, &[("weights", &bytes)]).await;
    let report =
        client.archive(&job(), None, options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    assert_eq!((report.stripes, report.undropped), (2, 0));
    (world, bytes)
}

/// Runs `check` for every pattern, while the client cannot reach the nodes of the pattern.
async fn for_each<F>(
    world: &World,
    patterns: Vec<Vec<usize>>,
    check: impl Fn(Client, Vec<usize>) -> F + Clone + Send + 'static,
) where
    F: Future<Output = ()> + Send,
{
    let patterns = Arc::new(patterns);
    let mut tasks = tokio::task::JoinSet::new();
    for worker in 0..WORKERS {
        // The world numbers clients in order.
        let (client, number) = world.numbered_client();
        let (network, patterns, check) = (world.network.clone(), patterns.clone(), check.clone());
        tasks.spawn(async move {
            let own = format!("client{number}:0");
            for pattern in patterns.iter().skip(worker).step_by(WORKERS) {
                pattern.iter().for_each(|&node| network.partition(&own, &address(node)));
                check(client.clone(), pattern.clone()).await;
                pattern.iter().for_each(|&node| network.heal(&own, &address(node)));
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_loss_of_up_to_five_nodes_restores_every_byte() {
    let (world, bytes) = archived_world().await;
    let all: Vec<_> = (0..=5).flat_map(patterns).collect();
    assert_eq!(all.len(), 6885);
    for_each(&world, all, move |client, pattern| {
        let bytes = bytes.clone();
        async move {
            let (out, report) = world::restore(&client, 1)
                .await
                .unwrap_or_else(|error| panic!("{pattern:?}: {error}"));
            assert!(read_file(&*out, "weights") == bytes, "{pattern:?}");
            assert_eq!((report.len_bytes, report.decoded_stripes), (LEN as u64, 2));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_loss_of_six_nodes_is_refused_before_a_byte_is_written() {
    let (world, _) = archived_world().await;
    let all = patterns(6);
    assert_eq!(all.len(), 8008);
    for_each(&world, all, |client, pattern| async move {
        let out = Arc::new(MemoryDisk::new(2 * LEN as u64));
        let request = rapidraid::client::RestoreRequest {
            out: out.clone(),
            force: false,
            shard: None,
            range: None,
        };
        let error = client.restore(&job(), None, request, world::quiet()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{pattern:?}: {error}");
        let ClientError::Lost { lost, total } = &error else { panic!("{pattern:?}: {error}") };
        assert_eq!((lost.len(), *total), (2, 2));
        for stripe in lost {
            assert_eq!(stripe.missing.len(), 6, "{stripe}");
            for node in &pattern {
                let named = |text: &String| text.contains(&format!("node{node:02}"));
                assert!(stripe.missing.iter().any(named), "{stripe}");
            }
        }
        assert_eq!(out.list("").unwrap(), [], "{pattern:?}");
    })
    .await;
}

/// The first step of the client that works while machines are replaced.
const FIRST: u64 = 10;
/// After a replacement, the suite restores without every eighth set of five nodes, and with
/// `RAPIDRAID_LOSSES_STRIDE=1` without every set.
const STRIDE: usize = 8;
/// Time within which an operation succeeds once its reason to fail is gone.
const PATIENCE: Duration = Duration::from_secs(120);

fn name(machine: usize) -> PeerName {
    format!("node{machine:02}").parse().unwrap()
}

/// Repeats `work` until it succeeds.
async fn until_done<T, F>(what: &str, work: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T, ClientError>>,
{
    let begun = tokio::time::Instant::now();
    loop {
        match work().await {
            Ok(done) => return done,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{what}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Saves, archives and restores steps until it is told to stop. A save needs all sixteen nodes, so it
/// fails while one is down; restores never fail. Returns the number of steps.
async fn keep_working(client: Client, stop: Arc<AtomicBool>) -> u64 {
    let mut steps = 0;
    while !stop.load(Ordering::Relaxed) {
        let step = FIRST + steps;
        let shard = vec![world::shard("weights", &content(40_000, step))];
        let saved =
            client.save(&job(), Step(step), shard, Default::default(), world::quiet()).await;
        match saved {
            Ok(_) => steps += 1,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "step {step}: {error}"),
        }
        if steps > 0 && steps.is_multiple_of(2) {
            let older = Some(Step(step - 1));
            let _ = client.archive(&job(), older, options(PlanChoice::Chain), &mut |_| ()).await;
        }
        for step in [Some(1), steps.checked_sub(1).map(|last| FIRST + last)].into_iter().flatten() {
            let restored = world::restore(&client, step).await;
            let (out, _) = restored.unwrap_or_else(|error| panic!("step {step}: {error}"));
            let len = if step == 1 { LEN } else { 40_000 };
            let seed = if step == 1 { 11 } else { step };
            assert!(read_file(&*out, "weights") == content(len, seed), "step {step}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    steps
}

/// Repairs all steps, and makes what a machine had on other nodes.
async fn repair_all(client: &Client, gone: Option<usize>) {
    let nodes: Vec<NodeId> = gone.map(|machine| NodeId::of(&name(machine))).into_iter().collect();
    for view in client.list_steps(None).await.unwrap() {
        let (step, options) = (Some(view.step), RepairOptions::default());
        // An archiving of the step comes first.
        until_done("a repair", async || {
            client.repair(&job(), step, options, &nodes, &mut |_| ()).await
        })
        .await;
    }
}

/// Five machines are replaced by empty ones, one after the other: three under their names, and two
/// under new ones. A client works meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_of_sixteen_machines_are_replaced_while_a_client_works() {
    let (mut world, bytes) = archived_world().await;
    let (client, stop) = (world.client(), Arc::new(AtomicBool::new(false)));
    let work = tokio::spawn(keep_working(world.client(), stop.clone()));
    for machine in 1..=3 {
        world.kill(machine).await;
        world.replace(machine);
        world.boot(machine);
        world.until_live(N).await;
        world.until_caught_up().await;
        repair_all(&client, None).await;
    }
    for machine in 4..=5 {
        world.kill(machine).await;
        world.grow(1);
        world.until_live(N).await;
        let new = world.machines.len() - 1;
        until_done("a replacement", async || client.replace_node(&name(machine), &name(new)).await)
            .await;
        // A node that does not answer a repair in time is not known to lack anything, and an
        // archiving may follow the repair. What is missing then refuses the removal.
        until_done("a removal", async || {
            repair_all(&client, Some(machine)).await;
            client.remove_node(&name(machine)).await
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    let steps = work.await.unwrap();
    assert!(steps > 0, "the client saved nothing");
    for view in client.list_steps(None).await.unwrap() {
        let step = Some(view.step);
        until_done("an archiving", async || {
            client.archive(&job(), step, options(PlanChoice::Chain), &mut |_| ()).await
        })
        .await;
    }
    repair_all(&client, None).await;
    for view in client.list_steps(None).await.unwrap() {
        let report = client.verify(&job(), Some(view.step), world::quiet()).await.unwrap();
        assert_eq!((report.faults, report.survives), (vec![], Some(5)), "step {}", view.step);
    }
    // The nodes are 1 to 3, and 6 to 18.
    let at = |node: &usize| if *node <= 3 { *node } else { node + 2 };
    let all: Vec<Vec<usize>> = patterns(5).iter().map(|set| set.iter().map(at).collect()).collect();
    assert_eq!(all.len(), 4368);
    let stride = std::env::var("RAPIDRAID_LOSSES_STRIDE").map_or(STRIDE, |n| n.parse().unwrap());
    let all = all.into_iter().step_by(stride).collect();
    for_each(&world, all, move |client, pattern| {
        let bytes = bytes.clone();
        async move {
            let restored = world::restore(&client, 1).await;
            let (out, _) = restored.unwrap_or_else(|error| panic!("{pattern:?}: {error}"));
            assert!(read_file(&*out, "weights") == bytes, "{pattern:?}");
        }
    })
    .await;
}
