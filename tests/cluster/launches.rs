//! The order of a job's launches: a launch that another one has replaced commits and removes nothing
//! that its successor could miss, whenever it wakes up.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::catalogue::record_access::launch_order_key;
use rapidraid::client::{
    Client, ClientError, NewShard, SaveCode, SaveDecisions, SaveOptions, SaveReport,
};
use rapidraid::clock::SystemClock;
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::launch_order::{LaunchRank, MAX_LAUNCHES};
use rapidraid::format::records::Record;
use rapidraid::id::{LaunchId, SaveId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::wire::calls::{CompareAndSetKey, GetKey, LaunchClaim};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::rebuild::{lose_catalogue, rebuild_on};
use world::{World, address, content, job, quiet, register, save, shard};

const BLOCK: u64 = 64 << 10;
/// Number of races between a commit and a registration.
const RACES: u64 = 40;
pub const A: LaunchId = LaunchId([0xa; 16]);
pub const B: LaunchId = LaunchId([0xb; 16]);
const C: LaunchId = LaunchId([0xc; 16]);

/// A launch that runs on one host, at the moment before it commits a step.
struct Trainer {
    launch: LaunchId,
    bytes: Bytes,
    save: SaveId,
    has_sent: watch::Sender<bool>,
    may_commit: watch::Sender<bool>,
}

impl Trainer {
    fn new(launch: LaunchId, step: u64) -> Arc<Self> {
        let seed = step * 100 + u64::from(launch.0[0]);
        let mut save = SaveId([0; 12]);
        SeededEntropy::new(seed).fill(&mut save.0);
        let (has_sent, may_commit) = (watch::Sender::default(), watch::Sender::new(true));
        Arc::new(Self { launch, bytes: content(BLOCK as usize, seed), save, has_sent, may_commit })
    }

    async fn has_sent(&self) {
        self.has_sent.subscribe().wait_for(|sent| *sent).await.unwrap();
    }
}

#[async_trait]
impl SaveDecisions for Trainer {
    fn assign_save_id(&self, _attempt: u32) -> io::Result<SaveId> {
        Ok(self.save)
    }

    fn launch(&self) -> Option<LaunchId> {
        Some(self.launch)
    }

    fn shards_for_code(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        Ok(vec![shard(&format!("index/{}", self.launch), &self.bytes)])
    }

    async fn approve_commit(&self) -> Result<(), String> {
        self.has_sent.send_replace(true);
        self.may_commit.subscribe().wait_for(|may| *may).await.unwrap();
        Ok(())
    }
}

async fn world() -> World {
    World::simulated(6, &[(4, 2)], BLOCK, 1).await
}

async fn save_as(
    client: &Client,
    step: u64,
    trainer: Arc<Trainer>,
) -> Result<SaveReport, ClientError> {
    client.save_with_decisions(&job(), Step(step), SaveOptions::default(), trainer, quiet()).await
}

async fn commit(world: &World, launch: LaunchId, step: u64) -> Result<SaveReport, ClientError> {
    save_as(&world.client(), step, Trainer::new(launch, step)).await
}

/// Starts a save that waits before its commit until it is let on.
async fn pause_before_commit(
    world: &World,
    launch: LaunchId,
    step: u64,
) -> (Arc<Trainer>, JoinHandle<Result<SaveReport, ClientError>>) {
    let trainer = Trainer::new(launch, step);
    trainer.may_commit.send_replace(false);
    let (client, of) = (world.client(), trainer.clone());
    let saving = tokio::spawn(async move { save_as(&client, step, of).await });
    trainer.has_sent().await;
    (trainer, saving)
}

fn steps(world: &World) -> Vec<u64> {
    (0..60).filter(|step| world.committed(*step).is_some()).collect()
}

fn assert_fenced<T: std::fmt::Debug>(result: Result<T, ClientError>) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_launch_that_was_replaced_commits_nothing_later_than_its_successors_resume_point() {
    let world = world().await;
    let client = world.client();
    assert_fenced(commit(&world, A, 10).await);
    register(&client, A, None).await.unwrap();
    commit(&world, A, 10).await.unwrap();
    let (early, early_save) = pause_before_commit(&world, A, 5).await;
    let (late, late_save) = pause_before_commit(&world, A, 20).await;
    register(&client, B, Some(10)).await.unwrap();
    late.may_commit.send_replace(true);
    late_save.await.unwrap().unwrap_err();
    // Step 5 is older than what the successor loaded.
    early.may_commit.send_replace(true);
    early_save.await.unwrap().unwrap();
    let error = commit(&world, A, 30).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("launch 2 ({B}) has been saving for the job since ")), "{text}");
    commit(&world, B, 20).await.unwrap();
    assert_eq!(steps(&world), [5, 10, 20]);
    let names = world.committed(20).unwrap();
    assert_eq!(names[0].0.name.as_str(), format!("index/{B}"));
    let order = client.fetch_launch_order(&job()).await.unwrap();
    assert_eq!((order.rank_of(A), order.rank_of(B)), (LaunchRank::Older, LaunchRank::Newest));
    assert_fenced(register(&client, A, Some(20)).await);
    world.assert_swept(&client).await;
}

