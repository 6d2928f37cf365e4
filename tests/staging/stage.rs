//! A staging daemon as a process, with a staging folder of its own in shared memory.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::trainer::StagingError;
use rapidraid::trainer::protocol::{Answer, Request};
use rapidraid::trainer::protocol::{Load, Status};
use rapidraid::trainer::session::{Session, Wait};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;

use crate::content::{self, Loaded};
use crate::launch::in_container;
use crate::machine::network::{Machine, Network};
use crate::machine::{Cluster, Daemon, Ended, exit_code, files_below, program, run};
use crate::watch::Watch;

/// Time limit for an event that has to happen, on a busy machine too.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Interval between two checks.
pub const LOOK: Duration = Duration::from_millis(10);
/// The log filter of the daemon.
const LOG: &str = "warn,rapidraid=info,rapidraid::staging=debug";

/// Waits until `holds` returns true. Panics after a time limit, with `what` and the text of `tail`.
pub fn until(what: &str, tail: impl Fn() -> String, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LIMIT, "not yet: {what}\n{}", tail());
        sleep(LOOK);
    }
}

/// A staging daemon, or its folder while no daemon runs.
pub struct Stage<'a> {
    pub cluster: &'a Cluster,
    /// The daemon's machine, or `None` if all processes share this one.
    pub machine: Option<Machine>,
    home: TempDir,
    settings: Vec<String>,
    environment: Vec<(String, PathBuf)>,
    daemon: Option<Daemon>,
    pub watch: Watch,
}

impl<'a> Stage<'a> {
    /// Starts a daemon with `memory` for segments and further settings.
    pub fn start(cluster: &'a Cluster, memory: &str, settings: &[&str]) -> Self {
        let mut stage = Self::folder(cluster, memory, settings);
        stage.restart();
        stage
    }

