//! The trace points of a save, an archiving, a removal, a rebuild, a change of rings and a restore.
//! A repair passes some trace points of an archiving. The process that is about to pass a trace
//! point logs its name.
//!
//! The log shows an operator how far an operation is, and a test kills a process exactly there. The
//! names are those of docs/semantics.md, 3 to 6, 8 and 10. Nothing else depends on them: a line is
//! written before the action that it names, and says nothing about the outcome.

use std::fmt::Display;

/// The log target of the lines. `RUST_LOG=rapidraid::stage=debug` shows them and nothing else.
pub const TARGET: &str = "rapidraid::stage";

macro_rules! stages {
    ($($(#[$meta:meta])* $variant:ident = $name:literal,)*) => {
        /// A trace point.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum TracePoint {
            $($(#[$meta])* $variant,)*
        }

        impl TracePoint {
            /// All trace points, in the order in which an operation passes them.
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

stages! {
    /// Save, gateway: the step is opened in the catalogue.
    Begin = "begin",
    /// The record of a joint save is about to be written.
    Join = "join",
    /// The ring of a save that belongs to no launch is about to be written.
    Ring = "ring",
    /// A launch is about to be registered as the newest one of its job.
    Register = "register",
    /// Save, client: the blocks of a stripe are sent.
    Send = "send",
    /// Save, holder: a block that arrived completely gets its name.
    Block = "block",
    /// Save, holder: the record of a stripe is written.
    Record = "record",
    /// Save, node of the ring: the leaves of a shard are written.
    Leaves = "leaves",
    /// Save, gateway: the shard root and the shard state are written to the catalogue.
    Seal = "seal",
    /// Save, gateway: the compare-and-set that commits.
    Decide = "decide",
    /// Save, node of the ring: a commit mark is written.
    Mark = "mark",
    /// Save, gateway: the step becomes visible.
    Publish = "publish",
    /// Archiving, coordinator: the archive request is written to the catalogue.
    Request = "request",
    /// Archiving, coordinator: the coordinator takes ownership of a shard.
    Take = "take",
    /// Archiving, coordinator: the replicas of a stripe are checked.
    Replicas = "replicas",
    /// Archiving and mending, node: a missing or damaged replica was copied from another node, or
    /// gathered from good grains, and gets its name on this node.
    Fetch = "fetch",
    /// Archiving, coordinator: the nodes of a plan reserve memory and disk space.
    Reserve = "reserve",
    /// Archiving, coordinator: the hops of a plan run.
    Run = "run",
    /// Archiving, node: a piece that was written completely gets its name.
    Piece = "piece",
    /// Archiving, coordinator: the fingerprints of the pieces are verified.
    Proof = "proof",
    /// Archiving, node: a receipt is written.
    Receipt = "receipt",
    /// Archiving, coordinator: the compare-and-set that commits a stripe.
    Archived = "archived",
    /// Archiving, node: replicas are removed.
    Drop = "drop",
    /// Archiving, coordinator: the catalogue records that all replicas of a stripe are dropped.
    Dropped = "dropped",
    /// Archiving, coordinator: the archive request is removed from the catalogue, or left for a
    /// later retry.
    Done = "done",
    /// Removal, gateway: the step becomes invisible.
    Removing = "removing",
    /// Removal, gateway: a shard is fenced permanently.
    Fence = "fence",
    /// Removal, node: a tombstone is written.
    Tombstone = "tombstone",
    /// Removal, node: the files of a save are purged.
    Sweep = "sweep",
    /// Removal, node: the save is recorded in the removed-save set and the tombstone is removed.
    Grave = "grave",
    /// Removal, catalogue server: the removal of an aborted save is deferred.
    Defer = "defer",
    /// Removal, gateway: the save's entries are removed from the catalogue.
    Forget = "forget",
    /// Rebuild, node: the next epoch is recorded durably.
    Claim = "claim",
    /// Rebuild, daemon: the inventory of the nodes that claimed the epoch is read completely.
    Census = "census",
    /// Rebuild, daemon: the new catalogue database gets its epoch.
    Map = "map",
    /// Replacement and removal of a node, gateway: the node is recorded as leaving.
    Leaving = "leaving",
    /// Replacement and removal of a node, on another node: that other node stores the ring changes
    /// and catches up.
    CatchUp = "catchup",
    /// Removal of a node, gateway: the compare-and-set that records that the node has left.
    Left = "left",
    /// Removal of a node, gateway: the node is taken off the list of nodes.
    Unlist = "unlist",
    /// Restore, client: the sources of each stripe are chosen.
    Plan = "plan",
    /// Restore, client: the first byte is written.
    Deliver = "deliver",
    /// Restore, client: the restored files get their names.
    Finish = "finish",
}

/// Logs that the operation on `what` is about to pass the trace point `stage`.
pub fn trace_point(stage: TracePoint, what: impl Display) {
    tracing::debug!(target: TARGET, %what, "{}", stage.name());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_single_words_and_differ() {
        let mut names: Vec<&str> = TracePoint::ALL.iter().map(|stage| stage.name()).collect();
        assert!(names.iter().all(|name| name.bytes().all(|byte| byte.is_ascii_lowercase())));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TracePoint::ALL.len());
    }
}
