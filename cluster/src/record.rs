//! Results as data: the experiment, the machines, and every single run. Tables and pictures use
//! nothing else.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::arm::Arm;
use crate::experiment::Experiment;
use crate::text::read_text;

/// The version of the record's format. It grows with every change of the format.
pub const SCHEMA: u32 = 1;
const MAX_FILE_BYTES: u64 = 256 << 20;

/// All results of an experiment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The version of the format.
    pub schema: u32,
    /// The experiment file.
    pub experiment: Experiment,
    /// The command that was typed.
    pub command: String,
    /// The date in UTC.
    pub date: String,
    /// The output of `rapidraid --version` on the first host.
    pub program: String,
    /// The commit of the repository that contains the experiment's file, with `+` if its sources
    /// differ from the commit. Absent if git knows none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The machine of the first host. If all hosts are this machine, it is the only one.
    pub machine: Machine,
    /// The kind of the links.
    pub links: Value,
    /// The later commands that resumed the experiment after it was interrupted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resumed: Vec<Resumed>,
    /// The results of the points.
    pub points: Vec<PointRecord>,
}

/// A later command that resumed an experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    /// Number of runs of earlier commands.
    pub after_runs: usize,
    /// The command, as in [`Record`].
    pub command: String,
    /// The date in UTC.
    pub date: String,
    /// The output of `rapidraid --version`.
    pub program: String,
    /// The commit, as in [`Record`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
}

/// A machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The model of the processor.
    pub processor: String,
    /// Number of processors that this process may use.
    pub processors: usize,
    /// The release of the kernel.
    pub kernel: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The kind of file system that holds the data, such as `ext2/ext3` or `tmpfs`. Empty if it was
    /// not determined.
    #[serde(default)]
    pub disk: String,
}

/// The runs at one point.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PointRecord {
    /// The label of the point.
    pub label: String,
    /// The complete conditions.
    pub conditions: Value,
    /// Seconds of one block over a node's link. Absent if links are not shaped.
    pub block_time_s: Option<f64>,
    /// All runs.
    pub runs: Vec<RunRecord>,
}

/// A run of an arm.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunRecord {
    /// The round, from 0.
    pub round: u32,
    /// The arm that was run.
    pub arm: Arm,
    /// The measure that is compared, in seconds. For the archiving of one stripe it is the run of
    /// the plan, which ends when the last piece is durable and proven. For a stream of checkpoints
    /// it is the median of their times at risk, and for a transfer the time of the slowest
    /// receiver. For everything else, and beside a peer, it is the whole command.
    pub seconds: f64,
    /// Duration of the whole command, in seconds.
    pub command_s: f64,
    /// Phases of archiving, summed over stripes: reserve, run and prove, receipts and commit, drop.
    #[serde(default)]
    pub phases_s: Vec<f64>,
    /// Bytes that all nodes together sent.
    pub sent_bytes: u64,
    /// The most bytes that one node sent or received: the load of the busiest link.
    pub busiest_bytes: u64,
    /// Processor time in seconds of all daemons together, or of the processes that were measured in
    /// their place.
    pub cpu_s: f64,
    /// Share of the machine's processors that was busy, if all hosts are this machine.
    pub busy: Option<f64>,
    /// Maximum memory of one of these processes in this run. If the host's kernel cannot reset
    /// peaks, it is the maximum since the process began.
    pub peak_bytes: u64,
    /// Further facts about the run.
    #[serde(default)]
    pub notes: BTreeMap<String, Value>,
}

/// The note of a run that names the node that was stopped, and when.
pub const STOPPED: &str = "stopped";
/// The note of a run that has the trace of its hops, as `archive --trace` writes it.
pub const TRACE: &str = "trace";

impl RunRecord {
    /// Returns whether the run should have stopped a node, and ended before one was stopped.
    pub fn ended_unstopped(&self) -> bool {
        self.arm == Arm::RestoreStopped && !self.notes.contains_key(STOPPED)
    }
}

