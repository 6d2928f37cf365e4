//! Experiment files: the question, the conditions, and the arms that are compared.
//!
//! A file has one question, settings, and points. A point changes some settings; a file without
//! points has a single one. At each point a cluster is started, and every round runs each arm once,
//! in an order drawn for that round, so that drift affects all arms alike.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rapidraid::units::{BLOCK_LENGTHS, ByteCount, is_block_length};
use serde::{Deserialize, Serialize};

use crate::arm::{Arm, Kind};
use crate::conditions::{Conditions, Relayed, Stream};
use crate::text::read_text;

/// Maximum length of an experiment file.
const MAX_FILE_BYTES: u64 = 1 << 20;
const MAX_ROUNDS: u32 = 1000;
const MAX_POINTS: usize = 64;
/// Four times the maximum number of nodes of a code of this project.
const MAX_NODES: u32 = 128;
/// A larger checkpoint would fill the disk of a small machine before the first result.
const MAX_CHECKPOINT_BYTES: u64 = 64 << 30;

/// An experiment file as it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// The name of the results: letters, digits and `-`.
    pub name: String,
    /// The question that the experiment answers, in one sentence.
    pub question: String,
    /// Number of times that each arm is run, unless a point has another number.
    pub rounds: u32,
    /// The arms that are compared. Restores are compared only with restores.
    pub arms: Vec<Arm>,
    /// Whether the hops of the first round are drawn over time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trace: bool,
    /// The settings for every point.
    #[serde(default)]
    pub setting: Setting,
    /// The points and the settings that they change.
    #[serde(default, rename = "point")]
    pub points: Vec<Point>,
    /// The settings that `--short` changes at every point.
    #[serde(default)]
    pub short: Short,
}

/// A change of settings, with a label for tables and pictures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// The label of the point.
    pub label: String,
    /// The settings that differ here.
    #[serde(flatten)]
    pub setting: Setting,
}

/// The settings that `--short` changes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Short {
    /// The settings that differ; they override those of points.
    #[serde(flatten)]
    pub setting: Setting,
}

/// Settings that a file, a point or `--short` may give. Absent settings keep their values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Number of times that each arm is run; fewer where a run takes long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rounds: Option<u32>,
    /// Number of storage nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// The code as `n,k`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Length of a full block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<ByteCount>,
    /// Number of shards of a checkpoint. Each is one file of one stripe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<u32>,
    /// Working memory of one daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteCount>,
    /// Rate of every node's link in both directions, in Mbit/s; slow nodes have `slow_rate_mbit`.
    /// Absent here and in the setting: not shaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_mbit: Option<u32>,
    /// Rate of the client's link, in Mbit/s. Absent: not shaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_rate_mbit: Option<u32>,
    /// Number of nodes with `slow_rate_mbit` instead, in each round the next ones by name; or
    /// number of nodes behind a relay, always the first ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_nodes: Option<u32>,
    /// Rate of slow nodes, in Mbit/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_rate_mbit: Option<u32>,
    /// Delay of the packets of slow nodes in each direction, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_delay_ms: Option<u32>,
    /// Loss of the packets of slow nodes in each direction, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_loss_percent: Option<f64>,
    /// The congestion controller of the daemons and clients: `cubic` or `bbr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub congestion: Option<String>,
    /// The time for which a checkpoint is degraded before it is repaired automatically.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repair_grace_s: Option<u32>,
    /// Number of checkpoints that a run saves, one every `every_s`. Absent: a run is one archiving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saves: Option<u32>,
    /// Seconds from one save to the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_s: Option<u32>,
}

impl Setting {
    fn over(&self, base: &Setting) -> Setting {
        Setting {
            rounds: self.rounds.or(base.rounds),
            nodes: self.nodes.or(base.nodes),
            code: self.code.clone().or_else(|| base.code.clone()),
            block: self.block.or(base.block),
            shards: self.shards.or(base.shards),
            memory: self.memory.or(base.memory),
            rate_mbit: self.rate_mbit.or(base.rate_mbit),
            client_rate_mbit: self.client_rate_mbit.or(base.client_rate_mbit),
            slow_nodes: self.slow_nodes.or(base.slow_nodes),
            slow_rate_mbit: self.slow_rate_mbit.or(base.slow_rate_mbit),
            slow_delay_ms: self.slow_delay_ms.or(base.slow_delay_ms),
            slow_loss_percent: self.slow_loss_percent.or(base.slow_loss_percent),
            congestion: self.congestion.clone().or_else(|| base.congestion.clone()),
            repair_grace_s: self.repair_grace_s.or(base.repair_grace_s),
            saves: self.saves.or(base.saves),
            every_s: self.every_s.or(base.every_s),
        }
    }

