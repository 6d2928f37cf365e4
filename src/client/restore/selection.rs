//! The selection of a read: the bytes of each shard that are wanted, and the blocks and grains of
//! each stripe that hold them.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OnceCell;

use super::restore_request::RestoreRequest;
use crate::client::{Client, ClientError};
use crate::format::geometry::{Geometry, StripeCut};
use crate::format::records::{Leaves, ShardRoot, ShardState};
use crate::gf::FingerprintKey;
use crate::id::{ShardName, StepRef};
use crate::pipeline::read::Sink;
use crate::store::DiskError;
use crate::units::{GRAIN_BYTES, grains};

/// A range of a shard to read into a sink.
pub struct ReadRange {
    /// The shard.
    pub shard: ShardName,
    /// The range of bytes.
    pub range: Range<u64>,
    /// The sink that receives the bytes, with their offsets in the shard.
    pub sink: Arc<dyn Sink>,
}

/// A sink that keeps a range of a shard in memory.
pub struct MemorySink {
    from: u64,
    bytes: Mutex<Vec<u8>>,
}

impl MemorySink {
    /// Returns a sink for this range of a shard.
    pub fn new(range: Range<u64>) -> Self {
        let len_bytes = range.end.saturating_sub(range.start) as usize;
        Self { from: range.start, bytes: Mutex::new(vec![0; len_bytes]) }
    }

