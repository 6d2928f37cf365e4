//! A coordinator vanishes, with the default lease. Within ten seconds another daemon takes over:
//! back before the commit point, forward after it. Each case runs at several moments between two
//! polls of the other daemons.

use std::time::Duration;

use rapidraid::catalogue::record_access::{ArchiveRequest, archive_request_key};
use rapidraid::format::records::{Record, Writing};
use rapidraid::id::{NodeId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::wire::calls::{CommitSave, CompareAndSetKey, CompleteShard, GrantLease, PlanChoice};
use tokio::time::Instant;

use world::raw::empty_root;
use world::{World, content, job, options, read_file, restore, save};

/// The promised time of a takeover.
const PROMISED: Duration = Duration::from_secs(10);
/// Number of moments at which a coordinator vanishes, `APART` from each other. Together they cover
/// more than two polls for unfinished work.
const MOMENTS: u64 = 8;
const APART: Duration = Duration::from_millis(470);
/// More removals than the collector continues at once.
const LONG_REMOVALS: u64 = 20;
/// The daemon that vanishes.
const VICTIM: usize = 1;

async fn world() -> World {
    World::simulated(6, &[(4, 2)], 64 << 10, 1).await
}

/// Lets other tasks run until `reached`, without advancing the time.
async fn at_once(what: &str, reached: impl Fn() -> bool) {
    for _ in 0..1_000_000 {
        if reached() {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("never came: {what}");
}

/// Cuts the victim's power. The state `reached` must come within the promised time.
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

/// Restarts the victim and moves to the next moment.
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
            world.checkpoint(step).writing.is_none()
        })
        .await;
        let removing = world.checkpoint(step).removing;
        assert!(removing.iter().any(|entry| entry.save == begun.save), "{removing:?}");
        // All nodes forget the save soon: only the victim had to be waited for.
        let died = Instant::now();
        comes_back(&mut world, step).await;
        world.until("the step is free", || world.checkpoint(step).removing.is_empty()).await;
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
        // With too few nodes for the marks, the save is decided and not published.
        for away in [5, 6] {
            world.kill(away).await;
        }
        let commit = CommitSave { job: job(), step: Step(step), save: begun.save, shards: 1 };
        let error = voice.ask(&gateway, &commit).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(matches!(world.checkpoint(step).writing, Some(Writing::Decided { .. })));
        for away in [5, 6] {
            world.boot(away);
        }
        vanishes(&mut world, "the save is published", |world| {
            world.checkpoint(step).committed.is_some()
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
        let key = archive_request_key(job().at(Step(step)));
        let victim = NodeId::of(&world.machines[VICTIM].name);
        let is_his = |world: &World| {
            world.record::<ArchiveRequest>(&key).is_some_and(|record| record.node == victim)
        };
        at_once("the wish", || is_his(&world)).await;
        vanishes(&mut world, "the archiving is another's", |world| !is_his(world)).await;
        archiving.abort();
        comes_back(&mut world, step).await;
        world.until("its end", || world.record::<ArchiveRequest>(&key).is_none()).await;
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
        let id = world.checkpoint(step).committed.unwrap().save;
        let client = world.client_of(VICTIM);
        let removing =
            tokio::spawn(async move { drop(client.remove_step(&job(), Step(step)).await) });
        at_once("the removal", || !world.checkpoint(step).removing.is_empty()).await;
        removing.abort();
        vanishes(&mut world, "all others have removed it", |world| {
            world.files_of(id).iter().all(|(machine, _)| *machine == VICTIM)
        })
        .await;
        comes_back(&mut world, step).await;
        world.until("it is forgotten", || world.checkpoint(step).removing.is_empty()).await;
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
    // Every removal waits for this node, which accepts connections and never answers.
    let _silent = world.silence(6).await;
    for step in 1..=LONG_REMOVALS {
        let client = world.client_of(VICTIM);
        tokio::spawn(async move { drop(client.remove_step(&job(), Step(step)).await) });
    }
    let is_removing = |step: u64| !world.checkpoint(step).removing.is_empty();
    world.until("the removals", || (1..=LONG_REMOVALS).all(is_removing)).await;
    let voice = world.voice(Role::Client, "writer");
    for step in LONG_REMOVALS + 1..LONG_REMOVALS + 4 {
        voice.begin(&world.node_address(VICTIM), step).await.unwrap();
        vanishes(&mut world, "the save is aborted", |world| {
            world.checkpoint(step).writing.is_none()
        })
        .await;
        world.kill(VICTIM).await;
        world.boot(VICTIM);
        tokio::time::sleep(2 * APART).await;
    }
}

/// The coordinator of an archiving recorded its failure, and could not revoke its lease.
#[tokio::test(start_paused = true)]
async fn an_archiving_that_waits_for_a_retry_begins_when_it_is_asked_for() {
    let world = world().await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(300_000, 1))]).await;
    let (voice, server) = (world.voice(Role::Node, "node"), world.node_address(0));
    let (lease, _) = voice.ask(&server, &GrantLease {}).await.unwrap();
    let failed = ArchiveRequest {
        node: NodeId::of(&world.machines[VICTIM].name),
        lease,
        save: world.checkpoint(1).committed.unwrap().save,
        options: options(PlanChoice::Chain),
        failures: 3,
        waiting: Some("a node did not answer".into()),
    };
    let key = archive_request_key(job().at(Step(1)));
    let value = Some(failed.to_bytes().unwrap());
    let call = CompareAndSetKey { key: key.clone(), expected: None, value };
    voice.ask(&server, &call).await.unwrap();
    let chain = options(PlanChoice::Chain);
    client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await.unwrap();
    world.until("its end", || world.record::<ArchiveRequest>(&key).is_none()).await;
}
