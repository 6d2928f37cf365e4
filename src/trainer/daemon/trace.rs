//! The points of a step's way through the daemon, by name: each is said in the log by the task that has just come there.
//!
//! An operator sees how far a step is, and a test kills a process exactly there. The names follow docs/staging.md, 4 and 7. Nothing else
//! depends on them.

use crate::id::{Job, Step};

/// The target of the lines. `RUST_LOG=rapidraid::staging=debug` shows them and nothing else.
pub const TARGET: &str = "rapidraid::staging";

macro_rules! points {
    ($($(#[$meta:meta])* $variant:ident = $name:literal,)*) => {
        /// A point.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum TracePoint {
            $($(#[$meta])* $variant,)*
        }

        impl TracePoint {
            /// All of them, in the order in which a step meets them.
            pub const ALL: &'static [TracePoint] = &[$(TracePoint::$variant,)*];

            /// Returns the name in the log: one lower-case word.
            pub fn name(self) -> &'static str {
                match self {
                    $(TracePoint::$variant => $name,)*
                }
            }
        }
    };
}

points! {
    /// A header says Filling, and its owner is about to be told.
    Filling = "filling",
    /// All ranks have staged the step, and its record is kept.
    Staged = "staged",
    /// The extents are about to be hashed.
    Hashing = "hashing",
    /// The hashes are kept.
    Hashed = "hashed",
    /// The id of a save is kept, and the save is about to begin.
    Saving = "saving",
    /// All bytes are stored and hashed again, and the commit is about to be sent.
    Confirmed = "confirmed",
    /// The cluster has committed the save, and the record does not say so yet.
    Decided = "decided",
    /// The record says that the step is committed.
    Committed = "committed",
    /// The record of a step that is over, or dropped, is about to be removed.
    Forgetting = "forgetting",
    /// A step was found for a load, and the process is about to be told.
    Loading = "loading",
    /// A step is about to be read from the cluster.
    Fetching = "fetching",
    /// What a launch abandons is kept, and is about to be settled.
    Abandoning = "abandoning",
}

/// Says that a step has come to a point.
pub(super) fn trace_point(point: TracePoint, job: &Job, step: Step) {
    tracing::debug!(target: TARGET, "{} {job}/{step}", point.name());
}
