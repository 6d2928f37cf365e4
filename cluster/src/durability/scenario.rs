//! The file of a durability model: clusters, and how often what fails in them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rapidraid::config::RepairRules;
use serde::{Deserialize, Serialize};

use crate::text::read_text;

const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum number of nodes of a ring.
const MAX_NODES: usize = 128;
const MAX_GROUPS: usize = 100_000;

/// A file of scenarios.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The name of the results' file.
    pub name: String,
    /// The question that the scenarios answer.
    pub question: String,
    /// The scenarios.
    pub scenario: Vec<Scenario>,
}

/// How the catalogue server decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// By the daemon's rules.
    #[default]
    AsIs,
    /// It repairs first what survives the most losses.
    Reversed,
    /// The brake is always on.
    BrakeStuck,
    /// The brake is never on.
    NoBrake,
}

/// The duration of a repair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RepairTime {
    /// The bytes of the pieces over the share of a link.
    #[default]
    Rate,
    /// Exponential, with this mean in hours.
    Exponential(f64),
    /// Nothing is repaired.
    Never,
}

/// A cluster, the rates at which parts of it fail, and the extent of its simulation. Times between
/// failures and durations of outages are exponential.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The name.
    pub name: String,
    /// Number of nodes.
    pub nodes: usize,
    /// Number of racks; 0: none is configured.
    pub racks: usize,
    /// Number of pieces of a stripe.
    pub n: usize,
    /// Number of pieces from which a stripe can be read.
    pub k: usize,
    /// Number of groups of stripes, each repaired as a whole.
    pub groups: usize,
    /// Bytes on each node, in terabytes.
    #[serde(default)]
    pub node_tb: f64,
    /// The rate of a link.
    #[serde(default)]
    pub link_gbit: f64,
    /// The share of the links at which repairs send, in percent.
    #[serde(default = "default_share")]
    pub share_percent: u8,
    /// `repair.grace_s`.
    pub grace_s: u64,
    /// `repair.brake`.
    pub brake_percent: u8,
    /// Disks that are lost, per node and year.
    pub lost_disks_per_year: f64,
    /// The mean time until an empty node replaces one that has lost its disk; 0: at once.
    #[serde(default)]
    pub replacement_hours: f64,
    /// Outages after which a node comes back with its disk, per node and year.
    #[serde(default)]
    pub outages_per_year: f64,
    /// Their mean duration.
    #[serde(default)]
    pub outage_hours: f64,
    /// Outages of a whole rack, per rack and year.
    #[serde(default)]
    pub rack_outages_per_year: f64,
    /// Their mean duration.
    #[serde(default)]
    pub rack_outage_hours: f64,
    /// Pieces that are damaged without notice, per node and year.
    #[serde(default)]
    pub damaged_pieces_per_year: f64,
    /// The time between two verifications of everything; 0: never.
    #[serde(default)]
    pub verify_days: f64,
    /// The share of repairs that fail. They are tried again after a minute.
    #[serde(default)]
    pub failed_repairs: f64,
    /// The duration of a repair.
    #[serde(default)]
    pub repair_time: RepairTime,
    /// The mean time, in hours, in which the Markov chain makes a lost piece again: from the loss
    /// to the end of the repair. 0: the scenario has no chain.
    #[serde(default)]
    pub chain_hours: f64,
    /// How the catalogue server decides.
    #[serde(default)]
    pub variant: Variant,
    /// The simulated time.
    pub years: f64,
    /// Number of lost groups after which a simulation ends.
    #[serde(default = "default_losses")]
    pub stop_after_losses: u64,
    /// Number of simulated clusters.
    pub clusters: u64,
}

fn default_share() -> u8 {
    25
}

fn default_losses() -> u64 {
    u64::MAX
}

impl Model {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = read_text(path, MAX_FILE_BYTES)?;
        let model: Self = toml::from_str(&text).with_context(|| format!("{shown}"))?;
        for scenario in &model.scenario {
            scenario.check().with_context(|| format!("{shown}: scenario {}", scenario.name))?;
        }
        Ok(model)
    }
}

impl Scenario {
    fn check(&self) -> Result<()> {
        let Self { nodes, racks, n, k, groups, .. } = *self;
        ensure!(0 < k && k < n && n <= nodes, "needs 0 < k < n <= nodes");
        ensure!(
            nodes <= MAX_NODES && racks <= nodes,
            "at most {MAX_NODES} nodes, and as many racks"
        );
        ensure!((1..=MAX_GROUPS).contains(&groups), "1 to {MAX_GROUPS} groups");
        ensure!(self.clusters > 0, "at least one cluster is simulated");
        ensure!(
            matches!(self.repair_time, RepairTime::Never | RepairTime::Exponential(_))
                || (self.link_gbit > 0.0 && (1..=100).contains(&self.share_percent)),
            "a repair at a rate needs link_gbit and share_percent of 1 to 100"
        );
        let rates = [
            self.node_tb,
            self.link_gbit,
            self.lost_disks_per_year,
            self.replacement_hours,
            self.outages_per_year,
            self.outage_hours,
            self.rack_outages_per_year,
            self.rack_outage_hours,
            self.damaged_pieces_per_year,
            self.verify_days,
            self.chain_hours,
        ];
        ensure!(
            rates.iter().all(|rate| (0.0..1e9).contains(rate)),
            "a rate is no number below 10^9"
        );
        ensure!(self.years > 0.0 && self.years <= 1e5, "years is no number up to 100,000");
        ensure!(self.stop_after_losses > 0, "stop_after_losses is at least 1");
        if let RepairTime::Exponential(hours) = self.repair_time {
            ensure!((1e-6..1e9).contains(&hours), "repair_time: {hours} is no number of hours");
        }
        ensure!((0.0..1.0).contains(&self.failed_repairs), "failed_repairs is no number below 1");
        Ok(())
    }

    /// Returns the rules of the catalogue server.
    pub fn rules(&self) -> RepairRules {
        RepairRules {
            share_percent: self.share_percent,
            grace: Duration::from_secs(self.grace_s),
            brake_percent: match self.variant {
                Variant::NoBrake => 100,
                _ => self.brake_percent,
            },
        }
    }

    /// Returns the bytes of all pieces of a group on one node.
    pub fn piece_bytes(&self) -> f64 {
        self.node_tb * 1e12 * self.nodes as f64 / (self.groups * self.n) as f64
    }
}
