//! `cargo xtask bench trainers`: what a trainer sees, measured by `python/benchmarks/trainers` with the wheel that users install.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::python::{run, with_wheel};

/// The record, and the folder of its pictures.
const OUT: [&str; 2] = ["benches/record/trainers.json", "docs/benchmarks"];
/// A short run is no record.
const SHORT_OUT: [&str; 2] = ["target/bench/trainers.json", "target/bench"];
/// What the tests do not need: the reference of a hash, and a library for pictures.
const PACKAGES: [&str; 2] = ["blake3", "matplotlib"];

/// Builds the wheel for release, installs it, and measures; the arguments are those of the program that measures.
pub fn bench(arguments: &[&str]) -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    match measure(root, arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask bench trainers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(root: &Path, arguments: &[&str]) -> Result<()> {
    let environment = with_wheel(root, "release", &PACKAGES)?;
    let [record, pictures] = if arguments.contains(&"--short") { SHORT_OUT } else { OUT };
    let mut program = environment.command("python");
    program.args(["-P", "-m", "trainers", "--record"]).arg(root.join(record));
    program.arg("--pictures").arg(root.join(pictures)).args(arguments);
    // Beside the measures stands no folder of the package: what is measured is the installed one.
    program.env("PYTHONPATH", root.join("python/benchmarks"));
    run(&mut program).context("the measures")
}
