//! Replica and piece files: first the data, so that direct I/O finds it aligned, then the bytes
//! that prove it.
//!
//! ```text
//! 0            D       data
//! D            32 g    hash of each of the g = ceil(D / 64 KiB) grains (format::tree)
//! D + 32 g     H       the sealed header record (format::envelope, FileHeader)
//! file end-32  32      trailer: magic "rRdT", version u32, H u32, D u64, 12 bytes of BLAKE3
//! ```
//!
//! All numbers are little-endian. Each byte after the data is covered by exactly one check: the
//! table by the root in the header, the header by its envelope, the trailer by its own checksum.
//! The three lengths must add up to the length of the file. The header states the content of the
//! file, and the file's name must agree with it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::format::FormatError;
use crate::format::envelope::{RecordKind, open_record, seal_record};
use crate::format::tree::{GrainTree, HASH_BYTES, Hash};
use crate::id::{Attempt, ClusterId, NodeId, StripeId};
use crate::units::{MAX_BLOCK_BYTES, grains};

/// The length of the trailer in bytes.
pub const TRAILER_BYTES: u64 = 32;
/// The longest sealed header that is read, in bytes.
pub const MAX_HEADER_BYTES: u64 = 1024;
/// Maximum number of bytes after the data.
pub const MAX_TAIL_BYTES: u64 =
    grains(MAX_BLOCK_BYTES) * HASH_BYTES + MAX_HEADER_BYTES + TRAILER_BYTES;

const TRAILER_MAGIC: [u8; 4] = *b"rRdT";
const TRAILER_VERSION: u32 = 1;
const HEADER_VERSION: u8 = 1;
const WHAT: &str = "replica or piece file";

/// The content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Content {
    /// A full copy of a source block.
    Replica {
        /// The block's number in the stripe, from 0.
        block: u8,
    },
    /// A coded piece.
    Piece {
        /// The piece's number, from 0.
        piece: u8,
        /// The archiving attempt that made the piece; part of the piece's file name.
        attempt: Attempt,
        /// The id of the code.
        code: u64,
    },
}

impl Content {
    /// Returns the name of a file with this content.
    pub fn name(&self) -> FileName {
        match *self {
            Self::Replica { block } => FileName::Replica { block },
            Self::Piece { piece, attempt, .. } => FileName::Piece { piece, attempt },
        }
    }
}

/// The name of a file in its stripe's folder: `block-03.rep`, `piece-07-<attempt>.pc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FileName {
    /// A full copy of a source block.
    Replica {
        /// The block's number in the stripe, from 0.
        block: u8,
    },
    /// A coded piece.
    Piece {
        /// The piece's number, from 0.
        piece: u8,
        /// The archiving attempt that made the piece; part of the piece's file name.
        attempt: Attempt,
    },
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replica { block } => write!(f, "block-{block:02}.rep"),
            Self::Piece { piece, attempt } => write!(f, "piece-{piece:02}-{attempt}.pc"),
        }
    }
}

impl FromStr for FileName {
    type Err = FormatError;

    /// Accepts only texts that [`Display`](fmt::Display) prints, so that one file has one name.
    fn from_str(text: &str) -> Result<Self, FormatError> {
        let parsed = if let Some(block) =
            text.strip_prefix("block-").and_then(|rest| rest.strip_suffix(".rep"))
        {
            block.parse().ok().map(|block| Self::Replica { block })
        } else {
            text.strip_prefix("piece-")
                .and_then(|rest| rest.strip_suffix(".pc"))
                .and_then(|rest| rest.split_once('-'))
                .and_then(|(piece, attempt)| Some((piece.parse().ok()?, attempt.parse().ok()?)))
                .map(|(piece, attempt)| Self::Piece { piece, attempt })
        };
        parsed
            .filter(|name| name.to_string() == text)
            .ok_or_else(|| FormatError::FileName { name: text.chars().take(128).collect() })
    }
}

/// The key of a file on a node: its stripe, and its name in the stripe's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileKey {
    /// The stripe.
    pub stripe: StripeId,
    /// The name of the file in the stripe's folder.
    pub name: FileName,
}

impl FileKey {
    /// Returns the key of the replica of `block`.
    pub fn replica(stripe: StripeId, block: u8) -> Self {
        Self { stripe, name: FileName::Replica { block } }
    }

    /// Returns the key of `piece` as made by `attempt`.
    pub fn piece(stripe: StripeId, piece: u8, attempt: Attempt) -> Self {
        Self { stripe, name: FileName::Piece { piece, attempt } }
    }
}

impl fmt::Display for FileKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:08x}/{}", self.stripe.shard, self.stripe.index, self.name)
    }
}

/// The description of a file in its own header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHeader {
    /// The cluster that the file belongs to.
    pub cluster: ClusterId,
    /// The stripe.
    pub stripe: StripeId,
    /// The block or piece that the file holds.
    pub content: Content,
    /// The number of data bytes without padding.
    pub len_bytes: u64,
    /// The BLAKE3 hash of the data.
    pub root: Hash,
    /// The node that wrote the file.
    pub written_by: NodeId,
    /// The layout of the stripe.
    pub layout: u8,
}

