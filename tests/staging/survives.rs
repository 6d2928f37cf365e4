//! Tests of the table "What survives" of docs/staging.md, 8: which process is killed, and how far
//! the step had come.

use std::time::{Duration, Instant};

use rapidraid::trainer::daemon::trace::StagingPoint;
use rustix::process::Signal;
use serde_json::json;

use crate::launch::{Launch, Plan};
use crate::machine::Cluster;
use crate::stage::Stage;
use crate::{Cell, cells};

/// Time within which the other ranks learn that a step cannot be completed.
const TOLD: Duration = Duration::from_secs(1);

pub const CELLS: &[Cell] = cells![
    a_trainer_while_it_fills,
    a_trainer_when_all_have_staged,
    a_trainer_when_it_is_committed,
    the_daemon_while_ranks_fill,
    the_daemon_when_all_have_staged,
    the_daemon_when_it_is_committed,
    both_while_ranks_fill,
    both_when_all_have_staged,
    both_when_it_is_committed,
    the_host_while_ranks_fill,
    the_host_when_all_have_staged,
    the_host_when_it_is_committed,
    all_trainers_right_after_the_last_answer,
    a_trainer_right_after_its_header,
];

fn stage<'a>(cluster: &'a Cluster) -> Stage<'a> {
    Stage::start(cluster, "64MiB", &[])
}

/// Starts a launch in which rank 0 of two has staged the step and rank 1 fills it.
fn half(stage: &Stage<'_>, job: &str) -> Launch {
    let mut launch = Launch::ready(stage, &Plan::new(job, 2));
    launch.ranks[0].step("save", 10).unwrap();
    launch.fill(1, 10);
    launch
}

/// Starts a launch in which all ranks have staged step 10, and sends the daemon a signal before its
/// save begins.
fn staged(stage: &Stage<'_>, job: &str, signal: Signal) -> (Launch, String) {
    let mut launch = Launch::ready(stage, &Plan::new(job, 2));
    stage.watch.set_trap(StagingPoint::Saving, &[stage.pid()], signal);
    let fill = launch.save(10);
    stage.until("the daemon is at the save", || stage.watch.has_sprung());
    stage.watch.take_trap();
    (launch, fill)
}

/// Starts a launch of two ranks that has committed step 10. Returns it and the filling.
fn committed(stage: &Stage<'_>, job: &str) -> (Launch, String) {
    let mut launch = Launch::ready(stage, &Plan::new(job, 2));
    let fill = launch.save(10);
    launch.wait(10);
    (launch, fill)
}

/// Asserts that nothing is left of the step: a new launch resumes from nothing and saves it again.
fn is_dropped(stage: &Stage<'_>, job: &str) {
    assert_eq!(stage.load(job, None).unwrap(), None);
    assert_eq!(stage.state(job, 10), None);
    let mut launch = Launch::start(stage, &Plan::new(job, 2));
    assert!(launch.load(None).iter().all(|loaded| loaded.is_null()));
    launch.prepare();
    let fill = launch.save(10);
    launch.wait(10);
    assert_eq!(stage.load(job, None).unwrap().unwrap().fill.to_string(), fill);
    stage.assert_sound();
}

/// Asserts that a new launch of `world` ranks resumes from step 10, and that the step that it saves
/// next is committed.
fn is_resumed(stage: &Stage<'_>, job: &str, fill: &str, from_memory: bool, world: u32) {
    let mut launch = Launch::start(stage, &Plan::new(job, world).after(10));
    for loaded in launch.load(None) {
        assert_eq!((&loaded["step"], &loaded["fill"]), (&json!(10), &json!(fill)), "{loaded}");
        assert_eq!(loaded["memory"], from_memory, "{loaded}");
    }
    stage.until("step 10 is committed", || stage.committed(job) == [10]);
    launch.prepare();
    launch.save(20);
    launch.wait(20);
    // Check the bytes in the cluster too.
    drop(launch);
    stage.forget(job);
    let again = stage.load(job, Some(10)).unwrap().unwrap();
    assert_eq!((again.fill.to_string().as_str(), again.is_from_memory), (fill, false));
    stage.assert_sound();
}

fn a_trainer_while_it_fills(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = half(&stage, job);
    launch.ranks[0].send(&json!({ "do": "wait", "step": 10 }));
    let killed = Instant::now();
    launch.ranks[1].kill();
    let told = launch.ranks[0].answer().unwrap_err();
    assert!(killed.elapsed() < TOLD, "told after {:?}", killed.elapsed());
    told.says("Unavailable", &["rank 1 died before it had staged step 10"]);
    let notices = launch.ranks[0].tell("notices").unwrap();
    assert_eq!(notices[0][0], 10, "{notices}");
    drop(launch);
    is_dropped(&stage, job);
}

