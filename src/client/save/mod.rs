//! Saving a checkpoint: its stripes, leaves, completion and commit.

mod driver;
mod session;

pub use driver::{NewShard, SaveCode, SaveDriver, SaveFate};
pub use session::{SaveOptions, SaveReport};
