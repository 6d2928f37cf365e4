//! `cargo xtask mutants`: removes each sync, mark, check and fence that `tests/mutants.txt` names,
//! one at a time, and expects its tests to fail. A mutant that survives shows a check that no test
//! needs.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{fmt, fs, thread};

use anyhow::{Context, Result, bail, ensure};

use crate::cargo::cargo;

const LIST: &str = "tests/mutants.txt";
/// Has a folder for each job, with a copy of the tree and a target folder of its own, which is built
/// again for each mutant.
const FOLDER: &str = "target/mutants";
const MAX_JOBS: usize = 64;

/// Exit codes of cargo and nextest. Any other one says that the tests did not run.
const BUILD_FAILED: i32 = 101;
const NEXTEST_FAILED: i32 = 100;
/// The build is known to succeed when the tests run.
const CARGO_TEST_FAILED: i32 = 101;

/// A change of the source, and the tests that must detect it.
#[derive(Debug, PartialEq, Eq)]
struct Mutant {
    name: String,
    file: String,
    /// The arguments of `cargo test`: the test binary, and a part of the tests' names.
    tests: Vec<String>,
    before: String,
    after: String,
}

impl Mutant {
    /// Returns an error unless the lines to remove are in the file exactly once.
    fn fits(&self, root: &Path) -> Result<()> {
        let source = fs::read_to_string(root.join(&self.file));
        let source = source.with_context(|| self.file.clone())?;
        let times = source.matches(&self.before).count();
        ensure!(times == 1, "{}: its lines are {times} times in {}", self.name, self.file);
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Caught,
    Survived,
    NotBuilt,
}

impl fmt::Display for Ended {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Ended::Caught => "caught",
            Ended::Survived => "SURVIVED",
            Ended::NotBuilt => "NOT BUILT",
        })
    }
}

/// The mutants to run.
#[derive(Debug, PartialEq, Eq)]
pub enum Chosen<'a> {
    All,
    /// The mutants whose name contains this.
    Named(&'a str),
    /// Part `.0` of `.1` equal parts, counted from 1.
    Part(usize, usize),
    /// The mutants of files that differ from this commit.
    Since(&'a str),
}

/// Parses the arguments of the recipe. Returns the chosen mutants and how many run at a time.
pub fn parse_arguments<'a>(arguments: &[&'a str]) -> Result<(Chosen<'a>, usize), String> {
    let (arguments, jobs) = match arguments {
        [rest @ .., "--jobs", jobs] => (rest, jobs.parse().ok()),
        _ => (arguments, Some(1)),
    };
    let jobs = jobs.filter(|jobs| (1..=MAX_JOBS).contains(jobs));
    let jobs = jobs.ok_or_else(|| format!("--jobs: give a number from 1 to {MAX_JOBS}"))?;
    let part = |text: &str| {
        let (part, of) = text.split_once('/')?;
        let (part, of) = (part.parse().ok()?, of.parse().ok()?);
        (1 <= part && part <= of).then_some(Chosen::Part(part, of))
    };
    let chosen = match arguments {
        [] => Chosen::All,
        ["--part", text] => part(text).ok_or_else(|| format!("--part {text}: give it as 2/4"))?,
        ["--since", commit] if !commit.starts_with('-') => Chosen::Since(commit),
        [name] if !name.starts_with('-') => Chosen::Named(name),
        _ => return Err(format!("mutants does not take {:?}", arguments.join(" "))),
    };
    Ok((chosen, jobs))
}

