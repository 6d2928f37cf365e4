//! The Python extension: the trainer's side of staging, for the package `rapidraid` around it.
//!
//! The extension links no network and no async runtime. A call that waits for the daemon has a
//! deadline and ends on Ctrl-C. Such calls, and those that copy tensors, release the interpreter
//! for other threads. Names that begin with an underscore are only for the package: some take
//! addresses of memory.

mod buffer;
mod errors;
mod loaded;
mod session;
mod table;
mod values;

use pyo3::prelude::*;

/// Encodes a plain value. Returns its bytes, or `None` if the object is not a plain value.
#[pyfunction]
fn encode_value<'py>(
    value: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, pyo3::types::PyBytes>>> {
    let py = value.py();
    let Some(plain) = values::from_python(value, 0)? else { return Ok(None) };
    let bytes = plain.to_bytes().map_err(|e| errors::raise(py, e.kind(), &e.to_string(), ""))?;
    Ok(Some(pyo3::types::PyBytes::new(py, &bytes)))
}

/// Decodes a plain value. Returns the Python object.
#[pyfunction]
fn decode_value<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let plain = rapidraid::format::value::Value::parse(bytes);
    let plain = plain.map_err(|e| errors::raise(py, e.kind(), &e.to_string(), ""))?;
    values::to_python(py, &plain)
}

/// Returns the nanoseconds since the host's boot, by a clock that continues while the host sleeps.
#[pyfunction]
fn boot_ns() -> u64 {
    let now = rapidraid::trainer::session::boot_time();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the staging folder, the token's file and the cluster of a client's configuration.
#[pyfunction]
fn staging_place(py: Python<'_>, config: std::path::PathBuf) -> PyResult<session::StagingPlace> {
    session::staging_place(py, &config)
}

/// Returns the text form of a path.
#[pyfunction]
fn format_path(py: Python<'_>, keys: Vec<table::PyKey>) -> PyResult<String> {
    let path = table::path_of(keys).map_err(|error| table::table_error(py, &error))?;
    Ok(path.to_string())
}

/// Parses the text form of a path. Returns its keys.
#[pyfunction]
fn parse_path(py: Python<'_>, text: &str) -> PyResult<Vec<table::PyPart>> {
    let path: Result<rapidraid::format::table::Path, _> = text.parse();
    let path = path.map_err(|error| errors::raise(py, error.kind(), &error.to_string(), ""))?;
    table::parts_of(py, &path)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<session::Session>()?;
    module.add_class::<buffer::SegmentBuffer>()?;
    module.add_class::<loaded::LoadedStep>()?;
    module.add_class::<table::TableWriter>()?;
    module.add_function(wrap_pyfunction!(encode_value, module)?)?;
    module.add_function(wrap_pyfunction!(decode_value, module)?)?;
    module.add_function(wrap_pyfunction!(format_path, module)?)?;
    module.add_function(wrap_pyfunction!(parse_path, module)?)?;
    module.add_function(wrap_pyfunction!(boot_ns, module)?)?;
    module.add_function(wrap_pyfunction!(staging_place, module)?)?;
    module.add_function(wrap_pyfunction!(buffer::sample_hash, module)?)?;
    module.add("HEADER_BYTES", rapidraid::trainer::segment::HEADER_BYTES)?;
    module.add("EXTENT_ALIGN_BYTES", rapidraid::trainer::segment::EXTENT_ALIGN_BYTES)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))
}
