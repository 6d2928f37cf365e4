//! Tests of the staging daemon with real processes: storage daemons, `rapidraid stage`, and
//! trainers that use its socket. Processes are killed, break the rules, or disagree; every step
//! that is loaded afterwards is compared byte by byte (docs/staging.md).
//!
//! A cell is one scenario. The cells of a test share a cluster; each has its own staging daemon,
//! folder and job.
#![allow(clippy::disallowed_methods)] // processes of the machine, in the machine's time
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test

mod machine;

#[path = "staging/away.rs"]
mod away;
#[path = "staging/content.rs"]
mod content;
#[path = "staging/crashes.rs"]
mod crashes;
#[path = "staging/dates.rs"]
mod dates;
#[path = "staging/flips.rs"]
mod flips;
#[path = "staging/hostile.rs"]
mod hostile;
#[path = "staging/hosts.rs"]
mod hosts;
#[path = "staging/input.rs"]
mod input;
#[path = "staging/launch.rs"]
mod launch;
#[path = "staging/launches.rs"]
mod launches;
#[path = "staging/ledger.rs"]
mod ledger;
#[path = "staging/own_part.rs"]
mod own_part;
#[path = "staging/ranges.rs"]
mod ranges;
#[path = "staging/rank.rs"]
mod rank;
#[path = "staging/role.rs"]
mod role;
#[path = "staging/servers.rs"]
mod servers;
#[path = "staging/stage.rs"]
mod stage;
#[path = "staging/storm.rs"]
mod storm;
#[path = "staging/survives.rs"]
mod survives;
#[path = "staging/watch.rs"]
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use machine::Cluster;
use machine::network::Network;
use serde_json::{Value, json};

/// A scenario: its name, which is also the name of its job, and the function that runs it.
type Cell = (&'static str, fn(&Cluster, &str));

/// Number of cells that run at once; a cell spends most of its time waiting.
const JOBS: u64 = 3;

/// Number of kills in the suite's storm.
const SUITE_KILLS: u64 = 20;

/// Number of bits that the suite flips in each place.
const SUITE_FLIPS: u64 = 2;

/// Number of nodes of a cluster.
const NODES: usize = 6;

/// Settings of a cluster of six nodes with short leases.
const CLUSTER: [&str; 3] = ["code.list=6,4", "timeouts.lease_s=3", "policy.archive_all_but=never"];

/// Lists cells by the names of their functions.
macro_rules! cells {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name)),*] };
}
pub(crate) use cells;

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    setting(name).map(|text| text.parse().unwrap())
}

/// Runs cells on one cluster, several at once.
fn play(cells: &[Cell]) {
    play_at_once(cells, number("RAPIDRAID_SOAK_JOBS").unwrap_or(JOBS));
}

/// Runs cells on one cluster, `jobs` at once, and reports all failures.
fn play_at_once(cells: &[Cell], jobs: u64) {
    play_on(|| Cluster::start(NODES, &CLUSTER), cells, jobs);
}

/// Runs cells on the cluster that `start` returns, `jobs` at once, and reports all failures.
fn play_on(start: impl FnOnce() -> Cluster, cells: &[Cell], jobs: u64) {
    let only = setting("RAPIDRAID_STAGING_CELL");
    let cells: Vec<&Cell> =
        cells.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)).collect();
    if cells.is_empty() {
        return;
    }
    let cluster = start();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((name, cell)) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            let began = Instant::now();
            let ended = catch_unwind(AssertUnwindSafe(|| cell(&cluster, name)));
            let word = if ended.is_ok() { "holds" } else { "FAILED" };
            eprintln!("{name}: {word} after {:.1} s", began.elapsed().as_secs_f64());
            if ended.is_err() {
                failed.lock().unwrap().push(*name);
            }
        }
    };
    std::thread::scope(|scope| {
        (0..jobs.min(cells.len() as u64)).for_each(|_| drop(scope.spawn(work)));
    });
    let failed = failed.into_inner().unwrap();
    let replay = "RAPIDRAID_STAGING_CELL=NAME cargo test --test staging plays one again";
    assert!(failed.is_empty(), "{} of {} cells: {failed:?}; {replay}", failed.len(), cells.len());
}

