//! Trainers as processes, and launches made of them.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rapidraid::entropy::{Entropy, SystemEntropy};
use rapidraid::id::LaunchId;
use rapidraid::trainer::session::boot_time;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::machine::run_inside;
use crate::role::{FOLDER, MARK, TOKEN};
use crate::stage::{LIMIT, Stage};

/// Number of rows of the shared tensor that a rank owns: two stripes.
pub const ROWS: u64 = 5_000;

/// The reason why an order failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub kind: String,
    pub message: String,
    pub hint: String,
}

impl Refused {
    /// Asserts that the failure is of kind `kind` and that its message or hint contains each of
    /// `parts`.
    pub fn says(&self, kind: &str, parts: &[&str]) {
        assert_eq!(self.kind, kind, "{self:?}");
        for part in parts {
            assert!(
                self.message.contains(part) || self.hint.contains(part),
                "{part:?} is not in {self:?}"
            );
        }
    }
}

/// The result of an order.
pub type Told = Result<Value, Refused>;

/// A trainer process.
pub struct Trainer {
    child: Child,
    lines: mpsc::Receiver<Value>,
}

/// Returns the command that runs this test binary as a trainer.
pub fn trainer_command(folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_trainer_of_the_other_tests", "--nocapture", "--test-threads=1"]);
    command.env(FOLDER, folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn command_with_token(folder: &Path, token: Option<&Path>) -> Command {
    let mut command = trainer_command(folder);
    token.into_iter().for_each(|token| drop(command.env(TOKEN, token).get_envs()));
    command
}

/// Returns the same command with its own process ids, as in a container: to it, processes outside
/// have the id 0.
pub fn in_container(command: &Command) -> Command {
    let mut inside = Command::new("unshare");
    inside.args(["--pid", "--fork", "--kill-child=KILL", "--mount-proc"]);
    run_inside(inside, command)
}

/// Returns whether this machine allows containers: only root may create them.
pub fn has_containers() -> bool {
    let mut command = in_container(&Command::new("true"));
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Passes the marked lines of a trainer to `told`, from a thread of its own.
pub fn listen(child: &mut Child, told: impl Fn(Value) + Send + 'static) {
    let stdout = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            if let Some(json) = line.strip_prefix(MARK) {
                told(serde_json::from_str(json).unwrap());
            }
        }
    });
}

impl Trainer {
    /// Starts a trainer.
    pub fn start(folder: &Path, token: Option<&Path>) -> Self {
        Self::spawn(command_with_token(folder, token))
    }

    /// Starts a trainer on the machine of a staging daemon.
    fn beside(stage: &Stage<'_>, token: Option<&Path>) -> Self {
        Self::spawn(stage.on_its_machine(command_with_token(&stage.dir(), token)))
    }

    /// Starts a trainer that other containers cannot see.
    pub fn in_container(folder: &Path) -> Self {
        Self::spawn(in_container(&trainer_command(folder)))
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = mpsc::channel();
        listen(&mut child, move |line| drop(tell.send(line)));
        Self { child, lines }
    }

    /// Sends an order and does not wait for its answer.
    pub fn send(&mut self, order: &Value) {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{order}").unwrap();
    }

    /// Returns the answer to the previous order.
    pub fn answer(&self) -> Told {
        self.answer_within(LIMIT).expect("the trainer does not answer")
    }

    /// Returns the answer if it arrives in time; `None` also if the trainer is dead.
    pub fn answer_within(&self, limit: Duration) -> Option<Told> {
        let answer = self.lines.recv_timeout(limit).ok()?;
        let text = |field: &str| answer["error"][field].as_str().unwrap_or_default().to_owned();
        Some(match answer.get("ok") {
            Some(ok) => Ok(ok.clone()),
            None => {
                Err(Refused { kind: text("kind"), message: text("message"), hint: text("hint") })
            }
        })
    }

    /// Sends an order and waits. Returns its answer.
    pub fn ask(&mut self, order: &Value) -> Told {
        self.send(order);
        self.answer()
    }

    /// Sends an order without arguments. Returns its answer.
    pub fn tell(&mut self, what: &str) -> Told {
        self.ask(&json!({ "do": what }))
    }

