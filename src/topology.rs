//! The nodes of the cluster as one client or daemon knows them: addresses, failure domains and
//! liveness.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::try_join;

use crate::catalogue::record_access::read_ring_changes;
use crate::catalogue::{Catalogue, CatalogueError};
use crate::format::records::{LeaveState, Node, RingChanges, RingNode, ShardRoot};
use crate::id::{NodeId, PeerName};
use crate::wire::NodeAddress;
use crate::wire::calls::NodeView;

/// The registered nodes by node id, the nodes that were silent when last asked, and the ring
/// changes.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    nodes: BTreeMap<NodeId, NodeView>,
    /// Nodes that did not answer the last request made through this directory or a clone of it. The
    /// lease of such a node may stay alive for some seconds.
    silent: Arc<Mutex<HashSet<NodeId>>>,
    /// The ring changes: the state and the successors of each node that has one.
    ring_changes: Arc<HashMap<NodeId, (LeaveState, Vec<NodeId>)>>,
}

impl Directory {
    /// Returns the directory of these nodes.
    pub fn new(views: Vec<NodeView>, ring_changes: RingChanges) -> Self {
        let nodes = views.into_iter().map(|view| (NodeId::of(&view.node.name), view)).collect();
        let ring_changes = ring_changes.changes.into_iter().map(|change| {
            let successors = change.successors.iter().map(NodeId::of).collect();
            (NodeId::of(&change.node), (change.state, successors))
        });
        Self { nodes, silent: Arc::default(), ring_changes: Arc::new(ring_changes.collect()) }
    }

    /// Returns the directory of the nodes of a catalogue.
    ///
    /// # Errors
    /// If the catalogue does not answer.
    pub async fn read(catalogue: &dyn Catalogue) -> Result<Self, CatalogueError> {
        let both = try_join(catalogue.list_nodes(), read_ring_changes(catalogue));
        let (views, ring_changes) = both.await?;
        Ok(Self::new(views, ring_changes))
    }

    /// Returns the nodes that may hold data or records of a shard: the nodes of its root's ring and
    /// all their successors, without nodes that have left (docs/semantics.md, 10).
    pub fn nodes_to_ask(&self, root: &ShardRoot) -> impl Iterator<Item = NodeId> + use<> {
        let mut nodes: Vec<NodeId> = root.ring.iter().map(|member| member.node).collect();
        nodes.extend(self.all_successors_of(&nodes));
        nodes.retain(|node| !self.has_left(*node));
        nodes.into_iter()
    }

    /// Returns the current ring of a shard: the nodes that have the shard's records or are to get
    /// them, and that may get blocks and pieces of it. These are the nodes of the root's ring
    /// without those that have left, and the successors of nodes that are leaving or have left.
    pub fn current_ring(&self, root: &ShardRoot) -> Vec<RingNode> {
        let named: Vec<NodeId> = root.ring.iter().map(|member| member.node).collect();
        let mut ring = root.ring.clone();
        for node in self.active_successors_of(&named) {
            let domain = self.domain_in(&ring, node);
            ring.push(RingNode { node, domain });
        }
        ring.retain(|member| !self.has_left(member.node));
        ring
    }

    /// Returns whether a node is in the ring of a shard's root, or is a successor of such a node.
    pub fn is_named_by(&self, root: &ShardRoot, node: NodeId) -> bool {
        let named: Vec<NodeId> = root.ring.iter().map(|member| member.node).collect();
        named.contains(&node) || self.all_successors_of(&named).contains(&node)
    }

    /// Returns the state of a node, or `None` if it has no ring change.
    pub fn leave_state_of(&self, node: NodeId) -> Option<LeaveState> {
        self.ring_changes.get(&node).map(|(state, _)| *state)
    }

    /// Returns the successors of these nodes, transitively, without the nodes themselves.
    pub fn all_successors_of(&self, nodes: &[NodeId]) -> Vec<NodeId> {
        self.follow_successors(nodes, |_| true)
    }

    /// Returns the successors of these nodes as [`Directory::all_successors_of`] does, but does not
    /// follow the successors of a node that has returned.
    pub fn active_successors_of(&self, nodes: &[NodeId]) -> Vec<NodeId> {
        self.follow_successors(nodes, |state| state != LeaveState::Returned)
    }

    fn follow_successors(
        &self,
        nodes: &[NodeId],
        is_followed: impl Fn(LeaveState) -> bool,
    ) -> Vec<NodeId> {
        if self.ring_changes.is_empty() {
            return Vec::new();
        }
        let mut seen: HashSet<NodeId> = nodes.iter().copied().collect();
        let (mut next, mut found) = (nodes.to_vec(), Vec::new());
        while let Some(node) = next.pop() {
            let change = self.ring_changes.get(&node).filter(|(state, _)| is_followed(*state));
            for &successor in change.into_iter().flat_map(|(_, successors)| successors) {
                if seen.insert(successor) {
                    next.push(successor);
                    found.push(successor);
                }
            }
        }
        found
    }

    /// Returns whether a node has left the rings that name it. The data that it stored is not
    /// expected back.
    pub fn has_left(&self, node: NodeId) -> bool {
        self.leave_state_of(node) == Some(LeaveState::Left)
    }

    /// Returns whether a node is leaving or has left. Nothing new is given to it.
    pub fn is_leaving_or_left(&self, node: NodeId) -> bool {
        self.leave_state_of(node) >= Some(LeaveState::Leaving)
    }

