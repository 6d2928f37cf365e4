//! The steps of `cargo xtask test`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::cargo::{cargo, target_dir};
use crate::python::{self, Environment, Unable};
use crate::tally::{self, Runner, Tally};

/// The oldest cargo-deny (major and minor version) whose list of licences has all those in
/// `deny.toml`.
const OLDEST_DENY: (u32, u32) = (0, 18);

/// A run of the recipe, or of some of its steps: its counts and the steps that it skipped.
struct Run {
    root: PathBuf,
    tally: Tally,
    skipped: Vec<String>,
    start: Instant,
    output: Output,
}

/// The place for the output of a run.
enum Output {
    Terminal,
    /// Kept, because another run uses the terminal at the same time.
    Kept(Arc<Mutex<Vec<u8>>>),
}

impl Output {
    fn write(&self, mut stream: impl Write, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Terminal => stream.write_all(bytes),
            Self::Kept(kept) => {
                kept.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    fn line(&self, line: &str) {
        // The reader of this program's output may be gone; the steps go on all the same.
        let _ = self.write(std::io::stdout(), format!("{line}\n").as_bytes());
    }
}

/// Runs every step. The last line of output says how many tests passed and failed.
pub fn test() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let mut run = Run::new(root, Output::Terminal);
    let outcome = run.steps();
    println!("\n== summary ({:.0} s)", run.start.elapsed().as_secs_f64());
    for reason in &run.skipped {
        println!("skipped: {reason}");
    }
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAILED: {error:#}");
            // A step that fails without a failed test (format, lint, build) counts as a failure
            // too.
            run.tally.failed = run.tally.failed.max(1);
            ExitCode::FAILURE
        }
    };
    println!("{} passed, {} failed", run.tally.passed, run.tally.failed);
    code
}

impl Run {
    fn new(root: &Path, output: Output) -> Self {
        let (tally, skipped) = (Tally::default(), Vec::new());
        Self { root: root.to_owned(), tally, skipped, start: Instant::now(), output }
    }

    fn steps(&mut self) -> Result<()> {
        self.toolchain()?;
        if self.has(&["fmt", "--version"]) {
            self.cargo("fmt", &["fmt", "--all", "--check"], &[])?;
        } else {
            self.skip("fmt: rustfmt is not installed (rustup component add rustfmt)");
        }
        if self.has(&["clippy", "--version"]) {
            let lint =
                ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
            self.cargo("clippy", &lint, &[])?;
            // This test takes minutes, so it is not among all targets; it must compile all the
            // same.
            let long =
                ["clippy", "--locked", "--workspace", "--test", "sixteen", "--", "-D", "warnings"];
            self.cargo("clippy of what the suite leaves out", &long, &[])?;
        } else {
            self.skip("clippy: it is not installed (rustup component add clippy)");
        }
        let doc = ["doc", "--locked", "--workspace", "--no-deps", "--document-private-items"];
        self.cargo("docs", &doc, &[("RUSTDOCFLAGS", "-D warnings")])?;
        self.terraform()?;
        self.tests()?;
        self.python_and_experiments()?;
        self.cargo("doc tests", &["test", "--locked", "--workspace", "--doc"], &[])?;
        if self.has_benches() {
            self.cargo(
                "benches, each once",
                &["test", "--locked", "--workspace", "--bench", "*"],
                &[],
            )?;
        } else {
            self.skip("benches: there is no benches/*.rs");
        }
        self.deny()?;
        Ok(())
    }

