//! An in-memory [`Kv`], for clusters in one process, and in place of an index for which the disk
//! has no room.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::kv::{Batch, Kv, KvError, MAX_PAGE, Pair, scan_lower_bound};

/// Estimated overhead of a pair in bytes: two vectors and a share of a tree node.
const PAIR_BYTES: usize = 96;

/// A key-value map in memory.
#[derive(Debug, Default)]
pub struct MemoryKv {
    pairs: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
    /// The estimated size of the pairs, in bytes.
    bytes: AtomicUsize,
    limit_bytes: Option<usize>,
}

fn pair_bytes(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + PAIR_BYTES
}

impl MemoryKv {
    /// Returns an empty map without a limit.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty map that refuses a batch if the estimated size of the map and the size of all
    /// pairs that the batch puts exceed `limit_bytes` together. Pairs that the batch replaces or
    /// deletes are not subtracted. A batch that only deletes is never refused.
    pub fn bounded(limit_bytes: usize) -> Self {
        Self { limit_bytes: Some(limit_bytes), ..Self::default() }
    }

    /// Returns an independent copy with the present contents, as a backup.
    pub fn copy(&self) -> Self {
        let bytes = self.bytes.load(Ordering::Relaxed).into();
        Self { pairs: Mutex::new(self.lock_pairs().clone()), bytes, limit_bytes: self.limit_bytes }
    }

    fn lock_pairs(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kv for MemoryKv {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        Ok(self.lock_pairs().get(key).cloned())
    }

    fn apply(&self, batch: &Batch) -> Result<(), KvError> {
        batch.check_lengths()?;
        let mut pairs = self.lock_pairs();
        let more = batch.changes.iter().map(|(key, value)| match value {
            Some(value) => pair_bytes(key, value),
            None => 0,
        });
        let more: usize = more.sum();
        let bytes = self.bytes.load(Ordering::Relaxed);
        if let Some(limit_bytes) =
            self.limit_bytes.filter(|limit| more > 0 && bytes + more > *limit)
        {
            return Err(KvError::NoMemory { limit_bytes });
        }
        for (key, value) in &batch.changes {
            let old = match value {
                Some(value) => pairs.insert(key.clone(), value.clone()),
                None => pairs.remove(key),
            };
            let new = value.as_ref().map_or(0, |value| pair_bytes(key, value));
            self.bytes.fetch_add(new, Ordering::Relaxed);
            let old = old.map_or(0, |old| pair_bytes(key, &old));
            self.bytes.fetch_sub(old, Ordering::Relaxed);
        }
        Ok(())
    }

    fn scan(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<Pair>, KvError> {
        let pairs = self.lock_pairs();
        let range = pairs.range::<[u8], _>((scan_lower_bound(prefix, after), Bound::Unbounded));
        let within = range.take_while(|(key, _)| key.starts_with(prefix));
        Ok(within.take(limit.min(MAX_PAGE)).map(|(k, v)| (k.clone(), v.clone())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_map_takes_so_much_and_no_more() {
        let kv = MemoryKv::bounded(3 * (PAIR_BYTES + 2));
        for key in ["a", "b", "c", "c"] {
            kv.apply(Batch::new().put(key, "1"))
                .unwrap_or_else(|error| assert_eq!(key, "c", "{error}"));
        }
        let more = kv.apply(Batch::new().put("d", "1"));
        assert!(matches!(more, Err(KvError::NoMemory { .. })));
        kv.apply(Batch::new().delete("a").delete("x")).unwrap();
        kv.apply(Batch::new().put("d", "1")).unwrap();
        assert_eq!(kv.scan(b"", None, 9).unwrap().len(), 3);
    }
}
