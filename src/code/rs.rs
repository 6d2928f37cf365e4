//! The classical code: systematic Reed-Solomon with the matrix of the crate `reed-solomon-erasure`,
//! and with code ids of this program. Pieces below k are the source blocks themselves.
//!
//! The crate is the reference implementation and an alternative for benchmarks. The kernels of this
//! program apply the same matrix and produce the same bytes.

use std::sync::Arc;

use reed_solomon_erasure::galois_8::ReedSolomon;

use super::{CodeError, CodeId, MAX_PIECES};
use crate::gf::{GfError, Matrix, field};

/// The kind byte of Reed-Solomon codes in the description from which a [`CodeId`] is computed.
const KIND: u8 = 2;

/// A systematic Reed-Solomon code over GF(2^8).
#[derive(Debug, Clone)]
pub struct RsCode {
    generator: Matrix,
    id: CodeId,
    codec: Arc<ReedSolomon>,
}

impl PartialEq for RsCode {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl RsCode {
    /// Returns the code of `n` pieces, or [`CodeError::Parameters`] unless 1 <= `k` < `n` <= 32.
    pub fn new(n: usize, k: usize) -> Result<Self, CodeError> {
        let impossible = || {
            let rule = "1 <= k < n <= 32";
            CodeError::Parameters { what: "Reed-Solomon code", n, k, rule }
        };
        if k == 0 || k >= n || n > MAX_PIECES {
            return Err(impossible());
        }
        let codec = ReedSolomon::new(k, n - k).map_err(|_| impossible())?;
        // Byte t of block j is 1 where t = j, so byte t of a parity piece is its coefficient for
        // block t.
        let blocks = Matrix::identity(k)?;
        let blocks: Vec<&[u8]> = blocks.iter().collect();
        let mut parity = vec![vec![0; k]; n - k];
        codec.encode_sep(&blocks, &mut parity).map_err(|_| impossible())?;
        let rows: Vec<&[u8]> = blocks.into_iter().chain(parity.iter().map(Vec::as_slice)).collect();
        let generator = Matrix::from_rows(&rows)?;
        let id = CodeId::of(&description(n, k, &parity));
        Ok(Self { generator, id, codec: Arc::new(codec) })
    }

    /// Returns the code's id.
    pub fn id(&self) -> CodeId {
        self.id
    }

    /// Returns the number of pieces.
    pub fn n(&self) -> usize {
        self.generator.rows()
    }

    /// Returns the number of source blocks.
    pub fn k(&self) -> usize {
        self.generator.cols()
    }

    /// Returns the generator matrix. Row i is piece i over the source blocks; the first k rows are
    /// the identity.
    pub fn generator(&self) -> &Matrix {
        &self.generator
    }

    /// Computes all parity pieces from all source blocks with the `reed-solomon-erasure` crate,
    /// which is the reference for this program's kernels and the codec behind `--codec
    /// reed-solomon-erasure`. All buffers must have the same length; otherwise the result is
    /// [`GfError::Count`].
    pub fn encode_with_crate(
        &self,
        blocks: &[&[u8]],
        parity: &mut [&mut [u8]],
    ) -> Result<(), CodeError> {
        let counts =
            [("blocks", self.k(), blocks.len()), ("parity", self.n() - self.k(), parity.len())];
        if let Some(&(what, expected, actual)) = counts.iter().find(|count| count.1 != count.2) {
            return Err(GfError::Count { what, expected, actual }.into());
        }
        let expected = blocks.first().map_or(0, |block| block.len());
        let mut lengths = blocks.iter().map(|b| b.len()).chain(parity.iter().map(|p| p.len()));
        if let Some(actual) = lengths.find(|&len| len != expected) {
            let what = "bytes of each block and parity piece";
            return Err(GfError::Count { what, expected, actual }.into());
        }
        if expected == 0 {
            return Ok(()); // the crate refuses empty blocks
        }
        let what = "encoding by reed-solomon-erasure";
        self.codec.encode_sep(blocks, parity).map_err(|_| CodeError::Defect { what })
    }
}

/// Returns the bytes from which a code id is computed: kind, n, k, bits of the field, its
/// polynomial (big-endian), then the rows of the parity pieces.
fn description(n: usize, k: usize, parity: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![KIND, n as u8, k as u8, 8];
    bytes.extend(field::POLYNOMIAL.to_be_bytes());
    bytes.extend(parity.iter().flatten());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::{Entropy, SeededEntropy};
    use crate::gf::{Kernel, Mode};

    #[test]
    fn our_kernels_make_the_crates_parity() {
        let entropy = SeededEntropy::new(1);
        for (n, k, len) in [(16, 11, 4099), (6, 4, 64), (2, 1, 1), (32, 16, 200), (32, 31, 77)] {
            let code = RsCode::new(n, k).unwrap();
            let mut blocks = vec![vec![0; len]; k];
            blocks.iter_mut().for_each(|block| entropy.fill(block));
            let blocks: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
            let mut expected = vec![vec![0; len]; n - k];
            let mut parity: Vec<&mut [u8]> = expected.iter_mut().map(Vec::as_mut_slice).collect();
            code.encode_with_crate(&blocks, &mut parity).unwrap();
            let rows = code.generator().select(&(k..n).collect::<Vec<_>>()).unwrap();
            for kernel in Kernel::available() {
                let mut got = vec![vec![0; len]; n - k];
                let mut outputs: Vec<&mut [u8]> = got.iter_mut().map(Vec::as_mut_slice).collect();
                kernel.apply(&rows, &blocks, &mut outputs, Mode::Overwrite).unwrap();
                assert_eq!(got, expected, "({n},{k}) {}", kernel.name());
            }
        }
    }

    #[test]
    fn wrong_buffers_and_parameters_are_refused() {
        for (n, k) in [(0, 0), (1, 0), (4, 4), (3, 4), (33, 20)] {
            assert!(RsCode::new(n, k).is_err(), "({n},{k})");
        }
        let code = RsCode::new(3, 2).unwrap();
        assert!(code.encode_with_crate(&[&[1]], &mut [&mut [0]]).is_err());
        assert!(code.encode_with_crate(&[&[1], &[2]], &mut [&mut [0, 0]]).is_err());
        assert!(code.encode_with_crate(&[&[], &[]], &mut [&mut []]).is_ok());
    }
}
