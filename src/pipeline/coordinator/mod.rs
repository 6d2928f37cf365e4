//! Archiving: a coordinator takes the shards of a committed step and turns each stripe's replicas
//! into n proven pieces (docs/semantics.md, section 4).
//!
//! `request` runs an archive request; `error` defines the errors that stop it; `owned_shard` owns a
//! shard and commits its stripes; `stripe` archives one stripe; `orders` turns a plan into orders
//! and verifies the proofs; `replicas` recreates missing replicas.

mod error;
mod orders;
mod owned_shard;
mod replicas;
mod request;
mod stripe;

pub use error::ArchiveError;
pub use request::{Coordinator, Events, shard_roots};
