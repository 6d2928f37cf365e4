//! Rows that do not make a table: the builder, the coverage check and the merge refuse them, each
//! with the right message.

use super::*;
use crate::format::table::limits::MAX_PATH_BYTES;

/// Returns a builder with name `a` of shape [4], and the row of that name.
fn started() -> (TableBuilder, u32) {
    let mut builder = TableBuilder::new();
    let name = builder.add_name(tensor("a", &[4]));
    (builder, name)
}

#[track_caller]
fn says(error: TableError, words: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error:?} without {word:?}");
    }
}

/// Returns a table with `name` and the given regions, one extent each.
fn table(name: Name, forms: &[Form]) -> Result<Table, TableError> {
    let mut builder = TableBuilder::new();
    let mut offset = 0;
    let row = builder.add_name(name.clone());
    for form in forms {
        let len = name.part_bytes(form).unwrap_or(10);
        let extent = builder.add_extent(extent(offset, len));
        offset += (len + 1).next_multiple_of(64);
        builder.add_region(row, form.clone(), extent);
    }
    builder.build()
}

#[test]
fn rows_are_sorted_and_renumbered() {
    let mut builder = TableBuilder::new();
    let b = builder.add_name(tensor("b", &[2]));
    let private = Name { space: Space::Rank(3), ..tensor("a", &[2]) };
    let private = builder.add_name(private);
    let a = builder.add_name(tensor("a", &[2]));
    let late = builder.add_extent(extent(128, 8));
    let early = builder.add_extent(extent(0, 8));
    let same = builder.add_extent(extent(128, 8));
    builder.add_region(b, Form::Whole, late);
    builder.add_region(private, Form::Whole, early);
    let [low, high] = [64, 192].map(|offset| builder.add_extent(extent(offset, 4)));
    builder.add_region(a, area(&[1], &[1]), low);
    builder.add_region(a, area(&[0], &[1]), high);
    builder.add_region(a, Form::Whole, same);
    let table = builder.build().unwrap();
    let names: Vec<String> = table.names().iter().map(Name::to_string).collect();
    assert_eq!(names, ["a", "b", "rank 3: a"]);
    let offsets: Vec<u64> = table.extents().iter().map(|extent| extent.offset_bytes).collect();
    assert_eq!(offsets, [0, 64, 128, 192]);
    let rows: Vec<(u32, u32)> = table.regions().iter().map(|r| (r.name, r.extent)).collect();
    assert_eq!(rows, [(0, 2), (0, 3), (0, 1), (1, 2), (2, 0)]);
    assert_eq!(table.find(Space::Rank(3), &"a".parse().unwrap()), Some(2));
    assert_eq!(table.find(Space::Rank(2), &"a".parse().unwrap()), None);
    assert_eq!(table.regions_of(1).len(), 1);
    assert_eq!(table.regions_of(9), []);
    assert_eq!((table.data_end_bytes(0), table.data_end_bytes(1)), (196, 0));
}

#[test]
fn what_breaks_a_rule_is_refused_with_the_name() {
    let (mut builder, _) = started();
    builder.add_name(tensor("a", &[9]));
    says(builder.build().unwrap_err(), &["a is given twice"]);
    let (mut builder, name) = started();
    builder.add_region(name, Form::Whole, 0);
    says(builder.build().unwrap_err(), &["row 0 of 0 extents"]);
    let (mut builder, _) = started();
    let some = builder.add_extent(extent(0, 16));
    builder.add_region(1, Form::Whole, some);
    says(builder.build().unwrap_err(), &["row 1 of 1 names"]);
    let (mut builder, name) = started();
    let some = builder.add_extent(extent(0, 15));
    builder.add_region(name, Form::Whole, some);
    says(builder.build().unwrap_err(), &["a: its region whole takes 16 bytes", "has 15"]);
    let named = |change: &dyn Fn(&mut Name)| {
        let mut name = tensor("deep/name", &[4]);
        change(&mut name);
        table(name, &[]).unwrap_err()
    };
    says(named(&|name| name.element.bits = 0), &["deep/name", "no bits"]);
    says(named(&|name| name.element.name = "".into()), &["deep/name", "1 to 64"]);
    says(named(&|name| name.element.name = "x".repeat(65).into()), &["deep/name", "1 to 64"]);
    says(named(&|name| name.shape = vec![1; 65]), &["deep/name", "64 dimensions"]);
    says(named(&|name| name.shape = vec![1 << 40, 1 << 40]), &["deep/name", "64 bits"]);
    says(named(&|name| name.kind = NameKind::Value), &["deep/name", "no shape"]);
    assert!(table(tensor("a", &[1 << 40, 1 << 40, 0]), &[]).is_ok());
    let a = || tensor("a", &[4]);
    let region = |form| table(a(), &[form]).unwrap_err();
    says(region(area(&[1], &[4])), &["a: its region box of [4] at [1]", "beyond the shape"]);
    says(region(area(&[u64::MAX], &[4])), &["beyond the shape"]);
    says(region(area(&[], &[])), &["another number of dimensions"]);
    says(region(Form::Unknown { number: 1, payload: vec![] }), &["known form"]);
    says(region(Form::Unknown { number: 9, payload: vec![0; (1 << 20) + 1] }), &["1 MiB"]);
    let twice = [area(&[0], &[2]), area(&[0], &[2])];
    says(table(a(), &twice).unwrap_err(), &["a: its region box of [2] at [0] is given twice"]);
    let octets = ElementType { name: "bytes".into(), bits: 8, big_endian: false };
    let bytes = Name { kind: NameKind::Bytes, element: octets, ..tensor("a", &[]) };
    assert!(table(bytes.clone(), &[Form::Whole]).is_ok());
    says(table(bytes, &[area(&[], &[])]).unwrap_err(), &["no tensor"]);
}

