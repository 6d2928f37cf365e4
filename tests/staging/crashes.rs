//! Tests that kill the daemon at each trace point of a step and check the state that it leaves
//! (docs/staging.md, 8).

use rapidraid::trainer::daemon::trace::StagingPoint;
use rustix::process::Signal;
use serde_json::json;

use crate::launch::{Launch, Plan, Trainer};
use crate::machine::Cluster;
use crate::stage::Stage;
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    killed_when_a_header_says_filling,
    killed_when_all_have_staged,
    killed_while_it_hashes,
    killed_when_the_hashes_are_kept,
    killed_before_the_commit_is_sent,
    killed_after_the_commit,
    killed_when_the_record_says_committed,
    killed_while_a_record_goes,
    killed_while_a_step_is_loaded,
    killed_while_a_step_is_read_from_the_cluster,
    killed_while_it_abandons,
    killed_at_every_point_of_one_step,
    headers_say_staged_and_no_record_does,
    ranks_that_go_on_after_a_kill_bring_nothing_back,
    a_rank_that_was_told_brings_nothing_back,
    a_removed_step_does_not_come_back,
    what_a_killed_daemon_left_half_is_removed,
    a_job_that_is_called_new_is_found,
    a_reader_that_the_daemon_forgot_takes_no_other_bytes,
];

fn stage<'a>(cluster: &'a Cluster) -> Stage<'a> {
    Stage::start(cluster, "64MiB", &[])
}

/// Saves step 10 and kills the daemon when it logs `point`, then restarts it. Returns the filling
/// if the last rank got an answer.
fn killed_at(stage: &mut Stage<'_>, launch: &mut Launch, point: StagingPoint) -> Option<String> {
    stage.watch.set_trap(point, &[stage.pid()], Signal::KILL);
    let mut fill = None;
    for rank in &mut launch.ranks {
        // The daemon may be killed before it has answered.
        fill = rank.step("save", 10).ok().map(|saved| saved["fill"].as_str().unwrap().to_owned());
    }
    stage.until("it is killed", || stage.watch.has_sprung());
    stage.restart();
    stage.watch.take_trap();
    fill
}

/// Asserts that step 10 is committed without any trainer, and that memory and cluster have the same
/// content.
fn goes_on(stage: &Stage<'_>, job: &str, fill: Option<&str>) {
    stage.until_state(job, 10, "committed");
    assert_eq!(stage.committed(job), [10]);
    let memory = stage.load(job, None).unwrap().unwrap();
    stage.forget(job);
    let cluster = stage.load(job, None).unwrap().unwrap();
    assert!(memory.is_from_memory && !cluster.is_from_memory);
    assert_eq!((memory.step, memory.fill), (10, cluster.fill));
    assert!(fill.is_none_or(|fill| fill == cluster.fill.to_string()));
    stage.assert_sound();
}

fn killed_when_a_header_says_filling(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    stage.watch.set_trap(StagingPoint::Filling, &[stage.pid()], Signal::KILL);
    // A single rank saves: however late the daemon dies, the step is not whole.
    let _ = launch.ranks[0].step("save", 10);
    stage.until("it is killed", || stage.watch.has_sprung());
    stage.restart();
    stage.watch.take_trap();
    assert_eq!(stage.load(job, None).unwrap(), None);
    assert_eq!(stage.state(job, 10), None);
    // The ranks still own their segments.
    launch.reconnect();
    launch.save(20);
    launch.wait(20);
    stage.assert_sound();
}

fn after_a_kill_at(cluster: &Cluster, job: &str, point: StagingPoint) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let fill = killed_at(&mut stage, &mut launch, point);
    launch.kill();
    goes_on(&stage, job, fill.as_deref());
}

fn killed_when_all_have_staged(cluster: &Cluster, job: &str) {
    after_a_kill_at(cluster, job, StagingPoint::Staged);
}

fn killed_while_it_hashes(cluster: &Cluster, job: &str) {
    after_a_kill_at(cluster, job, StagingPoint::Hashing);
}

fn killed_when_the_hashes_are_kept(cluster: &Cluster, job: &str) {
    after_a_kill_at(cluster, job, StagingPoint::Hashed);
}

fn killed_before_the_commit_is_sent(cluster: &Cluster, job: &str) {
    after_a_kill_at(cluster, job, StagingPoint::Confirmed);
}

fn killed_after_the_commit(cluster: &Cluster, job: &str) {
    after_a_kill_at(cluster, job, StagingPoint::Decided);
}

fn killed_when_the_record_says_committed(cluster: &Cluster, job: &str) {
    after_a_kill_at(cluster, job, StagingPoint::Committed);
}

