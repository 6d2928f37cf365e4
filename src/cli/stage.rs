//! `stage`: the process of a training host's staging daemon, and requests to the daemon that runs.

mod detach;
mod free;
mod priority;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::args::Stage;
use super::interrupt::Signals;
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Table};
use super::{Front, Outcome, connect, files, log};
use crate::client::Client;
use crate::clock::SystemClock;
use crate::config::ClientConfig;
use crate::entropy::SystemEntropy;
use crate::id::Job;
use crate::kind::ErrorKind;
use crate::net::identity::Identity;
use crate::trainer::StagingError;
use crate::trainer::daemon::{Running, Settings, StagingDaemon};
use crate::trainer::protocol::{Answer as Told, Request, Status};
use crate::trainer::session::{Session, Wait, default_dir};
use crate::units::ByteCount;
use crate::workers::Workers;

/// Default memory limit, in percent of the size of the file system that holds the staging folder.
const MEMORY_PERCENT: u64 = 80;
/// The daemon, as errors of requests to it name it.
const DAEMON: &str = "the staging daemon";
/// Maximum time for the requests of a command to the daemon.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// Number of threads that hash, merge tables and copy bytes. The daemon yields to training, so more
/// threads would only wait.
const WORKERS: usize = 4;
/// A daemon started by `--detach` ends after this time without a connection and without used
/// memory.
const IDLE: Duration = Duration::from_secs(60);
/// How long the daemon continues to save after its folder was removed.
const LOST_LIMIT: Duration = Duration::from_secs(60);

/// Runs the command `stage`.
pub async fn run(front: &mut Front, options: Stage) -> Outcome {
    let (file, config) = connect::client_config(&options.connect, &front.env)?;
    let dir = config.staging.dir.clone();
    let dir = dir.unwrap_or_else(|| default_dir(config.membership.cluster));
    if options.status {
        log::of_command(front);
        return show_status(dir, &config).await;
    }
    if let Some(job) = options.free {
        log::of_command(front);
        return free::run(dir, &config, job, options.force).await;
    }
    if options.detach {
        return detach::run(&dir, &config, (&file, &options.connect.set)).await;
    }
    log::of_staging(front);
    files::raise_open_files();
    if options.detached {
        detach::leave_the_starter()?;
    }
    let gone = options.stop_at_eof.then(super::node::end_of_stdin);
    serve(front, dir, &config, options.detached.then_some(IDLE), gone).await
}

fn token(config: &ClientConfig) -> Result<Vec<u8>, CommandFailure> {
    match &config.staging.token {
        Some(path) => files::read_token(path),
        None => Ok(Vec::new()),
    }
}

/// Returns the staging folder, or while it does not exist the nearest folder above it: the folder may
/// be a mount point.
fn nearest_folder(dir: &Path) -> &Path {
    dir.ancestors().find(|folder| files::kind_of(folder).is_ok()).unwrap_or(Path::new("."))
}

async fn serve(
    front: &mut Front,
    dir: PathBuf,
    config: &ClientConfig,
    idle: Option<Duration>,
    gone: Option<oneshot::Receiver<()>>,
) -> Outcome {
    let identity = connect::identity(&config.membership)?;
    let mut signals = Signals::of_daemon()?;
    priority::lower_session(config.staging.nice);
    let failed = |error| {
        CommandFailure::new(ErrorKind::Io, format!("cannot start the background threads: {error}"))
    };
    let background = priority::Background::start(config.staging.nice).map_err(failed)?;
    let keeper = client_on(Handle::current(), &identity, config).await?;
    let client = client_on(background.handle(), &identity, config).await?;
    client.set_lease_keeper(keeper.clone(), Handle::current());
    let memory_bytes = match config.staging.memory_bytes {
        Some(bytes) => bytes,
        None => files::total_bytes(nearest_folder(&dir))? / 100 * MEMORY_PERCENT,
    };
    let settings = Settings {
        dir: dir.clone(),
        memory_bytes,
        fill: config.staging.fill,
        stall: config.staging.stall,
        token: token(config)?,
        cluster: config.membership.cluster,
        background: background.handle(),
    };
    let entropy = std::sync::Arc::new(SystemEntropy);
    let clock = SystemClock::new();
    let running =
        StagingDaemon::start(settings, client.clone(), clock, entropy, Workers::new(WORKERS)).await;
    let running = running.map_err(|error| CommandFailure::of(error.kind(), &error))?;
    let (pid, limit) = (std::process::id(), ByteCount(memory_bytes));
    front.printer.note(&format!("ready: staging in {} with {limit} (pid {pid})", dir.display()));
    let outcome = until_end(front, &running, &mut signals, config.staging.stop, idle, gone).await;
    drop(running);
    connect::close(&client).await;
    connect::close(&keeper).await;
    outcome
}

