//! Finds orders without natural dependencies, and coefficients without accidental ones.
//!
//! A determinant is affine in each single coefficient. The determinants of a subset with the
//! coefficient at 0 and at 1 therefore tell for which of its values the subset is dependent. The
//! search sets one coefficient after the other to the best of its 255 values. All random choices
//! follow from a seed: the same seed gives the same code.

use super::algebra::chain_rows;
use super::subsets::{determinants, natural, natural_up_to, total};
use super::{ChainCode, CodeError, Layout};
use crate::entropy::{Entropy, SeededEntropy};
use crate::gf::field;

/// The default number of coefficients that are set before the search gives up.
pub const DEFAULT_STEPS: usize = 2000;
/// The default number of orders that are tried before the search gives up.
pub const DEFAULT_ORDERS: usize = 20_000;
/// Maximum number of exchanges in one order without gain before another order is drawn.
const PATIENCE: usize = 200;

/// Maximum number of rounds over all coefficients without gain before the search for better ones
/// ends.
const IDLE_ROUNDS: usize = 8;

/// Returns a code whose order and coefficients leave no dependent subset, or
/// [`CodeError::NotFound`] if the search finds none.
pub fn mds(n: usize, k: usize, seed: u64) -> Result<ChainCode, CodeError> {
    let layout = Layout::new(n, k)?;
    let order = order(layout, seed, DEFAULT_ORDERS)?;
    let code = coefficients(layout, &order, seed, DEFAULT_STEPS)?;
    match super::subsets::dependent(code.generator())? {
        0 => Ok(code),
        _ => Err(CodeError::NotFound { what: "MDS coefficients", n, k, tries: DEFAULT_STEPS }),
    }
}

/// Returns whether each of the first k hops brings exactly one block that no hop before it had.
/// From those k pieces the blocks are reconstructed by walking the chain.
pub fn is_walkable(layout: Layout, order: &[usize]) -> bool {
    let mut seen = vec![false; layout.k()];
    order.len() >= layout.k()
        && order.iter().take(layout.k()).all(|&position| take_new(layout, position, &mut seen) == 1)
}

/// Marks the blocks at `position` as seen. Returns how many of them are new.
fn take_new(layout: Layout, position: usize, seen: &mut [bool]) -> usize {
    let new = |block: usize| !std::mem::replace(&mut seen[block], true);
    layout.blocks_at(position).map(new).filter(|&is_new| is_new).count()
}

/// Returns an order without natural dependencies in which each of the first k hops brings a new
/// block ([`is_walkable`]), or [`CodeError::NotFound`] if there is none among `tries` orders.
pub fn order(layout: Layout, seed: u64, tries: usize) -> Result<Vec<usize>, CodeError> {
    let entropy = SeededEntropy::new(seed);
    let (n, k) = (layout.n(), layout.k());
    let (mut best, mut best_count, mut idle) = (Vec::new(), u64::MAX, 0);
    // This refuses parameters with too many subsets before the loop counts them.
    natural(layout, &(0..n).collect::<Vec<_>>())?;
    for _ in 0..tries {
        let is_fresh = best.is_empty() || idle >= PATIENCE;
        let candidate =
            if is_fresh { walkable_order(layout, &entropy) } else { exchange(&best, &entropy) };
        if !is_walkable(layout, &candidate) {
            continue;
        }
        let limit = if is_fresh { total(n, k) } else { best_count };
        let count = natural_up_to(layout, &candidate, limit);
        idle = if is_fresh || count < best_count { 0 } else { idle + 1 };
        if is_fresh || count <= best_count {
            (best, best_count) = (candidate, count);
        }
        if best_count == 0 && natural(layout, &best)? == 0 {
            return Ok(best);
        }
    }
    Err(CodeError::NotFound { what: "walkable order without natural dependencies", n, k, tries })
}

fn exchange(order: &[usize], entropy: &SeededEntropy) -> Vec<usize> {
    let mut changed = order.to_vec();
    let pick = || entropy.below(order.len() as u64) as usize;
    let (a, b) = (pick(), pick());
    changed.swap(a, b);
    changed
}

/// Returns a random order, which is walkable unless the draw reaches a dead end.
fn walkable_order(layout: Layout, entropy: &SeededEntropy) -> Vec<usize> {
    let mut rest: Vec<usize> = (0..layout.n()).collect();
    let mut seen = vec![false; layout.k()];
    let mut order = Vec::new();
    while !rest.is_empty() {
        let brings_one = |&&position: &&usize| take_new(layout, position, &mut seen.clone()) == 1;
        let fits: Vec<usize> = rest.iter().filter(brings_one).copied().collect();
        let choices = if fits.is_empty() { &rest } else { &fits };
        let chosen = choices[entropy.below(choices.len() as u64) as usize];
        take_new(layout, chosen, &mut seen);
        rest.retain(|&position| position != chosen);
        order.push(chosen);
    }
    order
}

/// The place of a coefficient: psi or xi, the hop, and the number of the block among the hop's
/// blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Place {
    is_psi: bool,
    hop: usize,
    slot: usize,
}

/// All coefficients of a chain, hop by hop.
struct Coefficients {
    psi: Vec<Vec<u8>>,
    xi: Vec<Vec<u8>>,
}

impl Coefficients {
    fn at(&mut self, place: Place) -> &mut u8 {
        let side = if place.is_psi { &mut self.psi } else { &mut self.xi };
        &mut side[place.hop][place.slot]
    }
}

