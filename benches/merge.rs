//! Measures the merge of the tables of many hosts into the index of a checkpoint, as the staging
//! daemon of one host does it for all: the union, the check that every tensor is whole, and the
//! bytes.
//!
//! 128 hosts have 4,000 names each. In *sharded*, every host has one slice of each of the same
//! names; in *private*, all names differ.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)] // a bench stops at the first failure

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rapidraid::format::table::{
    ElementType, Extent, Form, MergeInput, Name, NameKind, Space, Table, TableBuilder,
};

const HOSTS: u32 = 128;
const NAMES: u32 = 4_000;
const ROWS: u64 = 16;

/// Returns the table of one host. `is_shared` says whether all hosts have the same names.
fn table(host: u32, is_shared: bool) -> Table {
    let mut builder = TableBuilder::new();
    for name in 0..NAMES {
        let owner = if is_shared { String::new() } else { format!("host{host}.") };
        let path = format!("model/{owner}layers.{}.weight{}", name / 10, name % 10);
        let rows = if is_shared { ROWS * u64::from(HOSTS) } else { ROWS };
        let start = if is_shared { ROWS * u64::from(host) } else { 0 };
        let row = builder.add_name(Name {
            space: Space::Shared,
            path: path.parse().unwrap(),
            kind: NameKind::Tensor,
            element: ElementType { name: "float32".into(), bits: 32, big_endian: false },
            shape: vec![rows, 64],
            flags: 0,
        });
        let len_bytes = ROWS * 64 * 4;
        let extent = builder.add_extent(Extent {
            source: 0,
            shard: 0,
            offset_bytes: u64::from(name) * len_bytes,
            len_bytes,
            hash: Some([name as u8; 32]),
        });
        let form = Form::new_box(&[start, 0], &[ROWS, 64]);
        builder.add_region(row, form, extent);
    }
    builder.build().unwrap()
}

fn merge(tables: &[Table]) -> usize {
    let inputs: Vec<MergeInput<'_>> = (0..)
        .zip(tables)
        .map(|(shard, table)| MergeInput { table, shard, base_offset_bytes: 0 })
        .collect();
    let merged = Table::merge(&inputs).unwrap();
    merged.check_coverage().unwrap();
    merged.without_hashes().to_bytes().unwrap().len()
}

fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("merge");
    group.sample_size(10).throughput(Throughput::Elements(u64::from(HOSTS * NAMES)));
    for (label, is_shared) in [("sharded", true), ("private", false)] {
        let tables: Vec<Table> = (0..HOSTS).map(|host| table(host, is_shared)).collect();
        println!("{label}: an index of {} bytes", merge(&tables));
        group.bench_function(label, |bencher| bencher.iter(|| merge(&tables)));
    }
    group.finish();
}

criterion_group!(merges, benches);
criterion_main!(merges);
