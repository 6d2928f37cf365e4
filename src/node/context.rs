//! The parts of a node that every service may use.

use std::sync::Arc;

use super::catalogue_contact::CatalogueContact;
use super::catalogue_server::serving::CatalogueServer;
use super::tasks::Tasks;
use super::{CALL_LIMIT, NodeParts, NodeSettings};
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::remote::RemoteCatalogue;
use crate::catalogue::{Catalogue, CatalogueError};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::format::records as formats;
use crate::id::NodeId;
use crate::net::call::Caller;
use crate::net::pool::Pool;
use crate::pipeline::coordinator::Coordinator;
use crate::store::Store;
use crate::wire::{NodeAddress, RemoteError};
use crate::workers::Workers;

/// The identity, the settings and the resources of a node, its access to the catalogue, and its
/// tasks.
pub(super) struct NodeContext {
    pub(super) settings: NodeSettings,
    pub(super) id: NodeId,
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) entropy: Arc<dyn Entropy>,
    pub(super) workers: Workers,
    pub(super) caller: Arc<Caller>,
    /// The catalogue server of this node. It has a catalogue only while this node serves one.
    pub(super) catalogue_server: CatalogueServer,
    /// Access to the catalogue while another node serves it.
    pub(super) remote: Arc<RemoteCatalogue>,
    /// Whether a catalogue answers.
    pub(super) catalogue_contact: CatalogueContact,
    /// The tasks of all services.
    pub(super) tasks: Tasks,
}

impl NodeContext {
    /// Opens the catalogue database of this node, or creates it if the settings say so. Prepares
    /// access to a catalogue on another node, through the seeds and the nodes that the store
    /// remembers.
    ///
    /// # Errors
    /// If the catalogue database fails to open or cannot be created.
    pub(super) fn open(settings: NodeSettings, parts: NodeParts) -> Result<Self, CatalogueError> {
        let NodeParts { store, db_location, transport, clock, entropy, workers, .. } = parts;
        let caller = Caller::new(Pool::new(transport, clock.clone()), clock.clone(), CALL_LIMIT);
        let seen = store.highest_seen_epoch();
        let open = |kv| {
            let (clock, entropy) = (clock.clone(), entropy.clone());
            LocalCatalogue::open(kv, clock, entropy, &workers, settings.lease, seen)
        };
        let catalogue_server =
            CatalogueServer::open_or_create(db_location, &settings.new_catalogue, seen, &open)?;
        let (own_node, seeds) = (node_record_from_settings(&settings), settings.seeds.clone());
        let remote = Arc::new(RemoteCatalogue::new(caller.clone(), own_node, seeds));
        remote.set_expected_epoch(seen, store.db_id_of_highest_epoch());
        if let Some(last) = store.server_of_highest_epoch() {
            remote.add_fallback_nodes([NodeAddress { name: last.name, host_port: last.address }]);
        }
        // The stored members only help to find the catalogue. A record of them that does not open
        // is ignored here, and is written anew later.
        let members = store.read_members().unwrap_or_default().nodes.into_iter();
        remote.add_fallback_nodes(members.map(|node| NodeAddress::of(&node)));
        let id = NodeId::of(&settings.name);
        let (catalogue_contact, tasks) = Default::default();
        Ok(Self {
            settings,
            id,
            store,
            clock,
            entropy,
            workers,
            caller,
            catalogue_server,
            remote,
            catalogue_contact,
            tasks,
        })
    }

    /// Returns the catalogue: the local one if this node serves it, otherwise the remote one.
    pub(super) fn catalogue(&self) -> Arc<dyn Catalogue> {
        match self.local_catalogue() {
            Some(local) => local,
            None => self.remote.clone(),
        }
    }

    /// Returns the catalogue if this node serves it.
    pub(super) fn local_catalogue(&self) -> Option<Arc<LocalCatalogue>> {
        self.catalogue_server.served_or_step_down(&self.store)
    }

    /// Returns whether this node serves the catalogue and accepts changes of it.
    pub(super) fn is_writable_catalogue_server(&self) -> bool {
        self.local_catalogue().is_some_and(|local| !local.is_read_only())
    }

    /// Returns the address of the catalogue server, as far as this node knows it.
    pub(super) fn catalogue_server_address(&self) -> Option<NodeAddress> {
        if self.local_catalogue().is_some() {
            return Some(self.own_address());
        }
        self.remote.known_server(self.store.highest_seen_epoch())
    }

    pub(super) fn own_address(&self) -> NodeAddress {
        NodeAddress { name: self.settings.name.clone(), host_port: self.settings.advertise.clone() }
    }

    pub(super) fn own_node_record(&self) -> formats::Node {
        node_record_from_settings(&self.settings)
    }

    pub(super) fn coordinator(&self) -> Coordinator {
        Coordinator {
            cluster: self.settings.cluster,
            me: self.id,
            catalogue: self.catalogue(),
            caller: self.caller.clone(),
            clock: self.clock.clone(),
            entropy: self.entropy.clone(),
        }
    }

    /// Runs blocking work on the store, on the worker threads and not on those of the network.
    /// Returns its result.
    pub(super) async fn run_on_store<T, E>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, E> + Send + 'static,
    ) -> Result<T, RemoteError>
    where
        T: Send + 'static,
        E: Into<RemoteError> + Send + 'static,
    {
        let store = self.store.clone();
        self.workers.run(move || work(&store)).await?.map_err(Into::into)
    }
}

pub(super) fn node_record_from_settings(settings: &NodeSettings) -> formats::Node {
    formats::Node {
        name: settings.name.clone(),
        address: settings.advertise.clone(),
        zone: settings.zone.clone(),
        rack: settings.rack.clone(),
        storage: settings.storage,
    }
}
