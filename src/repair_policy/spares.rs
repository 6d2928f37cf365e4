//! The choice of other nodes for the pieces of nodes that are given up (docs/semantics.md, 11, *On
//! another node*).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::format::records::RingNode;
use crate::id::NodeId;

/// The whole pieces of a stripe on the nodes that answer.
#[derive(Debug, Clone, Default)]
pub struct PiecesByNode(pub BTreeMap<NodeId, BTreeSet<u8>>);

impl PiecesByNode {
    /// Returns the nodes that answer.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.0.keys().copied()
    }

    /// Returns whether the node answers.
    pub fn answers(&self, node: NodeId) -> bool {
        self.0.contains_key(&node)
    }

    /// Returns whether the node has the piece.
    pub fn has(&self, node: NodeId, piece: u8) -> bool {
        self.0.get(&node).is_some_and(|pieces| pieces.contains(&piece))
    }
}

/// The number of pieces of a stripe that each failure domain has.
#[derive(Debug)]
pub struct PiecesByDomain {
    domains: HashMap<NodeId, u16>,
    pieces: HashMap<u16, usize>,
}

impl PiecesByDomain {
    /// Counts the pieces on `piece_nodes`, the node of each piece.
    pub fn new(ring: &[RingNode], piece_nodes: impl Iterator<Item = NodeId>) -> Self {
        let domains: HashMap<NodeId, u16> =
            ring.iter().map(|member| (member.node, member.domain)).collect();
        let mut pieces = HashMap::new();
        for domain in piece_nodes.filter_map(|node| domains.get(&node)) {
            *pieces.entry(*domain).or_default() += 1;
        }
        Self { domains, pieces }
    }

    /// Returns whether moving a piece from one node to another would spread the pieces more evenly
    /// over the failure domains. Returns `false` if one of the nodes is not in the ring.
    pub fn would_balance_move(&self, from: NodeId, to: NodeId) -> bool {
        let pieces_near = |node: NodeId| {
            let domain = self.domains.get(&node)?;
            Some(self.pieces.get(domain).copied().unwrap_or(0))
        };
        let (Some(here), Some(there)) = (pieces_near(from), pieces_near(to)) else { return false };
        there + 1 < here
    }
}

/// The spares of a stripe, and how many of its pieces each failure domain has.
#[derive(Debug)]
pub struct SparesOfStripe {
    free: Vec<RingNode>,
    /// The nodes that answer and cannot receive data. Such a node is chosen for a piece only if it
    /// has the piece and no free node is left.
    leaving: BTreeSet<NodeId>,
    /// The piece_nodes, and the spares that were taken.
    used: BTreeSet<NodeId>,
    domains: HashMap<NodeId, u16>,
    pieces: HashMap<u16, usize>,
}

impl SparesOfStripe {
    /// Creates the state for the choice of spares of one stripe. `piece_nodes` has the node to
    /// which the receipt ascribes each piece. A spare is a node of the ring that answers, can
    /// receive data, is not one of `piece_nodes`, and has no piece that is missing on the node to
    /// which the receipt ascribes it. The first spare rotates with `rotation`, so that the load
    /// spreads.
    pub fn new(
        ring: &[RingNode],
        piece_nodes: &[NodeId],
        held: &PiecesByNode,
        rotation: usize,
        can_receive: &dyn Fn(NodeId) -> bool,
    ) -> Self {
        let is_surplus = |piece: &u8| {
            let home = piece_nodes.get(usize::from(*piece));
            home.is_some_and(|home| held.has(*home, *piece))
        };
        let is_spare = |member: &&RingNode| {
            let pieces = held.0.get(&member.node);
            !piece_nodes.contains(&member.node)
                && pieces.is_some_and(|had| had.iter().all(is_surplus))
        };
        let mut free: Vec<RingNode> = ring.iter().filter(is_spare).copied().collect();
        if !free.is_empty() {
            let first = rotation % free.len();
            free.rotate_left(first);
        }
        free.retain(|member| can_receive(member.node));
        let leaving = held.nodes().filter(|node| !can_receive(*node)).collect();
        let mut pieces = HashMap::new();
        for member in ring.iter().filter(|member| held.answers(member.node)) {
            *pieces.entry(member.domain).or_default() +=
                usize::from(piece_nodes.contains(&member.node));
        }
        let used = piece_nodes.iter().copied().collect();
        let domains = ring.iter().map(|member| (member.node, member.domain)).collect();
        Self { free, leaving, used, domains, pieces }
    }

    /// Takes the spare for a piece: a node that has the piece and is not yet used, or else a free
    /// node. A node that cannot receive data is taken only if it has the piece and no node is free.
    /// Among the free nodes, prefers a failure domain with the fewest pieces, then the least load.
    /// Returns `None` if no node is left.
    pub fn take(
        &mut self,
        piece: u8,
        held: &PiecesByNode,
        load_of: &dyn Fn(NodeId) -> u64,
    ) -> Option<NodeId> {
        let is_holder = |node: &NodeId| held.has(*node, piece) && !self.used.contains(node);
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
        let piece_nodes = [0, 1, 2, 4].map(NodeId);
        let mut spares = SparesOfStripe::new(&ring(), &piece_nodes, held, rotation, &|_| true);
        // Node 8 has been used.
        let load_of = |node: NodeId| u64::from(node == NodeId(8));
        let mut take = |at: usize| spares.take(at as u8, held, &load_of);
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
        // Node 0, the node of piece 0, also has piece 3.
        let nodes = held(&[(0, &[0, 3]), (1, &[1]), (2, &[2]), (8, &[])]);
        assert_eq!(choose(&nodes, &[3], 0), [Some(8)]);
        // The piece of node 9 is surplus, that of node 8 is not: node 2 does not have it.
        let nodes = held(&[(0, &[0]), (1, &[1]), (2, &[]), (9, &[1]), (8, &[2])]);
        assert_eq!(choose(&nodes, &[3], 0), [Some(9)]);
    }

    #[test]
    fn pieces_are_more_even_in_a_domain_that_has_fewer() {
        let ring: Vec<RingNode> =
            (0..12).map(|node| RingNode { node: NodeId(node), domain: node as u16 / 4 }).collect();
        // Domain 0 has one piece, domain 1 has two, and domain 2 has three.
        let domains = PiecesByDomain::new(&ring, [0, 4, 5, 8, 9, 10].map(NodeId).into_iter());
        assert!(domains.would_balance_move(NodeId(8), NodeId(1)));
        assert!(!domains.would_balance_move(NodeId(4), NodeId(1)));
        assert!(!domains.would_balance_move(NodeId(8), NodeId(6)));
        assert!(!domains.would_balance_move(NodeId(8), NodeId(11)));
        assert!(!domains.would_balance_move(NodeId(99), NodeId(1)), "a node outside the ring");
    }
}
