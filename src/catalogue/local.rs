//! The engine inside the catalogue server, over its key-value store.
//!
//! Work on the entries runs on worker threads, off the network's threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::database::{Database, transfer_error};
use super::database_format::{DbWriter, read_epoch_and_id};
use super::leases::Leases;
use super::record_access::{NODES, NOTHING_FORGOTTEN, parse_record, read_record, ring_change_key};
use super::{Catalogue, CatalogueError, Entry, Guard, GuardedOutcome, MAX_PAGE, SetOutcome};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::format::records::{LeaveState, Node, Record, RingChange};
use crate::id::{DbId, Epoch, LeaseId, NodeId, PeerName};
use crate::kind::ErrorKind;
use crate::store::kv::Kv;
use crate::wire::calls::{DbChecksum, NodeView, RegisterAnswer};
use crate::workers::Workers;

/// Maximum number of registered nodes.
const MAX_NODES: usize = 4096;
/// Number of entries and pages that are read at once.
const READS_AT_ONCE: usize = 4;
/// How long writes stay paused after each request of the daemon that copies the database.
const PAUSE: Duration = Duration::from_secs(10);
/// How long a change waits for the end of a pause before it is refused.
const PAUSE_LIMIT: Duration = Duration::from_secs(3);
/// Interval between checks whether the pause has ended.
const PAUSE_CHECK: Duration = Duration::from_millis(20);

/// The engine of the catalogue server.
pub struct LocalCatalogue {
    database: Arc<Database>,
    /// Workers with one slot: a change waits for other changes and their syncs, a read waits for
    /// neither.
    write_workers: Workers,
    read_workers: Workers,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    epoch: Epoch,
    db_id: DbId,
    leases: Mutex<Leases>,
    paused_until: Mutex<Duration>,
}

impl LocalCatalogue {
    /// Opens the catalogue in `kv`. If `kv` has none and `seen_epoch` is 0, creates one of epoch 1.
    /// `lease_period` is the lifetime of leases. The engine gets worker slots of its own, beside
    /// those of `workers`.
    ///
    /// A node that has seen an epoch was part of a cluster. An empty or older database is then
    /// not the cluster's, and is refused with [`CatalogueError::StaleDatabase`]. A database whose
    /// sum is wrong is refused with [`CatalogueError::Incomplete`].
    pub fn open(
        kv: Arc<dyn Kv>,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        workers: &Workers,
        lease_period: Duration,
        seen_epoch: Epoch,
    ) -> Result<Self, CatalogueError> {
        let (epoch, map) = match read_epoch_and_id(&*kv)? {
            Some((epoch, map)) if epoch >= seen_epoch => (epoch, map),
            None if seen_epoch == Epoch::default() => {
                let map = DbId(entropy.id());
                let mut first = DbWriter::for_copy(kv.clone(), 0);
                first.put_entry(NOTHING_FORGOTTEN, &[])?;
                first.finish(Epoch(1), map)?;
                (Epoch(1), map)
            }
            found => {
                let found = found.map_or(Epoch::default(), |(epoch, _)| epoch);
                return Err(CatalogueError::StaleDatabase { seen: seen_epoch, found });
            }
        };
        let leases = Leases::new(lease_period, clock.now());
        Ok(Self {
            database: Arc::new(Database::open(kv)?),
            write_workers: workers.beside(1),
            read_workers: workers.beside(READS_AT_ONCE),
            clock,
            entropy,
            epoch,
            db_id: map,
            leases: Mutex::new(leases),
            paused_until: Mutex::default(),
        })
    }

    /// Returns the id of the database.
    pub fn db_id(&self) -> DbId {
        self.db_id
    }

    /// Returns the revision of the last change.
    pub fn revision(&self) -> u64 {
        self.database.revision()
    }

    /// Returns whether the catalogue is read-only, because it has not heard from enough nodes.
    pub fn is_read_only(&self) -> bool {
        self.database.is_read_only()
    }

