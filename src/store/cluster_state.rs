//! The records in which a node remembers its cluster: the highest epoch and the catalogue server
//! that claimed it, the last catalogue revision, the nodes, the ring changes, and whether the node
//! has caught up (docs/semantics.md, 8).

use super::StoreError;
use super::data_folder::{EPOCH, Store};
use crate::format::envelope::RecordKind;
use crate::format::records::{CatchUp, Heard, Home, Members, RingChanges, SeenEpoch, Standing};
use crate::id::{DbId, Epoch};

const MEMBERS: &str = "members";
const RING_CHANGES: &str = "ring-changes";
const HEARD: &str = "heard";
const CATCH_UP: &str = "catch-up";

impl Store {
    /// Returns the epoch record on disk, or `None`.
    pub(super) fn read_seen_epoch(&self) -> Result<Option<SeenEpoch>, StoreError> {
        let noted = self.open_sealed_record(EPOCH, RecordKind::Epoch);
        noted.map_err(|error| match error {
            StoreError::Format { path, source } => StoreError::Epoch { path, source },
            other => other,
        })
    }

    /// Returns the record of the last catalogue revision. A record that does not open counts as
    /// missing: the record helps to detect an old copy of the catalogue, but nothing depends on it.
    pub(super) fn read_last_revision(&self) -> Option<Heard> {
        self.open_sealed_record(HEARD, RecordKind::Heard).ok().flatten()
    }

    /// Returns the last revision that this node knows of the catalogue database of the highest seen
    /// epoch; 0 if it knows none.
    pub fn revision_of_current_db(&self) -> u64 {
        let (map, heard) = (self.db_id_of_highest_epoch(), *self.lock_last_revision());
        heard.filter(|heard| map == Some(heard.map)).map_or(0, |heard| heard.revision)
    }

    /// Returns the last catalogue revision that this node knows, of any catalogue database;
    /// revisions grow from one database to the next. The stored list of members is at least as new
    /// as this revision. Returns 0 if it knows none.
    pub fn revision_of_any_db(&self) -> u64 {
        self.lock_last_revision().map_or(0, |heard| heard.revision)
    }

    /// Records durably that the catalogue database `db_id` has reached `revision`. Does nothing if
    /// the node already knows that revision or a higher one of the same database.
    pub fn record_revision(&self, db_id: DbId, revision: u64) -> Result<(), StoreError> {
        // One writer at a time. Readers of the revision do not wait for the disk.
        let _noting = self.lock_revision_writer();
        if self
            .lock_last_revision()
            .is_some_and(|heard| db_id == heard.map && revision <= heard.revision)
        {
            return Ok(());
        }
        let now = Heard { map: db_id, revision };
        self.put_sealed(HEARD, RecordKind::Heard, &now)?;
        *self.lock_last_revision() = Some(now);
        Ok(())
    }

    /// Returns the highest catalogue epoch that this node has seen.
    pub fn highest_seen_epoch(&self) -> Epoch {
        self.lock_seen_epoch().epoch
    }

    /// Returns the catalogue server that claimed the highest seen epoch on this node, if any.
    pub fn server_of_highest_epoch(&self) -> Option<Home> {
        self.lock_seen_epoch().home.clone()
    }

    /// Returns the id of the catalogue database of the highest seen epoch, or `None` if this node does
    /// not know it yet.
    pub fn db_id_of_highest_epoch(&self) -> Option<DbId> {
        self.lock_seen_epoch().map
    }

    /// Records that `epoch` was seen, durably if it is new.
    ///
    /// # Errors
    /// [`StoreError::StaleEpoch`] if a later epoch was seen, and [`StoreError::FarEpoch`] if `epoch`
    /// is implausibly far beyond the highest one seen.
    pub fn raise_highest_seen_epoch(&self, epoch: Epoch) -> Result<(), StoreError> {
        if epoch == self.highest_seen_epoch() {
            return Ok(());
        }
        let _writing = self.lock_epoch_writer();
        let seen = self.highest_seen_epoch();
        refuse_older_epoch(seen, epoch)?;
        if epoch > seen {
            self.write_seen_epoch(SeenEpoch { epoch, map: None, home: None })?;
        }
        Ok(())
    }

    /// Records durably that `db_id` is the catalogue database of `epoch`.
    ///
    /// # Errors
    /// [`StoreError::StaleEpoch`] if a later epoch was seen, [`StoreError::OtherDatabase`] if `epoch`
    /// has another database, and [`StoreError::FarEpoch`] if `epoch` is implausibly far beyond the
    /// highest one seen.
    pub fn record_db_id(&self, epoch: Epoch, db_id: DbId) -> Result<(), StoreError> {
        self.record_db_and_server(epoch, db_id, None)
    }

