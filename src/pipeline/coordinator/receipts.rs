//! The receipts of a stripe: storing them on the nodes of the pieces, choosing the one that says
//! where the pieces are, and finding one whose pieces are all in place.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};

use super::owned_stripe::OwnedStripe;
use super::plan_execution::NodeOrder;
use super::{Coordinator, CoordinatorError};
use crate::code::{CodeId, reconstruct, table};
use crate::format::records::{PieceForm, Receipt, ReceiptPiece, Record, ShardRoot};
use crate::id::{Attempt, Generation, NodeId};
use crate::net::call::address;
use crate::pipeline::record_fetch::{self, StripeInfo};
use crate::plan::Plan;
use crate::topology::Directory;
use crate::wire::calls::{GetRecord, PutReceipt, RecordName, VerifyFile};

/// Time limit for a node to read a piece, including the time in the node's queue.
const READ_LIMIT: Duration = Duration::from_secs(300);

impl OwnedStripe<'_> {
    /// Returns the call that stores the receipt on a node.
    pub(super) fn build_put_receipt(
        &self,
        receipt: &Receipt,
    ) -> Result<PutReceipt, CoordinatorError> {
        let bytes =
            receipt.to_bytes().map_err(|error| CoordinatorError::Format(error.to_string()))?;
        let (owner, coordinator) = (self.shard.generation, self.coordinator.me);
        Ok(PutReceipt { bytes, owner, coordinator })
    }

    /// Stores the receipt on all nodes that hold a piece.
    pub(super) async fn put_receipts(
        &self,
        orders: &[NodeOrder],
        receipt: &Receipt,
    ) -> Result<(), CoordinatorError> {
        let call = self.build_put_receipt(receipt)?;
        let holders = orders
            .iter()
            .filter(|order| receipt.pieces.iter().any(|piece| piece.node == order.node));
        let caller = &self.coordinator.caller;
        try_join_all(holders.map(|order| caller.call(&order.address, &call))).await?;
        Ok(())
    }

    /// Returns the receipts of an attempt on the nodes that answer
    /// ([`Coordinator::fetch_all_receipts`]).
    pub(super) async fn fetch_all_receipts(&self, attempt: Attempt) -> FoundReceipts {
        let root = &self.shard.root;
        self.coordinator.fetch_all_receipts(&self.info, &self.directory, root, attempt).await
    }

    /// Returns the stripe's receipt of an attempt from a node that has it.
    pub(super) async fn fetch_receipt(
        &self,
        attempt: Attempt,
    ) -> Result<Receipt, CoordinatorError> {
        let at = (self.index(), self.info.places.as_slice());
        let (caller, root) = (&self.coordinator.caller, &self.shard.root);
        Ok(record_fetch::fetch_receipt(caller, &self.directory, root, at, attempt).await?)
    }

    /// Returns the receipt of an earlier owner's run, if all of its pieces are on the nodes that
    /// this plan assigns to them. These pieces were proven, so the plan need not run again.
    pub(super) async fn find_reusable_receipt(
        &self,
        plan: &Plan,
        generation: Generation,
    ) -> Option<Receipt> {
        let found = self.fetch_receipt(plan.attempt).await;
        let receipt = found.ok().filter(|receipt| {
            let is_at_its_node = |piece: &ReceiptPiece| plan.home(piece.piece) == Some(piece.node);
            receipt.generation == generation
                && receipt.code == plan.code
                && receipt.pieces.iter().all(is_at_its_node)
        })?;
        let present = self.find_present_pieces(&receipt).await;
        (present.len() == receipt.pieces.len()).then_some(receipt)
    }

    /// Returns whether the receipt's pieces that nodes have now are enough to read every block.
    pub(super) async fn can_rebuild_blocks(&self, receipt: &Receipt) -> bool {
        let Some(code) = table::by_id(receipt.code) else { return false };
        let present = self.find_present_pieces(receipt).await;
        let all: Vec<usize> = (0..code.k()).collect();
        reconstruct(&code, &present, &all).is_ok()
    }

    async fn find_present_pieces(&self, receipt: &Receipt) -> Vec<usize> {
        self.coordinator.find_present_pieces(&self.info, &self.directory, receipt).await
    }
}

