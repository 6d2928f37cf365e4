//! Segments in this process's memory: the one place of the trainer layer that touches shared memory.
//!
//! A segment is a file that two processes map. The trainer writes it, then says *staged*; the staging daemon and later readers read it.
//! Rust's rules about references cannot be checked across processes, so this file keeps them by the protocol of docs/staging.md: bytes are
//! written only between *filling* and *staged*, and read only after *staged*. A process that breaks the protocol can make a reader see
//! other bytes, which the hashes find. It cannot make the reader touch memory that is not the mapping's.
//!
//! A file that is shortened while it is mapped ends the process that reads behind its end (SIGBUS). [`check_allocated`] refuses files that
//! are too short or have holes; docs/staging.md says what is done about a trainer that shortens its own segment afterwards.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};

/// Pages are reserved in pieces of this length, so that a signal is served between two pieces.
const PIECE_BYTES: u64 = 1 << 30;
/// Blocks of `st_blocks` have this length, whatever the file system's blocks are.
const STAT_BLOCK_BYTES: u64 = 512;

/// A mapping that this process writes.
#[derive(Debug)]
pub struct Writable(MmapRaw);

/// A mapping that this process only reads.
#[derive(Debug)]
pub struct Readable(MmapRaw);

/// Refuses a file that a mapping of `len_bytes` would read behind the end of, or that has pages without memory.
pub fn check_allocated(file: &File, len_bytes: u64) -> io::Result<()> {
    let metadata = file.metadata()?;
    let allocated_bytes = metadata.blocks().saturating_mul(STAT_BLOCK_BYTES);
    if !metadata.is_file() || metadata.len() < len_bytes || allocated_bytes < len_bytes {
        let found = metadata.len().min(allocated_bytes);
        let message = format!("the segment has {found} bytes of memory, {len_bytes} expected");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
    }
    Ok(())
}

