//! Checkpoint storage that distributed trainers trust.
//!
//! The library is a house of floors (`docs/architecture.md`); a floor uses only the floors below it.

pub mod budget;
pub mod clock;
pub mod entropy;
pub mod format;
pub mod id;
pub mod kind;
pub mod store;
pub mod units;
