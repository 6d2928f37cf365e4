//! The `rapidraid` binary: environment and arguments in, exit code out. Everything else is `rapidraid::cli`.

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
    // Whatever still blocks on a disk must not keep the process alive: its outcome is printed.
    runtime.shutdown_background();
    ExitCode::from(code)
}
