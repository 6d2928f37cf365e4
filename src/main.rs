//! The `rapidraid` binary: it passes environment and arguments to `rapidraid::cli`, which does all
//! the work, and returns the exit code.

use std::process::ExitCode;

use rapidraid::cli;

fn main() -> ExitCode {
    let env = cli::files::environment();
    cli::files::raise_open_files();
    let args = match cli::args::parse(std::env::args_os(), &env) {
        Ok(args) => args,
        Err(code) => return ExitCode::from(code),
    };
    let runtime = match cli::runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(cli::run(args, env));
    // The outcome is already printed: a thread that still blocks on a disk must not keep the
    // process alive.
    runtime.shutdown_background();
    ExitCode::from(code)
}
