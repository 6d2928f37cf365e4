//! Matrices of coefficients over GF(2^16).

use super::field16::Element;
use super::{GfError, Matrix};

/// A matrix of 1 to 256 rows and columns over GF(2^16). Rows are outputs, columns are inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix16 {
    cols: usize,
    /// Row after row; never empty, and a multiple of `cols`.
    entries: Vec<Element>,
}

impl Matrix16 {
    /// The matrix with these entries, row after row.
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

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.entries.len() / self.cols
    }

    /// How many columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All rows in turn.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[Element]> {
        self.entries.chunks_exact(self.cols)
    }
}
