//! Tables with valid checksums and invalid content. Each is refused for its own reason.

use super::*;
use crate::format::table::columns::{join_columns, put_number};
use crate::format::table::layout::{Block, Directory, Footer, checksum};
use crate::format::table::limits::*;

/// A block: its rows, its columns, and its first key as in the directory.
type BlockParts<const COLUMNS: usize, F> = (usize, [Vec<u8>; COLUMNS], F);

/// The parts of a table, which a test changes one by one. Checksums and lengths are computed
/// afterwards.
#[derive(Clone)]
struct Parts {
    names: Vec<BlockParts<5, (Space, Path)>>,
    /// The directory holds the first and the last name of each block.
    regions: Vec<BlockParts<4, (u32, u32)>>,
    extents: Vec<BlockParts<5, ()>>,
    /// The numbers of rows in the footer.
    counts: [u32; 3],
}

fn block<const N: usize, F>(
    out: &mut Vec<u8>,
    rows: usize,
    columns: &[Vec<u8>; N],
    first: F,
) -> Block<F> {
    let bytes = join_columns(columns.clone());
    let (offset_bytes, len_bytes, sum) = (out.len() as u64, bytes.len(), checksum(&bytes));
    out.extend(bytes);
    Block { offset_bytes, len_bytes, first_row: 0, rows, sum, first }
}

/// Appends a directory and a footer to `blocks`.
fn sealed(mut blocks: Vec<u8>, directory: &[u8], counts: [u32; 3]) -> Vec<u8> {
    blocks.extend(directory);
    let [names, regions, extents] = counts;
    let footer = Footer {
        has_hashes: false,
        directory_bytes: directory.len() as u32,
        table_bytes: (blocks.len() + FOOTER_BYTES) as u64,
        names,
        regions,
        extents,
        directory_sum: checksum(directory),
    };
    blocks.extend(footer.to_bytes());
    blocks
}

impl Parts {
    /// Returns the parts of a table with names `a` and `b`, both `float32` of shape [2], each whole
    /// in an extent of its own.
    fn good() -> Self {
        let element = b"\0\0\x20\x07float32";
        let types = [&[0][..], element, &[1]].concat();
        let paths = b"\0\x03\x01a\0\x01\x02b\0".to_vec();
        let names = [vec![0, 0], paths, types, vec![1, 2, 1, 2], vec![0, 0]];
        Self {
            names: vec![(2, names, (Space::Shared, "a".parse().unwrap()))],
            regions: vec![(2, [vec![0, 1], vec![0, 0], vec![], vec![0, 0]], (0, 1))],
            extents: vec![(2, [vec![0, 0], vec![0, 0], vec![0, 0], vec![8, 8], vec![]], ())],
            counts: [2, 2, 2],
        }
    }

    fn blocks(&self) -> (Vec<u8>, Directory) {
        let (mut out, mut directory) = (Vec::new(), Directory::default());
        for (rows, columns, first) in &self.names {
            directory.names.push(block(&mut out, *rows, columns, first.clone()));
        }
        for (rows, columns, first) in &self.regions {
            directory.regions.push(block(&mut out, *rows, columns, *first));
        }
        for (rows, columns, ()) in &self.extents {
            directory.extents.push(block(&mut out, *rows, columns, ()));
        }
        (out, directory)
    }

    fn bytes(&self) -> Vec<u8> {
        let (blocks, directory) = self.blocks();
        sealed(blocks, &directory.to_bytes(), self.counts)
    }
}

