//! The engine that uses the catalogue of another daemon over the network. It finds the catalogue
//! server through the seeds, and finds it again after a transfer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream;

use super::{Catalogue, CatalogueError, Entry, Guard, GuardedOutcome, SetOutcome};
use crate::clock::deadline;
use crate::format::records::Node;
use crate::id::{DbId, Epoch, LeaseId, PeerName};
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Caller, address};
use crate::net::{Address, Connection};
use crate::wire::calls::{
    CompareAndSetAnswer, CompareAndSetKey, CompareAndSetKeyGuarded, GetKey, GrantLease,
    GuardedSetAnswer, Hello, HelloAnswer, ListKeys, ListNodes, NodeView, RegisterAnswer,
    RegisterNode, RevokeLease, TouchLease,
};
use crate::wire::{Call, NodeAddress, RemoteError};

/// Number of attempts to find and ask the catalogue server before an operation fails.
const ATTEMPTS: u32 = 4;
/// Time limit for all attempts together. It is shorter than the time limits of clients whose
/// requests make a daemon ask the catalogue, so that a client receives the reason of a failure.
const ASK_LIMIT: Duration = Duration::from_secs(9);
/// Wait before the second attempt. It doubles with each further attempt.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Time limit for one attempt to renew or check a lease, or to renew a registration. Several
/// attempts fit into a lease period, even while the connection to a dead server seems alive.
const LEASE_LIMIT: Duration = Duration::from_secs(2);

/// Time limit for a node to say where the catalogue is. A later answer is ignored.
const HELLO_LIMIT: Duration = Duration::from_secs(3);
/// Number of nodes asked at once.
const ASK_AT_ONCE: usize = 16;
/// Maximum number of nodes kept to be asked when no seed knows the server.
const MAX_KNOWN: usize = 64;

/// The catalogue as the daemons that do not serve it see it.
pub struct RemoteCatalogue {
    caller: Arc<Caller>,
    own_node: Node,
    seeds: Vec<String>,
    server: Mutex<Option<(Epoch, NodeAddress)>>,
    /// The server that was forgotten last.
    previous_server: Mutex<Option<NodeAddress>>,
    /// The connection over which the server has proven which database it serves. On the next
    /// connection another process may answer.
    proven_connection: Mutex<Option<Weak<dyn Connection>>>,
    /// Nodes to ask when no seed knows the server.
    fallback_nodes: Mutex<BTreeMap<PeerName, NodeAddress>>,
    epoch: Mutex<Epoch>,
    /// The epoch and database of the catalogue that this node belongs to. Another database of this
    /// epoch, and any catalogue of an older epoch, are not trusted.
    expected: Mutex<(Epoch, Option<DbId>)>,
}

impl RemoteCatalogue {
    /// Returns an engine for the catalogue that the daemons at `seeds` (HOST:PORT) know. `own_node`
    /// is the node that asks.
    pub fn new(caller: Arc<Caller>, own_node: Node, seeds: Vec<String>) -> Self {
        let (server, previous_server, proven_connection, fallback_nodes, epoch, expected) =
            Default::default();
        Self {
            caller,
            own_node,
            seeds,
            server,
            previous_server,
            proven_connection,
            fallback_nodes,
            epoch,
            expected,
        }
    }

    /// Returns the server where the catalogue was last found. Returns `None` if it was found in an
    /// epoch before `min_epoch`, or if no server is known.
    pub fn known_server(&self, min_epoch: Epoch) -> Option<NodeAddress> {
        let home = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        home.as_ref().filter(|(found, _)| *found >= min_epoch).map(|(_, home)| home.clone())
    }

    /// Adds nodes to ask when no seed knows the server.
    pub fn add_fallback_nodes(&self, nodes: impl IntoIterator<Item = NodeAddress>) {
        let mut known = self.fallback_nodes.lock().unwrap_or_else(PoisonError::into_inner);
        for node in nodes {
            if known.len() < MAX_KNOWN || known.contains_key(&node.name) {
                known.insert(node.name.clone(), node);
            }
        }
    }

