//! What the library is about to offer. Each entry is `None` until it does; then it is one line here, and the
//! rows and bars that wait for it appear by themselves.
//!
//! ```text
//! STREAM:   Some(Mode::Stream)
//! IN_PLACE: Some(|kernel, matrix, streams, inputs, outputs| kernel.apply_in_place(matrix, streams, inputs, outputs))
//! WIDE:     Some(|kernel, rows| {
//!               let matrix = Matrix16::from_rows(rows)?;
//!               Ok(Box::new(move |inputs, outputs, mode| kernel.apply16(&matrix, inputs, outputs, mode)))
//!           })
//! ```

use rapidraid::gf::{GfError, Kernel, Matrix, Mode};

/// The mode that overwrites with non-temporal stores, for outputs that nobody reads soon.
pub const STREAM: Option<Mode> = None;

/// `(kernel, matrix, streams, inputs, outputs)`: the streams are the first inputs, and the first outputs
/// are written over them.
pub type InPlace =
    fn(Kernel, &Matrix, &mut [&mut [u8]], &[&[u8]], &mut [&mut [u8]]) -> Result<(), GfError>;

/// The kernel that writes over its input.
pub const IN_PLACE: Option<InPlace> = None;

/// A matrix over GF(2^16), made ready for one kernel.
pub type Wide = Box<dyn Fn(&[&[u8]], &mut [&mut [u8]], Mode) -> Result<(), GfError>>;

/// Makes a matrix over GF(2^16) ready, from its rows.
pub type MakeWide = fn(Kernel, &[Vec<u16>]) -> Result<Wide, GfError>;

/// The kernel over GF(2^16).
pub const WIDE: Option<MakeWide> = None;
