//! The moves of a repair: it chooses other nodes for the pieces of nodes that are given up, and
//! replaces lost kept replicas by pieces (docs/semantics.md, 11, *On another node*).

use std::collections::BTreeSet;

use super::CoordinatorError;
use super::ensure_replicas::{FilesByNode, has_good_replica};
use super::owned_stripe::OwnedStripe;
use super::repair_task::RepairTask;
use crate::code::{Code, NodeShare, survivable_losses};
use crate::format::records::{PieceForm, Receipt, ReceiptPiece};
use crate::id::{Generation, NodeId};
use crate::repair_policy::{PiecesByNode, SparesOfStripe};
use crate::wire::calls::FileView;

impl Receipt {
    /// Returns this receipt with `entries` in the place of the entries with the same piece numbers,
    /// and with the generation of the repairer as its order. Returns the receipt unchanged if
    /// `entries` is empty.
    pub(super) fn with_entries(&self, entries: &[ReceiptPiece], repairer: Generation) -> Receipt {
        let mut receipt = self.clone();
        for new in entries {
            if let Some(entry) = receipt.pieces.get_mut(usize::from(new.piece)) {
                *entry = new.clone();
                receipt.order = repairer;
            }
        }
        receipt
    }
}

impl OwnedStripe<'_> {
    /// Returns the entries that are to replace entries of the receipt. A piece or kept replica
    /// becomes a piece on a spare if its node does not answer and is given up, or if its node is
    /// leaving, answers, and lacks it, as long as there are spares. A kept replica that its node
    /// has lost becomes a piece on the same node. A new entry keeps the root of the entry that it
    /// replaces. The `refused` nodes have failed to take a piece and get none.
    ///
    /// # Errors
    /// [`CoordinatorError::ReceiptUnanswered`] if a node answers which files of the stripe it has and
    /// is not among those that `answered` whether they have a receipt: its receipt might have a
    /// greater order.
    pub(super) async fn plan_moves(
        &self,
        (receipt, answered): (&Receipt, &BTreeSet<NodeId>),
        code: &Code,
        refused: &BTreeSet<NodeId>,
        task: RepairTask<'_>,
    ) -> Result<Vec<ReceiptPiece>, CoordinatorError> {
        let cut = self.info.fixed.cut;
        let has_file = |piece: &&ReceiptPiece| match piece.form {
            PieceForm::Replica { block } => cut.block_len(block) > 0,
            PieceForm::File => true,
        };
        let mut files = receipt.pieces.iter().filter(has_file);
        let is_given_up = |node: NodeId, is_urgent: bool| {
            self.directory.has_left(node) || task.gives_up_pieces_of(node, is_urgent)
        };
        let may_move = |node| self.directory.is_leaving_or_left(node) || is_given_up(node, true);
        if !files.any(|piece| is_kept_replica(piece) || may_move(piece.node)) {
            return Ok(Vec::new());
        }
        let files_by_node = self.list_ring_files().await;
        let held = find_pieces(&files_by_node, receipt);
        let is_urgent = self.survives_no_loss(&held, code);
        let lost: Vec<&ReceiptPiece> = receipt
            .pieces
            .iter()
            .filter(has_file)
            .filter(|piece| match held.answers(piece.node) {
                // A leaving node may answer and lack the piece. Then another node gets it.
                true => {
                    (self.directory.is_leaving_or_left(piece.node) || is_kept_replica(piece))
                        && !held.has(piece.node, piece.piece)
                }
                false => is_given_up(piece.node, is_urgent),
            })
            .collect();
        if lost.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(node) = held.nodes().find(|node| !answered.contains(node)) {
            let (stripe, node) = (self.info.fixed.stripe, self.directory.name(node));
            return Err(CoordinatorError::ReceiptUnanswered { stripe, node });
        }
        let for_spares = match code {
            Code::Rs(_) => self.with_replaced_replicas(held.clone(), &files_by_node),
            Code::Chain(_) => held.clone(),
        };
        Ok(self.choose_nodes(receipt, &lost, (&held, &for_spares), refused, task))
    }

    /// Returns the new entries for the lost pieces and replicas. `held` has, for each node, the
    /// pieces of the receipt that it has. `for_spares` has the pieces that keep a node from being a
    /// spare for another piece.
    fn choose_nodes(
        &self,
        receipt: &Receipt,
        lost: &[&ReceiptPiece],
        (held, for_spares): (&PiecesByNode, &PiecesByNode),
        refused: &BTreeSet<NodeId>,
        task: RepairTask<'_>,
    ) -> Vec<ReceiptPiece> {
        let (directory, turn) = (&self.directory, self.rotation());
        let ring = directory.current_ring(&self.shard.root);
        let piece_nodes: Vec<NodeId> = receipt.pieces.iter().map(|piece| piece.node).collect();
        let can_receive = |node| directory.can_receive_data(node) && !refused.contains(&node);
        let mut spares = SparesOfStripe::new(&ring, &piece_nodes, for_spares, turn, &can_receive);
        let entries = lost.iter().filter_map(|&piece| {
            let own = held.answers(piece.node).then_some(piece.node);
            let node = match own.filter(|node| !directory.is_leaving_or_left(*node)) {
                Some(own) => Some(own),
                None => spares
                    .take(piece.piece, for_spares, &|node| task.loads.load_of(node))
                    // Without a spare, a leaving node that answers gets a piece for its replica.
                    .or(own.filter(|_| is_kept_replica(piece))),
            };
            let node = node.filter(|node| !refused.contains(node))?;
            Some(ReceiptPiece { node, form: PieceForm::File, ..piece.clone() })
        });
        entries.collect()
    }

    /// Adds the good replicas of a stripe of a classical code to `held`, each as the piece with the
    /// number of its block. A replica is added even if the receipt names a piece file in its place.
    /// So a node with such a replica is no spare for another piece.
    fn with_replaced_replicas(&self, mut held: PiecesByNode, files: &FilesByNode) -> PiecesByNode {
        for (node, pieces) in &mut held.0 {
            let blocks = 0..self.info.fixed.blocks.len();
            let is_here = |block: &usize| has_good_replica(&self.info, files, *node, *block);
            pieces.extend(blocks.filter(is_here).map(|block| block as u8));
        }
        held
    }

    /// Returns whether the loss of some further node makes a block unreadable, or a block is
    /// unreadable already.
    fn survives_no_loss(&self, held: &PiecesByNode, code: &Code) -> bool {
        let cut = self.info.fixed.cut;
        let (wanted, past_end): (Vec<u8>, Vec<u8>) =
            (0..cut.k).partition(|block| cut.block_len(*block) > 0);
        let shares = held.0.values().filter(|pieces| !pieces.is_empty()).map(|pieces| {
            let mut pieces: Vec<u8> = pieces.iter().copied().collect();
            if matches!(code, Code::Rs(_)) {
                // Blocks past the shard's end are known without a file.
                pieces.extend(&past_end);
            }
            NodeShare { blocks: Vec::new(), pieces }
        });
        let shares: Vec<NodeShare> = shares.collect();
        survivable_losses(&wanted, Some(code), &shares).unwrap_or(0) == 0
    }
}

fn is_kept_replica(piece: &ReceiptPiece) -> bool {
    piece.form != PieceForm::File
}

/// Returns, for each node that answers, the numbers of the receipt's pieces that the node has with
/// the right root.
pub(super) fn find_pieces(held: &FilesByNode, receipt: &Receipt) -> PiecesByNode {
    let pieces = |files: &Vec<FileView>| {
        let is_it = |piece: &&ReceiptPiece, view: &FileView| {
            (view.file, view.root) == (receipt.file_of(piece), piece.root)
        };
        let held =
            receipt.pieces.iter().filter(|piece| files.iter().any(|view| is_it(piece, view)));
        held.map(|piece| piece.piece).collect()
    };
    let answers = held.iter().filter_map(|(node, files)| Some((*node, files.as_ref()?)));
    PiecesByNode(answers.map(|(node, files)| (node, pieces(files))).collect())
}
