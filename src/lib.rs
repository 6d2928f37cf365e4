//! Checkpoint storage that distributed trainers trust.
//!
//! The library is built in layers (`docs/architecture.md`); a layer uses only the layers below it.
//!
//! Without the feature `cluster`, only the parts that a trainer's process needs are built: the
//! formats and the trainer's side of staging.

#[cfg(feature = "cluster")]
pub mod budget;
#[cfg(feature = "cluster")]
pub mod catalogue;
#[cfg(feature = "cluster")]
pub mod cli;
#[cfg(feature = "cluster")]
pub mod client;
#[cfg(feature = "cluster")]
pub mod clock;
pub mod code;
pub mod config;
pub mod entropy;
pub mod format;
pub mod gf;
pub mod id;
pub mod kind;
#[cfg(feature = "cluster")]
pub mod net;
#[cfg(feature = "cluster")]
pub mod node;
#[cfg(feature = "cluster")]
pub mod pipeline;
#[cfg(feature = "cluster")]
pub mod placement;
pub mod plan;
#[cfg(feature = "cluster")]
pub mod planner;
#[cfg(feature = "cluster")]
pub mod repair_policy;
pub mod stage;
#[cfg(feature = "cluster")]
pub mod store;
#[cfg(feature = "cluster")]
pub mod topology;
pub mod trainer;
pub mod units;
pub mod wire;
#[cfg(feature = "cluster")]
pub mod workers;

/// The Rust example of the README, compiled as a doc test.
#[cfg(all(doctest, feature = "cluster"))]
#[doc = include_str!("../README.md")]
struct Readme;
