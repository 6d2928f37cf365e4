//! The cargo that runs us, and one test binary of the library run by it.

use std::process::{Command, ExitCode};

/// The cargo that runs us, or the one on the path.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs one test binary with `arguments` and `settings` in its environment; what its tests say is shown while they run.
pub fn test<'a>(
    binary: &str,
    arguments: &[&str],
    settings: impl IntoIterator<Item = (&'a str, String)>,
) -> ExitCode {
    let mut command = cargo();
    command.args(["test", "--locked", "--package", "rapidraid", "--test", binary]);
    command.args(["--", "--nocapture"]).args(arguments).envs(settings);
    match command.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cannot start cargo: {error}");
            ExitCode::FAILURE
        }
    }
}
