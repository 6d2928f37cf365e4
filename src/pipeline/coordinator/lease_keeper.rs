//! The lease under which a coordinator owns requests and shards.

use tokio::task::JoinHandle;

use super::Coordinator;
use crate::catalogue::CatalogueError;
use crate::id::LeaseId;

/// A lease keeper: it renews a coordinator's lease until the keeper is dropped or the lease is lost.
pub(super) struct LeaseKeeper {
    /// The lease.
    pub lease: LeaseId,
    keeper: JoinHandle<()>,
}

impl LeaseKeeper {
    /// Obtains a lease from the catalogue, and starts to renew it. Returns the keeper.
    pub async fn start(coordinator: &Coordinator) -> Result<Self, CatalogueError> {
        let (lease, period) = coordinator.catalogue.grant_lease().await?;
        let (catalogue, clock) = (coordinator.catalogue.clone(), coordinator.clock.clone());
        let keeper = tokio::spawn(async move {
            loop {
                clock.sleep(period / 3).await;
                if let Ok(false) = catalogue.renew_lease(lease).await {
                    return;
                }
            }
        });
        Ok(Self { lease, keeper })
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}
