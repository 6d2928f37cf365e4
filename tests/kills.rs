//! Kills real daemons and commands with SIGKILL, at each stage of each operation and at random
//! moments. The processes use real sockets and files.
//!
//! The suite plays some cells of the matrix and a short storm; `cargo xtask kills` plays the rest
//! (docs/testing.md).
#![allow(clippy::disallowed_methods)] // processes of the machine, in the machine's time
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test

mod machine;

#[path = "kills/cell.rs"]
mod cell;
#[path = "kills/damage.rs"]
mod damage;
#[path = "kills/day.rs"]
mod day;
#[path = "kills/fleet.rs"]
mod fleet;
#[path = "kills/ledger.rs"]
mod ledger;
#[path = "kills/rest.rs"]
mod rest;
#[path = "kills/storm.rs"]
mod storm;
#[path = "kills/watch.rs"]
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cell::Cell;
use fleet::{Fleet, Plan};

/// Number of fleets on which cells are played concurrently. A cell spends most of its time waiting.
const JOBS: u64 = 3;
/// Cells that the suite plays: every role, every operation except restore, and the stages around each
/// commit point.
const SUITE: [&str; 18] = [
    "gateway:save.decide",
    "head:save.block",
    "home:save.publish",
    "client:save.seal",
    "middle:replace.mark",
    "home:archive.archived",
    "gateway:archive.proof",
    "tail:archive.piece",
    "head:archive.drop",
    "client:archive.reserve",
    "gateway:rm.tombstone",
    "middle:rm.sweep",
    "sayer:mend.fetch",
    "gateway:repair.piece",
    "tail:giveup.receipt",
    "sayer:replacenode.catchup",
    "home:removenode.left",
    "head:rebuild.claim",
];

/// Number of kills in the suite's storm.
const SUITE_KILLS: u64 = 10;

/// Number of seconds of the suite's day of faults.
const SUITE_DAY: u64 = 20;

fn fleet_of_cells() -> Fleet {
    Fleet::start(&Plan {
        nodes: cell::NODES,
        code: cell::CODE,
        set: &[cell::BLOCK],
        small_disks: 0,
    })
}

/// Plays the cells on several fleets concurrently. Replaces a fleet after a failed cell and after a
/// cell that moves the catalogue. Panics at the end with a list of all failed cells.
fn play_cells(cells: &[Cell]) {
    let seed = number("RAPIDRAID_KILLS_SEED").unwrap_or(0);
    let jobs = number("RAPIDRAID_SOAK_JOBS").unwrap_or(JOBS).min(cells.len() as u64);
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let started = Instant::now();
    let work = || {
        let mut fleet = None;
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(cell) = cells.get(at) else { return };
            let began = Instant::now();
            let now = fleet.take().unwrap_or_else(fleet_of_cells);
            match catch_unwind(AssertUnwindSafe(|| now.play(*cell, seed, at as u64 + 1))) {
                Ok(()) => fleet = Some(now).filter(|_| !cell.moves_the_home()),
                Err(_) => failed.lock().unwrap().push(*cell),
            }
            let (all, took) = (cells.len(), began.elapsed().as_secs_f64());
            let (wrong, total) = (failed.lock().unwrap().len(), started.elapsed().as_secs());
            let number = at + 1;
            eprintln!(
                "cell {number} of {all}, {wrong} failed: {cell} in {took:.1} s; {total} s in all"
            );
        }
    };
    std::thread::scope(|scope| {
        (0..jobs).for_each(|_| drop(scope.spawn(work)));
    });
    let failed = failed.into_inner().unwrap();
    let replay = |cell: &Cell| format!("cargo xtask kills --cell {cell} --seed {seed}");
    let replays: Vec<String> = failed.iter().map(replay).collect();
    assert!(
        failed.is_empty(),
        "{} of {} cells:\n{}",
        failed.len(),
        cells.len(),
        replays.join("\n")
    );
}

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str) -> Option<u64> {
    setting(name).map(|text| text.parse().unwrap())
}

#[test]
fn whoever_is_killed_at_a_stage_nothing_is_lost_and_nothing_is_left() {
    let cells: Vec<Cell> = match setting("RAPIDRAID_KILLS_CELL") {
        Some(one) if one == "all" => cell::all(),
        Some(one) => one.split(',').map(|one| one.parse().unwrap()).collect(),
        None => SUITE.iter().map(|one| one.parse().unwrap()).collect(),
    };
    play_cells(&cells);
}

#[test]
fn whoever_is_killed_at_any_moment_nothing_is_lost_and_nothing_is_left() {
    let kills = number("RAPIDRAID_KILLS_RANDOM").unwrap_or(SUITE_KILLS);
    fleet_of_cells().storm(kills, number("RAPIDRAID_KILLS_SEED").unwrap_or(0));
}

#[test]
fn a_day_of_faults_loses_nothing_and_leaves_nothing_degraded() {
    let seconds = number("RAPIDRAID_KILLS_DAY").map_or(SUITE_DAY, |minutes| 60 * minutes);
    let seed = number("RAPIDRAID_KILLS_SEED").unwrap_or(0);
    day::play(&day::start(), Duration::from_secs(seconds), seed);
}
