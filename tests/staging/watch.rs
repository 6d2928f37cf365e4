//! A watch on the trace points that a staging daemon logs, and the trap: kills processes as soon as
//! the daemon logs a given point.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use rapidraid::trainer::daemon::trace::{StagingPoint, TARGET};
use rustix::process::{Pid, Signal, kill_process};

use crate::machine::Listener;

/// Maximum number of log lines that are kept for the report of a failure.
const KEPT: usize = 1000;

/// A trace point that was logged, and its step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub point: String,
    pub step: u64,
}

#[derive(Default)]
struct State {
    lines: VecDeque<String>,
    said: Vec<Said>,
    trap: Option<(StagingPoint, Vec<Pid>, Signal)>,
    sprung: Option<Instant>,
    panics: Vec<String>,
}

/// The log of a daemon and the trap, shared with the thread that reads the log.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<State>>);

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Returns the listener for a daemon's log lines.
    pub fn listener(&self) -> Listener {
        let watch = self.clone();
        Arc::new(move |line| watch.heard(line))
    }

    fn heard(&self, line: &str) {
        let mut state = self.state();
        if line.contains("panicked at") {
            state.panics.push(line.to_owned());
        }
        let said = said(line);
        // Readers load repeatedly, so equal lines about loads are kept once.
        let is_load = said.as_ref().is_some_and(|said| said.point == StagingPoint::Loading.name());
        if !(is_load && state.said.last() == said.as_ref()) {
            state.lines.push_back(line.to_owned());
        }
        if state.lines.len() > KEPT {
            state.lines.pop_front();
        }
        let Some(said) = said else { return };
        if let Some((point, victims, signal)) = &state.trap
            && point.name() == said.point
        {
            // Kill under the lock: until the trap is removed, no thread reaps a victim, which would
            // free its process id for reuse.
            for victim in victims {
                let _ = kill_process(*victim, *signal);
            }
            state.trap = None;
            state.sprung = Some(Instant::now());
        }
        state.said.push(said);
    }

    /// Sets the trap: the victims get `signal` as soon as the daemon logs `point`.
    pub fn set_trap(&self, point: StagingPoint, victims: &[Pid], signal: Signal) {
        let mut state = self.state();
        (state.trap, state.sprung) = (Some((point, victims.to_vec(), signal)), None);
    }

    /// Removes the trap. Returns whether it has sprung.
    pub fn take_trap(&self) -> bool {
        let mut state = self.state();
        state.trap = None;
        state.sprung.take().is_some()
    }

    /// Returns whether the trap has sprung.
    pub fn has_sprung(&self) -> bool {
        self.state().sprung.is_some()
    }

    /// Returns whether a point of a step was logged.
    pub fn has_said(&self, point: StagingPoint, step: u64) -> bool {
        self.state()
            .said
            .iter()
            .any(|said| (said.point.as_str(), said.step) == (point.name(), step))
    }

    /// Returns the log lines about panics.
    pub fn panics(&self) -> Vec<String> {
        self.state().panics.clone()
    }

    /// Returns the last log lines.
    pub fn tail(&self) -> String {
        self.state().lines.iter().fold(String::new(), |text, line| text + line + "\n")
    }
}

/// Returns the trace point that a log line names.
fn said(line: &str) -> Option<Said> {
    let (_, rest) = line.split_once(TARGET)?;
    let mut words = rest.strip_prefix(": ")?.split(' ');
    let point = words.next()?.to_owned();
    let (_, step) = words.next()?.rsplit_once('/')?;
    Some(Said { point, step: step.parse().ok()? })
}
