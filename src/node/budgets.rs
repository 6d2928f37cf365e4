//! The shares of a daemon's memory.

use std::sync::Arc;
use std::time::Duration;

use super::context::NodeContext;
use super::storage::error::StorageError;
use crate::budget::{Budget, Reservation};
use crate::clock::deadline;
use crate::wire::RemoteError;

/// Maximum time that a call waits for memory of its share. After that the call fails with kind
/// `Busy`.
pub(in crate::node) const MEMORY_LIMIT: Duration = Duration::from_secs(6);

/// The shares of a daemon's memory. No share borrows from another.
pub(in crate::node) struct Budgets {
    pub(in crate::node) archive: Arc<Budget>,
    pub(in crate::node) save: Arc<Budget>,
    pub(in crate::node) restore: Arc<Budget>,
    pub(in crate::node) control: Arc<Budget>,
    pub(in crate::node) requests: Arc<Budget>,
}

impl Budgets {
    /// Returns the shares of `memory_bytes`: half for archiving, a quarter for saves, an eighth for
    /// reads, and a sixteenth for long requests. Of the last sixteenth, a quarter is for short
    /// requests; the rest is for the index and the catalogue.
    pub(in crate::node) fn new(memory_bytes: u64) -> Self {
        Self {
            archive: Budget::new("archive", archive_share_bytes(memory_bytes)),
            save: Budget::new("save", save_share_bytes(memory_bytes)),
            restore: Budget::new("restore", memory_bytes / 8),
            control: Budget::new("control", memory_bytes / 16),
            requests: Budget::new("requests", memory_bytes / 64),
        }
    }
}

/// Returns the share for archiving of a daemon with `memory_bytes` of memory.
pub(in crate::node) fn archive_share_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / 2
}

/// Returns the share for saves of a daemon with `memory_bytes` of memory.
pub(in crate::node) fn save_share_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / 4
}

/// Reserves `bytes` of memory from `share`. Returns the reservation.
///
/// # Errors
/// [`StorageError::NoMemory`] if the bytes are not free within [`MEMORY_LIMIT`];
/// [`StorageError::MemoryShareTooSmall`] if the whole share is smaller than `bytes`.
pub(in crate::node) async fn reserve_memory(
    context: &NodeContext,
    share: &Arc<Budget>,
    bytes: u64,
) -> Result<Reservation, RemoteError> {
    match deadline(&*context.clock, MEMORY_LIMIT, share.reserve(bytes)).await {
        Ok(Ok(reservation)) => Ok(reservation),
        Ok(Err(never)) => Err(StorageError::MemoryShareTooSmall(never).into()),
        Err(_) => Err(StorageError::NoMemory { node: context.settings.name.clone() }.into()),
    }
}
