//! Errors of the store.

use super::disk::DiskError;
use super::kv::KvError;
use crate::format::FormatError;
use crate::format::envelope::MAX_RECORD_BYTES;
use crate::format::file::FileKey;
use crate::format::tree::Hash;
use crate::id::Epoch;
use crate::kind::ErrorKind;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The disk failed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The index failed.
    #[error("index: {0}")]
    Index(#[from] KvError),
    /// A file or record does not parse.
    #[error("{path}: {source}")]
    Format {
        /// Its path in the data folder.
        path: String,
        /// The parse error.
        source: FormatError,
    },
    /// The epoch record does not parse.
    #[error(
        "{path}: {source}. This file records which catalogue this node follows. If another node serves the catalogue, remove this file and start the daemon again: it writes the file anew when it registers"
    )]
    Epoch {
        /// Its path in the data folder.
        path: String,
        /// The parse error.
        source: FormatError,
    },
    /// The header of a file does not match its name.
    #[error("the header of {path} names {found}: the file was moved there; use another copy")]
    Misplaced {
        /// Its path in the data folder.
        path: String,
        /// The file that its header names.
        found: String,
    },
    /// A grain does not match its hash.
    #[error("grain {grain} of {key} is damaged: use another copy")]
    Grain {
        /// The file.
        key: FileKey,
        /// The number of the grain.
        grain: u64,
    },
    /// The file has a damage note and does not count as a copy.
    #[error("{key} is damaged: use another copy")]
    Damaged {
        /// The file.
        key: FileKey,
    },
    /// The bytes read back from the medium differ from those that were written.
    #[error(
        "grain {grain} of {key} read back from the disk differs from what was written: replace the disk"
    )]
    ReadBack {
        /// The file.
        key: FileKey,
        /// The number of the grain; one past the last grain stands for the tail after the data.
        grain: u64,
    },
    /// The root of the received bytes differs from the announced one.
    #[error("{key} has root {found}, {expected} expected: send it again")]
    Root {
        /// The file.
        key: FileKey,
        /// The announced root.
        expected: blake3::Hash,
        /// The root of the received bytes.
        found: blake3::Hash,
    },
    /// The caller broke the contract of a call, for example with more or fewer bytes than announced, a
    /// grain given twice, or a range past the end of the data.
    #[error("{key}: {why}")]
    Misuse {
        /// The file.
        key: FileKey,
        /// The caller's mistake.
        why: &'static str,
    },
    /// Another file with different content has the same name.
    #[error("{key} already exists with other content and is kept: use another attempt")]
    Conflict {
        /// The file.
        key: FileKey,
    },
    /// A record that never changes already exists with other content.
    #[error("{path} already exists with other content and never changes: it is kept")]
    ImmutableRecord {
        /// The path of the record.
        path: String,
    },
    /// The folder belongs to another cluster or node.
    #[error("this data folder belongs to {found}, not to {ours}: give the daemon its own folder")]
    Foreign {
        /// The owner of the folder.
        found: String,
        /// The node and cluster that tried to open it.
        ours: String,
    },
    /// The folder holds data but no `node.id`.
    #[error(
        "the data folder has files but no node.id: put node.id back, or start in an empty folder"
    )]
    NoIdentity,
    /// The epoch is older than one that this node has seen.
    #[error("epoch {given} is over: this node has seen {seen}; ask the newer catalogue")]
    StaleEpoch {
        /// The highest epoch seen.
        seen: Epoch,
        /// The epoch that was given.
        given: Epoch,
    },
    /// The epoch is too far beyond the highest one seen to be genuine.
    #[error(
        "epoch {given} is far beyond {seen}, the highest that this node has seen: it is refused"
    )]
    FarEpoch {
        /// The highest epoch seen.
        seen: Epoch,
        /// The epoch that was given.
        given: Epoch,
    },
    /// Another catalogue database already belongs to this epoch.
    #[error(
        "epoch {epoch} already has another catalogue database: this one was created or rebuilt beside it and is refused; rebuild again if the other one is lost"
    )]
    OtherDatabase {
        /// The epoch.
        epoch: Epoch,
    },
    /// A record of the removed-save set is damaged. Any save could be in it.
    #[error(
        "{path}, which names removed saves, is damaged ({reason}): restart this node's daemon, which sets the file aside and learns the removals from the other nodes"
    )]
    RemovedSavesDamaged {
        /// Its path in the data folder.
        path: String,
        /// The reason why it does not open.
        reason: String,
    },
    /// A record of the removed-save set has no room for another id.
    #[error("{path} is full: it takes no more removed saves")]
    RemovedSavesFull {
        /// Its path in the data folder.
        path: String,
    },
    /// The name is not valid for a small record.
    #[error("{name:?} is not a record name: 1 to 80 of a-z 0-9 -")]
    Name {
        /// The name.
        name: String,
    },
    /// A small record is longer than the limit.
    #[error("a small record of {bytes} bytes is over the limit of {MAX_RECORD_BYTES}")]
    TooLong {
        /// Its length, in bytes.
        bytes: u64,
    },
}

impl StoreError {
    /// Returns the kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Disk(error) => error.kind(),
            Self::Index(error) => error.kind(),
            Self::Format { source, .. } | Self::Epoch { source, .. } => source.kind(),
            Self::Misplaced { .. }
            | Self::Grain { .. }
            | Self::Damaged { .. }
            | Self::ReadBack { .. }
            | Self::Root { .. }
            | Self::RemovedSavesDamaged { .. } => ErrorKind::Corrupt,
            Self::Conflict { .. } | Self::ImmutableRecord { .. } => ErrorKind::Exists,
            Self::Foreign { .. } | Self::NoIdentity => ErrorKind::Denied,
            Self::StaleEpoch { .. } | Self::OtherDatabase { .. } => ErrorKind::Fenced,
            Self::Misuse { .. }
            | Self::Name { .. }
            | Self::TooLong { .. }
            | Self::RemovedSavesFull { .. }
            | Self::FarEpoch { .. } => ErrorKind::Invalid,
        }
    }
}

/// Returns the error for two roots that differ.
pub(super) fn root_mismatch_error(key: FileKey, expected: Hash, found: Hash) -> StoreError {
    StoreError::Root { key, expected: expected.into(), found: found.into() }
}
