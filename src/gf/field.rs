//! Arithmetic of single elements of GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D), the field of
//! `reed-solomon-erasure` and ISA-L. Addition and subtraction are XOR. Streams of bytes are
//! processed by [`super::kernel`] instead.

/// The field's polynomial, with its leading bit.
pub const POLYNOMIAL: u16 = 0x11D;

/// The order of the multiplicative group.
const GROUP: usize = 255;

/// The powers of the generator 2, stored twice so that a sum of two logarithms needs no reduction.
const EXP: [u8; 2 * GROUP] = powers();
/// The logarithm of each element to the base 2. The entry of 0 is never used.
const LOG: [u8; 256] = logarithms();

const fn powers() -> [u8; 2 * GROUP] {
    let mut table = [0; 2 * GROUP];
    let mut power: u16 = 1;
    let mut i = 0;
    while i < table.len() {
        table[i] = power as u8;
        power <<= 1;
        if power & 0x100 != 0 {
            power ^= POLYNOMIAL;
        }
        i += 1;
    }
    table
}

const fn logarithms() -> [u8; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < GROUP {
        table[EXP[i] as usize] = i as u8;
        i += 1;
    }
    table
}

/// Returns the product `a * b`.
pub const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// Returns the inverse of `a`, or `None` for zero.
pub const fn inv(a: u8) -> Option<u8> {
    if a == 0 { None } else { Some(EXP[GROUP - LOG[a as usize] as usize]) }
}

/// Returns the quotient `a / b`, or `None` when `b` is zero.
pub const fn div(a: u8, b: u8) -> Option<u8> {
    match inv(b) {
        Some(inverse) => Some(mul(a, inverse)),
        None => None,
    }
}

/// Returns 2 to the `power`. The element 2 generates the multiplicative group.
pub const fn exp(power: usize) -> u8 {
    EXP[power % GROUP]
}

/// Returns `a` to the `power`. Any element to the power 0 is 1.
pub const fn pow(a: u8, power: usize) -> u8 {
    if power == 0 {
        1
    } else if a == 0 {
        0
    } else {
        exp(LOG[a as usize] as usize * (power % GROUP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reed_solomon_erasure::galois_8;

    #[test]
    fn every_product_and_quotient_is_the_oracles() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(mul(a, b), galois_8::mul(a, b), "{a} * {b}");
                let quotient = (b != 0).then(|| galois_8::div(a, b));
                assert_eq!(div(a, b), quotient, "{a} / {b}");
                assert_eq!(pow(a, usize::from(b)), galois_8::exp(a, usize::from(b)), "{a} ^ {b}");
            }
        }
    }

    #[test]
    fn the_field_axioms_hold() {
        for a in 0..=255u8 {
            assert_eq!((mul(a, 1), mul(a, 0)), (a, 0));
            assert_eq!(inv(a).map(|inverse| mul(a, inverse)), (a != 0).then_some(1));
            for b in 0..=255u8 {
                let product = mul(a, b);
                assert_eq!(product, mul(b, a));
                assert_eq!(product == 0, a == 0 || b == 0);
                for c in 0..=255u8 {
                    assert_eq!(mul(product, c), mul(a, mul(b, c)));
                    assert_eq!(mul(a, b ^ c), product ^ mul(a, c));
                }
            }
        }
    }

    #[test]
    fn two_generates_the_group() {
        let mut seen = [false; 256];
        (0..GROUP).for_each(|i| seen[usize::from(exp(i))] = true);
        assert_eq!(seen.iter().filter(|&&is_power| is_power).count(), GROUP);
        assert_eq!((exp(GROUP), pow(0, 0), pow(2, 256)), (1, 1, 2));
    }
}
