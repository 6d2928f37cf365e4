//! The visible and the durable image of a disk in memory, and the effect of a power cut on them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::file_contents::FileState;
use super::lock_ignoring_poison;
use crate::entropy::{Entropy, SeededEntropy};

pub(super) struct FileNode {
    pub(super) state: Mutex<FileState>,
    pub(super) disk_used_bytes: Arc<AtomicU64>,
    /// A number that is unique to the file and kept across crashes.
    pub(super) number: u64,
}

impl Drop for FileNode {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.disk_used_bytes.fetch_sub(state.occupied_bytes(), Ordering::Relaxed);
    }
}

#[derive(Clone)]
pub(super) enum TreeNode {
    File(Arc<FileNode>),
    Dir(Arc<Mutex<DirState>>),
}

impl TreeNode {
    fn is_same_node(&self, other: &TreeNode) -> bool {
        match (self, other) {
            (TreeNode::File(a), TreeNode::File(b)) => Arc::ptr_eq(a, b),
            (TreeNode::Dir(a), TreeNode::Dir(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// A folder: its visible and its durable names.
#[derive(Default)]
pub(super) struct DirState {
    pub(super) visible: BTreeMap<String, TreeNode>,
    pub(super) durable: BTreeMap<String, TreeNode>,
}

/// The part of the contents that a power cut leaves.
#[derive(Clone, Copy)]
pub(super) enum SurvivingWrites<'a> {
    /// Everything that was synced.
    Synced,
    /// Everything that was synced, and the unsynced changes that the coin selects.
    Torn(&'a SeededEntropy),
    /// Everything that was visible.
    All,
}

/// Returns the state in which a power cut leaves a folder and everything below it.
pub(super) fn crash_image_of_dir(
    dir: &Mutex<DirState>,
    surviving: SurvivingWrites<'_>,
    used_bytes: &Arc<AtomicU64>,
) -> Arc<Mutex<DirState>> {
    let dir = lock_ignoring_poison(dir);
    let mut kept = match surviving {
        SurvivingWrites::All => dir.visible.clone(),
        SurvivingWrites::Synced | SurvivingWrites::Torn(_) => dir.durable.clone(),
    };
    if let SurvivingWrites::Torn(coin) = surviving {
        let names: BTreeSet<&String> = dir.visible.keys().chain(dir.durable.keys()).collect();
        for name in names {
            let (seen, durable) = (dir.visible.get(name), dir.durable.get(name));
            let same = seen.zip(durable).is_some_and(|(a, b)| a.is_same_node(b));
            match seen {
                _ if same || coin.below(2) == 0 => {}
                Some(node) => drop(kept.insert(name.clone(), node.clone())),
                None => drop(kept.remove(name)),
            }
        }
    }
    let image = |node: &TreeNode| match node {
        TreeNode::Dir(dir) => TreeNode::Dir(crash_image_of_dir(dir, surviving, used_bytes)),
        TreeNode::File(file) => {
            let state = lock_ignoring_poison(&file.state);
            let contents = match surviving {
                SurvivingWrites::Synced => state.durable.clone(),
                SurvivingWrites::Torn(coin) => state.random_torn_contents(coin),
                SurvivingWrites::All => state.visible.clone(),
            };
            used_bytes.fetch_add(contents.len, Ordering::Relaxed);
            let unreadable = state.unreadable.clone();
            let mut image = FileState::with_synced_contents(contents);
            image.unreadable = unreadable;
            let state = Mutex::new(image);
            TreeNode::File(Arc::new(FileNode {
                state,
                disk_used_bytes: used_bytes.clone(),
                number: file.number,
            }))
        }
    };
    let seen: BTreeMap<_, _> =
        kept.iter().map(|(name, node)| (name.clone(), image(node))).collect();
    Arc::new(Mutex::new(DirState { durable: seen.clone(), visible: seen }))
}

/// Makes the visible state of a folder and everything below it durable.
pub(super) fn sync_tree(dir: &Mutex<DirState>) {
    let mut dir = lock_ignoring_poison(dir);
    for node in dir.visible.values() {
        match node {
            TreeNode::File(file) => lock_ignoring_poison(&file.state).sync(),
            TreeNode::Dir(dir) => sync_tree(dir),
        }
    }
    dir.durable = dir.visible.clone();
}
