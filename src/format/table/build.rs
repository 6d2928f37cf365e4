//! Builds a table from rows in any order.

use super::error::{Section, TableError};
use super::rules::check_counts;
use super::{Extent, Name, Region, Table};

/// Collects rows in any order; [`build`](Self::build) sorts, renumbers and checks them.
///
/// ```
/// use rapidraid::format::table::{
///     ElementType, Extent, Form, Key, Name, NameKind, Path, Space, TableBuilder,
/// };
///
/// let mut builder = TableBuilder::new();
/// let name = builder.add_name(Name {
///     space: Space::Shared,
///     path: Path::new(&[Key::Text("model".into()), Key::Text("bias".into())])?,
///     kind: NameKind::Tensor,
///     element: ElementType { name: "float32".into(), bits: 32, big_endian: false },
///     shape: vec![8],
///     flags: 0,
/// });
/// let extent = Extent { source: 0, shard: 0, offset_bytes: 64, len_bytes: 32, hash: None };
/// let extent = builder.add_extent(extent);
/// builder.add_region(name, Form::Whole, extent);
/// let table = builder.build()?;
/// table.check_coverage()?;
/// assert_eq!(table.find(Space::Shared, &"model/bias".parse()?), Some(0));
/// # Ok::<(), rapidraid::format::table::TableError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct TableBuilder {
    names: Vec<Name>,
    regions: Vec<Region>,
    extents: Vec<Extent>,
}

/// Sorts `rows`. Returns them, and the new row number of each old row. Drops a row if `is_same`
/// holds for it and the row before it.
fn sorted<T>(
    rows: Vec<T>,
    compare: impl Fn(&T, &T) -> std::cmp::Ordering,
    is_same: impl Fn(&T, &T) -> bool,
) -> (Vec<T>, Vec<u32>) {
    // The extents of several tables are in order already when each table has a shard of its own.
    if rows.is_sorted_by(|a, b| compare(a, b).is_lt()) {
        let same_rows = (0..rows.len() as u32).collect();
        return (rows, same_rows);
    }
    let mut numbered: Vec<(usize, T)> = rows.into_iter().enumerate().collect();
    numbered.sort_by(|(_, a), (_, b)| compare(a, b));
    let mut new_rows = vec![0; numbered.len()];
    let mut out: Vec<T> = Vec::with_capacity(numbered.len());
    for (old, row) in numbered {
        if !out.last().is_some_and(|before| is_same(before, &row)) {
            out.push(row);
        }
        if let Some(new) = new_rows.get_mut(old) {
            *new = (out.len() - 1) as u32;
        }
    }
    (out, new_rows)
}

/// Sorts extents and drops duplicates. Returns the extents, and the new row number of each old row.
pub(super) fn sorted_extents(extents: Vec<Extent>) -> (Vec<Extent>, Vec<u32>) {
    sorted(extents, |a, b| (a.place(), a.hash).cmp(&(b.place(), b.hash)), |a, b| a == b)
}

impl TableBuilder {
    /// Returns a builder without rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a name and returns its number, for [`add_region`](Self::add_region).
    pub fn add_name(&mut self, name: Name) -> u32 {
        self.names.push(name);
        (self.names.len() - 1) as u32
    }

    /// Adds an extent and returns its number, for [`add_region`](Self::add_region). An extent that
    /// equals another one becomes the same row.
    pub fn add_extent(&mut self, extent: Extent) -> u32 {
        self.extents.push(extent);
        (self.extents.len() - 1) as u32
    }

    /// Adds a region by the numbers of its name and its extent.
    pub fn add_region(&mut self, name: u32, form: super::Form, extent: u32) {
        self.regions.push(Region { name, form, extent });
    }

    /// Returns the table, or an error for the first rule that the rows break. A single table need
    /// not cover its tensors: [`Table::check_coverage`] checks the merged one.
    pub fn build(self) -> Result<Table, TableError> {
        let Self { names, mut regions, extents } = self;
        check_counts(names.len(), regions.len(), extents.len())?;
        let by_path = |a: &Name, b: &Name| (a.space, &a.path).cmp(&(b.space, &b.path));
        let (names, new_names) = sorted(names, by_path, |_, _| false);
        let (extents, new_extents) = sorted_extents(extents);
        for region in &mut regions {
            let new = |section, rows: &[u32], row: u32| {
                let new = rows.get(row as usize).copied();
                new.ok_or(TableError::Row { section, row, rows: rows.len() })
            };
            region.name = new(Section::Names, &new_names, region.name)?;
            region.extent = new(Section::Extents, &new_extents, region.extent)?;
        }
        regions.sort_by(|a, b| (a.name, &a.form).cmp(&(b.name, &b.form)));
        Table::checked(names, regions, extents)
    }
}
