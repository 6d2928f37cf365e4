//! A network inside one process, for deterministic clusters: no sockets, no threads, no clock. It
//! behaves like QUIC wherever callers can tell the difference: windows, stream limits, resets, when
//! a stream becomes visible, and which data a close loses. It also produces faults on demand:
//! [`MemoryNetwork::kill`], [`MemoryNetwork::partition`], [`MemoryNetwork::set_lag`],
//! [`MemoryNetwork::set_pace`], [`MemoryNetwork::mute`], [`MemoryNetwork::cut_one_way`] and
//! [`MemoryNetwork::deliver_again`].

mod connection;
mod link;
mod outgoing;
mod pipe;
mod stream;
mod tap;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Mutex as AsyncMutex, mpsc};

use crate::clock::Clock;

use super::{ABANDONED, Address, Connection, NetError, Peer, Role, Transport, check_server};
use connection::MemoryConnection;
use link::Link;
use pipe::WINDOW_BYTES;
pub use tap::Message;
use tap::Tap;

/// Maximum number of connections that wait for [`Transport::accept`]. A further one is refused as
/// busy.
const BACKLOG: usize = 64;
/// Length of the chunks that leave a slow member, in bytes.
const PACE_BYTES: usize = 64 << 10;

/// A simulated network in this process.
#[derive(Default)]
pub struct MemoryNetwork {
    state: Mutex<State>,
}

/// The delay of sent data, and the clock that measures it.
#[derive(Clone)]
struct Lag {
    clock: Arc<dyn Clock>,
    draw: Arc<dyn Fn() -> Duration + Send + Sync>,
}

/// The members that send slowly or not at all, by address.
#[derive(Default)]
struct Paces(Mutex<BTreeMap<String, Pace>>);

#[derive(Clone)]
enum Pace {
    /// The member sends slowly: the clock, and the time that each [`PACE_BYTES`] take.
    Slow(Arc<dyn Clock>, Duration),
    /// Nothing that the member sends leaves it.
    Mute,
}

impl Paces {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Pace>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, address: &str) -> Option<Pace> {
        self.lock().get(address).cloned()
    }
}

#[derive(Default)]
struct State {
    lag: Option<Lag>,
    paces: Arc<Paces>,
    tap: Option<Tap>,
    members: BTreeMap<String, Member>,
    links: Vec<Weak<Link>>,
    cuts: BTreeSet<(String, String)>,
    joined: u64,
}

struct Member {
    /// A number that tells a transport from its successor at the same address.
    number: u64,
    peer: Peer,
    backlog: mpsc::Sender<Arc<dyn Connection>>,
}

/// A member's access to a [`MemoryNetwork`]. Dropping it removes the member from the network.
pub struct MemoryTransport {
    network: Arc<MemoryNetwork>,
    number: u64,
    peer: Peer,
    address: String,
    backlog: AsyncMutex<mpsc::Receiver<Arc<dyn Connection>>>,
}

fn pair(a: &str, b: &str) -> (String, String) {
    if a <= b { (a.into(), b.into()) } else { (b.into(), a.into()) }
}

impl MemoryNetwork {
    /// Returns a network without members.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Adds a member `peer`, which is reachable at `address` if it is a node. First kills the
    /// member that had the address, as a restart does. Returns the new member's transport.
    pub fn join(self: &Arc<Self>, peer: Peer, address: &str) -> MemoryTransport {
        self.kill(address);
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let mut state = self.lock();
        state.joined += 1;
        state.paces.lock().remove(address);
        let number = state.joined;
        let member = Member { number, peer: peer.clone(), backlog: sender };
        state.members.insert(address.to_owned(), member);
        drop(state);
        MemoryTransport {
            network: self.clone(),
            number,
            peer,
            address: address.to_owned(),
            backlog: AsyncMutex::new(receiver),
        }
    }

    /// Removes the member at `address` as a power cut does: its connections break without notice,
    /// it is no longer reachable, and every call of its own transport fails.
    pub fn kill(&self, address: &str) {
        let mut state = self.lock();
        state.members.remove(address);
        state.break_links(|link| link.joins(address));
    }

