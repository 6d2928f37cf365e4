//! Writers that no longer report: the others hear of them within a lease period and a quarter.

use std::sync::Arc;
use std::time::Duration;

use rapidraid::config::DEFAULT_LEASE;
use world::{World, address, content};

use super::joint::{LAUNCH, LEN, Moment, Writer, assert_exact, start, start_by, world};

/// The time within which the others hear of a writer that is lost.
const HEARD_WITHIN: Duration = Duration::from_millis(DEFAULT_LEASE.as_millis() as u64 * 5 / 4);

/// Starts a writer whose upload takes longer than [`HEARD_WITHIN`].
async fn start_slowly(world: &World, number: u32, writers: u32) -> Arc<Writer> {
    let (client, caller) = world.connect(vec![address(0)]);
    let clock = world.machines[0].time.clock();
    world.network.set_pace(&format!("client{caller}:0"), clock, Duration::from_secs(5));
    let mut writer = Writer::new(LAUNCH, number, 1);
    writer.shards = vec![content(12 * LEN, 1)];
    let writer = Arc::new(writer.waiting_at(Moment::Sent));
    drop(start_by(client, 1, writers, &writer));
    writer
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_is_lost_before_it_announces_is_named() {
    let world = world().await;
    let waits = Arc::new(Writer::new(LAUNCH, 0, 1));
    let begun = tokio::time::Instant::now();
    let saving = start(&world, 0, 1, 2, &waits);
    waits.misses(&[1]).await;
    assert!(waits.silent().is_empty(), "it has only just begun");
    waits.finds_silent(&[1]).await;
    let heard = begun.elapsed();
    assert!((DEFAULT_LEASE * 3 / 4..HEARD_WITHIN).contains(&heard), "{heard:?}");
    // It comes after all.
    let late = Arc::new(Writer::new(LAUNCH, 1, 1));
    let second = start(&world, 1, 1, 2, &late);
    waits.finds_silent(&[]).await;
    saving.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_exact(&world, 1, &[&waits, &late]).await;
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_uploads_names_one_that_is_lost() {
    let world = world().await;
    let lost = Arc::new(Writer::new(LAUNCH, 1, 1).waiting_at(Moment::Sent));
    let losing = start(&world, 1, 1, 2, &lost);
    let uploads = start_slowly(&world, 0, 2).await;
    lost.has_reached(Moment::Sent).await;
    losing.abort();
    let lost_at = tokio::time::Instant::now();
    uploads.finds_silent(&[1]).await;
    let heard = lost_at.elapsed();
    assert!(heard < HEARD_WITHIN, "{heard:?}");
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_is_lost_after_its_shards_are_complete_is_not_silent() {
    let world = world().await;
    let complete = Arc::new(Writer::new(LAUNCH, 1, 2));
    let lost = Arc::new(Writer::new(LAUNCH, 2, 1).waiting_at(Moment::Sent));
    let first = start(&world, 1, 1, 3, &complete);
    let second = start(&world, 2, 1, 3, &lost);
    let uploads = start_slowly(&world, 0, 3).await;
    lost.has_reached(Moment::Sent).await;
    second.abort();
    let lost_at = tokio::time::Instant::now();
    uploads.finds_silent(&[2]).await;
    // A writer that has nothing left to send hears of it, too.
    complete.finds_silent(&[2]).await;
    let heard = lost_at.elapsed();
    assert!(heard < HEARD_WITHIN, "{heard:?}");
    let open = world.client_of(3).list_open_saves(None).await.unwrap();
    assert_eq!(open[0].complete_shards, 2);
    first.abort();
    tokio::time::sleep(3 * DEFAULT_LEASE).await;
    assert_eq!(uploads.silent(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_checks_waits_or_sends_slowly_is_not_silent() {
    let world = world().await;
    let checks = Arc::new(Writer::new(LAUNCH, 1, 1).waiting_at(Moment::Sent));
    let saving = start(&world, 1, 1, 3, &checks);
    let waits = Arc::new(Writer::new(LAUNCH, 2, 1));
    let waiting = start(&world, 2, 1, 3, &waits);
    tokio::time::sleep(5 * DEFAULT_LEASE).await;
    assert_eq!((checks.silent(), waits.silent()), (vec![0], vec![0]), "only one has not come");
    let sends = start_slowly(&world, 0, 3).await;
    sends.has_reached(Moment::Sent).await;
    tokio::time::sleep(3 * DEFAULT_LEASE).await;
    for writer in [&sends, &checks, &waits] {
        assert!(writer.silent().is_empty(), "{:?}", writer.silent());
        writer.may_go.send_replace(true);
    }
    saving.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
}