    /// Records the same as [`record_db_id`](Self::record_db_id), and that `server` serves the
    /// database.
    pub fn claim_epoch(&self, epoch: Epoch, db_id: DbId, server: Home) -> Result<(), StoreError> {
        self.record_db_and_server(epoch, db_id, Some(server))
    }

    fn record_db_and_server(
        &self,
        epoch: Epoch,
        db_id: DbId,
        server: Option<Home>,
    ) -> Result<(), StoreError> {
        let _writing = self.lock_epoch_writer();
        let seen = self.lock_seen_epoch().clone();
        refuse_older_epoch(seen.epoch, epoch)?;
        let is_known = epoch == seen.epoch && seen.map.is_some();
        if is_known && seen.map != Some(db_id) {
            return Err(StoreError::OtherDatabase { epoch });
        }
        if is_known && (server.is_none() || server == seen.home) {
            return Ok(());
        }
        self.write_seen_epoch(SeenEpoch { epoch, map: Some(db_id), home: server })
    }

    /// Writes the seen epoch, durably before a reader sees it. The caller holds the lock of
    /// [`lock_epoch_writer`](Self::lock_epoch_writer).
    fn write_seen_epoch(&self, new: SeenEpoch) -> Result<(), StoreError> {
        let seen = self.highest_seen_epoch();
        if !new.epoch.is_near(seen) {
            return Err(StoreError::FarEpoch { seen, given: new.epoch });
        }
        self.put_sealed(EPOCH, RecordKind::Epoch, &new)?;
        *self.lock_seen_epoch() = new;
        Ok(())
    }

    /// Returns whether this node has caught up with the committed and the removed saves. A data folder
    /// from before catch-up records existed has none; the answer is then [`Standing::Unknown`]. A
    /// record that does not open counts as [`Standing::Behind`].
    pub fn read_catch_up_standing(&self) -> Standing {
        match self.open_sealed_record::<CatchUp>(CATCH_UP, RecordKind::CatchUp) {
            Ok(None) => Standing::Unknown,
            Ok(Some(CatchUp { registered: Some(_) })) => Standing::CaughtUp,
            Ok(Some(_)) | Err(_) => Standing::Behind,
        }
    }

    /// Returns the revision of the registration under which this node caught up, or `None` if it has
    /// not caught up or its record does not open.
    pub fn caught_up_registration(&self) -> Option<u64> {
        let record = self.open_sealed_record::<CatchUp>(CATCH_UP, RecordKind::CatchUp);
        record.ok().flatten().and_then(|record| record.registered)
    }

    /// Records durably that this node has caught up under the registration with revision `registered`.
    ///
    /// # Errors
    /// [`StoreError::StaleEpoch`] if a later epoch than `epoch` was seen.
    pub fn record_caught_up(&self, epoch: Epoch, registered: u64) -> Result<(), StoreError> {
        // The epoch cannot change during the write. A concurrent claim of a later epoch therefore
        // comes after the write, and the rebuild that follows the claim finds the record.
        let _writing = self.lock_epoch_writer();
        refuse_older_epoch(self.highest_seen_epoch(), epoch)?;
        let record = CatchUp { registered: Some(registered) };
        self.put_sealed(CATCH_UP, RecordKind::CatchUp, &record)
    }

    /// Records durably that this node is behind.
    pub fn record_behind(&self) -> Result<(), StoreError> {
        self.put_sealed(CATCH_UP, RecordKind::CatchUp, &CatchUp { registered: None })
    }

    /// Returns the nodes of the cluster as this node last heard; empty if it never did.
    pub fn read_members(&self) -> Result<Members, StoreError> {
        Ok(self.open_sealed_record(MEMBERS, RecordKind::Members)?.unwrap_or_default())
    }

    /// Records the nodes of the cluster durably.
    pub fn put_members(&self, members: &Members) -> Result<(), StoreError> {
        if self.read_members().is_ok_and(|known| known == *members) {
            return Ok(());
        }
        self.put_sealed(MEMBERS, RecordKind::Members, members)
    }

    /// Returns the ring changes of the cluster as this node last heard; empty if it never did.
    pub fn read_ring_changes(&self) -> Result<RingChanges, StoreError> {
        Ok(self.open_sealed_record(RING_CHANGES, RecordKind::RingChanges)?.unwrap_or_default())
    }

    /// Records the ring changes durably.
    pub fn put_ring_changes(&self, changes: &RingChanges) -> Result<(), StoreError> {
        if self.read_ring_changes().is_ok_and(|known| known == *changes) {
            return Ok(());
        }
        self.put_sealed(RING_CHANGES, RecordKind::RingChanges, changes)
    }
}

