//! Saving from the client's side: blocks and records go to their holders.

mod stripe;

pub use stripe::{FailedNodes, SaveError, ShardSource, StripeUploader};
