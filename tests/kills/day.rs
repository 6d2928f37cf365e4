//! A day of faults: nodes are killed, stopped, filled up and emptied while clients work, and what is
//! lost is made again automatically.
//!
//! The faults stay within what the promises allow. At most n-k nodes are away or degraded at the same
//! time. A replicated block has two copies, so no disk is emptied before the last one is whole again.

use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::entropy::{Entropy, SeededEntropy};
use rustix::process::Signal;
use serde_json::Value;

use crate::fleet::{Fleet, LEASE, Plan, SETTLE_LIMIT};
use crate::machine::disk::fill;
use crate::storm::{AWAY, Ends, Storm};

/// Number of nodes: more than the code needs, so that there are spares.
const NODES: usize = 10;
/// Number of nodes whose disks can be filled up.
const SMALL_DISKS: usize = 3;
/// A node is given up for pieces after five of these.
const GRACE: Duration = Duration::from_secs(2);
/// The largest outage: pieces are made on other nodes meanwhile.
const LONG_OUTAGE: Duration = Duration::from_secs(25);
/// The time that a filled disk stays full.
const FULL: Duration = Duration::from_secs(5);
/// The setting `memory`: the limit of all work of a daemon.
const MEMORY: u64 = 64 << 20;
/// Memory that a daemon needs beyond that limit: for its code, its threads, and the caches of its
/// index.
const BASE_MEMORY: u64 = 192 << 20;
/// Maximum duration of a survey of this fleet. A node that hangs holds it up for five seconds.
const SURVEY: Duration = Duration::from_secs(8);
/// Once a node is back on an emptied disk for this long, no further fault begins until nothing is
/// degraded.
const HEALING: Duration = Duration::from_secs(45);
/// A daemon may end this long after its disk was full.
const AFTER_FULL: Duration = Duration::from_secs(30);
/// The kinds of fault that begin a day: a disk is filled up, or emptied.
const FILL: u64 = 8;
const EMPTY: u64 = 9;
/// Interval between two progress lines.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// Starts a fleet that gives nodes up after seconds and repairs at full speed.
pub fn start() -> Fleet {
    let memory = format!("memory={}MiB", MEMORY >> 20);
    let grace = format!("repair.grace_s={}", GRACE.as_secs());
    let set = ["code.block=64KiB", "repair.share=100", &*memory, &*grace];
    Fleet::start(&Plan { nodes: NODES, code: "6,4", set: &set, small_disks: SMALL_DISKS })
}

/// The fault of a node, with the time at which it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Killed, with or without its data.
    Down(Instant),
    Stopped(Instant),
    Full(Instant),
}

/// A node whose disk was emptied.
#[derive(Debug, Clone, Copy)]
struct Emptied {
    at: usize,
    /// The time of its return; until then, that of the fault.
    back: Instant,
    /// The time since which it is back and no save runs that began before its return. Such a save
    /// may commit a block of which this node has lost a copy, and a survey sees only what is
    /// committed.
    settled: Instant,
}

struct FaultSchedule<'a> {
    storm: &'a Storm<'a>,
    random: SeededEntropy,
    nodes: Vec<Fault>,
    /// The kinds of the first faults, the last one first. Later ones are drawn.
    first: Vec<u64>,
    /// The node that was emptied last, until nothing is degraded.
    emptied: Option<Emptied>,
    /// For each node, the time at which its disk was last full.
    full: Vec<Option<Instant>>,
    /// The most memory that a daemon had.
    peak: u64,
}

/// Lets clients work for this long while faults happen. Then waits until nothing is degraded, and
/// checks every step.
pub fn play(fleet: &Fleet, length: Duration, seed: u64) {
    let storm = fleet.work_under(0, seed, |storm| {
        let _ends = Ends(&storm.over);
        let mut schedule = FaultSchedule {
            storm,
            random: SeededEntropy::new(seed),
            nodes: vec![Fault::None; NODES],
            first: vec![FILL, EMPTY],
            emptied: None,
            full: vec![None; NODES],
            peak: 0,
        };
        schedule.run_until(Instant::now() + length);
        let peak = schedule.peak;
        assert!(peak <= MEMORY + BASE_MEMORY, "a daemon had {peak} bytes in memory");
        eprintln!("largest daemon: {} MiB", peak >> 20);
    });
    let calm = Instant::now();
    fleet.until("nothing is degraded", || is_whole(&fleet.ask("status --json"), calm));
    storm.calm();
}

