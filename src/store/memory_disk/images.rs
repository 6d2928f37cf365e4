//! The visible and the durable image of a disk in memory, and the effect of a power cut on them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::file::FileState;
use super::hold;
use crate::entropy::{Entropy, SeededEntropy};

pub(super) struct FileNode {
    pub(super) state: Mutex<FileState>,
    pub(super) used: Arc<AtomicU64>,
    /// A number that is unique to the file and kept across crashes.
    pub(super) number: u64,
}

impl Drop for FileNode {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.used.fetch_sub(state.space(), Ordering::Relaxed);
    }
}

#[derive(Clone)]
pub(super) enum TreeNode {
    File(Arc<FileNode>),
    Dir(Arc<Mutex<DirState>>),
}

impl TreeNode {
    fn same(&self, other: &TreeNode) -> bool {
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
    pub(super) seen: BTreeMap<String, TreeNode>,
    pub(super) durable: BTreeMap<String, TreeNode>,
}

/// The part of the contents that a power cut leaves.
#[derive(Clone, Copy)]
pub(super) enum Leftover<'a> {
    /// Everything that was synced.
    Synced,
    /// Everything that was synced, and the unsynced changes that the coin selects.
    Torn(&'a SeededEntropy),
    /// Everything that was visible.
    All,
}

/// Returns the state in which a power cut leaves a folder and everything below it.
pub(super) fn image_of_dir(
    dir: &Mutex<DirState>,
    left: Leftover<'_>,
    used: &Arc<AtomicU64>,
) -> Arc<Mutex<DirState>> {
    let dir = hold(dir);
    let mut kept = match left {
        Leftover::All => dir.seen.clone(),
        Leftover::Synced | Leftover::Torn(_) => dir.durable.clone(),
    };
    if let Leftover::Torn(coin) = left {
        let names: BTreeSet<&String> = dir.seen.keys().chain(dir.durable.keys()).collect();
        for name in names {
            let (seen, durable) = (dir.seen.get(name), dir.durable.get(name));
            let same = seen.zip(durable).is_some_and(|(a, b)| a.same(b));
            match seen {
                _ if same || coin.below(2) == 0 => {}
                Some(node) => drop(kept.insert(name.clone(), node.clone())),
                None => drop(kept.remove(name)),
            }
        }
    }
    let image = |node: &TreeNode| match node {
        TreeNode::Dir(dir) => TreeNode::Dir(image_of_dir(dir, left, used)),
        TreeNode::File(file) => {
            let state = hold(&file.state);
            let contents = match left {
                Leftover::Synced => state.durable.clone(),
                Leftover::Torn(coin) => state.torn(coin),
                Leftover::All => state.seen.clone(),
            };
            used.fetch_add(contents.len, Ordering::Relaxed);
            let unreadable = state.unreadable.clone();
            let mut image = FileState::synced(contents);
            image.unreadable = unreadable;
            let state = Mutex::new(image);
            TreeNode::File(Arc::new(FileNode { state, used: used.clone(), number: file.number }))
        }
    };
    let seen: BTreeMap<_, _> =
        kept.iter().map(|(name, node)| (name.clone(), image(node))).collect();
    Arc::new(Mutex::new(DirState { durable: seen.clone(), seen }))
}

/// Makes the visible state of a folder and everything below it durable.
pub(super) fn sync_tree(dir: &Mutex<DirState>) {
    let mut dir = hold(dir);
    for node in dir.seen.values() {
        match node {
            TreeNode::File(file) => hold(&file.state).sync(),
            TreeNode::Dir(dir) => sync_tree(dir),
        }
    }
    dir.durable = dir.seen.clone();
}