fn killed_while_a_record_goes(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    launch.save(10);
    launch.wait(10);
    launch.save(20);
    launch.wait(20);
    stage.watch.set_trap(StagingPoint::Forgetting, &[stage.pid()], Signal::KILL);
    let _ = launch.ranks[0].step("save", 30);
    stage.until("it is killed", || stage.watch.has_sprung());
    stage.restart();
    launch.kill();
    assert!(stage.state(job, 10).is_none_or(|state| state == "committed"));
    let loaded = stage.load(job, None).unwrap().unwrap().step;
    assert!([20, 30].contains(&loaded), "{loaded}");
    assert_eq!(stage.load(job, Some(10)).unwrap().unwrap().step, 10);
    let committed = stage.committed(job);
    assert_eq!(committed[..2], [10, 20]);
    stage.assert_sound();
}

fn killed_while_a_step_is_loaded(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let fill = launch.save(10);
    launch.wait(10);
    let mut next = Launch::start(&stage, &Plan::new(job, 2).after(10));
    stage.watch.set_trap(StagingPoint::Loading, &[stage.pid()], Signal::KILL);
    let load = json!({ "do": "load", "job": job, "launch": next.id.to_string(), "number": 1 });
    // Either the call fails, or the bytes that it got are right.
    let first = next.ranks[0].ask(&load);
    stage.until("it is killed", || stage.watch.has_sprung());
    stage.restart();
    // The next step must not change the bytes that the launch got.
    launch.reconnect();
    launch.save(20);
    launch.wait(20);
    let second = next.ranks[1].ask(&load).or_else(|_| next.ranks[1].ask(&load)).unwrap();
    assert_eq!((&second["step"], &second["fill"]), (&json!(10), &json!(fill)), "{first:?}");
    stage.assert_sound();
}

fn killed_while_a_step_is_read_from_the_cluster(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let fill = launch.save(10);
    launch.wait(10);
    launch.kill();
    stage.forget(job);
    stage.watch.set_trap(StagingPoint::Fetching, &[stage.pid()], Signal::KILL);
    let mut reader = Trainer::start(&stage.dir(), None);
    let load = json!({ "do": "load", "job": job });
    let told = reader.ask(&load);
    stage.until("it is killed", || stage.watch.has_sprung());
    told.unwrap_err().says("Unavailable", &["went away"]);
    stage.restart();
    assert_eq!(stage.files("fetched"), Vec::<String>::new());
    let found = reader.ask(&load).unwrap();
    assert_eq!((&found["memory"], &found["fill"]), (&json!(false), &json!(fill)), "{found}");
    stage.assert_sound();
}

fn killed_while_it_abandons(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 1));
    for step in [10, 20, 30] {
        old.save(step);
        old.wait(step);
    }
    old.kill();
    let plan = Plan { newest_seen: Some(30), abandon_later: true, ..Plan::new(job, 1).after(10) };
    let mut new = Launch::ready(&stage, &plan);
    stage.watch.set_trap(StagingPoint::Abandoning, &[stage.pid()], Signal::KILL);
    let _ = new.ranks[0].step("fill", 20);
    stage.until("it is killed", || stage.watch.has_sprung());
    new.kill();
    stage.restart();
    // This holds from the first moment on.
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    stage.until("they are removed", || stage.committed(job) == [10]);
    stage.assert_sound();
}

/// Saves one step and kills the daemon again and again, a little further each time.
fn killed_at_every_point_of_one_step(cluster: &Cluster, job: &str) {
    use StagingPoint::{Confirmed, Decided, Hashed, Hashing, Saving, Staged};
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let fill = killed_at(&mut stage, &mut launch, Staged);
    launch.kill();
    for point in [Hashing, Hashed, Saving, Saving, Confirmed, Decided] {
        stage.watch.set_trap(point, &[stage.pid()], Signal::KILL);
        // The daemon may have passed the point already; then the next point serves as well.
        let mut is_over = false;
        stage.until("it is killed, or done", || {
            is_over = stage.watch.has_said(StagingPoint::Committed, 10);
            stage.watch.has_sprung() || is_over
        });
        if stage.watch.take_trap() {
            stage.restart();
        } else if is_over {
            break;
        }
    }
    goes_on(&stage, job, fill.as_deref());
}

fn headers_say_staged_and_no_record_does(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let mut fill = String::new();
    for rank in 0..2 {
        fill = launch.fill(rank, 10);
    }
    stage.signal(Signal::STOP);
    for rank in &mut launch.ranks {
        rank.tell("header").unwrap();
    }
    stage.kill();
    assert!(stage.files("steps").is_empty());
    launch.kill();
    stage.restart();
    goes_on(&stage, job, Some(&fill));
}

