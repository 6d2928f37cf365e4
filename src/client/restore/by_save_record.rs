//! Restoring a save by its record. Neither a catalogue nor a majority of nodes is asked, because
//! the record says what was committed (docs/semantics.md, 6). Every byte is verified as in any
//! restore. The restore ends if a node knows that the save was removed.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;

use super::output::Output;
use crate::client::{Client, ClientError, ProgressFn, RestoreReport, RestoreRequest};
use crate::format::records::{Node, RingChanges};
use crate::format::save_record::SaveRecord;
use crate::id::{ClusterId, NodeId, SaveId};
use crate::net::call::address;
use crate::topology::Directory;
use crate::wire::calls::{FindRemovedSaves, Hello, ListMembers, ListRingChanges, NodeView};
use crate::wire::{Call, NodeAddress};

/// Time limit for a node to answer `Hello`, or to say whether it has removed a save. A node that
/// does not answer `Hello` in time counts as unreachable.
const HELLO_LIMIT: Duration = Duration::from_secs(3);
/// Time limit for a node to report the ring changes, or the addresses of other nodes, that it
/// knows.
const NEWS_LIMIT: Duration = Duration::from_secs(3);
/// Maximum number of addresses that are tried for nodes that have moved.
const MAX_RELOCATED: usize = 1024;
/// Number of nodes asked at once.
const AT_ONCE: usize = 32;

/// The first incident in the report of a restore by a record.
const BY_RECORD: &str = "restored by its record: no catalogue was asked";

impl Client {
    /// Restores the save of `record` into a folder. Writes only if everything can be read. If the
    /// step was replaced meanwhile, this still restores the save of the record, or nothing. Returns
    /// [`ClientError::Removed`] if a node knows that the save was removed.
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

    /// Returns a directory of the record's nodes and their successors, with their current addresses
    /// and with which of them answer.
    async fn probe_record_nodes(&self, record: &SaveRecord) -> Result<Directory, ClientError> {
        let mut views = self.hello_all(record.cluster(), record.nodes().to_vec()).await?;
        if let Some(view) = views.iter().find(|view| view.live) {
            self.set_gateway(NodeAddress::of(&view.node));
        }
        let changes = self.fetch_known_ring_changes(&views).await;
        let others = self.find_moved_nodes_and_successors(record, &views, &changes).await;
        for found in self.hello_all(record.cluster(), others).await? {
            // A node that answers at neither address keeps the new one, and is tried there again
            // when it is needed.
            let is_found = |view: &NodeView| view.live && view.node.name == found.node.name;
            if found.live || !views.iter().any(is_found) {
                views.retain(|view| view.node.name != found.node.name);
                views.push(found);
            }
        }
        if let Some(view) = views.iter().find(|view| view.live) {
            self.set_gateway(NodeAddress::of(&view.node));
        } else {
            let asked: Vec<&str> = views.iter().map(|view| view.node.address.as_str()).collect();
            let reason = "none of the record's nodes answers".to_owned();
            return Err(ClientError::Unreachable { seeds: asked.join(", "), reason });
        }
        let directory = Directory::new(views, changes);
        if self.is_removed_anywhere(&directory, record.saved().save).await {
            return Err(ClientError::Removed { job: record.job().clone(), step: record.step() });
        }
        Ok(directory)
    }

    /// Makes a call to the nodes that answer, or to a gateway if none does. Returns the answers. No
    /// catalogue is asked: there may be none, and that takes long to find out.
    async fn ask_live_nodes<C: Call>(&self, views: &[NodeView], call: &C) -> Vec<C::Answer> {
        let live: Vec<&NodeView> = views.iter().filter(|view| view.live).collect();
        if live.is_empty() {
            let answer = self.call_any_gateway_within(call, NEWS_LIMIT).await;
            return answer.into_iter().collect();
        }
        let asks = live.into_iter().map(|view| async move {
            let to = address(&NodeAddress::of(&view.node));
            self.caller().call_within(&to, call, NEWS_LIMIT).await.ok()
        });
        let asks: Vec<_> = asks.collect();
        stream::iter(asks).buffered(AT_ONCE).filter_map(std::future::ready).collect().await
    }

    /// Returns the ring changes that the nodes know.
    async fn fetch_known_ring_changes(&self, views: &[NodeView]) -> RingChanges {
        let mut changes = RingChanges::default();
        let call = ListRingChanges { only_stored: true };
        for known in self.ask_live_nodes(views, &call).await {
            known.changes.into_iter().for_each(|change| changes.merge(change));
        }
        changes
    }

    /// Returns the nodes that do not answer and for which other nodes know another address, and the
    /// successors of the nodes in the record's rings.
    async fn find_moved_nodes_and_successors(
        &self,
        record: &SaveRecord,
        views: &[NodeView],
        changes: &RingChanges,
    ) -> Vec<Node> {
        let rings = record.roots().iter().flat_map(|root| &root.ring);
        let in_rings: Vec<NodeId> = rings.map(|member| member.node).collect();
        let directory = Directory::new(Vec::new(), changes.clone());
        let successors = directory.all_successors_of(&in_rings);
        let away: Vec<_> = views.iter().filter(|view| !view.live).collect();
        if away.is_empty() && successors.is_empty() {
            return Vec::new();
        }
        let known = self.ask_live_nodes(views, &ListMembers {}).await;
        let mut moved: Vec<Node> = Vec::new();
        for node in known.into_iter().flatten() {
            let is_elsewhere = away
                .iter()
                .any(|view| view.node.name == node.name && view.node.address != node.address);
            let is_new = views.iter().all(|view| view.node.name != node.name);
            let is_successor = is_new && successors.contains(&NodeId::of(&node.name));
            let is_news = is_elsewhere || is_successor;
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
