//! Ensures two good replicas of each block before a stripe is archived. A missing or corrupt
//! replica is recreated from the other replica, on the same node or on a spare (docs/semantics.md,
//! 4.2).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;

use super::owned_stripe::OwnedStripe;
use super::{Coordinator, CoordinatorError};
use crate::format::file::FileName;
use crate::format::records::{Record, StripeRecord};
use crate::id::NodeId;
use crate::kind::ErrorKind;
use crate::net::call::address;
use crate::pipeline::record_fetch::StripeInfo;
use crate::placement::Spares;
use crate::topology::Directory;
use crate::wire::calls::{CopyReplica, FileView, ListFiles, ListSources, PutPlaces};

/// Time limit for copying one block between nodes.
const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Maximum number of spares that are asked to take the replicas of a node of a stripe.
pub(super) const MAX_SPARES: usize = 3;

/// The files of a stripe, by node; `None` for a node that does not answer.
pub(super) type FilesByNode = BTreeMap<NodeId, Option<Vec<FileView>>>;

/// For each block, a node with a replica of it, whole or damaged.
pub(super) type ReplicaSources = BTreeMap<usize, NodeId>;

/// A replica that is to be recreated.
pub(super) struct Recreation {
    /// The block.
    pub block: usize,
    /// A node that has a replica of the block, whole or damaged.
    pub from: NodeId,
    /// The node that stores the new replica.
    pub to: NodeId,
}

