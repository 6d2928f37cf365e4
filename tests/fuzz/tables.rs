//! Targets for a checkpoint's tables: whole tables, in which every change must be noticed, and
//! hostile columns under right checksums.

use std::collections::BTreeSet;

use rapidraid::format::table::{FOOTER_BYTES, Form, Table, TableReader, search};

use crate::fixtures;
use crate::target::{Memory, Seen, Target, Verdict, round_trip, within};

/// Memory of a parsed table. A row of names has at least 6 bytes and takes 80 in memory with an
/// empty shape and a shared type; a path expands to 33 times its bytes at most.
const MEMORY: Memory = Memory { base_bytes: 16 << 10, per_byte: 64 };

/// Number of columns in a block of names, of regions, of extents.
const COLUMNS: [usize; 3] = [5, 4, 5];

fn golden() -> Vec<Vec<u8>> {
    let lines = fixtures::lines("format/v1/tables.txt").into_iter();
    lines.filter(|(name, _)| !name.starts_with("path ")).map(|(_, bytes)| bytes).collect()
}

/// Reads a varint as far as it goes. Returns 0 if there is none.
fn number(bytes: &mut &[u8]) -> u64 {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let Some((byte, rest)) = bytes.split_first() else { break };
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            break;
        }
    }
    number
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take<'a>(bytes: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(len.min(bytes.len()));
    *bytes = rest;
    taken
}

/// Returns the section, the number of rows and the length in bytes of each block that the directory
/// lists.
fn entries(table: &[u8]) -> Vec<(usize, usize, usize)> {
    let footer = &table[table.len() - FOOTER_BYTES..];
    let directory = u32::from_le_bytes(footer[12..16].try_into().unwrap()) as usize;
    let end = table.len() - FOOTER_BYTES;
    let mut rest = &table[end - directory..end];
    let mut out = Vec::new();
    for section in 0..3 {
        for _ in 0..number(&mut rest) {
            let (rows, len) = (number(&mut rest) as usize, number(&mut rest) as usize);
            match section {
                0 => {
                    number(&mut rest);
                    let path = number(&mut rest) as usize;
                    take(&mut rest, path);
                }
                1 => drop((number(&mut rest), number(&mut rest))),
                _ => {}
            }
            take(&mut rest, 16);
            out.push((section, rows, len));
        }
    }
    out
}

/// Returns the input of `table_columns` that produces a golden table.
fn columns_of(table: &[u8]) -> Vec<u8> {
    let flags = table[table.len() - FOOTER_BYTES + 8];
    let (mut out, mut blocks) = (vec![flags], table);
    for (section, rows, len) in entries(table) {
        out.push(section as u8);
        out.extend((rows as u16).to_le_bytes());
        let mut block = take(&mut blocks, len);
        let mut lengths = take(&mut block, 4 * COLUMNS[section]);
        while let [a, b, _, _, rest @ ..] = lengths {
            lengths = rest;
            let len = u16::from_le_bytes([*a, *b]);
            out.extend(len.to_le_bytes());
            out.extend(take(&mut block, len.into()));
        }
    }
    out
}

/// A block, with its number of rows and its first key as the directory lists them.
struct Entry {
    rows: u64,
    first: Vec<u8>,
    block: Vec<u8>,
}

