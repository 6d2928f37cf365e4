//! Fencing of shards on this node: tombstones, commit marks, fences and the epoch
//! (docs/semantics.md, 2).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::StorageError;
use super::record_names::MARK;
use crate::catalogue::record_access::{read_record, shard_state_key};
use crate::format::records::{CommitMark, Fence, Record, ShardState, Tombstone};
use crate::id::{Epoch, Generation, NodeId, SaveId, ShardId};
use crate::kind::ErrorKind;
use crate::node::active_saves::ActiveSaves;
use crate::node::context::NodeContext;
use crate::node::registration::Registration;
use crate::store::{RecordScope, Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::MarkedSave;
use crate::workers::Workers;

/// Maximum number of cached tombstone look-ups, and maximum number of cached fences. A full cache
/// is cleared; the disk has all tombstones and fences.
const MAX_CACHED_TOMBSTONES: usize = 65_536;
/// Maximum number of saves that one node purges at once. Further purges wait.
const PURGES_AT_ONCE: usize = 2;
/// The name of the record with the fence of a shard.
pub(in crate::node) const FENCE: &str = "fence";

/// The service that decides which writes this node still accepts for a shard, and that removes
/// files which were written too late. It caches look-ups of tombstones and fences. It makes a newer
/// fence durable before the order that raised it is obeyed.
pub(in crate::node) struct Fencing {
    pub(super) context: Arc<NodeContext>,
    fences: Mutex<HashMap<ShardId, Fence>>,
    tombstones: Mutex<TombstoneCache>,
    /// Held while a fence is read and raised. Two orders must not both read the old fence.
    fence_lock: Arc<Mutex<()>>,
    registration: Arc<Registration>,
    pub(super) purging: ActiveSaves,
    /// Purges have threads of their own: one can take minutes, and renewals of leases must not wait
    /// for it.
    pub(super) purge_workers: Workers,
}

/// Look-ups of tombstones and removed-save entries.
#[derive(Default)]
struct TombstoneCache {
    removed: HashMap<SaveId, bool>,
    /// How often the cache was cleared.
    clear_count: u64,
}

impl TombstoneCache {
    /// Caches the look-up of a save. A removed save stays removed, so `true` is never replaced.
    fn insert(&mut self, save: SaveId, is_removed: bool) {
        if self.removed.len() >= MAX_CACHED_TOMBSTONES {
            self.removed.clear();
            self.clear_count += 1;
        }
        *self.removed.entry(save).or_default() |= is_removed;
    }

    /// Caches a look-up that began when the cache had been cleared `clear_count` times. A tombstone
    /// may have been written since the look-up, and the clearing of the cache may have forgotten
    /// it: in that case a look-up that found none is not cached.
    fn insert_unless_outdated(&mut self, save: SaveId, is_removed: bool, clear_count: u64) {
        if is_removed || self.clear_count == clear_count {
            self.insert(save, is_removed);
        }
    }
}

impl Fencing {
    /// Creates the service with empty caches.
    pub(in crate::node) fn new(context: Arc<NodeContext>, registration: Arc<Registration>) -> Self {
        let (fences, tombstones, fence_lock, purging) = Default::default();
        let purge_workers = context.workers.beside(PURGES_AT_ONCE);
        Self { context, fences, tombstones, fence_lock, registration, purging, purge_workers }
    }

    /// Returns whether this node has a tombstone or a removed-save entry of the save.
    pub(in crate::node) async fn is_removed_save(&self, save: SaveId) -> Result<bool, RemoteError> {
        let (cached, clear_count) = {
            let cache = self.lock_tombstones();
            (cache.removed.get(&save).copied(), cache.clear_count)
        };
        if let Some(known) = cached {
            return Ok(known);
        }
        let found = self.context.run_on_store(move |store| is_removed(store, save)).await?;
        self.lock_tombstones().insert_unless_outdated(save, found, clear_count);
        Ok(found)
    }

    fn lock_tombstones(&self) -> MutexGuard<'_, TombstoneCache> {
        self.tombstones.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Caches that the save is removed, once its tombstone is durable. It stays removed: a
    /// removed-save entry replaces the tombstone.
    pub(in crate::node) fn cache_removed(&self, save: SaveId) {
        self.lock_tombstones().insert(save, true);
    }

    /// Checks that the save was not removed and that the epoch is not over, and records the epoch.
    ///
    /// # Errors
    /// [`StorageError::SaveRemoved`] if the save was removed; the store's error if the epoch is
    /// over.
    pub(in crate::node) async fn check_not_removed_raising_epoch(
        &self,
        shard: ShardId,
        generation: Generation,
    ) -> Result<(), RemoteError> {
        if self.is_removed_save(shard.save()).await? {
            return Err(StorageError::SaveRemoved { save: shard.save() }.into());
        }
        self.context
            .run_on_store(move |store| store.raise_highest_seen_epoch(generation.epoch))
            .await
    }

    /// Checks that a client may write to a shard: besides
    /// [`check_not_removed_raising_epoch`](Self::check_not_removed_raising_epoch), the node stores
    /// data, the epoch has begun, and the shard is not committed.
    ///
    /// # Errors
    /// [`StorageError::ShardCommitted`] if the shard is committed;
    /// [`StorageError::NodeStoresNoData`] if the node stores no data; [`StorageError::NoSuchShard`]
    /// if no shard may have this number; [`StorageError::EpochNotBegun`] if the epoch has not begun;
    /// [`StorageError::SaveRemoved`] if the save was removed; the store's error if the epoch is over.
    pub(in crate::node) async fn check_client_may_write(
        &self,
        shard: ShardId,
        generation: Generation,
    ) -> Result<(), RemoteError> {
        if !self.context.settings.storage {
            let node = self.context.settings.name.clone();
            return Err(StorageError::NodeStoresNoData { node }.into());
        }
        if shard.index() == u32::MAX {
            return Err(StorageError::NoSuchShard { shard }.into());
        }
        self.check_epoch_has_begun(generation.epoch).await?;
        self.check_not_removed_raising_epoch(shard, generation).await?;
        // Only committed shards get an owner, so a fence proves the commit as a mark does. Not
        // every node has the mark.
        let settled = self.context.run_on_store(move |store| {
            let scope = RecordScope::Shard(shard);
            let is_settled = store.get_record_file(scope, MARK)?.is_some()
                || store.get_record_file(scope, FENCE)?.is_some();
            Ok::<_, StoreError>(is_settled)
        });
        match settled.await? {
            true => Err(StorageError::ShardCommitted { shard }.into()),
            false => Ok(()),
        }
    }

    /// Checks that the epoch of a client's call has begun. A client names an epoch but cannot raise
    /// it: a wrong number would shut this node out of its own cluster permanently.
    async fn check_epoch_has_begun(&self, epoch: Epoch) -> Result<(), RemoteError> {
        if epoch <= self.context.store.highest_seen_epoch() {
            return Ok(());
        }
        // Registering returns the catalogue's epoch, which a node that has just started may not
        // know yet.
        let answer = self.registration.register_and_note_absence().await?;
        if epoch > answer.epoch {
            return Err(StorageError::EpochNotBegun { epoch, newest: answer.epoch }.into());
        }
        Ok(())
    }

    /// Checks an order of a shard's owner: refuses a generation that is over, and makes a newer one
    /// durable before it is obeyed.
    ///
    /// # Errors
    /// [`StorageError::GenerationOver`] if the generation is over; [`StorageError::SaveRemoved`] or
    /// [`StorageError::SaveRemovedMeanwhile`] if the save was removed. If the fence is damaged, also
    /// errors of the catalogue, and [`StorageError::CatalogueOutdated`].
    pub(in crate::node) async fn check_and_raise_fence(
        self: &Arc<Self>,
        shard: ShardId,
        generation: Generation,
        coordinator: NodeId,
    ) -> Result<(), RemoteError> {
        self.check_not_removed_raising_epoch(shard, generation).await?;
        let cached = {
            let fences = self.fences.lock().unwrap_or_else(PoisonError::into_inner);
            fences.get(&shard).copied()
        };
        let refuse = |fence: &Fence| {
            let (holder, newest) = (fence.holder, fence.generation);
            RemoteError::from(StorageError::GenerationOver { generation, shard, holder, newest })
        };
        match cached {
            Some(fence) if fence.generation == generation => return Ok(()),
            Some(fence) if fence.generation > generation => return Err(refuse(&fence)),
            _ => {}
        }
        let next = Fence { generation, holder: coordinator };
        let fence = match self.raise_fence_if_undamaged(shard, next).await? {
            Some(fence) => fence,
            None => self.replace_damaged_fence(shard, next).await?,
        };
        let mut fences = self.fences.lock().unwrap_or_else(PoisonError::into_inner);
        if fences.len() >= MAX_CACHED_TOMBSTONES {
            fences.clear();
        }
        let known = fences.entry(shard).or_insert(fence);
        if fence.generation > known.generation {
            *known = fence;
        }
        if known.generation > generation { Err(refuse(known)) } else { Ok(()) }
    }
}

impl Fencing {
    /// Raises a shard's durable fence to `next`. A present fence that is at least as high stays.
    /// Returns the resulting fence, or `None` if the present one is damaged.
    async fn raise_fence_if_undamaged(
        self: &Arc<Self>,
        shard: ShardId,
        next: Fence,
    ) -> Result<Option<Fence>, RemoteError> {
        let raising = self.fence_lock.clone();
        self.write_unless_removed(shard.save(), move |store| {
            let _one_at_a_time = raising.lock().unwrap_or_else(PoisonError::into_inner);
            match read_fence(store, shard)? {
                StoredFence::Damaged => Ok(None),
                StoredFence::Good(fence) => raise_fence(store, shard, fence, next).map(Some),
            }
        })
        .await
    }

    /// Replaces a damaged fence by `next`, or by the generation of the shard's newest owner
    /// according to the catalogue if that is higher. The catalogue has the generation of each owner
    /// before the owner's first order. Returns the resulting fence.
    ///
    /// # Errors
    /// [`StorageError::SaveRemoved`] if the catalogue does not have the shard, and
    /// [`StorageError::CatalogueOutdated`] if a later epoch than the catalogue's has begun.
    async fn replace_damaged_fence(
        self: &Arc<Self>,
        shard: ShardId,
        next: Fence,
    ) -> Result<Fence, RemoteError> {
        let catalogue = self.context.catalogue();
        // The epoch is read before the catalogue answers, as for a drop of replicas.
        let asked = catalogue.epoch();
        let state = read_record::<ShardState>(&*catalogue, &shard_state_key(shard)).await?;
        let (state, _) = state.ok_or(StorageError::SaveRemoved { save: shard.save() })?;
        let floor = state.generation.max(Generation { epoch: asked, counter: 0 });
        let holder = state.owner.map_or(next.holder, |owner| owner.node);
        let next = match floor > next.generation {
            true => Fence { generation: floor, holder },
            false => next,
        };
        let (node, raising) = (self.context.settings.name.clone(), self.fence_lock.clone());
        self
            .write_unless_removed(shard.save(), move |store| {
                let _one_at_a_time = raising.lock().unwrap_or_else(PoisonError::into_inner);
                let seen = store.highest_seen_epoch();
                if asked < seen {
                    return Err(StorageError::CatalogueOutdated { node, asked, seen }.into());
                }
                match read_fence(store, shard)? {
                    StoredFence::Damaged => {
                        tracing::warn!(%shard, generation = %next.generation, "a damaged fence was replaced by the generation of the shard's newest owner");
                        raise_fence(store, shard, None, next)
                    }
                    StoredFence::Good(fence) => raise_fence(store, shard, fence, next),
                }
            })
            .await
    }
}

/// The fence of a shard on this node's disk.
enum StoredFence {
    /// The fence, or `None` if the node has obeyed no owner of the shard yet.
    Good(Option<Fence>),
    /// The record does not parse, or the disk cannot read it.
    Damaged,
}

/// Reads the fence of a shard.
///
/// # Errors
/// If the fence is of a later format version, or if the store cannot be read.
fn read_fence(store: &Store, shard: ShardId) -> Result<StoredFence, RemoteError> {
    let bytes = store.get_record_file_or_empty(RecordScope::Shard(shard), FENCE)?;
    match bytes.map(|bytes| Fence::parse(&bytes)).transpose() {
        Ok(fence) => Ok(StoredFence::Good(fence)),
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(StoredFence::Damaged),
        Err(error) => Err(error.into()),
    }
}

/// Raises a shard's durable fence from `current` to `next`. If `current` is at least as high, it
/// stays, and is written again because an earlier write may have failed before its sync. Returns the
/// resulting fence.
fn raise_fence(
    store: &Store,
    shard: ShardId,
    current: Option<Fence>,
    next: Fence,
) -> Result<Fence, RemoteError> {
    let highest = current.filter(|current| current.generation >= next.generation).unwrap_or(next);
    store.put_record_file(RecordScope::Shard(shard), FENCE, &highest.to_bytes()?)?;
    Ok(highest)
}

/// Returns whether the save has a tombstone or a removed-save entry.
fn is_removed(store: &Store, save: SaveId) -> Result<bool, StoreError> {
    Ok(store.get_tombstone(save)?.is_some() || store.is_recorded_removed(save)?)
}

/// Returns the save according to a shard's commit mark, if the shard has a good mark of this
/// cluster.
pub(in crate::node) fn read_marked_save(
    store: &Store,
    shard: ShardId,
) -> Result<Option<MarkedSave>, StoreError> {
    let bytes = store.get_record_file_or_empty(RecordScope::Shard(shard), MARK)?;
    let mark = bytes.and_then(|bytes| CommitMark::parse(&bytes).ok());
    let fits = |mark: &CommitMark| {
        mark.cluster == store.cluster()
            && mark.root.shard == shard
            && mark.saved.save == shard.save()
    };
    Ok(mark.filter(fits).map(|mark| MarkedSave {
        job: mark.root.job,
        step: mark.root.step,
        saved: mark.saved,
        n: mark.root.n,
        k: mark.root.k,
    }))
}

/// Parses a tombstone. Returns it if it is of this cluster.
///
/// # Errors
/// [`StorageError::ForeignTombstone`] if it is of another cluster.
pub(in crate::node) fn parse_tombstone(
    context: &NodeContext,
    bytes: &[u8],
) -> Result<Tombstone, RemoteError> {
    let tombstone = Tombstone::parse(bytes)?;
    if tombstone.cluster != context.settings.cluster {
        return Err(StorageError::ForeignTombstone.into());
    }
    Ok(tombstone)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(number: u64) -> SaveId {
        let mut id = [0; 12];
        id[..8].copy_from_slice(&number.to_le_bytes());
        SaveId(id)
    }

    #[test]
    fn a_look_up_from_before_a_clear_does_not_hide_a_tombstone() {
        let mut cache = TombstoneCache::default();
        let before = cache.clear_count;
        cache.insert(save(0), true);
        (1..=MAX_CACHED_TOMBSTONES as u64).for_each(|number| cache.insert(save(number), false));
        assert_eq!((cache.removed.get(&save(0)), cache.clear_count), (None, before + 1));
        cache.insert_unless_outdated(save(0), false, before);
        assert_eq!(cache.removed.get(&save(0)), None);
        cache.insert_unless_outdated(save(0), true, before);
        cache.insert_unless_outdated(save(0), false, cache.clear_count);
        assert_eq!(cache.removed.get(&save(0)), Some(&true));
    }
}