    /// Returns whether a save whose ring names the node may be completed: the node is registered, has not
    /// left, and is live if it is leaving.
    pub fn may_complete_save_on(&self, node: NodeId) -> bool {
        match self.is_leaving_or_left(node) {
            true => !self.has_left(node) && self.is_live(node),
            false => self.address(node).is_some(),
        }
    }

    /// Returns whether a node may receive data: it is live, stores data, and neither is leaving nor
    /// has left.
    pub fn can_receive_data(&self, node: NodeId) -> bool {
        let stores = |view: &NodeView| view.node.storage;
        self.is_live(node)
            && self.nodes.get(&node).is_some_and(stores)
            && !self.is_leaving_or_left(node)
    }

    /// Returns the number of a node's failure domain in a ring: the number that a member of the same
    /// domain has, or a new one.
    fn domain_in(&self, ring: &[RingNode], node: NodeId) -> u16 {
        let of = |node: NodeId| {
            let view = self.nodes.get(&node)?;
            Some((&view.node.zone, &view.node.rack))
        };
        let own = of(node);
        let same = ring.iter().find(|member| own.is_some() && of(member.node) == own);
        let new = || ring.iter().map(|member| member.domain.saturating_add(1)).max();
        same.map(|member| member.domain).or_else(new).unwrap_or_default()
    }

    /// Returns the address of a node, if it is registered.
    pub fn address(&self, node: NodeId) -> Option<NodeAddress> {
        let view = self.nodes.get(&node)?;
        Some(NodeAddress::of(&view.node))
    }

    /// Returns the name of a node for messages: its registered name, or its id in text form.
    pub fn name(&self, node: NodeId) -> String {
        self.nodes.get(&node).map_or_else(|| node.to_string(), |view| view.node.name.to_string())
    }

    /// Returns the name of a node, if it is registered.
    pub fn peer_name(&self, node: NodeId) -> Option<PeerName> {
        self.nodes.get(&node).map(|view| view.node.name.clone())
    }

    /// Returns whether the node's lease is alive and the node is not silent.
    pub fn is_live(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|view| view.live) && !self.is_silent(node)
    }

    /// Returns whether the node's lease is alive. The node may be silent all the same.
    pub fn has_lease(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|view| view.live)
    }

    /// Records whether a node answered. Silent nodes are asked last. Returns whether this changed
    /// the node's state.
    pub fn heard(&self, node: NodeId, answered: bool) -> bool {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        if answered { silent.remove(&node) } else { silent.insert(node) }
    }

    /// Returns whether the node did not answer the last request made to it.
    pub fn is_silent(&self, node: NodeId) -> bool {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner).contains(&node)
    }

    /// Returns the storage nodes that new saves may use: their leases are alive, and they neither
    /// are leaving nor have left. Silent nodes are included.
    pub fn storage_for_saves(&self) -> Vec<Node> {
        let live = self.nodes.iter().filter(|(_, view)| view.live && view.node.storage);
        let staying = live.filter(|(node, _)| !self.is_leaving_or_left(**node));
        staying.map(|(_, view)| view.node.clone()).collect()
    }

    /// Returns all storage nodes, live or not, in node-id order.
    pub fn storage(&self) -> Vec<NodeId> {
        let storage = self.nodes.iter().filter(|(_, view)| view.node.storage);
        storage.map(|(id, _)| *id).collect()
    }

    /// Returns the registered nodes of a ring, sorted by name.
    pub fn list_ring_nodes(&self, ring: &[RingNode]) -> Vec<Node> {
        let found = ring.iter().filter_map(|member| self.nodes.get(&member.node));
        let mut nodes: Vec<Node> = found.map(|view| view.node.clone()).collect();
        nodes.sort_by(|one, other| one.name.cmp(&other.name));
        nodes
    }

    /// Returns all nodes, in node-id order.
    pub fn views(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::RingChange;

    fn id(text: &str) -> NodeId {
        NodeId::of(&text.parse().unwrap())
    }

    fn change(node: &str, state: LeaveState, successors: &[&str]) -> RingChange {
        let successors = successors.iter().map(|node| node.parse().unwrap()).collect();
        RingChange { node: node.parse().unwrap(), state, successors }
    }

    #[test]
    fn successors_are_followed_also_in_a_circle() {
        let changes = vec![
            change("a", LeaveState::Left, &["b"]),
            change("b", LeaveState::Leaving, &["c", "e"]),
            change("c", LeaveState::Returned, &["a", "f"]),
        ];
        let directory = Directory::new(Vec::new(), RingChanges { changes });
        let all = |node| -> HashSet<NodeId> {
            directory.all_successors_of(&[id(node)]).into_iter().collect()
        };
        let active = |node| -> HashSet<NodeId> {
            directory.active_successors_of(&[id(node)]).into_iter().collect()
        };
        assert_eq!(all("a"), [id("b"), id("c"), id("e"), id("f")].into());
        assert_eq!(active("a"), [id("b"), id("c"), id("e")].into());
        assert_eq!(all("c"), [id("a"), id("b"), id("e"), id("f")].into());
        assert!(active("c").is_empty() && all("e").is_empty());
        assert!(directory.has_left(id("a")) && !directory.has_left(id("b")));
        assert!(directory.is_leaving_or_left(id("b")) && !directory.is_leaving_or_left(id("c")));
        assert!(!directory.is_leaving_or_left(id("e")));
    }
}
