//! Runs an experiment from its first cluster to its last run.

mod archive;
mod beside;
mod repair;
mod restore;
mod seaweedfs;
mod stream;
mod transfer;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rapidraid::entropy::{Entropy as _, SeededEntropy};
use serde_json::Value;

use crate::arm::{Arm, Kind};
use crate::conditions::Conditions;
use crate::daemons::{Daemons, Reading};
use crate::experiment::Experiment;
use crate::hosts::Hosts;
use crate::model;
use crate::record::{PointRecord, RunRecord};
use crate::stop::Stop;

/// Maximum time of a command that moves a checkpoint.
pub(crate) const MOVE_LIMIT: Duration = Duration::from_secs(3600);
/// The job of all checkpoints.
const JOB: &str = "experiment";

/// The state in which the runs of one point take place.
pub struct Stage<'a> {
    /// The cluster.
    pub daemons: Daemons<'a>,
    /// The conditions.
    pub at: Conditions,
    /// The data that is saved: a folder on the client's host, with one file for each shard.
    pub data: String,
    /// Whether whole commands are compared. That is so beside peers, which report nothing else.
    pub is_whole: bool,
    next_step: u64,
    round: u32,
}

/// Starts a cluster, shapes its links and runs the rounds that are missing in `played`, which holds
/// complete rounds only. `told` receives the point's record after every run.
pub fn point(
    hosts: &dyn Hosts,
    local: &Path,
    experiment: &Experiment,
    at: &Conditions,
    played: Vec<RunRecord>,
    stop: &Stop,
    told: &mut dyn FnMut(&PointRecord) -> Result<()>,
) -> Result<()> {
    let daemons = Daemons::start(hosts, local, at, stop)?;
    let data = hosts.folder().join("data").to_string_lossy().into_owned();
    let is_whole = experiment.arms.contains(&Arm::SeaweedFs);
    let mut stage = Stage { daemons, at: at.clone(), data, is_whole, next_step: 1, round: 0 };
    stage.shape(0)?;
    let has = |wanted: fn(Kind) -> bool| experiment.arms.iter().any(|arm| wanted(arm.kind()));
    if has(|kind| !matches!(kind, Kind::Transfer(_))) {
        stage.make_data()?;
    }
    // This is done before the first run, so that all runs have the same conditions.
    let mut kept = match has(|kind| matches!(kind, Kind::Restore(_))) {
        true => Some(restore::Kept::save(&mut stage, &experiment.arms)?),
        false => None,
    };
    let mut damaged = match has(|kind| matches!(kind, Kind::Repair(_))) {
        true => Some(repair::Damaged::save(&mut stage)?),
        false => None,
    };
    let mut prepared = match has(|kind| matches!(kind, Kind::Beside(_))) {
        true => Some(beside::Prepared::save(&mut stage)?),
        false => None,
    };
    let mut peer = match is_whole {
        true => Some(seaweedfs::SeaweedFs::start(&stage)?),
        false => None,
    };
    let mut point = PointRecord {
        label: at.label.clone(),
        conditions: serde_json::to_value(at)?,
        block_time_s: at.rate_mbit.map(|rate| model::block_time_s(at.block_bytes, rate)),
        runs: played,
    };
    let first = point.runs.last().map_or(0, |run| run.round + 1);
    for round in first..at.rounds {
        stage.shape(round)?;
        for turn in order(experiment.arms.len(), round) {
            stop.check()?;
            let arm = experiment.arms[turn];
            let run = match arm.kind() {
                Kind::Archive(plan) => match at.stream {
                    Some(stream) => stream::run(&mut stage, arm, plan, stream, round),
                    None => {
                        let is_traced = experiment.trace && round == 0;
                        archive::run(&mut stage, arm, plan, round, is_traced)
                    }
                },
                Kind::Restore(_) => match &mut kept {
                    Some(kept) => restore::run(&mut stage, kept, arm, round),
                    None => bail!("nothing was saved for it"),
                },
                Kind::Repair(of) => match &mut damaged {
                    Some(damaged) => repair::run(&mut stage, damaged, (arm, of), round),
                    None => bail!("nothing was saved for it"),
                },
                Kind::Beside(of) => match &mut prepared {
                    Some(prepared) => beside::run(&mut stage, prepared, (arm, of), round),
                    None => bail!("nothing was saved for it"),
                },
                Kind::Transfer(transfer) => transfer::run(&mut stage, arm, transfer, round),
                Kind::SeaweedFs => match &mut peer {
                    Some(peer) => seaweedfs::run(&mut stage, peer, arm, round),
                    None => bail!("it was not started"),
                },
            };
            let run = run.with_context(|| format!("{} of round {}", arm.word(), round + 1))?;
            point.runs.push(run);
            told(&point)?;
        }
    }
    Ok(())
}

/// Returns the order of `count` arms in a round. It is drawn from the round's number and so is the
/// same in every run of a file. No arm always follows the same other arm, so that the state that an
/// arm leaves behind (caches, memory) affects all others; in 15 rounds of four arms, each follows
/// each of the others.
fn order(count: usize, round: u32) -> Vec<usize> {
    let random = SeededEntropy::new(round.into());
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    order
}

