//! Restoring a save by its record. Neither a catalogue nor a majority of nodes is asked, because
//! the record says what was committed (docs/semantics.md, 6). Every byte is verified as in any
//! restore. The restore ends if a node knows that the save was removed.

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

/// Time limit for a node to answer `Hello`. A node that takes longer counts as unreachable.
const HELLO_LIMIT: Duration = Duration::from_secs(3);
/// Time limit for a node that answers to report the current addresses of the others.
const NEWS_LIMIT: Duration = Duration::from_secs(3);
/// Maximum number of addresses that are tried for nodes that have moved.
const MAX_RELOCATED: usize = 1024;
/// Number of nodes asked at once.
const AT_ONCE: usize = 32;

/// The first incident in the report of a restore by a record.
const BY_RECORD: &str = "restored by its record: no catalogue was asked";

impl Client {
    /// Restores the save of `record` into a folder. Writes nothing unless everything can be read.
    /// If the step was replaced meanwhile, this still restores the save of the record, or nothing.
    /// Returns [`ClientError::Removed`] if a node knows that the save was removed.
    pub async fn restore_by_record(
        &self,
        record: &SaveRecord,
        request: RestoreRequest,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        let (job, step) = (record.job(), record.step());
        let shards = record.roots().iter().map(|root| (root.clone(), None)).collect();
        let parts = self.select_requested(job.at(step), shards, Some(&request))?;
        let directory = self.probe_record_nodes(record);
        let incident = Some(BY_RECORD);
        self.read_parts((job, step), parts, directory, incident, &Output::Files(&request), progress)
            .await
    }

    /// Returns a directory of the record's nodes with their current addresses, and of which of them
    /// answer.
    async fn probe_record_nodes(&self, record: &SaveRecord) -> Result<Directory, ClientError> {
        let mut views = self.hello_all(record.cluster(), record.nodes().to_vec()).await?;
        if let Some(view) = views.iter().find(|view| view.live) {
            self.set_gateway(Some(NodeAddress::of(&view.node)));
        }
        for found in
            self.hello_all(record.cluster(), self.find_relocated_nodes(&views).await).await?
        {
            // A node that answers at neither address keeps the new one, and is tried there again
            // when it is needed.
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

    /// Returns the nodes that do not answer and for which other nodes know another address. The
    /// nodes that answer are asked, or a gateway if none does. No catalogue is asked: there may be
    /// none, and that takes long to find out.
    async fn find_relocated_nodes(&self, views: &[NodeView]) -> Vec<Node> {
        let (live, away): (Vec<_>, Vec<_>) = views.iter().partition(|view| view.live);
        if away.is_empty() {
            return Vec::new();
        }
        let known: Vec<Vec<Node>> = if live.is_empty() {
            vec![
                self.call_any_gateway_within(&ListMembers {}, NEWS_LIMIT).await.unwrap_or_default(),
            ]
        } else {
            let asks = live.iter().map(|view| async move {
                let to = address(&NodeAddress::of(&view.node));
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

    /// Asks `nodes` for their `Hello` answer. Returns the nodes, and which of them answered in
    /// time. Returns [`ClientError::OtherCluster`] if a node belongs to another cluster.
    async fn hello_all(
        &self,
        cluster: ClusterId,
        nodes: Vec<Node>,
    ) -> Result<Vec<NodeView>, ClientError> {
        let asks = nodes.into_iter().map(|node| async move {
            let to = address(&NodeAddress::of(&node));
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

    /// Returns whether a node that answers has removed the save, or is to remove it.
    pub(in crate::client) async fn is_removed_anywhere(
        &self,
        directory: &Directory,
        save: SaveId,
    ) -> bool {
        let live = directory.views().filter(|view| view.live);
        let asks = live.map(|view| async move {
            let (to, call) =
                (address(&NodeAddress::of(&view.node)), FindRemovedSaves { saves: vec![save] });
            let gone = self.caller().call_within(&to, &call, HELLO_LIMIT).await;
            gone.is_ok_and(|gone| gone.contains(&save))
        });
        let asks: Vec<_> = asks.collect();
        stream::iter(asks).buffer_unordered(AT_ONCE).any(|gone| async move { gone }).await
    }
}
