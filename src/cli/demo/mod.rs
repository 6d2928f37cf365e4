//! `demo`: everything that rapidraid does, once, on this machine, with real daemons and real bytes.
//!
//! It promises that what it tells is measured or checked: sizes come from the nodes' own status, the traffic of every
//! hop is held against the model, and a restored file has the BLAKE3 of the one that was saved. At the end, however
//! it comes, no process and no folder is left (unless `--stay` asks for it).

mod daemons;
mod facts;
mod report;
mod stage;
mod story;

use super::args::Demo;
use super::node::Signals;
use super::printer::Failure;
use super::{Front, Outcome};
use crate::kind::ErrorKind;

/// The command.
pub async fn run(front: &mut Front, options: Demo) -> Outcome {
    let mut signals = Signals::new()?;
    tokio::select! {
        // Dropping the story ends its daemons and removes its folder.
        outcome = story::tell(front, &options) => Ok(Box::new(outcome?)),
        which = signals.next() => {
            let message = format!("ended by {which}: all nodes are stopped and their folder is removed");
            Err(Failure::new(ErrorKind::Unavailable, message).with_hint("run the demo again when you like"))
        }
    }
}
