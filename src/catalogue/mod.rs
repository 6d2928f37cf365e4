//! The catalogue: what exists and who may change it. A small ordered map with compare-and-set, leases, and the nodes' registration.
//!
//! [`evidence`] is what a lost one is made again from. One trait, several engines: [`local`] over the node's key-value store, [`remote`] for everybody else. What an answer
//! promises: a set that returned is durable. A set whose answer was lost is unknown: read the key before acting.
//! The keys and records are those of docs/semantics.md, section 2.

pub mod evidence;
pub mod key_scan;
pub mod local;
pub mod map;
pub mod records;
pub mod remote;
mod table;

use std::time::Duration;

use async_trait::async_trait;

use crate::format::records::Node;
use crate::id::{Epoch, LeaseId};
use crate::kind::ErrorKind;
use crate::store::KvError;
use crate::wire::calls::{NodeView, RegisterAnswer};

/// The longest value; a [`ShardState`](crate::format::records::ShardState) or root at its limit fits.
pub const MAX_VALUE_BYTES: usize = 5 << 10;
/// The longest key.
pub const MAX_KEY_BYTES: usize = 240;
/// The longest page of a list.
pub const MAX_PAGE: u32 = 256;

/// A value and the revision that a change of it must name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: Vec<u8>,
    /// Greater after each change of any key; never used twice within an epoch.
    pub revision: u64,
}

/// How a compare-and-set ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetOutcome {
    /// Done and durable; the key's new revision.
    Set(u64),
    /// The key is not as expected; nothing was changed. What it is now.
    Conflict(Option<Entry>),
}

/// The catalogue cannot answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// It cannot be reached.
    #[error(
        "the catalogue cannot be reached ({reason}); seeds asked: {seeds}. Check that its daemon runs"
    )]
    Unreachable {
        /// Which seeds were asked.
        seeds: String,
        /// The last failure.
        reason: String,
    },
    /// It refused, with its own words.
    #[error("{message}")]
    Refused {
        /// What kind of refusal.
        kind: ErrorKind,
        /// What it said.
        message: String,
    },
    /// Its store failed.
    #[error("the catalogue's store: {0}")]
    Store(String),
    /// Entries are missing or changed behind its back.
    #[error(
        "the catalogue's map lost entries ({found} found, their sum is wrong): it is not served, and nothing is deleted; make it again with `rapidraid catalogue rebuild`"
    )]
    Incomplete {
        /// How many entries there are.
        found: u64,
    },
    /// Its map does not open, and will not.
    #[error(
        "the catalogue's map {path} is damaged ({why}): it is left there and not served, and nothing is deleted; make it again with `rapidraid catalogue rebuild`"
    )]
    Damaged {
        /// Its folder.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// It is not the one that this node's cluster had.
    #[error(
        "the catalogue's map here is of epoch {found}, this node has seen epoch {seen}: it was lost or is an old one, and is not served; if no other daemon serves the catalogue, make it again with `rapidraid catalogue rebuild`. Nothing is deleted"
    )]
    Gone {
        /// The highest epoch that the node has seen.
        seen: Epoch,
        /// The map's; 0 for an empty one.
        found: Epoch,
    },
    /// A record in it does not parse.
    #[error("the catalogue's record {key}: {reason}")]
    Record {
        /// The key.
        key: String,
        /// Why.
        reason: String,
    },
    /// A key or value is longer than allowed.
    #[error("{what} has {bytes} bytes, at most {limit} are allowed")]
    TooLong {
        /// The key, or "value of KEY".
        what: String,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
}

impl CatalogueError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CatalogueError::Unreachable { .. } => ErrorKind::Unavailable,
            CatalogueError::Refused { kind, .. } => *kind,
            CatalogueError::Store(_) => ErrorKind::Io,
            CatalogueError::Gone { .. } => ErrorKind::Lost,
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

/// An engine.
#[async_trait]
pub trait Catalogue: Send + Sync + 'static {
    /// The epoch, as far as this side knows.
    fn epoch(&self) -> Epoch;

    /// Reads a key.
    async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError>;

    /// Sets (`Some`) or removes (`None`) a key, if its revision is `expected` (`None`: if it does not exist).
    async fn compare_and_set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError>;

    /// Keys of `prefix` after `after`, in order; at most `limit` and at most [`MAX_PAGE`].
    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError>;

    /// Grants a lease, and how long it lives unless it is kept.
    async fn lease_grant(&self) -> Result<(LeaseId, Duration), CatalogueError>;

    /// Whether a lease lives; with `keep` its time begins again.
    async fn lease_touch(&self, lease: LeaseId, keep: bool) -> Result<bool, CatalogueError>;

    /// Ends a lease.
    async fn lease_revoke(&self, lease: LeaseId) -> Result<(), CatalogueError>;

    /// Registers a node, or keeps it live.
    async fn register(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError>;

    /// All registered nodes, and which are live.
    async fn nodes(&self) -> Result<Vec<NodeView>, CatalogueError>;
}
