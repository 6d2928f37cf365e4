//! The messages on a stream, as bytes. Sending and receiving them is the task of `net`.
//!
//! A request opens a bidirectional stream with one frame: the call number (one byte), then the call
//! in postcard. The answer is one frame, for some calls several: `0` and the answer, or `1` and a
//! [`RemoteError`]. Bulk bytes follow a frame without a frame of their own; the frame before them
//! determines their length. The stream of a hop is unidirectional: one [`StreamHeader`] frame, then
//! the grains. docs/protocol.md specifies the bytes.

pub mod answers;
pub mod calls;
pub mod order;
pub mod policy;
pub mod repair;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format::records::Node;
use crate::id::PeerName;
use crate::kind::ErrorKind;
use crate::plan::StreamNo;

/// Maximum length of a frame in bytes. A stripe record with the largest block and n fits.
pub const MAX_FRAME_BYTES: usize = 4 << 20;
/// Maximum number of bulk bytes that are written at once.
pub const BULK_CHUNK_BYTES: usize = 256 << 10;

/// The peers that may make a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllowedCaller {
    /// Clients and nodes of this cluster.
    Anyone,
    /// Nodes of this cluster.
    Nodes,
}

/// A kind of request.
pub trait Call: Serialize + DeserializeOwned + Send + Sync {
    /// The number of the call on the wire. A number is never reused for another call.
    const NUMBER: u8;
    /// The name of the call in logs and errors.
    const NAME: &'static str;
    /// The peers that may make the call.
    const WHO: AllowedCaller;
    /// The type of the answer.
    type Answer: Serialize + DeserializeOwned + Send;
}

/// A node and its network address.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeAddress {
    /// The node's name, which its certificate must prove.
    pub name: PeerName,
    /// The address as HOST:PORT.
    pub host_port: String,
}

impl NodeAddress {
    /// Returns the address at which the node of a record is called.
    pub fn of(node: &Node) -> Self {
        Self { name: node.name.clone(), host_port: node.address.clone() }
    }
}

/// The failure of a call, as sent to the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RemoteError {
    /// The error kind, which determines whether a retry makes sense, and the exit code.
    pub kind: ErrorKind,
    /// The message that users see: what happened, to what, and what to do next.
    pub message: String,
}

/// The end of the message of an answer to an unknown call. Clients recognize it, so it does not
/// change (docs/protocol.md).
const UNKNOWN_CALL: &str = " is unknown here: the peer speaks a newer version";

impl RemoteError {
    /// Returns the answer to a call with a number that this program does not know.
    pub fn unknown_call(number: u8) -> Self {
        Self { kind: ErrorKind::Invalid, message: format!("call {number}{UNKNOWN_CALL}") }
    }

    /// Returns whether this is the answer of a program that does not know the call, because it is
    /// older than the caller's.
    pub fn is_unknown_call(&self) -> bool {
        let number = self.message.strip_prefix("call ");
        let number = number.and_then(|rest| rest.strip_suffix(UNKNOWN_CALL));
        self.kind == ErrorKind::Invalid && number.is_some_and(|number| number.parse::<u8>().is_ok())
    }
}

#[derive(Serialize, Deserialize)]
struct WireFailure {
    code: u32,
    message: String,
}

/// The errors of encoding and parsing messages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The frame is empty, its body does not parse, or a message cannot be encoded.
    #[error("{what} does not parse: the peer speaks another version, or the bytes are damaged")]
    Malformed {
        /// The expected message.
        what: &'static str,
    },
    /// The message does not fit into a frame.
    #[error(
        "{what} of {bytes} bytes is longer than a frame of {MAX_FRAME_BYTES} bytes: use smaller blocks or fewer shards a save"
    )]
    TooLong {
        /// The message.
        what: &'static str,
        /// Length of the message in bytes.
        bytes: usize,
    },
}

impl WireError {
    /// Returns [`ErrorKind::Invalid`].
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// The first frame of a stream from one hop to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHeader {
    /// The id of the plan's execution, drawn by its coordinator.
    pub run: [u8; 16],
    /// The number of the stream within the plan.
    pub stream: StreamNo,
}

fn body<T: Serialize>(first: &[u8], value: &T, what: &'static str) -> Result<Vec<u8>, WireError> {
    let bytes =
        postcard::to_extend(value, first.to_vec()).map_err(|_| WireError::Malformed { what })?;
    if bytes.len() > MAX_FRAME_BYTES {
        return Err(WireError::TooLong { what, bytes: bytes.len() });
    }
    Ok(bytes)
}

