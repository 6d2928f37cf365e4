//! Pieces as combinations of other pieces and of blocks: the arithmetic of repair.

use super::span::Span;
use super::{Code, CodeError, check_indices};

/// A piece or a block that is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StripePart {
    /// The piece with this number, from 0.
    Piece(usize),
    /// The block with this number, from 0.
    Block(usize),
}

/// Pieces that are linear combinations of other parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PieceCombination {
    /// The parts to combine, as indices of the available parts; at most k. At least one of the
    /// combinations needs each of them.
    pub sources: Vec<usize>,
    /// The coefficients: a row for each combined piece, a column for each source.
    pub rows: Vec<Vec<u8>>,
}

/// Expresses the pieces `wanted` as combinations of the parts `available`. The parts are taken in
/// their order; a part that depends on the parts before it is skipped.
///
/// # Errors
/// [`CodeError::Index`] for a number that does not exist, or for a wanted piece that occurs twice;
/// [`CodeError::PiecesLost`] if the available parts do not determine the wanted pieces.
pub fn combine_pieces(
    code: &Code,
    available: &[StripePart],
    wanted: &[usize],
) -> Result<PieceCombination, CodeError> {
    let (generator, k) = (code.generator(), code.k());
    check_indices("piece", wanted, code.n())?;
    let mut span = Span::default();
    let mut accepted = Vec::with_capacity(k);
    for (index, part) in available.iter().enumerate() {
        let row = match *part {
            StripePart::Piece(piece) => {
                check_indices("piece", &[piece], code.n())?;
                generator.row(piece).to_vec()
            }
            StripePart::Block(block) => {
                check_indices("block", &[block], k)?;
                (0..k).map(|at| u8::from(at == block)).collect()
            }
        };
        if span.insert(&row) {
            accepted.push(index);
        }
    }
    let mut rows = Vec::with_capacity(wanted.len());
    let mut missing = Vec::new();
    for &piece in wanted {
        match span.express(generator.row(piece)) {
            Some(row) => rows.push(row),
            None => missing.push(piece),
        }
    }
    if !missing.is_empty() {
        return Err(CodeError::PiecesLost {
            parts: available.len(),
            rank: span.rank(),
            k,
            missing,
        });
    }
    let is_used = |source: &usize| rows.iter().any(|row| row[*source] != 0);
    let used: Vec<usize> = (0..accepted.len()).filter(is_used).collect();
    Ok(PieceCombination {
        sources: used.iter().map(|&source| accepted[source]).collect(),
        rows: rows.iter().map(|row| used.iter().map(|&source| row[source]).collect()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{RsCode, table};
    use crate::gf::Matrix;

    fn rs(n: usize, k: usize) -> Code {
        Code::Rs(RsCode::new(n, k).unwrap())
    }

    /// Returns the rows of these parts over the blocks.
    fn rows(code: &Code, parts: &[StripePart]) -> Vec<Vec<u8>> {
        let row = |part: &StripePart| match *part {
            StripePart::Piece(piece) => code.generator().row(piece).to_vec(),
            StripePart::Block(block) => (0..code.k()).map(|at| u8::from(at == block)).collect(),
        };
        parts.iter().map(row).collect()
    }

    #[test]
    fn combinations_make_the_rows_of_their_pieces() {
        let mut codes: Vec<Code> = table::all().iter().cloned().map(Code::Chain).collect();
        codes.extend([rs(6, 4), rs(16, 11)]);
        for code in codes {
            let (n, k) = (code.n(), code.k());
            for first in 0..n {
                let mut available: Vec<StripePart> =
                    (0..k).map(|i| StripePart::Piece((first + i) % n)).collect();
                // Some blocks come first, so that fewer pieces are needed.
                available.splice(0..0, (0..first % 3).map(StripePart::Block));
                let wanted: Vec<usize> = (k..n).map(|i| (first + i) % n).collect();
                let made = combine_pieces(&code, &available, &wanted).unwrap();
                assert!(made.sources.len() <= k);
                let sources: Vec<StripePart> =
                    made.sources.iter().map(|&at| available[at]).collect();
                let sources = Matrix::from_rows(&rows(&code, &sources)).unwrap();
                let product = Matrix::from_rows(&made.rows).unwrap().mul(&sources).unwrap();
                for (row, &piece) in product.iter().zip(&wanted) {
                    assert_eq!(row, code.generator().row(piece), "{code} piece {piece}");
                }
            }
        }
    }

    #[test]
    fn too_few_parts_are_an_error_that_names_what_is_lost() {
        let code = Code::Chain(table::find(16, 11).unwrap().clone());
        let available: Vec<StripePart> = (0..10).map(StripePart::Piece).collect();
        let error = combine_pieces(&code, &available, &[12, 15]).unwrap_err();
        let lost = CodeError::PiecesLost { parts: 10, rank: 10, k: 11, missing: vec![12, 15] };
        assert_eq!(error, lost);
        assert!(error.to_string().contains("find 1 more"), "{error}");
        for (available, wanted) in [
            (StripePart::Piece(16), &[1][..]),
            (StripePart::Block(11), &[1]),
            (StripePart::Piece(0), &[1, 1]),
            (StripePart::Piece(0), &[16]),
        ] {
            let error = combine_pieces(&code, &[available], wanted).unwrap_err();
            assert!(matches!(error, CodeError::Index { .. }), "{error}");
        }
    }

    #[test]
    fn a_copy_of_a_piece_needs_no_other_source() {
        let code = Code::Chain(table::find(6, 4).unwrap().clone());
        let available = [
            StripePart::Piece(3),
            StripePart::Piece(0),
            StripePart::Piece(1),
            StripePart::Piece(2),
        ];
        let made = combine_pieces(&code, &available, &[3]).unwrap();
        assert_eq!(made, PieceCombination { sources: vec![0], rows: vec![vec![1]] });
        // Block 2 is piece 2 of a systematic code.
        let made =
            combine_pieces(&rs(6, 4), &[StripePart::Block(1), StripePart::Block(2)], &[2]).unwrap();
        assert_eq!(made, PieceCombination { sources: vec![1], rows: vec![vec![1]] });
        assert!(combine_pieces(&code, &available, &[]).unwrap().sources.is_empty());
    }
}
