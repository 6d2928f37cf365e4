//! Restoring: from the catalogue or by a save record, whole or by ranges.

mod by_record;
mod index;
mod output;
pub(super) mod read;
pub(super) mod selection;

pub use index::Index;
pub use output::RestoreRequest;
pub use read::RestoreReport;
pub use selection::{MemorySink, ReadRange};
