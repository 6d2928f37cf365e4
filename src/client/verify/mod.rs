//! Verifying a checkpoint where it lies.

mod examine;
mod judge;

pub use examine::{Away, Fault, VerifyReport};
pub use judge::{Held, Wrong};
