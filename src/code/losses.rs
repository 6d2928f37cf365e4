//! Counts how many more nodes may be lost before a block of a stripe becomes unreadable.

use std::collections::HashMap;

use super::span::Span;
use super::{Code, CodeId, MAX_PIECES};

/// Maximum number of sets of lost nodes that are tried, which takes half a second of one core.
const MAX_SETS: u64 = 100_000;
/// Maximum number of results in a [`SurvivableLossCache`].
const MAX_CACHED: usize = 16_384;

/// The blocks and pieces of a stripe that can be read from one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeShare {
    /// The numbers of the blocks, from 0.
    pub blocks: Vec<u8>,
    /// The numbers of the code's pieces, from 0.
    pub pieces: Vec<u8>,
}

/// Returns the largest number m such that, whichever m of `nodes` are lost, every block of `wanted`
/// can still be read: from a replica, or from pieces of `code` that span it. Returns `None` when
/// some block cannot be read even from all nodes together.
///
/// The ranks of the remaining pieces decide, so the result is right for codes that are not MDS,
/// too. After 100,000 sets the search stops and returns the number that it has proven so far.
pub fn survivable_losses(wanted: &[u8], code: Option<&Code>, nodes: &[NodeShare]) -> Option<usize> {
    let mut left: Vec<&NodeShare> =
        nodes.iter().filter(|node| **node != NodeShare::default()).collect();
    if !are_readable(wanted, code, &left) {
        return None;
    }
    if wanted.is_empty() {
        return Some(nodes.len());
    }
    let mut losses = Losses { wanted, code, sets: 0 };
    let mut survived = 0;
    while survived < left.len() && losses.survive(&mut left, 0, survived + 1) {
        survived += 1;
    }
    Some(survived)
}

/// The arguments of [`survivable_losses`]: the nodes, the wanted blocks, and the code.
type LossQuestion = (Vec<NodeShare>, Vec<u8>, Option<CodeId>);

/// Cached results of [`survivable_losses`]. Stripes differ in their nodes, but rarely in the parts
/// that their nodes hold.
#[derive(Debug, Default)]
pub struct SurvivableLossCache {
    known: HashMap<LossQuestion, Option<usize>>,
}

impl SurvivableLossCache {
    /// Returns what [`survivable_losses`] returns.
    pub fn survivable_losses(
        &mut self,
        wanted: Vec<u8>,
        code: Option<&Code>,
        mut nodes: Vec<NodeShare>,
    ) -> Option<usize> {
        nodes.sort();
        let key = (nodes, wanted, code.map(Code::id));
        if let Some(survives) = self.known.get(&key) {
            return *survives;
        }
        let survives = survivable_losses(&key.1, code, &key.0);
        if self.known.len() >= MAX_CACHED {
            self.known.clear();
        }
        self.known.insert(key, survives);
        survives
    }
}

struct Losses<'a> {
    wanted: &'a [u8],
    code: Option<&'a Code>,
    /// The number of sets that were tried.
    sets: u64,
}

impl Losses<'_> {
    /// Returns whether the blocks can be read after the loss of any `count` of the nodes from index
    /// `first` on. Returns false once [`MAX_SETS`] sets were tried.
    fn survive(&mut self, left: &mut Vec<&NodeShare>, first: usize, count: usize) -> bool {
        if count == 0 {
            self.sets += 1;
            return self.sets <= MAX_SETS && are_readable(self.wanted, self.code, left);
        }
        for at in first..(left.len() + 1).saturating_sub(count) {
            let lost = left.remove(at);
            let survives = self.survive(left, at, count - 1);
            left.insert(at, lost);
            if !survives {
                return false;
            }
        }
        true
    }
}

