//! Verifying a checkpoint in place.

mod examine;
mod judge;
mod mend;
mod report;

pub use judge::{HeldItem, Problem};
pub use report::{AbsentNode, Fault, VerifyReport};
