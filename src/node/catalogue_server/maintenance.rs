//! Maintenance of nodes: an absence that is announced, and for which no repair is begun
//! (docs/semantics.md, 11).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::CatalogueServerError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{MAINTENANCE, NODES, maintenance_key, parse_record};
use crate::catalogue::{Catalogue, CatalogueError, SetOutcome};
use crate::format::records::{Maintenance, Record};
use crate::id::PeerName;
use crate::node::context::NodeContext;
use crate::wire::RemoteError;
use crate::wire::calls::SetMaintenance;

/// The longest maintenance, in seconds.
const MAX_MAINTENANCE_SECONDS: u64 = 7 * 24 * 3600;

/// The service that records which nodes are in maintenance.
pub(in crate::node) struct MaintenanceCalls {
    context: Arc<NodeContext>,
}

impl MaintenanceCalls {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self { context }
    }

    /// Begins, prolongs or ends the maintenance of a node.
    ///
    /// # Errors
    /// Fails with kind `NotFound` if a maintenance begins and the node is not registered, and with
    /// kind `Invalid` if the time is too long.
    pub(in crate::node) async fn set_maintenance(
        &self,
        call: SetMaintenance,
    ) -> Result<(), RemoteError> {
        let SetMaintenance { node, seconds } = call;
        let catalogue = self.context.catalogue();
        // A maintenance can be ended also after the node was removed.
        if seconds > 0 && catalogue.get(&format!("{NODES}{node}")).await?.is_none() {
            return Err(CatalogueServerError::NodeNotRegistered { node }.into());
        }
        if seconds > MAX_MAINTENANCE_SECONDS {
            return Err(CatalogueServerError::MaintenanceTooLong.into());
        }
        let until = self.context.clock.wall_seconds().saturating_add(seconds);
        let key = maintenance_key(&node);
        let record = Maintenance { node, until };
        loop {
            // A record that does not parse is replaced or removed like any other.
            let known = catalogue.get(&key).await?;
            let value = match seconds {
                0 if known.is_none() => return Ok(()),
                0 => None,
                _ => Some(record.to_bytes()?),
            };
            let revision = known.map(|entry| entry.revision);
            if let SetOutcome::Set(_) = catalogue.compare_and_set(&key, revision, value).await? {
                tracing::info!(node = %record.node, seconds, "the maintenance of a node was set to end after `seconds`: 0 means that it is over");
                return Ok(());
            }
        }
    }
}

/// Returns the nodes that are in maintenance at `now` (seconds since 1970), each with the remaining
/// seconds. A maintenance whose end is further away than the longest maintenance counts as over,
/// because a wrong clock has written it.
///
/// # Errors
/// If the catalogue does not answer.
pub(in crate::node) async fn list_maintenance(
    catalogue: &dyn Catalogue,
    now: u64,
) -> Result<BTreeMap<PeerName, u64>, CatalogueError> {
    let mut found = BTreeMap::new();
    let mut scan = KeyScan::of_prefix(catalogue, MAINTENANCE);
    while let Some((key, entry)) = scan.next().await? {
        // One damaged record must not end all repairs. Its node counts as in no maintenance.
        let Maintenance { node, until } = match parse_record(&key, &entry.value) {
            Ok(maintenance) => maintenance,
            Err(error) => {
                tracing::error!(key, %error, "the maintenance of a node does not parse: `rapidraid cluster maintenance NODE --for 0` removes it");
                continue;
            }
        };
        let remaining = until.saturating_sub(now);
        if (1..=MAX_MAINTENANCE_SECONDS).contains(&remaining) {
            found.insert(node, remaining);
        }
    }
    Ok(found)
}
