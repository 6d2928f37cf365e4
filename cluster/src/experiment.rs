//! Experiment files: what is asked, under which conditions, and what is compared.
//!
//! A file has one question, settings, and points. A point changes some settings; without points there is one. At each point a
//! cluster is brought up and every arm is played once a round, in turn, so that what drifts meets all arms alike.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rapidraid::units::ByteCount;
use serde::{Deserialize, Serialize};

use crate::text::read_text;

/// Files longer than this are no experiments.
const MAX_FILE_BYTES: u64 = 1 << 20;
const MAX_ROUNDS: u32 = 1000;
const MAX_POINTS: usize = 64;
/// As many as a code of this project has at most, times four.
const MAX_NODES: u32 = 128;
/// Beyond this a run would fill the disk of a small machine before it says anything.
const MAX_CHECKPOINT_BYTES: u64 = 64 << 30;

/// An experiment file, as it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// Names the results; letters, digits and `-`.
    pub name: String,
    /// What the experiment is to answer, in one sentence.
    pub question: String,
    /// How often each arm is played.
    pub rounds: u32,
    /// What is compared, all of one kind.
    pub arms: Vec<Arm>,
    /// Whether the hops of the first round are drawn over time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trace: bool,
    /// The conditions that hold at every point.
    #[serde(default)]
    pub setting: Setting,
    /// What changes, point by point.
    #[serde(default, rename = "point")]
    pub points: Vec<Point>,
    /// What `--short` changes everywhere; its rounds replace the file's.
    #[serde(default)]
    pub short: Short,
}

/// One of the things that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Archiving by the pipelined chain.
    Chain,
    /// Archiving by one coder that fetches every block, whatever it has: the paper's baseline.
    NaiveStar,
    /// Archiving by one coder on a node with two blocks.
    BestStar,
    /// Archiving by coders that change from range to range.
    StripedStar,
    /// Restoring from replicas: a plain parallel read of k blocks.
    RestoreReplicas,
    /// Restoring from pieces, all nodes up.
    RestorePieces,
    /// Restoring from pieces, one node stopped (SIGSTOP) once bytes flow.
    RestoreStopped,
    /// Restoring from pieces with 1 node killed since the archiving.
    #[serde(rename = "restore-missing-1")]
    RestoreMissing1,
    /// The same with 2.
    #[serde(rename = "restore-missing-2")]
    RestoreMissing2,
    /// The same with 3.
    #[serde(rename = "restore-missing-3")]
    RestoreMissing3,
    /// The same with 4.
    #[serde(rename = "restore-missing-4")]
    RestoreMissing4,
    /// The same with 5.
    #[serde(rename = "restore-missing-5")]
    RestoreMissing5,
}

impl Arm {
    /// As it is written in files and results.
    pub fn word(self) -> &'static str {
        match self {
            Arm::Chain => "chain",
            Arm::NaiveStar => "naive-star",
            Arm::BestStar => "best-star",
            Arm::StripedStar => "striped-star",
            Arm::RestoreReplicas => "restore-replicas",
            Arm::RestorePieces => "restore-pieces",
            Arm::RestoreStopped => "restore-stopped",
            Arm::RestoreMissing1 => "restore-missing-1",
            Arm::RestoreMissing2 => "restore-missing-2",
            Arm::RestoreMissing3 => "restore-missing-3",
            Arm::RestoreMissing4 => "restore-missing-4",
            Arm::RestoreMissing5 => "restore-missing-5",
        }
    }

    /// The word of `rapidraid archive --plan`, for arms that archive.
    pub fn plan(self) -> Option<&'static str> {
        match self {
            Arm::Chain => Some("chain"),
            Arm::NaiveStar => Some("naive-star"),
            Arm::BestStar => Some("star"),
            Arm::StripedStar => Some("striped-star"),
            _ => None,
        }
    }

    /// How many nodes are killed before the restore.
    pub fn missing(self) -> usize {
        match self {
            Arm::RestoreMissing1 => 1,
            Arm::RestoreMissing2 => 2,
            Arm::RestoreMissing3 => 3,
            Arm::RestoreMissing4 => 4,
            Arm::RestoreMissing5 => 5,
            _ => 0,
        }
    }
}

