//! `rapidraid-cluster run`: runs one experiment point by point, from its file to its record, tables
//! and picture.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use crate::arm::Kind;
use crate::conditions::Conditions;
use crate::experiment::Experiment;
use crate::hosts::Hosts;
use crate::hosts::loopback::Loopback;
use crate::hosts::netns::{self, Namespaces};
use crate::hosts::ssh::{Inventory, Machines};
use crate::record::{Machine, PointRecord, Record, SCHEMA};
use crate::stop::{Stop, checked};
use crate::work::WorkFolder;
use crate::{daemons, draw, play, report, say, work_parent};

/// Maximum time of a command that only asks.
const ASK_LIMIT: Duration = Duration::from_secs(60);

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub struct Run {
    /// The experiment, a TOML file
    file: PathBuf,
    /// The hosts of the daemons: `netns` (namespaces of this machine, needs root), `loopback`, or
    /// an inventory file (ssh)
    #[arg(long, default_value = "netns", value_name = "HOSTS")]
    on: String,
    /// Leave links unshaped whatever rates the file has; not for files with slow nodes
    #[arg(long)]
    unshaped: bool,
    /// Use the table `short` of the file: a trial of whether the experiment works, not a
    /// measurement
    #[arg(long)]
    short: bool,
    /// Resume an earlier run of this file from NAME.part.json; its complete rounds are kept
    #[arg(long)]
    resume: bool,
    /// The folder for results
    #[arg(long, default_value = "docs/benchmarks", value_name = "FOLDER")]
    out: PathBuf,
    /// The folder for the daemons' data; a new folder is created in it and removed at the end
    /// [default: the system's folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,
    /// The output at the end
    #[arg(long, value_enum, default_value_t = Print::Tables)]
    print: Print,
}

/// The output of a command at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Print {
    /// Tables for people
    Tables,
    /// The record as JSON
    Json,
}

impl Run {
    /// Runs the experiment. The results of an earlier run stay until this one has ended.
    pub fn run(&self) -> Result<()> {
        let experiment = Experiment::read(&self.file, self.short)?;
        let mut conditions = experiment.conditions(self.short)?;
        ensure!(
            self.out.is_dir(),
            "{} is no folder: make it, or name another with --out",
            self.out.display()
        );
        self.check_hosts(&experiment, &conditions)?;
        if self.unshaped {
            conditions = conditions.into_iter().map(Conditions::unshaped).collect();
        }
        let stop = Stop::on_signals()?;
        let mut record = Record {
            schema: SCHEMA,
            experiment,
            command: command(std::env::args()),
            date: utc_date(),
            program: local_version(&stop)?,
            commit: commit(&self.file, &stop),
            machine: Machine::this(),
            links: serde_json::Value::Null,
            resumed: Vec::new(),
            points: Vec::new(),
        };
        let ending = if self.short { "short.json" } else { "json" };
        let path = self.out.join(format!("{}.{ending}", record.experiment.name));
        let part = path.with_extension("part.json");
        if self.resume {
            let earlier = Record::read(&part).context("cannot resume an earlier run")?;
            record = record.resume(earlier).with_context(|| part.display().to_string())?;
        }
        if let Err(error) = self.play(&mut record, &conditions, &part, &stop) {
            return match record.points.is_empty() {
                true => Err(error),
                false => Err(error.context(format!(
                    "the experiment did not end; {0} has the runs until then, and `show {0}` prints them",
                    part.display()
                ))),
            };
        }
        std::fs::rename(&part, &path).with_context(|| {
            format!("all runs are in {}, but it cannot become {}", part.display(), path.display())
        })?;
        let drawn = draw(&record, &path)?;
        match self.print {
            Print::Tables => {
                say(format_args!("{}\n\n{}", record.experiment.question, report::tables(&record)))?;
                say(format_args!(
                    "{} has every run, {} the picture",
                    path.display(),
                    drawn.display()
                ))?;
            }
            Print::Json => say(serde_json::to_string(&record)?)?,
        }
        Ok(())
    }

