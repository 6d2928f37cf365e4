//! Memory of a segment as a Python buffer, and hashes over memory that Python owns.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use rapidraid::trainer::segment::HEADER_BYTES;
use rapidraid::trainer::session::Segment;

/// The data of a segment: what lies behind its header. The mapping lives as long as any view of it.
#[pyclass(frozen, module = "rapidraid._native")]
pub struct SegmentBuffer {
    segment: Arc<Segment>,
}

impl SegmentBuffer {
    /// The data of `segment`.
    pub fn new(segment: Arc<Segment>) -> Self {
        Self { segment }
    }
}

#[pymethods]
impl SegmentBuffer {
    fn __len__(&self) -> usize {
        self.segment.map.len() - HEADER_BYTES as usize
    }

    /// Copies memory of contiguous tensors into the segment: each is given by its offset behind the header, address and length.
    ///
    /// The caller in the package takes the addresses from tensors that it holds until this returns.
    fn _fill(
        &self,
        py: Python<'_>,
        sources: Vec<(usize, usize, usize)>,
        threads: usize,
    ) -> PyResult<()> {
        let mut sources: Vec<(usize, &[u8])> = sources
            .into_iter()
            .map(|(offset, address, len)| {
                // SAFETY: the package passes the address and the length in bytes of a contiguous tensor on the host that it holds. Python
                // code of other threads that writes such a tensor during a save makes a mess of what is saved, as with any other copy of it.
                (offset.saturating_add(HEADER_BYTES as usize), unsafe { memory(address, len) })
            })
            .collect();
        py.detach(|| self.segment.map.write_all(&mut sources, threads))
            .map_err(|error| PyBufferError::new_err(error.to_string()))
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let len =
            isize::try_from(this.__len__()).map_err(|_| PyBufferError::new_err("too long"))?;
        let from = this.segment.map.as_mut_ptr().wrapping_add(HEADER_BYTES as usize);
        // SAFETY: the interpreter passes a valid view. The memory is that of the mapping, which this object keeps alive; the view holds a
        // reference to the object. Python code writes the memory as it likes, and nothing in this process has a Rust reference into it:
        // `Writable` hands out none.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), from.cast(), len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Reads memory that Python owns.
///
/// # Safety
///
/// `address` must point to `len` readable bytes that nobody writes while the slice lives.
pub unsafe fn memory<'a>(address: usize, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: by the contract above.
    unsafe { std::slice::from_raw_parts(address as *const u8, len) }
}

/// Returns 16 bytes of BLAKE3 over ranges of memory, each given by address and length.
///
/// The caller in the package takes the addresses from tensors that it holds, and does not let go of the interpreter in between.
#[pyfunction]
#[pyo3(name = "_sample_hash")]
pub fn sample_hash(ranges: Vec<(usize, usize)>) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for (address, len) in ranges {
        // SAFETY: the package passes ranges inside storages of tensors that it holds for the time of the call, on the thread that holds
        // the interpreter, so no Python code writes them meanwhile.
        hasher.update(unsafe { memory(address, len) });
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}
