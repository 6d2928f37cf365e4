//! Kernels for x86-64: one set of loops ([`loops`], [`lines`]), instantiated in a module for each
//! instruction set. The module defines the vector type and the multiplication by a constant.

#[macro_use]
mod loops;
#[macro_use]
mod lines;
mod avx2;
mod avx512;
mod fingerprint256;
mod fingerprint512;
mod tables;

pub(super) use avx2::{Avx2, Avx2Gfni};
pub(super) use avx512::Avx512Gfni;

use super::Mode;
use super::group::{Coefs, GROUP_INPUTS, GROUP_OUTPUTS, Group, STEP_BYTES};
use crate::gf::line::Line;

/// A pass that touches more bytes than this is assumed to read from memory, because they do not fit
/// into the second-level cache (1 to 2 MiB in current server processors).
const FAR_BYTES: usize = 1 << 20;

/// The way in which a pass accesses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// All data is in the caches.
    Near,
    /// The data is in memory. The loops prefetch it explicitly, because the processor's own
    /// prefetcher gives up when there are many streams.
    Far,
    /// The data is in memory, and outputs are written by non-temporal stores.
    Stream,
}

/// The length of a cache line in bytes: the alignment of non-temporal stores and the unit of
/// prefetching.
const LINE_BYTES: usize = 64;

/// A straight-line program and its buffers in the form that the loops use.
///
/// Invariants that the loops rely on: there are as many sources and targets as the program names;
/// `bytes` can be read from each and written to each target, and no other reference to them is used
/// meanwhile; no target is a source; with [`Way::Stream`] targets are aligned to vectors.
struct LineTask<'a> {
    line: &'a Line,
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    bytes: usize,
    way: Way,
}

impl<'a> LineTask<'a> {
    /// Returns the task for a program and its buffers. There must be as many buffers as the program
    /// has, and each must be at least `bytes` long.
    fn of(
        line: &'a Line,
        inputs: &'a [&[u8]],
        outputs: &'a mut [&mut [u8]],
        bytes: usize,
        mode: Mode,
    ) -> Self {
        assert!(inputs.len() == line.inputs && inputs.iter().all(|input| input.len() >= bytes));
        assert!(
            outputs.len() == line.outputs && outputs.iter().all(|output| output.len() >= bytes)
        );
        let buffers = inputs.len() + outputs.len();
        let sources: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
        let targets: Vec<*mut u8> = outputs.iter_mut().map(|output| output.as_mut_ptr()).collect();
        let is_aligned = || targets.iter().all(|at| (*at as usize).is_multiple_of(LINE_BYTES));
        let way = match mode {
            Mode::Stream if is_aligned() => Way::Stream,
            _ if buffers.saturating_mul(bytes) > FAR_BYTES => Way::Far,
            _ => Way::Near,
        };
        Self { line, sources, targets, bytes, way }
    }
}

/// The buffers of a group in the form that the loops use: an address for each column and row, all
/// of which advance by the same amount.
///
/// Invariants that the loops rely on: `bytes` is a multiple of [`STEP_BYTES`]; `columns` sources
/// and `rows` targets are set; the steps of `bytes` from each can be read, or written, and no other
/// reference to them is used meanwhile; with [`Way::Stream`] targets are aligned to vectors. A
/// source may be a target: the bytes at an offset are read before that offset is written, and never
/// after.
struct Task<'a> {
    coefs: &'a Coefs,
    sources: [*const u8; GROUP_INPUTS],
    targets: [*mut u8; GROUP_OUTPUTS],
    columns: usize,
    rows: usize,
    bytes: usize,
    /// The number of columns or rows per buffer. Between two vectors of one column or row lie the
    /// vectors of the other columns or rows of the same buffer.
    per_buffer: usize,
    way: Way,
    accumulate: bool,
    /// Whether the first buffer has coefficient 1 in each output, as the stream that enters a hop
    /// does.
    is_first_plain: bool,
}

impl<'a> Task<'a> {
    /// Returns the task for a group. `vector_bytes` is the length of the vectors that are stored.
    fn of(group: Group<'a, '_, '_>, vector_bytes: usize) -> Self {
        let Group { coefs, planes, streams, inputs, outputs, range, mode } = group;
        let per_buffer = planes.per_buffer();
        let mut sources = [std::ptr::null(); GROUP_INPUTS];
        let mut targets = [std::ptr::null_mut(); GROUP_OUTPUTS];
        let (mut columns, mut rows) = (0, 0);
        for stream in streams.iter_mut() {
            let start = stream.as_mut_ptr().wrapping_add(range.start);
            for plane in 0..per_buffer {
                targets[rows] = start.wrapping_add(plane * STEP_BYTES / 2);
                sources[columns] = targets[rows].cast_const();
                (rows, columns) = (rows + 1, columns + 1);
            }
        }
        for output in outputs.iter_mut() {
            let start = output.as_mut_ptr().wrapping_add(range.start);
            for plane in 0..per_buffer {
                targets[rows] = start.wrapping_add(plane * STEP_BYTES / 2);
                rows += 1;
            }
        }
        for input in inputs {
            let start = input.as_ptr().wrapping_add(range.start);
            for plane in 0..per_buffer {
                sources[columns] = start.wrapping_add(plane * STEP_BYTES / 2);
                columns += 1;
            }
        }
        let buffers = (rows + columns) / per_buffer - streams.len();
        let is_aligned =
            || targets[..rows].iter().all(|at| (*at as usize).is_multiple_of(vector_bytes));
        let way = match mode {
            Mode::Stream if is_aligned() => Way::Stream,
            _ if buffers.saturating_mul(range.len()) > FAR_BYTES => Way::Far,
            _ => Way::Near,
        };
        let is_plain = |i: usize| (0..rows).all(|o| coefs[i][o] == u8::from(o % per_buffer == i));
        Self {
            coefs,
            sources,
            targets,
            columns,
            rows,
            bytes: range.len(),
            per_buffer,
            way,
            accumulate: mode == Mode::Accumulate,
            is_first_plain: (0..per_buffer.min(columns)).all(is_plain),
        }
    }

    /// Returns the task for at most `count` of the rows, from `first` on, with `coefs` as storage
    /// for their coefficients.
    fn rows_from(&self, coefs: &'a mut Coefs, first: usize, count: usize) -> Task<'a> {
        let mut targets = [std::ptr::null_mut(); GROUP_OUTPUTS];
        let rows = count.min(self.rows - first);
        targets[..rows].copy_from_slice(&self.targets[first..first + rows]);
        for (part, all) in coefs.iter_mut().zip(self.coefs) {
            part[..rows].copy_from_slice(&all[first..first + rows]);
        }
        Task { coefs, targets, rows, ..*self }
    }
}
