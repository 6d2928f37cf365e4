//! A launch on eight hosts, each with a staging daemon and two trainers. One host is lost for good,
//! and the job goes on with the other seven, whose ranks have other numbers then.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::entropy::{Entropy, SystemEntropy};
use rapidraid::id::LaunchId;
use rapidraid::trainer::daemon::trace::StagingPoint;
use rapidraid::trainer::protocol::{Hosts, Place, Prepare, Request, Resumed};
use rapidraid::trainer::segment::HEADER_BYTES;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::launch::{Launch, Plan};
use crate::machine::Cluster;
use crate::stage::{LIMIT, Stage, with_wait};
use crate::{Cell, cells};

const HOSTS: usize = 8;
pub const RANKS_PER_HOST: u32 = 2;
/// Longer than the wait of a load for hosts that make no progress.
const LOAD_LIMIT_MS: u64 = 60_000;
/// Number of rows of a step whose hashing takes longer than a request to the daemon.
const HASHED_ROWS: u64 = 2 << 20;
/// Number of ranks that prepare at the same moment, and of launches that do so.
const AT_ONCE: u32 = 8;
const LAUNCHES_AT_ONCE: u64 = 64;

/// Cells that lose one of eight hosts.
pub const EIGHT: &[Cell] = cells![
    a_host_of_eight_while_it_fills,
    a_host_of_eight_whose_trainers_die_first,
    a_host_of_eight_while_it_sends,
    a_host_of_eight_when_all_is_committed,
];

/// A cell that cuts the link of one of eight hosts, each of which is a machine of its own.
pub const EIGHT_WITH_LINKS: &[Cell] = cells![a_host_of_eight_whose_link_is_cut];

/// Cells in which one of two daemons is killed at a trace point, and started again.
pub const TWO: &[Cell] = cells![
    one_of_two_killed_when_all_have_staged,
    one_of_two_killed_while_it_hashes,
    one_of_two_killed_when_the_hashes_are_kept,
    one_of_two_killed_when_it_begins_to_save,
    one_of_two_killed_after_the_commit,
    one_of_two_killed_when_the_record_says_committed,
    one_of_two_killed_while_its_ranks_fill_two_steps,
    a_step_that_is_dropped_while_it_is_hashed_leaves_no_table,
    ranks_that_prepare_at_the_same_moment_all_begin,
];

/// A launch on several hosts: one part on each of them, in the order of their numbers.
pub struct Joint {
    pub parts: Vec<Launch>,
}

impl Joint {
    /// Starts the ranks on these hosts without preparing them.
    pub fn start(stages: &[&Stage<'_>], plan: &Plan) -> Self {
        let mut parts: Vec<Launch> =
            stages.iter().map(|stage| Launch::start(stage, plan)).collect();
        let id = parts[0].id;
        parts.iter_mut().for_each(|part| part.id = id);
        Self { parts }
    }

    /// Makes all ranks prepare, after a load of `step`.
    pub fn prepare(&mut self, step: Option<u64>) {
        let names: Vec<String> = (0..self.parts.len()).map(name_of).collect();
        for (host, part) in self.parts.iter_mut().enumerate() {
            (part.plan.loaded, part.plan.newest_seen) = (step, step);
            for rank in 0..part.ranks.len() {
                let mut order = part.prepare_order(rank);
                (order["hosts"], order["host"]) = (json!(names), json!(host));
                part.ranks[rank].ask(&order).unwrap();
            }
        }
    }

    /// Makes the ranks of these hosts save a step. Returns the filling of each host.
    pub fn save(&mut self, hosts: std::ops::Range<usize>, step: u64) -> BTreeMap<usize, String> {
        hosts.map(|host| (host, self.parts[host].save(step))).collect()
    }

    pub fn wait(&mut self, step: u64) {
        self.parts.iter_mut().for_each(|part| part.wait(step));
    }

    /// Makes all ranks load the newest step that the cluster has. Returns their answers.
    pub fn load(&mut self) -> Vec<Value> {
        let order = |part: &Launch, step: Option<u64>| {
            json!({
                "do": "load", "job": part.plan.job, "launch": part.id.to_string(), "step": step,
                "number": 1, "from_cluster": true, "limit_ms": LOAD_LIMIT_MS,
            })
        };
        // One rank chooses for all, as a collective of the trainers does.
        let first = order(&self.parts[0], None);
        let chosen = self.parts[0].ranks[0].ask(&first).unwrap();
        let mut found = vec![chosen.clone()];
        for (host, part) in self.parts.iter_mut().enumerate() {
            let order = order(part, chosen["step"].as_u64());
            for rank in part.ranks.iter_mut().skip(usize::from(host == 0)) {
                found.push(rank.ask(&order).unwrap());
            }
        }
        found
    }
}

fn name_of(host: usize) -> String {
    format!("host-{host}")
}

/// Returns the fillings that a step of these hosts must have, rank by rank.
pub fn by_rank(fills: &BTreeMap<usize, String>) -> Value {
    json!(fills.values().flat_map(|fill| [fill, fill]).collect::<Vec<_>>())
}

/// The eight hosts, with step 10 committed.
struct Play<'a> {
    job: &'a str,
    stages: Vec<Stage<'a>>,
    joint: Joint,
    /// The fillings of each step that all hosts have begun.
    fills: BTreeMap<u64, BTreeMap<usize, String>>,
}

