//! A stripe of a shard that this coordinator owns, with its record and the nodes as they are when a
//! try begins. Archiving and repair work on it.

use super::owned_shard::OwnedShard;
use super::{Coordinator, CoordinatorError};
use crate::pipeline::record_fetch::{self, StripeInfo};
use crate::topology::Directory;

/// A stripe of an owned shard.
pub(super) struct OwnedStripe<'a> {
    pub coordinator: &'a Coordinator,
    pub shard: &'a OwnedShard,
    /// The stripe's record.
    pub info: StripeInfo,
    /// The nodes that are registered.
    pub directory: Directory,
}

impl<'a> OwnedStripe<'a> {
    /// Fetches the record of stripe `index`, and the list of nodes.
    pub async fn open(
        coordinator: &'a Coordinator,
        shard: &'a OwnedShard,
        index: u32,
    ) -> Result<Self, CoordinatorError> {
        let directory = coordinator.fetch_directory().await?;
        let leaves = shard.fetch_leaves(coordinator, &directory).await?;
        let (caller, root) = (&coordinator.caller, &shard.root);
        let info =
            record_fetch::fetch_stripe_record(caller, &directory, root, leaves, index).await?;
        Ok(Self { coordinator, shard, info, directory })
    }

    /// Returns the number by which choices rotate. It grows by one from stripe to stripe, and from
    /// shard to shard.
    pub fn rotation(&self) -> usize {
        (self.info.fixed.stripe.shard.index().wrapping_add(self.index())) as usize
    }

    /// Returns the stripe's number in its shard.
    pub fn index(&self) -> u32 {
        self.info.fixed.stripe.index
    }
}
