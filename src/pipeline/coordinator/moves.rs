//! The choice of other nodes for the pieces of nodes that are given up (docs/semantics.md, 11, *On
//! another node*).

use std::collections::BTreeSet;

use super::CoordinatorError;
use super::ensure_replicas::FilesByNode;
use super::owned_stripe::OwnedStripe;
use super::step_repair::RepairTask;
use crate::code::{Code, NodeShare, survivable_losses};
use crate::format::records::{PieceForm, Receipt, ReceiptPiece};
use crate::id::{Generation, NodeId};
use crate::repair_policy::{PiecesByNode, SparesOfStripe};
use crate::wire::calls::FileView;

/// A piece that is made on another node than the receipt says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceMove {
    /// The piece.
    pub piece: u8,
    /// The spare that stores it.
    pub to: NodeId,
}

impl Receipt {
    /// Returns the receipt after these moves by the repairer of this generation. Without a move it
    /// is the same receipt.
    pub(super) fn with_moves(&self, moves: &[PieceMove], repairer: Generation) -> Receipt {
        let mut receipt = self.clone();
        for &PieceMove { piece, to } in moves {
            if let Some(entry) = receipt.pieces.get_mut(usize::from(piece)) {
                entry.node = to;
                receipt.order = repairer;
            }
        }
        receipt
    }
}

impl OwnedStripe<'_> {
    /// Returns a spare for each piece whose node does not answer and is given up, as long as there
    /// are spares. The `refused` ones have failed to take a piece.
    ///
    /// # Errors
    /// [`CoordinatorError::ReceiptUnanswered`] if a node lists files of the stripe and is not among
    /// those that `answered` for their receipts: its receipt might be greater.
    pub(super) async fn plan_moves(
        &self,
        (receipt, answered): (&Receipt, &BTreeSet<NodeId>),
        code: &Code,
        refused: &BTreeSet<NodeId>,
        task: RepairTask<'_>,
    ) -> Result<Vec<PieceMove>, CoordinatorError> {
        let is_file = |piece: &&ReceiptPiece| piece.form == PieceForm::File;
        let mut files = receipt.pieces.iter().filter(is_file);
        let is_given_up = |node: NodeId, is_urgent: bool| {
            self.directory.has_left(node) || task.gives_up_pieces_of(node, is_urgent)
        };
        let may_move = |node| self.directory.is_leaving_or_left(node) || is_given_up(node, true);
        if !files.any(|piece| may_move(piece.node)) {
            return Ok(Vec::new());
        }
        let held = find_pieces(&self.list_ring_files().await, receipt);
        let is_urgent = self.survives_no_loss(&held, code);
        let lost: Vec<&ReceiptPiece> = receipt
            .pieces
            .iter()
            .filter(is_file)
            .filter(|piece| match held.answers(piece.node) {
                // A leaving node may answer and lack the piece. Then another node gets it.
                true => {
                    self.directory.is_leaving_or_left(piece.node)
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
        let ring = self.directory.current_ring(&self.shard.root);
        let piece_nodes: Vec<NodeId> = receipt.pieces.iter().map(|piece| piece.node).collect();
        let can_receive = |node| self.directory.can_receive_data(node) && !refused.contains(&node);
        let mut spares =
            SparesOfStripe::new(&ring, &piece_nodes, &held, self.rotation(), &can_receive);
        let moves = lost.into_iter().filter_map(|piece| {
            let to = spares.take(piece.piece, &held, &|node| task.loads.load_of(node))?;
            Some(PieceMove { piece: piece.piece, to })
        });
        Ok(moves.collect())
    }

    /// Returns whether the loss of some further node makes a block unreadable.
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

/// Returns the whole pieces of an attempt on the nodes that answer.
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
