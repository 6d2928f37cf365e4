//! The stages of a save, an archiving, a removal, a rebuild and a restore, by name: each is said in the log by whoever is about to take it.
//!
//! An operator sees where something stands, and a test kills a process exactly there. The names are those of docs/semantics.md, 3 to 6 and 8.
//! Nothing else depends on them: a line is written before its stage, and says nothing about how it ends.

use std::fmt::Display;

/// What the lines are filed under. `RUST_LOG=rapidraid::stage=debug` shows them and nothing else.
pub const TARGET: &str = "rapidraid::stage";

macro_rules! stages {
    ($($(#[$meta:meta])* $variant:ident = $name:literal,)*) => {
        /// A stage.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum TracePoint {
            $($(#[$meta])* $variant,)*
        }

        impl TracePoint {
            /// All of them, in the order in which an operation meets them.
            pub const ALL: &'static [TracePoint] = &[$(TracePoint::$variant,)*];

            /// As it stands in the log: one lower-case word.
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
    /// Save, client: the blocks of a stripe are sent.
    Send = "send",
    /// Save, holder: a block that came whole gets its name.
    Block = "block",
    /// Save, holder: the record of a stripe is written.
    Record = "record",
    /// Save, ring: the leaves of a shard are written.
    Leaves = "leaves",
    /// Save, gateway: the root and the state of a shard go into the catalogue.
    Seal = "seal",
    /// Save, gateway: the compare-and-set that commits.
    Decide = "decide",
    /// Save, ring: a commit mark is written.
    Mark = "mark",
    /// Save, gateway: the step becomes visible.
    Publish = "publish",
    /// Archiving, coordinator: the wish goes into the catalogue.
    Wish = "wish",
    /// Archiving, coordinator: a shard is taken.
    Take = "take",
    /// Archiving, coordinator: the replicas of a stripe are looked at.
    Replicas = "replicas",
    /// Archiving, node: a replica is made again.
    Fetch = "fetch",
    /// Archiving, coordinator: the nodes of a plan reserve.
    Reserve = "reserve",
    /// Archiving, coordinator: the hops of a plan run.
    Run = "run",
    /// Archiving, node: a piece that was written whole gets its name.
    Piece = "piece",
    /// Archiving, coordinator: the pieces are judged by their fingerprints.
    Proof = "proof",
    /// Archiving, node: a receipt is written.
    Receipt = "receipt",
    /// Archiving, coordinator: the compare-and-set that commits a stripe.
    Archived = "archived",
    /// Archiving, node: replicas are removed.
    Drop = "drop",
    /// Archiving, coordinator: that all replicas are gone goes into the catalogue.
    Dropped = "dropped",
    /// Archiving, coordinator: the wish goes out of the catalogue, or is left to wait.
    Done = "done",
    /// Removal, gateway: the step goes out of sight.
    Removing = "removing",
    /// Removal, gateway: a shard is fenced for good.
    Fence = "fence",
    /// Removal, node: a tombstone is written.
    Tombstone = "tombstone",
    /// Removal, node: the files of a save go.
    Sweep = "sweep",
    /// Removal, node: the grave is written, the tombstone goes.
    Grave = "grave",
    /// Removal, gateway: the catalogue forgets the save.
    Forget = "forget",
    /// Rebuild, node: the next epoch is noted.
    Claim = "claim",
    /// Rebuild, daemon: what the nodes hold that claimed is read to the end.
    Census = "census",
    /// Rebuild, daemon: the new map gets its epoch.
    Map = "map",
    /// Restore, client: a way to read each stripe is looked for.
    Plan = "plan",
    /// Restore, client: the first byte is written.
    Deliver = "deliver",
    /// Restore, client: the files get their names.
    Finish = "finish",
}

/// Says that `stage` of `what` is about to be taken.
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