    /// Refuses experiments that these hosts cannot run, before the first cluster is started.
    fn check_hosts(&self, experiment: &Experiment, all: &[Conditions]) -> Result<()> {
        let needs = |kind: fn(Kind) -> bool| experiment.arms.iter().any(|arm| kind(arm.kind()));
        ensure!(
            self.on != "loopback" || !needs(|kind| matches!(kind, Kind::Transfer(_))),
            "transfers are measured between hosts of their own: use --on netns, or an inventory"
        );
        ensure!(
            self.on == "netns" || !needs(|kind| matches!(kind, Kind::SeaweedFs)),
            "SeaweedFS is measured on namespaces of this machine: use --on netns"
        );
        if let Some(at) = all.iter().find(|at| at.slow_nodes > 0) {
            ensure!(
                !self.unshaped && self.on == "netns",
                "at the point {:?} some nodes are slow, which only shaped links make them: use --on netns \
                 without --unshaped, or a file without slow_nodes",
                at.label
            );
        }
        if !["netns", "loopback"].contains(&&*self.on) {
            let inventory = Inventory::read(Path::new(&self.on))?;
            for at in all {
                inventory
                    .has_room(at.nodes as usize)
                    .with_context(|| format!("the point {:?} cannot be played", at.label))?;
            }
        }
        Ok(())
    }

    fn play(
        &self,
        record: &mut Record,
        conditions: &[Conditions],
        part: &Path,
        stop: &Stop,
    ) -> Result<()> {
        let experiment = record.experiment.clone();
        let rounds: usize = conditions.iter().map(|at| at.rounds as usize).sum();
        let bar = progress((rounds * experiment.arms.len()) as u64);
        let mut earlier = std::mem::take(&mut record.points).into_iter().peekable();
        for at in conditions {
            let begun = earlier.next_if(|point| point.label == at.label);
            let played = begun.as_ref().map_or(0, |point| point.runs.len());
            let conditions = serde_json::to_value(at)?;
            ensure!(
                begun.as_ref().is_none_or(|point| point.conditions == conditions),
                "the point {:?} was begun under other conditions: run it without --resume",
                at.label
            );
            bar.inc(played as u64);
            let before = record.points.len();
            record.points.extend(begun);
            if played == at.rounds as usize * experiment.arms.len() {
                continue;
            }
            bar.set_message(format!("{}: starting {} daemons", at.label, at.nodes));
            let (hosts, local) = self.bring_up(at)?;
            let (program, machine) = first_host(&*hosts, stop)?;
            record.is_played_on(hosts.describe(), program, machine)?;
            let begun = record.points.get(before).map_or_else(Vec::new, |point| point.runs.clone());
            // The record is written after every run, so that a long experiment that fails late
            // still has results.
            let mut told = |point: &PointRecord| {
                bar.inc(1);
                if let Some(run) = point.runs.last() {
                    let arm = run.arm.word();
                    bar.set_message(format!("{}: {arm} {:.2} s", at.label, run.seconds));
                }
                record.points.truncate(before);
                record.points.push(point.clone());
                record.write(part)
            };
            play::point(&*hosts, &local, &experiment, at, begun, stop, &mut told)
                .with_context(|| format!("at the point {:?}", at.label))?;
        }
        bar.finish_and_clear();
        Ok(())
    }

    fn bring_up(&self, at: &Conditions) -> Result<(Box<dyn Hosts>, PathBuf)> {
        let nodes = at.nodes as usize;
        if self.on == "netns" {
            // Processes of a killed run may still write into its folder, so they are removed first.
            netns::check()?;
            netns::remove_leftovers()?;
        }
        let work = WorkFolder::create(&work_parent(self.work.as_deref()))?;
        let local = work.path().to_owned();
        let program = daemons::local_program().to_string_lossy().into_owned();
        let hosts: Box<dyn Hosts> = match self.on.as_str() {
            "netns" => Box::new(Namespaces::up(nodes, at.relayed, program, work)?),
            "loopback" => Box::new(Loopback::up(nodes, program, work)?),
            file => Box::new(Machines::up(nodes, Inventory::read(Path::new(file))?, work)?),
        };
        Ok((hosts, local))
    }
}