    /// Creates a staging folder without a daemon.
    pub fn folder(cluster: &'a Cluster, memory: &str, settings: &[&str]) -> Self {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut all = vec![
            format!("staging.dir={}", home.path().join("staging").display()),
            format!("staging.memory={memory}"),
        ];
        all.extend(settings.iter().map(|setting| (*setting).to_owned()));
        let (environment, watch) = (Vec::new(), Watch::default());
        let machine = cluster.network.as_ref().map(Network::add_machine);
        Self { cluster, machine, home, settings: all, environment, daemon: None, watch }
    }

    /// Adds a setting for the next start.
    pub fn set(&mut self, setting: &str) {
        self.settings.push(setting.to_owned());
    }

    /// Sets variables of the daemon's environment for the next start.
    pub fn set_environment(&mut self, variables: &[(String, PathBuf)]) {
        self.environment.extend_from_slice(variables);
    }

    /// Returns the staging folder.
    pub fn dir(&self) -> PathBuf {
        self.home.path().join("staging")
    }

    /// Returns a path beside the staging folder.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Returns the command `rapidraid stage` with these arguments.
    pub fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = program(self.cluster.folder.path());
        command.arg("stage").args(arguments);
        self.settings.iter().for_each(|setting| drop(command.arg("--set").arg(setting).get_args()));
        command.env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml").env("RUST_LOG", LOG);
        command.envs(self.environment.iter().cloned());
        self.on_its_machine(command)
    }

    /// Returns a command that runs `command` on the daemon's machine.
    pub fn on_its_machine(&self, command: std::process::Command) -> std::process::Command {
        self.machine.as_ref().map(|machine| machine.inside(&command)).unwrap_or(command)
    }

    /// Starts the daemon and waits until it is ready.
    pub fn restart(&mut self) {
        self.launch();
        let daemon = self.daemon.take().unwrap();
        self.daemon = Some(daemon.ready());
    }

    /// Starts the daemon in a container: its parent process is outside and has the id 0 for it, and
    /// its session has no leader inside.
    pub fn restart_in_container(&mut self) {
        self.bury();
        let command = in_container(&self.command(&[]));
        self.daemon = Some(Daemon::told(command, self.watch.listener()).ready());
    }

    /// Starts the daemon and does not wait until it is ready.
    pub fn launch(&mut self) {
        self.bury();
        self.daemon = Some(Daemon::told(self.command(&[]), self.watch.listener()));
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("the daemon does not run")
    }

    /// Returns the daemon's process id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.daemon().child)
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: Signal) {
        self.daemon().signal(signal);
    }

    /// Kills the daemon and waits for its end.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.bury();
    }

    /// Waits for the end of a daemon that was killed.
    pub fn bury(&mut self) {
        self.daemon = None;
    }

    /// Waits until the daemon has ended by itself. Returns its exit code, -1 for a signal.
    pub fn ended(&mut self) -> i32 {
        let mut daemon = self.daemon.take().unwrap();
        exit_code(&mut daemon.child, LIMIT).expect("the daemon does not end")
    }

    /// Returns whether the daemon runs.
    pub fn is_alive(&mut self) -> bool {
        let daemon = self.daemon.as_mut();
        daemon.is_some_and(|daemon| daemon.child.try_wait().unwrap().is_none())
    }

    /// Runs `rapidraid stage` with these arguments.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        run(self.command(arguments))
    }

    /// Connects this process to the daemon as a reader.
    pub fn session(&self) -> Result<Session, StagingError> {
        with_wait(|wait| Session::connect(&self.dir(), None, wait))
    }

    /// Returns the daemon's status.
    pub fn status(&self) -> Status {
        let mut session = self.session().unwrap();
        let asked = with_wait(|wait| session.ask("status", &Request::Status, wait));
        let (Answer::Status(status), _) = asked.unwrap() else { panic!() };
        status
    }

    /// Returns the state of a job's step in one word, or `None` if the daemon does not have the
    /// step.
    pub fn state(&self, job: &str, step: u64) -> Option<String> {
        let status = self.status();
        let job = status.jobs.into_iter().find(|found| found.job.as_str() == job)?;
        let found = job.steps.into_iter().find(|found| found.step.0 == step)?;
        Some(found.state)
    }

    /// Waits until a step is in `state`.
    pub fn until_state(&self, job: &str, step: u64, state: &str) {
        self.until(&format!("{job}/{step} is {state}"), || {
            self.state(job, step).as_deref() == Some(state)
        });
    }

    /// Waits until `holds` returns true. Panics after a time limit, with the daemon's last log
    /// lines and status.
    pub fn until(&self, what: &str, holds: impl FnMut() -> bool) {
        until(what, || format!("{}{:#?}", self.watch.tail(), self.status()), holds);
    }

    /// Frees a job's memory until it has none.
    pub fn forget(&self, job: &str) {
        self.until("all is given back", || {
            self.free(job);
            self.status().used_bytes == 0
        });
    }

    /// Loads a step, or the resume point, without a launch, and checks every byte.
    pub fn load(&self, job: &str, step: Option<u64>) -> Result<Option<Loaded>, StagingError> {
        self.load_with(job, step, false)
    }

    /// Loads like [`Self::load`]. With `offline` it also loads if the cluster does not say what is
    /// committed.
    pub fn load_with(
        &self,
        job: &str,
        step: Option<u64>,
        offline: bool,
    ) -> Result<Option<Loaded>, StagingError> {
        let (job, step) = (job.parse().unwrap(), step.map(rapidraid::id::Step));
        let table_first = false;
        let load = Load { job, launch: None, step, offline, table_first, limit_ms: 0 };
        let mut session = self.session()?;
        with_wait(|wait| content::load(&mut session, &load, wait))
    }

    /// Returns the committed steps of a job as the cluster lists them.
    pub fn committed(&self, job: &str) -> Vec<u64> {
        let listed = self.cluster.run(&format!("ls {job} --json")).ok().json();
        let steps = listed["steps"].as_array().unwrap();
        steps.iter().map(|step| step["step"].as_u64().unwrap()).collect()
    }

    /// Frees a job's memory. Returns the command's JSON output.
    pub fn free(&self, job: &str) -> Value {
        self.run(&["--free", job, "--json"]).ok().json()
    }

    /// Returns the path of a segment's file.
    pub fn segment(&self, id: &str) -> PathBuf {
        self.dir().join("segments").join(format!("{id}.seg"))
    }

    /// Flips a bit of the byte at offset `at` of a file.
    pub fn flip(&self, path: &Path, at: u64) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }

    /// Asserts that no thread of the daemon has panicked.
    pub fn assert_sound(&self) {
        assert_eq!(self.watch.panics(), Vec::<String>::new());
    }

    /// Returns the files of the staging folder below `folder`, by name.
    pub fn files(&self, folder: &str) -> Vec<String> {
        files_below(&self.dir().join(folder))
    }
}

/// Runs a call with the usual time limit.
pub fn with_wait<T>(call: impl FnOnce(&mut Wait<'_>) -> T) -> T {
    let mut proceed = || true;
    call(&mut Wait::new(crate::role::CALL_LIMIT, &mut proceed))
}