/// Runs the chosen mutants, `jobs` at a time.
pub fn run(chosen: &Chosen<'_>, jobs: usize) -> ExitCode {
    match try_run(chosen, jobs) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo xtask mutants: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn try_run(asked: &Chosen<'_>, jobs: usize) -> Result<bool> {
    let text = fs::read_to_string(LIST).with_context(|| format!("reading {LIST}"))?;
    let all = parse(&text)?;
    let changed = match asked {
        Chosen::Since(commit) => list_changed_files(commit)?,
        _ => String::new(),
    };
    let is_chosen = |at: usize, mutant: &Mutant| match asked {
        Chosen::All => true,
        Chosen::Named(name) => mutant.name.contains(name),
        Chosen::Since(_) => changed.lines().any(|file| file == mutant.file),
        Chosen::Part(part, of) => {
            (all.len() * (part - 1) / of..all.len() * part / of).contains(&at)
        }
    };
    let chosen: Vec<&Mutant> = all
        .iter()
        .enumerate()
        .filter(|(at, mutant)| is_chosen(*at, mutant))
        .map(|(_, mutant)| mutant)
        .collect();
    ensure!(!chosen.is_empty(), "no mutant of {LIST} is chosen by {asked:?}");
    chosen.iter().try_for_each(|mutant| mutant.fits(Path::new(".")))?;
    let folders = (1..=jobs.min(chosen.len())).map(|job| Path::new(FOLDER).join(job.to_string()));
    let folders: Vec<PathBuf> = folders.collect();
    folders.iter().try_for_each(|folder| copy_tree(&folder.join("tree")))?;
    let runner = nextest_or_test();
    let (next, ended_count, started) = (AtomicUsize::new(0), AtomicUsize::new(0), Instant::now());
    let run_some = |folder: &Path| {
        let mut survived = Vec::new();
        while let Some(mutant) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let ended = run_one(folder, mutant, runner);
            if ended.is_err() {
                // The other jobs begin no further mutant.
                next.store(chosen.len(), Ordering::Relaxed);
            }
            let ended = ended?;
            let (count, all) = (ended_count.fetch_add(1, Ordering::Relaxed) + 1, chosen.len());
            let seconds = started.elapsed().as_secs();
            println!("{count:>3} of {all}, {seconds:>5} s, {ended:<9} {}", mutant.name);
            if ended != Ended::Caught {
                survived.push(mutant.name.as_str());
            }
        }
        Ok::<_, anyhow::Error>(survived)
    };
    let survived = thread::scope(|scope| {
        let run_some = &run_some;
        let running = folders.iter().map(|folder| scope.spawn(move || run_some(folder)));
        let running: Vec<_> = running.collect();
        let ended = running
            .into_iter()
            .map(|job| job.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.collect::<Result<Vec<_>>>()
    })?
    .concat();
    println!("{} caught, {} not: {survived:?}", chosen.len() - survived.len(), survived.len());
    Ok(survived.is_empty())
}

/// Returns the names of the files that differ from a commit, line by line.
fn list_changed_files(commit: &str) -> Result<String> {
    let listed = Command::new("git").args(["diff", "--name-only", commit, "--"]).output();
    let listed = listed.context("git diff")?;
    let said = String::from_utf8_lossy(&listed.stderr);
    ensure!(listed.status.success(), "git diff --name-only {commit}: {said}");
    Ok(String::from_utf8_lossy(&listed.stdout).into_owned())
}

/// Returns the arguments of cargo that run tests: nextest, which stops at the first failed test, or
/// where it is not installed, `cargo test`.
fn nextest_or_test() -> &'static [&'static str] {
    let nextest = cargo().args(["nextest", "--version"]).stderr(Stdio::null()).output();
    match nextest.is_ok_and(|output| output.status.success()) {
        // A mutant whose filter matches no test counts as survived.
        true => &["nextest", "run", "--no-tests=pass"],
        false => &["test"],
    }
}

/// Changes the copy of the tree, runs the mutant's tests, and changes the copy back.
fn run_one(folder: &Path, mutant: &Mutant, runner: &[&str]) -> Result<Ended> {
    let path = folder.join("tree").join(&mutant.file);
    let source = fs::read_to_string(&path)?;
    fs::write(&path, source.replacen(&mutant.before, &mutant.after, 1))?;
    let ended = test(folder, mutant, runner);
    fs::write(&path, source)?;
    ended
}

/// Copies the files that git knows to a tree where they can be changed. Unchanged files outside
/// `src` keep their times, so that cargo does not build them again.
fn copy_tree(tree: &Path) -> Result<()> {
    let listed = Command::new("git").args(["ls-files", "-z"]).output().context("git ls-files")?;
    ensure!(listed.status.success(), "git ls-files failed");
    // A module that was moved since the last run would be in the copy twice.
    if tree.join("src").exists() {
        fs::remove_dir_all(tree.join("src"))?;
    }
    for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = std::str::from_utf8(name).context("a file name that is not UTF-8")?;
        let (from, to) = (Path::new(name), tree.join(name));
        let bytes = fs::read(from).with_context(|| name.to_owned())?;
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&to, bytes)?;
    }
    Ok(())
}