    /// Partitions two addresses: connections between them break, and new ones are refused.
    pub fn partition(&self, a: &str, b: &str) {
        let mut state = self.lock();
        state.cuts.insert(pair(a, b));
        state.break_links(|link| link.joins(a) && link.joins(b));
    }

    /// Delays each chunk and each end of a stream by a time that `draw` returns, on all connections
    /// that are made from now on.
    pub fn set_lag(
        &self,
        clock: Arc<dyn Clock>,
        draw: impl Fn() -> Duration + Send + Sync + 'static,
    ) {
        self.lock().lag = Some(Lag { clock, draw: Arc::new(draw) });
    }

    /// Slows the member at `address` down: each 64 KiB that it sends take the time `each`, on
    /// existing connections too, until a member joins at that address again.
    pub fn set_pace(&self, address: &str, clock: Arc<dyn Clock>, each: Duration) {
        self.lock().paces.lock().insert(address.to_owned(), Pace::Slow(clock, each));
    }

    /// Mutes the member at `address`: it still receives everything, but nothing that it sends
    /// leaves it. Its connections stay open. This ends when a member joins at that address again.
    pub fn mute(&self, address: &str) {
        self.lock().paces.lock().insert(address.to_owned(), Pace::Mute);
    }

    /// Cuts the direction from `from` to `to`: on existing connections nothing that `from` sends
    /// leaves it, while it still receives. Neither side can make new connections. QUIC ends such a
    /// connection once it has been idle; see [`MemoryNetwork::break_one_way`].
    pub fn cut_one_way(&self, from: &str, to: &str) {
        let mut state = self.lock();
        state.cuts.insert(pair(from, to));
        for link in state.links.iter().filter_map(Weak::upgrade).filter(|link| link.joins(to)) {
            if let Some(side) = link.side_of(from) {
                link.silence(side);
            }
        }
    }

    /// Breaks those connections between two addresses that are cut in one direction.
    pub fn break_one_way(&self, a: &str, b: &str) {
        self.lock().break_links(|link| link.joins(a) && link.joins(b) && link.is_silenced());
    }

    /// Passes to `tap` each request that a node sends to another one, on connections that are made
    /// from now on, when the request's stream is dropped.
    pub fn set_tap(&self, tap: impl Fn(Message) + Send + Sync + 'static) {
        self.lock().tap = Some(Tap(Arc::new(tap)));
    }

    /// Sends a request again on a connection of its own, and returns once it was answered. The
    /// original sender need not exist any more.
    ///
    /// # Errors
    /// If the receiver is not there, or does not accept the request.
    pub async fn deliver_again(&self, message: &Message) -> Result<(), NetError> {
        let Message { from, from_address, to, chunks } = message;
        let to = Address { host_port: to.clone(), node: None };
        let connection = self.lock().link(from, from_address, &to, None)?;
        let (mut send, mut recv) = connection.open_bi().await?;
        for chunk in chunks {
            send.write(chunk.clone()).await?;
        }
        send.finish().await?;
        while recv.read(WINDOW_BYTES).await?.is_some() {}
        Ok(())
    }

