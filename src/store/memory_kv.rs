//! A map in memory, for clusters in one process.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::kv::{Batch, Kv, KvError, MAX_PAGE, Pair, scan_start};

/// A map in memory, for clusters in one process.
#[derive(Debug, Default)]
pub struct MemoryKv {
    pairs: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl MemoryKv {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Another map with what is in this one now: a backup.
    pub fn copy(&self) -> Self {
        Self { pairs: Mutex::new(self.pairs().clone()) }
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
