//! The field GF(2^8) and everything that touches many bytes at once: matrices of coefficients, the fused
//! kernel that applies one to streams, and the linear fingerprint.
//!
//! Promises: every function here is exact and the same on every processor; a wrong shape or length is an
//! error, never undefined behaviour. The only `unsafe` code of the library is in [`kernel`].
//! Which coefficients make a good code is left to the floor above.

pub mod field;
pub mod field16;
pub mod fingerprint;
pub mod kernel;
mod line;
mod matrix;
mod matrix16;

pub use fingerprint::{Fingerprint, FingerprintKey};
pub use kernel::{Kernel, Mode};
pub use line::{Line, Operand, Step};
pub use matrix::Matrix;
pub(crate) use matrix::add_scaled;
pub use matrix16::Matrix16;

use crate::kind::ErrorKind;

/// Why a matrix, a kernel or a fingerprint could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GfError {
    /// A matrix needs 1 to [`Matrix::MAX_SIDE`] rows and columns.
    #[error(
        "a matrix of {rows} rows and {cols} columns cannot be made: give 1 to {max} of each",
        max = Matrix::MAX_SIDE
    )]
    Size {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// Two things that must have the same number of entries do not.
    #[error("{what}: expected {expected}, got {actual}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// The number that fits.
        expected: usize,
        /// The number that was given.
        actual: usize,
    },
    /// A buffer differs in length from the first input.
    #[error(
        "{side} {index} has {actual} bytes, the first input has {expected}: cut all to one length"
    )]
    Length {
        /// `"stream"`, `"input"` or `"output"`.
        side: &'static str,
        /// Which of them, from 0.
        index: usize,
        /// The length of the first input.
        expected: usize,
        /// Its own length.
        actual: usize,
    },
    /// Symbols of two bytes do not come out even.
    #[error("{bytes} bytes are no whole number of 16-bit symbols: cut buffers to an even length")]
    OddLength {
        /// Bytes given.
        bytes: usize,
    },
    /// More than one pass can do, and a second would read what the first has overwritten.
    #[error(
        "a matrix of {rows} rows and {cols} columns is not applied in place: give at most {max_rows} and {max_cols}, or outputs of their own"
    )]
    InPlace {
        /// Rows given.
        rows: usize,
        /// Columns given.
        cols: usize,
        /// The most rows.
        max_rows: usize,
        /// The most columns.
        max_cols: usize,
    },
    /// A straight-line program replaces what its outputs hold.
    #[error("a straight-line program adds to nothing: use `Mode::Overwrite` or `Mode::Stream`")]
    NoSum,
    /// The matrix has no inverse.
    #[error("a matrix of side {side} has rank {rank} and so no inverse: choose other rows")]
    Singular {
        /// Rows of the matrix.
        side: usize,
        /// Its rank.
        rank: usize,
    },
    /// More bytes than a grain has.
    #[error("{bytes} bytes are more than a grain of {max}: cut them into grains first", max = crate::units::GRAIN_BYTES)]
    GrainTooLong {
        /// Bytes given.
        bytes: usize,
    },
    /// No kernel has this name, or this processor cannot run it.
    #[error("no kernel {name:?} on this processor: set {env} to one of: {available}", env = kernel::ENV)]
    NoSuchKernel {
        /// The name asked for, cut to 64 characters.
        name: String,
        /// The names that work here.
        available: String,
    },
}

impl GfError {
    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// Applies `matrix` (a row per output, a column per input) to all bytes at once with the kernel chosen for
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
