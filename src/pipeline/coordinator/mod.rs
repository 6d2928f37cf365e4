//! Archiving: a coordinator takes the shards of a committed step and turns each stripe's replicas
//! into n proven pieces (docs/semantics.md, section 4).
//!
//! `archive_request` runs an archive request, and `watch_request` watches one that another
//! coordinator runs; `error` defines the errors that stop it;
//! `owned_shard` owns a shard and commits its stripes; `stripe_archiving` archives one stripe. Its
//! steps: `ensure_replicas` recreates missing replicas; `orders_and_proofs` turns a plan into
//! orders and verifies the proofs; `plan_execution` runs them; `receipts` stores and finds
//! receipts; `drop_replicas` drops the replicas.

mod archive_request;
mod drop_replicas;
mod ensure_replicas;
mod error;
mod orders_and_proofs;
mod owned_shard;
mod plan_execution;
mod receipts;
mod stripe_archiving;
mod watch_request;

pub use archive_request::{ArchiveEventSender, Coordinator, list_shard_roots};
pub use error::ArchiveError;
