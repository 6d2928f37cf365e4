//! The two images of a disk in memory, and what a power cut makes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::file::FileState;
use super::hold;
use crate::entropy::{Entropy, SeededEntropy};

pub(super) struct FileNode {
    pub(super) state: Mutex<FileState>,
    pub(super) used: Arc<AtomicU64>,
    /// No other file has it, and it is kept over crashes.
    pub(super) number: u64,
}

impl Drop for FileNode {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.used.fetch_sub(state.space(), Ordering::Relaxed);
    }
}

#[derive(Clone)]
pub(super) enum Node {
    File(Arc<FileNode>),
    Dir(Arc<Mutex<DirState>>),
}

impl Node {
    fn same(&self, other: &Node) -> bool {
        match (self, other) {
            (Node::File(a), Node::File(b)) => Arc::ptr_eq(a, b),
            (Node::Dir(a), Node::Dir(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// A folder: the names that are seen and the ones that are durable.
#[derive(Default)]
pub(super) struct DirState {
    pub(super) seen: BTreeMap<String, Node>,
    pub(super) durable: BTreeMap<String, Node>,
}

/// What a power cut leaves.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// What was synced.
    Synced,
    /// That, and of the rest what the coin says.
    Torn(&'a SeededEntropy),
    /// All that was seen.
    All,
}

/// What a power cut leaves of a folder and all below it.
pub(super) fn image_of_dir(
    dir: &Mutex<DirState>,
    left: Left<'_>,
    used: &Arc<AtomicU64>,
) -> Arc<Mutex<DirState>> {
    let dir = hold(dir);
    let mut kept = match left {
        Left::All => dir.seen.clone(),
        Left::Synced | Left::Torn(_) => dir.durable.clone(),
    };
    if let Left::Torn(coin) = left {
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
    let image = |node: &Node| match node {
        Node::Dir(dir) => Node::Dir(image_of_dir(dir, left, used)),
        Node::File(file) => {
            let state = hold(&file.state);
            let contents = match left {
                Left::Synced => state.durable.clone(),
                Left::Torn(coin) => state.torn(coin),
                Left::All => state.seen.clone(),
            };
            used.fetch_add(contents.len, Ordering::Relaxed);
            let unreadable = state.unreadable.clone();
            let mut image = FileState::synced(contents);
            image.unreadable = unreadable;
            let state = Mutex::new(image);
            Node::File(Arc::new(FileNode { state, used: used.clone(), number: file.number }))
        }
    };
    let seen: BTreeMap<_, _> =
        kept.iter().map(|(name, node)| (name.clone(), image(node))).collect();
    Arc::new(Mutex::new(DirState { durable: seen.clone(), seen }))
}

/// Makes a folder and all below it durable as they are seen.
pub(super) fn sync_tree(dir: &Mutex<DirState>) {
    let mut dir = hold(dir);
    for node in dir.seen.values() {
        match node {
            Node::File(file) => hold(&file.state).sync(),
            Node::Dir(dir) => sync_tree(dir),
        }
    }
    dir.durable = dir.seen.clone();
}
