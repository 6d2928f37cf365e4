//! The span of some rows, grown row by row. It remembers how each vector in it is composed of the
//! rows.

use crate::gf::Matrix;
use crate::gf::field;

/// A basis in reduced echelon form, with the combination of accepted rows that gives each basis
/// vector.
#[derive(Debug, Default)]
pub(super) struct Span {
    basis: Vec<BasisVector>,
}

#[derive(Debug)]
struct BasisVector {
    /// The column of the first nonzero entry, which is 1 and the only nonzero entry in its column.
    pivot: usize,
    vector: Vec<u8>,
    /// The coefficient of each accepted row; missing entries at the end are zero.
    made_of: Vec<u8>,
}

fn add_scaled(sums: &mut Vec<u8>, coef: u8, terms: &[u8]) {
    if coef != 0 {
        sums.resize(sums.len().max(terms.len()), 0);
        sums.iter_mut().zip(terms).for_each(|(sum, &term)| *sum ^= field::mul(coef, term));
    }
}

impl Span {
    /// Returns the number of accepted rows.
    pub(super) fn rank(&self) -> usize {
        self.basis.len()
    }

    /// Returns the remainder of `vector` outside the span, and the combination of accepted rows
    /// that was subtracted.
    fn reduce(&self, vector: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (mut rest, mut taken) = (vector.to_vec(), vec![0; self.rank()]);
        for basis in &self.basis {
            let factor = rest.get(basis.pivot).copied().unwrap_or(0);
            add_scaled(&mut rest, factor, &basis.vector);
            add_scaled(&mut taken, factor, &basis.made_of);
        }
        (rest, taken)
    }

    /// Accepts `row` if it is independent of the accepted rows. Returns whether it was accepted.
    pub(super) fn insert(&mut self, row: &[u8]) -> bool {
        let (mut vector, mut made_of) = self.reduce(row);
        let first = vector.iter().enumerate().find(|(_, entry)| **entry != 0);
        let Some((pivot, scale)) = first.and_then(|(col, &e)| Some((col, field::inv(e)?))) else {
            return false;
        };
        made_of.push(1);
        for entry in vector.iter_mut().chain(&mut made_of) {
            *entry = field::mul(scale, *entry);
        }
        for basis in &mut self.basis {
            let factor = basis.vector.get(pivot).copied().unwrap_or(0);
            add_scaled(&mut basis.vector, factor, &vector);
            add_scaled(&mut basis.made_of, factor, &made_of);
        }
        self.basis.push(BasisVector { pivot, vector, made_of });
        true
    }

    /// Returns the coefficients, one per accepted row, that give `vector`, or `None` when it is
    /// outside the span.
    pub(super) fn express(&self, vector: &[u8]) -> Option<Vec<u8>> {
        let (rest, taken) = self.reduce(vector);
        rest.iter().all(|&entry| entry == 0).then_some(taken)
    }

    /// Returns the coefficients that give unit vector `col` of a space of `cols` dimensions.
    pub(super) fn express_unit(&self, col: usize, cols: usize) -> Option<Vec<u8>> {
        let unit: Vec<u8> = (0..cols).map(|i| u8::from(i == col)).collect();
        self.express(&unit)
    }

    /// Accepts rows of `matrix` in the given order until the span is the whole space. Returns the
    /// accepted rows.
    pub(super) fn grow(&mut self, matrix: &Matrix, rows: &[usize]) -> Vec<usize> {
        let full = matrix.cols();
        rows.iter()
            .copied()
            .filter(|&row| self.rank() < full && self.insert(matrix.row(row)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::{Entropy, SeededEntropy};

    #[test]
    fn expressions_make_their_vector() {
        let entropy = SeededEntropy::new(1);
        for cols in 1..20 {
            let entries = (0..2 * cols * cols).map(|_| entropy.below(3) as u8).collect();
            let matrix = Matrix::new(2 * cols, cols, entries).unwrap();
            let mut span = Span::default();
            let accepted = span.grow(&matrix, &(0..2 * cols).collect::<Vec<_>>());
            assert_eq!(accepted.len(), matrix.rank());
            for row in matrix.iter() {
                let coefs = span.express(row).unwrap();
                let coefs = Matrix::from_rows(&[coefs]).unwrap();
                let made = coefs.mul(&matrix.select(&accepted).unwrap()).unwrap();
                assert_eq!(made.row(0), row);
            }
        }
    }

    #[test]
    fn what_is_outside_has_no_expression() {
        let mut span = Span::default();
        assert!(span.insert(&[1, 1, 0]) && span.insert(&[0, 2, 2]));
        assert!(!span.insert(&[1, 0, 1]));
        assert_eq!(span.express_unit(0, 3), None);
        assert_eq!(span.express(&[1, 0, 1]), Some(vec![1, field::inv(2).unwrap()]));
    }
}
