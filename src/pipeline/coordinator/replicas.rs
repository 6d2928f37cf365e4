//! Ensures two good replicas of each block before a stripe is archived. A missing or corrupt
//! replica is recreated from the other replica, on the same node or on a spare (docs/semantics.md,
//! 4.2).

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;

use super::owned_shard::OwnedShard;
use super::{ArchiveError, Coordinator};
use crate::format::file::FileName;
use crate::format::records::{Record, StripeRecord};
use crate::id::{NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::address;
use crate::pipeline::shard_records::StripeInfo;
use crate::placement::Spares;
use crate::topology::Directory;
use crate::wire::calls::{CopyReplica, FileView, ListFiles, ListSources, PutPlaces};

/// Time limit for copying one block between nodes.
const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// The files of a stripe, by node; `None` for a node that does not answer.
pub(super) type FilesByNode = BTreeMap<NodeId, Option<Vec<FileView>>>;

/// A node with a damaged replica, by block.
type Damaged = BTreeMap<usize, NodeId>;

/// Returns the error for a block of which no node that answered has a good replica.
fn lost_or_away(
    stripe: StripeId,
    block: usize,
    directory: &Directory,
    held: &FilesByNode,
) -> ArchiveError {
    let silent = held.iter().filter(|(_, files)| files.is_none());
    let silent: Vec<String> = silent.map(|(node, _)| directory.name(*node)).collect();
    let block = block as u32;
    match silent.is_empty() {
        true => ArchiveError::BlockLost { stripe, block },
        false => ArchiveError::Away { stripe, block, silent: silent.join(", ") },
    }
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

    /// Ensures that every position of the stripe has its replicas. Puts spares in the places of
    /// nodes that do not answer, and records the new places. Returns the node of each position.
    pub(super) async fn ensure_replicas(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
    ) -> Result<Vec<NodeId>, ArchiveError> {
        let stripe = info.fixed.stripe;
        let mut places = info.places.clone();
        let mut held = self.list_files(directory, info, places.iter().copied()).await;
        let ring = || shard.root.ring.iter().map(|member| member.node);
        let missing = |held: &FilesByNode| -> Vec<usize> {
            let blocks =
                (0..info.fixed.blocks.len()).filter(|&b| info.fixed.blocks[b].len_bytes > 0);
            blocks.filter(|&block| holder(info, held, block).is_none()).collect()
        };
        if !missing(&held).is_empty() {
            // The record's places are a hint. Any node of the ring may have the blocks that are not
            // found there.
            let rest: Vec<NodeId> = ring().filter(|node| !held.contains_key(node)).collect();
            held.extend(self.list_files(directory, info, rest).await);
        }
        let missing = missing(&held);
        let damaged = match missing.is_empty() {
            true => Damaged::new(),
            false => self.damaged_replicas(directory, info, ring()).await,
        };
        if let Some(&block) = missing.iter().find(|block| !damaged.contains_key(block)) {
            return Err(lost_or_away(stripe, block, directory, &held));
        }
        let is_live = |node| directory.is_live(node);
        let mut spares = Spares::new(&shard.root.ring, shard.layout, &places, is_live);
        let mut fetches = Vec::new();
        for position in 0..places.len() {
            let node = places[position];
            if held.get(&node).is_none_or(Option::is_none) {
                let missing = format!("node {} does not answer", directory.name(node));
                let spare = spares.take(&places, position, |_| false);
                places[position] = spare.ok_or(ArchiveError::NoSpare { stripe, missing })?;
            }
            let to = places[position];
            for block in shard.layout.blocks_at(position) {
                if info.fixed.blocks[block].len_bytes > 0
                    && !has_good(info, &held, to, block)
                    && let Some(from) = holder(info, &held, block).or(damaged.get(&block).copied())
                {
                    fetches.push((to, block, from));
                }
            }
        }
        for (node, block, from) in fetches {
            tracing::info!(%stripe, block, from = directory.name(from), to = directory.name(node), "recreating a replica");
            match self.copy_replica(shard, info, directory, node, block, from).await {
                Err(error) if error.kind() == ErrorKind::Lost => {
                    tracing::warn!(%stripe, block, %error, "cannot recreate a replica: the other nodes have too few good grains of the block; the stripe is not archived now");
                    // The block counts as lost only if every node of the ring answers.
                    held.extend(self.list_files(directory, info, ring()).await);
                    return Err(lost_or_away(stripe, block, directory, &held));
                }
                fetched => fetched?,
            }
        }
        if places != info.places {
            self.put_places(shard, info, directory, &places).await?;
        }
        Ok(places)
    }

    /// Returns, for each block, the first node of the ring that has a damaged replica of it. Other
    /// nodes may have the grains that are damaged there.
    async fn damaged_replicas(
        &self,
        directory: &Directory,
        info: &StripeInfo,
        ring: impl Iterator<Item = NodeId>,
    ) -> Damaged {
        let stripe = info.fixed.stripe;
        let asks = ring.filter(|node| directory.is_live(*node)).filter_map(|node| {
            let to = directory.address(node)?;
            Some(async move { (node, self.caller.call(&to, &ListSources { stripe }).await) })
        });
        let asks: Vec<_> = asks.collect();
        let mut damaged = Damaged::new();
        for (node, answer) in join_all(asks).await {
            for source in answer.unwrap_or_default() {
                if let FileName::Replica { block } = source.file {
                    damaged.entry(block.into()).or_insert(node);
                }
            }
        }
        damaged
    }

    async fn copy_replica(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
        to: NodeId,
        block: usize,
        from: NodeId,
    ) -> Result<(), ArchiveError> {
        let source = directory.address(from).ok_or(ArchiveError::Unregistered { node: from })?;
        let target = directory.address(to).ok_or(ArchiveError::Unregistered { node: to })?;
        let expected = &info.fixed.blocks[block];
        let call = CopyReplica {
            stripe: info.fixed.stripe,
            block: block as u8,
            len_bytes: expected.len_bytes,
            root: expected.root,
            generation: shard.generation,
            coordinator: self.me,
            from: source,
        };
        Ok(self.caller.call_within(&address(&target), &call, FETCH_LIMIT).await?)
    }

    /// Writes the stripe's record with its new places to n-k+1 of them.
    async fn put_places(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
        places: &[NodeId],
    ) -> Result<(), ArchiveError> {
        let format = |error: crate::format::FormatError| ArchiveError::Format(error.to_string());
        let record = StripeRecord::new(&info.fixed, places.to_vec()).map_err(format)?;
        let call = PutPlaces {
            stripe: info.fixed.stripe,
            generation: shard.generation,
            coordinator: self.me,
            bytes: record.to_bytes().map_err(format)?,
        };
        let enough = shard.layout.n() - shard.layout.k() + 1;
        for &node in places.iter().take(enough) {
            let to = directory.address(node).ok_or(ArchiveError::Unregistered { node })?;
            self.caller.call(&to, &call).await?;
        }
        Ok(())
    }
}

/// Returns a node that has a good replica of the block, if there is one.
fn holder(info: &StripeInfo, held: &FilesByNode, block: usize) -> Option<NodeId> {
    held.keys().copied().find(|&node| has_good(info, held, node, block))
}

/// Returns whether `node` has a good replica of the block.
fn has_good(info: &StripeInfo, held: &FilesByNode, node: NodeId, block: usize) -> bool {
    let expected = &info.fixed.blocks[block];
    let files = held.get(&node).and_then(Option::as_ref);
    files.into_iter().flatten().any(|view| {
        view.file == FileName::Replica { block: block as u8 }
            && view.root == expected.root
            && view.len_bytes == expected.len_bytes
    })
}
