//! The catalogue: which checkpoints exist and who may change them. It is an ordered map of keys
//! with compare-and-set, leases, and the registration of nodes.
//!
//! The trait [`Catalogue`] has two engines: [`local`] over the key-value store of the catalogue
//! server, and [`remote`] for the other daemons. [`save_evidence`] judges what the nodes hold, so
//! that a lost catalogue can be rebuilt. A compare-and-set that returned [`SetOutcome::Set`] is
//! durable. If its answer was lost, its outcome is unknown: read the key before acting. Keys and
//! records are those of docs/semantics.md, section 2.

mod database;
pub mod database_format;
pub(crate) mod key_scan;
mod leases;
pub mod local;
pub mod record_access;
pub mod remote;
pub mod save_evidence;

use std::time::Duration;

use async_trait::async_trait;

use crate::format::records::Node;
use crate::id::{Epoch, LeaseId};
use crate::kind::ErrorKind;
use crate::store::KvError;
use crate::wire::calls::{NodeView, RegisterAnswer};

/// Maximum length of a value in bytes. A [`ShardState`](crate::format::records::ShardState) or a
/// shard root at its limit fits.
pub const MAX_VALUE_BYTES: usize = 5 << 10;
/// Maximum length of a key in bytes.
pub const MAX_KEY_BYTES: usize = 240;
/// Maximum number of entries on a page of a list.
pub const MAX_PAGE: u32 = 256;

/// A value and the revision that a change of it must name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: Vec<u8>,
    /// The revision of the entry. Revisions grow with each change of any key and are never reused
    /// within an epoch.
    pub revision: u64,
}

/// The outcome of a compare-and-set. [`RemoteCatalogue`](remote::RemoteCatalogue) repeats a call whose
/// answer was lost, and then takes an entry that already has the wanted value for its own change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetOutcome {
    /// The change is durable. Holds the key's new revision, or 0 if a repeated removal found the key
    /// gone.
    Set(u64),
    /// The key is not as expected, and nothing was changed. Holds the key's current entry.
    Conflict(Option<Entry>),
}

/// A second key, whose revision a compare-and-set requires as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The key.
    pub key: String,
    /// The revision that it must have; `None`: the key must not exist.
    pub revision: Option<u64>,
}

/// The outcome of a compare-and-set with a [`Guard`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuardedOutcome {
    /// The change is durable. Holds the key's new revision.
    Set(u64),
    /// The key is not as expected, and nothing was changed. Holds the key's current entry.
    Conflict(Option<Entry>),
    /// The key is as expected and the guard is not. Nothing was changed.
    GuardConflict,
}

/// The errors of the catalogue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// The catalogue server cannot be reached.
    #[error(
        "the catalogue cannot be reached ({reason}); seeds asked: {seeds}. Check that its daemon runs"
    )]
    Unreachable {
        /// The seeds that were asked.
        seeds: String,
        /// The last failure.
        reason: String,
    },
    /// The catalogue server refused the request.
    #[error("{message}")]
    Refused {
        /// The kind of the refusal.
        kind: ErrorKind,
        /// The server's message.
        message: String,
    },
    /// The catalogue database could not be read or written.
    #[error("the catalogue's store: {0}")]
    Store(String),
    /// Entries of the database are missing, or were changed without the catalogue.
    #[error(
        "the catalogue database lost entries ({found} found, their sum is wrong): it is not served, and nothing is deleted; rebuild it with `rapidraid catalogue rebuild`"
    )]
    Incomplete {
        /// Number of entries found.
        found: u64,
    },
    /// The database does not open, and further attempts would fail too.
    #[error(
        "the catalogue database {path} is damaged ({why}): it is left in place and not served, and nothing is deleted; rebuild it with `rapidraid catalogue rebuild`"
    )]
    Damaged {
        /// The folder of the database.
        path: String,
        /// Description of the damage.
        why: String,
    },
    /// The database is empty, or older than an epoch that this node has seen.
    #[error(
        "the catalogue database here is of epoch {found}, this node has seen epoch {seen}: the database was lost or is an old copy, and is not served; if no other daemon serves the catalogue, rebuild it with `rapidraid catalogue rebuild`. Nothing is deleted"
    )]
    StaleDatabase {
        /// The highest epoch that the node has seen.
        seen: Epoch,
        /// The epoch of the database; 0 if it is empty.
        found: Epoch,
    },
    /// A record does not parse.
    #[error("the catalogue's record {key}: {reason}")]
    Record {
        /// The key.
        key: String,
        /// The reason.
        reason: String,
    },
    /// A key or value is longer than allowed.
    #[error("{what} has {bytes} bytes, at most {limit} are allowed")]
    TooLong {
        /// The key, or "value of KEY".
        what: String,
        /// Length in bytes.
        bytes: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
}

impl CatalogueError {
    /// Returns the error kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CatalogueError::Unreachable { .. } => ErrorKind::Unavailable,
            CatalogueError::Refused { kind, .. } => *kind,
            CatalogueError::Store(_) => ErrorKind::Io,
            CatalogueError::StaleDatabase { .. } => ErrorKind::Lost,
            CatalogueError::Incomplete { .. }
            | CatalogueError::Damaged { .. }
            | CatalogueError::Record { .. } => ErrorKind::Corrupt,
            CatalogueError::TooLong { .. } => ErrorKind::Invalid,
        }
    }
}

impl From<KvError> for CatalogueError {
    fn from(error: KvError) -> Self {
        match error {
            KvError::Damaged { path, why } => Self::Damaged { path, why },
            other => Self::Store(other.to_string()),
        }
    }
}

/// An engine of the catalogue: the database of this process, or calls to the catalogue server.
/// Methods fail with [`CatalogueError`].
#[async_trait]
pub trait Catalogue: Send + Sync + 'static {
    /// Returns the epoch of the catalogue, as far as this engine knows it.
    fn epoch(&self) -> Epoch;

    /// Reads a key. Returns `None` if it does not exist.
    async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError>;

    /// Sets a key to `value` (`None`: removes the key), provided that the key's revision is
    /// `expected` (`None`: that the key does not exist). Returns the new revision, or the key's
    /// current entry if the revision differs.
    async fn compare_and_set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError>;

    /// Sets a key as [`compare_and_set`](Self::compare_and_set) does, provided that at the same
    /// moment the key in `guard` has the revision in `guard`. The key itself is compared first, so
    /// that a repeated call recognises its own effect.
    async fn compare_and_set_guarded(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Vec<u8>,
        guard: &Guard,
    ) -> Result<GuardedOutcome, CatalogueError>;

    /// Returns the keys that begin with `prefix` and follow `after`, with their entries, in key
    /// order. Returns at most `limit` and at most [`MAX_PAGE`] entries.
    async fn list_entries(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError>;

    /// Grants a lease. Returns its id and its lifetime without renewal.
    async fn grant_lease(&self) -> Result<(LeaseId, Duration), CatalogueError>;

    /// Renews a live lease for its full lifetime. Returns whether it was alive.
    async fn renew_lease(&self, lease: LeaseId) -> Result<bool, CatalogueError>;

    /// Returns whether a lease is alive.
    async fn is_lease_alive(&self, lease: LeaseId) -> Result<bool, CatalogueError>;

    /// Ends a lease.
    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), CatalogueError>;

    /// Registers a node, or renews its registration.
    async fn register_node(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError>;

    /// Returns all registered nodes, and which are live.
    async fn list_nodes(&self) -> Result<Vec<NodeView>, CatalogueError>;
}
