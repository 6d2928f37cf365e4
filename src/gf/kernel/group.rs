//! A group: the work of a kernel in one pass, i.e. some outputs and some inputs of a matrix over a
//! range of bytes.

use std::ops::Range;

use super::Mode;

/// Maximum number of outputs of one pass. This covers the reconstruction of up to twelve blocks.
/// With two vectors per output, the sums fit into 32 registers.
pub(super) const GROUP_OUTPUTS: usize = 12;
/// Maximum number of inputs of one pass. It bounds the coefficients that are kept on the stack.
pub(super) const GROUP_INPUTS: usize = 32;
/// The length of a step in bytes. Vector kernels process whole steps; the partial steps at both
/// ends are copied to buffers of one step.
pub(super) const STEP_BYTES: usize = 128;
/// The alignment of non-temporal stores, in bytes.
const LINE_BYTES: usize = 64;

/// The coefficients of a group: `[i][o]` is the coefficient of input i in output o.
pub(super) type Coefs = [[u8; GROUP_OUTPUTS]; GROUP_INPUTS];

/// The meaning of the rows and columns of the coefficients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planes {
    /// A single row or column per buffer.
    Whole,
    /// Two rows or columns per buffer: the first and the second half of each of its steps
    /// (GF(2^16), docs/format.md).
    Split,
}

impl Planes {
    /// Returns the number of rows or columns per buffer.
    pub fn per_buffer(self) -> usize {
        match self {
            Planes::Whole => 1,
            Planes::Split => 2,
        }
    }
}

/// Some outputs of a matrix over a range of bytes. Streams are inputs that an output overwrites:
/// they come first among inputs and outputs.
///
/// Invariants, which [`super::Kernel`] establishes and unsafe code relies on: every buffer is at
/// least `range.end` bytes long; streams and inputs have 1 to [`GROUP_INPUTS`] columns, streams and
/// outputs 1 to [`GROUP_OUTPUTS`] rows. Vector kernels receive ranges of whole steps.
pub(super) struct Group<'a, 's, 'o> {
    pub coefs: &'a Coefs,
    pub planes: Planes,
    pub streams: &'a mut [&'s mut [u8]],
    pub inputs: &'a [&'a [u8]],
    pub outputs: &'a mut [&'o mut [u8]],
    pub range: Range<usize>,
    pub mode: Mode,
}

impl<'s, 'o> Group<'_, 's, 'o> {
    /// Returns the same group over another range, which must lie inside this one's.
    fn over(&mut self, range: Range<usize>) -> Group<'_, 's, 'o> {
        debug_assert!(self.range.start <= range.start && range.end <= self.range.end);
        let Group { coefs, planes, streams, inputs, outputs, mode, .. } = self;
        Group { coefs, planes: *planes, streams, inputs, outputs, range, mode: *mode }
    }

    /// Runs `apply`, which accepts ranges of whole steps only, over the whole range.
    pub(super) fn in_steps(mut self, apply: &impl Fn(Group<'_, '_, '_>)) {
        let Range { start, end } = self.range;
        let body = (start + self.ragged_start()).min(end);
        let tail = end - (end - body) % STEP_BYTES;
        if start < body {
            self.over(start..body).in_buffers(apply);
        }
        if body < tail {
            apply(self.over(body..tail));
        }
        if tail < end {
            self.over(tail..end).in_buffers(apply);
        }
    }

    /// Returns the number of bytes before the first address at which the first output is aligned
    /// for non-temporal stores, or 0 if the group uses none. The steps of split buffers cannot be
    /// shifted, so the result is 0 for them, too.
    fn ragged_start(&self) -> usize {
        let mut starts = self.outputs.iter().map(|output| output.as_ptr() as usize);
        match starts.next().map(|first| first.wrapping_add(self.range.start) % LINE_BYTES) {
            Some(over @ 1..) if self.mode == Mode::Stream && self.planes == Planes::Whole => {
                LINE_BYTES - over
            }
            _ => 0,
        }
    }

    /// Runs `apply` over less than a step, on copies that are padded with zeros.
    #[inline(never)]
    fn in_buffers(self, apply: &impl Fn(Group<'_, '_, '_>)) {
        let Group { coefs, planes, streams, inputs, outputs, range, mode } = self;
        // The high halves of a split step of h symbols start at byte h.
        let half = range.len() / planes.per_buffer();
        let halves = || range.clone().step_by(half).map(|at| at..at + half);
        let places = || (0..).step_by(STEP_BYTES / planes.per_buffer()).map(|at| at..at + half);
        let copy = |from: &[u8], to: &mut [u8; STEP_BYTES]| {
            halves().zip(places()).for_each(|(at, place)| to[place].copy_from_slice(&from[at]));
        };
        let mut sources = [[0; STEP_BYTES]; GROUP_INPUTS];
        let (used, made) = (streams.len() + inputs.len(), streams.len() + outputs.len());
        let all = streams.iter().map(|stream| &**stream).chain(inputs.iter().copied());
        sources.iter_mut().zip(all).for_each(|(to, from)| copy(from, to));
        let mut results = [[0; STEP_BYTES]; GROUP_OUTPUTS];
        if mode == Mode::Accumulate {
            results.iter_mut().zip(&*outputs).for_each(|(to, from)| copy(from, to));
        }
        let inputs: [&[u8]; GROUP_INPUTS] = std::array::from_fn(|i| &sources[i][..]);
        let mut refs = results.each_mut().map(|copy| &mut copy[..]);
        apply(Group {
            coefs,
            planes,
            streams: &mut [],
            inputs: &inputs[..used],
            outputs: &mut refs[..made],
            range: 0..STEP_BYTES,
            mode: if mode == Mode::Accumulate { mode } else { Mode::Overwrite },
        });
        let streams = streams.iter_mut().map(|stream| &mut **stream);
        let outputs = outputs.iter_mut().map(|output| &mut **output);
        for (target, result) in streams.chain(outputs).zip(&results) {
            halves()
                .zip(places())
                .for_each(|(at, place)| target[at].copy_from_slice(&result[place]));
        }
    }
}
