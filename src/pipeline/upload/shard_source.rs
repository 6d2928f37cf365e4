//! The bytes of a shard that is saved.

use std::io;

use bytes::Bytes;

/// A source of a shard's bytes. The methods may block. Bytes are read more than once if a holder
/// fails.
pub trait ShardSource: Send + Sync + 'static {
    /// Returns the length in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `out` with the bytes from `offset` on.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Returns the `len` bytes from `offset` on, if the source has them in memory in one piece.
    /// They are then hashed and sent without a copy. The memory must not change before the save has
    /// ended, because a block whose holder fails is read again.
    fn bytes_in_memory(&self, offset: u64, len: usize) -> Option<Bytes> {
        let _ = (offset, len);
        None
    }

    /// Returns whether the source is the same as when it was opened, as far as it can tell. The
    /// caller asks after it has read all of the source.
    fn is_unchanged(&self) -> io::Result<bool> {
        Ok(true)
    }
}

impl ShardSource for Bytes {
    fn len_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let range = from.checked_add(out.len()).and_then(|to| self.get(from..to));
        out.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn bytes_in_memory(&self, offset: u64, len: usize) -> Option<Bytes> {
        let from = usize::try_from(offset).ok()?;
        (from.checked_add(len)? <= self.len()).then(|| self.slice(from..from + len))
    }
}
