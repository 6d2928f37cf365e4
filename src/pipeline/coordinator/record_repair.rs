//! Sending nodes the records that they lack: of a stripe, and of a shard.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt;
use futures_util::stream;

use super::owned_shard::OwnedShard;
use super::owned_stripe::OwnedStripe;
use super::stripe_repair::StripeOutcome;
use super::{Coordinator, CoordinatorError};
use crate::format::FormatError;
use crate::format::records::{
    CommitMark, PieceForm, Receipt, ReceiptPiece, Record, Saved, StripeRecord,
};
use crate::id::NodeId;
use crate::net::call::CallError;
use crate::pipeline::record_fetch::describe_record;
use crate::repair_policy::PiecesByDomain;
use crate::topology::Directory;
use crate::wire::Call;
use crate::wire::calls::{GetRecord, PutLeaves, PutMark, PutPlaces, RecordName, RepairOptions};

/// Maximum number of nodes that are asked at once for their records of a shard.
const ASK_AT_ONCE: usize = 8;

impl OwnedStripe<'_> {
    /// Sends the stripe's record with these places to those of `holders` that answer and lack it. A
    /// record with other places is replaced only if `places` differ from those of the record that
    /// the repair read.
    pub(super) async fn put_missing_stripe_records(
        &self,
        places: &[NodeId],
        holders: BTreeSet<NodeId>,
        options: RepairOptions,
        outcome: &mut StripeOutcome,
    ) {
        let fixed = &self.info.fixed;
        let record = StripeRecord::new(fixed, places.to_vec());
        let sealed = record.and_then(|record| Ok((record.to_bytes()?, record.fixed)));
        let (bytes, fixed_bytes) = match sealed {
            Ok(sealed) => sealed,
            Err(error) => return outcome.add_problem(None, error.to_string()),
        };
        let are_new = places != self.info.places;
        let is_right = |found: &[u8]| match are_new {
            true => found == bytes,
            false => StripeRecord::parse(found).is_ok_and(|found| found.fixed == fixed_bytes),
        };
        let call = PutPlaces {
            stripe: fixed.stripe,
            generation: self.shard.generation,
            coordinator: self.coordinator.me,
            bytes: bytes.clone(),
        };
        let record = RecordName::Stripe { index: fixed.stripe.index };
        for node in holders {
            self.put_if_lacking(node, record, &is_right, &call, options, outcome).await;
        }
    }

    /// Sends the receipt to the nodes that it names, that answer, and that lack it: first to the
    /// `spares`, which have pieces that no older receipt names there, and to the others only if all
    /// spares have it. If nothing of the stripe is missing, also sends it to the nodes that are to
    /// drop their surplus copies. A receipt that parses is replaced only by one of a greater order.
    /// `found` are the receipts that nodes had before.
    pub(super) async fn put_missing_receipts(
        &self,
        receipt: &Receipt,
        spares: &[NodeId],
        found: &BTreeMap<NodeId, Receipt>,
        options: RepairOptions,
        outcome: &mut StripeOutcome,
    ) {
        let call = match self.build_put_receipt(receipt) {
            Ok(call) => call,
            Err(error) => return outcome.add_problem(None, error.to_string()),
        };
        let record = RecordName::Receipt { index: self.index(), attempt: receipt.attempt };
        let is_right =
            |found: &[u8]| Receipt::parse(found).is_ok_and(|found| found.order >= receipt.order);
        for &spare in spares {
            self.put_if_lacking(spare, record, &is_right, &call, options, outcome).await;
            if !self.has_record(spare, record, &call.bytes).await {
                let (index, name) = (self.index(), self.directory.name(spare));
                let problem = format!("stripe {index}: {name} did not take its new receipt");
                return outcome.add_problem(Some(spare), problem);
            }
        }
        for node in receipt.pieces.iter().map(|piece| piece.node) {
            // A node that lacks its piece refuses the receipt.
            let is_lacking = outcome.lacking.contains(&node);
            if !spares.contains(&node) && !is_lacking && found.get(&node) != Some(receipt) {
                self.put_if_lacking(node, record, &is_right, &call, options, outcome).await;
            }
        }
        if outcome.lacking.is_empty() && outcome.away.is_empty() && outcome.problems.is_empty() {
            for node in self.choose_nodes_to_tell(receipt, found) {
                let get = GetRecord { shard: self.shard.root.shard, record };
                let to = (&self.directory, node);
                match self.coordinator.put_if_lacking(to, get, &is_right, &call, options).await {
                    Ok(is_lacking) => outcome.records += u64::from(is_lacking),
                    // Nothing is missing: the node only keeps its surplus copies for now.
                    Err(error) => {
                        let (stripe, node) = (receipt.stripe, self.directory.name(node));
                        tracing::info!(%stripe, node, %error, "a node with surplus copies did not take the receipt that counts");
                    }
                }
            }
        }
    }

    /// Returns the nodes that may drop surplus copies once they have the receipt: they have one of a
    /// lower order, and the receipt does not name them. Leaves out a node with a copy that is worth
    /// more than its space: one in a failure domain with at least two pieces fewer than that of the
    /// piece, or a kept replica of a block of which the receipt names another kept replica, because
    /// replicas are dropped without a look at the other copy.
    fn choose_nodes_to_tell(
        &self,
        receipt: &Receipt,
        found: &BTreeMap<NodeId, Receipt>,
    ) -> Vec<NodeId> {
        let ring = self.directory.current_ring(&self.shard.root);
        let domains = PiecesByDomain::new(&ring, receipt.pieces.iter().map(|piece| piece.node));
        let is_worth_its_space = |old: &ReceiptPiece| {
            receipt.pieces.get(usize::from(old.piece)).is_none_or(|new| {
                let are_replicas = old.form != PieceForm::File && new.form != PieceForm::File;
                are_replicas || domains.would_balance_move(new.node, old.node)
            })
        };
        let may_be_told = |node: NodeId, old: &Receipt| {
            old.order < receipt.order
                && receipt.pieces.iter().all(|piece| piece.node != node)
                && !old.pieces.iter().any(|piece| piece.node == node && is_worth_its_space(piece))
        };
        let nodes = found.iter().filter(|(node, old)| may_be_told(**node, old));
        nodes.map(|(node, _)| *node).collect()
    }

    /// Returns whether the node has this record with exactly these bytes; `false` also if the node
    /// does not answer.
    async fn has_record(&self, node: NodeId, record: RecordName, bytes: &[u8]) -> bool {
        let get = GetRecord { shard: self.shard.root.shard, record };
        let Some(address) = self.directory.address(node) else { return false };
        let found = self.coordinator.caller.call(&address, &get).await;
        found.is_ok_and(|found| found.as_deref() == Some(bytes))
    }

    /// Makes `call`, which stores a record, if the node lacks the record.
    async fn put_if_lacking<C: Call<Answer = ()>>(
        &self,
        node: NodeId,
        record: RecordName,
        is_right: &(dyn Fn(&[u8]) -> bool + Sync),
        call: &C,
        options: RepairOptions,
        outcome: &mut StripeOutcome,
    ) {
        let get = GetRecord { shard: self.shard.root.shard, record };
        let to = (&self.directory, node);
        match self.coordinator.put_if_lacking(to, get, is_right, call, options).await {
            Ok(is_lacking) => outcome.records += u64::from(is_lacking),
            Err(error) => {
                let (index, name) = (self.index(), self.directory.name(node));
                let what = describe_record(&record);
                let problem = format!("stripe {index}: {name} did not take {what}: {error}");
                outcome.add_problem(Some(node), problem);
            }
        }
    }
}

