//! The takeover of archivings whose coordinator is gone.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};

use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    ARCHIVE_REQUESTS, ArchiveRequest, parse_archive_request_key, parse_record,
};
use crate::id::NodeId;
use crate::node::context::NodeContext;
use crate::node::failure_log::FailureLog;
use crate::node::retry_schedule::{backoff, scan_interval};
use crate::wire::RemoteError;

/// Maximum number of archivings that one daemon takes over at once.
const TAKEN_AT_ONCE: usize = 4;
/// An archive request without a live coordinator: the revision of its key, and the time at which
/// this node first saw the request at that revision.
struct ObservedRequest {
    revision: u64,
    first_seen: Duration,
}

/// The service that takes over archivings whose coordinator is gone.
pub(in crate::node) struct ArchivingTakeover {
    context: Arc<NodeContext>,
}

impl ArchivingTakeover {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Takes over archivings whose coordinator is gone. Runs until the node stops.
    pub(in crate::node) async fn run_archiving_takeover(self: Arc<Self>) {
        let slots = Arc::new(Semaphore::new(TAKEN_AT_ONCE));
        let (mut met, mut live) = (HashMap::new(), BTreeSet::new());
        let mut scan_failures = FailureLog::default();
        loop {
            self.context.clock.sleep(scan_interval(self.context.settings.lease)).await;
            match self.take_over_archivings(&slots, &met, &mut live).await {
                Ok(now_met) => {
                    met = now_met;
                    if scan_failures.record_success() {
                        tracing::info!(
                            "the scan for archivings whose coordinator is gone is complete again"
                        );
                    }
                }
                Err(error) => {
                    if let Some(failures) = scan_failures.record_failure(self.context.clock.now()) {
                        tracing::warn!(%error, failures, "the scan for archivings whose coordinator is gone ended early: those that it did not reach wait for the next scan");
                    }
                }
            }
        }
    }

    /// Takes over archivings that no live coordinator works on. Several daemons may try; the
    /// compare-and-set of the archive request lets one of them succeed. An archiving that failed is
    /// tried again after a wait that grows with its failures. The wait begins when this node first
    /// sees the request at its present revision. It ends early when a node is live that was not in
    /// `live`, because the archiving may wait for that node. Returns, by key, the archive requests that have no
    /// live coordinator or do not parse.
    async fn take_over_archivings(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        observed: &HashMap<String, ObservedRequest>,
        live: &mut BTreeSet<NodeId>,
    ) -> Result<HashMap<String, ObservedRequest>, RemoteError> {
        let catalogue = self.context.catalogue();
        let is_node_back = note_live_nodes(&*catalogue, live).await?;
        let mut now_met = HashMap::new();
        let mut requests = KeyScan::of_prefix(&*catalogue, ARCHIVE_REQUESTS);
        while let Some((key, entry)) = requests.next().await? {
            // One damaged record must not end the takeover of all other requests.
            let archiving: ArchiveRequest = match parse_record(&key, &entry.value) {
                Ok(archiving) => archiving,
                Err(error) => {
                    if !observed.contains_key(&key) {
                        tracing::error!(key, %error, "an archive request does not parse: no daemon takes it over");
                    }
                    let (revision, first_seen) = (entry.revision, self.context.clock.now());
                    now_met.insert(key, ObservedRequest { revision, first_seen });
                    continue;
                }
            };
            let Some((job, step)) = parse_archive_request_key(&key) else { continue };
            if archiving.has_coordinator(&*catalogue).await? {
                continue;
            }
            let now = self.context.clock.now();
            let revision = entry.revision;
            let earlier = observed.get(&key).filter(|met| met.revision == revision);
            // A request that another daemon has just tried has another revision, and waits.
            let is_wait_over = is_node_back && earlier.is_some();
            let at = earlier.map_or(now, |met| met.first_seen);
            now_met.insert(key, ObservedRequest { revision, first_seen: at });
            // A coordinator that died is not a failure of the archiving. Failures count only for a
            // request that waits for a retry.
            let failures = archiving.waiting.as_ref().map_or(0, |_| archiving.failures);
            let due = at.saturating_add(backoff(self.context.settings.lease, failures));
            if now < due && !is_wait_over {
                continue;
            }
            let Ok(slot) = slots.clone().try_acquire_owned() else { continue };
            let coordinator = self.context.coordinator();
            self.context.tasks.spawn_until_stop(async move {
                // No client watches this archiving, so its events are discarded.
                let (events, _) = mpsc::channel(1);
                let found = (archiving, revision);
                match coordinator.take_over_and_run_request(job.at(step), found, &events).await {
                    Ok(()) => {
                        tracing::info!(%job, %step, "the takeover of an archiving ended without an error")
                    }
                    Err(error) => {
                        tracing::info!(%job, %step, %error, "failed to take over the archiving or to finish it")
                    }
                }
                drop(slot);
            });
        }
        Ok(now_met)
    }
}

/// Puts the nodes that are live now into `live`. Returns whether one of them was not there before.
async fn note_live_nodes(
    catalogue: &dyn Catalogue,
    live: &mut BTreeSet<NodeId>,
) -> Result<bool, RemoteError> {
    let nodes = catalogue.list_nodes().await?.into_iter().filter(|view| view.live);
    let now_live = nodes.map(|view| NodeId::of(&view.node.name)).collect();
    let before = std::mem::replace(live, now_live);
    Ok(!live.is_subset(&before))
}
