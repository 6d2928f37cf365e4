//! Starting a staging daemon that outlives whoever needed it. Several may do so at once: one daemon stays.
#![allow(clippy::disallowed_methods)] // starts and watches a process of the machine

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit};
use rustix::thread::CpuSet;

use super::Ended;
use crate::cli::args::Connect;
use crate::cli::printer::Failure;
use crate::cli::{Outcome, files};
use crate::clock::{Clock, SystemClock};
use crate::config::ClientConfig;
use crate::kind::ErrorKind;
use crate::trainer::StagingError;
use crate::trainer::session::{Session, Wait};

const NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
/// How long a daemon may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// How long one look for a daemon may take.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Returns when a daemon answers: one that runs, or one that is started.
pub async fn run(dir: &Path, config: &ClientConfig, from: &Connect) -> Outcome {
    let clock = SystemClock::new();
    let log = dir.with_extension("log");
    let mut child = None;
    loop {
        match answers(dir, config).await {
            Ok(()) => return Ok(Box::new(Ended)),
            Err(StagingError::NoDaemon { .. }) => {}
            Err(error) => return Err(super::failure(&error)),
        }
        let running = match child.as_mut() {
            Some(running) => running,
            None => child.insert(start(&log, from)?),
        };
        let ended = running.try_wait().ok().flatten();
        let last = || files::last_lines(&log, 5);
        // Another one that was started at the same moment has won; it answers soon.
        if let Some(status) = ended
            && !last().contains("another staging daemon runs")
        {
            let message =
                format!("the staging daemon ended ({status}); the end of its log:\n{}", last());
            return Err(Failure::new(ErrorKind::Unavailable, message)
                .with_hint("`rapidraid stage` in a terminal shows why"));
        }
        if clock.now() > READY_LIMIT {
            let message = format!(
                "no staging daemon is ready after {} s; the end of its log:\n{}",
                READY_LIMIT.as_secs(),
                last()
            );
            return Err(Failure::new(ErrorKind::Timeout, message)
                .with_hint("`rapidraid stage` in a terminal shows why"));
        }
        clock.sleep(POLL).await;
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

fn start(log: &Path, from: &Connect) -> Result<std::process::Child, Failure> {
    let failed =
        |what: &str, error: std::io::Error| Failure::new(ErrorKind::Io, format!("{what}: {error}"));
    let program = std::env::current_exe()
        .map_err(|e| failed("cannot find the program that is running", e))?;
    let mut options = OpenOptions::new();
    // Anybody may make links where the folder is by default.
    options.append(true).create(true).mode(0o600).custom_flags(NOFOLLOW);
    let log =
        options.open(log).map_err(|e| failed(&format!("cannot open {}", log.display()), e))?;
    let mut command = Command::new(program);
    command.args(["stage", "--detached"]);
    if let Some(config) = &from.config {
        let config = std::path::absolute(config).map_err(|e| failed("no absolute path", e))?;
        command.arg("--config").arg(config);
    }
    for setting in &from.set {
        command.arg("--set").arg(format!("{}={}", setting.key, setting.value));
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().map_err(|e| failed("cannot start the staging daemon", e))
}

/// Lets go of what the daemon has from the trainer that it was started by: session, terminal, working folder, processors, limits and mask.
/// Descriptors are not inherited, because whoever starts it closes them.
pub fn leave_the_starter() -> Result<(), Failure> {
    let failed = |what: &str, error: rustix::io::Errno| {
        Failure::new(ErrorKind::Io, format!("{what}: {error}"))
    };
    // A process that leads a group already cannot begin a session; then nobody else is in it either.
    let _ = rustix::process::setsid();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::chdir("/").map_err(|error| failed("leaving the working folder", error))?;
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    // The kernel takes those that there are; in a container, those that it may have.
    for thread in threads() {
        if let Err(error) = rustix::thread::sched_setaffinity(thread, &all) {
            tracing::warn!(%error, "the daemon stays on the processors of the trainer that started it");
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

/// The threads of this process: those of its runtime exist already.
fn threads() -> Vec<Option<Pid>> {
    let id = |entry: std::io::Result<std::fs::DirEntry>| {
        Pid::from_raw(entry.ok()?.file_name().to_str()?.parse().ok()?)
    };
    let Ok(folder) = std::fs::read_dir("/proc/self/task") else { return vec![None] };
    folder.filter_map(id).map(Some).collect()
}
