//! A disk that is full or takes no writes: the space that is released for it, and the warnings
//! about it (docs/semantics.md, 7, *A full disk*).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::node::context::NodeContext;
use crate::store::{Disk, ReserveState, Space, create_or_release_reserve};
use crate::units::ByteCount;

/// Interval between two checks of the free space.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Returns whether `new_bytes` more bytes would exceed the high-water mark of a disk, which is
/// `percent` percent of its size.
pub(in crate::node) fn exceeds_high_water(space: Space, new_bytes: u64, percent: u8) -> bool {
    let used = space.total_bytes.saturating_sub(space.free_bytes).saturating_add(new_bytes);
    used > space.total_bytes / 100 * u64::from(percent)
}

/// The service that releases and recreates the reserve of disk space, moves tombstones from slots
/// to files, and warns of a full disk.
pub(in crate::node) struct DiskSpace {
    context: Arc<NodeContext>,
    is_reserve_given_up: AtomicBool,
    is_index_in_memory: AtomicBool,
}

impl DiskSpace {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self {
            context,
            is_reserve_given_up: AtomicBool::new(false),
            is_index_in_memory: AtomicBool::new(false),
        }
    }

    /// Records that the index is in memory because the disk has no room for it.
    pub(in crate::node) fn note_index_in_memory(&self) {
        self.is_index_in_memory.store(true, Ordering::Relaxed);
    }

    /// Removes the reserve when the disk is nearly full and recreates it when there is room, until
    /// the daemon stops.
    pub(in crate::node) async fn run_reserve_adjustment(self: Arc<Self>, disk: Arc<dyn Disk>) {
        let mut told = None;
        loop {
            let disk = disk.clone();
            let looked = self.context.run_on_store(move |_| {
                create_or_release_reserve(&*disk).map_err(crate::store::StoreError::from)
            });
            match looked.await {
                Ok(state) => {
                    let is_given_up = state == ReserveState::Absent;
                    self.is_reserve_given_up.store(is_given_up, Ordering::Relaxed);
                    told = None;
                }
                Err(error) => {
                    let text = Some(error.to_string());
                    if told != text {
                        tracing::warn!(%error, "the reserve cannot be adjusted");
                    }
                    told = text;
                }
            }
            self.context.clock.sleep(LOOK_EVERY).await;
        }
    }

    /// Moves tombstones from slots to files, as far as the disk has room.
    pub(in crate::node) async fn move_tombstones_to_files(&self) {
        if let Err(error) = self.context.run_on_store(|store| store.move_slots_to_files()).await {
            tracing::debug!(%error, "the slot file was not made, or some tombstones stay in their slots");
        }
    }

    /// Returns the warning that saves are refused here, if they are. Saves fill a disk up to just
    /// below the high-water mark, so the check includes the size of one more block.
    fn high_water_warning(&self) -> Option<String> {
        let settings = &self.context.settings;
        let (block_bytes, percent) = (settings.block_bytes, settings.high_water_percent);
        let space = self.context.store.disk_space().ok()?;
        (settings.storage && exceeds_high_water(space, block_bytes, percent)).then(|| {
            format!(
                "its disk is at its high-water mark of {percent} %: it takes no new blocks of {}; remove or archive checkpoints, or add disk space",
                ByteCount(block_bytes)
            )
        })
    }

    /// Returns the warnings about this node's disk, each with the action that helps.
    pub(in crate::node) async fn disk_space_warnings(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Err(error) = self.context.run_on_store(|store| store.probe_writable()).await {
            notes.push(format!(
                "its data folder takes no writes ({error}): nothing is stored there"
            ));
        }
        notes.extend(self.high_water_warning());
        if !self.context.store.has_slot_file() {
            notes.push("it has no slots for tombstones, so `rm` may fail when its disk is full: free space".into());
        }
        if self.is_reserve_given_up.load(Ordering::Relaxed) {
            notes.push(
                "its disk is nearly full: free space, or remove checkpoints (`rapidraid rm`)"
                    .into(),
            );
        }
        if self.is_index_in_memory.load(Ordering::Relaxed) {
            notes.push("its disk had no room for the index, which is in memory: start the daemon again when there is room".into());
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_counts_the_new_block() {
        let space = |free_bytes| Space { total_bytes: 1000, free_bytes };
        assert!(!exceeds_high_water(space(250), 100, 85));
        assert!(exceeds_high_water(space(249), 100, 85));
        assert!(!exceeds_high_water(space(150), 0, 85));
        assert!(exceeds_high_water(space(0), u64::MAX, 99));
    }
}