fn are_readable(wanted: &[u8], code: Option<&Code>, nodes: &[&NodeShare]) -> bool {
    let has_replica = |block: &u8| nodes.iter().any(|node| node.blocks.contains(block));
    let mut rest = wanted.iter().filter(|block| !has_replica(block)).peekable();
    if rest.peek().is_none() {
        return true;
    }
    let Some(code) = code else { return false };
    let (mut span, mut seen) = (Span::default(), [false; MAX_PIECES]);
    for &piece in nodes.iter().flat_map(|node| &node.pieces) {
        let piece = usize::from(piece);
        let is_new = seen.get_mut(piece).is_some_and(|seen| !std::mem::replace(seen, true));
        if is_new && piece < code.n() && span.rank() < code.k() {
            span.insert(code.generator().row(piece));
        }
    }
    span.rank() == code.k()
        || rest.all(|&block| span.express_unit(block.into(), code.k()).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{ChainCode, Layout, RsCode, table};
    use crate::entropy::{Entropy, SeededEntropy};
    use crate::gf::Matrix;

    /// The reference implementation: tries all sets of remaining nodes, with ranks of matrices.
    fn brute_force(wanted: &[u8], code: Option<&Code>, nodes: &[NodeShare]) -> Option<usize> {
        let is_readable = |left: u32| {
            let left: Vec<&NodeShare> =
                (0..nodes.len()).filter(|at| left >> at & 1 == 1).map(|at| &nodes[at]).collect();
            let pieces: Vec<Vec<u8>> = left
                .iter()
                .flat_map(|node| &node.pieces)
                .filter_map(|&piece| Some(code?.generator().row(piece.into()).to_vec()))
                .collect();
            wanted.iter().all(|&block| {
                if left.iter().any(|node| node.blocks.contains(&block)) {
                    return true;
                }
                let Some(code) = code.filter(|_| !pieces.is_empty()) else { return false };
                let unit = (0..code.k()).map(|col| u8::from(col == usize::from(block))).collect();
                let mut more = pieces.clone();
                more.push(unit);
                let rank = |rows: &[Vec<u8>]| Matrix::from_rows(rows).unwrap().rank();
                rank(&more) == rank(&pieces)
            })
        };
        let all = (1_u32 << nodes.len()) - 1;
        let kept = |losses: usize| {
            (0..=all).filter(move |set| (all & !set).count_ones() as usize == losses)
        };
        let survives = |losses: &usize| kept(*losses).all(is_readable);
        (0..=nodes.len()).take_while(survives).last()
    }

    fn pieces_of(code: &Code) -> Vec<NodeShare> {
        (0..code.n() as u8).map(|piece| NodeShare { blocks: vec![], pieces: vec![piece] }).collect()
    }

    #[test]
    fn whole_codes_survive_what_they_promise() {
        for chain in table::all() {
            let code = Code::Chain(chain.clone());
            let wanted: Vec<u8> = (0..code.k() as u8).collect();
            let survived = survivable_losses(&wanted, Some(&code), &pieces_of(&code));
            assert_eq!(survived, Some(code.n() - code.k()), "({},{})", code.n(), code.k());
        }
    }

    #[test]
    fn it_is_what_brute_force_says() {
        let draw = SeededEntropy::new(24);
        let below = |bound: usize| draw.below(bound as u64) as usize;
        // Coefficients of 1 make a chain with many dependent subsets.
        let (layout, order) = (Layout::new(6, 4).unwrap(), vec![2, 3, 0, 1, 4, 5]);
        let xi: Vec<Vec<u8>> =
            order.iter().map(|&at| vec![1; layout.blocks_at(at).count()]).collect();
        let mut psi = xi.clone();
        psi[5].fill(0);
        let poor = ChainCode::new(layout, order, psi, xi).unwrap();
        let shipped = [(4, 2), (6, 4), (8, 4), (16, 11)].map(|(n, k)| table::find(n, k).unwrap());
        let mut codes: Vec<Code> = shipped.map(|code| Code::Chain(code.clone())).into();
        codes.extend([Code::Chain(poor), Code::Rs(RsCode::new(9, 5).unwrap())]);
        let (mut lost, mut not_mds) = (0, 0);
        for turn in 0..180 {
            let code = &codes[turn % codes.len()];
            let (n, k) = (code.n(), code.k());
            // With more nodes the reference implementation takes seconds.
            let losses = if n == 16 { 4 + below(4) } else { below(n - k + 2) };
            let mut nodes = pieces_of(code);
            for _ in 0..losses {
                nodes.remove(below(nodes.len()));
            }
            let replicas = if below(3) == 0 { below(k + 1) } else { 0 };
            for _ in 0..replicas {
                let at = below(nodes.len());
                nodes[at].blocks.push(below(k) as u8);
            }
            if below(5) == 0 {
                // A node holds two pieces.
                if let Some(mut node) = nodes.pop() {
                    nodes
                        .last_mut()
                        .into_iter()
                        .for_each(|last| last.pieces.append(&mut node.pieces));
                }
            }
            let wanted: Vec<u8> = (0..k as u8).filter(|_| below(8) > 0).collect();
            let found = survivable_losses(&wanted, Some(code), &nodes);
            assert_eq!(found, brute_force(&wanted, Some(code), &nodes), "{turn}: {nodes:?}");
            lost += usize::from(found.is_none());
            not_mds += usize::from(found.is_some_and(|found| found + k < nodes.len()));
        }
        assert!(lost > 5 && not_mds > 5, "{lost} lost, {not_mds} with less than MDS codes have");
    }

    #[test]
    fn replicas_survive_the_loss_of_all_but_one_of_a_block() {
        let share = |blocks: &[u8]| NodeShare { blocks: blocks.to_vec(), pieces: vec![] };
        let nodes = [share(&[0, 1]), share(&[1, 2]), share(&[2, 0]), share(&[])];
        assert_eq!(survivable_losses(&[0, 1, 2], None, &nodes), Some(1));
        assert_eq!(survivable_losses(&[0, 1, 2], None, &nodes[..2]), Some(0));
        assert_eq!(survivable_losses(&[0, 1, 2], None, &nodes[..1]), None);
        assert_eq!(survivable_losses(&[], None, &nodes), Some(4));
    }

    #[test]
    fn the_work_is_bounded() {
        let code = Code::Rs(RsCode::new(32, 16).unwrap());
        let survived =
            survivable_losses(&(0..16).collect::<Vec<_>>(), Some(&code), &pieces_of(&code));
        // C(32, 4) and all smaller sets are 41,449 sets; C(32, 5) are 201,376.
        assert_eq!(survived, Some(4));
    }
}
