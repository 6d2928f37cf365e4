//! Ctrl-C and SIGTERM in a command: what it says, and what it leaves behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::machine::{Cluster, Daemon, Ended, Listener, Running, bytes, files_below, program};

/// The longest that an event may take to come. No test depends on how long it takes.
const LIMIT: Duration = Duration::from_secs(60);

fn spawn(cluster: &Cluster, line: &str) -> Running {
    spawn_heard(cluster, line, Arc::new(|_| ()))
}

/// Starts a client command. `listener` receives the lines of its stderr.
fn spawn_heard(cluster: &Cluster, line: &str, listener: Listener) -> Running {
    let mut command = program(cluster.folder.path());
    command.args(line.split(' ')).env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
    Running::start(command, listener)
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
    for (signal_sent, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        cluster.daemons[3].signal(Signal::STOP);
        let saving = spawn(&cluster, "save gpt/1 in --record gpt.record");
        wait_until("the save has begun", || has_stripe_files(&cluster));
        let interrupted_at = Instant::now();
        signal(&saving, signal_sent);
        saving
            .ended(LIMIT)
            .fails(code, &["interrupted by", "was aborted", "nothing of it is visible"]);
        eprintln!("aborted {:.2} s after the signal", interrupted_at.elapsed().as_secs_f64());
        cluster.daemons[3].signal(Signal::CONT);
        assert!(!cluster.path("gpt.record").exists());
        wait_until("the files are removed", || !has_stripe_files(&cluster));
    }
    // The leases of both saves last for a minute, and the step is free all the same.
    cluster.run("save gpt/1 in").ok();
    cluster.run("restore gpt/1 --out out").ok();
    assert_eq!(cluster.read("out/a.bin"), bytes(4_000_000, 1));
}

/// No gateway answers, so the save cannot be aborted. The second signal ends the command, which would
/// otherwise try for longer than the first wait of this test.
#[test]
fn a_second_signal_ends_the_command_at_once() {
    let cluster = Cluster::start(6, &["code.list=6,4"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 1));
    cluster.daemons[3].signal(Signal::STOP);
    let saving = spawn(&cluster, "save gpt/1 in");
    wait_until("the save has begun", || has_stripe_files(&cluster));
    for command in ["ls", "status"] {
        let shown = cluster.run(&format!("{command} --json")).ok().json();
        let open = &shown["open_saves"][0];
        assert_eq!((&open["job"], &open["step"]), (&"gpt".into(), &1.into()), "{command}");
        let text = cluster.run(command).ok().out;
        assert!(text.contains("gpt/1 is being saved"), "{command}: {text}");
    }
    cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::STOP));
    signal(&saving, Signal::INT);
    std::thread::sleep(Duration::from_secs(1));
    assert!(!saving.has_exited(), "the first signal lets the command abort its save");
    signal(&saving, Signal::INT);
    saving.ended(LIMIT).fails(130, &["interrupted by SIGINT", "a second SIGINT"]);
    cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::CONT));
    cluster.until("all nodes are live", |nodes| nodes.iter().all(|node| node["live"] == true));
    // The save ends with its lease.
    cluster.run("save gpt/1 in --wait").ok();
}

/// A command that waits for its first answer has nothing to undo.
#[test]
fn a_signal_ends_a_command_that_has_not_begun() {
    let cluster = Cluster::start(6, &["code.list=6,4"]);
    cluster.write("in/a.bin", &bytes(4_000, 1));
    cluster.run("save gpt/1 in").ok();
    cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::STOP));
    for line in ["save gpt/2 in", "archive gpt/1", "restore gpt/1 --out out"] {
        let waiting = spawn(&cluster, line);
        std::thread::sleep(Duration::from_millis(500));
        signal(&waiting, Signal::INT);
        let ended = waiting.ended(LIMIT);
        // The process ends by the signal itself, or says so if it has begun meanwhile.
        assert!(matches!(ended.code, -1 | 130), "{line}: {ended:?}");
        assert!(
            !cluster.path("out").exists() && !ended.err.contains("second"),
            "{line}: {ended:?}"
        );
    }
    cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::CONT));
    cluster.run("save gpt/2 in").ok();
}