#[tokio::test(start_paused = true)]
async fn the_open_save_of_an_older_launch_does_not_hold_up_its_successor() {
    let world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    let (first, first_save) = pause_before_commit(&world, A, 10).await;
    // Registering ends it, although its lease is alive.
    register(&client, B, None).await.unwrap();
    assert!(client.list_open_saves(None).await.unwrap().is_empty());
    let (second, second_save) = pause_before_commit(&world, B, 10).await;
    first.may_commit.send_replace(true);
    first_save.await.unwrap().unwrap_err();
    // A save that was not ended then is ended by the one that needs its step. Step 10 is not later
    // than the resume point of launch C, so B may still save it.
    register(&client, C, Some(10)).await.unwrap();
    assert_eq!(client.list_open_saves(None).await.unwrap().len(), 1);
    commit(&world, C, 10).await.unwrap();
    second.may_commit.send_replace(true);
    second_save.await.unwrap().unwrap_err();
    assert_eq!(steps(&world), [10]);
    world.assert_swept(&client).await;
}

#[tokio::test(start_paused = true)]
async fn an_open_save_that_nobody_has_ended_is_refused_at_its_commit() {
    let world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    let (trainer, saving) = pause_before_commit(&world, A, 10).await;
    // The gateway dies right after it has added launch B.
    let mut order = client.fetch_launch_order(&job()).await.unwrap();
    order.register(B, 0, None);
    let voice = world.voice(Role::Node, "node01");
    let key = launch_order_key(&job());
    let (to, call) = (world.node_address(0), GetKey { key: key.clone() });
    let (_, revision) = voice.ask(&to, &call).await.unwrap().unwrap();
    let (expected, value) = (Some(revision), Some(order.to_bytes().unwrap()));
    voice.ask(&to, &CompareAndSetKey { key, expected, value }).await.unwrap();
    assert_eq!(client.list_open_saves(None).await.unwrap().len(), 1);
    trainer.may_commit.send_replace(true);
    assert_fenced(saving.await.unwrap());
    assert_eq!(steps(&world), [0; 0]);
    world.assert_swept(&client).await;
}

/// A commit and a registration race: what is not committed when the registration returns is not
/// committed later.
#[tokio::test(start_paused = true)]
async fn a_launch_that_registers_during_a_commit_sees_its_outcome() {
    let mut committed = 0;
    for seed in 0..RACES {
        let world = World::simulated(6, &[(4, 2)], BLOCK, seed).await;
        let client = world.client();
        register(&client, A, None).await.unwrap();
        let (trainer, saving) = pause_before_commit(&world, A, 10).await;
        world.set_lag(20);
        let random = SeededEntropy::new(seed);
        let pause = || tokio::time::sleep(Duration::from_millis(random.below(100)));
        let commits = async {
            pause().await;
            trainer.may_commit.send_replace(true);
        };
        let registers = async {
            pause().await;
            let claim = LaunchClaim::After { newest: Some(A) };
            client.register_launch(&job(), B, None, claim).await.unwrap();
        };
        tokio::join!(commits, registers);
        let before = steps(&world);
        let saved = saving.await.unwrap();
        assert_eq!(steps(&world), before, "seed {seed}: {saved:?}");
        committed += before.len() as u64;
    }
    assert!((1..RACES).contains(&committed), "{committed} of {RACES}: these are no races");
}

/// As above, of a removal.
#[tokio::test(start_paused = true)]
async fn a_launch_that_registers_during_a_removal_sees_its_outcome() {
    let mut removed = 0;
    for seed in 0..RACES {
        let world = World::simulated(6, &[(4, 2)], BLOCK, seed).await;
        let client = world.client();
        register(&client, A, None).await.unwrap();
        let save = commit(&world, A, 10).await.unwrap().save;
        // The gateway of the removal takes about 0.1 s for each request to the catalogue.
        let slow = world.client_of(1);
        slow.list_steps(None).await.unwrap();
        world.network.set_pace(&address(1), SystemClock::new(), Duration::from_secs(60));
        let removes = async { slow.remove_launch_step(job().at(Step(10)), save, A).await };
        let registers = async {
            tokio::time::sleep(Duration::from_millis(seed * 20)).await;
            let claim = LaunchClaim::After { newest: Some(A) };
            client.register_launch(&job(), B, Some(Step(10)), claim).await.unwrap();
            steps(&world)
        };
        let (answer, after) = tokio::join!(removes, registers);
        assert_eq!(steps(&world), after, "seed {seed}: {answer:?}");
        removed += u64::from(answer.is_ok());
    }
    assert!((1..RACES).contains(&removed), "{removed} of {RACES}: these are no races");
}

