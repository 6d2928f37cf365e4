//! The client's side of saving one stripe: its blocks are uploaded in rounds, and spares take the
//! places of holders that fail (docs/semantics.md, 3.2).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;

use super::error::{BlockError, NodeFailure, SaveError};
use super::shard_source::ShardSource;
use crate::code::Layout;
use crate::format::geometry::StripeCut;
use crate::format::records::{BlockInfo, Record, StripeFixed, StripeRecord};
use crate::gf::FingerprintKey;
use crate::id::{Generation, NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::Caller;
use crate::placement::Spares;
use crate::topology::Directory;
use crate::wire::calls::{PutRecord, RecordName};
use crate::workers::Workers;

/// Wait before holders that failed are asked again instead of being replaced.
const BUSY_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of consecutive retries while a holder reports that it is out of memory.
const BUSY_ROUNDS: usize = 30;
/// Maximum number of rounds in which failed holders are replaced.
const ROUNDS: usize = 3;
/// How long a stripe waits for holders that do not answer and that no spare can replace. A daemon
/// that restarts is back within this time.
const HOLDER_WAIT: Duration = Duration::from_secs(30);

/// The nodes that failed while a save wrote to them. The other stripes and shards of the save avoid
/// these nodes where they can.
#[derive(Debug, Default)]
pub struct FailedNodes(Mutex<BTreeMap<NodeId, bool>>);

impl FailedNodes {
    fn record_failure(&self, failed: &NodeFailure) {
        let refused = failed.has_refused();
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A node that was silent once may be gone, even if it refused before.
        *nodes.entry(failed.node).or_insert(true) &= refused;
    }

    fn contains(&self, node: NodeId) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&node)
    }

    /// Returns the nodes that are alive and said that they cannot take blocks, for example because
    /// their disk is full. A new save does not count on them.
    pub fn refused_nodes(&self) -> Vec<NodeId> {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.iter().filter(|(_, refused)| **refused).map(|(node, _)| *node).collect()
    }

    /// Returns whether at least one node failed, and all nodes that failed refused. Returns `false`
    /// if any of them did not answer.
    pub fn has_only_refusals(&self) -> bool {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        !nodes.is_empty() && nodes.values().all(|refused| *refused)
    }
}

/// The uploader of a shard's stripes: the state that all of them share.
pub struct StripeUploader {
    /// The client for calls to nodes.
    pub caller: Arc<Caller>,
    /// The workers that read and hash.
    pub workers: Workers,
    /// The nodes.
    pub directory: Directory,
    /// The shard's bytes.
    pub source: Arc<dyn ShardSource>,
    /// The shard's name, for errors.
    pub name: String,
    /// The shard's fingerprint key.
    pub key: Arc<FingerprintKey>,
    /// The bytes of this key, as in the shard's record.
    pub key_bytes: [u8; 32],
    /// The save's generation.
    pub generation: Generation,
    /// The layout of the stripes.
    pub layout: Layout,
    /// A permit for each block that the save may send at once. The blocks of a stripe are sent
    /// together if there are enough, so that its nodes receive at even rates.
    pub block_permits: Arc<Semaphore>,
    /// The nodes that failed in any part of the save.
    pub failures: Arc<FailedNodes>,
    /// Called with the length in bytes of each block that has become durable.
    pub progress: Arc<dyn Fn(u64) + Send + Sync>,
}

impl StripeUploader {
    /// Saves one stripe. Where a holder fails, puts one of `spares` in its place in `places`.
    /// Returns the fixed part of the stripe's record.
    pub async fn upload_stripe(
        &self,
        stripe: StripeId,
        cut: StripeCut,
        places: &mut [NodeId],
        mut spares: Spares,
    ) -> Result<StripeFixed, SaveError> {
        let k = self.layout.k();
        self.avoid_failed_nodes(places, &mut spares);
        let mut blocks: Vec<Option<BlockInfo>> = vec![None; k];
        let mut todo: BTreeSet<usize> = (0..k).collect();
        let (mut round, mut busy_rounds, mut waits_until) = (0, 0, None);
        while round <= ROUNDS {
            let left = todo.len();
            let mut failures =
                self.upload_round(stripe, &cut, places, &mut todo, &mut blocks).await?;
            if todo.len() < left {
                (busy_rounds, waits_until) = (0, None);
            }
            if todo.is_empty() {
                let blocks = blocks.into_iter().flatten().collect();
                return Ok(StripeFixed { stripe, cut, blocks });
            }
            // A holder that is busy with other work need not be replaced.
            if busy_rounds < BUSY_ROUNDS {
                failures.retain(|failed| failed.error.kind() != ErrorKind::Busy);
            }
            if failures.is_empty() {
                busy_rounds += 1;
                self.caller.clock().sleep(BUSY_WAIT).await;
                continue;
            }
            round += 1;
            let now = self.caller.clock().now();
            if round == 1 && failures.iter().all(|failed| failed.is_own_answer()) {
                self.caller.clock().sleep(BUSY_WAIT).await;
                continue;
            }
            if round > ROUNDS {
                spares.retain(|_| false);
            }
            let (again, lacks_spare) =
                self.replace_failed_nodes_by_spares(stripe, places, &mut spares, &failures);
            todo.extend(again);
            let Some(error) = lacks_spare else { continue };
            let may_all_return = failures.iter().all(|failed| !failed.has_refused());
            if !may_all_return || now >= *waits_until.get_or_insert(now + HOLDER_WAIT) {
                return Err(error);
            }
            round -= 1;
            self.caller.clock().sleep(BUSY_WAIT).await;
        }
        Err(SaveError::NoHolders {
            stripe,
            failed: "several nodes".into(),
            reason: format!("the spares that replaced them in {ROUNDS} rounds failed, too"),
        })
    }

