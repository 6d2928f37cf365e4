//! What all processes of a fleet say, and the trap: the process that is killed as soon as somebody says a wanted stage.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use rapidraid::stage::{TARGET, TracePoint};
use rustix::process::{Pid, Signal, kill_process};

use crate::machine::Listener;

/// Lines of each process that are kept for a failure.
const KEPT: usize = 60;
/// What a daemon says when a client's work goes through it.
const GATEWAY_STAGES: [TracePoint; 5] = [
    TracePoint::Begin,
    TracePoint::Seal,
    TracePoint::Decide,
    TracePoint::Wish,
    TracePoint::Removing,
];

/// Who is to die.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Victim {
    /// The daemon that the client's work goes through, as far as it is known; else whoever says the stage.
    Gateway,
    /// The process of this name.
    Named(String),
    /// Whoever says the stage.
    Sayer,
}

/// A kill that has happened.
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
    /// Under the lock: nobody waits for a process, and so frees its number, before it is taken out of here.
    fn signal(&self, name: &str, signal: Signal) -> bool {
        self.pids.get(name).is_some_and(|pid| kill_process(*pid, signal).is_ok())
    }
}

/// Shared by the threads that read what processes say.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<State>>);

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// The listener of the process `name`.
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

    /// Kills a process at once; `false` when it is none.
    pub fn kill(&self, name: &str) -> bool {
        self.signal(name, Signal::KILL)
    }

    /// Sends a signal to a process; `false` when it is none.
    pub fn signal(&self, name: &str, signal: Signal) -> bool {
        self.state().signal(name, signal)
    }

    /// From now on the name is that of this process.
    pub fn is(&self, name: &str, child: &std::process::Child) {
        self.state().pids.insert(name.to_owned(), Pid::from_child(child));
    }

    /// The process may be waited for.
    pub fn is_not(&self, name: &str) {
        self.state().pids.remove(name);
    }

    /// Sets the trap for one operation.
    pub fn set_trap(&self, stage: TracePoint, victim: Victim) {
        let mut state = self.state();
        (state.trap, state.killed, state.gateway) = (Some((stage, victim)), None, None);
    }

    /// Takes the trap away; whom it has killed.
    pub fn take_trap(&self) -> Option<Killed> {
        let mut state = self.state();
        state.trap = None;
        state.killed.take()
    }

    /// Whether the trap still waits.
    pub fn is_set(&self) -> bool {
        self.state().trap.is_some()
    }

    /// Whom the trap has killed by now.
    pub fn killed(&self) -> Option<Killed> {
        self.state().killed.clone()
    }

    /// What panicked anywhere.
    pub fn panics(&self) -> Vec<String> {
        self.state().panics.clone()
    }

    /// The last lines of all processes.
    pub fn tails(&self) -> String {
        let mut out = String::new();
        for (name, tail) in &self.state().tails {
            out.push_str(&format!("--- {name}\n"));
            tail.iter().for_each(|line| out.push_str(&format!("{line}\n")));
        }
        out
    }
}

/// The stage that a log line says.
fn stage_of(line: &str) -> Option<&str> {
    let (_, said) = line.split_once(TARGET)?;
    said.strip_prefix(": ")?.split(' ').next()
}
