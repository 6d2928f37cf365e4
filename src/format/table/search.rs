//! Finds the bytes of extents that make up a wanted part of a name, and their places in the
//! destination.
//!
//! An extent holds the elements of its region in row-major order, without gaps. A destination holds
//! those of the wanted box in the same way, from its byte 0 on. An [`ExtentCopy`] copies the
//! elements that one region and the wanted box have in common.

use super::coverage::{Area, Defect, find_defect};
use super::error::{element_text, quoted};
use super::rules::packed_bytes;
use super::{ElementType, Form, Name, NameKind, Path, Region, Space, Table};
use crate::kind::ErrorKind;

/// A request for a part of one name.
#[derive(Debug, Clone)]
pub struct Wanted<'a> {
    /// The space of the name.
    pub space: Space,
    /// The path of the name.
    pub path: &'a Path,
    /// The wanted part: whole, or a box.
    pub form: &'a Form,
    /// The element type of the destination, or `None` if any type is accepted.
    pub element: Option<&'a ElementType>,
    /// The required shape of the whole tensor, or `None` if any shape is accepted.
    pub shape: Option<&'a [u64]>,
}

/// Bytes to copy from one extent to the destination: runs of `run_bytes`, as many as the product of
/// the counts of `dims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentCopy {
    /// The row of the extent.
    pub extent: u32,
    /// The offset of the first run in the extent, in bytes.
    pub from_bytes: u64,
    /// The offset of the first run in the destination, in bytes.
    pub to_bytes: u64,
    /// The length of each run in bytes.
    pub run_bytes: u64,
    /// The levels of repetition, outermost first. If there is none, there is one run.
    pub dims: Vec<CopyDim>,
}

/// A level of repetition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyDim {
    /// The number of repetitions of the run and of all inner levels; at least 2.
    pub count: u64,
    /// The distance in bytes from one repetition to the next in the extent.
    pub from_stride: u64,
    /// The distance in bytes from one repetition to the next in the destination.
    pub to_stride: u64,
}

/// The reason why wanted bytes cannot be found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SearchError {
    /// The name does not exist.
    #[error("{name} is not in the index: check its spelling and its space")]
    NoSuchName {
        /// The name in the table.
        name: String,
    },
    /// The name has another element type or shape than the destination.
    #[error(
        "{name}: its {what} is {found}, and {wanted} is wanted: load it as it was saved, then convert it"
    )]
    Mismatch {
        /// The name in the table.
        name: String,
        /// The name of the property that differs.
        what: &'static str,
        /// The property as saved.
        found: String,
        /// The property as wanted.
        wanted: String,
    },
    /// The wanted part is not inside the shape.
    #[error("{name}: {form} is wanted and the shape is {shape:?}: ask for a part of it")]
    OutsideShape {
        /// The name in the table.
        name: String,
        /// The part of the name that was asked for, as text.
        form: String,
        /// The shape of the saved tensor.
        shape: Vec<u64>,
    },
    /// No region holds a wanted element.
    #[error("{name}: {element} is held by no region: the checkpoint does not have all of it")]
    Uncovered {
        /// The name in the table.
        name: String,
        /// The first such element in row-major order.
        element: String,
    },
    /// Two regions hold a wanted element.
    #[error(
        "{name}: {element} is held by two regions or more: the index was not checked when it was written"
    )]
    Overlap {
        /// The name in the table.
        name: String,
        /// The first such element in row-major order.
        element: String,
    },
    /// A wanted element may be in a region whose form this release does not know.
    #[error("{name}: its region {form} is of a form that this release does not read: upgrade it")]
    UnknownForm {
        /// The name in the table.
        name: String,
        /// The form of that region, as text.
        form: String,
    },
    /// Elements shorter than a byte do not begin or end at a byte boundary.
    #[error(
        "{name}: elements of {bits} bits from region {form} do not begin and end at whole bytes: \
        load the whole tensor, or cut it at whole bytes"
    )]
    NotByteAligned {
        /// The name in the table.
        name: String,
        /// Length of one element of the tensor, in bits.
        bits: u16,
        /// The form of the region in which they are, as text.
        form: String,
    },
    /// The regions are cut in so many dimensions at once that they cannot be compared within the
    /// limit of steps.
    #[error("{name}: its regions are cut in too many dimensions at once to be searched")]
    Fragmented {
        /// The name in the table.
        name: String,
    },
}

