//! The blocks of a table: encodes rows as columns, and decodes them. Each block can be read without
//! the others.
//!
//! Deltas are from the row before, in the first row from 0:
//!
//! ```text
//! names     space delta | path | type | shape | flags
//! regions   name delta | form number | form content | extent
//! extents   source delta | shard | gap | length | hash
//! ```
//!
//! Decoding checks everything that can be checked within one block, including the order of its
//! rows.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::columns::{
    Column, Decoded, Malformed, join_columns, put_number, put_path, read_path, require,
    split_columns, unzigzag, zigzag,
};
use super::limits::{
    EXTENT_ALIGN_BYTES, FULL_BLOCK_BYTES, MAX_DIMS, MAX_ELEMENT_NAME_BYTES, MAX_FORM_BYTES,
};
use super::path::Path;
use super::{Dims, ElementType, Extent, Form, Name, NameKind, Region, Space};

/// The smallest size of a row of names in bytes: space, the two lengths of a path, type, shape,
/// flags.
pub(super) const LEAST_NAME_BYTES: usize = 6;
/// The smallest size of a row of regions in bytes: name, form, extent.
pub(super) const LEAST_REGION_BYTES: usize = 3;
/// The smallest size of a row of extents in bytes: source, shard, gap, length.
pub(super) const LEAST_EXTENT_BYTES: usize = 4;

const WHOLE: u8 = 0;
const BOX: u8 = 1;
const BIG_ENDIAN: u8 = 1;
const HASH_BYTES: usize = 32;

/// Returns whether the columns have reached the length at which their block ends.
fn is_full<const N: usize>(columns: &[Vec<u8>; N]) -> bool {
    columns.iter().map(Vec::len).sum::<usize>() >= FULL_BLOCK_BYTES
}

/// Returns the number of a space: 0 for the shared space, then the ranks.
pub(super) fn space_number(space: Space) -> u64 {
    match space {
        Space::Shared => 0,
        Space::Rank(rank) => u64::from(rank) + 1,
    }
}

/// Returns the space with this number.
pub(super) fn space_of(number: u64) -> Decoded<Space> {
    match number.checked_sub(1) {
        None => Ok(Space::Shared),
        Some(rank) => {
            u32::try_from(rank).map(Space::Rank).map_err(|_| Malformed("there is no such rank"))
        }
    }
}

fn kind_number(kind: NameKind) -> u8 {
    match kind {
        NameKind::Tensor => 0,
        NameKind::Bytes => 1,
        NameKind::Value => 2,
    }
}

fn put_type(out: &mut Vec<u8>, kind: NameKind, element: &ElementType) {
    out.push(kind_number(kind));
    out.push(if element.big_endian { BIG_ENDIAN } else { 0 });
    put_number(out, element.bits.into());
    put_number(out, element.name.len() as u64);
    out.extend(element.name.as_bytes());
}

fn read_type(column: &mut Column<'_>) -> Decoded<(NameKind, ElementType)> {
    let kind = match column.byte()? {
        0 => NameKind::Tensor,
        1 => NameKind::Bytes,
        2 => NameKind::Value,
        _ => return Err(Malformed("a name is of a kind that there is not")),
    };
    let flags = column.byte()?;
    require(flags <= BIG_ENDIAN, "an element type has a flag that there is not")?;
    let bits = column.number_to(u16::MAX.into())? as u16;
    let len = column.number_to(MAX_ELEMENT_NAME_BYTES)?;
    let name = std::str::from_utf8(column.bytes(len)?)
        .map_err(|_| Malformed("the name of an element type is not UTF-8"))?;
    let element = ElementType { name: Arc::from(name), bits, big_endian: flags == BIG_ENDIAN };
    Ok((kind, element))
}

/// Encodes as many of `names` as fit into one block of at most `block_rows` rows. Returns their
/// number and the block.
pub(super) fn encode_names(names: &[Name], block_rows: usize) -> (usize, Vec<u8>) {
    let mut columns: [Vec<u8>; 5] = Default::default();
    let mut types: Vec<(NameKind, &ElementType)> = Vec::new();
    let mut known = std::collections::BTreeMap::new();
    let (mut space_before, mut path_before): (u64, &[u8]) = (0, &[]);
    let mut rows = 0;
    for name in names.iter().take(block_rows) {
        let [spaces, paths, type_numbers, shapes, flags] = &mut columns;
        let space = space_number(name.space);
        put_number(spaces, space - space_before);
        put_path(paths, path_before, name.path.as_bytes());
        (space_before, path_before) = (space, name.path.as_bytes());
        let key = (name.kind, &name.element);
        let number = match known.get(&key) {
            Some(number) => *number,
            None => {
                types.push(key);
                known.insert(key, types.len() as u64);
                0
            }
        };
        put_number(type_numbers, number);
        if number == 0 {
            put_type(type_numbers, name.kind, &name.element);
        }
        put_number(shapes, name.shape.len() as u64);
        for size in &name.shape {
            put_number(shapes, *size);
        }
        put_number(flags, name.flags.into());
        rows += 1;
        if is_full(&columns) {
            break;
        }
    }
    (rows, join_columns(columns))
}

