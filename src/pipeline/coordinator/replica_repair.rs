//! Making the missing replicas of a stripe that is not archived.

use std::collections::BTreeSet;
use std::time::Duration;

use super::CoordinatorError;
use super::ensure_replicas::{
    FilesByNode, MAX_SPARES, Recreation, find_good_holder, has_good_replica,
};
use super::owned_stripe::OwnedStripe;
use super::repair_task::RepairTask;
use super::step_repair::ends_the_repair;
use super::stripe_repair::StripeOutcome;
use crate::id::NodeId;
use crate::placement::Spares;

/// The replicas of a stripe: which good ones there are, and which are to be made.
struct ReplicaRepair<'a> {
    stripe: &'a OwnedStripe<'a>,
    /// The good replicas, by block and node.
    good: BTreeSet<(usize, NodeId)>,
    /// The nodes that answered.
    answering: BTreeSet<NodeId>,
    /// The leaving nodes that answer and lack a block.
    vacated: BTreeSet<NodeId>,
    /// For a block without a good replica, the node to name as the source. Its replica is damaged; the
    /// node that stores the new replica gathers it from the good grains of all nodes.
    damaged: super::ensure_replicas::ReplicaSources,
    task: RepairTask<'a>,
}

/// The result of making the replicas of a position on a spare.
enum SpareResult {
    /// The spare has all blocks of the position.
    Complete(NodeId),
    /// None of the spares that were asked has all of them.
    AllFailed,
    /// No spare is left.
    NoSpare,
}

impl OwnedStripe<'_> {
    /// Makes the missing replicas of a stripe, one after the other. Puts spares in the places of nodes
    /// that do not answer and are given up, and of leaving nodes that lack a block. Sends the records
    /// that nodes lack.
    pub(super) async fn repair_replicas(
        &self,
        task: RepairTask<'_>,
    ) -> Result<StripeOutcome, CoordinatorError> {
        let held = self.list_ring_files().await;
        let blocks = &self.info.fixed.blocks;
        let blocks: Vec<usize> =
            (0..blocks.len()).filter(|&block| blocks[block].len_bytes > 0).collect();
        let mut outcome = StripeOutcome::default();
        let is_lost = |block: &usize| find_good_holder(&self.info, &held, *block).is_none();
        let damaged = match blocks.iter().any(is_lost) {
            true => self.find_replica_sources().await,
            false => Default::default(),
        };
        for block in blocks.iter().filter(|block| is_lost(block) && !damaged.contains_key(block)) {
            let error = self.missing_block_error(*block, &held);
            outcome.add_problem(None, error.to_string());
        }
        let good = blocks.iter().flat_map(|&block| {
            let nodes =
                held.keys().filter(|node| has_good_replica(&self.info, &held, **node, block));
            nodes.map(move |node| (block, *node)).collect::<Vec<_>>()
        });
        let mut repair = ReplicaRepair {
            stripe: self,
            good: good.collect(),
            answering: held.iter().filter(|(_, files)| files.is_some()).map(|(n, _)| *n).collect(),
            vacated: self.leaving_nodes_that_lack(&held),
            damaged,
            task,
        };
        let places = repair.make_missing_replicas(&mut outcome).await?;
        let holders = places.iter().copied().collect();
        self.put_missing_stripe_records(&places, holders, task.options, &mut outcome).await;
        Ok(outcome)
    }
}

impl OwnedStripe<'_> {
    /// Returns the leaving nodes that answer and lack a block. Spares get the blocks of these nodes.
    fn leaving_nodes_that_lack(&self, held: &FilesByNode) -> BTreeSet<NodeId> {
        let has_all = |node: NodeId| {
            let positions = (0..).zip(&self.info.places).filter(|(_, place)| **place == node);
            let mut blocks =
                positions.flat_map(|(position, _)| self.shard.layout.blocks_at(position));
            blocks.all(|block| {
                self.info.fixed.blocks[block].len_bytes == 0
                    || has_good_replica(&self.info, held, node, block)
            })
        };
        let answering = held.iter().filter(|(_, files)| files.is_some()).map(|(node, _)| *node);
        let leaving = answering.filter(|node| self.directory.is_leaving_or_left(*node));
        leaving.filter(|node| !has_all(*node)).collect()
    }
}

