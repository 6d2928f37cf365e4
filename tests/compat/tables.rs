//! Tables of a checkpoint's shards with all kinds, forms and spaces, and encoded paths.

use rapidraid::format::table::{
    ElementType, Extent, Form, Key, MergeInput, Name, NameKind, Path, Space, Table, TableBuilder,
};

use crate::fixture::Case;

fn element(name: &str, bits: u16) -> ElementType {
    ElementType { name: name.into(), bits, big_endian: false }
}

fn tensor(path: &str, element: ElementType, shape: &[u64]) -> Name {
    Name {
        space: Space::Shared,
        path: path.parse().unwrap(),
        kind: NameKind::Tensor,
        element,
        shape: shape.to_vec(),
        flags: 0,
    }
}

fn area(start: &[u64], size: &[u64]) -> Form {
    Form::new_box(start, size)
}

/// A writer of tables: adds names, and extents one after the other.
struct Writer {
    builder: TableBuilder,
    has_hashes: bool,
    end_bytes: u64,
}

impl Writer {
    fn extent(&mut self, len_bytes: u64) -> u32 {
        let offset_bytes = self.end_bytes.next_multiple_of(64);
        self.end_bytes = offset_bytes + len_bytes;
        let hash = self.has_hashes.then(|| *blake3::hash(&offset_bytes.to_le_bytes()).as_bytes());
        self.builder.add_extent(Extent { source: 0, shard: 0, offset_bytes, len_bytes, hash })
    }

    fn add(&mut self, name: Name, form: Form, len_bytes: u64) -> u32 {
        let (name, extent) = (self.builder.add_name(name), self.extent(len_bytes));
        self.builder.add_region(name, form, extent);
        extent
    }
}

/// Returns a table that contains every kind of entry.
pub fn varied(has_hashes: bool) -> Table {
    let mut writer = Writer { builder: TableBuilder::new(), has_hashes, end_bytes: 0 };
    let float32 = element("float32", 32);
    let split = writer.builder.add_name(tensor("model/embed.weight", float32.clone(), &[300, 4]));
    for (start, size) in [(0, 200), (200, 100)] {
        let extent = writer.extent(size * 16);
        writer.builder.add_region(split, area(&[start, 0], &[size, 4]), extent);
    }
    let head = tensor("model/head.weight", element("bfloat16", 16), &[7, 9]);
    let shared = writer.add(head, Form::Whole, 126);
    let tied = tensor("model/tied.weight", element("bfloat16", 16), &[9, 7]);
    let tied = writer.builder.add_name(tied);
    writer.builder.add_region(tied, Form::Whole, shared);
    for layer in 0..3 {
        let path = format!("model/layers.{layer}.attention.weight");
        writer.add(tensor(&path, element("float8_e4m3fn", 8), &[2, 2]), Form::Whole, 4);
        let path = format!("optim/state{{{layer}}}/exp_avg");
        writer.add(Name { flags: 1, ..tensor(&path, float32.clone(), &[2, 2]) }, Form::Whole, 16);
    }
    writer.add(tensor("model/packed", element("int4", 4), &[5]), Form::Whole, 3);
    writer.add(tensor("model/scalar", float32.clone(), &[]), Form::Whole, 4);
    writer.add(tensor("model/empty", float32, &[0, 7]), Form::Whole, 0);
    let big = ElementType { big_endian: true, ..element("complex128", 128) };
    let later = writer.builder.add_name(tensor("model/later", big, &[2, 2]));
    let extent = writer.extent(100);
    for (number, len) in [(2, 0), (3, 5), (4, 200), (255, 1)] {
        let form = Form::Unknown { number, payload: vec![number; len] };
        writer.builder.add_region(later, form, extent);
    }
    let hash = has_hashes.then_some([0x0d; 32]);
    let older = Extent { source: 1, shard: 300, offset_bytes: 1 << 40, len_bytes: 16, hash };
    let older = writer.builder.add_extent(older);
    writer.builder.add_region(later, area(&[1, 1], &[1, 1]), older);
    for (rank, kind) in [(0, NameKind::Bytes), (1, NameKind::Value), (1023, NameKind::Bytes)] {
        let octets = tensor("data/files[3]", element("bytes", 8), &[]);
        let name = Name { space: Space::Rank(rank), kind, flags: 1 << 31, ..octets };
        writer.add(name, Form::Whole, u64::from(rank));
    }
    writer.builder.build().unwrap()
}

/// Returns a table of 13 bytes of data, as one rank writes it.
pub fn one_extent() -> Table {
    let mut writer = Writer { builder: TableBuilder::new(), has_hashes: false, end_bytes: 0 };
    let name = Name { kind: NameKind::Bytes, ..tensor("model/note", element("uint8", 8), &[]) };
    writer.add(name, Form::Whole, 13);
    writer.builder.build().unwrap()
}

/// Returns the index of two data shards, each with a part of one tensor.
fn merged() -> Table {
    let mut writer = Writer { builder: TableBuilder::new(), has_hashes: false, end_bytes: 0 };
    let split = tensor("model/split.weight", element("float32", 32), &[4, 2]);
    writer.add(split.clone(), area(&[0, 0], &[1, 2]), 8);
    let first = writer.builder.build().unwrap();
    let mut writer = Writer { builder: TableBuilder::new(), has_hashes: false, end_bytes: 0 };
    writer.add(split, area(&[1, 0], &[3, 2]), 24);
    writer.add(tensor("model/bias", element("float32", 32), &[2]), Form::Whole, 8);
    let second = writer.builder.build().unwrap();
    let input = |table, shard| MergeInput { table, shard, base_offset_bytes: 0 };
    let merged = Table::merge(&[input(&first, 0), input(&second, 1)]).unwrap();
    merged.check_coverage().unwrap();
    merged
}

fn table(name: &str, table: Table, block_rows: usize) -> Case {
    let bytes = table.to_bytes_in_blocks(block_rows).unwrap();
    let parse = move |bytes: &[u8]| match Table::parse(bytes) {
        Ok(found) => Ok(found == table),
        Err(error) => Err(error.kind()),
    };
    Case { name: name.to_owned(), bytes, parse: Box::new(parse) }
}

/// Returns the cases of all tables.
pub fn cases() -> Vec<Case> {
    vec![
        table("table of a data shard", varied(true), usize::MAX),
        table("index", varied(false), usize::MAX),
        table("index in blocks of three rows", varied(false), 3),
        table("table without rows", Table::default(), usize::MAX),
        table("index of two data shards", merged(), usize::MAX),
    ]
}

/// Returns the cases of paths with keys of all kinds.
pub fn paths() -> Vec<Case> {
    let text = |text: &str| Key::Text(text.into());
    let all = [
        vec![text("model"), text("layers.0.weight")],
        vec![text("0")],
        vec![Key::Integer(0)],
        vec![Key::Position(0)],
        vec![text("a/b"), text(""), text("\u{e9}\0\n\"")],
        vec![Key::Integer(i64::MIN), Key::Integer(-1), Key::Integer(i64::MAX)],
        vec![text("files"), Key::Position(u32::MAX), text("x")],
    ];
    let case = |keys: &Vec<Key>| {
        let path = Path::new(keys).unwrap();
        let (name, bytes) = (format!("path {path}").replace(':', "."), path.as_bytes().to_vec());
        let parse = move |bytes: &[u8]| match Path::from_bytes(bytes) {
            Ok(found) => Ok(found == path && found.to_string().parse() == Ok(found)),
            Err(error) => Err(error.kind()),
        };
        Case { name, bytes, parse: Box::new(parse) }
    };
    all.iter().map(case).collect()
}
