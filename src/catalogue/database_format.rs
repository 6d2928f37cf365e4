//! The layout of the catalogue's entries in a key-value store, and the writer of a new database.
//!
//! `k/KEY` holds a revision and a value. `m/revision`, `m/sum` and `m/epoch` belong to the database
//! as a whole. A database without an epoch is not a catalogue: an interrupted rebuild or transfer
//! leaves such a database. [`DbWriter::finish`] writes the epoch last.

use std::sync::Arc;

use super::{CatalogueError, Entry, MAX_KEY_BYTES, MAX_PAGE, MAX_VALUE_BYTES};
use crate::id::{DbId, Epoch};
use crate::store::kv::{Batch, Kv};
use crate::wire::calls::DbChecksum;

pub(super) const REVISION: &[u8] = b"m/revision";
pub(super) const SUM: &[u8] = b"m/sum";
const EPOCH: &[u8] = b"m/epoch";
pub(super) const DATA: &str = "k/";

/// Number of entries that are made durable in one batch.
const BATCH_ENTRIES: usize = 256;
/// A rebuilt database counts its revisions from its epoch times this number, so a revision that was
/// read before the rebuild matches no entry of the rebuilt database.
pub const REVISIONS_PER_EPOCH: u64 = 1 << 40;

/// Returns the contribution of an entry to the database's sum: the first 16 bytes of BLAKE3 over
/// the key and the stored bytes.
pub(super) fn entry_checksum(key: &str, stored: &[u8]) -> u128 {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid catalogue sum v1");
    hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes()).update(stored);
    let mut first = [0; 16];
    hasher.finalize_xof().fill(&mut first);
    u128::from_be_bytes(first)
}

pub(super) fn parse_number(bytes: Option<Vec<u8>>) -> Option<u64> {
    bytes.and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).map(u64::from_be_bytes)
}

pub(super) fn parse_entry(bytes: &[u8]) -> Option<Entry> {
    let (revision, value) = bytes.split_first_chunk::<8>()?;
    Some(Entry { value: value.to_vec(), revision: u64::from_be_bytes(*revision) })
}

/// Computes the sum of all entries. Returns it if it is the sum that the last batch recorded,
/// otherwise [`CatalogueError::Incomplete`].
pub(super) fn verify_checksum(kv: &dyn Kv) -> Result<u128, CatalogueError> {
    let (mut found, mut sum) = (0, 0);
    let mut after: Option<Vec<u8>> = None;
    loop {
        let page = kv.scan(DATA.as_bytes(), after.as_deref(), MAX_PAGE as usize)?;
        for (key, stored) in &page {
            found += 1;
            sum ^= entry_checksum(&String::from_utf8_lossy(key), stored);
        }
        match page.into_iter().next_back() {
            Some((last, _)) => after = Some(last),
            None => break,
        }
    }
    let recorded = kv.get(SUM)?;
    let recorded = recorded.and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
    if sum == recorded.map_or(0, u128::from_be_bytes) {
        Ok(sum)
    } else {
        Err(CatalogueError::Incomplete { found })
    }
}

/// Returns the epoch and id of the database, or `None` if it is not a catalogue.
pub(super) fn read_epoch_and_id(kv: &dyn Kv) -> Result<Option<(Epoch, DbId)>, CatalogueError> {
    let bytes = kv.get(EPOCH)?;
    let parse = |bytes: &[u8]| {
        let (epoch, map) = bytes.split_first_chunk::<8>()?;
        Some((Epoch(u64::from_be_bytes(*epoch)), DbId(map.try_into().ok()?)))
    };
    Ok(bytes.as_deref().and_then(parse))
}

/// Writes the epoch and id, which makes the database a catalogue.
pub(super) fn write_epoch_and_id(
    kv: &dyn Kv,
    epoch: Epoch,
    db_id: DbId,
) -> Result<(), CatalogueError> {
    let value = [&epoch.0.to_be_bytes()[..], &db_id.0].concat();
    Ok(kv.apply(Batch::new().put(EPOCH, value))?)
}

/// A writer that fills an empty database, entry by entry.
pub struct DbWriter {
    kv: Arc<dyn Kv>,
    revision: u64,
    sum: u128,
    batch: Batch,
    batch_entries: usize,
}

impl DbWriter {
    /// Returns a writer of the database of `epoch` in `kv`, which must be empty.
    pub fn new(kv: Arc<dyn Kv>, epoch: Epoch) -> Self {
        let revision = epoch.0.wrapping_mul(REVISIONS_PER_EPOCH);
        Self { kv, revision, sum: 0, batch: Batch::new(), batch_entries: 0 }
    }