#[test]
fn extents_are_aligned_apart_and_inside_64_bits() {
    let with = |extents: &[Extent]| {
        let mut builder = TableBuilder::new();
        extents.iter().for_each(|extent| {
            builder.add_extent(*extent);
        });
        builder.build()
    };
    says(with(&[extent(32, 1)]).unwrap_err(), &["at 32", "multiple of 64"]);
    says(with(&[extent(u64::MAX - 63, 64)]).unwrap_err(), &["beyond 64 bits"]);
    assert!(with(&[extent(u64::MAX - 63, 63)]).is_ok());
    says(
        with(&[extent(0, 65), extent(64, 1)]).unwrap_err(),
        &["at 64", "inside the extent before"],
    );
    assert!(with(&[extent(0, 64), extent(64, 1), extent(64, 0)]).is_ok());
    says(with(&[extent(0, 65), extent(64, 0)]).unwrap_err(), &["inside the extent before"]);
    let other = Extent { shard: 1, ..extent(64, 1) };
    let older = Extent { source: 1, ..extent(64, 1) };
    assert_eq!(with(&[extent(0, 65), other, older]).unwrap().extents().len(), 3);
    let hashed = Extent { hash: Some([1; 32]), ..extent(0, 64) };
    says(with(&[hashed, extent(64, 1)]).unwrap_err(), &["give all of them one"]);
    let changed = Extent { hash: Some([2; 32]), ..hashed };
    says(with(&[hashed, changed]).unwrap_err(), &["given twice"]);
    assert_eq!(with(&[hashed, hashed]).unwrap().extents().len(), 1);
}

#[test]
fn a_tensor_is_covered_once_by_regions_of_known_forms() {
    let cover = |shape: &[u64], forms: &[Form]| {
        table(tensor("model/w", shape), forms).unwrap().check_coverage()
    };
    assert_eq!(cover(&[4], &[Form::Whole]), Ok(()));
    assert_eq!(cover(&[4], &[area(&[2], &[2]), area(&[0], &[2])]), Ok(()));
    assert_eq!(cover(&[0, 3], &[Form::Whole]), Ok(()));
    assert_eq!(cover(&[0, 3], &[]), Ok(()));
    assert_eq!(cover(&[], &[Form::Whole]), Ok(()));
    assert_eq!(cover(&[4], &[Form::Whole, area(&[4], &[0])]), Ok(()));
    let error = |shape: &[u64], forms: &[Form]| cover(shape, forms).unwrap_err();
    says(error(&[], &[]), &["model/w: its value is held by no region"]);
    says(error(&[4], &[area(&[0], &[3])]), &["model/w: element [3] is held by no region"]);
    says(
        error(&[4], &[area(&[0], &[3]), area(&[2], &[2])]),
        &["model/w: element [2] is held by two"],
    );
    says(error(&[4], &[Form::Whole, area(&[1], &[1])]), &["model/w: element [1] is held by two"]);
    let unknown = Form::Unknown { number: 2, payload: vec![] };
    says(error(&[4], &[unknown]), &["model/w: its region flat (form 2)", "upgrade"]);
    let octets = ElementType { name: "bytes".into(), bits: 8, big_endian: false };
    let value = Name { kind: NameKind::Value, element: octets, ..tensor("lr", &[]) };
    says(
        table(value, &[]).unwrap().check_coverage().unwrap_err(),
        &["lr: its value is held by no"],
    );
}