/// Decodes a block of `rows` names and appends them to `out`.
pub(super) fn decode_names(block: &[u8], rows: usize, out: &mut Vec<Name>) -> Decoded<()> {
    let [mut spaces, mut paths, mut type_numbers, mut shapes, mut flags] = split_columns(block)?;
    require(rows <= block.len() / LEAST_NAME_BYTES, "a block has fewer bytes than rows")?;
    let mut types: Vec<(NameKind, ElementType)> = Vec::new();
    let mut known = BTreeSet::new();
    let (mut space, mut path, mut before) = (0u64, Vec::new(), Vec::new());
    for row in 0..rows {
        let delta = spaces.number()?;
        space = space.checked_add(delta).ok_or(Malformed("there is no such rank"))?;
        before.clone_from(&path);
        read_path(&mut paths, &mut path)?;
        require(row == 0 || delta > 0 || before < path, "names are not in order")?;
        let number = type_numbers.number_to(types.len())?;
        if number == 0 {
            let new = read_type(&mut type_numbers)?;
            require(known.insert(new.clone()), "an element type is given twice")?;
            types.push(new);
        }
        let at = number.checked_sub(1).unwrap_or(types.len().saturating_sub(1));
        let (kind, element) =
            types.get(at).cloned().ok_or(Malformed("there is no such element type"))?;
        let dims = shapes.number_to(MAX_DIMS)?;
        let mut shape = Vec::with_capacity(dims);
        for _ in 0..dims {
            shape.push(shapes.number()?);
        }
        out.push(Name {
            space: space_of(space)?,
            path: Path::from_bytes(&path).map_err(|_| Malformed("a path does not decode"))?,
            kind,
            element,
            shape,
            flags: flags.number32()?,
        });
    }
    for column in [spaces, paths, type_numbers, shapes, flags] {
        column.end()?;
    }
    Ok(())
}

fn put_form(numbers: &mut Vec<u8>, contents: &mut Vec<u8>, form: &Form) {
    match form {
        Form::Whole => numbers.push(WHOLE),
        Form::Box { start, size } => {
            numbers.push(BOX);
            put_number(contents, start.len() as u64);
            for (start, size) in start.iter().zip(size) {
                put_number(contents, *start);
                put_number(contents, *size);
            }
        }
        Form::Unknown { number, payload } => {
            numbers.push(*number);
            put_number(contents, payload.len() as u64);
            contents.extend(payload);
        }
    }
}

fn read_form(numbers: &mut Column<'_>, contents: &mut Column<'_>) -> Decoded<Form> {
    match numbers.byte()? {
        WHOLE => Ok(Form::Whole),
        BOX => {
            let dims = contents.number_to(MAX_DIMS)?;
            let (mut start, mut size) = (Dims::with_capacity(dims), Dims::with_capacity(dims));
            for _ in 0..dims {
                start.push(contents.number()?);
                size.push(contents.number()?);
            }
            Ok(Form::Box { start, size })
        }
        number => {
            let len = contents.number_to(MAX_FORM_BYTES)?;
            Ok(Form::Unknown { number, payload: contents.bytes(len)?.to_vec() })
        }
    }
}

/// Encodes as many of `regions` as fit into one block of at most `block_rows` rows. Returns their
/// number and the block.
pub(super) fn encode_regions(regions: &[Region], block_rows: usize) -> (usize, Vec<u8>) {
    let mut columns: [Vec<u8>; 4] = Default::default();
    let (mut name_before, mut expected_extent) = (0, 0i64);
    let mut rows = 0;
    for region in regions.iter().take(block_rows) {
        let [names, numbers, contents, extents] = &mut columns;
        put_number(names, (region.name - name_before).into());
        put_form(numbers, contents, &region.form);
        put_number(extents, zigzag(i64::from(region.extent) - expected_extent));
        (name_before, expected_extent) = (region.name, i64::from(region.extent) + 1);
        rows += 1;
        if is_full(&columns) {
            break;
        }
    }
    (rows, join_columns(columns))
}