    /// Restricts trust to the catalogue of `epoch` with the database `db_id` (`None`: any), and to
    /// catalogues of later epochs. Does nothing if a later epoch is expected already.
    pub fn set_expected_epoch(&self, epoch: Epoch, db_id: Option<DbId>) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if epoch >= expected.0 {
            *expected = (epoch, db_id);
        }
    }

    fn is_expected_catalogue(&self, hello: &HelloAnswer) -> bool {
        let (epoch, map) = *self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = map.is_none_or(|map| hello.map.is_none_or(|found| found == map));
        hello.epoch.is_near(epoch) && (hello.epoch > epoch || hello.epoch == epoch && is_same)
    }

    /// Returns whether a server that answers `hello` is proven to serve the expected catalogue. An
    /// answer that names the expected epoch and no database proves nothing: the server may know the
    /// epoch only from another node's order. It names its database once it has registered with itself.
    fn is_proven_server(&self, hello: &HelloAnswer) -> bool {
        let (epoch, map) = *self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let is_told = map.is_none() || hello.map.is_some() || hello.epoch > epoch;
        self.is_expected_catalogue(hello) && is_told
    }

    /// Takes `server` for the catalogue server of `epoch`, without asking it.
    pub fn set_server(&self, epoch: Epoch, server: NodeAddress) {
        self.raise_known_epoch(epoch);
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, server));
    }

    fn forget_server(&self) {
        let home = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((_, home)) = home {
            *self.previous_server.lock().unwrap_or_else(PoisonError::into_inner) = Some(home);
        }
    }

    /// Asks the server that was forgotten last whether it still serves the catalogue. A read-only
    /// server refuses changes but still answers, while asking seeds that are down takes seconds.
    /// Returns the server if it still serves the catalogue.
    async fn ask_previous_server(&self) -> Option<NodeAddress> {
        let previous =
            self.previous_server.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let hello = Hello { me: Some(self.own_node.clone()) };
        let said = self.caller.call_within(&address(&previous), &hello, HELLO_LIMIT).await.ok()?;
        let serves = said.catalogue.as_ref().is_some_and(|home| home.name == said.node);
        if !serves || !self.is_expected_catalogue(&said) {
            return None;
        }
        self.set_server(said.epoch, previous.clone());
        Some(previous)
    }

    /// Returns a connection to `server` over which the server has proven that it serves the
    /// database that this node belongs to.
    async fn connect_proven(&self, server: &NodeAddress) -> Result<Arc<dyn Connection>, String> {
        let connection = self.caller.connection(server).await.map_err(|error| error.to_string())?;
        let proven = || self.proven_connection.lock().unwrap_or_else(PoisonError::into_inner);
        let this = Arc::downgrade(&connection);
        if proven().as_ref().is_some_and(|proven| proven.ptr_eq(&this)) {
            return Ok(connection);
        }
        let (to, hello) = (address(server), Hello { me: Some(self.own_node.clone()) });
        let said = self.caller.call_on(&*connection, &to, &hello, HELLO_LIMIT).await;
        let said = said.map_err(|error| error.to_string())?;
        if !self.is_proven_server(&said) {
            return Err(format!("{} serves another catalogue than the cluster's", server.name));
        }
        *proven() = Some(this);
        Ok(connection)
    }

    fn raise_known_epoch(&self, epoch: Epoch) {
        let mut known = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        *known = epoch.max(*known);
    }

    /// Finds the catalogue server unless it is known. Asks all seeds and trusts the answer of the
    /// highest epoch. If no seed knows the server, asks the other known nodes.
    async fn find_server(&self) -> Result<NodeAddress, CatalogueError> {
        if let Some(home) = self.known_server(Epoch::default()) {
            return Ok(home);
        }
        let seeds = self.seeds.iter().map(|seed| Address { host_port: seed.clone(), node: None });
        let mut found = self.ask_for_server(seeds.collect()).await;
        if found.is_err() {
            let known: Vec<Address> = {
                let known = self.fallback_nodes.lock().unwrap_or_else(PoisonError::into_inner);
                known.values().map(address).collect()
            };
            found = self.ask_for_server(known).await.or(found);
        }
        let (epoch, home) = found.map_err(|reason| self.unreachable_error(reason))?;
        self.set_server(epoch, home.clone());
        Ok(home)
    }

    /// Asks the nodes at `addresses` for the catalogue server. Returns the answer of the highest
    /// epoch. Within an epoch, the server's own answer takes precedence over those of other nodes.
    async fn ask_for_server(
        &self,
        addresses: Vec<Address>,
    ) -> Result<(Epoch, NodeAddress), String> {
        let hello = Hello { me: Some(self.own_node.clone()) };
        let asks: Vec<_> =
            addresses.iter().map(|to| self.caller.call_within(to, &hello, HELLO_LIMIT)).collect();
        let mut answers = stream::iter(asks).buffer_unordered(ASK_AT_ONCE);
        let mut best: Option<((Epoch, bool), NodeAddress)> = None;
        let mut reason = "no seed knows the catalogue server".to_owned();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(hello) => {
                    if self.is_expected_catalogue(&hello)
                        && let Some(home) = hello.catalogue
                    {
                        let rank = (hello.epoch, home.name == hello.node);
                        if best.as_ref().is_none_or(|(other, _)| rank > *other) {
                            best = Some((rank, home));
                        }
                    }
                }
                Err(error) => reason = error.to_string(),
            }
        }
        best.map(|((epoch, _), home)| (epoch, home)).ok_or(reason)
    }

    async fn call_server<C: Call>(&self, call: &C) -> Result<C::Answer, CatalogueError> {
        self.call_server_within(call, self.caller.limit()).await
    }

    /// Makes a call to the catalogue server. Each attempt may take `limit`, and all attempts
    /// together [`ASK_LIMIT`].
    async fn call_server_within<C: Call>(
        &self,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, CatalogueError> {
        let mut last = None;
        let attempts = self.call_with_retries(call, limit, &mut last);
        if let Ok(Ok(answer)) = deadline(&**self.caller.clock(), ASK_LIMIT, attempts).await {
            return Ok(answer);
        }
        Err(last
            .unwrap_or_else(|| self.unreachable_error(format!("no answer within {ASK_LIMIT:?}"))))
    }

    fn unreachable_error(&self, reason: String) -> CatalogueError {
        CatalogueError::Unreachable { seeds: self.seeds.join(", "), reason }
    }

    /// Makes the attempts of a call. `last_error` receives the reason of each failed attempt. The
    /// caller still has the last reason if its time limit cancels these attempts.
    async fn call_with_retries<C: Call>(
        &self,
        call: &C,
        limit: Duration,
        last_error: &mut Option<CatalogueError>,
    ) -> Result<C::Answer, ()> {
        let mut wait = FIRST_WAIT;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                self.caller.clock().sleep(wait).await;
                wait *= 2;
            }
            // If no server is known, the first two attempts ask the previous server before the seeds.
            // Later attempts ask the seeds at once, because a newer server may be elsewhere.
            let again = if attempt < 2 && self.known_server(Epoch::default()).is_none() {
                self.ask_previous_server().await
            } else {
                None
            };
            let found = match again {
                Some(home) => Ok(home),
                None => self.find_server().await,
            };
            let home = match found {
                Ok(home) => home,
                Err(error) => {
                    *last_error = Some(error);
                    continue;
                }
            };
            let connection = match self.connect_proven(&home).await {
                Ok(connection) => connection,
                Err(reason) => {
                    self.forget_server();
                    *last_error = Some(self.unreachable_error(reason));
                    continue;
                }
            };
            match self.caller.call_on(&*connection, &address(&home), call, limit).await {
                Ok(answer) => return Ok(answer),
                Err(CallError::Failed(failure)) if !failure.kind.is_transient() => {
                    let (kind, message) = (failure.kind, failure.message);
                    *last_error = Some(CatalogueError::Refused { kind, message });
                    return Err(());
                }
                // The catalogue may be in transfer to another server.
                Err(CallError::Failed(RemoteError { kind: ErrorKind::Busy, message })) => {
                    self.forget_server();
                    *last_error = Some(CatalogueError::Refused { kind: ErrorKind::Busy, message });
                }
                Err(error) => {
                    self.forget_server();
                    *last_error = Some(self.unreachable_error(error.to_string()));
                }
            }
        }
        Err(())
    }
}