    /// Checks the Terraform files for EC2: their format, and their validity if the provider has
    /// been fetched. This step fetches nothing.
    fn terraform(&mut self) -> Result<()> {
        let folder = self.root.join("cluster/ec2");
        let terraform = |arguments: &[&str]| {
            let mut command = Command::new("terraform");
            command.args(arguments).current_dir(&folder);
            command
        };
        if terraform(&["version"]).stdout(Stdio::null()).status().is_err() {
            self.skip("terraform fmt and validate: terraform is not installed");
            return Ok(());
        }
        let mut checks = vec![&["fmt", "-check", "-diff"][..], &["validate"]];
        if !folder.join(".terraform").exists() {
            self.skip("terraform validate: its provider was not fetched (`terraform init` in cluster/ec2 fetches it)");
            checks.truncate(1);
        }
        for check in checks {
            let line = format!("terraform {}", check.join(" "));
            println!("\n== {line} in cluster/ec2");
            let status =
                terraform(check).status().with_context(|| format!("cannot start `{line}`"))?;
            if !status.success() {
                bail!("{line} ({status}) in cluster/ec2");
            }
        }
        Ok(())
    }

    /// Checks that the compiler is at least the version in Cargo.toml. An older compiler would fail
    /// later with a less clear message.
    fn toolchain(&mut self) -> Result<()> {
        println!("== toolchain");
        let manifest = self.root.join("Cargo.toml");
        let text =
            std::fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
        let wanted = text
            .lines()
            .find_map(|line| line.strip_prefix("rust-version = "))
            .context("Cargo.toml: no `rust-version = \"...\"` line")?
            .trim_matches('"');
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let output = Command::new(&rustc).arg("--version").output().context("cannot run rustc")?;
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let found = version.split_whitespace().nth(1).unwrap_or_default();
        if numbers(found) < numbers(wanted) {
            bail!("{version} is older than the {wanted} that Cargo.toml asks for: rustup update");
        }
        println!("{version}; Cargo.toml asks for {wanted} or later");
        Ok(())
    }

    fn tests(&mut self) -> Result<()> {
        let quota = Command::new("mkfs.btrfs").arg("--version").stdout(Stdio::null()).status();
        if quota.is_err() {
            self.skip("a node beyond its quota: mkfs.btrfs is not installed (package btrfs-progs)");
        }
        if self.has(&["nextest", "--version"]) {
            let run =
                ["nextest", "run", "--locked", "--workspace", "--no-fail-fast", "--no-tests=pass"];
            self.cargo("tests", &run, &[])
        } else {
            self.skip("nextest: it is not installed, so `cargo test` ran the tests");
            let run = ["test", "--locked", "--workspace", "--no-fail-fast"];
            // Doc tests are a separate step.
            self.cargo("tests", &[&run[..], &["--lib", "--bins", "--tests"]].concat(), &[])
        }
    }

    /// Checks the Python package: the build of the extension without the part of the library for
    /// clusters, lints, types, and tests with the wheel.
    fn python(&mut self) -> Result<()> {
        println!("\n== the Python package's environment");
        let environment = match Environment::make(&self.root) {
            Ok(environment) => environment,
            Err(Unable::Missing(what)) => {
                self.skip(&format!("the Python package: {what}"));
                return Ok(());
            }
            Err(Unable::Failed(error)) => return Err(error),
        };
        println!("\n== the Python package's wheel");
        // The tests have built the program. Another selection of packages would build all its
        // dependencies once more.
        let wheel =
            environment.wheel_with(&target_dir(&self.root).join("debug/rapidraid"), "dev")?;
        environment.install(&wheel)?;
        let checks: [(&str, &[&str]); 3] = [
            ("ruff", &["check", "."]),
            ("ruff", &["format", "--check", "."]),
            ("mypy", &["rapidraid"]),
        ];
        for (program, arguments) in checks {
            println!("\n== {program} {} in python", arguments.join(" "));
            python::run(environment.command(program).args(arguments))?;
        }
        if !environment.has_torch {
            self.skip("the Python tests: torch cannot be installed here");
            return Ok(());
        }
        println!("\n== mypy of the benchmarks");
        python::run(environment.command("mypy").args(["benchmarks/trainers"]))?;
        self.counted("Python tests", Runner::Pytest, &mut environment.pytest("tests"))
    }

