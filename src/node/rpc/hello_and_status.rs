//! The calls by which nodes and clients get to know this node: hello, and its status.

use std::sync::PoisonError;

use crate::net::{Peer, Role};
use crate::node::{MAX_INTRODUCED, Node};
use crate::wire::NodeAddress;
use crate::wire::RemoteError;
use crate::wire::calls::{Hello, HelloAnswer, NodeStatusAnswer};

impl Node {
    /// Answers a hello. If a node introduces itself by it, its address is kept.
    pub(in crate::node) async fn record_introduction(
        &self,
        call: Hello,
        peer: &Peer,
    ) -> Result<HelloAnswer, RemoteError> {
        if let Some(node) = call.me.filter(|node| peer.role == Role::Node && peer.name == node.name)
        {
            // This node may have noted an epoch without its catalogue server, and may know no other
            // node to ask.
            self.context.remote.add_fallback_nodes([NodeAddress::of(&node)]);
            let mut met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
            if met.len() < MAX_INTRODUCED || met.contains_key(&node.name) {
                met.insert(node.name.clone(), node);
            }
        }
        Ok(HelloAnswer {
            cluster: self.context.settings.cluster,
            node: self.context.settings.name.clone(),
            epoch: self.context.store.highest_seen_epoch(),
            map: self.context.store.last_db_id(),
            revision: self.context.store.revision_of_current_db(),
            catalogue: self.context.catalogue_server_address(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    pub(in crate::node) async fn get_node_status(&self) -> Result<NodeStatusAnswer, RemoteError> {
        let totals = self.context.store.totals();
        let space = self.context.store.disk_space()?;
        let budgets = [
            ("archive", &self.budgets.archive),
            ("save", &self.budgets.save),
            ("restore", &self.budgets.restore),
            ("control", &self.budgets.control),
            ("requests", &self.budgets.requests),
        ];
        let notes = self.collect_status_warnings(totals.quarantined).await?;
        Ok(NodeStatusAnswer {
            replicas: (totals.replica_files, totals.replica_bytes),
            pieces: (totals.piece_files, totals.piece_bytes),
            record_bytes: totals.small_bytes,
            quarantined: totals.quarantined,
            disk: (space.total_bytes, space.free_bytes),
            budgets: budgets
                .map(|(name, share)| {
                    (name.to_owned(), share.used_bytes(), share.peak_bytes(), share.total_bytes())
                })
                .to_vec(),
            peak_memory_bytes: crate::clock::peak_memory_bytes(),
            segmentation_offload: self.segmentation_offload,
            catalogue: self.context.local_catalogue().is_some(),
            notes,
        })
    }
}
