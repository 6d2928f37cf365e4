//! Planning a read: finds the sources of every stripe before the first byte is delivered
//! (docs/semantics.md, 6).

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream;

use super::selection::{PartSlice, PartSlices, ShardSelection, StripeSlice};
use crate::client::{Client, ClientError};
use crate::format::records::{Leaves, ShardState, StripeState};
use crate::id::StripeId;
use crate::kind::ErrorKind;
use crate::pipeline::read::{
    NodesToAsk, ReadError, ReadSession, StripeReader, UnreadableStripe, find_stripe_state,
};
use crate::pipeline::record_fetch::{self, RecordsError};
use crate::wire::calls::GetShardState;

/// Number of stripes planned at once.
const PLANS_AT_ONCE: usize = 8;
/// Memory for the plans of a read, 90 kB for a stripe of 704 MiB. All stripes are planned before the
/// first is read. A plan for which there is no room is made again when its stripe is read.
const PLANS_BYTES: usize = 64 << 20;
/// Maximum number of changes of a stripe's state that a reader follows. The state moves forward
/// twice, but a state that is derived from the nodes may vary from time to time.
pub(in crate::client) const MAX_MOVES: u32 = 8;

/// A slice that can be read, and the state of its stripe for which it was planned.
pub(super) struct PlannedStripe {
    pub(super) slice: StripeSlice,
    pub(super) state: StripeState,
    /// `None` if there was no memory to keep the reader.
    pub(super) reader: Option<StripeReader>,
}

/// All slices of a read, in order, with the numbers of their parts.
#[derive(Default)]
pub(super) struct ReadPlan {
    pub(super) slices: Vec<(usize, PlannedStripe)>,
    /// Memory that the readers of `slices` take.
    readers_bytes: usize,
    /// Number of stripes that are read from replicas.
    pub(super) replica_stripes: u64,
    /// Number of stripes that are decoded from pieces.
    pub(super) decoded_stripes: u64,
}

impl ReadPlan {
    /// Adds a slice of part `at`. Its reader is dropped if there is no room for it.
    fn add(&mut self, at: usize, mut planned: PlannedStripe) {
        if let Some(reader) = &planned.reader {
            let is_decoded = reader.needs_decoding();
            *(if is_decoded { &mut self.decoded_stripes } else { &mut self.replica_stripes }) += 1;
            let with_it = self.readers_bytes + reader.memory_bytes();
            match with_it <= PLANS_BYTES {
                true => self.readers_bytes = with_it,
                false => planned.reader = None,
            }
        }
        self.slices.push((at, planned));
    }
}

impl Client {
    /// Plans a reader for each slice of each part. Reports all stripes that cannot be read in one
    /// [`ClientError::Lost`]. The slices of all parts are planned as one sequence, because most
    /// parts of a step of many small files have a single slice.
    pub(super) async fn plan_parts(
        &self,
        reading: &Arc<ReadSession>,
        parts: &[ShardSelection],
    ) -> Result<ReadPlan, ClientError> {
        let (mut lost, mut total) = (Vec::new(), 0);
        let mut plan = ReadPlan::default();
        let slices = PartSlices::new(parts)?;
        let mut plans = stream::iter(slices)
            .map(|next| async move {
                (next.at, self.plan_part_slice(reading, &parts[next.at], next).await)
            })
            .buffered(PLANS_AT_ONCE);
        while let Some((at, planned)) = plans.next().await {
            total += 1;
            match planned {
                Ok(planned) => plan.add(at, planned),
                Err(ClientError::Read(ReadError::Lost(one))) => lost.push(one),
                Err(error) => return Err(error),
            }
        }
        if lost.is_empty() { Ok(plan) } else { Err(ClientError::Lost { lost, total }) }
    }

    /// Plans a reader for a slice. Fetches the leaves of its part unless another slice has done so.
    async fn plan_part_slice(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        PartSlice { slice, leaves, .. }: PartSlice,
    ) -> Result<PlannedStripe, ClientError> {
        let leaves = leaves.get_or_try_init(|| self.fetch_leaves(reading, part)).await?;
        let state = match &part.state {
            Some(known) => known.stripe(slice.stripe),
            None => {
                let of = (&part.root, slice.stripe);
                Some(find_stripe_state(reading, of.0, of.1, NodesToAsk::Live).await)
            }
        };
        let state = state.unwrap_or(StripeState::Replicated);
        self.plan_slice(reading, part, leaves, &slice, state).await
    }

