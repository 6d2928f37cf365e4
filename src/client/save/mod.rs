//! Saving a checkpoint: its stripes, leaves, completion and commit.

mod save_driver;
mod save_session;

pub use save_driver::{NewShard, SaveCode, SaveDriver, SaveFate};
pub use save_session::{SaveOptions, SaveReport};
