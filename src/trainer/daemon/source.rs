//! Shards over segments: the bytes that an upload hashes and sends are the segments' own memory.

use std::io;

use bytes::Bytes;

use super::hold::Hold;
use crate::pipeline::upload::ShardSource;
use crate::trainer::mapping::Readable;

/// The memory of a segment that is held as long as any byte of it is in use: a [`Bytes`] over it, also one that the transport still has
/// to send, owns the hold.
pub struct HeldMemory {
    map: Readable,
    _hold: Hold,
}

impl HeldMemory {
    /// The bytes of `map`, which `hold` keeps from being filled again.
    pub fn bytes(map: Readable, hold: Hold) -> Bytes {
        Bytes::from_owner(Self { map, _hold: hold })
    }
}

impl AsRef<[u8]> for HeldMemory {
    fn as_ref(&self) -> &[u8] {
        self.map.as_ref()
    }
}

/// Pieces of memory one behind the other; what lies between two of them is zero.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    /// Where each begins, ascending.
    pieces: Vec<(u64, Bytes)>,
    len_bytes: u64,
}

impl Pieces {
    /// Adds a piece at `offset`, which is not before the end of the last one.
    pub fn push(&mut self, offset: u64, bytes: Bytes) {
        debug_assert!(offset >= self.len_bytes, "pieces overlap");
        self.len_bytes = offset + bytes.len() as u64;
        if !bytes.is_empty() {
            self.pieces.push((offset, bytes));
        }
    }

    /// Length with all pieces.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The same without what lies outside `from..to`, which becomes `0..to - from`.
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

    /// The piece that has the byte at `offset`, or the first one behind it.
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

    fn bytes_at(&self, offset: u64, len: usize) -> Option<Bytes> {
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
                if let Some(bytes) = pieces.bytes_at(from as u64, to - from) {
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
        assert!(pieces.bytes_at(5, 4).is_some() && pieces.bytes_at(2, 2).is_none());
        assert!(
            pieces.read_at(9, &mut [0]).is_err() && pieces.read_at(u64::MAX, &mut [0]).is_err()
        );
    }
}