/// Reserves memory for the first `len_bytes` of `file`. The process that calls it is charged for the pages, and a full file system is an
/// error here instead of a SIGBUS at the first write. `proceed` is asked between pieces; its error ends the work.
pub fn reserve(
    file: &File,
    len_bytes: u64,
    mut proceed: impl FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let mut offset = 0;
    while offset < len_bytes {
        proceed()?;
        let piece = PIECE_BYTES.min(len_bytes - offset);
        match fallocate(file, FallocateFlags::empty(), offset, piece) {
            Ok(()) => offset += piece,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn check_len(file: &File, len_bytes: u64) -> io::Result<MmapOptions> {
    check_allocated(file, len_bytes)?;
    let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut options = MmapOptions::new();
    options.len(len);
    Ok(options)
}

/// The bytes `from..from + len` of a mapping as a pointer; refused when they are not all in it.
fn at(map: &MmapRaw, from: usize, len: usize) -> io::Result<*mut u8> {
    match from.checked_add(len) {
        Some(end) if end <= map.len() => Ok(map.as_mut_ptr().wrapping_add(from)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Writable {
    /// Maps the first `len_bytes` of `file`, all of which have memory (see [`reserve`]), and makes the pages present, so that no later
    /// write waits for the kernel to clear one. `proceed` is asked between pieces.
    pub fn map(
        file: &File,
        len_bytes: u64,
        mut proceed: impl FnMut() -> io::Result<()>,
    ) -> io::Result<Self> {
        let map = check_len(file, len_bytes)?.map_raw(file)?;
        // A forked worker must not keep the memory, and copying page tables for it would make the fork slow.
        map.advise(Advice::DontFork)?;
        let mut offset = 0;
        while offset < map.len() {
            proceed()?;
            let piece = (PIECE_BYTES as usize).min(map.len() - offset);
            match map.advise_range(Advice::PopulateWrite, offset, piece) {
                Ok(()) => {}
                // Kernels before 5.14 do not know the advice: the first save faults the pages in.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => break,
                Err(error) => return Err(error),
            }
            offset += piece;
        }
        Ok(Self(map))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the mapping is empty; it never is, because the kernel maps no empty file.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Where the mapping begins. Valid for [`Writable::len`] bytes as long as this value lives.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = at(&self.0, offset, bytes.len())?;
        // SAFETY: `at` checked that the range lies in the mapping, which lives as long as `self`. `bytes` cannot overlap it: no reference
        // into a writable mapping is ever handed out.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Sets the four bytes at `offset`, a multiple of four, after all that this process wrote before.
    pub fn store_release(&self, offset: usize, value: u32) -> io::Result<()> {
        word(&self.0, offset)?.store(value.to_le(), Ordering::Release);
        Ok(())
    }
}

impl Readable {
    /// Maps the first `len_bytes` of `file`, all of which must have memory.
    pub fn map(file: &File, len_bytes: u64) -> io::Result<Self> {
        let map = check_len(file, len_bytes)?.map_raw_read_only(file)?;
        map.advise(Advice::DontFork)?;
        Ok(Self(map))
    }

    /// Reads the four bytes at `offset`, a multiple of four, before all that this process reads later.
    pub fn load_acquire(&self, offset: usize) -> io::Result<u32> {
        let word = word(&self.0, offset)?.load(Ordering::Relaxed);
        // On memory that cannot be written only relaxed loads are defined; the fence makes them acquire.
        fence(Ordering::Acquire);
        Ok(u32::from_le(word))
    }

    /// Copies the bytes from `offset` on into `out`. For what is parsed: a copy does not change while it is looked at.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        let from = at(&self.0, offset, out.len())?;
        // SAFETY: `at` checked that the range lies in the mapping; `out` is this process's own memory.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }
}

impl AsRef<[u8]> for Readable {
    /// The bytes. They must be staged, or of a file that nobody writes.
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping is readable for its whole length and lives as long as `self`. Nobody writes staged bytes
        // (docs/staging.md): the daemon gives no descriptor for writing of a segment to anybody but the trainer that it was made for, and
        // that trainer writes it again only after the daemon said *free*, which it does when no reader is left. A trainer that breaks this
        // makes readers see other bytes. The readers only copy, hash and send them, and compare the hashes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// The aligned word at `offset`.
fn word(map: &MmapRaw, offset: usize) -> io::Result<&AtomicU32> {
    let place = at(map, offset, 4)?.cast::<u32>();
    if !place.is_aligned() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the place is aligned and inside the mapping, which outlives the reference; every process accesses these four bytes by
    // atomic operations of four bytes only. A read-only mapping is only loaded from.
    Ok(unsafe { AtomicU32::from_ptr(place) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap()
    }

    #[test]
    fn both_sides_see_one_memory() {
        let file = file();
        reserve(&file, 10_000, || Ok(())).unwrap();
        let writer = Writable::map(&file, 10_000, || Ok(())).unwrap();
        let reader = Readable::map(&file, 10_000).unwrap();
        writer.write(9_990, b"0123456789").unwrap();
        writer.store_release(8, 7).unwrap();
        assert_eq!(reader.load_acquire(8).unwrap(), 7);
        let mut out = [0; 4];
        reader.copy_to(9_996, &mut out).unwrap();
        assert_eq!(&out, b"6789");
        assert_eq!(&reader.as_ref()[9_990..], b"0123456789");
    }

    #[test]
    fn what_is_outside_is_refused() {
        let file = file();
        reserve(&file, 4096, || Ok(())).unwrap();
        let map = Writable::map(&file, 4096, || Ok(())).unwrap();
        assert!(map.write(4095, b"ab").is_err() && map.write(usize::MAX, b"ab").is_err());
        assert!(map.store_release(4094, 1).is_err() && map.store_release(6, 1).is_err());
        assert!(Readable::map(&file, 4097).is_err());
    }

    #[test]
    fn a_file_with_a_hole_is_not_mapped() {
        let file = file();
        file.set_len(1 << 20).unwrap();
        assert!(check_allocated(&file, 1 << 20).is_err());
        reserve(&file, 1 << 20, || Ok(())).unwrap();
        assert!(check_allocated(&file, 1 << 20).is_ok());
    }

    #[test]
    fn work_that_may_not_proceed_ends() {
        let stop = || Err(io::ErrorKind::Interrupted.into());
        let file = file();
        assert!(reserve(&file, 4096, stop).is_err());
        reserve(&file, 4096, || Ok(())).unwrap();
        assert!(Writable::map(&file, 4096, stop).is_err());
    }
}
