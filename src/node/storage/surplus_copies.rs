//! Surplus copies of pieces on this node: which they are, and their drop (docs/semantics.md, 11, *On
//! another node*).

use std::collections::BTreeSet;
use std::time::Duration;

use super::record_names::receipt_name;
use super::records_and_drops::{ShardRecords, ensure_epoch_is_current};
use crate::code::{Code, table};
use crate::format::file::{FileKey, FileName};
use crate::format::records::{PieceForm, Receipt, Record};
use crate::id::{Epoch, NodeId};
use crate::stage::{TracePoint, trace_point};
use crate::store::{RecordScope, Store};
use crate::wire::RemoteError;

/// The limits of the evidence on which surplus copies are dropped.
#[derive(Debug, Clone, Copy)]
pub(in crate::node) struct DropEvidence {
    /// The epoch of the catalogue that was asked, read before it answered.
    pub(in crate::node) asked: Epoch,
    /// The time until which the answers of the nodes are taken as evidence.
    pub(in crate::node) until: Duration,
}

impl ShardRecords {
    /// Returns the numbers of the pieces of which this node has surplus copies: files of the
    /// committed attempt that neither this node's own receipt nor `counting`, the valid receipt of
    /// the stripe, ascribes to this node.
    pub(in crate::node) async fn list_surplus_pieces(
        &self,
        counting: Receipt,
    ) -> Result<BTreeSet<u8>, RemoteError> {
        let me = self.context.id;
        let found =
            self.context.run_on_store(move |store| find_surplus_files(store, me, &counting));
        Ok(found.await?.into_iter().map(piece_of).collect())
    }

    /// Drops the copies of `pieces` that are still surplus ([`ShardRecords::list_surplus_pieces`]).
    /// All pieces that `counting` names must have been found on their nodes shortly before: drops
    /// nothing after `evidence.until`. Returns the number of removed files.
    ///
    /// # Errors
    /// [`StorageError::CatalogueOutdated`](super::error::StorageError::CatalogueOutdated) if another
    /// epoch has begun since the evidence was read.
    pub(in crate::node) async fn drop_surplus_pieces(
        &self,
        counting: Receipt,
        pieces: BTreeSet<u8>,
        evidence: DropEvidence,
    ) -> Result<u32, RemoteError> {
        let (me, locks) = (self.context.id, self.stripe_locks.clone());
        let (clock, node) = (self.context.clock.clone(), self.context.settings.name.clone());
        let DropEvidence { asked, until } = evidence;
        self.context
            .run_on_store(move |store| {
                let _alone = locks.lock(counting.stripe);
                ensure_epoch_is_current(store, node, asked)?;
                trace_point(TracePoint::Drop, counting.stripe);
                let mut files = 0;
                for key in find_surplus_files(store, me, &counting)? {
                    let is_current = pieces.contains(&piece_of(key)) && clock.now() <= until;
                    files += u32::from(is_current && store.remove_file(key)?);
                }
                Ok::<_, RemoteError>(files)
            })
            .await
    }
}

/// Returns the number of the piece in a file: for a replica, the number of its block.
fn piece_of(key: FileKey) -> u8 {
    match key.name {
        FileName::Piece { piece, .. } => piece,
        FileName::Replica { block } => block,
    }
}

/// Returns the files of the attempt that neither this node's receipt nor `counting` ascribes to
/// this node.
pub(super) fn find_surplus_files(
    store: &Store,
    me: NodeId,
    counting: &Receipt,
) -> Result<Vec<FileKey>, RemoteError> {
    let (stripe, of_attempt) = (counting.stripe, counting.attempt);
    let here = store.get_record_file(RecordScope::Stripe(stripe), &receipt_name(of_attempt))?;
    // A receipt that does not parse is an error: it may be one that ascribes a piece to this node.
    let here = here.map(|bytes| Receipt::parse(&bytes)).transpose()?;
    let is_ours = |file: FileName| {
        here.iter().chain([counting]).any(|receipt| {
            let mut ours = receipt.pieces.iter().filter(|piece| piece.node == me);
            ours.any(|piece| receipt.file_of(piece) == file)
        })
    };
    let is_surplus = |key: &FileKey| {
        let is_piece = match key.name {
            FileName::Piece { attempt, .. } => attempt == of_attempt,
            FileName::Replica { block } => is_replaced_elsewhere(counting, me, block),
        };
        is_piece && !is_ours(key.name)
    };
    let files = store.list_all_files(stripe)?.into_iter().map(|(key, _)| key);
    Ok(files.filter(is_surplus).collect())
}

/// Returns whether a classical code kept the replica of this block as a piece, and a repair has put
/// a piece on another node in its place.
pub(super) fn is_replaced_elsewhere(receipt: &Receipt, me: NodeId, block: u8) -> bool {
    let is_classical = matches!(table::by_id(receipt.code), Some(Code::Rs(_)));
    let piece = receipt.pieces.get(usize::from(block));
    is_classical && piece.is_some_and(|piece| piece.form == PieceForm::File && piece.node != me)
}
