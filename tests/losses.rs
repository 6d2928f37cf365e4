//! All loss patterns of a (16,11) stripe: restores survive the loss of every set of up to five
//! nodes, and refuse every set of six cleanly.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits until it is up
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test

mod world;

use std::sync::Arc;

use bytes::Bytes;
use rapidraid::client::{Client, ClientError};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, MemoryDisk};
use rapidraid::wire::calls::PlanChoice;
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
        let out = Arc::new(MemoryDisk::new(1 << 20));
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
