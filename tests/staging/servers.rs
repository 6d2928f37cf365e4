//! Two hosts save one step, or a launch on one host replaces theirs and abandons a step, and a storage
//! daemon is killed at a trace point: the catalogue server, or the daemon that is about to pass the
//! point, which is the gateway or a node that stores a part. The save goes on without help and is
//! whole, the abandoned step goes, and a removal leaves nothing.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rapidraid::stage::{TARGET, TracePoint};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::hosts::{Joint, RANKS_PER_HOST, by_rank};
use crate::launch::{Launch, Plan};
use crate::machine::{Cluster, Daemon, files_below, program};
use crate::stage::{Stage, until};
use crate::{CLUSTER, NODES};

/// The trace points that every joint save passes on storage daemons.
const POINTS: [TracePoint; 10] = {
    use TracePoint::*;
    [Register, Begin, Join, Block, Record, Leaves, Seal, Decide, Mark, Publish]
};
/// The trace points that a launch passes on storage daemons when it replaces another one, abandons a
/// step of it, and saves a step alone.
const SUCCESSOR_POINTS: [TracePoint; 8] = {
    use TracePoint::*;
    [Register, Removing, Fence, Forget, Begin, Seal, Decide, Publish]
};
/// The points that the suite plays.
const SUITE: [TracePoint; 3] = [TracePoint::Join, TracePoint::Seal, TracePoint::Decide];
const SUCCESSOR_SUITE: [TracePoint; 2] = [TracePoint::Register, TracePoint::Removing];
/// The catalogue server: the first node of a new cluster.
const CATALOGUE_SERVER: usize = 0;
/// The node that is down while a removal is deferred.
const ABSENT: usize = 3;
/// The limit of a trainer's wait for the commit.
const WAIT_LIMIT_MS: u64 = 50_000;
/// Longer than a lease, so that the node counts as dead.
const LONG: Duration = Duration::from_secs(5);

/// The daemon that a trap kills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    CatalogueServer,
    /// The daemon that logs the point.
    Logger,
}

/// The trap for storage daemons, shared with the threads that read their logs.
#[derive(Default)]
struct Trap {
    pids: Vec<Option<Pid>>,
    set: Option<(TracePoint, Victim)>,
    /// The node that was killed.
    killed: Option<usize>,
    panics: Vec<String>,
}

impl Trap {
    fn heard(&mut self, node: usize, line: &str) {
        if line.contains("panicked at") {
            self.panics.push(line.to_owned());
        }
        let said = line.split_once(TARGET).and_then(|(_, said)| said.strip_prefix(": "));
        let Some(said) = said.and_then(|said| said.split(' ').next()) else { return };
        let Some((_, victim)) = self.set.filter(|(point, _)| point.name() == said) else { return };
        let at = if victim == Victim::Logger { node } else { CATALOGUE_SERVER };
        // The daemon is reaped only after its process id was taken out of the list.
        if let Some(pid) = self.pids[at] {
            kill_process(pid, Signal::KILL).unwrap();
            (self.set, self.killed) = (None, Some(at));
        }
    }
}

/// A cluster whose daemons log trace points to a trap.
struct Servers {
    cluster: Cluster,
    daemons: Mutex<Vec<Daemon>>,
    trap: Arc<Mutex<Trap>>,
}

impl Servers {
    fn start() -> Self {
        let trap = Trap { pids: vec![None; NODES], ..Trap::default() };
        let (cluster, trap) = (Cluster::files(NODES, &CLUSTER), Arc::new(Mutex::new(trap)));
        let servers = Self { cluster, daemons: Mutex::default(), trap };
        let daemons = (0..NODES).map(|node| servers.daemon(node)).collect();
        *servers.daemons.lock().unwrap() = daemons;
        servers.until_live();
        servers
    }

    /// Starts the daemon of a node.
    fn daemon(&self, node: usize) -> Daemon {
        let mut command = program(self.cluster.folder.path());
        command.arg("node").arg("--config").arg(self.cluster.config(node + 1));
        command.env("RUST_LOG", format!("warn,{TARGET}=debug"));
        let trap = self.trap.clone();
        let daemon =
            Daemon::told(command, Arc::new(move |line| trap.lock().unwrap().heard(node, line)));
        self.trap.lock().unwrap().pids[node] = Some(Pid::from_child(&daemon.child));
        daemon.ready()
    }

