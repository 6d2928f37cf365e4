//! The rules that the rows of a table obey, whether a builder sorted them or a parser read them.

use std::cmp::Ordering;

use super::error::{Section, TableError, quoted};
use super::limits::{
    EXTENT_ALIGN_BYTES, MAX_DIMS, MAX_ELEMENT_NAME_BYTES, MAX_EXTENTS, MAX_FORM_BYTES, MAX_NAMES,
    MAX_REGIONS,
};
use super::{Extent, Form, Name, NameKind, Region, Table, volume};

/// Returns an error when there are more rows than a table may have.
pub(super) fn check_counts(names: usize, regions: usize, extents: usize) -> Result<(), TableError> {
    for (section, count, limit) in [
        (Section::Names, names, MAX_NAMES),
        (Section::Regions, regions, MAX_REGIONS),
        (Section::Extents, extents, MAX_EXTENTS),
    ] {
        if count > limit {
            return Err(TableError::TooMany { section, count, limit });
        }
    }
    Ok(())
}

/// Checks one name: its element type, its shape, and that its length in bits fits 64 bits.
pub(super) fn check_name(name: &Name) -> Result<(), TableError> {
    let wrong = |why| Err(TableError::Name { name: quoted(name), why });
    let element = &name.element;
    if !(1..=MAX_ELEMENT_NAME_BYTES).contains(&element.name.len())
        || !element.name.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return wrong("its element type needs a name of 1 to 64 visible ASCII characters");
    }
    if element.bits == 0 {
        return wrong("its elements have no bits");
    }
    if name.shape.len() > MAX_DIMS {
        return wrong("its shape has more than 64 dimensions");
    }
    if name.kind != NameKind::Tensor && (!name.shape.is_empty() || element.bits != 8) {
        return wrong("bytes and plain values have no shape and elements of 8 bits");
    }
    let bits = name.elements().and_then(|elements| elements.checked_mul(element.bits.into()));
    if bits.is_none() {
        return wrong("its length in bits does not fit 64 bits");
    }
    Ok(())
}

/// Returns the length in bytes of an extent that holds `elements` of `bits` each. Packed elements
/// are rounded up to a byte. Returns `None` when the number of bits overflows.
pub(super) fn packed_bytes(elements: u64, bits: u16) -> Option<u64> {
    Some(elements.checked_mul(bits.into())?.div_ceil(8))
}

/// Checks one region against its name and extent.
pub(super) fn check_region(name: &Name, form: &Form, extent: &Extent) -> Result<(), TableError> {
    let wrong = |why| Err(TableError::Region { name: quoted(name), form: quoted(form), why });
    let elements = match form {
        Form::Unknown { number: 0 | 1, .. } => {
            return wrong("has the number of a known form: use that form");
        }
        Form::Unknown { payload, .. } if payload.len() > MAX_FORM_BYTES => {
            return wrong("has a content over the limit of 1 MiB: put it into an extent");
        }
        Form::Unknown { .. } => return Ok(()),
        Form::Whole if name.kind != NameKind::Tensor => return Ok(()),
        Form::Whole => name.elements(),
        Form::Box { .. } if name.kind != NameKind::Tensor => {
            return wrong("is of a name that is no tensor: save it whole");
        }
        Form::Box { start, size } => {
            if start.len() != name.shape.len() || size.len() != name.shape.len() {
                return wrong("has another number of dimensions than the shape");
            }
            let fits = |((start, size), extent): ((&u64, &u64), &u64)| {
                start.checked_add(*size).is_some_and(|end| end <= *extent)
            };
            if !start.iter().zip(size).zip(&name.shape).all(fits) {
                return wrong("reaches beyond the shape");
            }
            volume(size)
        }
    };
    let expected = elements.and_then(|elements| packed_bytes(elements, name.element.bits));
    match expected {
        Some(expected_bytes) if expected_bytes == extent.len_bytes => Ok(()),
        expected => Err(TableError::RegionLength {
            name: quoted(name),
            form: quoted(form),
            expected_bytes: expected.unwrap_or(u64::MAX),
            found_bytes: extent.len_bytes,
        }),
    }
}

