//! Writes a piece from grains in any order, and proves it: what was written is read from the medium again.
//!
//! Syncs go behind the writer in extents, and each synced extent is read back at once, so that only the last one
//! is left when the chain ends. The order is what proves: written, synced, read *past the page cache*,
//! compared with the hash of what was written, and handed to the caller, who fingerprints it. The last grain
//! waits for the end: it can share a page with the hash table, and that page is written once more.

use super::StoreError;
use super::disk::AlignedBuffer;
use super::folder::Store;
use super::temporary::{Plan, Stored, Temporary};
use crate::format::file::{Content, MAX_TAIL_BYTES};
use crate::format::tree::{GrainTree, Hash, grain_hash, grain_len};
use crate::id::{Attempt, StripeId};
use crate::units::{GRAIN_BYTES, MAX_BLOCK_BYTES, MIB, grains};

/// So many bytes are written before they are synced and read back.
const EXTENT_BYTES: u64 = 8 * MIB;
/// One read of the read-back.
const READ_BACK_BYTES: u64 = MIB;

/// The most memory that one [`PieceWriter`] holds: the read-back's buffer, a hash and a number per grain, and the
/// tail when it ends.
pub const PIECE_WRITER_BYTES: u64 =
    READ_BACK_BYTES + 64 * grains(MAX_BLOCK_BYTES) + 5 * MAX_TAIL_BYTES;

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
    proven: u64,
    buffer: AlignedBuffer,
}

impl Store {
    /// Begins to write a piece. Space for all of it is reserved now.
    pub fn write_piece(&self, spec: PieceSpec) -> Result<PieceWriter, StoreError> {
        let PieceSpec { stripe, piece, attempt, code, layout, len_bytes } = spec;
        let content = Content::Piece { piece, attempt, code };
        let temporary = Temporary::create(self, Plan { stripe, content, layout, len_bytes })?;
        Ok(PieceWriter {
            temporary,
            hashes: vec![None; grains(len_bytes) as usize],
            unsynced: Vec::new(),
            unsynced_bytes: 0,
            extent_bytes: EXTENT_BYTES,
            proven: 0,
            buffer: AlignedBuffer::new(READ_BACK_BYTES.min(len_bytes) as usize),
        })
    }
}

impl PieceWriter {
    fn misuse(&self, why: &'static str) -> StoreError {
        StoreError::Misuse { key: self.temporary.key(), why }
    }

    /// How many bytes [`advance`](Self::advance) lets come together before it syncs them; 8 MiB at first.
    pub fn set_extent_bytes(&mut self, extent_bytes: u64) {
        self.extent_bytes = extent_bytes;
    }

    /// Writes grain `index`, whole, once.
    pub fn write_grain(&mut self, index: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let hash = grain_hash(self.temporary.len_bytes(), index, bytes)
            .ok_or_else(|| self.misuse("a grain of the wrong length, or behind the end"))?;
        let slot = usize::try_from(index).ok().and_then(|at| self.hashes.get_mut(at));
        match slot {
            Some(slot @ None) => {
                self.temporary.file().write_at(bytes, index * GRAIN_BYTES)?;
                *slot = Some(hash);
            }
            _ => return Err(self.misuse("a grain was given twice")),
        }
        self.unsynced.push(index);
        self.unsynced_bytes += bytes.len() as u64;
        Ok(())
    }

    /// When an extent has come together: syncs it, reads it back and hands each grain to `readback`. Otherwise
    /// nothing. Gives the number of grains proven so far. To be called between writes.
    pub fn advance(&mut self, readback: &mut dyn FnMut(u64, &[u8])) -> Result<u64, StoreError> {
        if self.unsynced_bytes >= self.extent_bytes {
            self.temporary.file().sync()?;
            self.prove(Some(grains(self.temporary.len_bytes()).saturating_sub(1)), readback)?;
        }
        Ok(self.proven)
    }

    /// Proves what is left, hands it to `readback`, and makes the piece durable under its name. `readback` has
    /// then had every grain once, those of one extent in ascending order.
    pub fn finish(mut self, readback: &mut dyn FnMut(u64, &[u8])) -> Result<Stored, StoreError> {
        let hashes: Option<Vec<Hash>> = self.hashes.iter().copied().collect();
        let tree = hashes
            .and_then(|hashes| GrainTree::from_hashes(self.temporary.len_bytes(), hashes).ok())
            .ok_or_else(|| self.misuse("not every grain was written"))?;
        let tail = self.temporary.write_tail(&tree)?;
        self.temporary.file().sync()?;
        self.prove(None, readback)?;
        if self.proven != grains(self.temporary.len_bytes()) {
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

    /// Reads back what was written since the last sync, all but the grain `later`.
    fn prove(
        &mut self,
        later: Option<u64>,
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), StoreError> {
        let mut synced = std::mem::take(&mut self.unsynced);
        self.unsynced_bytes = 0;
        synced.retain(|grain| {
            let wait = Some(*grain) == later;
            if wait {
                self.unsynced.push(*grain);
            }
            !wait
        });
        synced.sort_unstable();
        let most = (READ_BACK_BYTES / GRAIN_BYTES) as usize;
        let runs = synced.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(most));
        runs.into_iter().try_for_each(|run| self.read_back(run, readback))
    }

    /// Reads neighbouring grains from the medium and compares them with what was written.
    fn read_back(
        &mut self,
        run: &[u64],
        readback: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), StoreError> {
        let (key, len_bytes) = (self.temporary.key(), self.temporary.len_bytes());
        let Some(first) = run.first() else { return Ok(()) };
        let bytes: u64 = run.iter().map(|grain| grain_len(len_bytes, *grain)).sum();
        let Some(buf) = self.buffer.bytes().get_mut(..bytes as usize) else {
            return Err(StoreError::Misuse { key, why: "a run longer than the buffer" });
        };
        self.temporary.file().read_past_cache_at(buf, first * GRAIN_BYTES)?;
        for (grain, bytes) in run.iter().copied().zip(buf.chunks(GRAIN_BYTES as usize)) {
            let written = self.hashes.get(grain as usize).copied().flatten();
            if written.is_none() || grain_hash(len_bytes, grain, bytes) != written {
                return Err(StoreError::ReadBack { key, grain });
            }
            readback(grain, bytes);
            self.proven += 1;
        }
        Ok(())
    }
}
