//! Matrices of coefficients over GF(2^16).

use super::field16::Element;
use super::{GfError, Matrix};

/// A matrix of 1 to 256 rows and columns over GF(2^16). Rows are outputs, columns are inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix16 {
    cols: usize,
    /// The entries, row after row. Never empty; the length is a multiple of `cols`.
    entries: Vec<Element>,
}

impl Matrix16 {
    /// Returns the matrix with these entries, row after row. Returns [`GfError::Size`] or
    /// [`GfError::Count`] if the sizes do not fit.
    pub fn new(rows: usize, cols: usize, entries: Vec<Element>) -> Result<Self, GfError> {
        let sides = 1..=Matrix::MAX_SIDE;
        if !sides.contains(&rows) || !sides.contains(&cols) {
            return Err(GfError::Size { rows, cols });
        }
        if entries.len() != rows * cols {
            let what = "entries of a matrix";
            return Err(GfError::Count { what, expected: rows * cols, actual: entries.len() });
        }
        Ok(Self { cols, entries })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.entries.len() / self.cols
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns an iterator over the rows.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[Element]> {
        self.entries.chunks_exact(self.cols)
    }
}