fn value<T: DeserializeOwned>(bytes: &[u8], what: &'static str) -> Result<T, WireError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(WireError::Malformed { what }),
    }
}

/// Returns the frame of a request.
pub fn request_to_bytes<C: Call>(call: &C) -> Result<Vec<u8>, WireError> {
    body(&[C::NUMBER], call, C::NAME)
}

/// Splits the frame of a request. Returns the call's number and the body.
pub fn split_request(frame: &[u8]) -> Result<(u8, &[u8]), WireError> {
    frame
        .split_first()
        .map(|(number, body)| (*number, body))
        .ok_or(WireError::Malformed { what: "a request" })
}

/// Parses the body of call `C`.
pub fn parse_request<C: Call>(body: &[u8]) -> Result<C, WireError> {
    value(body, C::NAME)
}

/// Returns the frame of an answer or a failure. A failure's message is cut to 4,096 characters.
pub fn answer_to_bytes<A: Serialize>(
    answer: &Result<A, RemoteError>,
) -> Result<Vec<u8>, WireError> {
    match answer {
        Ok(answer) => body(&[0], answer, "an answer"),
        Err(failure) => {
            let message = failure.message.chars().take(4096).collect();
            body(&[1], &WireFailure { code: failure.kind.wire_code(), message }, "a failure")
        }
    }
}

/// Parses the frame of an answer or a failure.
pub fn parse_answer<A: DeserializeOwned>(
    frame: &[u8],
) -> Result<Result<A, RemoteError>, WireError> {
    match frame.split_first() {
        Some((0, body)) => value(body, "an answer").map(Ok),
        Some((1, body)) => {
            let failure: WireFailure = value(body, "a failure")?;
            Ok(Err(RemoteError {
                kind: ErrorKind::from_wire_code(failure.code),
                message: failure.message,
            }))
        }
        _ => Err(WireError::Malformed { what: "an answer" }),
    }
}

/// Returns the frame of any other message. `what` names the message in errors.
pub fn message_to_bytes<T: Serialize>(
    message: &T,
    what: &'static str,
) -> Result<Vec<u8>, WireError> {
    body(&[], message, what)
}

/// Parses the frame of any other message. `what` names the message in errors.
pub fn parse_message<T: DeserializeOwned>(
    frame: &[u8],
    what: &'static str,
) -> Result<T, WireError> {
    value(frame, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_and_failures_round_trip() {
        let answer: Result<u64, RemoteError> = Ok(7);
        assert_eq!(parse_answer::<u64>(&answer_to_bytes(&answer).unwrap()).unwrap(), answer);
        let failure: Result<u64, RemoteError> =
            Err(RemoteError { kind: ErrorKind::Fenced, message: "generation 1.2 is known".into() });
        assert_eq!(parse_answer::<u64>(&answer_to_bytes(&failure).unwrap()).unwrap(), failure);
    }

    #[test]
    fn the_answer_to_an_unknown_call_is_recognized() {
        let answer: Result<u64, RemoteError> = Err(RemoteError::unknown_call(250));
        let Err(failure) = parse_answer::<u64>(&answer_to_bytes(&answer).unwrap()).unwrap() else {
            panic!()
        };
        // Older programs send this text too.
        assert_eq!(failure.message, "call 250 is unknown here: the peer speaks a newer version");
        assert!(failure.is_unknown_call());
        let message = failure.message.replace("250", "x");
        assert!(!RemoteError { message, ..failure.clone() }.is_unknown_call());
        assert!(!RemoteError { kind: ErrorKind::Io, ..failure }.is_unknown_call());
    }

    #[test]
    fn damaged_frames_are_errors() {
        assert!(split_request(&[]).is_err());
        assert!(parse_answer::<u64>(&[]).is_err());
        assert!(parse_answer::<u64>(&[9, 1]).is_err());
        assert!(parse_answer::<u64>(&[0, 7, 7]).is_err());
        assert!(parse_request::<calls::RenewLease>(&[1, 2]).is_err());
        let long = RemoteError { kind: ErrorKind::Io, message: "x".repeat(1 << 20) };
        assert!(answer_to_bytes::<u64>(&Err(long)).unwrap().len() < 8192);
    }
}
