//! Every boundary of the format, and one byte less and more: saved, archived, and read back with
//! n-k nodes unreachable.

use std::ops::Range;

use bytes::Bytes;
use rapidraid::client::{ClientError, RestoreRequest};
use rapidraid::id::Step;
use rapidraid::kind::ErrorKind;
use rapidraid::store::MemoryDisk;
use rapidraid::units::GRAIN_BYTES;
use rapidraid::wire::BULK_CHUNK_BYTES;
use rapidraid::wire::calls::PlanChoice;

use world::{World, address, content, job, options, quiet, read_file, restore, save};

/// Returns each point and its neighbours, without duplicates.
fn around(points: &[u64]) -> Vec<u64> {
    let mut sizes: Vec<u64> =
        points.iter().flat_map(|&point| point.saturating_sub(1)..=point + 1).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Returns all sets of `lost` of the nodes 1 to `n`.
fn losses(n: usize, lost: u32) -> impl Iterator<Item = Vec<usize>> {
    let sets = (0u32..1 << n).filter(move |set| set.count_ones() == lost);
    sets.map(move |set| (1..=n).filter(|node| set >> (node - 1) & 1 == 1).collect())
}

async fn every_size_comes_back(n: u8, k: u8, block_bytes: u64) {
    let world = World::start(n.into(), &[(n, k)], block_bytes).await;
    let (client, number) = world.numbered_client();
    let stripe = u64::from(k) * block_bytes;
    let sizes = around(&[1, GRAIN_BYTES, BULK_CHUNK_BYTES as u64, block_bytes, stripe, 2 * stripe]);
    let shards: Vec<(String, Bytes)> =
        sizes.iter().map(|&len| (format!("of/{len}"), content(len as usize, len))).collect();
    let named: Vec<(&str, &Bytes)> =
        shards.iter().map(|(name, bytes)| (name.as_str(), bytes)).collect();
    let stripes: u64 = sizes.iter().map(|len| len.div_ceil(stripe)).sum();
    for (step, plan) in [(1, PlanChoice::Chain), (2, PlanChoice::BestStar)] {
        save(&client, step, &named).await;
        let held = world.assert_invariant(&client, step).await;
        assert_eq!((held.stripes as u64, held.archived, held.pieces), (stripes, 0, 0));
        let archived = client.archive(&job(), Some(Step(step)), options(plan), &mut |_| ()).await;
        let archived = archived.unwrap();
        assert_eq!((archived.stripes, archived.undropped, archived.notes), (stripes, 0, vec![]));
        let held = world.assert_invariant(&client, step).await;
        assert_eq!(held.archived as u64, stripes);
        for lost in losses(n.into(), (n - k).into()) {
            let own = format!("client{number}:0");
            lost.iter().for_each(|&node| world.network.partition(&own, &address(node)));
            let (out, report) = restore(&client, step).await.unwrap();
            for (name, bytes) in &shards {
                assert!(read_file(&*out, name) == *bytes, "{name} without {lost:?}, {plan:?}");
            }
            assert_eq!(report.len_bytes, sizes.iter().sum::<u64>());
            if plan == PlanChoice::Chain {
                assert_eq!((report.replica_stripes, report.decoded_stripes), (0, stripes));
            }
            lost.iter().for_each(|&node| world.network.heal(&own, &address(node)));
        }
        let verified = client.read_without_output(&job(), Some(Step(step)), quiet()).await.unwrap();
        assert_eq!((verified.len_bytes, verified.incidents), (sizes.iter().sum(), vec![]));
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn every_size_comes_back_from_a_4_2_code_with_blocks_of_several_chunks() {
    every_size_comes_back(4, 2, 512 << 10).await;
}

#[tokio::test(start_paused = true)]
async fn every_size_comes_back_from_a_6_4_code_with_blocks_of_one_grain() {
    every_size_comes_back(6, 4, GRAIN_BYTES).await;
}

fn request(range: Range<u64>) -> (std::sync::Arc<MemoryDisk>, RestoreRequest) {
    let out = std::sync::Arc::new(MemoryDisk::new(64 << 20));
    let shard = Some("weights".parse().unwrap());
    (out.clone(), RestoreRequest { out, force: false, shard, range: Some(range) })
}

#[tokio::test(start_paused = true)]
async fn ranges_at_every_boundary_are_the_bytes_of_the_shard() {
    const BLOCK: u64 = 2 * GRAIN_BYTES;
    let world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let len = 4 * BLOCK + 70_001;
    let bytes = content(len as usize, 8);
    save(&client, 1, &[("weights", &bytes), ("other", &content(9, 9))]).await;
    let points = [1, GRAIN_BYTES, BLOCK, BLOCK + GRAIN_BYTES, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK];
    let mut ranges: Vec<Range<u64>> = points
        .iter()
        .flat_map(|&at| [at - 1..at, at..at + 1, at - 1..at + 1, at..at, 0..at, at..len])
        .collect();
    ranges.extend([0..len, len - 1..len, len..len, 100..4 * BLOCK + 7]);
    for archived in [false, true] {
        if archived {
            client.archive(&job(), None, options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
        }
        for range in ranges.clone() {
            let (out, request) = request(range.clone());
            let report = client.restore(&job(), None, request, quiet()).await.unwrap();
            assert_eq!(report.len_bytes, range.end - range.start);
            let expected = &bytes[range.start as usize..range.end as usize];
            assert!(read_file(&*out, "weights") == expected, "{range:?}, archived: {archived}");
        }
    }
    #[allow(clippy::reversed_empty_ranges)] // one of the ranges that are refused
    for range in [0..len + 1, len..len + 1, len + 1..len + 1, 7..6, 0..u64::MAX] {
        let (_, request) = request(range.clone());
        let error = client.restore(&job(), None, request, quiet()).await.unwrap_err();
        assert!(matches!(error, ClientError::Range { .. }), "{range:?}: {error}");
    }
    let (_, mut unnamed) = request(0..1);
    unnamed.shard = None;
    let error = client.restore(&job(), None, unnamed, quiet()).await.unwrap_err();
    assert!(matches!(error, ClientError::RangeOfMany), "{error}");
    let (_, mut unknown) = request(0..1);
    unknown.shard = Some("weight".parse().unwrap());
    let error = client.restore(&job(), None, unknown, quiet()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    world.assert_idle().await;
}
