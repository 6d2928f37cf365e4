//! A storm: one job saves and loads while its trainers and the staging daemon are killed, at random
//! moments and at each phase of a step as soon as the daemon logs it.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use rapidraid::entropy::{Entropy, SeededEntropy, SystemEntropy};
use rapidraid::id::LaunchId;
use rapidraid::kind::ErrorKind;
use rapidraid::trainer::daemon::trace::StagingPoint;
use rapidraid::trainer::protocol::Load;
use rapidraid::trainer::session::{Session, boot_time};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::content;
use crate::launch::{listen, trainer_command};
use crate::ledger::Ledger;
use crate::machine::Cluster;
use crate::rank::SETTINGS;
use crate::stage::{Stage, with_wait};

const JOB: &str = "storm";
/// The phases in which processes are killed.
const PHASES: [StagingPoint; 6] = [
    StagingPoint::Filling,
    StagingPoint::Staged,
    StagingPoint::Hashing,
    StagingPoint::Saving,
    StagingPoint::Decided,
    StagingPoint::Loading,
];
/// How long a trap waits for its phase.
const TRAP_LIMIT: Duration = Duration::from_secs(5);
/// Number of kills between two rests; at a rest everything is compared.
const REST_EVERY: u64 = 50;
/// Number of committed steps that a rest keeps.
const KEPT: usize = 3;

/// The ranks of one launch.
struct Ranks {
    children: Vec<Child>,
}

impl Ranks {
    fn pids(&self) -> Vec<Pid> {
        self.children.iter().map(Pid::from_child).collect()
    }

    /// Returns whether a rank has ended.
    fn is_over(&mut self) -> bool {
        self.children.iter_mut().any(|child| child.try_wait().unwrap().is_some())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The processes to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    Rank,
    AllRanks,
    Both,
}

impl Victim {
    fn name(self) -> &'static str {
        match self {
            Victim::Daemon => "daemon",
            Victim::Rank => "one rank",
            Victim::AllRanks => "all ranks",
            Victim::Both => "daemon and all ranks",
        }
    }
}

/// A reader that loads concurrently with all other work, in a thread of its own.
struct Reader {
    is_over: Arc<AtomicBool>,
    /// Whether the reader pauses, so that the next load that the daemon logs is a launch's.
    is_paused: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Reader {
    fn start(dir: PathBuf, ledger: Arc<Mutex<Ledger>>) -> Self {
        let (is_over, is_paused) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (over, paused) = (is_over.clone(), is_paused.clone());
        let thread = std::thread::spawn(move || {
            let mut loads = 0;
            while !over.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(20));
                if paused.load(Ordering::Relaxed) {
                    continue;
                }
                let gone = ledger.lock().unwrap().gone();
                let load = Load {
                    job: JOB.parse().unwrap(),
                    launch: None,
                    step: None,
                    offline: false,
                    table_first: false,
                    limit_ms: 0,
                };
                let found = with_wait(|wait| {
                    let mut session = Session::connect(&dir, None, wait)?;
                    content::load(&mut session, &load, wait)
                });
                match found {
                    Ok(Some(found)) => {
                        loads += 1;
                        let fill = found.fill.to_string();
                        ledger.lock().unwrap().read_beside(found.step, &fill, &gone);
                    }
                    Ok(None) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        ledger.lock().unwrap().wrong.push(format!("a load says: {error}"));
                    }
                    // The daemon is down, or the step was removed in the meantime.
                    Err(_) => {}
                }
            }
            loads
        });
        Self { is_over, is_paused, thread: Some(thread) }
    }

    /// Returns how many steps were loaded.
    fn end(mut self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().expect("a reader was given wrong bytes")
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

struct Storm<'a> {
    stage: Stage<'a>,
    ledger: Arc<Mutex<Ledger>>,
    random: SeededEntropy,
    ranks: Option<Ranks>,
    launches: u64,
    /// Number of kills by phase and by victim.
    counts: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
    checked: u64,
}

