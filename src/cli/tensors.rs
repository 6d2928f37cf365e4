//! `show --tensors`: the names in a checkpoint that a trainer saved.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use wildmatch::WildMatch;

use super::args::Show;
use super::printer::{CommandOutput, step_json};
use super::table::{Paint, Table, Tint};
use super::transfer::{self, counted};
use super::{Front, Outcome, connect};
use crate::client::CheckpointIndex;
use crate::format::table::{Extent, Form, Name, NameKind, Region, Space};
use crate::units::ByteCount;

/// Reads the index of a checkpoint and lists the names that match the pattern.
pub async fn show(front: &mut Front, options: Show) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let (job, step) = (&options.step.job, options.step.step);
    let progress = transfer::watch(front, format!("index of {}", transfer::named(job, step)));
    let index = client.read_index(job, step, progress).await;
    connect::close(&client).await;
    let index = index.map_err(|error| connect::failure(&error))?;
    let pattern = options.names.unwrap_or_else(|| "*".to_owned());
    Ok(Box::new(Tensors { index, pattern: WildMatch::new(&pattern) }))
}

struct Tensors {
    index: CheckpointIndex,
    /// Selects the names that are listed.
    pattern: WildMatch,
}

impl Tensors {
    /// Returns the names that are listed, each with its regions.
    fn names(&self) -> impl Iterator<Item = (&Name, &[Region])> {
        let table = &self.index.table;
        let rows = (0..).zip(table.names()).map(|(row, name)| (name, table.regions_of(row)));
        rows.filter(|(name, _)| self.pattern.matches(&name.to_string()))
    }

    fn extent(&self, region: &Region) -> Option<&Extent> {
        self.index.table.extents().get(region.extent as usize)
    }

    fn len_bytes(&self, regions: &[Region]) -> u64 {
        regions.iter().filter_map(|region| self.extent(region)).map(|e| e.len_bytes).sum()
    }
}

fn region_json(region: &Region, extent: Option<&Extent>) -> Value {
    let mut fields = Map::new();
    match &region.form {
        Form::Box { start, size } => {
            fields.insert("start".to_owned(), json!(start.as_slice()));
            fields.insert("size".to_owned(), json!(size.as_slice()));
            fields.insert("form".to_owned(), json!("box"));
        }
        other => drop(fields.insert("form".to_owned(), json!(other.to_string()))),
    }
    if let Some(extent) = extent {
        fields.insert("shard".to_owned(), json!(extent.shard));
        fields.insert("offset".to_owned(), json!(extent.offset_bytes));
        fields.insert("bytes".to_owned(), json!(extent.len_bytes));
    }
    Value::Object(fields)
}

impl CommandOutput for Tensors {
    fn json(&self) -> Map<String, Value> {
        let name = |(name, regions): (&Name, &[Region])| {
            let rank = match name.space {
                Space::Shared => None,
                Space::Rank(rank) => Some(rank),
            };
            let regions: Vec<Value> =
                regions.iter().map(|region| region_json(region, self.extent(region))).collect();
            json!({
                "name": name.to_string(), "rank": rank, "kind": name.kind.to_string(), "dtype": &*name.element.name,
                "bits": name.element.bits, "big_endian": name.element.big_endian, "shape": name.shape, "regions": regions,
            })
        };
        let mut fields = step_json(&self.index.step);
        fields.insert("names".to_owned(), self.names().map(name).collect());
        fields
    }