/// Returns the output of `rapidraid --version` on this machine, which creates the cluster's files.
fn local_version(stop: &Stop) -> Result<String> {
    let program = daemons::local_program();
    let mut command = std::process::Command::new(&program);
    command.arg("--version");
    let output = stop.run(command, ASK_LIMIT, || Ok(())).with_context(|| {
        format!("{}: cargo build --release, or set RAPIDRAID", program.display())
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the version of the program on the first host, and the machine with the disk that holds
/// the data.
fn first_host(hosts: &dyn Hosts, stop: &Stop) -> Result<(String, Machine)> {
    let ask = |program: &str, arguments: &[&str]| {
        let said = checked(stop, hosts.command(0, program, arguments), ASK_LIMIT, || Ok(()))?;
        anyhow::Ok(String::from_utf8_lossy(&said).trim().to_owned())
    };
    let version = ask(hosts.program(), &["--version"])?;
    let machine = Machine::parse(&ask("sh", &["-c", Machine::ASKED])?);
    let disk = ask("stat", &["-f", "-c", "%T", &hosts.folder().to_string_lossy()])?;
    Ok((version, Machine { disk, ..machine }))
}

/// Returns the commit of the repository that contains `file`, with `+` if its sources differ, or
/// `None` if git knows none.
fn commit(file: &Path, stop: &Stop) -> Option<String> {
    let folder = std::path::absolute(file).ok()?.parent()?.to_owned();
    let git = |arguments: &[&str]| {
        let mut git = std::process::Command::new("git");
        git.arg("--no-optional-locks").arg("-C").arg(&folder).args(arguments);
        let said = checked(stop, git, ASK_LIMIT, || Ok(())).ok()?;
        Some(String::from_utf8_lossy(&said).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    // The results that experiments themselves write into the repository do not count as changes.
    let sources =
        ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs"];
    let changed = git(&sources)?;
    Some(if changed.is_empty() { commit } else { commit + "+" })
}

/// Returns a progress bar on stderr, which is hidden unless stderr is a terminal.
fn progress(runs: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {eta} left  {msg}");
    ProgressBar::new(runs).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Returns the date in UTC, such as `2026-11-22`.
fn utc_date() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut date = rapidraid::units::date(since.map_or(0, |since| since.as_secs()));
    date.truncate(10);
    date
}

/// Returns the command as it was called, without the folder of the program.
fn command(words: impl Iterator<Item = String>) -> String {
    let mut words: Vec<String> = words.collect();
    if let Some(program) = words.first_mut() {
        *program = program.rsplit('/').next().unwrap_or_default().to_owned();
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(name: &str, on: &str, unshaped: bool) -> Option<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments");
        let file = folder.join(format!("{name}.toml"));
        let experiment = Experiment::read(&file, false).unwrap();
        let run = Run {
            file,
            on: on.to_owned(),
            unshaped,
            short: false,
            resume: false,
            out: PathBuf::new(),
            work: None,
            print: Print::Tables,
        };
        let conditions = experiment.conditions(false).unwrap();
        run.check_hosts(&experiment, &conditions).err().map(|error| format!("{error:#}"))
    }

    #[test]
    fn slow_nodes_need_shaped_links() {
        for name in ["slow-nodes", "far-nodes"] {
            assert_eq!(refused(name, "netns", false), None);
            for (on, unshaped) in [("netns", true), ("loopback", true), ("loopback", false)] {
                let why = refused(name, on, unshaped).unwrap();
                assert!(why.contains("slow") && why.contains("--on netns"), "{why}");
            }
        }
        assert_eq!(refused("one-shard", "loopback", true), None);
    }

    #[test]
    fn an_inventory_has_hosts_for_every_point() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("inventory.toml");
        let host = "[[host]]\nssh = \"h\"\naddress = \"10.0.0.1\"\n";
        let write = |hosts: usize| {
            let text = format!("user = \"u\"\nfolder = \"/srv\"\n{}", host.repeat(hosts));
            std::fs::write(&file, text).unwrap();
            refused("scaling", file.to_str().unwrap(), true)
        };
        let why = write(20).unwrap();
        assert!(why.contains("(20,16)") && why.contains("need 21"), "{why}");
        assert_eq!(write(21), None);
    }

    #[test]
    fn unshaped_conditions_have_no_rates() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments/one-shard.toml");
        let conditions = Experiment::read(&file, false).unwrap().conditions(false).unwrap();
        assert!(conditions.iter().all(|at| at.rate_mbit.is_some()));
        for at in conditions.into_iter().map(Conditions::unshaped) {
            assert_eq!((at.rates_in(0)[0], at.client_rate_mbit), (None, None));
        }
    }

    #[test]
    fn the_commit_is_that_of_the_files_repository() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.toml");
        std::fs::write(&file, "a").unwrap();
        let stop = Stop::default();
        let found = || commit(&file, &stop);
        assert_eq!(found(), None);
        let git = |arguments: &[&str]| {
            let mut git = std::process::Command::new("git");
            git.arg("-C").arg(folder.path()).args(["-c", "user.name=a", "-c", "user.email=a@b.c"]);
            git.args(arguments)
                .stdout(std::process::Stdio::null())
                .status()
                .is_ok_and(|s| s.success())
        };
        if !git(&["init", "-q"]) {
            return;
        }
        assert!(git(&["add", "a.toml"]) && git(&["commit", "-q", "-m", "a"]));
        let clean = found().unwrap();
        assert!(clean.len() >= 4 && clean.bytes().all(|byte| byte.is_ascii_hexdigit()), "{clean}");
        std::fs::write(&file, "b").unwrap();
        assert_eq!(found().unwrap(), clean + "+");
    }
}
