//! A cluster of real daemons that tests kill and restart, the client commands that run against it,
//! and the log lines of all these processes.

use std::path::PathBuf;
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::id::NodeId;
use serde_json::Value;
use tempfile::TempDir;

use crate::machine::disk::Tmpfs;
use crate::machine::{Daemon, Ended, ON_A_FULL_DISK, Running, free_ports, program, run};
use crate::watch::Watch;

/// Duration of a lease: short, so that tests that wait for the end of a lease stay fast.
pub const LEASE: Duration = Duration::from_secs(2);
/// How long an eventual condition may take to hold, on a busy machine too.
pub const SETTLE_LIMIT: Duration = Duration::from_secs(120);
/// Interval between two polls.
pub const LOOK: Duration = Duration::from_millis(50);
/// Time limit of a command. Busy nodes alone are retried for longer (ten minutes).
pub const COMMAND_LIMIT: Duration = Duration::from_secs(240);
/// The log filter of daemons and commands.
const LOG: &str = "warn,rapidraid=info,rapidraid::stage=debug";

/// The parameters of a fleet.
pub struct Plan<'a> {
    pub nodes: usize,
    /// The codes, each as `n,k`, separated by blanks.
    pub code: &'a str,
    /// Further settings, each as `name=value`.
    pub set: &'a [&'a str],
    /// Number of nodes, from the first of the ring on, whose disk has a size of its own, if it can
    /// be mounted.
    pub small_disks: usize,
}

/// The size of a small disk.
const SMALL_DISK: &str = "size=192m";

/// A member of the fleet: a name, an address, and the daemon while it runs.
pub struct Member {
    pub name: String,
    pub address: String,
    daemon: Mutex<Option<Daemon>>,
}

/// A cluster of real daemons. Members are in the order of the ring: stripe 0 of the first shard is
/// on the first n of them.
pub struct Fleet {
    /// The disks of the first members, as far as they have one of their own. They are unmounted
    /// before the folder is removed.
    pub disks: Vec<Tmpfs>,
    pub folder: TempDir,
    pub members: Vec<Member>,
    pub watch: Watch,
    /// Index of the member that serves the catalogue.
    pub home: usize,
}

impl Fleet {
    /// Starts all daemons and waits until they are live. The last but one member of the ring serves
    /// the catalogue. Returns the fleet.
    pub fn start(plan: &Plan<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut names: Vec<String> = (1..=plan.nodes).map(|at| format!("n{at}")).collect();
        names.sort_by_key(|name| NodeId::of(&name.parse().unwrap()));
        let member = |(name, port): (&String, u16)| Member {
            name: name.clone(),
            address: format!("127.0.0.1:{port}"),
            daemon: Mutex::default(),
        };
        let members: Vec<Member> = names.iter().zip(free_ports(plan.nodes)).map(member).collect();
        let home = plan.nodes - 2;
        let mut command = program(folder.path());
        command.args(["cluster", "init", "cluster"]);
        let (before, after) = members.split_at(home);
        for member in after.iter().chain(before) {
            command.arg("--node").arg(format!("{}={}", member.name, member.address));
        }
        let lease = format!("timeouts.lease_s={}", LEASE.as_secs());
        let code = format!("code.list={}", plan.code);
        let usual = [&*lease, &*code, "policy.archive_all_but=never", ON_A_FULL_DISK];
        for set in usual.iter().chain(plan.set) {
            command.arg("--set").arg(set);
        }
        run(command).ok();
        let (watch, disks) = (Watch::default(), Vec::new());
        let mut fleet = Self { folder, members, watch, home, disks };
        let mount = |at: usize| Tmpfs::mount(fleet.data_folder(at), SMALL_DISK);
        fleet.disks = (0..plan.small_disks).map_while(mount).collect();
        (0..plan.nodes).for_each(|at| fleet.launch(at));
        (0..plan.nodes).for_each(|at| fleet.until_ready(at));
        fleet.until("all nodes are live", || fleet.live() == plan.nodes);
        fleet
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn data_folder(&self, at: usize) -> PathBuf {
        self.path(&format!("cluster/nodes/{}/data", self.members[at].name))
    }

    fn slot(&self, at: usize) -> std::sync::MutexGuard<'_, Option<Daemon>> {
        self.members[at].daemon.lock().unwrap()
    }

    /// Returns the index of the member with this name.
    pub fn place(&self, name: &str) -> usize {
        self.members.iter().position(|member| member.name == name).unwrap()
    }