/// Builds a table from an input: flags, then blocks of section (1 byte), rows (2) and columns, each
/// of length (2) and bytes. Blocks of one section become neighbours, the directory lists the first
/// key of each block, and all checksums are right.
fn table_of(mut input: &[u8]) -> Vec<u8> {
    let flags = take(&mut input, 1).first().map_or(0, |flags| flags & 1);
    let mut sections: [Vec<Entry>; 3] = Default::default();
    let mut last_name = 0;
    while let [section, low, high, rest @ ..] = input {
        input = rest;
        let section = usize::from(section % 3);
        let rows = u64::from(u16::from_le_bytes([*low, *high]));
        let (mut lengths, mut columns) = (Vec::new(), Vec::new());
        let mut firsts: Vec<&[u8]> = Vec::new();
        for _ in 0..COLUMNS[section] {
            let len =
                take(&mut input, 2).iter().rev().fold(0, |len, byte| len << 8 | usize::from(*byte));
            let column = take(&mut input, len);
            lengths.extend((column.len() as u32).to_le_bytes());
            columns.extend(column);
            firsts.push(column);
        }
        let mut first = Vec::new();
        match section {
            0 => {
                put_number(&mut first, number(&mut firsts[0]));
                number(&mut firsts[1]);
                let len = number(&mut firsts[1]).min(firsts[1].len() as u64);
                put_number(&mut first, len);
                first.extend(take(&mut firsts[1], len as usize));
            }
            1 => {
                let from = number(&mut firsts[0]);
                let to = (1..rows).fold(from, |sum, _| sum.wrapping_add(number(&mut firsts[0])));
                put_number(&mut first, from.wrapping_sub(last_name));
                put_number(&mut first, to.wrapping_sub(from));
                last_name = to;
            }
            _ => {}
        }
        sections[section].push(Entry { rows, first, block: [lengths, columns].concat() });
    }
    let (mut table, mut directory) = (Vec::new(), Vec::new());
    let mut counts = [0u32; 3];
    for (blocks, count) in sections.iter().zip(&mut counts) {
        put_number(&mut directory, blocks.len() as u64);
        for Entry { rows, first, block } in blocks {
            put_number(&mut directory, *rows);
            put_number(&mut directory, block.len() as u64);
            directory.extend(first);
            directory.extend(&blake3::hash(block).as_bytes()[..16]);
            table.extend(block);
            *count += *rows as u32;
        }
    }
    table.extend(&directory);
    let len = (table.len() + FOOTER_BYTES) as u64;
    let mut footer = b"rRdX\x01\0\0\0".to_vec();
    footer.extend(u32::from(flags).to_le_bytes());
    footer.extend((directory.len() as u32).to_le_bytes());
    footer.extend(len.to_le_bytes());
    footer.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
    footer.extend(&blake3::hash(&directory).as_bytes()[..16]);
    let sum = blake3::hash(&footer);
    footer.extend(&sum.as_bytes()[..12]);
    table.extend(footer);
    table
}

/// Checks the block reader: it finds in a good table what the table contains, and in a bad one
/// nothing else. Returns the peak memory in bytes.
fn read_by_blocks(bytes: &[u8], table: Option<&Table>) -> Result<usize, String> {
    let ((), peak_bytes) = within(MEMORY, bytes.len(), || {
        let Ok(reader) = TableReader::open(bytes, bytes.len() as u64) else { return };
        for number in 0..8 {
            let Ok((_, names)) = reader.name_block(number) else { continue };
            let Some(name) = names.last() else { break };
            let _ = reader.find(name.space, &name.path);
        }
    })?;
    let Some(table) = table else { return Ok(peak_bytes) };
    let reader = TableReader::open(bytes, bytes.len() as u64).map_err(|e| e.to_string())?;
    for (row, name) in (0u32..).zip(table.names()).take(40) {
        let found = reader.find(name.space, &name.path).map_err(|e| e.to_string())?;
        let found = found.ok_or_else(|| format!("{name} is not found"))?;
        if (found.row, &found.name, found.regions.as_slice()) != (row, name, table.regions_of(row))
        {
            return Err(format!("{name} is found as {found:?}"));
        }
        if found.search(&Form::Whole) != search(table, row, &Form::Whole) {
            return Err(format!("{name} is searched otherwise"));
        }
    }
    Ok(peak_bytes)
}

fn parsed(bytes: &[u8]) -> Verdict {
    let (table, peak_bytes) = round_trip(MEMORY, bytes, Table::parse, Table::to_bytes)?;
    let by_blocks = read_by_blocks(bytes, table.as_ref())?;
    if let Some(table) = &table {
        let _ = table.check_coverage();
    }
    Ok(Seen { accepted: table.is_some(), peak_bytes: peak_bytes.max(by_blocks) })
}

/// Fuzzes whole tables: only a golden table is accepted, whatever was changed.
pub fn tables() -> Target {
    let corpus = golden();
    let whole: BTreeSet<Vec<u8>> = corpus.iter().cloned().collect();
    let check = move |bytes: &[u8]| match parsed(bytes)? {
        Seen { accepted: true, .. } if !whole.contains(bytes) => {
            Err("a damaged table is believed".into())
        }
        seen => Ok(seen),
    };
    Target { name: "tables", cases: 50_000, corpus, words: Vec::new(), check: Box::new(check) }
}

/// Fuzzes columns: the target builds a table from them as if their writer had meant them.
pub fn table_columns() -> Target {
    let corpus: Vec<Vec<u8>> = golden().iter().map(|table| columns_of(table)).collect();
    for (golden, input) in golden().iter().zip(&corpus) {
        assert!(&table_of(input) == golden, "the table is put together otherwise");
    }
    let check = |input: &[u8]| parsed(&table_of(input));
    Target {
        name: "table_columns",
        cases: 60_000,
        corpus,
        words: Vec::new(),
        check: Box::new(check),
    }
}
