//! What one kernel runs over in one pass: some outputs and some inputs of a matrix, over a range of bytes.

use std::ops::Range;

use super::Mode;

/// Outputs that one pass produces: the rows of reconstructions of up to twelve blocks, whose sums fit into 32 registers twice.
pub(super) const GROUP_OUTPUTS: usize = 12;
/// Inputs that one pass reads; it bounds the coefficients that are kept on the stack.
pub(super) const GROUP_INPUTS: usize = 32;
/// Kernels with vectors go over whole multiples of this; what is left at the ends is copied to buffers of so many bytes.
pub(super) const STEP_BYTES: usize = 128;
/// What stores past the caches are aligned to.
const LINE_BYTES: usize = 64;

/// `[i][o]` is what input i counts for in output o.
pub(super) type Coefs = [[u8; GROUP_OUTPUTS]; GROUP_INPUTS];

/// What the rows and columns of the coefficients stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planes {
    /// Each for a buffer.
    Whole,
    /// Two for each buffer: the first and the second half of each of its steps (GF(2^16), docs/format.md).
    Split,
}

impl Planes {
    /// Rows or columns for each buffer.
    pub fn per_buffer(self) -> usize {
        match self {
            Planes::Whole => 1,
            Planes::Split => 2,
        }
    }
}

/// Some outputs of a matrix over a range of bytes. Streams are inputs that are overwritten by an output: they come first among both.
///
/// Invariants, which [`super::Kernel`] establishes and unsafe code relies on: every buffer is at least `range.end` bytes long; streams and
/// inputs have 1 to [`GROUP_INPUTS`] columns, streams and outputs 1 to [`GROUP_OUTPUTS`] rows. Kernels with vectors get ranges of whole steps.
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
    /// The same over another range, which lies in this one's.
    fn over(&mut self, range: Range<usize>) -> Group<'_, 's, 'o> {
        debug_assert!(self.range.start <= range.start && range.end <= self.range.end);
        let Group { coefs, planes, streams, inputs, outputs, mode, .. } = self;
        Group { coefs, planes: *planes, streams, inputs, outputs, range, mode: *mode }
    }

    /// Runs `apply`, which takes ranges of whole steps only, over all of the range.
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

    /// Bytes before the first address that all outputs can be written from past the caches. Halves of steps stay where they are.
    fn ragged_start(&self) -> usize {
        let mut starts = self.outputs.iter().map(|output| output.as_ptr() as usize);
        match starts.next().map(|first| first.wrapping_add(self.range.start) % LINE_BYTES) {
            Some(over @ 1..) if self.mode == Mode::Stream && self.planes == Planes::Whole => {
                LINE_BYTES - over
            }
            _ => 0,
        }
    }

    /// Runs `apply` over less than a step, on copies that are filled up with zeros.
    #[inline(never)]
    fn in_buffers(self, apply: &impl Fn(Group<'_, '_, '_>)) {
        let Group { coefs, planes, streams, inputs, outputs, range, mode } = self;
        // A split step of h symbols has its high halves from h on.
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