    fn text(&self, paint: Paint) -> String {
        let (mut names, mut regions_len) = (0, 0);
        let mut contents = BTreeMap::new();
        let mut table = Table::new(&["NAME", "TYPE", "SHAPE", ">REGIONS", ">SIZE"]);
        for (name, regions) in self.names() {
            names += 1;
            regions_len += regions.len();
            // Tied tensors share their content, which counts once.
            contents
                .extend(regions.iter().filter_map(|r| Some((r.extent, self.extent(r)?.len_bytes))));
            let is_tensor = name.kind == NameKind::Tensor;
            table.row([
                name.to_string(),
                if is_tensor { name.element.name.to_string() } else { name.kind.to_string() },
                if is_tensor { format!("{:?}", name.shape) } else { String::new() },
                regions.len().to_string(),
                ByteCount(self.len_bytes(regions)).to_string(),
            ]);
        }
        let view = &self.index.step;
        let title = paint.tint(Tint::Bold, &format!("{}/{}", view.job, view.step));
        let sum = format!(
            "{title}  {} in {}, {}",
            counted(names, "name"),
            counted(regions_len as u64, "region"),
            ByteCount(contents.values().sum())
        );
        if table.is_empty() {
            return format!("{sum}: no name fits\n");
        }
        format!("{sum}\n\n{}", table.render(paint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::Saved;
    use crate::format::table::{ElementType, Key, Path, TableBuilder};
    use crate::id::{Generation, SaveId, Step};
    use crate::wire::calls::StepView;

    fn path(name: &str) -> Path {
        Path::new(&[Key::Text("model".into()), Key::Text(name.into())]).unwrap()
    }

    fn tensors(pattern: &str) -> Tensors {
        let mut builder = TableBuilder::new();
        let float = ElementType { name: "float32".into(), bits: 32, big_endian: false };
        let byte = ElementType { name: "value".into(), bits: 8, big_endian: false };
        let tensor = |name: &str| Name {
            space: Space::Shared,
            path: path(name),
            kind: NameKind::Tensor,
            element: float.clone(),
            shape: vec![4, 2],
            flags: 0,
        };
        let extent = |offset_bytes, len_bytes| Extent {
            source: 0,
            shard: 0,
            offset_bytes,
            len_bytes,
            hash: None,
        };
        let (tied, other) = (builder.add_name(tensor("tied")), builder.add_name(tensor("other")));
        let seed = Name {
            space: Space::Rank(3),
            path: path("seed"),
            kind: NameKind::Value,
            element: byte,
            shape: vec![],
            flags: 0,
        };
        let seed = builder.add_name(seed);
        let (upper, lower) =
            (builder.add_extent(extent(0, 16)), builder.add_extent(extent(64, 16)));
        let value = builder.add_extent(extent(128, 9));
        for name in [tied, other] {
            for (start, extent) in [(0, upper), (2, lower)] {
                let form = Form::new_box(&[start, 0], &[2, 2]);
                builder.add_region(name, form, extent);
            }
        }
        builder.add_region(seed, Form::Whole, value);
        let saved = Saved {
            save: SaveId([1; 12]),
            generation: Generation::default(),
            shards: 2,
            len_bytes: 41,
            roots_hash: [0; 32],
            saved_at: 0,
        };
        let step = StepView { job: "gpt".parse().unwrap(), step: Step(7), saved, by_marks: false };
        let table = builder.build().unwrap();
        Tensors { index: CheckpointIndex { step, table }, pattern: WildMatch::new(pattern) }
    }

    #[test]
    fn what_is_tied_counts_once_in_the_sum() {
        let expected = "\
gpt/7  3 names in 5 regions, 41 B

NAME                TYPE     SHAPE   REGIONS  SIZE
model/other         float32  [4, 2]        2  32 B
model/tied          float32  [4, 2]        2  32 B
rank 3: model/seed  value                  1   9 B
";
        assert_eq!(tensors("*").text(Paint::PLAIN), expected);
    }

    #[test]
    fn a_pattern_chooses_names() {
        assert!(
            tensors("rank 3: *").text(Paint::PLAIN).starts_with("gpt/7  1 name in 1 region, 9 B")
        );
        assert_eq!(
            tensors("nothing*").text(Paint::PLAIN),
            "gpt/7  0 names in 0 regions, 0 B: no name fits\n"
        );
    }

    #[test]
    fn json_says_where_every_byte_is() {
        let fields = tensors("*tied").json();
        let expected = json!([{
            "name": "model/tied", "rank": null, "kind": "tensor", "dtype": "float32", "bits": 32, "big_endian": false, "shape": [4, 2],
            "regions": [
                {"form": "box", "start": [0, 0], "size": [2, 2], "shard": 0, "offset": 0, "bytes": 16},
                {"form": "box", "start": [2, 0], "size": [2, 2], "shard": 0, "offset": 64, "bytes": 16},
            ],
        }]);
        assert_eq!(fields["names"], expected);
    }
}
