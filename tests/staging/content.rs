//! The content that trainers save: every byte follows from the filling and the rank, so that a load
//! can check that a step is whole and comes from one filling.

use std::collections::BTreeMap;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::table::{
    ElementType, Extent, ExtentCopy, Form, Key, Name, NameKind, Path, Region, Space, Table,
    TableBuilder,
};
use rapidraid::id::{FillId, Step};
use rapidraid::trainer::StagingError;
use rapidraid::trainer::copy::Target;
use rapidraid::trainer::fill::Segment;
use rapidraid::trainer::load::LoadedStep;
use rapidraid::trainer::mapping::Writable;
use rapidraid::trainer::protocol::{Load, LoadFrom};
use rapidraid::trainer::segment::{EXTENT_ALIGN_BYTES, HEADER_BYTES, Header, stage};
use rapidraid::trainer::session::{Session, Wait};

/// Length of a row of the shared tensor in bytes: 16 elements of 4.
const ROW_BYTES: u64 = 64;
/// Space in bytes for the table behind the extents.
const TABLE_ROOM_BYTES: u64 = 64 << 10;
/// The parts of one rank; the first is its box of the shared tensor.
const PARTS: [&str; 4] = ["weights", "rng", "fill", "nothing"];

/// The amount of data that a rank saves. Ranks are counted over all hosts of the launch.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub rank: u32,
    pub world: u32,
    /// Number of rows of the shared tensor that the rank owns.
    pub rows: u64,
    /// The first rank of its host, and the number of ranks there.
    pub first: u32,
    pub here: u32,
}

impl Shape {
    /// Returns the shape of a rank whose launch runs on one host.
    pub fn on_one_host(rank: u32, world: u32, rows: u64) -> Self {
        Self { rank, world, rows, first: 0, here: world }
    }

    /// Returns the sum of the lengths in bytes of one segment over the ranks of the host.
    pub fn host_bytes(&self) -> u64 {
        let ranks = self.first..self.first + self.here;
        ranks.map(|rank| Self { rank, ..*self }.segment_bytes()).sum()
    }

    fn len_bytes(&self, part: &str) -> u64 {
        match part {
            "weights" => self.rows * ROW_BYTES,
            "rng" => 777 + u64::from(self.rank),
            "fill" => 16,
            _ => 0,
        }
    }

    /// Returns the length in bytes of a segment for this content.
    pub fn segment_bytes(&self) -> u64 {
        let parts = PARTS.map(|part| self.len_bytes(part).next_multiple_of(EXTENT_ALIGN_BYTES));
        HEADER_BYTES + parts.iter().sum::<u64>() + TABLE_ROOM_BYTES
    }

    fn table(&self) -> (Table, Vec<u64>, u64) {
        let (mut builder, mut offsets, mut end) = (TableBuilder::new(), Vec::new(), 0);
        for part in PARTS {
            let len_bytes = self.len_bytes(part);
            let (source, shard, hash) = (0, 0, None);
            let extent =
                builder.add_extent(Extent { source, shard, offset_bytes: end, len_bytes, hash });
            offsets.push(end);
            end = (end + len_bytes).next_multiple_of(EXTENT_ALIGN_BYTES);
            let is_shared = part == "weights";
            let name = builder.add_name(Name {
                space: if is_shared { Space::Shared } else { Space::Rank(self.rank) },
                path: Path::new(&[Key::Text(part.into())]).unwrap(),
                kind: if is_shared { NameKind::Tensor } else { NameKind::Bytes },
                element: ElementType {
                    name: if is_shared { "float32".into() } else { "uint8".into() },
                    bits: if is_shared { 32 } else { 8 },
                    big_endian: false,
                },
                shape: if is_shared { vec![self.rows * u64::from(self.world), 16] } else { vec![] },
                flags: 0,
            });
            let start = [u64::from(self.rank) * self.rows, 0];
            let form = match is_shared {
                true => Form::new_box(&start, &[self.rows, 16]),
                false => Form::Whole,
            };
            builder.add_region(name, form, extent);
        }
        (builder.build().unwrap(), offsets, end)
    }
}

/// Returns the bytes of a part.
fn bytes_of(part: &str, fill: FillId, rank: u32, len_bytes: u64) -> Vec<u8> {
    if part == "fill" {
        return fill.0.to_vec();
    }
    let hash = blake3::hash(&[&fill.0[..], &rank.to_le_bytes(), part.as_bytes()].concat());
    let mut bytes = vec![0; len_bytes as usize];
    SeededEntropy::new(u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap()))
        .fill(&mut bytes);
    bytes
}

/// Writes a rank's extents.
pub fn write_extents(map: &Writable, shape: &Shape, fill: FillId) {
    let (_, offsets, _) = shape.table();
    for (part, offset) in PARTS.iter().zip(offsets) {
        let bytes = bytes_of(part, fill, shape.rank, shape.len_bytes(part));
        map.write((HEADER_BYTES + offset) as usize, &bytes).unwrap();
    }
}

