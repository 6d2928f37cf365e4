//! Kernels: the loops over many bytes, one portable and one for each worthwhile instruction set.
//!
//! The interface is fused: one pass over the inputs of a matrix computes all its outputs, because
//! the cost of a hop is the bytes that it moves, not the products that it computes. A [`Kernel`]
//! with special instructions holds a token which only detection can make, so its existence proves
//! that the processor has them. The best kernel is chosen once; [`ENV`] selects another one, so
//! that tests can simulate a weaker machine.
//!
//! This module checks everything before any kernel runs. The parts that all instruction sets share
//! (groups of outputs, tiles, partial steps) are in `group` and here. A kernel itself consists of a
//! loop over one group, a loop over one straight-line program, and a fingerprint.

mod group;
mod portable;

#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use group::{Coefs, GROUP_INPUTS, GROUP_OUTPUTS, Group, Planes, STEP_BYTES};

use super::fingerprint::FingerprintKey;
use super::{GfError, Line, Matrix, Matrix16, field16};

/// The name of the environment variable that selects a kernel.
pub const ENV: &str = "RAPIDRAID_KERNEL";

/// Number of bytes that all passes of a matrix process before they advance. The inputs are then
/// read from memory once, and from the nearest caches by the later passes.
const TILE_BYTES: usize = 8 * 1024;
/// Maximum number of outputs of [`Kernel::apply_in_place`]. Every kernel computes that many in one
/// pass, so no input is overwritten before its last use.
const IN_PLACE_OUTPUTS: usize = 4;

/// The treatment of the previous content of outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The result replaces the previous content.
    Overwrite,
    /// The result is added to the previous content.
    Accumulate,
    /// The result replaces the previous content in memory, by non-temporal stores that bypass the
    /// caches. This is faster for outputs of megabytes that this core does not read again soon, and
    /// slower otherwise. This is the same as [`Mode::Overwrite`] if the outputs start at different
    /// offsets in their cache lines (for straight-line programs and GF(2^16): anywhere but at the
    /// start of one), if a matrix has more inputs than one pass takes, or if the portable loops
    /// run.
    Stream,
}

/// An implementation that this processor can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel(Isa);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx2Gfni(x86::Avx2Gfni),
    #[cfg(target_arch = "x86_64")]
    Avx512Gfni(x86::Avx512Gfni),
}

