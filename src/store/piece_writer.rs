//! Writes a piece from grains in any order, and verifies it by reading everything back from the
//! medium.
//!
//! The grains are synced in extents. Each extent is synced and read back while the next one is
//! written, so that only the last extent is left after the last grain. The order of the steps makes
//! the result a proof: write, sync, read *past the page cache*, compare with the hash of the
//! written bytes, and pass to the caller, who fingerprints the bytes. The last grain waits for the
//! end, because it can share a page with the hash table, and that page is written once more.
//!
//! Neighbouring grains are gathered and written past the page cache. Caching them has no use: the
//! read-back bypasses the cache, and the next reader comes days later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::StoreError;
use super::data_folder::Store;
use super::disk::{AlignedBuffer, DiskFile};
use super::temporary_file::{FileSpec, StoreOutcome, TemporaryFile};
use crate::format::file::{Content, FileKey, MAX_TAIL_BYTES};
use crate::format::tree::{GrainTree, Hash, grain_hash, grain_len};
use crate::id::{Attempt, StripeId};
use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES, MIB, grains};

/// Number of bytes that are written before they are synced and read back.
const EXTENT_BYTES: u64 = 8 * MIB;
/// Length of one write and of one read of the read-back, in bytes.
const BUFFER_BYTES: u64 = MIB;

/// Maximum memory that one [`PieceWriter`] and one [`Extent`] hold together, in bytes: their
/// buffers, hashes and numbers per grain, and the tail at the end.
pub const PIECE_WRITER_BYTES: u64 =
    2 * BUFFER_BYTES + 128 * grains(MAX_BLOCK_BYTES) + 5 * MAX_TAIL_BYTES;

/// The piece to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceSpec {
    /// The stripe.
    pub stripe: StripeId,
    /// The piece's number, from 0.
    pub piece: u8,
    /// The attempt that makes it.
    pub attempt: Attempt,
    /// The id of the code.
    pub code: u64,
    /// The layout of the stripe.
    pub layout: u8,
    /// The length of the piece, in bytes.
    pub len_bytes: u64,
}

/// A writer of one piece. Dropping it before [`finish`](Self::finish) leaves nothing.
pub struct PieceWriter {
    temporary: TemporaryFile,
    hashes: Vec<Option<Hash>>,
    /// Numbers of the written grains that no extent has taken yet, and the number of bytes written
    /// since the last extent was taken.
    unsynced: Vec<u64>,
    unsynced_bytes: u64,
    min_extent_bytes: u64,
    /// Number of grains that were read back as written.
    proven_grains: Arc<AtomicU64>,
    /// The gathered grains, which are not written yet.
    buffer: AlignedBuffer,
    gathered: GatheredGrains,
}

/// A run of consecutive whole grains in the buffer.
#[derive(Debug, Clone, Copy, Default)]
struct GatheredGrains {
    first: u64,
    count: u64,
}

impl Store {
    /// Begins to write a piece and reserves space for all of it. Returns its writer.
    pub fn create_piece_writer(&self, spec: PieceSpec) -> Result<PieceWriter, StoreError> {
        let PieceSpec { stripe, piece, attempt, code, layout, len_bytes } = spec;
        let content = Content::Piece { piece, attempt, code };
        let temporary =
            TemporaryFile::create(self, FileSpec { stripe, content, layout, len_bytes })?;
        Ok(PieceWriter {
            temporary,
            hashes: vec![None; grains(len_bytes) as usize],
            unsynced: Vec::new(),
            unsynced_bytes: 0,
            min_extent_bytes: EXTENT_BYTES,
            proven_grains: Arc::default(),
            buffer: AlignedBuffer::new(BUFFER_BYTES.min(len_bytes) as usize),
            gathered: GatheredGrains::default(),
        })
    }
}

impl PieceWriter {
    fn misuse_error(&self, why: &'static str) -> StoreError {
        StoreError::Misuse { key: self.temporary.key(), why }
    }

