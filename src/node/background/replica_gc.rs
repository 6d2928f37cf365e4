//! Collection of files that no coordinator orders this node to drop. For example, the node was a
//! spare of an archiving that stopped, and was unreachable when the next archiving, which used
//! other nodes, ordered its drops. No record names the files on this node any more
//! (docs/semantics.md, 4.9).
//!
//! A node scans what it holds, a part in each lease period. It drops such files on the evidence
//! that it requires for any drop: the catalogue says that the stripe is archived and its replicas
//! are dropped, and the node has the receipt. A piece of the archived attempt goes only after
//! another node has read its copy of the piece (docs/semantics.md, 11, *On another node*). The scan
//! covers every stripe once whenever the node has registered after its start or after failures.
//! After that it covers only the stripes with a file that no receipt on this node ascribes to this
//! node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::catalogue::Catalogue;
use crate::catalogue::record_access::{read_record, shard_root_key, shard_state_key};
use crate::code::CodeId;
use crate::format::records::{Receipt, Record, ShardRoot, ShardState, StripeState};
use crate::id::{Attempt, ShardId, StripeId};
use crate::kind::ErrorKind;
use crate::node::context::NodeContext;
use crate::node::failure_log::FailureLog;
use crate::node::storage::full_disk::DiskSpace;
use crate::node::storage::record_names::{RECEIPT_PREFIX, receipt_name};
use crate::node::storage::records_and_drops::ShardRecords;
use crate::node::storage::surplus_copies::DropEvidence;
use crate::pipeline::coordinator::{ArchivedAttempt, ReceiptUse};
use crate::store::{RecordScope, Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::DropReplicas;

/// Maximum number of stripes that are checked before each pause of one lease. A shard without
/// stripes counts as one stripe.
const LOOKED_AT: usize = 256;

/// The position of the scan: after this shard, or after this stripe of it. The default is the
/// start.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct GcCursor {
    shard: Option<ShardId>,
    stripe: Option<u32>,
}

/// The receipts that may account for a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReceiptFilter {
    /// No receipt: every file is in question.
    NoReceipt,
    /// Any receipt on this node.
    AnyReceipt,
    /// The receipt of this attempt.
    OfAttempt(Attempt),
}

/// The service that drops files of this node which archived stripes do not need.
pub(in crate::node) struct ReplicaGc {
    context: Arc<NodeContext>,
    shard_records: Arc<ShardRecords>,
    disk_space: Arc<DiskSpace>,
    /// Whether the node has registered after its start or after failures, and may have missed
    /// orders.
    has_returned: AtomicBool,
}

