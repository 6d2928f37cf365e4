//! Ctrl-C and commands with a time limit: every wait ends when the run is to end.

use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use std::{fs::File, io::Read as _, io::Seek as _};

use anyhow::{Context, Result, bail, ensure};

/// Interval of the checks during a wait. Times that a program reports do not depend on it; times
/// that are measured from outside may be this much longer.
const POLL: Duration = Duration::from_millis(10);

/// Whether the run is to end.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Returns a flag that SIGINT, SIGTERM and SIGHUP set from now on. A second signal ends the
    /// program at once.
    pub fn on_signals() -> Result<Self> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        use signal_hook::flag;
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The order matters: the second signal finds the flag set by the first.
            flag::register_conditional_shutdown(signal, 130, stop.0.clone())?;
            flag::register(signal, stop.0.clone())?;
        }
        Ok(stop)
    }

    /// Returns an error once the run is to end.
    pub fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            true => bail!("stopped by a signal; the cluster is removed"),
            false => Ok(()),
        }
    }

    /// Waits for this time. Returns an error once the run is to end.
    pub fn sleep(&self, long: Duration) -> Result<()> {
        let end = Instant::now() + long;
        while Instant::now() < end {
            self.check()?;
            sleep(POLL.min(end.saturating_duration_since(Instant::now())));
        }
        self.check()
    }

    /// Runs commands in parallel, each to its end. Returns their outputs in the same order.
    pub fn run_all(&self, commands: Vec<Command>, limit: Duration) -> Result<Vec<Output>> {
        let one = |command| self.run(command, limit, || Ok(()));
        thread::scope(|scope| {
            let begun: Vec<_> =
                commands.into_iter().map(|command| scope.spawn(move || one(command))).collect();
            let ended = begun.into_iter().map(|thread| thread.join());
            ended.map(|ended| ended.unwrap_or_else(|_| bail!("a thread panicked"))).collect()
        })
    }

    /// Runs `command` to its end and returns its output. `meanwhile` is called while it runs. The
    /// command is killed after `limit`, when the run is to end, or if `meanwhile` fails.
    pub fn run(
        &self,
        mut command: Command,
        limit: Duration,
        mut meanwhile: impl FnMut() -> Result<()>,
    ) -> Result<Output> {
        let line = shown(&command);
        // The output goes to files instead of pipes, so that it need not be read while the command
        // runs.
        let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
        let mut child =
            own_group(&mut command).spawn().with_context(|| format!("cannot start `{line}`"))?;
        let end = Instant::now() + limit;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Ok(status);
            }
            let late = match Instant::now() > end {
                true => Err(anyhow::anyhow!("`{line}` took longer than {limit:?}")),
                false => self.check().and_then(|()| meanwhile()),
            };
            if let Err(error) = late {
                // The child may have ended by itself already.
                let _ = child.kill();
                let _ = child.wait();
                break Err(error);
            }
            sleep(POLL);
        }?;
        Ok(Output { status, stdout: read_back(&mut out)?, stderr: read_back(&mut err)? })
    }
}

/// Runs a command and returns its stdout. If it fails, the error contains its stderr.
pub fn checked(
    stop: &Stop,
    command: Command,
    limit: Duration,
    meanwhile: impl FnMut() -> Result<()>,
) -> Result<Vec<u8>> {
    let line = shown(&command);
    let output = stop.run(command, limit, meanwhile)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{line}` failed ({}): {}", output.status, said.trim());
    Ok(output.stdout)
}

/// Gives the command its own process group: Ctrl-C is for this program, which then ends its
/// children.
pub fn own_group(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt;
    command.process_group(0)
}

/// Returns a command as a person would type it.
pub fn shown(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn read_back(file: &mut File) -> Result<Vec<u8>> {
    /// Maximum output, more than any command here prints.
    const MAX_OUTPUT_BYTES: u64 = 64 << 20;
    file.rewind()?;
    let mut bytes = Vec::new();
    file.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_command_gives_what_it_prints_and_ends_at_its_limit() {
        let stop = Stop::default();
        let quick = Duration::from_secs(20);
        let output = stop.run(sh("echo out; echo err >&2; exit 3"), quick, || Ok(())).unwrap();
        assert_eq!(
            (output.status.code(), &output.stdout[..], &output.stderr[..]),
            (Some(3), &b"out\n"[..], &b"err\n"[..])
        );
        let late = stop.run(sh("sleep 60"), Duration::from_millis(50), || Ok(())).unwrap_err();
        assert!(late.to_string().contains("sleep 60"), "{late}");
    }

    #[test]
    fn a_stop_ends_what_is_waited_for() {
        let stop = Stop::default();
        let mut looks = 0;
        let meanwhile = || {
            looks += 1;
            stop.0.store(looks > 2, Ordering::Relaxed);
            Ok(())
        };
        let stopped = stop.run(sh("sleep 60"), Duration::from_secs(60), meanwhile).unwrap_err();
        assert!(stopped.to_string().starts_with("stopped"), "{stopped}");
        assert!(stop.sleep(Duration::from_secs(60)).is_err());
    }
}
