//! The data folder itself: its owner, its lock, and its files.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::damage_note::DamageNotes;
use super::disk::{Disk, DiskEntry, DiskLock, Space};
use super::durable_paths::none_if_not_found;
use super::durable_paths::{
    FileNames, QUARANTINE, SHARDS, TMP, file_path, parse_stripe_index, shard_dir, stripe_dir,
};
use super::file_index::{FileInfo, Index, Totals};
use super::kv::Kv;
use super::open_findings::{OpenFindings, ReconcileCounts};
use super::real_disk::RealDisk;
use super::sled_kv::{SledKv, SledOpening};
use super::stored_file::StoredFile;
use super::tombstone_slots::TombstoneSlots;
use crate::format::FormatError;
use crate::format::envelope::{RecordKind, open_envelope, open_record, seal_record};
use crate::format::file::FileKey;
use crate::format::records::{Heard, SeenEpoch};
use crate::id::{ClusterId, NodeId, PeerName, ShardId, StripeId};

/// The name of the lock file. Lock it with [`Disk::lock`] before anything else in the folder is
/// opened.
pub const LOCK_FILE: &str = "lock";
/// The name of the folder of the index.
pub const INDEX_DIR: &str = "index";

const IDENTITY: &str = "node.id";
pub(super) const EPOCH: &str = "epoch";
/// The version of the folder's layout.
const FOLDER_FORMAT: u8 = 1;

/// The body of `node.id`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct NodeIdentity {
    cluster: ClusterId,
    name: PeerName,
    format: u8,
}

/// The data folder of a node. Clones share the same folder.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    disk: Arc<dyn Disk>,
    names: FileNames,
    index: Index,
    cluster: ClusterId,
    node: NodeId,
    seen_epoch: Mutex<SeenEpoch>,
    epoch_writer: Mutex<()>,
    last_revision: Mutex<Option<Heard>>,
    revision_writer: Mutex<()>,
    next_quarantine: AtomicU64,
    removed_saves_lock: Mutex<()>,
    slots: Mutex<TombstoneSlots>,
    damage_notes: Mutex<DamageNotes>,
    open_findings: OnceLock<OpenFindings>,
    _lock: DiskLock,
}

impl Store {
    /// Opens a data folder of this machine: takes the lock, opens the index, and calls
    /// [`Store::open`]. Returns the store, the differences between index and folders, and how the
    /// index was opened.
    pub fn open_folder(
        path: impl Into<PathBuf>,
        index_cache_bytes: u64,
        cluster: ClusterId,
        name: &PeerName,
    ) -> Result<(Self, ReconcileCounts, SledOpening), StoreError> {
        let disk = RealDisk::open(path)?;
        let lock = disk.lock(LOCK_FILE)?;
        let (kv, opened) = SledKv::open(&lock, &disk.root().join(INDEX_DIR), index_cache_bytes)?;
        let (store, reconciled) = Self::open(Arc::new(disk), lock, Arc::new(kv), cluster, name)?;
        Ok((store, reconciled, opened))
    }

    /// Opens the data folder of node `name` of `cluster`. A folder that has neither `node.id` nor
    /// shards becomes that node's. `lock` is the lock of [`LOCK_FILE`], taken before `kv` was opened.
    /// Returns the store, and the differences that were found between index and folders.
    ///
    /// First makes everything visible durable (a killed process may have left names that were never
    /// synced). Then empties `tmp/`, corrects the index from the folders, and sets damaged records of
    /// the removed-save set aside.
    ///
    /// # Errors
    /// [`StoreError::Foreign`] if the folder belongs to another node or cluster, and
    /// [`StoreError::NoIdentity`] if `shards/` is not empty and there is no `node.id`.
    pub fn open(
        disk: Arc<dyn Disk>,
        lock: DiskLock,
        kv: Arc<dyn Kv>,
        cluster: ClusterId,
        name: &PeerName,
    ) -> Result<(Self, ReconcileCounts), StoreError> {
        disk.sync_all()?;
        let identity = NodeIdentity { cluster, name: name.clone(), format: FOLDER_FORMAT };
        let inner = Inner {
            names: FileNames::new(disk.clone()),
            index: Index::new(disk.clone(), kv),
            disk,
            cluster,
            node: NodeId::of(name),
            seen_epoch: Mutex::default(),
            epoch_writer: Mutex::default(),
            last_revision: Mutex::default(),
            revision_writer: Mutex::default(),
            next_quarantine: AtomicU64::new(1),
            removed_saves_lock: Mutex::default(),
            slots: Mutex::default(),
            damage_notes: Mutex::default(),
            open_findings: OnceLock::new(),
            _lock: lock,
        };
        let store = Self { inner: Arc::new(inner) };
        store.claim_folder_and_clear_tmp(&identity)?;
        *store.lock_seen_epoch() = store.read_seen_epoch()?.unwrap_or_default();
        *store.lock_last_revision() = store.read_last_revision();
        store.load_or_create_slots()?;
        let found = store.reconcile_index()?;
        let counts = found.counts;
        store.set_aside_damaged_removed_saves();
        let _ = store.inner.open_findings.set(found);
        Ok((store, counts))
    }

