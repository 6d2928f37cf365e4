//! `rapidraid-cluster`: real daemons on shaped links, one experiment file, results as data, tables and pictures.

#![allow(clippy::disallowed_methods)] // a program of its own on the machine's own clock, files and processes

mod arm;
mod daemons;
mod experiment;
mod hops;
mod hosts;
mod model;
mod numbers;
mod picture;
mod play;
mod pump;
mod pump_tls;
mod record;
mod relay;
mod report;
mod stop;
mod text;
mod work;

use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};

use arm::Kind;
use experiment::{Conditions, Experiment};
use hosts::Hosts;
use hosts::loopback::Loopback;
use hosts::netns::{self, Namespaces};
use hosts::ssh::{Inventory, Machines};
use record::{Machine, Record, SCHEMA};
use stop::Stop;
use work::WorkFolder;

const HELP: &str = "\
Examples:
  sudo rapidraid-cluster run cluster/experiments/one-shard.toml
  rapidraid-cluster run cluster/experiments/one-shard.toml --on loopback --unshaped --short
  rapidraid-cluster run cluster/experiments/one-shard.toml --on inventory.toml --unshaped
  rapidraid-cluster show docs/benchmarks/one-shard.json

The program `rapidraid` is the one beside this one, or $RAPIDRAID, or the one on the PATH.";

/// Brings up a cluster of rapidraid daemons, runs an experiment, and takes everything down again.
#[derive(Debug, Parser)]
#[command(name = "rapidraid-cluster", version, after_help = HELP, max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run an experiment and write NAME.json and NAME.svg
    Run(Run),
    /// Check an experiment file and say what it would do
    Check {
        /// The experiment.
        file: PathBuf,
    },
    /// Print the tables of a record, and draw its picture again
    Show {
        /// What `run` wrote.
        record: PathBuf,
    },
    /// Receive a stream, send one, or both: what `run` starts on the hosts to measure the network alone
    #[command(hide = true)]
    Pump(pump::Pump),
    /// Links that deliver late and lose frames: what `run` starts for them
    #[command(hide = true)]
    Relay(relay::Relay),
    /// Remove what runs that were killed have left on this machine
    Clean {
        /// Where they had their folders [default: the system's folder for temporary files]
        #[arg(long)]
        work: Option<PathBuf>,
    },
}

