//! `node`: the process of a storage daemon: its configuration, its log, and its end by signals.

use std::io::{self, Read};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::args::NodeOptions;
use super::interrupt::{Signals, interrupted};
use super::printer::{CommandFailure, CommandOutput};
use super::table::Paint;
use super::{Front, Outcome, connect, files, log};
use crate::clock::{SystemClock, deadline};
use crate::config::{LogFormat, MAX_FILE_BYTES, NodeConfig, Sources};
use crate::format::FormatError;
use crate::kind::ErrorKind;
use crate::node::{Daemon, NodeError};
use crate::store::{DiskError, StoreError};

/// How long a daemon may take to stop. After that the process ends as in a crash. No acknowledged
/// data is lost.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// The output of a daemon that stopped in order. Its text is empty.
struct Stopped;

impl CommandOutput for Stopped {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([("stopped".to_owned(), json!(true))])
    }
    fn text(&self, _: Paint) -> String {
        String::new()
    }
}

/// Converts an error of the daemon's start. A daemon that does not start needs other hints than a
/// command that failed.
fn not_started(error: &NodeError) -> CommandFailure {
    let failure = CommandFailure::of(error.kind(), error);
    let hint = match error {
        NodeError::Store(StoreError::Disk(DiskError::InUse { .. })) => {
            "another daemon runs on this folder: `pgrep -af 'rapidraid node'` shows which; stop it, or set `data_dir` to another folder"
        }
        NodeError::Store(StoreError::NoIdentity) => {
            "restore node.id from a copy; if there is no copy, move the data folder aside and start with an empty one: the replicas and pieces in the old folder then count as lost"
        }
        NodeError::Store(StoreError::Format { source: FormatError::Version { .. }, .. }) => {
            "a later release wrote it: start that release, or a later one, on this folder"
        }
        NodeError::Store(StoreError::Format { path, .. }) if path == "node.id" => {
            "restore node.id from a copy; if there is no copy, move the data folder aside and start with an empty one: the replicas and pieces in the old folder then count as lost"
        }
        _ => return failure,
    };
    failure.with_hint(hint)
}

/// Runs the command `node`. It returns when the daemon has stopped.
pub async fn run(front: &mut Front, options: NodeOptions) -> Outcome {
    let text = files::read_text(&options.config, MAX_FILE_BYTES).map_err(|failure| {
        failure.with_hint("`rapidraid cluster init` writes one as nodes/NAME/rapidraid.toml")
    })?;
    let set = connect::options(&options.set);
    let sources = Sources { file: &options.config, text: &text, env: &front.env, options: &set };
    let config = NodeConfig::parse(sources).map_err(|error| connect::config_failure(&error))?;
    let identity = connect::identity(&config.membership)?;
    log::of_daemon(front, &config);

    // The signals are caught before the daemon starts, so that a signal during its start also ends
    // it in order.
    let mut signals = Signals::of_daemon()?;
    let name = config.membership.name.clone();
    let format = config.log_format;
    let mut gone = options.stop_at_eof.then(end_of_stdin);
    let daemon = Daemon::start(config, identity).await;
    let daemon = daemon.map_err(|error| not_started(&error))?;
    let (address, pid) = (daemon.local_addr(), std::process::id());
    match format {
        LogFormat::Text => {
            front.printer.note(&format!("ready: {name} listens on {address} (pid {pid})"));
        }
        LogFormat::Json => {
            let line =
                json!({ "ready": true, "node": name, "address": address.to_string(), "pid": pid });
            front.printer.note(&line.to_string());
        }
    }
    let starter_gone = async {
        match gone.as_mut() {
            Some(gone) => drop(gone.await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = daemon.wait_until_stopping() => {
            let message = format!("node {name} stopped by itself: its log above says why");
            return Err(CommandFailure::new(ErrorKind::Unavailable, message).with_hint("correct the cause, then start it again"));
        }
        which = signals.next() => tracing::info!(signal = which, "stopping; a second signal ends the process at once"),
        () = starter_gone => tracing::info!("stdin ended, the process that started this node is gone: stopping"),
    }
    let clock = SystemClock::new();
    tokio::select! {
        stopped = deadline(&*clock, STOP_LIMIT, daemon.stop()) => match stopped {
            Ok(()) => Ok(Box::new(Stopped)),
            Err(elapsed) => Err(CommandFailure::new(ErrorKind::Timeout, format!("stopping: {elapsed}"))
                .with_hint("nothing that was acknowledged is lost: start it again")),
        },
        which = signals.next() => {
            let consequence = "the node ended at once, before its orderly stop was complete";
            Err(interrupted(which, consequence)
                .with_hint("nothing that was acknowledged is lost: start it again"))
        }
    }
}

/// Returns a receiver that resolves when stdin ends. The thread that reads stdin is never joined;
/// nothing else reads stdin.
pub fn end_of_stdin() -> oneshot::Receiver<()> {
    let (ended, gone) = oneshot::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 256];
        while matches!(io::stdin().read(&mut buffer), Ok(1..)) {}
        let _ = ended.send(());
    });
    gone
}
