//! The choice of other nodes for the pieces of nodes that are given up (docs/semantics.md, 11, *On
//! another node*).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::ensure_replicas::FilesByNode;
use super::owned_stripe::OwnedStripe;
use super::step_repair::RepairTask;
use crate::code::Code;
use crate::format::file::FileName;
use crate::format::records::{PieceForm, Receipt, ReceiptPiece, RingNode};
use crate::id::{Generation, NodeId};
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
    /// are spares. Nothing is moved if a node lists files of the stripe and is not among those that
    /// `answered` for their receipts: its receipt might be greater.
    pub(super) async fn plan_moves(
        &self,
        receipt: &Receipt,
        answered: &BTreeSet<NodeId>,
        code: &Code,
        task: RepairTask<'_>,
    ) -> Vec<PieceMove> {
        let is_file = |piece: &&ReceiptPiece| piece.form == PieceForm::File;
        let mut files = receipt.pieces.iter().filter(is_file);
        if !files.any(|piece| task.gives_up_pieces_of(piece.node, true)) {
            return Vec::new();
        }
        let held = PiecesByNode::new(&self.list_ring_files().await, receipt);
        let is_urgent = held.distinct().len() <= code.k();
        let lost = receipt.pieces.iter().filter(is_file).filter(|piece| {
            !held.answers(piece.node) && task.gives_up_pieces_of(piece.node, is_urgent)
        });
        if !held.nodes().all(|node| answered.contains(&node)) {
            return Vec::new();
        }
        let ring = &self.shard.root.ring;
        let mut spares = SparesOfStripe::new(ring, receipt, &held, self.index());
        let moves = lost.filter_map(|piece| {
            let to = spares.take(piece, &held)?;
            Some(PieceMove { piece: piece.piece, to })
        });
        moves.collect()
    }
}

/// The whole pieces of an attempt that the nodes have which answer.
struct PiecesByNode(BTreeMap<NodeId, BTreeSet<u8>>);

impl PiecesByNode {
    fn new(held: &FilesByNode, receipt: &Receipt) -> Self {
        let pieces = |files: &Vec<FileView>| {
            let is_it = |piece: &&ReceiptPiece, view: &FileView| {
                let file = match piece.form {
                    PieceForm::File => {
                        FileName::Piece { piece: piece.piece, attempt: receipt.attempt }
                    }
                    PieceForm::Replica { block } => FileName::Replica { block },
                };
                (view.file, view.root) == (file, piece.root)
            };
            let held =
                receipt.pieces.iter().filter(|piece| files.iter().any(|view| is_it(piece, view)));
            held.map(|piece| piece.piece).collect()
        };
        let answers = held.iter().filter_map(|(node, files)| Some((*node, files.as_ref()?)));
        Self(answers.map(|(node, files)| (node, pieces(files))).collect())
    }

    fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.0.keys().copied()
    }

    fn answers(&self, node: NodeId) -> bool {
        self.0.contains_key(&node)
    }

    fn has(&self, node: NodeId, piece: u8) -> bool {
        self.0.get(&node).is_some_and(|pieces| pieces.contains(&piece))
    }

    /// Returns the pieces that some node has.
    fn distinct(&self) -> BTreeSet<u8> {
        self.0.values().flatten().copied().collect()
    }
}

/// The spares of a stripe, and how many of its pieces each failure domain has.
struct SparesOfStripe {
    free: Vec<RingNode>,
    /// The nodes that have a piece which is needed there.
    used: BTreeSet<NodeId>,
    pieces: HashMap<u16, usize>,
}

impl SparesOfStripe {
    /// Returns the nodes of the ring that answer, that the receipt does not name, and none of whose
    /// pieces is missing where the receipt says. They begin with another one for each stripe, so that
    /// the load spreads.
    fn new(ring: &[RingNode], receipt: &Receipt, held: &PiecesByNode, stripe: u32) -> Self {
        let is_surplus = |piece: &u8| {
            let home = receipt.pieces.get(usize::from(*piece)).map(|piece| piece.node);
            home.is_some_and(|home| held.has(home, *piece))
        };
        let is_spare = |member: &&RingNode| {
            let pieces = held.0.get(&member.node);
            !receipt.names(member.node) && pieces.is_some_and(|had| had.iter().all(is_surplus))
        };
        let mut free: Vec<RingNode> = ring.iter().filter(is_spare).copied().collect();
        if !free.is_empty() {
            let first = stripe as usize % free.len();
            free.rotate_left(first);
        }
        let mut pieces = HashMap::new();
        for member in ring.iter().filter(|member| held.answers(member.node)) {
            *pieces.entry(member.domain).or_default() += usize::from(receipt.names(member.node));
        }
        let used = receipt.pieces.iter().map(|piece| piece.node).collect();
        Self { free, used, pieces }
    }

    /// Returns the spare for a piece: a node that has it already, without a receipt, or else a free
    /// one of the failure domain with the fewest pieces.
    fn take(&mut self, piece: &ReceiptPiece, held: &PiecesByNode) -> Option<NodeId> {
        let mut holders = held.nodes().filter(|node| held.has(*node, piece.piece));
        if let Some(holder) = holders.find(|node| !self.used.contains(node)) {
            self.free.retain(|member| member.node != holder);
            self.used.insert(holder);
            return Some(holder);
        }
        let pieces_near = |at: &usize| {
            let domain = self.free.get(*at).map(|member| member.domain);
            domain.and_then(|domain| self.pieces.get(&domain)).copied().unwrap_or(0)
        };
        let best = (0..self.free.len()).min_by_key(pieces_near)?;
        let RingNode { node, domain } = self.free.remove(best);
        self.used.insert(node);
        *self.pieces.entry(domain).or_default() += 1;
        Some(node)
    }
}
