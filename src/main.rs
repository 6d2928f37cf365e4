//! The `rapidraid` binary: it passes environment and arguments to `rapidraid::cli`, which does all
//! the work, and returns the exit code.

use std::process::ExitCode;

use rapidraid::cli;

fn main() -> ExitCode {
    let env = cli::files::environment();
    cli::files::raise_open_files();
    cli::run(std::env::args_os(), env)
}