impl SearchError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSuchName { .. } => ErrorKind::NotFound,
            Self::Uncovered { .. } | Self::Overlap { .. } => ErrorKind::Corrupt,
            Self::Mismatch { .. }
            | Self::OutsideShape { .. }
            | Self::UnknownForm { .. }
            | Self::NotByteAligned { .. }
            | Self::Fragmented { .. } => ErrorKind::Invalid,
        }
    }
}

impl ExtentCopy {
    /// Returns an iterator over the runs: (offset in the extent, offset in the destination,
    /// length), ascending in the destination.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let mut at = vec![0u64; self.dims.len()];
        let mut next = Some((self.from_bytes, self.to_bytes));
        std::iter::from_fn(move || {
            let (from, to) = next?;
            next = self.step(&mut at, from, to);
            Some((from, to, self.run_bytes))
        })
    }

    /// Moves `at` to the next repetition. Returns the offsets of its run, or `None` after the last
    /// one.
    fn step(&self, at: &mut [u64], mut from: u64, mut to: u64) -> Option<(u64, u64)> {
        for (dim, at) in self.dims.iter().zip(at).rev() {
            if *at + 1 < dim.count {
                *at += 1;
                return Some((from + dim.from_stride, to + dim.to_stride));
            }
            from -= *at * dim.from_stride;
            to -= *at * dim.to_stride;
            *at = 0;
        }
        None
    }

    /// Returns the number of bytes that are copied.
    pub fn len_bytes(&self) -> u64 {
        self.dims.iter().fold(self.run_bytes, |bytes, dim| bytes * dim.count)
    }
}

/// Returns the intersection of two boxes, as first index and size, or `None` when it is empty.
fn intersection(a: Area<'_>, b: Area<'_>) -> Option<(Vec<u64>, Vec<u64>)> {
    let (mut start, mut size) =
        (Vec::with_capacity(a.start.len()), Vec::with_capacity(a.start.len()));
    let dims = a.start.iter().zip(a.size).zip(b.start.iter().zip(b.size));
    for ((a_start, a_size), (b_start, b_size)) in dims {
        let first = *a_start.max(b_start);
        let end = (a_start + a_size).min(b_start + b_size);
        size.push(end.checked_sub(first).filter(|size| *size > 0)?);
        start.push(first);
    }
    Some((start, size))
}

/// Returns how to copy the elements of the box `common` from the extent of the box `from` to the
/// destination of the box `to`. All numbers in the result count elements, not bytes.
///
/// From the innermost dimension on, dimensions are joined into one run, or into one level, as long
/// as neither side has a gap between them.
fn copy_elements(extent: u32, from: Area<'_>, to: Area<'_>, common: Area<'_>) -> ExtentCopy {
    let (mut from_first, mut to_first, mut run) = (0, 0, 1);
    let (mut from_stride, mut to_stride) = (1, 1);
    let mut dims: Vec<CopyDim> = Vec::new();
    let sides = from.start.iter().zip(from.size).zip(to.start.iter().zip(to.size));
    for (((from_start, from_size), (to_start, to_size)), (first, count)) in
        sides.zip(common.start.iter().zip(common.size)).rev()
    {
        from_first += (first - from_start) * from_stride;
        to_first += (first - to_start) * to_stride;
        match dims.last_mut() {
            _ if *count == 1 => {}
            None if (from_stride, to_stride) == (run, run) => run *= count,
            Some(inner)
                if (from_stride, to_stride)
                    == (inner.count * inner.from_stride, inner.count * inner.to_stride) =>
            {
                inner.count *= count;
            }
            _ => dims.push(CopyDim { count: *count, from_stride, to_stride }),
        }
        from_stride *= from_size;
        to_stride *= to_size;
    }
    dims.reverse();
    ExtentCopy { extent, from_bytes: from_first, to_bytes: to_first, run_bytes: run, dims }
}