    /// Makes the catalogue read-only, or allows changes.
    pub fn set_read_only(&self, is_read_only: bool) {
        self.database.set_read_only(is_read_only);
    }

    /// Pauses changes for the next ten seconds. Returns the checksum of the entries. A change that
    /// had already begun may still be made.
    ///
    /// # Errors
    /// Fails with kind `Unavailable` if the catalogue is read-only: another catalogue may have begun
    /// without its knowledge.
    pub async fn pause_writes(&self) -> Result<DbChecksum, CatalogueError> {
        self.database.refuse_if_read_only()?;
        *self.paused_until.lock().unwrap_or_else(PoisonError::into_inner) =
            self.clock.now() + PAUSE;
        self.run_on_database(&self.write_workers, |table| Ok(table.checksum())).await
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the server's process runs, so that a time in which it did not run ends no lease.
    /// The server calls this four times in each lease period.
    pub fn note_heartbeat(&self) {
        self.leases().note_heartbeat(self.clock.now());
    }

    fn is_node_live(&self, node: NodeId) -> bool {
        self.leases().is_node_live(node, self.clock.now())
    }

    /// Sets the ring change of a node that registers to *returned* if the node has left, or if it
    /// is leaving and `lease_had_ended`. If the node is being removed at that time, its removal
    /// begins anew.
    async fn record_return(
        &self,
        name: &PeerName,
        lease_had_ended: bool,
    ) -> Result<(), CatalogueError> {
        let key = ring_change_key(name);
        while let Some((change, revision)) = read_record::<RingChange>(self, &key).await?
            && (change.state == LeaveState::Left
                || (change.state == LeaveState::Leaving && lease_had_ended))
        {
            tracing::warn!(node = %name, state = ?change.state, "a node that was leaving or had left has registered again: it is a member again");
            let returned = RingChange { state: LeaveState::Returned, ..change };
            let value =
                returned.to_bytes().map_err(|error| CatalogueError::Store(error.to_string()))?;
            self.compare_and_set(&key, Some(revision), Some(value)).await?;
        }
        Ok(())
    }

    /// Waits until changes are no longer paused. A transfer completes or fails soon, so this wait
    /// spares most callers a retry. Returns an error of kind `Busy` if the pause outlasts
    /// [`PAUSE_LIMIT`].
    async fn wait_while_paused(&self) -> Result<(), CatalogueError> {
        let until = self.clock.now() + PAUSE_LIMIT;
        loop {
            let now = self.clock.now();
            if now >= *self.paused_until.lock().unwrap_or_else(PoisonError::into_inner) {
                return Ok(());
            }
            if now >= until {
                return Err(transfer_error());
            }
            self.clock.sleep(PAUSE_CHECK).await;
        }
    }

    /// Refuses changes from now on, for a transfer, provided that `copy_checksum` is the checksum
    /// of the current entries.
    ///
    /// # Errors
    /// Fails with kind `Exists` if the copy differs from this database. Nothing has changed here
    /// then.
    pub async fn stop_writes_for_transfer(
        &self,
        copy_checksum: DbChecksum,
    ) -> Result<(), CatalogueError> {
        self.run_on_database(&self.write_workers, move |table| {
            table.stop_writes_for_transfer(copy_checksum)
        })
        .await
    }

    /// Ends the pause after a transfer. If `has_failed` is set, the transfer failed and this
    /// catalogue accepts changes again; otherwise the catalogue is served elsewhere.
    pub fn end_transfer(&self, has_failed: bool) {
        if has_failed {
            self.database.cancel_transfer();
        }
        *self.paused_until.lock().unwrap_or_else(PoisonError::into_inner) = Duration::ZERO;
    }

    async fn run_on_database<T: Send + 'static>(
        &self,
        workers: &Workers,
        work: impl FnOnce(&Database) -> Result<T, CatalogueError> + Send + 'static,
    ) -> Result<T, CatalogueError> {
        let table = self.database.clone();
        let done = workers.run(move || work(&table)).await;
        done.map_err(|died| CatalogueError::Store(died.to_string()))?
    }
}

