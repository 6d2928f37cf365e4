//! Tests of input: which component refuses it and with which message, and the operator's commands
//! to the daemon.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rapidraid::trainer::StagingError;
use rapidraid::trainer::daemon::trace::StagingPoint;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::launch::{Launch, Plan, Trainer, has_containers};
use crate::machine::Cluster;
use crate::stage::{Stage, until};
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    no_daemon_is_an_error_at_once,
    a_daemon_that_stands_still_is_one_in_time,
    a_token_is_asked_for,
    a_folder_that_others_enter_is_refused,
    containers_share_a_daemon,
    one_daemon_for_a_folder,
    a_detached_daemon_finds_a_relative_configuration,
    full_memory_is_told_and_keeps_the_resume_point,
    a_process_that_ends_while_it_waits_for_memory_is_forgotten,
    too_many_connections_are_refused,
    a_control_group_without_room_is_told,
    a_rank_whose_prepare_failed_is_seen_to_end,
    status_and_free_are_told_as_json,
    unsaved_steps_are_freed_by_force_alone,
    what_was_read_from_the_cluster_is_freed,
    it_ends_when_what_is_staged_is_saved,
    an_interrupt_ends_it_at_once,
    a_folder_that_is_taken_away_ends_it,
    a_step_that_was_not_saved_by_a_trainer_is_told,
    a_resume_point_that_nobody_has_any_more_is_told,
];

fn no_daemon_is_an_error_at_once(cluster: &Cluster, _: &str) {
    let mut stage = Stage::folder(cluster, "64MiB", &[]);
    let mut trainer = Trainer::start(&stage.dir(), None);
    let began = Instant::now();
    let hint = ["no such folder", "rapidraid stage"];
    trainer.tell("connect").unwrap_err().says("Unavailable", &hint);
    stage.restart();
    stage.kill();
    let refused = trainer.tell("connect").unwrap_err();
    refused.says("Unavailable", &["nobody listens", "rapidraid stage"]);
    assert!(began.elapsed() < Duration::from_secs(10));
    stage.run(&["--status"]).fails(1, &["nobody listens"]);
}

fn a_daemon_that_stands_still_is_one_in_time(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    stage.signal(Signal::STOP);
    let began = Instant::now();
    let order = json!({ "do": "fill", "step": 10, "limit_ms": 500 });
    launch.ranks[0].ask(&order).unwrap_err().says("Timeout", &["a segment to fill", "0.5 s"]);
    let mut late = Trainer::start(&stage.dir(), None);
    let order = json!({ "do": "connect", "limit_ms": 500 });
    late.ask(&order).unwrap_err().says("Timeout", &["the staging daemon", "--status"]);
    assert!(began.elapsed() < Duration::from_secs(10));
    stage.signal(Signal::CONT);
    launch.save(10);
    launch.wait(10);
    // The answer to the call that timed out belongs to the old connection; the filling that it gave
    // belongs to the step.
    assert_eq!(stage.committed(job), [10]);
}

