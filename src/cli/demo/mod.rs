//! `demo`: shows every feature once on this machine, with real daemons and real bytes.
//!
//! All that it reports is measured or checked: sizes are from the nodes' own status, the traffic of
//! every hop is compared with the model, and the restored file has the BLAKE3 hash of the saved
//! one. Unless `--stay` asks for it, the demo leaves no process behind, and no folder unless it is
//! killed (SIGKILL).

mod daemons;
mod facts;
mod report;
mod stage;
mod story;

use super::args::Demo;
use super::interrupt::{Signals, interrupted};
use super::{Front, Outcome};

/// Runs the command `demo`.
pub async fn run(front: &mut Front, options: Demo) -> Outcome {
    let mut signals = Signals::new()?;
    tokio::select! {
        // Dropping the story ends its daemons and removes its folder.
        outcome = story::tell(front, &options) => Ok(Box::new(outcome?)),
        which = signals.next() => {
            let consequence = "all nodes are stopped and their folder is removed";
            Err(interrupted(which, consequence).with_hint("run the demo again when you like"))
        }
    }
}