/// The receipts of an attempt on the nodes of a stripe.
#[derive(Debug, Default)]
pub(super) struct FoundReceipts {
    /// The receipts that parse and are of this stripe and attempt, by node.
    pub by_node: BTreeMap<NodeId, Receipt>,
    /// The nodes that answered, also those without a receipt.
    pub answered: BTreeSet<NodeId>,
}

/// The use that a node makes of a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceiptUse {
    /// It stores the receipt, which it lacks.
    Fetch,
    /// It drops the surplus copies that it has.
    DropSurplus,
}

/// The attempt by which a stripe is archived, according to the shard's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArchivedAttempt {
    /// The attempt.
    pub attempt: Attempt,
    /// The generation that began it.
    pub generation: Generation,
    /// The code of its pieces.
    pub code: CodeId,
}

/// Chooses the receipt that counts: of the receipts of an attempt on the nodes of a stripe, the one
/// that says where the stripe's pieces are now.
///
/// The receipt with the greatest order counts. Several receipts may have that order: archivings
/// give the lowest order unless they find a greater one. So an attempt that was continued on other
/// nodes may have an earlier receipt of the same order, left on nodes that the later receipt does
/// not name. All nodes that the later receipt names got it before the stripe was committed as
/// archived. So a receipt does not count if a node that it names has a different receipt of that
/// order. If several receipts remain, the one on the most nodes counts. Returns `None` if no
/// receipt remains, or if several share the greatest number of nodes.
pub(crate) fn choose_receipt_that_counts(
    found: &BTreeMap<NodeId, Receipt>,
    archived: ArchivedAttempt,
) -> Option<&Receipt> {
    let ArchivedAttempt { attempt, generation, code } = archived;
    let fits = |receipt: &&Receipt| {
        (receipt.attempt, receipt.generation, receipt.code) == (attempt, generation, code)
    };
    let greatest = found.values().filter(fits).map(|receipt| receipt.order).max()?;
    let found: BTreeMap<NodeId, &Receipt> = found
        .iter()
        .filter(|(_, receipt)| receipt.order == greatest)
        .map(|(node, receipt)| (*node, receipt))
        .collect();
    let mut candidates: Vec<(usize, &Receipt)> = Vec::new();
    for &receipt in found.values() {
        let is_contradicted =
            |piece: &ReceiptPiece| found.get(&piece.node).is_some_and(|other| *other != receipt);
        let fits = fits(&receipt) && !receipt.pieces.iter().any(is_contradicted);
        match candidates.iter_mut().find(|(_, known)| *known == receipt) {
            Some((nodes, _)) => *nodes += 1,
            None if fits => candidates.push((1, receipt)),
            None => {}
        }
    }
    candidates.sort_by_key(|(nodes, _)| std::cmp::Reverse(*nodes));
    match candidates.as_slice() {
        [(_, only)] => Some(only),
        [(most, first), (next, _), ..] if most > next => Some(first),
        _ => None,
    }
}

