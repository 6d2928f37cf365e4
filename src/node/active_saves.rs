//! The saves that tasks of this node work on, so that no second task starts work on the same save.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::id::SaveId;

/// The saves that tasks of this node work on now.
pub(in crate::node) type ActiveSaves = Arc<Mutex<HashSet<SaveId>>>;

/// A task's claim on a save. Dropping it releases the save.
pub(in crate::node) struct ActiveSave {
    all: ActiveSaves,
    save: SaveId,
}

impl ActiveSave {
    /// Claims `save`. Returns `None` if another task of this node has claimed it.
    pub(in crate::node) fn begin(all: &ActiveSaves, save: SaveId) -> Option<Self> {
        let is_new = all.lock().unwrap_or_else(PoisonError::into_inner).insert(save);
        is_new.then(|| Self { all: all.clone(), save })
    }
}

impl Drop for ActiveSave {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.save);
    }
}
