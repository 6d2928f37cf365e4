//! Placement: the node at each position of each stripe. It is a pure function of the shard's ring,
//! so a record that names at most 128 nodes places any number of stripes.
//!
//! Guarantees:
//! - The n nodes of a stripe are distinct.
//! - The two replicas of a block lie in different failure domains if there are several domains and
//!   their sizes differ by at most one node. With other sizes the choice is greedy and can fail:
//!   with domains of 8, 4 and 4 nodes at (16,11), one block of a stripe has both replicas in the
//!   large domain.
//! - A stripe uses the domains evenly.
//! - Positions rotate over the stripes, so that load spreads.
//! - Within a domain the chain visits nodes in the ring's order. Without domains, the chains of all
//!   stripes therefore pass from each node to the same next node. However many chains run at once,
//!   each node sends to one node only and receives from one node only, so no two senders share a
//!   receiver's network link.
//!
//! A replica may be on another node than this function says, because a node was down. The places in
//! the stripe's record then name that node. They are a hint: the files found on the nodes decide.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::code::{Layout, table};
use crate::format::records::{MAX_RING, Node, RingNode};
use crate::id::{NodeId, SaveId};
use crate::kind::ErrorKind;

/// The error of a placement: there are fewer nodes than the code needs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{have} nodes are live, the code needs {need}: start more nodes, or configure a smaller code"
)]
pub struct PlacementError {
    /// Number of nodes that the code needs.
    pub need: usize,
    /// Number of nodes that are available.
    pub have: usize,
}

impl PlacementError {
    /// Returns [`ErrorKind::Unavailable`], because nodes may come back.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Unavailable
    }
}

/// Returns the nodes that a save may use: all of `nodes` if they are at most [`MAX_RING`], or else
/// [`MAX_RING`] of them. The choice follows from the id of the save and takes evenly from all
/// domains, so that the saves of a large cluster use all of its nodes.
pub fn nodes_of_save(mut nodes: Vec<Node>, save: SaveId) -> Vec<Node> {
    if nodes.len() <= MAX_RING {
        return nodes;
    }
    let draw = |node: &Node| {
        let mut hasher = blake3::Hasher::new_derive_key("rapidraid nodes of a save v1");
        hasher.update(&save.0).update(node.name.as_str().as_bytes());
        *hasher.finalize().as_bytes()
    };
    nodes.sort_by_cached_key(draw);
    // The first node drawn of each domain comes first, then the second of each, and so on.
    let mut drawn: HashMap<(String, String), usize> = HashMap::new();
    let rank = |node: Node| {
        let of_domain = drawn.entry((node.zone.clone(), node.rack.clone())).or_default();
        *of_domain += 1;
        (*of_domain, node)
    };
    let mut ranked: Vec<(usize, Node)> = nodes.into_iter().map(rank).collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().take(MAX_RING).map(|(_, node)| node).collect()
}

/// Returns the ring of a new shard: the given nodes with their domains interleaved, at most
/// [`MAX_RING`] of them.
///
/// `turn` rotates the ring, so that many small shards do not all begin on the same node.
pub fn ring(nodes: &[Node], turn: u64) -> Vec<RingNode> {
    let mut domains: Vec<(&str, &str)> =
        nodes.iter().map(|node| (node.zone.as_str(), node.rack.as_str())).collect();
    domains.sort_unstable();
    domains.dedup();
    let mut members: Vec<Vec<NodeId>> = vec![Vec::new(); domains.len()];
    for node in nodes {
        if let Ok(domain) = domains.binary_search(&(node.zone.as_str(), node.rack.as_str())) {
            members[domain].push(NodeId::of(&node.name));
        }
    }
    members.iter_mut().for_each(|ids| ids.sort_unstable());
    let mut ring: Vec<RingNode> = Vec::with_capacity(nodes.len());
    for round in 0..nodes.len() {
        for (domain, ids) in members.iter().enumerate() {
            if let Some(&node) = ids.get(round) {
                ring.push(RingNode { node, domain: domain as u16 });
            }
        }
    }
    if !ring.is_empty() {
        let turn = (turn % ring.len() as u64) as usize;
        ring.rotate_left(turn);
    }
    ring.truncate(MAX_RING);
    ring
}

