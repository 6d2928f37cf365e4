//! The small records of shards and stripes: the checks before they are written, and the drop of
//! replicas that receipts allow.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::damaged_records::{DamagedRecords, is_damaged_record};
use super::error::StorageError;
use super::fencing::{Fencing, parse_tombstone};
use super::record_names::{MARK, RECEIPT_PREFIX, receipt_name, record_location};
use super::surplus_copies::is_replaced_elsewhere;
use crate::catalogue::record_access::{read_record, shard_state_key};
use crate::code::CodeId;
use crate::format::envelope::{RecordKind, parse_body};
use crate::format::file::{FileKey, FileName};
use crate::format::records::{
    CommitMark, Leaves, PieceForm, Receipt, Record, RemoveReason, ShardState, StripeFixed,
    StripeRecord, StripeState,
};
use crate::id::{Epoch, Generation, NodeId, PeerName, SaveId, ShardId, StripeId};
use crate::node::context::NodeContext;
use crate::stage::{TracePoint, trace_point};
use crate::store::{RecordScope, Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::{
    DropReplicas, DropReplicasAnswer, GetRecord, PutLeaves, PutMark, PutPlaces, PutReceipt,
    PutRecord, PutTombstone, RecordName,
};

/// Checks that `bytes` are a record of `stripe`. Returns its fixed part.
fn parse_stripe_record_fixed(bytes: &[u8], stripe: StripeId) -> Result<Vec<u8>, RemoteError> {
    let record = StripeRecord::parse(bytes)?;
    let fixed: StripeFixed = parse_body(RecordKind::StripeRecord, &record.fixed)?;
    if fixed.stripe != stripe {
        return Err(StorageError::RecordOfOtherStripe { found: fixed.stripe, stripe }.into());
    }
    Ok(record.fixed)
}

/// Number of locks that all stripes share.
const STRIPE_LOCKS: usize = 64;

/// The service that stores and returns the records of shards and stripes, and drops replicas and
/// pieces that receipts make redundant.
pub(in crate::node) struct ShardRecords {
    pub(super) context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    damaged_records: Arc<DamagedRecords>,
    pub(super) stripe_locks: Arc<StripeLocks>,
}

impl ShardRecords {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        damaged_records: Arc<DamagedRecords>,
    ) -> Self {
        Self { context, fencing, damaged_records, stripe_locks: Arc::default() }
    }

    /// Stores the leaves of a shard or the record of a stripe, as a client sends them.
    pub(in crate::node) async fn put_record(&self, call: PutRecord) -> Result<(), RemoteError> {
        self.fencing.check_client_may_write(call.shard, call.generation).await?;
        let fixed = match call.record {
            RecordName::Leaves => {
                let leaves = Leaves::parse(&call.bytes)?;
                if leaves.root.shard != call.shard || !leaves.root.admits(&leaves) {
                    return Err(StorageError::LeavesMismatch { shard: call.shard }.into());
                }
                call.bytes.clone()
            }
            RecordName::Stripe { index } => {
                parse_stripe_record_fixed(&call.bytes, StripeId { shard: call.shard, index })?
            }
            RecordName::Receipt { .. } | RecordName::Mark => {
                return Err(StorageError::RecordNotWritable.into());
            }
        };
        let (scope, name) = record_location(call.shard, call.record);
        match call.record {
            RecordName::Stripe { index } => {
                trace_point(TracePoint::Record, format_args!("{}/{index}", call.shard));
            }
            _ => trace_point(TracePoint::Leaves, call.shard),
        }
        // The save may be committed even if no mark on this node says so, so its fixed content is
        // written once. A corrupt copy may be replaced.
        let is_same = move |old: &[u8]| match call.record {
            RecordName::Stripe { .. } => {
                StripeRecord::parse(old).map_or(true, |record| record.fixed == fixed)
            }
            _ => Leaves::parse(old).is_err() || old == fixed,
        };
        self.fencing
            .write_unless_removed(call.shard.save(), move |store| {
                store.put_record_file_if(scope, &name, &call.bytes, is_same)
            })
            .await
    }

    /// Returns the bytes of a record, if this node has it, and remembers whether they are damaged.
    pub(in crate::node) async fn get_record(
        &self,
        call: GetRecord,
    ) -> Result<Option<Vec<u8>>, RemoteError> {
        let (scope, name) = record_location(call.shard, call.record);
        let GetRecord { shard, record } = call;
        let read = self.context.run_on_store(move |store| {
            let bytes = store.get_record_file_or_empty(scope, &name)?;
            let is_damaged = bytes.as_ref().is_some_and(|bytes| is_damaged_record(record, bytes));
            Ok::<_, StoreError>((bytes, is_damaged))
        });
        let (bytes, is_damaged) = read.await?;
        if bytes.is_some() {
            self.damaged_records.set_or_clear_damaged(shard, record, is_damaged);
        }
        Ok(bytes)
    }

    /// Replaces the record of a stripe by one with other places, on the order of the shard's owner.
    pub(in crate::node) async fn put_places(&self, call: PutPlaces) -> Result<(), RemoteError> {
        self.fencing
            .check_and_raise_fence(call.stripe.shard, call.generation, call.coordinator)
            .await?;
        parse_stripe_record_fixed(&call.bytes, call.stripe)?;
        let (shard, index) = (call.stripe.shard, call.stripe.index);
        let (scope, name) = record_location(shard, RecordName::Stripe { index });
        self.fencing
            .write_unless_removed(shard.save(), move |store| {
                store.put_record_file(scope, &name, &call.bytes)
            })
            .await
    }

    /// Stores the leaves of a committed shard, on the order of the shard's owner. Leaves that parse
    /// are never replaced by others.
    pub(in crate::node) async fn put_leaves(&self, call: PutLeaves) -> Result<(), RemoteError> {
        let leaves = Leaves::parse(&call.bytes)?;
        let shard = leaves.root.shard;
        if !leaves.root.admits(&leaves) {
            return Err(StorageError::LeavesMismatch { shard }.into());
        }
        self.fencing.check_and_raise_fence(shard, call.owner, call.coordinator).await?;
        trace_point(TracePoint::Leaves, shard);
        let (scope, name) = record_location(shard, RecordName::Leaves);
        let bytes = call.bytes;
        self.fencing
            .write_unless_removed(shard.save(), move |store| {
                let may_replace = |old: &[u8]| Leaves::parse(old).is_err() || old == bytes;
                store.put_record_file_if(scope, &name, &bytes, may_replace)
            })
            .await
    }

    /// Stores a commit mark.
    pub(in crate::node) async fn put_mark(&self, call: PutMark) -> Result<(), RemoteError> {
        let mark = CommitMark::parse(&call.bytes)?;
        if mark.cluster != self.context.settings.cluster || mark.root.save != mark.saved.save {
            return Err(StorageError::ForeignMark.into());
        }
        let shard = mark.root.shard;
        self.fencing
            .check_not_removed_raising_epoch(shard, Generation { epoch: call.epoch, counter: 0 })
            .await?;
        trace_point(TracePoint::Mark, shard);
        self.fencing
            .write_unless_removed(shard.save(), move |store| {
                store.put_record_file(RecordScope::Shard(shard), MARK, &call.bytes)?;
                // A rebuild may have claimed an epoch meanwhile and read this node before the
                // write. The call fails then, because its epoch is over.
                store.raise_highest_seen_epoch(call.epoch)
            })
            .await
    }

    /// Stores a receipt. This node must have each piece that the receipt ascribes to it. A receipt
    /// that parses is replaced only by a receipt with a greater [`Receipt::order`], or by one with
    /// the same bytes. If both have the lowest order, any receipt replaces it.
    pub(in crate::node) async fn put_receipt(&self, call: PutReceipt) -> Result<(), RemoteError> {
        let receipt = Receipt::parse(&call.bytes)?;
        if receipt.cluster != self.context.settings.cluster {
            return Err(StorageError::ForeignReceipt.into());
        }
        self.fencing
            .check_and_raise_fence(receipt.stripe.shard, call.owner, call.coordinator)
            .await?;
        let (me, save) = (self.context.id, receipt.stripe.shard.save());
        let locks = self.stripe_locks.clone();
        self.fencing
            .write_unless_removed(save, move |store| {
                let _alone = locks.lock(receipt.stripe);
                check_own_pieces(store, me, &receipt)?;
                trace_point(TracePoint::Receipt, receipt.stripe);
                let scope = RecordScope::Stripe(receipt.stripe);
                let name = receipt_name(receipt.attempt);
                let may_replace = |old: &[u8]| may_replace_receipt(old, &receipt, &call.bytes);
                store.put_record_file_if(scope, &name, &call.bytes, may_replace)?;
                store.raise_highest_seen_epoch(call.owner.epoch).map_err(RemoteError::from)
            })
            .await
    }

    /// Stores a tombstone. Does nothing if the save is in the removed-save set.
    pub(in crate::node) async fn put_tombstone(
        &self,
        call: PutTombstone,
    ) -> Result<(), RemoteError> {
        let tombstone = parse_tombstone(&self.context, &call.bytes)?;
        let save = tombstone.save;
        // Writes check the cache, so it must not miss a tombstone whose sender is cancelled.
        let (context, fencing) = (self.context.clone(), self.fencing.clone());
        let task = self.context.tasks.spawn(async move {
            let stored = context.run_on_store(move |store| {
                let epoch = tombstone.generation.epoch;
                store.raise_highest_seen_epoch(epoch)?;
                // The removed-save entry says the same, and a purge accepts it as evidence, too.
                if store.is_recorded_removed(save)? {
                    return Ok(());
                }
                // A decided save is never aborted, so this tombstone comes from an outdated
                // catalogue.
                if tombstone.reason == RemoveReason::Aborted && has_mark_of_save(store, save)? {
                    return Err(RemoteError::from(StorageError::SaveMarked { save }));
                }
                trace_point(TracePoint::Tombstone, save);
                store.put_tombstone(save, &call.bytes)?;
                store.raise_highest_seen_epoch(epoch).map_err(RemoteError::from)
            });
            stored.await?;
            fencing.cache_removed(save);
            Ok(())
        });
        task.await.map_err(|_| StorageError::TaskLost { work: "tombstone" })?
    }

    /// Fails if the stripe is archived. If the catalogue records its drops as complete, also drops
    /// replicas that were recreated late on this node: the coordinator has seen enough pieces
    /// (semantics 4.8). Otherwise they stay until a coordinator orders the drop.
    pub(in crate::node) async fn drop_and_refuse_if_archived(
        &self,
        stripe: StripeId,
    ) -> Result<(), RemoteError> {
        let state =
            read_record::<ShardState>(&*self.context.catalogue(), &shard_state_key(stripe.shard))
                .await?;
        let state = state.and_then(|(state, _)| state.stripe(stripe.index));
        let Some(StripeState::Archived { attempt, generation, dropped, .. }) = state else {
            return Ok(());
        };
        if dropped {
            self.drop_replicas(DropReplicas { stripe, attempt, generation }).await?;
        }
        Err(StorageError::StripeArchived { stripe }.into())
    }

    /// Drops this node's replicas of an archived stripe and the files of other attempts, on the
    /// evidence of the catalogue and the receipt (semantics 4.8). Returns the number and the size
    /// of the removed files.
    pub(in crate::node) async fn drop_replicas(
        &self,
        call: DropReplicas,
    ) -> Result<DropReplicasAnswer, RemoteError> {
        let stripe = call.stripe;
        // All nodes of a ring are ordered to drop. Most have no file of the stripe, and need no
        // evidence.
        if self.context.run_on_store(move |store| store.list_all_files(stripe)).await?.is_empty() {
            return Ok(DropReplicasAnswer { files: 0, bytes: 0 });
        }
        let catalogue = self.context.catalogue();
        // The epoch is read before the catalogue answers: a claim that arrives meanwhile raises it,
        // and an answer of the old catalogue would then pass for one of the new catalogue.
        let asked = catalogue.epoch();
        let state = read_record::<ShardState>(&*catalogue, &shard_state_key(stripe.shard)).await?;
        let archived = state.and_then(|(state, _)| state.stripe(stripe.index));
        let code = match archived {
            Some(StripeState::Archived { attempt, generation, code, .. })
                if attempt == call.attempt && generation == call.generation =>
            {
                code
            }
            state => {
                let attempt = call.attempt;
                return Err(StorageError::StripeNotArchived { stripe, state, attempt }.into());
            }
        };
        let (me, locks) = (self.context.id, self.stripe_locks.clone());
        let node = self.context.settings.name.clone();
        self.context
            .run_on_store(move |store| {
                let _alone = locks.lock(stripe);
                ensure_epoch_is_current(store, node, asked)?;
                let receipt = read_receipt_named_in_order(store, &call, code)?;
                check_own_pieces(store, me, &receipt)?;
                trace_point(TracePoint::Drop, stripe);
                drop_files_outside_receipt(store, me, &receipt)
            })
            .await
    }
}

