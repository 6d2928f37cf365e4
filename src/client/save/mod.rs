//! Saving a checkpoint: its stripes, leaves, completion and commit.

mod joint_save;
mod save_decisions;
mod save_session;
mod shard_upload;
mod stall_timer;
mod writer_watch;

pub use joint_save::{JointDecisions, JointWriter};
pub use save_decisions::{NewShard, SaveCode, SaveDecisions, SaveFate};
pub use save_session::{SaveOptions, SaveReport};