fn why(bytes: &[u8]) -> String {
    let error = Table::parse(bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    // The reader need not detect every error. It must not panic, and the names that it returns must
    // be consistent.
    if let Ok(reader) = TableReader::open(bytes, bytes.len() as u64) {
        for name in reader.name_blocks().flatten().flat_map(|(_, names)| names) {
            if let Ok(Some(found)) = reader.find(name.space, &name.path) {
                assert_eq!(found.name, name);
                let _ = found.search(&Form::Whole);
            }
        }
    }
    error.to_string()
}

/// Asserts that the good parts, changed by `change`, are refused with an error that contains
/// `expected`.
#[track_caller]
fn refused(expected: &str, change: impl FnOnce(&mut Parts)) {
    let mut parts = Parts::good();
    change(&mut parts);
    let error = why(&parts.bytes());
    assert!(error.contains(expected), "{error:?}, expected: {expected}");
}

#[test]
fn the_parts_are_a_table_before_they_are_changed() {
    let bytes = Parts::good().bytes();
    let table = Table::parse(&bytes).unwrap();
    let names: Vec<String> = table.names().iter().map(Name::to_string).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(table.check_coverage(), Ok(()));
    assert_eq!(table.to_bytes().unwrap(), bytes);
}

#[test]
fn columns_that_do_not_decode_are_refused() {
    refused("ends early", |parts| parts.names[0].1[0].truncate(1));
    refused("left over", |parts| parts.names[0].1[0].push(0));
    refused("left over", |parts| parts.regions[0].1[2].push(0));
    refused("left over", |parts| parts.extents[0].1[4] = vec![0; 64]);
    refused("shortest form", |parts| parts.names[0].1[4] = vec![0x80, 0, 0]);
    refused("longer than 32 bits", |parts| {
        parts.names[0].1[4] = vec![0xff, 0xff, 0xff, 0xff, 0x1f, 0];
    });
    refused("kind that there is not", |parts| parts.names[0].1[2][1] = 3);
    refused("flag that there is not", |parts| parts.names[0].1[2][2] = 2);
    refused("over its limit", |parts| *parts.names[0].1[2].last_mut().unwrap() = 2);
    refused("not UTF-8", |parts| parts.names[0].1[2][5] = 0xff);
    refused("given twice", |parts| {
        let types = &mut parts.names[0].1[2];
        types.pop();
        types.extend_from_within(..);
    });
    refused("over its limit", |parts| {
        parts.names[0].1[3] = [&[65][..], &[1; 65], &[1, 2]].concat();
    });
    refused("no such rank", |parts| {
        parts.names[0].1[0] = vec![0, 0x81, 0x80, 0x80, 0x80, 0x20];
    });
    refused("fewer bytes than rows", |parts| {
        parts.names[0].0 = MAX_BLOCK_ROWS;
        parts.counts[0] = MAX_BLOCK_ROWS as u32;
    });
    refused("no such extent", |parts| parts.regions[0].1[3] = vec![1, 0]);
}

#[test]
fn paths_that_do_not_decode_or_are_not_in_order_are_refused() {
    let paths =
        |bytes: &'static [u8]| move |parts: &mut Parts| parts.names[0].1[1] = bytes.to_vec();
    refused("a path does not decode", paths(b"\0\x03\x01a\0\0\x01\x04"));
    refused("not in order", paths(b"\0\x03\x01a\0\x03\0"));
    refused("shares another part", paths(b"\0\x03\x01a\0\0\x03\x01b\0"));
    refused("over its limit", paths(b"\0\x03\x01a\0\x04\x01b"));
    refused("over its limit", paths(b"\0\x03\x01a\0\x01\x80\x20b\0"));
    refused("not in order", |parts| {
        parts.names[0].1[1] = b"\0\x03\x01b\0\x01\x02a\0".to_vec();
        parts.names[0].2.1 = "b".parse().unwrap();
    });
}

/// A path that shares 4,000 bytes with the one before it and adds one: thousands of such paths
/// would expand a short column to megabytes.
#[test]
fn a_path_that_shares_more_than_its_own_bytes_pay_for_is_refused() {
    refused("shares another part", |parts| {
        let mut column = vec![0];
        put_number(&mut column, 4002);
        column.push(1);
        column.extend([b'x'; 4000]);
        column.push(0);
        put_number(&mut column, 4000);
        column.extend([2, b'y', 0]);
        parts.names[0].1[1] = column;
        parts.names[0].2.1 = "x".repeat(4000).parse().unwrap();
    });
}

#[test]
fn rows_that_contradict_each_other_are_refused() {
    refused("row 2 of 2 names", |parts| {
        parts.regions[0].1[0] = vec![0, 2];
        parts.regions[0].2 = (0, 2);
    });
    refused("row 2 of 2 extents", |parts| parts.regions[0].1[3] = vec![0, 2]);
    refused("regions are not in order", |parts| {
        parts.regions[0].1[0] = vec![0, 0];
        parts.regions[0].2 = (0, 0);
    });
    refused("takes 8 bytes and its extent has 9", |parts| parts.extents[0].1[3] = vec![9, 8]);
    refused("given twice or out of order", |parts| parts.extents[0].1[3] = vec![0, 0]);
    refused("beyond what 32 or 64 bits", |parts| {
        let most = [&[0xff; 9][..], &[1]].concat();
        parts.extents[0].1[2] = [&most[..], &[0]].concat();
    });
    refused("does not fit 64 bits", |parts| {
        let most = [&[0xff; 9][..], &[1]].concat();
        parts.names[0].1[3] = [&[1][..], &most, &[1, 2]].concat();
    });
    refused("reaches beyond the shape", |parts| {
        parts.regions[0].1[1] = vec![1, 0];
        parts.regions[0].1[2] = vec![1, 1, 2];
    });
    refused("another number of dimensions", |parts| {
        parts.regions[0].1[1] = vec![1, 0];
        parts.regions[0].1[2] = vec![2, 0, 1, 0, 2];
    });
    refused("have no bits", |parts| parts.names[0].1[2][3] = 0);
    refused("visible ASCII", |parts| parts.names[0].1[2][5] = b' ');
    refused("bytes and plain values", |parts| parts.names[0].1[2][1] = 1);
}

/// The reader reads one block of each section. It also refuses blocks that contradict the directory
/// or the rows of another block.
#[test]
fn the_reader_refuses_what_contradicts_the_blocks_that_it_reads() {
    let find = |change: &dyn Fn(&mut Parts)| {
        let mut parts = Parts::good();
        change(&mut parts);
        let bytes = parts.bytes();
        let reader = TableReader::open(bytes.as_slice(), bytes.len() as u64).unwrap();
        reader.find(Space::Shared, &"b".parse().unwrap())
    };
    assert_eq!(find(&|_| ()).unwrap().unwrap().row, 1);
    let refused = |expected: &str, change: &dyn Fn(&mut Parts)| {
        let error = find(change).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains(expected), "{error}, expected: {expected}");
    };
    refused("begins with another name", &|parts| {
        parts.names[0].2 = (Space::Shared, "A".parse().unwrap());
    });
    refused("regions of other names", &|parts| parts.regions[0].2 = (0, 5));
    refused("row 2 of 2 extents", &|parts| parts.regions[0].1[3] = vec![0, 2]);
    refused("takes 8 bytes and its extent has 9", &|parts| parts.extents[0].1[3] = vec![8, 9]);
    refused("given twice or out of order", &|parts| parts.extents[0].1[3] = vec![0, 0]);
    refused("have no bits", &|parts| parts.names[0].1[2][3] = 0);
    refused("regions are not in order", &|parts| {
        let rows = (1, [vec![1], vec![0], vec![], vec![0]], (1, 1));
        parts.regions = vec![rows.clone(), rows];
    });
    // A block whose last name follows the first name of the next block.
    let mut parts = Parts::good();
    parts.names.push(parts.names[0].clone());
    parts.names[0].1[1] = b"\0\x03\x01a\0\x01\x02c\0".to_vec();
    parts.names[1].1[1] = b"\0\x03\x01b\0\x01\x02d\0".to_vec();
    parts.names[1].2.1 = "b".parse().unwrap();
    parts.counts[0] = 4;
    let bytes = parts.bytes();
    let reader = TableReader::open(bytes.as_slice(), bytes.len() as u64).unwrap();
    assert!(reader.name_block(0).unwrap_err().to_string().contains("not in order"));
    assert!(why(&bytes).contains("b: it is not in order"));
}