#[async_trait]
impl Catalogue for LocalCatalogue {
    fn epoch(&self) -> Epoch {
        self.epoch
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
        let key = key.to_owned();
        self.run_on_database(&self.read_workers, move |table| table.get(&key)).await
    }

    async fn compare_and_set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError> {
        self.wait_while_paused().await?;
        let key = key.to_owned();
        self.run_on_database(&self.write_workers, move |table| {
            table.compare_and_set(&key, expected, value)
        })
        .await
    }

    async fn compare_and_set_guarded(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Vec<u8>,
        guard: &Guard,
    ) -> Result<GuardedOutcome, CatalogueError> {
        self.wait_while_paused().await?;
        let (key, guard) = (key.to_owned(), guard.clone());
        self.run_on_database(&self.write_workers, move |table| {
            table.compare_and_set_guarded(&key, expected, value, &guard)
        })
        .await
    }

    async fn list_entries(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        self.run_on_database(&self.read_workers, move |table| {
            table.list_entries(&prefix, after.as_deref(), limit)
        })
        .await
    }

    async fn grant_lease(&self) -> Result<(LeaseId, Duration), CatalogueError> {
        self.database.refuse_if_read_only()?;
        let lease = LeaseId(self.entropy.id());
        let mut leases = self.leases();
        leases.grant(lease, self.clock.now())?;
        Ok((lease, leases.period()))
    }

    async fn renew_lease(&self, lease: LeaseId) -> Result<bool, CatalogueError> {
        self.leases().renew(lease, self.clock.now())
    }

