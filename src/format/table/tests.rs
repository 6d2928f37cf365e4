//! Tests of the table as a whole: round trips and damage. The submodules test the parts.

mod blocks;
mod hostile;
mod reference;
mod rows;

use super::*;
use crate::kind::ErrorKind;

pub(super) fn float32() -> ElementType {
    ElementType { name: "float32".into(), bits: 32, big_endian: false }
}

pub(super) fn tensor(path: &str, shape: &[u64]) -> Name {
    Name {
        space: Space::Shared,
        path: path.parse().unwrap(),
        kind: NameKind::Tensor,
        element: float32(),
        shape: shape.to_vec(),
        flags: 0,
    }
}

pub(super) fn area(start: &[u64], size: &[u64]) -> Form {
    Form::new_box(start, size)
}

pub(super) fn extent(offset_bytes: u64, len_bytes: u64) -> Extent {
    Extent { source: 0, shard: 0, offset_bytes, len_bytes, hash: None }
}

/// Returns a small table with every feature: both spaces, all kinds and forms, tied weights, an
/// empty tensor and a scalar.
pub(super) fn varied(has_hashes: bool) -> Table {
    let mut builder = TableBuilder::new();
    let mut offset = 0;
    let mut next = |len_bytes: u64| {
        let hash = has_hashes.then_some([offset as u8; 32]);
        let extent = Extent { hash, ..extent(offset, len_bytes) };
        offset = (offset + len_bytes).next_multiple_of(64);
        extent
    };
    let embed = builder.add_name(tensor("model/embed.weight", &[6, 4]));
    let top = builder.add_extent(next(4 * 3 * 4));
    let bottom = builder.add_extent(next(4 * 3 * 4));
    builder.add_region(embed, area(&[0, 0], &[3, 4]), top);
    builder.add_region(embed, area(&[3, 0], &[3, 4]), bottom);
    let head = builder.add_name(tensor("model/head.weight", &[3, 4]));
    builder.add_region(head, Form::Whole, bottom);
    let scalar = builder.add_name(tensor("optim/state{0}/step", &[]));
    let four = builder.add_extent(next(4));
    builder.add_region(scalar, Form::Whole, four);
    let empty = builder.add_name(tensor("model/empty", &[0, 7]));
    let nothing = builder.add_extent(next(0));
    builder.add_region(empty, Form::Whole, nothing);
    let packed = ElementType { name: "int4".into(), bits: 4, big_endian: false };
    let packed = builder.add_name(Name { element: packed, ..tensor("model/packed", &[5]) });
    let three = builder.add_extent(next(3));
    builder.add_region(packed, Form::Whole, three);
    let octets = ElementType { name: "bytes".into(), bits: 8, big_endian: false };
    for (rank, kind) in [(0, NameKind::Bytes), (7, NameKind::Value), (u32::MAX, NameKind::Bytes)] {
        let space = Space::Rank(rank);
        let element = octets.clone();
        let name = Name { space, kind, element, flags: rank, ..tensor("rng[3]", &[]) };
        let name = builder.add_name(name);
        let some = builder.add_extent(next(u64::from(rank % 100)));
        builder.add_region(name, Form::Whole, some);
    }
    let big = ElementType { name: "complex128".into(), bits: 128, big_endian: true };
    let later = builder.add_name(Name { element: big, ..tensor("model/later", &[9, 9, 9]) });
    let some = builder.add_extent(next(100));
    for number in [2, 3, 4, 200] {
        builder.add_region(later, Form::Unknown { number, payload: vec![number; 3] }, some);
    }
    // Offsets of other shards and sources start at 0 again.
    let hash = has_hashes.then_some([1; 32]);
    let old = builder.add_extent(Extent { source: 3, shard: 9, hash, ..extent(640, 16) });
    for (source, shard) in [(0, 4), (0, 5), (3, 10), (4, 1)] {
        builder.add_extent(Extent { source, shard, hash, ..extent(0, 16) });
    }
    builder.add_region(later, area(&[0, 0, 0], &[1, 1, 1]), old);
    builder.build().unwrap()
}

#[test]
fn a_table_reads_as_it_was_written() {
    for table in [varied(false), varied(true), Table::default()] {
        for block_rows in [1, 2, 3, 100, usize::MAX] {
            let bytes = table.to_bytes_in_blocks(block_rows).unwrap();
            assert_eq!(Table::parse(&bytes), Ok(table.clone()), "{block_rows} rows");
        }
    }
}

#[test]
fn any_flipped_bit_any_missing_or_added_byte_is_refused() {
    for block_rows in [2, 100] {
        let good = varied(true).to_bytes_in_blocks(block_rows).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                Table::parse(&bad).map_err(|e| e.kind()),
                Err(ErrorKind::Corrupt),
                "bit {bit}"
            );
        }
        for len in 0..good.len() {
            assert!(Table::parse(&good[..len]).is_err(), "cut to {len}");
        }
        assert!(Table::parse(&[good.as_slice(), b"x"].concat()).is_err());
        assert!(Table::parse(&[b"x", good.as_slice()].concat()).is_err());
    }
}

#[test]
fn a_whole_tensor_is_one_run() {
    let table = varied(false);
    let row = table.find(Space::Shared, &"model/head.weight".parse().unwrap()).unwrap();
    let copies = search(&table, row, &Form::Whole).unwrap();
    let runs: Vec<_> = copies.iter().flat_map(|copy| copy.runs()).collect();
    assert_eq!(runs, [(0, 0, 48)]);
}

#[test]
fn dimensions_are_joined_where_they_can_be() {
    let mut builder = TableBuilder::new();
    let name = builder.add_name(tensor("a", &[4, 3, 5, 2]));
    let all = builder.add_extent(extent(0, 4 * 120));
    builder.add_region(name, Form::Whole, all);
    let table = builder.build().unwrap();
    let only = |form: Form| search(&table, name, &form).unwrap().remove(0);
    // The last two dimensions make runs of 4 elements; the first two dimensions give twelve of
    // them.
    let copy = only(area(&[0, 0, 1, 0], &[4, 3, 2, 2]));
    let dims = vec![CopyDim { count: 12, from_stride: 40, to_stride: 16 }];
    assert_eq!(copy, ExtentCopy { extent: 0, from_bytes: 8, to_bytes: 0, run_bytes: 16, dims });
    assert_eq!(only(area(&[1, 0, 0, 0], &[2, 3, 5, 2])).dims, []);
    assert_eq!(only(area(&[1, 1, 0, 1], &[2, 2, 5, 1])).dims.len(), 2);
}

#[test]
fn the_reader_finds_what_the_table_has() {
    for block_rows in [1, 2, 100] {
        let table = varied(true);
        let data = vec![7; 1000];
        let shard = [data.as_slice(), &table.to_bytes_in_blocks(block_rows).unwrap()].concat();
        let reader = TableReader::open(shard.as_slice(), shard.len() as u64).unwrap();
        assert_eq!(reader.table_range().start, 1000);
        for (row, name) in (0u32..).zip(table.names()) {
            let found = reader.find(name.space, &name.path).unwrap().unwrap();
            assert_eq!((found.row, &found.name), (row, name));
            assert_eq!(found.regions, table.regions_of(row));
            assert_eq!(found.search(&Form::Whole), search(&table, row, &Form::Whole));
        }
        let all: Vec<Name> = reader.name_blocks().flat_map(|block| block.unwrap().1).collect();
        assert_eq!(all, table.names());
        assert_eq!(reader.read_all().unwrap(), table);
    }
}
