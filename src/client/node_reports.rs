//! Requests to the nodes themselves, which show which nodes answer. The nodes' leases do not show
//! this while no catalogue renews them.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{StreamExt, future, stream};

use super::{Client, ClientError};
use crate::format::file::FileName;
use crate::format::records::Node;
use crate::id::{NodeId, PeerName, StripeId};
use crate::net::call::address;
use crate::wire::NodeAddress;
use crate::wire::calls::{
    CHANGES_NOTHING, GetNodeStatus, Hello, HelloAnswer, ListFiles, ListNodes, NodeStatusAnswer,
    NodeView,
};

/// Time limit for a node to answer `Hello` or to list its files of a stripe, and for the catalogue
/// server to report its status. A node that takes longer counts as silent.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(3);
/// Number of nodes asked at once.
const AT_ONCE: usize = 256;

/// A node with its own answers.
#[derive(Debug, Clone)]
pub struct NodeReport {
    /// The node, and whether its lease is alive.
    pub view: NodeView,
    /// The node's answer to `Hello`, if it answers.
    pub hello: Option<HelloAnswer>,
    /// The node's holdings, if it reports them.
    pub held: Option<NodeStatusAnswer>,
}

/// The state of the catalogue: the daemon that serves it, and whether it accepts changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CatalogueReport {
    /// The node that serves the catalogue, as far as it is known.
    pub catalogue_server: Option<PeerName>,
    /// The reason why nothing can be saved, archived or removed now.
    pub read_only_reason: Option<String>,
}

/// The files of one stripe that nodes say they have, by node.
pub type StripeFiles = BTreeMap<NodeId, Vec<FileName>>;

impl Client {
    /// Returns the nodes on the catalogue's list, or those that the gateway remembers if no
    /// catalogue answers.
    pub(super) async fn fetch_known_nodes(&self) -> Result<Vec<NodeView>, ClientError> {
        match self.call_gateway(&ListNodes {}).await {
            Ok(nodes) => Ok(nodes),
            Err(error) if error.kind().is_transient() => {
                let members = self.fetch_members().await.map_err(|_| error)?;
                Ok(members.into_iter().map(|node| NodeView { node, live: false }).collect())
            }
            Err(error) => Err(error),
        }
    }

    async fn fetch_hello(&self, node: &Node) -> Option<HelloAnswer> {
        let to = address(&NodeAddress::of(node));
        self.caller().call_within(&to, &Hello { me: None }, HELLO_LIMIT).await.ok()
    }

    /// Asks each node for its `Hello` answer and its holdings. Returns the reports in the order of
    /// the nodes' names.
    pub(super) async fn fetch_node_reports(&self, nodes: Vec<NodeView>) -> Vec<NodeReport> {
        let asks: Vec<_> = nodes
            .into_iter()
            .map(|view| async move {
                let hello = self.fetch_hello(&view.node).await;
                let held = match &hello {
                    Some(_) => {
                        let to = NodeAddress::of(&view.node);
                        self.caller().call(&to, &GetNodeStatus {}).await.ok()
                    }
                    None => None,
                };
                NodeReport { view, hello, held }
            })
            .collect();
        let mut reports: Vec<_> = stream::iter(asks).buffer_unordered(AT_ONCE).collect().await;
        reports.sort_by(|a, b| a.view.node.name.cmp(&b.view.node.name));
        reports
    }

    /// Returns the nodes, in the order of their names. A node without a lease that answers counts
    /// as live.
    pub(super) async fn probe_liveness(&self, nodes: Vec<NodeView>) -> Vec<NodeView> {
        let asks: Vec<_> = nodes
            .into_iter()
            .map(|mut view| async move {
                view.live = view.live || self.fetch_hello(&view.node).await.is_some();
                view
            })
            .collect();
        let mut nodes: Vec<_> = stream::iter(asks).buffer_unordered(AT_ONCE).collect().await;
        nodes.sort_by(|a, b| a.node.name.cmp(&b.node.name));
        nodes
    }

    /// Asks the live storage nodes among `nodes` which files of a stripe they have. Damaged files
    /// are not listed. A node that does not answer within three seconds is left out.
    pub async fn list_stripe_files(&self, stripe: StripeId, nodes: &[NodeView]) -> StripeFiles {
        let asks = nodes.iter().filter(|view| view.live && view.node.storage).map(|view| {
            let to = NodeAddress::of(&view.node);
            async move {
                let call = ListFiles { stripe };
                let files = self.caller().call_within(&address(&to), &call, HELLO_LIMIT).await;
                let names = files.ok()?.into_iter().map(|view| view.file).collect();
                Some((NodeId::of(&view.node.name), names))
            }
        });
        let asks: Vec<_> = asks.collect();
        stream::iter(asks).buffer_unordered(AT_ONCE).filter_map(future::ready).collect().await
    }

    /// Returns the state of the catalogue.
    pub(super) async fn fetch_catalogue_report(&self) -> Result<CatalogueReport, ClientError> {
        let Some(home) = self.call_gateway(&Hello { me: None }).await?.catalogue else {
            let why = "no node serves the catalogue: start the daemon that did, or `rapidraid catalogue rebuild`";
            return Ok(CatalogueReport {
                catalogue_server: None,
                read_only_reason: Some(why.to_owned()),
            });
        };
        let asked =
            self.caller().call_within(&address(&home), &GetNodeStatus {}, HELLO_LIMIT).await;
        let unchanged = match asked {
            Ok(status) => status.notes.into_iter().find(|note| note.starts_with(CHANGES_NOTHING)),
            Err(_) => Some(format!(
                "node {}, which serves the catalogue, does not answer: start it, or `rapidraid catalogue rebuild`",
                home.name
            )),
        };
        Ok(CatalogueReport { catalogue_server: Some(home.name), read_only_reason: unchanged })
    }
}
