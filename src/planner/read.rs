//! The direct read: k pieces stream to the reader, which decodes them.

use super::Subject;
use crate::code::{CodeError, Program};
use crate::id::NodeId;
use crate::plan::{Hop, Input, Output, Plan};

/// Builds a plan that reads `blocks` over `grains` from the pieces that `program` uses. `homes`
/// lists the node of each of these pieces, in the program's order.
///
/// The reader's hop carries the program's matrix, so the check of the plan also proves the program,
/// which the reader runs instead of the matrix. Returns an error if the matrix of the program cannot
/// be computed.
pub fn direct_read(
    subject: &Subject<'_>,
    program: &Program,
    homes: &[NodeId],
    blocks: &[u8],
    grains: (u64, u64),
) -> Result<Plan, CodeError> {
    let matrix = program.to_matrix()?;
    let pieces = program.pieces();
    let mut hops: Vec<Hop> = pieces
        .iter()
        .zip(homes)
        .enumerate()
        .map(|(stream, (&piece, &node))| Hop {
            node: Some(node),
            grains,
            inputs: vec![Input::Piece(piece as u8)],
            outputs: vec![Output::Stream(stream as u16)],
            matrix: vec![vec![1]],
        })
        .collect();
    hops.push(Hop {
        node: None,
        grains,
        inputs: (0..pieces.len() as u16).map(Input::Stream).collect(),
        outputs: blocks.iter().map(|&block| Output::Deliver(block)).collect(),
        matrix: (0..blocks.len()).map(|row| matrix.row(row).to_vec()).collect(),
    });
    Ok(Plan {
        stripe: subject.stripe,
        attempt: subject.attempt,
        code: subject.code.id(),
        cut: subject.cut,
        hops,
        kept: Vec::new(),
    })
}