/// Builds and runs the tests of a mutant; with nextest, until one of them fails.
fn test(folder: &Path, mutant: &Mutant, runner: &[&str]) -> Result<Ended> {
    let target = fs::canonicalize(folder)?.join("target");
    let cargo = |arguments: &[&str]| {
        let mut command = cargo();
        command.current_dir(folder.join("tree")).env("CARGO_TARGET_DIR", &target).args(runner);
        // Each mutant is built once and run once, and the build takes most of the time.
        command.args(["--config", "profile.dev.package.rapidraid.opt-level=0"]).args(arguments);
        let output = command.output().context("running cargo")?;
        Ok::<_, anyhow::Error>((output.status.code(), output.stderr))
    };
    let unexpected = |code: Option<i32>, stderr: &[u8]| {
        let stderr = String::from_utf8_lossy(stderr);
        anyhow::anyhow!("{}: cargo ended with {code:?}:\n{stderr}", mutant.name)
    };
    let tests: Vec<&str> = mutant.tests.iter().map(String::as_str).collect();
    let binary = match tests.first() {
        Some(&"lib") => vec!["--package", "rapidraid", "--lib"],
        Some(binary) => vec!["--workspace", "--test", binary],
        None => bail!("{}: no test is named", mutant.name),
    };
    match cargo(&[&binary[..], &["--no-run"]].concat())? {
        (Some(0), _) => {}
        (Some(BUILD_FAILED), stderr) => {
            eprintln!("{}", String::from_utf8_lossy(&stderr));
            return Ok(Ended::NotBuilt);
        }
        (code, stderr) => return Err(unexpected(code, &stderr)),
    }
    match cargo(&[&binary[..], &tests[1..]].concat())? {
        (Some(0), _) => Ok(Ended::Survived),
        (Some(NEXTEST_FAILED | CARGO_TEST_FAILED), _) => Ok(Ended::Caught),
        (code, stderr) => Err(unexpected(code, &stderr)),
    }
}

/// Parses blocks of `name:`, `file:` and `tests:`, followed by the lines before (`-`) and after
/// (`+`) the change; `#` begins a comment.
fn parse(text: &str) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    for block in text.split("\n\n").map(str::trim).filter(|block| !block.is_empty()) {
        let (mut fields, mut before, mut after) = (Vec::new(), String::new(), String::new());
        for line in block.lines().filter(|line| !line.starts_with('#')) {
            if let Some(line) = line.strip_prefix('-') {
                before.push_str(line);
                before.push('\n');
            } else if let Some(line) = line.strip_prefix('+') {
                after.push_str(line);
                after.push('\n');
            } else {
                fields.push(line.split_once(": ").with_context(|| format!("{LIST}: {line}"))?);
            }
        }
        if fields.is_empty() && before.is_empty() {
            continue;
        }
        let field = |key: &str| {
            let found = fields.iter().find(|(name, _)| *name == key);
            found
                .map(|(_, value)| (*value).to_owned())
                .with_context(|| format!("no {key}: {block}"))
        };
        ensure!(!before.is_empty(), "{LIST}: nothing is taken out in\n{block}");
        let tests = field("tests")?.split(' ').map(str::to_owned).collect();
        mutants.push(Mutant { name: field("name")?, file: field("file")?, tests, before, after });
    }
    Ok(mutants)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change of a line that a mutant removes must change the mutant, too.
    #[test]
    fn every_mutant_fits_the_source() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let all = parse(&fs::read_to_string(root.join(LIST)).unwrap()).unwrap();
        assert!(all.len() > 90);
        all.iter().for_each(|mutant| mutant.fits(root).unwrap());
    }

    #[test]
    fn the_arguments_choose_mutants() {
        assert_eq!(parse_arguments(&[]), Ok((Chosen::All, 1)));
        assert_eq!(parse_arguments(&["sync"]), Ok((Chosen::Named("sync"), 1)));
        assert_eq!(parse_arguments(&["--part", "2/4"]), Ok((Chosen::Part(2, 4), 1)));
        assert_eq!(parse_arguments(&["--since", "v1"]), Ok((Chosen::Since("v1"), 1)));
        assert_eq!(parse_arguments(&["--jobs", "2"]), Ok((Chosen::All, 2)));
        assert_eq!(parse_arguments(&["sync", "--jobs", "2"]), Ok((Chosen::Named("sync"), 2)));
        for wrong in [
            &["--part", "5/4"][..],
            &["--part", "0/4"],
            &["--since"],
            &["--help"],
            &["a", "b"],
            &["--jobs", "0"],
            &["--jobs"],
        ] {
            parse_arguments(wrong).unwrap_err();
        }
    }

    #[test]
    fn a_block_is_a_change_and_its_tests() {
        let text = "# why\nname: no sync\nfile: src/a.rs\ntests: lib a::tests\n-    file.sync()?;\n+    // none\n\n# only a remark\n";
        let expected = Mutant {
            name: "no sync".into(),
            file: "src/a.rs".into(),
            tests: vec!["lib".into(), "a::tests".into()],
            before: "    file.sync()?;\n".into(),
            after: "    // none\n".into(),
        };
        assert_eq!(parse(text).unwrap(), [expected]);
        parse("name: x\nfile: y\n-z").unwrap_err();
    }
}
