//! `rapidraid-cluster durability`: simulates clusters over years, in which disks are lost, nodes
//! and racks are away and pieces decay, and counts what is lost for ever.

mod chain;
mod repair;
mod scenario;
mod world;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::record::Machine;
use crate::run::Print;
use crate::say;
use scenario::{Model, Scenario};
use world::{Outcome, World};

/// Options of `durability`.
#[derive(Debug, clap::Args)]
pub struct Durability {
    /// The scenarios, a TOML file
    file: PathBuf,
    /// Run only the scenarios whose names begin with NAME; the results are printed, not written
    #[arg(long, default_value = "", value_name = "NAME")]
    only: String,
    /// Simulate one of every N clusters, as a trial; the results are printed, not written
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    thin: u64,
    /// The seed of the first cluster; the others have the following ones
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The folder for results
    #[arg(long, default_value = "benches/record", value_name = "FOLDER")]
    out: PathBuf,
    /// The output: a line for each scenario, or the record at the end
    #[arg(long, value_enum, default_value_t = Print::Tables)]
    print: Print,
}

/// All results of a model.
#[derive(Debug, Serialize)]
struct Results {
    command: String,
    seed: u64,
    machine: Machine,
    model: Model,
    results: Vec<Counts>,
}

/// The results of a scenario.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct Counts {
    name: String,
    clusters: u64,
    cluster_years: f64,
    lost_disks: u64,
    /// Number of groups that were lost in all clusters.
    lost_groups: u64,
    /// Number of moments at which groups were lost. Groups with the same nodes are lost together.
    losses: u64,
    /// Number of clusters that lost a group.
    clusters_with_loss: u64,
    /// The 95 % interval of the share of clusters that lose a group.
    loss_share: [f64; 2],
    /// Cluster-years per loss; `None` if there was none.
    years_per_loss: Option<f64>,
    /// The bound 3/T of the losses per cluster-year (95 %), if there was none.
    most_losses_per_year: Option<f64>,
    /// The mean time in years until one given group is lost by the Markov chain, for a scenario
    /// that has one.
    chain_years_per_group: Option<f64>,
    /// Terabytes of pieces that repairs made, per cluster-year.
    made_tb_per_year: f64,
}

impl Durability {
    /// Runs the scenarios, and prints the results. Writes them unless only a part was run.
    pub fn run(&self) -> Result<()> {
        let model = Model::read(&self.file)?;
        let mut results = Vec::new();
        let chosen = model.scenario.iter().filter(|scenario| scenario.name.starts_with(&self.only));
        for scenario in chosen {
            let counts = self.simulate(scenario)?;
            if self.print == Print::Tables {
                say(line(&counts))?;
            }
            results.push(counts);
        }
        ensure!(!results.is_empty(), "no scenario's name begins with {:?}", self.only);
        let path = self.out.join(format!("{}.json", model.name));
        let command = std::env::args().collect::<Vec<_>>().join(" ");
        let (seed, machine) = (self.seed, Machine::this());
        let results = Results { command, seed, machine, model, results };
        if self.print == Print::Json {
            say(serde_json::to_string(&results)?)?;
        }
        if self.thin > 1 || !self.only.is_empty() {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(&results)?;
        std::fs::write(&path, text + "\n").with_context(|| path.display().to_string())?;
        match self.print {
            Print::Tables => say(format_args!("wrote {}", path.display())),
            Print::Json => Ok(()),
        }
    }

    /// Simulates the clusters of a scenario, on all processors.
    fn simulate(&self, scenario: &Scenario) -> Result<Counts> {
        let clusters = scenario.clusters.div_ceil(self.thin);
        let next = AtomicU64::new(0);
        let progress = progress(&scenario.name, clusters);
        let work = || -> Result<Vec<Outcome>> {
            let mut outcomes = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= clusters {
                    return Ok(outcomes);
                }
                outcomes.push(World::new(scenario, self.seed + number)?.run());
                progress.inc(1);
            }
        };
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let outcomes = thread::scope(|scope| -> Result<Vec<Outcome>> {
            let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
            let mut all = Vec::new();
            for worker in workers {
                all.extend(worker.join().map_err(|_| anyhow::anyhow!("a simulation panicked"))??);
            }
            Ok(all)
        })?;
        progress.finish_and_clear();
        Ok(count(scenario, &outcomes))
    }
}

fn progress(name: &str, clusters: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{prefix}: {pos} of {len} clusters, {eta} left");
    let bar = ProgressBar::new(clusters).with_prefix(name.to_owned());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn count(scenario: &Scenario, outcomes: &[Outcome]) -> Counts {
    let clusters = outcomes.len() as u64;
    // In a fixed order, so that a sum does not depend on the threads.
    let sum = |of: fn(&Outcome) -> f64| -> f64 {
        let mut all: Vec<f64> = outcomes.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all.iter().sum()
    };
    let cluster_years = sum(|outcome| outcome.years);
    let made = sum(|outcome| outcome.made_bytes);
    let losses: u64 = outcomes.iter().map(|outcome| outcome.losses).sum();
    let lost_groups: u64 = outcomes.iter().map(|outcome| outcome.lost_groups).sum();
    let with_loss = outcomes.iter().filter(|outcome| outcome.lost_groups > 0).count() as u64;
    let chain_years_per_group = (scenario.chain_hours > 0.0).then(|| {
        let repairs_per_year = 365.25 * 24.0 / scenario.chain_hours;
        let lost = scenario.lost_disks_per_year;
        chain::mean_time_to_loss(scenario.n, scenario.k, lost, repairs_per_year)
    });
    Counts {
        name: scenario.name.clone(),
        clusters,
        cluster_years,
        lost_disks: outcomes.iter().map(|outcome| outcome.lost_disks).sum(),
        lost_groups,
        clusters_with_loss: with_loss,
        loss_share: wilson(with_loss, clusters),
        losses,
        years_per_loss: (losses > 0).then(|| cluster_years / losses as f64),
        most_losses_per_year: (losses == 0).then(|| 3.0 / cluster_years),
        chain_years_per_group,
        made_tb_per_year: made / 1e12 / cluster_years,
    }
}

/// Returns the 95 % interval of a probability by Wilson's score, after `hits` of `all` trials.
fn wilson(hits: u64, all: u64) -> [f64; 2] {
    const Z: f64 = 1.959_964;
    let (hits, all) = (hits as f64, all as f64);
    let share = hits / all;
    let middle = share + Z * Z / (2.0 * all);
    let half = Z * (share * (1.0 - share) / all + Z * Z / (4.0 * all * all)).sqrt();
    let scale = 1.0 + Z * Z / all;
    [((middle - half) / scale).max(0.0), ((middle + half) / scale).min(1.0)]
}

fn line(counts: &Counts) -> String {
    let Counts { name, clusters, cluster_years, lost_disks, clusters_with_loss, .. } = counts;
    let [low, high] = counts.loss_share.map(|share| 100.0 * share);
    let years = match (counts.years_per_loss, counts.most_losses_per_year) {
        (Some(years), _) => format!("one loss in {years:.3e} years"),
        (_, Some(most)) => format!("below {most:.1e} losses a year"),
        _ => String::new(),
    };
    let chain = counts
        .chain_years_per_group
        .map_or_else(String::new, |years| format!(", a group by the chain in {years:.3e} years"));
    format!(
        "{name}: {cluster_years:.0} cluster-years, {lost_disks} disks lost; {clusters_with_loss} of {clusters} clusters lost data ({low:.2} to {high:.2} %), {years}{chain}; {:.2} TB a year made",
        counts.made_tb_per_year
    )
}
