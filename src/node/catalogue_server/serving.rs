//! The decision whether this daemon serves the catalogue, and whether it may change it
//! (docs/semantics.md, 8).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;

use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::{Catalogue, CatalogueError};
use crate::format::records::{Members, Node as NodeRecord};
use crate::id::{Epoch, PeerName};
use crate::net::call::address;
use crate::node::Node;
use crate::node::quorum::majority;
use crate::node::retry_schedule::renewal_interval;
use crate::store::{CatalogueStorage, Kv, Store};
use crate::wire::NodeAddress;
use crate::wire::calls::{CHANGES_NOTHING, ClaimEpoch, Hello, HelloAnswer};

/// Time limit for a node to answer with its epoch. A node that exceeds it is not counted.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// Number of rounds in a row with too few nodes heard, after which the catalogue server makes no
/// changes until it hears enough nodes.
const MISSED_ROUNDS: u32 = 2;
/// Wait between two rounds while the catalogue is read-only.
const READ_ONLY_ROUND: Duration = Duration::from_millis(500);
/// Maximum number of nodes that are asked at once.
const AT_ONCE: usize = 32;

/// The catalogue server of a daemon, which may or may not serve the catalogue.
pub(in crate::node) struct CatalogueServer {
    state: Mutex<ServingState>,
    db_location: Arc<dyn CatalogueStorage>,
    /// Number of storage nodes that were heard in the last round, and number of all storage nodes.
    heard: Mutex<(usize, usize)>,
}

enum ServingState {
    /// The daemon has no database, or one that must not be used. With the reason, if an operator
    /// needs to know it.
    NotServing(Option<String>),
    /// The daemon should have a database and has none. With the reason.
    Missing(String),
    /// The daemon has a database. It is read-only until enough nodes have reported that no other
    /// catalogue has begun.
    Serving(Arc<LocalCatalogue>),
}

/// The function that opens a database as a catalogue.
type OpenCatalogue<'a> = &'a dyn Fn(Arc<dyn Kv>) -> Result<LocalCatalogue, CatalogueError>;

impl CatalogueServer {
    /// Opens the database of this daemon. If there is none, one is created only if `begin` is set
    /// and the data folder has never seen an epoch. Returns the server, whether or not it serves a
    /// catalogue. With a full disk, or a catalogue that is lost, incomplete or damaged, it serves
    /// none.
    ///
    /// # Errors
    /// If the database cannot be created, or cannot be opened for another reason than these.
    pub(in crate::node) fn open_or_create(
        maps: Arc<dyn CatalogueStorage>,
        may_create: bool,
        seen_epoch: Epoch,
        open: OpenCatalogue<'_>,
    ) -> Result<Self, CatalogueError> {
        let is_new = seen_epoch == Epoch::default();
        let gone = || CatalogueError::StaleDatabase { seen: seen_epoch, found: Epoch::default() };
        let existing = maps.open_existing();
        if let Err(error) = &existing
            && error.is_disk_full()
        {
            // The database is intact, and opens when there is room. No new one is created in its
            // place.
            tracing::error!(%error, "the disk has no room for the catalogue database: the catalogue is not served");
            let why = format!(
                "the disk has no room for the catalogue database ({error}): free space and start the daemon again"
            );
            return Ok(Self {
                state: Mutex::new(ServingState::NotServing(Some(why))),
                db_location: maps,
                heard: Mutex::default(),
            });
        }
        let opened = match existing {
            Ok(Some(kv)) => open(kv).map(Some),
            Ok(None) if may_create && is_new => open(maps.move_aside_and_create()?).map(Some),
            Ok(None) if may_create => Err(gone()),
            Ok(None) => Ok(None),
            Err(error) => Err(error.into()),
        };
        let state = match opened {
            Ok(Some(local)) => {
                // A new catalogue has no nodes to ask yet. Nodes that know another database do not
                // register with it.
                local.set_read_only(!is_new);
                ServingState::Serving(Arc::new(local))
            }
            Ok(None) => ServingState::NotServing(None),
            Err(
                error @ (CatalogueError::StaleDatabase { .. }
                | CatalogueError::Incomplete { .. }
                | CatalogueError::Damaged { .. }),
            ) => {
                tracing::error!(%error, "this daemon does not serve the catalogue");
                match error {
                    CatalogueError::StaleDatabase { found, .. } if found == Epoch::default() => {
                        ServingState::Missing(error.to_string())
                    }
                    _ => ServingState::NotServing(Some(error.to_string())),
                }
            }
            Err(error) => return Err(error),
        };
        Ok(Self { state: Mutex::new(state), db_location: maps, heard: Mutex::default() })
    }

