//! Writes a replica from a stream of bytes and hashes it grain by grain on the way.

use super::StoreError;
use super::data_folder::Store;
use super::error::root_mismatch_error;
use super::temporary_file::{FileSpec, StoreOutcome, TemporaryFile};
use crate::format::file::{Content, MAX_TAIL_BYTES};
use crate::format::tree::{GrainTree, Hash, grain_hash, grain_len};
use crate::id::StripeId;
use crate::units::GRAIN_BYTES;

/// Maximum memory that one [`BlockWriter`] holds, in bytes: one grain, the hashes and, at the end,
/// the tail (its own, and that of a file that may already have the name).
pub const BLOCK_WRITER_BYTES: u64 = GRAIN_BYTES + 4 * MAX_TAIL_BYTES;

/// A callback that receives each grain of a block, with its number, once and in order.
pub type FingerprintFn = Box<dyn FnMut(u64, &[u8]) + Send>;

/// The replica to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSpec {
    /// The stripe.
    pub stripe: StripeId,
    /// The block's number, from 0.
    pub block: u8,
    /// The layout of the stripe.
    pub layout: u8,
    /// The length of the block without padding, in bytes.
    pub len_bytes: u64,
}

/// A writer of one replica. Dropping it before [`finish`](Self::finish) leaves nothing.
pub struct BlockWriter {
    temporary: TemporaryFile,
    fingerprint: Option<FingerprintFn>,
    hashes: Vec<Hash>,
    /// The received part of the next grain, always shorter than the grain.
    partial: Vec<u8>,
    /// Set after a failed write: the contents of the file are unknown.
    has_failed: bool,
}

impl Store {
    /// Begins to write a replica and reserves space for all of it. Returns its writer.
    pub fn create_block_writer(
        &self,
        spec: BlockSpec,
        fingerprint: Option<FingerprintFn>,
    ) -> Result<BlockWriter, StoreError> {
        let content = Content::Replica { block: spec.block };
        let BlockSpec { stripe, layout, len_bytes, .. } = spec;
        let temporary =
            TemporaryFile::create(self, FileSpec { stripe, content, layout, len_bytes })?;
        Ok(BlockWriter {
            temporary,
            fingerprint,
            hashes: Vec::new(),
            partial: Vec::new(),
            has_failed: false,
        })
    }
}

impl BlockWriter {
    fn misuse_error(&self, why: &'static str) -> StoreError {
        StoreError::Misuse { key: self.temporary.key(), why }
    }

    fn received_bytes(&self) -> u64 {
        self.hashes.len() as u64 * GRAIN_BYTES + self.partial.len() as u64
    }

    /// Appends the next bytes, in any number.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] if there are more bytes than announced, or a write failed before.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        if self.has_failed {
            return Err(self.misuse_error("a write has failed before: begin again"));
        }
        if bytes.len() as u64 > self.missing_bytes() {
            return Err(self.misuse_error("more bytes than announced"));
        }
        self.has_failed = true;
        let done = self.append_by_grains(bytes);
        self.has_failed = done.is_err();
        done
    }

    /// Returns the number of bytes that are still missing.
    pub fn missing_bytes(&self) -> u64 {
        // A short last grain counts as a whole one in `received_bytes`, which may therefore exceed
        // the length.
        self.temporary.len_bytes().saturating_sub(self.received_bytes())
    }

    fn append_by_grains(&mut self, mut bytes: &[u8]) -> Result<(), StoreError> {
        while !bytes.is_empty() {
            let grain = grain_len(self.temporary.len_bytes(), self.hashes.len() as u64) as usize;
            if self.partial.is_empty()
                && let Some((whole, rest)) = bytes.split_at_checked(grain)
            {
                self.write_grain(whole)?;
                bytes = rest;
                continue;
            }
            let (now, rest) = bytes.split_at(bytes.len().min(grain - self.partial.len()));
            self.partial.extend_from_slice(now);
            bytes = rest;
            if self.partial.len() == grain {
                let mut whole = std::mem::take(&mut self.partial);
                self.write_grain(&whole)?;
                whole.clear();
                self.partial = whole;
            }
        }
        Ok(())
    }

    fn write_grain(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let index = self.hashes.len() as u64;
        let hash = grain_hash(self.temporary.len_bytes(), index, bytes)
            .ok_or_else(|| self.misuse_error("a grain of the wrong length"))?;
        if let Some(fingerprint) = &mut self.fingerprint {
            fingerprint(index, bytes);
        }
        self.temporary.file().write_at(bytes, index * GRAIN_BYTES)?;
        self.hashes.push(hash);
        Ok(())
    }

    /// Makes the replica durable under its name. `expected_root` is the root that the sender
    /// announced, if it announced one.
    ///
    /// # Errors
    /// [`StoreError::Root`] if the root differs from the announced one, and [`StoreError::Misuse`]
    /// if bytes are missing; nothing is left behind.
    pub fn finish(mut self, expected_root: Option<Hash>) -> Result<StoreOutcome, StoreError> {
        if self.has_failed || self.missing_bytes() > 0 {
            return Err(self.misuse_error("fewer bytes than announced"));
        }
        let key = self.temporary.key();
        let hashes = std::mem::take(&mut self.hashes);
        let tree = GrainTree::from_hashes(self.temporary.len_bytes(), hashes)
            .map_err(|_| self.misuse_error("fewer bytes than announced"))?;
        if let Some(expected) = expected_root.filter(|expected| *expected != tree.root()) {
            return Err(root_mismatch_error(key, expected, tree.root()));
        }
        let tail = self.temporary.write_tail(&tree)?;
        self.temporary.file().sync()?;
        self.temporary.publish_under_key(&tail)
    }
}
