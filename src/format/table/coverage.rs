//! Checks whether boxes tile a shape, i.e. whether every element is in exactly one of them.
//!
//! The number of boxes that hold an element is a function of the element's index. Its mixed
//! differences determine it, and they are non-zero only at corners of boxes: +1 or -1 for each
//! corner. So the boxes tile the shape exactly when their corners and the corners of the shape
//! cancel. The first corner in row-major order that does not cancel is the first element that is
//! held twice or not at all, because all elements before it are held once.
//!
//! Corners are compared one dimension at a time. Boxes that begin and boxes that end at the same
//! index cancel when they agree in all further dimensions, so a grid costs a sort in each dimension
//! and not 2^d corners.

use super::error::{TableError, element_text, quoted};
use super::limits::MAX_STEPS_PER_REGION;
use super::{Form, Name, NameKind, Region, Table};

/// A box: the first index and the size in each dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area<'a> {
    pub start: &'a [u64],
    pub size: &'a [u64],
}

impl Area<'_> {
    fn is_empty(&self) -> bool {
        self.size.contains(&0)
    }

    /// Returns start and size of the box without its first `dim` dimensions.
    fn rest(&self, dim: usize) -> (&[u64], &[u64]) {
        (self.start.get(dim..).unwrap_or_default(), self.size.get(dim..).unwrap_or_default())
    }
}

/// The reason why boxes do not tile a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Defect {
    /// An element is not held exactly once. This is the first one in row-major order.
    Element { index: Vec<u64>, is_overlap: bool },
    /// The check needed more steps than its limit.
    Fragmented,
}

struct CornerWalk<'a> {
    areas: Vec<Area<'a>>,
    steps_left: usize,
    index: Vec<u64>,
}

impl CornerWalk<'_> {
    /// Returns the first corner, by dimensions `dim` and above, at which the weighted boxes of
    /// `list` do not cancel.
    fn first_defect(&mut self, dim: usize, list: &[(i64, usize)]) -> Result<(), Defect> {
        self.steps_left = self.steps_left.checked_sub(list.len()).ok_or(Defect::Fragmented)?;
        let dims = self.areas.first().map_or(0, |area| area.start.len());
        if dim == dims {
            let sum: i64 = list.iter().map(|(weight, _)| weight).sum();
            if sum == 0 {
                return Ok(());
            }
            return Err(Defect::Element { index: self.index.clone(), is_overlap: sum > 0 });
        }
        let mut corners = Vec::with_capacity(2 * list.len());
        for (weight, at) in list {
            let Some(area) = self.areas.get(*at) else { continue };
            let (Some(start), Some(size)) = (area.start.get(dim), area.size.get(dim)) else {
                continue;
            };
            corners.push((*start, *weight, *at));
            corners.push((start + size, -weight, *at));
        }
        let rest = |at: &usize| self.areas.get(*at).map(|area| area.rest(dim + 1));
        corners.sort_unstable_by(|(i, _, a), (j, _, b)| (i, rest(a)).cmp(&(j, rest(b))));
        // Each box adds its weight where it begins and subtracts it where it ends, so all groups
        // together cancel. If every group but the last one cancels by itself, the last one cancels,
        // too, and is not visited.
        let last = corners.last().map(|corner| corner.0);
        let mut groups: Vec<(u64, Vec<(i64, usize)>)> = Vec::new();
        for same in corners.chunk_by(|(i, _, a), (j, _, b)| (i, rest(a)) == (j, rest(b))) {
            let sum = same.iter().map(|(_, weight, _)| weight).sum();
            let Some((index, _, at)) = same.first().filter(|_| sum != 0) else { continue };
            match groups.last_mut().filter(|(before, _)| before == index) {
                Some((_, group)) => group.push((sum, *at)),
                None => groups.push((*index, vec![(sum, *at)])),
            }
        }
        for (index, group) in groups.into_iter().filter(|(index, _)| Some(*index) != last) {
            self.index.push(index);
            self.first_defect(dim + 1, &group)?;
            self.index.pop();
        }
        Ok(())
    }
}