/// Converts the numbers of `copy` from elements to bytes. Returns `None` when a run does not begin
/// and end at byte boundaries.
///
/// A single run that ends where the region and the destination end is rounded up to a byte, because
/// the lengths of both are.
fn to_bytes(
    copy: ExtentCopy,
    bits: u16,
    from_elements: u64,
    to_elements: u64,
) -> Option<ExtentCopy> {
    let bits = u64::from(bits);
    let whole = |elements: u64| {
        let bits = elements * bits;
        bits.is_multiple_of(8).then_some(bits / 8)
    };
    let ends_both = copy.dims.is_empty()
        && copy.from_bytes + copy.run_bytes == from_elements
        && copy.to_bytes + copy.run_bytes == to_elements;
    let run_bytes = match whole(copy.run_bytes) {
        None if ends_both => (copy.run_bytes * bits).div_ceil(8),
        run_bytes => run_bytes?,
    };
    let mut dims = copy.dims;
    for dim in &mut dims {
        (dim.from_stride, dim.to_stride) = (whole(dim.from_stride)?, whole(dim.to_stride)?);
    }
    let (from_bytes, to_bytes) = (whole(copy.from_bytes)?, whole(copy.to_bytes)?);
    Some(ExtentCopy { extent: copy.extent, from_bytes, to_bytes, run_bytes, dims })
}

/// Returns which bytes of which extents to copy to fill the part `wanted` of `name`. `regions` must
/// be all regions of the name, and `extent_bytes` returns the length of an extent.
pub(super) fn search_regions(
    name: &Name,
    regions: &[Region],
    wanted: &Form,
    extent_bytes: impl Fn(u32) -> Option<u64>,
) -> Result<Vec<ExtentCopy>, SearchError> {
    let outside = || SearchError::OutsideShape {
        name: quoted(name),
        form: quoted(wanted),
        shape: name.shape.clone(),
    };
    let zeros = vec![0; name.shape.len()];
    let whole = Area { start: &zeros, size: &name.shape };
    let to = match wanted {
        Form::Whole => whole,
        Form::Box { start, size } if name.kind == NameKind::Tensor => {
            let fits = |((start, size), extent): ((&u64, &u64), &u64)| {
                start.checked_add(*size).is_some_and(|end| end <= *extent)
            };
            let is_inside = (start.len(), size.len()) == (zeros.len(), zeros.len())
                && start.iter().zip(size).zip(&name.shape).all(fits);
            if !is_inside {
                return Err(outside());
            }
            Area { start, size }
        }
        Form::Box { .. } | Form::Unknown { .. } => return Err(outside()),
    };
    let unknown = regions.iter().find(|region| matches!(region.form, Form::Unknown { .. }));
    let unknown = unknown
        .map(|region| SearchError::UnknownForm { name: quoted(name), form: quoted(&region.form) });
    if name.kind != NameKind::Tensor {
        let known = regions.iter().find(|region| region.form == Form::Whole);
        let found = known.and_then(|region| Some((region.extent, extent_bytes(region.extent)?)));
        let Some((extent, run_bytes)) = found else {
            let element = format!("its {}", name.kind);
            return Err(unknown.unwrap_or(SearchError::Uncovered { name: quoted(name), element }));
        };
        let copy = ExtentCopy { extent, from_bytes: 0, to_bytes: 0, run_bytes, dims: Vec::new() };
        return Ok(if run_bytes == 0 { Vec::new() } else { vec![copy] });
    }
    let (mut commons, mut copies) = (Vec::new(), Vec::new());
    // No product overflows: the length of the whole tensor in bits fits 64 bits, and both boxes lie
    // inside the tensor.
    let elements = |area: Area<'_>| area.size.iter().product();
    for region in regions {
        let from = match &region.form {
            Form::Whole => whole,
            Form::Box { start, size } => Area { start, size },
            Form::Unknown { .. } => continue,
        };
        let Some((start, size)) = intersection(from, to) else { continue };
        let common = Area { start: &start, size: &size };
        let copy = copy_elements(region.extent, from, to, common);
        let bits = name.element.bits;
        let copy = to_bytes(copy, bits, elements(from), elements(to));
        copies.push(copy.ok_or_else(|| SearchError::NotByteAligned {
            name: quoted(name),
            bits,
            form: quoted(&region.form),
        })?);
        commons.push((start, size));
    }
    let parts: Vec<Area<'_>> = commons.iter().map(|(start, size)| Area { start, size }).collect();
    match find_defect(to, &parts) {
        Ok(()) => Ok(copies),
        Err(Defect::Fragmented) => Err(SearchError::Fragmented { name: quoted(name) }),
        Err(Defect::Element { index, is_overlap: true }) => {
            Err(SearchError::Overlap { name: quoted(name), element: element_text(&index) })
        }
        Err(Defect::Element { index, .. }) => Err(unknown.unwrap_or(SearchError::Uncovered {
            name: quoted(name),
            element: element_text(&index),
        })),
    }
}

