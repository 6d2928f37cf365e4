//! What can go wrong between two processes.

use std::time::Duration;

use super::ABANDONED;
use super::identity::IdentityError;
use crate::id::PeerName;
use crate::kind::ErrorKind;

/// Why something between two processes failed. Cloned when several callers wait for one connection, so
/// causes from below are kept as their text.
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
    /// The operating system gives no socket.
    #[error(
        "no UDP socket on {addr}: {reason}; check that this machine has the address and that the port is allowed"
    )]
    Socket {
        /// The local address.
        addr: String,
        /// What the operating system said.
        reason: String,
    },
    /// A limit that the protocol cannot express.
    #[error("the transport limit {field} is out of range: {expected}")]
    Limit {
        /// The field of `TransportLimits`.
        field: &'static str,
        /// The rule that it breaks.
        expected: &'static str,
    },
    /// The identity of this process cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The address means nothing to the resolver.
    #[error(
        "{host_port:?} leads to no address: {reason}; expected HOST:PORT, and a host that the resolver knows"
    )]
    Resolve {
        /// The text.
        host_port: String,
        /// What the resolver said.
        reason: String,
    },
    /// Nobody answers there.
    #[error("cannot connect to {to}: {reason}; check that it runs and that UDP passes")]
    Unreachable {
        /// Where to.
        to: String,
        /// What is known.
        reason: String,
    },
    /// Nobody answered in time.
    #[error("no connection to {to} within {limit:?}: check that it runs and that UDP passes")]
    ConnectTimeout {
        /// Where to.
        to: String,
        /// How long was waited.
        limit: Duration,
    },
    /// One side does not accept the other's certificate or protocol.
    #[error(
        "refused with {peer}: {reason}; both sides need a certificate of the same cluster and the same version"
    )]
    Refused {
        /// The other side.
        peer: String,
        /// What was wrong.
        reason: String,
    },
    /// Another node than the expected one answers.
    #[error(
        "{host_port} is node {found}, not {expected}: correct the address of {expected} or the certificate folder there"
    )]
    WrongPeer {
        /// Where to.
        host_port: String,
        /// Who was to be there.
        expected: PeerName,
        /// Who is there.
        found: PeerName,
    },
    /// The other side takes no more connections now.
    #[error("{peer} takes no more connections now: try again later")]
    Busy {
        /// The other side.
        peer: String,
    },
    /// The connection is over.
    #[error("the connection with {peer} is closed: {reason}")]
    Closed {
        /// The other side.
        peer: String,
        /// The code that the other side gave, if it closed the connection.
        code: Option<u32>,
        /// What is known.
        reason: String,
    },
    /// This process has closed its transport.
    #[error("this process is shutting down its connections")]
    ShutDown,
    /// The sender gave the stream up.
    #[error("the sender gave the stream up (code {code}, {:?})", kind_of_code(*.code))]
    Reset {
        /// The sender's code.
        code: u32,
    },
    /// The reader wants no more.
    #[error("the reader stopped the stream (code {code}, {:?})", kind_of_code(*.code))]
    Stopped {
        /// The reader's code.
        code: u32,
    },
    /// A stream is used after this side ended it.
    #[error("this side has already ended the stream")]
    Ended,
    /// A message is longer than its kind may be.
    #[error("a message of {len_bytes} bytes passes the limit of {limit_bytes}")]
    FrameTooLong {
        /// The length it claims.
        len_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The stream ended inside a message.
    #[error("the stream ended after {got_bytes} of {wanted_bytes} bytes")]
    Truncated {
        /// The length that was due.
        wanted_bytes: u64,
        /// What came.
        got_bytes: u64,
    },
    /// The pool has as many live connections as it may.
    #[error("all {limit} connections of the pool are in use: try again later")]
    PoolFull {
        /// How many it may have.
        limit: usize,
    },
}

/// What the code of a stream or connection says about the failure.
fn kind_of_code(code: u32) -> ErrorKind {
    if code == ABANDONED { ErrorKind::Unavailable } else { ErrorKind::from_wire_code(code) }
}

impl NetError {
    /// What kind of failure it is.
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