/// Returns whether `parts` are slices of `whole` along one dimension, one behind the other.
fn are_slices(whole: Area<'_>, parts: &[Area<'_>]) -> bool {
    let Some(first) = parts.first() else { return false };
    let cut = first.size.iter().zip(whole.size).position(|(own, all)| own != all);
    let mut end = 0;
    let is_next = |part: &Area<'_>| {
        let mut dims = part.start.iter().zip(part.size).zip(whole.size).enumerate();
        dims.all(|(dim, ((start, size), all))| match Some(dim) == cut {
            true => {
                let is_behind = *start == end;
                end = start.saturating_add(*size);
                is_behind
            }
            false => (*start, size) == (0, all),
        })
    };
    parts.iter().all(is_next) && cut.and_then(|dim| whole.size.get(dim)) == Some(&end)
}

/// Returns the first element of `whole` that is not in exactly one of `parts`. All parts must lie
/// inside `whole`.
pub(super) fn find_defect(whole: Area<'_>, parts: &[Area<'_>]) -> Result<(), Defect> {
    if let [part] = parts
        && *part == whole
    {
        return Ok(());
    }
    if are_slices(whole, parts) {
        return Ok(());
    }
    let all = parts.iter().chain([&whole]).filter(|area| !area.is_empty());
    let areas: Vec<Area<'_>> = all.copied().collect();
    let weight = |at: usize| if at + 1 == areas.len() && !whole.is_empty() { -1 } else { 1 };
    let list: Vec<(i64, usize)> = (0..areas.len()).map(|at| (weight(at), at)).collect();
    let steps_left = areas.len().saturating_add(1).saturating_mul(MAX_STEPS_PER_REGION);
    CornerWalk { areas, steps_left, index: Vec::new() }.first_defect(0, &list)
}

fn check_name(name: &Name, regions: &[Region]) -> Result<(), TableError> {
    let unknown = regions.iter().find(|region| matches!(region.form, Form::Unknown { .. }));
    if let Some(region) = unknown {
        let (name, form) = (quoted(name), quoted(&region.form));
        return Err(TableError::UnknownForm { name, form });
    }
    if name.kind != NameKind::Tensor {
        // Bytes and plain values have only the form `whole`, and no form occurs twice.
        let element = format!("its {}", name.kind);
        return match regions {
            [] => Err(TableError::Gap { name: quoted(name), element }),
            _ => Ok(()),
        };
    }
    let zeros = vec![0; name.shape.len()];
    let whole = Area { start: &zeros, size: &name.shape };
    let mut parts = Vec::with_capacity(regions.len());
    for region in regions {
        parts.push(match &region.form {
            Form::Box { start, size } => Area { start, size },
            _ => whole,
        });
    }
    match find_defect(whole, &parts) {
        Ok(()) => Ok(()),
        Err(Defect::Fragmented) => Err(TableError::Fragmented { name: quoted(name) }),
        Err(Defect::Element { index, is_overlap }) => {
            let (name, element) = (quoted(name), element_text(&index));
            Err(if is_overlap {
                TableError::Overlap { name, element }
            } else {
                TableError::Gap { name, element }
            })
        }
    }
}

impl Table {
    /// Checks that the regions of every name hold each of its elements exactly once. Returns an
    /// error for the first name with an element that is held twice or not at all, or with a region
    /// whose form this release does not know.
    pub fn check_coverage(&self) -> Result<(), TableError> {
        let mut rest: &[Region] = &self.regions;
        for (row, name) in (0u32..).zip(&self.names) {
            let count = rest.iter().take_while(|region| region.name == row).count();
            let (regions, behind) = rest.split_at_checked(count).unwrap_or_default();
            check_name(name, regions)?;
            rest = behind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_gives_up_after_its_steps() {
        let (zeros, size) = ([0, 0], [4, 4]);
        let whole = Area { start: &zeros, size: &size };
        let (half, low, high) = ([2, 4], [0, 0], [2, 0]);
        let areas =
            vec![Area { start: &low, size: &half }, Area { start: &high, size: &half }, whole];
        let list = [(1, 0), (1, 1), (-1, 2)];
        let walk = |steps_left| {
            CornerWalk { areas: areas.clone(), steps_left, index: Vec::new() }
                .first_defect(0, &list)
        };
        assert_eq!(walk(2), Err(Defect::Fragmented));
        assert_eq!(walk(100), Ok(()));
    }
}
