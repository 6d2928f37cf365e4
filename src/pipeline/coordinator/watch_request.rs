//! Watching an archive request that another coordinator runs.

use std::time::Duration;

use super::archive_request::{ArchiveEventSender, Coordinator, list_shard_roots};
use super::error::ArchiveError;
use crate::catalogue::record_access::{
    ArchiveRequest, archive_request_key, read_record, shard_state_key,
};
use crate::format::records::{ShardRoot, ShardState, StripeState};
use crate::id::{SaveId, StepRef};
use crate::wire::calls::ArchiveEvent;

/// Interval between two looks at an archive request that another coordinator runs.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

impl Coordinator {
    /// Reports the progress of an archive request that another coordinator runs. Returns when no
    /// live coordinator runs it any more, or when nobody listens to `events`.
    pub(super) async fn watch_request(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        events: &ArchiveEventSender,
    ) -> Result<(), ArchiveError> {
        let key = archive_request_key(step_ref);
        let roots = list_shard_roots(&*self.catalogue, save).await?;
        let mut unfinished_at_first = None;
        while !events.is_closed() {
            let unfinished = self.count_unfinished_bytes(&roots).await?;
            let total_bytes = *unfinished_at_first.get_or_insert(unfinished);
            let done_bytes = total_bytes.saturating_sub(unfinished);
            let _ = events.send(ArchiveEvent::Progress { done_bytes, total_bytes }).await;
            let request = read_record::<ArchiveRequest>(&*self.catalogue, &key).await?;
            let Some((request, _)) = request else { return Ok(()) };
            if !self.catalogue.is_lease_alive(request.lease).await? {
                return Ok(());
            }
            self.clock.sleep(WATCH_INTERVAL).await;
        }
        Ok(())
    }

    /// Returns the number of bytes of the stripes that are not archived, or not dropped.
    async fn count_unfinished_bytes(&self, roots: &[ShardRoot]) -> Result<u64, ArchiveError> {
        let mut unfinished = 0;
        for root in roots.iter().filter(|root| root.len_bytes > 0) {
            let state =
                read_record::<ShardState>(&*self.catalogue, &shard_state_key(root.shard)).await?;
            // A shard without a state was removed: nothing of it is left to archive.
            let Some((state, _)) = state else { continue };
            let geometry =
                root.geometry().map_err(|error| ArchiveError::Format(error.to_string()))?;
            let is_done =
                |state: StripeState| matches!(state, StripeState::Archived { dropped: true, .. });
            let open =
                (0..geometry.stripes()).zip(state.states()).filter(|(_, state)| !is_done(*state));
            let cuts = open.filter_map(|(index, _)| geometry.stripe(index));
            unfinished += cuts.map(|cut| cut.len_bytes).sum::<u64>();
        }
        Ok(unfinished)
    }
}
