//! Trainers as processes, and the launches that they make.

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

use crate::role::{FOLDER, MARK, TOKEN};
use crate::stage::{LIMIT, Stage};

/// Rows of the shared tensor that a rank owns: two stripes.
pub const ROWS: u64 = 5_000;

/// Why an order failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub kind: String,
    pub message: String,
    pub hint: String,
}

impl Refused {
    /// It must be of this kind and say all of this.
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

/// What an order came to.
pub type Told = Result<Value, Refused>;

/// One trainer.
pub struct Trainer {
    child: Child,
    lines: mpsc::Receiver<Value>,
}

/// The command that makes this test binary a trainer.
pub fn trainer_command(folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_trainer_of_the_other_tests", "--nocapture", "--test-threads=1"]);
    command.env(FOLDER, folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// The same command with process ids of its own, as in a container: processes outside have the id 0 for it.
pub fn in_container(command: &Command) -> Command {
    let mut inside = Command::new("unshare");
    inside.args(["--pid", "--fork", "--kill-child=KILL", "--mount-proc"]);
    inside.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        value.map(|value| inside.env(name, value));
    }
    command.get_current_dir().map(|folder| inside.current_dir(folder));
    inside
}

/// Returns whether this machine lets us make containers: only root may.
pub fn has_containers() -> bool {
    let mut command = in_container(&Command::new("true"));
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Sends the lines that a trainer marks, from a thread of its own.
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
    /// Starts one.
    pub fn start(folder: &Path, token: Option<&Path>) -> Self {
        let mut command = trainer_command(folder);
        token.into_iter().for_each(|token| drop(command.env(TOKEN, token).get_envs()));
        Self::spawn(command)
    }

    /// Starts one that no other container sees.
    pub fn in_container(folder: &Path) -> Self {
        Self::spawn(in_container(&trainer_command(folder)))
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = mpsc::channel();
        listen(&mut child, move |line| drop(tell.send(line)));
        Self { child, lines }
    }

    /// Gives an order and does not wait for its answer.
    pub fn send(&mut self, order: &Value) {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{order}").unwrap();
    }

    /// The answer to the order before.
    pub fn answer(&self) -> Told {
        self.answer_within(LIMIT).expect("the trainer does not answer")
    }

    /// The answer, if it comes in time; `None` also when the trainer is dead.
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

    /// Gives an order and waits.
    pub fn ask(&mut self, order: &Value) -> Told {
        self.send(order);
        self.answer()
    }

    /// An order without arguments.
    pub fn tell(&mut self, what: &str) -> Told {
        self.ask(&json!({ "do": what }))
    }

    /// An order about a step.
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

/// What a launch is made with.
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
    /// A job of so many ranks that begins anew.
    pub fn new(job: &str, world: u32) -> Self {
        let (job, rows, keep) = (job.to_owned(), ROWS, 0);
        let (loaded, newest_seen, abandon_later) = (None, None, false);
        Self { job, world, rows, loaded, newest_seen, abandon_later, keep }
    }

    /// The same after a load of this step, the newest one.
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

/// Launches of one process are made one after the other.
static BORN: AtomicU64 = AtomicU64::new(0);

impl Launch {
    /// Starts the processes; nothing is prepared yet.
    pub fn start(stage: &Stage<'_>, plan: &Plan) -> Self {
        Self::with_token(stage, plan, None)
    }

    pub fn with_token(stage: &Stage<'_>, plan: &Plan, token: Option<&Path>) -> Self {
        let ranks = (0..plan.world).map(|_| Trainer::start(&stage.dir(), token)).collect();
        let born_ns = boot_time().as_nanos() as u64;
        let born_ns = BORN.fetch_max(born_ns, Ordering::Relaxed).max(born_ns);
        Self { plan: plan.clone(), id: LaunchId(SystemEntropy.id()), born_ns, ranks, loads: 0 }
    }

    /// The order by which a rank prepares.
    pub fn prepare_order(&self, rank: usize) -> Value {
        let Plan { job, world, rows, loaded, newest_seen, abandon_later, keep } = &self.plan;
        json!({
            "do": "prepare", "job": job, "launch": self.id.to_string(), "world": world, "rank": rank, "rows": rows,
            "born_ns": self.born_ns, "loaded": loaded, "newest_seen": newest_seen, "abandon_later": abandon_later, "keep": keep,
        })
    }

    /// All ranks prepare.
    pub fn prepare(&mut self) {
        for rank in 0..self.ranks.len() {
            let order = self.prepare_order(rank);
            self.ranks[rank].ask(&order).unwrap();
        }
    }

    /// Starts a launch that is prepared.
    pub fn ready(stage: &Stage<'_>, plan: &Plan) -> Self {
        let mut launch = Self::start(stage, plan);
        launch.prepare();
        launch
    }

    /// All ranks save a step. Returns the filling.
    pub fn save(&mut self, step: u64) -> String {
        let mut fill = Value::Null;
        for rank in &mut self.ranks {
            fill = rank.step("save", step).unwrap()["fill"].clone();
        }
        fill.as_str().unwrap().to_owned()
    }

    /// All ranks have a step committed.
    pub fn wait(&mut self, step: u64) {
        for rank in &mut self.ranks {
            rank.step("wait", step).unwrap();
        }
    }

    /// All ranks meet the daemon that was started since; the first call after that fails.
    pub fn reconnect(&mut self) {
        for rank in &mut self.ranks {
            if let Err(refused) = rank.tell("notices") {
                refused.says("Unavailable", &["went away"]);
                rank.tell("notices").unwrap();
            }
        }
    }

    /// A rank begins to fill a step and writes its extents. Returns the filling.
    pub fn fill(&mut self, rank: usize, step: u64) -> String {
        let filled = self.ranks[rank].step("fill", step).unwrap();
        self.ranks[rank].tell("write").unwrap();
        filled["fill"].as_str().unwrap().to_owned()
    }

    /// All ranks load: the next load of the launch.
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