impl ReplicaGc {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        shard_records: Arc<ShardRecords>,
        disk_space: Arc<DiskSpace>,
    ) -> Self {
        Self { context, shard_records, disk_space, has_returned: AtomicBool::new(false) }
    }

    /// Makes the scan begin anew and look at every file, because this node may have missed orders.
    pub(in crate::node) fn request_full_scan(&self) {
        self.has_returned.store(true, Ordering::Relaxed);
    }

    /// Scans the files of this node, round after round, and drops those that are not needed. Runs
    /// until the node stops.
    pub(in crate::node) async fn run_replica_gc(self: Arc<Self>) {
        let (mut cursor, mut by) = (GcCursor::default(), ReceiptFilter::NoReceipt);
        let (mut scan_failures, mut drop_failures) = (FailureLog::default(), FailureLog::default());
        let lease = self.context.settings.lease;
        let mut pause = lease;
        loop {
            self.context.clock.sleep(pause).await;
            self.disk_space.move_tombstones_to_files().await;
            if self.has_returned.swap(false, Ordering::Relaxed) {
                (cursor, by) = (GcCursor::default(), ReceiptFilter::NoReceipt);
            }
            let found = self
                .context
                .run_on_store(move |store| scan_unreferenced_stripes(store, by, cursor, LOOKED_AT))
                .await;
            let (stripes, next) = match found {
                Ok(found) => found,
                Err(error) => {
                    if let Some(failures) = scan_failures.record_failure(self.context.clock.now()) {
                        tracing::warn!(%error, failures, "failed to look for unreferenced files");
                    }
                    continue;
                }
            };
            scan_failures.record_success();
            cursor = next;
            if cursor == GcCursor::default() {
                by = ReceiptFilter::AnyReceipt;
            }
            let mut is_complete = true;
            // Other nodes read whole files for the drops of surplus copies. A node that has come back
            // with many copies must not keep them busy, so it asks for at most half of the time.
            let begun_at = self.context.clock.now();
            let read_until = begun_at + lease;
            for of_shard in stripes.chunk_by(|a, b| a.shard == b.shard) {
                if let Err(error) = self.drop_unreferenced_files(of_shard, read_until).await {
                    is_complete = false;
                    if let Some(failures) = drop_failures.record_failure(self.context.clock.now()) {
                        tracing::info!(%error, failures, "files that may be unreferenced are kept for now");
                    }
                }
            }
            if is_complete {
                drop_failures.record_success();
            }
            pause = lease.max(self.context.clock.now() - begun_at);
        }
    }

    /// Drops the unneeded files of these stripes, which all belong to one shard; surplus copies
    /// only until `read_until`, and the rest of them in a later round. If dropping fails for one
    /// stripe, continues with the next stripe, and returns the last such error.
    async fn drop_unreferenced_files(
        &self,
        stripes: &[StripeId],
        read_until: Duration,
    ) -> Result<(), RemoteError> {
        let Some(shard) = stripes.first().map(|stripe| stripe.shard) else { return Ok(()) };
        let catalogue = self.context.catalogue();
        let Some((state, _)) =
            read_record::<ShardState>(&*catalogue, &shard_state_key(shard)).await?
        else {
            return Ok(());
        };
        let mut dropped = Ok(());
        for &stripe in stripes {
            // Until all of the replicas are dropped, a coordinator still works on the stripe.
            let archived = state.stripe(stripe.index);
            let Some(StripeState::Archived { attempt, generation, code, dropped: true }) = archived
            else {
                continue;
            };
            let by = ReceiptFilter::OfAttempt(attempt);
            if !self
                .context
                .run_on_store(move |store| has_unreferenced_file(store, stripe, by))
                .await?
            {
                continue;
            }
            match self
                .drop_files_fetching_missing_receipt(
                    &*catalogue,
                    DropReplicas { stripe, attempt, generation },
                    code,
                    read_until,
                )
                .await
            {
                Ok(0) => {}
                Ok(files) => tracing::info!(%stripe, files, "dropped unreferenced files"),
                Err(error) => {
                    tracing::debug!(%stripe, %error, "files that may be unreferenced are kept for now");
                    dropped = Err(error);
                }
            }
        }
        dropped
    }

    /// Drops the files of a stripe that its receipt does not place on this node. If this node has
    /// no receipt, fetches it from other nodes first. Returns the number of files dropped.
    async fn drop_files_fetching_missing_receipt(
        &self,
        catalogue: &dyn Catalogue,
        call: DropReplicas,
        code: CodeId,
        read_until: Duration,
    ) -> Result<u32, RemoteError> {
        let DropReplicas { stripe, attempt, generation } = call;
        let archived = ArchivedAttempt { attempt, generation, code };
        let mut dropped = self.shard_records.drop_replicas(call.clone()).await;
        if dropped.as_ref().is_err_and(|failure| failure.kind == ErrorKind::NotFound)
            && let Some(counting) =
                self.find_complete_receipt(catalogue, stripe, archived, ReceiptUse::Fetch).await?
        {
            self.shard_records.store_missing_receipt(counting).await?;
            dropped = self.shard_records.drop_replicas(call).await;
        }
        let mut files = dropped?.files;
        let by = ReceiptFilter::OfAttempt(attempt);
        if self.context.clock.now() < read_until
            && self
                .context
                .run_on_store(move |store| has_unreferenced_file(store, stripe, by))
                .await?
        {
            files += self.drop_surplus_copies(catalogue, stripe, archived).await?;
        }
        Ok(files)
    }

    /// Drops the pieces of the committed attempt that the valid receipt of the stripe places on
    /// other nodes. Before that, these nodes read their copies. Drops nothing if a piece is not in
    /// its place or not whole. Returns the number of files dropped.
    async fn drop_surplus_copies(
        &self,
        catalogue: &dyn Catalogue,
        stripe: StripeId,
        archived: ArchivedAttempt,
    ) -> Result<u32, RemoteError> {
        let find =
            || self.find_complete_receipt(catalogue, stripe, archived, ReceiptUse::DropSurplus);
        let Some(counting) = find().await? else { return Ok(0) };
        let surplus = self.shard_records.list_surplus_pieces(counting.clone()).await?;
        if surplus.is_empty() {
            return Ok(0);
        }
        let coordinator = self.context.coordinator();
        let keep = |why: &str| {
            tracing::debug!(%stripe, pieces = ?surplus, why, "surplus copies are kept for now");
            Ok(0)
        };
        for piece in counting.pieces.iter().filter(|piece| surplus.contains(&piece.piece)) {
            if !coordinator.is_piece_whole(&counting, piece).await? {
                return keep("a piece that is elsewhere is damaged or was not read");
            }
        }
        // The reading may have taken long, so the catalogue and all nodes are asked again.
        let until = self.context.clock.now() + self.context.settings.lease / 2;
        let evidence = DropEvidence { asked: catalogue.epoch(), until };
        let state_key = shard_state_key(stripe.shard);
        let state = read_record::<ShardState>(catalogue, &state_key).await?;
        let ArchivedAttempt { attempt, generation, code } = archived;
        let expected = StripeState::Archived { attempt, generation, code, dropped: true };
        if state.and_then(|(state, _)| state.stripe(stripe.index)) != Some(expected) {
            return keep("the state of the stripe has changed");
        }
        if find().await?.is_none_or(|found| found != counting) {
            return keep("the receipts or pieces on other nodes have changed");
        }
        self.shard_records.drop_surplus_pieces(counting, surplus, evidence).await
    }

    /// Returns the valid receipt of an archived stripe, if all pieces that it names are on the
    /// nodes that it names, and these nodes keep them. Otherwise returns `None`.
    async fn find_complete_receipt(
        &self,
        catalogue: &dyn Catalogue,
        stripe: StripeId,
        archived: ArchivedAttempt,
        purpose: ReceiptUse,
    ) -> Result<Option<Receipt>, RemoteError> {
        let root_key = shard_root_key(stripe.shard.save(), stripe.shard.index());
        let Some((root, _)) = read_record::<ShardRoot>(catalogue, &root_key).await? else {
            return Ok(None);
        };
        let coordinator = self.context.coordinator();
        Ok(coordinator.find_complete_receipt(&root, stripe.index, archived, purpose).await?)
    }
}