    fn until_live(&self) {
        self.cluster
            .until("all nodes are live", |nodes| nodes.iter().all(|node| node["live"] == true));
    }

    /// Waits until the trap has killed a daemon, and starts it again after `away`.
    fn restart_killed(&self, away: Duration) {
        let killed = || self.trap.lock().unwrap().killed;
        until("a daemon is killed", String::new, || killed().is_some());
        let node = killed().unwrap();
        std::thread::sleep(away);
        self.trap.lock().unwrap().pids[node] = None;
        // Its address is free once it is reaped.
        let mut daemons = self.daemons.lock().unwrap();
        daemons[node].child.wait().unwrap();
        daemons[node] = self.daemon(node);
        drop(daemons);
        self.trap.lock().unwrap().killed = None;
    }

    /// Returns the replicas and pieces on the disks of all nodes.
    fn stored(&self) -> Vec<String> {
        let folders = (1..=NODES)
            .map(|node| self.cluster.path(&format!("cluster/nodes/n{node}/data/shards")));
        let files = folders.flat_map(|folder| files_below(&folder));
        files.filter(|name| name.ends_with(".rep") || name.ends_with(".pc")).collect()
    }

    /// Saves a step on two hosts. The victim is killed when a daemon logs the point, and is started
    /// again after `away`.
    fn kill_at(&self, point: TracePoint, victim: Victim, away: Duration) {
        let job = format!("{}-{victim:?}-{}", point.name(), away.as_secs()).to_lowercase();
        let stages: Vec<Stage<'_>> =
            (0..2).map(|_| Stage::start(&self.cluster, "64MiB", &[])).collect();
        let all: Vec<&Stage<'_>> = stages.iter().collect();
        let mut joint = Joint::start(&all, &Plan::new(&job, RANKS_PER_HOST));
        self.trap.lock().unwrap().set = Some((point, victim));
        let fills = std::thread::scope(|scope| {
            scope.spawn(|| self.restart_killed(away));
            joint.prepare(None);
            joint.save(0..stages.len(), 10)
        });
        // No trainer and no person does anything for the save but wait.
        for rank in joint.parts.iter_mut().flat_map(|part| &mut part.ranks) {
            rank.ask(&json!({ "do": "wait", "step": 10, "limit_ms": WAIT_LIMIT_MS })).unwrap();
        }
        joint.parts.iter_mut().for_each(Launch::kill);
        let all: Vec<&Stage<'_>> = stages.iter().rev().collect();
        for found in Joint::start(&all, &Plan::new(&job, RANKS_PER_HOST)).load() {
            assert_eq!((&found["step"], &found["fills"]), (&10.into(), &by_rank(&fills)));
        }
        stages.iter().for_each(Stage::assert_sound);
        drop(stages);
        self.remove_all(&job, &[10]);
    }

    /// A launch on one host replaces one of two hosts, abandons its later step, and saves the next.
    /// The victim is killed when a daemon logs the point, and is started again after `away`.
    fn kill_at_of_successor(&self, point: TracePoint, victim: Victim, away: Duration) {
        let name = point.name();
        let job = format!("after-{name}-{victim:?}-{}", away.as_secs()).to_lowercase();
        let stages: Vec<Stage<'_>> =
            (0..2).map(|_| Stage::start(&self.cluster, "64MiB", &[])).collect();
        let all: Vec<&Stage<'_>> = stages.iter().collect();
        let mut joint = Joint::start(&all, &Plan::new(&job, RANKS_PER_HOST));
        joint.prepare(None);
        for step in [10, 20] {
            joint.save(0..stages.len(), step);
            joint.wait(step);
        }
        joint.parts.iter_mut().for_each(Launch::kill);
        let plan = Plan { newest_seen: Some(20), ..Plan::new(&job, RANKS_PER_HOST).after(10) };
        let mut next = Launch::start(&stages[0], &Plan { abandon_later: true, ..plan });
        self.trap.lock().unwrap().set = Some((point, victim));
        let fill = std::thread::scope(|scope| {
            scope.spawn(|| self.restart_killed(away));
            next.prepare();
            next.save(30)
        });
        for rank in &mut next.ranks {
            rank.ask(&json!({ "do": "wait", "step": 30, "limit_ms": WAIT_LIMIT_MS })).unwrap();
        }
        self.until_live();
        stages[0].until("step 20 is abandoned", || stages[0].committed(&job) == [10, 30]);
        next.kill();
        let found = stages[1].load(&job, None).unwrap().unwrap();
        assert_eq!(
            (found.step, &found.fills),
            (30, &vec![fill.parse().unwrap(); RANKS_PER_HOST as usize])
        );
        stages.iter().for_each(Stage::assert_sound);
        drop(stages);
        self.remove_all(&job, &[10, 30]);
    }

