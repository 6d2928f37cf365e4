//! Archiving: a coordinator takes the shards of a committed step and turns each stripe's replicas into n proven pieces
//! (docs/semantics.md, section 4).
//!
//! Split by idea: `request` carries a request out; `error` says why it stops; `owned_shard` owns a shard and commits stripes; `stripe` archives one; `orders` turns a plan into orders and
//! proofs into verdicts; `replicas` makes missing replicas again.

mod error;
mod orders;
mod owned_shard;
mod replicas;
mod request;
mod stripe;

pub use error::ArchiveError;
pub use request::{Coordinator, Events, shard_roots};
