//! Saves that a task of this node works on, so that no second task begins.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::id::SaveId;

/// Saves that somebody here is at.
pub(in crate::node) type ActiveSaves = Arc<Mutex<HashSet<SaveId>>>;

/// The mark that somebody here is at a save, until it is dropped.
pub(in crate::node) struct ActiveSave {
    all: ActiveSaves,
    save: SaveId,
}

impl ActiveSave {
    /// `None`: it has the mark.
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