fn a_token_is_asked_for(cluster: &Cluster, job: &str) {
    let mut stage = Stage::folder(cluster, "64MiB", &[]);
    let (right, wrong) = (stage.beside("token"), stage.beside("wrong"));
    std::fs::write(&right, "").unwrap();
    std::fs::write(&wrong, "another").unwrap();
    stage.set(&format!("staging.token={}", right.display()));
    let mode = |mode| {
        std::fs::set_permissions(&right, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(0o640);
    stage.run(&[]).fails(2, &["is empty", "staging.token"]);
    std::fs::write(&right, "a secret").unwrap();
    mode(0o644);
    stage.run(&[]).fails(1, &["every user may read", "chmod o-rw"]);
    mode(0o640);
    stage.restart();
    for token in [None, Some(wrong.as_path())] {
        let mut trainer = Trainer::start(&stage.dir(), token);
        trainer.tell("connect").unwrap_err().says("Denied", &["token", "staging.token"]);
    }
    let mut launch = Launch::with_token(&stage, &Plan::new(job, 1), Some(&right));
    launch.prepare();
    launch.save(10);
    launch.wait(10);
    stage.run(&["--status"]).ok();
}

fn a_folder_that_others_enter_is_refused(cluster: &Cluster, _: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mode = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(stage.dir(), permissions).unwrap();
    };
    let mut trainer = Trainer::start(&stage.dir(), None);
    mode(0o755);
    let hint = ["can be entered by others", "0755", "0700"];
    trainer.tell("connect").unwrap_err().says("Denied", &hint);
    mode(0o700);
    trainer.tell("connect").unwrap();
    if rustix::process::geteuid().is_root() {
        let other = Some(rustix::process::Uid::from_raw(12_345));
        rustix::fs::chown(stage.dir(), other, None).unwrap();
        let mut trainer = Trainer::start(&stage.dir(), None);
        let hint = ["belongs to user 12345", "staging.dir"];
        trainer.tell("connect").unwrap_err().says("Denied", &hint);
        stage.kill();
        stage.run(&[]).fails(1, &["belongs to user 12345", "0700"]);
        rustix::fs::chown(stage.dir(), Some(rustix::process::geteuid()), None).unwrap();
    } else {
        eprintln!("skipped: another user's folder can be made by root alone");
        stage.kill();
    }
    let permissions = std::fs::Permissions::from_mode(0o750);
    std::fs::set_permissions(stage.dir(), permissions).unwrap();
    stage.run(&[]).fails(1, &["mode 0750", "0700"]);
}

fn containers_share_a_daemon(cluster: &Cluster, job: &str) {
    if !has_containers() {
        eprintln!("{job}: skipped, because `unshare --pid` needs root");
        return;
    }
    let mut stage = Stage::folder(cluster, "64MiB", &[]);
    stage.restart_in_container();
    let mut launch = Launch::start(&stage, &Plan::new(job, 2));
    launch.ranks[1] = Trainer::in_container(&stage.dir());
    launch.prepare();
    launch.save(10);
    launch.wait(10);
    assert_eq!(stage.committed(job), [10]);
    // The daemon notices the end of a process in a container like that of any other process.
    launch.fill(0, 20);
    launch.ranks[1].kill();
    stage.until("rank 1 is seen to have ended", || stage.state(job, 20).is_none());
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    stage.assert_sound();
}

fn one_daemon_for_a_folder(cluster: &Cluster, _: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    stage.run(&[]).fails(1, &["another staging daemon runs", "--status"]);
    let detached = stage.run(&["--detach", "--json"]).ok().json();
    assert_eq!(detached, json!({ "schema": 1, "ready": true }));
    assert_eq!(stage.run(&["--status", "--json"]).ok().json()["jobs"], json!([]));
}

fn a_detached_daemon_finds_a_relative_configuration(cluster: &Cluster, _: &str) {
    // `RAPIDRAID_CONFIG` is relative, and so are the names of the key and the token in the file.
    let stage = Stage::folder(cluster, "64MiB", &["staging.token=client.toml"]);
    let token = cluster.path("cluster/client/client.toml");
    std::fs::write(&token, "a secret").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    stage.run(&["--detach"]).ok();
    let told = stage.run(&["--status", "--json"]).ok().json();
    let pid = told["pid"].as_i64().and_then(|pid| Pid::from_raw(pid.try_into().unwrap())).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    until("the daemon ends", String::new, || stage.run(&["--status"]).code != 0);
}

fn full_memory_is_told_and_keeps_the_resume_point(cluster: &Cluster, job: &str) {
    // Memory for three segments of one rank.
    let segment = crate::content::Shape::on_one_host(0, 1, 20_000).segment_bytes();
    let memory = format!("{}", 3 * segment + segment / 2);
    let stage = Stage::start(cluster, &memory, &[]);
    let plan = Plan { rows: 20_000, ..Plan::new(job, 1) };
    let mut launch = Launch::ready(&stage, &plan);
    let fill = launch.save(10);
    launch.wait(10);
    launch.kill();
    let wide = Plan { rows: 20_000, ..Plan::new(&format!("{job}-2"), 4) };
    let mut other = Launch::start(&stage, &wide);
    let order = other.prepare_order(0);
    let refused = other.ranks[0].ask(&order).unwrap_err();
    refused.says("Busy", &["the staging memory is full", job, "staging.memory", "--free JOB"]);
    let mut next = Launch::start(&stage, &plan.clone().after(10));
    assert_eq!(next.load(None)[0]["fill"], fill);
    next.prepare();
    next.save(20);
    let found = stage.load(job, Some(10)).unwrap().unwrap();
    assert!(found.is_from_memory || stage.committed(job) == [10, 20], "{found:?}");
    next.wait(20);
    // A third launch finds memory again, because no launch resumes from step 10 any more.
    next.kill();
    let mut last = Launch::ready(&stage, &plan.after(20));
    last.save(30);
    last.wait(30);
    stage.assert_sound();
}

fn a_process_that_ends_while_it_waits_for_memory_is_forgotten(cluster: &Cluster, job: &str) {
    let segment = crate::content::Shape::on_one_host(0, 1, 20_000).segment_bytes();
    let stage = Stage::start(cluster, &format!("{}", 2 * segment + segment / 2), &[]);
    let plan = Plan { rows: 20_000, ..Plan::new(job, 1) };
    let _older = Launch::ready(&stage, &plan);
    let mut next = Launch::start(&stage, &plan);
    let order = next.prepare_order(0);
    next.ranks[0].send(&order);
    let members = || stage.status().jobs.iter().map(|job| job.members).sum::<u32>();
    stage.until("both launches have a process", || members() == 2);
    // A rank that waits asks again every two seconds, and is watched after its first request.
    std::thread::sleep(Duration::from_secs(3));
    next.kill();
    stage.until("the one that waited is forgotten", || members() == 1);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(members(), 1, "its last request must not make it a member again");
}

fn too_many_connections_are_refused(cluster: &Cluster, _: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut sessions = Vec::new();
    let refused = loop {
        match stage.session() {
            Ok(session) => sessions.push(session),
            Err(error) => break error,
        }
        assert!(sessions.len() < 1000);
    };
    assert!(
        matches!(&refused, StagingError::Refused { reason, .. } if reason.contains("connections open")),
        "{refused}"
    );
    drop(sessions);
    stage.until("a connection is free", || stage.session().is_ok());
}

/// A control group with a memory limit; it is removed on drop.
struct Group(PathBuf);

impl Group {
    /// Creates the group. Returns `None` if this process may not create one.
    fn make(name: &str, limit_bytes: u64) -> Option<Self> {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (root, limit) = match first.is_dir() {
            true => (first, "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup"), "memory.max"),
        };
        let group = Self(root.join(format!("rapidraid-test-{}-{name}", std::process::id())));
        std::fs::create_dir(&group.0).ok()?;
        std::fs::write(group.0.join(limit), limit_bytes.to_string()).ok()?;
        Some(group)
    }

    fn take(&self, pid: rustix::process::Pid) {
        let pid = pid.as_raw_nonzero().to_string();
        std::fs::write(self.0.join("cgroup.procs"), pid).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn a_control_group_without_room_is_told(cluster: &Cluster, job: &str) {
    let Some(group) = Group::make(job, 48 << 20) else {
        eprintln!("{job}: skipped, because no control group can be made here");
        return;
    };
    let stage = Stage::start(cluster, "256MiB", &[]);
    let mut launch = Launch::start(&stage, &Plan { rows: 800_000, ..Plan::new(job, 1) });
    group.take(launch.ranks[0].pid());
    let order = launch.prepare_order(0);
    let says = ["48.9 MiB do not fit", "control group", "as its state has"];
    launch.ranks[0].ask(&order).unwrap_err().says("Busy", &says);
    launch.kill();
    stage.until("its memory is given back", || stage.status().used_bytes == 0);
}

fn a_rank_whose_prepare_failed_is_seen_to_end(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "4MiB", &[]);
    let plan = Plan { rows: 200_000, ..Plan::new(job, 1) };
    let mut launch = Launch::start(&stage, &plan);
    let order = launch.prepare_order(0);
    launch.ranks[0].ask(&order).unwrap_err().says("Busy", &["memory is full"]);
    let members = || stage.status().jobs.first().map(|job| job.members);
    assert_eq!(members(), Some(1));
    launch.kill();
    stage.until("nobody is connected", || members() == Some(0));
}

fn status_and_free_are_told_as_json(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let status = stage.run(&["--status", "--json"]).ok().json();
    assert_eq!((&status["used_bytes"], &status["jobs"]), (&json!(0), &json!([])), "{status}");
    assert_eq!(status["memory_bytes"], 64 << 20, "{status}");
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(10);
    launch.wait(10);
    launch.fill(0, 20);
    let status = stage.run(&["--status", "--json"]).ok().json();
    let told = &status["jobs"][0];
    assert_eq!((&told["job"], &told["members"]), (&json!(job), &json!(2)), "{status}");
    assert_eq!(told["segment_bytes"], status["used_bytes"], "{status}");
    let states: Vec<(u64, &str)> = told["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| (step["step"].as_u64().unwrap(), step["state"].as_str().unwrap()))
        .collect();
    assert_eq!(states, [(10, "committed"), (20, "filling")], "{status}");
    let text = stage.run(&["--status"]).ok().out;
    assert!(text.contains(job) && text.contains("filling") && text.contains("0 of 2"), "{text}");
    // Memory that a process uses is not freed.
    let freed = stage.free(job);
    assert_eq!((&freed["freed_bytes"], &freed["dropped"]), (&json!(0), &json!([])), "{freed}");
    let kept: Vec<_> = freed["kept"].as_array().unwrap().iter().map(|kept| &kept["step"]).collect();
    assert_eq!(kept, [10, 20], "{freed}");
    let text = stage.run(&["--free", job, "--force"]).ok().out;
    assert!(text.contains("step 10 (committed) stays: a process"), "{text}");
    launch.kill();
    stage.until("step 20 is dropped", || stage.state(job, 20).is_none());
    let freed = stage.free(job)["freed_bytes"].as_u64().unwrap();
    assert!(freed > 0);
    stage.until("all is given back", || stage.status().used_bytes == 0);
    assert_eq!(stage.files("segments"), Vec::<String>::new());
    let unknown = stage.run(&["--free", "nobody", "--json"]);
    unknown.fails(1, &["no steps of job nobody", "--status"]);
    assert_eq!(unknown.json()["error"]["kind"], "not_found");
}

fn unsaved_steps_are_freed_by_force_alone(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    stage.watch.set_trap(StagingPoint::Saving, &[stage.pid()], Signal::STOP);
    launch.save(10);
    stage.until("the daemon is at the save", || stage.watch.has_sprung());
    launch.kill();
    // The requests are in the queue when the daemon resumes.
    std::thread::scope(|scope| {
        let free = scope.spawn(|| stage.free(job));
        std::thread::sleep(Duration::from_millis(300));
        stage.signal(Signal::CONT);
        free.join().unwrap();
    });
    let forced = stage.run(&["--free", job, "--force"]).ok();
    assert!(forced.out.contains("given back"), "{forced:?}");
    stage.until("all is given back", || stage.status().used_bytes == 0);
    // Either the save was faster, or the step is lost for good.
    stage.until("its save is settled", || {
        let kept = stage.committed(job);
        kept == [10] || kept.is_empty() && stage.load(job, None).unwrap().is_none()
    });
    stage.assert_sound();
}

fn what_was_read_from_the_cluster_is_freed(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(10);
    launch.wait(10);
    launch.kill();
    stage.free(job);
    stage.until("all is given back", || stage.status().used_bytes == 0);
    let mut reader = Trainer::start(&stage.dir(), None);
    let open = json!({ "do": "open", "job": job });
    assert_eq!(reader.ask(&open).unwrap(), 10);
    let used = stage.status().used_bytes;
    assert!(used > 0 && stage.files("fetched").len() == 1, "{:?}", stage.files("fetched"));
    // Memory that a process reads is not freed.
    assert_eq!(stage.free(job)["freed_bytes"], 0);
    assert_eq!(reader.tell("check").unwrap()["memory"], false);
    reader.tell("release").unwrap();
    assert_eq!(stage.status().used_bytes, used, "for ranks that begin later");
    assert_eq!(stage.free(job)["freed_bytes"], used);
    assert_eq!((stage.status().used_bytes, stage.files("fetched").len()), (0, 0));
    // A reader that dies does not hold memory either.
    assert_eq!(reader.ask(&open).unwrap(), 10);
    reader.kill();
    stage.until("the reader is gone", || {
        stage.free(job);
        stage.status().used_bytes == 0
    });
    stage.kill();
}

fn it_ends_when_what_is_staged_is_saved(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(10);
    stage.signal(Signal::TERM);
    // Trainers that are ordered to end together with the daemon save once more.
    launch.save(20);
    stage.signal(Signal::TERM);
    assert_eq!(stage.ended(), 0);
    assert_eq!(stage.committed(job), [10, 20]);
}

fn an_interrupt_ends_it_at_once(cluster: &Cluster, job: &str) {
    for first in [None, Some(Signal::TERM)] {
        let mut stage = Stage::start(cluster, "64MiB", &[]);
        let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
        launch.ranks[0].step("save", 10).unwrap();
        let began = Instant::now();
        first.into_iter().for_each(|first| stage.signal(first));
        stage.signal(Signal::INT);
        assert_eq!(stage.ended(), 1, "{}", stage.watch.tail());
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let tail = stage.watch.tail();
        assert!(tail.contains("rank 1 has not staged step 10"), "{tail}");
    }
}

fn a_folder_that_is_taken_away_ends_it(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    stage.watch.set_trap(StagingPoint::Saving, &[stage.pid()], Signal::STOP);
    launch.save(10);
    stage.until("the daemon is at the save", || stage.watch.has_sprung());
    std::fs::remove_dir_all(stage.dir()).unwrap();
    stage.signal(Signal::CONT);
    assert_eq!(stage.ended(), 1, "{}", stage.watch.tail());
    assert!(stage.watch.tail().contains("taken away"), "{}", stage.watch.tail());
    assert_eq!(stage.committed(job), [10], "what it still had was saved");
}

fn a_step_that_was_not_saved_by_a_trainer_is_told(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    cluster.write(&format!("{job}/a.bin"), b"no checkpoint of a trainer");
    cluster.run(&format!("save {job}/7 {job}")).ok();
    let mut reader = Trainer::start(&stage.dir(), None);
    let refused = reader.ask(&json!({ "do": "load", "job": job })).unwrap_err();
    refused.says("Invalid", &["was not saved by a trainer", "rapidraid restore"]);
    reader
        .ask(&json!({ "do": "load", "job": job, "step": 8 }))
        .unwrap_err()
        .says("NotFound", &["8"]);
    assert_eq!(stage.status().used_bytes, 0);
}

fn a_resume_point_that_nobody_has_any_more_is_told(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    for step in [10, 20] {
        launch.save(step);
        launch.wait(step);
    }
    launch.kill();
    let mut launch = Launch::start(&stage, &Plan::new(job, 1).after(20));
    assert_eq!(launch.load(None)[0]["step"], 20);
    cluster.run(&format!("rm {job}/20")).ok();
    stage.forget(job);
    // A rank that loads once more, as after a damage, is not given another step in its place.
    let order = json!({
        "do": "load", "job": job, "launch": launch.id.to_string(), "number": 2, "step": 20,
    });
    let refused = launch.ranks[0].ask(&order).unwrap_err();
    refused.says("NotFound", &["20 is not committed", "rapidraid ls"]);
    // The launch has the state, so it goes on.
    launch.prepare();
    let fill = launch.save(30);
    launch.wait(30);
    assert_eq!(stage.committed(job), [10, 30]);
    let again = stage.load(job, None).unwrap().unwrap();
    assert_eq!((again.step, again.fill.to_string()), (30, fill));
    stage.assert_sound();
}
