//! Checkpoints of training jobs: state goes into shared memory, and a staging daemon saves it from there (docs/staging.md).
//!
//! The trainer's side ([`session`], [`load`]) waits without an async runtime and knows no network, so that it can live in any process,
//! also one that forks. The daemon's side ([`daemon`]) is built with the feature `cluster`.

pub mod cgroup;
#[cfg(feature = "cluster")]
pub mod daemon;
pub mod error;
pub mod frames;
pub mod load;
pub mod mapping;
pub mod protocol;
pub mod segment;
pub mod session;

pub use error::StagingError;
