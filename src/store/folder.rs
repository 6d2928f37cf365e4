//! The data folder itself: whose it is, its lock, its epoch, its files.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::disk::{Disk, DiskEntry, DiskLock, Space};
use super::index::{FileInfo, Index, Totals};
use super::kv::{Kv, Opened, SledKv};
use super::names::{
    Names, QUARANTINE, SHARDS, TMP, file_path, parse_stripe_index, shard_dir, stripe_dir,
};
use super::real_disk::RealDisk;
use super::small::{if_found, is_small_name};
use super::stored_file::StoredFile;
use crate::format::FormatError;
use crate::format::envelope::{RecordKind, open_record, seal_record};
use crate::format::file::{FileKey, FileName};
use crate::id::{ClusterId, Epoch, NodeId, PeerName, ShardId, StripeId};
use crate::kind::Kind;

/// The name of the lock file: [`Disk::lock`] it before anything else in the folder is opened.
pub const LOCK_FILE: &str = "lock";
/// The folder of the index.
pub const INDEX_DIR: &str = "index";

const IDENTITY: &str = "node.id";
const EPOCH: &str = "epoch";
/// The layout of the folder.
const FOLDER_FORMAT: u8 = 1;
/// The end of the name of a note in quarantine.
const NOTE: &str = ".why";

/// The body of `node.id`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct NodeIdentity {
    cluster: ClusterId,
    name: PeerName,
    format: u8,
}

/// What [`Store::open`] found when it compared index and folders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Reconciled {
    /// Files that the index did not have, or had otherwise.
    pub added: u64,
    /// Entries without a file.
    pub dropped: u64,
    /// Files that proved nothing and are in quarantine now.
    pub quarantined: u64,
    /// Files that could not be read now (disk errors, a later release's): left, and not in the index.
    pub unreadable: u64,
    /// Names that are not ours: left alone.
    pub strangers: u64,
}

/// The data folder of a node. Clones are the same folder.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    disk: Arc<dyn Disk>,
    names: Names,
    index: Index,
    cluster: ClusterId,
    node: NodeId,
    epoch: Mutex<Epoch>,
    next_quarantine: AtomicU64,
    _lock: DiskLock,
}

impl Store {
    /// Opens a folder of this machine: lock, index, then [`Store::open`].
    pub fn open_folder(
        path: impl Into<PathBuf>,
        index_cache_bytes: u64,
        cluster: ClusterId,
        name: &PeerName,
    ) -> Result<(Self, Reconciled, Opened), StoreError> {
        let disk = RealDisk::open(path)?;
        let lock = disk.lock(LOCK_FILE)?;
        let (kv, opened) = SledKv::open(&lock, &disk.root().join(INDEX_DIR), index_cache_bytes)?;
        let (store, reconciled) = Self::open(Arc::new(disk), lock, Arc::new(kv), cluster, name)?;
        Ok((store, reconciled, opened))
    }

    /// Opens the data folder of node `name` of `cluster`; an empty one becomes that node's. `lock` is the lock
    /// of [`LOCK_FILE`], taken before `kv` was opened.
    ///
    /// Whatever can be seen is made durable first (a killed process may have left names that nobody synced),
    /// `tmp/` is emptied, and the index is brought in line with the folders.
    pub fn open(
        disk: Arc<dyn Disk>,
        lock: DiskLock,
        kv: Arc<dyn Kv>,
        cluster: ClusterId,
        name: &PeerName,
    ) -> Result<(Self, Reconciled), StoreError> {
        disk.sync_all()?;
        let identity = NodeIdentity { cluster, name: name.clone(), format: FOLDER_FORMAT };
        let inner = Inner {
            names: Names::new(disk.clone()),
            index: Index::new(disk.clone(), kv),
            disk,
            cluster,
            node: NodeId::of(name),
            epoch: Mutex::default(),
            next_quarantine: AtomicU64::new(1),
            _lock: lock,
        };
        let store = Self { inner: Arc::new(inner) };
        store.check_identity(&identity)?;
        if let Some(epoch) = store.get_sealed(EPOCH, RecordKind::Epoch)? {
            *store.epoch_cell() = epoch;
        }
        let reconciled = store.reconcile()?;
        Ok((store, reconciled))
    }

