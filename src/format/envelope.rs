//! The envelope of every small record at rest: magic, kind, version, length, body, checksum.
//!
//! ```text
//! 0   4  magic "rRd1"
//! 4   1  kind (RecordKind)
//! 5   1  version of the body
//! 6   4  length of the body, u32 little-endian
//! 10  .  body, postcard
//! .   16 BLAKE3 of everything before, cut to 16 bytes
//! ```
//!
//! The structure of the envelope is the same for all versions of a body, and the checksum is
//! checked before the version. Damage is therefore distinguished from a record of a later release.
//! A checksum guards against faults, not against malice.

use std::fmt;
use std::ops::RangeInclusive;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::format::FormatError;

/// The first bytes of every record.
pub const RECORD_MAGIC: [u8; 4] = *b"rRd1";
/// The longest body, in bytes.
pub const MAX_BODY_BYTES: usize = 4 << 20;
/// Number of bytes that the envelope adds to the body.
pub const ENVELOPE_BYTES: usize = HEAD_BYTES + CHECKSUM_BYTES;
/// The longest sealed record, in bytes.
pub const MAX_RECORD_BYTES: usize = MAX_BODY_BYTES + ENVELOPE_BYTES;

const HEAD_BYTES: usize = 10;
const CHECKSUM_BYTES: usize = 16;

/// The kind of a record. The numbers are part of the format: they are never reused and never
/// changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum RecordKind {
    /// The fixed part of a shard, with the root of its stripe hashes.
    ShardRoot = 1,
    /// The mutable part of a shard in the catalogue.
    ShardState = 2,
    /// The state of a step in the catalogue.
    Checkpoint = 3,
    /// A stripe: hashes, fingerprints and places.
    StripeRecord = 4,
    /// The record that a shard was committed.
    CommitMark = 5,
    /// The record that a stripe was archived and proven.
    Receipt = 6,
    /// The record that a save was removed.
    Tombstone = 7,
    /// The highest generation that a node has seen for a shard.
    Fence = 8,
    /// The identity of the node that owns a data folder.
    NodeIdentity = 9,
    /// The header of a replica or piece file.
    FileHeader = 10,
    /// A node, in the catalogue.
    Node = 11,
    /// The highest catalogue epoch that a node has seen.
    Epoch = 12,
    /// A shard's root and the hashes of its stripe records, on nodes.
    Leaves = 13,
    /// An archiving under way, in the catalogue.
    Archiving = 14,
    /// A save that must be removed from all nodes, in the catalogue.
    Removing = 15,
    /// The nodes of the cluster, as one of them last received the list.
    Members = 16,
    /// A part of the removed-save set of a node: ids of removed saves.
    Graves = 17,
    /// The last change of the catalogue that a node knows of.
    Heard = 18,
    /// The head of the save record that a client keeps, which precedes the shard roots.
    SaveHead = 19,
    /// The identity of a staging folder.
    StagingFolder = 20,
    /// The owner of a segment file in a staging folder.
    SegmentOwner = 21,
    /// A step in a staging folder.
    StagedStep = 22,
    /// A job in a staging folder.
    StagedJob = 23,
    /// Whether a node has caught up with commits and removals.
    CatchUp = 24,
    /// The damage note of a replica or piece file.
    Damage = 25,
    /// A save that belongs to a launch, in the catalogue.
    JointSave = 26,
    /// The hosts of a launch, in a staging folder.
    LaunchHosts = 27,
    /// The launches of a job, in the catalogue.
    LaunchOrder = 28,
    /// The labels of a committed save, in the catalogue.
    StepLabels = 29,
    /// A node that leaves the rings of shards, in the catalogue.
    RingChange = 30,
    /// The nodes that leave the rings of shards, in a node's folder.
    RingChanges = 31,
    /// The maintenance of a node, in the catalogue.
    Maintenance = 32,
    /// The ring of a save that belongs to no launch, in the catalogue.
    SaveRing = 33,
}

