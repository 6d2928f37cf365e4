//! The stream of a stripe's grains. Grains are fetched one after the other, and decoded, verified
//! and delivered side by side.

use std::sync::Arc;

use bytes::Bytes;

use super::ReadError;
use super::source_reader::{OpenFile, RoundEnd};
use super::stripe_reader::{MAX_REPAIRED_GRAINS, ReadCursor, ReadTarget, StripeReader};
use crate::code::{CodeError, Program};
use crate::gf::Mode;
use crate::units::GRAIN_BYTES;
use crate::workers::InOrder;

/// Maximum number of grains of a stripe that are decoded, verified and written at once, while the
/// next one is fetched.
const GRAINS_AT_ONCE: usize = 4;

impl StripeReader {
    /// Fetches the remaining grains one by one. While the next grain comes, the grains that have
    /// come are decoded, verified and written, each on a core of its own. Without a `program`, the
    /// files are replicas of `blocks`.
    ///
    /// Returns early, with grains left in `progress`, after [`MAX_REPAIRED_GRAINS`] grains had to
    /// be read from other sources.
    pub(super) async fn read_grains(
        &self,
        mut files: Vec<OpenFile>,
        program: Option<Arc<Program>>,
        blocks: &[u8],
        progress: &mut ReadCursor,
        target: &ReadTarget,
    ) -> Result<(), RoundEnd> {
        let mut begun = InOrder::new(GRAINS_AT_ONCE);
        let (mut fetched, mut patches) = (Ok(()), 0);
        for grain in progress.left.clone() {
            let inputs = match self.read_grain_from_all(&mut files, grain).await {
                Ok(Some(inputs)) => inputs,
                Ok(None) => {
                    while let Some(done) = begun.next().await? {
                        done?;
                        progress.left.start += 1;
                    }
                    self.read_next_grain_elsewhere(blocks, progress, target).await?;
                    patches += 1;
                    // End the round: other sources may have less damage.
                    if patches == MAX_REPAIRED_GRAINS {
                        return Ok(());
                    }
                    continue;
                }
                Err(stop) => {
                    fetched = Err(stop);
                    break;
                }
            };
            let work =
                self.decode_verify_and_write_job(inputs, program.clone(), blocks, grain, target);
            if let Some(done) = begun.push(|| self.reading.workers.begin(work)).await? {
                done?;
                progress.left.start += 1;
            }
        }
        while let Some(done) = begun.next().await? {
            done?;
            progress.left.start += 1;
        }
        fetched
    }

    /// Returns a job that decodes one grain, checks each block against the fingerprint of the save,
    /// and writes the bytes that `target` wants.
    pub(super) fn decode_verify_and_write_job(
        &self,
        inputs: Vec<Bytes>,
        program: Option<Arc<Program>>,
        blocks: &[u8],
        grain: u64,
        target: &ReadTarget,
    ) -> impl FnOnce() -> Result<(), ReadError> + Send + 'static {
        let (info, key) = (self.info.clone(), self.key.clone());
        let (blocks, target) = (blocks.to_vec(), target.clone());
        move || {
            let decoded = match program {
                Some(program) => decode_grain(&program, &inputs, blocks.len())?,
                None => inputs,
            };
            let (cut, stripe) = (info.fixed.cut, info.fixed.stripe);
            for (block, bytes) in blocks.into_iter().zip(decoded) {
                let found = key.fingerprint(&bytes).ok();
                if found != Some(info.fixed.fingerprint(block.into(), grain)) {
                    return Err(ReadError::Decoded { stripe, grain });
                }
                let inside = grain * GRAIN_BYTES;
                let real = cut.block_len(block).saturating_sub(inside).min(bytes.len() as u64);
                let start = cut.offset_bytes + cut.block_offset(block) + inside;
                let (from, to) =
                    (target.range.start.max(start), target.range.end.min(start + real));
                if from < to {
                    let part = &bytes[(from - start) as usize..(to - start) as usize];
                    let written = target.sink.write_at(from, part);
                    written.map_err(|source| ReadError::Sink { offset: from, source })?;
                }
            }
            Ok(())
        }
    }
}

/// Decodes one grain. Returns the grain of each wanted block.
fn decode_grain(
    program: &Program,
    inputs: &[Bytes],
    block_count: usize,
) -> Result<Vec<Bytes>, CodeError> {
    let len = inputs.first().map_or(0, Bytes::len);
    let mut decoded = vec![vec![0; len]; block_count];
    let inputs: Vec<&[u8]> = inputs.iter().map(|bytes| &bytes[..]).collect();
    let mut targets: Vec<&mut [u8]> = decoded.iter_mut().map(|bytes| &mut bytes[..]).collect();
    program.run(&inputs, &mut targets, Mode::Overwrite)?;
    Ok(decoded.into_iter().map(Bytes::from).collect())
}
