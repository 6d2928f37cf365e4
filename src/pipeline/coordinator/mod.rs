//! Archiving and repair: a coordinator takes the shards of a committed step. It turns each stripe's
//! replicas into n proven pieces (docs/semantics.md, section 4), or makes again what nodes have lost
//! (section 11).
//!
//! `archive_request` runs an archive request, and `watch_request` watches one that another
//! coordinator runs; `error` defines the errors that stop it;
//! `owned_shard` owns a shard and commits its stripes; `owned_stripe` is one of its stripes;
//! `stripe_archiving` archives it. Its steps: `ensure_replicas` recreates missing replicas; `orders_and_proofs` turns a plan into
//! orders and verifies the proofs; `plan_execution` runs them; `receipts` stores and finds
//! receipts; `drop_replicas` drops the replicas.
//!
//! `step_repair` runs a repair over the shards of a step; `stripe_repair` repairs one stripe:
//! `piece_repair` makes its missing pieces, `moves` chooses other nodes for the pieces of those
//! that are given up, `node_loads` spreads the load over the nodes, `replica_repair` its missing
//! replicas, and `record_repair` sends the records that nodes lack. `lease_keeper` keeps the lease
//! of an owner.

mod archive_request;
mod drop_replicas;
mod ensure_replicas;
mod error;
mod lease_keeper;
mod moves;
mod node_loads;
mod orders_and_proofs;
mod owned_shard;
mod owned_stripe;
mod piece_repair;
mod plan_execution;
mod receipts;
mod record_repair;
mod replica_repair;
mod step_repair;
mod stripe_archiving;
mod stripe_repair;
mod watch_request;

pub use archive_request::{ArchiveEventSender, Coordinator, list_shard_roots};
pub use error::CoordinatorError;
pub(crate) use receipts::{ArchivedAttempt, choose_receipt_that_counts};
pub use step_repair::{RepairCause, RepairEventSender, RepairLimits, StripesByShard};
