//! The receipt of an archived stripe: which node has which proven piece.

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::envelope::{self, RecordKind};
use super::file::FileName;
use super::records::Record;
use crate::code::CodeId;
use crate::id::{Attempt, ClusterId, Generation, NodeId, StripeId};

/// The form in which a piece is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PieceForm {
    /// A piece file of the attempt.
    File,
    /// The replica of this block, which stays in place as a systematic piece.
    Replica {
        /// The block, from 0.
        block: u8,
    },
}

/// A proven piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiptPiece {
    /// The piece's number in the code, from 0.
    pub piece: u8,
    /// The node that holds it.
    pub node: NodeId,
    /// The form in which it is stored.
    pub form: PieceForm,
    /// The BLAKE3 hash of its bytes (for a replica: of its bytes without padding).
    pub root: [u8; 32],
}

/// The receipt of an archived stripe: the record of its proven pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The cluster.
    pub cluster: ClusterId,
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt.
    pub attempt: Attempt,
    /// The generation that began the attempt.
    pub generation: Generation,
    /// The code of the pieces.
    pub code: CodeId,
    /// All n pieces, in order.
    pub pieces: Vec<ReceiptPiece>,
    /// The order among the receipts of the attempt: the receipt with the greatest order says where
    /// the pieces are (docs/semantics.md, 11). A repairer writes its generation. An archiving
    /// writes the lowest order, or its generation if a node has a receipt of a higher order.
    pub order: Generation,
}

/// The body of version 1, which has the lowest order.
#[derive(Serialize, Deserialize)]
struct ReceiptBody {
    cluster: ClusterId,
    stripe: StripeId,
    attempt: Attempt,
    generation: Generation,
    code: CodeId,
    pieces: Vec<ReceiptPiece>,
}

/// A receipt of the lowest order has version 1, which older programs can read. Others have version
/// 2.
impl Record for Receipt {
    const KIND: RecordKind = RecordKind::Receipt;
    const VERSION: u8 = 2;

    fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        if self.order != Generation::default() {
            return envelope::seal_record(Self::KIND, Self::VERSION, self);
        }
        let &Self { cluster, stripe, attempt, generation, code, ref pieces, .. } = self;
        let pieces = pieces.clone();
        let body = ReceiptBody { cluster, stripe, attempt, generation, code, pieces };
        envelope::seal_record(Self::KIND, 1, &body)
    }

    fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let (version, body) = envelope::open_envelope(Self::KIND, 1..=Self::VERSION, bytes)?;
        if version > 1 {
            let receipt: Self = envelope::parse_body(Self::KIND, body)?;
            let has_order = receipt.order != Generation::default();
            let why = || "a receipt of the lowest order has version 1".to_owned();
            return match has_order {
                true => Ok(receipt),
                false => Err(FormatError::Body { kind: Self::KIND, why: why() }),
            };
        }
        let ReceiptBody { cluster, stripe, attempt, generation, code, pieces } =
            envelope::parse_body(Self::KIND, body)?;
        let order = Generation::default();
        Ok(Self { cluster, stripe, attempt, generation, code, pieces, order })
    }
}

impl Receipt {
    /// Returns whether the receipt ascribes a piece to the node.
    pub fn names(&self, node: NodeId) -> bool {
        self.pieces.iter().any(|piece| piece.node == node)
    }

    /// Returns the name of the file that holds `piece`, which is one of the receipt's pieces.
    pub fn file_of(&self, piece: &ReceiptPiece) -> FileName {
        match piece.form {
            PieceForm::File => FileName::Piece { piece: piece.piece, attempt: self.attempt },
            PieceForm::Replica { block } => FileName::Replica { block },
        }
    }
}
