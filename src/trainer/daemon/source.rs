//! Shards over segments: an upload hashes and sends the segments' own memory, without a copy.

use std::io;

use bytes::Bytes;

use super::hold::Hold;
use crate::pipeline::upload::ShardSource;
use crate::trainer::mapping::Readable;

/// The memory of a segment, held as long as any byte of it is in use. Every [`Bytes`] over it owns
/// the hold, including those that the transport still has to send.
pub struct HeldMemory {
    map: Readable,
    _hold: Hold,
}

impl HeldMemory {
    /// Returns the bytes of `map`. `hold` keeps the segment from being filled again.
    pub fn bytes(map: Readable, hold: Hold) -> Bytes {
        Bytes::from_owner(Self { map, _hold: hold })
    }
}

impl AsRef<[u8]> for HeldMemory {
    fn as_ref(&self) -> &[u8] {
        self.map.as_ref()
    }
}

/// Pieces of memory in ascending order. The bytes between two pieces are zero.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    /// The offset and the bytes of each piece, ascending.
    pieces: Vec<(u64, Bytes)>,
    len_bytes: u64,
}

impl Pieces {
    /// Adds a piece at `offset`, which must not be before the end of the last one.
    pub fn push(&mut self, offset: u64, bytes: Bytes) {
        debug_assert!(offset >= self.len_bytes, "pieces overlap");
        self.len_bytes = offset + bytes.len() as u64;
        if !bytes.is_empty() {
            self.pieces.push((offset, bytes));
        }
    }

    /// Returns the length up to the end of the last piece, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the pieces of the range `from..to`, which becomes `0..to - from`.
    pub fn slice(&self, from: u64, to: u64) -> Self {
        let mut out = Self::default();
        for (start, bytes) in &self.pieces {
            let end = start + bytes.len() as u64;
            let (first, last) = (from.max(*start), to.min(end));
            if first < last {
                out.push(
                    first - from,
                    bytes.slice((first - start) as usize..(last - start) as usize),
                );
            }
        }
        out.len_bytes = to.saturating_sub(from);
        out
    }

    /// Returns the index of the piece that contains `offset`, or else of the first one after it.
    fn at(&self, offset: u64) -> usize {
        self.pieces.partition_point(|(start, bytes)| start + bytes.len() as u64 <= offset)
    }
}

impl ShardSource for Pieces {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.len_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.fill(0);
        for (start, bytes) in self.pieces.get(self.at(offset)..).unwrap_or_default() {
            let end = offset + out.len() as u64;
            if *start >= end {
                break;
            }
            let (first, last) = (offset.max(*start), end.min(start + bytes.len() as u64));
            let from = &bytes[(first - start) as usize..(last - start) as usize];
            out[(first - offset) as usize..(last - offset) as usize].copy_from_slice(from);
        }
        Ok(())
    }

    fn bytes_in_memory(&self, offset: u64, len: usize) -> Option<Bytes> {
        let (start, bytes) = self.pieces.get(self.at(offset))?;
        let from = usize::try_from(offset.checked_sub(*start)?).ok()?;
        (from.checked_add(len)? <= bytes.len()).then(|| bytes.slice(from..from + len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces() -> Pieces {
        let mut pieces = Pieces::default();
        pieces.push(0, Bytes::from_static(b"abc"));
        pieces.push(3, Bytes::new());
        pieces.push(5, Bytes::from_static(b"defg"));
        pieces
    }

    #[test]
    fn every_range_is_what_it_would_be_in_one_piece() {
        let (pieces, whole) = (pieces(), b"abc\0\0defg");
        assert_eq!(pieces.len_bytes(), 9);
        for from in 0..=9usize {
            for to in from..=9 {
                let mut out = vec![1; to - from];
                pieces.read_at(from as u64, &mut out).unwrap();
                assert_eq!(out, &whole[from..to]);
                if let Some(bytes) = pieces.bytes_in_memory(from as u64, to - from) {
                    assert_eq!(bytes, &whole[from..to]);
                }
                let slice = pieces.slice(from as u64, to as u64);
                let mut again = vec![1; to - from];
                slice.read_at(0, &mut again).unwrap();
                assert_eq!(
                    (again.as_slice(), slice.len_bytes()),
                    (&whole[from..to], (to - from) as u64)
                );
            }
        }
        assert!(pieces.bytes_in_memory(5, 4).is_some() && pieces.bytes_in_memory(2, 2).is_none());
        assert!(
            pieces.read_at(9, &mut [0]).is_err() && pieces.read_at(u64::MAX, &mut [0]).is_err()
        );
    }
}
