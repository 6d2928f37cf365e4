//! Interrupts: the signals that end a command, and what a command does first.
//!
//! A command that changes nothing durable simply ends. A `save` aborts its save, or waits for the
//! end of the commit that it has requested; after an `archive` the nodes continue to archive; a
//! `restore` removes its temporary files. A command whose request the daemons may carry out without it
//! says so ([`unless_interrupted`]).

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::files;
use super::printer::{CommandFailure, CommandOutput};
use super::table::Paint;
use super::words::ExactStep;
use crate::client::{Client, ClientError, NewShard, SaveCode, SaveDecisions, SaveFate};
use crate::clock::{SystemClock, deadline};
use crate::entropy::{Entropy, SystemEntropy};
use crate::id::SaveId;
use crate::kind::ErrorKind;

/// How long the interrupted command `save` tries to abort its save: long enough to find another
/// gateway. A save that was not aborted ends with its lease.
const ABORT_LIMIT: Duration = Duration::from_secs(15);

/// The name of the signal that Ctrl-C sends.
const INTERRUPT: &str = "SIGINT";

/// The name of the signal that a terminal sends when it is closed.
const HANG_UP: &str = "SIGHUP";

/// Maximum length of the file in which the system describes a process.
const MAX_STATUS_BYTES: usize = 64 << 10;

/// The signals that end a process in order. SIGHUP ends a command, unless the command was started with
/// this signal ignored, for example by `nohup`. It never ends a daemon.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Option<Signal>,
    /// The effect of SIGHUP, if it is caught.
    on_hang_up: OnHangUp,
}

/// The effect of SIGHUP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnHangUp {
    End,
    /// Nothing but a log line.
    Log,
}

impl Signals {
    /// Starts to catch the signals that end a command.
    pub fn new() -> Result<Self, CommandFailure> {
        Self::listen(OnHangUp::End)
    }

    /// Starts to catch the signals that end a daemon. A daemon has no terminal and reads its
    /// configuration only once, so it logs and ignores SIGHUP, which a rotation of logs may send.
    pub fn of_daemon() -> Result<Self, CommandFailure> {
        Self::listen(OnHangUp::Log)
    }

    fn listen(on_hang_up: OnHangUp) -> Result<Self, CommandFailure> {
        let listen = |kind| {
            signal(kind).map_err(|e| {
                CommandFailure::new(ErrorKind::Io, format!("cannot listen for signals: {e}"))
            })
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: match is_hang_up_ignored() {
                true => None,
                false => Some(listen(SignalKind::hangup())?),
            },
            on_hang_up,
        })
    }

    /// Waits for the next SIGINT.
    pub async fn interrupted(&mut self) {
        self.interrupt.recv().await;
    }

    /// Waits for the next signal that ends the process. Returns its name.
    pub async fn next(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => return INTERRUPT,
                _ = self.terminate.recv() => return "SIGTERM",
                // Without a signal to wait for, this branch is disabled.
                Some(_) = async { self.hang_up.as_mut()?.recv().await } => match self.on_hang_up {
                    OnHangUp::End => return HANG_UP,
                    OnHangUp::Log => tracing::info!(
                        "SIGHUP is ignored: a daemon reads its configuration only when it starts"
                    ),
                },
            }
        }
    }
}

/// Returns whether this process ignores SIGHUP, the lowest bit of the mask of ignored signals.
/// Returns true if the system does not show the mask, so that the signal is not caught then.
fn is_hang_up_ignored() -> bool {
    let status = files::read_text(Path::new("/proc/self/status"), MAX_STATUS_BYTES);
    let status = status.unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask & 1 == 1)
}

/// How far a save has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SavePhase {
    /// The client asks to begin, or waits to ask again.
    Beginning,
    /// The save is open under this id, and its blocks are being sent.
    Sending(SaveId),
    /// The client asks for the commit.
    Committing,
}

/// The state of a save that a signal may call off.
struct SaveProgress {
    phase: SavePhase,
    /// The id of the attempt under way.
    save: Option<SaveId>,
    is_called_off: bool,
}

/// The decisions of the command `save`. The shards are known beforehand. A signal calls the save
/// off, unless the client has already asked for the commit.
pub struct InterruptibleSave {
    shards: Vec<NewShard>,
    progress: Mutex<SaveProgress>,
}

/// The outcome of an interrupted save.
pub enum InterruptedSave<T> {
    /// The save ended by itself with this result.
    Ended(T),
    /// The save was committed before the signal.
    Committed(SaveId),
    /// The save was aborted or had not begun, or its fate is unknown: the failure says which.
    Failed(CommandFailure),
}

impl InterruptibleSave {
    /// Creates the decisions for a save of `shards`.
    pub fn new(shards: Vec<NewShard>) -> Arc<Self> {
        let (phase, save, is_called_off) = (SavePhase::Beginning, None, false);
        let progress = Mutex::new(SaveProgress { phase, save, is_called_off });
        Arc::new(Self { shards, progress })
    }

    fn progress(&self) -> MutexGuard<'_, SaveProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the save off. Returns the phase that it has reached. The save enters no further phase
    /// after this; a commit that was already asked for is carried out.
    fn call_off(&self) -> SavePhase {
        let mut progress = self.progress();
        progress.is_called_off = true;
        progress.phase
    }

