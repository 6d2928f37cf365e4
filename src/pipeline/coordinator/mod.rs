//! Archiving and repair: a coordinator takes the shards of a committed step. It turns each stripe's
//! replicas into n proven pieces (docs/semantics.md, section 4), or makes again what nodes have lost
//! (section 11).
//!
//! `archive_request` runs an archive request, and `watch_request` watches one that another
//! coordinator runs; `error` defines the errors that stop an archiving or a repair; `owned_shard`
//! owns a shard and commits its stripes; `owned_stripe` is one stripe of an owned shard;
//! `stripe_archiving` archives such a stripe. The steps of that archiving: `ensure_replicas`
//! recreates missing replicas; `orders_and_proofs` turns a plan into orders and verifies the
//! proofs; `plan_execution` runs them; `receipts` stores and finds receipts; `drop_replicas` drops
//! the replicas.
//!
//! `step_repair` repairs the shards of a step; `repair_task` is its task, with its limits. `stripe_repair` repairs one stripe. `piece_repair`
//! makes the missing pieces of an archived stripe. `replica_repair` copies the missing replicas of
//! a stripe that is not archived. `record_repair` sends nodes the records that they lack. `moves`
//! chooses other nodes for pieces whose nodes are given up. `stripe_counts` counts the stripes that
//! an archiving has left. `node_loads` counts the hops that a
//! repair has given to each node, so that plans prefer nodes with few hops. `repair_rate` limits the
//! rate of automatic repairs. `lease_keeper` keeps the lease under which a coordinator owns requests
//! and shards.

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
mod repair_rate;
mod repair_task;
mod replica_repair;
mod step_repair;
mod stripe_archiving;
mod stripe_counts;
mod stripe_repair;
mod watch_request;

pub use archive_request::{ArchiveEventSender, Coordinator, list_shard_roots};
pub use error::CoordinatorError;
pub(crate) use receipts::{ArchivedAttempt, ReceiptUse, choose_receipt_that_counts};
pub use repair_rate::RepairRate;
pub use repair_task::{RepairCause, RepairLimits, StripesByShard};
pub use step_repair::RepairEventSender;
