//! A small ordered map that survives a crash, as the index and the catalogue's engine use it. What is kept in one can be made again from files or
//! from other nodes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::kind::ErrorKind;

/// The longest key.
pub const MAX_KEY_BYTES: usize = 256;
/// The longest value. 17 such entries, the most that a sled leaf has, stay below 128 KiB, from which on sled would
/// write a file apart that it does not sync.
pub const MAX_VALUE_BYTES: usize = 6 * 1024;
/// The most entries that one [`Kv::scan`] gives.
pub const MAX_PAGE: usize = 4096;
/// Why the map did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// Another process has the map open.
    #[error("{path} is open in another process: stop that one")]
    InUse {
        /// The folder.
        path: String,
    },
    /// A key or value is over its limit.
    #[error("a {part} of {bytes} bytes is over the limit of {limit_bytes}")]
    TooLong {
        /// "key" or "value".
        part: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// What is on disk cannot be used.
    #[error("{path} is damaged ({why})")]
    Damaged {
        /// The folder.
        path: String,
        /// The engine's words.
        why: String,
    },
    /// It has failed before.
    #[error("{path} has failed and is not used any more: the log says how; start the daemon again")]
    Failed {
        /// The folder.
        path: String,
    },
    /// The index in memory has reached its limit.
    #[error(
        "the disk has no room for the index, and more files are here than {limit_bytes} bytes of memory can list: free space on the disk and start the daemon again, or raise `memory`"
    )]
    NoMemory {
        /// What it may take.
        limit_bytes: usize,
    },
    /// The system refused.
    #[error("cannot {op} {path}: {source}")]
    Io {
        /// The verb.
        op: &'static str,
        /// On what.
        path: String,
        /// The system's words.
        source: std::io::Error,
    },
}

impl KvError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InUse { .. } => ErrorKind::Exists,
            Self::TooLong { .. } => ErrorKind::Invalid,
            Self::Damaged { .. } => ErrorKind::Corrupt,
            Self::Failed { .. } | Self::NoMemory { .. } | Self::Io { .. } => ErrorKind::Io,
        }
    }

    /// Returns whether the disk, or a quota, is full.
    pub fn is_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Self::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }
}

/// Where a daemon keeps its catalogue's map.
pub trait Maps: Send + Sync + 'static {
    /// The map that is there. One that is damaged stays, for [`fresh`](Self::fresh) to move.
    fn existing(&self) -> Result<Option<Arc<dyn Kv>>, KvError>;

    /// A new and empty map; one that is there is moved aside.
    fn fresh(&self) -> Result<Arc<dyn Kv>, KvError>;

    /// Nothing is in the map's place any more: what is open of it ends with this process.
    fn is_gone(&self) -> bool;
}

/// Changes that are made together or not at all.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Batch {
    pub(super) changes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Batch {
    /// No change.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `key`; the last word on a key counts.
    pub fn put(&mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> &mut Self {
        self.changes.insert(key.into(), Some(value.into()));
        self
    }

    /// Removes `key` if it is there.
    pub fn delete(&mut self, key: impl Into<Vec<u8>>) -> &mut Self {
        self.changes.insert(key.into(), None);
        self
    }

    /// How many keys change.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Whether it sets `key` to `value`.
    pub fn puts(&self, key: &[u8], value: &[u8]) -> bool {
        matches!(self.changes.get(key), Some(Some(new)) if new == value)
    }

    pub(super) fn check(&self) -> Result<(), KvError> {
        let within = |part, bytes: usize, limit_bytes| {
            if bytes <= limit_bytes {
                return Ok(());
            }
            Err(KvError::TooLong { part, bytes, limit_bytes })
        };
        self.changes.iter().try_for_each(|(key, value)| {
            within("key", key.len(), MAX_KEY_BYTES)?;
            within("value", value.as_ref().map_or(0, Vec::len), MAX_VALUE_BYTES)
        })
    }
}

/// A key and its value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// A map from bytes to bytes, in the order of the keys.
pub trait Kv: Send + Sync + 'static {
    /// The value of `key`.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError>;

    /// Makes the changes, all or none, and returns when they are durable.
    fn apply(&self, batch: &Batch) -> Result<(), KvError>;

    /// The first `limit` (at most [`MAX_PAGE`]) pairs whose key begins with `prefix` and is greater than
    /// `after`. Fewer than that: there are no more.
    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize)
    -> Result<Vec<Pair>, KvError>;
}

/// Where a scan begins.
pub(super) fn scan_start<'a>(prefix: &'a [u8], after: Option<&'a [u8]>) -> Bound<&'a [u8]> {
    match after {
        Some(after) if after >= prefix => Bound::Excluded(after),
        _ => Bound::Included(prefix),
    }
}
