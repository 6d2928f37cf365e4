//! The registration of this node in the catalogue, and the requests for catching up that follow
//! from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{MutexGuard, Notify};

use super::context::NodeContext;
use crate::catalogue::database_format::REVISIONS_PER_EPOCH;
use crate::catalogue::record_access::NODES;
use crate::store::StoreError;
use crate::wire::RemoteError;
use crate::wire::calls::RegisterAnswer;

/// Whether a round of catching up is due, and whether one runs.
#[derive(Default)]
pub(super) struct CatchUpRequests {
    round: tokio::sync::Mutex<()>,
    is_due: AtomicBool,
    wake: Notify,
}

impl CatchUpRequests {
    /// Makes a round due. If one runs now, another follows it.
    pub(super) fn request(&self) {
        self.request_later();
        self.wake.notify_one();
    }

    /// Makes a round due without waking the task that runs rounds. The task checks at intervals.
    pub(super) fn request_later(&self) {
        self.is_due.store(true, Ordering::Relaxed);
    }

    /// Takes the request for a round. Returns whether there was one.
    pub(super) fn take(&self) -> bool {
        self.is_due.swap(false, Ordering::Relaxed)
    }

    /// Waits until [`request`](Self::request) is called. Returns at once if it was called since the
    /// last wait. A call of
    /// [`request_later`](Self::request_later) does not end the wait.
    pub(super) async fn wait_for_request(&self) {
        self.wake.notified().await;
    }

    /// Waits until no other round runs. Returns the guard, which the caller holds during its round.
    pub(super) async fn begin_round(&self) -> MutexGuard<'_, ()> {
        self.round.lock().await
    }
}

/// The service that registers this node. It notices when the node's entry in the catalogue is not
/// the one under which the node has caught up.
pub(super) struct Registration {
    context: Arc<NodeContext>,
    catching_up: Arc<CatchUpRequests>,
}

impl Registration {
    /// Creates the service. The service requests a round of catching up from `catching_up` when the
    /// node was off the list.
    pub(super) fn new(context: Arc<NodeContext>, catching_up: Arc<CatchUpRequests>) -> Self {
        Self { context, catching_up }
    }

    /// Registers this node, or renews its registration. Returns the catalogue's answer.
    pub(super) async fn register(&self) -> Result<RegisterAnswer, RemoteError> {
        Ok(self.context.catalogue().register_node(&self.context.own_node_record()).await?)
    }

    /// Registers this node, and checks before and after whether it was off the list. Returns the
    /// catalogue's answer.
    pub(super) async fn register_and_note_absence(&self) -> Result<RegisterAnswer, RemoteError> {
        self.request_catch_up_if_unlisted().await?;
        let answer = self.register().await?;
        self.request_catch_up_if_unlisted().await?;
        Ok(answer)
    }

    /// Compares this node's entry in the list of nodes with the entry in its catch-up record. A
    /// node that was taken off the list has missed commits and removals since, so it notes that it
    /// is behind. A node whose entry was rewritten, for example with another address, cannot tell
    /// that from an absence and does the same. A rebuilt database has other entries for all nodes.
    /// A node keeps its record then, because a rebuild lists only nodes that were on the list. In
    /// all of these cases a round of catching up becomes due.
    pub(super) async fn request_catch_up_if_unlisted(&self) -> Result<(), RemoteError> {
        let noted = self
            .context
            .run_on_store(|store| Ok::<_, StoreError>(store.caught_up_registration()))
            .await?;
        let Some(noted) = noted else { return Ok(()) };
        let registered = self.fetch_registration_revision().await?;
        if registered == Some(noted) {
            return Ok(());
        }
        self.catching_up.request();
        let epoch = |revision: u64| revision / REVISIONS_PER_EPOCH;
        if registered.is_none_or(|registered| epoch(registered) == epoch(noted)) {
            self.context.run_on_store(|store| store.record_behind()).await?;
            tracing::warn!(
                "this node was off the list of nodes, or its entry was rewritten: it catches up again"
            );
        }
        Ok(())
    }

    /// Returns the revision of this node's entry in the catalogue, or `None` if it has none.
    pub(super) async fn fetch_registration_revision(&self) -> Result<Option<u64>, RemoteError> {
        let key = format!("{NODES}{}", self.context.settings.name);
        Ok(self.context.catalogue().get(&key).await?.map(|entry| entry.revision))
    }
}