impl ReplicaRepair<'_> {
    /// Returns the blocks that the node at this position should have.
    fn blocks_at(&self, position: usize) -> Vec<usize> {
        let blocks = &self.stripe.info.fixed.blocks;
        let at = self.stripe.shard.layout.blocks_at(position);
        at.filter(|&block| blocks[block].len_bytes > 0).collect()
    }

    /// Makes the missing replicas. Returns the new places of the stripe.
    async fn make_missing_replicas(
        &mut self,
        outcome: &mut StripeOutcome,
    ) -> Result<Vec<NodeId>, CoordinatorError> {
        let mut places = self.stripe.info.places.clone();
        for (position, &node) in places.iter().enumerate() {
            if self.answering.contains(&node) && !self.vacated.contains(&node) {
                self.make_blocks(node, &self.blocks_at(position), outcome).await?;
            }
        }
        let directory = &self.stripe.directory;
        let can_receive_data = |node| directory.can_receive_data(node);
        let ring = directory.current_ring(&self.stripe.shard.root);
        let mut spares = Spares::new(&ring, self.stripe.shard.layout, &places, can_receive_data);
        for position in 0..places.len() {
            let (node, blocks) = (places[position], self.blocks_at(position));
            let copies = |block: &usize| self.good.iter().filter(|(of, _)| of == block).count();
            let (answers, is_vacated) =
                (self.answering.contains(&node), self.vacated.contains(&node));
            if (answers && !is_vacated) || blocks.iter().all(|block| copies(block) >= 2) {
                continue;
            }
            let is_gone = is_vacated || directory.has_left(node);
            if !is_gone && !self.task.gives_up_replicas_of(node) {
                *outcome.away.entry(node).or_default() += blocks.len() as u64;
                continue;
            }
            match self.make_blocks_on_spare(&mut spares, &places, position, outcome).await? {
                SpareResult::Complete(spare) => places[position] = spare,
                SpareResult::AllFailed => {}
                // A leaving node that answers keeps its place.
                SpareResult::NoSpare if is_vacated => {
                    self.make_blocks(node, &blocks, outcome).await?;
                }
                SpareResult::NoSpare => {
                    *outcome.away.entry(node).or_default() += blocks.len() as u64;
                    let name = directory.name(node);
                    let problem = format!(
                        "stripe {}: {name} does not answer, and no spare is live; the blocks there have one copy less",
                        self.stripe.index()
                    );
                    outcome.add_problem(None, problem);
                }
            }
        }
        Ok(places)
    }

    /// Makes the replicas of a position on a spare. A spare may be full, or its disk may fail: then
    /// another one is asked. Adds the problems only if all spares failed.
    async fn make_blocks_on_spare(
        &mut self,
        spares: &mut Spares,
        places: &[NodeId],
        position: usize,
        outcome: &mut StripeOutcome,
    ) -> Result<SpareResult, CoordinatorError> {
        let blocks = self.blocks_at(position);
        let mut failed = Vec::new();
        while failed.len() < MAX_SPARES
            && let Some(spare) = spares.take(places, position, |_| false)
        {
            let mut made = StripeOutcome::default();
            let is_complete = self.make_blocks(spare, &blocks, &mut made).await?;
            outcome.replicas += made.replicas;
            outcome.made_bytes += made.made_bytes;
            outcome.limit_delay += made.limit_delay;
            if is_complete {
                return Ok(SpareResult::Complete(spare));
            }
            failed.push(made);
        }
        if failed.is_empty() {
            return Ok(SpareResult::NoSpare);
        }
        for StripeOutcome { lacking, problems, .. } in failed {
            outcome.lacking.extend(lacking);
            outcome.problems.extend(problems);
        }
        Ok(SpareResult::AllFailed)
    }

    /// Has a replica copied, or rebuilt if the source's copy is damaged. Adds the time by which a
    /// limit of the rate has lengthened the copy to `limit_delay`. A rebuild has no limit.
    async fn copy_replica(
        &self,
        recreation: Recreation,
        is_source_good: bool,
        limit_delay: &mut Duration,
    ) -> Result<(), CoordinatorError> {
        let OwnedStripe { coordinator, shard, info, .. } = self.stripe;
        coordinator.ensure_may_go_on(shard, self.task).await?;
        let bytes = info.fixed.blocks[recreation.block].len_bytes;
        let begun_at = coordinator.clock.now();
        let limit = self.task.choose_limit(bytes, begun_at).filter(|_| is_source_good);
        let bytes_per_s = limit.map(|limit| limit.bytes_per_s);
        let copied = self.stripe.order_replica_copy(recreation, bytes_per_s).await;
        let now = coordinator.clock.now();
        let took = now.saturating_sub(begun_at);
        *limit_delay += limit.map_or(Duration::ZERO, |limit| limit.delay_of(took));
        copied?;
        if limit.is_none() && is_source_good {
            self.task.record_rate(bytes, took, now);
        }
        Ok(())
    }

    /// Makes the replicas of `blocks` that node `to` lacks. Returns whether the node has all of `blocks`
    /// afterwards. A dry run only counts them.
    async fn make_blocks(
        &mut self,
        to: NodeId,
        blocks: &[usize],
        outcome: &mut StripeOutcome,
    ) -> Result<bool, CoordinatorError> {
        let mut is_complete = true;
        for &block in blocks {
            if self.good.contains(&(block, to)) {
                continue;
            }
            let holder = self.good.iter().find(|(of, _)| *of == block).map(|(_, node)| *node);
            let Some(from) = holder.or(self.damaged.get(&block).copied()) else {
                is_complete = false;
                outcome.lacking.insert(to);
                continue;
            };
            let made = match self.task.options.is_dry_run() {
                true => Ok(()),
                false => {
                    let (recreation, delay) =
                        (Recreation { block, from, to }, &mut outcome.limit_delay);
                    self.copy_replica(recreation, holder.is_some(), delay).await
                }
            };
            match made {
                Ok(()) => {
                    self.good.insert((block, to));
                    outcome.replicas += 1;
                    outcome.made_bytes += self.stripe.info.fixed.blocks[block].len_bytes;
                }
                Err(error) if ends_the_repair(&error) => return Err(error),
                Err(error) => {
                    is_complete = false;
                    let (index, name) = (self.stripe.index(), self.stripe.directory.name(to));
                    let problem =
                        format!("stripe {index}: block {block} was not copied to {name}: {error}");
                    outcome.add_problem(Some(to), problem);
                }
            }
        }
        Ok(is_complete)
    }
}
