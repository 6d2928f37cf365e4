//! The saves that tasks of this node work on, so that no second task starts work on the same save.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::id::SaveId;

/// The saves that tasks of this node work on now.
pub(in crate::node) type ActiveSaves = Arc<Mutex<HashSet<SaveId>>>;

/// A task's claim on a save. Dropping it releases the save.
pub(in crate::node) struct ActiveSaveGuard {
    active_saves: ActiveSaves,
    save: SaveId,
}

impl ActiveSaveGuard {
    /// Claims `save`. Returns `None` if another task of this node has claimed it.
    pub(in crate::node) fn try_claim(active_saves: &ActiveSaves, save: SaveId) -> Option<Self> {
        let is_new = active_saves.lock().unwrap_or_else(PoisonError::into_inner).insert(save);
        is_new.then(|| Self { active_saves: active_saves.clone(), save })
    }
}

impl Drop for ActiveSaveGuard {
    fn drop(&mut self) {
        self.active_saves.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.save);
    }
}
