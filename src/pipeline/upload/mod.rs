//! The client's side of a save: sends blocks and records to their holders.

mod stripe;

pub use stripe::{FailedNodes, SaveError, ShardSource, StripeUploader};