    fn lock_state(&self) -> std::sync::MutexGuard<'_, ServingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::node) fn db_location(&self) -> &Arc<dyn CatalogueStorage> {
        &self.db_location
    }

    /// Returns the catalogue if this daemon serves it. If the node has noted a later epoch, or
    /// another database of the same epoch, the daemon steps down here, and this returns `None`.
    pub(in crate::node) fn served_or_step_down(
        &self,
        store: &Store,
    ) -> Option<Arc<LocalCatalogue>> {
        let mut state = self.lock_state();
        let ServingState::Serving(local) = &*state else { return None };
        let (epoch, map) = (store.highest_seen_epoch(), store.last_db_id());
        let is_other = epoch == local.epoch() && map.is_some_and(|map| map != local.db_id());
        if epoch <= local.epoch() && !is_other {
            return Some(local.clone());
        }
        let why = format!(
            "the catalogue here is of epoch {}, which is over: epoch {epoch} has begun elsewhere; the folder can be removed",
            local.epoch()
        );
        tracing::warn!(why, "stepping down");
        *state = ServingState::NotServing(Some(why));
        None
    }

    /// Steps down because the database is an old copy of the cluster's. It is not served.
    fn step_down_as_old_copy(&self, node: &PeerName, heard_revision: u64, own_revision: u64) {
        let why = format!(
            "the catalogue here is an old copy (revision {own_revision}; {node} has heard of revision {heard_revision}): it is not served, and nothing is deleted; rebuild it with `rapidraid catalogue rebuild`"
        );
        tracing::error!(why, "stepping down");
        *self.lock_state() = ServingState::NotServing(Some(why));
    }

    /// Steps down because the database was removed under the running daemon. It would answer for as
    /// long as the process lives, but nothing that it writes would last.
    fn step_down_as_lost(&self) {
        let why = "the folder catalogue/ was removed while this daemon ran: it serves no catalogue any more; rebuild it with `rapidraid catalogue rebuild`";
        tracing::error!(why, "stepping down");
        *self.lock_state() = ServingState::Missing(why.to_owned());
    }

    /// Makes this daemon serve `local` from now on.
    pub(in crate::node) fn start_serving(&self, local: Arc<LocalCatalogue>) {
        *self.lock_state() = ServingState::Serving(local);
    }

    /// Clears the state [`ServingState::Missing`], because this node is a member of a catalogue
    /// that another daemon serves. The lack of a database here then needs no repair.
    pub(in crate::node) fn clear_missing_state(&self) {
        let mut state = self.lock_state();
        if matches!(&*state, ServingState::Missing(_)) {
            *state = ServingState::NotServing(None);
        }
    }

    fn set_heard_counts(&self, heard: usize, storage_count: usize) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = (heard, storage_count);
    }

    /// Returns the warning that an operator should see, if there is one.
    pub(in crate::node) fn serving_warning(&self) -> Option<String> {
        match &*self.lock_state() {
            ServingState::NotServing(why) => why.clone(),
            ServingState::Missing(why) => Some(why.clone()),
            ServingState::Serving(local) if local.is_read_only() => {
                let (heard, all) = *self.heard.lock().unwrap_or_else(PoisonError::into_inner);
                let needed = majority(all);
                Some(format!(
                    "{CHANGES_NOTHING}: it hears {heard} of {all} storage nodes, {needed} are needed"
                ))
            }
            ServingState::Serving(_) => None,
        }
    }
}

