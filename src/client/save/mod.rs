//! Saving a checkpoint: its stripes, leaves, completion and commit.

mod save_decisions;
mod save_session;

pub use save_decisions::{NewShard, SaveCode, SaveDecisions, SaveFate};
pub use save_session::{SaveOptions, SaveReport};
