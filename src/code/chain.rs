//! Chain codes: the order in which a chain visits the nodes of a stripe, and the coefficients of
//! each hop.

use super::algebra::chain_rows;
use super::algebra::check_order;
use super::{CodeError, CodeId, Layout, search};
use crate::gf::{Matrix, field};

/// The kind byte of chain codes in the description from which a [`CodeId`] is computed.
const KIND: u8 = 1;

/// A RapidRAID code over GF(2^8). Hop i of the chain runs on position `order()[i]` of the stripe
/// and stores piece i:
///
/// ```text
/// c_i = x_{i-1} + sum xi_{i,j}  o_j     stored                (RapidRAID, equation (4))
/// x_i = x_{i-1} + sum psi_{i,j} o_j     forwarded, x_{-1} = 0 (RapidRAID, equation (3))
/// ```
///
/// where j runs over the blocks of the hop's node in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainCode {
    layout: Layout,
    order: Vec<usize>,
    psi: Vec<Vec<u8>>,
    xi: Vec<Vec<u8>>,
    generator: Matrix,
    prefixes: Matrix,
    id: CodeId,
}

impl ChainCode {
    /// Returns the code that visits the positions in this order with these coefficients, one per
    /// block of each hop in ascending order of blocks. The tail forwards nothing, so its psi must
    /// be zero. Returns [`CodeError::Order`] or [`CodeError::Coefficients`] if an argument does not
    /// fit.
    pub fn new(
        layout: Layout,
        order: Vec<usize>,
        psi: Vec<Vec<u8>>,
        xi: Vec<Vec<u8>>,
    ) -> Result<Self, CodeError> {
        check_order(layout, &order)?;
        check_coefficients("psi", layout, &order, &psi)?;
        check_coefficients("xi", layout, &order, &xi)?;
        if let Some(tail) = psi.last().filter(|tail| tail.iter().any(|&psi| psi != 0)) {
            let (hop, expected) = (order.len() - 1, tail.len());
            return Err(CodeError::Coefficients {
                what: "psi",
                hop,
                expected,
                given: tail.clone(),
            });
        }
        let rows = chain_rows(layout, &order, &psi, &xi);
        let generator = Matrix::from_rows(&rows.pieces)?;
        let prefixes = Matrix::from_rows(&rows.prefixes)?;
        let id = CodeId::of(&description(layout, &order, &psi, &xi));
        Ok(Self { layout, order, psi, xi, generator, prefixes, id })
    }

    /// Returns the code as published: the chain visits positions 0, 1, 2 and so on. If the search
    /// succeeds, only the natural dependencies remain, i.e. the subsets that are dependent for
    /// every choice of coefficients.
    pub fn paper(n: usize, k: usize) -> Result<Self, CodeError> {
        let layout = Layout::new(n, k)?;
        search::coefficients(layout, &(0..n).collect::<Vec<_>>(), 0, search::DEFAULT_STEPS)
    }

    /// Returns the code's id.
    pub fn id(&self) -> CodeId {
        self.id
    }

    /// Returns the number of pieces.
    pub fn n(&self) -> usize {
        self.layout.n()
    }

    /// Returns the number of source blocks.
    pub fn k(&self) -> usize {
        self.layout.k()
    }

    /// Returns the layout of the replicas from which the chain starts.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the position on which each hop runs.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns, per hop and block of its node, the coefficient of the block in the stream that is
    /// forwarded.
    pub fn psi(&self) -> &[Vec<u8>] {
        &self.psi
    }

    /// Returns, per hop and block of its node, the coefficient of the block in the piece that is
    /// stored.
    pub fn xi(&self) -> &[Vec<u8>] {
        &self.xi
    }

    /// Returns the blocks that hop `hop` reads, in ascending order. The result is empty when there
    /// is no such hop.
    pub fn blocks_of_hop(&self, hop: usize) -> impl Iterator<Item = usize> + Clone {
        let position = self.order.get(hop).copied();
        position.into_iter().flat_map(move |position| self.layout.blocks_at(position))
    }

    /// Returns the generator matrix. Row i is piece i over the source blocks.
    pub fn generator(&self) -> &Matrix {
        &self.generator
    }

