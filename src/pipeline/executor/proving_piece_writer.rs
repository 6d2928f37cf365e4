//! A piece that is being written. Each extent is synced and read back while writing continues, and
//! the bytes that were read back are fingerprinted.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::hop_error::HopError;
use crate::gf::{Fingerprint, FingerprintKey, GfError};
use crate::store::disk::AlignedBuffer;
use crate::store::{Extent, PieceWriter, StoreOutcome};
use crate::units::grains;
use crate::workers::Begun;

/// A piece that is being written, with the proof of its extents.
pub struct ProvingPieceWriter {
    writer: Mutex<Option<PieceWriter>>,
    proof: Mutex<ProofState>,
    /// The extent that is being proven; the next one waits for it.
    proving: tokio::sync::Mutex<Option<Begun<Result<(), HopError>>>>,
}

/// The fingerprints of the grains that were read back so far, and the read buffer.
struct ProofState {
    fingerprints: Vec<Fingerprint>,
    buffer: AlignedBuffer,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProvingPieceWriter {
    /// Returns the writer of a new piece of `len_bytes` bytes.
    pub fn new(writer: PieceWriter, len_bytes: u64) -> Self {
        let fingerprints = vec![Fingerprint::ZERO; grains(len_bytes) as usize];
        let proof = ProofState { fingerprints, buffer: Extent::new_read_back_buffer(len_bytes) };
        Self {
            writer: Mutex::new(Some(writer)),
            proof: Mutex::new(proof),
            proving: tokio::sync::Mutex::default(),
        }
    }

    /// Writes a grain. Returns an extent if one is complete now; the caller has to prove it.
    pub fn write(&self, grain: u64, bytes: &[u8]) -> Result<Option<Extent>, HopError> {
        let mut writer = locked(&self.writer);
        let writer =
            writer.as_mut().ok_or(HopError::Order { what: "a piece was finished too early" })?;
        writer.write_grain(grain, bytes)?;
        Ok(writer.take_extent_to_prove()?)
    }

    /// Syncs an extent, reads it back past the page cache, and fingerprints the bytes that were
    /// read.
    pub fn prove_extent(&self, key: &FingerprintKey, extent: Extent) -> Result<(), HopError> {
        let ProofState { fingerprints, buffer } = &mut *locked(&self.proof);
        let mut read_back = GrainFingerprinter { key, fingerprints, failed: None };
        extent.sync_and_verify_read_back(buffer, &mut |grain, bytes| {
            read_back.fingerprint_grain(grain, bytes)
        })?;
        read_back.into_result()
    }

    /// Waits until the previous extent is proven, then begins the next proof. A hop that writes
    /// faster than the disk waits here.
    pub async fn begin_next_proof(
        &self,
        begin: impl FnOnce() -> Begun<Result<(), HopError>>,
    ) -> Result<(), HopError> {
        let mut proving = self.proving.lock().await;
        if let Some(before) = proving.take() {
            before.end().await??;
        }
        *proving = Some(begin());
        Ok(())
    }

    /// Waits until no extent is being proven.
    pub async fn wait_for_proofs(&self) -> Result<(), HopError> {
        match self.proving.lock().await.take() {
            Some(begun) => begun.end().await?,
            None => Ok(()),
        }
    }

    /// Makes the piece durable. Returns the outcome, and the fingerprints of all grains as they
    /// were read back past the page cache.
    pub fn finish(
        &self,
        key: &FingerprintKey,
    ) -> Result<(StoreOutcome, Vec<Fingerprint>), HopError> {
        let writer = locked(&self.writer).take();
        let writer = writer.ok_or(HopError::Order { what: "a piece was finished twice" })?;
        let ProofState { fingerprints, .. } = &mut *locked(&self.proof);
        let mut read_back = GrainFingerprinter { key, fingerprints, failed: None };
        let stored =
            writer.finish(&mut |grain, bytes| read_back.fingerprint_grain(grain, bytes))?;
        read_back.into_result()?;
        Ok((stored, std::mem::take(fingerprints)))
    }
}

/// A consumer that fingerprints the grains read back from the medium.
pub struct GrainFingerprinter<'a> {
    /// The shard's key.
    pub key: &'a FingerprintKey,
    /// The fingerprints, one slot per grain.
    pub fingerprints: &'a mut [Fingerprint],
    /// The latest failure.
    pub failed: Option<GfError>,
}

impl GrainFingerprinter<'_> {
    /// Fingerprints one grain.
    pub fn fingerprint_grain(&mut self, grain: u64, bytes: &[u8]) {
        match (self.key.fingerprint(bytes), self.fingerprints.get_mut(grain as usize)) {
            (Ok(found), Some(slot)) => *slot = found,
            (Err(error), _) => self.failed = Some(error),
            // The grain is past the end. The writer has refused it before.
            (Ok(_), None) => {}
        }
    }

    /// Returns an error if a grain could not be fingerprinted.
    pub fn into_result(self) -> Result<(), HopError> {
        self.failed.map_or(Ok(()), |error| Err(error.into()))
    }
}
