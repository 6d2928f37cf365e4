//! Results as data: what was run, where, and every single run. Tables and pictures are made from this and nothing else.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::arm::Arm;
use crate::experiment::Experiment;
use crate::text::read_text;

/// Counts changes of this file's shape.
pub const SCHEMA: u32 = 1;
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Everything that an experiment found out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The shape of this file.
    pub schema: u32,
    /// The file that was run.
    pub experiment: Experiment,
    /// The command that was typed.
    pub command: String,
    /// Date, UTC.
    pub date: String,
    /// What `rapidraid --version` says.
    pub program: String,
    /// The machine that ran it.
    pub machine: Machine,
    /// How links are made.
    pub links: Value,
    /// Results, point by point.
    pub points: Vec<PointRecord>,
}

/// A machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    /// Its processor.
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// The kernel's release.
    pub kernel: String,
    /// Its memory.
    pub memory_bytes: u64,
}

/// The runs at one point.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PointRecord {
    /// Its label.
    pub label: String,
    /// The conditions, complete.
    pub conditions: Value,
    /// Seconds of a block over a node's link; absent where links are not shaped.
    pub block_time_s: Option<f64>,
    /// Every run.
    pub runs: Vec<RunRecord>,
}

/// One run of one arm.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunRecord {
    /// Which round, from 0.
    pub round: u32,
    /// What was run.
    pub arm: Arm,
    /// What is compared: for one stripe until its last piece is durable and proven, for several and for
    /// restores the whole command, for a stream of checkpoints the median of them, for a transfer the slowest receiver.
    pub seconds: f64,
    /// The whole command.
    pub command_s: f64,
    /// Phases of archiving, summed over stripes: reserve, run and prove, receipts and commit, drop.
    #[serde(default)]
    pub phases_s: Vec<f64>,
    /// Bytes that all nodes together sent.
    pub sent_bytes: u64,
    /// The most that one node sent or received: the busiest link.
    pub busiest_bytes: u64,
    /// Processor time of all daemons together, or of the processes that were measured in their place.
    pub cpu_s: f64,
    /// Share of the machine's processors that was busy, where all hosts are this machine.
    pub busy: Option<f64>,
    /// The most memory that one of them has had so far.
    pub peak_bytes: u64,
    /// What else there is to say.
    #[serde(default)]
    pub notes: BTreeMap<String, Value>,
}

/// The note of a run that says which node was stopped, and when.
pub const STOPPED: &str = "stopped";
/// The note of a run that has the trace of its hops, as `archive --trace` writes it.
pub const TRACE: &str = "trace";

impl RunRecord {
    /// Whether it was to go on with a node stopped, and ended before one was.
    pub fn ended_unstopped(&self) -> bool {
        self.arm == Arm::RestoreStopped && !self.notes.contains_key(STOPPED)
    }
}

impl Record {
    /// Reads what [`Record::write`] wrote.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = read_text(path, MAX_FILE_BYTES)?;
        let record: Self =
            serde_json::from_str(&text).with_context(|| format!("{shown} is no record"))?;
        ensure!(
            record.schema == SCHEMA,
            "{shown} has schema {}, this program reads {SCHEMA}",
            record.schema
        );
        Ok(record)
    }

    /// Writes it in place of an earlier one, which stays when this fails.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        let new = path.with_extension("json.new");
        std::fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
        std::fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        let memory_kib: u64 =
            memory.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        Self {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            memory_bytes: memory_kib << 10,
        }
    }
}