impl Record {
    /// Reads a record that [`Record::write`] wrote.
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

    /// Resumes `earlier`: its complete rounds are kept, an incomplete one is run again. Returns an
    /// error if the experiments differ.
    pub fn resume(self, mut earlier: Self) -> Result<Self> {
        let without_points = |of: &Experiment| Experiment { points: Vec::new(), ..of.clone() };
        ensure!(
            without_points(&earlier.experiment) == without_points(&self.experiment),
            "the interrupted run is of another experiment, or its file has changed since: run it without --resume"
        );
        let arms = self.experiment.arms.len().max(1);
        for point in &mut earlier.points {
            let rounds = point.runs.chunks_exact(arms).zip(0..);
            let is_whole =
                |(runs, round): &(&[RunRecord], u32)| runs.iter().all(|run| run.round == *round);
            let whole = rounds.take_while(is_whole).count();
            point.runs.truncate(whole * arms);
        }
        earlier.points.retain(|point| !point.runs.is_empty());
        if earlier.points.is_empty() {
            return Ok(self);
        }
        // Further points may follow these. Their settings are compared when they are run.
        let kept: Vec<&str> = earlier.points.iter().map(|point| point.label.as_str()).collect();
        ensure!(
            self.experiment.labels().starts_with(&kept),
            "the file does not begin with the points that were played ({}): run it without --resume",
            kept.join(", ")
        );
        earlier.experiment = self.experiment;
        earlier.resumed.push(Resumed {
            after_runs: earlier.points.iter().map(|point| point.runs.len()).sum(),
            command: self.command,
            date: self.date,
            program: self.program,
            commit: self.commit,
        });
        Ok(earlier)
    }

    /// Records the hosts of the next point. A resumed experiment must run on the same hosts as
    /// before.
    pub fn is_played_on(&mut self, links: Value, program: String, machine: Machine) -> Result<()> {
        let Some(resumed) = self.resumed.last_mut() else {
            (self.links, self.program, self.machine) = (links, program, machine);
            return Ok(());
        };
        ensure!(
            self.links == links && self.machine == machine,
            "it was begun on other hosts, links or disks: run it without --resume"
        );
        resumed.program = program;
        Ok(())
    }

    /// Writes the record in place of an earlier one. If this fails, the earlier one stays.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        let new = path.with_extension("json.new");
        std::fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
        std::fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Machine {
    /// The shell script whose output [`Machine::parse`] reads.
    pub const ASKED: &str = "cat /proc/cpuinfo /proc/meminfo; echo \"processors: $(nproc)\"; \
                             echo \"kernel: $(cat /proc/sys/kernel/osrelease)\"";

    /// Returns this machine.
    pub fn this() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let parts = ["/proc/cpuinfo", "/proc/meminfo"].map(read).concat();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let kernel = read("/proc/sys/kernel/osrelease");
        Self::parse(&format!("{parts}\nprocessors: {processors}\nkernel: {kernel}"))
    }