    fn relayed(&self) -> Option<Relayed> {
        if self.slow_delay_ms.is_none() && self.slow_loss_percent.is_none() {
            return None;
        }
        Some(Relayed {
            nodes: self.slow_nodes.unwrap_or(0),
            delay_ms: self.slow_delay_ms.unwrap_or(0),
            loss_percent: self.slow_loss_percent.unwrap_or(0.0),
        })
    }

    fn complete(&self, label: &str, rounds: u32) -> Result<Conditions> {
        let code = self.code.as_deref().unwrap_or("16,11");
        let parts = code.split_once(',');
        let shape = parts.and_then(|(n, k)| Some((n.trim().parse().ok()?, k.trim().parse().ok()?)));
        let (n, k): (u32, u32) =
            shape.with_context(|| format!("code = {code:?}: expected `n,k`, such as \"16,11\""))?;
        let conditions = Conditions {
            label: label.to_owned(),
            rounds: self.rounds.unwrap_or(rounds),
            nodes: self.nodes.unwrap_or(n),
            n,
            k,
            block_bytes: self.block.map_or(8 << 20, |block| block.0),
            shards: self.shards.unwrap_or(1),
            memory_bytes: self.memory.map_or(256 << 20, |memory| memory.0),
            rate_mbit: self.rate_mbit,
            client_rate_mbit: self.client_rate_mbit,
            slow_nodes: self.slow_nodes.unwrap_or(0),
            slow_rate_mbit: self.slow_rate_mbit,
            relayed: self.relayed(),
            congestion: self.congestion.clone(),
            repair_grace_s: self.repair_grace_s,
            stream: self.saves.zip(self.every_s).map(|(saves, every_s)| Stream { saves, every_s }),
        };
        ensure!(self.saves.is_some() == self.every_s.is_some(), "saves and every_s go together");
        ensure!((1..=1000).contains(&self.saves.unwrap_or(1)), "saves: expected 1 to 1000");
        ensure!((1..=3600).contains(&self.every_s.unwrap_or(1)), "every_s: expected 1 to 3600");
        let rounds = conditions.rounds;
        ensure!(
            (1..=MAX_ROUNDS).contains(&rounds),
            "rounds = {rounds}: expected 1 to {MAX_ROUNDS}"
        );
        ensure!(k >= 1 && k < n && n <= 2 * k, "code = {code:?}: expected k < n <= 2k");
        let nodes = conditions.nodes;
        ensure!((n..=MAX_NODES).contains(&nodes), "nodes = {nodes}: expected {n} to {MAX_NODES}");
        ensure!((1..=1024).contains(&conditions.shards), "shards: expected 1 to 1024");
        ensure!(conditions.slow_nodes <= nodes, "slow_nodes: there are {nodes} nodes");
        ensure!(
            self.congestion.as_deref().is_none_or(|word| ["cubic", "bbr"].contains(&word)),
            "congestion: expected cubic or bbr"
        );
        let is_slowed = self.slow_rate_mbit.is_some() || conditions.relayed.is_some();
        ensure!(
            (conditions.slow_nodes > 0) == is_slowed,
            "slow_nodes goes together with slow_rate_mbit, slow_delay_ms or slow_loss_percent"
        );
        if let Some(relayed) = conditions.relayed {
            ensure!(
                self.slow_rate_mbit.is_none(),
                "slow_rate_mbit: nodes behind a relay have the rate of all"
            );
            ensure!(relayed.delay_ms <= 1000, "slow_delay_ms: expected at most 1000");
            let is_share = (0.0..=50.0).contains(&relayed.loss_percent);
            ensure!(is_share, "slow_loss_percent: expected 0 to 50");
        }
        let rates = [self.rate_mbit, self.client_rate_mbit, self.slow_rate_mbit];
        let usable = rates.into_iter().flatten().all(|rate| (1..=400_000).contains(&rate));
        ensure!(usable, "a rate is 1 to 400,000 Mbit/s");
        let bytes = conditions.checkpoint_bytes();
        ensure!(
            bytes <= MAX_CHECKPOINT_BYTES,
            "a checkpoint of {bytes} bytes: at most {MAX_CHECKPOINT_BYTES}"
        );
        Ok(conditions)
    }
}

