//! Changes of the catalogue that race with a registration, a removal or a label: what a gateway or
//! the policy has checked changes before its compare-and-set.

use std::fmt::Debug;
use std::time::Duration;

use rapidraid::catalogue::record_access::{checkpoint_key, joint_save_key, labels_key};
use rapidraid::client::{Client, SaveOptions};
use rapidraid::format::records::Writing;
use rapidraid::id::{SaveId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::net::call::CallError;
use rapidraid::wire::calls::{
    BeginLaunchSave, BeginSave, CommitSave, CompleteShard, JoinSave, LabelChange, LabelStep,
    PauseWrites, WriterReport,
};
use rapidraid::wire::{Call, NodeAddress};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::launches::{A, B};
use crate::policy::{for_all, keep, restart};
use world::raw::{Voice, empty_root};
use world::{World, content, job, quiet, register, save, shard};

const BLOCK: u64 = 64 << 10;
/// The gateway of the calls that are overtaken. Another node serves the catalogue.
const GATEWAY: &str = "node01";
/// The step that both launches save.
const STEP: u64 = 10;
/// Lease period of the catalogue server whose policy is tested. A pause of the catalogue ends after
/// the first round of the policy, and before a change that waits for it is refused.
const LONG_LEASE: Duration = Duration::from_secs(16);
/// Time of the pause after the start of that server.
const PAUSE_AT_MS: u64 = 7_490;
/// Time of the earliest label after the start of that server. The policy waits for the end of the
/// pause then.
const LABEL_AT_MS: u64 = 16_500;
/// Interval at which a change checks whether the pause has ended.
const PAUSE_CHECK_MS: u64 = 20;

/// A world, and a peer that calls the gateway.
struct Race {
    world: World,
    client: Client,
    voice: Voice,
    to: NodeAddress,
}

impl Race {
    async fn start() -> Self {
        let world = World::simulated(6, &[(4, 2)], BLOCK, 1).await;
        let (client, voice) = (world.client(), world.voice(Role::Client, "overtaken"));
        let to = world.node_address(1);
        assert_eq!(to.name.to_string(), GATEWAY);
        Self { world, client, voice, to }
    }

    /// Starts a world in which launch A is the newest one.
    async fn with_launch() -> Self {
        let race = Self::start().await;
        register(&race.client, A, None).await.unwrap();
        race
    }

    async fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, CallError> {
        self.voice.ask(&self.to, call).await
    }

    fn is_step_open(&self) -> bool {
        matches!(self.world.checkpoint(STEP).writing, Some(Writing::Open { .. }))
    }
}

fn step_key() -> String {
    checkpoint_key(job().at(Step(STEP)))
}

/// Returns the call by which launch A opens a save of the step.
fn begin() -> BeginLaunchSave {
    let (job, step, save) = (job(), Step(STEP), SaveId([1; 12]));
    let begin = BeginSave { job, step, replace: false, save, avoid: Vec::new() };
    BeginLaunchSave { begin, launch: A }
}

/// Checks that launch A was refused because of launch B.
fn assert_replaced<T: Debug>(answer: Result<T, CallError>) {
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    let text = format!("launch 2 ({B}) has been saving for the job since ");
    assert!(error.to_string().contains(&text), "{error}");
}

/// Lets launch B register between the check and the compare-and-set of a call by which launch A
/// opens a save.
async fn assert_opens_nothing<C: Call>(call: C)
where
    C::Answer: Debug,
{
    let race = Race::with_launch().await;
    let opening = race.world.requests.hold_write(GATEWAY, &step_key());
    let registers = opening.during(register(&race.client, B, None));
    let (answer, registered) = tokio::join!(race.ask(&call), registers);
    registered.unwrap();
    assert_replaced(answer);
    assert!(race.client.list_open_saves(None).await.unwrap().is_empty());
    assert!(!race.is_step_open());
    race.world.assert_swept(&race.client).await;
}

#[tokio::test(start_paused = true)]
async fn a_launch_opens_no_save_once_another_one_has_registered() {
    assert_opens_nothing(begin()).await;
}

#[tokio::test(start_paused = true)]
async fn a_writer_opens_no_joint_save_once_another_launch_has_registered() {
    let (job, step, launch, avoid) = (job(), Step(STEP), A, Vec::new());
    let report = WriterReport::Joins;
    let joins = JoinSave { job, step, launch, writer: 0, writers: 2, report, replace: None, avoid };
    assert_opens_nothing(joins).await;
}

/// The gateway has opened the save, and records its launch a moment later.
#[tokio::test(start_paused = true)]
async fn a_registration_ends_a_save_whose_launch_is_not_recorded_yet() {
    let (race, begin) = (Race::with_launch().await, begin());
    let recording = race.world.requests.hold_write(GATEWAY, &joint_save_key(begin.begin.save));
    let registers = async {
        recording.has_come().await;
        let records = async {
            sleep(Duration::from_millis(500)).await;
            recording.let_go();
        };
        let (registered, ()) = tokio::join!(register(&race.client, B, None), records);
        registered.unwrap();
        assert!(!race.is_step_open());
    };
    let (begun, ()) = tokio::join!(race.ask(&begin), registers);
    begun.unwrap();
}

/// A save of the command line has its ring on record, so that nobody waits for its launch.
#[tokio::test(start_paused = true)]
async fn a_writer_that_meets_a_save_of_the_command_line_is_told_at_once() {
    let race = Race::with_launch().await;
    race.ask(&begin().begin).await.unwrap();
    let (job, step, launch, avoid) = (job(), Step(STEP), A, Vec::new());
    let report = WriterReport::Joins;
    let joins = JoinSave { job, step, launch, writer: 0, writers: 2, report, replace: None, avoid };
    let began = Instant::now();
    let refused = race.ask(&joins).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_launch_commits_nothing_once_another_one_has_registered() {
    let race = Race::with_launch().await;
    let begun = race.ask(&begin()).await.unwrap();
    let root = empty_root(&begun, STEP, "weights");
    race.ask(&CompleteShard { root }).await.unwrap();
    // The gateway of launch B is overtaken too: it adds the launch, and has not ended the open save
    // of launch A yet.
    let decision = race.world.requests.hold_write(GATEWAY, &step_key());
    let abort = race.world.requests.hold_write("node02", &step_key());
    let second = race.world.client_of(2);
    let mut registering = JoinSet::new();
    let registers = decision.during(async {
        registering.spawn(async move { register(&second, B, None).await });
        abort.has_come().await;
    });
    let commit = CommitSave { job: job(), step: Step(STEP), save: begun.save, shards: 1 };
    let (answer, ()) = tokio::join!(race.ask(&commit), registers);
    assert_replaced(answer);
    assert!(race.is_step_open(), "neither decided nor ended");
    assert!(race.client.list_steps(None).await.unwrap().is_empty());
    abort.let_go();
    registering.join_next().await.unwrap().unwrap().unwrap();
    assert!(!race.is_step_open());
    assert!(race.client.list_steps(None).await.unwrap().is_empty());
    race.world.assert_swept(&race.client).await;
}

#[tokio::test(start_paused = true)]
async fn a_label_is_refused_once_its_save_has_gone() {
    for (is_replaced, kind) in [(false, ErrorKind::NotFound), (true, ErrorKind::Fenced)] {
        let race = Race::start().await;
        let (world, client) = (&race.world, &race.client);
        save(client, STEP, &[("weights", &content(1000, 1))]).await;
        let call = LabelStep {
            job: job(),
            step: Step(STEP),
            save: world.checkpoint(STEP).committed.unwrap().save,
            label: "trusted".parse().unwrap(),
            change: LabelChange::Add,
        };
        let labelling = world.requests.hold_write(GATEWAY, &labels_key(job().at(Step(STEP))));
        let goes = labelling.during(async {
            if is_replaced {
                let newer = vec![shard("weights", &content(1000, 2))];
                let options = SaveOptions { replace: true };
                client.save(&job(), Step(STEP), newer, options, quiet()).await.unwrap();
            } else {
                client.remove_step(&job(), Step(STEP)).await.unwrap();
            }
            world.assert_swept(client).await;
        });
        let (answer, ()) = tokio::join!(race.ask(&call), goes);
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(world.catalogue_keys("b/"), [""; 0]);
        // The present save may have labels.
        if is_replaced {
            let save = world.checkpoint(STEP).committed.unwrap().save;
            let labels = race.ask(&LabelStep { save, ..call.clone() }).await.unwrap();
            assert_eq!(labels, [call.label]);
        }
    }
}

/// The policy and a label both wait for the end of a pause of the catalogue, after they have read
/// the step and its labels. Each of them is the first one in some of the races.
#[tokio::test(start_paused = true)]
async fn a_label_that_comes_before_the_policy_retires_its_step_keeps_the_step() {
    let (mut races, mut labelled) = (0, 0);
    for later_ms in (0..PAUSE_CHECK_MS).step_by(3) {
        let mut world = World::simulated(4, &[(4, 2)], BLOCK, later_ms).await;
        for step in 1..=2 {
            save(&world.client(), step, &[("weights", &content(1000, step))]).await;
        }
        world.lease = LONG_LEASE;
        restart(&mut world, for_all(keep(1))).await;
        let start = Instant::now();
        let after = |ms| sleep_until(start + Duration::from_millis(ms));
        after(PAUSE_AT_MS).await;
        let voice = world.voice(Role::Node, GATEWAY);
        voice.ask(&world.node_address(0), &PauseWrites {}).await.unwrap();
        after(LABEL_AT_MS + later_ms).await;
        let (client, label) = (world.client_of(0), "trusted".parse().unwrap());
        let answer = client.label_step(job().at(Step(1)), &label, LabelChange::Add).await;
        tokio::time::sleep(3 * LONG_LEASE).await;
        let left = client.list_steps(None).await.unwrap();
        let left: Vec<u64> = left.iter().map(|view| view.step.0).collect();
        match answer {
            Ok(_) => {
                assert_eq!(left, [1, 2], "{later_ms} ms: the label is acknowledged");
                labelled += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{later_ms} ms: {error}");
                assert_eq!(left, [2], "{later_ms} ms");
                assert_eq!(world.catalogue_keys("b/"), [""; 0]);
            }
        }
        races += 1;
    }
    assert!((1..races).contains(&labelled), "{labelled} of {races}: these are no races");
}