impl Coordinator {
    /// Returns the receipt that says where the pieces of an archived stripe are. Returns `None` if
    /// no receipt does, if some piece is not on its node now, or if the node of some piece is
    /// leaving or has left. For [`ReceiptUse::DropSurplus`], also returns `None` if the node of some
    /// piece does not have the receipt or may not receive data. This node need not have the receipt.
    pub(crate) async fn find_complete_receipt(
        &self,
        root: &ShardRoot,
        index: u32,
        archived: ArchivedAttempt,
        purpose: ReceiptUse,
    ) -> Result<Option<Receipt>, CoordinatorError> {
        let directory = self.fetch_directory().await?;
        let leaves = record_fetch::fetch_leaves(&self.caller, &directory, root).await?;
        let info =
            record_fetch::fetch_stripe_record(&self.caller, &directory, root, &leaves, index)
                .await?;
        let found = self.fetch_all_receipts(&info, &directory, root, archived.attempt).await;
        let counting = choose_receipt_that_counts(&found.by_node, archived);
        let Some(receipt) = counting else { return Ok(None) };
        let is_file = |piece: &&ReceiptPiece| match piece.form {
            PieceForm::Replica { block } => info.fixed.cut.block_len(block) > 0,
            PieceForm::File => true,
        };
        // The pieces and replicas of a leaving node may be gone soon. A node without the receipt may
        // drop its piece: it may rely on an older receipt, which names another node for the piece.
        let keeps = |node: NodeId| {
            let has_receipt = node == self.me || found.by_node.get(&node) == Some(receipt);
            has_receipt && directory.can_receive_data(node)
        };
        let is_kept = |piece: &ReceiptPiece| match purpose {
            ReceiptUse::Fetch => !directory.is_leaving_or_left(piece.node),
            ReceiptUse::DropSurplus => keeps(piece.node),
        };
        if !receipt.pieces.iter().filter(is_file).all(is_kept) {
            return Ok(None);
        }
        let held = self.find_present_pieces(&info, &directory, receipt).await;
        Ok((held.len() == receipt.pieces.len()).then(|| receipt.clone()))
    }

    /// Asks the node that the receipt names for a piece to read it. Returns whether the piece is
    /// whole; `false` also if the node does not answer.
    pub(crate) async fn is_piece_whole(
        &self,
        receipt: &Receipt,
        piece: &ReceiptPiece,
    ) -> Result<bool, CoordinatorError> {
        let directory = self.fetch_directory().await?;
        let Some(node) = directory.address(piece.node) else { return Ok(false) };
        let call = VerifyFile { stripe: receipt.stripe, file: receipt.file_of(piece) };
        let checked = self.caller.call_within(&address(&node), &call, READ_LIMIT).await;
        Ok(checked.is_ok_and(|is_bad| !is_bad))
    }

    /// Asks all live nodes of the ring, and those in the stripe's record, for their receipt of an
    /// attempt.
    pub(super) async fn fetch_all_receipts(
        &self,
        info: &StripeInfo,
        directory: &Directory,
        root: &ShardRoot,
        attempt: Attempt,
    ) -> FoundReceipts {
        let stripe = info.fixed.stripe;
        let mut nodes: BTreeSet<NodeId> = directory.nodes_to_ask(root).collect();
        nodes.extend(&info.places);
        let record = RecordName::Receipt { index: stripe.index, attempt };
        let ask =
            nodes.into_iter().filter(|node| directory.is_live(*node)).map(|node| async move {
                let call = GetRecord { shard: stripe.shard, record };
                let bytes = self.caller.call(&directory.address(node)?, &call).await.ok()?;
                Some((node, bytes.and_then(|bytes| Receipt::parse(&bytes).ok())))
            });
        let answers: Vec<(NodeId, Option<Receipt>)> =
            join_all(ask).await.into_iter().flatten().collect();
        let answered: BTreeSet<NodeId> = answers.iter().map(|(node, _)| *node).collect();
        let fits = |receipt: &Receipt| {
            receipt.cluster == self.cluster
                && receipt.stripe == stripe
                && receipt.attempt == attempt
                && receipt.pieces.len() == usize::from(root.n)
                && (0..).zip(&receipt.pieces).all(|(number, piece)| piece.piece == number)
        };
        let receipts = answers.into_iter().filter_map(|(node, found)| Some((node, found?)));
        FoundReceipts { by_node: receipts.filter(|(_, receipt)| fits(receipt)).collect(), answered }
    }