impl Experiment {
    /// Reads and checks a file. `is_short` applies its table `short`.
    pub fn read(path: &Path, is_short: bool) -> Result<Self> {
        let shown = path.display();
        let text = read_text(path, MAX_FILE_BYTES)?;
        Self::parse(&text, is_short).with_context(|| format!("{shown} is no experiment"))
    }

    /// Parses and checks the text of an experiment file.
    pub fn parse(text: &str, is_short: bool) -> Result<Self> {
        let experiment: Experiment = toml::from_str(text)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let name = &experiment.name;
        ensure!(
            (1..=64).contains(&name.len()) && name.chars().all(plain),
            "name = {name:?}: expected 1 to 64 letters, digits and `-`"
        );
        ensure!(experiment.points.len() <= MAX_POINTS, "at most {MAX_POINTS} points");
        let arms: BTreeSet<Arm> = experiment.arms.iter().copied().collect();
        ensure!(!arms.is_empty(), "arms is empty: name what is to be compared");
        ensure!(arms.len() == experiment.arms.len(), "an arm is named twice");
        let is_restore = |arm: &Arm| matches!(arm.kind(), Kind::Restore(_));
        if arms.iter().any(is_restore) && !arms.iter().all(is_restore) {
            bail!("arms: archiving and restoring are different experiments; make two files");
        }
        // This check reports a wrong point before the first cluster is started.
        experiment.conditions(is_short)?;
        Ok(experiment)
    }

    /// Returns the labels of the points. An experiment without points has one, named like the
    /// experiment.
    pub fn labels(&self) -> Vec<&str> {
        match self.points.is_empty() {
            true => vec![&self.name],
            false => self.points.iter().map(|point| point.label.as_str()).collect(),
        }
    }