    /// Ends a partition between two addresses, or a cut in one direction. Connections that are cut in
    /// one direction break first. Broken connections stay broken.
    pub fn heal(&self, a: &str, b: &str) {
        self.break_one_way(a, b);
        self.lock().cuts.remove(&pair(a, b));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn break_links(&mut self, concerned: impl Fn(&Link) -> bool) {
        self.links.retain(|link| match link.upgrade() {
            Some(link) if concerned(&link) => {
                link.close(None, ABANDONED, "");
                false
            }
            other => other.is_some(),
        });
    }
}

impl State {
    /// Returns a new connection between the peer at `from_address` and the node at `to`.
    fn link(
        &mut self,
        from: &Peer,
        from_address: &str,
        to: &Address,
        tap: Option<Tap>,
    ) -> Result<Arc<MemoryConnection>, NetError> {
        let unreachable =
            |reason: &str| NetError::Unreachable { to: to.to_string(), reason: reason.to_owned() };
        if self.cuts.contains(&pair(from_address, &to.host_port)) {
            return Err(unreachable("the network is partitioned"));
        }
        let member = match self.members.get(&to.host_port) {
            Some(member) if member.peer.role == Role::Node => member,
            _ => return Err(unreachable("nobody listens there")),
        };
        check_server(to, &member.peer)?;
        let ends = [from_address.to_owned(), to.host_port.clone()];
        let tap = tap.filter(|_| from.role == Role::Node);
        let link = Link::new(ends, self.lag.clone(), self.paces.clone(), tap);
        let (ours, theirs) = MemoryConnection::both_ends(&link, from.clone(), member.peer.clone());
        match member.backlog.try_send(theirs) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(NetError::Busy { peer: to.to_string() });
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                return Err(unreachable("nobody listens there"));
            }
        }
        self.links.retain(|link| link.strong_count() > 0);
        self.links.push(Arc::downgrade(&link));
        Ok(ours)
    }
}

impl MemoryTransport {
    fn is_member(&self, state: &State) -> bool {
        state.members.get(&self.address).is_some_and(|member| member.number == self.number)
    }

    fn leave(&self, code: u32, reason: &str) {
        let mut state = self.network.lock();
        if !self.is_member(&state) {
            return;
        }
        state.members.remove(&self.address);
        state.links.retain(|link| {
            let Some(link) = link.upgrade() else { return false };
            if let Some(side) = link.side_of(&self.address) {
                link.close(Some(side), code, reason);
            }
            true
        });
    }
}

#[async_trait]
impl Transport for MemoryTransport {
    async fn connect(&self, to: &Address) -> Result<Arc<dyn Connection>, NetError> {
        let mut state = self.network.lock();
        if !self.is_member(&state) {
            return Err(NetError::ShutDown);
        }
        let tap = state.tap.clone();
        Ok(state.link(&self.peer, &self.address, to, tap)?)
    }

    async fn accept(&self) -> Option<Arc<dyn Connection>> {
        let mut backlog = self.backlog.lock().await;
        // Leaving the network drops the sender, which ends this loop.
        loop {
            let connection = backlog.recv().await?;
            if !connection.is_closed() {
                return Some(connection);
            }
        }
    }

