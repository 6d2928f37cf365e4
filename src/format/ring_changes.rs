//! The record of the nodes that leave the rings of shards (docs/semantics.md, 10).

use serde::{Deserialize, Serialize};

use super::envelope::RecordKind;
use super::records::Record;
use crate::id::PeerName;

/// Maximum number of ring changes of a cluster.
pub const MAX_RING_CHANGES: usize = 1024;
/// Maximum number of successors of one node.
pub const MAX_SUCCESSORS: usize = 16;

/// A node that leaves the rings that name it, in the catalogue. The record is never removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingChange {
    /// The node that leaves.
    pub node: PeerName,
    /// The state of the node.
    pub state: LeaveState,
    /// The nodes that join the rings of `node` and are asked besides it, in ascending order; at
    /// most [`MAX_SUCCESSORS`].
    pub successors: Vec<PeerName>,
}

/// The state of a node's departure from its rings, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LeaveState {
    /// The node was leaving or had left, and has registered again.
    Returned,
    /// The node is leaving. Nothing new is given to it.
    Leaving,
    /// The node was removed, and nothing is missing without it.
    Left,
}

/// The ring changes of a cluster, one for each node. A node stores them as it last received them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingChanges {
    /// The changes, by node; at most [`MAX_RING_CHANGES`].
    pub changes: Vec<RingChange>,
}

impl Record for RingChange {
    const KIND: RecordKind = RecordKind::RingChange;
}

impl Record for RingChanges {
    const KIND: RecordKind = RecordKind::RingChanges;
}

impl RingChange {
    /// Returns the change of a node that is to leave and has no successor.
    pub fn leaving(node: PeerName) -> Self {
        Self { node, state: LeaveState::Leaving, successors: Vec::new() }
    }

    /// Adds a successor. Returns `false` if the node has too many.
    pub fn add_successor(&mut self, successor: PeerName) -> bool {
        let Err(at) = self.successors.binary_search(&successor) else { return true };
        if self.successors.len() >= MAX_SUCCESSORS {
            return false;
        }
        self.successors.insert(at, successor);
        true
    }
}

impl RingChanges {
    /// Adds a change, or merges it with the change that the same node has already: the result has
    /// the successors of both and the lower of the two states. Leaves out changes and successors
    /// that are beyond the limits.
    pub fn merge(&mut self, change: RingChange) {
        match self.changes.binary_search_by(|known| known.node.cmp(&change.node)) {
            Ok(at) => {
                let known = &mut self.changes[at];
                known.state = known.state.min(change.state);
                for successor in change.successors {
                    known.add_successor(successor);
                }
            }
            Err(at) if self.changes.len() < MAX_RING_CHANGES => self.changes.insert(at, change),
            Err(_) => {}
        }
    }

    /// Returns the record that a node is leaving, has left or has returned; `None` if there is none.
    pub fn find(&self, node: &PeerName) -> Option<&RingChange> {
        let at = self.changes.binary_search_by(|change| change.node.cmp(node)).ok()?;
        self.changes.get(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> PeerName {
        text.parse().unwrap()
    }

    fn change(node: &str, state: LeaveState, successors: &[&str]) -> RingChange {
        let successors = successors.iter().map(|node| name(node)).collect();
        RingChange { node: name(node), state, successors }
    }

    fn changes(all: &[RingChange]) -> RingChanges {
        let mut changes = RingChanges::default();
        all.iter().cloned().for_each(|change| changes.merge(change));
        changes
    }

    #[test]
    fn merged_changes_keep_all_successors_and_the_least_departure() {
        let left = change("b", LeaveState::Left, &["c"]);
        let back = change("b", LeaveState::Returned, &["a", "c"]);
        let both = changes(&[change("b", LeaveState::Returned, &["a", "c"])]);
        assert_eq!(changes(&[left.clone(), back.clone()]), both);
        assert_eq!(changes(&[back, left]), both);
    }

    #[test]
    fn everything_has_a_limit() {
        let mut full = RingChanges::default();
        for number in 0..=MAX_RING_CHANGES {
            full.merge(RingChange::leaving(name(&format!("n{number}"))));
        }
        assert_eq!(full.changes.len(), MAX_RING_CHANGES);
        let mut change = RingChange::leaving(name("a"));
        for number in 0..MAX_SUCCESSORS {
            assert!(change.add_successor(name(&format!("n{number}"))));
        }
        assert!(change.add_successor(name("n0")) && !change.add_successor(name("m")));
    }
}