    /// Returns the conditions of every point.
    pub fn conditions(&self, is_short: bool) -> Result<Vec<Conditions>> {
        let whole = [Point { label: self.name.clone(), setting: Setting::default() }];
        let points = if self.points.is_empty() { &whole[..] } else { &self.points };
        let mut all = Vec::with_capacity(points.len());
        for point in points {
            let mut setting = point.setting.over(&self.setting);
            if is_short {
                setting = self.short.setting.over(&setting);
            }
            let conditions = setting
                .complete(&point.label, self.rounds)
                .with_context(|| format!("at the point {:?}", point.label))?;
            let is_archive = |arm: &Arm| matches!(arm.kind(), Kind::Archive(_));
            let is_transfer = |arm: &Arm| matches!(arm.kind(), Kind::Transfer(_));
            let label = &point.label;
            let has_code =
                rapidraid::code::table::find(conditions.n as usize, conditions.k as usize);
            ensure!(
                has_code.is_some() || self.arms.iter().all(is_transfer),
                "at the point {label:?}: there is no chain code ({},{}); `rapidraid code list` shows which there are",
                conditions.n,
                conditions.k
            );
            ensure!(
                conditions.stream.is_none() || self.arms.iter().all(is_archive),
                "at the point {label:?}: a stream of checkpoints is for arms that archive"
            );
            ensure!(
                conditions.congestion.is_none() || !self.arms.iter().any(is_transfer),
                "at the point {label:?}: congestion is for daemons; transfers have an arm for each"
            );
            ensure!(
                conditions.shards == 1 || !self.arms.contains(&Arm::SeaweedFs),
                "at the point {label:?}: seaweedfs is measured with one shard"
            );
            let bytes = conditions.block_bytes;
            ensure!(
                is_block_length(bytes) || self.arms.iter().all(is_transfer),
                "at the point {label:?}: a block of {bytes} bytes: expected {BLOCK_LENGTHS}"
            );
            let most = self.arms.iter().map(|arm| arm.missing()).max().unwrap_or(0);
            let spare = (conditions.n - conditions.k) as usize;
            ensure!(
                most <= spare,
                "at the point {:?}: {most} missing nodes, but the code survives {spare}",
                point.label
            );
            all.push(conditions);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
name = "one-shard"
question = "How much faster is the chain?"
rounds = 15
arms = ["chain", "naive-star", "seaweedfs"]
[setting]
block = "64MiB"
rate_mbit = 200
[[point]]
label = "1 MiB"
block = "1MiB"
[[point]]
label = "half"
rounds = 3
slow_nodes = 8
slow_rate_mbit = 100
[short]
rounds = 2
block = "256KiB"
"#;

    #[test]
    fn points_change_settings_and_short_changes_all() {
        let experiment = Experiment::parse(FILE, false).unwrap();
        let points = experiment.conditions(false).unwrap();
        assert_eq!(points.iter().map(|p| p.block_bytes).collect::<Vec<_>>(), [1 << 20, 64 << 20]);
        assert_eq!((points[1].n, points[1].k, points[1].nodes), (16, 11, 16));
        assert_eq!(points[0].slow_in(0), [0; 0]);
        assert_eq!(points[1].slow_in(0).len(), 8);
        assert_eq!((points[0].rounds, points[1].rounds), (15, 3));
        let short = Experiment::parse(FILE, true).unwrap().conditions(true).unwrap();
        assert!(short.iter().all(|p| p.block_bytes == 256 << 10 && p.rounds == 2));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (from, to, named) in [
            ("rounds = 15", "rounds = 0", "rounds = 0"),
            ("rounds = 15", "rouns = 15", "rouns"),
            ("rounds = 3", "rounds = 1001", "rounds = 1001"),
            ("rate_mbit = 200", "rate_mbits = 200", "rate_mbits"),
            ("label = \"half\"", "label = \"half\"\nrat = 2", "rat"),
            ("slow_rate_mbit = 100", "", "goes together"),
            ("\"naive-star\"", "\"naive\"", "naive"),
            ("\"naive-star\"", "\"restore-pieces\"", "two files"),
            ("\"naive-star\"", "\"chain\"", "twice"),
            ("one-shard", "../one", "letters"),
            ("block = \"64MiB\"", "code = \"16\"", "n,k"),
            ("block = \"64MiB\"", "nodes = 3", "nodes = 3"),
            ("block = \"64MiB\"", "block = \"192MiB\"", "\"half\": a block of 201326592"),
            ("block = \"64MiB\"", "block = \"100KiB\"", "multiple of 64KiB"),
            ("block = \"64MiB\"", "saves = 3", "saves and every_s"),
            ("block = \"64MiB\"", "congestion = \"reno\"", "cubic or bbr"),
            ("slow_nodes = 8", "slow_nodes = 8\nslow_delay_ms = 20", "slow_rate_mbit"),
            ("slow_rate_mbit = 100", "slow_delay_ms = 2000", "slow_delay_ms"),
            ("slow_rate_mbit = 100", "slow_loss_percent = 60.0", "slow_loss_percent"),
            ("slow_nodes = 8", "slow_nodes = 8\nshards = 2", "one shard"),
            ("slow_nodes = 8", "slow_nodes = 8\nsaves = 2\nevery_s = 1", "arms that archive"),
        ] {
            let error = Experiment::parse(&FILE.replace(from, to), false).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(named), "{to:?}: {text}");
        }
        let many = FILE
            .replace("\"chain\", \"naive-star\", \"seaweedfs\"", "\"restore-missing-5\"")
            .replace("rate_mbit = 200", "code = \"6,4\"");
        let error = Experiment::parse(&many, false).unwrap_err();
        assert!(format!("{error:#}").contains("survives 2"), "{error:#}");
    }

    /// All experiment files of this repository, and all records that it keeps, can be read: a field
    /// that an old record lacks has a default.
    #[test]
    fn files_and_records_are_read() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let files = |folder: &str, ending: &str| {
            let entries = std::fs::read_dir(here.join(folder)).unwrap().flatten();
            let paths = entries.map(|entry| entry.path());
            paths.filter(|path| path.extension().is_some_and(|e| e == ending)).collect::<Vec<_>>()
        };
        let experiments = files("experiments", "toml");
        assert!(experiments.len() >= 12, "{experiments:?}");
        for file in experiments {
            for is_short in [false, true] {
                Experiment::read(&file, is_short).unwrap();
            }
        }
        for file in files("../docs/benchmarks", "json") {
            let record = crate::record::Record::read(&file).unwrap();
            for point in &record.points {
                serde_json::from_value::<Conditions>(point.conditions.clone()).unwrap();
            }
        }
    }
}
