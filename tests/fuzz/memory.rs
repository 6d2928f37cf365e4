//! Measures the peak memory of one computation: an allocator that counts for each thread
//! separately, so that concurrent tests do not disturb the count.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator with counters.
pub struct Counting;

fn count(bytes: isize) {
    // A thread that ends still frees memory after its counters are destroyed; nothing reads them
    // then.
    let _ = LIVE_BYTES.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK_BYTES.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call passes unchanged to the system's allocator, and its result is returned
// unchanged; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the contract that `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above; `at` came from `System`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        // The old and the new block may exist at the same time.
        count(new_bytes as isize);
        count(-(layout.size() as isize));
        // SAFETY: as above; `at` came from `System`.
        unsafe { System.realloc(at, layout, new_bytes) }
    }
}

/// Runs `work`. Returns its result and the maximum number of bytes that this thread held during it
/// beyond those that it held before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE_BYTES.get();
    PEAK_BYTES.set(before);
    let done = work();
    (done, PEAK_BYTES.get().saturating_sub(before).max(0) as usize)
}

#[test]
fn the_peak_is_what_was_held_at_once() {
    let (kept, peak) = peak_of(|| {
        drop(vec![0u8; 100_000]);
        vec![0u8; 60_000]
    });
    assert_eq!((kept.len(), peak), (60_000, 100_000));
    let (_, peak) = peak_of(|| drop(kept));
    assert_eq!(peak, 0);
}