/// Writes table and header. From then on the segment is marked as staged.
pub fn write_header(
    segment: &Segment,
    shape: &Shape,
    launch: rapidraid::id::LaunchId,
    step: Step,
    fill: FillId,
) {
    let (table, _, end) = shape.table();
    let table = table.to_bytes().unwrap();
    let header = Header {
        segment: segment.id,
        launch,
        world: shape.here,
        rank: shape.rank - shape.first,
        step,
        fill,
        table_offset: HEADER_BYTES + end,
        table_bytes: table.len() as u64,
    };
    stage(&segment.map, header, &table).unwrap();
}

/// A step that was loaded and verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    pub step: u64,
    pub fill: FillId,
    /// The filling of each rank. The ranks of one host have the same.
    pub fills: Vec<FillId>,
    pub world: u32,
    pub is_from_memory: bool,
    /// The length of all extents, and how much of it is read from the cluster in a load by ranges.
    pub read_bytes: Option<(u64, u64)>,
    pub newest_committed: Option<u64>,
}

/// Copies every extent, verified, and compares it with the expected bytes. Panics if a byte is
/// wrong, or if ranks of one host have saved different fillings.
pub fn check(
    session: &mut Session,
    loaded: &mut LoadedStep,
    wait: &mut Wait<'_>,
) -> Result<Loaded, StagingError> {
    let found = check_hosts(session, loaded, wait)?;
    assert!(found.fills.iter().all(|fill| *fill == found.fill), "parts of several fillings");
    Ok(found)
}

/// Checks as [`check`] a step that several hosts have saved.
pub fn check_hosts(
    session: &mut Session,
    loaded: &mut LoadedStep,
    wait: &mut Wait<'_>,
) -> Result<Loaded, StagingError> {
    let mut buffers: Vec<Vec<u8>> =
        loaded.table.extents().iter().map(|extent| vec![0; extent.len_bytes as usize]).collect();
    let wanted: Vec<Vec<u32>> = (0..buffers.len() as u32).map(|row| vec![row]).collect();
    for window in loaded.windows(&wanted) {
        if loaded.is_by_ranges() {
            session.read_extents(loaded, &window.extents, &mut |_, _| (), wait)?;
        }
        let targets = (0..).zip(&mut buffers).map(|(extent, bytes)| Target {
            copies: vec![ExtentCopy {
                extent,
                from_bytes: 0,
                to_bytes: 0,
                run_bytes: bytes.len() as u64,
                dims: Vec::new(),
            }],
            bytes,
        });
        loaded.copy(targets.collect(), 2, &mut || true)?;
    }
    let table = &loaded.table;
    let region = |row: u32| table.regions_of(row).iter();
    let rows = || (0u32..).zip(table.names());
    let part = |name: &Name| name.path.to_string();
    let fills: BTreeMap<u32, FillId> = rows()
        .filter(|(_, name)| part(name) == "fill")
        .flat_map(|(row, name)| {
            let Space::Rank(rank) = name.space else { panic!("{name}") };
            let of =
                |region: &Region| FillId(buffers[region.extent as usize][..].try_into().unwrap());
            region(row).map(move |region| (rank, of(region)))
        })
        .collect();
    let world = fills.len() as u32;
    assert!(fills.keys().copied().eq(0..world) && world > 0, "{fills:?}");
    for (row, name) in rows() {
        for region in region(row) {
            let found = &buffers[region.extent as usize];
            let rank = match (&name.space, &region.form) {
                (Space::Rank(rank), _) => *rank,
                (_, Form::Box { start, size }) => (start[0] / size[0].max(1)) as u32,
                other => panic!("{name}: {other:?}"),
            };
            let expected = bytes_of(&part(name), fills[&rank], rank, found.len() as u64);
            assert!(*found == expected, "{name} of rank {rank}: wrong bytes were loaded");
        }
    }
    Ok(Loaded {
        step: loaded.step().0,
        fill: fills[&0],
        fills: fills.into_values().collect(),
        world,
        is_from_memory: loaded.is_from_memory(),
        read_bytes: loaded
            .is_by_ranges()
            .then(|| (loaded.len_bytes(), loaded.wanted_bytes(&wanted))),
        newest_committed: loaded.about.newest_committed.map(|step| step.0),
    })
}

/// Loads a step and checks every byte of it. Returns `None` if there is nothing to load.
pub fn load(
    session: &mut Session,
    load: &Load,
    wait: &mut Wait<'_>,
) -> Result<Option<Loaded>, StagingError> {
    load_from(session, load, LoadFrom::Anywhere, wait)
}

/// Loads like [`load`]. A step from the cluster may have been saved by several hosts.
pub fn load_from(
    session: &mut Session,
    load: &Load,
    from: LoadFrom,
    wait: &mut Wait<'_>,
) -> Result<Option<Loaded>, StagingError> {
    let Some(mut step) = session.load(load, from, &mut |_, _| (), wait)? else {
        return Ok(None);
    };
    let checked = match from {
        LoadFrom::Anywhere => check(session, &mut step, wait),
        LoadFrom::Cluster => check_hosts(session, &mut step, wait),
    };
    match checked {
        Ok(found) => {
            session.release(step, wait)?;
            Ok(Some(found))
        }
        Err(error) => {
            session.give_up_load(step, &error, wait)?;
            Err(error)
        }
    }
}