#[tokio::test(start_paused = true)]
async fn each_launch_in_between_limits_an_older_one() {
    let world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    commit(&world, A, 20).await.unwrap();
    register(&client, B, Some(20)).await.unwrap();
    commit(&world, B, 40).await.unwrap();
    register(&client, C, Some(40)).await.unwrap();
    // Launch A left the line at step 20, where B went on.
    assert_fenced(commit(&world, A, 30).await);
    commit(&world, A, 15).await.unwrap();
    commit(&world, B, 35).await.unwrap();
    assert_fenced(commit(&world, B, 41).await);
    assert_eq!(steps(&world), [15, 20, 35, 40]);
}

#[tokio::test(start_paused = true)]
async fn a_launch_that_began_before_another_one_registers_too_late() {
    let world = world().await;
    let client = world.client();
    // Both begin when no launch is known; B registers first, and A is paused meanwhile.
    let claim = LaunchClaim::After { newest: None };
    client.register_launch(&job(), B, None, claim).await.unwrap();
    commit(&world, B, 10).await.unwrap();
    assert_fenced(client.register_launch(&job(), A, None, claim).await);
    // Repeating the call is safe.
    client.register_launch(&job(), B, None, claim).await.unwrap();
    commit(&world, B, 20).await.unwrap();
    let order = client.fetch_launch_order(&job()).await.unwrap();
    assert_eq!(order.launches.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_launch_removes_steps_only_while_it_is_the_newest() {
    let world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    let first = commit(&world, A, 10).await.unwrap().save;
    let second = commit(&world, A, 20).await.unwrap().save;
    client.remove_launch_step(job().at(Step(10)), first, A).await.unwrap();
    register(&client, B, Some(20)).await.unwrap();
    assert_fenced(client.remove_launch_step(job().at(Step(20)), second, A).await);
    assert_eq!(steps(&world), [20]);
    client.remove_launch_step(job().at(Step(20)), second, B).await.unwrap();
    assert_eq!(steps(&world), [0; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_decided_save_is_published_before_its_successor_begins() {
    let mut world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    let (trainer, saving) = pause_before_commit(&world, A, 10).await;
    // More than k-1 nodes are down, so that the save is decided and gets no marks.
    for index in 2..=4 {
        world.kill(index).await;
    }
    trainer.may_commit.send_replace(true);
    let error = saving.await.unwrap().unwrap_err();
    assert!(error.kind().is_transient(), "{error}");
    assert_eq!(steps(&world), [0; 0]);
    let refused = register(&client, B, None).await.unwrap_err();
    assert!(refused.kind().is_transient(), "{refused}");
    for index in 2..=4 {
        world.boot(index);
    }
    // The save waited for some time, and the leases of the nodes are over.
    world.until_live(world.nodes.len() - 1).await;
    register(&client, B, None).await.unwrap();
    assert_eq!(steps(&world), [10]);
}

#[tokio::test(start_paused = true)]
async fn after_a_rebuild_the_launch_that_has_committed_last_goes_on() {
    let mut world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    commit(&world, A, 10).await.unwrap();
    register(&client, B, Some(10)).await.unwrap();
    commit(&world, B, 20).await.unwrap();
    lose_catalogue(&mut world).await;
    rebuild_on(&world.client_of(1), 2, false).await.unwrap();
    let client = world.client_of(1);
    assert!(client.fetch_launch_order(&job()).await.unwrap().launches.is_empty());
    assert_fenced(commit(&world, B, 30).await);
    // The older launch wakes up first. Its successor has committed a step.
    let again = LaunchClaim::Again;
    assert_fenced(client.register_launch(&job(), A, None, again).await);
    // A save of no launch overtakes nobody.
    save(&client, 25, &[("a", &content(1000, 1))]).await;
    client.register_launch(&job(), B, Some(Step(10)), again).await.unwrap();
    commit(&world, B, 30).await.unwrap();
    assert_fenced(commit(&world, A, 40).await);
    assert_eq!(steps(&world), [10, 20, 25, 30]);
}

#[tokio::test(start_paused = true)]
async fn saves_of_no_launch_know_no_order() {
    let world = world().await;
    let client = world.client();
    let bytes = content(1000, 1);
    save(&client, 10, &[("a", &bytes)]).await;
    register(&client, A, None).await.unwrap();
    save(&client, 20, &[("a", &bytes)]).await;
    register(&client, B, None).await.unwrap();
    save(&client, 30, &[("a", &bytes)]).await;
    commit(&world, B, 40).await.unwrap();
    assert_eq!(steps(&world), [10, 20, 30, 40]);
}

#[tokio::test(start_paused = true)]
async fn a_launch_that_the_order_has_forgotten_does_not_come_back() {
    let world = world().await;
    let client = world.client();
    register(&client, A, None).await.unwrap();
    for number in 0..=MAX_LAUNCHES {
        register(&client, LaunchId([100 + number as u8; 16]), None).await.unwrap();
    }
    let order = client.fetch_launch_order(&job()).await.unwrap();
    assert_eq!((order.launches.len(), order.rank_of(A)), (MAX_LAUNCHES, LaunchRank::Unknown));
    assert_fenced(client.register_launch(&job(), A, None, LaunchClaim::Again).await);
    assert_fenced(commit(&world, A, 10).await);
}
