//! How the catalogue's entries lie in a key-value store, and how a whole map is written anew.
//!
//! `k/KEY` has a revision and a value; `m/revision`, `m/sum` and `m/epoch` belong to the map. A map without an epoch is none: it is what
//! an interrupted rebuild leaves, and [`MapWriter::finish`] writes the epoch last.

use std::sync::Arc;

use super::{CatalogueError, Entry, MAX_KEY_BYTES, MAX_PAGE, MAX_VALUE_BYTES};
use crate::id::{Epoch, MapId};
use crate::store::kv::{Batch, Kv};

pub(super) const REVISION: &[u8] = b"m/revision";
pub(super) const SUM: &[u8] = b"m/sum";
const EPOCH: &[u8] = b"m/epoch";
pub(super) const DATA: &str = "k/";

/// Entries that are made durable at once.
const BATCH_ENTRIES: usize = 256;

/// The part of an entry in the map's sum: the first 16 bytes of BLAKE3.
pub(super) fn summand(key: &str, stored: &[u8]) -> u128 {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid catalogue sum v1");
    hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes()).update(stored);
    let mut first = [0; 16];
    hasher.finalize_xof().fill(&mut first);
    u128::from_be_bytes(first)
}

pub(super) fn number(bytes: Option<Vec<u8>>) -> Option<u64> {
    bytes.and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).map(u64::from_be_bytes)
}

pub(super) fn entry(bytes: &[u8]) -> Option<Entry> {
    let (revision, value) = bytes.split_first_chunk::<8>()?;
    Some(Entry { value: value.to_vec(), revision: u64::from_be_bytes(*revision) })
}

/// The sum that the last batch left, if it is the sum of what is there.
pub(super) fn check_sum(kv: &dyn Kv) -> Result<u128, CatalogueError> {
    let (mut found, mut sum) = (0, 0);
    let mut after: Option<Vec<u8>> = None;
    loop {
        let page = kv.scan(DATA.as_bytes(), after.as_deref(), MAX_PAGE as usize)?;
        for (key, stored) in &page {
            found += 1;
            sum ^= summand(&String::from_utf8_lossy(key), stored);
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

/// Epoch and id of a map that was begun.
pub(super) fn tenure(kv: &dyn Kv) -> Result<Option<(Epoch, MapId)>, CatalogueError> {
    let bytes = kv.get(EPOCH)?;
    let parse = |bytes: &[u8]| {
        let (epoch, map) = bytes.split_first_chunk::<8>()?;
        Some((Epoch(u64::from_be_bytes(*epoch)), MapId(map.try_into().ok()?)))
    };
    Ok(bytes.as_deref().and_then(parse))
}

/// Makes a map a catalogue.
pub(super) fn begin(kv: &dyn Kv, epoch: Epoch, map: MapId) -> Result<(), CatalogueError> {
    let value = [&epoch.0.to_be_bytes()[..], &map.0].concat();
    Ok(kv.apply(Batch::new().put(EPOCH, value))?)
}

/// Fills an empty map, entry by entry.
pub struct MapWriter {
    kv: Arc<dyn Kv>,
    revision: u64,
    sum: u128,
    batch: Batch,
    waiting: usize,
}

impl MapWriter {
    /// Writes into `kv`, which must be empty.
    pub fn new(kv: Arc<dyn Kv>) -> Self {
        Self { kv, revision: 0, sum: 0, batch: Batch::new(), waiting: 0 }
    }

    /// Adds an entry; no key comes twice.
    pub fn put(&mut self, key: &str, value: &[u8]) -> Result<(), CatalogueError> {
        for (what, bytes, limit) in
            [("a key", key.len(), MAX_KEY_BYTES), (key, value.len(), MAX_VALUE_BYTES)]
        {
            if bytes > limit {
                return Err(CatalogueError::TooLong { what: what.to_owned(), bytes, limit });
            }
        }
        self.revision += 1;
        let stored = [&self.revision.to_be_bytes()[..], value].concat();
        let key = format!("{DATA}{key}");
        self.sum ^= summand(&key, &stored);
        self.batch.put(key, stored);
        self.waiting += 1;
        if self.waiting >= BATCH_ENTRIES { self.apply() } else { Ok(()) }
    }

    fn apply(&mut self) -> Result<(), CatalogueError> {
        self.batch.put(REVISION, self.revision.to_be_bytes()).put(SUM, self.sum.to_be_bytes());
        self.waiting = 0;
        Ok(self.kv.apply(&std::mem::take(&mut self.batch))?)
    }

    /// Makes it the catalogue `map` of `epoch`: all entries are durable before this is.
    pub fn finish(mut self, epoch: Epoch, map: MapId) -> Result<Arc<dyn Kv>, CatalogueError> {
        self.apply()?;
        begin(&*self.kv, epoch, map)?;
        Ok(self.kv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;
    use crate::catalogue::local::LocalCatalogue;
    use crate::clock::SystemClock;
    use crate::entropy::SeededEntropy;
    use crate::store::MemoryKv;
    use crate::workers::Workers;

    #[tokio::test]
    async fn a_written_map_is_a_catalogue_and_only_when_it_is_finished() {
        let open = |kv: &Arc<dyn Kv>| {
            let entropy = Arc::new(SeededEntropy::new(1));
            let lease = std::time::Duration::from_secs(10);
            let workers = Workers::inline();
            LocalCatalogue::open(kv.clone(), SystemClock::new(), entropy, &workers, lease, Epoch(4))
        };
        let kv: Arc<dyn Kv> = Arc::new(MemoryKv::new());
        let mut map = MapWriter::new(kv.clone());
        for number in 0..BATCH_ENTRIES + 10 {
            map.put(&format!("c/{number:04}"), &[7]).unwrap();
        }
        assert!(matches!(open(&kv), Err(CatalogueError::Gone { .. })));
        let catalogue = open(&map.finish(Epoch(4), MapId([3; 16])).unwrap()).unwrap();
        assert_eq!((catalogue.epoch(), catalogue.map()), (Epoch(4), MapId([3; 16])));
        let last = catalogue.get(&format!("c/{:04}", BATCH_ENTRIES + 9)).await.unwrap().unwrap();
        assert_eq!((last.value, last.revision), (vec![7], BATCH_ENTRIES as u64 + 10));
        assert!(map_refuses(&kv));
    }

    fn map_refuses(kv: &Arc<dyn Kv>) -> bool {
        MapWriter::new(kv.clone()).put(&"x".repeat(MAX_KEY_BYTES + 1), &[]).is_err()
    }
}
