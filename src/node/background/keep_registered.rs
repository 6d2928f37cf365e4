//! Registration of this node in the catalogue, and the renewal of its lease.

use std::sync::Arc;
use std::time::Duration;

use super::replica_gc::ReplicaGc;
use crate::id::DbId;
use crate::node::catalogue_server::membership::Membership;
use crate::node::context::NodeContext;
use crate::node::failure_log::FailureLog;
use crate::node::registration::{CatchUpRequests, Registration};
use crate::node::retry_schedule::renewal_interval;
use crate::pipeline::executor::Executor;
use crate::wire::calls::RegisterAnswer;

/// Maximum number of nodes to which a node introduces itself.
const INTRODUCED: usize = 32;
/// Shortest wait between two registrations, whatever lease the catalogue server grants.
const LEAST_RENEWAL: Duration = Duration::from_millis(50);

/// The progress of this node's registrations.
#[derive(Default)]
struct RegistrationProgress {
    /// The time of the last registration, and the id of the database that accepted it.
    last: Option<(Duration, DbId)>,
    /// The id of the database whose list of nodes and ring changes this node stored last, and
    /// [`RegisterAnswer::members`] of that time.
    stored_members: Option<(DbId, u64)>,
    /// Whether the last try succeeded.
    is_registered: bool,
    has_registered_before: bool,
}

/// The service that keeps this node registered.
pub(in crate::node) struct RegistrationRenewal {
    context: Arc<NodeContext>,
    executor: Arc<Executor>,
    registration: Arc<Registration>,
    catching_up: Arc<CatchUpRequests>,
    membership: Arc<Membership>,
    replica_gc: Arc<ReplicaGc>,
}

impl RegistrationRenewal {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        executor: Arc<Executor>,
        registration: Arc<Registration>,
        catching_up: Arc<CatchUpRequests>,
        membership: Arc<Membership>,
        replica_gc: Arc<ReplicaGc>,
    ) -> Self {
        Self { context, executor, registration, catching_up, membership, replica_gc }
    }

    /// Registers this node, and renews the registration until the node stops.
    pub(in crate::node) async fn keep_registered(self: Arc<Self>) {
        let (mut progress, mut failures) = (RegistrationProgress::default(), FailureLog::default());
        loop {
            let registered = match self.may_be_unregistered(progress.last) {
                true => self.registration.register_and_note_absence().await,
                false => self.registration.register().await,
            };
            // A catalogue server that hears too few nodes accepts no registration, but it still
            // answers reads.
            let answers =
                registered.is_ok() || self.registration.fetch_registration_revision().await.is_ok();
            match answers {
                true => self.context.catalogue_contact.record_answer(),
                false => self.context.catalogue_contact.record_silence(),
            }
            let mut lease = self.context.settings.lease;
            match registered {
                Ok(answer) => {
                    lease = lease.min(Duration::from_millis(answer.lease_ms));
                    self.record_registration(&answer, &mut progress).await;
                    self.start_work_after_registration(&answer, &mut progress);
                    failures.record_success();
                }
                Err(error) => {
                    if let Some(failures) = failures.record_failure(self.context.clock.now()) {
                        tracing::warn!(%error, failures, "failed to register this node or to renew its registration; retrying");
                    }
                    progress.is_registered = false;
                }
            }
            self.executor.release_unused_parts();
            self.context.clock.sleep(renewal_interval(lease).max(LEAST_RENEWAL)).await;
        }
    }

    /// Records on disk and in memory which catalogue has registered this node.
    async fn record_registration(
        &self,
        answer: &RegisterAnswer,
        progress: &mut RegistrationProgress,
    ) {
        let (epoch, db_id) = (answer.epoch, answer.map);
        if progress.last.is_some_and(|(_, db_id_of_highest_epoch)| db_id_of_highest_epoch != db_id)
            && let Err(error) = self.registration.request_catch_up_if_unlisted().await
        {
            tracing::info!(%error, "failed to read this node's entry in the new catalogue");
        }
        progress.last = Some((self.context.clock.now(), db_id));
        if let Err(error) =
            self.context.run_on_store(move |store| store.record_db_id(epoch, db_id)).await
        {
            tracing::error!(%error, "registered, but failed to record the catalogue's epoch and database");
            return;
        }
        self.context.catalogue_server.clear_reason();
        self.context.remote.set_expected_epoch(epoch, Some(db_id));
        self.record_members_and_revision(answer, progress).await;
    }

    /// Stores the list of nodes if it has changed, and then the catalogue's revision, so that the
    /// list is never older than the revision that this node reports.
    async fn record_members_and_revision(
        &self,
        answer: &RegisterAnswer,
        progress: &mut RegistrationProgress,
    ) {
        let (db_id, revision) = (answer.map, answer.revision);
        let members = Some((db_id, answer.members));
        if progress.stored_members != members {
            if let Err(error) = self.membership.fetch_and_store_members().await {
                tracing::info!(%error, "failed to store the list of nodes");
                return;
            }
            // This node may have been taken off the list and be on it again. Its clock, which
            // `may_be_unregistered` trusts, may have stood still meanwhile.
            if let Err(error) = self.registration.request_catch_up_if_unlisted().await {
                tracing::info!(%error, "failed to compare this node's entry in the list of nodes");
                return;
            }
            progress.stored_members = members;
        }
        let recorded =
            self.context.run_on_store(move |store| store.record_revision(db_id, revision));
        if let Err(error) = recorded.await {
            tracing::warn!(%error, "failed to store the catalogue's revision");
        }
    }

    /// After the first registration, and after one that follows failures, logs the registration and
    /// requests a full scan for unreferenced files. After the first registration, also makes a
    /// round of catching up due and introduces this node to others.
    fn start_work_after_registration(
        self: &Arc<Self>,
        answer: &RegisterAnswer,
        progress: &mut RegistrationProgress,
    ) {
        if !progress.is_registered {
            self.replica_gc.request_full_scan();
            tracing::info!(node = %self.context.settings.name, catalogue_epoch = %answer.epoch, "registered");
        }
        if !progress.has_registered_before {
            self.catching_up.request();
            self.context.tasks.spawn_until_stop(self.clone().introduce_to_next_nodes());
        }
        (progress.is_registered, progress.has_registered_before) = (true, true);
    }

    /// Returns whether this node may have been taken off the list since its last registration.
    /// A node can be taken off the list only after its lease has ended.
    fn may_be_unregistered(&self, last_registered: Option<(Duration, DbId)>) -> bool {
        let is_safe = |(at, _): (Duration, DbId)| {
            self.context.clock.now() < at + self.context.settings.lease / 2
        };
        !last_registered.is_some_and(is_safe)
    }

    /// Introduces this node to some of the other nodes. Without this, they would learn of it only
    /// when they next read the list of nodes, seconds later, and the catalogue may be down by then.
    async fn introduce_to_next_nodes(self: Arc<Self>) {
        let Ok(nodes) = self.context.catalogue().list_nodes().await else { return };
        let mut nodes: Vec<_> = nodes.into_iter().map(|view| view.node).collect();
        // Each node introduces itself to those that follow it by name, so that the work is shared
        // evenly.
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let behind = nodes.iter().position(|node| node.name > self.context.settings.name);
        nodes.rotate_left(behind.unwrap_or_default());
        nodes.truncate(INTRODUCED);
        self.membership.exchange_hellos(&nodes).await;
    }
}
