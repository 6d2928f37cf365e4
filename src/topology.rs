//! The nodes of the cluster as one side knows them: addresses, domains, and who is live.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::format::records::Node;
use crate::id::{NodeId, PeerName};
use crate::wire::NodeAddress;
use crate::wire::calls::NodeView;

/// Registered nodes by number.
#[derive(Debug, Clone, Default)]
pub struct Directory {
    nodes: BTreeMap<NodeId, NodeView>,
    /// Nodes that did not answer whoever holds this directory, or a clone of it: their leases may live on for seconds.
    silent: Arc<Mutex<HashSet<NodeId>>>,
}

impl Directory {
    /// The directory of these nodes.
    pub fn new(views: Vec<NodeView>) -> Self {
        let nodes = views.into_iter().map(|view| (NodeId::of(&view.node.name), view)).collect();
        Self { nodes, silent: Arc::default() }
    }

    /// Where a node is reached, if it is registered.
    pub fn address(&self, node: NodeId) -> Option<NodeAddress> {
        let view = self.nodes.get(&node)?;
        Some(NodeAddress { name: view.node.name.clone(), host_port: view.node.address.clone() })
    }

    /// What people call a node.
    pub fn name(&self, node: NodeId) -> String {
        self.nodes.get(&node).map_or_else(|| node.to_string(), |view| view.node.name.to_string())
    }

    /// Its name, if it is registered.
    pub fn peer_name(&self, node: NodeId) -> Option<PeerName> {
        self.nodes.get(&node).map(|view| view.node.name.clone())
    }

    /// Whether its lease lives, and it has not been found silent since.
    pub fn is_live(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|view| view.live) && !self.is_silent(node)
    }

    /// Notes whether a node answered: silent ones are asked last. Gives whether that is news.
    pub fn heard(&self, node: NodeId, answered: bool) -> bool {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        if answered { silent.remove(&node) } else { silent.insert(node) }
    }

    /// Whether it did not answer when it was asked last.
    pub fn is_silent(&self, node: NodeId) -> bool {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner).contains(&node)
    }

    /// Live nodes that store data.
    pub fn live_storage(&self) -> Vec<Node> {
        let live = self.nodes.values().filter(|view| view.live && view.node.storage);
        live.map(|view| view.node.clone()).collect()
    }

    /// All nodes that store data, live or not, in node-id order.
    pub fn storage(&self) -> Vec<NodeId> {
        let storage = self.nodes.iter().filter(|(_, view)| view.node.storage);
        storage.map(|(id, _)| *id).collect()
    }

    /// All nodes.
    pub fn views(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.values()
    }
}
