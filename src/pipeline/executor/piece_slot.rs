//! A piece while it is written: each extent is synced and read back beside the writing, and what came back is fingerprinted.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::hop_error::HopError;
use crate::gf::{Fingerprint, FingerprintKey, GfError};
use crate::store::disk::AlignedBuffer;
use crate::store::{Extent, PieceWriter, StoreOutcome};
use crate::units::grains;
use crate::workers::Begun;

/// A piece while it is written.
pub struct PieceSlot {
    writer: Mutex<Option<PieceWriter>>,
    proof: Mutex<ProofState>,
    /// The extent that is being proven; the next one waits for it.
    proving: tokio::sync::Mutex<Option<Begun<Result<(), HopError>>>>,
}

/// What was read back so far, and the buffer for it.
struct ProofState {
    fingerprints: Vec<Fingerprint>,
    buffer: AlignedBuffer,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PieceSlot {
    /// The slot of a new piece of `len_bytes`.
    pub fn new(writer: PieceWriter, len_bytes: u64) -> Self {
        let fingerprints = vec![Fingerprint::ZERO; grains(len_bytes) as usize];
        let proof = ProofState { fingerprints, buffer: Extent::buffer(len_bytes) };
        Self {
            writer: Mutex::new(Some(writer)),
            proof: Mutex::new(proof),
            proving: tokio::sync::Mutex::default(),
        }
    }

    /// Writes a grain; an extent that is whole now is to be proven.
    pub fn write(&self, grain: u64, bytes: &[u8]) -> Result<Option<Extent>, HopError> {
        let mut writer = locked(&self.writer);
        let writer =
            writer.as_mut().ok_or(HopError::Order { what: "a piece was finished too early" })?;
        writer.write_grain(grain, bytes)?;
        Ok(writer.extent()?)
    }

    /// Syncs an extent and fingerprints what is read back past the page cache.
    pub fn prove(&self, key: &FingerprintKey, extent: Extent) -> Result<(), HopError> {
        let ProofState { fingerprints, buffer } = &mut *locked(&self.proof);
        let mut read_back = ReadBack { key, fingerprints, failed: None };
        extent.prove(buffer, &mut |grain, bytes| read_back.take(grain, bytes))?;
        read_back.result()
    }

    /// Begins to prove an extent when the one before is proven: whoever writes faster than the disk waits here.
    pub async fn join_last_proof(
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

    /// Makes the piece durable; answers with the fingerprints of all that was read back past the page cache.
    pub fn finish(
        &self,
        key: &FingerprintKey,
    ) -> Result<(StoreOutcome, Vec<Fingerprint>), HopError> {
        let writer = locked(&self.writer).take();
        let writer = writer.ok_or(HopError::Order { what: "a piece was finished twice" })?;
        let ProofState { fingerprints, .. } = &mut *locked(&self.proof);
        let mut read_back = ReadBack { key, fingerprints, failed: None };
        let stored = writer.finish(&mut |grain, bytes| read_back.take(grain, bytes))?;
        read_back.result()?;
        Ok((stored, std::mem::take(fingerprints)))
    }
}

/// Fingerprints grains that come back from the medium.
pub struct ReadBack<'a> {
    /// The shard's key.
    pub key: &'a FingerprintKey,
    /// One slot a grain.
    pub fingerprints: &'a mut [Fingerprint],
    /// The first failure.
    pub failed: Option<GfError>,
}

impl ReadBack<'_> {
    /// One grain.
    pub fn take(&mut self, grain: u64, bytes: &[u8]) {
        match (self.key.fingerprint(bytes), self.fingerprints.get_mut(grain as usize)) {
            (Ok(found), Some(slot)) => *slot = found,
            (Err(error), _) => self.failed = Some(error),
            // Past the end: the writer has refused it before.
            (Ok(_), None) => {}
        }
    }

    /// Whether all went well.
    pub fn result(self) -> Result<(), HopError> {
        self.failed.map_or(Ok(()), |error| Err(error.into()))
    }
}