/// A change of the settings, with a name for tables and pictures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// What the table calls it.
    pub label: String,
    /// What differs here.
    #[serde(flatten)]
    pub setting: Setting,
}

/// What `--short` changes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Short {
    /// How often each arm is played.
    pub rounds: Option<u32>,
    /// What differs; wins over points.
    #[serde(flatten)]
    pub setting: Setting,
}

/// Settings that a file, a point or `--short` may give; what is not given is as before.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Storage nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// The code, `n,k`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Length of a full block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<ByteCount>,
    /// Shards of a checkpoint, each one file of one stripe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<u32>,
    /// What the work of one daemon may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteCount>,
    /// Every node's link, both directions, in Mbit/s; absent: not shaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_mbit: Option<u32>,
    /// The client's link; absent: not shaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_rate_mbit: Option<u32>,
    /// How many nodes, the first ones by name, have `slow_rate_mbit` instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_nodes: Option<u32>,
    /// The rate of slow nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_rate_mbit: Option<u32>,
}

/// The settings of one point, complete and checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// The point's label.
    pub label: String,
    /// Storage nodes.
    pub nodes: u32,
    /// Pieces of a stripe.
    pub n: u32,
    /// Blocks of a stripe.
    pub k: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Shards of a checkpoint.
    pub shards: u32,
    /// Bytes that the work of one daemon may take.
    pub memory_bytes: u64,
    /// Of every node, both directions.
    pub rate_mbit: Option<u32>,
    /// Of the client.
    pub client_rate_mbit: Option<u32>,
    /// How many nodes are slow.
    pub slow_nodes: u32,
    /// The rate of those.
    pub slow_rate_mbit: Option<u32>,
}

impl Conditions {
    /// Bytes of a checkpoint.
    pub fn checkpoint_bytes(&self) -> u64 {
        u64::from(self.shards) * u64::from(self.k) * self.block_bytes
    }

    /// The rate of node `at`, counted from 0.
    pub fn rate_of(&self, at: u32) -> Option<u32> {
        if at < self.slow_nodes { self.slow_rate_mbit } else { self.rate_mbit }
    }
}

impl Setting {
    fn over(&self, base: &Setting) -> Setting {
        Setting {
            nodes: self.nodes.or(base.nodes),
            code: self.code.clone().or_else(|| base.code.clone()),
            block: self.block.or(base.block),
            shards: self.shards.or(base.shards),
            memory: self.memory.or(base.memory),
            rate_mbit: self.rate_mbit.or(base.rate_mbit),
            client_rate_mbit: self.client_rate_mbit.or(base.client_rate_mbit),
            slow_nodes: self.slow_nodes.or(base.slow_nodes),
            slow_rate_mbit: self.slow_rate_mbit.or(base.slow_rate_mbit),
        }
    }

