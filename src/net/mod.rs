//! Connections between the processes of a cluster, behind traits, so that the same node code runs over QUIC
//! ([`quic`]) and inside one deterministic process ([`memory`]).
//!
//! What every transport promises, and `tests/net.rs` holds both to:
//! - A connection's [`Peer`] is proven before the connection is handed out.
//! - Streams are ordered and flow controlled: a writer waits once the reader is a window behind.
//! - A stream becomes visible to the other side with its first write, finish or reset, and opening order is kept.
//! - A [`SendStream`] that is dropped before [`SendStream::finish`] is reset with [`ABANDONED`], so that a
//!   task that dies never looks like a clean end. A [`RecvStream`] that is dropped before its end stops the sender.
//! - Dropping the last handle of a connection, its streams included, closes it.
//!
//! Left to others: deadlines (only connecting and handshakes have their own; wrap the rest in
//! [`crate::clock::deadline`]), retries, and what the bytes mean.

mod authority;
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

/// The UDP port of a node unless its configuration says otherwise.
pub const DEFAULT_PORT: u16 = 7440;

/// The code of a stream or connection that was let go without a reason: its task ended or was cancelled.
/// All other codes are those of [`crate::kind::ErrorKind::wire_code`].
pub const ABANDONED: u32 = 0;

/// What a certificate lets its holder be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A storage node: it may serve, and order other nodes.
    Node,
    /// A client: it may only ask.
    Client,
}

/// Who is on the other side, as its certificate proves (or as it joined the memory network).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer {
    /// What it may do.
    pub role: Role,
    /// Its name in the cluster.
    pub name: PeerName,
}

/// Where to connect to, and who has to be there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// `HOST:PORT`; for the memory network, the text that the node joined with.
    pub host_port: String,
    /// The node that must answer. `None`: any node of this cluster will do (a seed).
    pub node: Option<PeerName>,
}

/// Makes and receives connections.
#[async_trait]
pub trait Transport: Send + Sync + 'static {
    /// Connects to a node, proves who it is, and gives up after a few seconds.
    ///
    /// TLS 1.3 lets the server judge our certificate after we are done: a refusal can therefore come
    /// as [`NetError::Refused`] from the first use of the connection.
    async fn connect(&self, to: &Address) -> Result<Arc<dyn Connection>, NetError>;

    /// The next connection that somebody made to us and whose peer is proven. `None` once the transport
    /// is closed, or when it does not listen. A handshake that fails is logged and never ends this.
    /// Cancel safe.
    async fn accept(&self) -> Option<Arc<dyn Connection>>;

    /// Closes all connections, tells the peers, and waits a bounded time for them to know.
    async fn close(&self);
}

/// A connection to a proven peer. Either side opens streams.
#[async_trait]
pub trait Connection: Send + Sync + 'static {
    /// Who is on the other side.
    fn peer(&self) -> &Peer;

    /// Opens a stream with both directions; waits while the peer allows no more streams.
    async fn open_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError>;

    /// Opens a stream towards the peer; waits while the peer allows no more streams.
    async fn open_uni(&self) -> Result<Box<dyn SendStream>, NetError>;

    /// The next stream with both directions that the peer opened. Cancel safe.
    async fn accept_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError>;

    /// The next stream towards us that the peer opened. Cancel safe.
    async fn accept_uni(&self) -> Result<Box<dyn RecvStream>, NetError>;

    /// Closes the connection at once; what was not yet received is lost. The first close wins.
    fn close(&self, code: u32, reason: &str);

    /// Whether it is closed, by either side or by the network.
    fn is_closed(&self) -> bool;

    /// Returns when it is closed, by either side or by the network.
    async fn closed(&self);
}

/// The writing end of a stream.
#[async_trait]
pub trait SendStream: Send {
    /// Hands `chunk` over without copying; waits while the reader is a window behind. Not cancel safe: a
    /// part of the chunk may have been taken.
    async fn write(&mut self, chunk: Bytes) -> Result<(), NetError>;

    /// Marks the clean end. It does not wait for the peer: that all was received is what an answer is
    /// for, and closing the connection right after this can lose the tail.
    async fn finish(&mut self) -> Result<(), NetError>;

    /// Ends the stream with a code; the reader loses what it has not read. Nothing happens after
    /// [`SendStream::finish`].
    fn reset(&mut self, code: u32);
}

/// The reading end of a stream.
#[async_trait]
pub trait RecvStream: Send {
    /// The next 1 to `max_bytes` bytes, or `None` at the clean end. Cancel safe.
    ///
    /// The slice may keep a whole received datagram batch (64 KiB) alive: use it up or copy it.
    async fn read(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError>;

    /// Tells the sender that nothing more will be read; it sees [`NetError::Stopped`].
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

/// Who this side accepts behind `to`: a node, and the expected one where one is named.
fn check_server(to: &Address, found: &Peer) -> Result<(), NetError> {
    if found.role != Role::Node {
        return Err(NetError::Refused {
            peer: to.to_string(),
            reason: format!("{found} answered, which is no node"),
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