    /// Plans a reader for a stripe in `state`, or in the state that it has reached meanwhile.
    pub(super) async fn plan_slice(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        leaves: &Leaves,
        slice: &StripeSlice,
        mut state: StripeState,
    ) -> Result<PlannedStripe, ClientError> {
        let (mut moves, mut patience) = (0, reading.new_busy_retry());
        let (mut has_asked_nodes, mut is_by_nodes) = (part.state.is_none(), false);
        loop {
            let error = match self.plan_slice_in_state(reading, part, leaves, slice, state).await {
                Ok(reader) => {
                    let (slice, reader) = (slice.clone(), Some(reader));
                    return Ok(PlannedStripe { slice, state, reader });
                }
                Err(ClientError::Read(error)) => error,
                Err(error) => return Err(error),
            };
            let is_busy = matches!(error, ReadError::Busy { .. });
            if moves >= MAX_MOVES || !(is_busy || matches!(error, ReadError::Lost(_))) {
                return Err(error.into());
            }
            if is_busy && is_by_nodes {
                // The catalogue does not know this state yet, so asking it again yields nothing
                // new.
                if !patience.wait_unless_expired().await {
                    return Err(error.into());
                }
                continue;
            }
            is_by_nodes = false;
            match self.find_changed_state(reading, part, slice.stripe, state).await? {
                Some(next) => {
                    moves += 1;
                    state = next;
                }
                None if is_busy && patience.wait_unless_expired().await => {}
                // The nodes may have pieces that were proven before the commit point. These serve
                // as well, so derive the state from the nodes, once.
                None if !is_busy && !has_asked_nodes => {
                    has_asked_nodes = true;
                    let found =
                        find_stripe_state(reading, &part.root, slice.stripe, NodesToAsk::All).await;
                    if found == state || found == StripeState::Replicated {
                        return Err(error.into());
                    }
                    (state, is_by_nodes) = (found, true);
                }
                None => return Err(error.into()),
            }
        }
    }

    /// Returns the present state of a stripe if it differs from `known`. Returns `None` if the
    /// state is unchanged, or cannot be found out.
    pub(in crate::client) async fn find_changed_state(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        stripe: u32,
        known: StripeState,
    ) -> Result<Option<StripeState>, ClientError> {
        let shard = self.fetch_shard_state(reading, part).await?;
        let state = match part.state {
            Some(_) => shard.and_then(|shard| shard.stripe(stripe)),
            None => Some(find_stripe_state(reading, &part.root, stripe, NodesToAsk::All).await),
        };
        Ok(state.filter(|state| *state != known))
    }

    /// Fetches the leaves of a shard. Returns [`ClientError::Removed`] if no node has them because
    /// the step was removed.
    pub(in crate::client) async fn fetch_leaves(
        &self,
        reading: &ReadSession,
        part: &ShardSelection,
    ) -> Result<Leaves, ClientError> {
        let mut patience = reading.new_busy_retry();
        loop {
            match record_fetch::fetch_leaves(&reading.caller, &reading.directory, &part.root).await
            {
                Err(error @ RecordsError::Lost { .. }) => {
                    self.fetch_shard_state(reading, part).await?;
                    if error.kind() != ErrorKind::Busy || !patience.wait_unless_expired().await {
                        return Err(error.into());
                    }
                }
                leaves => return Ok(leaves?),
            }
        }
    }

    /// Fetches the state of a shard. Returns `None` if the catalogue does not answer, or if `part`
    /// has no state from a catalogue. Returns [`ClientError::Removed`] if the shard is gone.
    async fn fetch_shard_state(
        &self,
        reading: &ReadSession,
        part: &ShardSelection,
    ) -> Result<Option<ShardState>, ClientError> {
        let (job, step) = (&part.root.job, part.root.step);
        let gone = || ClientError::Removed { job: job.clone(), step };
        if part.state.is_none() {
            let is_gone = self.is_removed_anywhere(&reading.directory, part.root.save).await;
            return if is_gone { Err(gone()) } else { Ok(None) };
        }
        let Ok(shard) = self.call_gateway(&GetShardState { shard: part.root.shard }).await else {
            return Ok(None);
        };
        shard.filter(|shard| !shard.deleting).map(Some).ok_or_else(gone)
    }

    async fn plan_slice_in_state(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        leaves: &Leaves,
        slice: &StripeSlice,
        state: StripeState,
    ) -> Result<StripeReader, ClientError> {
        let (caller, directory) = (&reading.caller, &reading.directory);
        let info = match record_fetch::fetch_stripe_record(
            caller,
            directory,
            &part.root,
            leaves,
            slice.stripe,
        )
        .await
        {
            Err(error @ RecordsError::Lost { .. }) if error.kind() == ErrorKind::Busy => {
                let stripe = StripeId { shard: part.root.shard, index: slice.stripe };
                let (node, reason) = ("with its record".into(), error.to_string());
                return Err(ReadError::Busy { stripe, node, reason }.into());
            }
            Err(error @ RecordsError::Lost { .. }) => {
                return Err(ReadError::Lost(UnreadableStripe {
                    shard: part.root.name.to_string(),
                    stripe: slice.stripe,
                    needs: "its record".into(),
                    missing: vec![error.to_string()],
                })
                .into());
            }
            other => other?,
        };
        let receipt = match state {
            StripeState::Archived { attempt, .. } => {
                // Without the receipt the pieces can still be read. The decoded bytes are verified
                // in any case.
                let at = (slice.stripe, info.places.as_slice());
                record_fetch::fetch_receipt(caller, directory, &part.root, at, attempt).await.ok()
            }
            _ => None,
        };
        let (root, key) = (part.root.clone(), part.key.clone());
        let (blocks, grains) = (&slice.blocks, slice.grains.clone());
        let reading = reading.clone();
        let plan =
            StripeReader::probe_and_plan(reading, root, key, info, state, receipt, blocks, grains);
        Ok(plan.await?)
    }
}
