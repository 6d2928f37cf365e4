//! Counts, by exhaustion, the k-subsets of pieces from which the blocks cannot be reconstructed.
//!
//! *Natural* dependencies hold for every choice of coefficients and are a property of layout and
//! order; *accidental* ones come from unlucky coefficients (the paper's terms). Subsets with a
//! common prefix share its elimination: one row is reduced per subset, not k.

use super::algebra::{Element, Mersenne61, chain_rows};
use super::{CodeError, Layout};
use crate::entropy::{Entropy, SeededEntropy};
use crate::gf::Matrix;

/// Maximum number of subsets that are counted, which takes a few seconds of one core.
pub const MAX_SUBSETS: u64 = 4_000_000;

/// Returns the number of subsets of k out of n pieces.
pub fn total(n: usize, k: usize) -> u64 {
    (0..k.min(n) as u64).fold(1, |count, i| count * (n as u64 - i) / (i + 1))
}

/// Returns an error for parameters with more than [`MAX_SUBSETS`] subsets.
fn check_total(n: usize, k: usize) -> Result<(), CodeError> {
    let subsets = if n > super::MAX_PIECES { u64::MAX } else { total(n, k) };
    if subsets > MAX_SUBSETS {
        return Err(CodeError::TooManySubsets { n, k, subsets, max: MAX_SUBSETS });
    }
    Ok(())
}

/// Returns the number of dependent subsets of k rows of a generator (k columns).
pub fn dependent(generator: &Matrix) -> Result<u64, CodeError> {
    check_total(generator.rows(), generator.cols())?;
    let rows: Vec<Vec<u8>> = generator.iter().map(<[u8]>::to_vec).collect();
    Ok(count(&rows, u64::MAX))
}

/// Returns the number of subsets that are dependent in every chain code of this layout and order.
pub fn natural(layout: Layout, order: &[usize]) -> Result<u64, CodeError> {
    super::algebra::check_order(layout, order)?;
    check_total(layout.n(), layout.k())?;
    let draws = [0, 1].map(|draw| count(&random_rows(layout, order, draw), u64::MAX));
    Ok(draws[0].min(draws[1]))
}

/// Counts the dependent subsets of one random choice of coefficients, which are almost certainly
/// the natural ones. The count stops soon after it exceeds `limit`. The function is for comparing
/// many orders.
pub(super) fn natural_up_to(layout: Layout, order: &[usize], limit: u64) -> u64 {
    count(&random_rows(layout, order, 0), limit)
}

/// Returns generator rows with random coefficients of a field so large that a dependency is
/// almost certainly not accidental.
fn random_rows(layout: Layout, order: &[usize], draw: u64) -> Vec<Vec<Mersenne61>> {
    let entropy = SeededEntropy::new(draw);
    let random = || -> Vec<Vec<Mersenne61>> {
        let hop = |&position: &usize| {
            let element = |_| Mersenne61::new(entropy.below(u64::MAX));
            layout.blocks_at(position).map(element).collect()
        };
        order.iter().map(hop).collect()
    };
    chain_rows(layout, order, &random(), &random()).pieces
}

/// Counts dependent subsets. The count stops soon after it exceeds `limit`.
fn count<E: Element>(rows: &[Vec<E>], limit: u64) -> u64 {
    let mut dependent = 0;
    SubsetIter::new(rows, |pivots: Option<&[E]>, subsets| {
        dependent += if pivots.is_none() { subsets } else { 0 };
        dependent <= limit
    })
    .descend(0);
    dependent
}

/// Returns the determinants of all k-subsets of rows in lexicographic order. In characteristic 2
/// exchanging rows does not change the sign, so each determinant is the product of the pivots.
pub(super) fn determinants(rows: &[Vec<u8>]) -> Vec<u8> {
    let mut all = Vec::new();
    SubsetIter::new(rows, |pivots: Option<&[u8]>, subsets| {
        let value = pivots.map_or(0, |pivots| pivots.iter().fold(1, |a, &b| a.mul(b)));
        all.extend(std::iter::repeat_n(value, subsets as usize));
        true
    })
    .descend(0);
    all
}

/// An iteration over all subsets of k rows in lexicographic order, which eliminates on the way.
/// `visit` receives either the pivots of an independent subset, or the number of subsets that share
/// a dependent prefix. `visit` returns whether the iteration continues.
struct SubsetIter<'a, E, V> {
    rows: &'a [Vec<E>],
    cols: usize,
    /// The reduced rows, each with the column of its pivot. The pivot is scaled to 1.
    basis: Vec<(usize, Vec<E>)>,
    /// The pivots before scaling.
    pivots: Vec<E>,
    visit: V,
}

