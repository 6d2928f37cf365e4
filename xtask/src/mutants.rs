//! `cargo xtask mutants`: removes each sync, mark, check and fence that `tests/mutants.txt` names,
//! one at a time, and expects its tests to fail. A mutant that survives shows a check that no test
//! needs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::cargo::cargo;

const LIST: &str = "tests/mutants.txt";
/// The folder with a copy of the tree and a target folder of its own, which is built again for each
/// mutant.
const FOLDER: &str = "target/mutants";

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

enum Ended {
    Caught,
    Survived,
    NotBuilt,
}

/// The mutants to run.
#[derive(Debug, PartialEq, Eq)]
pub enum Chosen<'a> {
    All,
    /// The mutants whose name contains this.
    Named(&'a str),
    /// Part `.0` of `.1` equal parts, counted from 1.
    Part(usize, usize),
}

/// Parses the arguments of the recipe.
pub fn parse_arguments<'a>(arguments: &[&'a str]) -> Result<Chosen<'a>, String> {
    let part = |text: &str| {
        let (part, of) = text.split_once('/')?;
        let (part, of) = (part.parse().ok()?, of.parse().ok()?);
        (1 <= part && part <= of).then_some(Chosen::Part(part, of))
    };
    match arguments {
        [] => Ok(Chosen::All),
        ["--part", text] => part(text).ok_or_else(|| format!("--part {text}: give it as 2/4")),
        [name] if !name.starts_with('-') => Ok(Chosen::Named(name)),
        _ => Err(format!("mutants does not take {:?}", arguments.join(" "))),
    }
}

/// Runs the chosen mutants.
pub fn run(chosen: &Chosen<'_>) -> ExitCode {
    match try_run(chosen) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo xtask mutants: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn try_run(asked: &Chosen<'_>) -> Result<bool> {
    let text = fs::read_to_string(LIST).with_context(|| format!("reading {LIST}"))?;
    let all = parse(&text)?;
    let is_chosen = |at: usize, mutant: &Mutant| match asked {
        Chosen::All => true,
        Chosen::Named(name) => mutant.name.contains(name),
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
    // nextest stops at the first failed test. `--no-tests=pass`: a mutant whose filter matches no
    // test counts as survived.
    let nextest = cargo().args(["nextest", "--version"]).stderr(Stdio::null()).output();
    let runner = match nextest.is_ok_and(|output| output.status.success()) {
        true => &["nextest", "run", "--no-tests=pass"][..],
        false => &["test"],
    };
    chosen.iter().try_for_each(|mutant| mutant.fits(Path::new(".")))?;
    let tree = copy_tree()?;
    let (mut survived, started) = (Vec::new(), Instant::now());
    for (at, mutant) in chosen.iter().enumerate() {
        let path = tree.join(&mutant.file);
        let source = fs::read_to_string(&path)?;
        fs::write(&path, source.replacen(&mutant.before, &mutant.after, 1))?;
        let ended = test(&tree, mutant, runner);
        fs::write(&path, source)?;
        let word = match ended? {
            Ended::Caught => "caught",
            Ended::Survived => "SURVIVED",
            Ended::NotBuilt => "NOT BUILT",
        };
        println!(
            "{:>3}/{} {word:<9} {} ({} s)",
            at + 1,
            chosen.len(),
            mutant.name,
            started.elapsed().as_secs()
        );
        if word != "caught" {
            survived.push(mutant.name.as_str());
        }
    }
    println!("{} caught, {} not: {survived:?}", chosen.len() - survived.len(), survived.len());
    Ok(survived.is_empty())
}

/// Copies the files that git knows to a tree where they can be changed. Unchanged files outside
/// `src` keep their times, so that cargo does not build them again. Returns the path of the copy.
fn copy_tree() -> Result<PathBuf> {
    let tree = Path::new(FOLDER).join("tree");
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
    Ok(tree)
}

/// Builds and runs the tests of a mutant; with nextest, until one of them fails.
fn test(tree: &Path, mutant: &Mutant, runner: &[&str]) -> Result<Ended> {
    let target = fs::canonicalize(FOLDER)?.join("target");
    let cargo = |arguments: &[&str]| {
        let mut command = cargo();
        command.current_dir(tree).env("CARGO_TARGET_DIR", &target).args(runner);
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
        assert_eq!(parse_arguments(&[]), Ok(Chosen::All));
        assert_eq!(parse_arguments(&["sync"]), Ok(Chosen::Named("sync")));
        assert_eq!(parse_arguments(&["--part", "2/4"]), Ok(Chosen::Part(2, 4)));
        for wrong in [&["--part", "5/4"][..], &["--part", "0/4"], &["--help"], &["a", "b"]] {
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