#[test]
fn an_archiving_goes_on_without_its_watcher_and_another_one_joins_it() {
    let cluster = Cluster::start(6, &["code.list=6,4"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 2));
    cluster.run("save gpt/1 in").ok();
    cluster.daemons[3].signal(Signal::STOP);
    let first = spawn(&cluster, "archive gpt/1");
    wait_until("the archiving has begun", || {
        let shown = cluster.run("show gpt/1 --json").ok().json();
        shown["shards"][0]["archiving"].as_u64() > Some(0)
    });
    signal(&first, Signal::INT);
    first.ended(LIMIT).fails(130, &["interrupted by SIGINT", "the nodes continue"]);
    let has_joined = Arc::new(AtomicBool::new(false));
    let told = has_joined.clone();
    let listener = Arc::new(move |line: &str| {
        told.fetch_or(line.contains("archives gpt/1 already"), Ordering::Relaxed);
    });
    let second = spawn_heard(&cluster, "archive gpt/1 --json", listener);
    wait_until("the second one joins", || has_joined.load(Ordering::Relaxed));
    cluster.daemons[3].signal(Signal::CONT);
    let mut joined = second.ended(LIMIT);
    // On a slow machine the node was away for longer than its lease. Then the attempt has failed, and
    // the nodes go on by themselves.
    let until = Instant::now() + LIMIT;
    while joined.code != 0 {
        assert!(joined.err.contains("the nodes try again by themselves"), "{}", joined.err);
        assert!(Instant::now() < until, "it is not archived: {}", joined.err);
        joined = cluster.run("archive gpt/1 --json");
    }
    let joined = joined.json();
    assert_eq!(joined["undropped"], 0, "{joined}");
    let verified = cluster.run("verify gpt/1 --json").ok().json();
    assert_eq!(verified["survives"], 2, "{verified}");
}

/// Starts `restoring` and sends it the signal when it has created its file. The nodes are stopped at
/// that moment, and go on after the signal. Returns the outcome. A restore that was faster than that,
/// which ends with the code 0, is repeated unless `may_succeed`.
fn restore_until_signal(
    cluster: &Cluster,
    restoring: impl Fn() -> Running,
    signal_sent: Signal,
    may_succeed: bool,
) -> Ended {
    loop {
        let restoring = restoring();
        let has_file = || !files_below(&cluster.path("out")).is_empty();
        wait_until("the file is created", || has_file() || restoring.has_exited());
        cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::STOP));
        let was_running = !restoring.has_exited();
        signal(&restoring, signal_sent);
        std::thread::sleep(Duration::from_millis(100));
        cluster.daemons.iter().for_each(|daemon| daemon.signal(Signal::CONT));
        let ended = restoring.ended(LIMIT);
        if was_running && (may_succeed || ended.code != 0) {
            return ended;
        }
        std::fs::remove_dir_all(cluster.path("out")).unwrap();
    }
}

#[test]
fn an_interrupted_restore_leaves_no_file() {
    let cluster = Cluster::start(6, &["code.list=6,4"]);
    cluster.write("in/a.bin", &bytes(40_000_000, 3));
    cluster.run("save gpt/1 in").ok();
    let restoring = || spawn(&cluster, "restore gpt/1 --out out --force");
    for (signal_sent, name, code) in [(Signal::INT, "SIGINT", 130), (Signal::HUP, "SIGHUP", 129)] {
        let ended = restore_until_signal(&cluster, restoring, signal_sent, false);
        ended.fails(code, &[&format!("interrupted by {name}"), "nothing of gpt/1 was written"]);
        assert!(!cluster.path("out").exists(), "{name}");
    }
    // A shell or `nohup` has the command ignore the end of the terminal.
    let ignoring = || {
        let line = "restore gpt/1 --out out --force";
        let mut command = std::process::Command::new("sh");
        command
            .arg("-c")
            .arg(format!("trap '' HUP; exec {} {line}", env!("CARGO_BIN_EXE_rapidraid")));
        command.current_dir(cluster.folder.path());
        command.env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
        Running::start(command, Arc::new(|_| ()))
    };
    restore_until_signal(&cluster, ignoring, Signal::HUP, true).ok();
    assert!(cluster.read("out/a.bin") == bytes(40_000_000, 3));
}

