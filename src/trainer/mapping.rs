//! Segments in this process's memory. No other file of the trainer layer accesses shared memory.
//!
//! A segment is a file that two processes map. The trainer writes it and then sets the state
//! *staged*; the staging daemon and later readers read it. Rust's rules about references cannot be
//! checked across processes, so this file keeps them by the protocol of docs/staging.md: bytes are
//! written only between *filling* and *staged*, and read only after *staged*. A process that
//! violates the protocol can make a reader see other bytes, which the hashes detect. It cannot make
//! the reader access memory outside the mapping.
//!
//! Shortening a file while it is mapped kills the process that reads past its end (SIGBUS).
//! [`check_allocated`] refuses files that are too short or have holes; docs/staging.md says what is
//! done about a trainer that shortens its own segment afterwards.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};

/// Length of the pieces in which pages are reserved. Signals are served between two pieces.
const PIECE_BYTES: u64 = 1 << 30;
/// Length of the blocks that `st_blocks` counts, whatever the file system's block size.
const STAT_BLOCK_BYTES: u64 = 512;

/// Length of the part that a thread copies before it takes the next one.
const PART_BYTES: usize = 4 << 20;
/// Minimum length of a copy that bypasses the cache. For shorter ones, waiting for the streamed
/// stores to complete takes longer than streaming saves.
const MIN_STREAMED_BYTES: usize = 64 << 10;

/// A mapping that this process writes.
#[derive(Debug)]
pub struct Writable(MmapRaw);

/// A mapping that this process only reads.
#[derive(Debug)]
pub struct Readable(MmapRaw);

/// Fails if `file` is shorter than `len_bytes` or has less memory allocated: a mapping of its first
/// `len_bytes` could not be read safely. The check compares totals, so it may miss a hole in a
/// longer file.
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

/// Reserves memory for the first `len_bytes` of `file`. The kernel charges the pages to the calling
/// process, and a full file system is an error here instead of a SIGBUS at the first write.
/// `proceed` is called before each piece; its error ends the work.
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

