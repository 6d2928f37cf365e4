//! The members of the cluster, as far as this node knows them: the stored list, the nodes that
//! introduced themselves, and the nodes that those name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};

use crate::catalogue::record_access::read_ring_changes;
use crate::format::records::{Members, Node as NodeRecord, RingChanges};
use crate::id::PeerName;
use crate::kind::ErrorKind;
use crate::net::call::address;
use crate::net::{Peer, Role};
use crate::node::context::NodeContext;
use crate::store::Store;
use crate::wire::calls::{Hello, HelloAnswer, ListMembers, ListRingChanges};
use crate::wire::{NodeAddress, RemoteError};

/// Time limit for a node to answer with its epoch, or to accept the epoch that the server claims. A
/// node that exceeds it is not counted.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for a node to answer with its ring changes.
const RING_CHANGES_LIMIT: Duration = Duration::from_secs(20);
/// Maximum number of nodes that are asked at once.
const AT_ONCE: usize = 32;
/// Maximum number of rounds in which members name further members.
const MEMBER_ROUNDS: usize = 4;
/// Maximum number of nodes that are remembered because they introduced themselves.
const MAX_INTRODUCED: usize = 4096;

/// The service that knows the other nodes.
pub(in crate::node) struct Membership {
    context: Arc<NodeContext>,
    /// The nodes that introduced themselves since the list was stored.
    introduced: Mutex<BTreeMap<PeerName, NodeRecord>>,
    /// The ring changes that were found when the members were last discovered, on this node and on
    /// all nodes that answered.
    heard_changes: Mutex<RingChanges>,
    /// Held while the list of nodes is read and stored, so that an older list does not replace a
    /// newer one.
    storing: tokio::sync::Mutex<()>,
}