    /// Checks the Python package and runs the short experiments at the same time: experiments
    /// mostly wait for their links. Their output follows that of the Python package.
    fn python_and_experiments(&mut self) -> Result<()> {
        // Cargo unifies the features of all selected targets, with those of the development
        // dependencies. The tests are selected so that what they were built with is used again.
        let build = ["build", "--locked", "--workspace", "--bins", "--tests"];
        self.cargo("cluster programs", &build, &[])?;
        let kept = Arc::new(Mutex::new(Vec::new()));
        let mut beside = Run::new(&self.root, Output::Kept(kept.clone()));
        let (python, experiments) = thread::scope(|scope| {
            let experiments = scope.spawn(|| beside.experiments());
            (self.python(), experiments.join())
        });
        let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = std::io::stdout().write_all(&kept);
        self.tally += beside.tally;
        self.skipped.append(&mut beside.skipped);
        let experiments = experiments.unwrap_or_else(|_| bail!("the experiments panicked"));
        match (python, experiments) {
            (Err(python), Err(experiments)) => bail!("{python:#}\nFAILED: {experiments:#}"),
            (python, experiments) => python.and(experiments),
        }
    }

    /// Runs the experiments of `cluster/` with their `[short]` settings, to see whether they work:
    /// on loopback, and as root also on namespaces.
    fn experiments(&mut self) -> Result<()> {
        let out = self.root.join("target/experiments");
        std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
        let out = out.display().to_string();
        let everywhere = vec!["one-shard", "restore", "trace", "repair"];
        let mut hosts = vec![(vec!["--on", "loopback", "--unshaped"], everywhere.clone())];
        match namespaces() {
            // Transfers need links of their own.
            Ok(()) => {
                let mut all =
                    [everywhere, vec!["transport", "cpu", "time-at-risk", "lost-node"]].concat();
                match Path::new("/dev/net/tun").exists() {
                    true => all.push("far-nodes"),
                    false => self.skip("the experiment far-nodes: there is no /dev/net/tun"),
                }
                hosts.push((vec!["--on", "netns"], all));
            }
            Err(why) => self.skip(&format!("experiments on network namespaces: {why}")),
        }
        for (on, names) in hosts {
            for name in names {
                let file = format!("cluster/experiments/{name}.toml");
                let mut program =
                    Command::new(target_dir(&self.root).join("debug/rapidraid-cluster"));
                program.args(["run", &file]).args(&on).args(["--short", "--out", &out]);
                let title = format!("experiment {name} {}", on[1]);
                self.counted(&title, Runner::Cargo, program.current_dir(&self.root))?;
            }
        }
        Ok(())
    }

