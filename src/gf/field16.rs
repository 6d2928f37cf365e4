//! Arithmetic of single elements of GF(2^16), for codes that need more elements than GF(2^8) has.
//! The field is that of `reed-solomon-erasure`'s `galois_16`: polynomials `low + high X` over
//! GF(2^8) modulo X^2 + 2 X + 128.
//!
//! Because the field is an extension of the small field, a product with a constant is a 2x2 block
//! of products in GF(2^8). The kernels of GF(2^8) therefore do the work, and every map that is
//! linear over GF(2^8) with one weight for both halves of a symbol commutes with it.

use super::field;

/// The remainder of X^2 modulo the polynomial: `SQUARE[0] + SQUARE[1] X`.
const SQUARE: [u8; 2] = [128, 2];

/// An element: the low half, then the high half.
pub type Element = [u8; 2];

/// Returns the block that multiplies the halves of a symbol by `a`: the row for the low half of the
/// product, then the row for the high half. The first entry of each row is for the symbol's low
/// half.
pub const fn block(a: Element) -> [[u8; 2]; 2] {
    let [low, high] = a;
    [[low, field::mul(high, SQUARE[0])], [high, low ^ field::mul(high, SQUARE[1])]]
}

/// Returns the product `a * b`.
pub const fn mul(a: Element, b: Element) -> Element {
    let [low, high] = block(a);
    [
        field::mul(low[0], b[0]) ^ field::mul(low[1], b[1]),
        field::mul(high[0], b[0]) ^ field::mul(high[1], b[1]),
    ]
}

/// Returns the inverse of `a`, or `None` for zero.
pub const fn inv(a: Element) -> Option<Element> {
    // The adjugate of the block divided by its determinant, applied to one.
    let [[p, q], [r, s]] = block(a);
    match field::inv(field::mul(p, s) ^ field::mul(q, r)) {
        Some(scale) => Some([field::mul(scale, s), field::mul(scale, r)]),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reed_solomon_erasure::galois_16;

    fn all() -> impl Iterator<Item = Element> {
        (0..=u16::MAX).map(u16::to_le_bytes)
    }

    /// Checks every element times those that span the field: 1 and X span it over GF(2^8), so all
    /// products follow.
    #[test]
    fn products_are_the_oracles() {
        use reed_solomon_erasure::Field;
        let some = [[0, 0], [1, 0], [2, 0], [0, 1], [0, 2], [3, 7], [255, 255], [17, 128]];
        for (a, b) in all().flat_map(|a| some.map(|b| (a, b))) {
            // The reference stores the high half first.
            let [high, low] = galois_16::Field::mul([a[1], a[0]], [b[1], b[0]]);
            assert_eq!(mul(a, b), [low, high], "{a:?} * {b:?}");
        }
    }

    #[test]
    fn every_element_but_zero_has_its_inverse() {
        for a in all() {
            let product = inv(a).map(|inverse| mul(a, inverse));
            assert_eq!(product, (a != [0, 0]).then_some([1, 0]), "{a:?}");
            assert_eq!(mul(a, [1, 0]), a);
        }
    }

    #[test]
    fn the_axioms_hold_on_what_spans() {
        let basis: Vec<Element> = (0..8).flat_map(|bit| [[1 << bit, 0], [0, 1 << bit]]).collect();
        let add = |a: Element, b: Element| [a[0] ^ b[0], a[1] ^ b[1]];
        for (&a, &b) in basis.iter().flat_map(|a| basis.iter().map(move |b| (a, b))) {
            assert_eq!(mul(a, b), mul(b, a));
            for &c in &basis {
                assert_eq!(mul(mul(a, b), c), mul(a, mul(b, c)));
                assert_eq!(mul(a, add(b, c)), add(mul(a, b), mul(a, c)));
            }
        }
    }
}
