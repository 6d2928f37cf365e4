//! Ctrl-C and SIGTERM in a command: what it says, and what it leaves behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::machine::{Cluster, Running, bytes, files_below, program};

/// The longest that an event may take to come. No test depends on how long it takes.
const LIMIT: Duration = Duration::from_secs(60);

fn spawn(cluster: &Cluster, line: &str) -> Running {
    let mut command = program(cluster.folder.path());
    command.args(line.split(' ')).env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
    Running::start(command, Arc::new(|_| ()))
}

fn signal(command: &Running, signal: Signal) {
    kill_process(Pid::from_child(&command.child), signal).unwrap();
}

fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < LIMIT, "never came: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns whether a node has a file of a stripe.
fn has_stripe_files(cluster: &Cluster) -> bool {
    files_below(&cluster.path("cluster/nodes")).iter().any(|file| file.contains("/shards/"))
}

/// A node that is stopped holds up a save in the middle: its blocks wait for it.
#[test]
fn an_interrupted_save_is_aborted_and_its_step_is_free_at_once() {
    let cluster = Cluster::start(6, &["code.list=6,4", "timeouts.lease_s=60"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 1));
    for signal_sent in [Signal::INT, Signal::TERM] {
        cluster.daemons[3].signal(Signal::STOP);
        let saving = spawn(&cluster, "save gpt/1 in --record gpt.record");
        wait_until("the save has begun", || has_stripe_files(&cluster));
        signal(&saving, signal_sent);
        saving
            .ended(LIMIT)
            .fails(1, &["interrupted by", "was aborted", "nothing of it is visible"]);
        cluster.daemons[3].signal(Signal::CONT);
        assert!(!cluster.path("gpt.record").exists());
        wait_until("the files are removed", || !has_stripe_files(&cluster));
    }
    // The leases of both saves last for a minute, and the step is free all the same.
    cluster.run("save gpt/1 in").ok();
    cluster.run("restore gpt/1 --out out").ok();
    assert_eq!(cluster.read("out/a.bin"), bytes(4_000_000, 1));
}

#[test]
fn an_archiving_goes_on_without_its_watcher_and_another_one_joins_it() {
    let cluster = Cluster::start(6, &["code.list=6,4"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 2));
    cluster.run("save gpt/1 in").ok();
    cluster.daemons[3].signal(Signal::STOP);
    let first = spawn(&cluster, "archive gpt/1");
    wait_until("the archiving has begun", || {
        cluster.run("show gpt/1 --json").ok().out.contains("archiving")
    });
    let second = spawn(&cluster, "archive gpt/1 --json");
    signal(&first, Signal::INT);
    first.ended(LIMIT).fails(1, &["interrupted by SIGINT", "the nodes go on archiving gpt/1"]);
    cluster.daemons[3].signal(Signal::CONT);
    let joined = second.ended(LIMIT).ok().json();
    assert_eq!(joined["undropped"], 0, "{joined}");
    assert!(joined["notes"].to_string().contains("archives gpt/1 already"), "{joined}");
    let verified = cluster.run("verify gpt/1 --json").ok().json();
    assert_eq!(verified["survives"], 2, "{verified}");
}

#[test]
fn an_interrupted_restore_leaves_no_file() {
    let cluster = Cluster::start(6, &["code.list=6,4"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 3));
    cluster.run("save gpt/1 in").ok();
    for daemon in &cluster.daemons[1..] {
        daemon.signal(Signal::STOP);
    }
    let restoring = spawn(&cluster, "restore gpt/1 --out out");
    wait_until("the folder is created", || cluster.path("out").exists());
    signal(&restoring, Signal::INT);
    restoring.ended(LIMIT).fails(1, &["interrupted by SIGINT", "nothing of gpt/1 was written"]);
    for daemon in &cluster.daemons[1..] {
        daemon.signal(Signal::CONT);
    }
    assert!(!cluster.path("out").exists());
}
