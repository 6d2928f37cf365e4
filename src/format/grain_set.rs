//! A set of grains of one file, as a bitmap.

use serde::{Deserialize, Serialize};

use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES};

/// The longest set in bytes: a bit for each grain of the longest block.
const MAX_BYTES: usize = (MAX_BLOCK_BYTES / GRAIN_BYTES / 8) as usize;

/// A set of grains of one file: bit `g % 8` of byte `g / 8` is set for grain g. The last byte is
/// not 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct GrainSet(Vec<u8>);

impl GrainSet {
    /// Adds a grain. A number that no grain of any file has is ignored.
    pub fn insert(&mut self, grain: u64) {
        let at = (grain / 8) as usize;
        if at < MAX_BYTES {
            self.0.resize(self.0.len().max(at + 1), 0);
            self.0[at] |= 1 << (grain % 8);
        }
    }

    /// Returns whether the set contains `grain`.
    pub fn contains(&self, grain: u64) -> bool {
        let byte = usize::try_from(grain / 8).ok().and_then(|at| self.0.get(at));
        byte.is_some_and(|byte| byte & (1 << (grain % 8)) != 0)
    }

    /// Returns an iterator over the grains, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        let all = 0..self.0.len() as u64 * 8;
        all.filter(|grain| self.contains(*grain))
    }

    /// Returns the number of grains.
    pub fn len(&self) -> usize {
        self.0.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<u64> for GrainSet {
    fn from_iter<T: IntoIterator<Item = u64>>(grains: T) -> Self {
        let mut set = Self::default();
        grains.into_iter().for_each(|grain| set.insert(grain));
        set
    }
}

impl TryFrom<Vec<u8>> for GrainSet {
    type Error = &'static str;

    fn try_from(bytes: Vec<u8>) -> Result<Self, Self::Error> {
        match bytes.len() <= MAX_BYTES && bytes.last() != Some(&0) {
            true => Ok(Self(bytes)),
            false => Err("a set of grains is too long, or ends in a zero byte"),
        }
    }
}

impl From<GrainSet> for Vec<u8> {
    fn from(set: GrainSet) -> Self {
        set.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_in_and_one_form() {
        let grains = [0, 7, 8, 100, 2047];
        let mut set: GrainSet = grains.into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), grains);
        assert!(set.contains(100) && !set.contains(101) && !set.contains(u64::MAX));
        assert_eq!((set.len(), set.is_empty(), GrainSet::default().is_empty()), (5, false, true));
        let before = set.clone();
        set.insert(2048);
        set.insert(u64::MAX);
        assert_eq!(set, before);
        let bytes = postcard::to_stdvec(&set).unwrap();
        assert_eq!(postcard::from_bytes::<GrainSet>(&bytes).unwrap(), set);
        assert!(GrainSet::try_from(vec![1, 0]).is_err());
        assert!(GrainSet::try_from(vec![1; MAX_BYTES + 1]).is_err());
    }
}
