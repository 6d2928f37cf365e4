//! `rapidraid-cluster`: runs an experiment file with real daemons on shaped links, and writes its
//! results as data, tables and pictures.

#![allow(clippy::disallowed_methods)] // a separate program that uses the machine's own clock, files and processes

mod arm;
mod conditions;
mod daemons;
mod durability;
mod experiment;
mod hops;
mod hosts;
mod model;
mod numbers;
mod picture;
mod play;
mod pump;
mod pump_disk;
mod pump_tls;
mod record;
mod relay;
mod report;
mod run;
mod stop;
mod text;
mod work;

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

use experiment::Experiment;
use hosts::netns;
use hosts::ssh::{self, Inventory};
use record::Record;
use work::WorkFolder;

const HELP: &str = "\
Examples:
  sudo rapidraid-cluster run cluster/experiments/one-shard.toml
  rapidraid-cluster run cluster/experiments/one-shard.toml --on loopback --unshaped --short
  rapidraid-cluster run cluster/experiments/one-shard.toml --on inventory.toml --unshaped
  rapidraid-cluster show docs/benchmarks/one-shard.json

The program `rapidraid` is $RAPIDRAID, or the one beside this program, or the one on the PATH.";

/// Start a cluster of rapidraid daemons, run an experiment, and remove everything again.
#[derive(Debug, Parser)]
#[command(name = "rapidraid-cluster", version, after_help = HELP, max_term_width = 110)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run an experiment and write NAME.json and NAME.svg
    Run(run::Run),
    /// Check an experiment file and print its points
    Check {
        /// The experiment, a TOML file
        file: PathBuf,
    },
    /// Print the tables of a record, and draw its picture again
    Show {
        /// The record that `run` wrote
        record: PathBuf,
    },
    /// Simulate clusters over years, and count what is lost
    Durability(durability::Durability),
    /// Receive a stream, send one, or both; `run` starts this on the hosts to measure the network
    /// alone
    #[command(hide = true)]
    Pump(pump::Pump),
    /// Join links that delay and lose frames; `run` starts this for such links
    #[command(hide = true)]
    Relay(relay::Relay),
    /// Remove what killed runs left behind on this machine, or on the machines of an inventory
    Clean {
        /// An inventory file: on its machines, remove the folders of runs that have no process left
        /// there
        #[arg(long, value_name = "INVENTORY", conflicts_with = "work")]
        on: Option<PathBuf>,
        /// The folder in which the runs kept their data [default: the system's folder for temporary
        /// files]
        #[arg(long)]
        work: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.command {
        Command::Run(options) => options.run(),
        Command::Check { file } => check(file),
        Command::Show { record } => show(record),
        Command::Durability(options) => options.run(),
        Command::Pump(pump) => pump.run().and_then(|took| say(serde_json::to_string(&took)?)),
        Command::Relay(relay) => relay.run(),
        Command::Clean { on: Some(inventory), .. } => clean_machines(inventory),
        Command::Clean { on: None, work } => clean(work.as_deref()),
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

/// Draws a record beside its file: the hops if it has traced runs, else the runs. Returns the path
/// of the picture.
fn draw(record: &Record, file: &Path) -> Result<PathBuf> {
    let drawn = file.with_extension("svg");
    let picture = hops::draw(record).unwrap_or_else(|| picture::draw(record));
    std::fs::write(&drawn, picture).with_context(|| format!("cannot write {}", drawn.display()))?;
    Ok(drawn)
}

fn clean(work: Option<&Path>) -> Result<()> {
    let removed = netns::remove_leftovers()?;
    let stay = work::remove_leftovers(&work_parent(work));
    say(format_args!("removed {removed} namespaces of runs that have ended"))?;
    ensure!(
        stay == 0,
        "{stay} folders were not removed: run this as their owner, with sudo for folders of root"
    );
    Ok(())
}

fn clean_machines(inventory: &Path) -> Result<()> {
    let work = WorkFolder::create(&work_parent(None))?;
    let stay = ssh::remove_leftovers(Inventory::read(inventory)?, work)?;
    say("removed the folders of runs that have no process left")?;
    ensure!(
        stay.is_empty(),
        "{}; a folder stays while processes of its run exist, or if it belongs to another user",
        stay.join("; ")
    );
    Ok(())
}

/// Writes text to stdout. It is no error if the reader has closed the pipe, as `head` does.
fn say(text: impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        said => said.context("cannot write to stdout"),
    }
}