/// Thirty cuts in thirty dimensions have 2^30 corners. The corners that cancel are never visited.
#[test]
fn cuts_in_many_dimensions_are_checked_quickly() {
    let shape = vec![2u64; 30];
    let mut forms = Vec::new();
    for dim in 0..30 {
        // The dimensions before `dim` are at 1, `dim` is at 0, and the later ones are whole.
        let start: Vec<u64> = (0..30).map(|at| u64::from(at < dim)).collect();
        let size = (0..30).map(|at| if at <= dim { 1 } else { 2 }).collect::<Vec<u64>>();
        forms.push(area(&start, &size));
    }
    forms.push(area(&[1; 30], &[1; 30]));
    assert_eq!(table(tensor("a", &shape), &forms).unwrap().check_coverage(), Ok(()));
}

fn input(table: &Table, shard: u32, base_offset_bytes: u64) -> MergeInput<'_> {
    MergeInput { table, shard, base_offset_bytes }
}

#[test]
fn tables_of_ranks_become_one() {
    let half = |start, len| table(tensor("model/w", &[4]), &[area(&[start], &[len])]).unwrap();
    let (first, second) = (half(0, 3), half(3, 1));
    let merged = Table::merge(&[input(&second, 0, 0), input(&first, 0, 64)]).unwrap();
    assert_eq!(merged.check_coverage(), Ok(()));
    assert_eq!(merged.names().len(), 1);
    assert_eq!(merged.extents(), [extent(0, 4), extent(64, 12)]);
    assert_eq!(merged.regions()[0].extent, 1);
    // The same tables again, as the tables of two shards.
    let index = Table::merge(&[input(&merged, 5, 0)]).unwrap();
    assert_eq!(index.extents()[1], Extent { shard: 5, ..extent(64, 12) });
    let shards = Table::merge(&[input(&first, 1, 0), input(&second, 0, 0)]).unwrap();
    let places: Vec<u32> = shards.regions().iter().map(|region| region.extent).collect();
    assert_eq!(places, [1, 0]);
    assert_eq!(Table::merge(&[]), Ok(Table::default()));
    // Names that are private to different ranks stay separate.
    let private = |rank| {
        let name = Name { space: Space::Rank(rank), ..tensor("rng", &[1]) };
        table(name, &[Form::Whole]).unwrap()
    };
    let (zero, one) = (private(0), private(1));
    let merged = Table::merge(&[input(&zero, 0, 0), input(&one, 1, 0)]).unwrap();
    assert_eq!((merged.names().len(), merged.check_coverage()), (2, Ok(())));
}

#[test]
fn tables_that_disagree_are_refused_with_the_name() {
    let one = table(tensor("model/w", &[4]), &[Form::Whole]).unwrap();
    let other = |change: &dyn Fn(&mut Name)| {
        let mut name = tensor("model/w", &[4]);
        change(&mut name);
        let other = table(name, &[]).unwrap();
        Table::merge(&[input(&Table::default(), 0, 0), input(&one, 0, 0), input(&other, 1, 0)])
            .unwrap_err()
    };
    says(
        other(&|name| name.shape = vec![5]),
        &["model/w: its shape is [4] in table 1 and [5] in table 2"],
    );
    says(other(&|name| name.element.big_endian = true), &["element type", "big-endian in table 2"]);
    says(other(&|name| name.flags = 2), &["flags is 0x0 in table 1 and 0x2 in table 2"]);
    says(
        other(&|name| {
            (name.kind, name.shape, name.element.bits) = (NameKind::Bytes, vec![], 8);
        }),
        &["kind is tensor in table 1 and bytes in table 2"],
    );
    let again = table(tensor("model/w", &[4]), &[Form::Whole]).unwrap();
    let twice = Table::merge(&[input(&one, 0, 0), input(&again, 1, 0)]).unwrap_err();
    says(twice, &["model/w: its region whole is given twice"]);
}

