//! The choice of other nodes for the pieces of nodes that are given up (docs/semantics.md, 11, *On
//! another node*).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::CoordinatorError;
use super::ensure_replicas::FilesByNode;
use super::owned_stripe::OwnedStripe;
use super::step_repair::RepairTask;
use crate::code::{Code, NodeShare, survivable_losses};
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
        let held = PiecesByNode::new(&self.list_ring_files().await, receipt);
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
        let mut spares = SparesOfStripe::new(&ring, receipt, &held, self.rotation());
        let can_receive = |node| self.directory.can_receive_data(node) && !refused.contains(&node);
        spares.free.retain(|member| can_receive(member.node));
        spares.leaving = held.nodes().filter(|node| !can_receive(*node)).collect();
        let moves = lost.into_iter().filter_map(|piece| {
            let to = spares.take(piece, &held, &|node| task.loads.load_of(node))?;
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

/// The whole pieces of an attempt on the nodes that answer.
pub(super) struct PiecesByNode(BTreeMap<NodeId, BTreeSet<u8>>);

impl PiecesByNode {
    pub fn new(held: &FilesByNode, receipt: &Receipt) -> Self {
        let pieces = |files: &Vec<FileView>| {
            let is_it = |piece: &&ReceiptPiece, view: &FileView| {
                (view.file, view.root) == (receipt.file_of(piece), piece.root)
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

    pub fn has(&self, node: NodeId, piece: u8) -> bool {
        self.0.get(&node).is_some_and(|pieces| pieces.contains(&piece))
    }
}

/// The spares of a stripe, and how many of its pieces each failure domain has.
struct SparesOfStripe {
    free: Vec<RingNode>,
    /// The nodes that get no piece unless they have it and no other node is left.
    leaving: BTreeSet<NodeId>,
    /// The nodes that the receipt names, and the spares that were taken.
    used: BTreeSet<NodeId>,
    domains: HashMap<NodeId, u16>,
    pieces: HashMap<u16, usize>,
}

impl SparesOfStripe {
    /// Returns the nodes of the ring that answer, that the receipt does not name, and none of whose
    /// pieces is missing where the receipt says. The first one rotates with the stripe's number, so
    /// that the load spreads.
    fn new(ring: &[RingNode], receipt: &Receipt, held: &PiecesByNode, rotation: usize) -> Self {
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
            let first = rotation % free.len();
            free.rotate_left(first);
        }
        let mut pieces = HashMap::new();
        for member in ring.iter().filter(|member| held.answers(member.node)) {
            *pieces.entry(member.domain).or_default() += usize::from(receipt.names(member.node));
        }
        let used = receipt.pieces.iter().map(|piece| piece.node).collect();
        let domains = ring.iter().map(|member| (member.node, member.domain)).collect();
        Self { free, leaving: BTreeSet::new(), used, domains, pieces }
    }

    /// Returns the spare for a piece: a node that has the piece and is not yet used, or else a free
    /// node of the failure domain with the fewest pieces, and of these the one with the least load.
    fn take(
        &mut self,
        piece: &ReceiptPiece,
        held: &PiecesByNode,
        load_of: &dyn Fn(NodeId) -> u64,
    ) -> Option<NodeId> {
        let is_holder = |node: &NodeId| held.has(*node, piece.piece) && !self.used.contains(node);
        let staying = held.nodes().find(|node| is_holder(node) && !self.leaving.contains(node));
        let leaving = || held.nodes().find(is_holder).filter(|_| self.free.is_empty());
        if let Some(holder) = staying.or_else(leaving) {
            self.free.retain(|member| member.node != holder);
            self.use_node(holder);
            return Some(holder);
        }
        let cost = |at: &usize| {
            let RingNode { node, domain } = *self.free.get(*at)?;
            Some((self.pieces.get(&domain).copied().unwrap_or(0), load_of(node)))
        };
        let best = (0..self.free.len()).min_by_key(cost)?;
        let RingNode { node, .. } = self.free.remove(best);
        self.use_node(node);
        Some(node)
    }

    fn use_node(&mut self, node: NodeId) {
        self.used.insert(node);
        if let Some(domain) = self.domains.get(&node) {
            *self.pieces.entry(*domain).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::receipts::tests::receipt;
    use super::*;

    /// Returns a ring of nodes 0 to 9 in racks of two.
    fn ring() -> Vec<RingNode> {
        (0..10).map(|node| RingNode { node: NodeId(node), domain: node as u16 / 2 }).collect()
    }

    fn held(pieces: &[(u64, &[u8])]) -> PiecesByNode {
        let pieces =
            pieces.iter().map(|(node, had)| (NodeId(*node), had.iter().copied().collect()));
        PiecesByNode(pieces.collect())
    }

    /// Returns the spares for these pieces, in this order.
    fn choose(held: &PiecesByNode, lost: &[usize], rotation: usize) -> Vec<Option<u64>> {
        let receipt = receipt(&[0, 1, 2, 4]);
        let mut spares = SparesOfStripe::new(&ring(), &receipt, held, rotation);
        // Node 8 has been used.
        let load_of = |node: NodeId| u64::from(node == NodeId(8));
        let mut take = |at: usize| spares.take(&receipt.pieces[at], held, &load_of);
        lost.iter().map(|&at| take(at).map(|node| node.0)).collect()
    }

    #[test]
    fn a_spare_is_free_and_in_the_domain_with_the_fewest_pieces() {
        // Piece 3 of node 4 is lost. Node 3 shares a rack with node 2, and node 5 with the lost
        // one.
        let nodes: &[(u64, &[u8])] =
            &[(0, &[0]), (1, &[1]), (2, &[2]), (3, &[]), (5, &[]), (6, &[]), (7, &[]), (8, &[])];
        let chosen: Vec<_> = (0..5).map(|stripe| choose(&held(nodes), &[3], stripe)[0]).collect();
        assert!(chosen.iter().all(|node| matches!(node, Some(5..=7))), "{chosen:?}");
        assert!(chosen.iter().any(|node| *node != chosen[0]), "{chosen:?}");
        // Each further spare goes to another rack.
        let many = choose(&held(nodes), &[3, 2, 1], 0);
        let racks: BTreeSet<u64> = many.iter().flatten().map(|node| node / 2).collect();
        assert_eq!(racks.len(), 3, "{many:?}");
        assert_eq!(choose(&held(&[(0, &[0]), (1, &[1]), (2, &[2])]), &[3], 0), [None]);
    }

    #[test]
    fn a_node_that_has_the_piece_is_taken_and_one_with_a_needed_piece_is_not() {
        let alive: &[(u64, &[u8])] = &[(0, &[0]), (1, &[1]), (2, &[2])];
        let with = |more: &[(u64, &'static [u8])]| held(&[alive, more].concat());
        // Node 7 has the lost piece 3 without a receipt.
        assert_eq!(choose(&with(&[(6, &[]), (7, &[3])]), &[3], 0), [Some(7)]);
        // Node 7 has both lost pieces, and only one of them may stay there.
        let nodes = held(&[(0, &[0]), (1, &[1]), (6, &[]), (7, &[2, 3])]);
        assert_eq!(choose(&nodes, &[2, 3], 0), [Some(7), Some(6)]);
        // Node 0, which the receipt names for piece 0, also has piece 3.
        let nodes = held(&[(0, &[0, 3]), (1, &[1]), (2, &[2]), (8, &[])]);
        assert_eq!(choose(&nodes, &[3], 0), [Some(8)]);
        // The piece of node 9 is surplus, that of node 8 is not: node 2 does not have it.
        let nodes = held(&[(0, &[0]), (1, &[1]), (2, &[]), (9, &[1]), (8, &[2])]);
        assert_eq!(choose(&nodes, &[3], 0), [Some(9)]);
    }
}