    fn claim_folder_and_clear_tmp(&self, ours: &NodeIdentity) -> Result<(), StoreError> {
        let found: Option<NodeIdentity> =
            self.open_sealed_record(IDENTITY, RecordKind::NodeIdentity)?;
        let fresh = found.is_none();
        match found {
            Some(found) if found.format > FOLDER_FORMAT => {
                let source = FormatError::Version {
                    what: "the data folder".to_owned(),
                    found: found.format.into(),
                    first: FOLDER_FORMAT.into(),
                    last: FOLDER_FORMAT.into(),
                };
                return Err(StoreError::Format { path: IDENTITY.to_owned(), source });
            }
            Some(found) if found != *ours => {
                let text =
                    |id: &NodeIdentity| format!("node {} of cluster {}", id.name, id.cluster);
                return Err(StoreError::Foreign { found: text(&found), ours: text(ours) });
            }
            Some(_) => {}
            None => {
                let files = none_if_not_found(self.disk().list(SHARDS))?.unwrap_or_default();
                if !files.is_empty() {
                    return Err(StoreError::NoIdentity);
                }
            }
        }
        for dir in [SHARDS, TMP, QUARANTINE] {
            self.disk().create_dir(dir)?;
        }
        self.disk().sync_dir("")?;
        for left in self.disk().list(TMP)?.iter().filter(|entry| !entry.is_dir) {
            self.disk().remove(&format!("{TMP}/{}", left.name))?;
        }
        if fresh {
            // The catch-up record is written before the identity: a new node knows of no save, even if
            // an earlier node of the same name had caught up.
            self.record_behind()?;
            self.put_sealed(IDENTITY, RecordKind::NodeIdentity, ours)?;
        }
        Ok(())
    }

    pub(super) fn open_sealed_record<T: for<'a> Deserialize<'a>>(
        &self,
        path: &str,
        kind: RecordKind,
    ) -> Result<Option<T>, StoreError> {
        let Some(bytes) = self.get_record(path)? else { return Ok(None) };
        let record = open_record(kind, 1..=1, &bytes);
        record.map(Some).map_err(|source| StoreError::Format { path: path.to_owned(), source })
    }

    pub(super) fn put_sealed<T: Serialize>(
        &self,
        path: &str,
        kind: RecordKind,
        body: &T,
    ) -> Result<(), StoreError> {
        let format = |source| StoreError::Format { path: path.to_owned(), source };
        // A record of a later release is kept, because this release cannot write everything that is
        // in it.
        if let Ok(Some(found)) = self.get_record(path)
            && let Err(source @ FormatError::Version { .. }) = open_envelope(kind, 1..=1, &found)
        {
            return Err(format(source));
        }
        let bytes = seal_record(kind, 1, body).map_err(format)?;
        self.put_record(path, &bytes).map(drop)
    }

    /// Locks the change of the seen epoch. The holder may wait for the disk. Readers of the epoch do
    /// not wait for it.
    pub(super) fn lock_epoch_writer(&self) -> MutexGuard<'_, ()> {
        self.inner.epoch_writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_seen_epoch(&self) -> MutexGuard<'_, SeenEpoch> {
        self.inner.seen_epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_last_revision(&self) -> MutexGuard<'_, Option<Heard>> {
        self.inner.last_revision.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_revision_writer(&self) -> MutexGuard<'_, ()> {
        self.inner.revision_writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn disk(&self) -> &dyn Disk {
        self.inner.disk.as_ref()
    }

    pub(super) fn durable_names(&self) -> &FileNames {
        &self.inner.names
    }

    pub(super) fn index(&self) -> &Index {
        &self.inner.index
    }

    pub(super) fn damage_notes_mutex(&self) -> &Mutex<DamageNotes> {
        &self.inner.damage_notes
    }

    /// Returns the lock that is held during a change of the removed-save set.
    pub(super) fn removed_saves_lock(&self) -> &Mutex<()> {
        &self.inner.removed_saves_lock
    }

    pub(super) fn slots_mutex(&self) -> &Mutex<TombstoneSlots> {
        &self.inner.slots
    }

