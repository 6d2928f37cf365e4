//! What operators ask: the state of the cluster, its catalogue, its members.

use std::time::Duration;

use super::connection::{Client, LONG_LIMIT};
use super::error::ClientError;
use super::node_reports::{CatalogueReport, HELLO_LIMIT, NodeReport};
use crate::id::{Epoch, PeerName};
use crate::net::Address;
use crate::net::call::address;
use crate::wire::calls::{
    GetPolicyStatus, Hello, MoveCatalogue, MoveCatalogueAnswer, RebuildAnswer, RebuildCatalogue,
    RemoveNode,
};
use crate::wire::policy::PolicyAnswer;

/// The nodes' inventories are read whole.
const REBUILD_LIMIT: Duration = Duration::from_secs(3600);

/// The nodes and what they hold.
#[derive(Debug, Clone)]
pub struct StatusReport {
    /// Each node, and what it says.
    pub nodes: Vec<NodeReport>,
    /// The state of the catalogue.
    pub catalogue: CatalogueReport,
    /// The highest epoch that was heard of.
    pub epoch: Epoch,
    /// The policy that the catalogue's host applies, if it answers.
    pub policy: Option<PolicyAnswer>,
}

impl Client {
    /// Has the daemon `on` (by default the first seed that answers) make a lost catalogue again from what the nodes hold, and serve it
    /// (docs/semantics.md, 8). `accept_loss`: also when fewer nodes are reached than that needs, or roots are missing.
    pub async fn rebuild_catalogue(
        &self,
        on: Option<&Address>,
        accept_loss: bool,
    ) -> Result<RebuildAnswer, ClientError> {
        let call = RebuildCatalogue { accept_loss };
        match on {
            Some(on) => Ok(self.caller().call_within(on, &call, REBUILD_LIMIT).await?),
            None => self.ask_once(&call, REBUILD_LIMIT).await,
        }
    }

    /// Has the daemon `on` copy the catalogue from the one that serves it, and serve it from then on (docs/semantics.md, 8).
    pub async fn move_catalogue(&self, on: &Address) -> Result<MoveCatalogueAnswer, ClientError> {
        Ok(self.caller().call_within(on, &MoveCatalogue {}, REBUILD_LIMIT).await?)
    }

    /// Takes a node off the list of members: one that is not live, and on which no checkpoint may lie (docs/semantics.md, 10).
    pub async fn remove_node(&self, name: &PeerName) -> Result<(), ClientError> {
        self.ask_once(&RemoveNode { name: name.clone() }, LONG_LIMIT).await
    }

    /// The nodes and what they hold, asked of the nodes themselves: also while no catalogue answers, or one that changes nothing.
    pub async fn status(&self) -> Result<StatusReport, ClientError> {
        let nodes = self.fetch_node_reports(self.known_nodes().await?).await;
        let hello = self.ask(&Hello { me: None }).await?;
        let policy = match &hello.catalogue {
            Some(home) => {
                let to = address(home);
                self.caller().call_within(&to, &GetPolicyStatus {}, HELLO_LIMIT).await.ok()
            }
            None => None,
        };
        let catalogue = self.fetch_catalogue_report().await?;
        Ok(StatusReport { nodes, catalogue, epoch: hello.epoch, policy })
    }
}