/// Returns the nodes of stripe `index`, one per position, for an (n, k) code in the standard
/// layout. Returns an error if the ring has fewer than n nodes.
pub fn place(
    ring: &[RingNode],
    n: usize,
    k: usize,
    index: u32,
) -> Result<Vec<NodeId>, PlacementError> {
    if ring.len() < n {
        return Err(PlacementError { need: n, have: ring.len() });
    }
    let start = index as usize % ring.len();
    let rotated: Vec<RingNode> = ring[start..].iter().chain(&ring[..start]).copied().collect();
    let mut taken = vec![false; rotated.len()];
    let mut used: HashMap<u16, usize> = HashMap::new();
    let mut free: HashMap<u16, usize> = HashMap::new();
    for member in &rotated {
        *free.entry(member.domain).or_default() += 1;
    }
    let mut domains: Vec<u16> = Vec::with_capacity(n);
    for position in 0..n {
        // Position p shares block p-(n-k) with position p-(n-k). The two should not lie in one
        // domain.
        let other = position.checked_sub(n - k).map(|other| domains[other]);
        let cost = |at: &usize| {
            let domain = rotated[*at].domain;
            // Among equally used domains, prefer the one with the most free nodes. A large domain
            // that is left for the end would have to hold both replicas of a block.
            let left = Reverse(free.get(&domain).copied().unwrap_or(0));
            (other == Some(domain), used.get(&domain).copied().unwrap_or(0), left, *at)
        };
        let Some(best) = (0..rotated.len()).filter(|&at| !taken[at]).min_by_key(cost) else {
            return Err(PlacementError { need: n, have: ring.len() });
        };
        taken[best] = true;
        let domain = rotated[best].domain;
        *used.entry(domain).or_default() += 1;
        free.entry(domain).and_modify(|free| *free -= 1);
        domains.push(domain);
    }
    let mut nodes: Vec<RingNode> =
        rotated.into_iter().zip(taken).filter(|&(_, taken)| taken).map(|(node, _)| node).collect();
    let mut places = vec![None; n];
    for position in visits(n, k) {
        let next = nodes.iter().position(|node| node.domain == domains[position]);
        places[position] = next.map(|next| nodes.remove(next).node);
    }
    // No place is `None`: of each domain exactly as many nodes were taken as it has positions.
    Ok(places.into_iter().flatten().collect())
}

/// Returns the positions in the order in which the shipped chain code for (n, k) visits them, or in
/// ascending order if no such code ships.
fn visits(n: usize, k: usize) -> Vec<usize> {
    table::find(n, k).map_or_else(|| (0..n).collect(), |code| code.order().to_vec())
}

/// The spares of a stripe: nodes of its ring that may take over one of its positions.
#[derive(Debug, Clone)]
pub struct Spares {
    layout: Layout,
    domains: HashMap<NodeId, u16>,
    free: Vec<NodeId>,
}

impl Spares {
    /// Returns the nodes of `ring` that are not in `places` and for which `is_usable` is true.
    pub fn new(
        ring: &[RingNode],
        layout: Layout,
        places: &[NodeId],
        is_usable: impl Fn(NodeId) -> bool,
    ) -> Self {
        let domains = ring.iter().map(|member| (member.node, member.domain)).collect();
        let free = ring.iter().map(|member| member.node);
        let free = free.filter(|node| !places.contains(node) && is_usable(*node)).collect();
        Self { layout, domains, free }
    }

    /// Returns the remaining spares.
    pub fn nodes(&self) -> &[NodeId] {
        &self.free
    }

    /// Removes the spares for which `is_usable` is false.
    pub fn retain(&mut self, is_usable: impl Fn(NodeId) -> bool) {
        self.free.retain(|node| is_usable(*node));
    }

