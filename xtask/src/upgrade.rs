//! `cargo xtask upgrade`: builds an older program from the repository's history and tests a rolling
//! upgrade from it and back.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

/// The default commit of the older program.
const FROM: &str = "ac02641";
/// The folder of the older source and its build.
const FOLDER: &str = "target/upgrade";

/// Tests the upgrade from `commit`, or from [`FROM`].
pub fn run(commit: Option<&str>) -> ExitCode {
    match try_run(commit.unwrap_or(FROM)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask upgrade: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(commit: &str) -> Result<()> {
    let found = Command::new("git").args(["rev-parse", "--verify", commit]).output()?;
    ensure!(found.status.success(), "{commit} is not in this clone: fetch the whole history");
    let commit = String::from_utf8(found.stdout)?;
    let source = format!("{FOLDER}/{}", commit.trim());
    if !Path::new(&source).exists() {
        let (archive, aside) = (format!("{FOLDER}/source.tar"), format!("{FOLDER}/source"));
        if Path::new(&aside).exists() {
            std::fs::remove_dir_all(&aside)?;
        }
        std::fs::create_dir_all(&aside)?;
        call(Command::new("git").args(["archive", "--output", &archive, commit.trim()]))?;
        call(Command::new("tar").args(["-xf", &archive, "-C", &aside]))?;
        std::fs::rename(&aside, &source)?;
    }
    let target = std::env::current_dir()?.join(FOLDER).join("build");
    let mut build = Command::new("cargo");
    build.args(["build", "--locked", "--bin", "rapidraid"]).current_dir(&source);
    call(build.env("CARGO_TARGET_DIR", &target))?;
    let older = target.join("debug/rapidraid");
    let mut test = Command::new("cargo");
    test.args(["test", "--locked", "--test", "cli", "upgrade", "--", "--nocapture"]);
    call(test.env("RAPIDRAID_OLDER_PROGRAM", older))
}

fn call(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