impl Coordinator {
    /// Makes `call`, which stores a record, if the node answers, stores data, and has no record that
    /// is right. In a dry run, only asks. Returns whether the node lacked it.
    async fn put_if_lacking<C: Call<Answer = ()>>(
        &self,
        (directory, node): (&Directory, NodeId),
        get: GetRecord,
        is_right: &(dyn Fn(&[u8]) -> bool + Sync),
        call: &C,
        options: RepairOptions,
    ) -> Result<bool, CallError> {
        let is_asked = directory.is_live(node) && directory.storage().contains(&node);
        let Some(address) = directory.address(node).filter(|_| is_asked) else { return Ok(false) };
        match self.caller.call(&address, &get).await {
            Ok(Some(found)) if is_right(&found) => return Ok(false),
            Ok(_) => {}
            // A node that does not answer now is not known to lack anything.
            Err(error) if error.is_unanswered() => return Ok(false),
            Err(error) => return Err(error),
        }
        if !options.is_dry_run() {
            self.caller.call(&address, call).await?;
        }
        Ok(true)
    }

    /// Sends the shard's commit mark to the nodes of the ring that answer and lack the mark. Sends
    /// the leaves to those that lack the leaves and are not in `lacking`, the nodes that may lack a
    /// piece, replica or record of a stripe: a rebuild assumes that a node with the leaves has all
    /// that it should have.
    pub(super) async fn repair_shard_records(
        &self,
        shard: &OwnedShard,
        saved: &Saved,
        lacking: &BTreeSet<NodeId>,
        options: RepairOptions,
    ) -> Result<StripeOutcome, CoordinatorError> {
        let format = |error: FormatError| CoordinatorError::Format(error.to_string());
        let directory = &self.fetch_directory().await?;
        let leaves = shard.fetch_leaves(self, directory).await?.to_bytes().map_err(format)?;
        let (root, saved, owner) = (shard.root.clone(), saved.clone(), shard.generation);
        let mark = CommitMark { cluster: self.cluster, saved, root }.to_bytes().map_err(format)?;
        let mark = &PutMark { bytes: mark, epoch: owner.epoch };
        let leaves = &PutLeaves { bytes: leaves, owner, coordinator: self.me };
        let id = shard.root.shard;
        let ring = directory.current_ring(&shard.root);
        let nodes: Vec<NodeId> = ring.iter().map(|member| member.node).collect();
        let mut running = stream::iter(nodes)
            .map(|node| async move {
                let to = (directory, node);
                let get = GetRecord { shard: id, record: RecordName::Mark };
                let is_right = |found: &[u8]| found == mark.bytes;
                let marked = self.put_if_lacking(to, get, &is_right, mark, options).await;
                if lacking.contains(&node) {
                    return (node, [marked, Ok(false)]);
                }
                let get = GetRecord { shard: id, record: RecordName::Leaves };
                let is_right = |found: &[u8]| found == leaves.bytes;
                let listed = self.put_if_lacking(to, get, &is_right, leaves, options).await;
                (node, [marked, listed])
            })
            .buffer_unordered(ASK_AT_ONCE);
        let mut outcome = StripeOutcome::default();
        while let Some((node, results)) = running.next().await {
            for result in results {
                match result {
                    Ok(is_lacking) => outcome.records += u64::from(is_lacking),
                    Err(error) => {
                        let name = directory.name(node);
                        let problem = format!("{name} did not take the shard's records: {error}");
                        outcome.add_problem(Some(node), problem);
                    }
                }
            }
        }
        Ok(outcome)
    }
}