    async fn is_lease_alive(&self, lease: LeaseId) -> Result<bool, CatalogueError> {
        Ok(self.leases().is_alive(lease, self.clock.now()))
    }

    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), CatalogueError> {
        self.leases().revoke(lease, self.clock.now())
    }

    async fn register_node(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError> {
        self.database.refuse_if_read_only()?;
        let key = format!("{NODES}{}", node.name);
        let id = NodeId::of(&node.name);
        let lease_had_ended = !self.is_node_live(id) || self.get(&key).await?.is_none();
        self.record_return(&node.name, lease_had_ended).await?;
        loop {
            let current = self.get(&key).await?;
            let known = current
                .as_ref()
                .map(|entry| parse_record::<Node>(&key, &entry.value))
                .transpose()?;
            if known.as_ref() == Some(node) {
                break;
            }
            if known.as_ref().is_some_and(|known| known.storage && !node.storage) {
                let message = format!(
                    "node {} is registered as a storage node: stop it, `rapidraid cluster remove-node`, and start it again",
                    node.name
                );
                return Err(CatalogueError::Refused { kind: ErrorKind::Exists, message });
            }
            if known.is_none() {
                let others = self.list_nodes().await?;
                if others.len() >= MAX_NODES
                    || others.iter().any(|view| NodeId::of(&view.node.name) == id)
                {
                    let message =
                        format!("node {} cannot be added: rename it, or remove others", node.name);
                    return Err(CatalogueError::Refused { kind: ErrorKind::Exists, message });
                }
            }
            let value =
                node.to_bytes().map_err(|error| CatalogueError::Store(error.to_string()))?;
            let expected = current.map(|entry| entry.revision);
            if let SetOutcome::Set(_) = self.compare_and_set(&key, expected, Some(value)).await? {
                break;
            }
        }
        let mut leases = self.leases();
        leases.renew_node(id, self.clock.now());
        Ok(RegisterAnswer {
            epoch: self.epoch,
            map: self.db_id,
            revision: self.revision(),
            members: self.database.members_revision(),
            lease_ms: leases.period().as_millis() as u64,
        })
    }

    async fn list_nodes(&self) -> Result<Vec<NodeView>, CatalogueError> {
        let mut views = Vec::new();
        let mut after: Option<String> = None;
        loop {
            let page = self.list_entries(NODES, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            for (key, entry) in &page {
                let node: Node = parse_record(key, &entry.value)?;
                let live = self.is_node_live(NodeId::of(&node.name));
                views.push(NodeView { node, live });
            }
        }
        Ok(views)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::entropy::SeededEntropy;
    use crate::store::kv::Batch;
    use crate::store::{Disk, MemoryKv, RealDisk, SledKv};

    const LEASE: Duration = Duration::from_secs(10);

    fn open(kv: &Arc<MemoryKv>) -> Result<LocalCatalogue, CatalogueError> {
        let (clock, entropy) = (SystemClock::new(), Arc::new(SeededEntropy::new(1)));
        LocalCatalogue::open(
            kv.clone(),
            clock,
            entropy,
            &Workers::inline(),
            LEASE,
            Epoch::default(),
        )
    }

    #[tokio::test]
    async fn a_set_needs_the_revision_that_is_there() {
        let kv = Arc::new(MemoryKv::new());
        let catalogue = open(&kv).unwrap();
        let set = async |key: &str, expected, value: &[u8]| {
            catalogue.compare_and_set(key, expected, Some(value.to_vec())).await.unwrap()
        };
        assert_eq!(set("a", None, b"1").await, SetOutcome::Set(2));
        let now = Some(Entry { value: b"1".to_vec(), revision: 2 });
        assert_eq!(set("a", None, b"2").await, SetOutcome::Conflict(now.clone()));
        assert_eq!(set("a", Some(7), b"2").await, SetOutcome::Conflict(now));
        assert_eq!(set("a", Some(2), b"2").await, SetOutcome::Set(3));
        assert_eq!(set("b", Some(1), b"2").await, SetOutcome::Conflict(None));
        assert_eq!(
            catalogue.compare_and_set("a", Some(3), None).await.unwrap(),
            SetOutcome::Set(4)
        );
        assert_eq!(catalogue.get("a").await.unwrap(), None);
        // Revisions continue after a restart, so that no old revision ever fits a new value.
        drop(catalogue);
        let again = open(&kv).unwrap();
        assert_eq!(
            again.compare_and_set("a", None, Some(vec![9])).await.unwrap(),
            SetOutcome::Set(5)
        );
    }

    #[tokio::test]
    async fn a_guarded_set_needs_both_revisions_and_compares_its_own_key_first() {
        let kv = Arc::new(MemoryKv::new());
        let catalogue = open(&kv).unwrap();
        let set = async |expected, value: &[u8], revision| {
            let guard = Guard { key: "guard".into(), revision };
            let value = value.to_vec();
            catalogue.compare_and_set_guarded("a", expected, value, &guard).await.unwrap()
        };
        assert_eq!(set(None, b"1", Some(1)).await, GuardedOutcome::GuardConflict);
        assert_eq!(catalogue.get("a").await.unwrap(), None);
        assert_eq!(set(None, b"1", None).await, GuardedOutcome::Set(2));
        catalogue.compare_and_set("guard", None, Some(vec![0])).await.unwrap();
        // The guard has changed too, but a repeated call must find its own value.
        let now = Some(Entry { value: b"1".to_vec(), revision: 2 });
        assert_eq!(set(None, b"1", None).await, GuardedOutcome::Conflict(now));
        assert_eq!(set(Some(2), b"2", None).await, GuardedOutcome::GuardConflict);
        assert_eq!(set(Some(2), b"2", Some(3)).await, GuardedOutcome::Set(4));
        open(&kv).unwrap();
    }

    #[tokio::test]
    async fn a_map_that_lost_or_changed_an_entry_is_not_opened() {
        let kv = Arc::new(MemoryKv::new());
        let catalogue = open(&kv).unwrap();
        for key in ["a", "b", "c"] {
            catalogue.compare_and_set(key, None, Some(key.into())).await.unwrap();
        }
        open(&kv).unwrap();
        let b = kv.get(b"k/b").unwrap().unwrap();
        kv.apply(Batch::new().delete("k/b")).unwrap();
        assert!(matches!(open(&kv), Err(CatalogueError::Incomplete { found: 3 })));
        kv.apply(Batch::new().put("k/b", [&b[..], b"!"].concat())).unwrap();
        assert!(matches!(open(&kv), Err(CatalogueError::Incomplete { found: 4 })));
        kv.apply(Batch::new().put("k/b", b)).unwrap();
        open(&kv).unwrap();
    }

    #[tokio::test]
    async fn a_set_that_could_not_sync_is_the_last_and_the_map_opens_again() {
        let folder = tempfile::tempdir().unwrap();
        let lock = RealDisk::open(folder.path()).unwrap().lock("lock").unwrap();
        let path = folder.path().join("map");
        let open_kv = || SledKv::open(&lock, &path, 1 << 20).unwrap().0;
        let open = |kv| {
            let (clock, entropy) = (SystemClock::new(), Arc::new(SeededEntropy::new(1)));
            let workers = Workers::new(2);
            LocalCatalogue::open(Arc::new(kv), clock, entropy, &workers, LEASE, Epoch::default())
                .unwrap()
        };
        let catalogue = open(open_kv());
        catalogue.compare_and_set("a", None, Some(vec![1])).await.unwrap();
        drop(catalogue);
        let mut kv = open_kv();
        kv.fail_syncs();
        let catalogue = open(kv);
        for key in ["b", "c"] {
            let refused = catalogue.compare_and_set(key, None, Some(vec![2])).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Io, "{refused}");
        }
        assert_eq!(catalogue.get("a").await.unwrap_err().kind(), ErrorKind::Io);
        drop(catalogue);
        // `b` may or may not be there. `a` is, and the sum is right.
        assert!(open(open_kv()).get("a").await.unwrap().is_some());
    }

    #[tokio::test]
    async fn an_empty_or_older_map_is_not_taken_for_the_clusters() {
        let open = |kv: &Arc<MemoryKv>, seen| {
            let (clock, entropy) = (SystemClock::new(), Arc::new(SeededEntropy::new(1)));
            LocalCatalogue::open(kv.clone(), clock, entropy, &Workers::inline(), LEASE, Epoch(seen))
        };
        let kv = Arc::new(MemoryKv::new());
        for _ in 0..2 {
            let found = open(&kv, 1).err().map(|error| error.kind());
            assert_eq!(found, Some(ErrorKind::Lost));
        }
        open(&kv, 0).unwrap();
        open(&kv, 1).unwrap();
        assert!(matches!(open(&kv, 2), Err(CatalogueError::StaleDatabase { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn leases_end_unless_they_are_kept_and_a_restart_renews_them() {
        let kv = Arc::new(MemoryKv::new());
        let catalogue = open(&kv).unwrap();
        let (lease, period) = catalogue.grant_lease().await.unwrap();
        tokio::time::advance(period / 2).await;
        assert!(catalogue.renew_lease(lease).await.unwrap());
        tokio::time::advance(period * 3 / 4).await;
        assert!(catalogue.is_lease_alive(lease).await.unwrap());
        tokio::time::advance(period / 2).await;
        assert!(!catalogue.renew_lease(lease).await.unwrap());
        let again = open(&kv).unwrap();
        assert!(again.is_lease_alive(lease).await.unwrap());
        tokio::time::advance(period).await;
        assert!(!again.is_lease_alive(lease).await.unwrap());
        let (revoked, _) = again.grant_lease().await.unwrap();
        again.revoke_lease(revoked).await.unwrap();
        assert!(!again.is_lease_alive(revoked).await.unwrap());
        // Right after a start, when unknown leases count as alive, a revoked lease is remembered
        // too.
        let third = open(&kv).unwrap();
        let older = LeaseId([9; 16]);
        third.revoke_lease(older).await.unwrap();
        third.grant_lease().await.unwrap();
        assert!(!third.is_lease_alive(older).await.unwrap());
    }
}