    /// Sets the minimum length in bytes of an extent that
    /// [`take_extent_to_prove`](Self::take_extent_to_prove) returns. The default is 8 MiB.
    pub fn set_min_extent_bytes(&mut self, extent_bytes: u64) {
        self.min_extent_bytes = extent_bytes;
    }

    /// Writes the whole grain `index`.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] if the grain has the wrong length, lies past the end, or was given
    /// before.
    pub fn write_grain(&mut self, index: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let hash = grain_hash(self.temporary.len_bytes(), index, bytes)
            .ok_or_else(|| self.misuse_error("a grain of the wrong length, or behind the end"))?;
        let slot = usize::try_from(index).ok().and_then(|at| self.hashes.get_mut(at));
        match slot {
            Some(slot @ None) => *slot = Some(hash),
            _ => return Err(self.misuse_error("a grain was given twice")),
        }
        self.unsynced.push(index);
        self.unsynced_bytes += bytes.len() as u64;
        self.gather_or_write_grain(index, bytes)
    }

    fn gather_or_write_grain(&mut self, index: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if (bytes.len() as u64) < GRAIN_BYTES {
            // The last grain, whose length may not be aligned.
            return Ok(self.temporary.file().write_at(bytes, index * GRAIN_BYTES)?);
        }
        let GatheredGrains { first, count } = self.gathered;
        let is_full = (count + 1) * GRAIN_BYTES > self.buffer.bytes().len() as u64;
        if is_full || index != first + count {
            self.write_buffered_grains()?;
        }
        if self.gathered.count == 0 {
            self.gathered.first = index;
        }
        let from = (self.gathered.count * GRAIN_BYTES) as usize;
        self.buffer.bytes()[from..from + bytes.len()].copy_from_slice(bytes);
        self.gathered.count += 1;
        Ok(())
    }

    fn write_buffered_grains(&mut self) -> Result<(), StoreError> {
        let GatheredGrains { first, count } = std::mem::take(&mut self.gathered);
        if count > 0 {
            let bytes = &self.buffer.bytes()[..(count * GRAIN_BYTES) as usize];
            self.temporary.file().write_past_cache_at(bytes, first * GRAIN_BYTES)?;
        }
        Ok(())
    }

    /// Returns the extent to verify now, while writing continues, or `None` if too few bytes were
    /// written since the last extent was taken.
    pub fn take_extent_to_prove(&mut self) -> Result<Option<Extent>, StoreError> {
        if self.unsynced_bytes < self.min_extent_bytes {
            return Ok(None);
        }
        self.write_buffered_grains()?;
        Ok(Some(
            self.take_unproven_extent(Some(grains(self.temporary.len_bytes()).saturating_sub(1))),
        ))
    }

