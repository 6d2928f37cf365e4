//! The staging daemon yields to training: it hashes and sends saves on threads of low priority. If it
//! leads its session, that session gets little weight where the kernel shares processors between
//! sessions (sched(7), "The autogroup feature": there a thread's nice value only counts within its
//! session).
#![allow(clippy::disallowed_methods)] // a setting of the kernel, not a file

use std::io;
use std::num::NonZero;

use rustix::process::{getpriority_process, setpriority_process};
use tokio::runtime::{Builder, Handle, Runtime};

const AUTOGROUP: &str = "/proc/self/autogroup";
const STAT: &str = "/proc/self/stat";
/// Maximum number of threads that carry the packets of saves and of reads from the cluster.
const MAX_THREADS: usize = 8;

/// A runtime whose threads have a low priority. Dropping it shuts it down in the background, so
/// that it may be dropped anywhere.
pub struct Background {
    handle: Handle,
    runtime: Option<Runtime>,
}

impl Background {
    /// Starts the runtime with threads of at least the nice value `nice`.
    pub fn start(nice: i32) -> io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(2, NonZero::get);
        let threads = (cores / 2).clamp(1, MAX_THREADS);
        let yielding = move || {
            if let Err(error) = lower_thread(nice) {
                tracing::warn!(%error, "a thread of the staging daemon cannot lower its priority");
            }
        };
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("background")
            .on_thread_start(yielding)
            .enable_all()
            .build()?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    /// Returns a handle that spawns tasks on the runtime.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Raises the nice value of the calling thread to at least `nice`. On Linux the value belongs to
/// the thread, not to the process.
fn lower_thread(nice: i32) -> io::Result<()> {
    if getpriority_process(None)? < nice {
        setpriority_process(None, nice)?;
    }
    Ok(())
}

/// Raises the nice value of the daemon's session to at least `nice`, if the kernel has autogroups
/// and the daemon leads its session.
pub fn lower_session(nice: i32) {
    if !std::fs::read_to_string(STAT).is_ok_and(|text| leads_its_session(&text)) {
        return;
    }
    let Ok(text) = std::fs::read_to_string(AUTOGROUP) else { return };
    let now = nice_of_autogroup(&text);
    if now.is_some_and(|now| now < nice)
        && let Err(error) = std::fs::write(AUTOGROUP, nice.to_string())
    {
        tracing::warn!(%error, "the daemon's session keeps its normal weight: cannot write {AUTOGROUP}");
    }
}

/// Returns whether the process leads its session. `text` is a line of proc_pid_stat(5): process id,
/// name in brackets, state, parent, group, session. The session is 0 if its leader is outside of
/// this container; `getsid` of rustix does not accept that id.
fn leads_its_session(text: &str) -> bool {
    let Some((start, fields)) = text.rsplit_once(')') else { return false };
    let process = start.split_whitespace().next();
    process.is_some() && process == fields.split_whitespace().nth(3)
}

/// Parses a line such as `/autogroup-501 nice 0`. Returns the nice value.
fn nice_of_autogroup(text: &str) -> Option<i32> {
    text.split_whitespace().skip_while(|word| *word != "nice").nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_background_are_nice_and_others_are_not() {
        let before = getpriority_process(None).unwrap();
        let background = Background::start(before + 3).unwrap();
        let handle = background.handle();
        let (nice, blocking) = handle.block_on(async {
            let task = handle.spawn(async { getpriority_process(None).unwrap() });
            let job = handle.spawn_blocking(|| getpriority_process(None).unwrap());
            (task.await.unwrap(), job.await.unwrap())
        });
        assert_eq!((nice, blocking), (before + 3, before + 3));
        assert_eq!(getpriority_process(None).unwrap(), before);
    }

    #[test]
    fn the_leader_of_a_session_is_known() {
        assert!(leads_its_session("3 (cat) R 1 3 3 0 -1 4194304"));
        assert!(leads_its_session("3 (a) b (c) R 1 3 3 0 -1"));
        assert!(!leads_its_session("2 (cat) R 1 0 0 0 -1 4194304"));
        assert!(!leads_its_session("2 (cat) R 1 2 1 0 -1"));
        for text in ["", ")", "2 (cat", "2 (cat) R 1"] {
            assert!(!leads_its_session(text), "{text}");
        }
    }

    #[test]
    fn autogroups_are_read() {
        assert_eq!(nice_of_autogroup("/autogroup-501 nice 0\n"), Some(0));
        assert_eq!(nice_of_autogroup("/autogroup-7 nice -5\n"), Some(-5));
        assert_eq!(nice_of_autogroup("/autogroup-7\n"), None);
        assert_eq!(nice_of_autogroup(""), None);
    }
}
