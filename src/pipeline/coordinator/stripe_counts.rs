//! How many stripes of a save are archived, and of how many of these the replicas are dropped.

use super::Coordinator;
use super::error::CoordinatorError;
use crate::catalogue::record_access::{read_record, shard_state_key};
use crate::format::geometry::Geometry;
use crate::format::records::{ShardRoot, ShardState, StripeState};

/// The stripes of one or several shards by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StripeCounts {
    /// The stripes that are not archived.
    pub unarchived: u64,
    /// The archived stripes with replicas that are not confirmed as dropped.
    pub undropped: u64,
    /// The archived stripes without replicas.
    pub dropped: u64,
    /// The bytes of the stripes that are not archived, or not dropped.
    pub unfinished_bytes: u64,
}

impl StripeCounts {
    /// Returns the counts of one shard.
    pub(super) fn of_shard(root: &ShardRoot, state: &ShardState) -> Result<Self, CoordinatorError> {
        let geometry =
            root.geometry().map_err(|error| CoordinatorError::Format(error.to_string()))?;
        let mut counts = Self::default();
        counts.add_shard(&geometry, state.states());
        Ok(counts)
    }

    /// Adds the stripes of a shard. A stripe without a state counts as not archived.
    pub(super) fn add_shard(
        &mut self,
        geometry: &Geometry,
        states: impl IntoIterator<Item = StripeState>,
    ) {
        let mut states = states.into_iter();
        for index in 0..geometry.stripes() {
            let count = match states.next() {
                Some(StripeState::Archived { dropped: true, .. }) => {
                    self.dropped += 1;
                    continue;
                }
                Some(StripeState::Archived { .. }) => &mut self.undropped,
                _ => &mut self.unarchived,
            };
            *count += 1;
            self.unfinished_bytes += geometry.stripe(index).map_or(0, |cut| cut.len_bytes);
        }
    }

    /// Returns the number of archived stripes.
    pub(super) fn archived(&self) -> u64 {
        self.undropped + self.dropped
    }
}

impl Coordinator {
    /// Returns the counts of a shard's stripes according to the catalogue, or `None` if the shard is
    /// being removed or was removed.
    pub(super) async fn fetch_stripe_counts(
        &self,
        root: &ShardRoot,
    ) -> Result<Option<StripeCounts>, CoordinatorError> {
        let state = self.fetch_shard_state(root).await?.filter(|state| !state.deleting);
        state.map(|state| StripeCounts::of_shard(root, &state)).transpose()
    }

    /// Returns the state of a shard, or `None` if the shard was removed.
    pub(super) async fn fetch_shard_state(
        &self,
        root: &ShardRoot,
    ) -> Result<Option<ShardState>, CoordinatorError> {
        let key = shard_state_key(root.shard);
        let found = read_record::<ShardState>(&*self.catalogue, &key).await?;
        Ok(found.map(|(state, _)| state))
    }
}
