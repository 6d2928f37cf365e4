//! Connections between the processes of a cluster, behind traits, so that the same node code runs
//! over QUIC ([`quic`]) and in a deterministic simulation within one process ([`memory`]).
//!
//! Every transport guarantees the following; `tests/net.rs` checks both:
//! - The identity of a connection's [`Peer`] is verified before the connection is handed out.
//! - Streams are ordered and flow controlled: a writer waits while the reader is a window behind.
//! - A stream becomes visible to the other side with its first write, finish or reset. Streams
//!   become visible in the order in which they were opened.
//! - A [`SendStream`] that is dropped before [`SendStream::finish`] is reset with [`ABANDONED`], so
//!   that a task that dies never looks like a clean end. A [`RecvStream`] that is dropped before
//!   its end stops the sender.
//! - Dropping the last handle of a connection, including its streams, closes it.
//!
//! Callers are responsible for deadlines (only connecting and handshakes have their own; wrap
//! everything else in [`crate::clock::deadline`]), for retries, and for the meaning of the bytes.

pub mod authority;
pub mod call;
mod error;
pub mod frame;
pub mod identity;
pub mod memory;
pub mod pool;
pub mod quic;
mod tls;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

pub use error::NetError;

use crate::id::PeerName;

/// The default UDP port of a node.
pub const DEFAULT_PORT: u16 = 7440;

/// The code of a stream or connection that was dropped without a reason: its task ended or was
/// cancelled. All other codes are those of [`crate::kind::ErrorKind::wire_code`].
pub const ABANDONED: u32 = 0;

/// The role that a certificate gives to its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A node: it may serve calls, and send orders to other nodes.
    Node,
    /// A client: it may only make client calls.
    Client,
}

/// The identity of the other side, as its certificate proves (or as it joined the memory network).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer {
    /// Its role.
    pub role: Role,
    /// Its name in the cluster.
    pub name: PeerName,
}

/// An address to connect to, and the node that is expected there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// `HOST:PORT`; for the memory network, the address with which the node joined.
    pub host_port: String,
    /// The node that must answer. `None` accepts any node of this cluster (a seed).
    pub node: Option<PeerName>,
}

/// A transport: makes and accepts connections.
#[async_trait]
pub trait Transport: Send + Sync + 'static {
    /// Connects to a node and verifies its identity. Gives up after a few seconds. Returns the
    /// connection.
    ///
    /// In TLS 1.3 the server checks our certificate after our side of the handshake is complete. A
    /// refusal can therefore surface as [`NetError::Refused`] at the first use of the connection.
    async fn connect(&self, to: &Address) -> Result<Arc<dyn Connection>, NetError>;

    /// Returns the next incoming connection whose peer is verified; `None` once the transport is
    /// closed, or if it does not listen. A failed handshake is logged and does not end this call.
    /// Cancel safe.
    async fn accept(&self) -> Option<Arc<dyn Connection>>;

    /// Closes all connections, notifies the peers, and waits a bounded time for their
    /// acknowledgement.
    async fn close(&self);
}

/// A connection to a verified peer. Either side opens streams.
#[async_trait]
pub trait Connection: Send + Sync + 'static {
    /// Returns the identity of the other side.
    fn peer(&self) -> &Peer;

    /// Opens a bidirectional stream. Waits while the peer allows no more streams.
    async fn open_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError>;

    /// Opens a unidirectional stream towards the peer. Waits while the peer allows no more streams.
    async fn open_uni(&self) -> Result<Box<dyn SendStream>, NetError>;

    /// Returns the next bidirectional stream that the peer opened. Cancel safe.
    async fn accept_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError>;

    /// Returns the next unidirectional stream that the peer opened. Cancel safe.
    async fn accept_uni(&self) -> Result<Box<dyn RecvStream>, NetError>;

    /// Closes the connection at once; data that was not received yet is lost. Only the first close
    /// takes effect.
    fn close(&self, code: u32, reason: &str);

    /// Returns whether the connection is closed, by either side or by the network.
    fn is_closed(&self) -> bool;

    /// Returns once the connection is closed, by either side or by the network.
    async fn closed(&self);
}

/// The writing end of a stream.
#[async_trait]
pub trait SendStream: Send {
    /// Writes `chunk` without copying it. Waits while the reader is a window behind. Not cancel
    /// safe: part of the chunk may have been written.
    async fn write(&mut self, chunk: Bytes) -> Result<(), NetError>;

    /// Ends the stream cleanly, without waiting for the peer. Only an answer proves that everything
    /// was received; closing the connection right after this call can lose the last bytes.
    async fn finish(&mut self) -> Result<(), NetError>;

    /// Resets the stream with a code; the reader loses the bytes that it has not read. Has no
    /// effect after [`SendStream::finish`].
    fn reset(&mut self, code: u32);
}

/// The reading end of a stream.
#[async_trait]
pub trait RecvStream: Send {
    /// Returns the next 1 to `max_bytes` bytes, or `None` at the clean end. Cancel safe.
    ///
    /// The slice may keep a whole received batch of datagrams (64 KiB) in memory: use it up or copy
    /// it.
    async fn read(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError>;

    /// Tells the sender that nothing more will be read. The sender gets [`NetError::Stopped`].
    fn stop(&mut self, code: u32);
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Node => "node",
            Role::Client => "client",
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.name)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.node {
            Some(name) => write!(f, "{name} at {}", self.host_port),
            None => f.write_str(&self.host_port),
        }
    }
}

/// Checks that `found` is acceptable at `to`: it must be a node, and the node that `to` names if it
/// names one.
fn check_server(to: &Address, found: &Peer) -> Result<(), NetError> {
    if found.role != Role::Node {
        return Err(NetError::Refused {
            peer: to.to_string(),
            reason: format!("{found} answered, which is not a node"),
        });
    }
    match &to.node {
        Some(expected) if *expected != found.name => Err(NetError::WrongPeer {
            host_port: to.host_port.clone(),
            expected: expected.clone(),
            found: found.name.clone(),
        }),
        _ => Ok(()),
    }
}