/// Decodes a block of `rows` regions and appends them to `out`.
pub(super) fn decode_regions(block: &[u8], rows: usize, out: &mut Vec<Region>) -> Decoded<()> {
    let [mut names, mut numbers, mut contents, mut extents] = split_columns(block)?;
    require(rows <= block.len() / LEAST_REGION_BYTES, "a block has fewer bytes than rows")?;
    let (mut name, mut expected_extent) = (0u32, 0i64);
    for row in 0..rows {
        let delta = names.number32()?;
        name = name.checked_add(delta).ok_or(Malformed("there is no such name"))?;
        let form = read_form(&mut numbers, &mut contents)?;
        if row > 0 && delta == 0 {
            let in_order = out.last().is_some_and(|before| before.form < form);
            require(in_order, "regions are not in order")?;
        }
        let extent = expected_extent.checked_add(unzigzag(extents.number()?));
        let extent = extent.and_then(|extent| u32::try_from(extent).ok());
        let extent = extent.ok_or(Malformed("there is no such extent"))?;
        expected_extent = i64::from(extent) + 1;
        out.push(Region { name, form, extent });
    }
    for column in [names, numbers, contents, extents] {
        column.end()?;
    }
    Ok(())
}

/// Encodes as many of `extents` as fit into one block of at most `block_rows` rows. Returns their
/// number and the block.
pub(super) fn encode_extents(extents: &[Extent], block_rows: usize) -> (usize, Vec<u8>) {
    let mut columns: [Vec<u8>; 5] = Default::default();
    let mut cursor = Cursor::default();
    let mut rows = 0;
    for extent in extents.iter().take(block_rows) {
        let [sources, shards, gaps, lengths, hashes] = &mut columns;
        put_number(sources, (extent.source - cursor.source).into());
        cursor.enter_source(extent.source);
        put_number(shards, (extent.shard - cursor.shard).into());
        cursor.enter_shard(extent.shard);
        put_number(gaps, extent.offset_bytes / EXTENT_ALIGN_BYTES - cursor.end_units);
        put_number(lengths, extent.len_bytes);
        hashes.extend_from_slice(extent.hash.as_ref().map_or(&[], |hash| hash.as_slice()));
        cursor.end_units = (extent.offset_bytes + extent.len_bytes).div_ceil(EXTENT_ALIGN_BYTES);
        rows += 1;
        if is_full(&columns) {
            break;
        }
    }
    (rows, join_columns(columns))
}

/// The end of the preceding extent, relative to which the next one is encoded.
#[derive(Default)]
struct Cursor {
    source: u32,
    shard: u32,
    /// The end of the preceding extent, in units of 64 bytes.
    end_units: u64,
}

impl Cursor {
    fn enter_source(&mut self, source: u32) {
        if self.source != source {
            *self = Self { source, ..Self::default() };
        }
    }

    fn enter_shard(&mut self, shard: u32) {
        if self.shard != shard {
            *self = Self { source: self.source, shard, end_units: 0 };
        }
    }
}

/// Decodes a block of `rows` extents, with hashes or without, and appends them to `out`.
pub(super) fn decode_extents(
    block: &[u8],
    rows: usize,
    has_hashes: bool,
    out: &mut Vec<Extent>,
) -> Decoded<()> {
    let [mut sources, mut shards, mut gaps, mut lengths, mut hashes] = split_columns(block)?;
    require(rows <= block.len() / LEAST_EXTENT_BYTES, "a block has fewer bytes than rows")?;
    let absent = Malformed("an extent lies beyond what 32 or 64 bits can say");
    let mut cursor = Cursor::default();
    for _ in 0..rows {
        let source = cursor.source.checked_add(sources.number32()?).ok_or(absent)?;
        cursor.enter_source(source);
        let shard = cursor.shard.checked_add(shards.number32()?).ok_or(absent)?;
        cursor.enter_shard(shard);
        let units = cursor.end_units.checked_add(gaps.number()?).ok_or(absent)?;
        let offset_bytes = units.checked_mul(EXTENT_ALIGN_BYTES).ok_or(absent)?;
        let len_bytes = lengths.number()?;
        let end = offset_bytes.checked_add(len_bytes).ok_or(absent)?;
        cursor.end_units = end.div_ceil(EXTENT_ALIGN_BYTES);
        let hash = if has_hashes { Some(hashes.array::<HASH_BYTES>()?) } else { None };
        out.push(Extent { source, shard, offset_bytes, len_bytes, hash });
    }
    for column in [sources, shards, gaps, lengths, hashes] {
        column.end()?;
    }
    Ok(())
}