/// Checks up to `max_stripes` stripes after the position `after`. Returns those with a file on this
/// node that no receipt selected by `filter` accounts for, and the new position. After the last
/// stripe, the new position is the start.
fn scan_unreferenced_stripes(
    store: &Store,
    filter: ReceiptFilter,
    after: GcCursor,
    max_stripes: usize,
) -> Result<(Vec<StripeId>, GcCursor), StoreError> {
    let mut found = Vec::new();
    let mut room = max_stripes;
    let rest = after.shard.filter(|_| after.stripe.is_some()).into_iter();
    for shard in rest.chain(store.shards_after(after.shard)?) {
        let behind = after.stripe.filter(|_| after.shard == Some(shard));
        let stripes = store.list_stripes(shard, behind, room)?;
        for &stripe in &stripes {
            if has_unreferenced_file(store, stripe, filter)? {
                found.push(stripe);
            }
        }
        if let Some(last) = stripes.last().filter(|_| stripes.len() == room) {
            return Ok((found, GcCursor { shard: Some(shard), stripe: Some(last.index) }));
        }
        room -= stripes.len().max(1);
        if room == 0 {
            return Ok((found, GcCursor { shard: Some(shard), stripe: None }));
        }
    }
    Ok((found, GcCursor::default()))
}

/// Returns whether this node has a file of the stripe that none of the receipts selected by
/// `filter` ascribes to it.
fn has_unreferenced_file(
    store: &Store,
    stripe: StripeId,
    filter: ReceiptFilter,
) -> Result<bool, StoreError> {
    let scope = RecordScope::Stripe(stripe);
    let names = match filter {
        ReceiptFilter::NoReceipt => Vec::new(),
        ReceiptFilter::AnyReceipt => {
            store.list_record_files(scope)?.into_iter().map(|(name, _)| name).collect()
        }
        ReceiptFilter::OfAttempt(attempt) => vec![receipt_name(attempt)],
    };
    let mut ours = Vec::new();
    for name in names.iter().filter(|name| name.starts_with(RECEIPT_PREFIX)) {
        // A receipt that does not parse accounts for no file.
        let receipt = store
            .get_record_file_or_empty(scope, name)?
            .and_then(|bytes| Receipt::parse(&bytes).ok());
        let Some(receipt) = receipt else { continue };
        let pieces = receipt.pieces.iter().filter(|piece| piece.node == store.node());
        ours.extend(pieces.map(|piece| receipt.file_of(piece)));
    }
    let counting = store.list_undamaged_files(stripe)?.into_iter().map(|info| info.content.name());
    let mut files = counting.chain(store.damaged_files_of_stripe(stripe));
    Ok(files.any(|file| !ours.contains(&file)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::code::CodeId;
    use crate::format::records::{PieceForm, ReceiptPiece};
    use crate::id::{Generation, NodeId};
    use crate::store::BlockSpec;

    fn write_replica(store: &Store, stripe: StripeId, block: u8) {
        let spec = BlockSpec { stripe, block, layout: 1, len_bytes: 3 };
        let mut writer = store.create_block_writer(spec, None).unwrap();
        writer.write(b"abc").unwrap();
        writer.finish(None).unwrap();
    }

    fn write_receipt(store: &Store, stripe: StripeId, node: NodeId, block: u8) {
        let attempt = Attempt([9; 16]);
        let form = PieceForm::Replica { block };
        let receipt = Receipt {
            cluster: store.cluster(),
            stripe,
            attempt,
            generation: Generation::default(),
            code: CodeId(1),
            pieces: vec![ReceiptPiece { piece: block, node, form, root: [0; 32] }],
            order: Generation::default(),
        };
        let bytes = receipt.to_bytes().unwrap();
        store.put_record_file(RecordScope::Stripe(stripe), &receipt_name(attempt), &bytes).unwrap();
    }

    #[test]
    fn each_file_without_a_receipt_comes_once_a_round_whatever_the_step() {
        let store = Store::new_in_memory();
        let (mut all, mut unreceipted) = (BTreeSet::new(), BTreeSet::new());
        for shard in 1..=4 {
            for index in 0..u32::from(shard) {
                let stripe = StripeId { shard: ShardId([shard; 16]), index };
                write_replica(&store, stripe, 1);
                match index {
                    0 => write_receipt(&store, stripe, store.node(), 1),
                    // The receipt names another node's piece, or another block.
                    1 => write_receipt(&store, stripe, NodeId(7), 1),
                    2 => write_receipt(&store, stripe, store.node(), 0),
                    _ => {}
                }
                all.insert((stripe.shard, index));
                if index > 0 {
                    unreceipted.insert((stripe.shard, index));
                }
            }
        }
        let (of, another) = (
            ReceiptFilter::OfAttempt(Attempt([9; 16])),
            ReceiptFilter::OfAttempt(Attempt([8; 16])),
        );
        let cases = [
            (ReceiptFilter::NoReceipt, &all),
            (ReceiptFilter::AnyReceipt, &unreceipted),
            (of, &unreceipted),
            (another, &all),
        ];
        for ((by, expected), limit) in
            cases.into_iter().flat_map(|case| (1..12).map(move |l| (case, l)))
        {
            let (mut found, mut cursor) = (Vec::new(), GcCursor::default());
            loop {
                let (stripes, next) = scan_unreferenced_stripes(&store, by, cursor, limit).unwrap();
                assert!(stripes.len() <= limit);
                found.extend(stripes.iter().map(|stripe| (stripe.shard, stripe.index)));
                cursor = next;
                if cursor == GcCursor::default() {
                    break;
                }
            }
            assert_eq!(found.len(), expected.len(), "{by:?} {limit}");
            assert_eq!(&BTreeSet::from_iter(found), expected, "{by:?} {limit}");
        }
    }
}