#[test]
fn rows_of_two_blocks_are_in_order() {
    let two = |parts: &mut Parts, forms: [&[u8]; 2]| {
        let row =
            |form: &[u8]| (1, [vec![1], form[..1].to_vec(), form[1..].to_vec(), vec![0]], (1, 1));
        parts.regions = forms.map(row).to_vec();
        parts.extents[0].1[3] = vec![4, 8];
    };
    refused("box of [1] at [0] is given twice", |parts| two(parts, [&[1, 1, 0, 1], &[1, 1, 0, 1]]));
    refused("box of [1] at [0] is not in order", |parts| {
        two(parts, [&[1, 1, 1, 1], &[1, 1, 0, 1]]);
    });
}

#[test]
fn a_directory_that_does_not_fit_its_blocks_is_refused() {
    refused("another number of rows", |parts| parts.counts[1] = 3);
    refused("begins with another name", |parts| {
        parts.names[0].2 = (Space::Shared, "A".parse().unwrap());
    });
    refused("begins with another name", |parts| parts.names[0].2.0 = Space::Rank(0));
    refused("regions of other names", |parts| parts.regions[0].2 = (0, 5));
    let (blocks, directory) = Parts::good().blocks();
    let refused = |expected: &str, change: &dyn Fn(&mut Directory)| {
        let mut directory = directory.clone();
        change(&mut directory);
        let counts = [2, 2, 2];
        let error = why(&sealed(blocks.clone(), &directory.to_bytes(), counts));
        assert!(error.contains(expected), "{error:?}, expected: {expected}");
    };
    refused("do not fill the table", &|directory| directory.extents[0].len_bytes += 1);
    refused("fails its checksum", &|directory| {
        directory.names[0].len_bytes += 1;
        directory.regions[0].len_bytes -= 1;
    });
    refused("over its limit", &|directory| {
        directory.names[0].len_bytes = MAX_TABLE_BLOCK_BYTES + 1
    });
    refused("over its limit", &|directory| directory.names[0].rows = MAX_BLOCK_ROWS + 1);
    refused("has no rows", &|directory| {
        let empty = Block { rows: 0, len_bytes: 0, ..directory.extents[0].clone() };
        directory.extents.push(empty);
    });
    refused("not in order", &|directory| {
        directory.names[0].rows = 1;
        directory.names.push(directory.names[0].clone());
    });
    let longer = [directory.to_bytes().as_slice(), &[0]].concat();
    assert!(why(&sealed(blocks.clone(), &longer, [2, 2, 2])).contains("left over"));
    // A number of blocks that the bytes cannot hold.
    let claims = [0xff, 0xff, 0xff, 0x7f];
    assert!(why(&sealed(Vec::new(), &claims, [0, 0, 0])).contains("over its limit"));
}

