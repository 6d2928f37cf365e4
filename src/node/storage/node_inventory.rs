//! Inventory of this node, page by page: the evidence for a rebuild of a lost catalogue
//! (docs/semantics.md, 8), the marks that readers use while no catalogue answers (6), and the
//! contents of a shard by which the catalogue server finds what is missing (11).

use super::fencing::read_marked_save;
use super::record_names::{LEAVES, MARK, RECEIPT_PREFIX, RECORD};
use crate::format::file::FileName;
use crate::format::records::{Leaves, Receipt, Record};
use crate::id::{SaveId, ShardId, StripeId};
use crate::node::context::NodeContext;
use crate::store::{RecordScope, Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::{
    InventoryPage, ListInventory, ListMarkedSaves, MarkedSave, MarkedSavesPage, STRIPES_PER_SURVEY,
    ShardHolding, ShardSurvey, StripeHolding, StripeSurvey, SurveyShard,
};

/// Maximum number of shards that begin in a page of the inventory. The page may also have the rest
/// of a shard that began in the page before.
const SHARDS_PER_PAGE: usize = 64;
/// Maximum number of stripes in a page of the inventory.
const STRIPES_PER_PAGE: usize = 1024;
/// Maximum number of shards whose marks are read for a page of marks. Once a shard of a save has a
/// mark, the other shards of that save are skipped.
const MARKS_PER_PAGE: usize = 4096;

/// Returns a page of the shards and stripes that this node has files or records of.
pub(in crate::node) async fn list_inventory(
    context: &NodeContext,
    call: ListInventory,
) -> Result<InventoryPage, RemoteError> {
    context.run_on_store(move |store| read_inventory_page(store, call.after, call.only)).await
}

/// Returns a page of the saves that this node has a mark of, in order.
pub(in crate::node) async fn list_marked_saves(
    context: &NodeContext,
    call: ListMarkedSaves,
) -> Result<MarkedSavesPage, RemoteError> {
    context
        .run_on_store(move |store| read_marked_saves_page(store, call.after, MARKS_PER_PAGE))
        .await
}

/// Returns what this node has of a shard, for the stripes from `call.first` on.
pub(in crate::node) async fn survey_shard(
    context: &NodeContext,
    call: SurveyShard,
) -> Result<ShardSurvey, RemoteError> {
    context.run_on_store(move |store| read_shard_survey(store, call.shard, call.first)).await
}

/// Returns a page of the marked saves, in order. Reads the marks of at most `max_shards` shards.
pub(in crate::node) fn read_marked_saves_page(
    store: &Store,
    after: Option<ShardId>,
    max_shards: usize,
) -> Result<MarkedSavesPage, StoreError> {
    let mut saves: Vec<MarkedSave> = Vec::new();
    let (mut last, mut looked_at) = (after, 0);
    for shard in store.shards_after(after)? {
        if saves.last().is_none_or(|found| found.saved.save != shard.save()) {
            if looked_at == max_shards {
                return Ok(MarkedSavesPage { saves, next: last });
            }
            looked_at += 1;
            saves.extend(read_marked_save(store, shard)?);
        }
        last = Some(shard);
    }
    Ok(MarkedSavesPage { saves, next: None })
}

/// Returns the saves that have damaged marks on this node and no good one.
pub(in crate::node) fn find_damaged_mark_saves(store: &Store) -> Result<Vec<SaveId>, StoreError> {
    let (mut damaged, mut good) = (Vec::new(), None);
    for shard in store.shards_after(None)? {
        let save = shard.save();
        if good == Some(save) {
            continue;
        }
        if read_marked_save(store, shard)?.is_some() {
            good = Some(save);
            damaged.pop_if(|last| *last == save);
        } else if damaged.last() != Some(&save)
            && store.get_record_file_or_empty(RecordScope::Shard(shard), MARK)?.is_some()
        {
            damaged.push(save);
        }
    }
    Ok(damaged)
}

fn read_inventory_page(
    store: &Store,
    after: Option<(ShardId, Option<u32>)>,
    only_save: Option<SaveId>,
) -> Result<InventoryPage, StoreError> {
    let mut page = InventoryPage { shards: Vec::new(), next: None };
    let mut room = STRIPES_PER_PAGE;
    let mut behind = after.map(|(shard, _)| shard);
    if let Some((shard, Some(index))) = after {
        // The rest of a shard that did not fit into the previous page.
        let (held, next) = read_shard_holding(store, shard, Some(index), &mut room)?;
        page.shards.push(held);
        if next.is_some() {
            return Ok(InventoryPage { next: Some((shard, next)), ..page });
        }
    }
    if let (Some(save), None) = (only_save, behind) {
        behind = ShardId::before(save);
    }
    let shards = store.list_shards(behind, SHARDS_PER_PAGE)?;
    let is_last_page = shards.len() < SHARDS_PER_PAGE;
    for shard in shards {
        if only_save.is_some_and(|save| save != shard.save()) {
            return Ok(page);
        }
        let (held, next) = read_shard_holding(store, shard, None, &mut room)?;
        page.shards.push(held);
        page.next = Some((shard, next));
        if next.is_some() || room == 0 {
            return Ok(page);
        }
    }
    if is_last_page {
        page.next = None;
    }
    Ok(page)
}

/// Returns the records and files of a shard on this node, with its stripes after stripe `after`: at
/// most `stripes_left`, but at least one if the shard has one. If the shard may have more, also
/// returns the index of the last stripe returned. Reduces `stripes_left` by the number of stripes
/// returned.
fn read_shard_holding(
    store: &Store,
    shard: ShardId,
    after: Option<u32>,
    stripes_left: &mut usize,
) -> Result<(ShardHolding, Option<u32>), StoreError> {
    let scope = RecordScope::Shard(shard);
    let is_of_save = shard.index() == u32::MAX;
    let leaves = store.get_record_file_or_empty(scope, LEAVES)?;
    // A record that does not parse proves nothing. Other nodes have their copies.
    let root = leaves.and_then(|bytes| Leaves::parse(&bytes).ok());
    let root = root.filter(|leaves| leaves.root.admits(leaves)).map(|leaves| leaves.root);
    let mut held = ShardHolding {
        shard,
        mark: store.get_record_file_or_empty(scope, MARK)?,
        root,
        tombstone: if is_of_save { store.get_tombstone(shard.save())? } else { None },
        stripes: Vec::new(),
    };
    let wanted = (*stripes_left).max(1);
    for stripe in store.list_stripes(shard, after, wanted)? {
        held.stripes.push(read_stripe_holding(store, stripe)?);
    }
    *stripes_left = stripes_left.saturating_sub(held.stripes.len());
    let is_full = held.stripes.len() == wanted;
    let last = held.stripes.last().map(|stripe| stripe.index).filter(|_| is_full);
    Ok((held, last))
}

/// Returns the files and receipts of a stripe on this node.
fn read_stripe_holding(store: &Store, stripe: StripeId) -> Result<StripeHolding, StoreError> {
    let mut held = StripeHolding {
        index: stripe.index,
        replicas: Vec::new(),
        pieces: Vec::new(),
        receipts: Vec::new(),
    };
    for info in store.list_undamaged_files(stripe)? {
        match info.content.name() {
            FileName::Replica { block } => held.replicas.push(block),
            FileName::Piece { piece, attempt } => held.pieces.push((piece, attempt)),
        }
    }
    // A replica that exists, however damaged, was not dropped. A rebuild concludes nothing else
    // from it.
    for file in store.damaged_files_of_stripe(stripe) {
        if let FileName::Replica { block } = file {
            held.replicas.push(block);
        }
    }
    let scope = RecordScope::Stripe(stripe);
    for (name, _) in store.list_record_files(scope)? {
        if !name.starts_with(RECEIPT_PREFIX) {
            continue;
        }
        let receipt = store
            .get_record_file_or_empty(scope, &name)?
            .and_then(|bytes| Receipt::parse(&bytes).ok());
        if let Some(receipt) =
            receipt.filter(|receipt| receipt.stripe == stripe && receipt.cluster == store.cluster())
        {
            held.receipts.push((receipt.attempt, receipt.code, receipt.generation));
        }
    }
    Ok(held)
}

/// Returns what this node has of a shard, for the stripes from `first` on, at most
/// [`STRIPES_PER_SURVEY`] of them. A record is reported as present if its file exists: its contents
/// are not read here.
fn read_shard_survey(store: &Store, shard: ShardId, first: u32) -> Result<ShardSurvey, StoreError> {
    let records = store.list_record_files(RecordScope::Shard(shard))?;
    let has_record = |wanted| records.iter().any(|(name, _)| name == wanted);
    let (has_leaves, has_mark) = (has_record(LEAVES), has_record(MARK));
    let mut survey = ShardSurvey { has_leaves, has_mark, stripes: Vec::new() };
    let behind = first.checked_sub(1);
    for stripe in store.list_stripes(shard, behind, STRIPES_PER_SURVEY as usize)? {
        if stripe.index >= first.saturating_add(STRIPES_PER_SURVEY) {
            break;
        }
        survey.stripes.push(read_stripe_survey(store, stripe)?);
    }
    Ok(survey)
}

fn read_stripe_survey(store: &Store, stripe: StripeId) -> Result<StripeSurvey, StoreError> {
    let mut survey = StripeSurvey { index: stripe.index, ..StripeSurvey::default() };
    for info in store.list_undamaged_files(stripe)? {
        match info.content.name() {
            FileName::Replica { block } => survey.replicas.push(block),
            FileName::Piece { piece, attempt } => survey.pieces.push((piece, attempt)),
        }
    }
    for (name, _) in store.list_record_files(RecordScope::Stripe(stripe))? {
        survey.has_record |= name == RECORD;
        if let Some(Ok(attempt)) = name.strip_prefix(RECEIPT_PREFIX).map(str::parse) {
            survey.receipts.push(attempt);
        }
    }
    Ok(survey)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::{CommitMark, Saved, ShardRoot};
    use crate::id::{ClusterId, Generation, Step};

    fn mark(shard: ShardId) -> CommitMark {
        let (save, generation) = (shard.save(), Generation::default());
        let saved =
            Saved { save, generation, shards: 3, len_bytes: 0, roots_hash: [0; 32], saved_at: 0 };
        let root = ShardRoot {
            job: "job".parse().unwrap(),
            step: Step(1),
            save,
            index: shard.index(),
            shards: 3,
            shard,
            name: "shard".parse().unwrap(),
            len_bytes: 0,
            block_bytes: 0,
            n: 3,
            k: 2,
            layout: 1,
            field: 1,
            fingerprint_key: [0; 32],
            ring: Vec::new(),
            stripes_root: [0; 32],
        };
        CommitMark { cluster: ClusterId([1; 16]), saved, root }
    }

    #[test]
    fn pages_of_marks_have_each_marked_save_once() {
        let store = Store::new_in_memory();
        for save in 1..=9 {
            for index in 0..3 {
                let shard = ShardId::new(SaveId([save; 12]), index);
                // Some first shards have no mark, and every third save has none at all.
                let is_marked = save % 3 > 0 && (index > 0 || save % 2 == 0);
                let mark = mark(shard).to_bytes().unwrap();
                let (name, bytes) = if is_marked { (MARK, mark) } else { (LEAVES, vec![1]) };
                store.put_record_file(RecordScope::Shard(shard), name, &bytes).unwrap();
            }
        }
        for limit in 1..30 {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let page = read_marked_saves_page(&store, after, limit).unwrap();
                assert!(
                    page.saves.len() <= limit && page.next.is_none_or(|next| after < Some(next))
                );
                found.extend(page.saves.iter().map(|found| found.saved.save.0[0]));
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(found, [1, 2, 4, 5, 7, 8], "{limit}");
        }
        let page = read_marked_saves_page(&store, None, 3).unwrap();
        assert_eq!(
            page.next,
            Some(ShardId::new(SaveId([2; 12]), 2)),
            "shards of a save that is already found are skipped"
        );
    }
}