#[async_trait]
impl Catalogue for RemoteCatalogue {
    fn epoch(&self) -> Epoch {
        *self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
        let found = self.call_server(&GetKey { key: key.to_owned() }).await?;
        Ok(found.map(|(value, revision)| Entry { value, revision }))
    }

    async fn compare_and_set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError> {
        let call = CompareAndSetKey { key: key.to_owned(), expected, value };
        // A retry inside `call_server` may meet the effect of this call's first attempt, so the wanted
        // value counts as this call's own.
        match self.call_server(&call).await? {
            CompareAndSetAnswer::Set(revision) => Ok(SetOutcome::Set(revision)),
            CompareAndSetAnswer::Conflict(Some((value, revision)))
                if Some(&value) == call.value.as_ref() =>
            {
                Ok(SetOutcome::Set(revision))
            }
            CompareAndSetAnswer::Conflict(None) if call.value.is_none() => Ok(SetOutcome::Set(0)),
            CompareAndSetAnswer::Conflict(other) => {
                Ok(SetOutcome::Conflict(other.map(|(value, revision)| Entry { value, revision })))
            }
        }
    }

    async fn compare_and_set_guarded(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Vec<u8>,
        guard: &Guard,
    ) -> Result<GuardedOutcome, CatalogueError> {
        let (guard_key, guard_revision) = (guard.key.clone(), guard.revision);
        let key = key.to_owned();
        let call = CompareAndSetKeyGuarded { key, expected, value, guard_key, guard_revision };
        Ok(match self.call_server(&call).await? {
            GuardedSetAnswer::Set(revision) => GuardedOutcome::Set(revision),
            // As in `compare_and_set`: the value found may be this call's own.
            GuardedSetAnswer::Conflict(Some((value, revision))) if value == call.value => {
                GuardedOutcome::Set(revision)
            }
            GuardedSetAnswer::Conflict(other) => {
                GuardedOutcome::Conflict(other.map(|(value, revision)| Entry { value, revision }))
            }
            GuardedSetAnswer::GuardConflict => GuardedOutcome::GuardConflict,
        })
    }

