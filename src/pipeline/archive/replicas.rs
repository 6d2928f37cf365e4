//! Before a stripe is archived, two good replicas of each block: what is missing or rotten is made again from its twin, on the
//! same node or on a spare (docs/semantics.md, 4.2).

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;

use super::shard::OwnedShard;
use super::{ArchiveError, Coordinator};
use crate::format::file::FileName;
use crate::format::records::{Record, StripeRecord};
use crate::id::NodeId;
use crate::net::call::address;
use crate::pipeline::records::StripeInfo;
use crate::topology::Directory;
use crate::wire::calls::{Fetch, FileView, Inspect, PutPlaces};

/// Time for one block to be copied between nodes.
const FETCH_LIMIT: Duration = Duration::from_secs(300);

/// Blocks (from 0) that position `position` holds in the standard layout.
pub(in crate::pipeline) fn blocks_at(
    n: usize,
    k: usize,
    position: usize,
) -> impl Iterator<Item = usize> {
    [Some(position), position.checked_sub(n - k)]
        .into_iter()
        .flatten()
        .filter(move |&block| block < k)
}

impl Coordinator {
    /// What each of `nodes` holds of the stripe; `None` for a node that does not answer.
    async fn inspect(
        &self,
        directory: &Directory,
        info: &StripeInfo,
        nodes: &[NodeId],
    ) -> HashMap<NodeId, Option<Vec<FileView>>> {
        let ask = nodes.iter().map(|&node| async move {
            let call = Inspect { stripe: info.fixed.stripe };
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

    /// Makes sure that every position of the stripe has its replicas; answers with the node of each position.
    pub(super) async fn ensure_replicas(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
    ) -> Result<Vec<NodeId>, ArchiveError> {
        let (n, k) = (usize::from(shard.root.n), usize::from(shard.root.k));
        let stripe = info.fixed.stripe;
        let mut places = info.places.clone();
        let held = self.inspect(directory, info, &places).await;
        let good = |node: NodeId, block: usize| {
            let expected = &info.fixed.blocks[block];
            let files = held.get(&node).and_then(Option::as_ref);
            files.into_iter().flatten().any(|view| {
                view.file == FileName::Replica { block: block as u8 }
                    && view.root == expected.root
                    && view.len_bytes == expected.len_bytes
            })
        };
        let wanted = |position: usize| {
            blocks_at(n, k, position).filter(|&block| info.fixed.blocks[block].len_bytes > 0)
        };
        let mut spares: Vec<NodeId> = shard
            .root
            .ring
            .iter()
            .map(|member| member.node)
            .filter(|&node| !info.places.contains(&node) && directory.is_live(node))
            .collect();
        let mut fetches = Vec::new();
        for (position, place) in places.iter_mut().enumerate() {
            let node = *place;
            let answers = held.get(&node).is_some_and(Option::is_some);
            if !answers {
                let missing = format!("node {} does not answer", directory.name(node));
                *place = spares.pop().ok_or(ArchiveError::NoSpare { stripe, missing })?;
            }
            for block in wanted(position) {
                if answers && good(node, block) {
                    continue;
                }
                let twin =
                    info.places.iter().copied().find(|&other| other != node && good(other, block));
                let lost = ArchiveError::BlockLost { stripe, block: block as u32 + 1 };
                fetches.push((*place, block, twin.ok_or(lost)?));
            }
        }
        for (node, block, from) in fetches {
            tracing::info!(%stripe, block = block + 1, from = directory.name(from), to = directory.name(node), "making a replica again");
            self.fetch(shard, info, directory, node, block, from).await?;
        }
        if places != info.places {
            self.put_places(shard, info, directory, &places).await?;
        }
        Ok(places)
    }

    async fn fetch(
        &self,
        shard: &OwnedShard,
        info: &StripeInfo,
        directory: &Directory,
        to: NodeId,
        block: usize,
        from: NodeId,
    ) -> Result<(), ArchiveError> {
        let unknown = |node: NodeId| ArchiveError::Format(format!("node {node} is not registered"));
        let source = directory.address(from).ok_or_else(|| unknown(from))?;
        let target = directory.address(to).ok_or_else(|| unknown(to))?;
        let expected = &info.fixed.blocks[block];
        let call = Fetch {
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

    /// The stripe's record with its new places, on at least n-k+1 of them.
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
        let (n, k) = (usize::from(shard.root.n), usize::from(shard.root.k));
        for &node in &places[..n - k + 1] {
            let unknown = || ArchiveError::Format(format!("node {node} is not registered"));
            self.caller.call(&directory.address(node).ok_or_else(unknown)?, &call).await?;
        }
        Ok(())
    }
}