/// The ranks do not notice that the daemon was killed and restarted, and continue to write. No rank
/// contacts the new daemon.
fn ranks_that_go_on_after_a_kill_bring_nothing_back(cluster: &Cluster, job: &str) {
    for staged in [1, 0] {
        let job = format!("{job}-{staged}");
        let mut stage = stage(cluster);
        let mut launch = Launch::ready(&stage, &Plan::new(&job, 2));
        for rank in 0..2 {
            launch.fill(rank, 10);
            if rank < staged {
                launch.ranks[rank].tell("header").unwrap();
                launch.ranks[rank].tell("say").unwrap();
            }
        }
        stage.kill();
        stage.restart();
        for rank in staged..2 {
            launch.ranks[rank].tell("header").unwrap();
        }
        stage.kill();
        launch.kill();
        stage.restart();
        assert_eq!(stage.state(&job, 10), None, "it was dropped when its daemon was killed");
        assert_eq!(stage.load(&job, None).unwrap(), None);
        assert!(stage.committed(&job).is_empty());
        stage.assert_sound();
    }
}

fn a_rank_that_was_told_brings_nothing_back(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.ranks[0].step("save", 10).unwrap();
    launch.fill(1, 10);
    stage.kill();
    stage.restart();
    launch.ranks[1].tell("header").unwrap();
    let mut told = launch.ranks[1].tell("say").unwrap_err();
    if told.message.contains("went away") {
        told = launch.ranks[1].tell("say").unwrap_err();
    }
    told.says("Unavailable", &["step 10 was dropped"]);
    stage.kill();
    stage.restart();
    assert_eq!(stage.state(job, 10), None);
    launch.kill();
    assert_eq!(stage.load(job, None).unwrap(), None);
    assert!(stage.committed(job).is_empty());
}

/// An operator removes the step; the daemon learns of it and is killed.
fn a_removed_step_does_not_come_back(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(10);
    launch.wait(10);
    launch.save(20);
    launch.wait(20);
    cluster.run(&format!("rm {job}/20")).ok();
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    stage.kill();
    stage.restart();
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    launch.kill();
    stage.until("nobody is connected", || stage.status().jobs[0].members == 0);
    assert_eq!(stage.committed(job), [10]);
    assert_eq!(stage.state(job, 20), None);
    stage.assert_sound();
}

fn what_a_killed_daemon_left_half_is_removed(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let fill = launch.save(10);
    launch.wait(10);
    launch.kill();
    stage.kill();
    let lost = "aa".repeat(16);
    let make = |path: &str, bytes: &[u8]| std::fs::write(stage.dir().join(path), bytes).unwrap();
    let own = stage.files("segments").into_iter().find(|name| name.ends_with(".own")).unwrap();
    let owner = std::fs::read(stage.dir().join("segments").join(own)).unwrap();
    make(&format!("segments/{lost}.own"), &owner);
    make(&format!("segments/{}.seg", "bb".repeat(16)), &[0; 4096]);
    make(&format!("segments/{}.own", "cc".repeat(16)), &owner);
    make(&format!("segments/{}.seg", "cc".repeat(16)), &[]);
    make(&format!("jobs/{job}~new"), b"half");
    make(&format!("fetched/{lost}"), b"half");
    make(&format!("steps/{job}/{:020}-{lost}-{lost}.table", 30), b"no record");
    make(&format!("steps/{job}/{:020}-{lost}-{lost}", 40), b"no record either");
    stage.restart();
    let known =
        |name: &String| !["aaaa", "bbbb", "cccc", "~new"].iter().any(|part| name.contains(part));
    stage.until("what nobody has is gone", || {
        let all = ["segments", "steps", "jobs", "fetched"].map(|folder| stage.files(folder));
        all.concat().iter().all(known)
    });
    goes_on(&stage, job, Some(&fill));
}

fn a_job_that_is_called_new_is_found(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let job = format!("{job}.new");
    let mut launch = Launch::ready(&stage, &Plan::new(&job, 1));
    stage.watch.set_trap(StagingPoint::Saving, &[stage.pid()], Signal::KILL);
    let fill = launch.save(10);
    stage.until("the daemon is at the save", || stage.watch.has_sprung());
    launch.kill();
    stage.restart();
    goes_on(&stage, &job, Some(&fill));
}

/// The daemon that knew of the reader is killed, and the next daemon returns the segments to their
/// owner.
fn a_reader_that_the_daemon_forgot_takes_no_other_bytes(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    launch.save(10);
    launch.wait(10);
    let mut reader = Trainer::start(&stage.dir(), None);
    assert_eq!(reader.ask(&json!({ "do": "open", "job": job })).unwrap(), 10);
    assert_eq!(reader.tell("check").unwrap()["step"], 10);
    stage.kill();
    stage.restart();
    launch.reconnect();
    for step in [20, 30] {
        launch.save(step);
        launch.wait(step);
    }
    reader.tell("check").unwrap_err().says("Unavailable", &["step 10 was replaced in memory"]);
    let _ = reader.tell("notices");
    assert_eq!(reader.ask(&json!({ "do": "load", "job": job })).unwrap()["step"], 30);
    assert_eq!(reader.ask(&json!({ "do": "load", "job": job, "step": 10 })).unwrap()["step"], 10);
    stage.assert_sound();
}
