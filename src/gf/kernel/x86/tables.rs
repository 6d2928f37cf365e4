//! Tables for the multiplication by constants: a bit matrix for the affine instruction, two tables
//! of sixteen bytes for the byte shuffle.

use crate::gf::field;

/// The bit matrices that multiply by c, in the form that the affine instruction reads: in
/// `AFFINE[c]`, bit i of the result is the parity of byte 7-i of the matrix AND the operand. This
/// works for any field polynomial.
pub(super) static AFFINE: [u64; 256] = affine_matrices();

const fn affine_matrices() -> [u64; 256] {
    let mut matrices = [0; 256];
    let mut c = 0;
    while c < 256 {
        let mut bit = 0;
        while bit < 8 {
            let product = field::mul(c as u8, 1 << bit) as u64;
            let mut i = 0;
            while i < 8 {
                matrices[c] |= (product >> i & 1) << (8 * (7 - i) + bit);
                i += 1;
            }
            bit += 1;
        }
        c += 1;
    }
    matrices
}

/// The products of a constant with the sixteen values of a low and of a high half of a byte.
pub(super) type Nibbles = [[u8; 16]; 2];

/// The tables that multiply by c: the product with a byte is the sum of the products with its
/// halves, which `NIBBLES[c]` holds.
pub(super) static NIBBLES: [Nibbles; 256] = nibble_products();

const fn nibble_products() -> [Nibbles; 256] {
    let mut tables = [[[0; 16]; 2]; 256];
    let mut c = 0;
    while c < 256 {
        let mut nibble = 0;
        while nibble < 16 {
            tables[c][0][nibble] = field::mul(c as u8, nibble as u8);
            tables[c][1][nibble] = field::mul(c as u8, (nibble << 4) as u8);
            nibble += 1;
        }
        c += 1;
    }
    tables
}
