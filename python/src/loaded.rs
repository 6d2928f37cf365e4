//! A step that is being loaded, for Python.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rapidraid::format::table::{Form, NameKind, SearchError, Space, search};
use rapidraid::kind::Kind;
use rapidraid::trainer::StagingError;
use rapidraid::trainer::load::Target;

use crate::errors::{of_staging, raise};
use crate::table::{PyKey, PyPart, parts_of, path_of, space_of, table_error};

/// A step of which bytes can be read until it is released.
#[pyclass(module = "rapidraid._native")]
pub struct LoadedStep {
    step: Option<rapidraid::trainer::load::LoadedStep>,
}

/// A name: rank or nothing, keys, kind, element type, bits, shape, flags, bytes.
type PyName = (Option<u32>, Vec<PyPart>, &'static str, String, u16, Vec<u64>, u32);
/// A part of a tensor and where it goes: row of the name, start and size or nothing, address and length.
type PyTarget = (u32, Option<(Vec<u64>, Vec<u64>)>, usize, usize);

impl LoadedStep {
    pub(crate) fn new(step: rapidraid::trainer::load::LoadedStep) -> Self {
        Self { step: Some(step) }
    }

    pub(crate) fn take(&mut self) -> Option<rapidraid::trainer::load::LoadedStep> {
        self.step.take()
    }

    fn open(&self, py: Python<'_>) -> PyResult<&rapidraid::trainer::load::LoadedStep> {
        let released = || raise(py, Kind::Invalid, "this load has ended", "load once more");
        self.step.as_ref().ok_or_else(released)
    }
}

fn search_error(py: Python<'_>, error: &SearchError) -> PyErr {
    raise(py, error.kind(), &error.to_string(), "")
}

#[pymethods]
impl LoadedStep {
    /// The step.
    #[getter]
    fn number(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.step().0)
    }

    /// Whether it is read from the host's memory as its trainers left it.
    #[getter]
    fn is_from_memory(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.open(py)?.is_from_memory())
    }

    /// The newest committed step of the job.
    #[getter]
    fn newest_committed(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.open(py)?.about.newest_committed.map(|step| step.0))
    }

    /// All names, by row.
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

    /// The row of a name, if there is one.
    fn find(&self, py: Python<'_>, rank: Option<u32>, keys: Vec<PyKey>) -> PyResult<Option<u32>> {
        let path = path_of(keys).map_err(|error| table_error(py, &error))?;
        Ok(self.open(py)?.table.find(space_of(rank), &path))
    }

    /// The bytes of a plain value or of opaque bytes, verified.
    fn content<'py>(&self, py: Python<'py>, row: u32) -> PyResult<Bound<'py, PyBytes>> {
        let step = self.open(py)?;
        let region = step.table.regions_of(row).first();
        let region =
            region.ok_or_else(|| raise(py, Kind::NotFound, "the name has no bytes", ""))?;
        let extent = region.extent;
        let bytes = py.detach(|| step.bytes(extent)).map_err(|error| of_staging(py, &error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Copies tensors, or boxes of them, to addresses, and verifies what it copies. Returns `None`, or what is damaged.
    ///
    /// The caller in the package takes the addresses from contiguous tensors that it holds and that do not overlap.
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
            let form = part.map_or(Form::Whole, |(start, size)| Form::Box { start, size });
            let copies = search(&step.table, row, &form).map_err(|e| search_error(py, &e))?;
            found.push((copies, address, len));
        }
        let targets = found
            .into_iter()
            .map(|(copies, address, len)| Target {
                copies,
                // SAFETY: the package passes the address and the length in bytes of a contiguous tensor that it holds until this call
                // returns. No two of them overlap, so no byte has two references; Python code of other threads that writes such a tensor
                // during a load makes a mess of its content, as with any other copy into it.
                bytes: unsafe { writable(address, len) },
            })
            .collect();
        let mut signal = None;
        let done = {
            let signal = std::sync::Mutex::new(&mut signal);
            py.detach(|| {
                let proceed = || match Python::attach(|py| py.check_signals()) {
                    Ok(()) => true,
                    Err(error) => {
                        if let Ok(mut signal) = signal.lock() {
                            **signal = Some(error);
                        }
                        false
                    }
                };
                step.copy(targets, threads, &proceed)
            })
        };
        match (done, signal) {
            (_, Some(signal)) => Err(signal),
            (Ok(()), None) => Ok(None),
            (Err(StagingError::Corrupt { name }), None) => Ok(Some(name)),
            (Err(error), None) => Err(of_staging(py, &error)),
        }
    }
}

/// Memory of a tensor.
///
/// # Safety
///
/// `address` must point to `len` writable bytes to which nothing else refers while the slice lives.
unsafe fn writable<'a>(address: usize, len: usize) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: by the contract above.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) }
}
