//! Starts a staging daemon that outlives the process that needed it. Several processes may do so at
//! the same time: one daemon remains.
#![allow(clippy::disallowed_methods)] // starts and watches a process of the machine

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit};
use rustix::thread::CpuSet;
use serde_json::{Map, Value, json};

use crate::cli::printer::{CommandFailure, CommandOutput};
use crate::cli::table::Paint;
use crate::cli::words::Setting;
use crate::cli::{Outcome, files};
use crate::clock::{Clock, SystemClock};
use crate::config::ClientConfig;
use crate::kind::ErrorKind;
use crate::trainer::StagingError;
use crate::trainer::session::{Session, Wait};

const NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
/// Maximum time for a daemon to become ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Length from which on the log is emptied when a daemon starts. The log lies in memory, beside the
/// staging folder.
const MAX_LOG_BYTES: u64 = 1 << 20;
const POLL: Duration = Duration::from_millis(20);
/// Maximum time for one attempt to reach a daemon.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Returns when a daemon answers: one that runs already, or one that is started here with the
/// configuration's file and the settings of the command line.
pub async fn run(dir: &Path, config: &ClientConfig, from: (&Path, &[Setting])) -> Outcome {
    let clock = SystemClock::new();
    let log = dir.with_extension("log");
    let mut child = None;
    loop {
        match answers(dir, config).await {
            Ok(()) => return Ok(Box::new(Ready)),
            Err(StagingError::NoDaemon { .. }) => {}
            Err(error) => return Err(super::failure(&error)),
        }
        let running = match child.as_mut() {
            Some(running) => running,
            None => child.insert(start(&log, from)?),
        };
        let ended = running.try_wait().ok().flatten();
        let last = || files::last_lines(&log, 5);
        if let Some(status) = ended {
            // If the log says that another daemon runs, that daemon holds the folder's lock. It was
            // just started and answers soon, or it is about to end and the next start succeeds.
            if !last().contains("another staging daemon runs") {
                let message =
                    format!("the staging daemon ended ({status}); the end of its log:\n{}", last());
                return Err(CommandFailure::new(ErrorKind::Unavailable, message)
                    .with_hint("`rapidraid stage` in a terminal shows why"));
            }
            child = None;
        }
        if clock.now() > READY_LIMIT {
            let message = format!(
                "no staging daemon is ready after {} s; the end of its log:\n{}",
                READY_LIMIT.as_secs(),
                last()
            );
            return Err(CommandFailure::new(ErrorKind::Timeout, message)
                .with_hint("`rapidraid stage` in a terminal shows why"));
        }
        clock.sleep(POLL).await;
    }
}

/// The output of `stage --detach`: a daemon answers. The text is empty; the JSON says `ready`.
struct Ready;

impl CommandOutput for Ready {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([("ready".to_owned(), json!(true))])
    }

    fn text(&self, _: Paint) -> String {
        String::new()
    }
}

async fn answers(dir: &Path, config: &ClientConfig) -> Result<(), StagingError> {
    let (dir, token) = (dir.to_owned(), config.staging.token.clone());
    let asked = tokio::task::spawn_blocking(move || {
        let mut proceed = || true;
        Session::connect(&dir, token.as_deref(), &mut Wait::new(LOOK_LIMIT, &mut proceed)).map(drop)
    });
    asked.await.unwrap_or(Err(StagingError::Unexpected { what: "the staging daemon" }))
}

fn start(
    log: &Path,
    (file, set): (&Path, &[Setting]),
) -> Result<std::process::Child, CommandFailure> {
    let failed = |what: &str, error: std::io::Error| {
        CommandFailure::new(ErrorKind::Io, format!("{what}: {error}"))
    };
    let program = std::env::current_exe()
        .map_err(|e| failed("cannot find the program that is running", e))?;
    let mut options = OpenOptions::new();
    // By default any user may create links in this folder, so links are not followed.
    options.append(true).create(true).mode(0o600).custom_flags(NOFOLLOW);
    let log = open_log(log, &options)
        .map_err(|e| failed(&format!("cannot open {}", log.display()), e))?;
    let mut command = Command::new(program);
    // The daemon leaves this working folder before it reads the files that the configuration names.
    let file = std::path::absolute(file).map_err(|e| failed("no absolute path", e))?;
    command.args(["stage", "--detached", "--config"]).arg(file);
    for setting in set {
        command.arg("--set").arg(format!("{}={}", setting.key, setting.value));
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().map_err(|e| failed("cannot start the staging daemon", e))
}

/// Opens the log, and empties the log if it is longer than [`MAX_LOG_BYTES`]. A daemon that still
/// writes to it appends, so its lines are not lost in a hole.
fn open_log(path: &Path, options: &OpenOptions) -> std::io::Result<File> {
    let log = options.open(path)?;
    if log.metadata()?.len() > MAX_LOG_BYTES {
        log.set_len(0)?;
    }
    Ok(log)
}

/// Detaches the daemon from the trainer that started it: session, terminal, working folder,
/// processors, limits and mask. Descriptors are not inherited, because the starter closes them.
pub fn leave_the_starter() -> Result<(), CommandFailure> {
    let failed = |what: &str, error: rustix::io::Errno| {
        CommandFailure::new(ErrorKind::Io, format!("{what}: {error}"))
    };
    // A process that already leads a group cannot begin a session. Then it is alone in that group.
    let _ = rustix::process::setsid();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::chdir("/").map_err(|error| failed("leaving the working folder", error))?;
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    // The kernel uses the processors that exist or, in a container, those that the container may
    // use.
    for thread in threads() {
        if let Err(error) = rustix::thread::sched_setaffinity(thread, &all) {
            tracing::warn!(%error, "a thread of the daemon stays on the processors of the trainer that started it");
        }
    }
    for resource in [Resource::Nofile, Resource::As, Resource::Memlock, Resource::Core] {
        let limit = rustix::process::getrlimit(resource);
        let _ = rustix::process::setrlimit(
            resource,
            Rlimit { current: limit.maximum, maximum: limit.maximum },
        );
    }
    Ok(())
}

/// Returns the threads of this process. The threads of its runtime exist already.
fn threads() -> Vec<Option<Pid>> {
    let id = |entry: std::io::Result<std::fs::DirEntry>| {
        Pid::from_raw(entry.ok()?.file_name().to_str()?.parse().ok()?)
    };
    let Ok(folder) = std::fs::read_dir("/proc/self/task") else { return vec![None] };
    folder.filter_map(id).map(Some).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_log_is_emptied_and_a_short_one_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stage.log");
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        for (before, after) in [(MAX_LOG_BYTES, MAX_LOG_BYTES), (MAX_LOG_BYTES + 1, 0)] {
            File::create(&path).unwrap().set_len(before).unwrap();
            assert_eq!(open_log(&path, &options).unwrap().metadata().unwrap().len(), after);
        }
        let missing = folder.path().join("other.log");
        assert_eq!(open_log(&missing, &options).unwrap().metadata().unwrap().len(), 0);
    }
}
