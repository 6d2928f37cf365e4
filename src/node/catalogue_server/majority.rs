//! The rounds in which the catalogue server asks whether it may still change the catalogue
//! (docs/semantics.md, 8).

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::membership::{HELLO_LIMIT, Membership};
use crate::catalogue::Catalogue;
use crate::catalogue::local::LocalCatalogue;
use crate::format::records::Node as NodeRecord;
use crate::net::call::address;
use crate::node::context::NodeContext;
use crate::node::quorum::majority;
use crate::node::retry_schedule::{renewal_interval, scan_interval};
use crate::wire::NodeAddress;
use crate::wire::calls::ClaimEpoch;

/// Number of rounds in a row with too few nodes heard, after which the catalogue server makes no
/// changes until it hears enough nodes.
const MISSED_ROUNDS: u32 = 2;
/// Wait between two rounds while the catalogue is read-only.
const READ_ONLY_ROUND: Duration = Duration::from_millis(500);

/// Maximum number of nodes that introduced themselves but are not in the database, and that a new
/// catalogue server asks in a round.
const MAX_STRANGERS: usize = 16;

/// The service that lets the catalogue change only while a majority of the storage nodes obeys it.
pub(in crate::node) struct MajorityChecks {
    context: Arc<NodeContext>,
    membership: Arc<Membership>,
}

impl MajorityChecks {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>, membership: Arc<Membership>) -> Self {
        Self { context, membership }
    }

    /// Runs the rounds of the catalogue server. The catalogue accepts changes only while more than
    /// half of the storage nodes report that no other catalogue has begun. A rebuild needs more
    /// than half of them, too, so no two catalogues accept changes at the same time. Runs until the
    /// node stops.
    pub(in crate::node) async fn run_majority_checks(self: Arc<Self>) {
        let mut missed = 0;
        loop {
            let Some(local) = self.context.local_catalogue() else {
                self.context.clock.sleep(self.context.settings.lease).await;
                continue;
            };
            if self.context.catalogue_server.db_location().is_folder_gone() {
                self.context.catalogue_server.step_down_as_lost();
                continue;
            }
            let hears = self.claim_majority_or_step_down(&local).await;
            missed = if hears { 0 } else { missed + 1 };
            if local.is_read_only() && hears {
                tracing::info!(epoch = %local.epoch(), "more than half of the storage nodes obey this catalogue: this server accepts changes from now on");
                local.set_read_only(false);
            } else if !local.is_read_only() && missed >= MISSED_ROUNDS {
                tracing::warn!(epoch = %local.epoch(), "the catalogue accepts no changes until this daemon hears more than half of the storage nodes again");
                local.set_read_only(true);
            }
            let wait = if local.is_read_only() {
                READ_ONLY_ROUND
            } else {
                renewal_interval(self.context.settings.lease)
            };
            self.context.clock.sleep(wait).await;
        }
    }

    /// Tells the catalogue, while this node serves it, that this process runs. Runs until the node
    /// stops.
    pub(in crate::node) async fn run_heartbeats(self: Arc<Self>) {
        loop {
            if let Some(local) = self.context.local_catalogue() {
                local.note_heartbeat();
            }
            self.context.clock.sleep(scan_interval(self.context.settings.lease)).await;
        }
    }

    /// Asks the nodes in the database which epoch, database and revision they have noted. If a node
    /// has noted a later epoch, or another database of this epoch, records a later epoch on this
    /// node, which makes this server step down. This server also steps down if a node has heard of
    /// a later revision of this database. Claims this epoch on the nodes that have not noted it
    /// with this database: otherwise a daemon on a new disk would serve an empty catalogue beside
    /// this one. Returns whether more than half of the storage nodes obey this catalogue, or the
    /// database has no storage nodes.
    pub(in crate::node) async fn claim_majority_or_step_down(
        &self,
        local: &LocalCatalogue,
    ) -> bool {
        let Ok(nodes) = local.list_nodes().await else { return false };
        // A server that steps down must find the other server, and its only seed may be itself.
        self.context
            .remote
            .add_fallback_nodes(nodes.iter().map(|view| NodeAddress::of(&view.node)));
        let nodes: Vec<NodeRecord> = nodes.into_iter().map(|view| view.node).collect();
        if self.step_down_if_new_beside_another(local, &nodes).await {
            return false;
        }
        let storage = nodes.iter().filter(|node| node.storage).count();
        let (mut heard, mut behind) = (0, Vec::new());
        for (node, hello) in self.membership.exchange_hellos(&nodes).await {
            if hello.map == Some(local.db_id()) && hello.revision > local.revision() {
                self.context.catalogue_server.step_down_as_old_copy(
                    &node.name,
                    hello.revision,
                    local.revision(),
                );
                return false;
            }
            let is_other =
                hello.epoch == local.epoch() && hello.map.is_some_and(|map| map != local.db_id());
            if hello.epoch > local.epoch() || is_other {
                tracing::warn!(node = %node.name, epoch = %hello.epoch, "a node has noted another catalogue: this daemon is to stop serving its own");
                let noted = self.context.run_on_store(move |store| match hello.map {
                    Some(map) if !is_other => store.record_db_id(hello.epoch, map),
                    // Two databases have the same epoch: neither is served any more.
                    _ => store.raise_highest_seen_epoch(if is_other {
                        hello.epoch.next()
                    } else {
                        hello.epoch
                    }),
                });
                if let Err(error) = noted.await {
                    tracing::warn!(%error, "failed to store the later epoch");
                }
                return false;
            }
            // A node that has noted the epoch alone knows neither its database nor its server.
            if hello.epoch < local.epoch() || hello.map.is_none() {
                behind.push(node);
            } else {
                heard += usize::from(node.storage);
            }
        }
        let call = ClaimEpoch {
            epoch: local.epoch(),
            map: local.db_id(),
            home: self.context.own_address(),
        };
        let tells = behind.iter().map(|node| async {
            let to = NodeAddress::of(node);
            let told = self.context.caller.call_within(&address(&to), &call, HELLO_LIMIT).await;
            if let Err(error) = &told {
                tracing::info!(node = %node.name, %error, "failed to claim the epoch on a node");
            }
            // Until the claim succeeds, the node obeys an older catalogue, or another one of this
            // epoch if that claims first.
            usize::from(told.is_ok() && node.storage)
        });
        let heard = heard + join_all(tells).await.into_iter().sum::<usize>();
        self.context.catalogue_server.set_heard_counts(heard, storage);
        storage == 0 || heard >= majority(storage)
    }

    /// Steps down if this server was created on a new disk beside another catalogue of the cluster.
    /// Returns whether it did. Nodes that look for the catalogue introduce themselves here; the
    /// server asks them as long as no other node has registered with it. After that, a node that
    /// knows another catalogue proves nothing: the catalogue of this server may be the newer one.
    async fn step_down_if_new_beside_another(
        &self,
        local: &LocalCatalogue,
        nodes: &[NodeRecord],
    ) -> bool {
        if nodes.iter().any(|node| node.name != self.context.settings.name) {
            return false;
        }
        let mut strangers = self.membership.list_introduced();
        strangers.truncate(MAX_STRANGERS);
        for (node, hello) in self.membership.exchange_hellos(&strangers).await {
            if hello.map.is_some_and(|map| map != local.db_id()) && hello.epoch >= local.epoch() {
                self.context.catalogue_server.step_down_as_new(&node.name);
                return true;
            }
        }
        false
    }
}
