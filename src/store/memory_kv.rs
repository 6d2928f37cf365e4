//! A map in memory: for clusters in one process, and in the place of an index for which the disk has no room.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::kv::{Batch, Kv, KvError, MAX_PAGE, Pair, scan_start};

/// What a pair takes beside its bytes: two vectors, and its part of a node of the tree.
const PAIR_BYTES: usize = 96;

/// A map in memory.
#[derive(Debug, Default)]
pub struct MemoryKv {
    pairs: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
    limit_bytes: Option<usize>,
}

impl MemoryKv {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty map that takes about `limit_bytes` of memory.
    pub fn bounded(limit_bytes: usize) -> Self {
        Self { limit_bytes: Some(limit_bytes), ..Self::default() }
    }

    /// Another map with what is in this one now: a backup.
    pub fn copy(&self) -> Self {
        Self { pairs: Mutex::new(self.pairs().clone()), limit_bytes: self.limit_bytes }
    }

    fn pairs(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kv for MemoryKv {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        Ok(self.pairs().get(key).cloned())
    }

    fn apply(&self, batch: &Batch) -> Result<(), KvError> {
        batch.check()?;
        let mut pairs = self.pairs();
        // The pairs of the index, which is what is bounded, are of about one length.
        if let (Some(limit_bytes), Some((key, value))) = (self.limit_bytes, pairs.first_key_value())
            && batch.changes.iter().any(|(_, value)| value.is_some())
            && pairs.len().saturating_mul(key.len() + value.len() + PAIR_BYTES) >= limit_bytes
        {
            return Err(KvError::NoMemory { limit_bytes });
        }
        for (key, value) in &batch.changes {
            match value {
                Some(value) => pairs.insert(key.clone(), value.clone()),
                None => pairs.remove(key),
            };
        }
        Ok(())
    }

    fn scan(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<Pair>, KvError> {
        let pairs = self.pairs();
        let range = pairs.range::<[u8], _>((scan_start(prefix, after), Bound::Unbounded));
        let within = range.take_while(|(key, _)| key.starts_with(prefix));
        Ok(within.take(limit.min(MAX_PAGE)).map(|(k, v)| (k.clone(), v.clone())).collect())
    }
}
