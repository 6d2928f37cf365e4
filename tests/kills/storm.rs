//! Clients save, replace, archive, restore and remove steps while any process may be killed at any
//! moment. At most n-k daemons are down at the same time, and each one is restarted.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::stage::TracePoint;

use crate::fleet::{Fleet, LEASE, kind_of, message_of};
use crate::ledger::{Is, Ledger, Name};
use crate::machine::{Ended, bytes, tree};
use crate::watch::Victim;

/// Number of concurrent clients.
const CLIENTS: u64 = 2;
/// Maximum number of daemons that are down at the same time: n-k.
pub const AWAY: usize = 2;
/// Number of steps that a client keeps. With more, it removes one.
const STEPS: usize = 4;
/// How long a trap waits for its stage.
const TRAP_LIMIT: Duration = Duration::from_secs(1);
/// Number of kills between two progress lines when stderr is no terminal.
const TOLD_EVERY: u64 = 50;

/// Counters of outcomes, by name.
#[derive(Default)]
pub struct Counts(pub Mutex<BTreeMap<String, u64>>);

impl Counts {
    pub fn add(&self, what: &str) {
        *self.0.lock().unwrap().entry(what.to_owned()).or_default() += 1;
    }
}

/// A storm that runs on a fleet.
pub struct Storm<'a> {
    pub fleet: &'a Fleet,
    ledger: Mutex<Ledger>,
    /// For each daemon: when it was last killed, stopped or emptied, and when it was whole again.
    pub away: Mutex<Vec<(Option<Instant>, Option<Instant>)>>,
    kills: AtomicU64,
    wanted: u64,
    pub over: AtomicBool,
    pub counts: Counts,
    /// Steps that a restore has reported as lost. They are neither replaced nor removed until one
    /// has read them.
    owed: Mutex<BTreeSet<Name>>,
    /// For each client, the time at which its present save began.
    pub saving: Mutex<BTreeMap<String, Instant>>,
}

/// Ends the storm when dropped, also when a thread panics.
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Fleet {
    /// Runs a storm with `kills` kills drawn from `seed`. Then waits until the fleet is at rest and
    /// checks every step.
    pub fn storm(&self, kills: u64, seed: u64) {
        self.work_under(kills, seed, |storm| storm.killer(seed)).calm();
    }

    /// Lets the clients work until `faults` returns. Returns the storm.
    pub fn work_under(&self, kills: u64, seed: u64, faults: impl FnOnce(&Storm<'_>)) -> Storm<'_> {
        let away = Mutex::new(vec![(None, None); self.members.len()]);
        let storm = Storm {
            fleet: self,
            ledger: Mutex::default(),
            away,
            kills: AtomicU64::new(0),
            wanted: kills,
            over: AtomicBool::new(false),
            counts: Counts::default(),
            owed: Mutex::default(),
            saving: Mutex::default(),
        };
        let started = Instant::now();
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let storm = &storm;
                scope.spawn(move || storm.client(client, seed));
            }
            faults(&storm);
        });
        let took = started.elapsed().as_secs();
        eprintln!("{took} s: {:?}", storm.counts.0.lock().unwrap());
        storm
    }
}

/// Returns the files of a version.
fn content(version: u64) -> Vec<(String, Vec<u8>)> {
    let random = SeededEntropy::new(version);
    let lengths = [0, 1, 65_536, 262_145, 400_000, 1_000_003];
    let count = 1 + random.below(3);
    let file = |at: u64| {
        let len = lengths[random.below(lengths.len() as u64) as usize];
        (format!("r{at}.bin"), bytes(len, version * 8 + at))
    };
    (0..count).map(file).collect()
}

