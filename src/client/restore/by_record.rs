//! Restoring a save by its record: no catalogue and no majority is asked, because the record says what was committed
//! (docs/semantics.md, 6). Every byte is verified as ever; a node that knows that the save was removed ends it.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;

use super::output::Output;
use crate::client::{Client, ClientError, ProgressFn, RestoreReport, RestoreRequest};
use crate::format::records::Node;
use crate::format::save_record::SaveRecord;
use crate::id::{ClusterId, SaveId};
use crate::net::call::address;
use crate::topology::Directory;
use crate::wire::NodeAddress;
use crate::wire::calls::{FindRemovedSaves, Hello, ListMembers, NodeView};

/// A node that does not say within this who it is counts as away.
const HELLO_LIMIT: Duration = Duration::from_secs(3);
/// Whoever answers says within this where the others are now.
const NEWS_LIMIT: Duration = Duration::from_secs(3);
/// Addresses that are tried for nodes that are not where they were.
const MAX_RELOCATED: usize = 1024;
/// Nodes asked at once.
const AT_ONCE: usize = 32;

/// The first incident of a restore by a record.
const BY_RECORD: &str = "restored by its record: no catalogue was asked";

impl Client {
    /// Restores the save of `record` into a folder. Nothing is written unless everything can be read. The step may have been replaced
    /// meanwhile: what is restored is that save, or nothing.
    pub async fn restore_record(
        &self,
        record: &SaveRecord,
        request: RestoreRequest,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        let (job, step) = (record.job(), record.step());
        let shards = record.roots().iter().map(|root| (root.clone(), None)).collect();
        let parts = self.select_all(job, step, shards, Some(&request))?;
        let directory = self.build_directory(record);
        let incident = Some(BY_RECORD);
        self.read_parts((job, step), parts, directory, incident, &Output::Files(&request), progress)
            .await
    }

    /// The record's nodes, where they are now, and which of them answer.
    async fn build_directory(&self, record: &SaveRecord) -> Result<Directory, ClientError> {
        let mut views = self.hello_all(record.cluster(), record.nodes().to_vec()).await?;
        if let Some(view) = views.iter().find(|view| view.live) {
            self.set_gateway(Some(node_address(&view.node)));
        }
        for found in self.hello_all(record.cluster(), self.relocated_nodes(&views).await).await? {
            // Where it is said to be now it is looked for again, when it is needed.
            let is_found = |view: &NodeView| view.live && view.node.name == found.node.name;
            if found.live || !views.iter().any(is_found) {
                views.retain(|view| view.node.name != found.node.name);
                views.push(found);
            }
        }
        if !views.iter().any(|view| view.live) {
            let asked: Vec<&str> = views.iter().map(|view| view.node.address.as_str()).collect();
            let reason = "none of the record's nodes answers".to_owned();
            return Err(ClientError::Unreachable { seeds: asked.join(", "), reason });
        }
        let directory = Directory::new(views);
        if self.is_removed_anywhere(&directory, record.saved().save).await {
            return Err(ClientError::Removed { job: record.job().clone(), step: record.step() });
        }
        Ok(directory)
    }

    /// Nodes that do not answer, at other addresses that those that do, or a gateway, have heard of. No catalogue is asked: there may be
    /// none, and that takes long to find out.
    async fn relocated_nodes(&self, views: &[NodeView]) -> Vec<Node> {
        let (live, away): (Vec<_>, Vec<_>) = views.iter().partition(|view| view.live);
        if away.is_empty() {
            return Vec::new();
        }
        let known: Vec<Vec<Node>> = if live.is_empty() {
            vec![self.ask_within(&ListMembers {}, NEWS_LIMIT).await.unwrap_or_default()]
        } else {
            let asks = live.iter().map(|view| async move {
                let to = address(&node_address(&view.node));
                self.caller()
                    .call_within(&to, &ListMembers {}, NEWS_LIMIT)
                    .await
                    .unwrap_or_default()
            });
            let asks: Vec<_> = asks.collect();
            stream::iter(asks).buffered(AT_ONCE).collect().await
        };
        let mut moved: Vec<Node> = Vec::new();
        for node in known.into_iter().flatten() {
            let is_news = away
                .iter()
                .any(|view| view.node.name == node.name && view.node.address != node.address);
            let is_known =
                moved.iter().any(|other| other.name == node.name && other.address == node.address);
            if is_news && !is_known && moved.len() < MAX_RELOCATED {
                moved.push(node);
            }
        }
        moved
    }

    /// `nodes`, and which of them say in time who they are.
    async fn hello_all(
        &self,
        cluster: ClusterId,
        nodes: Vec<Node>,
    ) -> Result<Vec<NodeView>, ClientError> {
        let asks = nodes.into_iter().map(|node| async move {
            let to = address(&node_address(&node));
            let hello = self.caller().call_within(&to, &Hello { me: None }, HELLO_LIMIT).await;
            match hello {
                Ok(hello) if hello.cluster != cluster => {
                    Err(ClientError::OtherCluster { record: cluster, found: hello.cluster })
                }
                hello => Ok(NodeView { node, live: hello.is_ok() }),
            }
        });
        let asks: Vec<_> = asks.collect();
        let answers: Vec<_> = stream::iter(asks).buffered(AT_ONCE).collect().await;
        answers.into_iter().collect()
    }

    /// Whether a node that answers has removed the save, or is to.
    pub(in crate::client) async fn is_removed_anywhere(
        &self,
        directory: &Directory,
        save: SaveId,
    ) -> bool {
        let live = directory.views().filter(|view| view.live);
        let asks = live.map(|view| async move {
            let (to, call) =
                (address(&node_address(&view.node)), FindRemovedSaves { saves: vec![save] });
            let gone = self.caller().call_within(&to, &call, HELLO_LIMIT).await;
            gone.is_ok_and(|gone| gone.contains(&save))
        });
        let asks: Vec<_> = asks.collect();
        stream::iter(asks).buffer_unordered(AT_ONCE).any(|gone| async move { gone }).await
    }
}

fn node_address(node: &Node) -> NodeAddress {
    NodeAddress { name: node.name.clone(), host_port: node.address.clone() }
}