/// Returns which bytes of which extents to copy to fill the part `wanted` (whole, or a box) of the
/// name in row `name_row`, in the order of its regions. The destination is the wanted part,
/// row-major, without gaps.
pub fn search(table: &Table, name_row: u32, wanted: &Form) -> Result<Vec<ExtentCopy>, SearchError> {
    let name = table.names().get(name_row as usize);
    let name = name.ok_or_else(|| SearchError::NoSuchName { name: format!("row {name_row}") })?;
    let extent_bytes = |row: u32| table.extents().get(row as usize).map(|extent| extent.len_bytes);
    search_regions(name, table.regions_of(name_row), wanted, extent_bytes)
}

impl Name {
    /// Returns the length in bytes of the part of this tensor that `form` describes: all of it, or
    /// a box. The length is the same in an extent and in a destination. Returns `None` if the name
    /// is not a tensor, because bytes and plain values are as long as their extent, and for a form
    /// that this release does not know.
    pub fn part_bytes(&self, form: &Form) -> Option<u64> {
        if self.kind != NameKind::Tensor {
            return None;
        }
        let elements = match form {
            Form::Whole => self.elements()?,
            Form::Box { size, .. } => super::volume(size)?,
            Form::Unknown { .. } => return None,
        };
        packed_bytes(elements, self.element.bits)
    }
}

impl Wanted<'_> {
    /// Returns an error when `name` has another element type or shape than the destination.
    pub(super) fn check(&self, name: &Name) -> Result<(), SearchError> {
        let mismatch = |what, found, wanted| {
            Err(SearchError::Mismatch { name: quoted(name), what, found, wanted })
        };
        if let Some(element) = self.element.filter(|element| **element != name.element) {
            return mismatch("element type", quoted(&name.element), quoted(element));
        }
        if let Some(shape) = self.shape.filter(|shape| *shape != name.shape) {
            let text = |shape| quoted(&format_args!("{shape:?}"));
            return mismatch("shape", text(name.shape.as_slice()), text(shape));
        }
        Ok(())
    }
}

impl Table {
    /// Finds a name. Returns its row, and which bytes of which extents to copy to fill the wanted
    /// part of it.
    pub fn search(&self, wanted: &Wanted<'_>) -> Result<(u32, Vec<ExtentCopy>), SearchError> {
        let row = self.find(wanted.space, wanted.path);
        let name = row.and_then(|row| Some((row, self.names().get(row as usize)?)));
        let Some((row, name)) = name else {
            let name = match wanted.space {
                Space::Shared => quoted(wanted.path),
                Space::Rank(rank) => format!("{} of rank {rank}", quoted(wanted.path)),
            };
            return Err(SearchError::NoSuchName { name });
        };
        wanted.check(name)?;
        Ok((row, search(self, row, wanted.form)?))
    }
}