pub(super) fn extent_error(extent: &Extent, why: &'static str) -> TableError {
    let Extent { shard, offset_bytes, len_bytes, .. } = *extent;
    TableError::Extent { shard, offset_bytes, len_bytes, why }
}

/// Checks one extent against the one before it, if there is one.
pub(super) fn check_extent(before: Option<&Extent>, extent: &Extent) -> Result<(), TableError> {
    if !extent.offset_bytes.is_multiple_of(EXTENT_ALIGN_BYTES) {
        return Err(extent_error(extent, "does not begin at a multiple of 64"));
    }
    if extent.offset_bytes.checked_add(extent.len_bytes).is_none() {
        return Err(extent_error(extent, "reaches beyond 64 bits"));
    }
    let Some(before) = before else { return Ok(()) };
    if before.hash.is_some() != extent.hash.is_some() {
        return Err(TableError::MixedHashes);
    }
    if before.place() >= extent.place() {
        return Err(extent_error(extent, "is given twice or out of order"));
    }
    let is_one_shard = (before.source, before.shard) == (extent.source, extent.shard);
    if is_one_shard && before.offset_bytes + before.len_bytes > extent.offset_bytes {
        return Err(extent_error(extent, "begins inside the extent before it"));
    }
    Ok(())
}

/// Checks that a name sorts after the one before it. A builder sorts the names, so there the check
/// fails only for a name that is given twice.
fn check_name_order(before: &Name, name: &Name) -> Result<(), TableError> {
    match (before.space, &before.path).cmp(&(name.space, &name.path)) {
        Ordering::Less => Ok(()),
        Ordering::Equal => Err(TableError::DuplicateName { name: quoted(name) }),
        Ordering::Greater => {
            Err(TableError::Name { name: quoted(name), why: "it is not in order" })
        }
    }
}

/// Checks that a region sorts after the one before it.
fn check_region_order(before: &Region, region: &Region, name: &Name) -> Result<(), TableError> {
    let order = (before.name, &before.form).cmp(&(region.name, &region.form));
    if order == Ordering::Less {
        return Ok(());
    }
    let (name, form) = (quoted(name), quoted(&region.form));
    Err(match order {
        Ordering::Equal => TableError::DuplicateRegion { name, form },
        _ => TableError::Region { name, form, why: "is not in order" },
    })
}

impl Table {
    /// Returns the table of sorted rows, or an error for the first rule that they break.
    pub(super) fn checked(
        names: Vec<Name>,
        regions: Vec<Region>,
        extents: Vec<Extent>,
    ) -> Result<Self, TableError> {
        check_counts(names.len(), regions.len(), extents.len())?;
        for (at, name) in names.iter().enumerate() {
            check_name(name)?;
            if let Some(before) = at.checked_sub(1).and_then(|at| names.get(at)) {
                check_name_order(before, name)?;
            }
        }
        for (at, extent) in extents.iter().enumerate() {
            check_extent(at.checked_sub(1).and_then(|at| extents.get(at)), extent)?;
        }
        for (at, region) in regions.iter().enumerate() {
            let absent = |section, row, rows| TableError::Row { section, row, rows };
            let name = names
                .get(region.name as usize)
                .ok_or_else(|| absent(Section::Names, region.name, names.len()))?;
            let extent = extents
                .get(region.extent as usize)
                .ok_or_else(|| absent(Section::Extents, region.extent, extents.len()))?;
            check_region(name, &region.form, extent)?;
            if let Some(before) = at.checked_sub(1).and_then(|at| regions.get(at)) {
                check_region_order(before, region, name)?;
            }
        }
        Ok(Self { names, regions, extents })
    }
}
