//! The table of a rank's segment: built once for a layout and encoded again for each step, because
//! plain values change their lengths.

use pyo3::prelude::*;
use rapidraid::format::table::{
    ElementType, Extent, Form, Key, Name, NameKind, Path, Space, Table, TableBuilder, TableError,
};
use rapidraid::trainer::segment::EXTENT_ALIGN_BYTES;

use crate::errors::raise;

/// A key of a path as the package passes it: 0 and a text, 1 and an integer, or 2 and a position.
#[derive(FromPyObject)]
pub enum PyKey {
    /// A text.
    #[pyo3(transparent)]
    Text((u8, String)),
    /// An integer or a position.
    #[pyo3(transparent)]
    Number((u8, i64)),
}

/// Returns the path that consists of `keys`.
pub fn path_of(keys: Vec<PyKey>) -> Result<Path, TableError> {
    let keys: Vec<Key> = keys
        .into_iter()
        .map(|key| match key {
            PyKey::Text((_, text)) => Key::Text(text),
            PyKey::Number((2, position)) => Key::Position(position as u32),
            PyKey::Number((_, number)) => Key::Integer(number),
        })
        .collect();
    Ok(Path::new(&keys)?)
}

/// A key of a path as it is returned to the package: the same pairs as in [`PyKey`].
pub type PyPart = (u8, Py<PyAny>);

/// Returns the keys of a path for the package.
pub fn parts_of(py: Python<'_>, path: &Path) -> PyResult<Vec<PyPart>> {
    let part = |key: Key| -> PyResult<PyPart> {
        Ok(match key {
            Key::Text(text) => (0, text.into_pyobject(py)?.into_any().unbind()),
            Key::Integer(number) => (1, number.into_pyobject(py)?.into_any().unbind()),
            Key::Position(at) => (2, at.into_pyobject(py)?.into_any().unbind()),
        })
    };
    path.keys().into_iter().map(part).collect()
}

/// Returns the space of a name: private to `rank`, or shared if `rank` is `None`.
pub fn space_of(rank: Option<u32>) -> Space {
    rank.map_or(Space::Shared, Space::Rank)
}

pub(crate) fn table_error(py: Python<'_>, error: &TableError) -> PyErr {
    raise(py, error.kind(), &error.to_string(), "")
}

struct Row {
    name: Name,
    form: Form,
    extent: usize,
}

/// Collects the entries that a rank stores, in the order of its segment.
#[pyclass(module = "rapidraid._native")]
#[derive(Default)]
pub struct TableWriter {
    rows: Vec<Row>,
    /// Lengths of the extents in bytes, in the order of the segment.
    lengths: Vec<u64>,
}

#[pymethods]
impl TableWriter {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds an extent. Returns its number.
    fn add_extent(&mut self, len_bytes: u64) -> usize {
        self.lengths.push(len_bytes);
        self.lengths.len() - 1
    }

    /// Sets the length of an extent, given by its number. Does nothing if there is no such extent.
    fn set_length(&mut self, extent: usize, len_bytes: u64) {
        if let Some(len) = self.lengths.get_mut(extent) {
            *len = len_bytes;
        }
    }

    /// Adds a tensor, or a box of it.
    #[pyo3(signature = (rank, keys, element, bits, shape, extent, start=None, size=None, flags=0))]
    #[expect(clippy::too_many_arguments, reason = "the package passes them by name")]
    fn add_tensor(
        &mut self,
        py: Python<'_>,
        rank: Option<u32>,
        keys: Vec<PyKey>,
        element: &str,
        bits: u16,
        shape: Vec<u64>,
        extent: usize,
        start: Option<Vec<u64>>,
        size: Option<Vec<u64>>,
        flags: u32,
    ) -> PyResult<()> {
        let path = path_of(keys).map_err(|error| table_error(py, &error))?;
        let element = ElementType { name: element.into(), bits, big_endian: false };
        let kind = NameKind::Tensor;
        let form = match (start, size) {
            (Some(start), Some(size)) => Form::new_box(&start, &size),
            _ => Form::Whole,
        };
        let name = Name { space: space_of(rank), path, kind, element, shape, flags };
        self.rows.push(Row { name, form, extent });
        Ok(())
    }

    /// Adds a plain value, or opaque bytes.
    #[pyo3(signature = (rank, keys, is_value, extent, flags=0))]
    fn add_bytes(
        &mut self,
        py: Python<'_>,
        rank: Option<u32>,
        keys: Vec<PyKey>,
        is_value: bool,
        extent: usize,
        flags: u32,
    ) -> PyResult<()> {
        let path = path_of(keys).map_err(|error| table_error(py, &error))?;
        let kind = if is_value { NameKind::Value } else { NameKind::Bytes };
        let element = ElementType { name: "uint8".into(), bits: 8, big_endian: false };
        let name = Name { space: space_of(rank), path, kind, element, shape: Vec::new(), flags };
        self.rows.push(Row { name, form: Form::Whole, extent });
        Ok(())
    }

    /// Returns the offset of each extent after the header, and the offset at which the data ends,
    /// all in bytes.
    fn offsets(&self) -> (Vec<u64>, u64) {
        let mut at = 0;
        let mut offsets = Vec::with_capacity(self.lengths.len());
        for len in &self.lengths {
            offsets.push(at);
            at = (at + len).next_multiple_of(EXTENT_ALIGN_BYTES);
        }
        (offsets, at)
    }

    /// Returns the length of the table in bytes.
    fn table_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.encode().map_err(|error| table_error(py, &error))?.0.len())
    }
}

impl TableWriter {
    /// Returns the bytes of the table, and the offset after the header at which the data ends.
    pub fn encode(&self) -> Result<(Vec<u8>, u64), TableError> {
        let (offsets, end) = self.offsets();
        let mut builder = TableBuilder::new();
        let mut extents = Vec::with_capacity(offsets.len());
        for (offset_bytes, len_bytes) in offsets.into_iter().zip(&self.lengths) {
            let extent =
                Extent { source: 0, shard: 0, offset_bytes, len_bytes: *len_bytes, hash: None };
            extents.push(builder.add_extent(extent));
        }
        let mut last: Option<(&Name, u32)> = None;
        for row in &self.rows {
            // The boxes of one tensor are consecutive.
            let number = match last {
                Some((name, number)) if *name == row.name => number,
                _ => builder.add_name(row.name.clone()),
            };
            last = Some((&row.name, number));
            let extent = extents.get(row.extent).copied().unwrap_or(u32::MAX);
            builder.add_region(number, row.form.clone(), extent);
        }
        let table: Table = builder.build()?;
        Ok((table.to_bytes()?, end))
    }
}