impl FileHeader {
    /// Returns the key under which a node stores this file.
    pub fn key(&self) -> FileKey {
        FileKey { stripe: self.stripe, name: self.content.name() }
    }
}

/// The last 32 bytes of a file, by which all other parts are located.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    data_bytes: u64,
    header_bytes: u64,
}

impl Trailer {
    /// Parses the trailer of a file of `file_bytes`. Returns an error unless all its lengths are
    /// consistent with that length.
    pub fn parse(
        file_bytes: u64,
        bytes: &[u8; TRAILER_BYTES as usize],
    ) -> Result<Self, FormatError> {
        let (fields, sum) = bytes.split_at(20);
        let [magic, version, header, data_low, data_high] = fields.as_chunks::<4>().0 else {
            return Err(FormatError::Magic { what: WHAT });
        };
        if *magic != TRAILER_MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        if sum != trailer_checksum(fields) {
            return Err(FormatError::Checksum { what: WHAT });
        }
        let version = u32::from_le_bytes(*version);
        if version != TRAILER_VERSION {
            return Err(FormatError::Version {
                what: format!("the {WHAT}"),
                found: version,
                first: TRAILER_VERSION,
                last: TRAILER_VERSION,
            });
        }
        let data_bytes = u64::from(u32::from_le_bytes(*data_low))
            | u64::from(u32::from_le_bytes(*data_high)) << 32;
        let trailer = Self { data_bytes, header_bytes: u32::from_le_bytes(*header).into() };
        if trailer.data_bytes > MAX_BLOCK_BYTES || trailer.header_bytes > MAX_HEADER_BYTES {
            return Err(FormatError::Contradiction { part: "trailer" });
        }
        // Both lengths are bounded now, so the sums cannot overflow.
        let expected_bytes = trailer.data_bytes + trailer.tail_bytes();
        if expected_bytes != file_bytes {
            return Err(FormatError::Length {
                what: WHAT,
                expected_bytes,
                found_bytes: file_bytes,
            });
        }
        Ok(trailer)
    }

    fn to_bytes(self) -> [u8; TRAILER_BYTES as usize] {
        let mut out = [0; TRAILER_BYTES as usize];
        out[..4].copy_from_slice(&TRAILER_MAGIC);
        out[4..8].copy_from_slice(&TRAILER_VERSION.to_le_bytes());
        out[8..12].copy_from_slice(&(self.header_bytes as u32).to_le_bytes());
        out[12..20].copy_from_slice(&self.data_bytes.to_le_bytes());
        let sum = trailer_checksum(&out[..20]);
        out[20..].copy_from_slice(&sum);
        out
    }

    /// Returns the length of the data, which is the offset of the tail.
    pub fn data_bytes(self) -> u64 {
        self.data_bytes
    }

    /// Returns the length of table, header and trailer, at most [`MAX_TAIL_BYTES`].
    pub fn tail_bytes(self) -> u64 {
        self.table_bytes() + self.header_bytes + TRAILER_BYTES
    }

    fn table_bytes(self) -> u64 {
        grains(self.data_bytes) * HASH_BYTES
    }
}

fn trailer_checksum(fields: &[u8]) -> [u8; 12] {
    let mut out = [0; 12];
    out.copy_from_slice(&blake3::hash(fields).as_bytes()[..12]);
    out
}

/// Returns the bytes that follow the data: table, header, trailer.
pub fn tail_to_bytes(header: &FileHeader, tree: &GrainTree) -> Result<Vec<u8>, FormatError> {
    if header.len_bytes != tree.len_bytes() || header.root != tree.root() {
        return Err(FormatError::Contradiction { part: "grain hash table" });
    }
    let sealed = seal_record(RecordKind::FileHeader, HEADER_VERSION, header)?;
    let trailer = Trailer { data_bytes: header.len_bytes, header_bytes: sealed.len() as u64 };
    let mut out = Vec::with_capacity(trailer.tail_bytes() as usize);
    out.extend(tree.hashes().as_flattened());
    out.extend(sealed);
    out.extend(trailer.to_bytes());
    Ok(out)
}

