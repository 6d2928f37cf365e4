//! The codes: which combinations of a stripe's source blocks its pieces are, and how blocks are
//! reconstructed.
//!
//! A [`ChainCode`] is computed by a chain of nodes while the stripe passes along it (RapidRAID,
//! arXiv 1207.6744, with our chain order: `docs/paper.md`); an [`rs::RsCode`] is the classical
//! systematic Reed-Solomon code. Both have a generator matrix with a row per piece, and a
//! [`CodeId`] that covers all coefficients. [`table`] holds the chain codes of this release and
//! [`search`] finds more. [`subsets`] counts the subsets of pieces from which the blocks cannot be
//! reconstructed, [`survivable_losses`] counts how many more nodes may be lost,
//! [`reconstruct()`] plans the reconstruction of blocks, and [`combine_pieces`] that of pieces.
//!
//! Blocks, pieces, positions and hops count from 0; only [`show`] presents them to users, counted
//! from 1. Everything here is arithmetic: the layers above decide where pieces are stored and how
//! bytes are sent.

mod algebra;
mod chain;
mod combination;
mod layout;
mod losses;
pub mod program;
pub mod reconstruct;
pub mod rs;
pub mod search;
pub mod show;
mod span;
pub mod subsets;
pub mod table;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use chain::ChainCode;
pub use combination::{PieceCombination, StripePart, combine_pieces};
pub use layout::Layout;
pub use losses::{NodeShare, SurvivableLossCache, survivable_losses};
pub use program::Program;
pub use reconstruct::reconstruct;
pub use rs::RsCode;

use crate::gf::{GfError, Matrix};
use crate::kind::ErrorKind;

/// Maximum number of pieces of a code. It bounds every record, and the unknowns of a chain fit in
/// 64 bits.
pub const MAX_PIECES: usize = 32;

/// The id of a code, computed from its content: kind, parameters, field, order and coefficients.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CodeId(pub u64);

impl CodeId {
    /// Returns the id of the code with this canonical description: the first 8 bytes of BLAKE3's
    /// key derivation (context `rapidraid code id v1`), big-endian.
    fn of(description: &[u8]) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = blake3::derive_key("rapidraid code id v1", description);
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

impl fmt::Display for CodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for CodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CodeId({self})")
    }
}

impl FromStr for CodeId {
    type Err = CodeError;
    fn from_str(text: &str) -> Result<Self, CodeError> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let value = u64::from_str_radix(text, 16).ok();
        match value.filter(|_| text.len() == 16 && text.bytes().all(is_digit)) {
            Some(id) => Ok(Self(id)),
            None => Err(CodeError::Id { text: text.chars().take(64).collect() }),
        }
    }
}

/// A code of either kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Code {
    /// A chain code, which a chain of nodes computes in place.
    Chain(ChainCode),
    /// A systematic Reed-Solomon code.
    Rs(RsCode),
}

impl Code {
    /// Returns the code's id.
    pub fn id(&self) -> CodeId {
        match self {
            Code::Chain(code) => code.id(),
            Code::Rs(code) => code.id(),
        }
    }

    /// Returns the number of pieces.
    pub fn n(&self) -> usize {
        self.generator().rows()
    }

    /// Returns the number of source blocks.
    pub fn k(&self) -> usize {
        self.generator().cols()
    }

    /// Returns the generator matrix. Row i has the coefficients of piece i over the source blocks.
    pub fn generator(&self) -> &Matrix {
        match self {
            Code::Chain(code) => code.generator(),
            Code::Rs(code) => code.generator(),
        }
    }

    /// Returns the position at which the chain plan, or the naive or striped star, stores `piece`.
    /// Other plans and repairs may store it elsewhere: the receipt of a stripe names the nodes of
    /// its pieces.
    pub fn position_of_piece(&self, piece: usize) -> Option<usize> {
        match self {
            Code::Chain(code) => code.order().get(piece).copied(),
            Code::Rs(code) => (piece < code.n()).then_some(piece),
        }
    }

    /// Returns the piece that is stored at `position`, as [`Code::position_of_piece`] says.
    pub fn piece_at_position(&self, position: usize) -> Option<usize> {
        (0..self.n()).find(|&piece| self.position_of_piece(piece) == Some(position))
    }

    /// Returns the kind of the code: `chain` or `rs`.
    pub fn name(&self) -> &'static str {
        match self {
            Code::Chain(_) => "chain",
            Code::Rs(_) => "rs",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({},{})", self.name(), self.n(), self.k())
    }
}

