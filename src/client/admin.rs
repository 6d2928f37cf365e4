//! Requests of operators: the state of the cluster, its catalogue and its members.

use std::time::Duration;

use super::connection::{Client, LONG_LIMIT};
use super::error::ClientError;
use super::node_reports::{CatalogueReport, HELLO_LIMIT, NodeReport};
use crate::format::records::RingChanges;
use crate::id::{Epoch, PeerName};
use crate::net::Address;
use crate::net::call::{CallError, address};
use crate::wire::calls::{
    GetPolicyStatus, GetRepairStatus, Hello, MoveCatalogue, MoveCatalogueAnswer, RebuildAnswer,
    RebuildCatalogue, RemoveNode, RepairStatus, ReplaceNode, SetMaintenance, SetRetention,
};
use crate::wire::policy::{PolicyAnswer, RetentionChange};

/// Time limit for rebuilding or moving the catalogue, and for removing or replacing a node. All
/// nodes are asked what they have.
const REBUILD_LIMIT: Duration = Duration::from_secs(3600);

/// The state of the cluster.
#[derive(Debug, Clone)]
pub struct StatusReport {
    /// The nodes, each with its own answers.
    pub nodes: Vec<NodeReport>,
    /// The state of the catalogue.
    pub catalogue: CatalogueReport,
    /// The highest epoch that the gateway knows.
    pub epoch: Epoch,
    /// The policy that the catalogue server applies, if the server answers.
    pub policy: Option<PolicyAnswer>,
    /// Whether retention is paused; `None` if the catalogue server does not say so.
    pub is_retention_paused: Option<bool>,
    /// How many nodes may be lost, and what the catalogue server repairs automatically, if the server
    /// answers.
    pub repair: Option<RepairStatus>,
    /// The ring changes of the cluster.
    pub ring_changes: RingChanges,
}

impl Client {
    /// Makes `daemon` rebuild a lost catalogue from the contents of the nodes and serve it
    /// (docs/semantics.md, 8). `None` is the daemon that this client already uses, or the first
    /// seed that answers.
    pub async fn rebuild_catalogue(
        &self,
        daemon: Option<&Address>,
    ) -> Result<RebuildAnswer, ClientError> {
        self.call_rebuild(daemon, RebuildCatalogue { accept_loss: false }).await
    }

    /// Does the same as [`rebuild_catalogue`](Self::rebuild_catalogue), even if fewer nodes are
    /// reached than that function requires, or if shard roots are missing. The rebuilt catalogue
    /// lacks the steps that were lost.
    pub async fn rebuild_catalogue_despite_loss(
        &self,
        daemon: Option<&Address>,
    ) -> Result<RebuildAnswer, ClientError> {
        self.call_rebuild(daemon, RebuildCatalogue { accept_loss: true }).await
    }

    async fn call_rebuild(
        &self,
        daemon: Option<&Address>,
        call: RebuildCatalogue,
    ) -> Result<RebuildAnswer, ClientError> {
        match daemon {
            Some(on) => Ok(self.caller().call_within(on, &call, REBUILD_LIMIT).await?),
            None => self.call_gateway_once(&call, REBUILD_LIMIT).await,
        }
    }

    /// Makes the daemon `new_server` copy the catalogue from the daemon that serves it, and serve
    /// it from then on (docs/semantics.md, 8).
    pub async fn move_catalogue(
        &self,
        new_server: &Address,
    ) -> Result<MoveCatalogueAnswer, ClientError> {
        Ok(self.caller().call_within(new_server, &MoveCatalogue {}, REBUILD_LIMIT).await?)
    }

    /// Removes a node from the list of members. The node must not be live, and every checkpoint
    /// must be whole without it (docs/semantics.md, 10).
    pub async fn remove_node(&self, name: &PeerName) -> Result<(), ClientError> {
        self.call_gateway_once(&RemoveNode { name: name.clone() }, REBUILD_LIMIT).await
    }

    /// Records `node` as leaving, with the storage node `successor` as its successor in the rings
    /// of shards (docs/semantics.md, 10). A repair that gives `node` up makes the node's pieces and
    /// replicas on other nodes.
    pub async fn replace_node(
        &self,
        node: &PeerName,
        successor: &PeerName,
    ) -> Result<(), ClientError> {
        let call = ReplaceNode { node: node.clone(), successor: successor.clone() };
        self.call_gateway_once(&call, REBUILD_LIMIT).await
    }

    /// Makes automatic repair ignore the absence of `node` for the next `seconds` seconds; 0 ends
    /// that (docs/semantics.md, 11).
    pub async fn set_maintenance(&self, node: &PeerName, seconds: u64) -> Result<(), ClientError> {
        let call = SetMaintenance { node: node.clone(), seconds };
        self.call_gateway_once(&call, LONG_LIMIT).await
    }

    /// Pauses or resumes retention, or leaves it as it is (docs/semantics.md, 9). Returns whether it
    /// is paused afterwards: then neither the policy nor a trainer removes older steps.
    pub async fn set_retention(&self, change: RetentionChange) -> Result<bool, ClientError> {
        self.call_gateway(&SetRetention { change }).await
    }

    /// Returns whether retention is paused. Asks the catalogue server itself, because the gateway
    /// may run an older version, which does not know the call. A catalogue server of an older
    /// version has no pause.
    pub async fn is_retention_paused(&self) -> Result<bool, ClientError> {
        let look = SetRetention { change: RetentionChange::None };
        let hello = self.call_gateway(&Hello { me: None }).await?;
        let Some(home) = &hello.catalogue else { return self.call_gateway(&look).await };
        match self.caller().call_within(&address(home), &look, HELLO_LIMIT).await {
            Err(CallError::Failed(answer)) if answer.is_unknown_call() => Ok(false),
            answer => Ok(answer?),
        }
    }

    /// Returns the state of the cluster. Asks the nodes themselves, so that the call also works
    /// while no catalogue answers, or while the catalogue is read-only.
    pub async fn status(&self) -> Result<StatusReport, ClientError> {
        let nodes = self.fetch_node_reports(self.fetch_known_nodes().await?).await;
        let hello = self.call_gateway(&Hello { me: None }).await?;
        let (mut policy, mut repair, mut is_retention_paused) = (None, None, None);
        if let Some(home) = &hello.catalogue {
            let (to, caller) = (address(home), self.caller());
            policy = caller.call_within(&to, &GetPolicyStatus {}, HELLO_LIMIT).await.ok();
            repair = caller.call_within(&to, &GetRepairStatus {}, HELLO_LIMIT).await.ok();
            let look = SetRetention { change: RetentionChange::None };
            is_retention_paused = caller.call_within(&to, &look, HELLO_LIMIT).await.ok();
        }
        let catalogue = self.fetch_catalogue_report().await?;
        let ring_changes = self.fetch_ring_changes().await.unwrap_or_default();
        let epoch = hello.epoch;
        Ok(StatusReport {
            nodes,
            catalogue,
            epoch,
            policy,
            is_retention_paused,
            repair,
            ring_changes,
        })
    }
}