fn a_trainer_when_all_have_staged(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let (mut launch, fill) = staged(&stage, job, Signal::STOP);
    launch.ranks[1].kill();
    assert!(stage.committed(job).is_empty());
    stage.signal(Signal::CONT);
    // The other rank continues and learns of the commit.
    launch.ranks[0].step("wait", 10).unwrap();
    drop(launch);
    is_resumed(&stage, job, &fill, true, 2);
}

fn a_trainer_when_it_is_committed(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let (mut launch, fill) = committed(&stage, job);
    launch.ranks[1].kill();
    drop(launch);
    is_resumed(&stage, job, &fill, true, 3);
}

fn the_daemon_while_ranks_fill(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = half(&stage, job);
    stage.kill();
    // The first call finds no daemon; the next one reaches the new daemon, which tells the rank the
    // fate of the step.
    launch.ranks[0].step("wait", 10).unwrap_err().says("Unavailable", &[]);
    stage.restart();
    launch.ranks[0].step("wait", 10).unwrap_err().says("NotFound", &["step 10 is not being saved"]);
    launch.ranks[1].tell("header").unwrap();
    let told = launch.ranks[1].tell("say").unwrap_err();
    let told = if told.kind == "Unavailable" && told.message.contains("went away") {
        launch.ranks[1].tell("say").unwrap_err()
    } else {
        told
    };
    told.says("Unavailable", &["step 10 was dropped while rank 1 filled it", "started anew"]);
    assert_eq!(stage.load(job, None).unwrap(), None);
    // The ranks still own their segments, so the next step needs nothing else.
    launch.save(20);
    launch.wait(20);
    assert_eq!(stage.committed(job), [20]);
    stage.assert_sound();
}

fn the_daemon_when_all_have_staged(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let (mut launch, fill) = staged(&stage, job, Signal::KILL);
    stage.bury();
    assert!(stage.committed(job).is_empty());
    stage.restart();
    launch.ranks[1].step("wait", 10).unwrap_err().says("Unavailable", &["went away"]);
    launch.ranks[1].step("wait", 10).unwrap();
    drop(launch);
    is_resumed(&stage, job, &fill, true, 1);
}

fn the_daemon_when_it_is_committed(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let (launch, fill) = committed(&stage, job);
    stage.kill();
    stage.restart();
    assert_eq!(stage.state(job, 10).as_deref(), Some("committed"));
    drop(launch);
    is_resumed(&stage, job, &fill, true, 2);
}

fn both_while_ranks_fill(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = half(&stage, job);
    launch.kill();
    stage.kill();
    stage.restart();
    stage.until("what nobody has is unlinked", || stage.status().used_bytes == 0);
    is_dropped(&stage, job);
}

fn both_when_all_have_staged(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let (mut launch, fill) = staged(&stage, job, Signal::KILL);
    launch.kill();
    stage.bury();
    stage.restart();
    is_resumed(&stage, job, &fill, true, 2);
}

fn both_when_it_is_committed(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let (mut launch, fill) = committed(&stage, job);
    launch.kill();
    stage.kill();
    stage.restart();
    is_resumed(&stage, job, &fill, true, 4);
}

/// Simulates a reboot: every process on the host dies, and its memory is lost.
fn reboot(stage: &mut Stage<'_>, mut launch: Launch) {
    launch.kill();
    stage.kill();
    std::fs::remove_dir_all(stage.dir()).unwrap();
    stage.restart();
}

fn the_host_while_ranks_fill(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let launch = half(&stage, job);
    reboot(&mut stage, launch);
    is_dropped(&stage, job);
}

fn the_host_when_all_have_staged(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let (launch, _) = staged(&stage, job, Signal::STOP);
    reboot(&mut stage, launch);
    is_dropped(&stage, job);
}

fn the_host_when_it_is_committed(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let (launch, fill) = committed(&stage, job);
    reboot(&mut stage, launch);
    is_resumed(&stage, job, &fill, false, 2);
}

/// Preemption: all trainers are killed at once.
fn all_trainers_right_after_the_last_answer(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 3));
    let fill = launch.save(10);
    launch.kill();
    stage.until("it is committed without any trainer", || stage.committed(job) == [10]);
    is_resumed(&stage, job, &fill, true, 3);
}

/// The header counts, even if its owner died before it could report it.
fn a_trainer_right_after_its_header(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = half(&stage, job);
    launch.ranks[1].tell("header").unwrap();
    launch.kill();
    let fill = stage.load(job, None).unwrap().unwrap().fill.to_string();
    is_resumed(&stage, job, &fill, true, 2);
}
