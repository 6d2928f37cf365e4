//! Tests with a suspended cluster: staged steps stay, every call is answered in time, and all work
//! resumes with the cluster. Cells that need a step that is hashed and not yet saved are here too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rapidraid::trainer::daemon::trace::StagingPoint;

use rustix::process::Signal;
use serde_json::json;

use crate::hostile::{IN_EXTENT, cut_off};
use crate::launch::{Launch, Plan};
use crate::machine::Cluster;
use crate::stage::Stage;
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    a_staged_step_waits_for_the_cluster,
    bits_that_turn_before_the_commit,
    a_segment_that_is_cut_off_ends_the_daemon_and_no_other_step,
    a_dropped_step_with_its_record_does_not_come_back,
];

/// A guard that keeps all nodes suspended while it exists.
struct Away<'a>(&'a Cluster);

impl<'a> Away<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::STOP));
        Self(cluster)
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        self.0.daemons.iter().for_each(|daemon| daemon.signal(Signal::CONT));
    }
}

/// How far a call may exceed its own time limit.
const GRACE: Duration = Duration::from_secs(4);

fn a_staged_step_waits_for_the_cluster(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(10);
    launch.wait(10);
    let away = Away::new(cluster);
    let fill = launch.save(20);
    // A daemon that starts while the cluster is suspended finds the step without asking the
    // cluster.
    launch.kill();
    stage.kill();
    stage.restart();
    let state = stage.state(job, 20);
    assert!(state.as_deref().is_some_and(|state| state != "committed"), "{state:?}");
    let mut next = Launch::start(&stage, &Plan::new(job, 1).after(20));
    let order = |limit_ms: u64, offline: bool| json!({ "do": "load", "job": job, "offline": offline, "limit_ms": limit_ms });
    let began = Instant::now();
    let told = next.ranks[0].ask(&order(1000, false)).unwrap_err();
    told.says("Timeout", &["the step to load"]);
    assert!(began.elapsed() < Duration::from_secs(1) + GRACE, "{:?}", began.elapsed());
    // On demand, a load takes the step from this host's memory.
    let found = next.ranks[0].ask(&order(60_000, true)).unwrap();
    assert_eq!((&found["step"], &found["fill"]), (&json!(20), &json!(fill)), "{found}");
    next.prepare();
    let began = Instant::now();
    let fill_order = json!({ "do": "fill", "step": 30, "limit_ms": 1000 });
    next.ranks[0].ask(&fill_order).unwrap_err().says("Timeout", &["a segment to fill"]);
    assert!(began.elapsed() < Duration::from_secs(1) + GRACE, "{:?}", began.elapsed());
    drop(away);
    stage.until("it is committed", || stage.state(job, 20).as_deref() == Some("committed"));
    stage.until("the next one begins", || next.ranks[0].step("save", 30).is_ok());
    next.wait(30);
    assert_eq!(stage.committed(job), [10, 20, 30]);
    stage.assert_sound();
}

/// Saves step 10, suspends the cluster, and stages step 20 until it is hashed. Returns the guard
/// and the segment of the first rank.
fn hashed<'a>(stage: &Stage<'a>, launch: &mut Launch) -> (Away<'a>, String) {
    launch.save(10);
    launch.wait(10);
    let away = Away::new(stage.cluster);
    let saved = launch.ranks[0].step("save", 20).unwrap();
    for rank in &mut launch.ranks[1..] {
        rank.step("save", 20).unwrap();
    }
    stage.until("it is hashed", || stage.watch.has_said(StagingPoint::Hashed, 20));
    (away, saved["segment"].as_str().unwrap().to_owned())
}

fn bits_that_turn_before_the_commit(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let (away, segment) = hashed(&stage, &mut launch);
    stage.flip(&stage.segment(&segment), IN_EXTENT);
    drop(away);
    for rank in &mut launch.ranks {
        let told = rank.step("wait", 20).unwrap_err();
        told.says("Corrupt", &["step 20", "weights was changed in memory"]);
    }
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    launch.save(30);
    launch.wait(30);
    assert_eq!(stage.committed(job), [10, 30]);
    stage.assert_sound();
}

fn a_segment_that_is_cut_off_ends_the_daemon_and_no_other_step(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut other = Launch::ready(&stage, &Plan::new(&format!("{job}-2"), 1));
    other.save(10);
    other.wait(10);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let (away, segment) = hashed(&stage, &mut launch);
    stage.signal(Signal::STOP);
    cut_off(&stage, &segment);
    // The other job stages a step, perhaps without getting an answer; its header says that the step
    // is staged.
    other.ranks[0].send(&json!({ "do": "save", "step": 20 }));
    stage.signal(Signal::CONT);
    drop(away);
    assert_eq!(stage.ended(), -1, "SIGBUS ends it");
    let answered = other.ranks[0].answer();
    stage.restart();
    other.reconnect();
    if answered.is_err() {
        let again = other.ranks[0].step("save", 20);
        assert!(again.is_ok() || again.unwrap_err().kind == "Exists");
    }
    other.wait(20);
    assert_eq!(stage.state(job, 20), None, "its step is dropped");
    assert_eq!(stage.committed(job), [10]);
    launch.ranks[0].step("wait", 20).unwrap_err();
    stage.assert_sound();
}

/// The daemon is killed after it has marked the filling as dropped and before it has removed the
/// step's record and changed its headers.
fn a_dropped_step_with_its_record_does_not_come_back(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let (away, segment) = hashed(&stage, &mut launch);
    let is_record =
        |name: &&String| name.contains(&format!("{:020}-", 20)) && !name.ends_with(".table");
    let files = stage.files("steps");
    let path = stage.dir().join("steps").join(files.iter().find(is_record).unwrap());
    let kept = std::fs::read(&path).unwrap();
    let segment = stage.segment(&segment);
    let whole = std::fs::read(&segment).unwrap();
    stage.flip(&segment, 5_000);
    drop(away);
    launch.ranks[0].step("wait", 20).unwrap_err().says("Corrupt", &["was changed"]);
    stage.kill();
    std::fs::write(&path, kept).unwrap();
    // Write to the same file, so that its owner still maps it.
    File::options().write(true).open(&segment).unwrap().write_all_at(&whole, 0).unwrap();
    stage.restart();
    assert_eq!(stage.state(job, 20), None);
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    assert!(!path.exists());
    launch.kill();
    stage.kill();
    stage.restart();
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    assert_eq!(stage.committed(job), [10]);
}
