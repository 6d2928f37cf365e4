//! The client's side of a save: sends blocks and records to their holders.

mod stripe_uploader;

pub use stripe_uploader::{FailedNodes, SaveError, ShardSource, StripeUploader};