/// Runs a storm of `kills` kills. Returns a report of what was done and seen.
pub fn play(cluster: &Cluster, kills: u64, seed: u64) -> Value {
    let started = Instant::now();
    let mut storm = Storm {
        // A rank may be killed before the other ranks of its launch have connected; then only this
        // time limit ends its step.
        stage: Stage::folder(cluster, "48MiB", &["staging.fill_s=20"]),
        ledger: Arc::default(),
        random: SeededEntropy::new(seed),
        ranks: None,
        launches: 0,
        counts: BTreeMap::new(),
        checked: 0,
    };
    storm.start_daemon();
    let reader = Reader::start(storm.stage.dir(), storm.ledger.clone());
    let mut killed = 0;
    while killed < kills {
        let what = storm.kill(&reader.is_paused);
        storm.assert_right();
        let Some((phase, victim)) = what else { continue };
        killed += 1;
        *storm.counts.entry(phase).or_default().entry(victim.name()).or_default() += 1;
        if std::io::stderr().is_terminal() {
            eprint!("\r{killed} of {kills} kills");
        }
        if killed.is_multiple_of(REST_EVERY) {
            storm.rest();
            let seconds = started.elapsed().as_secs();
            eprintln!("{killed} of {kills} kills in {seconds} s: {:?}", storm.counts);
        }
    }
    let loads = reader.end();
    storm.rest();
    storm.end();
    let (seconds, launches) = (started.elapsed().as_secs(), storm.launches);
    json!({
        "kills": kills, "seed": seed, "seconds": seconds, "launches": launches, "by_phase_and_victim": storm.counts,
        "committed_steps_compared": storm.checked, "loads_beside": loads, "violations": 0,
    })
}