    /// Sends an order about a step. Returns its answer.
    pub fn step(&mut self, what: &str, step: u64) -> Told {
        self.ask(&json!({ "do": what, "step": step }))
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Kills the process and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The parameters of a launch.
#[derive(Debug, Clone)]
pub struct Plan {
    pub job: String,
    pub world: u32,
    pub rows: u64,
    pub loaded: Option<u64>,
    pub newest_seen: Option<u64>,
    pub abandon_later: bool,
    pub keep: u32,
}

impl Plan {
    /// Creates the parameters of a job of `world` ranks that resumes from nothing.
    pub fn new(job: &str, world: u32) -> Self {
        let (job, rows, keep) = (job.to_owned(), ROWS, 0);
        let (loaded, newest_seen, abandon_later) = (None, None, false);
        Self { job, world, rows, loaded, newest_seen, abandon_later, keep }
    }

    /// Returns the same parameters after a load of this step, which was the newest.
    pub fn after(self, step: u64) -> Self {
        Self { loaded: Some(step), newest_seen: Some(step), ..self }
    }
}

/// The ranks of one launch.
pub struct Launch {
    pub plan: Plan,
    pub id: LaunchId,
    pub born_ns: u64,
    pub ranks: Vec<Trainer>,
    loads: u64,
}

/// The birth time of the newest launch, in ns. Launches of this process never have decreasing birth
/// times.
static BORN: AtomicU64 = AtomicU64::new(0);

impl Launch {
    /// Starts the processes without preparing them.
    pub fn start(stage: &Stage<'_>, plan: &Plan) -> Self {
        Self::with_token(stage, plan, None)
    }

    pub fn with_token(stage: &Stage<'_>, plan: &Plan, token: Option<&Path>) -> Self {
        let ranks = (0..plan.world).map(|_| Trainer::beside(stage, token)).collect();
        let born_ns = boot_time().as_nanos() as u64;
        let born_ns = BORN.fetch_max(born_ns, Ordering::Relaxed).max(born_ns);
        Self { plan: plan.clone(), id: LaunchId(SystemEntropy.id()), born_ns, ranks, loads: 0 }
    }

    /// Returns the order that makes a rank prepare.
    pub fn prepare_order(&self, rank: usize) -> Value {
        let Plan { job, world, rows, loaded, newest_seen, abandon_later, keep } = &self.plan;
        json!({
            "do": "prepare", "job": job, "launch": self.id.to_string(), "world": world, "rank": rank, "rows": rows,
            "born_ns": self.born_ns, "loaded": loaded, "newest_seen": newest_seen, "abandon_later": abandon_later, "keep": keep,
        })
    }

    /// Makes all ranks prepare.
    pub fn prepare(&mut self) {
        for rank in 0..self.ranks.len() {
            let order = self.prepare_order(rank);
            self.ranks[rank].ask(&order).unwrap();
        }
    }

    /// Starts a launch and prepares it.
    pub fn ready(stage: &Stage<'_>, plan: &Plan) -> Self {
        let mut launch = Self::start(stage, plan);
        launch.prepare();
        launch
    }

    /// Makes all ranks save a step. Returns the filling.
    pub fn save(&mut self, step: u64) -> String {
        let mut fill = Value::Null;
        for rank in &mut self.ranks {
            fill = rank.step("save", step).unwrap()["fill"].clone();
        }
        fill.as_str().unwrap().to_owned()
    }

    /// Makes all ranks wait until a step is committed.
    pub fn wait(&mut self, step: u64) {
        for rank in &mut self.ranks {
            rank.step("wait", step).unwrap();
        }
    }

    /// Makes all ranks connect to the restarted daemon; their first call after a restart fails.
    pub fn reconnect(&mut self) {
        for rank in &mut self.ranks {
            if let Err(refused) = rank.tell("notices") {
                refused.says("Unavailable", &["went away"]);
                rank.tell("notices").unwrap();
            }
        }
    }

    /// Makes a rank start to fill a step and write its extents. Returns the filling.
    pub fn fill(&mut self, rank: usize, step: u64) -> String {
        let filled = self.ranks[rank].step("fill", step).unwrap();
        self.ranks[rank].tell("write").unwrap();
        filled["fill"].as_str().unwrap().to_owned()
    }

    /// Makes all ranks load, as the next load of the launch. Returns their answers.
    pub fn load(&mut self, step: Option<u64>) -> Vec<Value> {
        self.loads += 1;
        let order = json!({
            "do": "load", "job": self.plan.job, "launch": self.id.to_string(), "number": self.loads, "step": step,
        });
        self.ranks.iter_mut().map(|rank| rank.ask(&order).unwrap()).collect()
    }

    /// Kills all ranks.
    pub fn kill(&mut self) {
        self.ranks.iter_mut().for_each(|rank| rank.signal(Signal::KILL));
        self.ranks.iter_mut().for_each(Trainer::kill);
    }
}
