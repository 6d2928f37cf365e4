//! The client's side of a save: sends blocks and records to their holders.

mod block_upload;
mod error;
mod shard_source;
mod stripe_uploader;

pub use error::SaveError;
pub use shard_source::ShardSource;
pub use stripe_uploader::{FailedNodes, StripeUploader};
