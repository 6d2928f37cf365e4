//! Bytes at rest: records, replica files, piece files, and the tables of trainers' shards. No I/O here.
//!
//! Promises: what is parsed was checked first (magic, checksum, version, then every length before it is
//! multiplied or allocated), and bytes that a release has written are read by every later one
//! (`docs/format.md`, `tests/fixtures/format`). Where the bytes lie and when they are durable is the
//! store's affair.

pub mod cluster;
pub mod digest;
pub mod envelope;
pub mod file;
pub mod geometry;
pub mod grain_set;
pub mod records;
#[cfg(test)]
pub(crate) mod samples;
pub mod save_record;
pub mod table;
pub mod tree;
pub mod value;

use crate::kind::ErrorKind;
use envelope::RecordKind;

/// Why bytes at rest are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The first bytes are not those of the format.
    #[error("{what} does not begin with its magic bytes: it is damaged, or not one of ours")]
    Magic {
        /// What was to be read.
        what: &'static str,
    },
    /// There are fewer or more bytes than the lengths inside say.
    #[error("{what} has {found_bytes} bytes, {expected_bytes} expected: use another copy")]
    Length {
        /// What was to be read.
        what: &'static str,
        /// The length that it should have.
        expected_bytes: u64,
        /// The length that it has.
        found_bytes: u64,
    },
    /// A length is beyond what the format allows.
    #[error("{what} of {bytes} bytes is over the format's limit of {limit_bytes}")]
    TooLong {
        /// What was to be read or written.
        what: &'static str,
        /// The length asked for or found.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The checksum does not fit the bytes.
    #[error("{what} fails its checksum: use another copy")]
    Checksum {
        /// What was to be read.
        what: &'static str,
    },
    /// A whole record of another kind.
    #[error("found a {found} where a {expected} record should be: use another copy")]
    RecordKind {
        /// The kind that was asked for.
        expected: RecordKind,
        /// The kind that the bytes name.
        found: String,
    },
    /// Whole and unharmed, but of a version that this release does not read.
    #[error("{what} is of version {found}; this release reads {first} to {last}: upgrade it")]
    Version {
        /// What was to be read.
        what: String,
        /// The version found.
        found: u32,
        /// The oldest version that can be read.
        first: u32,
        /// The newest version that can be read.
        last: u32,
    },
    /// The checksum fits, the body does not decode: the writer had another idea of the record.
    #[error("the body of the {kind} record does not decode ({why}): use another copy")]
    Body {
        /// The record's kind.
        kind: RecordKind,
        /// The decoder's words.
        why: String,
    },
    /// The body could not be encoded.
    #[error("the {kind} record cannot be encoded ({why}): this is a defect, please report it")]
    Encode {
        /// The record's kind.
        kind: RecordKind,
        /// The encoder's words.
        why: String,
    },
    /// Two parts of one file contradict each other.
    #[error("the file's {part} contradicts its header: use another copy")]
    Contradiction {
        /// The part that does not fit.
        part: &'static str,
    },
    /// Not the name of a replica or piece file.
    #[error("{name:?} is not the name of a replica or piece file")]
    FileName {
        /// The name, cut to 128 characters.
        name: String,
    },
}

impl FormatError {
    /// What kind of failure this is. A version too new is *not* corruption: those bytes must be kept.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Magic { .. }
            | Self::Length { .. }
            | Self::Checksum { .. }
            | Self::RecordKind { .. }
            | Self::Body { .. }
            | Self::Contradiction { .. } => ErrorKind::Corrupt,
            Self::TooLong { .. } | Self::Version { .. } | Self::FileName { .. } => {
                ErrorKind::Invalid
            }
            Self::Encode { .. } => ErrorKind::Internal,
        }
    }
}
