//! Writes a piece from grains in any order, and proves it: what was written is read from the medium again.
//!
//! Syncs go behind the writer in extents, and each is synced and read back at once while the next one is written, so that only the
//! last is left when the chain ends. The order is what proves: written, synced, read *past the page cache*,
//! compared with the hash of what was written, and handed to the caller, who fingerprints it. The last grain
//! waits for the end: it can share a page with the hash table, and that page is written once more.
//!
//! Neighbouring grains are gathered and written past the page cache, which would only be filled for nobody: the read-back
//! passes it by, and the next reader comes days later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::StoreError;
use super::data_folder::Store;
use super::disk::{AlignedBuffer, DiskFile};
use super::temporary::{FileSpec, StoreOutcome, Temporary};
use crate::format::file::{Content, FileKey, MAX_TAIL_BYTES};
use crate::format::tree::{GrainTree, Hash, grain_hash, grain_len};
use crate::id::{Attempt, StripeId};
use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES, MIB, grains};

/// So many bytes are written before they are synced and read back.
const EXTENT_BYTES: u64 = 8 * MIB;
/// One write, and one read of the read-back.
const BUFFER_BYTES: u64 = MIB;

/// The most memory that one [`PieceWriter`] and one [`Extent`] hold: their buffers, hashes and numbers per grain, and the
/// tail when it ends.
pub const PIECE_WRITER_BYTES: u64 =
    2 * BUFFER_BYTES + 128 * grains(MAX_BLOCK_BYTES) + 5 * MAX_TAIL_BYTES;

/// Which piece is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceSpec {
    /// The stripe.
    pub stripe: StripeId,
    /// The piece's number, from 0.
    pub piece: u8,
    /// The archiving that makes it.
    pub attempt: Attempt,
    /// The id of the code.
    pub code: u64,
    /// The layout of the stripe.
    pub layout: u8,
    /// The length of the piece.
    pub len_bytes: u64,
}

/// Writes one piece. Dropping it before [`finish`](Self::finish) leaves nothing.
pub struct PieceWriter {
    temporary: Temporary,
    hashes: Vec<Option<Hash>>,
    /// Grains that are not proven yet, and the bytes written since the last sync.
    unsynced: Vec<u64>,
    unsynced_bytes: u64,
    extent_bytes: u64,
    /// How many grains came back as they were written.
    proven: Arc<AtomicU64>,
    /// Grains that are not written yet.
    buffer: AlignedBuffer,
    gathered: GatheredRun,
}

/// Whole grains in the buffer that follow one another.
#[derive(Debug, Clone, Copy, Default)]
struct GatheredRun {
    first: u64,
    count: u64,
}

impl Store {
    /// Begins to write a piece. Space for all of it is reserved now.
    pub fn write_piece(&self, spec: PieceSpec) -> Result<PieceWriter, StoreError> {
        let PieceSpec { stripe, piece, attempt, code, layout, len_bytes } = spec;
        let content = Content::Piece { piece, attempt, code };
        let temporary = Temporary::create(self, FileSpec { stripe, content, layout, len_bytes })?;
        Ok(PieceWriter {
            temporary,
            hashes: vec![None; grains(len_bytes) as usize],
            unsynced: Vec::new(),
            unsynced_bytes: 0,
            extent_bytes: EXTENT_BYTES,
            proven: Arc::default(),
            buffer: AlignedBuffer::new(BUFFER_BYTES.min(len_bytes) as usize),
            gathered: GatheredRun::default(),
        })
    }
}

impl PieceWriter {
    fn misuse(&self, why: &'static str) -> StoreError {
        StoreError::Misuse { key: self.temporary.key(), why }
    }

    /// How many bytes are an [`extent`](Self::extent); 8 MiB at first.
    pub fn set_extent_bytes(&mut self, extent_bytes: u64) {
        self.extent_bytes = extent_bytes;
    }

    /// Writes grain `index`, whole, once.
    pub fn write_grain(&mut self, index: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let hash = grain_hash(self.temporary.len_bytes(), index, bytes)
            .ok_or_else(|| self.misuse("a grain of the wrong length, or behind the end"))?;
        let slot = usize::try_from(index).ok().and_then(|at| self.hashes.get_mut(at));
        match slot {
            Some(slot @ None) => *slot = Some(hash),
            _ => return Err(self.misuse("a grain was given twice")),
        }
        self.unsynced.push(index);
        self.unsynced_bytes += bytes.len() as u64;
        self.gather(index, bytes)
    }

