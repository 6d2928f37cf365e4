//! Work that a node does without a request: it registers, catches up, retries failed work, and
//! finishes what others left unfinished. The catalogue server also applies the policy, repairs what
//! nodes have lost and collects orphans.

pub(super) mod archiving_takeover;
pub(super) mod automatic_repair;
pub(super) mod catch_up;
pub(super) mod deferred_removals;
pub(super) mod error;
pub(super) mod keep_registered;
pub(super) mod orphan_gc;
pub(super) mod replica_gc;
pub(super) mod retention;
pub(super) mod save_recovery;
mod steps_to_repair;