impl fmt::Display for RecordKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ShardRoot => "shard root",
            Self::ShardState => "shard state",
            Self::Checkpoint => "checkpoint",
            Self::StripeRecord => "stripe",
            Self::CommitMark => "commit mark",
            Self::Receipt => "receipt",
            Self::Tombstone => "tombstone",
            Self::Fence => "fence",
            Self::NodeIdentity => "node identity",
            Self::FileHeader => "file header",
            Self::Node => "node",
            Self::Epoch => "epoch",
            Self::Leaves => "leaves",
            Self::Archiving => "archiving",
            Self::Removing => "removing",
            Self::Members => "members",
            Self::Graves => "removed-save set",
            Self::Heard => "heard revision",
            Self::SaveHead => "save's head",
            Self::StagingFolder => "staging folder",
            Self::SegmentOwner => "segment owner",
            Self::StagedStep => "staged step",
            Self::StagedJob => "staged job",
            Self::CatchUp => "catch-up",
            Self::Damage => "damage note",
            Self::JointSave => "joint save",
            Self::LaunchHosts => "hosts of a launch",
            Self::LaunchOrder => "order of launches",
            Self::StepLabels => "labels of a step",
            Self::RingChange => "ring change",
            Self::RingChanges => "ring changes",
            Self::Maintenance => "maintenance",
            Self::SaveRing => "save's ring",
        })
    }
}

/// Returns the length of the sealed record at the start of `bytes`, as its head states it, or
/// `None` when no record begins there.
pub fn record_len(bytes: &[u8]) -> Option<usize> {
    let head = bytes.get(..HEAD_BYTES).filter(|head| head.starts_with(&RECORD_MAGIC))?;
    let body = head.get(6..HEAD_BYTES)?.try_into().ok().map(u32::from_le_bytes)?;
    Some(usize::try_from(body).ok()?.saturating_add(ENVELOPE_BYTES))
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut out = [0; CHECKSUM_BYTES];
    out.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES]);
    out
}

/// Returns the sealed bytes of a record. Fails only when the body is longer than [`MAX_BODY_BYTES`]
/// or cannot be encoded.
pub fn seal_record<T: Serialize>(
    kind: RecordKind,
    version: u8,
    body: &T,
) -> Result<Vec<u8>, FormatError> {
    let mut bytes = Vec::with_capacity(256);
    bytes.extend(RECORD_MAGIC);
    bytes.extend([kind as u8, version, 0, 0, 0, 0]);
    let mut bytes = postcard::to_extend(body, bytes)
        .map_err(|error| FormatError::Encode { kind, why: error.to_string() })?;
    let body_bytes = bytes.len() - HEAD_BYTES;
    if body_bytes > MAX_BODY_BYTES {
        return Err(FormatError::TooLong {
            what: "record",
            bytes: body_bytes as u64,
            limit_bytes: MAX_BODY_BYTES as u64,
        });
    }
    bytes[6..HEAD_BYTES].copy_from_slice(&(body_bytes as u32).to_le_bytes());
    let sum = checksum(&bytes);
    bytes.extend(sum);
    Ok(bytes)
}

/// Checks the envelope and returns the version and the bytes of the body, for records of which
/// several versions are read. `bytes` must be exactly one record.
pub fn open_envelope(
    kind: RecordKind,
    versions: RangeInclusive<u8>,
    bytes: &[u8],
) -> Result<(u8, &[u8]), FormatError> {
    const WHAT: &str = "record";
    let short = |expected: usize| FormatError::Length {
        what: WHAT,
        expected_bytes: expected as u64,
        found_bytes: bytes.len() as u64,
    };
    let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(short(ENVELOPE_BYTES))?;
    let [m0, m1, m2, m3, found_kind, version, l0, l1, l2, l3] = *head;
    if [m0, m1, m2, m3] != RECORD_MAGIC {
        return Err(FormatError::Magic { what: WHAT });
    }
    let body_bytes = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if body_bytes > MAX_BODY_BYTES || rest.len() != body_bytes + CHECKSUM_BYTES {
        return Err(short(ENVELOPE_BYTES.saturating_add(body_bytes)));
    }
    let (sealed, sum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(short(ENVELOPE_BYTES))?;
    if checksum(sealed) != *sum {
        return Err(FormatError::Checksum { what: WHAT });
    }
    if found_kind != kind as u8 {
        return Err(FormatError::RecordKind {
            expected: kind,
            found: format!("record of kind {found_kind}"),
        });
    }
    if !versions.contains(&version) {
        return Err(FormatError::Version {
            what: format!("the {kind} record"),
            found: version.into(),
            first: (*versions.start()).into(),
            last: (*versions.end()).into(),
        });
    }
    Ok((version, sealed.get(HEAD_BYTES..).unwrap_or_default()))
}

/// Splits the first record, unchecked, off bytes that hold several records in a row. Returns it and
/// the rest, or `None` when there is no complete record.
pub fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>()?;
    let [.., l0, l1, l2, l3] = *head;
    let body_bytes = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    let is_whole = body_bytes <= MAX_BODY_BYTES && rest.len() >= body_bytes + CHECKSUM_BYTES;
    is_whole.then(|| bytes.split_at(ENVELOPE_BYTES + body_bytes))
}