    /// Uploads the blocks of `todo`, and moves those that succeed into `blocks`. Returns the
    /// failures of holders.
    ///
    /// # Errors
    /// [`SaveError::Changed`] if a block differs from what was uploaded before.
    async fn upload_round(
        &self,
        stripe: StripeId,
        cut: &StripeCut,
        places: &[NodeId],
        todo: &mut BTreeSet<usize>,
        blocks: &mut [Option<BlockInfo>],
    ) -> Result<Vec<NodeFailure>, SaveError> {
        let step = self.layout.n() - self.layout.k();
        let sends = todo.iter().map(|&block| async move {
            let holders = (places[block], places[block + step]);
            // The semaphore is never closed.
            let _permit = self.block_permits.acquire().await;
            (block, self.upload_block(stripe, cut, block as u8, holders).await)
        });
        let mut running: FuturesUnordered<_> = sends.collect();
        let mut failures = Vec::new();
        while let Some((block, result)) = running.next().await {
            match result {
                Ok(info) if blocks[block].as_ref().is_some_and(|first| *first != info) => {
                    return Err(SaveError::Changed { shard: self.name.clone() });
                }
                Ok(info) => {
                    if blocks[block].is_none() {
                        (self.progress)(info.len_bytes);
                    }
                    blocks[block] = Some(info);
                    todo.remove(&block);
                }
                Err(BlockError::Holder(failed)) => failures.push(failed),
                Err(BlockError::Fatal(error)) => return Err(error),
            }
        }
        Ok(failures)
    }

    /// Puts spares in the places of nodes that failed in other stripes, before the first byte is
    /// sent. The replaced nodes become the last spares.
    fn avoid_failed_nodes(&self, places: &mut [NodeId], spares: &mut Spares) {
        let failed = |node| self.failures.contains(node);
        for position in 0..places.len() {
            if failed(places[position])
                && !spares.nodes().iter().all(|&spare| failed(spare))
                && let Some(spare) = spares.take(places, position, failed)
            {
                spares.give(std::mem::replace(&mut places[position], spare));
            }
        }
    }

    /// Puts spares in the places of the nodes that failed. Returns the blocks of the changed
    /// positions, which have to be sent again, and an error if a place has no spare.
    fn replace_failed_nodes_by_spares(
        &self,
        stripe: StripeId,
        places: &mut [NodeId],
        spares: &mut Spares,
        failures: &[NodeFailure],
    ) -> (BTreeSet<usize>, Option<SaveError>) {
        failures.iter().for_each(|failed| self.failures.record_failure(failed));
        let nodes: BTreeSet<NodeId> = failures.iter().map(|failed| failed.node).collect();
        spares.retain(|spare| !nodes.contains(&spare));
        let mut again = BTreeSet::new();
        for position in 0..places.len() {
            if !nodes.contains(&places[position]) {
                continue;
            }
            let Some(spare) = spares.take(places, position, |node| self.failures.contains(node))
            else {
                let names: Vec<String> =
                    nodes.iter().map(|node| self.directory.name(*node)).collect();
                let reason =
                    failures.first().map(|failed| failed.error.to_string()).unwrap_or_default();
                let failed = names.join(", ");
                return (again, Some(SaveError::NoHolders { stripe, failed, reason }));
            };
            tracing::warn!(%stripe, failed = self.directory.name(places[position]), spare = self.directory.name(spare), "a failed holder is replaced by a spare");
            places[position] = spare;
            again.extend(self.layout.blocks_at(position));
        }
        (again, None)
    }

    /// Makes the stripe's record durable on all of its nodes that can be reached.
    ///
    /// # Errors
    /// [`SaveError::NoHolders`] if fewer than n-k+1 nodes have the record.
    pub async fn put_stripe_record(
        &self,
        fixed: &StripeFixed,
        record: &StripeRecord,
        places: &[NodeId],
    ) -> Result<(), SaveError> {
        let stripe = fixed.stripe;
        let call = PutRecord {
            shard: stripe.shard,
            record: RecordName::Stripe { index: stripe.index },
            generation: self.generation,
            bytes: record.to_bytes()?,
        };
        let puts = places.iter().map(|&node| {
            let call = &call;
            async move {
                let Some(to) = self.directory.address(node) else {
                    return Err(format!("node {node} is not registered"));
                };
                self.caller.call(&to, call).await.map_err(|error| error.to_string())
            }
        });
        let results = join_all(puts).await;
        let failures: Vec<String> = results.into_iter().filter_map(Result::err).collect();
        let needed = self.layout.n() - self.layout.k() + 1;
        if places.len() - failures.len() < needed {
            let failed =
                format!("{} of the {} holders of its record", failures.len(), places.len());
            return Err(SaveError::NoHolders { stripe, failed, reason: failures.join("; ") });
        }
        Ok(())
    }
}