impl Storm<'_> {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    fn assert_right(&self) {
        let wrong = std::mem::take(&mut self.ledger().wrong);
        assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), self.stage.watch.tail());
        self.stage.assert_sound();
    }

    fn start_daemon(&mut self) {
        self.ledger().starting();
        self.stage.restart();
        let pid = self.stage.pid().as_raw_nonzero().get() as u64;
        self.ledger().started(pid);
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// Starts the next launch: one to three ranks, and occasionally one that goes back to an
    /// earlier step.
    fn start_launch(&mut self) {
        self.ranks = None;
        self.launches += 1;
        let (launch, world, rows) = (self.launches, 1 + self.below(3), 200 + self.below(4) * 2_500);
        let steps = self.ledger().steps();
        let back = (self.below(8) == 0 && !steps.is_empty())
            .then(|| steps[self.below(steps.len() as u64) as usize]);
        self.ledger().launch(launch, back);
        let (id, born_ns) = (LaunchId(SystemEntropy.id()), boot_time().as_nanos() as u64);
        let start = |rank: u64| {
            let settings = json!({
                "job": JOB, "launch": id.to_string(), "world": world, "rank": rank, "rows": rows, "born_ns": born_ns,
                "load": back, "seed": self.random.below(u64::MAX),
            });
            let mut command = trainer_command(&self.stage.dir());
            let mut child = command
                .env(SETTINGS, settings.to_string())
                .stderr(Stdio::inherit())
                .spawn()
                .unwrap();
            let ledger = self.ledger.clone();
            listen(&mut child, move |said| {
                ledger.lock().unwrap().heard(launch, rank, world as usize, &said);
                if let Some(ended) = said.get("ended") {
                    heard_end(&ledger, ended);
                }
            });
            child
        };
        let children = (0..world).map(start).collect();
        self.ranks = Some(Ranks { children });
    }

    fn draw_victim(&self) -> Victim {
        match self.below(10) {
            0..5 => Victim::Daemon,
            5..7 => Victim::Rank,
            7..9 => Victim::AllRanks,
            _ => Victim::Both,
        }
    }

    fn pids_of(&self, victim: Victim) -> Vec<Pid> {
        let ranks = self.ranks.as_ref().map(Ranks::pids).unwrap_or_default();
        let one = || ranks.get(self.below(ranks.len().max(1) as u64) as usize).copied();
        match victim {
            Victim::Daemon => vec![self.stage.pid()],
            Victim::Rank => one().into_iter().collect(),
            Victim::AllRanks => ranks,
            Victim::Both => ranks.into_iter().chain([self.stage.pid()]).collect(),
        }
    }

    /// Kills a victim and restarts what was killed. Returns the phase and the victim; `None` if the
    /// phase was not reached.
    fn kill(&mut self, reader_is_paused: &AtomicBool) -> Option<(&'static str, Victim)> {
        if self.ranks.as_mut().is_none_or(Ranks::is_over) {
            self.start_launch();
        }
        // Sometimes let a few steps complete first.
        sleep(Duration::from_millis(self.below(3) * self.below(200)));
        let (at, victim) = (self.below(PHASES.len() as u64 + 1) as usize, self.draw_victim());
        let phase = PHASES.get(at).copied();
        if phase == Some(StagingPoint::Loading) {
            // Loads happen when a launch begins.
            reader_is_paused.store(true, Ordering::Relaxed);
            self.start_launch();
        }
        let victims = self.pids_of(victim);
        match phase {
            Some(phase) => {
                self.stage.watch.set_trap(phase, &victims, Signal::KILL);
                let set = Instant::now();
                while !self.stage.watch.has_sprung()
                    && set.elapsed() < TRAP_LIMIT
                    && !self.ranks.as_mut().is_some_and(Ranks::is_over)
                {
                    sleep(Duration::from_millis(1));
                }
                reader_is_paused.store(false, Ordering::Relaxed);
                if !self.stage.watch.take_trap() {
                    return None;
                }
            }
            None => {
                sleep(Duration::from_millis(self.below(300)));
                for pid in victims {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
        if matches!(victim, Victim::Daemon | Victim::Both) {
            self.stage.bury();
            let pause = [0, self.below(100), self.below(1_000)][self.below(3) as usize];
            sleep(Duration::from_millis(pause));
            self.start_daemon();
        }
        if victim != Victim::Daemon {
            // The job's supervisor ends the other ranks too.
            sleep(Duration::from_millis(self.below(3) * self.below(100)));
            self.start_launch();
        }
        Some((phase.map_or("any moment", StagingPoint::name), victim))
    }

    /// Pauses the kills: compares memory and cluster with the ledger, then removes most committed
    /// steps.
    fn rest(&mut self) {
        self.ranks = None;
        let stage = &self.stage;
        stage.until("all that is whole is committed", || {
            let jobs = stage.status().jobs;
            let steps = jobs.iter().flat_map(|job| &job.steps);
            jobs.iter().all(|job| job.members == 0)
                && steps.into_iter().all(|step| step.state == "committed")
        });
        let read = |step: u64| {
            let found = stage.load(JOB, Some(step)).unwrap().unwrap();
            (found.step, found.fill.to_string())
        };
        let mut listed = stage.committed(JOB);
        // The first loads take steps from memory if they are there; after the memory is freed, all
        // come from the cluster.
        let memory: Vec<(u64, String)> = listed.iter().map(|step| read(*step)).collect();
        stage.free(JOB);
        let cluster: Vec<(u64, String)> = listed.iter().map(|step| read(*step)).collect();
        assert_eq!(memory, cluster, "{}", stage.watch.tail());
        self.checked += listed.len() as u64;
        self.ledger().at_rest(&cluster);
        self.assert_right();
        listed.truncate(listed.len().saturating_sub(KEPT));
        for (step, fill) in cluster.iter().filter(|(step, _)| listed.contains(step)) {
            self.stage.cluster.run(&format!("rm {JOB}/{step}")).ok();
            self.ledger().removed(fill);
        }
    }

    /// Frees all memory, and checks that no file is left and that the daemon ends without an error.
    fn end(&mut self) {
        let stage = &self.stage;
        stage.until("all memory is given back", || {
            stage.free(JOB);
            stage.status().used_bytes == 0
        });
        for folder in ["segments", "fetched", "steps"] {
            assert_eq!(stage.files(folder), Vec::<String>::new(), "{folder}");
        }
        stage.signal(Signal::TERM);
        assert_eq!(self.stage.ended(), 0);
        self.assert_right();
    }
}

/// Checks why a rank ended by itself: its launch is superseded, or resumed from an earlier step
/// than one that exists by now.
fn heard_end(ledger: &Mutex<Ledger>, ended: &Value) {
    let (kind, message) = (&ended["kind"], ended["message"].as_str().unwrap_or_default());
    let is_legal =
        kind == "Fenced" || kind == "Exists" && message.contains("later steps are there");
    if !is_legal {
        ledger.lock().unwrap().wrong.push(format!("a rank ended: {ended}"));
    }
}
