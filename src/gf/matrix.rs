//! Small dense matrices over GF(2^8): the coefficients of codes, hops and reconstructions.

use std::fmt;

use super::{GfError, field};

/// A matrix of 1 to 256 rows and columns. Rows are outputs, columns are inputs.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Matrix {
    cols: usize,
    /// The entries, row after row. Never empty; the length is a multiple of `cols`.
    entries: Vec<u8>,
}

impl Matrix {
    /// Maximum number of rows or columns.
    pub const MAX_SIDE: usize = 256;

    /// Returns the matrix with these entries, row after row. Returns [`GfError::Size`] or
    /// [`GfError::Count`] if the sizes do not fit.
    pub fn new(rows: usize, cols: usize, entries: Vec<u8>) -> Result<Self, GfError> {
        if !(1..=Self::MAX_SIDE).contains(&rows) || !(1..=Self::MAX_SIDE).contains(&cols) {
            return Err(GfError::Size { rows, cols });
        }
        if entries.len() != rows * cols {
            let what = "entries of a matrix";
            return Err(GfError::Count { what, expected: rows * cols, actual: entries.len() });
        }
        Ok(Self { cols, entries })
    }

    /// Returns the matrix with these rows, which must all have the same length.
    pub fn from_rows<R: AsRef<[u8]>>(rows: &[R]) -> Result<Self, GfError> {
        let cols = rows.first().map_or(0, |row| row.as_ref().len());
        if let Some(row) = rows.iter().find(|row| row.as_ref().len() != cols) {
            let what = "entries of a row";
            return Err(GfError::Count { what, expected: cols, actual: row.as_ref().len() });
        }
        let entries = rows.iter().flat_map(|row| row.as_ref()).copied().collect();
        Self::new(rows.len(), cols, entries)
    }

    /// Returns the zero matrix.
    pub fn zero(rows: usize, cols: usize) -> Result<Self, GfError> {
        Self::new(rows, cols, vec![0; rows.saturating_mul(cols).min(Self::MAX_SIDE.pow(2))])
    }

    /// Returns the identity matrix.
    pub fn identity(side: usize) -> Result<Self, GfError> {
        let mut identity = Self::zero(side, side)?;
        identity.entries.iter_mut().step_by(side + 1).for_each(|entry| *entry = 1);
        Ok(identity)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.entries.len() / self.cols
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns row `row`, from 0.
    ///
    /// # Panics
    /// Panics when there is no such row, as a slice would.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.entries[row * self.cols..][..self.cols]
    }

    /// Returns row `row`, from 0, for writing.
    ///
    /// # Panics
    /// Panics when there is no such row, as a slice would.
    pub fn row_mut(&mut self, row: usize) -> &mut [u8] {
        &mut self.entries[row * self.cols..][..self.cols]
    }

