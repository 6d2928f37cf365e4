//! What this node holds, page by page: the evidence that a lost catalogue is made again from (docs/semantics.md, 8).

use super::Node;
use super::marks::{LEAVES, MARK, RECEIPT_PREFIX, TOMBSTONE};
use crate::format::file::FileName;
use crate::format::records::{Leaves, Receipt, Record};
use crate::id::{SaveId, ShardId, StripeId};
use crate::store::{Scope, Store, StoreError};
use crate::wire::Failure;
use crate::wire::calls::{Inventory, InventoryAnswer, ShardHolding, StripeHolding};

/// Shards in a page, at most.
const SHARDS_PER_PAGE: usize = 64;
/// Stripes in a page, at most.
const STRIPES_PER_PAGE: usize = 1024;

impl Node {
    pub(super) async fn inventory(&self, call: Inventory) -> Result<InventoryAnswer, Failure> {
        self.on_store(move |store| page(store, call.after, call.only)).await
    }
}

fn page(
    store: &Store,
    after: Option<(ShardId, Option<u32>)>,
    only: Option<SaveId>,
) -> Result<InventoryAnswer, StoreError> {
    let mut page = InventoryAnswer { shards: Vec::new(), next: None };
    let mut room = STRIPES_PER_PAGE;
    let mut behind = after.map(|(shard, _)| shard);
    if let Some((shard, Some(index))) = after {
        // The rest of a shard that did not fit into the page before.
        let (held, next) = shard_holding(store, shard, Some(index), &mut room)?;
        page.shards.push(held);
        if next.is_some() {
            return Ok(InventoryAnswer { next: Some((shard, next)), ..page });
        }
    }
    if let (Some(save), None) = (only, behind) {
        let first = u128::from_be_bytes(ShardId::new(save, 0).0);
        behind = first.checked_sub(1).map(|before| ShardId(before.to_be_bytes()));
    }
    let shards = store.list_shards(behind, SHARDS_PER_PAGE)?;
    let is_last_page = shards.len() < SHARDS_PER_PAGE;
    for shard in shards {
        if only.is_some_and(|save| save != shard.save()) {
            return Ok(page);
        }
        let (held, next) = shard_holding(store, shard, None, &mut room)?;
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

/// What is here of a shard, from behind stripe `after` on; `room` stripes at most. Answers with the last stripe when there are more.
fn shard_holding(
    store: &Store,
    shard: ShardId,
    after: Option<u32>,
    room: &mut usize,
) -> Result<(ShardHolding, Option<u32>), StoreError> {
    let scope = Scope::Shard(shard);
    let leaves = store.get_small(scope, LEAVES)?;
    // A record that does not parse proves nothing; other nodes have theirs.
    let root = leaves.and_then(|bytes| Leaves::parse(&bytes).ok());
    let root = root.filter(|leaves| leaves.root.admits(leaves)).map(|leaves| leaves.root);
    let mut held = ShardHolding {
        shard,
        mark: store.get_small(scope, MARK)?,
        root,
        tombstone: store.get_small(scope, TOMBSTONE)?,
        stripes: Vec::new(),
    };
    let wanted = (*room).max(1);
    for stripe in store.list_stripes(shard, after, wanted)? {
        held.stripes.push(stripe_holding(store, stripe)?);
    }
    *room = room.saturating_sub(held.stripes.len());
    let is_full = held.stripes.len() == wanted;
    let last = held.stripes.last().map(|stripe| stripe.index).filter(|_| is_full);
    Ok((held, last))
}

fn stripe_holding(store: &Store, stripe: StripeId) -> Result<StripeHolding, StoreError> {
    let mut held = StripeHolding {
        index: stripe.index,
        replicas: Vec::new(),
        pieces: Vec::new(),
        receipts: Vec::new(),
    };
    for info in store.find(stripe)? {
        match info.content.name() {
            FileName::Replica { block } => held.replicas.push(block),
            FileName::Piece { piece, attempt } => held.pieces.push((piece, attempt)),
        }
    }
    let scope = Scope::Stripe(stripe);
    for (name, _) in store.list_small(scope)? {
        if !name.starts_with(RECEIPT_PREFIX) {
            continue;
        }
        let receipt = store.get_small(scope, &name)?.and_then(|bytes| Receipt::parse(&bytes).ok());
        if let Some(receipt) =
            receipt.filter(|receipt| receipt.stripe == stripe && receipt.cluster == store.cluster())
        {
            held.receipts.push((receipt.attempt, receipt.code, receipt.generation));
        }
    }
    Ok(held)
}
