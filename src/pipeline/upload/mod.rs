//! The client's side of a save: sends blocks and records to their holders.

mod block_upload;
mod shard_source;
mod stripe_uploader;

pub use shard_source::ShardSource;
pub use stripe_uploader::{FailedNodes, SaveError, StripeUploader};