    fn has_benches(&self) -> bool {
        let entries = std::fs::read_dir(self.root.join("benches")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|e| e == "rs"))
    }

    /// Checks licences, bans and sources without a network, and advisories if their database can be
    /// fetched.
    fn deny(&mut self) -> Result<()> {
        let wanted = format!("cargo-deny {}.{} or later", OLDEST_DENY.0, OLDEST_DENY.1);
        if self.deny_version().is_none_or(|version| version < OLDEST_DENY) {
            self.skip(&format!(
                "licences, bans, sources and advisories: {wanted} is not installed"
            ));
            return Ok(());
        }
        let check = ["deny", "--offline", "--locked", "check"];
        let offline = [&check[..], &["licenses", "bans", "sources"]].concat();
        self.cargo("licences, bans and sources", &offline, &[])?;
        if !self.has(&["deny", "--locked", "fetch"]) {
            self.skip("advisories: their database cannot be fetched");
            return Ok(());
        }
        self.cargo("advisories", &[&check[..], &["advisories"]].concat(), &[])
    }

    /// Returns the major and minor version of cargo-deny, if it is installed.
    fn deny_version(&self) -> Option<(u32, u32)> {
        let output = self.command(&["deny", "--version"]).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut numbers = text.split_whitespace().last()?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    fn has(&self, arguments: &[&str]) -> bool {
        let quiet = self.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        quiet.is_ok_and(|status| status.success())
    }

    fn skip(&mut self, reason: &str) {
        self.output.line(&format!("\n== skipped: {reason}"));
        self.skipped.push(reason.to_owned());
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = cargo();
        command.args(arguments).current_dir(&self.root);
        command
    }

    /// Runs one step with cargo.
    fn cargo(&mut self, name: &str, arguments: &[&str], env: &[(&str, &str)]) -> Result<()> {
        let runner = match arguments.first() {
            Some(&"nextest") => Runner::Nextest,
            _ if arguments.contains(&"--bench") => Runner::Bench,
            _ => Runner::Cargo,
        };
        let mut command = self.command(arguments);
        self.counted(name, runner, command.envs(env.iter().copied()))
    }

    /// Runs one step. Its output is passed on as it arrives and searched for test counts.
    fn counted(&mut self, name: &str, runner: Runner, command: &mut Command) -> Result<()> {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        let line = words.join(" ");
        self.output.line(&format!("\n== {name}: {line}"));
        let begun = Instant::now();
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start `{line}`"))?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let counted = thread::scope(|scope| {
            let side = scope.spawn(|| pass_on(runner, err, std::io::stderr(), &self.output));
            let mut counted = pass_on(runner, out, std::io::stdout(), &self.output);
            counted += side.join().unwrap_or_default();
            counted
        });
        let status = child.wait().with_context(|| format!("cannot wait for `{line}`"))?;
        self.tally += counted;
        let seconds = begun.elapsed().as_secs_f64();
        if !status.success() {
            bail!("{name} ({status}) after {seconds:.1} s; run it alone with: {line}");
        }
        self.output.line(&format!("-- {name}: passed in {seconds:.1} s"));
        Ok(())
    }
}

/// Builds the wheel in release mode.
pub fn wheel() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let built = match Environment::make(root) {
        Ok(environment) => environment.wheel("release"),
        Err(Unable::Missing(what)) => Err(anyhow::anyhow!("the wheel cannot be built: {what}")),
        Err(Unable::Failed(error)) => Err(error),
    };
    match built {
        Ok(wheel) => {
            println!("{}", wheel.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cargo xtask wheel: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns Ok if network namespaces can be created here, and the reason otherwise.
fn namespaces() -> Result<(), &'static str> {
    let name = format!("rapidraid-probe-{}", std::process::id());
    let ip = |verb: &str| {
        let mut command = Command::new("ip");
        command.args(["netns", verb, &name]).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().map(|status| status.success())
    };
    let shaped = Command::new("tc").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
    match (ip("add"), shaped) {
        (Err(_), _) | (_, Err(_)) => Err("ip or tc is not installed (package iproute2)"),
        (Ok(false), _) => Err("this is not root, or may not make namespaces"),
        (Ok(true), Ok(_)) => {
            // If this fails, only an empty namespace remains.
            let _ = ip("del");
            Ok(())
        }
    }
}

/// Copies the output of a child line by line. Returns the counts of the tests in it.
fn pass_on(runner: Runner, from: Option<impl Read>, mut to: impl Write, output: &Output) -> Tally {
    let mut counted = Tally::default();
    let Some(from) = from else { return counted };
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        counted += tally::of_line(runner, &String::from_utf8_lossy(&line));
        // The reader of this program's output may be gone; the child must not block on a full pipe
        // because of that.
        let _ = output.write(&mut to, &[&line[..], b"\n"].concat());
    }
    counted
}

/// Parses `1.95.0-nightly` to numbers that can be compared: [1, 95, 0].
fn numbers(version: &str) -> Vec<u64> {
    let plain = version.split('-').next().unwrap_or_default();
    plain.split('.').map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert!(numbers("1.95.0") >= numbers("1.95"));
        assert!(numbers("1.100.0-nightly") > numbers("1.95"));
        assert!(numbers("1.9.0") < numbers("1.95"));
        assert!(numbers("") < numbers("1.95"));
    }
}