    async fn list_entries(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        let page = self.call_server(&ListKeys { prefix, after, limit }).await?;
        Ok(page
            .into_iter()
            .map(|(key, value, revision)| (key, Entry { value, revision }))
            .collect())
    }

    async fn grant_lease(&self) -> Result<(LeaseId, Duration), CatalogueError> {
        let (lease, ms) = self.call_server(&GrantLease {}).await?;
        Ok((lease, Duration::from_millis(ms)))
    }

    async fn renew_lease(&self, lease: LeaseId) -> Result<bool, CatalogueError> {
        self.call_server_within(&TouchLease { lease, keep: true }, LEASE_LIMIT).await
    }

    async fn is_lease_alive(&self, lease: LeaseId) -> Result<bool, CatalogueError> {
        self.call_server_within(&TouchLease { lease, keep: false }, LEASE_LIMIT).await
    }

    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), CatalogueError> {
        self.call_server(&RevokeLease { lease }).await
    }

    async fn register_node(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError> {
        let answer =
            self.call_server_within(&RegisterNode { node: node.clone() }, LEASE_LIMIT).await?;
        self.raise_known_epoch(answer.epoch);
        // A server that had just begun its epoch may have answered `Hello` with the previous epoch.
        // Correct the epoch that is recorded for the server.
        if let Some((found, _)) = &mut *self.server.lock().unwrap_or_else(PoisonError::into_inner) {
            *found = answer.epoch.max(*found);
        }
        Ok(answer)
    }

    async fn list_nodes(&self) -> Result<Vec<NodeView>, CatalogueError> {
        self.call_server(&ListNodes {}).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::id::ClusterId;
    use crate::net::frame::{FramedRecv, write_frame};
    use crate::net::memory::MemoryNetwork;
    use crate::net::pool::Pool;
    use crate::net::{Peer, Role, Transport};
    use crate::wire::{MAX_FRAME_BYTES, answer_to_bytes};

    fn at(name: &str) -> NodeAddress {
        NodeAddress { name: name.parse().unwrap(), host_port: name.into() }
    }

    /// Starts a node that answers its first calls with `answers`.
    fn answers(network: &Arc<MemoryNetwork>, name: &str, answers: Vec<Vec<u8>>) {
        let peer = Peer { role: Role::Node, name: name.parse().unwrap() };
        let transport = network.join(peer, name);
        let left = Arc::new(Mutex::new(answers.into_iter()));
        tokio::spawn(async move {
            // A caller asks by address and by name, over a connection for each.
            while let Some(connection) = transport.accept().await {
                let left = left.clone();
                tokio::spawn(async move {
                    while let Ok((mut send, recv)) = connection.accept_bi().await {
                        FramedRecv::new(recv).read_frame(MAX_FRAME_BYTES).await.unwrap();
                        let Some(bytes) = left.lock().unwrap().next() else { return };
                        write_frame(&mut *send, MAX_FRAME_BYTES, bytes.into()).await.unwrap();
                        send.finish().await.unwrap();
                    }
                });
            }
        });
    }

    /// Returns the `Hello` answer of node `name`: the server that it knows, and the id of its
    /// database.
    fn hello(name: &str, epoch: u64, home: &str, map: Option<DbId>) -> Vec<u8> {
        let hello = HelloAnswer {
            cluster: ClusterId([1; 16]),
            node: name.parse().unwrap(),
            epoch: Epoch(epoch),
            map,
            revision: 0,
            catalogue: Some(at(home)),
            version: String::new(),
        };
        answer_to_bytes(&Ok(hello)).unwrap()
    }

    fn says(network: &Arc<MemoryNetwork>, name: &str, epoch: u64, home: &str, map: Option<DbId>) {
        answers(network, name, vec![hello(name, epoch, home, map)]);
    }

    fn asks(network: &Arc<MemoryNetwork>, seeds: &[&str]) -> RemoteCatalogue {
        let client = Peer { role: Role::Node, name: "asker".parse().unwrap() };
        let (transport, clock) = (network.join(client, "asker"), SystemClock::new());
        let pool = Pool::new(Arc::new(transport), clock.clone());
        let caller = Caller::new(pool, clock, HELLO_LIMIT);
        let me = Node {
            name: "asker".parse().unwrap(),
            address: "asker".into(),
            zone: String::new(),
            rack: String::new(),
            storage: true,
        };
        RemoteCatalogue::new(caller, me, seeds.iter().map(|&seed| seed.to_owned()).collect())
    }

    #[tokio::test]
    async fn a_home_that_answers_is_believed_before_hearsay_of_its_epoch() {
        for (late, found) in [(4, "home"), (5, "rumour")] {
            let network = MemoryNetwork::new();
            says(&network, "first", late, "rumour", None);
            says(&network, "home", 4, "home", None);
            says(&network, "last", 4, "rumour", None);
            let home = asks(&network, &["first", "home", "last"]).find_server().await.unwrap();
            assert_eq!(home, at(found), "epoch {late}");
        }
    }

    #[tokio::test]
    async fn a_home_that_was_found_while_it_began_is_named_in_the_epoch_that_it_began() {
        let network = MemoryNetwork::new();
        let early = || hello("home", 0, "home", None);
        let registered = RegisterAnswer {
            epoch: Epoch(1),
            map: DbId([1; 16]),
            revision: 1,
            members: 1,
            lease_ms: 1000,
        };
        let registered = answer_to_bytes(&Ok(registered)).unwrap();
        answers(&network, "home", vec![early(), early(), registered]);
        let catalogue = asks(&network, &["home"]);
        catalogue.register_node(&catalogue.own_node).await.unwrap();
        assert_eq!(catalogue.known_server(Epoch(1)), Some(at("home")));
        assert_eq!(catalogue.known_server(Epoch(2)), None);
    }

    #[tokio::test]
    async fn a_home_that_names_another_map_or_none_is_not_asked() {
        let (ours, theirs) = (Some(DbId([1; 16])), Some(DbId([2; 16])));
        for (expected, epoch, map, is_taken) in [
            (ours, 4, ours, true),
            (ours, 4, theirs, false),
            (ours, 4, None, false),
            (ours, 3, ours, false),
            (ours, 5, theirs, true),
            (None, 4, None, true),
        ] {
            let network = MemoryNetwork::new();
            says(&network, "home", epoch, "home", map);
            let catalogue = asks(&network, &[]);
            catalogue.set_expected_epoch(Epoch(4), expected);
            let reached = catalogue.connect_proven(&at("home")).await;
            assert_eq!(reached.is_ok(), is_taken, "{expected:?}: epoch {epoch}, {map:?}");
        }
    }
}
