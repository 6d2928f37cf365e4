//! Restoring: from the catalogue or by a save record, whole or by ranges.

mod by_save_record;
mod checkpoint_index;
mod output;
pub(super) mod plan_and_read;
mod restore_request;
pub(super) mod selection;
pub(super) mod stripe_planning;

pub use checkpoint_index::CheckpointIndex;
pub use plan_and_read::RestoreReport;
pub use restore_request::RestoreRequest;
pub use selection::{MemorySink, ReadRange};