pub(super) fn refuse_older_epoch(seen: Epoch, epoch: Epoch) -> Result<(), StoreError> {
    if epoch < seen {
        return Err(StoreError::StaleEpoch { seen, given: epoch });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::id::ClusterId;
    use crate::store::{Disk, LOCK_FILE, MemoryDisk, MemoryKv};

    fn open(disk: &Arc<MemoryDisk>) -> Store {
        let lock = disk.lock(LOCK_FILE).unwrap();
        let (name, kv) = ("node-1".parse().unwrap(), Arc::new(MemoryKv::new()));
        Store::open(disk.clone(), lock, kv, ClusterId([4; 16]), &name).unwrap().0
    }

    fn home(name: &str) -> Home {
        Home { name: name.parse().unwrap(), address: format!("{name}:7440") }
    }

    /// A downgraded program keeps the records of a later version and works without them.
    #[test]
    fn notes_of_a_later_version_are_not_overwritten() {
        let disk = Arc::new(MemoryDisk::new(1 << 20));
        let store = open(&disk);
        store.claim_epoch(Epoch(1), DbId([1; 16]), home("a")).unwrap();
        let notes = [
            (MEMBERS, RecordKind::Members),
            (HEARD, RecordKind::Heard),
            (CATCH_UP, RecordKind::CatchUp),
            (RING_CHANGES, RecordKind::RingChanges),
        ];
        let later = |kind| crate::format::envelope::seal_record(kind, 2, &[7u8; 30]).unwrap();
        for (path, kind) in notes {
            store.put_record(path, &later(kind)).unwrap();
        }
        drop(store);
        let store = open(&disk);
        assert!(store.put_members(&Members::default()).is_err());
        assert!(store.put_ring_changes(&RingChanges::default()).is_err());
        assert!(store.record_revision(DbId([1; 16]), 9).is_err());
        assert!(store.record_behind().is_err() && store.record_caught_up(Epoch(1), 4).is_err());
        assert_eq!(
            (store.revision_of_current_db(), store.read_catch_up_standing()),
            (0, Standing::Behind)
        );
        for (path, kind) in notes {
            assert_eq!(store.get_record(path).unwrap(), Some(later(kind)), "{path}");
        }
        // A damaged record is written anew.
        store.put_record(HEARD, b"rot").unwrap();
        store.record_revision(DbId([1; 16]), 9).unwrap();
        assert_eq!(store.revision_of_current_db(), 9);
    }

    #[test]
    fn an_epoch_has_one_map_and_that_survives_a_power_cut() {
        let disk = Arc::new(MemoryDisk::new(1 << 20));
        let store = open(&disk);
        let (ours, theirs) = (DbId([1; 16]), DbId([2; 16]));
        store.raise_highest_seen_epoch(Epoch(2)).unwrap();
        // The epoch is known, but no catalogue server has claimed it yet.
        store.claim_epoch(Epoch(2), ours, home("a")).unwrap();
        store.record_db_id(Epoch(2), ours).unwrap();
        for other in
            [store.claim_epoch(Epoch(2), theirs, home("b")), store.record_db_id(Epoch(2), theirs)]
        {
            assert!(matches!(other, Err(StoreError::OtherDatabase { epoch: Epoch(2) })));
        }
        drop(store);
        let disk = Arc::new(disk.crash());
        let store = open(&disk);
        assert_eq!(
            (
                store.highest_seen_epoch(),
                store.db_id_of_highest_epoch(),
                store.server_of_highest_epoch()
            ),
            (Epoch(2), Some(ours), Some(home("a")))
        );
        let older = store.claim_epoch(Epoch(1), ours, home("a"));
        assert!(matches!(older, Err(StoreError::StaleEpoch { .. })));
        store.raise_highest_seen_epoch(Epoch(2)).unwrap();
        assert_eq!(store.server_of_highest_epoch(), Some(home("a")));
        store.claim_epoch(Epoch(3), theirs, home("b")).unwrap();
        store.raise_highest_seen_epoch(Epoch(4)).unwrap();
        assert_eq!(
            (
                store.highest_seen_epoch(),
                store.db_id_of_highest_epoch(),
                store.server_of_highest_epoch()
            ),
            (Epoch(4), None, None)
        );
        store.claim_epoch(Epoch(4), ours, home("a")).unwrap();
        assert_eq!(store.revision_of_current_db(), 0);
        for (map, revision, last) in [(ours, 7, 7), (ours, 5, 7), (theirs, 9, 0), (ours, 8, 8)] {
            store.record_revision(map, revision).unwrap();
            assert_eq!(store.revision_of_current_db(), last);
        }
        drop(store);
        let disk = Arc::new(disk.crash());
        let store = open(&disk);
        assert_eq!(store.revision_of_current_db(), 8);
        // No epoch can follow the highest number.
        for far in [
            store.raise_highest_seen_epoch(Epoch(u64::MAX)),
            store.record_db_id(Epoch(1 << 40), ours),
        ] {
            assert!(matches!(far, Err(StoreError::FarEpoch { .. })));
        }
        assert_eq!(store.highest_seen_epoch(), Epoch(4));
    }
}