impl Coordinator {
    /// Asks each live node of `nodes` which files of the stripe it holds. Returns the files by
    /// node.
    pub(super) async fn list_files(
        &self,
        directory: &Directory,
        info: &StripeInfo,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> FilesByNode {
        let ask = nodes.into_iter().map(|node| async move {
            let call = ListFiles { stripe: info.fixed.stripe };
            let answer = match directory.address(node) {
                Some(address) if directory.is_live(node) => {
                    self.caller.call(&address, &call).await.ok()
                }
                _ => None,
            };
            (node, answer)
        });
        join_all(ask).await.into_iter().collect()
    }
}

impl OwnedStripe<'_> {
    /// Ensures that every position of the stripe has its replicas. Puts spares in the places of
    /// nodes that do not answer or are leaving, and records the new places. Returns the node of each
    /// position.
    pub(super) async fn ensure_replicas(&self) -> Result<Vec<NodeId>, CoordinatorError> {
        let mut held = self.list_files(self.info.places.iter().copied()).await;
        if !self.missing_blocks(&held).is_empty() {
            // The record's places are a hint. Any node of the ring may have the blocks that are not
            // found there.
            let rest: Vec<NodeId> =
                self.ring_nodes().filter(|node| !held.contains_key(node)).collect();
            held.extend(self.list_files(rest).await);
        }
        let missing = self.missing_blocks(&held);
        let damaged = match missing.is_empty() {
            true => ReplicaSources::new(),
            false => self.find_replica_sources().await,
        };
        if let Some(&block) = missing.iter().find(|block| !damaged.contains_key(block)) {
            return Err(self.missing_block_error(block, &held));
        }
        let mut refused = BTreeSet::new();
        let mut places = self.replace_absent_nodes(&held, &refused)?;
        while let Err((node, error)) = self.recreate_replicas(&places, &mut held, &damaged).await {
            // A spare may be full, or its disk may fail: then another one takes its place.
            let is_of_spare = !self.info.places.contains(&node)
                && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Io);
            refused.insert(node);
            match self.replace_absent_nodes(&held, &refused) {
                Ok(others) if is_of_spare && refused.len() < MAX_SPARES => places = others,
                _ => return Err(error),
            }
        }
        if places != self.info.places {
            self.update_record_places(&places).await?;
        }
        Ok(places)
    }

    pub(super) fn ring_nodes(&self) -> impl Iterator<Item = NodeId> {
        self.directory.nodes_to_ask(&self.shard.root)
    }

    pub(super) async fn list_files(&self, nodes: impl IntoIterator<Item = NodeId>) -> FilesByNode {
        self.coordinator.list_files(&self.directory, &self.info, nodes).await
    }

    /// Returns the blocks of which no node in `held` has a good replica.
    fn missing_blocks(&self, held: &FilesByNode) -> Vec<usize> {
        let blocks = &self.info.fixed.blocks;
        let blocks = (0..blocks.len()).filter(|&block| blocks[block].len_bytes > 0);
        blocks.filter(|&block| find_good_holder(&self.info, held, block).is_none()).collect()
    }

    /// Returns the error for a block of which no node that answered has a good replica.
    pub(super) fn missing_block_error(&self, block: usize, held: &FilesByNode) -> CoordinatorError {
        let stripe = self.info.fixed.stripe;
        let silent = held.iter().filter(|(_, files)| files.is_none());
        let silent: Vec<String> = silent.map(|(node, _)| self.directory.name(*node)).collect();
        let block = block as u32;
        match silent.is_empty() {
            true => CoordinatorError::BlockLost { stripe, block },
            false => {
                CoordinatorError::BlockUnreachable { stripe, block, silent: silent.join(", ") }
            }
        }
    }

    /// Returns, for each block, the first node of the ring that has a replica of it, whole or
    /// damaged. Other nodes may have the grains that are damaged there.
    pub(super) async fn find_replica_sources(&self) -> ReplicaSources {
        let stripe = self.info.fixed.stripe;
        let caller = &self.coordinator.caller;
        let live = self.ring_nodes().filter(|node| self.directory.is_live(*node));
        let asks = live.filter_map(|node| {
            let to = self.directory.address(node)?;
            Some(async move { (node, caller.call(&to, &ListSources { stripe }).await) })
        });
        let asks: Vec<_> = asks.collect();
        let mut sources = ReplicaSources::new();
        for (node, answer) in join_all(asks).await {
            for source in answer.unwrap_or_default() {
                if let FileName::Replica { block } = source.file {
                    sources.entry(block.into()).or_insert(node);
                }
            }
        }
        sources
    }

    /// Returns the stripe's places, with a spare in the place of each node that does not answer or is
    /// leaving. A leaving node keeps its place if there is no spare. The `refused` nodes are no
    /// spares.
    fn replace_absent_nodes(
        &self,
        held: &FilesByNode,
        refused: &BTreeSet<NodeId>,
    ) -> Result<Vec<NodeId>, CoordinatorError> {
        let mut places = self.info.places.clone();
        let can_receive_data =
            |node| self.directory.can_receive_data(node) && !refused.contains(&node);
        let (ring, layout) = (self.directory.current_ring(&self.shard.root), self.shard.layout);
        let mut spares = Spares::new(&ring, layout, &places, can_receive_data);
        for position in 0..places.len() {
            let node = places[position];
            let answers = held.get(&node).is_some_and(Option::is_some);
            if answers && !self.directory.is_leaving_or_left(node) {
                continue;
            }
            let missing = format!("node {} does not answer", self.directory.name(node));
            let stripe = self.info.fixed.stripe;
            match spares.take(&places, position, |_| false) {
                Some(spare) => places[position] = spare,
                None if answers => {}
                None => return Err(CoordinatorError::NoSpare { stripe, missing }),
            }
        }
        Ok(places)
    }

    /// Returns the replicas that nodes in `places` lack, each with a node to copy it from. A
    /// damaged replica is a source too: the node that lacks the replica then gathers it from the
    /// good grains of all nodes.
    fn plan_recreations(
        &self,
        places: &[NodeId],
        held: &FilesByNode,
        damaged: &ReplicaSources,
    ) -> Vec<Recreation> {
        let mut recreations = Vec::new();
        for (position, &to) in places.iter().enumerate() {
            for block in self.shard.layout.blocks_at(position) {
                if self.info.fixed.blocks[block].len_bytes > 0
                    && !has_good_replica(&self.info, held, to, block)
                    && let Some(from) =
                        find_good_holder(&self.info, held, block).or(damaged.get(&block).copied())
                {
                    recreations.push(Recreation { block, from, to });
                }
            }
        }
        recreations
    }

    /// Recreates the replicas that nodes in `places` lack. Returns the first failure, and the node
    /// that was to store the replica.
    async fn recreate_replicas(
        &self,
        places: &[NodeId],
        held: &mut FilesByNode,
        damaged: &ReplicaSources,
    ) -> Result<(), (NodeId, CoordinatorError)> {
        for recreation in self.plan_recreations(places, held, damaged) {
            let to = recreation.to;
            self.recreate_replica(recreation, held).await.map_err(|error| (to, error))?;
        }
        Ok(())
    }

    async fn recreate_replica(
        &self,
        recreation: Recreation,
        held: &mut FilesByNode,
    ) -> Result<(), CoordinatorError> {
        let (stripe, block) = (self.info.fixed.stripe, recreation.block);
        match self.order_replica_copy(recreation, None).await {
            Err(error) if error.kind() == ErrorKind::Lost => {
                tracing::warn!(%stripe, block, %error, "cannot recreate a replica: the other nodes have too few good grains of the block; this run does not archive the stripe");
                // The block counts as lost only if every node of the ring answers.
                held.extend(self.list_files(self.ring_nodes()).await);
                Err(self.missing_block_error(block, held))
            }
            copied => copied,
        }
    }

    /// Has a replica copied at `bytes_per_s`, or as fast as possible.
    pub(super) async fn order_replica_copy(
        &self,
        Recreation { block, from, to }: Recreation,
        bytes_per_s: Option<u64>,
    ) -> Result<(), CoordinatorError> {
        let (stripe, name) = (self.info.fixed.stripe, |node| self.directory.name(node));
        tracing::info!(%stripe, block, from = name(from), to = name(to), "recreating a replica");
        let unknown = |node| CoordinatorError::Unregistered { node };
        let source = self.directory.address(from).ok_or_else(|| unknown(from))?;
        let target = self.directory.address(to).ok_or_else(|| unknown(to))?;
        let expected = &self.info.fixed.blocks[block];
        let call = CopyReplica {
            stripe,
            block: block as u8,
            len_bytes: expected.len_bytes,
            root: expected.root,
            generation: self.shard.generation,
            coordinator: self.coordinator.me,
            from: source,
            bytes_per_s,
        };
        let caller = &self.coordinator.caller;
        Ok(caller.call_within(&address(&target), &call, FETCH_LIMIT).await?)
    }

    /// Writes the stripe's record with its new places to the nodes of n-k+1 of these places.
    async fn update_record_places(&self, places: &[NodeId]) -> Result<(), CoordinatorError> {
        let format =
            |error: crate::format::FormatError| CoordinatorError::Format(error.to_string());
        let record = StripeRecord::new(&self.info.fixed, places.to_vec()).map_err(format)?;
        let call = PutPlaces {
            stripe: self.info.fixed.stripe,
            generation: self.shard.generation,
            coordinator: self.coordinator.me,
            bytes: record.to_bytes().map_err(format)?,
        };
        let enough = self.shard.layout.n() - self.shard.layout.k() + 1;
        for &node in places.iter().take(enough) {
            let to = self.directory.address(node).ok_or(CoordinatorError::Unregistered { node })?;
            self.coordinator.caller.call(&to, &call).await?;
        }
        Ok(())
    }
}

/// Returns a node that has a good replica of the block, if there is one.
pub(super) fn find_good_holder(
    info: &StripeInfo,
    held: &FilesByNode,
    block: usize,
) -> Option<NodeId> {
    held.keys().copied().find(|&node| has_good_replica(info, held, node, block))
}

/// Returns whether `node` has a good replica of the block.
pub(super) fn has_good_replica(
    info: &StripeInfo,
    held: &FilesByNode,
    node: NodeId,
    block: usize,
) -> bool {
    let expected = &info.fixed.blocks[block];
    let files = held.get(&node).and_then(Option::as_ref);
    files.into_iter().flatten().any(|view| {
        view.file == FileName::Replica { block: block as u8 }
            && view.root == expected.root
            && view.len_bytes == expected.len_bytes
    })
}
