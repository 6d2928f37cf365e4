//! Access to cargo: the cargo that runs this program, and a run of one test binary.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Returns a command for the cargo that runs this program, or for the one on the PATH.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Returns the folder in which cargo builds: that of `CARGO_TARGET_DIR`, or `target` in `root`.
pub fn target_dir(root: &Path) -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root.join(folder),
        None => root.join("target"),
    }
}

/// Runs one test binary with `arguments`, and with `settings` in its environment. The output of its
/// tests is shown while they run.
pub fn test<'a>(
    binary: &str,
    arguments: &[&str],
    settings: impl IntoIterator<Item = (&'a str, String)>,
) -> ExitCode {
    let mut command = cargo();
    command.args(["test", "--locked", "--workspace", "--test", binary]);
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
