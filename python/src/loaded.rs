//! A step that is being loaded, for Python.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rapidraid::format::table::{Form, NameKind, SearchError, Space, search};
use rapidraid::kind::ErrorKind;
use rapidraid::trainer::StagingError;
use rapidraid::trainer::copy::Target;

use crate::errors::{of_staging, raise};
use crate::table::{PyKey, PyPart, parts_of, path_of, space_of, table_error};

/// An open step, whose bytes can be read until it is released.
#[pyclass(module = "rapidraid._native")]
pub struct LoadedStep {
    step: Option<rapidraid::trainer::load::LoadedStep>,
}

/// A name: rank or `None`, keys, kind, element type, bits, shape, flags.
type PyName = (Option<u32>, Vec<PyPart>, &'static str, String, u16, Vec<u64>, u32);
/// A part of a tensor and its destination: row of the name, start and size or `None` for the whole,
/// address, and length in bytes.
type PyTarget = (u32, Option<(Vec<u64>, Vec<u64>)>, usize, usize);

impl LoadedStep {
    pub(crate) fn new(step: rapidraid::trainer::load::LoadedStep) -> Self {
        Self { step: Some(step) }
    }

    pub(crate) fn open_mut(
        &mut self,
        py: Python<'_>,
    ) -> PyResult<&mut rapidraid::trainer::load::LoadedStep> {
        let released = || raise(py, ErrorKind::Invalid, "this load has ended", "load once more");
        self.step.as_mut().ok_or_else(released)
    }

    pub(crate) fn take(&mut self) -> Option<rapidraid::trainer::load::LoadedStep> {
        self.step.take()
    }

    fn open(&self, py: Python<'_>) -> PyResult<&rapidraid::trainer::load::LoadedStep> {
        let released = || raise(py, ErrorKind::Invalid, "this load has ended", "load once more");
        self.step.as_ref().ok_or_else(released)
    }
}

fn no_bytes(py: Python<'_>) -> PyErr {
    raise(py, ErrorKind::NotFound, "the name has no bytes", "")
}

/// Returns the rows of the extents of each target, then of each name.
fn wanted(
    py: Python<'_>,
    step: &rapidraid::trainer::load::LoadedStep,
    targets: Vec<PyTarget>,
    names: Vec<u32>,
) -> PyResult<Vec<Vec<u32>>> {
    let of_target = |(row, part, _, _): PyTarget| {
        let copies = search(&step.table, row, &form_of(part)).map_err(|e| search_error(py, &e))?;
        Ok(copies.into_iter().map(|copy| copy.extent).collect())
    };
    let of_name = |row| {
        let extents = step.table.regions_of(row).iter().map(|region| region.extent);
        let extents: Vec<u32> = extents.collect();
        if extents.is_empty() { Err(no_bytes(py)) } else { Ok(extents) }
    };
    targets.into_iter().map(of_target).chain(names.into_iter().map(of_name)).collect()
}

fn form_of(part: Option<(Vec<u64>, Vec<u64>)>) -> Form {
    part.map_or(Form::Whole, |(start, size)| Form::new_box(&start, &size))
}

fn search_error(py: Python<'_>, error: &SearchError) -> PyErr {
    raise(py, error.kind(), &error.to_string(), "")
}

#[pymethods]
impl LoadedStep {
    /// The number of the step.
    #[getter]
    fn number(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.step().0)
    }

    /// Whether the step is read from the host's memory as its trainers left it.
    #[getter]
    fn is_from_memory(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.open(py)?.is_from_memory())
    }

    /// The newest committed step of the job.
    #[getter]
    fn newest_committed(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.open(py)?.about.newest_committed.map(|step| step.0))
    }

    /// Whether extents are read from the cluster window by window, and the reason if memory does
    /// not suffice for the whole step (else empty).
    #[getter]
    fn by_ranges(&self, py: Python<'_>) -> PyResult<(bool, String)> {
        let step = self.open(py)?;
        Ok((step.is_by_ranges(), step.about.why_by_ranges.clone()))
    }

    /// Returns the rows of the extents of each target.
    fn extents_of(&self, py: Python<'_>, targets: Vec<PyTarget>) -> PyResult<Vec<Vec<u32>>> {
        wanted(py, self.open(py)?, targets, Vec::new())
    }

    /// Returns the length of the step, and how many bytes a load by ranges reads for these targets
    /// and names.
    fn wanted_bytes(
        &self,
        py: Python<'_>,
        targets: Vec<PyTarget>,
        names: Vec<u32>,
    ) -> PyResult<(u64, u64)> {
        let step = self.open(py)?;
        Ok((step.len_bytes(), step.wanted_bytes(&wanted(py, step, targets, names)?)))
    }

    /// Divides the extents of targets and names into windows for `Session.read_extents`. Returns
    /// for each window its extents, and the indexes of the targets and names that need them; names
    /// are numbered after the targets. A window without extents is the part of the step in this
    /// host's memory, or the whole step if it is not loaded by ranges.
    fn windows(
        &self,
        py: Python<'_>,
        targets: Vec<PyTarget>,
        names: Vec<u32>,
    ) -> PyResult<Vec<(Vec<u32>, Vec<usize>)>> {
        let step = self.open(py)?;
        if !step.is_by_ranges() {
            return Ok(vec![(Vec::new(), (0..targets.len() + names.len()).collect())]);
        }
        let windows = step.windows(&wanted(py, step, targets, names)?);
        Ok(windows.into_iter().map(|window| (window.extents, window.wanted)).collect())
    }

    /// Returns all names, by row.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<PyName>> {
        let table = &self.open(py)?.table;
        let name = |name: &rapidraid::format::table::Name| -> PyResult<PyName> {
            let rank = match name.space {
                Space::Shared => None,
                Space::Rank(rank) => Some(rank),
            };
            let keys = parts_of(py, &name.path)?;
            let kind = match name.kind {
                NameKind::Tensor => "tensor",
                NameKind::Bytes => "bytes",
                NameKind::Value => "value",
            };
            let element = name.element.name.to_string();
            Ok((rank, keys, kind, element, name.element.bits, name.shape.clone(), name.flags))
        };
        table.names().iter().map(name).collect()
    }

    /// Returns the row of a name, or `None` if there is none.
    fn find(&self, py: Python<'_>, rank: Option<u32>, keys: Vec<PyKey>) -> PyResult<Option<u32>> {
        let path = path_of(keys).map_err(|error| table_error(py, &error))?;
        Ok(self.open(py)?.table.find(space_of(rank), &path))
    }

    /// Returns the bytes of a plain value or of opaque bytes, verified.
    fn content<'py>(&self, py: Python<'py>, row: u32) -> PyResult<Bound<'py, PyBytes>> {
        let step = self.open(py)?;
        let region = step.table.regions_of(row).first();
        let region = region.ok_or_else(|| no_bytes(py))?;
        let extent = region.extent;
        let bytes = py.detach(|| step.bytes(extent)).map_err(|error| of_staging(py, &error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Copies tensors, or boxes of them, to addresses, and verifies the copied bytes. Returns
    /// `None`, or the name of a damaged tensor.
    ///
    /// The package takes the addresses from contiguous tensors that it holds and that do not
    /// overlap.
    #[pyo3(name = "_copy")]
    fn copy(
        &self,
        py: Python<'_>,
        targets: Vec<PyTarget>,
        threads: usize,
    ) -> PyResult<Option<String>> {
        let step = self.open(py)?;
        let mut found = Vec::with_capacity(targets.len());
        for (row, part, address, len) in targets {
            let copies =
                search(&step.table, row, &form_of(part)).map_err(|e| search_error(py, &e))?;
            found.push((copies, address, len));
        }
        let targets = found
            .into_iter()
            .map(|(copies, address, len)| Target {
                copies,
                // SAFETY: the package passes the address and the length in bytes of a contiguous
                // tensor that it holds until this call returns. No two of them overlap, so no byte
                // has two references. If Python code of another thread writes such a tensor during
                // a load, its content is undefined, as with any other copy into it.
                bytes: unsafe { writable(address, len) },
            })
            .collect();
        let mut signal = None;
        let done = py.detach(|| {
            let mut proceed = || {
                signal = Python::attach(|py| py.check_signals()).err();
                signal.is_none()
            };
            step.copy(targets, threads, &mut proceed)
        });
        match (done, signal) {
            (_, Some(signal)) => Err(signal),
            (Ok(()), None) => Ok(None),
            (Err(StagingError::Corrupt { name }), None) => Ok(Some(name)),
            (Err(error), None) => Err(of_staging(py, &error)),
        }
    }
}

/// Returns the memory of a tensor as a slice.
///
/// # Safety
///
/// `address` must point to `len` writable bytes that no other reference covers while the slice
/// lives.
unsafe fn writable<'a>(address: usize, len: usize) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the caller guarantees it by the contract above.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) }
}
