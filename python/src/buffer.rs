//! The memory of a segment as a Python buffer, and hashes over memory that Python owns.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use rapidraid::trainer::fill::Segment;
use rapidraid::trainer::segment::HEADER_BYTES;

/// The data of a segment, after its header. The mapping lives as long as any view of it.
#[pyclass(frozen, module = "rapidraid._native")]
pub struct SegmentBuffer {
    segment: Arc<Segment>,
}

impl SegmentBuffer {
    /// Creates the buffer over the data of `segment`.
    pub fn new(segment: Arc<Segment>) -> Self {
        Self { segment }
    }
}

#[pymethods]
impl SegmentBuffer {
    fn __len__(&self) -> usize {
        self.segment.map.len() - HEADER_BYTES as usize
    }

    /// Copies the memory of contiguous tensors into the segment. Each source consists of an offset
    /// after the header, an address and a length in bytes.
    ///
    /// The package takes the addresses from tensors that it holds until this call returns.
    fn _fill(
        &self,
        py: Python<'_>,
        sources: Vec<(usize, usize, usize)>,
        threads: usize,
    ) -> PyResult<()> {
        let mut sources: Vec<(usize, &[u8])> = sources
            .into_iter()
            .map(|(offset, address, len)| {
                // SAFETY: the package passes the address and the length in bytes of a contiguous
                // tensor in the host's memory that it holds. If Python code of another thread
                // writes the tensor during a save, the saved content is undefined, as with any
                // other copy of the tensor.
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
        // SAFETY: the interpreter passes a valid view. The memory is that of the mapping, which
        // this object keeps alive; the view holds a reference to the object. Python code may write
        // the memory at any time, but this process has no Rust reference into it: `Writable` hands
        // out none.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), from.cast(), len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Returns memory that Python owns as a slice.
///
/// # Safety
///
/// `address` must point to `len` readable bytes that no thread writes while the slice lives.
pub unsafe fn memory<'a>(address: usize, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees it by the contract above.
    unsafe { std::slice::from_raw_parts(address as *const u8, len) }
}

/// Returns the first 16 bytes of BLAKE3 over ranges of memory, each given by address and length in
/// bytes.
///
/// The package takes the addresses from tensors that it holds. This call does not release the
/// interpreter.
#[pyfunction]
#[pyo3(name = "_sample_hash")]
pub fn sample_hash(ranges: Vec<(usize, usize)>) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for (address, len) in ranges {
        // SAFETY: the package passes ranges inside the storages of tensors that it holds during the
        // call. The calling thread holds the interpreter, so no Python code writes them meanwhile.
        hasher.update(unsafe { memory(address, len) });
    }
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}
