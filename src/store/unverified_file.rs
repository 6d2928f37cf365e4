//! A file, whole or damaged, that is open for reads of its grains.

use super::disk::DiskFile;
use crate::format::file::FileHeader;
use crate::format::grain_set::GrainSet;
use crate::format::tree::GrainTree;
use crate::units::GRAIN_BYTES;

/// An open file from which grains are read. The reader verifies each grain.
pub struct UnverifiedFile {
    file: Box<dyn DiskFile>,
    tail: Option<(FileHeader, GrainTree)>,
    /// Grains that are known to be damaged. They are not read again, because each attempt may take
    /// the disk seconds.
    damaged: GrainSet,
}

impl UnverifiedFile {
    pub(super) fn new(
        file: Box<dyn DiskFile>,
        tail: Option<(FileHeader, GrainTree)>,
        damaged: GrainSet,
    ) -> Self {
        Self { file, tail, damaged }
    }

    /// Returns the header and the hash tree, if the tail is good.
    pub fn tail(&self) -> Option<&(FileHeader, GrainTree)> {
        self.tail.as_ref()
    }

    /// Returns the grains that are known to be damaged.
    pub(super) fn damaged_grains(&self) -> &GrainSet {
        &self.damaged
    }

    /// Fills `buf` from `offset`. Fills with zeros where a grain is known to be damaged or cannot
    /// be read because the disk fails or the file ends too early.
    pub fn read_or_zero(&self, offset: u64, buf: &mut [u8]) {
        if self.damaged.is_empty() && self.file.read_at(buf, offset).is_ok() {
            return;
        }
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let in_grain = (GRAIN_BYTES - at % GRAIN_BYTES).min(rest.len() as u64);
            let (part, behind) = rest.split_at_mut(in_grain as usize);
            let is_damaged = self.damaged.contains(at / GRAIN_BYTES);
            if is_damaged || self.file.read_at(part, at).is_err() {
                part.fill(0);
            }
            (at, rest) = (at + in_grain, behind);
        }
    }
}
