//! The transport over QUIC (quinn): one UDP socket per process, and mutual TLS with certificates
//! from the cluster's authority.
//!
//! A connection is handed out only when the other side has shown a certificate of this cluster's
//! authority, the URI in it names this cluster and, on the connecting side, the expected node. A
//! peer that fails this is refused and logged; the daemon continues.

mod connection;
mod crypto;
mod handshake_slots;
mod limits;
mod refused;
mod reset;
mod socket;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use quinn::{AsyncUdpSocket, Endpoint, Incoming, Runtime, ServerConfig, TokioRuntime, VarInt};
use rustls_pki_types::CertificateDer;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{JoinHandle, JoinSet};

pub use crypto::ALPN;
pub use limits::TransportLimits;

use super::identity::{Identity, IdentityError, peer_of};
use super::{ABANDONED, Address, Connection, NetError, Peer, Role, Transport, check_server, tls};
use crate::clock::{Clock, deadline};
use crate::id::ClusterId;
use crate::kind::ErrorKind;
use connection::{QuicConnection, connection_error};
use handshake_slots::{HandshakeSlot, HandshakeSlots, MAX_HANDSHAKES};
use refused::Refused;

/// Time limit for connecting: resolving the host and trying its addresses, at most
/// [`MAX_ADDRESSES`], together.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of an incoming handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Time for which [`Transport::close`] waits for the peers to acknowledge.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// Maximum number of addresses of one host that are tried.
const MAX_ADDRESSES: usize = 4;
/// Maximum bytes of datagrams that arrive for handshakes before they begin, for all handshakes
/// together.
const INCOMING_BUFFER_BYTES: u64 = 1 << 20;

/// The QUIC endpoint of a process.
pub struct QuicTransport {
    endpoint: Endpoint,
    client: quinn::ClientConfig,
    cluster: ClusterId,
    clock: Arc<dyn Clock>,
    socket: Weak<dyn AsyncUdpSocket>,
    listener: Option<Listener>,
}

struct Listener {
    ready: Mutex<mpsc::Receiver<Admitted>>,
    task: JoinHandle<()>,
}

/// A verified connection. It keeps the slot of its handshake until it is accepted.
struct Admitted {
    connection: Arc<dyn Connection>,
    _slot: HandshakeSlot,
}