    /// Returns the matrix of forwarded streams. Row i is the stream that hop i forwards, over the
    /// source blocks. The tail forwards nothing; its row repeats the row before it.
    pub fn prefix_rows(&self) -> &Matrix {
        &self.prefixes
    }
}

fn check_coefficients(
    what: &'static str,
    layout: Layout,
    order: &[usize],
    coefs: &[Vec<u8>],
) -> Result<(), CodeError> {
    for hop in 0..order.len().max(coefs.len()) {
        let expected = order.get(hop).map_or(0, |&position| layout.blocks_at(position).count());
        let given = coefs.get(hop).map(Vec::as_slice).unwrap_or_default();
        if given.len() != expected || hop >= order.len() {
            let given = given.iter().take(8).copied().collect();
            return Err(CodeError::Coefficients { what, hop, expected, given });
        }
    }
    Ok(())
}

/// Returns the bytes from which a code id is computed: kind, n, k, bits of the field, its
/// polynomial (big-endian), then the order, all psi and all xi, hop by hop.
fn description(layout: Layout, order: &[usize], psi: &[Vec<u8>], xi: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![KIND, layout.n() as u8, layout.k() as u8, 8];
    bytes.extend(field::POLYNOMIAL.to_be_bytes());
    bytes.extend(order.iter().map(|&position| position as u8));
    bytes.extend(psi.iter().chain(xi).flatten());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a (4,2) code, which has four hops with one block each: c_1 = xi_1 o_1, x_1 = psi_1
    /// o_1, ...
    fn small() -> ChainCode {
        let layout = Layout::new(4, 2).unwrap();
        let psi = vec![vec![2], vec![3], vec![4], vec![0]];
        let xi = vec![vec![5], vec![6], vec![7], vec![8]];
        ChainCode::new(layout, vec![0, 1, 2, 3], psi, xi).unwrap()
    }

    #[test]
    fn the_generator_follows_the_recurrence() {
        let expected = Matrix::from_rows(&[[5, 0], [2, 6], [2 ^ 7, 3], [2 ^ 4, 3 ^ 8]]).unwrap();
        assert_eq!(small().generator(), &expected);
        let expected = Matrix::from_rows(&[[2, 0], [2, 3], [2 ^ 4, 3], [2 ^ 4, 3]]).unwrap();
        assert_eq!(small().prefix_rows(), &expected);
    }

    #[test]
    fn the_id_certifies_every_coefficient() {
        let code = small();
        let with = |order: [usize; 4], psi: Vec<Vec<u8>>, xi: Vec<Vec<u8>>| {
            ChainCode::new(code.layout, order.to_vec(), psi, xi).unwrap().id()
        };
        let mut ids = vec![code.id()];
        for hop in 0..4 {
            let mut changed = code.xi.clone();
            changed[hop][0] += 1;
            ids.push(with([0, 1, 2, 3], code.psi.clone(), changed));
            let mut changed = code.psi.clone();
            changed[hop][0] += 1;
            if hop < 3 {
                ids.push(with([0, 1, 2, 3], changed, code.xi.clone()));
            }
        }
        ids.push(with([1, 0, 2, 3], code.psi.clone(), code.xi.clone()));
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 9);
    }

    #[test]
    fn what_is_no_chain_is_refused() {
        let (layout, code) = (Layout::new(4, 2).unwrap(), small());
        for order in [vec![], vec![0, 1, 2], vec![0, 1, 2, 2], vec![0, 1, 2, 4], vec![0; 900]] {
            assert!(ChainCode::new(layout, order, code.psi.clone(), code.xi.clone()).is_err());
        }
        let order = || vec![0, 1, 2, 3];
        for bad in [vec![], vec![vec![1]; 3], vec![vec![1]; 5], vec![vec![1, 1]; 4]] {
            assert!(ChainCode::new(layout, order(), bad.clone(), code.xi.clone()).is_err());
            assert!(ChainCode::new(layout, order(), code.psi.clone(), bad).is_err());
        }
        let forwards_at_the_tail = vec![vec![1]; 4];
        assert!(ChainCode::new(layout, order(), forwards_at_the_tail, code.xi.clone()).is_err());
    }
}
