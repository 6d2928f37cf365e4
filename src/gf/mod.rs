//! The field GF(2^8) and everything that touches many bytes at once: matrices of coefficients, the fused
//! kernel that applies one to streams, and the linear fingerprint.
//!
//! Promises: every function here is exact and the same on every processor; a wrong shape or length is an
//! error, never undefined behaviour. The only `unsafe` code of the library is in [`kernel`].
//! Which coefficients make a good code is left to the floor above.

pub mod field;
pub mod fingerprint;
pub mod kernel;
mod matrix;

pub use fingerprint::{Fingerprint, FingerprintKey};
pub use kernel::{Kernel, Mode};
pub use matrix::Matrix;
pub(crate) use matrix::add_scaled;

use crate::kind::Kind;

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
        /// `"input"` or `"output"`.
        side: &'static str,
        /// Which of them, from 0.
        index: usize,
        /// The length of the first input.
        expected: usize,
        /// Its own length.
        actual: usize,
    },
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
    pub fn kind(&self) -> Kind {
        Kind::Invalid
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