    async fn close(&self) {
        self.leave(ABANDONED, "the peer shuts down");
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        self.leave(ABANDONED, "the peer shuts down");
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures_util::FutureExt;

    use super::*;

    fn join(network: &Arc<MemoryNetwork>, role: Role, name: &str) -> MemoryTransport {
        network.join(Peer { role, name: name.parse().unwrap() }, name)
    }

    fn to(host_port: &str) -> Address {
        Address { host_port: host_port.into(), node: None }
    }

    async fn is_unreachable(from: &MemoryTransport, host_port: &str) -> bool {
        matches!(from.connect(&to(host_port)).await, Err(NetError::Unreachable { .. }))
    }

    #[tokio::test]
    async fn the_killed_are_gone_until_they_join_again() {
        let network = MemoryNetwork::new();
        let (a, b) = (join(&network, Role::Node, "a"), join(&network, Role::Node, "b"));
        let at_b = b.connect(&to("a")).await.unwrap();
        let at_a = a.accept().await.unwrap();
        let mut recv = {
            let mut send = at_a.open_uni().await.unwrap();
            send.write(Bytes::from_static(b"last words")).await.unwrap();
            let recv = at_b.accept_uni().await.unwrap();
            network.kill("a");
            recv
        };
        at_b.closed().await;
        assert!(matches!(at_b.open_uni().await, Err(NetError::Closed { code: None, .. })));
        assert_eq!(recv.read(99).await, Err(NetError::Reset { code: ABANDONED }));
        assert!(a.accept().await.is_none());
        assert!(matches!(a.connect(&to("b")).await, Err(NetError::ShutDown)));
        assert!(is_unreachable(&b, "a").await);

        let again = join(&network, Role::Node, "a");
        drop(a);
        let _held = b.connect(&to("a")).await.unwrap();
        assert!(again.accept().await.is_some());
    }

    #[tokio::test]
    async fn a_partition_parts_two_and_nobody_else() {
        let network = MemoryNetwork::new();
        let nodes = ["a", "b", "c"].map(|name| join(&network, Role::Node, name));
        let [a, b, c] = &nodes;
        let (a_b, a_c) = (a.connect(&to("b")).await.unwrap(), a.connect(&to("c")).await.unwrap());
        network.partition("b", "a");
        assert!(a_b.is_closed() && !a_c.is_closed());
        assert!(is_unreachable(a, "b").await && is_unreachable(b, "a").await);
        c.connect(&to("b")).await.unwrap();
        network.heal("a", "b");
        assert!(a_b.is_closed());
        a.connect(&to("b")).await.unwrap();
    }

    #[tokio::test]
    async fn a_cut_in_one_direction_parts_hearing_from_being_heard() {
        let network = MemoryNetwork::new();
        let (a, b) = (join(&network, Role::Node, "a"), join(&network, Role::Node, "b"));
        let at_b = b.connect(&to("a")).await.unwrap();
        let at_a = a.accept().await.unwrap();
        let (mut ask, mut answer) = at_b.open_bi().await.unwrap();
        ask.write(Bytes::from_static(b"before")).await.unwrap();
        let (mut reply, mut asked) = at_a.accept_bi().await.unwrap();
        network.cut_one_way("a", "b");
        ask.write(Bytes::from_static(b", after")).await.unwrap();
        ask.finish().await.unwrap();
        assert!(reply.write(Bytes::from_static(b"lost")).now_or_never().is_none());
        assert_eq!(asked.read(99).await.unwrap().unwrap(), "before");
        assert_eq!(asked.read(99).await.unwrap().unwrap(), ", after");
        assert!(is_unreachable(&a, "b").await && is_unreachable(&b, "a").await);
        network.heal("a", "b");
        answer.read(99).await.unwrap_err();
        b.connect(&to("a")).await.unwrap();
    }

    #[tokio::test]
    async fn requests_between_nodes_can_come_again() {
        let network = MemoryNetwork::new();
        let (a, b) = (join(&network, Role::Node, "a"), join(&network, Role::Node, "b"));
        let client = join(&network, Role::Client, "c");
        let (sender, mut kept) = mpsc::unbounded_channel();
        network.set_tap(move |message| sender.send(message).unwrap());
        for from in [&client, &b] {
            let connection = from.connect(&to("a")).await.unwrap();
            let (mut send, _recv) = connection.open_bi().await.unwrap();
            send.write(Bytes::from_static(b"an order")).await.unwrap();
            a.accept().await.unwrap();
        }
        let message = kept.recv().await.unwrap();
        assert!(kept.try_recv().is_err());
        drop(b);
        let again = async {
            let connection = a.accept().await.unwrap();
            let (mut send, mut recv) = connection.accept_bi().await.unwrap();
            let request = recv.read(99).await.unwrap().unwrap();
            send.finish().await.unwrap();
            (connection.peer().name.to_string(), request)
        };
        let (delivered, (from, request)) = tokio::join!(network.deliver_again(&message), again);
        delivered.unwrap();
        assert_eq!((from.as_str(), &request[..]), ("b", &b"an order"[..]));
        assert!(kept.try_recv().is_err(), "what comes again is not copied again");
    }

    #[tokio::test]
    async fn nobody_connects_to_a_client_or_to_a_full_backlog() {
        let network = MemoryNetwork::new();
        let (client, _node) = (join(&network, Role::Client, "c"), join(&network, Role::Node, "a"));
        assert!(is_unreachable(&client, "c").await && is_unreachable(&client, "nowhere").await);
        let mut open = Vec::new();
        for _ in 0..BACKLOG {
            open.push(client.connect(&to("a")).await.unwrap());
        }
        assert!(matches!(client.connect(&to("a")).await, Err(NetError::Busy { .. })));
    }
}
