//! Memory for the buffers of one group. It is on huge pages, so that page table walks do not
//! dominate the measurement. The starts of the buffers differ modulo 4 KiB, so that no two streams
//! compete for the same set of a cache.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use anyhow::{Context, Result, ensure};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The offset of each buffer's start within its page, relative to the previous buffer: 69 cache
/// lines.
pub const STAGGER_BYTES: usize = 4416;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Private memory of this process. All of it is touched, and filled with bytes that do not repeat
/// soon.
pub struct Arena {
    base: NonNull<c_void>,
    mapped_bytes: usize,
    start: usize,
}

impl Arena {
    /// Allocates room for `count` buffers of `bytes` each. The kernel is asked for huge pages and
    /// may refuse them. Returns an error if `bytes` is not a positive multiple of 4096 or the
    /// memory cannot be mapped.
    pub fn new(count: usize, bytes: usize) -> Result<Self> {
        ensure!(bytes.is_multiple_of(4096) && bytes > 0, "buffers are whole pages, not {bytes} B");
        let wanted = count * (bytes + STAGGER_BYTES);
        let mapped_bytes = wanted.next_multiple_of(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let base = base.with_context(|| format!("cannot get {mapped_bytes} bytes of memory"))?;
        let base = NonNull::new(base).context("the kernel mapped address 0")?;
        // SAFETY: the range is the mapping made above, and this advice changes no contents.
        let advised = unsafe { madvise(base.as_ptr(), mapped_bytes, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            eprintln!("no huge pages ({error}): figures from memory are lower");
        }
        let start = base.as_ptr().addr().next_multiple_of(HUGE_PAGE_BYTES) - base.as_ptr().addr();
        let mut arena = Self { base, mapped_bytes, start };
        fill(arena.bytes());
        Ok(arena)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: start is below the mapped length, so the range is within the mapping. The mapping
        // is readable, writable and zeroed by the kernel, and lives until `self` is dropped. `&mut
        // self` makes this the only view.
        unsafe {
            let first = self.base.as_ptr().cast::<u8>().add(self.start);
            std::slice::from_raw_parts_mut(first, self.mapped_bytes - self.start)
        }
    }

    /// Returns the buffers. Each starts at a multiple of 64.
    pub fn buffers(&mut self, count: usize, bytes: usize) -> Result<Vec<&mut [u8]>> {
        let mut rest = self.bytes();
        let mut buffers = Vec::new();
        for _ in 0..count {
            let split = rest.split_at_mut_checked(bytes + STAGGER_BYTES);
            let (buffer, behind) = split.context("the arena was made for fewer buffers")?;
            buffers.push(&mut buffer[..bytes]);
            rest = behind;
        }
        Ok(buffers)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and every view of it borrows `self`.
        let _ = unsafe { munmap(self.base.as_ptr(), self.mapped_bytes) };
    }
}

/// Fills `bytes` by xorshift. Any bytes would do, except ones that a processor or the operating
/// system could treat as special.
fn fill(bytes: &mut [u8]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_apart_and_aligned() {
        let mut arena = Arena::new(5, 64 << 10).unwrap();
        let buffers = arena.buffers(5, 64 << 10).unwrap();
        let starts: Vec<usize> = buffers.iter().map(|buffer| buffer.as_ptr().addr()).collect();
        assert!(starts.iter().all(|start| start % 64 == 0));
        assert!(starts.windows(2).all(|pair| (pair[1] - pair[0]) % 4096 == STAGGER_BYTES % 4096));
        assert!(buffers.iter().all(|buffer| buffer.iter().any(|&byte| byte != buffer[0])));
        assert!(arena.buffers(700, 64 << 10).is_err());
    }
}
