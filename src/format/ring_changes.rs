//! The record of the nodes that leave the rings of shards (docs/semantics.md, 10).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::envelope::RecordKind;
use super::records::Record;
use crate::id::{NodeId, PeerName};

/// Maximum number of nodes that have ever left or had a successor.
pub const MAX_RING_CHANGES: usize = 1024;
/// Maximum number of successors of one node.
pub const MAX_SUCCESSORS: usize = 16;

/// A node that leaves the rings that name it, in the catalogue. It is never removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingChange {
    /// The node that leaves.
    pub node: PeerName,
    /// Whether it has left.
    pub state: LeaveState,
    /// The nodes that are asked besides it, in ascending order; at most [`MAX_SUCCESSORS`].
    pub successors: Vec<PeerName>,
}

/// How far a node has left its rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LeaveState {
    /// The node left or was about to, and has come back.
    Returned,
    /// The node is to leave. It gets nothing new.
    Leaving,
    /// The node was removed, and nothing is missing without it.
    Left,
}

/// The ring changes of the cluster, as a node last received them.
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
    /// Adds a change, or merges it with that of the same node: the node has all successors of both,
    /// and has left only if both say so. Leaves out what is beyond the limits.
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

    /// Returns the change of a node, if it has one.
    pub fn find(&self, node: &PeerName) -> Option<&RingChange> {
        let at = self.changes.binary_search_by(|change| change.node.cmp(node)).ok()?;
        self.changes.get(at)
    }

    /// Returns the state of a node, or `None` if it has no ring change.
    pub fn state_of(&self, node: NodeId) -> Option<LeaveState> {
        let change = self.changes.iter().find(|change| NodeId::of(&change.node) == node);
        change.map(|change| change.state)
    }

    /// Returns the successors of these nodes, and the successors of those, without the nodes
    /// themselves. Nodes that have returned lead to successors only if `with_returned`.
    pub fn successors_of(&self, nodes: &[NodeId], with_returned: bool) -> Vec<NodeId> {
        if self.changes.is_empty() {
            return Vec::new();
        }
        let mut seen: BTreeSet<NodeId> = nodes.iter().copied().collect();
        let (mut next, mut successors) = (nodes.to_vec(), Vec::new());
        while let Some(node) = next.pop() {
            let is_followed = |change: &&RingChange| {
                NodeId::of(&change.node) == node
                    && (with_returned || change.state != LeaveState::Returned)
            };
            let of_node = self.changes.iter().filter(is_followed);
            for successor in of_node.flat_map(|change| &change.successors) {
                let successor = NodeId::of(successor);
                if seen.insert(successor) {
                    next.push(successor);
                    successors.push(successor);
                }
            }
        }
        successors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> PeerName {
        text.parse().unwrap()
    }

    fn id(text: &str) -> NodeId {
        NodeId::of(&name(text))
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
    fn successors_are_followed_also_in_a_circle() {
        let found = changes(&[
            change("a", LeaveState::Left, &["b"]),
            change("b", LeaveState::Leaving, &["c", "e"]),
            change("c", LeaveState::Returned, &["a", "f"]),
        ]);
        let of = |node, with_returned| -> BTreeSet<NodeId> {
            found.successors_of(&[id(node)], with_returned).into_iter().collect()
        };
        assert_eq!(of("a", true), [id("b"), id("c"), id("e"), id("f")].into());
        assert_eq!(of("a", false), [id("b"), id("c"), id("e")].into());
        assert_eq!(of("c", true), [id("a"), id("b"), id("e"), id("f")].into());
        assert!(of("c", false).is_empty() && of("e", true).is_empty());
        assert_eq!(found.state_of(id("b")), Some(LeaveState::Leaving));
        assert_eq!(found.state_of(id("e")), None);
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