/// Creates a client whose packets are carried by the threads of `runtime`.
async fn client_on(
    runtime: Handle,
    identity: &Identity,
    config: &ClientConfig,
) -> Result<Client, CommandFailure> {
    let seeds = config.membership.seeds.iter().map(ToString::to_string).collect();
    let (identity, congestion) = (identity.clone(), config.congestion);
    let made = runtime
        .spawn(async move { Client::new_unconnected(&identity, seeds, congestion).await })
        .await
        .map_err(|error| {
            CommandFailure::new(ErrorKind::Internal, format!("a task died: {error}"))
        })?;
    made.map_err(|error| connect::failure(&error))
}

/// Returns how long the daemon continues to save after the signal `which`, and tells the user.
fn time_to_save(front: &mut Front, which: &str, stop: Duration) -> Duration {
    if which == "SIGINT" {
        front.printer.note("SIGINT: ending at once");
        return Duration::ZERO;
    }
    let limit_s = stop.as_secs();
    let what = format!("{which}: saving what is staged before the end, for at most {limit_s} s");
    front.printer.note(&what);
    stop
}

async fn until_end(
    front: &mut Front,
    running: &Running,
    signals: &mut Signals,
    stop: Duration,
    idle: Option<Duration>,
    gone: Option<oneshot::Receiver<()>>,
) -> Outcome {
    let starter_gone = async {
        match gone {
            Some(gone) => drop(gone.await),
            None => std::future::pending().await,
        }
    };
    let is_idle = async {
        match idle {
            Some(limit) => running.idle(limit).await,
            None => std::future::pending().await,
        }
    };
    let mut is_lost = false;
    let limit = tokio::select! {
        () = is_idle => return Ok(Box::new(Ended)),
        () = starter_gone => return Ok(Box::new(Ended)),
        which = signals.next() => time_to_save(front, which, stop),
        () = running.lost() => {
            is_lost = true;
            front.printer.note("the staging folder was taken away: saving what is staged before the end");
            LOST_LIMIT
        }
    };
    // Schedulers repeat SIGTERM, so a repeated SIGTERM changes nothing. Only SIGINT ends the wait
    // early.
    let left = tokio::select! {
        left = running.quiet(limit) => left,
        () = signals.interrupted() => running.quiet(Duration::ZERO).await,
    };
    if left.is_empty() && is_lost {
        let message =
            "the staging folder was taken away under the daemon; all that was staged is committed";
        let hint = "start it again; `RemoveIPC=no` keeps systemd-logind from removing a user's shared memory";
        return Err(CommandFailure::new(ErrorKind::Unavailable, message).with_hint(hint));
    }
    if left.is_empty() {
        return Ok(Box::new(Ended));
    }
    let message = format!("ended while steps were not committed:\n  {}", left.join("\n  "));
    let hint =
        "start it again on this host: steps that all ranks had staged are then saved from memory";
    Err(CommandFailure::new(ErrorKind::Unavailable, message).with_hint(hint))
}

struct Ended;