    /// Returns a writer that fills `kv`, which must be empty, with a copy of another database.
    /// `revision` is the last revision of the other database.
    pub fn for_copy(kv: Arc<dyn Kv>, revision: u64) -> Self {
        Self { kv, revision, sum: 0, batch: Batch::new(), batch_entries: 0 }
    }

    /// Adds an entry under the next revision. No key may be added twice. Returns
    /// [`CatalogueError::TooLong`] if the key or value exceeds its limit.
    pub fn put_entry(&mut self, key: &str, value: &[u8]) -> Result<(), CatalogueError> {
        self.revision += 1;
        self.put_entry_at_revision(key, value, self.revision)
    }

    /// Adds an entry with the revision that it had in the other database. No key may be added
    /// twice. Returns errors as [`DbWriter::put_entry`] does.
    pub fn put_entry_at_revision(
        &mut self,
        key: &str,
        value: &[u8],
        revision: u64,
    ) -> Result<(), CatalogueError> {
        for (what, bytes, limit) in
            [("a key", key.len(), MAX_KEY_BYTES), (key, value.len(), MAX_VALUE_BYTES)]
        {
            if bytes > limit {
                return Err(CatalogueError::TooLong { what: what.to_owned(), bytes, limit });
            }
        }
        let stored = [&revision.to_be_bytes()[..], value].concat();
        let key = format!("{DATA}{key}");
        self.sum ^= entry_checksum(&key, &stored);
        self.batch.put(key, stored);
        self.batch_entries += 1;
        if self.batch_entries >= BATCH_ENTRIES { self.apply_batch() } else { Ok(()) }
    }

    /// Makes all entries durable and reads them again. Returns their checksum.
    pub fn flush_and_checksum(&mut self) -> Result<DbChecksum, CatalogueError> {
        self.apply_batch()?;
        verify_checksum(&*self.kv)?;
        Ok(DbChecksum { revision: self.revision, sum: self.sum.to_be_bytes() })
    }

    fn apply_batch(&mut self) -> Result<(), CatalogueError> {
        self.batch.put(REVISION, self.revision.to_be_bytes()).put(SUM, self.sum.to_be_bytes());
        self.batch_entries = 0;
        Ok(self.kv.apply(&std::mem::take(&mut self.batch))?)
    }