impl ShardRecords {
    /// Stores a receipt on this node, which has none or a damaged one. If a repairer has stored a
    /// receipt here meanwhile, that receipt stays and the call fails.
    pub(in crate::node) async fn store_missing_receipt(
        &self,
        receipt: Receipt,
    ) -> Result<(), RemoteError> {
        let (me, locks, save) =
            (self.context.id, self.stripe_locks.clone(), receipt.stripe.shard.save());
        let bytes = receipt.to_bytes()?;
        self.fencing
            .write_unless_removed(save, move |store| {
                let stripe = receipt.stripe;
                let _alone = locks.lock(stripe);
                check_own_pieces(store, me, &receipt)?;
                trace_point(TracePoint::Receipt, stripe);
                let (scope, name) = (RecordScope::Stripe(stripe), receipt_name(receipt.attempt));
                let is_damaged = |old: &[u8]| Receipt::parse(old).is_err();
                store
                    .put_record_file_if(scope, &name, &bytes, is_damaged)
                    .map_err(RemoteError::from)
            })
            .await
    }
}

/// Locks by stripe. The holder of a stripe's lock is the only one that stores a receipt of the
/// stripe, or removes files by one.
pub(super) struct StripeLocks([Mutex<()>; STRIPE_LOCKS]);

impl Default for StripeLocks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl StripeLocks {
    /// Waits for the lock of a stripe. Some stripes share a lock.
    pub(super) fn lock(&self, stripe: StripeId) -> MutexGuard<'_, ()> {
        let at = (usize::from(stripe.shard.0[15]) + stripe.index as usize) % STRIPE_LOCKS;
        self.0[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns an error if another epoch has begun since `node` asked the catalogue of epoch `asked`.
pub(super) fn ensure_epoch_is_current(
    store: &Store,
    node: PeerName,
    asked: Epoch,
) -> Result<(), StorageError> {
    let seen = store.highest_seen_epoch();
    if asked < seen {
        return Err(StorageError::CatalogueOutdated { node, asked, seen });
    }
    Ok(())
}

/// Returns this node's receipt of the attempt that the order names.
///
/// # Errors
/// [`StorageError::NoReceipt`] if this node has no such receipt, or a damaged one, which the next
/// receipt replaces. [`StorageError::ReceiptMismatch`] if the receipt has another attempt or
/// generation than the order, or another code than `code`.
fn read_receipt_named_in_order(
    store: &Store,
    call: &DropReplicas,
    code: CodeId,
) -> Result<Receipt, RemoteError> {
    let stripe = call.stripe;
    let bytes = store.get_record_file(RecordScope::Stripe(stripe), &receipt_name(call.attempt))?;
    let receipt = bytes.and_then(|bytes| Receipt::parse(&bytes).ok());
    let receipt = receipt.ok_or(StorageError::NoReceipt { stripe })?;
    if receipt.attempt != call.attempt
        || receipt.generation != call.generation
        || receipt.code != code
    {
        return Err(StorageError::ReceiptMismatch { stripe }.into());
    }
    Ok(receipt)
}

/// Returns whether this node has a commit mark of any shard of `save`.
fn has_mark_of_save(store: &Store, save: SaveId) -> Result<bool, RemoteError> {
    for shard in store.shards_after(ShardId::before(save))?.take_while(|shard| shard.save() == save)
    {
        if store.get_record_file(RecordScope::Shard(shard), MARK)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks that this node has the pieces that `receipt` ascribes to it, and that they are not known
/// to be damaged.
///
/// # Errors
/// [`StorageError::PieceMismatch`] if a file has another root; the store's error if it does not
/// open.
fn check_own_pieces(store: &Store, me: NodeId, receipt: &Receipt) -> Result<(), RemoteError> {
    for piece in receipt.pieces.iter().filter(|piece| piece.node == me) {
        let key = match piece.form {
            PieceForm::File => FileKey::piece(receipt.stripe, piece.piece, receipt.attempt),
            PieceForm::Replica { block } => FileKey::replica(receipt.stripe, block),
        };
        if matches!(piece.form, PieceForm::Replica { .. })
            && piece.root == *blake3::hash(&[]).as_bytes()
        {
            // A block past the shard's end has no file.
            continue;
        }
        let file = store.open_undamaged_file(key)?;
        if file.index_entry().root != piece.root {
            return Err(StorageError::PieceMismatch { key }.into());
        }
    }
    Ok(())
}

/// Returns whether `receipt`, encoded as `bytes`, may replace the receipt `old` of its attempt.
fn may_replace_receipt(old: &[u8], receipt: &Receipt, bytes: &[u8]) -> bool {
    let is_lowest = receipt.order == Generation::default();
    Receipt::parse(old).map_or(true, |known| {
        known.order < receipt.order || known.order == receipt.order && (is_lowest || old == bytes)
    })
}

/// Removes the stripe's replicas, and the pieces and receipts of other attempts. Keeps the replicas
/// that the receipt ascribes to this node, and all pieces of its attempt: a piece that the receipt
/// does not ascribe may be one that a repairer has just made here. Also keeps a replica in whose
/// place another node has a piece: it is a surplus piece ([`is_replaced_elsewhere`]). Returns the
/// number and the size of the removed files.
fn drop_files_outside_receipt(
    store: &Store,
    me: NodeId,
    receipt: &Receipt,
) -> Result<DropReplicasAnswer, RemoteError> {
    // Remove the receipts of other attempts first, so that no receipt outlives its piece.
    let scope = RecordScope::Stripe(receipt.stripe);
    for (name, _) in store.list_record_files(scope)? {
        if name.starts_with(RECEIPT_PREFIX) && name != receipt_name(receipt.attempt) {
            store.remove_record_file(scope, &name)?;
        }
    }
    let ours = || receipt.pieces.iter().filter(|piece| piece.node == me);
    let mut answer = DropReplicasAnswer { files: 0, bytes: 0 };
    for (key, file_bytes) in store.list_all_files(receipt.stripe)? {
        let kept = match key.name {
            FileName::Replica { block } => {
                ours().any(|piece| piece.form == PieceForm::Replica { block })
                    || is_replaced_elsewhere(receipt, me, block)
            }
            FileName::Piece { attempt, .. } => attempt == receipt.attempt,
        };
        if !kept && store.remove_file(key)? {
            answer.files += 1;
            answer.bytes += file_bytes;
        }
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::RsCode;
    use crate::format::records::ReceiptPiece;
    use crate::id::Attempt;
    use crate::node::storage::surplus_copies::find_surplus_files;
    use crate::store::BlockSpec;

    const STRIPE: StripeId = StripeId { shard: ShardId([7; 16]), index: 0 };

    /// Returns a receipt of the classical (6,4) code: kept replicas and two pieces, each on the
    /// node with its number.
    fn receipt(store: &Store) -> Receipt {
        let piece = |piece: u8| {
            let is_replica = piece < 4;
            let form =
                if is_replica { PieceForm::Replica { block: piece } } else { PieceForm::File };
            ReceiptPiece { piece, node: NodeId(piece.into()), form, root: [piece; 32] }
        };
        Receipt {
            cluster: store.cluster(),
            stripe: STRIPE,
            attempt: Attempt([9; 16]),
            generation: Generation::default(),
            code: RsCode::new(6, 4).unwrap().id(),
            pieces: (0..6).map(piece).collect(),
            order: Generation::default(),
        }
    }

    /// A repair has put a piece on node 50 in the place of the kept replica of block 1.
    #[test]
    fn a_replica_that_a_piece_replaces_goes_only_with_surplus_pieces() {
        let store = Store::new_in_memory();
        for block in [1, 2] {
            let spec = BlockSpec { stripe: STRIPE, block, layout: 1, len_bytes: 3 };
            let mut writer = store.create_block_writer(spec, None).unwrap();
            writer.write(b"abc").unwrap();
            writer.finish(None).unwrap();
        }
        let me = store.node();
        let mut moved = receipt(&store);
        (moved.pieces[1].node, moved.pieces[1].form) = (NodeId(50), PieceForm::File);
        // Block 2 is a kept replica of node 2, so the copy here goes like any other.
        assert_eq!(drop_files_outside_receipt(&store, me, &moved).unwrap().files, 1);
        let left = store.list_all_files(STRIPE).unwrap();
        let left: Vec<FileName> = left.into_iter().map(|(key, _)| key.name).collect();
        assert_eq!(left, [FileName::Replica { block: 1 }]);
        // The receipt of the replica's own node ascribes it to that node.
        let mut own = receipt(&store);
        own.pieces[1].node = me;
        let (scope, file) = (RecordScope::Stripe(STRIPE), receipt_name(own.attempt));
        store.put_record_file(scope, &file, &own.to_bytes().unwrap()).unwrap();
        assert_eq!(find_surplus_files(&store, me, &moved).unwrap(), []);
        store.put_record_file(scope, &file, &moved.to_bytes().unwrap()).unwrap();
        let replica = FileKey::replica(STRIPE, 1);
        assert_eq!(find_surplus_files(&store, me, &moved).unwrap(), [replica]);
    }
}
