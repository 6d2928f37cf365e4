//! Errors of the store.

use super::disk::DiskError;
use super::kv::KvError;
use super::record_file::MAX_RECORD_FILE_BYTES;
use crate::format::FormatError;
use crate::format::file::FileKey;
use crate::format::tree::Hash;
use crate::id::Epoch;
use crate::kind::ErrorKind;

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The disk did not.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The index did not.
    #[error("index: {0}")]
    Index(#[from] KvError),
    /// A file or record does not parse.
    #[error("{path}: {source}")]
    Format {
        /// Where it lies.
        path: String,
        /// What is wrong with it.
        source: FormatError,
    },
    /// The note of the epoch does not parse.
    #[error(
        "{path}: {source}. It notes which catalogue this node follows: when the catalogue is served by another node, remove this file and start again, and the node notes it anew when it registers"
    )]
    Epoch {
        /// Where it lies.
        path: String,
        /// What is wrong with it.
        source: FormatError,
    },
    /// A file says that it is something else than its name.
    #[error("{path} says that it is {found}: it was moved there; use another copy")]
    Misplaced {
        /// Where it lies.
        path: String,
        /// What its header says.
        found: String,
    },
    /// A grain is not the one that was written.
    #[error("grain {grain} of {key} is damaged: use another copy")]
    Grain {
        /// The file.
        key: FileKey,
        /// The grain.
        grain: u64,
    },
    /// The file is known to be damaged, and does not count.
    #[error("{key} is damaged: use another copy")]
    Damaged {
        /// The file.
        key: FileKey,
    },
    /// What came back from the medium is not what was written.
    #[error(
        "grain {grain} of {key} came back from the disk otherwise than written: replace the disk"
    )]
    ReadBack {
        /// The file.
        key: FileKey,
        /// The grain; one behind the last for what follows the data.
        grain: u64,
    },
    /// The bytes given are not those that were announced.
    #[error("{key} has root {found}, {expected} expected: send it again")]
    Root {
        /// The file.
        key: FileKey,
        /// What was announced.
        expected: blake3::Hash,
        /// What came.
        found: blake3::Hash,
    },
    /// More or fewer bytes than announced, a grain of the wrong length, or twice.
    #[error("{key}: {why}")]
    Misuse {
        /// The file.
        key: FileKey,
        /// What the caller did.
        why: &'static str,
    },
    /// Another file is there under the same name.
    #[error("{key} is there already with other content; it is kept: take another attempt")]
    Conflict {
        /// The file.
        key: FileKey,
    },
    /// A record that never changes is there with other content.
    #[error("{path} is there already with other content, and never changes: it is kept")]
    Fixed {
        /// The record.
        path: String,
    },
    /// The folder belongs to another cluster or node.
    #[error("this data folder belongs to {found}, not to {ours}: give the daemon its own folder")]
    Foreign {
        /// Whose it is.
        found: String,
        /// Who asked.
        ours: String,
    },
    /// There is data but no `node.id`.
    #[error(
        "the data folder has files but no node.id: put node.id back, or start in an empty folder"
    )]
    NoIdentity,
    /// A newer catalogue has been seen.
    #[error("epoch {given} is over: this node has seen {seen}; ask the newer catalogue")]
    StaleEpoch {
        /// The highest epoch seen.
        seen: Epoch,
        /// The one that was given.
        given: Epoch,
    },
    /// No cluster comes that far.
    #[error("epoch {given} is far beyond {seen}, which this node has seen: it is not believed")]
    FarEpoch {
        /// The highest epoch seen.
        seen: Epoch,
        /// The one that was given.
        given: Epoch,
    },
    /// Another map is the catalogue of this epoch.
    #[error(
        "epoch {epoch} has another catalogue: this one was begun or rebuilt beside it, and is not obeyed; rebuild again if the other one is gone"
    )]
    OtherMap {
        /// The epoch.
        epoch: Epoch,
    },
    /// A record of graves has no room for more.
    #[error("{path} is full: it takes no more removed saves")]
    GravesFull {
        /// Where it lies.
        path: String,
    },
    /// Not a name for a small record.
    #[error("{name:?} is not a record name: 1 to 80 of a-z 0-9 -")]
    Name {
        /// The name.
        name: String,
    },
    /// A small record is over its limit.
    #[error("a small record of {bytes} bytes is over the limit of {MAX_RECORD_FILE_BYTES}")]
    TooLong {
        /// Its length.
        bytes: u64,
    },
}

impl StoreError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Disk(error) => error.kind(),
            Self::Index(error) => error.kind(),
            Self::Format { source, .. } | Self::Epoch { source, .. } => source.kind(),
            Self::Misplaced { .. }
            | Self::Grain { .. }
            | Self::Damaged { .. }
            | Self::ReadBack { .. }
            | Self::Root { .. } => ErrorKind::Corrupt,
            Self::Conflict { .. } | Self::Fixed { .. } => ErrorKind::Exists,
            Self::Foreign { .. } | Self::NoIdentity => ErrorKind::Denied,
            Self::StaleEpoch { .. } | Self::OtherMap { .. } => ErrorKind::Fenced,
            Self::Misuse { .. }
            | Self::Name { .. }
            | Self::TooLong { .. }
            | Self::GravesFull { .. }
            | Self::FarEpoch { .. } => ErrorKind::Invalid,
        }
    }
}

/// The error of two roots that differ.
pub(super) fn root_error(key: FileKey, expected: Hash, found: Hash) -> StoreError {
    StoreError::Root { key, expected: expected.into(), found: found.into() }
}