    pub(super) fn next_quarantine_number(&self) -> &AtomicU64 {
        &self.inner.next_quarantine
    }

    /// Returns the cluster that the folder belongs to.
    pub fn cluster(&self) -> ClusterId {
        self.inner.cluster
    }

    /// Returns the node that the folder belongs to.
    pub fn node(&self) -> NodeId {
        self.inner.node
    }

    /// Opens a file that has no damage note. Checks its header and hash tree; the data is checked
    /// when it is read.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] if the file has a damage note, or the error that opening it gives.
    pub fn open_undamaged_file(&self, key: FileKey) -> Result<StoredFile, StoreError> {
        if self.is_damaged(key) {
            return Err(StoreError::Damaged { key });
        }
        StoredFile::open(self.disk(), self.cluster(), key)
    }

    /// Removes a file and returns once the removal is durable. Returns `false` if there was none.
    /// The caller decides whether the file may be removed.
    pub fn remove_file(&self, key: FileKey) -> Result<bool, StoreError> {
        let removed = self.durable_names().remove_file_and_empty_dirs(&file_path(key))?;
        self.remove_stale_index_entry(key);
        self.remove_damage_note_if(key, |_| self.current_inode_number(key).is_none())?;
        Ok(removed)
    }

    /// Removes the index entry of a file that was removed or quarantined. If that fails, the next
    /// start corrects the index.
    pub(super) fn remove_stale_index_entry(&self, key: FileKey) {
        if let Err(error) = self.index().reconcile_entry(key, None) {
            tracing::error!(%key, %error, "a removed or quarantined file is still in the index: the next start of the daemon corrects the index");
        }
    }

    /// Corrects the index entry of `key` to match the file. Never changes the file. The entry of a file
    /// that is there but damaged stays.
    pub fn correct_index_entry(&self, key: FileKey) -> Result<(), StoreError> {
        let info =
            |store: &Self| store.open_undamaged_file(key).ok().map(|file| file.index_entry());
        let before = info(self);
        self.index().reconcile_entry(key, before)?;
        // If a file was published between the read and the update, the index gets its entry here.
        match info(self) {
            after if after != before => self.index().reconcile_entry(key, after),
            _ => Ok(()),
        }
    }

    /// Returns the replica and piece files of a stripe that are in the index and have no damage
    /// note, ordered by name.
    pub fn list_undamaged_files(&self, stripe: StripeId) -> Result<Vec<FileInfo>, StoreError> {
        let mut found = self.index().list_stripe_files(stripe)?;
        let notes = self.lock_damage_notes();
        found.retain(|info| !notes.contains_key(&info.key()));
        Ok(found)
    }

    /// Returns the replica and piece files of a stripe that the folder has or the index names, with
    /// their lengths in bytes. A removal uses this list. A file that only the index names has
    /// length 0.
    pub fn list_all_files(&self, stripe: StripeId) -> Result<Vec<(FileKey, u64)>, StoreError> {
        let entries = none_if_not_found(self.disk().list(&stripe_dir(stripe)))?.unwrap_or_default();
        let on_disk = entries.into_iter().filter(|entry| !entry.is_dir);
        let key = |entry: DiskEntry| {
            let name = entry.name.parse().ok()?;
            Some((FileKey { stripe, name }, entry.len_bytes))
        };
        let mut files: Vec<(FileKey, u64)> = on_disk.filter_map(key).collect();
        // A failed index contributes nothing; the next start corrects it.
        for info in self.index().list_stripe_files(stripe).unwrap_or_default() {
            if files.iter().all(|(key, _)| *key != info.key()) {
                files.push((info.key(), 0));
            }
        }
        Ok(files)
    }

    /// Returns the shards of which this folder holds anything, in order, from the first one after
    /// `after`. All names are read at once.
    pub fn shards_after(
        &self,
        after: Option<ShardId>,
    ) -> Result<impl Iterator<Item = ShardId>, StoreError> {
        // Read the slots first: a tombstone's file is written before its slot is freed.
        let in_slots = self.shards_in_slots();
        let names = self.disk().list_folders(SHARDS)?;
        let mut shards: Vec<ShardId> = names.iter().filter_map(|name| name.parse().ok()).collect();
        if !in_slots.is_empty() {
            shards.extend(in_slots);
            shards.sort_unstable();
            shards.dedup();
        }
        Ok(shards.into_iter().filter(move |shard| after.is_none_or(|after| *shard > after)))
    }

    /// Returns at most the first `limit` of [`Store::shards_after`].
    pub fn list_shards(
        &self,
        after: Option<ShardId>,
        limit: usize,
    ) -> Result<Vec<ShardId>, StoreError> {
        Ok(self.shards_after(after)?.take(limit).collect())
    }

