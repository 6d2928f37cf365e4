//! Errors of the network.

use std::time::Duration;

use super::ABANDONED;
use super::identity::IdentityError;
use crate::id::PeerName;
use crate::kind::ErrorKind;

/// An error of the network. It is cloned when several callers wait for one connection, so
/// underlying causes are kept as text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// Another process has the port.
    #[error(
        "the address {addr} is in use: stop the process that has it (`ss -ulpn` shows it) or configure another port"
    )]
    AddrInUse {
        /// The local address.
        addr: String,
    },
    /// The operating system provides no socket.
    #[error(
        "no UDP socket on {addr}: {reason}; check that this machine has the address and that the port is allowed"
    )]
    Socket {
        /// The local address.
        addr: String,
        /// The error from the operating system.
        reason: String,
    },
    /// A transport limit is out of range.
    #[error("the transport limit {field} is out of range: {expected}")]
    Limit {
        /// The field of `TransportLimits`.
        field: &'static str,
        /// The rule that the limit breaks.
        expected: &'static str,
    },
    /// The identity of this process is unusable.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The resolver does not know the address.
    #[error(
        "cannot resolve {host_port:?}: {reason}; expected HOST:PORT, and a host that the resolver knows"
    )]
    Resolve {
        /// The address as text.
        host_port: String,
        /// The error from the resolver.
        reason: String,
    },
    /// No process answers at the address.
    #[error("cannot connect to {to}: {reason}; check that it runs and that UDP passes")]
    Unreachable {
        /// The address.
        to: String,
        /// The cause, as far as it is known.
        reason: String,
    },
    /// The connection was not established in time.
    #[error("no connection to {to} within {limit:?}: check that it runs and that UDP passes")]
    ConnectTimeout {
        /// The address.
        to: String,
        /// The time limit.
        limit: Duration,
    },
    /// One side does not accept the other's certificate or protocol.
    #[error(
        "connection with {peer} refused: {reason}; both sides need a certificate of the same cluster, the same version, and a clock that is not past the end of the certificates"
    )]
    Refused {
        /// The other side.
        peer: String,
        /// The cause of the refusal.
        reason: String,
    },
    /// A node other than the expected one answers.
    #[error(
        "{host_port} is node {found}, not {expected}: correct the address of {expected} or the certificate folder there"
    )]
    WrongPeer {
        /// The address.
        host_port: String,
        /// The expected node.
        expected: PeerName,
        /// The node that answered.
        found: PeerName,
    },
    /// The other side accepts no more connections now.
    #[error("{peer} accepts no more connections now: try again later")]
    Busy {
        /// The other side.
        peer: String,
    },
    /// The connection is closed.
    #[error("the connection with {peer} is closed: {reason}")]
    Closed {
        /// The other side.
        peer: String,
        /// The code that the other side gave, if it closed the connection.
        code: Option<u32>,
        /// The cause, as far as it is known.
        reason: String,
    },
    /// This process has closed its transport.
    #[error("this process is shutting down its connections")]
    ShutDown,
    /// The sender reset the stream.
    #[error("the sender reset the stream (code {code}, {:?})", kind_of_code(*.code))]
    Reset {
        /// The sender's code.
        code: u32,
    },
    /// The reader stopped the stream.
    #[error("the reader stopped the stream (code {code}, {:?})", kind_of_code(*.code))]
    Stopped {
        /// The reader's code.
        code: u32,
    },
    /// The stream was used after this side ended it.
    #[error("this side has already ended the stream")]
    Ended,
    /// A message is longer than its limit.
    #[error("a message of {len_bytes} bytes exceeds the limit of {limit_bytes}")]
    FrameTooLong {
        /// The announced length, in bytes.
        len_bytes: u64,
        /// The limit, in bytes.
        limit_bytes: u64,
    },
    /// The stream ended inside a message.
    #[error("the stream ended after {got_bytes} of {wanted_bytes} bytes")]
    Truncated {
        /// The expected length, in bytes.
        wanted_bytes: u64,
        /// The received length, in bytes.
        got_bytes: u64,
    },
    /// The pool has reached its maximum number of live connections.
    #[error("all {limit} connections of the pool are in use: try again later")]
    PoolFull {
        /// The maximum number.
        limit: usize,
    },
}

/// Returns the kind of failure that the code of a stream or connection stands for.
fn kind_of_code(code: u32) -> ErrorKind {
    if code == ABANDONED { ErrorKind::Unavailable } else { ErrorKind::from_wire_code(code) }
}

impl NetError {
    /// Returns the kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            NetError::AddrInUse { .. } | NetError::Socket { .. } => ErrorKind::Io,
            NetError::Limit { .. } | NetError::FrameTooLong { .. } => ErrorKind::Invalid,
            NetError::Identity(error) => error.kind(),
            NetError::Resolve { .. } | NetError::Unreachable { .. } | NetError::ShutDown => {
                ErrorKind::Unavailable
            }
            NetError::ConnectTimeout { .. } => ErrorKind::Timeout,
            NetError::Refused { .. } | NetError::WrongPeer { .. } => ErrorKind::Denied,
            NetError::Busy { .. } | NetError::PoolFull { .. } => ErrorKind::Busy,
            NetError::Closed { code, .. } => kind_of_code(code.unwrap_or(ABANDONED)),
            NetError::Reset { code } | NetError::Stopped { code } => kind_of_code(*code),
            NetError::Ended => ErrorKind::Internal,
            NetError::Truncated { .. } => ErrorKind::Corrupt,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_from_the_other_side_keeps_its_kind() {
        let fenced = ErrorKind::Fenced.wire_code();
        assert_eq!(NetError::Reset { code: fenced }.kind(), ErrorKind::Fenced);
        assert_eq!(NetError::Stopped { code: fenced }.kind(), ErrorKind::Fenced);
        assert_eq!(NetError::Reset { code: ABANDONED }.kind(), ErrorKind::Unavailable);
        let lost = NetError::Closed { peer: "node a".into(), code: None, reason: "lost".into() };
        assert!(lost.kind().is_transient());
    }
}
