//! The questions and their contestants. A group consists of buffers ([`Shape`]) and of contestants
//! that do the same work on them. [`crate::bars`] finds contestants by the names given here.

mod copies;
mod encode;
mod fingerprint;
mod hop;
mod reconstruct;

use anyhow::Result;
use rapidraid::gf::{Kernel, Matrix, Mode, field};

use crate::check::Check;
use crate::harness::{Contestant, Group, Role, Run};
use crate::lanes::Place;
use crate::raw::isal::Isal;

pub use copies::COPY;
pub use encode::{ENCODE, RS_ERASURE_SIMD_ENCODE, RS_SIMD};
pub use fingerprint::{BLAKE3, FINGERPRINT, FINGERPRINTS_ALONE, HOP_ALONE, HOP_CHECKED, TOGETHER};
pub use hop::{FLOOR, FLOOR_PAST_CACHES, HOP, RS_ERASURE, RS_ERASURE_SIMD};
pub use reconstruct::{ANY_FIVE, RECONSTRUCT, dense_of, fewer_multiplications, sparse_of};

/// The ingredients of the groups.
pub struct Cast {
    pub isal: Vec<Isal>,
    /// The kernel that the library chose.
    pub kernel: Kernel,
    /// Number of sets of pieces to try where any five may be missing.
    pub draws: usize,
}

/// A group that can be built once its buffers exist.
pub struct Planned {
    pub question: &'static str,
    pub place: Place,
    pub shape: Shape,
    pub make: fn(&Cast, Place) -> Result<Vec<Contestant<'static>>>,
    pub counted_buffers: usize,
}

/// The number of buffers, and their length in cache. The length for [`Place::Memory`] follows from
/// the command line.
#[derive(Clone, Copy)]
pub struct Shape {
    pub inputs: usize,
    pub outputs: usize,
    pub cache_bytes: usize,
}

impl Planned {
    pub fn group(&self, cast: &Cast) -> Result<Group<'static>> {
        Ok(Group {
            question: self.question,
            place: self.place,
            counted_buffers: self.counted_buffers,
            contestants: (self.make)(cast, self.place)?,
        })
    }
}

/// Bytes of each buffer that ISA-L processes at a time when it works in tiles.
const ISAL_TILE_BYTES: usize = 16 << 10;

/// Returns all groups, in the order of the page.
pub fn all() -> Vec<Planned> {
    let parts = [hop::planned(), fingerprint::planned(), encode::planned(), reconstruct::planned()];
    parts.into_iter().flatten().collect()
}

/// Returns the name of the row of a kernel of this library.
pub fn ours(kernel: Kernel) -> String {
    format!("rapidraid, {}", kernel.name())
}

/// Returns the name of the row whose outputs are stored past the caches.
pub fn ours_past_caches(kernel: Kernel) -> String {
    format!("{}, stores past the caches", ours(kernel))
}

/// Returns the name of the row whose output overwrites the first input.
pub fn ours_in_place(kernel: Kernel) -> String {
    format!("{}, written over the incoming buffer", ours(kernel))
}

/// Returns the name of the row over GF(2^16).
pub fn ours_wide(kernel: Kernel) -> String {
    format!("{}, GF(2^16)", ours(kernel))
}

/// Returns the name of the row of ISA-L in tiles.
pub fn tiled(isal: &Isal) -> String {
    format!("{} in 16 KiB tiles", isal.name())
}

/// Returns the mode that suits a place, and the name of the row that uses it.
pub fn suited(kernel: Kernel, place: Place) -> (Mode, String) {
    match place {
        Place::Memory => (Mode::Stream, ours_past_caches(kernel)),
        Place::Cache => (Mode::Overwrite, ours(kernel)),
    }
}

/// Returns a matrix without zeros and ones: 2 to the powers 1, 8, 15 and so on.
fn dense_matrix(rows: usize, cols: usize) -> Result<Matrix> {
    let entries = (0..rows * cols).map(|i| field::exp(7 * i + 1)).collect();
    Ok(Matrix::new(rows, cols, entries)?)
}

/// Returns a contestant in which a kernel applies a matrix to the first inputs and outputs.
fn applied(name: String, kernel: Kernel, matrix: &Matrix, mode: Mode) -> Contestant<'static> {
    let (check, matrix) = (Check::Outputs(matrix.clone()), matrix.clone());
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let (inputs, outputs) =
            (&lanes.inputs[..matrix.cols()], &mut lanes.outputs[..matrix.rows()]);
        (0..repetitions).try_for_each(|_| kernel.apply(&matrix, inputs, outputs, mode))?;
        Ok(())
    });
    Contestant { name, role: Role::Ours, check, run }
}

/// Returns the contestant of [`applied`], and from memory another one whose stores bypass the
/// caches.
fn applied_at(kernel: Kernel, matrix: &Matrix, place: Place) -> Vec<Contestant<'static>> {
    let mut contestants = vec![applied(ours(kernel), kernel, matrix, Mode::Overwrite)];
    let (mode, name) = suited(kernel, place);
    if mode != Mode::Overwrite {
        contestants.push(applied(name, kernel, matrix, mode));
    }
    contestants
}

/// Returns ISA-L on whole buffers, and in tiles, which its larger matrices need from memory.
fn by_isal_both(isal: &Isal, matrix: &Matrix) -> [Contestant<'static>; 2] {
    [None, Some(ISAL_TILE_BYTES)].map(|tile_bytes| by_isal(isal, matrix, tile_bytes))
}

/// Returns ISA-L with the same matrix, in tiles or on whole buffers.
fn by_isal(isal: &Isal, matrix: &Matrix, tile_bytes: Option<usize>) -> Contestant<'static> {
    let tables = isal.tables(matrix);
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let run: Run<'static> = Box::new(move |lanes, repetitions| {
        let (inputs, outputs) = (&lanes.inputs[..cols], &mut lanes.outputs[..rows]);
        for _ in 0..repetitions {
            match tile_bytes {
                Some(bytes) => tables.apply_tiled(inputs, outputs, bytes),
                None => tables.apply(inputs, outputs),
            }
        }
        Ok(())
    });
    let name = if tile_bytes.is_some() { tiled(isal) } else { isal.name() };
    Contestant { name, role: Role::Peer, check: Check::Outputs(matrix.clone()), run }
}