/// Parses all bytes that follow the data. Returns the header and the tree only if header, table and
/// trailer agree.
pub fn parse_tail(file_bytes: u64, tail: &[u8]) -> Result<(FileHeader, GrainTree), FormatError> {
    let short = || FormatError::Length {
        what: WHAT,
        expected_bytes: TRAILER_BYTES,
        found_bytes: tail.len() as u64,
    };
    let (rest, trailer) = tail.split_last_chunk().ok_or_else(short)?;
    let trailer = Trailer::parse(file_bytes, trailer)?;
    let (table, sealed) = rest
        .split_at_checked(trailer.table_bytes() as usize)
        .filter(|(_, sealed)| sealed.len() as u64 == trailer.header_bytes)
        .ok_or_else(short)?;
    let header: FileHeader =
        open_record(RecordKind::FileHeader, HEADER_VERSION..=HEADER_VERSION, sealed)?;
    if header.len_bytes != trailer.data_bytes {
        return Err(FormatError::Contradiction { part: "length" });
    }
    let tree = GrainTree::from_hashes(header.len_bytes, table.as_chunks::<32>().0.to_vec())?;
    if tree.root() != header.root {
        return Err(FormatError::Contradiction { part: "grain hash table" });
    }
    Ok((header, tree))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ShardId;
    use crate::kind::ErrorKind;

    fn header(content: Content, data: &[u8]) -> FileHeader {
        FileHeader {
            cluster: ClusterId([0xc1; 16]),
            stripe: StripeId { shard: ShardId([0x5a; 16]), index: 258 },
            content,
            len_bytes: data.len() as u64,
            root: GrainTree::of(data).root(),
            written_by: NodeId(0x0102_0304_0506_0708),
            layout: 0,
        }
    }

    fn file(content: Content, data: &[u8]) -> Vec<u8> {
        let tree = GrainTree::of(data);
        [data, &tail_to_bytes(&header(content, data), &tree).unwrap()].concat()
    }

    fn parse(file: &[u8]) -> Result<(FileHeader, GrainTree), FormatError> {
        let short = FormatError::Magic { what: "file" };
        let trailer = Trailer::parse(file.len() as u64, file.last_chunk().ok_or(short)?)?;
        parse_tail(file.len() as u64, &file[trailer.data_bytes() as usize..])
    }

    /// Returns the released fixtures, by content and data. The data has a prime period.
    fn released() -> Vec<(Content, Vec<u8>)> {
        let data = |len: usize| (0..len).map(|i| (i % 251) as u8).collect::<Vec<u8>>();
        let piece = Content::Piece { piece: 7, attempt: Attempt([0xa7; 16]), code: 0x10_0b };
        vec![
            (Content::Replica { block: 1 }, data(0)),
            (Content::Replica { block: 3 }, data(65_536 + 129)),
            (piece, data(256)),
        ]
    }

    #[test]
    fn released_files_are_read_and_written_for_ever() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/format/v1/");
        for (content, data) in released() {
            let path = format!("{folder}{}", content.name());
            #[allow(clippy::disallowed_methods)] // reads a fixture
            let golden = std::fs::read(&path).unwrap();
            let (found, tree) = parse(&golden).unwrap();
            assert_eq!(found, header(content, &data));
            assert_eq!(tree, GrainTree::of(&data));
            assert_eq!(&golden[..data.len()], data);
            // The current release writes version 1. After a change of version, the lines above stay
            // and this one is removed.
            assert_eq!(file(content, &data), golden, "{path}");
        }
    }

    #[test]
    fn every_bit_behind_the_data_counts_and_no_length_is_believed() {
        for (content, data) in released() {
            let good = file(content, &data);
            assert!(parse(&good).is_ok());
            for bit in data.len() * 8..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(parse(&bad).map_err(|e| e.kind()), Err(ErrorKind::Corrupt), "bit {bit}");
            }
            for cut in [0, 1, 31, 32, 33, good.len() - 1] {
                assert!(parse(&good[..cut]).is_err(), "cut to {cut}");
            }
            assert!(parse(&[b"x".as_slice(), &good].concat()).is_err());
        }
    }

    #[test]
    fn a_trailer_with_huge_lengths_is_refused_before_they_are_used() {
        for (data_bytes, header_bytes) in
            [(u64::MAX, 0), (MAX_BLOCK_BYTES + 1, 100), (0, u64::from(u32::MAX))]
        {
            let bytes = Trailer { data_bytes, header_bytes }.to_bytes();
            assert!(Trailer::parse(1 << 20, &bytes).is_err());
        }
    }

    #[test]
    fn a_version_from_the_future_is_not_corruption() {
        let mut bytes = Trailer { data_bytes: 0, header_bytes: 0 }.to_bytes();
        bytes[4] = 2;
        let sum = trailer_checksum(&bytes[..20]);
        bytes[20..].copy_from_slice(&sum);
        assert_eq!(Trailer::parse(32, &bytes).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_table_of_another_content_is_refused() {
        let (content, data) = (Content::Replica { block: 1 }, vec![1; 70_000]);
        let other = GrainTree::of(&vec![2; 70_000]);
        assert!(tail_to_bytes(&header(content, &data), &other).is_err());
    }

    #[test]
    fn names_read_back_and_one_file_has_one_name() {
        for (content, _) in released() {
            let name = content.name();
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        let wide = FileName::Replica { block: 255 };
        assert_eq!("block-255.rep".parse(), Ok(wide));
        let piece = format!("piece-07-{}.pc", "a7".repeat(16));
        assert!(piece.parse::<FileName>().is_ok());
        for bad in [
            "block-3.rep",
            "block-003.rep",
            "block-+3.rep",
            "block-256.rep",
            "block-03.rep ",
            "block-03.pc",
            "piece-07.pc",
            "piece-7-00.pc",
            "../block-03.rep",
            "",
            &piece.to_uppercase(),
            &piece.replace("piece-07", "piece-007"),
        ] {
            assert!(bad.parse::<FileName>().is_err(), "{bad:?}");
        }
    }
}