impl Stage<'_> {
    /// Creates random files, each of one stripe.
    fn make_data(&self) -> Result<()> {
        let bytes = (u64::from(self.at.k) * self.at.block_bytes).to_string();
        let script = r#"mkdir -p "$1" && i=0 && while [ $i -lt "$2" ]; do
            head -c "$3" /dev/urandom > "$1/shard-$(printf %04d $i)" || exit 1; i=$((i + 1)); done"#;
        let shards = self.at.shards.to_string();
        let client = self.at.nodes as usize;
        self.daemons.on(client, "sh", &["-c", script, "sh", &self.data, &shards, &bytes])?;
        Ok(())
    }

    /// Gives all links the rates of a round.
    fn shape(&mut self, round: u32) -> Result<()> {
        self.round = round;
        let hosts = self.daemons.hosts();
        let nodes = self.at.rates_in(round).into_iter();
        for (host, rate) in nodes.chain([self.at.client_rate_mbit]).enumerate() {
            hosts.shape(host, rate)?;
        }
        Ok(())
    }

    /// Saves the data under a new step. Returns the step's name. The save uses unshaped links; the
    /// commands that are compared follow over shaped ones.
    fn save(&mut self) -> Result<String> {
        let name = self.next_name();
        self.unshaped(|stage| stage.save_as(&name).map(drop))?;
        Ok(name)
    }

    /// Does `work` over unshaped links.
    fn unshaped(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if self.at.is_shaped() {
            for host in 0..=self.daemons.hosts().nodes() {
                self.daemons.hosts().shape(host, None)?;
            }
        }
        work(self)?;
        self.shape(self.round)
    }

    fn next_name(&mut self) -> String {
        let name = format!("{JOB}/{}", self.next_step);
        self.next_step += 1;
        name
    }

    fn save_as(&self, name: &str) -> Result<()> {
        let saved = self.daemons.client(&["save", name, &self.data], MOVE_LIMIT)?;
        let (n, k) = (saved["n"].as_u64(), saved["k"].as_u64());
        ensure!(
            n == Some(self.at.n.into()) && k == Some(self.at.k.into()),
            "it was saved for ({n:?},{k:?}), not for ({},{})",
            self.at.n,
            self.at.k
        );
        Ok(())
    }

    fn remove(&self, step: &str) -> Result<()> {
        self.daemons.client(&["rm", step], MOVE_LIMIT)?;
        Ok(())
    }
}

/// Measures the work of the hosts between two readings.
struct Meter {
    before: Vec<Reading>,
    busy: Option<(f64, f64)>,
}

impl Meter {
    fn start(daemons: &Daemons<'_>) -> Result<Self> {
        daemons.forget_peaks()?;
        Ok(Self { before: daemons.read()?, busy: busy_of_hosts(daemons) })
    }

    /// Returns the record of the run. `seconds` is the measure that is compared, `command_s` the
    /// duration of the whole command.
    fn stop(
        self,
        daemons: &Daemons<'_>,
        (round, arm): (u32, Arm),
        (seconds, command_s): (f64, f64),
    ) -> Result<RunRecord> {
        let busy = self.busy.zip(busy_of_hosts(daemons)).map(|(before, after)| {
            let all = after.1 - before.1;
            if all > 0.0 { (after.0 - before.0) / all } else { 0.0 }
        });
        let after = daemons.read()?;
        let pairs = || self.before.iter().zip(&after);
        let sent = |(a, b): (&Reading, &Reading)| b.sent_bytes.saturating_sub(a.sent_bytes);
        let received =
            |(a, b): (&Reading, &Reading)| b.received_bytes.saturating_sub(a.received_bytes);
        let busiest = pairs().map(sent).chain(pairs().map(received)).max();
        Ok(RunRecord {
            round,
            arm,
            seconds,
            command_s,
            phases_s: Vec::new(),
            sent_bytes: pairs().map(sent).sum(),
            busiest_bytes: busiest.unwrap_or(0),
            cpu_s: pairs().map(|(a, b)| (b.cpu_s - a.cpu_s).max(0.0)).sum(),
            busy,
            peak_bytes: after.iter().map(|reading| reading.peak_bytes).max().unwrap_or(0),
            notes: BTreeMap::new(),
        })
    }
}

/// Returns the busy ticks and all ticks of this machine's processors since its start, or `None` if
/// hosts are other machines.
fn busy_of_hosts(daemons: &Daemons<'_>) -> Option<(f64, f64)> {
    if !daemons.hosts().is_here() {
        return None;
    }
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks: Vec<f64> =
        text.lines().next()?.split_whitespace().skip(1).filter_map(|t| t.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; the time of guests is part of user already.
    let all: f64 = ticks.iter().take(8).sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((all - idle, all))
}

/// Returns a number of the program's JSON.
fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("its JSON has no number {name:?}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn over_the_rounds_every_arm_follows_every_other() {
        let mut played = Vec::new();
        for round in 0..15 {
            let drawn = order(4, round);
            assert_eq!(drawn.iter().copied().collect::<BTreeSet<_>>(), (0..4).collect());
            assert_eq!(drawn, order(4, round));
            played.extend(drawn);
        }
        // The first arm of a round follows the last one of the previous round.
        let neighbours = played.windows(2).map(|pair| (pair[0], pair[1]));
        let pairs: BTreeSet<_> = neighbours.filter(|(before, after)| before != after).collect();
        assert_eq!(pairs.len(), 4 * 3, "{pairs:?}");
    }
}
