//! Kernels: the loops over many bytes, once for any processor and once for each instruction set worth it.
//!
//! The interface is the fused one: all outputs of a matrix come from one pass over its inputs, because what
//! a hop costs is the bytes it moves, not the products it forms. A [`Kernel`] that runs special
//! instructions holds a token which only detection can make, so having it proves that the processor has
//! them. The best one is chosen once; [`ENV`] forces another, so that tests can play a weaker machine.
//!
//! Everything is checked here, before any kernel runs. What the instruction sets share (groups of outputs,
//! tiles) is here too; a kernel of its own is one loop over one group, and one fingerprint.

mod portable;

#[cfg(target_arch = "x86_64")]
mod avx512_gfni;

use std::ops::Range;
use std::sync::OnceLock;

use super::fingerprint::FingerprintKey;
use super::{GfError, Matrix};

/// The environment variable that names the kernel to use.
pub const ENV: &str = "RAPIDRAID_KERNEL";

/// Outputs that one pass produces: with two vectors of each they fill half of 32 registers.
const GROUP_OUTPUTS: usize = 8;
/// Inputs that one pass reads; it bounds the coefficients that are kept on the stack.
const GROUP_INPUTS: usize = 32;
/// When a matrix takes several passes, they run over so many bytes at a time, so that the inputs are read
/// from memory once and from the nearest caches after that.
const TILE_BYTES: usize = 8 * 1024;

/// What becomes of the bytes that an output holds already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They are replaced.
    Overwrite,
    /// The result is added to them.
    Accumulate,
}

/// One implementation that this processor can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel(Isa);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx512Gfni(avx512_gfni::Avx512Gfni),
}

/// Some outputs of a matrix over a range of bytes, as a kernel gets it.
///
/// Invariants, which [`Kernel::apply`] establishes and unsafe code relies on: every input and output is at
/// least `range.end` bytes long; there are 1 to [`GROUP_INPUTS`] inputs and 1 to [`GROUP_OUTPUTS`] outputs.
struct Group<'a, 'b> {
    /// `coefs[i][o]` is what input i counts for in output o.
    coefs: &'a [[u8; GROUP_OUTPUTS]; GROUP_INPUTS],
    inputs: &'a [&'a [u8]],
    outputs: &'a mut [&'b mut [u8]],
    range: Range<usize>,
    mode: Mode,
}

impl Kernel {
    /// All that this processor can run, the best first. The portable one is always there.
    pub fn available() -> Vec<Kernel> {
        let mut kernels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        kernels.extend(avx512_gfni::Avx512Gfni::detect().map(Isa::Avx512Gfni));
        kernels.push(Isa::Portable);
        kernels.into_iter().map(Kernel).collect()
    }

    /// The kernel called `name`, if this processor can run it.
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

    /// The kernel that [`ENV`] names, or the best one when it is not set. A program asks this when it
    /// starts, so that a misspelt name is reported.
    pub fn from_env() -> Result<Kernel, GfError> {
        match std::env::var_os(ENV) {
            Some(name) => Self::named(&name.to_string_lossy()),
            None => Ok(Self::available().first().copied().unwrap_or(Kernel(Isa::Portable))),
        }
    }

    /// The kernel that this process uses, chosen at the first call. Where [`Kernel::from_env`] fails it is
    /// the portable one.
    pub fn active() -> Kernel {
        static ACTIVE: OnceLock<Kernel> = OnceLock::new();
        *ACTIVE.get_or_init(|| Self::from_env().unwrap_or(Kernel(Isa::Portable)))
    }

    /// Its name: `portable`, `avx512-gfni`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(_) => "avx512-gfni",
        }
    }

    /// For every byte offset t and output r: `outputs[r][t] = sum over s of matrix[r][s] * inputs[s][t]`,
    /// added to what is there in [`Mode::Accumulate`]. All buffers must have one length; any length and
    /// any alignment will do.
    pub fn apply(
        self,
        matrix: &Matrix,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    ) -> Result<(), GfError> {
        let bytes = check(matrix, inputs, outputs)?;
        let one_pass = inputs.len() <= GROUP_INPUTS && outputs.len() <= GROUP_OUTPUTS;
        let step = if one_pass { bytes } else { TILE_BYTES }.max(1);
        for start in (0..bytes).step_by(step) {
            let range = start..bytes.min(start + step);
            for (o, outputs) in outputs.chunks_mut(GROUP_OUTPUTS).enumerate() {
                for (i, inputs) in inputs.chunks(GROUP_INPUTS).enumerate() {
                    let coefs = &group_coefs(matrix, o * GROUP_OUTPUTS, i * GROUP_INPUTS);
                    let mode = if i == 0 { mode } else { Mode::Accumulate };
                    let range = range.clone();
                    self.apply_group(Group { coefs, inputs, outputs: &mut *outputs, range, mode });
                }
            }
        }
        Ok(())
    }

    fn apply_group(self, group: Group<'_, '_>) {
        match self.0 {
            Isa::Portable => portable::apply(group),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(isa) => isa.apply(group),
        }
    }

    /// The fingerprint of at most a grain of bytes, which the caller has checked.
    pub(super) fn fingerprint(self, key: &FingerprintKey, grain: &[u8]) -> [u8; 16] {
        match self.0 {
            Isa::Portable => portable::fingerprint(key, grain),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Gfni(isa) => isa.fingerprint(key, grain),
        }
    }
}

/// The common length of all buffers, if their number and lengths fit the matrix.
fn check(matrix: &Matrix, inputs: &[&[u8]], outputs: &[&mut [u8]]) -> Result<usize, GfError> {
    let counts =
        [("inputs", matrix.cols(), inputs.len()), ("outputs", matrix.rows(), outputs.len())];
    if let Some(&(what, expected, actual)) = counts.iter().find(|count| count.1 != count.2) {
        return Err(GfError::Count { what, expected, actual });
    }
    let expected = inputs.first().map_or(0, |input| input.len());
    let lengths = inputs.iter().map(|input| input.len()).enumerate().map(|of| ("input", of));
    let lengths =
        lengths.chain(outputs.iter().map(|out| out.len()).enumerate().map(|of| ("output", of)));
    for (side, (index, actual)) in lengths {
        if actual != expected {
            return Err(GfError::Length { side, index, expected, actual });
        }
    }
    Ok(expected)
}

/// The coefficients of one group, whose first output and input are given.
fn group_coefs(
    matrix: &Matrix,
    first_output: usize,
    first_input: usize,
) -> [[u8; GROUP_OUTPUTS]; GROUP_INPUTS] {
    let mut coefs = [[0; GROUP_OUTPUTS]; GROUP_INPUTS];
    for (o, row) in matrix.iter().skip(first_output).take(GROUP_OUTPUTS).enumerate() {
        for (i, &coef) in row.iter().skip(first_input).take(GROUP_INPUTS).enumerate() {
            coefs[i][o] = coef;
        }
    }
    coefs
}

#[cfg(test)]
mod tests;
