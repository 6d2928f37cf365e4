//! The trace points of a step's way through the daemon. A task logs the name of a point just before
//! the step passes it.
//!
//! The points show an operator how far a step has come, and let a test kill a process at one of
//! them. Their names follow docs/staging.md, 4 and 7. Nothing else depends on them.

use crate::id::{Job, Step};

/// The target of the log lines. `RUST_LOG=rapidraid::staging=debug` shows them and nothing else.
pub const TARGET: &str = "rapidraid::staging";

macro_rules! points {
    ($($(#[$meta:meta])* $variant:ident = $name:literal,)*) => {
        /// A trace point.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum StagingPoint {
            $($(#[$meta])* $variant,)*
        }

        impl StagingPoint {
            /// All points, in the order of their declaration.
            pub const ALL: &'static [StagingPoint] = &[$(StagingPoint::$variant,)*];

            /// Returns the name in the log: one lower-case word.
            pub fn name(self) -> &'static str {
                match self {
                    $(StagingPoint::$variant => $name,)*
                }
            }
        }
    };
}

points! {
    /// A header says *filling*, and the owner is about to be notified.
    Filling = "filling",
    /// All ranks have staged the step, and its record is written.
    Staged = "staged",
    /// The extents are about to be hashed.
    Hashing = "hashing",
    /// The hashes are written.
    Hashed = "hashed",
    /// The id of a save is written, and the save is about to begin.
    Saving = "saving",
    /// All bytes are stored and hashed again, and the commit is about to be sent.
    Confirmed = "confirmed",
    /// The cluster has committed the save, and the record does not say so yet.
    Decided = "decided",
    /// The record says that the step is committed.
    Committed = "committed",
    /// The record of a released or dropped step is about to be removed.
    Forgetting = "forgetting",
    /// A step was found for a load, and the process is about to be notified.
    Loading = "loading",
    /// A step is about to be read from the cluster.
    Fetching = "fetching",
    /// The saves that a launch abandons are on record, and are about to be settled.
    Abandoning = "abandoning",
}

/// Logs that a step passes a point.
pub(super) fn trace_point(point: StagingPoint, job: &Job, step: Step) {
    tracing::debug!(target: TARGET, "{} {job}/{step}", point.name());
}
