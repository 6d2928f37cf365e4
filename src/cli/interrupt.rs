//! Interrupts: the signals that end a command, and what a command does first.
//!
//! A command that changes nothing durable simply ends. A save aborts what it began, an archiving
//! goes on without its watcher, a restore removes its temporary files. A second signal ends the
//! process at once.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Outcome;
use super::printer::{CommandFailure, CommandOutput};
use super::table::Paint;
use super::words::ExactStep;
use crate::client::{Client, ClientError, NewShard, SaveCode, SaveDecisions, SaveFate};
use crate::clock::{SystemClock, deadline};
use crate::entropy::{Entropy, SystemEntropy};
use crate::id::SaveId;
use crate::kind::ErrorKind;

/// How long an interrupted save tries to abort what it began. After that its lease ends it.
const ABORT_LIMIT: Duration = Duration::from_secs(2);

/// The signals that end a process in order. SIGHUP is left to the system, so that `nohup` works.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Starts to catch the signals.
    pub fn new() -> Result<Self, CommandFailure> {
        let listen = |kind| {
            signal(kind).map_err(|e| {
                CommandFailure::new(ErrorKind::Io, format!("cannot listen for signals: {e}"))
            })
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    /// Waits for the next SIGINT.
    pub async fn interrupted(&mut self) {
        self.interrupt.recv().await;
    }

    /// Waits for the next signal. Returns its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// The decisions of the command `save`: the shards are known beforehand, and the id of the attempt
/// under way is kept, so that an interrupt can abort it.
pub struct InterruptibleSave {
    shards: Vec<NewShard>,
    save: Mutex<Option<SaveId>>,
}

impl InterruptibleSave {
    /// Creates the decisions for a save of `shards`.
    pub fn new(shards: Vec<NewShard>) -> Arc<Self> {
        Arc::new(Self { shards, save: Mutex::default() })
    }

    /// Settles the save after `signal_name`, and returns the outcome of the command. A second signal
    /// ends the wait.
    pub async fn settle(
        &self,
        client: &Client,
        step: &ExactStep,
        signal_name: &str,
        signals: &mut Signals,
    ) -> Outcome {
        let begun = *self.save.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(save) = begun else {
            return Err(interrupted(signal_name, &format!("the save of {step} had not begun")));
        };
        let (clock, step_ref) = (SystemClock::new(), step.job.at(step.step));
        let settled = tokio::select! {
            settled = deadline(&*clock, ABORT_LIMIT, client.settle_save(step_ref, save)) => settled,
            again = signals.next() => {
                let what = format!("a second {again} ended the abort of {step}");
                return Err(unsettled(signal_name, &what, step));
            }
        };
        match settled {
            Ok(Ok(SaveFate::Aborted)) => {
                let what = format!("the save of {step} was aborted, and nothing of it is visible");
                Err(interrupted(signal_name, &what))
            }
            Ok(Ok(SaveFate::Committed)) => {
                Ok(Box::new(CommittedBefore { step: step.clone(), save }))
            }
            Ok(Err(error)) => {
                Err(unsettled(signal_name, &format!("the abort of {step} failed: {error}"), step))
            }
            Err(late) => {
                Err(unsettled(signal_name, &format!("the abort of {step} failed: {late}"), step))
            }
        }
    }
}

#[async_trait]
impl SaveDecisions for InterruptibleSave {
    fn assign_save_id(&self, _attempt: u32) -> io::Result<SaveId> {
        let mut save = SaveId([0; 12]);
        SystemEntropy.fill(&mut save.0);
        *self.save.lock().unwrap_or_else(PoisonError::into_inner) = Some(save);
        Ok(save)
    }

    fn shards_for_code(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        Ok(self.shards.clone())
    }

    async fn approve_commit(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Returns the failure of a command that a signal ended, with `consequence`.
pub fn interrupted(signal_name: &str, consequence: &str) -> CommandFailure {
    let message = format!("interrupted by {signal_name}: {consequence}");
    CommandFailure::new(ErrorKind::Unavailable, message).with_hint("run the command again")
}

fn unsettled(signal_name: &str, consequence: &str, step: &ExactStep) -> CommandFailure {
    interrupted(signal_name, consequence).with_hint(format!(
        "the save ends by itself when its lease ends; until then {step} is being saved"
    ))
}

/// The output of a save that was committed before the interrupt.
struct CommittedBefore {
    step: ExactStep,
    save: SaveId,
}

impl CommandOutput for CommittedBefore {
    fn json(&self) -> Map<String, Value> {
        let Self { step, save } = self;
        let fields = json!({
            "job": step.job, "step": step.step, "save": save.to_string(), "committed": true,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, _: Paint) -> String {
        format!("{} was committed before the interrupt\n", self.step)
    }
}