    /// Returns at most `limit` stripes of a shard of which this folder holds anything, in order,
    /// from the first one after `after`.
    pub fn list_stripes(
        &self,
        shard: ShardId,
        after: Option<u32>,
        limit: usize,
    ) -> Result<Vec<StripeId>, StoreError> {
        let names =
            none_if_not_found(self.disk().list_folders(&shard_dir(shard)))?.unwrap_or_default();
        let stripes = names.iter().filter_map(|name| parse_stripe_index(name));
        let stripes = stripes.filter(|index| after.is_none_or(|after| *index > after));
        Ok(stripes.map(|index| StripeId { shard, index }).take(limit).collect())
    }

    /// Returns the findings of the last open.
    pub fn open_findings(&self) -> OpenFindings {
        self.inner.open_findings.get().cloned().unwrap_or_default()
    }

    /// Returns the totals of the folder.
    pub fn totals(&self) -> Totals {
        self.index().totals()
    }

    /// Returns the size of the disk and its free space.
    pub fn disk_space(&self) -> Result<Space, StoreError> {
        Ok(self.disk().space()?)
    }
}

#[cfg(test)]
impl Store {
    /// Returns the store of node `n1` on an empty disk of 1 MiB in memory.
    pub fn new_in_memory() -> Self {
        let disk = crate::store::MemoryDisk::new(1 << 20);
        let lock = disk.lock(LOCK_FILE).unwrap();
        let (kv, name) = (Arc::new(crate::store::MemoryKv::new()), "n1".parse().unwrap());
        Self::open(Arc::new(disk), lock, kv, ClusterId([1; 16]), &name).unwrap().0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::store::kv::{Batch, KvError, Pair};
    use crate::store::{BlockSpec, MemoryDisk, MemoryKv};

    /// A key-value map that fails from some point on, as sled does.
    #[derive(Default)]
    struct Failing(MemoryKv, AtomicBool);

    impl Failing {
        fn check(&self) -> Result<(), KvError> {
            let failed = || KvError::Failed { path: "index".into() };
            if self.1.load(Ordering::Relaxed) { Err(failed()) } else { Ok(()) }
        }
    }

    impl Kv for Failing {
        fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
            self.check().and_then(|()| self.0.get(key))
        }
        fn apply(&self, batch: &Batch) -> Result<(), KvError> {
            self.check().and_then(|()| self.0.apply(batch))
        }
        fn scan(
            &self,
            prefix: &[u8],
            after: Option<&[u8]>,
            limit: usize,
        ) -> Result<Vec<Pair>, KvError> {
            self.check().and_then(|()| self.0.scan(prefix, after, limit))
        }
    }

    #[test]
    fn what_the_index_missed_is_found_and_goes() {
        let disk = MemoryDisk::new(1 << 20);
        let (lock, name) = (disk.lock(LOCK_FILE).unwrap(), "n1".parse().unwrap());
        let kv = Arc::new(Failing::default());
        let cluster = ClusterId([1; 16]);
        let (store, _) = Store::open(Arc::new(disk), lock, kv.clone(), cluster, &name).unwrap();
        let stripe = StripeId { shard: ShardId([5; 16]), index: 3 };
        let write = |block| {
            let spec = BlockSpec { stripe, block, layout: 1, len_bytes: 3 };
            let mut writer = store.create_block_writer(spec, None)?;
            writer.write(b"abc")?;
            writer.finish(None)
        };
        write(1).unwrap();
        kv.1.store(true, Ordering::Relaxed);
        assert!(matches!(write(2), Err(StoreError::Index(_))));
        let keys = [1, 2].map(|block| FileKey::replica(stripe, block));
        let files = store.list_all_files(stripe).unwrap();
        assert_eq!(files.iter().map(|(key, _)| *key).collect::<Vec<_>>(), keys);
        for (key, len_bytes) in files {
            assert_eq!(len_bytes, store.open_undamaged_file(key).unwrap().index_entry().file_bytes);
            assert!(store.remove_file(key).unwrap());
        }
        assert_eq!(store.list_all_files(stripe).unwrap(), []);
        // An index that answers again still names the file that was written before it failed. The
        // next removal corrects it.
        kv.1.store(false, Ordering::Relaxed);
        assert_eq!(store.list_all_files(stripe).unwrap(), [(keys[0], 0)]);
        assert!(!store.remove_file(keys[0]).unwrap());
        assert_eq!(store.list_all_files(stripe).unwrap(), []);
        assert_eq!(store.list_shards(None, 9).unwrap(), []);
    }
}