impl Storm<'_> {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn killer(&self, seed: u64) {
        let _ends = Ends(&self.over);
        let random = SeededEntropy::new(seed);
        let mut back: Vec<(usize, Instant)> = Vec::new();
        while self.kills.load(Ordering::Relaxed) < self.wanted && !self.is_over() {
            sleep(Duration::from_millis(random.below(500)));
            self.bring_back(&mut back, |due| due <= Instant::now());
            let killed = match random.below(10) {
                0..3 => self.kill_command(&random),
                _ if back.len() >= AWAY => None,
                3..7 => self.spring(&random, &back),
                _ => self.kill_daemon(&random, &back),
            };
            let Some(killed) = killed else { continue };
            let number = self.kills.fetch_add(1, Ordering::Relaxed) + 1;
            if let Some(at) = killed {
                self.away.lock().unwrap()[at] = (Some(Instant::now()), None);
                let pause = match random.below(3) {
                    0 => 0,
                    1 => random.below(1000),
                    _ => random.below(2 * LEASE.as_millis() as u64),
                };
                back.push((at, Instant::now() + Duration::from_millis(pause)));
            }
            let is_watched = std::io::stderr().is_terminal();
            if is_watched {
                eprint!("\r{number} of {} kills", self.wanted);
            } else if number.is_multiple_of(TOLD_EVERY) {
                eprintln!("{number} of {} kills: {:?}", self.wanted, self.counts.0.lock().unwrap());
            }
        }
        self.bring_back(&mut back, |_| true);
    }

    fn bring_back(&self, back: &mut Vec<(usize, Instant)>, is_due: impl Fn(Instant) -> bool) {
        back.retain(|&(at, due)| {
            if !is_due(due) {
                return true;
            }
            self.fleet.restart(at);
            self.away.lock().unwrap()[at].1 = Some(Instant::now());
            false
        });
    }

    /// Kills the command of a random client. Returns `Some(None)` if it killed one, since no daemon
    /// is down then, and `None` if the client runs no command.
    fn kill_command(&self, random: &SeededEntropy) -> Option<Option<usize>> {
        let name = format!("client{}", random.below(CLIENTS));
        self.fleet.watch.kill(&name).then(|| {
            self.counts.add("killed a command");
            None
        })
    }

    fn draw_daemon(&self, random: &SeededEntropy, back: &[(usize, Instant)]) -> usize {
        loop {
            let at = random.below(self.fleet.members.len() as u64) as usize;
            if back.iter().all(|(away, _)| *away != at) {
                return at;
            }
        }
    }

    fn kill_daemon(
        &self,
        random: &SeededEntropy,
        back: &[(usize, Instant)],
    ) -> Option<Option<usize>> {
        let at = self.draw_daemon(random, back);
        assert!(self.fleet.kill(at), "{} has ended by itself", self.fleet.members[at].name);
        self.fleet.bury(at);
        self.counts.add("killed a daemon");
        Some(Some(at))
    }

    /// Kills a process at a random stage: the process that logs the stage, or a random daemon.
    /// Returns the index of the killed daemon, `Some(None)` if the process was a command, and
    /// `None` if the trap killed no process.
    fn spring(&self, random: &SeededEntropy, back: &[(usize, Instant)]) -> Option<Option<usize>> {
        let watch = &self.fleet.watch;
        let stage = TracePoint::ALL[random.below(TracePoint::ALL.len() as u64) as usize];
        let victim = match random.below(2) {
            0 => Victim::Sayer,
            _ => Victim::Named(self.fleet.members[self.draw_daemon(random, back)].name.clone()),
        };
        watch.set_trap(stage, victim);
        let set = Instant::now();
        while watch.is_set() && set.elapsed() < TRAP_LIMIT && !self.is_over() {
            sleep(Duration::from_millis(5));
        }
        let killed = watch.take_trap()?;
        self.counts.add(&format!("killed at {}", stage.name()));
        let at = self.fleet.members.iter().position(|member| member.name == killed.name);
        at.into_iter().for_each(|at| self.fleet.bury(at));
        Some(at)
    }

    fn client(&self, client: u64, seed: u64) {
        let _ends = Ends(&self.over);
        let random = SeededEntropy::new(seed * 1000 + client + 1);
        let (job, who) = (format!("job{client}"), format!("client{client}"));
        let mut next = 1;
        while !self.is_over() {
            let names: Vec<Name> =
                (0..CLIENTS).flat_map(|of| self.ledger().alive(&format!("job{of}"))).collect();
            let mine = self.ledger().alive(&job);
            let draw = |of: &[Name]| of.get(random.below(of.len().max(1) as u64) as usize).cloned();
            // Steps that a failed removal may still remove are not saved again, because no outcome
            // could be asserted for them.
            let owed = self.owed.lock().unwrap().clone();
            let free: Vec<Name> =
                mine.iter().filter(|name| !owed.contains(name)).cloned().collect();
            let certain: Vec<Name> =
                free.iter().filter(|name| self.ledger().is_certain(name)).cloned().collect();
            match random.below(20) {
                _ if free.len() > STEPS => self.remove(&who, &draw(&free).unwrap()),
                0..6 => {
                    next += 1;
                    self.save(&who, &(job.clone(), next), false);
                }
                6..9 => drop(draw(&certain).map(|name| self.save(&who, &name, true))),
                9..13 => drop(draw(&mine).map(|name| self.archive(&who, &name))),
                13 => drop(draw(&mine).map(|name| self.save(&who, &name, false))),
                14 => drop(draw(&free).map(|name| self.remove(&who, &name))),
                _ => drop(draw(&names).map(|name| self.restore(&who, &name))),
            }
        }
    }

    /// Runs a command and counts its outcome. Panics if no kill explains its failure. Returns the
    /// outcome.
    fn run(&self, who: &str, what: &str, line: &str, also: &[&str]) -> Ended {
        let ended = self.fleet.run_as(who, line);
        let kind = kind_of(&ended);
        let word = match ended.code {
            0 => "done",
            -1 => "killed",
            _ => &kind,
        };
        self.counts.add(&format!("{what} {word}"));
        let known = ["done", "killed", "unavailable", "timeout", "busy", "fenced", "exists"];
        let is_legal = known.contains(&word) || also.contains(&word);
        assert!(is_legal, "{line}: {ended:?}\n{}", self.fleet.watch.tails());
        ended
    }

    fn save(&self, who: &str, name: &Name, replace: bool) {
        let before = self.ledger().possible(name);
        let version = self.ledger().save(name);
        let folder = format!("in-{who}");
        for (file, bytes) in content(version) {
            self.fleet.write(&format!("{folder}/{file}"), &bytes);
        }
        let how = if replace { " --replace" } else { "" };
        let line = format!("save {}/{} {folder}{how}", name.0, name.1);
        self.saving.lock().unwrap().insert(who.to_owned(), Instant::now());
        let ended = self.run(who, if replace { "replace" } else { "save" }, &line, &[]);
        self.saving.lock().unwrap().remove(who);
        if ended.code == 0 {
            self.ledger().saved(name, version, replace);
        } else if message_of(&ended).contains("is committed") {
            assert!(
                before.iter().any(Option::is_some),
                "{name:?} can only be {before:?}: {ended:?}"
            );
        }
        std::fs::remove_dir_all(self.fleet.path(&folder)).unwrap();
    }

    fn archive(&self, who: &str, name: &Name) {
        let line = format!("archive {}/{}", name.0, name.1);
        let ended = self.run(who, "archive", &line, &["not_found"]);
        if ended.code == 0 && ended.json()["undropped"] == 0 {
            self.ledger().archived(name);
        }
        self.may_be_none(name, &ended);
    }

    fn remove(&self, who: &str, name: &Name) {
        let before = self.ledger().possible(name);
        self.ledger().remove(name);
        let ended = self.run(who, "rm", &format!("rm {}/{}", name.0, name.1), &["not_found"]);
        let found_none = kind_of(&ended) == "not_found";
        assert!(
            !found_none || before.contains(&None),
            "{name:?} can only be {before:?}: {ended:?}"
        );
        if ended.code == 0 || found_none {
            self.ledger().removed(name);
        }
    }

    fn may_be_none(&self, name: &Name, ended: &Ended) {
        if kind_of(ended) == "not_found" {
            let possible = self.ledger().possible(name);
            assert!(possible.contains(&None), "{name:?} can only be {possible:?}: {ended:?}");
        }
    }

    /// Restores a step of any client, and asserts that it has a possible version. The step's own
    /// client may work on it at the same time.
    fn restore(&self, who: &str, name: &Name) {
        let before = self.ledger().possible(name);
        let began = Instant::now();
        let out = format!("out-{who}");
        let line = format!("restore {}/{} --out {out} --force", name.0, name.1);
        let ended = self.run(who, "restore", &line, &["not_found", "lost"]);
        let after = self.ledger().possible(name);
        let newest = before.iter().chain(&after).copied().flatten().max().unwrap_or(0);
        let oldest = before.iter().copied().flatten().min().unwrap_or(newest);
        let is_possible = |is: Is| match is {
            // Two commands of the step's own client may have ended since the restore began.
            Some(version) => (oldest..=newest).contains(&version),
            None => before != after || before.contains(&None),
        };
        match (ended.code, &*kind_of(&ended)) {
            (0, _) => {
                let found = tree(&self.fleet.path(&out));
                let version = (oldest..=newest).find(|version| content(*version) == found);
                assert!(
                    version.is_some_and(|v| is_possible(Some(v))),
                    "{line}: {before:?} {after:?}"
                );
                self.owed.lock().unwrap().remove(name);
            }
            (_, "not_found") => assert!(is_possible(None), "{line}: {before:?}: {ended:?}"),
            (_, "lost") => {
                self.may_be_lost(name, &before, &after, began, &ended);
                self.owed.lock().unwrap().insert(name.clone());
            }
            _ => {}
        }
        let _ = std::fs::remove_dir_all(self.fleet.path(&out));
    }

    /// Asserts that enough daemons were down to explain that a step was lost. Two daemons that are
    /// down may be both holders of a block; an archived step survives their loss.
    fn may_be_lost(
        &self,
        name: &Name,
        before: &BTreeSet<Is>,
        after: &BTreeSet<Is>,
        began: Instant,
        ended: &Ended,
    ) {
        let away = self.away.lock().unwrap();
        // Clients do not see a restarted daemon at once.
        let was_away = |(killed, back): &&(Option<Instant>, Option<Instant>)| {
            killed.is_some() && back.is_none_or(|back| back + 2 * LEASE > began)
        };
        let missed = away.iter().filter(was_away).count();
        let is_archived = before == after
            && before.len() == 1
            && before.iter().flatten().all(|version| self.ledger().is_archived(name, *version));
        let enough = if is_archived { AWAY + 1 } else { AWAY };
        let tails = || self.fleet.watch.tails();
        assert!(
            missed >= enough,
            "{name:?}, {missed} away, archived {is_archived}: {ended:?}\n{}",
            tails()
        );
    }

    /// Waits until the fleet is idle with all daemons up. Then asserts that each step has a
    /// possible version and can be archived and removed, and that nothing is left.
    pub fn calm(&self) {
        let fleet = self.fleet;
        fleet.until_idle();
        let mut names = self.ledger().names();
        let mut checked = 0;
        // A decided save may become visible late, so the loop lists the steps until none is left.
        // The first list must contain every step that was reported.
        loop {
            let listed = self.listed();
            for name in &names {
                let possible = self.ledger().possible(name);
                let is_there = listed.contains(name);
                assert!(
                    is_there || possible.contains(&None),
                    "{name:?} is gone, can only be {possible:?}"
                );
                assert!(
                    !is_there || possible.iter().any(Option::is_some),
                    "{name:?} has come back"
                );
            }
            names = Vec::new();
            if listed.is_empty() {
                break;
            }
            for name in &listed {
                let possible = self.ledger().possible(name);
                let first = self.read(name, &possible);
                let line = format!("archive {}/{} --json", name.0, name.1);
                fleet.until("all is archived and dropped", || fleet.ask(&line)["undropped"] == 0);
                assert_eq!(self.read(name, &possible), first);
                checked += 1;
                self.ledger().remove(name);
                let gone = format!("rm {}/{}", name.0, name.1);
                fleet.until("it is removed", || {
                    let ended = fleet.run(&format!("{gone} --json"));
                    ended.code == 0 || kind_of(&ended) == "not_found"
                });
            }
        }
        fleet.until_bare();
        fleet.until_tidy();
        assert_eq!(fleet.watch.panics(), Vec::<String>::new());
        eprintln!("at rest: {checked} steps were read back, archived, read again and removed");
    }

    fn listed(&self) -> BTreeSet<Name> {
        let listed = self.fleet.ask("ls --json");
        let name = |step: &serde_json::Value| {
            (step["job"].as_str().unwrap().to_owned(), step["step"].as_u64().unwrap())
        };
        listed["steps"].as_array().unwrap().iter().map(name).collect()
    }

    /// Restores a step. Returns the version among `possible` whose bytes it has. Panics if it has
    /// none of them.
    fn read(&self, name: &Name, possible: &BTreeSet<Is>) -> u64 {
        self.fleet.ask(&format!("restore {}/{} --force --out last --json", name.0, name.1));
        let found = tree(&self.fleet.path("last"));
        let version = possible.iter().flatten().find(|version| content(**version) == found);
        std::fs::remove_dir_all(self.fleet.path("last")).unwrap();
        *version.unwrap_or_else(|| panic!("{name:?} is none of {possible:?}"))
    }
}
