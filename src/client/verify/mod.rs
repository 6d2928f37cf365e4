//! Verifying a checkpoint where it lies.

mod examine;
mod judge;

pub use examine::{AbsentNode, Fault, VerifyReport};
pub use judge::{HeldItem, Problem};