#[test]
fn extents_of_two_tables_need_places_of_their_own() {
    let one = |path: &str| table(tensor(path, &[4]), &[Form::Whole]).unwrap();
    let (a, b) = (one("a"), one("b"));
    let error = Table::merge(&[input(&a, 0, 0), input(&b, 0, 0)]).unwrap_err();
    says(error, &["is in two tables"]);
    says(Table::merge(&[input(&a, 0, 32)]).unwrap_err(), &["multiple of 64"]);
    let error = Table::merge(&[input(&a, 0, u64::MAX - 63), input(&b, 0, 0)]);
    assert!(error.is_ok(), "it fits: {error:?}");
    let far = Table::merge(&[input(&a, 9, 64)]).unwrap();
    says(Table::merge(&[input(&far, u32::MAX, 0)]).unwrap_err(), &["cannot be moved"]);
    says(Table::merge(&[input(&far, 0, u64::MAX - 63)]).unwrap_err(), &["cannot be moved"]);
    // Content of older saves may be in several tables, and keeps its place.
    let old = |path: &str| {
        let mut builder = TableBuilder::new();
        let name = builder.add_name(tensor(path, &[4]));
        let extent = builder.add_extent(Extent { source: 2, ..extent(64, 16) });
        builder.add_region(name, Form::Whole, extent);
        builder.build().unwrap()
    };
    let merged = Table::merge(&[input(&old("a"), 1, 64), input(&old("b"), 2, 128)]).unwrap();
    assert_eq!(merged.extents(), [Extent { source: 2, ..extent(64, 16) }]);
    let hashed = varied(true);
    assert!(hashed.has_hashes());
    let merged = Table::merge(&[input(&hashed, 0, 0)]).unwrap();
    assert_eq!(merged, hashed);
    assert_eq!(merged.without_hashes(), varied(false));
}

#[test]
fn what_is_wanted_must_be_there() {
    let table = varied(false);
    let path: Path = "model/embed.weight".parse().unwrap();
    let wanted =
        |path, form| Wanted { space: Space::Shared, path, form, element: None, shape: None };
    assert_eq!(table.search(&wanted(&path, &Form::Whole)).map(|(row, _)| row), Ok(0));
    let absent: Path = "model/none".parse().unwrap();
    let error = table.search(&wanted(&absent, &Form::Whole)).unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().contains("model/none")),
        (ErrorKind::NotFound, true)
    );
    let error = |wanted: &Wanted<'_>| table.search(wanted).unwrap_err().to_string();
    let big = area(&[0, 0], &[7, 4]);
    assert!(error(&wanted(&path, &big)).contains("the shape is [6, 4]"));
    let unknown = Form::Unknown { number: 2, payload: vec![] };
    assert!(error(&wanted(&path, &unknown)).contains("the shape is [6, 4]"));
    let other = ElementType { name: "bfloat16".into(), bits: 16, big_endian: false };
    let whole = Form::Whole;
    let typed = Wanted { element: Some(&other), ..wanted(&path, &whole) };
    assert!(error(&typed).contains("float32 of 32 bits, and bfloat16 of 16 bits is wanted"));
    let shaped = Wanted { shape: Some(&[6, 5]), ..wanted(&path, &whole) };
    assert!(error(&shaped).contains("shape is [6, 4], and [6, 5]"));
    // The element with a region of a known form is found; the other elements are not.
    let later: Path = "model/later".parse().unwrap();
    let first = area(&[0, 0, 0], &[1, 1, 1]);
    assert_eq!(table.search(&wanted(&later, &first)).unwrap().1.len(), 1);
    assert!(error(&wanted(&later, &whole)).contains("flat (form 2)"));
    let row = table.find(Space::Rank(7), &"rng[3]".parse().unwrap()).unwrap();
    let copies = search(&table, row, &Form::Whole).unwrap();
    assert_eq!(copies.iter().map(ExtentCopy::len_bytes).collect::<Vec<_>>(), [7]);
    assert!(search(&table, row, &area(&[], &[])).is_err());
    assert!(search(&table, 99, &Form::Whole).is_err());
}

#[test]
fn names_in_errors_are_cut() {
    let name = tensor(&"x".repeat(MAX_PATH_BYTES - 2), &[4]);
    let error = table(name, &[]).unwrap().check_coverage().unwrap_err().to_string();
    assert!(error.len() < 400 && error.contains("xxx...: element [0]"), "{error}");
}