impl Kernel {
    /// Returns all kernels that this processor can run, best first. The portable kernel is always
    /// included.
    pub fn available() -> Vec<Kernel> {
        let mut kernels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            kernels.extend(x86::Avx512Gfni::detect().map(Isa::Avx512Gfni));
            kernels.extend(x86::Avx2Gfni::detect().map(Isa::Avx2Gfni));
            kernels.extend(x86::Avx2::detect().map(Isa::Avx2));
        }
        kernels.push(Isa::Portable);
        kernels.into_iter().map(Kernel).collect()
    }

    /// Returns the kernel called `name`, or [`GfError::NoSuchKernel`] if this processor cannot run
    /// it.
    pub fn named(name: &str) -> Result<Kernel, GfError> {
        let available = Self::available();
        available.iter().find(|kernel| kernel.name() == name).copied().ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|kernel| kernel.name()).collect();
            GfError::NoSuchKernel {
                name: name.chars().take(64).collect(),
                available: names.join(", "),
            }
        })
    }

    /// Returns the kernel that [`ENV`] names, or the best one if the variable is not set. A program
    /// calls this when it starts, so that a misspelt name is reported.
    pub fn from_env() -> Result<Kernel, GfError> {
        match std::env::var_os(ENV) {
            Some(name) => Self::named(&name.to_string_lossy()),
            None => Ok(Self::available().first().copied().unwrap_or(Kernel(Isa::Portable))),
        }
    }

    /// Returns the kernel that this process uses, chosen at the first call. If [`Kernel::from_env`]
    /// fails, it is the portable one.
    pub fn active() -> Kernel {
        static ACTIVE: OnceLock<Kernel> = OnceLock::new();
        *ACTIVE.get_or_init(|| Self::from_env().unwrap_or(Kernel(Isa::Portable)))
    }

    /// Returns the name: `portable`, `avx2`, `avx2-gfni` or `avx512-gfni`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Gfni(_) => "avx2-gfni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(_) => "avx512-gfni",
        }
    }

    /// Applies a matrix. For every byte offset t and output r it computes
    /// `outputs[r][t] = sum over s of matrix[r][s] * inputs[s][t]`. In [`Mode::Accumulate`] the sum
    /// is added to the previous content. All buffers must have the same length; any length and any
    /// alignment is accepted.
    pub fn apply(
        self,
        matrix: &Matrix,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    ) -> Result<(), GfError> {
        let bytes = check((matrix.rows(), matrix.cols()), &[], inputs, outputs)?;
        let coefs = |output, input| coefs_from(matrix, output, input);
        self.apply_in_passes(&coefs, Planes::Whole, inputs, outputs, bytes, mode);
        Ok(())
    }

    /// Applies a matrix as [`Kernel::apply`] does, but writes the first outputs over the first
    /// inputs (the streams). `matrix` has a row for each stream and then for each output, and a
    /// column for each stream and then for each input. A hop saves the stores of one stream when it
    /// forwards the stream that it received in this way. The matrix may have at most 4 rows and 32
    /// columns.
    pub fn apply_in_place(
        self,
        matrix: &Matrix,
        streams: &mut [&mut [u8]],
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
    ) -> Result<(), GfError> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        if rows > IN_PLACE_OUTPUTS || cols > GROUP_INPUTS {
            let (max_rows, max_cols) = (IN_PLACE_OUTPUTS, GROUP_INPUTS);
            return Err(GfError::InPlace { rows, cols, max_rows, max_cols });
        }
        let bytes = check((rows, cols), streams, inputs, outputs)?;
        self.apply_group(Group {
            coefs: &coefs_from(matrix, 0, 0),
            planes: Planes::Whole,
            streams,
            inputs,
            outputs,
            range: 0..bytes,
            mode: Mode::Overwrite,
        });
        Ok(())
    }

    /// Applies a matrix over GF(2^16) ([`super::field16`]) as [`Kernel::apply`] does. The symbols
    /// are split in the buffers: in each group of 128 bytes, byte j and byte j + 64 are the low and
    /// the high half of symbol j. The rest at the end is one group with half as many symbols as
    /// bytes, so the length must be even.
    pub fn apply16(
        self,
        matrix: &Matrix16,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    ) -> Result<(), GfError> {
        let bytes = check((matrix.rows(), matrix.cols()), &[], inputs, outputs)?;
        if bytes % 2 == 1 {
            return Err(GfError::OddLength { bytes });
        }
        let coefs = |output, input| coefs16_from(matrix, output, input);
        self.apply_in_passes(&coefs, Planes::Split, inputs, outputs, bytes, mode);
        Ok(())
    }

    /// Applies a matrix in as many passes as it needs. `coefs(o, i)` returns the coefficients of
    /// the group that begins with output o and input i.
    fn apply_in_passes(
        self,
        coefs: &dyn Fn(usize, usize) -> Coefs,
        planes: Planes,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        bytes: usize,
        mode: Mode,
    ) {
        let group_inputs = GROUP_INPUTS / planes.per_buffer();
        let group_outputs = GROUP_OUTPUTS / planes.per_buffer();
        let one_pass = inputs.len() <= group_inputs && outputs.len() <= group_outputs;
        let step = if one_pass { bytes } else { TILE_BYTES }.max(1);
        for start in (0..bytes).step_by(step) {
            let range = start..bytes.min(start + step);
            for (o, outputs) in outputs.chunks_mut(group_outputs).enumerate() {
                for (i, part) in inputs.chunks(group_inputs).enumerate() {
                    // A sum of several passes is read again by the next pass.
                    let mode = match (mode, i) {
                        (Mode::Stream, 0) if inputs.len() > group_inputs => Mode::Overwrite,
                        (mode, 0) => mode,
                        _ => Mode::Accumulate,
                    };
                    self.apply_group(Group {
                        coefs: &coefs(o * group_outputs, i * group_inputs),
                        planes,
                        streams: &mut [],
                        inputs: part,
                        outputs: &mut *outputs,
                        range: range.clone(),
                        mode,
                    });
                }
            }
        }
    }

    /// Runs a straight-line program, which computes its outputs for every byte offset. All buffers
    /// must have the same length; any length and any alignment is accepted. [`Mode::Accumulate`] is
    /// refused with [`GfError::NoSum`].
    pub fn run(
        self,
        line: &Line,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    ) -> Result<(), GfError> {
        let bytes = line.check(inputs, outputs)?;
        if mode == Mode::Accumulate {
            return Err(GfError::NoSum);
        }
        let whole = bytes - bytes % STEP_BYTES;
        let done = match self.0 {
            Isa::Portable => 0,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.run(line, inputs, outputs, whole, mode),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Gfni(isa) => isa.run(line, inputs, outputs, whole, mode),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(isa) => isa.run(line, inputs, outputs, whole, mode),
        };
        portable::run(line, inputs, outputs, done..bytes);
        Ok(())
    }

    fn apply_group(self, group: Group<'_, '_, '_>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(isa) => group.in_steps(&|group| isa.apply(group)),
            _ if group.planes == Planes::Split => group.in_steps(&portable::apply_split),
            Isa::Portable => portable::apply(group),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => group.in_steps(&|group| isa.apply(group)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Gfni(isa) => group.in_steps(&|group| isa.apply(group)),
        }
    }

    /// Computes the fingerprint of at most a grain of bytes. The caller has checked the length.
    pub(super) fn fingerprint(self, key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
        match self.0 {
            Isa::Portable => portable::fingerprint(key, grain),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.fingerprint(key, grain),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Gfni(isa) => isa.fingerprint(key, grain),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(isa) => isa.fingerprint(key, grain),
        }
    }
}

