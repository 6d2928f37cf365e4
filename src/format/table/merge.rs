//! The union of tables: of the ranks of one host, or of the shards of one checkpoint.

use super::build::sorted_extents;
use super::error::{TableError, quoted};
use super::rules::{check_counts, extent_error};
use super::{Extent, Name, Region, Table};

/// A table to merge, and the place of its data in the result.
#[derive(Debug, Clone, Copy)]
pub struct MergeInput<'a> {
    /// The table.
    pub table: &'a Table,
    /// The number that is added to the shard of each extent of this save.
    pub shard: u32,
    /// The number of bytes that is added to the offset of each extent of this save; a multiple of
    /// 64.
    pub base_offset_bytes: u64,
}

/// Returns the first property in which two descriptions of a name differ, with both values, or
/// `None` if they are equal.
fn difference(a: &Name, b: &Name) -> Option<(&'static str, String, String)> {
    if a.kind != b.kind {
        return Some(("kind", a.kind.to_string(), b.kind.to_string()));
    }
    if a.element != b.element {
        return Some(("element type", quoted(&a.element), quoted(&b.element)));
    }
    if a.shape != b.shape {
        let text = |shape: &[u64]| quoted(&format_args!("{shape:?}"));
        return Some(("shape", text(&a.shape), text(&b.shape)));
    }
    (a.flags != b.flags).then(|| ("flags", format!("{:#x}", a.flags), format!("{:#x}", b.flags)))
}

fn moved(extent: &Extent, input: &MergeInput<'_>) -> Result<Extent, TableError> {
    if extent.source != 0 {
        return Ok(*extent);
    }
    let shard = extent.shard.checked_add(input.shard);
    let offset_bytes = extent.offset_bytes.checked_add(input.base_offset_bytes);
    match (shard, offset_bytes) {
        (Some(shard), Some(offset_bytes)) => Ok(Extent { shard, offset_bytes, ..*extent }),
        _ => Err(extent_error(extent, "cannot be moved so far")),
    }
}

/// For each input, the new row of each old one.
type NewRows = Vec<Vec<u32>>;

/// Merges the names. Returns them with the new row of each old one.
fn merge_names(inputs: &[MergeInput<'_>]) -> Result<(Vec<Name>, NewRows), TableError> {
    let mut all: Vec<(usize, &Name)> = Vec::new();
    for (input, rows) in inputs.iter().enumerate() {
        all.extend(rows.table.names.iter().map(|name| (input, name)));
    }
    // The sort is stable: the names of one table keep their order, so each table's list of new rows
    // is filled in order.
    all.sort_by(|(_, a), (_, b)| (a.space, &a.path).cmp(&(b.space, &b.path)));
    let (mut names, mut new_rows) = (Vec::new(), vec![Vec::new(); inputs.len()]);
    for same in all.chunk_by(|(_, a), (_, b)| (a.space, &a.path) == (b.space, &b.path)) {
        let Some((first_table, first)) = same.first() else { continue };
        for (table, name) in same {
            if let Some((what, a, b)) = difference(first, name) {
                return Err(TableError::Disagreement {
                    name: quoted(*first),
                    what,
                    first_table: *first_table,
                    first: a,
                    second_table: *table,
                    second: b,
                });
            }
            if let Some(rows) = new_rows.get_mut(*table) {
                rows.push(names.len() as u32);
            }
        }
        names.push((*first).clone());
    }
    Ok((names, new_rows))
}

/// Merges the extents. Two tables with an extent of this save at the same place are an error: the
/// caller has put both tables at the same base.
fn merge_extents(inputs: &[MergeInput<'_>]) -> Result<(Vec<Extent>, NewRows), TableError> {
    let mut all = Vec::new();
    for input in inputs {
        for extent in &input.table.extents {
            all.push(moved(extent, input)?);
        }
    }
    let (extents, rows) = sorted_extents(all);
    let (mut new_rows, mut rest) = (Vec::new(), rows.as_slice());
    let mut is_taken = vec![false; extents.len()];
    for input in inputs {
        let (own, behind) = rest.split_at_checked(input.table.extents.len()).unwrap_or_default();
        for row in own {
            let (row, Some(extent)) = (*row as usize, extents.get(*row as usize)) else { continue };
            let was_taken =
                is_taken.get_mut(row).is_some_and(|taken| std::mem::replace(taken, true));
            if was_taken && extent.source == 0 && extent.len_bytes > 0 {
                return Err(extent_error(extent, "is in two tables: give each its own place"));
            }
        }
        new_rows.push(own.to_vec());
        rest = behind;
    }
    Ok((extents, new_rows))
}

impl Table {
    /// Returns the union of `inputs`. Names with the same space and path must agree in all
    /// properties. Two regions of one name with the same form are an error: each region has one
    /// owner, and the caller must leave out the copies of other ranks.
    ///
    /// The extents keep their hashes; an index leaves them out
    /// ([`without_hashes`](Self::without_hashes)). Coverage is not checked
    /// ([`check_coverage`](Self::check_coverage)).
    pub fn merge(inputs: &[MergeInput<'_>]) -> Result<Self, TableError> {
        let count = |rows: fn(&Table) -> usize| inputs.iter().map(|input| rows(input.table)).sum();
        check_counts(0, count(|table| table.regions.len()), count(|table| table.extents.len()))?;
        let (names, new_names) = merge_names(inputs)?;
        let (extents, new_extents) = merge_extents(inputs)?;
        let mut regions: Vec<Region> = Vec::new();
        for (input, (new_names, new_extents)) in
            inputs.iter().zip(new_names.iter().zip(&new_extents))
        {
            for region in &input.table.regions {
                let name = new_names.get(region.name as usize).copied();
                let extent = new_extents.get(region.extent as usize).copied();
                // In a valid table all rows are in range, so this skips nothing.
                let (Some(name), Some(extent)) = (name, extent) else { continue };
                regions.push(Region { name, form: region.form.clone(), extent });
            }
        }
        regions.sort_by(|a, b| (a.name, &a.form).cmp(&(b.name, &b.form)));
        Self::checked(names, regions, extents)
    }
}