    /// Makes the database the catalogue `db_id` of `epoch`. All entries are durable before the
    /// epoch is. Returns the store of the database.
    pub fn finish(mut self, epoch: Epoch, db_id: DbId) -> Result<Arc<dyn Kv>, CatalogueError> {
        self.apply_batch()?;
        write_epoch_and_id(&*self.kv, epoch, db_id)?;
        Ok(self.kv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::local::LocalCatalogue;
    use crate::catalogue::{Catalogue, SetOutcome};
    use crate::clock::{Clock, SystemClock};
    use crate::entropy::SeededEntropy;
    use crate::kind::ErrorKind;
    use crate::store::MemoryKv;
    use crate::store::kv::{KvError, Pair};
    use crate::workers::Workers;

    /// A store whose batches fail after `left` of them succeeded.
    struct Failing {
        map: MemoryKv,
        left: std::sync::atomic::AtomicU32,
    }

    impl Kv for Failing {
        fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
            self.map.get(key)
        }

        fn apply(&self, batch: &Batch) -> Result<(), KvError> {
            use std::sync::atomic::Ordering::SeqCst;
            let left = self.left.try_update(SeqCst, SeqCst, |left| left.checked_sub(1));
            left.map_err(|_| KvError::Failed { path: "the map".into() })?;
            self.map.apply(batch)
        }

        fn scan(
            &self,
            prefix: &[u8],
            after: Option<&[u8]>,
            limit: usize,
        ) -> Result<Vec<Pair>, KvError> {
            self.map.scan(prefix, after, limit)
        }
    }

    #[test]
    fn whichever_batch_fails_a_map_that_is_not_finished_has_no_epoch() {
        for batches in 0..4 {
            let map = MemoryKv::new();
            let kv: Arc<dyn Kv> = Arc::new(Failing { map, left: batches.into() });
            let mut writer = DbWriter::new(kv.clone(), Epoch(4));
            let mut put = |number| writer.put_entry(&format!("c/{number:04}"), &[7]);
            let written = (0..BATCH_ENTRIES + 10).try_for_each(&mut put);
            let finished = written.and_then(|()| writer.finish(Epoch(4), DbId([3; 16])).map(drop));
            // A complete database takes two batches of entries, then the epoch.
            assert_eq!(finished.is_ok(), batches == 3, "{batches}");
            assert_eq!(read_epoch_and_id(&*kv).unwrap().is_some(), batches == 3, "{batches}");
        }
    }

    #[tokio::test]
    async fn a_written_map_is_a_catalogue_and_only_when_it_is_finished() {
        let open = |kv: &Arc<dyn Kv>| {
            let entropy = Arc::new(SeededEntropy::new(1));
            let lease = std::time::Duration::from_secs(10);
            let workers = Workers::inline();
            LocalCatalogue::open(kv.clone(), SystemClock::new(), entropy, &workers, lease, Epoch(4))
        };
        let kv: Arc<dyn Kv> = Arc::new(MemoryKv::new());
        let mut map = DbWriter::new(kv.clone(), Epoch(4));
        for number in 0..BATCH_ENTRIES + 10 {
            map.put_entry(&format!("c/{number:04}"), &[7]).unwrap();
        }
        assert!(matches!(open(&kv), Err(CatalogueError::StaleDatabase { .. })));
        let catalogue = open(&map.finish(Epoch(4), DbId([3; 16])).unwrap()).unwrap();
        assert_eq!((catalogue.epoch(), catalogue.db_id()), (Epoch(4), DbId([3; 16])));
        let last = catalogue.get(&format!("c/{:04}", BATCH_ENTRIES + 9)).await.unwrap().unwrap();
        let revision = 4 * REVISIONS_PER_EPOCH + BATCH_ENTRIES as u64 + 10;
        assert_eq!((last.value, last.revision), (vec![7], revision));
        let mut other = DbWriter::new(kv, Epoch(4));
        other.put_entry(&"x".repeat(MAX_KEY_BYTES + 1), &[]).unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn a_map_is_handed_over_only_for_a_whole_copy_and_does_not_change_then() {
        let open = |kv: Arc<dyn Kv>| {
            let entropy = Arc::new(SeededEntropy::new(1));
            let (lease, workers) = (std::time::Duration::from_secs(10), Workers::inline());
            let clock = SystemClock::new();
            LocalCatalogue::open(kv, clock, entropy, &workers, lease, Epoch::default()).unwrap()
        };
        let old = open(Arc::new(MemoryKv::new()));
        let set = async |key: &str, expected, value: Option<&[u8]>| {
            old.compare_and_set(key, expected, value.map(<[u8]>::to_vec)).await
        };
        for (key, gone) in [("a", false), ("b", true), ("c", false)] {
            let made = set(key, None, Some(key.as_bytes())).await.unwrap();
            let SetOutcome::Set(revision) = made else { panic!("{made:?}") };
            if gone {
                set(key, Some(revision), None).await.unwrap();
            }
        }
        let held = old.pause_writes().await.unwrap();
        assert_eq!(set("d", None, Some(b"d")).await.unwrap_err().kind(), ErrorKind::Busy);
        let copy = async |without: &str| {
            let kv: Arc<dyn Kv> = Arc::new(MemoryKv::new());
            let mut map = DbWriter::for_copy(kv, held.revision);
            for (key, entry) in old.list_entries("", None, 10).await.unwrap() {
                if key != without {
                    map.put_entry_at_revision(&key, &entry.value, entry.revision).unwrap();
                }
            }
            (map.flush_and_checksum().unwrap(), map)
        };
        let (sum, _) = copy("c").await;
        assert_eq!(old.stop_writes_for_transfer(sum).await.unwrap_err().kind(), ErrorKind::Exists);
        let (sum, map) = copy("").await;
        assert_eq!(sum, held);
        old.stop_writes_for_transfer(sum).await.unwrap();
        // Let the pause end, so that it cannot be what refuses the change.
        SystemClock::new().sleep(std::time::Duration::from_secs(11)).await;
        assert_eq!(set("d", None, Some(b"d")).await.unwrap_err().kind(), ErrorKind::Busy);
        // Revisions continue: a revision that was read before the transfer fits after it, and no
        // number is used twice.
        let new = open(map.finish(Epoch(2), DbId([3; 16])).unwrap());
        assert_eq!(new.get("c").await.unwrap(), old.get("c").await.unwrap());
        let c = new.get("c").await.unwrap().unwrap();
        let changed =
            new.compare_and_set("c", Some(c.revision), Some(b"C".to_vec())).await.unwrap();
        assert_eq!(changed, SetOutcome::Set(held.revision + 1));
    }
}
