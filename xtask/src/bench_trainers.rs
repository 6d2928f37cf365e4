//! `cargo xtask bench trainers`: measures the times that a trainer sees, by
//! `python/benchmarks/trainers` with the wheel that users install.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::python::{run, with_wheel};

/// The record, and the folder of its pictures.
const OUT: [&str; 2] = ["benches/record/trainers.json", "docs/benchmarks"];
/// The same for a short run, which is no record.
const SHORT_OUT: [&str; 2] = ["target/bench/trainers.json", "target/bench"];
/// The packages that the tests do not need: a reference implementation of a hash, and a library for
/// pictures.
const PACKAGES: [&str; 2] = ["blake3", "matplotlib"];

/// Builds the wheel in release mode, installs it, and measures. The arguments are passed to the
/// program that measures.
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
    // This path contains no folder of the package, and the current folder is not searched, not by the
    // program's own processes either. So the installed package is measured.
    program.env("PYTHONPATH", root.join("python/benchmarks")).env("PYTHONSAFEPATH", "1");
    run(&mut program).context("the program that measures failed")
}