    fn check_identity(&self, ours: &NodeIdentity) -> Result<(), StoreError> {
        let found: Option<NodeIdentity> = self.get_sealed(IDENTITY, RecordKind::NodeIdentity)?;
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
                let files = if_found(self.disk().list(SHARDS))?.unwrap_or_default();
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
            self.put_sealed(IDENTITY, RecordKind::NodeIdentity, ours)?;
        }
        Ok(())
    }

    fn get_sealed<T: for<'a> Deserialize<'a>>(
        &self,
        path: &str,
        kind: RecordKind,
    ) -> Result<Option<T>, StoreError> {
        let Some(bytes) = self.get_record(path)? else { return Ok(None) };
        let record = open_record(kind, 1..=1, &bytes);
        record.map(Some).map_err(|source| StoreError::Format { path: path.to_owned(), source })
    }

    fn put_sealed<T: Serialize>(
        &self,
        path: &str,
        kind: RecordKind,
        body: &T,
    ) -> Result<(), StoreError> {
        let bytes = seal_record(kind, 1, body)
            .map_err(|source| StoreError::Format { path: path.to_owned(), source })?;
        self.put_record(path, &bytes).map(drop)
    }

    pub(super) fn disk(&self) -> &dyn Disk {
        self.inner.disk.as_ref()
    }

    pub(super) fn names(&self) -> &Names {
        &self.inner.names
    }

    pub(super) fn index(&self) -> &Index {
        &self.inner.index
    }

    /// The cluster that the folder belongs to.
    pub fn cluster(&self) -> ClusterId {
        self.inner.cluster
    }

    /// The node that the folder belongs to.
    pub fn node(&self) -> NodeId {
        self.inner.node
    }

    fn epoch_cell(&self) -> std::sync::MutexGuard<'_, Epoch> {
        self.inner.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The highest catalogue epoch that this node has seen.
    pub fn epoch(&self) -> Epoch {
        *self.epoch_cell()
    }

    /// Notes that `epoch` was seen, durably when it is a new one; refuses one that is over.
    pub fn raise_epoch(&self, epoch: Epoch) -> Result<(), StoreError> {
        let mut seen = self.epoch_cell();
        if epoch < *seen {
            return Err(StoreError::StaleEpoch { seen: *seen, given: epoch });
        }
        if epoch > *seen {
            self.put_sealed(EPOCH, RecordKind::Epoch, &epoch)?;
            *seen = epoch;
        }
        Ok(())
    }

    /// Opens a file; its header and tree are checked, its data is when it is read.
    pub fn open_file(&self, key: FileKey) -> Result<StoredFile, StoreError> {
        StoredFile::open(self.disk(), self.cluster(), key)
    }

    /// Removes a file and returns when that is durable; `false` when there was none. Whether it *may* go is
    /// the caller's affair.
    pub fn remove(&self, key: FileKey) -> Result<bool, StoreError> {
        let removed = if_found(self.names().remove(&file_path(key)))?.is_some();
        self.index().update(key, None)?;
        Ok(removed)
    }

    /// Moves a file out of the way, with a note that says why. Nothing in quarantine is ever deleted.
    pub fn quarantine(&self, key: FileKey, why: &str) -> Result<(), StoreError> {
        self.move_to_quarantine(key, why)?;
        self.index().count_quarantined();
        self.index().update(key, None)
    }

    fn move_to_quarantine(&self, key: FileKey, why: &str) -> Result<(), StoreError> {
        let number = self.inner.next_quarantine.fetch_add(1, Ordering::Relaxed);
        let aside = format!("{QUARANTINE}/{number:06}-{}", key.to_string().replace('/', "-"));
        self.names().move_out(&file_path(key), &aside)?;
        tracing::warn!(%key, aside, why, "moved a file to quarantine");
        let note: String = format!("{key}\n{why}\n").chars().take(4096).collect();
        self.put_record(&format!("{aside}{NOTE}"), note.as_bytes()).map(drop)
    }

    /// The replica and piece files of a stripe, by name, as the index has them.
    pub fn find(&self, stripe: StripeId) -> Result<Vec<FileInfo>, StoreError> {
        self.index().find(stripe)
    }

    /// At most `limit` shards of which anything is here, in order, from behind `after`.
    pub fn list_shards(
        &self,
        after: Option<ShardId>,
        limit: usize,
    ) -> Result<Vec<ShardId>, StoreError> {
        let shards = self.disk().list(SHARDS)?.into_iter().filter(|entry| entry.is_dir);
        let shards = shards.filter_map(|entry| entry.name.parse().ok());
        Ok(shards.filter(|shard| after.is_none_or(|after| *shard > after)).take(limit).collect())
    }

    /// At most `limit` stripes of a shard of which anything is here, in order, from behind `after`.
    pub fn list_stripes(
        &self,
        shard: ShardId,
        after: Option<u32>,
        limit: usize,
    ) -> Result<Vec<StripeId>, StoreError> {
        let entries = if_found(self.disk().list(&shard_dir(shard)))?.unwrap_or_default();
        let stripes = entries.iter().filter_map(stripe_index);
        let stripes = stripes.filter(|index| after.is_none_or(|after| *index > after));
        Ok(stripes.map(|index| StripeId { shard, index }).take(limit).collect())
    }

    /// What the folder holds, in numbers.
    pub fn totals(&self) -> Totals {
        self.index().totals()
    }

    /// How much space the disk has.
    pub fn space(&self) -> Result<Space, StoreError> {
        Ok(self.disk().space()?)
    }

    /// Forgets the index and makes it again from the files. Writers wait at their end until it is done.
    pub fn rebuild_index(&self) -> Result<Reconciled, StoreError> {
        self.index().retain_stripes(|_| false)?;
        self.reconcile()
    }

    /// Brings the index in line with the folders.
    fn reconcile(&self) -> Result<Reconciled, StoreError> {
        let mut walk = Walk { store: self, report: Reconciled::default(), seen: HashSet::new() };
        let report = self.index().exclusively(|totals| {
            let quarantined = self.quarantined()?;
            walk.shards(totals)?;
            walk.report.dropped +=
                self.index().retain_stripes(|stripe| walk.seen.contains(&stripe))?;
            totals.quarantined = quarantined + walk.report.quarantined;
            Ok::<_, StoreError>(walk.report)
        })?;
        if report != Reconciled::default() {
            tracing::warn!(?report, "the index was not in line with the files");
        }
        Ok(report)
    }

    /// Counts what is in quarantine, and makes sure that no number is used twice.
    fn quarantined(&self) -> Result<u64, StoreError> {
        let entries = self.disk().list(QUARANTINE)?;
        let number = |entry: &DiskEntry| entry.name.split('-').next()?.parse::<u64>().ok();
        let highest = entries.iter().filter_map(number).max().unwrap_or(0);
        self.inner.next_quarantine.fetch_max(highest.saturating_add(1), Ordering::Relaxed);
        Ok(entries.iter().filter(|entry| !entry.name.ends_with(NOTE)).count() as u64)
    }
}