impl<'a> Play<'a> {
    fn begin(cluster: &'a Cluster, job: &'a str) -> Self {
        let stages: Vec<_> = (0..HOSTS).map(|_| Stage::start(cluster, "64MiB", &[])).collect();
        let all: Vec<_> = stages.iter().collect();
        let mut joint = Joint::start(&all, &Plan::new(job, RANKS_PER_HOST));
        joint.prepare(None);
        let fills = BTreeMap::from([(10, joint.save(0..HOSTS, 10))]);
        joint.wait(10);
        Self { job, stages, joint, fills }
    }

    fn last(&mut self) -> &mut Launch {
        self.joint.parts.last_mut().unwrap()
    }

    /// Kills the last host: its daemon, its trainers, and with them its memory.
    fn lose_the_last_host(&mut self) {
        self.last().kill();
        self.joint.parts.pop();
        let mut stage = self.stages.pop().unwrap();
        if stage.is_alive() {
            stage.kill();
        }
    }

    /// Waits until a trainer of each of the first seven hosts gets a message about the last host that
    /// `is_told` accepts, or hears that the step is committed. Returns whether it is committed.
    fn hear_of_it(&mut self, step: u64, is_told: fn(&str) -> bool) -> bool {
        let (began, lost) = (Instant::now(), name_of(HOSTS - 1));
        let mut is_committed = false;
        let stages = &self.stages;
        let tails = || stages.iter().map(|stage| stage.watch.tail()).collect::<String>();
        for part in &mut self.joint.parts[..HOSTS - 1] {
            loop {
                let order = json!({ "do": "wait", "step": step, "limit_ms": 100 });
                match part.ranks[0].ask(&order) {
                    Ok(_) => is_committed = true,
                    Err(refused) if is_told(&refused.message) => {}
                    Err(refused) => {
                        let is_late = began.elapsed() >= LIMIT;
                        assert!(!is_late, "{refused:?} does not name {lost}\n{}", tails());
                        continue;
                    }
                }
                break;
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        eprintln!("{}: the other hosts heard of it after {seconds:.1} s", self.job);
        is_committed
    }

    /// Waits until a trainer of each of the first seven hosts is warned that the save of `step` gets no
    /// report from the last host.
    fn until_all_are_warned(&mut self, step: u64) {
        let (began, lost) = (Instant::now(), name_of(HOSTS - 1));
        for (part, stage) in self.joint.parts[..HOSTS - 1].iter_mut().zip(&self.stages) {
            stage.until("its ranks are warned", || {
                let notices = part.ranks[0].tell("notices").unwrap();
                let is_warning = |notice: &Value| {
                    let text = notice[1].as_str().unwrap_or_default();
                    notice[0] == step && text.contains(&lost) && text.contains("no report")
                };
                notices.as_array().unwrap().iter().any(is_warning)
            });
        }
        eprintln!("step {step}: all are warned after {:.1} s", began.elapsed().as_secs_f64());
    }

    /// Kills the other trainers, and resumes on the seven hosts in the opposite order. The step must
    /// be `expected`, unless that is `None`. A save of the next step is committed.
    fn go_on(mut self, expected: Option<u64>) {
        self.joint.parts.iter_mut().for_each(Launch::kill);
        drop(self.joint);
        let seven: Vec<_> = self.stages.iter().rev().collect();
        let mut joint = Joint::start(&seven, &Plan::new(self.job, RANKS_PER_HOST));
        let loaded = joint.load();
        let step = loaded[0]["step"].as_u64().unwrap();
        assert!(expected.is_none_or(|expected| expected == step), "{loaded:?}");
        assert_eq!(loaded.len(), seven.len() * RANKS_PER_HOST as usize);
        for found in &loaded {
            assert_eq!(found["step"], step);
            assert_eq!(found["fills"], by_rank(&self.fills[&step]), "step {step} is not one save");
        }
        joint.prepare(Some(step));
        let fills = joint.save(0..seven.len(), 30);
        joint.wait(30);
        let first = seven[0];
        let committed = first.committed(self.job);
        let expected: &[u64] = if step == 10 { &[10, 30] } else { &[10, 20, 30] };
        assert_eq!(committed, expected);
        drop(joint);
        let mut again = Joint::start(&seven[..1], &Plan::new(self.job, RANKS_PER_HOST));
        assert_eq!(again.load()[0]["fills"], by_rank(&fills));
        self.stages.iter().for_each(Stage::assert_sound);
    }
}

fn names_the_last_host(message: &str) -> bool {
    message.contains(&name_of(HOSTS - 1))
}

/// Like [`names_the_last_host`], but no other host is named, except as one that an earlier attempt
/// has waited for.
fn names_the_last_host_alone(message: &str) -> bool {
    let now = message.split("; before that").next().unwrap_or_default();
    names_the_last_host(now) && !(0..HOSTS - 1).any(|host| now.contains(&name_of(host)))
}

/// Like [`names_the_last_host_alone`], with the rank that died there.
fn names_the_last_host_and_its_rank(message: &str) -> bool {
    names_the_last_host_alone(message)
        && (0..RANKS_PER_HOST)
            .any(|rank| message.contains(&format!("rank {rank} died before it had staged step 20")))
}

fn a_host_of_eight_while_it_fills(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    let mut fills = play.joint.save(0..HOSTS - 1, 20);
    play.last().ranks[0].step("save", 20).unwrap();
    fills.insert(HOSTS - 1, play.last().fill(1, 20));
    play.fills.insert(20, fills);
    play.lose_the_last_host();
    let is_committed = play.hear_of_it(20, names_the_last_host);
    assert!(!is_committed, "half a step is committed");
    play.until_all_are_warned(20);
    play.go_on(Some(10));
}

/// The daemon of the last host drops the step, because its trainers are dead, and tells the other
/// hosts. Each of them names the last host, not one that dropped the step for the same reason.
fn a_host_of_eight_whose_trainers_die_first(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    let fills = play.joint.save(0..HOSTS - 1, 20);
    play.fills.insert(20, fills);
    play.last().fill(0, 20);
    play.last().ranks.iter().for_each(|rank| rank.signal(Signal::KILL));
    let is_committed = play.hear_of_it(20, names_the_last_host_and_its_rank);
    assert!(!is_committed, "half a step is committed");
    play.lose_the_last_host();
    play.go_on(Some(10));
}

fn a_host_of_eight_while_it_sends(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    let fills = play.joint.save(0..HOSTS, 20);
    play.fills.insert(20, fills);
    let last = &play.stages[HOSTS - 1];
    last.until("the last host sends", || last.watch.has_said(StagingPoint::Saving, 20));
    // The moment is anywhere in the transfer, so the step may be whole just before it.
    sleep(Duration::from_millis(SystemEntropy.below(60)));
    play.lose_the_last_host();
    let is_committed = play.hear_of_it(20, names_the_last_host);
    if !is_committed {
        play.until_all_are_warned(20);
    }
    play.go_on(Some(if is_committed { 20 } else { 10 }));
}

fn a_host_of_eight_when_all_is_committed(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    let fills = play.joint.save(0..HOSTS, 20);
    play.fills.insert(20, fills);
    play.joint.wait(20);
    play.lose_the_last_host();
    play.go_on(Some(20));
}

/// The last host goes on without a network. When its link is mended, the job runs on the other hosts:
/// it commits nothing, and its trainers are told of the newer launch.
fn a_host_of_eight_whose_link_is_cut(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    let fills = play.joint.save(0..HOSTS, 20);
    play.fills.insert(20, fills);
    let last = &play.stages[HOSTS - 1];
    last.until("the last host sends", || last.watch.has_said(StagingPoint::Saving, 20));
    let machine = last.machine.as_ref().unwrap();
    machine.cut_link();
    let is_committed = play.hear_of_it(20, names_the_last_host);
    if !is_committed {
        play.until_all_are_warned(20);
    }
    let (stage, mut part) = (play.stages.pop().unwrap(), play.joint.parts.pop().unwrap());
    play.go_on(Some(if is_committed { 20 } else { 10 }));
    let committed = stage.committed(job);
    stage.machine.as_ref().unwrap().mend_link();
    stage.until("the host knows of the newer launch", || {
        let wait = json!({ "do": "wait", "step": 20, "limit_ms": 100 });
        let told = part.ranks[0].ask(&wait);
        told.is_err_and(|refused| refused.kind == "Fenced")
    });
    for rank in &mut part.ranks {
        rank.step("save", 40).unwrap_err().says("Fenced", &["launch", "end this process"]);
    }
    assert_eq!(stage.committed(job), committed, "a launch that was replaced has committed a step");
    stage.until("nothing is left of step 20", || stage.state(job, 20).is_none());
    stage.assert_sound();
}

/// Saves step 10 on two hosts. Kills the daemon of each in turn when it logs `point`, and all
/// trainers, and starts the daemon again: the step is committed, with the content of one save.
fn one_of_two(cluster: &Cluster, job: &str, point: StagingPoint) {
    for host in 0..2 {
        let job = format!("{job}-{host}");
        let mut stages: Vec<_> = (0..2).map(|_| Stage::start(cluster, "64MiB", &[])).collect();
        let all: Vec<_> = stages.iter().collect();
        let mut joint = Joint::start(&all, &Plan::new(&job, RANKS_PER_HOST));
        joint.prepare(None);
        stages[host].watch.set_trap(point, &[stages[host].pid()], Signal::KILL);
        for part in &mut joint.parts {
            for rank in &mut part.ranks {
                // The daemon may be killed before it has answered.
                let _ = rank.step("save", 10);
            }
        }
        stages[host].until("it is killed", || stages[host].watch.has_sprung());
        joint.parts.iter_mut().for_each(Launch::kill);
        stages[host].restart();
        stages[host].watch.take_trap();
        for stage in &stages {
            // Without trainers, a committed step stays until its memory is needed.
            stage.until("the step is committed", || {
                let state = stage.state(&job, 10);
                stage.committed(&job) == [10] && state.is_none_or(|state| state == "committed")
            });
        }
        let all: Vec<_> = stages.iter().rev().collect();
        let loaded = Joint::start(&all, &Plan::new(&job, RANKS_PER_HOST)).load();
        let fills = &loaded[0]["fills"];
        assert!(fills[0] == fills[1] && fills[2] == fills[3] && fills[0] != fills[2], "{fills}");
        assert!(loaded.iter().all(|found| found["fills"] == *fills && found["step"] == 10));
        stages.iter().for_each(Stage::assert_sound);
    }
}

fn one_of_two_killed_when_all_have_staged(cluster: &Cluster, job: &str) {
    one_of_two(cluster, job, StagingPoint::Staged);
}

fn one_of_two_killed_while_it_hashes(cluster: &Cluster, job: &str) {
    one_of_two(cluster, job, StagingPoint::Hashing);
}

fn one_of_two_killed_when_the_hashes_are_kept(cluster: &Cluster, job: &str) {
    one_of_two(cluster, job, StagingPoint::Hashed);
}

fn one_of_two_killed_when_it_begins_to_save(cluster: &Cluster, job: &str) {
    one_of_two(cluster, job, StagingPoint::Saving);
}

fn one_of_two_killed_after_the_commit(cluster: &Cluster, job: &str) {
    one_of_two(cluster, job, StagingPoint::Decided);
}

fn one_of_two_killed_when_the_record_says_committed(cluster: &Cluster, job: &str) {
    one_of_two(cluster, job, StagingPoint::Committed);
}

/// Rank 0 of the first host is a step ahead of rank 1. The other host has staged the first of the two
/// steps, and must not wait for a stall period.
fn one_of_two_killed_while_its_ranks_fill_two_steps(cluster: &Cluster, job: &str) {
    let mut stages: Vec<_> = (0..2).map(|_| Stage::start(cluster, "64MiB", &[])).collect();
    let all: Vec<_> = stages.iter().collect();
    let mut joint = Joint::start(&all, &Plan::new(job, RANKS_PER_HOST));
    joint.prepare(None);
    // The first host registers the launch.
    joint.parts[0].fill(1, 10);
    joint.parts[1].save(10);
    joint.parts[0].ranks[0].step("save", 10).unwrap();
    joint.parts[0].fill(0, 11);
    stages[0].kill();
    stages[0].restart();
    let order = json!({ "do": "wait", "step": 10, "limit_ms": 15_000 });
    let told = joint.parts[1].ranks[0].ask(&order).unwrap_err();
    assert_ne!(told.kind, "Timeout", "{told:?}");
    assert!(told.message.contains("dropped"), "{told:?}");
    stages.iter().for_each(Stage::assert_sound);
}

/// A newer launch drops the step while its extents are hashed.
fn a_step_that_is_dropped_while_it_is_hashed_leaves_no_table(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "1GiB", &[]);
    let names = json!([name_of(0), name_of(1)]);
    let order_of = |launch: &Launch| {
        let mut order = launch.prepare_order(0);
        (order["hosts"], order["host"]) = (names.clone(), json!(0));
        order
    };
    let plan = Plan { rows: HASHED_ROWS, ..Plan::new(job, 1) };
    let mut old = Launch::start(&stage, &plan);
    let order = order_of(&old);
    old.ranks[0].ask(&order).unwrap();
    let mut new = Launch::start(&stage, &Plan::new(job, 1));
    new.ranks[0].tell("connect").unwrap();
    stage.watch.set_trap(StagingPoint::Hashing, &[stage.pid()], Signal::STOP);
    old.save(10);
    stage.until("the daemon hashes", || stage.watch.has_sprung());
    let order = order_of(&new);
    new.ranks[0].send(&order);
    sleep(Duration::from_millis(200));
    stage.signal(Signal::CONT);
    new.ranks[0].answer().unwrap();
    stage.until("it is hashed", || stage.watch.has_said(StagingPoint::Hashed, 10));
    stage.until("nothing is left of it", || stage.files("steps").is_empty());
    stage.assert_sound();
}

/// The ranks of a host make the record of their launch known at the same moment, again and again. On a
/// machine of one or two processors the daemon has one thread for them, and this says little.
fn ranks_that_prepare_at_the_same_moment_all_begin(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let names = vec![name_of(0), name_of(1)];
    let begin = Barrier::new(AT_ONCE as usize);
    for born_ns in 0..LAUNCHES_AT_ONCE {
        let launch = LaunchId(SystemEntropy.id());
        let prepare = |rank: u32| {
            let place = Place { job: job.parse().unwrap(), launch, world: AT_ONCE, rank };
            let (segment_bytes, resumed) = (2 * HEADER_BYTES, Resumed::default());
            let launch_bytes = segment_bytes * u64::from(AT_ONCE);
            let (keep, limit_ms) = (0, 0);
            let prepare =
                Prepare { place, segment_bytes, launch_bytes, born_ns, resumed, keep, limit_ms };
            let request = Request::PrepareOnHost(prepare, Hosts { own: 0, names: names.clone() });
            let mut session = stage.session().unwrap();
            begin.wait();
            let made = with_wait(|wait| session.ask("prepare", &request, wait));
            // No rank leaves the launch before all have prepared.
            begin.wait();
            made.map(drop).map_err(|error| format!("launch {born_ns}, rank {rank}: {error}"))
        };
        std::thread::scope(|scope| {
            let start = |rank| scope.spawn(move || prepare(rank));
            let ranks: Vec<_> = (0..AT_ONCE).map(start).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
        });
    }
    stage.assert_sound();
}