impl QuicTransport {
    /// Opens a node's endpoint on `addr`, which accepts and makes connections.
    ///
    /// # Errors
    /// [`IdentityError::NotANode`] if the identity is a client's; [`NetError::AddrInUse`] or
    /// [`NetError::Socket`] if the address cannot be bound.
    pub async fn listen(
        addr: SocketAddr,
        identity: &Identity,
        limits: &TransportLimits,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, NetError> {
        if identity.role() != Role::Node {
            return Err(IdentityError::NotANode { name: identity.name().clone() }.into());
        }
        let mut server = ServerConfig::with_crypto(crypto::server_crypto(identity)?);
        server
            .transport_config(limits.accepting_config()?)
            // Members do not change their addresses: a packet from a new address is not theirs.
            .migration(false)
            .max_incoming(MAX_HANDSHAKES)
            .incoming_buffer_size(INCOMING_BUFFER_BYTES / 16)
            .incoming_buffer_size_total(INCOMING_BUFFER_BYTES);
        let mut transport = Self::open(addr, Some(server), identity, limits, clock)?;
        let (sender, ready) = mpsc::channel(MAX_HANDSHAKES);
        let admission = Admission {
            endpoint: transport.endpoint.clone(),
            cluster: transport.cluster,
            clock: transport.clock.clone(),
            max_connections: limits.max_connections as usize,
            node_window: limits.connection_window_bytes.into(),
            refused: Arc::new(Refused::new(transport.clock.clone())),
            ready: sender,
        };
        let task = tokio::spawn(admission.run());
        transport.listener = Some(Listener { ready: Mutex::new(ready), task });
        Ok(transport)
    }

    /// Opens an endpoint that only makes connections, on a port that the operating system chooses.
    pub async fn connect_only(
        identity: &Identity,
        limits: &TransportLimits,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, NetError> {
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        Self::open(any, None, identity, limits, clock.clone()).or_else(|_| {
            // The machine has no IPv6.
            let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
            Self::open(any, None, identity, limits, clock)
        })
    }

    fn open(
        addr: SocketAddr,
        server: Option<ServerConfig>,
        identity: &Identity,
        limits: &TransportLimits,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, NetError> {
        let mut client = quinn::ClientConfig::new(crypto::client_crypto(identity)?);
        client.transport_config(limits.transport_config()?);
        let mut config = limits::endpoint_config()?;
        if server.is_some() {
            reset::outlive_restarts(&mut config, identity);
        }
        let wrong = |error: std::io::Error| NetError::Socket {
            addr: addr.to_string(),
            reason: error.to_string(),
        };
        let socket = TokioRuntime.wrap_udp_socket(socket::bind(addr)?).map_err(wrong)?;
        let socket: Arc<dyn AsyncUdpSocket> = Arc::new(socket::Batched(socket));
        let weak = Arc::downgrade(&socket);
        let endpoint =
            Endpoint::new_with_abstract_socket(config, server, socket, Arc::new(TokioRuntime))
                .map_err(wrong)?;
        let cluster = identity.cluster();
        let transport = Self { endpoint, client, cluster, clock, socket: weak, listener: None };
        if !transport.segmentation_offload() {
            tracing::warn!(
                "the kernel offers no UDP segmentation offload: sending costs three times the CPU"
            );
        }
        Ok(transport)
    }

    /// Returns the address that the socket is bound to.
    pub fn local_addr(&self) -> Result<SocketAddr, NetError> {
        self.endpoint
            .local_addr()
            .map_err(|error| NetError::Socket { addr: "?".into(), reason: error.to_string() })
    }

    /// Returns whether the kernel segments batches into datagrams (GSO). It is on where the kernel
    /// supports it, and quinn turns it off when a device refuses it. Without it, sending costs
    /// about three times the CPU time.
    pub fn segmentation_offload(&self) -> bool {
        self.socket.upgrade().is_some_and(|socket| socket.max_transmit_segments() > 1)
    }

    /// Returns the number of connections that are open or opening, in both directions.
    pub fn open_connections(&self) -> usize {
        self.endpoint.open_connections()
    }

    async fn dial(&self, addr: SocketAddr, to: &Address) -> Result<QuicConnection, NetError> {
        let connecting = self
            .endpoint
            .connect_with(self.client.clone(), addr, tls::SERVER_NAME)
            .map_err(|error| match error {
                quinn::ConnectError::EndpointStopping => NetError::ShutDown,
                _ => NetError::Unreachable { to: to.to_string(), reason: error.to_string() },
            })?;
        let connection =
            connecting.await.map_err(|error| connection_error(&to.to_string(), error))?;
        let peer = prove(self.cluster, &connection, &to.to_string())?;
        check_server(to, &peer).inspect_err(|error| refuse(&connection, error))?;
        Ok(QuicConnection::new(connection, peer))
    }

    async fn dial_any(&self, to: &Address) -> Result<QuicConnection, NetError> {
        let wrong = |reason: String| NetError::Resolve { host_port: to.host_port.clone(), reason };
        let found = tokio::net::lookup_host(&to.host_port).await;
        let found: Vec<SocketAddr> =
            found.map_err(|error| wrong(error.to_string()))?.take(MAX_ADDRESSES).collect();
        let mut result = Err(wrong("the resolver returned no address".into()));
        for &addr in &found {
            // UDP has no "connection refused": a silent address must leave time for the next one.
            let share = CONNECT_LIMIT / found.len() as u32;
            result = deadline(&*self.clock, share, self.dial(addr, to)).await.unwrap_or_else(
                |elapsed| {
                    Err(NetError::ConnectTimeout { to: to.to_string(), limit: elapsed.limit })
                },
            );
            match &result {
                Err(error) if error.kind().is_transient() => {}
                _ => break,
            }
        }
        result
    }
}

#[async_trait]
impl Transport for QuicTransport {
    async fn connect(&self, to: &Address) -> Result<Arc<dyn Connection>, NetError> {
        match deadline(&*self.clock, CONNECT_LIMIT, self.dial_any(to)).await {
            Ok(result) => Ok(Arc::new(result?)),
            Err(elapsed) => {
                Err(NetError::ConnectTimeout { to: to.to_string(), limit: elapsed.limit })
            }
        }
    }

    async fn accept(&self) -> Option<Arc<dyn Connection>> {
        let mut ready = self.listener.as_ref()?.ready.lock().await;
        loop {
            let admitted = ready.recv().await?;
            if !admitted.connection.is_closed() {
                return Some(admitted.connection);
            }
        }
    }

    async fn close(&self) {
        self.endpoint.close(ABANDONED.into(), b"the peer shuts down");
        // Beyond the limit, the peers notice by their idle timeouts.
        let _ = deadline(&*self.clock, CLOSE_LIMIT, self.endpoint.wait_idle()).await;
    }
}

impl Drop for QuicTransport {
    fn drop(&mut self) {
        self.endpoint.close(ABANDONED.into(), b"the peer shuts down");
        if let Some(listener) = &self.listener {
            listener.task.abort();
        }
    }
}

/// Returns the peer of a connection whose certificate TLS has verified. Refuses the connection if
/// the certificate does not name a member of `cluster`.
fn prove(
    cluster: ClusterId,
    connection: &quinn::Connection,
    label: &str,
) -> Result<Peer, NetError> {
    let chain = connection.peer_identity();
    let chain =
        chain.as_ref().and_then(|chain| chain.downcast_ref::<Vec<CertificateDer<'static>>>());
    let refused = |reason: String| NetError::Refused { peer: label.to_owned(), reason };
    let leaf = chain.and_then(|chain| chain.first());
    let leaf = leaf.ok_or_else(|| refused("it presented no certificate".into()));
    leaf.and_then(|leaf| peer_of(cluster, leaf).map_err(|error| refused(error.to_string())))
        .inspect_err(|error| refuse(connection, error))
}

fn refuse(connection: &quinn::Connection, error: &NetError) {
    connection.close(ErrorKind::Denied.wire_code().into(), error.to_string().as_bytes());
}

/// The task that turns incoming attempts into verified connections, a bounded number at a time.
struct Admission {
    endpoint: Endpoint,
    cluster: ClusterId,
    clock: Arc<dyn Clock>,
    max_connections: usize,
    node_window: VarInt,
    refused: Arc<Refused>,
    ready: mpsc::Sender<Admitted>,
}

impl Admission {
    /// Runs until the endpoint closes. Handshakes in progress end when this future ends.
    async fn run(self) {
        let slots = Arc::new(HandshakeSlots::default());
        let mut handshakes = JoinSet::new();
        while let Some(incoming) = self.endpoint.accept().await {
            while handshakes.try_join_next().is_some() {}
            let from = incoming.remote_address();
            let slot = slots.try_take(from.ip());
            let full = self.endpoint.open_connections() >= self.max_connections;
            let (Some(slot), false) = (slot, full) else {
                self.refused.note(from, &"too many connections at once");
                incoming.refuse();
                continue;
            };
            // Under load, an address has to prove that it receives our packets before it costs a
            // handshake (RFC 9000, 8.1.2).
            if slots.is_pressed() && !incoming.remote_address_validated() && incoming.may_retry() {
                // Fails only for an attempt that was already retried.
                let _ = incoming.retry();
                continue;
            }
            let (cluster, clock, ready) = (self.cluster, self.clock.clone(), self.ready.clone());
            let (window, refused) = (self.node_window, self.refused.clone());
            let (endpoint, max_clients) =
                (self.endpoint.clone(), (self.max_connections * 3 / 4).max(1));
            handshakes.spawn(async move {
                let admit = async {
                    let connection = admit(incoming, cluster, window).await?;
                    let has_room = endpoint.open_connections() <= max_clients;
                    if connection.peer().role == Role::Node || has_room {
                        return Ok(connection);
                    }
                    Err(connection.refuse_as_busy())
                };
                let admitted = deadline(&*clock, HANDSHAKE_LIMIT, admit).await;
                match admitted {
                    Ok(Ok(connection)) => {
                        let connection: Arc<dyn Connection> = Arc::new(connection);
                        // Fails only if the transport is gone.
                        let _ = ready.send(Admitted { connection, _slot: slot }).await;
                    }
                    Ok(Err(error)) => refused.note(from, &error),
                    Err(elapsed) => refused.note(from, &elapsed),
                }
            });
        }
    }
}

async fn admit(
    incoming: Incoming,
    cluster: ClusterId,
    node_window: VarInt,
) -> Result<QuicConnection, NetError> {
    let label = incoming.remote_address().to_string();
    let connection = match incoming.accept() {
        Ok(connecting) => connecting.await,
        Err(error) => Err(error),
    };
    let connection = connection.map_err(|error| connection_error(&label, error))?;
    let peer = prove(cluster, &connection, &label)?;
    if peer.role == Role::Node {
        connection.set_receive_window(node_window);
    }
    Ok(QuicConnection::new(connection, peer))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::authority::Authority;
    use super::*;
    use crate::clock::SystemClock;

    fn identity(authority: &Authority, role: Role, name: &str) -> Identity {
        let issued = authority.issue(role, &name.parse().unwrap()).unwrap();
        Identity::from_pem(authority.cert_pem(), &issued.cert_pem, &issued.key_pem).unwrap()
    }

    #[tokio::test]
    async fn datagrams_grow_to_the_limit_and_stay_there() {
        let authority = Authority::create(ClusterId([1; 16])).unwrap();
        let (limits, clock) = (TransportLimits::default(), SystemClock::new());
        let node = identity(&authority, Role::Node, "a");
        let any = "127.0.0.1:0".parse().unwrap();
        let node = QuicTransport::listen(any, &node, &limits, clock.clone()).await.unwrap();
        let client = identity(&authority, Role::Client, "c");
        let client = QuicTransport::connect_only(&client, &limits, clock).await.unwrap();
        let addr = node.local_addr().unwrap();
        let to = Address { host_port: addr.to_string(), node: None };

        let (ours, theirs) = tokio::join!(client.dial(addr, &to), node.accept());
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        let mut send = ours.open_uni().await.unwrap();
        let writing = async {
            for _ in 0..64 {
                send.write(Bytes::from(vec![7; 1 << 20])).await.unwrap();
            }
            send.finish().await.unwrap();
        };
        let reading = async {
            let mut recv = theirs.accept_uni().await.unwrap();
            while recv.read(1 << 20).await.unwrap().is_some() {}
        };
        tokio::join!(writing, reading);
        let path = ours.path();
        assert!(path.current_mtu > 8850, "{path:?}");
        assert_eq!(path.black_holes_detected, 0, "{path:?}");
    }
}