    /// Returns the numbers of the receipt's pieces that their nodes have now.
    async fn find_present_pieces(
        &self,
        info: &StripeInfo,
        directory: &Directory,
        receipt: &Receipt,
    ) -> Vec<usize> {
        let nodes: BTreeSet<NodeId> = receipt.pieces.iter().map(|piece| piece.node).collect();
        let held = self.list_files(directory, info, nodes).await;
        let is_there = |piece: &&ReceiptPiece| {
            // A block past the shard's end has no file.
            if let PieceForm::Replica { block } = piece.form
                && info.fixed.cut.block_len(block) == 0
            {
                return true;
            }
            let file = receipt.file_of(piece);
            let files = held.get(&piece.node).and_then(Option::as_ref);
            files.into_iter().flatten().any(|view| view.file == file && view.root == piece.root)
        };
        receipt.pieces.iter().filter(is_there).map(|piece| piece.piece.into()).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::id::{ClusterId, Epoch, ShardId, StripeId};

    const ARCHIVED: ArchivedAttempt = ArchivedAttempt {
        attempt: Attempt([2; 16]),
        generation: Generation { epoch: Epoch(1), counter: 3 },
        code: CodeId(4),
    };

    /// Returns a receipt whose piece i is on the i-th of these nodes.
    pub fn receipt(nodes: &[u64]) -> Receipt {
        let piece = |(piece, node): (u8, &u64)| ReceiptPiece {
            piece,
            node: NodeId(*node),
            form: PieceForm::File,
            root: [piece; 32],
        };
        Receipt {
            cluster: ClusterId([1; 16]),
            stripe: StripeId { shard: ShardId([1; 16]), index: 0 },
            attempt: ARCHIVED.attempt,
            generation: ARCHIVED.generation,
            code: ARCHIVED.code,
            pieces: (0..).zip(nodes).map(piece).collect(),
            order: Generation::default(),
        }
    }

    fn choose(found: &[(u64, &Receipt)]) -> Option<Receipt> {
        let found = found.iter().map(|(node, receipt)| (NodeId(*node), (*receipt).clone()));
        choose_receipt_that_counts(&found.collect(), ARCHIVED).cloned()
    }

    /// An attempt that began on nodes 1, 2 and 3 was continued on 1, 2 and 4.
    #[test]
    fn an_earlier_receipt_of_the_attempt_does_not_count() {
        let (earlier, later) = (receipt(&[1, 2, 3]), receipt(&[1, 2, 4]));
        assert_eq!(choose(&[(1, &later), (2, &later), (3, &earlier)]), Some(later.clone()));
        // Node 3 still has the earlier one, and the disks of 2 and 4 are lost.
        assert_eq!(choose(&[(1, &later), (3, &earlier)]), Some(later.clone()));
        assert_eq!(choose(&[(3, &earlier), (4, &later), (1, &later)]), Some(later.clone()));
        // If the only nodes that know better are lost, nothing says which receipt is the later one.
        assert_eq!(choose(&[(3, &earlier), (4, &later)]), None);
        assert_eq!(choose(&[(3, &earlier)]), Some(earlier));
        assert_eq!(choose(&[]), None);
    }

    #[test]
    fn the_receipt_of_the_greatest_order_counts_wherever_it_is() {
        let by = |counter| Generation { epoch: Epoch(1), counter };
        let first = receipt(&[1, 2, 3]);
        let moved = Receipt { order: by(5), ..receipt(&[1, 2, 4]) };
        let again = Receipt { order: by(6), ..receipt(&[1, 2, 5]) };
        assert_eq!(choose(&[(1, &first), (2, &first), (4, &moved)]), Some(moved.clone()));
        let all = [(1, &first), (2, &moved), (3, &first), (4, &moved), (5, &again)];
        assert_eq!(choose(&all), Some(again.clone()));
        // Two receipts of one order differ only if two owners had the same generation.
        let other = Receipt { order: by(6), ..receipt(&[1, 2, 6]) };
        assert_eq!(choose(&[(5, &again), (6, &other), (1, &first)]), None);
    }

    #[test]
    fn a_receipt_of_another_generation_or_code_does_not_count() {
        let good = receipt(&[1, 2, 3]);
        let older =
            Receipt { generation: Generation { counter: 2, ..good.generation }, ..good.clone() };
        let other = Receipt { code: CodeId(5), ..good.clone() };
        assert_eq!(choose(&[(5, &older), (6, &older), (1, &good)]), Some(good.clone()));
        assert_eq!(choose(&[(1, &older)]), None);
        assert_eq!(choose(&[(1, &other)]), None);
    }
}
