//! Records the log lines of all processes of a fleet, and holds the trap: it kills a process as
//! soon as a given stage is logged.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use rapidraid::stage::{TARGET, TracePoint};
use rustix::process::{Pid, Signal, kill_process};

use crate::machine::Listener;

/// Number of the last lines that are kept of each process for failure messages.
const KEPT: usize = 60;
/// Stages that a daemon logs when it is the gateway of a client's operation.
const GATEWAY_STAGES: [TracePoint; 5] = [
    TracePoint::Begin,
    TracePoint::Seal,
    TracePoint::Decide,
    TracePoint::Request,
    TracePoint::Removing,
];

/// The process that a trap kills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Victim {
    /// The gateway of the client's operation, if it is known; otherwise the process that logs the
    /// stage.
    Gateway,
    /// The process of this name.
    Named(String),
    /// The process that logs the stage.
    Sayer,
}

/// A kill by the trap.
#[derive(Debug, Clone)]
pub struct Killed {
    pub name: String,
    pub at: Instant,
}

#[derive(Default)]
struct State {
    pids: BTreeMap<String, Pid>,
    tails: BTreeMap<String, VecDeque<String>>,
    gateway: Option<String>,
    trap: Option<(TracePoint, Victim)>,
    killed: Option<Killed>,
    panics: Vec<String>,
}

impl State {
    /// Sends a signal to a process. Returns whether it was sent.
    ///
    /// The caller holds the lock. A process is removed from `pids` before it is reaped, so its
    /// process id cannot belong to another process here.
    fn signal(&self, name: &str, signal: Signal) -> bool {
        self.pids.get(name).is_some_and(|pid| kill_process(*pid, signal).is_ok())
    }
}

/// The watch of a fleet, shared by the threads that read the lines of processes.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<State>>);

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Returns the listener for the process `name`.
    pub fn listener(&self, name: &str) -> Listener {
        let (watch, name) = (self.clone(), name.to_owned());
        Arc::new(move |line| watch.heard(&name, line))
    }

    fn heard(&self, name: &str, line: &str) {
        let mut state = self.state();
        if line.contains("panicked at") {
            state.panics.push(format!("{name}: {line}"));
        }
        let tail = state.tails.entry(name.to_owned()).or_default();
        tail.push_back(line.to_owned());
        if tail.len() > KEPT {
            tail.pop_front();
        }
        let Some(said) = stage_of(line) else { return };
        if GATEWAY_STAGES.iter().any(|stage| stage.name() == said) {
            state.gateway = Some(name.to_owned());
        }
        let Some((stage, victim)) = &state.trap else { return };
        if stage.name() != said {
            return;
        }
        let victim = match victim {
            Victim::Gateway => state.gateway.clone().unwrap_or_else(|| name.to_owned()),
            Victim::Named(name) => name.clone(),
            Victim::Sayer => name.to_owned(),
        };
        state.trap = None;
        if state.signal(&victim, Signal::KILL) {
            state.killed = Some(Killed { name: victim, at: Instant::now() });
        }
    }

    /// Kills a process. Returns `false` if no process with this name runs.
    pub fn kill(&self, name: &str) -> bool {
        self.signal(name, Signal::KILL)
    }

    /// Sends a signal to a process. Returns `false` if no process with this name runs.
    pub fn signal(&self, name: &str, signal: Signal) -> bool {
        self.state().signal(name, signal)
    }

    /// Registers a process under a name.
    pub fn is(&self, name: &str, child: &std::process::Child) {
        self.state().pids.insert(name.to_owned(), Pid::from_child(child));
    }

    /// Unregisters a process, so that it may be reaped.
    pub fn is_not(&self, name: &str) {
        self.state().pids.remove(name);
    }

    /// Sets the trap for one operation. Forgets the last kill and the last gateway.
    pub fn set_trap(&self, stage: TracePoint, victim: Victim) {
        let mut state = self.state();
        (state.trap, state.killed, state.gateway) = (Some((stage, victim)), None, None);
    }

    /// Removes the trap. Returns the kill, if the trap has killed a process.
    pub fn take_trap(&self) -> Option<Killed> {
        let mut state = self.state();
        state.trap = None;
        state.killed.take()
    }

    /// Returns whether the trap still waits for its stage.
    pub fn is_set(&self) -> bool {
        self.state().trap.is_some()
    }

    /// Returns the kill, if the trap has killed a process by now.
    pub fn killed(&self) -> Option<Killed> {
        self.state().killed.clone()
    }

    /// Returns the panic messages of all processes.
    pub fn panics(&self) -> Vec<String> {
        self.state().panics.clone()
    }

    /// Returns the last lines of all processes.
    pub fn tails(&self) -> String {
        let mut out = String::new();
        for (name, tail) in &self.state().tails {
            out.push_str(&format!("--- {name}\n"));
            tail.iter().for_each(|line| out.push_str(&format!("{line}\n")));
        }
        out
    }
}

/// Returns the stage that a log line names, if any.
fn stage_of(line: &str) -> Option<&str> {
    let (_, said) = line.split_once(TARGET)?;
    said.strip_prefix(": ")?.split(' ').next()
}