/// Returns the bytes `from..from + len` of a mapping as a pointer. Fails if they are not all inside
/// the mapping.
fn at(map: &MmapRaw, from: usize, len: usize) -> io::Result<*mut u8> {
    match from.checked_add(len) {
        Some(end) if end <= map.len() => Ok(map.as_mut_ptr().wrapping_add(from)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Writable {
    /// Maps the first `len_bytes` of `file`, all of which must be backed by memory (see
    /// [`reserve`]), and makes the pages present, so that no later write waits for the kernel to
    /// clear a page. `proceed` is called before each piece; its error ends the work.
    pub fn map(
        file: &File,
        len_bytes: u64,
        mut proceed: impl FnMut() -> io::Result<()>,
    ) -> io::Result<Self> {
        let map = check_len(file, len_bytes)?.map_raw(file)?;
        // A forked worker must not keep the memory alive, and copying page tables for it would slow
        // down the fork.
        map.advise(Advice::DontFork)?;
        let mut offset = 0;
        while offset < map.len() {
            proceed()?;
            let piece = (PIECE_BYTES as usize).min(map.len() - offset);
            match map.advise_range(Advice::PopulateWrite, offset, piece) {
                Ok(()) => {}
                // Kernels before 5.14 do not know this advice. There the first save faults the
                // pages in.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => break,
                Err(error) => return Err(error),
            }
            offset += piece;
        }
        Ok(Self(map))
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the mapping is empty. The mapping of a segment never is, because each
    /// segment has a header.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Returns the start of the mapping, valid for [`Writable::len`] bytes as long as this value
    /// lives.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = at(&self.0, offset, bytes.len())?;
        // SAFETY: `at` checked that the range is inside the mapping, which lives as long as `self`.
        // `bytes` cannot overlap it, because no reference into a writable mapping is ever handed
        // out.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies each of `sources` to its offset, on up to `threads` threads. On x86-64, long copies
    /// bypass the caches: a step is too long to stay in them until it is read, and through a cache
    /// each line of the target would be read from memory before it is overwritten.
    ///
    /// # Errors
    ///
    /// Fails, before anything is written, if a target is not inside the mapping or overlaps another
    /// one.
    pub fn write_all(&self, sources: &mut [(usize, &[u8])], threads: usize) -> io::Result<()> {
        sources.sort_unstable_by_key(|(offset, bytes)| (*offset, bytes.len()));
        let mut end = 0;
        for (offset, bytes) in &*sources {
            if *offset < end {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "two targets overlap"));
            }
            at(&self.0, *offset, bytes.len())?;
            end = offset + bytes.len();
        }
        let mut parts = Vec::with_capacity(sources.len());
        for (offset, bytes) in &*sources {
            let starts = (*offset..).step_by(PART_BYTES);
            parts.extend(starts.zip(bytes.chunks(PART_BYTES)));
        }
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((offset, bytes)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let to = self.0.as_mut_ptr().wrapping_add(*offset);
                // SAFETY: the loop above checked that the target is inside the mapping, which lives
                // as long as `self`, and that no two targets overlap. Each target is taken by one
                // thread. No source overlaps a target, because no reference into a writable mapping
                // is ever handed out.
                unsafe { copy_past_caches(bytes, to) };
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(parts.len()) {
                // If a thread cannot be started, the others do its work.
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        Ok(())
    }

    /// Sets the four bytes at `offset`, a multiple of four, with release ordering: after everything
    /// that this process wrote before.
    pub fn store_release(&self, offset: usize, value: u32) -> io::Result<()> {
        word(&self.0, offset)?.store(value.to_le(), Ordering::Release);
        Ok(())
    }
}

impl Readable {
    /// Maps the first `len_bytes` of `file`, all of which must be backed by memory.
    pub fn map(file: &File, len_bytes: u64) -> io::Result<Self> {
        let map = check_len(file, len_bytes)?.map_raw_read_only(file)?;
        map.advise(Advice::DontFork)?;
        Ok(Self(map))
    }

    /// Reads the four bytes at `offset`, a multiple of four, with acquire ordering: before
    /// everything that this process reads later.
    pub fn load_acquire(&self, offset: usize) -> io::Result<u32> {
        let word = word(&self.0, offset)?.load(Ordering::Relaxed);
        // On read-only memory only relaxed loads are defined; the fence makes this one an acquire
        // load.
        fence(Ordering::Acquire);
        Ok(u32::from_le(word))
    }

    /// Copies the bytes from `offset` on into `out`. Use this for bytes that are parsed: a copy
    /// does not change while it is parsed.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        let from = at(&self.0, offset, out.len())?;
        // SAFETY: `at` checked that the range is inside the mapping; `out` is this process's own
        // memory.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }
}

impl AsRef<[u8]> for Readable {
    /// Returns the bytes. They must be staged, or belong to a file that no process writes.
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping is readable for its whole length and lives as long as `self`. No
        // process writes staged bytes (docs/staging.md): the daemon gives a writable descriptor of
        // a segment only to the trainer for which the segment was made, and that trainer writes it
        // again only after the daemon has ordered it to fill the segment, which happens when no
        // reader that the daemon knows is left. Other readers, and all readers if a trainer
        // violates this, may see other bytes. The readers only copy, hash and send the bytes, and
        // compare the hashes or check the header afterwards.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// Copies `from` to `to`. On x86-64 a long copy bypasses the caches, and all of its stores come
/// before every later store of this thread.
///
/// # Safety
///
/// `to` must point to at least `from.len()` writable bytes, which do not overlap `from` and which
/// no other thread uses meanwhile.
unsafe fn copy_past_caches(from: &[u8], to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    if from.len() >= MIN_STREAMED_BYTES {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        const LINE: usize = 64;
        let head = to.align_offset(LINE).min(from.len());
        let body = (from.len() - head) / LINE * LINE;
        let (source, target) = (from.as_ptr(), to);
        // SAFETY: head, body and tail together are `from.len()` bytes, and the contract gives both
        // sides that many. `target + head` is a multiple of 64, so it has the alignment of 16 that
        // streaming stores require. SSE2 is part of x86-64. The fence orders the stores, which are
        // weaker than Rust's memory model assumes, before everything that follows.
        unsafe {
            std::ptr::copy_nonoverlapping(source, target, head);
            for at in (head..head + body).step_by(LINE) {
                let (source, target) =
                    (source.add(at).cast::<__m128i>(), target.add(at).cast::<__m128i>());
                let first = _mm_loadu_si128(source);
                let second = _mm_loadu_si128(source.add(1));
                let third = _mm_loadu_si128(source.add(2));
                let fourth = _mm_loadu_si128(source.add(3));
                _mm_stream_si128(target, first);
                _mm_stream_si128(target.add(1), second);
                _mm_stream_si128(target.add(2), third);
                _mm_stream_si128(target.add(3), fourth);
            }
            _mm_sfence();
            let tail = head + body;
            std::ptr::copy_nonoverlapping(source.add(tail), target.add(tail), from.len() - tail);
        }
        return;
    }
    // SAFETY: the caller guarantees it by the contract of this function.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
}

/// Returns the aligned word at `offset`. Fails if it is unaligned or outside the mapping.
fn word(map: &MmapRaw, offset: usize) -> io::Result<&AtomicU32> {
    let place = at(map, offset, 4)?.cast::<u32>();
    if !place.is_aligned() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the place is aligned and inside the mapping, which outlives the reference. Through a
    // mapping, processes write these four bytes only with atomic operations of four bytes; the
    // daemon writes them with system calls. A read-only mapping is only loaded from.
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
    fn many_sources_come_to_their_places() {
        let len = 24 << 20;
        let file = file();
        reserve(&file, len, || Ok(())).unwrap();
        let map = Writable::map(&file, len, || Ok(())).unwrap();
        let data: Vec<u8> =
            (0..20_u32 << 20).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        let mut expected = vec![0; len as usize];
        // Lengths around a cache line, around the streaming threshold, and beyond one thread's
        // part; targets at odd offsets.
        let lengths = [
            0,
            1,
            63,
            64,
            65,
            MIN_STREAMED_BYTES - 1,
            MIN_STREAMED_BYTES,
            MIN_STREAMED_BYTES + 77,
            PART_BYTES * 2 + 13,
            4_097,
        ];
        for threads in [1, 3] {
            let (mut sources, mut offset) = (Vec::new(), threads);
            for (number, length) in lengths.into_iter().enumerate() {
                let bytes = &data[number * 31..number * 31 + length];
                expected[offset..offset + length].copy_from_slice(bytes);
                sources.push((offset, bytes));
                offset += length + number;
            }
            sources.reverse();
            map.write_all(&mut sources, threads).unwrap();
            let reader = Readable::map(&file, len).unwrap();
            assert!(reader.as_ref() == expected, "{threads} threads");
        }
        assert!(map.write_all(&mut [(8, b"abc"), (10, b"d")], 2).is_err(), "two targets overlap");
        assert!(map.write_all(&mut [(0, b"x"), (len as usize, b"d")], 2).is_err());
        assert_eq!(
            Readable::map(&file, len).unwrap().as_ref()[0],
            expected[0],
            "nothing was written"
        );
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
