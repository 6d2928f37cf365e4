//! The receipts of a stripe: storing them on the nodes of the pieces, and finding one whose pieces
//! are all in place.

use std::collections::BTreeSet;

use futures_util::future::try_join_all;

use super::plan_execution::NodeOrder;
use super::stripe_archiving::StripeArchiving;
use super::{ArchiveError, Coordinator};
use crate::code::{reconstruct, table};
use crate::format::file::FileName;
use crate::format::records::{PieceForm, Receipt, ReceiptPiece, Record, ShardRoot};
use crate::id::{Attempt, Generation, NodeId};
use crate::pipeline::record_fetch::{self, StripeInfo};
use crate::plan::Plan;
use crate::topology::Directory;
use crate::wire::calls::PutReceipt;

impl StripeArchiving<'_> {
    /// Returns the call that stores the receipt on a node.
    pub(super) fn build_put_receipt(&self, receipt: &Receipt) -> Result<PutReceipt, ArchiveError> {
        let bytes = receipt.to_bytes().map_err(|error| ArchiveError::Format(error.to_string()))?;
        let (owner, coordinator) = (self.shard.generation, self.coordinator.me);
        Ok(PutReceipt { bytes, owner, coordinator })
    }

    /// Stores the receipt on all nodes that hold a piece.
    pub(super) async fn put_receipts(
        &self,
        orders: &[NodeOrder],
        receipt: &Receipt,
    ) -> Result<(), ArchiveError> {
        let call = self.build_put_receipt(receipt)?;
        let holders = orders
            .iter()
            .filter(|order| receipt.pieces.iter().any(|piece| piece.node == order.node));
        let caller = &self.coordinator.caller;
        try_join_all(holders.map(|order| caller.call(&order.address, &call))).await?;
        Ok(())
    }

    /// Returns the stripe's receipt of an attempt from a node that has it.
    pub(super) async fn fetch_receipt(&self, attempt: Attempt) -> Result<Receipt, ArchiveError> {
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

impl Coordinator {
    /// Fetches the receipt of an archived stripe from a node that has it. Returns the receipt if
    /// all of its pieces are on their nodes now.
    ///
    /// An attempt that was continued on other nodes may have an earlier receipt as well. Either
    /// receipt serves: once all pieces of one receipt are in place, no other file of the stripe is
    /// needed.
    pub(crate) async fn find_complete_receipt(
        &self,
        root: &ShardRoot,
        index: u32,
        attempt: Attempt,
    ) -> Result<Option<Receipt>, ArchiveError> {
        let directory = self.fetch_directory().await?;
        let leaves = record_fetch::fetch_leaves(&self.caller, &directory, root).await?;
        let info =
            record_fetch::fetch_stripe_record(&self.caller, &directory, root, &leaves, index)
                .await?;
        let at = (index, info.places.as_slice());
        let receipt =
            record_fetch::fetch_receipt(&self.caller, &directory, root, at, attempt).await?;
        let held = self.find_present_pieces(&info, &directory, &receipt).await;
        Ok((held.len() == receipt.pieces.len()).then_some(receipt))
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
            let file = match piece.form {
                PieceForm::File => FileName::Piece { piece: piece.piece, attempt: receipt.attempt },
                // A block past the shard's end has no file.
                PieceForm::Replica { block } if info.fixed.cut.block_len(block) == 0 => {
                    return true;
                }
                PieceForm::Replica { block } => FileName::Replica { block },
            };
            let files = held.get(&piece.node).and_then(Option::as_ref);
            files.into_iter().flatten().any(|view| view.file == file && view.root == piece.root)
        };
        receipt.pieces.iter().filter(is_there).map(|piece| piece.piece.into()).collect()
    }
}
