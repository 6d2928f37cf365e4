//! Watching an archive request that another coordinator runs.

use std::collections::HashMap;
use std::time::Duration;

use super::archive_request::{ArchiveEventSender, Coordinator, list_shard_roots};
use super::error::CoordinatorError;
use super::stripe_counts::StripeCounts;
use crate::catalogue::CatalogueError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    ArchiveRequest, archive_request_key, parse_record, read_record, shard_state_key,
    shard_states_prefix,
};
use crate::format::geometry::Geometry;
use crate::format::records::ShardState;
use crate::id::{NodeId, SaveId, StepRef};
use crate::wire::calls::ArchiveEvent;

/// Interval between two looks at an archive request that another coordinator runs.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The end of a watch.
pub(super) enum WatchOutcome {
    /// All stripes are archived, or nobody listens any more.
    Finished,
    /// No live coordinator runs the request, and stripes are left.
    Vacant,
    /// The request waits for a retry.
    Waiting {
        /// The node whose coordinator failed.
        node: NodeId,
        /// The reason of the failure.
        reason: String,
    },
}

impl Coordinator {
    /// Reports the progress of an archive request that another coordinator runs, until it ends.
    /// Returns how it ended. A catalogue that does not answer for a while does not end the watch.
    pub(super) async fn watch_request(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        events: &ArchiveEventSender,
    ) -> Result<WatchOutcome, CoordinatorError> {
        let roots = list_shard_roots(&*self.catalogue, save).await?;
        let mut geometries = HashMap::new();
        for root in roots.iter().filter(|root| root.len_bytes > 0) {
            let geometry =
                root.geometry().map_err(|error| CoordinatorError::Format(error.to_string()));
            geometries.insert(shard_state_key(root.shard), geometry?);
        }
        let mut unfinished_at_first = None;
        while !events.is_closed() {
            match self.fetch_counts_and_outcome(step_ref, save, &geometries).await {
                Ok((counts, outcome)) => {
                    let total_bytes = *unfinished_at_first.get_or_insert(counts.unfinished_bytes);
                    let done_bytes = total_bytes.saturating_sub(counts.unfinished_bytes);
                    let _ = events.send(ArchiveEvent::Progress { done_bytes, total_bytes }).await;
                    if let Some(WatchOutcome::Finished) = outcome {
                        let (stripes, undropped) = (counts.archived(), counts.undropped);
                        let _ = events.send(ArchiveEvent::Done { stripes, undropped }).await;
                    }
                    if let Some(outcome) = outcome {
                        return Ok(outcome);
                    }
                }
                Err(error) if error.kind().is_transient() => {
                    tracing::info!(%step_ref, %error, "cannot read the progress of an archiving from the catalogue; retrying");
                }
                Err(error) => return Err(error.into()),
            }
            self.clock.sleep(WATCH_INTERVAL).await;
        }
        Ok(WatchOutcome::Finished)
    }

    /// Returns the counts of the save's stripes, and the outcome of the request if nobody runs it.
    async fn fetch_counts_and_outcome(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
        geometries: &HashMap<String, Geometry>,
    ) -> Result<(StripeCounts, Option<WatchOutcome>), CatalogueError> {
        // The request is read first: if it is gone, the states that are read afterwards are final.
        let key = archive_request_key(step_ref);
        let request = read_record::<ArchiveRequest>(&*self.catalogue, &key).await?;
        let request = request.map(|(request, _)| request).filter(|request| request.save == save);
        let is_run = match &request {
            Some(request) => request.has_coordinator(&*self.catalogue).await?,
            None => false,
        };
        let counts = self.count_stripes(save, geometries).await?;
        let outcome = match request.and_then(|request| Some((request.node, request.waiting?))) {
            _ if is_run => None,
            _ if counts.unarchived == 0 => Some(WatchOutcome::Finished),
            Some((node, reason)) => Some(WatchOutcome::Waiting { node, reason }),
            None => Some(WatchOutcome::Vacant),
        };
        Ok((counts, outcome))
    }

    /// Counts the stripes of a save whose shards have these `geometries`, by the keys of their
    /// states. A shard without a state was removed: nothing of it is left to archive.
    async fn count_stripes(
        &self,
        save: SaveId,
        geometries: &HashMap<String, Geometry>,
    ) -> Result<StripeCounts, CatalogueError> {
        let mut counts = StripeCounts::default();
        let mut states = KeyScan::of_prefix(&*self.catalogue, shard_states_prefix(save));
        while let Some((key, entry)) = states.next().await? {
            let Some(geometry) = geometries.get(&key) else { continue };
            let shard: ShardState = parse_record(&key, &entry.value)?;
            counts.add_shard(geometry, shard.states());
        }
        Ok(counts)
    }
}