    /// Parses lines of `name: value`. A missing value is empty or 0.
    pub fn parse(text: &str) -> Self {
        let field = |name: &str| {
            let pairs = text.lines().filter_map(|line| line.split_once(':'));
            let value = pairs.filter(|(found, _)| found.trim() == name).map(|(_, value)| value);
            value.map(str::trim).next().unwrap_or_default()
        };
        let number = |name: &str| -> Option<u64> {
            field(name).split_whitespace().next().and_then(|word| word.parse().ok())
        };
        Self {
            processor: field("model name").to_owned(),
            processors: number("processors").unwrap_or(0) as usize,
            kernel: field("kernel").to_owned(),
            memory_bytes: number("MemTotal").unwrap_or(0) << 10,
            disk: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Point;

    fn record(runs: &[(u32, Arm)]) -> Record {
        let run = |&(round, arm): &(u32, Arm)| RunRecord {
            round,
            arm,
            seconds: 1.0,
            command_s: 1.0,
            phases_s: Vec::new(),
            sent_bytes: 0,
            busiest_bytes: 0,
            cpu_s: 0.0,
            busy: None,
            peak_bytes: 0,
            notes: BTreeMap::new(),
        };
        let point = |label: &str, runs: &[(u32, Arm)]| PointRecord {
            label: label.to_owned(),
            conditions: Value::Null,
            block_time_s: None,
            runs: runs.iter().map(run).collect(),
        };
        let experiment = "name = \"a\"\nquestion = \"b\"\nrounds = 2\narms = [\"chain\", \"best-star\"]\n\
             [[point]]\nlabel = \"whole\"\n[[point]]\nlabel = \"begun\"";
        Record {
            schema: SCHEMA,
            experiment: toml::from_str(experiment).unwrap(),
            command: "first".into(),
            date: String::new(),
            program: "1".into(),
            commit: None,
            machine: Machine::this(),
            links: Value::Null,
            resumed: Vec::new(),
            points: vec![point("whole", runs), point("begun", &runs[..1])],
        }
    }

    #[test]
    fn what_goes_on_keeps_whole_rounds() {
        let runs = [(0, Arm::Chain), (0, Arm::BestStar), (1, Arm::BestStar)];
        let mut now = record(&[(0, Arm::Chain)]);
        now.command = "second".into();
        let mut resumed = now.clone().resume(record(&runs)).unwrap();
        assert_eq!(resumed.points.len(), 1);
        let kept: Vec<_> = resumed.points[0].runs.iter().map(|run| (run.round, run.arm)).collect();
        assert_eq!(kept, runs[..2]);
        assert_eq!((resumed.command.as_str(), resumed.resumed[0].after_runs), ("first", 2));
        assert_eq!(resumed.resumed[0].command, "second");
        resumed.is_played_on(Value::Null, "2".into(), Machine::this()).unwrap();
        assert_eq!((resumed.program.as_str(), resumed.resumed[0].program.as_str()), ("1", "2"));
        assert!(resumed.is_played_on("other".into(), "2".into(), Machine::this()).is_err());
        let on_tmpfs = Machine { disk: "tmpfs".into(), ..Machine::this() };
        assert!(resumed.is_played_on(Value::Null, "2".into(), on_tmpfs).is_err());
        let nothing = now.clone().resume(record(&runs[1..])).unwrap();
        assert_eq!((nothing.command.as_str(), nothing.resumed.len()), ("second", 0));
        let refused = |change: fn(&mut Experiment)| {
            let mut changed = now.clone();
            change(&mut changed.experiment);
            changed.resume(record(&runs)).unwrap_err().to_string()
        };
        assert!(refused(|experiment| experiment.rounds = 3).contains("another experiment"));
        assert!(refused(|experiment| experiment.points.swap(0, 1)).contains("(whole)"));
        assert!(refused(|experiment| experiment.points.clear()).contains("(whole)"));
        let mut longer = now.clone();
        let last = longer.experiment.points[1].clone();
        longer.experiment.points.push(Point { label: "more".into(), ..last });
        let resumed = longer.clone().resume(record(&runs)).unwrap();
        assert_eq!(resumed.experiment, longer.experiment);
    }

    #[test]
    fn a_machine_tells_of_itself_as_another_would() {
        let sh = std::process::Command::new("sh").args(["-c", Machine::ASKED]).output().unwrap();
        let (told, this) = (Machine::parse(&String::from_utf8_lossy(&sh.stdout)), Machine::this());
        assert!(told.memory_bytes > 0 && told.processors > 0, "{told:?}");
        assert_eq!((told.memory_bytes, told.kernel), (this.memory_bytes, this.kernel));
        assert_eq!(told.processor, this.processor);
        let other = "processor\t: 0\nmodel name\t: A: b\nMemTotal:  8 kB\nprocessors: 3\nkernel: 6";
        let other = Machine::parse(other);
        assert_eq!(
            (other.processor.as_str(), other.processors, other.memory_bytes),
            ("A: b", 3, 8192)
        );
    }
}