impl<'a, E: Element, V: FnMut(Option<&[E]>, u64) -> bool> SubsetIter<'a, E, V> {
    fn new(rows: &'a [Vec<E>], visit: V) -> Self {
        let cols = rows.first().map_or(0, Vec::len);
        Self { rows, cols, basis: Vec::new(), pivots: Vec::new(), visit }
    }

    /// Extends the chosen rows by each row from `first` on, as long as enough rows remain.
    fn descend(&mut self, first: usize) -> bool {
        let missing = self.cols - self.basis.len();
        for next in first..(self.rows.len() + 1).saturating_sub(missing) {
            let mut row = self.rows[next].clone();
            for (col, basis) in &self.basis {
                let factor = row[*col];
                if factor != E::ZERO {
                    row.iter_mut().zip(basis).for_each(|(e, &b)| *e = e.sub_mul(factor, b));
                }
            }
            let goes_on = match row.iter().position(|&entry| entry != E::ZERO) {
                None => (self.visit)(None, total(self.rows.len() - next - 1, missing - 1)),
                Some(col) => self.descend_with(next, col, row, missing == 1),
            };
            if !goes_on {
                return false;
            }
        }
        true
    }

    fn descend_with(&mut self, chosen: usize, col: usize, mut row: Vec<E>, is_last: bool) -> bool {
        self.pivots.push(row[col]);
        let goes_on = if is_last {
            (self.visit)(Some(&self.pivots), 1)
        } else {
            let scale = row[col].inverse_or_zero();
            row.iter_mut().for_each(|entry| *entry = entry.mul(scale));
            self.basis.push((col, row));
            let goes_on = self.descend(chosen + 1);
            self.basis.pop();
            goes_on
        };
        self.pivots.pop();
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::RsCode;

    /// Returns all subsets of `k` numbers below `n`, in lexicographic order.
    fn subsets(n: usize, k: usize) -> Vec<Vec<usize>> {
        let masks = (0..1usize << n).filter(|mask| mask.count_ones() as usize == k);
        let mut all: Vec<Vec<usize>> =
            masks.map(|mask| (0..n).filter(|i| mask >> i & 1 == 1).collect()).collect();
        all.sort();
        all
    }

    #[test]
    fn the_count_is_that_of_ranks_one_by_one() {
        let entropy = SeededEntropy::new(1);
        for (n, k) in [(4, 2), (7, 3), (8, 4), (6, 6), (5, 1)] {
            // Entries of 0 and 1 make many subsets dependent.
            let entries = (0..n * k).map(|_| entropy.below(2) as u8).collect();
            let matrix = Matrix::new(n, k, entries).unwrap();
            let ranks =
                subsets(n, k).iter().map(|s| matrix.select(s).unwrap().rank()).collect::<Vec<_>>();
            let expected = ranks.iter().filter(|&&rank| rank < k).count() as u64;
            assert_eq!(dependent(&matrix), Ok(expected), "({n},{k})");
            let rows: Vec<Vec<u8>> = matrix.iter().map(<[u8]>::to_vec).collect();
            let zeros: Vec<bool> = determinants(&rows).iter().map(|&det| det == 0).collect();
            assert_eq!(zeros, ranks.iter().map(|&rank| rank < k).collect::<Vec<_>>());
            assert_eq!(total(n, k), ranks.len() as u64);
        }
    }

    #[test]
    fn determinants_of_two_rows_are_as_in_school() {
        let rows = vec![vec![3, 5], vec![7, 11], vec![0, 9]];
        let school = |a: usize, b: usize| {
            let (a, b): (&[u8], &[u8]) = (&rows[a], &rows[b]);
            a[0].mul(b[1]) ^ a[1].mul(b[0])
        };
        assert_eq!(determinants(&rows), [school(0, 1), school(0, 2), school(1, 2)]);
    }

    #[test]
    fn reed_solomon_has_no_dependent_subset() {
        assert_eq!(dependent(RsCode::new(12, 8).unwrap().generator()), Ok(0));
    }

    #[test]
    fn counting_is_bounded() {
        let error = natural(Layout::new(32, 16).unwrap(), &(0..32).collect::<Vec<_>>());
        assert!(matches!(error, Err(CodeError::TooManySubsets { subsets: 601_080_390, .. })));
        assert!(dependent(&Matrix::zero(256, 100).unwrap()).is_err());
    }
}