/// The reason why a code cannot be made, or cannot do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodeError {
    /// No code of this kind has these parameters.
    #[error("there is no {what} with n = {n} and k = {k}: it needs {rule}")]
    Parameters {
        /// The kind of code or layout that was requested.
        what: &'static str,
        /// The number of pieces.
        n: usize,
        /// The number of source blocks.
        k: usize,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// The order of a chain does not contain each position exactly once.
    #[error("a chain over {n} nodes visits each position below {n} once, which {order:?} does not")]
    Order {
        /// The number of positions.
        n: usize,
        /// The given order, cut after 64 entries.
        order: Vec<usize>,
    },
    /// The coefficients do not fit the blocks of their hop.
    #[error(
        "{what} of hop {hop} must be {expected} coefficients, and zero psi at the tail: got {given:?}"
    )]
    Coefficients {
        /// `psi` or `xi`.
        what: &'static str,
        /// The number of the hop, from 0.
        hop: usize,
        /// The number of blocks on its node.
        expected: usize,
        /// The given coefficients, cut after 8 entries.
        given: Vec<u8>,
    },
    /// A piece or block does not exist in the code, or was named twice.
    #[error("{what} {index} does not exist or is named twice: name each below {count} once")]
    Index {
        /// `piece` or `block`.
        what: &'static str,
        /// The wrong number.
        index: usize,
        /// The number of pieces or blocks that exist.
        count: usize,
    },
    /// The available pieces do not determine the wanted blocks.
    #[error(
        "{pieces} pieces of rank {rank} do not determine blocks {missing:?} of {k}: find {} more pieces, or others",
        k.saturating_sub(*rank)
    )]
    Lost {
        /// The number of available pieces.
        pieces: usize,
        /// The number of independent pieces among them.
        rank: usize,
        /// The number of source blocks of the code.
        k: usize,
        /// The wanted blocks that are not determined, from 0.
        missing: Vec<usize>,
    },
    /// The available pieces and blocks do not determine the wanted pieces.
    #[error(
        "{parts} pieces and blocks of rank {rank} do not determine pieces {missing:?}: find {} more, or others",
        k.saturating_sub(*rank)
    )]
    PiecesLost {
        /// The number of available pieces and blocks.
        parts: usize,
        /// The number of independent ones among them.
        rank: usize,
        /// The number of source blocks of the code.
        k: usize,
        /// The wanted pieces that are not determined, from 0.
        missing: Vec<usize>,
    },
    /// Counting would take too long.
    #[error(
        "({n},{k}) has {subsets} subsets of k pieces, more than the {max} that are counted: choose smaller parameters"
    )]
    TooManySubsets {
        /// The number of pieces.
        n: usize,
        /// The number of source blocks.
        k: usize,
        /// The number of subsets of k pieces.
        subsets: u64,
        /// The limit on subsets.
        max: u64,
    },
    /// A search ended without a result.
    #[error("no {what} found for ({n},{k}) within {tries} tries: try another seed")]
    NotFound {
        /// The object of the search.
        what: &'static str,
        /// The number of pieces.
        n: usize,
        /// The number of source blocks.
        k: usize,
        /// The limit of the search: orders to try, or coefficients to set. The search for coefficients
        /// may end earlier.
        tries: usize,
    },
    /// The text of a code report cannot be parsed.
    #[error("this is not a code report of schema 1: {reason}")]
    Report {
        /// The reason.
        reason: String,
    },
    /// Counting again does not confirm a claim of a code report.
    #[error(
        "the report claims {field} {claimed}, but it is {actual}: do not use this code under that claim"
    )]
    Claim {
        /// The field of the report that holds the claim.
        field: String,
        /// The value that the report claims.
        claimed: String,
        /// The value that was computed.
        actual: String,
    },
    /// A text is not a code id.
    #[error("{text:?} is not a code id: expected 16 lower-case hexadecimal digits")]
    Id {
        /// The text, cut to 64 characters.
        text: String,
    },
    /// A matrix or buffers do not fit.
    #[error(transparent)]
    Gf(#[from] GfError),
    /// An internal check failed.
    #[error("{what} did not pass its own check: this is a defect, please report it")]
    Defect {
        /// The object that was checked.
        what: &'static str,
    },
}

impl CodeError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CodeError::Lost { .. } | CodeError::PiecesLost { .. } => ErrorKind::Lost,
            CodeError::NotFound { .. } => ErrorKind::NotFound,
            CodeError::Claim { .. } => ErrorKind::Corrupt,
            CodeError::Defect { .. } => ErrorKind::Internal,
            CodeError::Gf(error) => error.kind(),
            _ => ErrorKind::Invalid,
        }
    }
}

/// Returns an error if a number is out of range or occurs twice.
fn check_indices(what: &'static str, indices: &[usize], count: usize) -> Result<(), CodeError> {
    let mut seen = vec![false; count];
    for &index in indices {
        match seen.get_mut(index) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(CodeError::Index { what, index, count }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_parse_only_what_they_print() {
        let id = CodeId(0x0123_4567_89ab_cdef);
        assert_eq!(id.to_string(), "0123456789abcdef");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "0123456789ABCDEF", "+123456789abcdef", "0123456789abcdef0", "ü"] {
            assert!(bad.parse::<CodeId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn pieces_and_positions_are_one_to_one() {
        for code in [
            Code::Chain(table::find(16, 11).unwrap().clone()),
            Code::Rs(RsCode::new(16, 11).unwrap()),
        ] {
            for piece in 0..16 {
                let position = code.position_of_piece(piece).unwrap();
                assert_eq!(code.piece_at_position(position), Some(piece));
            }
            assert_eq!((code.position_of_piece(16), code.piece_at_position(16)), (None, None));
        }
    }
}