#[derive(Debug, clap::Args)]
struct Run {
    /// The experiment, a TOML file
    file: PathBuf,
    /// Where daemons run: `netns` (namespaces of this machine, needs root), `loopback`, or an inventory file (ssh)
    #[arg(long, default_value = "netns", value_name = "HOSTS")]
    on: String,
    /// Leave links as they are, whatever the file says
    #[arg(long)]
    unshaped: bool,
    /// As the table `short` of the file says: a look at whether it works, not a measurement
    #[arg(long)]
    short: bool,
    /// Where results go
    #[arg(long, default_value = "docs/benchmarks", value_name = "FOLDER")]
    out: PathBuf,
    /// Where daemons keep their data; a new folder is made in it, and removed [default: the system's folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,
    /// What to print at the end
    #[arg(long, value_enum, default_value_t = Print::Tables)]
    print: Print,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Print {
    /// Tables for people
    Tables,
    /// The record, as JSON
    Json,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.command {
        Command::Run(options) => run(options),
        Command::Check { file } => check(file),
        Command::Show { record } => show(record),
        Command::Pump(pump) => pump.run().and_then(|took| say(serde_json::to_string(&took)?)),
        Command::Relay(relay) => relay.run(),
        Command::Clean { work } => clean(work.as_deref()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rapidraid-cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work_parent(given: Option<&Path>) -> PathBuf {
    given.map_or_else(std::env::temp_dir, Path::to_owned)
}

/// Refuses what these hosts cannot play, before the first cluster is up.
fn check_hosts(options: &Run, experiment: &Experiment, all: &[Conditions]) -> Result<()> {
    let needs = |kind: fn(Kind) -> bool| experiment.arms.iter().any(|arm| kind(arm.kind()));
    ensure!(
        options.on != "loopback" || !needs(|kind| matches!(kind, Kind::Transfer(_))),
        "transfers are measured between hosts of their own: use --on netns, or an inventory"
    );
    ensure!(
        options.on == "netns" || !needs(|kind| matches!(kind, Kind::SeaweedFs)),
        "SeaweedFS is measured on namespaces of this machine: use --on netns"
    );
    let is_relayed = !options.unshaped && all.iter().any(|at| at.relayed.is_some());
    ensure!(
        options.on == "netns" || !is_relayed,
        "links that deliver late or lose packets are made on namespaces only: use --on netns, or --unshaped"
    );
    Ok(())
}

fn bring_up(options: &Run, at: &Conditions) -> Result<(Box<dyn Hosts>, PathBuf)> {
    let nodes = at.nodes as usize;
    let relayed = at.relayed.filter(|_| !options.unshaped);
    if options.on == "netns" {
        // What a killed run left may still write into its folder.
        netns::check()?;
        netns::remove_leftovers()?;
    }
    let work = WorkFolder::create(&work_parent(options.work.as_deref()))?;
    let local = work.path().to_owned();
    let program = daemons::local_program().to_string_lossy().into_owned();
    let hosts: Box<dyn Hosts> = match options.on.as_str() {
        "netns" => Box::new(Namespaces::up(nodes, relayed, program, work)?),
        "loopback" => Box::new(Loopback::up(nodes, program, work)?),
        file => Box::new(Machines::up(nodes, Inventory::read(Path::new(file))?, work)?),
    };
    Ok((hosts, local))
}

fn run(options: &Run) -> Result<()> {
    let experiment = Experiment::read(&options.file, options.short)?;
    let conditions = experiment.conditions(options.short)?;
    ensure!(
        options.out.is_dir(),
        "{} is no folder: make it, or name another with --out",
        options.out.display()
    );
    check_hosts(options, &experiment, &conditions)?;
    let stop = Stop::on_signals()?;
    let program = version(&stop)?;
    let mut record = Record {
        schema: SCHEMA,
        experiment: experiment.clone(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        date: utc_date(),
        program,
        machine: Machine::this(),
        links: serde_json::Value::Null,
        points: Vec::new(),
    };
    let rounds: usize = conditions.iter().map(|at| at.rounds as usize).sum();
    let runs = rounds * experiment.arms.len();
    let bar = progress(runs as u64);
    let ending = if options.short { "short.json" } else { "json" };
    let path = options.out.join(format!("{}.{ending}", experiment.name));
    for at in &conditions {
        bar.set_message(format!("{}: starting {} daemons", at.label, at.nodes));
        let (mut hosts, local) = bring_up(options, at)?;
        record.links = hosts.describe();
        let before = record.points.len();
        // After every run: a long experiment that fails late has shown something.
        let mut told = |point: &record::PointRecord| {
            bar.inc(1);
            if let Some(run) = point.runs.last() {
                bar.set_message(format!("{}: {} {:.2} s", at.label, run.arm.word(), run.seconds));
            }
            record.points.truncate(before);
            record.points.push(point.clone());
            record.write(&path)
        };
        let is_shaped = !options.unshaped;
        play::point(&mut *hosts, &local, &experiment, at, is_shaped, &stop, &mut told)
            .with_context(|| format!("at the point {:?}", at.label))?;
    }
    bar.finish_and_clear();
    let drawn = draw(&record, &path)?;
    match options.print {
        Print::Tables => {
            say(format_args!("{}\n\n{}", experiment.question, report::tables(&record)))?;
            say(format_args!("{} has every run, {} the picture", path.display(), drawn.display()))?;
        }
        Print::Json => say(serde_json::to_string(&record)?)?,
    }
    Ok(())
}

fn check(file: &Path) -> Result<()> {
    let experiment = Experiment::read(file, false)?;
    say(format_args!("{}: {}", experiment.name, experiment.question))?;
    let arms: Vec<&str> = experiment.arms.iter().map(|arm| arm.word()).collect();
    for at in experiment.conditions(false)? {
        let rate = at.rate_mbit.map_or("unshaped".to_owned(), |rate| format!("{rate} Mbit/s"));
        say(format_args!(
            "  {}: {} rounds of {} on {} nodes, ({},{}), {} shards of one stripe, blocks of {} bytes, {rate}",
            at.label,
            at.rounds,
            arms.join(", "),
            at.nodes,
            at.n,
            at.k,
            at.shards,
            at.block_bytes
        ))?;
    }
    Ok(())
}

fn show(file: &Path) -> Result<()> {
    let record = Record::read(file)?;
    say(format_args!("{}\n\n{}", record.experiment.question, report::tables(&record)))?;
    draw(&record, file)?;
    Ok(())
}

/// Draws a record beside its file: the runs, or the hops of the traced ones.
fn draw(record: &Record, file: &Path) -> Result<PathBuf> {
    let drawn = file.with_extension("svg");
    let picture = hops::draw(record).unwrap_or_else(|| picture::draw(record));
    std::fs::write(&drawn, picture).with_context(|| format!("cannot write {}", drawn.display()))?;
    Ok(drawn)
}

fn clean(work: Option<&Path>) -> Result<()> {
    let removed = netns::remove_leftovers()?;
    work::remove_leftovers(&work_parent(work))?;
    say(format_args!("removed {removed} namespaces of runs that are no more"))?;
    Ok(())
}

fn version(stop: &Stop) -> Result<String> {
    let program = daemons::local_program();
    let mut command = std::process::Command::new(&program);
    command.arg("--version");
    let output =
        stop.run(command, std::time::Duration::from_secs(10), || Ok(())).with_context(|| {
            format!("{}: cargo build --release, or set RAPIDRAID", program.display())
        })?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A line, or some, on stdout. A reader that has left, as `head` does, is no error.
fn say(text: impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        said => said.context("cannot write to stdout"),
    }
}

/// On a terminal only, on stderr.
fn progress(runs: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {eta} left  {msg}");
    ProgressBar::new(runs).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// `2026-11-22`.
fn utc_date() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut date = rapidraid::units::date(since.map_or(0, |since| since.as_secs()));
    date.truncate(10);
    date
}
