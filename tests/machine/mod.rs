//! Real daemons and real commands for tests. Every process has a time limit and is killed through
//! its own handle, also when a test fails.
#![allow(clippy::disallowed_methods)] // polls processes of the machine
#![allow(dead_code)] // no test uses all of it

pub mod disk;
pub mod network;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use network::Network;
use serde_json::Value;
use tempfile::TempDir;

/// Time limit of a process: long enough for a busy machine with two processors. No test waits so
/// long when all is well.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The outcome of a command.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ended {
    /// Asserts that the command succeeded. Returns the outcome.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Asserts that the command failed with this exit code, and that its stderr has an error
    /// message with all `parts`.
    pub fn fails(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains("error: ") && !self.err.contains("panicked"), "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in {self:?}");
        }
    }

    /// Returns stdout, which must be one JSON document.
    pub fn json(&self) -> Value {
        let document: Value =
            serde_json::from_str(&self.out).unwrap_or_else(|_| panic!("{self:?}"));
        assert_eq!(document["schema"], 1, "{self:?}");
        document
    }
}

/// Returns a command that runs the program with an environment of its own.
pub fn program(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rapidraid"));
    let ours = |name: &String| name.starts_with("RAPIDRAID_") || name.starts_with("RUST_");
    for name in std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).filter(ours) {
        command.env_remove(name);
    }
    command.env("HOME", folder).env_remove("XDG_CONFIG_HOME").current_dir(folder);
    command
}

/// Returns `outer` with the program, arguments, environment and folder of `command`: a program such
/// as `unshare`, which runs its last arguments as a command.
pub fn run_inside(mut outer: Command, command: &Command) -> Command {
    outer.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    command.get_current_dir().map(|folder| outer.current_dir(folder));
    outer
}

/// A callback that receives each line that a process writes to stderr, as it comes.
pub type Listener = Arc<dyn Fn(&str) + Send + Sync>;

/// A running command.
pub struct Running {
    pub child: Child,
    what: String,
    out: JoinHandle<String>,
    err: JoinHandle<String>,
}

impl Running {
    pub fn start(mut command: Command, listener: Listener) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let out = std::thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).unwrap();
            text
        });
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let err = std::thread::spawn(move || {
            let mut text = String::new();
            for line in stderr.lines().map_while(Result::ok) {
                listener(&line);
                text.push_str(&line);
                text.push('\n');
            }
            text
        });
        Self { child, what: format!("{command:?}"), out, err }
    }

    /// Returns whether the command has exited. Its process id stays reserved until
    /// [`Running::ended`].
    pub fn has_exited(&self) -> bool {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_child(&self.child)), options).unwrap().is_some()
    }

    /// Waits for the command's end, at most `limit`. Returns its outcome. Panics if it does not end
    /// in time.
    pub fn ended(mut self, limit: Duration) -> Ended {
        let code = exit_code(&mut self.child, limit);
        let (out, err) = (self.out.join().unwrap(), self.err.join().unwrap());
        let code = code.unwrap_or_else(|| panic!("{} does not end: {err}", self.what));
        Ended { code, out, err }
    }
}

/// Runs a command to its end. Returns its outcome.
pub fn run(command: Command) -> Ended {
    Running::start(command, Arc::new(|_| ())).ended(LIMIT)
}

/// Returns the child's exit code, or -1 if a signal ended it. Kills the child and returns `None` if
/// it does not end within `limit`.
pub fn exit_code(child: &mut Child, limit: Duration) -> Option<i32> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status.code().unwrap_or(-1));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// A daemon and the lines of its stderr.
pub struct Daemon {
    pub child: Child,
    lines: Mutex<mpsc::Receiver<String>>,
}

impl Daemon {
    pub fn start(folder: &Path, config: &Path, more: &[&str]) -> Self {
        let mut command = program(folder);
        command.arg("node").arg("--config").arg(config).args(more);
        Self::told(command, Arc::new(|_| ()))
    }

