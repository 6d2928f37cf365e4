//! The chain's recurrence over any field: over GF(2^8) for the codes themselves, and over a prime
//! field so large that a dependency found there with random coefficients almost certainly holds for
//! every choice of coefficients.

use super::{CodeError, Layout};
use crate::gf::field;

/// The field operations that elimination needs.
pub(super) trait Element: Copy + PartialEq {
    const ZERO: Self;
    const ONE: Self;
    fn sub_mul(self, a: Self, b: Self) -> Self;
    fn add_mul(self, a: Self, b: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Returns the inverse of a nonzero element, and zero for zero.
    fn inverse_or_zero(self) -> Self;
}

impl Element for u8 {
    const ZERO: Self = 0;
    const ONE: Self = 1;
    fn sub_mul(self, a: u8, b: u8) -> u8 {
        self ^ field::mul(a, b)
    }
    fn add_mul(self, a: u8, b: u8) -> u8 {
        self ^ field::mul(a, b)
    }
    fn mul(self, other: u8) -> u8 {
        field::mul(self, other)
    }
    fn inverse_or_zero(self) -> u8 {
        field::inv(self).unwrap_or(0)
    }
}

/// An element of the integers modulo the prime 2^61 - 1. A determinant that is not identically zero
/// is zero at random coefficients with probability below 2^-54 (its degree is at most 2^7).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Mersenne61(u64);

impl Mersenne61 {
    const PRIME: u64 = (1 << 61) - 1;

    pub(super) fn new(value: u64) -> Self {
        Self(value % Self::PRIME)
    }
}

impl Element for Mersenne61 {
    const ZERO: Self = Self(0);
    const ONE: Self = Self(1);

    fn sub_mul(self, a: Self, b: Self) -> Self {
        Self::new(self.0 + Self::PRIME - a.mul(b).0)
    }

    fn add_mul(self, a: Self, b: Self) -> Self {
        Self::new(self.0 + a.mul(b).0)
    }

    fn mul(self, other: Self) -> Self {
        let product = u128::from(self.0) * u128::from(other.0);
        Self::new((product as u64 & Self::PRIME) + (product >> 61) as u64)
    }

    fn inverse_or_zero(self) -> Self {
        // Fermat's little theorem: the inverse is the power PRIME - 2.
        let (mut result, mut square, mut power) = (Self::ONE, self, Self::PRIME - 2);
        while power > 0 {
            if power & 1 == 1 {
                result = result.mul(square);
            }
            square = square.mul(square);
            power >>= 1;
        }
        result
    }
}

/// The outputs of a chain, as rows over the source blocks.
pub(super) struct ChainRows<E> {
    /// Row i: the piece c that hop i stores.
    pub pieces: Vec<Vec<E>>,
    /// Row i: the partial sum x that hop i forwards.
    pub prefixes: Vec<Vec<E>>,
}

/// Runs the chain on unit vectors (RapidRAID, equations (3) and (4)): hop i stores `c = x + sum xi
/// o` and forwards `x' = x + sum psi o`, over the blocks at position `order[i]`. The coefficients
/// must fit the layout.
pub(super) fn chain_rows<E: Element>(
    layout: Layout,
    order: &[usize],
    psi: &[Vec<E>],
    xi: &[Vec<E>],
) -> ChainRows<E> {
    let mut partial = vec![E::ZERO; layout.k()];
    let mut rows = ChainRows { pieces: Vec::new(), prefixes: Vec::new() };
    for ((&position, psi), xi) in order.iter().zip(psi).zip(xi) {
        let mut piece = partial.clone();
        for ((block, &psi), &xi) in layout.blocks_at(position).zip(psi).zip(xi) {
            piece[block] = piece[block].add_mul(xi, E::ONE);
            partial[block] = partial[block].add_mul(psi, E::ONE);
        }
        rows.pieces.push(piece);
        rows.prefixes.push(partial.clone());
    }
    rows
}

/// Returns an error unless `order` contains each position exactly once.
pub(super) fn check_order(layout: Layout, order: &[usize]) -> Result<(), CodeError> {
    let n = layout.n();
    let is_each_once = order.len() == n && (0..n).all(|position| order.contains(&position));
    if is_each_once {
        return Ok(());
    }
    Err(CodeError::Order { n, order: order.iter().take(64).copied().collect() })
}