/// Returns the common length of all buffers, or an error if their number or lengths do not fit the
/// matrix.
pub(super) fn check(
    (rows, cols): (usize, usize),
    streams: &[&mut [u8]],
    inputs: &[&[u8]],
    outputs: &[&mut [u8]],
) -> Result<usize, GfError> {
    let counts = [
        ("inputs", cols, streams.len() + inputs.len()),
        ("outputs", rows, streams.len() + outputs.len()),
    ];
    if let Some(&(what, expected, actual)) = counts.iter().find(|count| count.1 != count.2) {
        return Err(GfError::Count { what, expected, actual });
    }
    let expected = match (streams, inputs, outputs) {
        ([first, ..], ..) => first.len(),
        (_, [first, ..], _) => first.len(),
        (_, _, [first, ..]) => first.len(),
        _ => 0,
    };
    // Plain loops, because this runs for every call: nested iterators would cost more than a short
    // hop.
    for (index, stream) in streams.iter().enumerate() {
        is_long("stream", index, expected, stream.len())?;
    }
    for (index, input) in inputs.iter().enumerate() {
        is_long("input", index, expected, input.len())?;
    }
    for (index, output) in outputs.iter().enumerate() {
        is_long("output", index, expected, output.len())?;
    }
    Ok(expected)
}

fn is_long(
    side: &'static str,
    index: usize,
    expected: usize,
    actual: usize,
) -> Result<(), GfError> {
    if actual == expected {
        return Ok(());
    }
    Err(GfError::Length { side, index, expected, actual })
}

/// Returns the coefficients of the group with the given first output and input.
fn coefs_from(matrix: &Matrix, first_output: usize, first_input: usize) -> Coefs {
    let mut coefs = [[0; GROUP_OUTPUTS]; GROUP_INPUTS];
    let rows = GROUP_OUTPUTS.min(matrix.rows() - first_output);
    let cols = GROUP_INPUTS.min(matrix.cols() - first_input);
    for o in 0..rows {
        let row = &matrix.row(first_output + o)[first_input..first_input + cols];
        coefs.iter_mut().zip(row).for_each(|(column, &coef)| column[o] = coef);
    }
    coefs
}

/// Returns the coefficients of a group over GF(2^16). Each coefficient becomes the 2x2 block over
/// GF(2^8) that multiplies the halves of a symbol by it.
fn coefs16_from(matrix: &Matrix16, first_output: usize, first_input: usize) -> Coefs {
    let mut coefs = [[0; GROUP_OUTPUTS]; GROUP_INPUTS];
    for (o, row) in matrix.iter().skip(first_output).take(GROUP_OUTPUTS / 2).enumerate() {
        for (i, &coef) in row.iter().skip(first_input).take(GROUP_INPUTS / 2).enumerate() {
            let [low, high] = field16::block(coef);
            for (half, column) in low.into_iter().zip(high).enumerate() {
                (coefs[2 * i + half][2 * o], coefs[2 * i + half][2 * o + 1]) = column;
            }
        }
    }
    coefs
}

#[cfg(test)]
mod tests;