impl Node {
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
            let hears = self.check_and_claim_majority(&local).await;
            missed = if hears { 0 } else { missed + 1 };
            if local.is_read_only() && hears {
                tracing::info!(epoch = %local.epoch(), "the catalogue is served");
                local.set_read_only(false);
            } else if !local.is_read_only() && missed >= MISSED_ROUNDS {
                tracing::warn!(epoch = %local.epoch(), "the catalogue changes nothing: too few nodes are heard");
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

    /// Asks the nodes in the database for their epochs. If a node has a later epoch or another
    /// database, notes that, and this server steps down. Claims the epoch on the nodes that have
    /// not heard of it: otherwise a daemon on a new disk would serve an empty catalogue beside this
    /// one. Returns whether more than half of the storage nodes obey this catalogue, or there are
    /// none.
    pub(in crate::node) async fn check_and_claim_majority(&self, local: &LocalCatalogue) -> bool {
        let Ok(nodes) = local.list_nodes().await else { return false };
        // A server that steps down must find the other server, and its only seed may be itself.
        self.context
            .remote
            .add_fallback_nodes(nodes.iter().map(|view| NodeAddress::of(&view.node)));
        let nodes: Vec<NodeRecord> = nodes.into_iter().map(|view| view.node).collect();
        let storage = nodes.iter().filter(|node| node.storage).count();
        let (mut heard, mut behind) = (0, Vec::new());
        for (node, hello) in self.exchange_hellos(&nodes).await {
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
                tracing::warn!(node = %node.name, epoch = %hello.epoch, "another catalogue has begun");
                let noted = self.context.on_store(move |store| match hello.map {
                    Some(map) if !is_other => store.record_db_id(hello.epoch, map),
                    // Two databases have the same epoch: neither is served any more.
                    _ => store.raise_epoch(if is_other { hello.epoch.next() } else { hello.epoch }),
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

    /// Introduces this node to `nodes`. Returns those that belong to this cluster and answer in
    /// time with a plausible epoch, with their answers.
    pub(in crate::node) async fn exchange_hellos(
        &self,
        nodes: &[NodeRecord],
    ) -> Vec<(NodeRecord, HelloAnswer)> {
        let ask = |node: NodeRecord| async move {
            let to = NodeAddress::of(&node);
            let hello = self
                .context
                .caller
                .call_within(
                    &address(&to),
                    &Hello { me: Some(self.context.own_node_record()) },
                    HELLO_LIMIT,
                )
                .await
                .ok()?;
            let seen = self.context.store.highest_seen_epoch();
            if !hello.epoch.is_near(seen) {
                tracing::error!(node = %node.name, epoch = %hello.epoch, %seen, "the node reports an implausible epoch: its answer is ignored");
                return None;
            }
            (hello.cluster == self.context.settings.cluster).then_some((node, hello))
        };
        let asks: Vec<_> = nodes.iter().cloned().map(ask).collect();
        let mut asks = stream::iter(asks).buffer_unordered(AT_ONCE);
        let mut answers = Vec::new();
        while let Some(answer) = asks.next().await {
            answers.extend(answer);
        }
        answers
    }

    /// Stores the list of nodes, to be used when no catalogue answers.
    pub(in crate::node) async fn fetch_and_store_members(
        &self,
    ) -> Result<(), crate::wire::RemoteError> {
        let met_before: Vec<PeerName> = {
            let met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
            met.keys().cloned().collect()
        };
        let mut nodes: Vec<NodeRecord> = self
            .context
            .catalogue()
            .list_nodes()
            .await?
            .into_iter()
            .map(|view| view.node)
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        self.context.remote.add_fallback_nodes(nodes.iter().map(NodeAddress::of));
        self.context.on_store(move |store| store.put_members(&Members { nodes })).await?;
        // A node that introduced itself before the list was read is on the list, or was taken off
        // it. In both cases its introduction is not needed any more.
        let mut met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
        met.retain(|name, _| !met_before.contains(name));
        Ok(())
    }
}
