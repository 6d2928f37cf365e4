//! The layout: where the two replicas of each source block lie before archiving (RapidRAID's
//! overlapped replicas).

use super::{CodeError, MAX_PIECES};

/// The standard layout of k blocks on n positions, k <= n <= 2k: block j lies on positions j and
/// n-k+j, so that each position holds one or two blocks. With n = k there is one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    n: usize,
    k: usize,
}

impl Layout {
    /// Returns the layout of `k` blocks on `n` positions, or [`CodeError::Parameters`] unless 1 <=
    /// k <= n <= 2k and n <= 32.
    pub fn new(n: usize, k: usize) -> Result<Self, CodeError> {
        if k == 0 || !(k..=2 * k.min(MAX_PIECES)).contains(&n) || n > MAX_PIECES {
            let rule = "1 <= k <= n <= 2k and n <= 32";
            return Err(CodeError::Parameters { what: "standard layout", n, k, rule });
        }
        Ok(Self { n, k })
    }

    /// Returns the number of positions.
    pub fn n(self) -> usize {
        self.n
    }

    /// Returns the number of source blocks.
    pub fn k(self) -> usize {
        self.k
    }

    /// Returns the blocks on `position`, one or two, in ascending order. The result is empty when
    /// there is no such position.
    pub fn blocks_at(self, position: usize) -> impl Iterator<Item = usize> + Clone {
        let second = position.checked_sub(self.n - self.k).filter(|_| self.n > self.k);
        second.into_iter().chain([position]).filter(move |&block| block < self.k)
    }

    /// Returns the positions of the replicas of `block`, one or two, in ascending order. The result
    /// is empty when there is no such block.
    pub fn holders(self, block: usize) -> impl Iterator<Item = usize> + Clone {
        let copies = if self.n > self.k { 2 } else { 1 };
        [block, block.saturating_add(self.n - self.k)].into_iter().take(if block < self.k {
            copies
        } else {
            0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_and_blocks_are_the_same_relation() {
        for k in 1..=MAX_PIECES {
            for n in k..=(2 * k).min(MAX_PIECES) {
                let layout = Layout::new(n, k).unwrap();
                for position in 0..=n {
                    let blocks: Vec<usize> = layout.blocks_at(position).collect();
                    assert!(blocks.is_sorted());
                    let held = (0..=k).filter(|&b| layout.holders(b).any(|p| p == position));
                    assert_eq!(blocks, held.collect::<Vec<_>>(), "({n},{k}) {position}");
                    assert_eq!(blocks.is_empty(), position == n);
                }
            }
        }
    }

    #[test]
    fn the_headline_layout() {
        let layout = Layout::new(16, 11).unwrap();
        assert_eq!(layout.blocks_at(4).collect::<Vec<_>>(), [4]);
        assert_eq!(layout.blocks_at(5).collect::<Vec<_>>(), [0, 5]);
        assert_eq!(layout.blocks_at(15).collect::<Vec<_>>(), [10]);
        assert_eq!(layout.holders(10).collect::<Vec<_>>(), [10, 15]);
    }

    #[test]
    fn impossible_parameters_are_refused() {
        for (n, k) in [(0, 0), (3, 4), (9, 4), (33, 20), (usize::MAX, usize::MAX)] {
            assert!(Layout::new(n, k).is_err(), "({n},{k})");
        }
    }
}
