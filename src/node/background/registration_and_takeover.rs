//! Registration of this node and renewal of its lease, the calls that it answers while it serves
//! the catalogue, and the takeover of archivings whose coordinator is gone.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};

use super::catch_up::CatchUpState;
use super::retry_schedule::{backoff, renewal_interval, scan_interval};
use crate::catalogue::database_format::REVISIONS_PER_EPOCH;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::record_access::{
    ARCHIVE_REQUESTS, ArchiveRequest, NODES, parse_archive_request_key, parse_record,
};
use crate::catalogue::{Catalogue, SetOutcome};
use crate::id::{DbId, LeaseId};
use crate::kind::ErrorKind;
use crate::net::{Peer, Role};
use crate::node::catalogue_server::cluster_inventory::node_address;
use crate::node::context::NodeContext;
use crate::node::rpc::remote_errors::remote_error;
use crate::node::{MAX_INTRODUCED, Node};
use crate::store::StoreError;
use crate::wire::RemoteError;
use crate::wire::calls::{
    CompareAndSetAnswer, CompareAndSetKey, GetKey, Hello, HelloAnswer, ListKeys, NodeStatusAnswer,
    RegisterAnswer, RegisterNode, RevokeLease, TouchLease,
};

/// Maximum number of archivings that one daemon takes over at once.
const TAKEN_AT_ONCE: usize = 4;
/// Maximum number of nodes to which a node introduces itself.
const INTRODUCED: usize = 32;
/// Shortest wait between two registrations, whatever lease the catalogue server grants.
const LEAST_RENEWAL: Duration = Duration::from_millis(50);

/// An archive request without a live coordinator: its revision, and when this node first saw it
/// there.
struct ObservedRequest {
    revision: u64,
    first_seen: Duration,
}

/// The service that registers this node. It notices when the node's entry in the catalogue is not
/// the one under which the node has caught up.
pub(in crate::node) struct Registration {
    context: Arc<NodeContext>,
    catching_up: Arc<CatchUpState>,
}

impl Registration {
    /// Creates the service. It makes a round of `catching_up` due when the node was off the list.
    pub(in crate::node) fn new(context: Arc<NodeContext>, catching_up: Arc<CatchUpState>) -> Self {
        Self { context, catching_up }
    }

    /// Registers this node, and checks before and after whether it was off the list. Returns the
    /// catalogue's answer.
    pub(in crate::node) async fn register_and_check(&self) -> Result<RegisterAnswer, RemoteError> {
        self.note_lost_registration().await?;
        let answer =
            self.context.catalogue().register_node(&self.context.own_node_record()).await?;
        self.note_lost_registration().await?;
        Ok(answer)
    }

    /// Compares this node's entry in the list of nodes with the entry in its catch-up record. A
    /// node that was taken off the list has missed commits and removals since, so it notes that it
    /// is behind. A rebuilt database has other entries for all nodes. A node keeps its record then,
    /// because a rebuild lists only nodes that were on the list. In both cases a round of catching
    /// up becomes due.
    pub(in crate::node) async fn note_lost_registration(&self) -> Result<(), RemoteError> {
        let noted = self
            .context
            .on_store(|store| Ok::<_, StoreError>(store.caught_up_registration()))
            .await?;
        let Some(noted) = noted else { return Ok(()) };
        let registered = self.fetch_registration_revision().await?;
        if registered == Some(noted) {
            return Ok(());
        }
        self.catching_up.request_catch_up();
        let epoch = |revision: u64| revision / REVISIONS_PER_EPOCH;
        if registered.is_none_or(|registered| epoch(registered) == epoch(noted)) {
            self.context.on_store(|store| store.record_behind()).await?;
            tracing::warn!("this node was off the list of nodes: it catches up again");
        }
        Ok(())
    }

    /// Returns the revision of this node's entry in the catalogue, or `None` if it has none.
    pub(in crate::node) async fn fetch_registration_revision(
        &self,
    ) -> Result<Option<u64>, RemoteError> {
        let key = format!("{NODES}{}", self.context.settings.name);
        Ok(self.context.catalogue().get(&key).await?.map(|entry| entry.revision))
    }
}

