//! Compares search and coverage with a slow reference implementation that works on element numbers,
//! over random shapes, tilings and wanted boxes.

use super::*;
use crate::entropy::{Entropy, SeededEntropy};

/// A box as (first index, size).
type Area = (Vec<u64>, Vec<u64>);

/// A random tensor, its regions, and the wanted part.
struct Case {
    name: Name,
    /// The boxes of the regions in any order, including empty ones.
    areas: Vec<Area>,
    /// Whether there is also a region of an unknown form.
    has_unknown: bool,
    wanted: Option<Area>,
}

/// A source of random numbers from one seed.
struct Draw(SeededEntropy);

impl Draw {
    fn below(&self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn one_in(&self, number: u64) -> bool {
        self.below(number) == 0
    }

    /// Returns a random box inside `shape`, which is sometimes empty.
    fn area(&self, shape: &[u64]) -> Area {
        let side = |size: &u64| {
            let start = self.below(size + 1);
            (start, self.below(size - start + 1))
        };
        shape.iter().map(side).unzip()
    }

    /// Cuts a box into boxes: at random places of random dimensions, and into pinwheels, which no
    /// single cut separates.
    fn tile(&self, area: Area, cuts: u64, out: &mut Vec<Area>) {
        let (start, size) = &area;
        let long: Vec<usize> = (0..size.len()).filter(|dim| size[*dim] >= 3).collect();
        if cuts > 0 && long.len() >= 2 && self.one_in(3) {
            return self.pinwheel(area.clone(), long[0], long[1], out);
        }
        let dim = self.below(size.len() as u64) as usize;
        if cuts == 0 || size.get(dim).is_none_or(|size| *size < 2) {
            return out.push(area);
        }
        let at = 1 + self.below(size[dim] - 1);
        let (mut low, mut high) = (area.clone(), (start.clone(), size.clone()));
        low.1[dim] = at;
        (high.0[dim], high.1[dim]) = (start[dim] + at, size[dim] - at);
        self.tile(low, cuts - 1, out);
        self.tile(high, cuts - 1, out);
    }

    fn pinwheel(&self, (start, size): Area, i: usize, j: usize, out: &mut Vec<Area>) {
        let [i1, j1] = [size[i], size[j]].map(|size| 1 + self.below(size - 2));
        let [i2, j2] =
            [(size[i], i1), (size[j], j1)].map(|(size, a)| a + 1 + self.below(size - a - 1));
        let blades = [
            ((0, i1), (0, j2)),
            ((0, i2), (j2, size[j])),
            ((i2, size[i]), (j1, size[j])),
            ((i1, size[i]), (0, j1)),
            ((i1, i2), (j1, j2)),
        ];
        for ((i_from, i_to), (j_from, j_to)) in blades {
            let mut blade = (start.clone(), size.clone());
            (blade.0[i], blade.1[i]) = (start[i] + i_from, i_to - i_from);
            (blade.0[j], blade.1[j]) = (start[j] + j_from, j_to - j_from);
            out.push(blade);
        }
    }

    /// Returns a tensor whose regions tile it, or almost tile it.
    fn case(&self) -> Case {
        let dims = self.below(5);
        let most = [60, 60, 9, 6, 4][dims as usize];
        let size = |_| if self.one_in(12) { 0 } else { 1 + self.below(most) };
        let shape: Vec<u64> = (0..dims).map(size).collect();
        let bits = [4, 8, 16, 32, 64, 12, 1][self.below(7) as usize];
        let element = ElementType { name: "test".into(), bits, big_endian: false };
        let mut areas = Vec::new();
        self.tile((vec![0; shape.len()], shape.clone()), self.below(5), &mut areas);
        let at = self.below(areas.len() as u64) as usize;
        match self.below(6) {
            0 => drop(areas.swap_remove(at)),
            1 => {
                let dim = self.below(dims) as usize;
                let (start, size) = &mut areas[at];
                if shape.get(dim).is_some_and(|extent| start[dim] + size[dim] < *extent) {
                    size[dim] += 1;
                } else if start.get(dim).is_some_and(|start| *start > 0) {
                    (start[dim], size[dim]) = (start[dim] - 1, size[dim] + 1);
                }
            }
            2 => areas.push(self.area(&shape)),
            _ => {}
        }
        // A table holds each box only once.
        areas.sort();
        areas.dedup();
        let wanted = (!self.one_in(4)).then(|| self.area(&shape));
        let name = Name { element, ..tensor("a", &shape) };
        Case { name, areas, has_unknown: self.one_in(5), wanted }
    }
}

fn table_of(case: &Case) -> Table {
    let mut builder = TableBuilder::new();
    let name = builder.add_name(case.name.clone());
    let mut offset = 0;
    let mut add = |builder: &mut TableBuilder, form: Form, len_bytes: u64| {
        let extent = builder.add_extent(extent(offset, len_bytes));
        offset += (len_bytes + 1).next_multiple_of(64);
        builder.add_region(name, form, extent);
    };
    for (start, size) in &case.areas {
        let is_whole = size == &case.name.shape;
        let form = if is_whole { Form::Whole } else { area(start, size) };
        let bits = size.iter().product::<u64>() * u64::from(case.name.element.bits);
        add(&mut builder, form, bits.div_ceil(8));
    }
    if case.has_unknown {
        add(&mut builder, Form::Unknown { number: 3, payload: vec![1] }, 5);
    }
    builder.build().unwrap()
}

/// Returns all indices of a box in row-major order.
fn indices((start, size): &Area) -> Vec<Vec<u64>> {
    let mut out = vec![Vec::new()];
    for (start, size) in start.iter().zip(size) {
        let extend = |index: &Vec<u64>| {
            let index = index.clone();
            (0..*size).map(move |at| [index.as_slice(), &[start + at]].concat())
        };
        out = out.iter().flat_map(extend).collect();
    }
    out
}

/// Returns the first element of `area` that is not in exactly one of `areas`, and the number of
/// boxes that hold it.
fn first_defect(area: &Area, areas: &[Area]) -> Option<(Vec<u64>, usize)> {
    let holds = |(start, size): &Area, index: &[u64]| {
        index
            .iter()
            .zip(start.iter().zip(size))
            .all(|(at, (start, size))| (*start..start + size).contains(at))
    };
    let count = |index: &[u64]| areas.iter().filter(|area| holds(area, index)).count();
    indices(area).into_iter().map(|index| (index.clone(), count(&index))).find(|(_, n)| *n != 1)
}

/// Returns the longest runs of elements that are consecutive both in the box `from` and in the box
/// `to`: (number in `from`, number in `to`, length).
fn element_runs(from: &Area, to: &Area) -> Vec<(u64, u64, u64)> {
    let numbered = |area: &Area| (0u64..).zip(indices(area)).map(|(n, i)| (i, n)).collect();
    let places: std::collections::BTreeMap<Vec<u64>, u64> = numbered(from);
    let mut runs: Vec<(u64, u64, u64)> = Vec::new();
    for (at, index) in (0u64..).zip(indices(to)) {
        let Some(place) = places.get(&index) else { continue };
        match runs.last_mut() {
            Some((a, b, len)) if (*a + *len, *b + *len) == (*place, at) => *len += 1,
            _ => runs.push((*place, at, 1)),
        }
    }
    runs
}

/// Returns the runs in bytes, or `None` when one of them does not begin or end at a byte boundary.
/// A single run that ends with both boxes is rounded up.
fn byte_runs(from: &Area, to: &Area, bits: u64) -> Option<Vec<(u64, u64, u64)>> {
    let runs = element_runs(from, to);
    let count = |(_, size): &Area| size.iter().product::<u64>();
    let ends = |run: &(u64, u64, u64)| (run.0 + run.2, run.1 + run.2) == (count(from), count(to));
    let is_alone = runs.len() == 1 && runs.iter().all(ends);
    let bytes = |elements: u64| (elements * bits).is_multiple_of(8).then_some(elements * bits / 8);
    let len = |len: u64| if is_alone { Some((len * bits).div_ceil(8)) } else { bytes(len) };
    runs.iter().map(|(a, b, n)| Some((bytes(*a)?, bytes(*b)?, len(*n)?))).collect()
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Runs(Vec<Vec<(u64, u64, u64)>>),
    Overlap(String),
    Gap(String),
    Unknown,
    NotByteAligned,
}

fn expected(case: &Case) -> Outcome {
    let whole = (vec![0; case.name.shape.len()], case.name.shape.clone());
    let to = case.wanted.as_ref().unwrap_or(&whole);
    let mut all = Vec::new();
    for from in &case.areas {
        match byte_runs(from, to, case.name.element.bits.into()) {
            Some(runs) if runs.is_empty() => {}
            Some(runs) => all.push(runs),
            None => return Outcome::NotByteAligned,
        }
    }
    let text = |index: &[u64]| match index {
        [] => "its value".to_owned(),
        index => format!("element {index:?}"),
    };
    match first_defect(to, &case.areas) {
        None => Outcome::Runs(all),
        Some((_, 0)) if case.has_unknown => Outcome::Unknown,
        Some((index, 0)) => Outcome::Gap(text(&index)),
        Some((index, _)) => Outcome::Overlap(text(&index)),
    }
}

fn found(case: &Case, table: &Table) -> Outcome {
    let wanted = case.wanted.as_ref().map_or(Form::Whole, |(start, size)| area(start, size));
    match search(table, 0, &wanted) {
        Ok(copies) => {
            let mut all: Vec<(u32, Vec<_>)> =
                copies.iter().map(|copy| (copy.extent, copy.runs().collect())).collect();
            for (copy, (_, runs)) in copies.iter().zip(&all) {
                let bytes: u64 = runs.iter().map(|(_, _, len)| len).sum();
                assert_eq!(copy.len_bytes(), bytes);
                for dims in copy.dims.windows(2) {
                    let [from, to] =
                        [dims[1].from_stride, dims[1].to_stride].map(|s| s * dims[1].count);
                    assert_ne!((dims[0].from_stride, dims[0].to_stride), (from, to), "{copy:?}");
                }
            }
            // The extents are in the order of the boxes here.
            all.sort();
            Outcome::Runs(all.into_iter().map(|(_, runs)| runs).collect())
        }
        Err(SearchError::Uncovered { element, .. }) => Outcome::Gap(element),
        Err(SearchError::Overlap { element, .. }) => Outcome::Overlap(element),
        Err(SearchError::UnknownForm { .. }) => Outcome::Unknown,
        Err(SearchError::NotByteAligned { .. }) => Outcome::NotByteAligned,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn search_is_what_element_numbers_say() {
    let mut seen = [0u32; 5];
    for seed in 0..6000 {
        let case = Draw(SeededEntropy::new(seed)).case();
        let table = table_of(&case);
        let outcome = expected(&case);
        let areas = &case.areas;
        assert_eq!(found(&case, &table), outcome, "seed {seed}: {} {areas:?}", case.name.element);
        seen[match outcome {
            Outcome::Runs(_) => 0,
            Outcome::Overlap(_) => 1,
            Outcome::Gap(_) => 2,
            Outcome::Unknown => 3,
            Outcome::NotByteAligned => 4,
        }] += 1;
    }
    assert!(seen.iter().all(|count| *count > 50), "cases that are hardly there: {seen:?}");
}

#[test]
fn coverage_is_what_element_numbers_say() {
    let mut seen = [0u32; 3];
    for seed in 0..6000 {
        let case = Case { has_unknown: false, ..Draw(SeededEntropy::new(seed)).case() };
        let whole = (vec![0; case.name.shape.len()], case.name.shape.clone());
        let text = |index: Vec<u64>| match index.as_slice() {
            [] => "its value".to_owned(),
            index => format!("element {index:?}"),
        };
        let name = "a".to_owned();
        let expected = match first_defect(&whole, &case.areas) {
            None => Ok(()),
            Some((index, 0)) => Err(TableError::Gap { name, element: text(index) }),
            Some((index, _)) => Err(TableError::Overlap { name, element: text(index) }),
        };
        let areas = &case.areas;
        assert_eq!(table_of(&case).check_coverage(), expected, "seed {seed}: {areas:?}");
        seen[match expected {
            Ok(()) => 0,
            Err(TableError::Gap { .. }) => 1,
            _ => 2,
        }] += 1;
    }
    assert!(seen.iter().all(|count| *count > 200), "cases that are hardly there: {seen:?}");
}

/// Checks the bytes themselves: the copied bytes are those that a tensor of numbered elements has
/// at the wanted indices.
#[test]
fn the_bytes_of_a_wanted_box_are_its_elements() {
    for seed in 0..500 {
        let mut case = Draw(SeededEntropy::new(seed)).case();
        (case.name.element.bits, case.has_unknown) = (16, false);
        let whole = (vec![0; case.name.shape.len()], case.name.shape.clone());
        let numbers: std::collections::BTreeMap<Vec<u64>, u16> =
            indices(&whole).into_iter().zip(0..).collect();
        let elements = |area: &Area| -> Vec<u8> {
            indices(area).iter().flat_map(|index| numbers[index].to_le_bytes()).collect()
        };
        let table = table_of(&case);
        let wanted = case.wanted.as_ref().map_or(Form::Whole, |(start, size)| area(start, size));
        let Ok(copies) = search(&table, 0, &wanted) else { continue };
        let len = case.name.part_bytes(&wanted).unwrap();
        let mut destination = vec![0xee; len as usize];
        for copy in &copies {
            let region =
                table.regions().iter().find(|region| region.extent == copy.extent).unwrap();
            let held = match &region.form {
                Form::Box { start, size } => elements(&(start.to_vec(), size.to_vec())),
                _ => elements(&whole),
            };
            assert_eq!(held.len() as u64, table.extents()[copy.extent as usize].len_bytes);
            for (from, to, len) in copy.runs() {
                let [from, to, len] = [from, to, len].map(|number| number as usize);
                destination[to..to + len].copy_from_slice(&held[from..from + len]);
            }
        }
        assert_eq!(destination, elements(case.wanted.as_ref().unwrap_or(&whole)), "seed {seed}");
    }
}