impl Membership {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        Self {
            context,
            introduced: Mutex::default(),
            heard_changes: Mutex::default(),
            storing: tokio::sync::Mutex::default(),
        }
    }

    /// Answers a hello. If a node introduces itself with the hello, its record is kept.
    pub(in crate::node) async fn answer_hello(
        &self,
        call: Hello,
        peer: &Peer,
    ) -> Result<HelloAnswer, RemoteError> {
        if let Some(node) = call.me.filter(|node| peer.role == Role::Node && peer.name == node.name)
        {
            // This node may have noted an epoch without its catalogue server, and may know no other
            // node to ask.
            self.context.remote.add_fallback_nodes([NodeAddress::of(&node)]);
            let mut met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
            if met.len() < MAX_INTRODUCED || met.contains_key(&node.name) {
                met.insert(node.name.clone(), node);
            }
        }
        Ok(HelloAnswer {
            cluster: self.context.settings.cluster,
            node: self.context.settings.name.clone(),
            epoch: self.context.store.highest_seen_epoch(),
            map: self.context.store.db_id_of_highest_epoch(),
            revision: self.context.store.revision_of_current_db(),
            catalogue: self.context.catalogue_server_address(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    /// Introduces this node to `nodes`. Returns those that belong to this cluster and answer in
    /// time with a plausible epoch, with their answers.
    pub(in crate::node) async fn exchange_hellos(
        &self,
        nodes: &[NodeRecord],
    ) -> Vec<(NodeRecord, HelloAnswer)> {
        let ask = |node: NodeRecord| async move {
            let to = NodeAddress::of(&node);
            let hello = self
                .context
                .caller
                .call_within(
                    &address(&to),
                    &Hello { me: Some(self.context.own_node_record()) },
                    HELLO_LIMIT,
                )
                .await
                .ok()?;
            let seen = self.context.store.highest_seen_epoch();
            if !hello.epoch.is_near(seen) {
                tracing::error!(node = %node.name, epoch = %hello.epoch, %seen, "a node reports an epoch far above the highest that this node has seen: its answer is ignored");
                return None;
            }
            (hello.cluster == self.context.settings.cluster).then_some((node, hello))
        };
        let asks: Vec<_> = nodes.iter().cloned().map(ask).collect();
        let mut asks = stream::iter(asks).buffer_unordered(AT_ONCE);
        let mut answers = Vec::new();
        while let Some(answer) = asks.next().await {
            answers.extend(answer);
        }
        answers
    }

    /// Reads the list of nodes and the ring changes from the catalogue, and stores both on this
    /// node, to be used when no catalogue answers.
    pub(in crate::node) async fn fetch_and_store_members(&self) -> Result<(), RemoteError> {
        let _alone = self.storing.lock().await;
        let met_before: Vec<PeerName> = {
            let met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
            met.keys().cloned().collect()
        };
        let mut nodes: Vec<NodeRecord> = self
            .context
            .catalogue()
            .list_nodes()
            .await?
            .into_iter()
            .map(|view| view.node)
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        self.context.remote.add_fallback_nodes(nodes.iter().map(NodeAddress::of));
        // A node leaves the list only after its ring change is recorded. The ring changes are
        // therefore read after the list, and stored before it.
        let changes = read_ring_changes(&*self.context.catalogue()).await?;
        let store_both = move |store: &Store| {
            store.put_ring_changes(&changes)?;
            store.put_members(&Members { nodes })
        };
        self.context.run_on_store(store_both).await?;
        // A node that introduced itself before the list was read is on the list, or was taken off
        // it. In both cases its introduction is not needed any more.
        let mut met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
        met.retain(|name, _| !met_before.contains(name));
        Ok(())
    }

    /// Returns the members of the list that this node stores, and the nodes that have introduced
    /// themselves since. Asks no other node.
    pub(in crate::node) async fn list_known_members(&self) -> Result<Vec<NodeRecord>, RemoteError> {
        let mut nodes = self.context.run_on_store(|store| store.read_members()).await?.nodes;
        let met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, node) in met.iter() {
            if !nodes.iter().any(|known| known.name == *name) {
                nodes.push(node.clone());
            }
        }
        Ok(nodes)
    }

    /// Returns the nodes that have introduced themselves since this node stored the list of nodes.
    pub(super) fn list_introduced(&self) -> Vec<NodeRecord> {
        let met = self.introduced.lock().unwrap_or_else(PoisonError::into_inner);
        met.values().cloned().collect()
    }

    /// Returns the ring changes that this node and `nodes` store, and the nodes whose answer
    /// failed. A node whose program does not know ring changes counts as storing none.
    pub(in crate::node) async fn collect_ring_changes(
        &self,
        nodes: &[NodeRecord],
    ) -> (RingChanges, Vec<PeerName>) {
        let (mut found, mut failed) = (RingChanges::default(), Vec::new());
        match self.context.run_on_store(|store| store.read_ring_changes()).await {
            Ok(stored) => found = stored,
            Err(_) => failed.push(self.context.settings.name.clone()),
        }
        let asks = nodes.iter().map(|node| async {
            let to = address(&NodeAddress::of(node));
            let call = ListRingChanges { only_stored: true };
            let answer = self.context.caller.call_within(&to, &call, RING_CHANGES_LIMIT).await;
            (node.name.clone(), answer)
        });
        let asks: Vec<_> = asks.collect();
        let mut asks = stream::iter(asks).buffer_unordered(AT_ONCE);
        while let Some((node, answer)) = asks.next().await {
            match answer {
                Ok(stored) => stored.changes.into_iter().for_each(|change| found.merge(change)),
                Err(error) if error.kind() == ErrorKind::Invalid => {}
                Err(error) => {
                    tracing::warn!(%node, %error, "failed to read the ring changes of a node");
                    failed.push(node);
                }
            }
        }
        (found, failed)
    }

    /// Returns the ring changes that this node stores, and those that it has heard of from other
    /// nodes.
    pub(in crate::node) async fn list_stored_and_heard_ring_changes(
        &self,
    ) -> Result<RingChanges, RemoteError> {
        let mut found = self.context.run_on_store(|store| store.read_ring_changes()).await?;
        let heard = self.heard_changes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        heard.changes.into_iter().for_each(|change| found.merge(change));
        Ok(found)
    }

    /// Returns all nodes that this node or any reached node has heard of, and the answers of those
    /// that were reached. Remembers the ring changes that they store: this node may have missed
    /// some.
    pub(in crate::node) async fn discover_members(
        &self,
    ) -> Result<(Vec<NodeRecord>, Vec<(NodeRecord, HelloAnswer)>), RemoteError> {
        let mut known: BTreeMap<_, NodeRecord> = BTreeMap::new();
        let add = |nodes: Vec<NodeRecord>, known: &mut BTreeMap<_, NodeRecord>| {
            let before = known.len();
            for node in nodes {
                known.entry(node.name.clone()).or_insert(node);
            }
            known.len() > before
        };
        add(vec![self.context.own_node_record()], &mut known);
        add(self.list_known_members().await?, &mut known);
        let mut reached = Vec::new();
        for _ in 0..MEMBER_ROUNDS {
            let nodes: Vec<NodeRecord> = known.values().cloned().collect();
            reached = self.exchange_hellos(&nodes).await;
            let asks = reached.iter().map(|(node, _)| async {
                let to = NodeAddress::of(node);
                self.context.caller.call(&to, &ListMembers {}).await.unwrap_or_default()
            });
            let found: Vec<NodeRecord> = join_all(asks).await.into_iter().flatten().collect();
            if !add(found, &mut known) {
                break;
            }
        }
        let nodes: Vec<NodeRecord> = reached.iter().map(|(node, _)| node.clone()).collect();
        let (changes, _) = self.collect_ring_changes(&nodes).await;
        *self.heard_changes.lock().unwrap_or_else(PoisonError::into_inner) = changes;
        Ok((known.into_values().collect(), reached))
    }
}