    /// Adds a node that has been removed from the stripe.
    pub fn give(&mut self, node: NodeId) {
        self.free.push(node);
    }

    /// Takes a spare for `position` of a stripe on `places`. Prefers a node that is not in doubt,
    /// then a node outside the domains of the other holders of the position's blocks. Returns
    /// `None` if no spare is left.
    pub fn take(
        &mut self,
        places: &[NodeId],
        position: usize,
        is_in_doubt: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        let blocks = self.layout.blocks_at(position);
        let others = blocks.flat_map(|block| self.layout.holders(block));
        let others: Vec<_> = others
            .filter(|&other| other != position)
            .filter_map(|other| self.domains.get(places.get(other)?))
            .collect();
        let cost = |at: &usize| {
            let node = self.free[*at];
            let shares = self.domains.get(&node).is_some_and(|domain| others.contains(&domain));
            (is_in_doubt(node), shares)
        };
        let best = (0..self.free.len()).min_by_key(cost)?;
        Some(self.free.remove(best))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn nodes(count: usize, racks: usize) -> Vec<Node> {
        let sizes: Vec<usize> =
            (0..racks).map(|rack| count / racks + usize::from(rack < count % racks)).collect();
        in_racks(&sizes)
    }

    fn in_racks(sizes: &[usize]) -> Vec<Node> {
        let of = |(rack, &size): (usize, &usize)| {
            (0..size).map(move |i| Node {
                name: format!("n{rack}-{i}").parse().unwrap(),
                address: format!("h{rack}-{i}:7440"),
                zone: String::new(),
                rack: format!("r{rack}"),
                storage: true,
            })
        };
        sizes.iter().enumerate().flat_map(of).collect()
    }

    #[test]
    fn the_saves_of_a_large_cluster_use_all_nodes_and_all_domains_evenly() {
        let save = |byte| SaveId([byte; 12]);
        let names = |nodes: Vec<Node>| -> BTreeSet<String> {
            nodes.iter().map(|node| node.name.to_string()).collect()
        };
        let few = nodes(MAX_RING, 4);
        assert_eq!(nodes_of_save(few.clone(), save(1)), few);
        let many = in_racks(&[100, 100, 100, 20]);
        let mut used = BTreeSet::new();
        for byte in 0..30 {
            let chosen = nodes_of_save(many.clone(), save(byte));
            assert_eq!(chosen.len(), MAX_RING);
            let in_rack = |rack: &str| chosen.iter().filter(|node| node.rack == rack).count();
            // The small domain gives all that it has.
            assert_eq!(["r0", "r1", "r2", "r3"].map(in_rack), [36, 36, 36, 20]);
            used.extend(names(chosen));
        }
        assert_eq!(used, names(many.clone()));
        let mut reversed = many.clone();
        reversed.reverse();
        let (once, again) = (nodes_of_save(many, save(7)), nodes_of_save(reversed, save(7)));
        assert_eq!(names(once), names(again));
    }

    /// Counts the blocks of each stripe that have both replicas in one domain. Returns the
    /// greatest count.
    fn most_shared(nodes: &[Node], n: usize, k: usize) -> usize {
        let shared = |turn, stripe| {
            let ring = ring(nodes, turn);
            let domain: HashMap<NodeId, u16> =
                ring.iter().map(|member| (member.node, member.domain)).collect();
            let places = place(&ring, n, k, stripe).unwrap();
            let distinct: std::collections::HashSet<_> = places.iter().collect();
            assert_eq!(distinct.len(), n);
            (0..k).filter(|&j| domain[&places[j]] == domain[&places[j + n - k]]).count()
        };
        let stripes = 0..nodes.len() as u32;
        stripes.map(|stripe| shared(stripe.into(), stripe).max(shared(5, stripe))).max().unwrap()
    }

    #[test]
    fn the_replicas_of_a_block_lie_in_different_domains() {
        for (n, k) in [(16, 11), (14, 10), (12, 8), (6, 4), (4, 2)] {
            for racks in 2..=n {
                for count in n..n + 6 {
                    assert_eq!(most_shared(&nodes(count, racks), n, k), 0, "({n},{k}) {racks}");
                }
            }
        }
        assert_eq!(most_shared(&in_racks(&[6, 6, 4]), 16, 11), 0);
        assert_eq!(most_shared(&in_racks(&[8, 4, 4]), 16, 11), 1);
    }

    #[test]
    fn chains_of_all_stripes_go_round_the_ring() {
        for (n, k) in [(16, 11), (6, 4)] {
            for count in [n, n + 3] {
                let ring = ring(&nodes(count, 1), 2);
                let at = |node| ring.iter().position(|member| member.node == node).unwrap();
                for stripe in 0..count as u32 {
                    let places = place(&ring, n, k, stripe).unwrap();
                    let order = table::find(n, k).unwrap().order();
                    for hop in order.windows(2) {
                        assert_eq!(at(places[hop[1]]), (at(places[hop[0]]) + 1) % count);
                    }
                }
            }
        }
    }

    #[test]
    fn within_a_domain_the_chain_visits_the_ring_in_order() {
        let (n, k) = (14, 10);
        let ring = ring(&nodes(17, 3), 4);
        for stripe in 0..17 {
            let places = place(&ring, n, k, stripe).unwrap();
            let start = stripe as usize % 17;
            let at = |node| (ring.iter().position(|m| m.node == node).unwrap() + 17 - start) % 17;
            let mut last = HashMap::new();
            for &position in table::find(n, k).unwrap().order() {
                let at = at(places[position]);
                let domain = ring[(at + start) % 17].domain;
                assert!(last.insert(domain, at).is_none_or(|before| before < at), "{places:?}");
            }
        }
    }

    #[test]
    fn without_a_chain_positions_follow_the_ring() {
        let ring = ring(&nodes(12, 1), 0);
        assert_eq!(table::find(12, 6), None);
        let nodes: Vec<NodeId> = ring.iter().map(|member| member.node).collect();
        assert_eq!(place(&ring, 12, 6, 0).unwrap(), nodes);
    }

    #[test]
    fn positions_rotate_over_all_nodes() {
        let ring = ring(&nodes(20, 20), 0);
        let mut heads: Vec<NodeId> =
            (0..20).map(|stripe| place(&ring, 16, 11, stripe).unwrap()[0]).collect();
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), 20);
    }

    #[test]
    fn a_spare_lies_outside_the_domains_of_the_replicas_when_one_does() {
        let ring = ring(&in_racks(&[4, 2, 2]), 0);
        let layout = Layout::new(4, 2).unwrap();
        let domain = |node: NodeId| ring.iter().find(|m| m.node == node).unwrap().domain;
        let places = place(&ring, 4, 2, 0).unwrap();
        for position in 0..4 {
            let other = domain(places[(position + 2) % 4]);
            let mut spares = Spares::new(&ring, layout, &places, |_| true);
            let free = spares.nodes().to_vec();
            assert_eq!(free.len(), 4);
            let taken: Vec<NodeId> =
                (0..4).filter_map(|_| spares.take(&places, position, |_| false)).collect();
            assert_eq!(spares.take(&places, position, |_| false), None);
            let shared: Vec<bool> = taken.iter().map(|&node| domain(node) == other).collect();
            assert!(shared.is_sorted() && !shared[0], "{position}: {shared:?}");
            // A node that is not in doubt is preferred even if it shares a domain.
            let mut spares = Spares::new(&ring, layout, &places, |_| true);
            let good = *taken.last().unwrap();
            assert_eq!(spares.take(&places, position, |node| node != good), Some(good));
        }
    }

    #[test]
    fn too_few_nodes_are_refused() {
        let ring = ring(&nodes(15, 3), 0);
        assert_eq!(place(&ring, 16, 11, 0), Err(PlacementError { need: 16, have: 15 }));
        assert!(super::ring(&[], 3).is_empty());
    }
}
