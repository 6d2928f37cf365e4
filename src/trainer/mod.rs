//! Checkpoints of training jobs. Trainers write their state into shared memory, and a staging
//! daemon saves it from there (docs/staging.md).
//!
//! The trainer's side ([`session`], [`load`]) blocks without an async runtime and uses no network,
//! so that it can live in any process, including one that forks. The daemon's side ([`daemon`]) is
//! built with the feature `cluster`.

pub mod cgroup;
pub mod copy;
#[cfg(feature = "cluster")]
pub mod daemon;
pub mod error;
pub mod fill;
pub mod frames;
mod labels;
pub mod load;
pub mod mapping;
pub mod protocol;
pub mod segment;
pub mod session;

pub use error::StagingError;