    /// Starts the daemon of a `node` command. Its lines go to `listener` too. Returns the daemon.
    pub fn told(mut command: Command, listener: Listener) -> Self {
        command.arg("--stop-at-eof");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (told, lines) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            // Read to the end, so that the daemon never blocks on a full pipe.
            for line in stderr.lines().map_while(Result::ok) {
                listener(&line);
                drop(told.send(line));
            }
        });
        Self { child, lines: Mutex::new(lines) }
    }

    /// Waits for the line that says that the daemon is ready. Returns the daemon.
    pub fn ready(self) -> Self {
        let mut said = Vec::new();
        loop {
            let next = self.lines.lock().unwrap().recv_timeout(LIMIT);
            match next {
                Ok(line) if line.starts_with("ready: ") => return self,
                Ok(line) => said.push(line),
                Err(error) => panic!("not ready ({error}): {said:#?}"),
            }
        }
    }

    /// Waits for the daemon's end. Returns its outcome.
    pub fn ended(mut self) -> Ended {
        let code = exit_code(&mut self.child, LIMIT).expect("the daemon does not end");
        let err = self.lines.lock().unwrap().iter().collect::<Vec<_>>().join("\n");
        Ended { code, out: String::new(), err }
    }

    /// Sends a signal to the daemon.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The daemon may have ended already. Its process id stays reserved until it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The unused ports of the slots that this process has locked, and the locks.
static PORTS: Mutex<(Vec<u16>, Vec<File>)> = Mutex::new((Vec::new(), Vec::new()));

/// Returns free UDP ports. No other test process of this user gets them while this one runs, even
/// while their daemons are down. They are below the range that the system gives to clients.
pub fn free_ports(count: usize) -> Vec<u16> {
    let (left, locks) = &mut *PORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ports = Vec::new();
    while ports.len() < count {
        let Some(port) = left.pop() else {
            let (slot, lock) = lock_slot();
            left.extend(slot);
            locks.push(lock);
            continue;
        };
        if UdpSocket::bind(("127.0.0.1", port)).is_ok() {
            ports.push(port);
        }
    }
    ports
}

/// Takes a slot of ports. It is this process's until the lock is dropped.
fn lock_slot() -> (Range<u16>, File) {
    const FIRST: u16 = 16_384;
    const LEN: u16 = 32;
    const SLOTS: u16 = 488;
    let user = rustix::process::getuid().as_raw();
    let folder = std::env::temp_dir().join(format!("rapidraid-test-ports-{user}"));
    std::fs::create_dir_all(&folder).unwrap();
    let begin = std::process::id() as u16 % SLOTS;
    for slot in (begin..SLOTS).chain(0..begin) {
        let lock = File::create(folder.join(slot.to_string())).unwrap();
        if lock.try_lock().is_ok() {
            let first = FIRST + slot * LEN;
            return (first..first + LEN, lock);
        }
    }
    panic!("all {SLOTS} slots of ports are in use: {}", folder.display());
}

/// The setting with which a cluster of a test accepts saves although other data nearly fills the
/// disk of this machine.
pub const ON_A_FULL_DISK: &str = "disk.high_water=99";

/// A cluster on this machine, in a folder of its own.
pub struct Cluster {
    pub daemons: Vec<Daemon>,
    pub folder: TempDir,
    /// The network of the nodes, or `None` if they are on the loopback interface.
    pub network: Option<Network>,
}

impl Cluster {
    /// Creates the files of a cluster without daemons. Blocks are small unless `set` says
    /// otherwise. Returns the cluster.
    pub fn files(nodes: usize, set: &[&str]) -> Self {
        Self::files_on(None, nodes, set)
    }