/// Decodes the body of a checked envelope. Every byte must be used.
pub fn parse_body<T: DeserializeOwned>(kind: RecordKind, body: &[u8]) -> Result<T, FormatError> {
    let (value, rest) = postcard::take_from_bytes(body)
        .map_err(|error| FormatError::Body { kind, why: error.to_string() })?;
    match rest.len() {
        0 => Ok(value),
        left => Err(FormatError::Body { kind, why: format!("{left} bytes left over") }),
    }
}

/// Opens a record of a kind whose versions in `versions` all decode as `T`.
pub fn open_record<T: DeserializeOwned>(
    kind: RecordKind,
    versions: RangeInclusive<u8>,
    bytes: &[u8],
) -> Result<T, FormatError> {
    let (_, body) = open_envelope(kind, versions, bytes)?;
    parse_body(kind, body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::ErrorKind;

    type Body = (u64, String, Vec<u8>);

    fn sealed() -> Vec<u8> {
        let body: Body = (300, "step".to_owned(), vec![1, 2, 3]);
        seal_record(RecordKind::Fence, 1, &body).unwrap()
    }

    fn open(bytes: &[u8]) -> Result<Body, FormatError> {
        open_record(RecordKind::Fence, 1..=1, bytes)
    }

    #[test]
    fn the_bytes_are_the_ones_of_the_page() {
        let bytes = sealed();
        let body = [0xac, 0x02, 4, b's', b't', b'e', b'p', 3, 1, 2, 3];
        let mut expected = b"rRd1\x08\x01\x0b\0\0\0".to_vec();
        expected.extend(body);
        expected.extend(&blake3::hash(&expected).as_bytes()[..16]);
        assert_eq!(bytes, expected);
        assert_eq!(open(&bytes), Ok((300, "step".to_owned(), vec![1, 2, 3])));
    }

    #[test]
    fn any_flipped_bit_any_missing_or_added_byte_is_refused() {
        let good = sealed();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&bad).map_err(|e| e.kind()), Err(ErrorKind::Corrupt), "bit {bit}");
        }
        for len in 0..good.len() {
            assert!(open(&good[..len]).is_err(), "cut to {len}");
        }
        assert!(open(&[good.as_slice(), b"x"].concat()).is_err());
    }

    #[test]
    fn a_later_version_is_not_corruption() {
        let later = seal_record(RecordKind::Fence, 2, &1u8).unwrap();
        let error = open(&later).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("upgrade"), "{error}");
        assert!(open_record::<u8>(RecordKind::Fence, 1..=2, &later).is_ok());
        assert!(open_record::<u8>(RecordKind::Receipt, 1..=2, &later).is_err());
    }

    #[test]
    fn a_body_is_used_to_its_last_byte_and_bounded() {
        let two = seal_record(RecordKind::Fence, 1, &(1u8, 2u8)).unwrap();
        let error = open_record::<u8>(RecordKind::Fence, 1..=1, &two).unwrap_err();
        assert!(matches!(error, FormatError::Body { .. }), "{error}");
        let long = "x".repeat(MAX_BODY_BYTES);
        let error = seal_record(RecordKind::Fence, 1, &long).unwrap_err();
        assert!(matches!(error, FormatError::TooLong { .. }), "{error}");
    }
}