/// Returns the code with this order and the best coefficients found in `steps` steps. The search
/// ends early when only the natural dependencies remain, or when several rounds over all
/// coefficients have brought no gain.
///
/// The first psi of each block is 1: scaling a block changes no dependency, and multiplying by 1
/// costs nothing.
pub fn coefficients(
    layout: Layout,
    order: &[usize],
    seed: u64,
    steps: usize,
) -> Result<ChainCode, CodeError> {
    let goal = natural(layout, order)?;
    let entropy = SeededEntropy::new(seed);
    let (mut coefs, places) = random_coefficients(layout, order, &entropy);
    let (mut fewest, mut idle) = (u64::MAX, 0);
    for &place in places.iter().cycle().take(steps) {
        let (value, count) = best_value(layout, order, &mut coefs, place, &entropy);
        *coefs.at(place) = value;
        idle = if count < fewest { 0 } else { idle + 1 };
        fewest = fewest.min(count);
        if count <= goal || idle > IDLE_ROUNDS * places.len() {
            break;
        }
    }
    ChainCode::new(layout, order.to_vec(), coefs.psi, coefs.xi)
}

/// Returns random coefficients, and the places of the coefficients that may change: all but the
/// first psi of each block and the psi of the tail.
fn random_coefficients(
    layout: Layout,
    order: &[usize],
    entropy: &SeededEntropy,
) -> (Coefficients, Vec<Place>) {
    let mut coefs = Coefficients { psi: Vec::new(), xi: Vec::new() };
    let (mut places, mut seen) = (Vec::new(), vec![false; layout.k()]);
    let random = |_| 1 + entropy.below(255) as u8;
    for (hop, &position) in order.iter().enumerate() {
        let is_tail = hop + 1 == order.len();
        let blocks = layout.blocks_at(position);
        coefs.xi.push(blocks.clone().map(random).collect());
        coefs
            .psi
            .push(blocks.clone().map(|block| if is_tail { 0 } else { random(block) }).collect());
        for (slot, block) in blocks.enumerate() {
            places.push(Place { is_psi: false, hop, slot });
            let place = Place { is_psi: true, hop, slot };
            match std::mem::replace(&mut seen[block], true) {
                _ if is_tail => {}
                true => places.push(place),
                false => *coefs.at(place) = 1,
            }
        }
    }
    (coefs, places)
}

/// Returns the value of one coefficient that leaves the fewest dependent subsets, and the number of
/// these subsets. If several values are equally good, one is drawn at random.
fn best_value(
    layout: Layout,
    order: &[usize],
    coefs: &mut Coefficients,
    place: Place,
    entropy: &SeededEntropy,
) -> (u8, u64) {
    let counts = dependent_by_value(layout, order, coefs, place);
    let fewest = counts[1..].iter().min().copied().unwrap_or(0);
    let best: Vec<u8> = (1..=255).filter(|&value| counts[usize::from(value)] == fewest).collect();
    let choice = best.get(entropy.below(best.len() as u64) as usize).copied();
    (choice.unwrap_or(*coefs.at(place)), fewest)
}

/// Returns the number of dependent subsets for each value of one coefficient.
fn dependent_by_value(
    layout: Layout,
    order: &[usize],
    coefs: &mut Coefficients,
    place: Place,
) -> [u64; 256] {
    let current = *coefs.at(place);
    let [at_0, at_1] = [0, 1].map(|value| {
        *coefs.at(place) = value;
        determinants(&chain_rows(layout, order, &coefs.psi, &coefs.xi).pieces)
    });
    *coefs.at(place) = current;
    // det(v) = at_0 + v (at_0 + at_1) is zero at exactly one value, at every value, or at no value.
    let mut counts = [0; 256];
    for (&at_0, &at_1) in at_0.iter().zip(&at_1) {
        match field::div(at_0, at_0 ^ at_1) {
            Some(root) => counts[usize::from(root)] += 1,
            None if at_0 == 0 => counts.iter_mut().for_each(|count| *count += 1),
            None => {}
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::subsets::dependent;

    #[test]
    fn one_seed_one_code() {
        let code = mds(8, 4, 1).unwrap();
        assert_eq!(code, mds(8, 4, 1).unwrap());
        assert_ne!(code.id(), mds(8, 4, 2).unwrap().id());
    }

    #[test]
    fn what_is_found_is_mds_walkable_and_normalised() {
        for (n, k) in [(4, 2), (6, 4), (9, 6), (10, 6), (5, 5), (1, 1)] {
            let code = mds(n, k, 3).unwrap();
            assert_eq!(dependent(code.generator()), Ok(0));
            assert!(is_walkable(code.layout(), code.order()), "({n},{k})");
            let mut seen = vec![false; k];
            for hop in 0..n - 1 {
                for (block, &psi) in code.blocks_of_hop(hop).zip(&code.psi()[hop]) {
                    assert!(psi == 1 || std::mem::replace(&mut seen[block], true), "{code:?}");
                    seen[block] = true;
                }
            }
        }
    }

    #[test]
    fn two_counts_tell_all_values() {
        let layout = Layout::new(6, 4).unwrap();
        let order = [0, 1, 2, 3, 4, 5];
        let (mut coefs, places) = random_coefficients(layout, &order, &SeededEntropy::new(9));
        for place in places {
            let counts = dependent_by_value(layout, &order, &mut coefs, place);
            let current = *coefs.at(place);
            for (value, &count) in (0..=255).zip(&counts) {
                *coefs.at(place) = value;
                let rows = chain_rows(layout, &order, &coefs.psi, &coefs.xi).pieces;
                let zeros = determinants(&rows).iter().filter(|&&det| det == 0).count();
                assert_eq!(zeros as u64, count, "{place:?} = {value}");
            }
            *coefs.at(place) = current;
        }
    }

    #[test]
    fn hopeless_searches_end() {
        // (12,6) has natural dependencies in every known order.
        let error = order(Layout::new(12, 6).unwrap(), 1, 50).unwrap_err();
        assert!(matches!(error, CodeError::NotFound { tries: 50, .. }));
    }
}
