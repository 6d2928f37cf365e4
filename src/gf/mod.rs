//! The field GF(2^8) and all operations on many bytes at once: matrices of coefficients, the fused
//! kernel that applies a matrix to streams, and the linear fingerprint.
//!
//! Every function here is exact and gives the same result on every processor. A wrong shape or
//! length is an error, never undefined behaviour. The `unsafe` code of this module is in [`kernel`].
//! The layer above decides which coefficients make a good code.

pub mod field;
pub mod field16;
pub mod fingerprint;
pub mod kernel;
mod line;
mod matrix;
mod matrix16;

pub use fingerprint::{Fingerprint, FingerprintKey};
pub use kernel::{Kernel, Mode};
pub use line::{Line, LineStep, Operand};
pub use matrix::Matrix;
pub(crate) use matrix::add_scaled;
pub use matrix16::Matrix16;

use crate::kind::ErrorKind;

/// The reason why a matrix, a kernel or a fingerprint could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GfError {
    /// The size of a matrix is not 1 to [`Matrix::MAX_SIDE`] rows and columns.
    #[error(
        "a matrix of {rows} rows and {cols} columns cannot be made: give 1 to {max} of each",
        max = Matrix::MAX_SIDE
    )]
    Size {
        /// The requested number of rows.
        rows: usize,
        /// The requested number of columns.
        cols: usize,
    },
    /// Two counts that must be equal differ.
    #[error("{what}: expected {expected}, got {actual}")]
    Count {
        /// The name of the count.
        what: &'static str,
        /// The number that is required.
        expected: usize,
        /// The number that was given.
        actual: usize,
    },
    /// A buffer differs in length from the first buffer: the first stream or, without streams, the
    /// first input.
    #[error(
        "{side} {index} has {actual} bytes, the first input has {expected}: cut all to one length"
    )]
    Length {
        /// The kind of buffer: `"stream"`, `"input"` or `"output"`.
        side: &'static str,
        /// The number of the buffer among those of its kind, from 0.
        index: usize,
        /// The length of the first buffer.
        expected: usize,
        /// The length of the buffer.
        actual: usize,
    },
    /// The length of the buffers is odd, but symbols have two bytes.
    #[error(
        "{bytes} bytes are not a whole number of 16-bit symbols: cut buffers to an even length"
    )]
    OddLength {
        /// The given length in bytes.
        bytes: usize,
    },
    /// The matrix needs more than one pass, and a second pass would read what the first has
    /// overwritten.
    #[error(
        "a matrix of {rows} rows and {cols} columns is not applied in place: give at most {max_rows} and {max_cols}, or outputs of their own"
    )]
    InPlace {
        /// The given number of rows.
        rows: usize,
        /// The given number of columns.
        cols: usize,
        /// Maximum number of rows.
        max_rows: usize,
        /// Maximum number of columns.
        max_cols: usize,
    },
    /// A straight-line program was run in [`Mode::Accumulate`], but it can only replace its
    /// outputs.
    #[error(
        "a straight-line program cannot add to its outputs: use `Mode::Overwrite` or `Mode::Stream`"
    )]
    NoSum,
    /// The matrix has no inverse.
    #[error("a matrix of side {side} has rank {rank} and therefore no inverse: choose other rows")]
    Singular {
        /// The number of rows of the matrix.
        side: usize,
        /// The rank of the matrix.
        rank: usize,
    },
    /// The bytes are more than a grain.
    #[error("{bytes} bytes are more than a grain of {max}: cut them into grains first", max = crate::units::GRAIN_BYTES)]
    GrainTooLong {
        /// The number of bytes given.
        bytes: usize,
    },
    /// No kernel has this name, or this processor cannot run it.
    #[error("no kernel {name:?} on this processor: set {env} to one of: {available}", env = kernel::ENV)]
    NoSuchKernel {
        /// The requested name, cut to 64 characters.
        name: String,
        /// The names of the kernels that this processor can run.
        available: String,
    },
}

impl GfError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// Applies `matrix` (a row per output, a column per input) to all bytes with the kernel chosen for
/// this processor: see [`Kernel::apply`].
pub fn apply(
    matrix: &Matrix,
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
    mode: Mode,
) -> Result<(), GfError> {
    Kernel::active().apply(matrix, inputs, outputs, mode)
}

/// Runs a straight-line program with the kernel chosen for this processor: see [`Kernel::run`].
pub fn run(
    line: &Line,
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
    mode: Mode,
) -> Result<(), GfError> {
    Kernel::active().run(line, inputs, outputs, mode)
}