    fn gather(&mut self, index: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if (bytes.len() as u64) < GRAIN_BYTES {
            // The last grain, which may be no multiple of anything.
            return Ok(self.temporary.file().write_at(bytes, index * GRAIN_BYTES)?);
        }
        let GatheredRun { first, count } = self.gathered;
        let is_full = (count + 1) * GRAIN_BYTES > self.buffer.bytes().len() as u64;
        if is_full || index != first + count {
            self.write_gathered()?;
        }
        if self.gathered.count == 0 {
            self.gathered.first = index;
        }
        let from = (self.gathered.count * GRAIN_BYTES) as usize;
        self.buffer.bytes()[from..from + bytes.len()].copy_from_slice(bytes);
        self.gathered.count += 1;
        Ok(())
    }

    fn write_gathered(&mut self) -> Result<(), StoreError> {
        let GatheredRun { first, count } = std::mem::take(&mut self.gathered);
        if count > 0 {
            let bytes = &self.buffer.bytes()[..(count * GRAIN_BYTES) as usize];
            self.temporary.file().write_past_cache_at(bytes, first * GRAIN_BYTES)?;
        }
        Ok(())
    }

    /// When an extent has come together: what is to be proven now, while writing goes on.
    pub fn extent(&mut self) -> Result<Option<Extent>, StoreError> {
        if self.unsynced_bytes < self.extent_bytes {
            return Ok(None);
        }
        self.write_gathered()?;
        Ok(Some(self.unproven(Some(grains(self.temporary.len_bytes()).saturating_sub(1)))))
    }

    /// Proves what is left, hands it to `readback`, and makes the piece durable under its name, once all its extents are proven.
    /// `readback` has then had every grain once, those of one extent in ascending order.
    pub fn finish(
        mut self,
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<StoreOutcome, StoreError> {
        let hashes: Option<Vec<Hash>> = self.hashes.iter().copied().collect();
        let tree = hashes
            .and_then(|hashes| GrainTree::from_hashes(self.temporary.len_bytes(), hashes).ok())
            .ok_or_else(|| self.misuse("not every grain was written"))?;
        self.write_gathered()?;
        let tail = self.temporary.write_tail(&tree)?;
        self.temporary.file().sync()?;
        let last = self.unproven(None);
        last.read_back(&mut self.buffer, readback)?;
        if self.proven.load(Ordering::Acquire) != grains(self.temporary.len_bytes()) {
            return Err(self.misuse("a grain did not come back before: begin again"));
        }
        let mut found = AlignedBuffer::new(tail.bytes.len());
        let file = self.temporary.file();
        file.read_past_cache_at(found.bytes(), self.temporary.len_bytes())?;
        if *found.bytes() != tail.bytes {
            let (key, grain) = (self.temporary.key(), grains(self.temporary.len_bytes()));
            return Err(StoreError::ReadBack { key, grain });
        }
        self.temporary.publish(&tail)
    }

    /// What was written since the last extent, all but the grain `later`.
    fn unproven(&mut self, later: Option<u64>) -> Extent {
        let mut written = std::mem::take(&mut self.unsynced);
        self.unsynced_bytes = 0;
        written.retain(|grain| {
            let wait = Some(*grain) == later;
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
            proven: self.proven.clone(),
        }
    }
}

/// Part of a piece that is written: to be synced and read back.
pub struct Extent {
    file: Arc<dyn DiskFile>,
    key: FileKey,
    len_bytes: u64,
    /// In ascending order, with the hashes of what was written.
    grains: Vec<(u64, Option<Hash>)>,
    proven: Arc<AtomicU64>,
}

impl Extent {
    /// A buffer for [`prove`](Self::prove) of pieces of `len_bytes`.
    pub fn buffer(len_bytes: u64) -> AlignedBuffer {
        AlignedBuffer::new(BUFFER_BYTES.min(len_bytes) as usize)
    }

    /// Syncs the extent, reads it from the medium, compares it with what was written and hands each grain to `readback`.
    pub fn prove(
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
        runs.into_iter().try_for_each(|run| self.read_run(run, buffer, readback))
    }

    /// Reads neighbouring grains at once.
    fn read_run(
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
            self.proven.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }
}