    /// Verifies the remaining grains, passes them to `readback` in ascending order, and makes the
    /// piece durable under its name. The caller verifies all extents that it took before it calls
    /// this. The callbacks of all extents together then have received every grain once.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] if a grain was not written, or an extent that was taken is not verified;
    /// [`StoreError::ReadBack`] if a grain or the tail differs from what was written.
    pub fn finish(
        mut self,
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<StoreOutcome, StoreError> {
        let hashes: Option<Vec<Hash>> = self.hashes.iter().copied().collect();
        let tree = hashes
            .and_then(|hashes| GrainTree::from_hashes(self.temporary.len_bytes(), hashes).ok())
            .ok_or_else(|| self.misuse_error("not every grain was written"))?;
        self.write_buffered_grains()?;
        let tail = self.temporary.write_tail(&tree)?;
        self.temporary.file().sync()?;
        let last = self.take_unproven_extent(None);
        last.read_back(&mut self.buffer, readback)?;
        if self.proven_grains.load(Ordering::Acquire) != grains(self.temporary.len_bytes()) {
            return Err(self.misuse_error("an earlier grain failed its read-back: begin again"));
        }
        let mut found = AlignedBuffer::new(tail.bytes.len());
        let file = self.temporary.file();
        file.read_past_cache_at(found.bytes(), self.temporary.len_bytes())?;
        if *found.bytes() != tail.bytes {
            let (key, grain) = (self.temporary.key(), grains(self.temporary.len_bytes()));
            return Err(StoreError::ReadBack { key, grain });
        }
        self.temporary.publish_under_key(&tail)
    }

    /// Returns an extent with everything that was written since the last extent was taken, except
    /// the grain `except_grain`.
    fn take_unproven_extent(&mut self, except_grain: Option<u64>) -> Extent {
        let mut written = std::mem::take(&mut self.unsynced);
        self.unsynced_bytes = 0;
        written.retain(|grain| {
            let wait = Some(*grain) == except_grain;
            if wait {
                self.unsynced.push(*grain);
            }
            !wait
        });
        written.sort_unstable();
        let hash = |grain: u64| self.hashes.get(grain as usize).copied().flatten();
        Extent {
            file: self.temporary.file().clone(),
            key: self.temporary.key(),
            len_bytes: self.temporary.len_bytes(),
            grains: written.into_iter().map(|grain| (grain, hash(grain))).collect(),
            proven_grains: self.proven_grains.clone(),
        }
    }
}

/// A written part of a piece that is still to be synced and read back.
pub struct Extent {
    file: Arc<dyn DiskFile>,
    key: FileKey,
    len_bytes: u64,
    /// The grains in ascending order, with the hashes of the written bytes.
    grains: Vec<(u64, Option<Hash>)>,
    proven_grains: Arc<AtomicU64>,
}

impl Extent {
    /// Returns a buffer for [`sync_and_verify_read_back`](Self::sync_and_verify_read_back) that
    /// suits pieces of `piece_len_bytes`.
    pub fn new_read_back_buffer(piece_len_bytes: u64) -> AlignedBuffer {
        AlignedBuffer::new(BUFFER_BYTES.min(piece_len_bytes) as usize)
    }

    /// Syncs the extent, reads its grains from the medium and compares each with the hash of what
    /// was written. Passes each grain that matches to `readback`; stops at the first that does not.
    ///
    /// # Errors
    /// [`StoreError::ReadBack`] for a grain that differs from what was written, or the error of the
    /// disk.
    pub fn sync_and_verify_read_back(
        self,
        buffer: &mut AlignedBuffer,
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), StoreError> {
        self.file.sync()?;
        self.read_back(buffer, readback)
    }

    fn read_back(
        &self,
        buffer: &mut AlignedBuffer,
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), StoreError> {
        let most = (BUFFER_BYTES / GRAIN_BYTES) as usize;
        let runs = self.grains.chunk_by(|a, b| a.0 + 1 == b.0).flat_map(|run| run.chunks(most));
        runs.into_iter().try_for_each(|run| self.read_back_run(run, buffer, readback))
    }

    /// Reads and checks a run of consecutive grains with one read.
    fn read_back_run(
        &self,
        run: &[(u64, Option<Hash>)],
        buffer: &mut AlignedBuffer,
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), StoreError> {
        let (key, len_bytes) = (self.key, self.len_bytes);
        let Some((first, _)) = run.first() else { return Ok(()) };
        let bytes: u64 = run.iter().map(|(grain, _)| grain_len(len_bytes, *grain)).sum();
        let Some(buf) = buffer.bytes().get_mut(..bytes as usize) else {
            return Err(StoreError::Misuse { key, why: "a run longer than the buffer" });
        };
        self.file.read_past_cache_at(buf, first * GRAIN_BYTES)?;
        for ((grain, written), bytes) in run.iter().copied().zip(buf.chunks(GRAIN_BYTES as usize)) {
            if written.is_none() || grain_hash(len_bytes, grain, bytes) != written {
                return Err(StoreError::ReadBack { key, grain });
            }
            readback(grain, bytes);
            self.proven_grains.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }
}
