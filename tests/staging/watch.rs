//! What a staging daemon says of its steps, and the trap: processes that are killed as soon as it says a wanted point.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use rapidraid::trainer::daemon::trace::{TARGET, TracePoint};
use rustix::process::{Pid, Signal, kill_process};

use crate::machine::Listener;

/// Lines that are kept for a failure.
const KEPT: usize = 1000;

/// A point that was said, and of what step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub point: String,
    pub step: u64,
}

#[derive(Default)]
struct State {
    lines: VecDeque<String>,
    said: Vec<Said>,
    trap: Option<(TracePoint, Vec<Pid>, Signal)>,
    sprung: Option<Instant>,
    panics: Vec<String>,
}

/// Shared with the thread that reads what the daemon says.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<State>>);

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Hears a daemon's lines.
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
        // Readers load again and again.
        let is_load = said.as_ref().is_some_and(|said| said.point == TracePoint::Loading.name());
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
            // Under the lock: nobody waits for a victim, and so frees its number, before the trap is taken away.
            for victim in victims {
                let _ = kill_process(*victim, *signal);
            }
            state.trap = None;
            state.sprung = Some(Instant::now());
        }
        state.said.push(said);
    }

    /// From now on the victims get a signal as soon as the point is said.
    pub fn set_trap(&self, point: TracePoint, victims: &[Pid], signal: Signal) {
        let mut state = self.state();
        (state.trap, state.sprung) = (Some((point, victims.to_vec(), signal)), None);
    }

    /// Takes the trap away. Returns whether it has sprung.
    pub fn take_trap(&self) -> bool {
        let mut state = self.state();
        state.trap = None;
        state.sprung.take().is_some()
    }

    /// Returns whether the trap has sprung.
    pub fn has_sprung(&self) -> bool {
        self.state().sprung.is_some()
    }

    /// Returns whether a point was said of a step.
    pub fn has_said(&self, point: TracePoint, step: u64) -> bool {
        self.state()
            .said
            .iter()
            .any(|said| (said.point.as_str(), said.step) == (point.name(), step))
    }

    /// Returns what panicked.
    pub fn panics(&self) -> Vec<String> {
        self.state().panics.clone()
    }

    /// Returns the last lines.
    pub fn tail(&self) -> String {
        self.state().lines.iter().fold(String::new(), |text, line| text + line + "\n")
    }
}

/// The point that a log line says.
fn said(line: &str) -> Option<Said> {
    let (_, rest) = line.split_once(TARGET)?;
    let mut words = rest.strip_prefix(": ")?.split(' ');
    let point = words.next()?.to_owned();
    let (_, step) = words.next()?.rsplit_once('/')?;
    Some(Said { point, step: step.parse().ok()? })
}