impl Node {
    pub(in crate::node) async fn record_introduction(
        &self,
        call: Hello,
        peer: &Peer,
    ) -> Result<HelloAnswer, RemoteError> {
        if let Some(node) = call.me.filter(|node| peer.role == Role::Node && peer.name == node.name)
        {
            // This node may have noted an epoch without its catalogue server, and may know no other
            // node to ask.
            self.context.remote.add_fallback_nodes([node_address(&node)]);
            let mut met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
            if met.len() < MAX_INTRODUCED || met.contains_key(&node.name) {
                met.insert(node.name.clone(), node);
            }
        }
        Ok(HelloAnswer {
            cluster: self.context.settings.cluster,
            node: self.context.settings.name.clone(),
            epoch: self.context.store.highest_seen_epoch(),
            map: self.context.store.last_db_id(),
            revision: self.context.store.revision_of_current_db(),
            catalogue: self.context.catalogue_server_address(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    pub(in crate::node) async fn get_node_status(&self) -> Result<NodeStatusAnswer, RemoteError> {
        let totals = self.context.store.totals();
        let space = self.context.store.disk_space()?;
        let budgets = [
            ("archive", &self.budgets.archive),
            ("save", &self.budgets.save),
            ("restore", &self.budgets.restore),
            ("control", &self.budgets.control),
            ("requests", &self.budgets.requests),
        ];
        let notes = self.collect_status_warnings(totals.quarantined).await?;
        Ok(NodeStatusAnswer {
            replicas: (totals.replica_files, totals.replica_bytes),
            pieces: (totals.piece_files, totals.piece_bytes),
            record_bytes: totals.small_bytes,
            quarantined: totals.quarantined,
            disk: (space.total_bytes, space.free_bytes),
            budgets: budgets
                .map(|(name, share)| {
                    (name.to_owned(), share.used_bytes(), share.peak_bytes(), share.total_bytes())
                })
                .to_vec(),
            peak_memory_bytes: crate::clock::peak_memory_bytes(),
            segmentation_offload: self.segmentation_offload,
            catalogue: self.context.local_catalogue().is_some(),
            notes,
        })
    }

    /// Registers this node, and renews the registration until the node stops.
    pub(in crate::node) async fn keep_registered(self: Arc<Self>) {
        let (mut told, mut has_registered) = (false, false);
        // The time of the last registration, and the id of the catalogue database that accepted it.
        let mut last = None;
        let mut members = None;
        loop {
            let mut lease = self.context.settings.lease;
            let registered = match self.may_be_unregistered(last) {
                true => self.registration.register_and_check().await,
                false => self
                    .context
                    .catalogue()
                    .register_node(&self.context.own_node_record())
                    .await
                    .map_err(RemoteError::from),
            };
            // A catalogue server that hears too few nodes accepts no registration, but it still
            // answers reads.
            let key = format!("{NODES}{}", self.context.settings.name);
            let answers = registered.is_ok() || self.context.catalogue().get(&key).await.is_ok();
            self.outage_cache.record_catalogue_answering(answers);
            match registered {
                Ok(answer) => {
                    if last.is_some_and(|(_, map)| map != answer.map)
                        && let Err(error) = self.registration.note_lost_registration().await
                    {
                        tracing::info!(%error, "failed to read this node's entry in the new catalogue");
                    }
                    last = Some((self.context.clock.now(), answer.map));
                    lease = lease.min(Duration::from_millis(answer.lease_ms));
                    let noted = self
                        .context
                        .on_store(move |store| store.record_db_id(answer.epoch, answer.map));
                    match noted.await {
                        Ok(()) => {
                            self.context.catalogue_server.clear_missing_state();
                            self.context.remote.set_expected_epoch(answer.epoch, Some(answer.map));
                            // The list is stored before the revision, so that it is never older
                            // than the revision that this node reports.
                            if members != Some((answer.map, answer.members)) {
                                match self.fetch_and_store_members().await {
                                    Ok(()) => members = Some((answer.map, answer.members)),
                                    Err(error) => {
                                        tracing::info!(%error, "failed to store the list of nodes");
                                    }
                                }
                            }
                            if members == Some((answer.map, answer.members)) {
                                let noted = self.context.on_store(move |store| {
                                    store.record_revision(answer.map, answer.revision)
                                });
                                if let Err(error) = noted.await {
                                    tracing::warn!(%error, "failed to store the catalogue's revision");
                                }
                            }
                        }
                        Err(error) => {
                            tracing::error!(%error, "registered, but failed to record the catalogue's epoch and database");
                        }
                    }
                    if !told {
                        self.has_returned.store(true, Ordering::Relaxed);
                        tracing::info!(node = %self.context.settings.name, epoch = %answer.epoch, "registered");
                    }
                    if !has_registered {
                        self.catching_up.request_catch_up();
                        self.spawn_until_stop(Self::introduce_itself);
                    }
                    (told, has_registered) = (true, true);
                }
                Err(error) => {
                    tracing::warn!(%error, "not registered");
                    told = false;
                }
            }
            self.executor.release_unused_parts();
            self.context.clock.sleep(renewal_interval(lease).max(LEAST_RENEWAL)).await;
        }
    }

    /// Returns whether this node may have been taken off the list since its `last` registration.
    /// A node can be taken off the list only after its lease has ended.
    fn may_be_unregistered(&self, last_registered: Option<(Duration, DbId)>) -> bool {
        let is_safe = |(at, _): (Duration, DbId)| {
            self.context.clock.now() < at + self.context.settings.lease / 2
        };
        !last_registered.is_some_and(is_safe)
    }

    /// Introduces this node to some of the other nodes. They read the list of nodes seconds later,
    /// and the catalogue may be down by then.
    async fn introduce_itself(self: Arc<Self>) {
        let Ok(nodes) = self.context.catalogue().list_nodes().await else { return };
        let mut nodes: Vec<_> = nodes.into_iter().map(|view| view.node).collect();
        // Each node introduces itself to those that follow it by name, so that the work is shared
        // evenly.
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let behind = nodes.iter().position(|node| node.name > self.context.settings.name);
        nodes.rotate_left(behind.unwrap_or_default());
        nodes.truncate(INTRODUCED);
        self.exchange_hellos(&nodes).await;
    }

    /// Takes over archivings whose coordinator is gone. Runs until the node stops.
    pub(in crate::node) async fn run_archiving_takeover(self: Arc<Self>) {
        let slots = Arc::new(Semaphore::new(TAKEN_AT_ONCE));
        let mut met = HashMap::new();
        loop {
            self.context.clock.sleep(scan_interval(self.context.settings.lease)).await;
            match self.take_over_archivings(&slots, &met).await {
                Ok(now_met) => met = now_met,
                Err(error) => {
                    tracing::warn!(%error, "failed to look for archivings whose coordinator is gone");
                }
            }
        }
    }

    /// Takes over archivings whose coordinator's lease is over. Several daemons may try; the
    /// compare-and-set lets one of them succeed. An archiving that failed is tried again after a
    /// wait that grows with its failures, counted from when this node first saw it in this state.
    /// Returns the archive requests that have no live coordinator, by key.
    async fn take_over_archivings(
        self: &Arc<Self>,
        slots: &Arc<Semaphore>,
        observed: &HashMap<String, ObservedRequest>,
    ) -> Result<HashMap<String, ObservedRequest>, RemoteError> {
        let catalogue = self.context.catalogue();
        let mut now_met = HashMap::new();
        let mut requests = KeyScan::of_prefix(&*catalogue, ARCHIVE_REQUESTS);
        while let Some((key, entry)) = requests.next().await? {
            let archiving: ArchiveRequest = parse_record(&key, &entry.value)?;
            let Some((job, step)) = parse_archive_request_key(&key) else { continue };
            if catalogue.is_lease_alive(archiving.lease).await? {
                continue;
            }
            let now = self.context.clock.now();
            let revision = entry.revision;
            let earlier = observed.get(&key).filter(|met| met.revision == revision);
            let at = earlier.map_or(now, |met| met.first_seen);
            now_met.insert(key, ObservedRequest { revision, first_seen: at });
            // A coordinator that died is not a failure of the archiving. Failures count only for a
            // request that waits for a retry.
            let failures = archiving.waiting.as_ref().map_or(0, |_| archiving.failures);
            if now < at.saturating_add(backoff(self.context.settings.lease, failures)) {
                continue;
            }
            let Ok(slot) = slots.clone().try_acquire_owned() else { continue };
            let coordinator = self.context.coordinator();
            self.spawn_until_stop(|_| async move {
                // No client watches this archiving, so its events are discarded.
                let (events, _) = mpsc::channel(1);
                let found = (archiving, revision);
                match coordinator.take_over_request(&job, step, found, &events).await {
                    Ok(()) => tracing::info!(%job, %step, "takeover ended"),
                    Err(error) => {
                        tracing::info!(%job, %step, %error, "takeover failed")
                    }
                }
                drop(slot);
            });
        }
        Ok(now_met)
    }

    pub(in crate::node) fn require_local_catalogue(
        &self,
    ) -> Result<Arc<LocalCatalogue>, RemoteError> {
        self.context.local_catalogue().ok_or_else(|| {
            remote_error(ErrorKind::Unavailable, "this node does not serve the catalogue")
        })
    }

    pub(in crate::node) async fn register_node(
        &self,
        call: RegisterNode,
    ) -> Result<RegisterAnswer, RemoteError> {
        Ok(self.require_local_catalogue()?.register_node(&call.node).await?)
    }

    pub(in crate::node) async fn get_key(
        &self,
        call: GetKey,
    ) -> Result<Option<(Vec<u8>, u64)>, RemoteError> {
        let entry = self.require_local_catalogue()?.get(&call.key).await?;
        Ok(entry.map(|entry| (entry.value, entry.revision)))
    }

    pub(in crate::node) async fn compare_and_set_key(
        &self,
        call: CompareAndSetKey,
    ) -> Result<CompareAndSetAnswer, RemoteError> {
        let outcome = self
            .require_local_catalogue()?
            .compare_and_set(&call.key, call.expected, call.value)
            .await?;
        Ok(match outcome {
            SetOutcome::Set(revision) => CompareAndSetAnswer::Set(revision),
            SetOutcome::Conflict(entry) => {
                CompareAndSetAnswer::Conflict(entry.map(|entry| (entry.value, entry.revision)))
            }
        })
    }

    pub(in crate::node) async fn list_keys(
        &self,
        call: ListKeys,
    ) -> Result<Vec<(String, Vec<u8>, u64)>, RemoteError> {
        let page = self
            .require_local_catalogue()?
            .list_entries(&call.prefix, call.after.as_deref(), call.limit)
            .await?;
        Ok(page.into_iter().map(|(key, entry)| (key, entry.value, entry.revision)).collect())
    }

    pub(in crate::node) async fn grant_lease(&self) -> Result<(LeaseId, u64), RemoteError> {
        let (lease, period) = self.require_local_catalogue()?.grant_lease().await?;
        Ok((lease, period.as_millis() as u64))
    }

    pub(in crate::node) async fn renew_or_check_lease(
        &self,
        call: TouchLease,
    ) -> Result<bool, RemoteError> {
        let catalogue = self.require_local_catalogue()?;
        Ok(match call.keep {
            true => catalogue.renew_lease(call.lease).await?,
            false => catalogue.is_lease_alive(call.lease).await?,
        })
    }

    pub(in crate::node) async fn revoke_lease(&self, call: RevokeLease) -> Result<(), RemoteError> {
        Ok(self.require_local_catalogue()?.revoke_lease(call.lease).await?)
    }
}
