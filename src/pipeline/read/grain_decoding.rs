//! The decoding, verification and delivery of one grain.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::ReadError;
use super::stripe_sources::StripeSources;
use crate::code::{CodeError, Program};
use crate::gf::Mode;
use crate::units::GRAIN_BYTES;

/// The destination of the bytes in `range` of the shard.
#[derive(Clone)]
pub(super) struct ReadTarget {
    pub(super) range: Range<u64>,
    pub(super) sink: Arc<dyn Sink>,
}

/// The destination of restored bytes. The calls may block; ranges come in any order.
pub trait Sink: Send + Sync + 'static {
    /// Writes `bytes` at byte `shard_offset` of the shard. The same bytes may be written again when
    /// the reading of a stripe starts over.
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()>;
}

impl StripeSources {
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
