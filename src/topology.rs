//! The nodes of the cluster as one client or daemon knows them: addresses, failure domains and
//! liveness.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::format::records::Node;
use crate::id::{NodeId, PeerName};
use crate::wire::NodeAddress;
use crate::wire::calls::NodeView;

/// The registered nodes, by node id.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    nodes: BTreeMap<NodeId, NodeView>,
    /// Nodes that did not answer the last request made through this directory or a clone of it. The
    /// lease of such a node may stay alive for some seconds.
    silent: Arc<Mutex<HashSet<NodeId>>>,
}

impl Directory {
    /// Returns the directory of these nodes.
    pub fn new(views: Vec<NodeView>) -> Self {
        let nodes = views.into_iter().map(|view| (NodeId::of(&view.node.name), view)).collect();
        Self { nodes, silent: Arc::default() }
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

    /// Returns the storage nodes whose lease is alive, silent ones included.
    pub fn live_storage(&self) -> Vec<Node> {
        let live = self.nodes.values().filter(|view| view.live && view.node.storage);
        live.map(|view| view.node.clone()).collect()
    }

    /// Returns all storage nodes, live or not, in node-id order.
    pub fn storage(&self) -> Vec<NodeId> {
        let storage = self.nodes.iter().filter(|(_, view)| view.node.storage);
        storage.map(|(id, _)| *id).collect()
    }

    /// Returns all nodes, in node-id order.
    pub fn views(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.values()
    }
}
