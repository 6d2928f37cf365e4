//! The calls that any daemon serves for a client: saves, steps, removals, and reads while no
//! catalogue answers.

pub(super) mod begin_save;
pub(super) mod committed_steps;
pub(super) mod error;
mod joint_save;
pub(super) mod labels;
mod launches;
mod mark_snapshot;
mod open_saves;
mod page_limits;
pub(super) mod reads_without_catalogue;
pub(super) mod removal;
pub(super) mod retention_pause;
pub(super) mod save_lifecycle;
