//! Checkpoint storage that distributed trainers trust.
//!
//! The library is a house of floors (`docs/architecture.md`); a floor uses only the floors below it.

pub mod budget;
pub mod catalogue;
pub mod cli;
pub mod client;
pub mod clock;
pub mod code;
pub mod config;
pub mod entropy;
pub mod format;
pub mod gf;
pub mod id;
pub mod kind;
pub mod net;
pub mod node;
pub mod pipeline;
pub mod placement;
pub mod plan;
pub mod planner;
pub mod stage;
pub mod store;
pub mod topology;
pub mod units;
pub mod wire;
pub mod workers;
