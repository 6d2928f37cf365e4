//! The union of tables: of the ranks of one host, or of the shards of one checkpoint.

use std::collections::HashMap;

use super::build::sorted_extents;
use super::error::{TableError, quoted};
use super::rules::{check_counts, extent_error};
use super::{Extent, Name, Path, Region, Space, Table};

/// A table to merge, and the place of its data in the result.
#[derive(Debug, Clone, Copy)]
pub struct MergeInput<'a> {
    /// The table.
    pub table: &'a Table,
    /// The number that is added to the shard number of each extent of this save (source 0).
    pub shard: u32,
    /// The number of bytes that is added to the offset of each extent of this save (source 0); a
    /// multiple of 64.
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

/// For each input, the new row number of each old row.
type NewRows = Vec<Vec<u32>>;

/// The distinct names of the tables so far, each with a number in the order in which it was found.
struct DistinctNames<'a> {
    numbers: HashMap<(Space, &'a Path), usize>,
    /// The first description of each name, and the number of its table.
    first: Vec<(usize, &'a Name)>,
}

impl<'a> DistinctNames<'a> {
    /// Returns the number of a name. Compares the name with number `guess` first, which costs less
    /// than hashing it.
    fn number(&mut self, name: &'a Name, table: usize, guess: usize) -> Result<usize, TableError> {
        let is_guessed = self
            .first
            .get(guess)
            .is_some_and(|(_, guessed)| guessed.space == name.space && guessed.path == name.path);
        let number = match is_guessed {
            true => guess,
            false => *self.numbers.entry((name.space, &name.path)).or_insert(self.first.len()),
        };
        match self.first.get(number) {
            None => self.first.push((table, name)),
            Some(first) => refuse_difference(*first, (table, name))?,
        }
        Ok(number)
    }
}

/// Merges the names. Returns them, and the new row number of each old row.
fn merge_names(inputs: &[MergeInput<'_>]) -> Result<(Vec<Name>, NewRows), TableError> {
    let count = inputs.iter().map(|input| input.table.names.len()).sum();
    let numbers = HashMap::with_capacity(count);
    let mut distinct = DistinctNames { numbers, first: Vec::new() };
    let mut numbered: Vec<Vec<usize>> = Vec::with_capacity(inputs.len());
    for (table, input) in inputs.iter().enumerate() {
        let mut own = Vec::with_capacity(input.table.names.len());
        for name in &input.table.names {
            // Most hosts have the same names in the same order, so the number after the previous one
            // is usually right.
            let guess = own.last().map_or(0, |before| before + 1);
            own.push(distinct.number(name, table, guess)?);
        }
        numbered.push(own);
    }
    let first = distinct.first.iter().map(|(_, name)| *name);
    let mut order: Vec<(usize, &Name)> = first.enumerate().collect();
    order.sort_by(|(_, a), (_, b)| (a.space, &a.path).cmp(&(b.space, &b.path)));
    let mut rows = vec![0; order.len()];
    for (row, (number, _)) in (0u32..).zip(&order) {
        if let Some(of) = rows.get_mut(*number) {
            *of = row;
        }
    }
    let row_of = |number: usize| rows.get(number).copied().unwrap_or_default();
    let new_rows = numbered.into_iter().map(|own| own.into_iter().map(row_of).collect()).collect();
    Ok((order.into_iter().map(|(_, name)| name.clone()).collect(), new_rows))
}

/// Refuses two descriptions of one name, in two tables, that differ.
fn refuse_difference(
    (first_table, first): (usize, &Name),
    (second_table, second): (usize, &Name),
) -> Result<(), TableError> {
    let Some((what, a, b)) = difference(first, second) else { return Ok(()) };
    let name = quoted(first);
    Err(TableError::Disagreement { name, what, first_table, first: a, second_table, second: b })
}

/// Merges the extents. Two tables with a non-empty extent of this save at the same place are an
/// error: the caller has put both tables at the same base.
fn merge_extents(inputs: &[MergeInput<'_>]) -> Result<(Vec<Extent>, NewRows), TableError> {
    let mut all = Vec::with_capacity(inputs.iter().map(|input| input.table.extents.len()).sum());
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

/// Merges the regions, sorted by name and form.
fn merge_regions(
    inputs: &[MergeInput<'_>],
    new_names: &NewRows,
    new_extents: &NewRows,
) -> Vec<Region> {
    let count = inputs.iter().map(|input| input.table.regions.len()).sum();
    let mut regions: Vec<Region> = Vec::with_capacity(count);
    for ((input, names), extents) in inputs.iter().zip(new_names).zip(new_extents) {
        // In a valid table all rows are in range, so nothing is skipped.
        regions.extend(input.table.regions.iter().filter_map(|region| {
            let name = *names.get(region.name as usize)?;
            let extent = *extents.get(region.extent as usize)?;
            Some(Region { name, form: region.form.clone(), extent })
        }));
    }
    regions.sort_by(|a, b| a.name.cmp(&b.name).then_with(|| a.form.cmp(&b.form)));
    regions
}

impl Table {
    /// Returns the union of `inputs`. Names with the same space and path must agree in all
    /// properties. Two regions of one name with the same form are an error: each region has one
    /// owner, and the caller must leave out the same region of other ranks.
    ///
    /// The extents keep their hashes; an index leaves them out
    /// ([`without_hashes`](Self::without_hashes)). Coverage is not checked
    /// ([`check_coverage`](Self::check_coverage)).
    pub fn merge(inputs: &[MergeInput<'_>]) -> Result<Self, TableError> {
        let count = |rows: fn(&Table) -> usize| inputs.iter().map(|input| rows(input.table)).sum();
        check_counts(0, count(|table| table.regions.len()), count(|table| table.extents.len()))?;
        let (names, new_names) = merge_names(inputs)?;
        let (extents, new_extents) = merge_extents(inputs)?;
        let regions = merge_regions(inputs, &new_names, &new_extents);
        Self::checked(names, regions, extents)
    }
}
