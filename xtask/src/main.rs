//! The recipes of the project. `cargo xtask test` runs what CI runs, in the same order, and stops
//! at the first failure.
//!
//! A step that cannot run on this machine (a tool is not installed, a folder is missing) is skipped
//! with a message. The last line of `test` is always `N passed, N failed`.
#![allow(clippy::disallowed_methods)] // a build recipe: nothing here replays from a seed

mod bench;
mod bench_trainers;
mod cargo;
mod fuzz;
mod kills;
mod mutants;
mod python;
mod recipe;
mod soak;
mod tally;
mod upgrade;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask test    what CI runs: toolchain, fmt, clippy, docs, tests, the Python package, short experiments, doc tests, benches once, terraform, advisories
cargo xtask wheel   builds the Python package with the program in it, in release mode, into target/python/wheels
cargo xtask mutants ['TEXT' | --part I/N | --since COMMIT] [--jobs N]
                                           breaks each sync, mark, check and fence of tests/mutants.txt; its tests must fail
cargo xtask upgrade [COMMIT]  a rolling upgrade from an older program, which is built from the history, and back
cargo xtask soak --matrix [--jobs J]                the whole lost-sync matrix
cargo xtask soak --seeds N [--from S] [--jobs J]    N storms, from seed S (0) on
cargo xtask fuzz [--seconds N] [--target T] [--seed S]    the fuzz targets for N seconds in all (60)
cargo xtask kills --cells [--seed S] [--jobs J]     real daemons, killed in each role at each stage: all cells
cargo xtask kills --cell ROLE:OPERATION.STAGE [--seed S]    one of these cells, such as head:archive.piece
cargo xtask kills --random N [--seed S]             N kills at any moment, two clients at work
cargo xtask kills --day MINUTES [--seed S]          nodes killed, stopped, filled up and emptied, two clients at work, automatic repair
cargo xtask kills --restores [--mib M]              sixteen daemons: restores while nodes are dead or stopped
cargo xtask kills --standstill                      archives 64 stripes at once on sixteen daemons with the minimum of memory
cargo xtask kills --staging N [--seed S] [--result FILE]    N kills of trainers and their staging daemon, in each phase of a step
cargo xtask kills --servers                         storage daemons killed at ten points of a save of two hosts: all cells
cargo xtask kills --flips N [--seed S] [--result FILE]      N flipped bits in each place: segments, files, memory of loads
cargo xtask kills --torch N [--seed S] [--result FILE]      N kills of PyTorch trainers and their staging daemon
cargo xtask kills --hosts N [--seed S]                      N kills of ranks, daemons and hosts of a job on two hosts
cargo xtask bench kernels [--short] [--only WORDS] [--json]    the kernels compared with others; docs/benchmarks/kernels.md
cargo xtask bench kernels --as NAME [--json]    the same on another processor: writes kernels-NAME beside the record; its page must exist
cargo xtask bench plot    draws docs/benchmarks/kernels.svg from benches/record/kernels.json
cargo xtask bench trainers [--short] [--only NAME]...    stalls, uploads, loads and resumes of PyTorch jobs; needs torch, and root for links
cargo xtask help    this text

The last line of `test` is `N passed, N failed`; the exit code is 0 only when nothing failed.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["test"] => recipe::test(),
        ["wheel"] => recipe::wheel(),
        ["mutants", rest @ ..] => mutants::parse_arguments(rest)
            .map_or_else(misused, |(chosen, jobs)| mutants::run(&chosen, jobs)),
        ["upgrade"] => upgrade::run(None),
        ["upgrade", commit] => upgrade::run(Some(commit)),
        ["soak", rest @ ..] => soak::parse(rest).map_or_else(misused, |what| soak::soak(&what)),
        ["fuzz", rest @ ..] => fuzz::parse(rest).map_or_else(misused, |what| fuzz::fuzz(&what)),
        ["kills", rest @ ..] => kills::parse(rest).map_or_else(misused, |what| kills::kills(&what)),
        ["bench", "trainers", rest @ ..] => bench_trainers::bench(rest),
        ["bench", rest @ ..] => bench::parse(rest).map_or_else(misused, |what| bench::bench(&what)),
        ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            ExitCode::SUCCESS
        }
        other => misused(format!("cargo xtask knows no recipe {:?}", other.join(" "))),
    }
}

fn misused(why: String) -> ExitCode {
    eprintln!("{why}\n\n{HELP}");
    ExitCode::from(2)
}