    fn complete(&self, label: &str) -> Result<Conditions> {
        let code = self.code.as_deref().unwrap_or("16,11");
        let parts = code.split_once(',');
        let shape = parts.and_then(|(n, k)| Some((n.trim().parse().ok()?, k.trim().parse().ok()?)));
        let (n, k): (u32, u32) =
            shape.with_context(|| format!("code = {code:?}: expected `n,k`, such as \"16,11\""))?;
        let conditions = Conditions {
            label: label.to_owned(),
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
        };
        ensure!(k >= 1 && k < n && n <= 2 * k, "code = {code:?}: expected k < n <= 2k");
        let nodes = conditions.nodes;
        ensure!((n..=MAX_NODES).contains(&nodes), "nodes = {nodes}: expected {n} to {MAX_NODES}");
        ensure!((1..=1024).contains(&conditions.shards), "shards: expected 1 to 1024");
        ensure!(conditions.slow_nodes <= nodes, "slow_nodes: there are {nodes} nodes");
        let slow = conditions.slow_nodes > 0;
        ensure!(slow == self.slow_rate_mbit.is_some(), "slow_nodes and slow_rate_mbit go together");
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
    /// Reads and checks a file; `is_short` applies its table `short`.
    pub fn read(path: &Path, is_short: bool) -> Result<Self> {
        let shown = path.display();
        let text = read_text(path, MAX_FILE_BYTES)?;
        Self::parse(&text, is_short).with_context(|| format!("{shown} is no experiment"))
    }

    /// The same from text.
    pub fn parse(text: &str, is_short: bool) -> Result<Self> {
        let mut experiment: Experiment = toml::from_str(text)?;
        if is_short {
            experiment.rounds = experiment.short.rounds.unwrap_or(1);
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let name = &experiment.name;
        ensure!(
            (1..=64).contains(&name.len()) && name.chars().all(plain),
            "name = {name:?}: expected 1 to 64 letters, digits and `-`"
        );
        let rounds = experiment.rounds;
        ensure!(
            (1..=MAX_ROUNDS).contains(&rounds),
            "rounds = {rounds}: expected 1 to {MAX_ROUNDS}"
        );
        ensure!(experiment.points.len() <= MAX_POINTS, "at most {MAX_POINTS} points");
        let arms: BTreeSet<Arm> = experiment.arms.iter().copied().collect();
        ensure!(!arms.is_empty(), "arms is empty: name what is to be compared");
        ensure!(arms.len() == experiment.arms.len(), "an arm is named twice");
        if arms.iter().any(|arm| arm.plan().is_some())
            && arms.iter().any(|arm| arm.plan().is_none())
        {
            bail!("arms: archiving and restoring are different experiments; make two files");
        }
        // What is wrong with a point is told before the first cluster is up.
        experiment.conditions(is_short)?;
        Ok(experiment)
    }

    /// The conditions of every point.
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
                .complete(&point.label)
                .with_context(|| format!("at the point {:?}", point.label))?;
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
arms = ["chain", "naive-star"]
[setting]
block = "64MiB"
rate_mbit = 200
[[point]]
label = "1 MiB"
block = "1MiB"
[[point]]
label = "half"
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
        assert_eq!((points[1].rate_of(7), points[1].rate_of(8)), (Some(100), Some(200)));
        let short = Experiment::parse(FILE, true).unwrap();
        assert_eq!(short.rounds, 2);
        assert!(short.conditions(true).unwrap().iter().all(|p| p.block_bytes == 256 << 10));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (from, to, named) in [
            ("rounds = 15", "rounds = 0", "rounds = 0"),
            ("rounds = 15", "rouns = 15", "rouns"),
            ("rate_mbit = 200", "rate_mbits = 200", "rate_mbits"),
            ("label = \"half\"", "label = \"half\"\nrat = 2", "rat"),
            ("slow_rate_mbit = 100", "", "go together"),
            ("\"naive-star\"", "\"naive\"", "naive"),
            ("\"naive-star\"", "\"restore-pieces\"", "two files"),
            ("\"naive-star\"", "\"chain\"", "twice"),
            ("one-shard", "../one", "letters"),
            ("block = \"64MiB\"", "code = \"16\"", "n,k"),
            ("block = \"64MiB\"", "nodes = 3", "nodes = 3"),
        ] {
            let error = Experiment::parse(&FILE.replace(from, to), false).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(named), "{to:?}: {text}");
        }
        let many = FILE
            .replace("\"chain\", \"naive-star\"", "\"restore-missing-5\"")
            .replace("rate_mbit = 200", "code = \"6,4\"");
        let error = Experiment::parse(&many, false).unwrap_err();
        assert!(format!("{error:#}").contains("survives 2"), "{error:#}");
    }
}