fn stripe_index(entry: &DiskEntry) -> Option<u32> {
    if entry.is_dir { parse_stripe_index(&entry.name) } else { None }
}

/// One walk over `shards/`.
struct Walk<'a> {
    store: &'a Store,
    report: Reconciled,
    seen: HashSet<StripeId>,
}

impl Walk<'_> {
    fn shards(&mut self, totals: &mut Totals) -> Result<(), StoreError> {
        for entry in self.store.disk().list(SHARDS)? {
            match entry.name.parse().ok().filter(|_| entry.is_dir) {
                Some(shard) => self.shard(shard, totals)?,
                None => self.report.strangers += 1,
            }
        }
        Ok(())
    }

    fn shard(&mut self, shard: ShardId, totals: &mut Totals) -> Result<(), StoreError> {
        for entry in self.store.disk().list(&shard_dir(shard))? {
            match stripe_index(&entry) {
                Some(index) => self.stripe(StripeId { shard, index }, totals)?,
                None => self.small(&entry, totals),
            }
        }
        Ok(())
    }

    fn small(&mut self, entry: &DiskEntry, totals: &mut Totals) {
        if !entry.is_dir && is_small_name(&entry.name) {
            totals.small_bytes += entry.len_bytes;
        } else {
            self.report.strangers += 1;
        }
    }

    fn stripe(&mut self, stripe: StripeId, totals: &mut Totals) -> Result<(), StoreError> {
        self.seen.insert(stripe);
        let known = self.store.index().find(stripe)?;
        let mut files = Vec::new();
        for entry in self.store.disk().list(&stripe_dir(stripe))? {
            match entry.name.parse::<FileName>().ok().filter(|_| !entry.is_dir) {
                Some(name) => {
                    files.extend(self.file(FileKey { stripe, name }, entry.len_bytes, &known)?);
                }
                None => self.small(&entry, totals),
            }
        }
        let gone = |info: &&FileInfo| !files.iter().any(|file: &FileInfo| file.key() == info.key());
        self.report.dropped += known.iter().filter(gone).count() as u64;
        self.store.index().replace_stripe(stripe, &files, totals)
    }

    /// A file as the index has it, or as its header says where the index does not fit.
    fn file(
        &mut self,
        key: FileKey,
        file_bytes: u64,
        known: &[FileInfo],
    ) -> Result<Option<FileInfo>, StoreError> {
        let fits = |info: &&FileInfo| info.key() == key && info.file_bytes == file_bytes;
        if let Some(info) = known.iter().find(fits) {
            return Ok(Some(*info));
        }
        match self.store.open_file(key) {
            Ok(file) => {
                self.report.added += 1;
                Ok(Some(file.info()))
            }
            Err(error) if error.kind() == Kind::Corrupt => {
                self.store.move_to_quarantine(key, &error.to_string())?;
                self.report.quarantined += 1;
                Ok(None)
            }
            Err(error) => {
                tracing::error!(%key, %error, "cannot read a file; it is left where it is");
                self.report.unreadable += 1;
                Ok(None)
            }
        }
    }
}
