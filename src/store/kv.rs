//! A small, durable, ordered key-value map: the interface behind the index and the catalogue
//! database.
//!
//! The contents of both can be rebuilt from files or from other nodes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::kind::ErrorKind;

/// Maximum length of a key, in bytes.
pub const MAX_KEY_BYTES: usize = 256;
/// Maximum length of a value, in bytes. A sled leaf has at most 17 entries; 17 entries of this
/// length stay below 128 KiB, the size from which sled writes a separate file that it does not
/// sync.
pub const MAX_VALUE_BYTES: usize = 6 * 1024;
/// Maximum number of entries that one [`Kv::scan`] returns.
pub const MAX_PAGE: usize = 4096;
/// An error of a [`Kv`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// Another process has the database open.
    #[error("{path} is open in another process: stop that process")]
    InUse {
        /// The folder.
        path: String,
    },
    /// A key or value is over its limit.
    #[error("a {part} of {bytes} bytes is over the limit of {limit_bytes}")]
    TooLong {
        /// "key" or "value".
        part: &'static str,
        /// Its length, in bytes.
        bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The database on disk is damaged.
    #[error("{path} is damaged ({why})")]
    Damaged {
        /// The folder.
        path: String,
        /// The description from the engine.
        why: String,
    },
    /// The database has failed before and is not used until it is opened again.
    #[error(
        "{path} has failed and is no longer used: see the log for the cause, then start the daemon again"
    )]
    Failed {
        /// The folder.
        path: String,
    },
    /// The index in memory has reached its size limit.
    #[error(
        "the disk has no room for the index, and {limit_bytes} bytes of memory cannot list all files of this node: free space on the disk and start the daemon again, or raise `memory`"
    )]
    NoMemory {
        /// The limit, in bytes.
        limit_bytes: usize,
    },
    /// The operating system reported an error.
    #[error("cannot {op} {path}: {source}")]
    Io {
        /// The operation, as a verb.
        op: &'static str,
        /// The path that was operated on.
        path: String,
        /// The error from the operating system.
        source: std::io::Error,
    },
}

impl KvError {
    /// Returns the kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InUse { .. } => ErrorKind::Exists,
            Self::TooLong { .. } => ErrorKind::Invalid,
            Self::Damaged { .. } => ErrorKind::Corrupt,
            Self::Failed { .. } | Self::NoMemory { .. } | Self::Io { .. } => ErrorKind::Io,
        }
    }

    /// Returns whether the disk or a quota is full.
    pub fn is_disk_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Self::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }
}

/// The place where a daemon keeps its catalogue database.
pub trait CatalogueStorage: Send + Sync + 'static {
    /// Opens the database that is there. Returns `None` if there is none. A damaged one stays in
    /// place, for [`move_aside_and_create`](Self::move_aside_and_create) to move aside.
    fn open_existing(&self) -> Result<Option<Arc<dyn Kv>>, KvError>;

    /// Creates a new, empty database. Moves an existing one aside.
    fn move_aside_and_create(&self) -> Result<Arc<dyn Kv>, KvError>;

    /// Returns whether the database's folder is gone. A database that is still open then loses its
    /// contents when this process ends.
    fn is_folder_gone(&self) -> bool;
}

/// A set of changes that are applied atomically.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Batch {
    pub(super) changes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Batch {
    /// Returns an empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `key`. The last change of a key in the batch wins.
    pub fn put(&mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> &mut Self {
        self.changes.insert(key.into(), Some(value.into()));
        self
    }

    /// Deletes `key` if it exists.
    pub fn delete(&mut self, key: impl Into<Vec<u8>>) -> &mut Self {
        self.changes.insert(key.into(), None);
        self
    }

    /// Returns the number of keys that change.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Returns whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns whether the batch sets `key` to `value`.
    pub fn contains_put(&self, key: &[u8], value: &[u8]) -> bool {
        matches!(self.changes.get(key), Some(Some(new)) if new == value)
    }

    pub(super) fn check_lengths(&self) -> Result<(), KvError> {
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

/// A map from byte keys to byte values, ordered by key.
pub trait Kv: Send + Sync + 'static {
    /// Returns the value of `key`, or `None`.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError>;

    /// Applies the changes atomically and returns once they are durable.
    fn apply(&self, batch: &Batch) -> Result<(), KvError>;

    /// Returns the first `limit` (at most [`MAX_PAGE`]) pairs whose key begins with `prefix` and is
    /// greater than `after`. A shorter result is the end of the range.
    fn scan(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize)
    -> Result<Vec<Pair>, KvError>;
}

/// Returns the lower bound of a scan.
pub(super) fn scan_lower_bound<'a>(prefix: &'a [u8], after: Option<&'a [u8]>) -> Bound<&'a [u8]> {
    match after {
        Some(after) if after >= prefix => Bound::Excluded(after),
        _ => Bound::Included(prefix),
    }
}