/// Writes `bytes` into the footer at `at`, and corrects the footer's checksum.
fn with_footer(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut table = Parts::good().bytes();
    let footer = table.len() - FOOTER_BYTES;
    table[footer + at..][..bytes.len()].copy_from_slice(bytes);
    let sum = blake3::hash(&table[footer..footer + 52]);
    table[footer + 52..].copy_from_slice(&sum.as_bytes()[..12]);
    table
}

#[test]
fn a_later_version_is_not_corruption() {
    for (at, words) in [(4, "version 2"), (8, "flags 0x2")] {
        let error = Table::parse(&with_footer(at, &[2])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(
            error.to_string().contains(words) && error.to_string().contains("upgrade"),
            "{error}"
        );
    }
    // Damage in a table of a later version is still damage.
    let mut later = with_footer(4, &[2]);
    let last = later.len() - 1;
    later[last] ^= 1;
    assert_eq!(Table::parse(&later).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_footer_with_lengths_that_cannot_be_is_refused() {
    let over = "a length is over its limit";
    for (at, bytes, expected) in [
        (4, &[0; 4][..], "no version 0"),
        (12, &[0xff; 4], over),
        // A directory that is longer than the table.
        (12, &[0, 1, 0, 0], over),
        (16, &[0xff; 8], over),
        (16, &[63, 0, 0, 0, 0, 0, 0, 0], over),
        (24, &[1, 0, 0, 1], over),
        (28, &[1, 0, 0, 1], over),
        (32, &[1, 0, 0, 1], over),
        (36, &[0; 16], "the table's directory fails its checksum"),
    ] {
        let table = with_footer(at, bytes);
        let error = Table::parse(&table).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{at}: {error}");
        assert!(error.to_string().contains(expected), "{at}: {error}");
        assert_eq!(TableReader::open(table.as_slice(), table.len() as u64).unwrap_err(), error);
    }
}

#[test]
fn the_footer_says_where_in_the_shard_the_table_lies() {
    let table = Parts::good().bytes();
    let (len, footer) = (table.len() as u64, &table[table.len() - FOOTER_BYTES..]);
    assert_eq!(table_range(1000 + len, footer), Ok(1000..1000 + len));
    assert_eq!(table_range(len, footer), Ok(0..len));
    assert!(matches!(table_range(len - 1, footer), Err(TableError::Length { .. })));
    assert!(table_range(len, &footer[1..]).is_err());
}