    /// Returns an iterator over the rows.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.entries.chunks_exact(self.cols)
    }

    /// Returns the matrix of these rows, in this order. A row may occur twice.
    pub fn select(&self, rows: &[usize]) -> Result<Self, GfError> {
        if let Some(&row) = rows.iter().find(|&&row| row >= self.rows()) {
            return Err(GfError::Count {
                what: "number of a row (too great)",
                expected: self.rows() - 1,
                actual: row,
            });
        }
        Self::new(
            rows.len(),
            self.cols,
            rows.iter().flat_map(|&row| self.row(row)).copied().collect(),
        )
    }

    /// Returns the product `self * right`.
    pub fn mul(&self, right: &Matrix) -> Result<Self, GfError> {
        if self.cols != right.rows() {
            let what = "rows of the right factor";
            return Err(GfError::Count { what, expected: self.cols, actual: right.rows() });
        }
        let mut product = Self::zero(self.rows(), right.cols)?;
        for (sums, row) in product.entries.chunks_exact_mut(right.cols).zip(self.iter()) {
            for (&coef, terms) in row.iter().zip(right.iter()) {
                add_scaled(sums, coef, terms);
            }
        }
        Ok(product)
    }

    /// Returns the rank: the number of independent rows.
    pub fn rank(&self) -> usize {
        self.clone().eliminate(None)
    }

    /// Returns the inverse matrix, or [`GfError::Singular`] if there is none.
    pub fn inverse(&self) -> Result<Self, GfError> {
        let side = self.rows();
        if side != self.cols {
            let what = "columns of a matrix to invert";
            return Err(GfError::Count { what, expected: side, actual: self.cols });
        }
        let mut inverse = Self::identity(side)?;
        let rank = self.clone().eliminate(Some(&mut inverse));
        if rank < side { Err(GfError::Singular { side, rank }) } else { Ok(inverse) }
    }

    /// Brings the matrix to reduced echelon form and applies the same row operations to `companion`.
    /// Returns the rank.
    fn eliminate(&mut self, mut companion: Option<&mut Matrix>) -> usize {
        let mut rank = 0;
        for col in 0..self.cols {
            let Some(pivot) = (rank..self.rows()).find(|&row| self.row(row)[col] != 0) else {
                continue;
            };
            self.reduce_by(pivot, rank, col, companion.as_deref_mut());
            rank += 1;
        }
        rank
    }

    /// Moves row `pivot` to `target`, scales it so that its entry in `col` is 1, and clears `col`
    /// in all other rows.
    fn reduce_by(
        &mut self,
        pivot: usize,
        target: usize,
        col: usize,
        companion: Option<&mut Matrix>,
    ) {
        let factors: Vec<u8> = self.iter().map(|row| row[col]).collect();
        let Some(scale) = field::inv(factors[pivot]) else { return };
        for matrix in std::iter::once(&mut *self).chain(companion) {
            let scaled: Vec<u8> = matrix.row(pivot).iter().map(|&e| field::mul(scale, e)).collect();
            for (row, &factor) in factors.iter().enumerate() {
                if row != pivot {
                    add_scaled(matrix.row_mut(row), factor, &scaled);
                }
            }
            let displaced = matrix.row(target).to_vec();
            matrix.row_mut(pivot).copy_from_slice(&displaced);
            matrix.row_mut(target).copy_from_slice(&scaled);
        }
    }
}

/// Computes `sums += coef * terms`, entry by entry.
pub(crate) fn add_scaled(sums: &mut [u8], coef: u8, terms: &[u8]) {
    if coef != 0 {
        sums.iter_mut().zip(terms).for_each(|(sum, &term)| *sum ^= field::mul(coef, term));
    }
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a matrix with entries 2^(row * col). Every square one of up to 255 rows is
    /// invertible.
    fn vandermonde(rows: usize, cols: usize) -> Matrix {
        let entries = (0..rows).flat_map(|r| (0..cols).map(move |c| field::exp(r * c))).collect();
        Matrix::new(rows, cols, entries).unwrap()
    }

    #[test]
    fn an_inverse_undoes_its_matrix() {
        for side in 1..20 {
            let matrix = vandermonde(side, side);
            let inverse = matrix.inverse().unwrap();
            assert_eq!(matrix.mul(&inverse).unwrap(), Matrix::identity(side).unwrap());
            assert_eq!(inverse.mul(&matrix).unwrap(), Matrix::identity(side).unwrap());
        }
        let swap = Matrix::from_rows(&[[0, 1], [1, 0]]).unwrap();
        assert_eq!(swap.inverse().unwrap(), swap);
    }

    #[test]
    fn rank_counts_independent_rows() {
        let mut matrix = vandermonde(6, 4);
        assert_eq!(matrix.rank(), 4);
        let first = matrix.row(0).to_vec();
        (1..6).for_each(|row| matrix.row_mut(row).copy_from_slice(&first));
        assert_eq!(matrix.rank(), 1);
        let singular = matrix.select(&[0, 1, 2, 3]).unwrap();
        assert_eq!(singular.inverse(), Err(GfError::Singular { side: 4, rank: 1 }));
        assert_eq!(Matrix::zero(3, 5).unwrap().rank(), 0);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        for (rows, cols) in [(0, 1), (1, 0), (257, 1), (1, 257), (usize::MAX, usize::MAX)] {
            assert_eq!(Matrix::zero(rows, cols), Err(GfError::Size { rows, cols }));
        }
        assert!(Matrix::new(2, 2, vec![0; 3]).is_err());
        assert!(Matrix::from_rows(&[vec![1, 2], vec![3]]).is_err());
        assert!(Matrix::from_rows::<Vec<u8>>(&[]).is_err());
        let wide = Matrix::zero(2, 3).unwrap();
        assert!(wide.mul(&wide).is_err());
        assert!(wide.inverse().is_err());
        assert!(wide.select(&[2]).is_err());
    }
}