    /// Starts a daemon that is not running. Does not wait until it is ready.
    pub fn launch(&self, at: usize) {
        let name = &self.members[at].name;
        let mut command = program(self.folder.path());
        let config = self.path(&format!("cluster/nodes/{name}/rapidraid.toml"));
        command.arg("node").arg("--config").arg(config).env("RUST_LOG", LOG);
        if at < self.disks.len() {
            // A small disk keeps room for archiving.
            command.args(["--set", "disk.high_water=85"]);
        }
        let daemon = Daemon::told(command, self.watch.listener(name));
        self.watch.is(name, &daemon.child);
        *self.slot(at) = Some(daemon);
    }

    fn until_ready(&self, at: usize) {
        let mut slot = self.slot(at);
        let daemon = slot.take().unwrap();
        *slot = Some(daemon.ready());
    }

    /// Kills a daemon. Returns `false` if it is not running.
    pub fn kill(&self, at: usize) -> bool {
        self.watch.kill(&self.members[at].name)
    }

    /// Reaps a daemon that was killed, so that no process of it is left.
    pub fn bury(&self, at: usize) {
        let daemon = self.slot(at).take();
        self.watch.is_not(&self.members[at].name);
        drop(daemon);
    }

    /// Returns whether the daemon of a member has ended by itself.
    pub fn has_ended(&self, at: usize) -> bool {
        let mut slot = self.slot(at);
        slot.as_mut().is_some_and(|daemon| daemon.child.try_wait().unwrap().is_some())
    }

    /// Starts a daemon that was killed, and waits until it is ready.
    pub fn restart(&self, at: usize) {
        self.bury(at);
        self.launch(at);
        self.until_ready(at);
    }

    /// Returns a client command with the arguments in `line`, which are separated by blanks.
    pub fn command(&self, line: &str) -> std::process::Command {
        let mut command = program(self.folder.path());
        command.args(line.split(' ')).env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
        command
    }

    /// Starts a command of the client `name`. The watch reads its stages and can kill it by that
    /// name. Returns the running command.
    pub fn spawn(&self, name: &str, line: &str) -> Running {
        let mut command = self.command(&format!("{line} --json"));
        command.env("RUST_LOG", LOG);
        let running = Running::start(command, self.watch.listener(name));
        self.watch.is(name, &running.child);
        running
    }

    /// Runs a command of the client `name` to its end. Returns its outcome.
    pub fn run_as(&self, name: &str, line: &str) -> Ended {
        let running = self.spawn(name, line);
        self.wait_for(&running);
        self.watch.is_not(name);
        running.ended(COMMAND_LIMIT)
    }

    /// Waits until the command has exited. Its process id stays reserved until [`Running::ended`].
    pub fn wait_for(&self, running: &Running) {
        let started = Instant::now();
        while !running.has_exited() {
            assert!(started.elapsed() < COMMAND_LIMIT, "a command hangs\n{}", self.watch.tails());
            sleep(Duration::from_millis(2));
        }
    }

    /// Runs a command that the watch does not observe to its end. Returns its outcome.
    pub fn run(&self, line: &str) -> Ended {
        Running::start(self.command(line), std::sync::Arc::new(|_| ())).ended(COMMAND_LIMIT)
    }

    /// Runs a command that must succeed eventually, and retries it when it fails, for example
    /// because nodes are down. Returns its JSON output.
    pub fn ask(&self, line: &str) -> Value {
        let started = Instant::now();
        loop {
            let ended = self.run(line);
            if ended.code == 0 {
                return ended.json();
            }
            let tails = || self.watch.tails();
            assert!(started.elapsed() < SETTLE_LIMIT, "{line}: {ended:?}\n{}", tails());
            sleep(LOOK);
        }
    }

    pub fn live(&self) -> usize {
        let status = self.ask("status --json");
        status["nodes"].as_array().unwrap().iter().filter(|node| node["live"] == true).count()
    }

    /// Waits until a condition holds. Panics after [`SETTLE_LIMIT`].
    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let started = Instant::now();
        while !holds() {
            assert!(started.elapsed() < SETTLE_LIMIT, "not yet: {what}\n{}", self.watch.tails());
            sleep(LOOK);
        }
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// Returns the error kind from a failed command's JSON, or an empty string for a command that was
/// killed.
pub fn kind_of(ended: &Ended) -> String {
    let document: Result<Value, _> = serde_json::from_str(&ended.out);
    document.ok().and_then(|d| d["error"]["kind"].as_str().map(str::to_owned)).unwrap_or_default()
}

/// Returns the error message from a failed command's JSON, or its stderr if there is none.
pub fn message_of(ended: &Ended) -> String {
    let document: Result<Value, _> = serde_json::from_str(&ended.out);
    let text = document.ok().and_then(|d| d["error"]["message"].as_str().map(str::to_owned));
    text.unwrap_or_else(|| ended.err.clone())
}