    /// Like [`Self::files`], for nodes on this network, or on the loopback interface.
    fn files_on(network: Option<Network>, nodes: usize, set: &[&str]) -> Self {
        let host = network.as_ref().map_or("127.0.0.1", |_| network::NODES);
        let folder = tempfile::tempdir().unwrap();
        let mut command = program(folder.path());
        command.args(["cluster", "init", "cluster"]);
        for default in ["code.block=64KiB", ON_A_FULL_DISK] {
            let (key, _) = default.split_once('=').unwrap();
            if !set.iter().any(|set| set.split('=').next() == Some(key)) {
                command.args(["--set", default]);
            }
        }
        for (at, port) in free_ports(nodes).iter().enumerate() {
            command.arg("--node").arg(format!("n{}={host}:{port}", at + 1));
        }
        set.iter().for_each(|set| drop(command.arg("--set").arg(set).get_args()));
        run(command).ok();
        Self { daemons: Vec::new(), folder, network }
    }

    /// Starts a cluster. Returns it when all its nodes are live.
    pub fn start(nodes: usize, set: &[&str]) -> Self {
        Self::files(nodes, set).started(nodes)
    }

    /// Starts a cluster on a network of its own. Returns it when all its nodes are live.
    pub fn start_on(network: Network, nodes: usize, set: &[&str]) -> Self {
        Self::files_on(Some(network), nodes, set).started(nodes)
    }

    /// Starts the daemons of the cluster. Returns it when all of them are live.
    pub fn started(mut self, nodes: usize) -> Self {
        let cluster = &mut self;
        let start = |at: usize| {
            let mut command = program(cluster.folder.path());
            command.arg("node").arg("--config").arg(cluster.config(at));
            Daemon::told(cluster.inside(command), Arc::new(|_| ()))
        };
        let daemons: Vec<Daemon> = (1..=nodes).map(start).collect();
        cluster.daemons = daemons.into_iter().map(Daemon::ready).collect();
        let live = |all: &[Value]| all.iter().filter(|node| node["live"] == true).count();
        cluster.until("all nodes are live", |all| live(all) == nodes);
        self
    }

    /// Waits until the nodes that `status` shows satisfy `reached`.
    pub fn until(&self, what: &str, reached: impl Fn(&[Value]) -> bool) {
        let started = Instant::now();
        loop {
            let status = self.run("status --json").ok().json();
            if reached(status["nodes"].as_array().unwrap()) {
                return;
            }
            assert!(started.elapsed() < LIMIT, "never came: {what}: {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the path of the configuration of node `at`, counted from 1.
    pub fn config(&self, at: usize) -> PathBuf {
        self.folder.path().join(format!("cluster/nodes/n{at}/rapidraid.toml"))
    }

    /// Returns the address of node `at`, counted from 1.
    pub fn address(&self, at: usize) -> String {
        let config = std::fs::read_to_string(self.config(at)).unwrap();
        let advertise = config.lines().find(|line| line.starts_with("advertise")).unwrap();
        advertise.split('"').nth(1).unwrap().to_owned()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a client command in the cluster's folder; arguments are separated by blanks. Returns
    /// its outcome.
    pub fn run(&self, line: &str) -> Ended {
        let mut command = program(self.folder.path());
        command.args(line.split(' ')).env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
        run(self.inside(command))
    }

    /// Returns a command that runs `command` on the network of the nodes.
    fn inside(&self, command: Command) -> Command {
        self.network.as_ref().map(|network| network.inside(&command)).unwrap_or(command)
    }

    /// Writes a file below the cluster's folder.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        let path = self.path(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}

/// Returns all files below a folder with their bytes, by relative path.
pub fn tree(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| {
        let bytes = std::fs::read(folder.join(&name)).unwrap();
        (name, bytes)
    };
    files_below(folder).into_iter().map(read).collect()
}

/// Returns the relative paths of all files below a folder, sorted. Skips folders that vanish
/// meanwhile.
pub fn files_below(folder: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&next) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Returns `len` bytes that follow from `seed`.
pub fn bytes(len: usize, seed: u64) -> Vec<u8> {
    use rapidraid::entropy::{Entropy, SeededEntropy};
    let mut out = vec![0; len];
    SeededEntropy::new(seed).fill(&mut out);
    out
}
