//! Bytes at rest: records, replica files, piece files, and the tables of trainers' shards. This
//! module does no I/O.
//!
//! Parsers check before they use: magic, checksum, version, then every length before it is
//! multiplied or allocated. Every later release reads the bytes that a release has written
//! (`docs/format.md`, `tests/fixtures/format`). The store decides where the bytes lie and when they
//! are durable.

pub mod cluster;
pub mod digest;
pub mod envelope;
pub mod file;
pub mod geometry;
pub mod grain_set;
pub mod joint_save;
pub mod launch_order;
mod receipt;
pub mod records;
pub mod ring_changes;
#[cfg(test)]
pub(crate) mod samples;
pub mod save_record;
pub mod save_ring;
pub mod step_labels;
mod stripe_record;
pub mod table;
pub mod tree;
pub mod value;

use crate::kind::ErrorKind;
use envelope::RecordKind;

/// The reason why bytes at rest are not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The first bytes are not the magic bytes of the format.
    #[error("{what} does not begin with its magic bytes: it is damaged, or not in this format")]
    Magic {
        /// The name of the object that was read.
        what: &'static str,
    },
    /// The number of bytes differs from the lengths inside them.
    #[error("{what} has {found_bytes} bytes, {expected_bytes} expected: use another copy")]
    Length {
        /// The name of the object that was read.
        what: &'static str,
        /// The length that it should have, in bytes.
        expected_bytes: u64,
        /// The length that it has, in bytes.
        found_bytes: u64,
    },
    /// A length exceeds the limit of the format.
    #[error("{what} of {bytes} bytes is over the format's limit of {limit_bytes}")]
    TooLong {
        /// The name of the object to read or write.
        what: &'static str,
        /// The requested or found length in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The checksum does not match the bytes.
    #[error("{what} fails its checksum: use another copy")]
    Checksum {
        /// The name of the object that was read.
        what: &'static str,
    },
    /// The record is intact, but of another kind.
    #[error("found a {found} where a {expected} record should be: use another copy")]
    RecordKind {
        /// The kind that was requested.
        expected: RecordKind,
        /// The kind that the bytes state.
        found: String,
    },
    /// The record is intact, but of a version that this release does not read.
    #[error("{what} is of version {found}; this release reads {first} to {last}: upgrade it")]
    Version {
        /// The name of the object that was read.
        what: String,
        /// The version that was found.
        found: u32,
        /// The oldest version that can be read.
        first: u32,
        /// The newest version that can be read.
        last: u32,
    },
    /// The checksum matches, but the body does not decode: the writer used another definition of
    /// the record.
    #[error("the body of the {kind} record does not decode ({why}): use another copy")]
    Body {
        /// The record's kind.
        kind: RecordKind,
        /// The message of the decoder.
        why: String,
    },
    /// The body could not be encoded.
    #[error("the {kind} record cannot be encoded ({why}): this is a defect, please report it")]
    Encode {
        /// The record's kind.
        kind: RecordKind,
        /// The message of the encoder.
        why: String,
    },
    /// Two parts of one file or save record contradict each other, or a part is over its limit.
    #[error("the file's {part} contradicts its header: use another copy")]
    Contradiction {
        /// The part that contradicts the header.
        part: &'static str,
    },
    /// A text is not the name of a replica or piece file.
    #[error("{name:?} is not the name of a replica or piece file")]
    FileName {
        /// The text, cut to 128 characters.
        name: String,
    },
}

impl FormatError {
    /// Returns the kind of the error. A version that is too new is *not* corruption: those bytes
    /// must be kept.
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