    /// Ends `saving` when the signal `signal_name` has arrived: aborts the save or, if its commit
    /// was requested already, waits for the end of the commit. A second signal ends the wait for
    /// either.
    pub async fn end<T>(
        &self,
        client: &Client,
        step: &ExactStep,
        saving: Pin<&mut impl Future<Output = Result<T, ClientError>>>,
        (signal_name, signals): (&str, &mut Signals),
    ) -> InterruptedSave<Result<T, ClientError>> {
        let again = signals.next();
        match self.call_off() {
            SavePhase::Committing => tokio::select! {
                biased;
                done = saving => InterruptedSave::Ended(done),
                again = again => {
                    let what = format!("a second {again} ended the wait for the commit of {step}");
                    let hint = format!("`rapidraid show {step}` shows whether it is committed");
                    InterruptedSave::Failed(interrupted(signal_name, &what).with_hint(hint))
                }
            },
            // The gateway may be about to open the save. The save is then aborted as soon as the
            // gateway's answer comes.
            SavePhase::Beginning => tokio::select! {
                biased;
                done = within_limit(saving) => match done {
                    Some(Ok(done)) => InterruptedSave::Ended(Ok(done)),
                    Some(Err(_)) => {
                        let what = format!("nothing of {step} was saved");
                        InterruptedSave::Failed(interrupted(signal_name, &what))
                    }
                    None => unsettled(signal_name, "no daemon answers", step),
                },
                again = again => unsettled(signal_name, &format!("a second {again}"), step),
            },
            SavePhase::Sending(save) => tokio::select! {
                biased;
                settled = within_limit(client.settle_save(step.job.at(step.step), save)) => {
                    match settled {
                        Some(Ok(SaveFate::Aborted)) => {
                            let what = format!(
                                "the save of {step} was aborted, and nothing of it is visible"
                            );
                            InterruptedSave::Failed(interrupted(signal_name, &what))
                        }
                        Some(Ok(SaveFate::Committed)) => InterruptedSave::Committed(save),
                        Some(Err(error)) => unsettled(signal_name, &error.to_string(), step),
                        None => unsettled(signal_name, "no daemon answers", step),
                    }
                }
                again = again => unsettled(signal_name, &format!("a second {again}"), step),
            },
        }
    }
}

#[async_trait]
impl SaveDecisions for InterruptibleSave {
    fn assign_save_id(&self, _attempt: u32) -> io::Result<SaveId> {
        let mut progress = self.progress();
        if progress.is_called_off {
            return Err(io::Error::from(io::ErrorKind::Interrupted));
        }
        let mut save = SaveId([0; 12]);
        SystemEntropy.fill(&mut save.0);
        (progress.save, progress.phase) = (Some(save), SavePhase::Beginning);
        Ok(save)
    }

    fn shards_for_code(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        let mut progress = self.progress();
        if progress.is_called_off {
            return Err(ClientError::CalledOff { why: "interrupted".to_owned() });
        }
        if let Some(save) = progress.save {
            progress.phase = SavePhase::Sending(save);
        }
        Ok(self.shards.clone())
    }

    async fn approve_commit(&self) -> Result<(), String> {
        let mut progress = self.progress();
        if progress.is_called_off {
            return Err("interrupted".to_owned());
        }
        progress.phase = SavePhase::Committing;
        Ok(())
    }
}

/// Runs `work`, at most [`ABORT_LIMIT`]. Returns its result, or `None` after the limit.
async fn within_limit<T>(work: impl Future<Output = T>) -> Option<T> {
    deadline(&*SystemClock::new(), ABORT_LIMIT, work).await.ok()
}

/// Awaits a request that the daemons may carry out although the command ends. Returns the failure of
/// the command if a signal ends it first: `consequence` says what may become of the request, `hint` how
/// to find out. Signals are caught from now on: before its request, a command changes nothing.
pub async fn unless_interrupted<T>(
    request: impl Future<Output = T>,
    consequence: &str,
    hint: &str,
) -> Result<T, CommandFailure> {
    let mut signals = Signals::new()?;
    tokio::select! {
        biased;
        done = request => Ok(done),
        which = signals.next() => Err(interrupted(which, consequence).with_hint(hint)),
    }
}

/// Returns the failure of a command that a signal ended, with `consequence`.
pub fn interrupted(signal_name: &str, consequence: &str) -> CommandFailure {
    let message = format!("interrupted by {signal_name}: {consequence}");
    let signal = match signal_name {
        INTERRUPT => rustix::process::Signal::INT,
        HANG_UP => rustix::process::Signal::HUP,
        _ => rustix::process::Signal::TERM,
    };
    let failure = CommandFailure::new(ErrorKind::Unavailable, message);
    let signal = u8::try_from(signal.as_raw()).ok();
    CommandFailure { signal, ..failure.with_hint("run the command again") }
}

fn unsettled<T>(signal_name: &str, reason: &str, step: &ExactStep) -> InterruptedSave<T> {
    let what = format!("the save of {step} could not be aborted ({reason})");
    let hint = format!("it ends by itself when its lease ends; until then {step} is being saved");
    InterruptedSave::Failed(interrupted(signal_name, &what).with_hint(hint))
}

/// The output of a save that was committed before the signal.
pub struct CommittedBefore {
    /// The step.
    pub step: ExactStep,
    /// The save.
    pub save: SaveId,
}

impl CommandOutput for CommittedBefore {
    fn json(&self) -> Map<String, Value> {
        let Self { step, save } = self;
        let fields = json!({
            "job": step.job, "step": step.step, "save": save.to_string(), "committed": true,
            "record": null,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, _: Paint) -> String {
        format!("{} was committed before the signal\n", self.step)
    }
}
