//! The calls that read and change the catalogue, on the node that serves it.

use std::sync::Arc;

use super::error::CatalogueServerError;
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::{Catalogue, Guard, GuardedOutcome, SetOutcome};
use crate::id::LeaseId;
use crate::node::context::NodeContext;
use crate::wire::RemoteError;
use crate::wire::calls::{
    CompareAndSetAnswer, CompareAndSetKey, CompareAndSetKeyGuarded, GetKey, GuardedSetAnswer,
    ListKeys, RegisterAnswer, RegisterNode, RevokeLease, TouchLease,
};

/// The service that reads and changes the catalogue for other nodes, while this node serves it.
pub(in crate::node) struct CatalogueCalls {
    context: Arc<NodeContext>,
}

impl CatalogueCalls {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Returns the catalogue that this node serves.
    ///
    /// # Errors
    /// [`CatalogueServerError::CatalogueNotServed`] if it serves none.
    pub(in crate::node) fn require_local_catalogue(
        &self,
    ) -> Result<Arc<LocalCatalogue>, RemoteError> {
        Ok(self.context.local_catalogue().ok_or(CatalogueServerError::CatalogueNotServed)?)
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

    pub(in crate::node) async fn compare_and_set_key_guarded(
        &self,
        call: CompareAndSetKeyGuarded,
    ) -> Result<GuardedSetAnswer, RemoteError> {
        let guard = Guard { key: call.guard_key, revision: call.guard_revision };
        let outcome = self
            .require_local_catalogue()?
            .compare_and_set_guarded(&call.key, call.expected, call.value, &guard)
            .await?;
        Ok(match outcome {
            GuardedOutcome::Set(revision) => GuardedSetAnswer::Set(revision),
            GuardedOutcome::Conflict(entry) => {
                GuardedSetAnswer::Conflict(entry.map(|entry| (entry.value, entry.revision)))
            }
            GuardedOutcome::GuardConflict => GuardedSetAnswer::GuardConflict,
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
