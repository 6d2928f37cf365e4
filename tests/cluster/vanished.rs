//! Whoever coordinates vanishes, with the default lease: another daemon goes on within ten seconds, back before the commit point, forward
//! after it. Each is tried at several moments between two looks of the others.

use std::time::Duration;

use rapidraid::catalogue::records::{Archiving, archiving_key, checkpoint_key};
use rapidraid::format::records::{Checkpoint, Record, Writing};
use rapidraid::id::{NodeId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::store::Kv;
use rapidraid::wire::calls::{CommitSave, CompleteShard, PlanChoice};
use tokio::time::Instant;

use crate::world::raw::empty_root;
use crate::world::{World, content, job, options, read_file, restore, save};

/// What is promised.
const PROMISED: Duration = Duration::from_secs(10);
/// Moments at which somebody vanishes, this far apart: together more than two looks at what is left.
const MOMENTS: u64 = 8;
const APART: Duration = Duration::from_millis(470);
/// Removals more than the collector goes on with at once.
const LONG_REMOVALS: u64 = 20;
/// The daemon that vanishes.
const VICTIM: usize = 1;

async fn world() -> World {
    World::simulated(6, &[(4, 2)], 64 << 10, 1).await
}

fn record<R: Record>(world: &World, key: &str) -> Option<R> {
    // Before the record stands its revision.
    let value = world.map().get(format!("k/{key}").as_bytes()).unwrap();
    value.map(|value| R::parse(&value[8..]).unwrap())
}

fn checkpoint(world: &World, step: u64) -> Checkpoint {
    record(world, &checkpoint_key(&job(), Step(step))).unwrap_or_default()
}

/// Goes on without letting time pass until `reached`.
async fn at_once(what: &str, reached: impl Fn() -> bool) {
    for _ in 0..1_000_000 {
        if reached() {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("never came: {what}");
}

/// The victim vanishes; by the time that was promised it is `reached`.
async fn vanishes(world: &mut World, what: &str, reached: impl Fn(&World) -> bool) {
    assert_eq!(world.lease, rapidraid::config::DEFAULT_LEASE);
    assert!(!reached(world), "{what} before anybody died");
    world.cut_power(VICTIM);
    let died = Instant::now();
    while !reached(world) {
        assert!(died.elapsed() < PROMISED, "{what}: not yet after {:?}", died.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    eprintln!("{what} after {:?}", died.elapsed());
}

/// The victim comes back, and the next moment is another one.
async fn comes_back(world: &mut World, moment: u64) {
    world.kill(VICTIM).await;
    world.boot(VICTIM);
    world.until_live(6).await;
    tokio::time::sleep(APART * moment as u32).await;
}

#[tokio::test(start_paused = true)]
async fn an_open_save_goes_back() {
    let mut world = world().await;
    let voice = world.voice(Role::Client, "writer");
    for step in 1..=MOMENTS {
        let gateway = world.node_address(VICTIM);
        let begun = voice.begin(&gateway, step).await.unwrap();
        vanishes(&mut world, "the save is aborted", |world| {
            checkpoint(world, step).writing.is_none()
        })
        .await;
        let removing = checkpoint(&world, step).removing;
        assert!(removing.iter().any(|entry| entry.save == begun.save), "{removing:?}");
        // Forgotten by all soon: nobody else is to be waited for.
        let died = Instant::now();
        comes_back(&mut world, step).await;
        world.until("the step is free", || checkpoint(&world, step).removing.is_empty()).await;
        assert!(died.elapsed() < 3 * PROMISED, "{:?}", died.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_decided_save_goes_forward() {
    let mut world = world().await;
    let voice = world.voice(Role::Client, "writer");
    for step in 1..=MOMENTS {
        let gateway = world.node_address(VICTIM);
        let begun = voice.begin(&gateway, step).await.unwrap();
        voice
            .ask(&gateway, &CompleteShard { root: empty_root(&begun, step, "weights") })
            .await
            .unwrap();
        // Too few nodes for the marks: so far and no further.
        for away in [5, 6] {
            world.kill(away).await;
        }
        let commit = CommitSave { job: job(), step: Step(step), save: begun.save, shards: 1 };
        let error = voice.ask(&gateway, &commit).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(matches!(checkpoint(&world, step).writing, Some(Writing::Decided { .. })));
        for away in [5, 6] {
            world.boot(away);
        }
        vanishes(&mut world, "the save is published", |world| {
            checkpoint(world, step).committed.is_some()
        })
        .await;
        comes_back(&mut world, step).await;
        let (out, _) = restore(&world.client_of(0), step).await.unwrap();
        assert!(read_file(&*out, "weights").is_empty());
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_archiving_goes_on() {
    let mut world = world().await;
    let bytes = content(900_000, 1);
    for step in 1..=MOMENTS {
        save(&world.client_of(0), step, &[("weights", &bytes)]).await;
        let client = world.client_of(VICTIM);
        let archiving = tokio::spawn(async move {
            let chain = options(PlanChoice::Chain);
            let _ = client.archive(&job(), Some(Step(step)), chain, &mut |_| ()).await;
        });
        let key = archiving_key(&job(), Step(step));
        let victim = NodeId::of(&world.machines[VICTIM].name);
        let is_his = |world: &World| {
            record::<Archiving>(world, &key).is_some_and(|record| record.node == victim)
        };
        at_once("the wish", || is_his(&world)).await;
        vanishes(&mut world, "the archiving is another's", |world| !is_his(world)).await;
        archiving.abort();
        comes_back(&mut world, step).await;
        world.until("its end", || record::<Archiving>(&world, &key).is_none()).await;
        let (out, _) = restore(&world.client_of(0), step).await.unwrap();
        assert!(read_file(&*out, "weights") == bytes);
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_removal_goes_on() {
    let mut world = world().await;
    let bytes = content(300_000, 1);
    for step in 1..=MOMENTS {
        save(&world.client_of(0), step, &[("weights", &bytes)]).await;
        let id = checkpoint(&world, step).committed.unwrap().save;
        let client = world.client_of(VICTIM);
        let removing = tokio::spawn(async move { drop(client.remove(&job(), Step(step)).await) });
        at_once("the removal", || !checkpoint(&world, step).removing.is_empty()).await;
        removing.abort();
        vanishes(&mut world, "all others have removed it", |world| {
            world.files_of(id).iter().all(|(machine, _)| *machine == VICTIM)
        })
        .await;
        comes_back(&mut world, step).await;
        world.until("it is forgotten", || checkpoint(&world, step).removing.is_empty()).await;
    }
    world.assert_swept(&world.client_of(0)).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn removals_that_take_long_hold_up_nothing_else() {
    let mut world = world().await;
    let bytes = content(300_000, 1);
    for step in 1..=LONG_REMOVALS {
        save(&world.client_of(0), step, &[("weights", &bytes)]).await;
    }
    // Whoever removes waits for this one, which takes connections and says nothing.
    let _silent = world.silence(6).await;
    for step in 1..=LONG_REMOVALS {
        let client = world.client_of(VICTIM);
        tokio::spawn(async move { drop(client.remove(&job(), Step(step)).await) });
    }
    let is_removing = |step: u64| !checkpoint(&world, step).removing.is_empty();
    world.until("the removals", || (1..=LONG_REMOVALS).all(is_removing)).await;
    let voice = world.voice(Role::Client, "writer");
    for step in LONG_REMOVALS + 1..LONG_REMOVALS + 4 {
        voice.begin(&world.node_address(VICTIM), step).await.unwrap();
        vanishes(&mut world, "the save is aborted", |world| {
            checkpoint(world, step).writing.is_none()
        })
        .await;
        world.kill(VICTIM).await;
        world.boot(VICTIM);
        tokio::time::sleep(2 * APART).await;
    }
}