impl FaultSchedule<'_> {
    fn run_until(&mut self, end: Instant) {
        let mut told = Instant::now();
        while Instant::now() < end && !self.storm.is_over() {
            sleep(Duration::from_millis(self.random.below(1000)));
            self.end_faults(Instant::now());
            self.check_status();
            if told.elapsed() >= TOLD_EVERY {
                told = Instant::now();
                let left = end.saturating_duration_since(told).as_secs();
                eprintln!("{left} s left: {:?}", self.storm.counts.0.lock().unwrap());
            }
            let away = self.nodes.iter().filter(|node| **node != Fault::None).count();
            let healing = self.emptied.filter(|emptied| self.nodes[emptied.at] == Fault::None);
            // A survey finds nothing missing only while all nodes are live.
            let is_late = healing.is_some_and(|emptied| emptied.back.elapsed() > HEALING);
            if away + usize::from(healing.is_some()) < AWAY && !is_late {
                self.begin_fault();
            }
        }
        self.end_faults(Instant::now() + 2 * LONG_OUTAGE);
    }

    /// Begins a drawn fault of a drawn node, if the node has none.
    fn begin_fault(&mut self) {
        let fleet = self.storm.fleet;
        let kind = self.first.last().copied().unwrap_or_else(|| self.random.below(10));
        let nodes = if kind == FILL { fleet.disks.len() } else { NODES };
        let at = self.random.below(nodes as u64) as usize;
        let is_emptied = self.emptied.is_some_and(|emptied| emptied.at == at);
        let is_refused = kind == EMPTY && (self.emptied.is_some() || at == fleet.home);
        if nodes == 0 {
            self.first.pop();
        }
        if nodes == 0 || self.nodes[at] != Fault::None || is_emptied || is_refused {
            return;
        }
        self.first.pop();
        let now = Instant::now();
        let random_ms = |most: Duration| self.random.below(most.as_millis() as u64);
        let within = |most: Duration| now + Duration::from_millis(random_ms(most));
        let (name, fault) = match kind {
            FILL => ("filled up", Fault::Full(now + FULL)),
            EMPTY => ("emptied", Fault::Down(within(2 * LEASE))),
            0..4 => ("killed", Fault::Down(within(2 * LEASE))),
            4..6 => ("killed for long", Fault::Down(within(LONG_OUTAGE / 2) + LONG_OUTAGE / 2)),
            _ => ("stopped", Fault::Stopped(within(3 * LEASE))),
        };
        match fault {
            Fault::Stopped(_) => {
                assert!(fleet.watch.signal(&fleet.members[at].name, Signal::STOP));
            }
            Fault::Full(_) => fill(&fleet.data_folder(at).join("foreign")),
            _ => {
                fleet.kill(at);
                fleet.bury(at);
            }
        }
        if kind == EMPTY {
            empty(fleet, at);
            self.emptied = Some(Emptied { at, back: now, settled: now });
        }
        self.nodes[at] = fault;
        if kind != FILL {
            self.storm.away.lock().unwrap()[at] = (Some(now), None);
        }
        self.storm.counts.add(name);
    }

    /// Ends the faults whose time has come, and starts daemons that have ended on a full disk.
    fn end_faults(&mut self, until: Instant) {
        let fleet = self.storm.fleet;
        for at in 0..NODES {
            let now = Instant::now();
            if matches!(self.nodes[at], Fault::Full(_)) {
                self.full[at] = Some(now);
            }
            match self.nodes[at] {
                Fault::None if fleet.has_ended(at) => {
                    self.restart_after_full_disk(at);
                    continue;
                }
                Fault::Down(due) if due <= until => fleet.restart(at),
                Fault::Stopped(due) if due <= until => {
                    fleet.watch.signal(&fleet.members[at].name, Signal::CONT);
                }
                Fault::Full(due) if due <= until => {
                    std::fs::remove_file(fleet.data_folder(at).join("foreign")).unwrap();
                    self.nodes[at] = Fault::None;
                    continue;
                }
                _ => continue,
            }
            self.nodes[at] = Fault::None;
            match &mut self.emptied {
                Some(emptied) if emptied.at == at => emptied.back = Instant::now(),
                _ => self.storm.away.lock().unwrap()[at].1 = Some(Instant::now()),
            }
        }
    }

    /// Starts a daemon that has ended by itself, which only a full disk explains.
    fn restart_after_full_disk(&mut self, at: usize) {
        let fleet = self.storm.fleet;
        let name = &fleet.members[at].name;
        let was_full = self.full[at].is_some_and(|full| full.elapsed() < AFTER_FULL);
        assert!(was_full, "{name} has ended\n{}", fleet.watch.tails());
        self.storm.counts.add("ended on a full disk");
        self.storm.away.lock().unwrap()[at] = (self.full[at], None);
        fleet.restart(at);
        self.storm.away.lock().unwrap()[at].1 = Some(Instant::now());
    }

    /// Reads the status: the memory of daemons, and whether what was on an emptied disk is there
    /// again.
    fn check_status(&mut self) {
        let ended = self.storm.fleet.run("status --json");
        if ended.code != 0 {
            return;
        }
        let status = ended.json();
        let peaks = status["nodes"].as_array().unwrap().iter();
        let peaks = peaks.filter_map(|node| node["peak_memory_bytes"].as_u64());
        self.peak = peaks.chain([self.peak]).max().unwrap_or_default();
        let Some(emptied) = &mut self.emptied else { return };
        let (at, back) = (emptied.at, emptied.back);
        let saving = self.storm.saving.lock().unwrap().values().any(|began| *began <= back);
        if saving || self.nodes[at] != Fault::None {
            emptied.settled = Instant::now();
            return;
        }
        let tails = || self.storm.fleet.watch.tails();
        assert!(back.elapsed() < 3 * SETTLE_LIMIT, "still degraded: {status}\n{}", tails());
        if is_whole(&status, emptied.settled.max(back)) {
            self.emptied = None;
            self.storm.away.lock().unwrap()[at].1 = Some(Instant::now());
            self.storm.counts.add("emptied and whole again");
        }
    }
}

/// Returns whether a survey that began after this time found nothing missing.
fn is_whole(status: &Value, after: Instant) -> bool {
    let survey = &status["repair"]["survey"];
    let Some(age_s) = survey["age_s"].as_f64() else { return false };
    let began = Duration::from_secs_f64(age_s) + SURVEY;
    survey["degraded"] == 0 && survey["unknown"] == 0 && began < after.elapsed()
}

/// Removes all files of a node's data folder, which may be a mount point.
fn empty(fleet: &Fleet, at: usize) {
    for entry in std::fs::read_dir(fleet.data_folder(at)).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => std::fs::remove_dir_all(path).unwrap(),
            false => std::fs::remove_file(path).unwrap(),
        }
    }
}