    /// Takes the bytes that were read.
    pub fn take_bytes(&self) -> Vec<u8> {
        std::mem::take(&mut *self.bytes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Sink for MemorySink {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut memory = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let at = shard_offset.checked_sub(self.from).and_then(|at| usize::try_from(at).ok());
        let into = at.and_then(|at| memory.get_mut(at..)?.get_mut(..bytes.len()));
        into.ok_or(io::ErrorKind::UnexpectedEof)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// The part of a request that concerns one shard.
pub(in crate::client) struct ShardSelection {
    pub(in crate::client) root: Arc<ShardRoot>,
    /// The states of the shard's stripes. `None` in a restore by a save record and for an open save:
    /// the nodes are then asked for the states.
    pub(in crate::client) state: Option<ShardState>,
    pub(in crate::client) key: Arc<FingerprintKey>,
    pub(in crate::client) range: Range<u64>,
    /// The temporary and the final name of the output file, relative to the output folder.
    pub(in crate::client) temporary: String,
    pub(in crate::client) path: String,
}

impl ShardSelection {
    /// Returns the error for `source`, which an operation on the output file returned.
    pub(in crate::client) fn output_error(&self, source: DiskError) -> ClientError {
        ClientError::Output { path: self.path.clone(), source }
    }
}

/// The blocks and grains of one stripe that a range touches.
#[derive(Clone)]
pub(in crate::client) struct StripeSlice {
    pub(in crate::client) stripe: u32,
    pub(in crate::client) blocks: Vec<u8>,
    pub(in crate::client) grains: Range<u64>,
}

/// Returns the blocks and grains of `cut` that hold bytes of `range`, a range of the shard. Returns
/// `None` if there are none.
fn slice_for_range(stripe: u32, cut: &StripeCut, range: &Range<u64>) -> Option<StripeSlice> {
    let from = range.start.max(cut.offset_bytes);
    let to = range.end.min(cut.offset_bytes + cut.len_bytes);
    if from >= to {
        return None;
    }
    let (from, to) = (from - cut.offset_bytes, to - cut.offset_bytes);
    let (first, last) = (from / cut.block_bytes, (to - 1) / cut.block_bytes);
    let grains = if first == last {
        let inside = first * cut.block_bytes;
        (from - inside) / GRAIN_BYTES..grains(to - inside)
    } else {
        0..cut.grains()
    };
    Some(StripeSlice { stripe, blocks: (first as u8..=last as u8).collect(), grains })
}

/// A slice that is to be planned, and the number of its part. The slices of a part share its
/// leaves, which are dropped with the last of these slices.
pub(super) struct PartSlice {
    pub(super) at: usize,
    pub(super) slice: StripeSlice,
    pub(super) leaves: Arc<OnceCell<Leaves>>,
}

/// The slices of all parts, in order. Each is made only when it is taken.
pub(super) struct PartSlices<'a> {
    parts: &'a [ShardSelection],
    geometries: Vec<Geometry>,
    at: usize,
    stripe: u32,
    leaves: Arc<OnceCell<Leaves>>,
}

impl<'a> PartSlices<'a> {
    pub(super) fn new(parts: &'a [ShardSelection]) -> Result<Self, ClientError> {
        let geometries = parts.iter().map(|part| part.root.geometry()).collect::<Result<_, _>>()?;
        Ok(Self { parts, geometries, at: 0, stripe: 0, leaves: Arc::default() })
    }
}

impl Iterator for PartSlices<'_> {
    type Item = PartSlice;

    fn next(&mut self) -> Option<PartSlice> {
        loop {
            let (part, geometry) = (self.parts.get(self.at)?, self.geometries.get(self.at)?);
            let Some(cut) = geometry.stripe(self.stripe) else {
                (self.at, self.stripe, self.leaves) = (self.at + 1, 0, Arc::default());
                continue;
            };
            self.stripe += 1;
            if let Some(slice) = slice_for_range(self.stripe - 1, &cut, &part.range) {
                return Some(PartSlice { at: self.at, slice, leaves: self.leaves.clone() });
            }
        }
    }
}

impl Client {
    /// Returns the parts of `shards` that `output` requests: all shards if it names none.
    pub(in crate::client) fn select_requested(
        &self,
        StepRef { job, step }: StepRef<'_>,
        shards: Vec<(ShardRoot, Option<ShardState>)>,
        output: Option<&RestoreRequest>,
    ) -> Result<Vec<ShardSelection>, ClientError> {
        let only = output.and_then(|output| output.shard.as_ref());
        let range = output.and_then(|output| output.range.clone());
        if range.is_some() && only.is_none() && shards.len() > 1 {
            return Err(ClientError::RangeOfMany);
        }
        let mut parts = Vec::new();
        for (root, state) in shards {
            if only.is_some_and(|only| *only != root.name) {
                continue;
            }
            let range = range.clone().unwrap_or(0..root.len_bytes);
            parts.push(self.select_shard_range(Arc::new(root), state, range)?);
        }
        match only {
            Some(name) if parts.is_empty() => {
                Err(ClientError::NoShard { job: job.clone(), step, name: name.clone() })
            }
            _ => Ok(parts),
        }
    }

    /// Returns the part of a shard that `range` selects, or [`ClientError::Range`] if the range is
    /// not within the shard.
    fn select_shard_range(
        &self,
        root: Arc<ShardRoot>,
        state: Option<ShardState>,
        range: Range<u64>,
    ) -> Result<ShardSelection, ClientError> {
        if range.start > range.end || range.end > root.len_bytes {
            let (name, len_bytes) = (root.name.clone(), root.len_bytes);
            return Err(ClientError::Range { name, from: range.start, to: range.end, len_bytes });
        }
        Ok(ShardSelection {
            key: Arc::new(FingerprintKey::derive(&root.fingerprint_key)),
            // The random number keeps two restores into one folder from sharing a temporary file.
            temporary: format!(".rapidraid-{}-{:016x}", root.shard, self.entropy().below(u64::MAX)),
            path: root.name.to_string(),
            root,
            state,
            range,
        })
    }

    /// Returns a part for each of `ranges`, in their order.
    pub(in crate::client) fn select_ranges(
        &self,
        StepRef { job, step }: StepRef<'_>,
        shards: Vec<(ShardRoot, Option<ShardState>)>,
        ranges: &[ReadRange],
    ) -> Result<Vec<ShardSelection>, ClientError> {
        let shards: BTreeMap<_, _> = shards
            .into_iter()
            .map(|(root, state)| (root.name.clone(), (Arc::new(root), state)))
            .collect();
        let parts = ranges.iter().map(|ReadRange { shard, range, .. }| {
            let found = shards.get(shard).ok_or_else(|| ClientError::NoShard {
                job: job.clone(),
                step,
                name: shard.clone(),
            })?;
            self.select_shard_range(found.0.clone(), found.1.clone(), range.clone())
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::geometry::Geometry;

    #[test]
    fn a_small_range_is_a_small_read() {
        let geometry = Geometry::checked(10_000_000, 1 << 20, 6, 4).unwrap();
        let cut = geometry.stripe(0).unwrap();
        let one = slice_for_range(0, &cut, &(1_048_576 + 70_000..1_048_576 + 70_001)).unwrap();
        assert_eq!((one.blocks, one.grains), (vec![1], 1..2));
        let two = slice_for_range(0, &cut, &(1_048_575..1_048_577)).unwrap();
        assert_eq!((two.blocks, two.grains), (vec![0, 1], 0..16));
        assert!(slice_for_range(1, &geometry.stripe(1).unwrap(), &(0..4_194_304)).is_none());
        assert!(slice_for_range(0, &cut, &(5..5)).is_none());
    }
}