/// Not a test: the other tests start this binary again as a trainer.
#[test]
fn a_trainer_of_the_other_tests() {
    role::play_if_started();
}

#[test]
fn what_survives_a_kill_is_what_the_page_says() {
    play(survives::CELLS);
}

#[test]
fn a_cluster_that_stands_still_loses_nothing() {
    // These cells suspend the cluster that they share.
    play_at_once(away::CELLS, 1);
}

#[test]
fn launches_take_over_in_order() {
    play(launches::CELLS);
}

#[test]
fn a_host_of_eight_is_lost_and_seven_go_on() {
    // Each cell has eight daemons and sixteen trainers, which wait most of the time.
    let Some(network) = Network::start() else {
        eprintln!("no link is cut: network namespaces need root and iproute2");
        return play_at_once(hosts::EIGHT, 2);
    };
    let cells = [hosts::EIGHT, hosts::EIGHT_WITH_LINKS].concat();
    play_on(|| Cluster::start_on(network, NODES, &CLUSTER), &cells, 2);
}

#[test]
fn a_host_loads_its_part_from_memory() {
    play(own_part::CELLS);
}

#[test]
fn a_daemon_of_two_hosts_that_was_killed_anywhere_goes_on() {
    play(hosts::TWO);
}

#[test]
fn a_save_of_two_hosts_outlives_the_daemons_that_serve_it() {
    servers::play(setting("RAPIDRAID_KILLS_SERVERS").is_some_and(|which| which == "all"));
}

#[test]
fn dates_that_jump_change_nothing() {
    dates::play();
}

#[test]
fn bad_input_is_refused_with_a_hint() {
    play(input::CELLS);
}

#[test]
fn a_part_of_a_step_is_read_by_ranges() {
    play(ranges::CELLS);
}

#[test]
fn a_hostile_trainer_hurts_nobody_else() {
    play(hostile::CELLS);
}

#[test]
fn a_bit_that_turns_anywhere_is_never_committed_or_loaded() {
    let count = number("RAPIDRAID_FLIPS").unwrap_or(SUITE_FLIPS);
    let seed = number("RAPIDRAID_KILLS_SEED").unwrap_or(0);
    let cluster = Cluster::start(NODES, &CLUSTER);
    let seen = json!(flips::play(&cluster, count, seed));
    eprintln!("{seen:#}");
    if let Some(path) = setting("RAPIDRAID_KILLS_RESULT") {
        let record = json!({ "bits_in_each_place": count, "seed": seed, "seen": seen });
        std::fs::write(path, format!("{record:#}\n")).unwrap();
    }
}

#[test]
fn a_daemon_that_was_killed_anywhere_goes_on() {
    play(crashes::CELLS);
}

#[test]
fn whoever_is_killed_at_any_moment_no_whole_step_is_lost_and_no_wrong_byte_is_loaded() {
    let kills = number("RAPIDRAID_KILLS_STAGING").unwrap_or(SUITE_KILLS);
    let seed = number("RAPIDRAID_KILLS_SEED").unwrap_or(0);
    let cluster = Cluster::start(NODES, &CLUSTER);
    let mut seen = storm::play(&cluster, kills, seed);
    eprintln!("{seen:#}");
    if let Some(path) = setting("RAPIDRAID_KILLS_RESULT") {
        seen["command"] = format!("cargo xtask kills --staging {kills} --seed {seed}").into();
        seen["machine"] = machine();
        std::fs::write(path, format!("{seen:#}\n")).unwrap();
    }
}

/// Returns a description of the machine on which the tests run.
fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpus.lines().find(|line| line.starts_with(name));
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
    };
    let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let kernel = read("/proc/sys/kernel/osrelease");
    json!({ "processor": field("model name"), "cores": cores, "kernel": format!("Linux {}", kernel.trim()) })
}
