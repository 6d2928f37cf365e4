//! Tests of the reader of single blocks: the blocks that it reads, the damage that it detects, and
//! the names that it still returns.

use std::cell::RefCell;
use std::io;

use super::*;

/// A shard in memory that records each read.
struct Noted<'a> {
    shard: &'a [u8],
    reads: RefCell<Vec<(u64, usize)>>,
    /// The offset at which reads fail.
    broken_at: Option<u64>,
}

impl ReadAt for Noted<'_> {
    fn read_at(&self, offset_bytes: u64, len_bytes: usize) -> io::Result<Vec<u8>> {
        self.reads.borrow_mut().push((offset_bytes, len_bytes));
        if self.broken_at == Some(offset_bytes) {
            return Err(io::Error::other("the line is down"));
        }
        self.shard.read_at(offset_bytes, len_bytes)
    }
}

fn noted(shard: &[u8]) -> Noted<'_> {
    Noted { shard, reads: RefCell::new(Vec::new()), broken_at: None }
}

/// Returns a table of a hundred names, each with two regions.
fn hundred() -> Table {
    let mut builder = TableBuilder::new();
    for at in 0..100u64 {
        let name = builder.add_name(tensor(&format!("model/layers.{at:02}"), &[4]));
        for half in 0..2 {
            let extent = builder.add_extent(extent(128 * at + 64 * half, 8));
            builder.add_region(name, area(&[2 * half], &[2]), extent);
        }
    }
    builder.build().unwrap()
}

#[test]
fn one_name_costs_one_block_of_each_sort() {
    let bytes = hundred().to_bytes_in_blocks(10).unwrap();
    let source = noted(&bytes);
    let reader = TableReader::open(&source, bytes.len() as u64).unwrap();
    assert_eq!(source.reads.borrow().len(), 2, "footer and directory");
    let path: Path = "model/layers.57".parse().unwrap();
    let found = reader.find(Space::Shared, &path).unwrap().unwrap();
    assert_eq!((found.row, found.regions.len(), found.extents.len()), (57, 2, 2));
    let reads = source.reads.borrow();
    assert_eq!(reads.len(), 5, "names, regions, extents");
    let read: usize = reads.iter().skip(2).map(|(_, len)| len).sum();
    assert!(read * 8 < bytes.len(), "{read} of {}", bytes.len());
}

#[test]
fn a_name_that_is_not_there_costs_one_block_at_most() {
    let bytes = hundred().to_bytes_in_blocks(10).unwrap();
    let source = noted(&bytes);
    let reader = TableReader::open(&source, bytes.len() as u64).unwrap();
    for (space, path, blocks) in [
        (Space::Shared, "a", 0),
        (Space::Shared, "model/layers.571", 1),
        (Space::Shared, "z", 1),
        (Space::Rank(0), "model/layers.57", 1),
    ] {
        source.reads.borrow_mut().clear();
        assert_eq!(reader.find(space, &path.parse().unwrap()), Ok(None), "{path}");
        assert_eq!(source.reads.borrow().len(), blocks, "{path}");
    }
    assert_eq!(reader.regions_of(100), Ok(Vec::new()));
    assert!(matches!(reader.extents(&[0, 200]), Err(TableError::Row { row: 200, .. })));
    let rows: Vec<u32> = reader.extents(&[150, 3, 3]).unwrap().iter().map(|e| e.0).collect();
    assert_eq!(rows, [3, 150]);
    assert_eq!(reader.name_block(10), Ok((100, Vec::new())));
    assert_eq!([reader.names_len(), reader.regions_len(), reader.extents_len()], [100, 200, 200]);
    let empty = Table::default().to_bytes().unwrap();
    let reader = TableReader::open(empty.as_slice(), empty.len() as u64).unwrap();
    assert_eq!(reader.find(Space::Shared, &"a".parse().unwrap()), Ok(None));
    assert_eq!((reader.name_blocks().count(), reader.has_hashes()), (0, false));
}

#[test]
fn a_damaged_block_harms_no_other() {
    let table = hundred();
    let good = table.to_bytes_in_blocks(10).unwrap();
    let reads_of = |path: &Path| {
        let source = noted(&good);
        let reader = TableReader::open(&source, good.len() as u64).unwrap();
        reader.find(Space::Shared, path).unwrap().unwrap();
        source.reads.into_inner()
    };
    let reads = reads_of(&"model/layers.57".parse().unwrap());
    for (offset, len) in reads.iter().skip(2) {
        let mut bad = good.clone();
        bad[*offset as usize + len / 2] ^= 0x10;
        let reader = TableReader::open(bad.as_slice(), bad.len() as u64).unwrap();
        let mut damaged = 0;
        for (row, name) in (0u32..).zip(table.names()) {
            match reader.find(Space::Shared, &name.path) {
                Ok(found) => assert_eq!(found.unwrap().regions, table.regions_of(row)),
                Err(error) => {
                    assert!(matches!(error, TableError::Checksum { part: TablePart::Block(..) }));
                    assert!(reads_of(&name.path).contains(&(*offset, *len)), "{name}");
                    damaged += 1;
                }
            }
        }
        assert!((5..=10).contains(&damaged), "{damaged} names");
    }
}

#[test]
fn a_source_that_fails_or_gives_too_little_is_no_corruption_of_ours() {
    #[derive(Debug)]
    struct Short<'a>(&'a [u8]);
    impl ReadAt for Short<'_> {
        fn read_at(&self, offset_bytes: u64, len_bytes: usize) -> io::Result<Vec<u8>> {
            self.0.read_at(offset_bytes, len_bytes - 1)
        }
    }
    let bytes = hundred().to_bytes_in_blocks(10).unwrap();
    let len = bytes.len() as u64;
    let error = TableReader::open(Short(&bytes), len).unwrap_err();
    assert!(matches!(error, TableError::Length { part: TablePart::Footer, .. }), "{error}");
    let broken = Noted { broken_at: Some(0), ..noted(&bytes) };
    let reader = TableReader::open(&broken, len).unwrap();
    let error = reader.find(Space::Shared, &"model/layers.03".parse().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("block 0 of the table's names"), "{error}");
    assert!(error.to_string().contains("the line is down"), "{error}");
    assert!(reader.find(Space::Shared, &"model/layers.57".parse().unwrap()).is_ok());
    assert_eq!(reader.read_all().unwrap_err().kind(), ErrorKind::Io);
    for shard_len in [0, 63, len - 1, len + 1] {
        assert!(TableReader::open(bytes.as_slice(), shard_len).is_err(), "{shard_len}");
    }
}
