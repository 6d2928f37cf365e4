//! Verifying a checkpoint in place.

mod examine_stripes;
mod judge_stripe;
mod mend_replicas;
mod report;

pub use judge_stripe::{HeldItem, Problem};
pub use report::{AbsentNode, Fault, VerifyReport};
