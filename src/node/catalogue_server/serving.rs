//! The decision whether this daemon serves the catalogue, and whether it may change it
//! (docs/semantics.md, 8).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::{Catalogue, CatalogueError};
use crate::id::{Epoch, PeerName};
use crate::node::NewCatalogue;
use crate::node::quorum::majority;
use crate::store::{CatalogueStorage, Kv, Store};
use crate::wire::calls::CHANGES_NOTHING;

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
    /// The daemon has a database. After a restart or a transfer it is read-only until enough nodes
    /// have reported that no other catalogue has begun. A new one accepts changes at once; so does
    /// a rebuilt one if a majority of the storage nodes has recorded its epoch.
    Serving(Arc<LocalCatalogue>),
}

/// The function that opens a database as a catalogue.
type OpenCatalogue<'a> = &'a dyn Fn(Arc<dyn Kv>) -> Result<LocalCatalogue, CatalogueError>;

/// Returns the warning of a daemon that has a new disk and should serve the catalogue of a cluster
/// that `witness` belongs to.
fn lost_with_disk(witness: &dyn fmt::Display) -> String {
    format!(
        "the data folder of this daemon is new, and {witness} knows a catalogue of this cluster: if it was on the disk that was replaced, it is lost; rebuild it with `rapidraid catalogue rebuild`"
    )
}

impl CatalogueServer {
    /// Opens the database of this daemon. If there is none, one is created only if `new_catalogue`
    /// says so and the data folder has never seen an epoch. Returns the server, whether or not it
    /// serves a catalogue. With a full disk, or a database that is lost, incomplete, damaged or
    /// older than `seen_epoch`, it serves none.
    ///
    /// # Errors
    /// If the database cannot be created, or cannot be opened for any other reason.
    pub(in crate::node) fn open_or_create(
        maps: Arc<dyn CatalogueStorage>,
        new_catalogue: &NewCatalogue,
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
        let opened = match (existing, new_catalogue) {
            (Ok(Some(kv)), _) => open(kv).map(Some),
            (Ok(None), NewCatalogue::Never) => Ok(None),
            (Ok(None), _) if !is_new => Err(gone()),
            (Ok(None), NewCatalogue::Create) => open(maps.move_aside_and_create()?).map(Some),
            (Ok(None), NewCatalogue::ExistsElsewhere { seed }) => {
                let why = lost_with_disk(seed);
                tracing::error!(why, "this daemon serves no catalogue");
                let state = Mutex::new(ServingState::NotServing(Some(why)));
                return Ok(Self { state, db_location: maps, heard: Mutex::default() });
            }
            (Err(error), _) => Err(error.into()),
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
                tracing::error!(%error, "cannot serve the catalogue from the database of this daemon");
                ServingState::NotServing(Some(error.to_string()))
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
        let (epoch, map) = (store.highest_seen_epoch(), store.db_id_of_highest_epoch());
        let is_other = epoch == local.epoch() && map.is_some_and(|map| map != local.db_id());
        if epoch <= local.epoch() && !is_other {
            return Some(local.clone());
        }
        let why = format!(
            "the catalogue here is of epoch {}, which is over: another catalogue has begun, and this node has noted epoch {epoch}; its folder catalogue/ can be removed",
            local.epoch()
        );
        tracing::warn!(why, "this daemon stops serving the catalogue");
        *state = ServingState::NotServing(Some(why));
        None
    }

    /// Steps down because the database is an old copy of the cluster's. It is not served.
    pub(super) fn step_down_as_old_copy(
        &self,
        node: &PeerName,
        heard_revision: u64,
        own_revision: u64,
    ) {
        let why = format!(
            "the catalogue here is an old copy (revision {own_revision}; {node} has heard of revision {heard_revision}): it is not served, and nothing is deleted; rebuild it with `rapidraid catalogue rebuild`"
        );
        tracing::error!(why, "this daemon stops serving the catalogue");
        *self.lock_state() = ServingState::NotServing(Some(why));
    }

    /// Steps down because the database was removed under the running daemon. The open database
    /// would answer for as long as the process lives, but nothing that is written to it would last.
    pub(super) fn step_down_as_lost(&self) {
        let why = "the folder catalogue/ was removed while this daemon ran: it serves no catalogue any more; rebuild it with `rapidraid catalogue rebuild`";
        tracing::error!(why, "this daemon stops serving the catalogue");
        *self.lock_state() = ServingState::NotServing(Some(why.to_owned()));
    }

    /// Steps down because the catalogue here was created on a new disk, and `node` belongs to
    /// another one.
    pub(super) fn step_down_as_new(&self, node: &PeerName) {
        let why = lost_with_disk(node);
        tracing::error!(why, "this daemon stops serving the catalogue");
        *self.lock_state() = ServingState::NotServing(Some(why));
    }

    /// Makes this daemon serve `local` from now on.
    pub(in crate::node) fn start_serving(&self, local: Arc<LocalCatalogue>) {
        *self.lock_state() = ServingState::Serving(local);
    }

    /// Forgets why this daemon serves no catalogue, because this node has registered with another
    /// daemon that serves it. Whatever is wrong with the database here then needs no repair.
    pub(in crate::node) fn clear_reason(&self) {
        let mut state = self.lock_state();
        if let ServingState::NotServing(reason) = &mut *state
            && let Some(why) = reason.take()
        {
            tracing::info!(
                why,
                "another daemon serves the catalogue: the folder catalogue/ here is not needed"
            );
        }
    }

    pub(super) fn set_heard_counts(&self, heard: usize, storage_count: usize) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = (heard, storage_count);
    }

    /// Returns the warning that an operator should see, if there is one.
    pub(in crate::node) fn serving_warning(&self) -> Option<String> {
        match &*self.lock_state() {
            ServingState::NotServing(why) => why.clone(),
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
