//! Machines whose dates jump, by decades and in both directions, while two hosts save one step. A
//! launch replaces its predecessor although the date of its host is decades earlier.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rapidraid::stage::{TARGET, TracePoint};
use rapidraid::trainer::daemon::trace::StagingPoint;

use crate::hosts::{Joint, RANKS_PER_HOST, by_rank};
use crate::launch::Plan;
use crate::machine::{Cluster, Daemon, program};
use crate::stage::Stage;
use crate::{CLUSTER, NODES};

const YEAR_S: i64 = 365 * 24 * 3600;
/// Longer than a lease of the cluster, which has three seconds.
const LONGER_THAN_A_LEASE: Duration = Duration::from_secs(4);

/// The library that shifts dates, and the offsets of the machines.
struct Dates {
    folder: tempfile::TempDir,
}

impl Dates {
    /// Builds the library.
    fn build() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machine/clock.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(folder.path().join("clock.so")).arg(source);
        assert!(cc.arg("-ldl").status().unwrap().success());
        Self { folder }
    }

    fn file(&self, machine: &str) -> PathBuf {
        self.folder.path().join(machine)
    }

    /// Returns the environment in which a process has the date of a machine.
    fn environment(&self, machine: &str) -> [(String, PathBuf); 2] {
        let pair = |name: &str, file: &str| (name.to_owned(), self.file(file));
        [pair("LD_PRELOAD", "clock.so"), pair("DATE_OFFSET_FILE", machine)]
    }

    /// Moves the date of a machine.
    fn jump(&self, machine: &str, years: i64) {
        let next = self.file("next");
        std::fs::write(&next, (years * YEAR_S).to_string()).unwrap();
        std::fs::rename(next, self.file(machine)).unwrap();
    }
}

fn this_year() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    1970 + now.as_secs() as i64 / YEAR_S
}

/// Returns whether a line with `word` is dated about so many years from now.
fn has_dated(log: &str, word: &str, years: i64) -> bool {
    let year = |line: &str| line.get(..4).and_then(|year| year.parse::<i64>().ok());
    let with_word = log.lines().filter(|line| line.contains(word));
    with_word.filter_map(year).any(|year| (year - this_year() - years).abs() <= 1)
}

/// The log of a storage daemon, as far as it is written.
type Log = Arc<Mutex<String>>;

/// Starts the daemons of a cluster, each by the date of its machine. Returns the cluster and the
/// logs.
fn start_cluster(dates: &Dates) -> (Cluster, Vec<Log>) {
    let mut cluster = Cluster::files(NODES, &CLUSTER);
    let logs: Vec<Log> = (0..NODES).map(|_| Log::default()).collect();
    let daemon = |(node, log): (usize, &Log)| {
        let mut command = program(cluster.folder.path());
        command.arg("node").arg("--config").arg(cluster.config(node));
        command.envs(dates.environment(&format!("n{node}")));
        command.env("RUST_LOG", format!("info,{TARGET}=debug"));
        let log = log.clone();
        let listener = move |line: &str| *log.lock().unwrap() += &format!("{line}\n");
        Daemon::told(command, Arc::new(listener)).ready()
    };
    let daemons = (1..).zip(&logs).map(daemon).collect();
    cluster.daemons = daemons;
    until_all_live(&cluster);
    (cluster, logs)
}

fn until_all_live(cluster: &Cluster) {
    cluster.until("all nodes are live", |nodes| nodes.iter().all(|node| node["live"] == true));
}

pub fn play() {
    let dates = Dates::build();
    // This machine's clock has lost its battery: it is before the certificates' first day.
    dates.jump("n2", 2000 - this_year());
    let (cluster, logs) = start_cluster(&dates);
    let mut stages: Vec<Stage<'_>> =
        (0..2).map(|_| Stage::folder(&cluster, "64MiB", &[])).collect();
    for (stage, host) in stages.iter_mut().zip(["h0", "h1"]) {
        stage.set_environment(&dates.environment(host));
        stage.restart();
    }

    // Dates jump when one host has staged its part of a step and the other one has not.
    let all: Vec<&Stage<'_>> = stages.iter().collect();
    let plan = Plan::new("dates", RANKS_PER_HOST);
    let mut old = Joint::start(&all, &plan);
    old.prepare(None);
    let mut fills = old.save(0..1, 10);
    for (machine, years) in [("h0", 20), ("n1", -3), ("n3", 50), ("n4", -10)] {
        dates.jump(machine, years);
    }
    fills.extend(old.save(1..2, 10));
    old.wait(10);
    let committed = StagingPoint::Committed.name();
    stages[0].until("it is committed, by another date", || {
        has_dated(&stages[0].watch.tail(), committed, 20)
    });
    std::thread::sleep(LONGER_THAN_A_LEASE);
    until_all_live(&cluster);
    cluster.run("archive dates/10").ok();
    let piece = format!("{TARGET}: {}", TracePoint::Piece.name());
    for (node, years) in [(1, -3), (2, 2000 - this_year()), (3, 50), (4, -10)] {
        let log = logs[node - 1].lock().unwrap();
        assert!(has_dated(&log, &piece, years), "the date of n{node} did not jump: {log}");
    }

    // The next launch is decades behind the one that it replaces, on one host, and ahead on the
    // other, where the daemon has just connected to the cluster.
    dates.jump("h0", -24);
    dates.jump("h1", 60);
    stages[1].restart();
    let all: Vec<&Stage<'_>> = stages.iter().collect();
    let mut new = Joint::start(&all, &plan);
    for found in new.load() {
        assert_eq!((&found["step"], &found["fills"]), (&10.into(), &by_rank(&fills)));
    }
    new.prepare(Some(10));
    let fills = new.save(0..2, 20);
    new.wait(20);
    let refused = old.parts[0].ranks[0].step("save", 30).unwrap_err();
    refused.says("Fenced", &["newer launch"]);
    for found in Joint::start(&all, &plan).load() {
        assert_eq!((&found["step"], &found["fills"]), (&20.into(), &by_rank(&fills)));
    }
    assert_eq!(all[0].committed("dates"), [10, 20]);
    all.iter().for_each(|stage| stage.assert_sound());
    until_all_live(&cluster);
}