/// The nodes carry out these requests without the command. A node that is stopped holds them up.
#[test]
fn an_interrupted_request_says_what_may_become_of_it() {
    let cluster = Cluster::start(6, &["code.list=6,4", "timeouts.lease_s=60"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 1));
    for step in 1..=3 {
        cluster.run(&format!("save gpt/{step} in")).ok();
    }
    cluster.daemons[3].signal(Signal::STOP);
    let has_begun = Arc::new(AtomicBool::new(false));
    let told = has_begun.clone();
    let listener = Arc::new(move |line: &str| {
        told.fetch_or(line.contains("checkpoint 1 of 3"), Ordering::Relaxed);
    });
    let mending = spawn_heard(&cluster, "verify --mend", listener);
    wait_until("the verify has begun", || has_begun.load(Ordering::Relaxed));
    signal(&mending, Signal::INT);
    let parts = ["interrupted by SIGINT", "repair them without the command", "hint: run"];
    mending.ended(LIMIT).fails(130, &parts);
    // A request waits some seconds for the stopped node. On a busy machine it may end before the
    // signal comes; the next step is removed then.
    let interrupted = (1..=3).find(|step| {
        let removing = spawn(&cluster, &format!("rm gpt/{step}"));
        let show = format!("show gpt/{step}");
        wait_until("the step is not visible", || cluster.run(&show).code == 1);
        signal(&removing, Signal::TERM);
        let ended = removing.ended(LIMIT);
        let was_interrupted = ended.code != 0;
        if was_interrupted {
            let begun = format!("may have begun to remove gpt/{step}");
            ended.fails(143, &["interrupted by SIGTERM", &begun, &show]);
        }
        was_interrupted
    });
    let last = interrupted.expect("no request was interrupted");
    for step in last + 1..=3 {
        cluster.run(&format!("rm gpt/{step}")).ok();
    }
    let is_left = |file: &String| file.ends_with(".rep") && !file.starts_with("n4/");
    wait_until("the other nodes have removed their replicas", || {
        !files_below(&cluster.path("cluster/nodes")).iter().any(is_left)
    });
}

/// A daemon that was started in a terminal, or whose log was rotated, is needed all the same.
#[test]
fn a_daemon_outlives_the_end_of_its_terminal() {
    let cluster = Cluster::files(2, &[]);
    let is_told = Arc::new(AtomicBool::new(false));
    let told = is_told.clone();
    let listener = Arc::new(move |line: &str| {
        told.fetch_or(line.contains("SIGHUP is ignored"), Ordering::Relaxed);
    });
    let mut command = program(cluster.folder.path());
    command.arg("node").arg("--config").arg(cluster.config(1));
    let daemon = Daemon::told(command, listener).ready();
    daemon.signal(Signal::HUP);
    wait_until("the log line", || is_told.load(Ordering::Relaxed));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().code, 0);
}

#[test]
fn a_demo_that_is_told_to_end_says_by_which_signal() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(folder.path());
    command.args(["demo", "--size", "8MiB", "--dir", "play"]);
    let demo = Running::start(command, Arc::new(|_| ()));
    wait_until("the demo has begun", || !files_below(&folder.path().join("play")).is_empty());
    signal(&demo, Signal::TERM);
    demo.ended(LIMIT).fails(143, &["interrupted by SIGTERM", "all nodes are stopped"]);
    assert_eq!(std::fs::read_dir(folder.path().join("play")).unwrap().count(), 0);
}

/// A file that changes while it is saved is no wrong usage.
#[test]
fn a_save_of_a_file_that_changes_fails_with_its_own_exit_code() {
    let cluster = Cluster::start(6, &["code.list=6,4", "timeouts.lease_s=60"]);
    cluster.write("in/a.bin", &bytes(4_000_000, 1));
    cluster.daemons[3].signal(Signal::STOP);
    let saving = spawn(&cluster, "save gpt/1 in");
    wait_until("the save has begun", || has_stripe_files(&cluster));
    cluster.write("in/a.bin", &bytes(4_000_001, 2));
    cluster.daemons[3].signal(Signal::CONT);
    saving.ended(LIMIT).fails(1, &["changed while", "--allow-changing"]);
}