impl CommandOutput for Ended {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([("stopped".to_owned(), json!(true))])
    }
    fn text(&self, _: Paint) -> String {
        String::new()
    }
}

/// Converts an error of the trainer's side, with its own hint if it has one.
fn failure(error: &StagingError) -> CommandFailure {
    let failure = CommandFailure::of(error.kind(), error);
    match error.hint() {
        hint if hint.is_empty() => failure,
        hint => failure.with_hint(hint),
    }
}

/// Connects to the daemon and makes the requests of `ask`, which may block, within [`ASK_LIMIT`].
async fn with_session<T: Send + 'static>(
    dir: PathBuf,
    config: &ClientConfig,
    ask: impl FnOnce(&mut Session, &mut Wait<'_>) -> Result<T, StagingError> + Send + 'static,
) -> Result<T, CommandFailure> {
    let token = config.staging.token.clone();
    let asked = tokio::task::spawn_blocking(move || {
        let mut proceed = || true;
        let mut wait = Wait::new(ASK_LIMIT, &mut proceed);
        let mut session = Session::connect(&dir, token.as_deref(), &mut wait)?;
        ask(&mut session, &mut wait)
    });
    let died = |error| CommandFailure::new(ErrorKind::Internal, format!("a task died: {error}"));
    asked.await.map_err(died)?.map_err(|error| failure(&error))
}

/// Asks the daemon for its status.
fn ask_status(session: &mut Session, wait: &mut Wait<'_>) -> Result<Status, StagingError> {
    match session.ask(DAEMON, &Request::Status, wait)? {
        (Told::Status(status), _) => Ok(status),
        _ => Err(StagingError::Unexpected { what: DAEMON }),
    }
}

async fn show_status(dir: PathBuf, config: &ClientConfig) -> Outcome {
    let held = with_session(dir, config, |session, wait| {
        Ok(Held { status: ask_status(session, wait)?, pid: session.daemon_pid() })
    });
    Ok(Box::new(held.await?))
}

struct Held {
    status: Status,
    pid: u32,
}

impl CommandOutput for Held {
    fn json(&self) -> Map<String, Value> {
        let job = |job: &crate::trainer::protocol::JobStatus| {
            let steps: Vec<Value> = job
                .steps
                .iter()
                .map(|step| {
                    json!({ "step": step.step, "state": step.state, "bytes": step.len_bytes, "staged": step.staged, "world": step.world })
                })
                .collect();
            json!({
                "job": job.job, "launch": job.launch.map(|launch| launch.to_string()), "members": job.members,
                "segment_bytes": job.segment_bytes, "steps": steps,
            })
        };
        let jobs: Vec<Value> = self.status.jobs.iter().map(job).collect();
        let fields = json!({
            "pid": self.pid, "instance": self.status.instance.to_string(), "memory_bytes": self.status.memory_bytes,
            "used_bytes": self.status.used_bytes, "jobs": jobs,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let (used, limit) =
            (ByteCount(self.status.used_bytes), ByteCount(self.status.memory_bytes));
        let mut out = format!("staging daemon {}: {used} of {limit} in segments\n", self.pid);
        let mut table = Table::new(&["JOB", ">STEP", "STATE", ">SIZE", ">RANKS", ">PROCESSES"]);
        for job in &self.status.jobs {
            let name = |job: &Job| job.to_string();
            if job.steps.is_empty() {
                let size = ByteCount(job.segment_bytes).to_string();
                table.row([
                    name(&job.job),
                    "-".into(),
                    "no step".into(),
                    size,
                    "-".into(),
                    job.members.to_string(),
                ]);
            }
            for step in &job.steps {
                table.row([
                    name(&job.job),
                    step.step.to_string(),
                    step.state.clone(),
                    ByteCount(step.len_bytes).to_string(),
                    format!("{} of {}", step.staged, step.world),
                    job.members.to_string(),
                ]);
            }
        }
        if !self.status.jobs.is_empty() {
            out.push_str(&table.render(paint));
        }
        out
    }
}
