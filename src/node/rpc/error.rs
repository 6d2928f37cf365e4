//! The errors of the dispatch of calls.

use crate::id::PeerName;

/// The reason why a call was refused before its handler ran.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum RpcError {
    /// The request is too long for its call, which allows only short requests.
    #[error("the request {call} has {len_bytes} bytes, at most {limit_bytes} are allowed")]
    RequestTooLong { call: &'static str, len_bytes: usize, limit_bytes: usize },
    /// A client made a call that only nodes may make.
    #[error("{call} is for nodes of the cluster; {client} is a client")]
    CallerNotNode { call: &'static str, client: PeerName },
    /// The call is known, but no handler serves it.
    #[error("call {number} has no handler here")]
    NoHandler { number: u8 },
}