    /// A job dies in its first save while a node is down. The catalogue server is killed when it
    /// defers the removal of that save, and is started again after `away`.
    fn kill_at_deferral(&self, away: Duration) {
        let job = format!("deferred-{}", away.as_secs());
        let mut stages: Vec<Stage<'_>> =
            (0..2).map(|_| Stage::start(&self.cluster, "64MiB", &[])).collect();
        let all: Vec<&Stage<'_>> = stages.iter().collect();
        let mut joint = Joint::start(&all, &Plan::new(&job, RANKS_PER_HOST));
        joint.prepare(None);
        joint.save(0..1, 10);
        let open = || self.cluster.run("status --json").json()["open_saves"].clone();
        until("the save is open", || open().to_string(), || open() != json!([]));
        self.stop(ABSENT);
        self.trap.lock().unwrap().set = Some((TracePoint::Defer, Victim::CatalogueServer));
        joint.parts.iter_mut().for_each(Launch::kill);
        stages.iter_mut().for_each(Stage::kill);
        self.restart_killed(away);
        let daemon = self.daemon(ABSENT);
        self.daemons.lock().unwrap()[ABSENT] = daemon;
        self.remove_all(&job, &[]);
    }

    /// Kills the daemon of a node.
    fn stop(&self, node: usize) {
        self.trap.lock().unwrap().pids[node] = None;
        let child = &mut self.daemons.lock().unwrap()[node].child;
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Removes steps. Waits until no node has a file of any step.
    fn remove_all(&self, job: &str, steps: &[u64]) {
        self.until_live();
        for step in steps {
            self.cluster.run(&format!("rm {job}/{step}")).ok();
        }
        let left = || format!("{:#?}", self.stored());
        until("nothing is left of the save", left, || self.stored().is_empty());
        assert_eq!(self.trap.lock().unwrap().panics, Vec::<String>::new());
    }
}

/// Kills each victim at the points of the suite or, with `all`, at all points.
pub fn play(all: bool) {
    let servers = Servers::start();
    let points = if all { &POINTS[..] } else { &SUITE[..] };
    play_points(points, all, |point, victim, away| servers.kill_at(point, victim, away));
    let points = if all { &SUCCESSOR_POINTS[..] } else { &SUCCESSOR_SUITE[..] };
    play_points(points, all, |point, victim, away| {
        servers.kill_at_of_successor(point, victim, away);
    });
    for away in if all { &[Duration::ZERO, LONG][..] } else { &[Duration::ZERO] } {
        let began = Instant::now();
        servers.kill_at_deferral(*away);
        let seconds = began.elapsed().as_secs_f64();
        eprintln!("{:?}, away {away:?}: holds after {seconds:.1} s", TracePoint::Defer);
    }
}

/// Plays the points with both victims, which are away for both times if `all`, and else for one.
fn play_points(points: &[TracePoint], all: bool, kill_at: impl Fn(TracePoint, Victim, Duration)) {
    for point in points {
        for victim in [Victim::CatalogueServer, Victim::Logger] {
            let aways = [Duration::ZERO, LONG];
            let away = |away: &&Duration| all || (**away == LONG) == (victim == Victim::Logger);
            for away in aways.iter().filter(away) {
                let began = Instant::now();
                kill_at(*point, victim, *away);
                let seconds = began.elapsed().as_secs_f64();
                eprintln!("{point:?}, {victim:?}, away {away:?}: holds after {seconds:.1} s");
            }
        }
    }
}
