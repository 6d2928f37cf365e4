//! Messages: what is said on a stream, as bytes. Sending and receiving is `net`'s.
//!
//! A request opens a bidirectional stream with one frame: call number (one byte), then the call in postcard. The answer is one frame
//! (some calls: several): `0` and the answer, or `1` and a [`RemoteError`]. Bulk bytes follow a frame raw, their
//! length known from it. A hop's stream is unidirectional: one [`StreamHeader`] frame, then the grains. docs/protocol.md has the bytes.

pub mod answers;
pub mod calls;
pub mod order;
pub mod policy;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::id::PeerName;
use crate::kind::ErrorKind;
use crate::plan::StreamNo;

/// The longest frame; a stripe record of the largest block and n fits.
pub const MAX_FRAME_BYTES: usize = 4 << 20;
/// Bulk bytes are written in chunks of at most this.
pub const BULK_CHUNK_BYTES: usize = 256 << 10;

/// Who may make a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllowedCaller {
    /// Clients and nodes of this cluster.
    Anyone,
    /// Nodes of this cluster.
    Nodes,
}

/// One kind of request.
pub trait Call: Serialize + DeserializeOwned + Send + Sync {
    /// Its number on the wire; never used again for another call.
    const NUMBER: u8;
    /// Its name in logs and errors.
    const NAME: &'static str;
    /// Who may make it.
    const WHO: AllowedCaller;
    /// What comes back.
    type Answer: Serialize + DeserializeOwned + Send;
}

/// A node and where it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeAddress {
    /// Its name, which its certificate must prove.
    pub name: PeerName,
    /// HOST:PORT.
    pub host_port: String,
}

/// Why a call failed, as told to the other side.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RemoteError {
    /// The kind, from which retry and exit code follow.
    pub kind: ErrorKind,
    /// What happened, to what, and what to do next.
    pub message: String,
}

#[derive(Serialize, Deserialize)]
struct WireFailure {
    code: u32,
    message: String,
}

/// A message that is not one of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The frame is empty or its body does not parse.
    #[error("{what} does not parse: the peer speaks another version, or the bytes are damaged")]
    Malformed {
        /// What it should have been.
        what: &'static str,
    },
    /// It does not fit into a frame.
    #[error(
        "{what} of {bytes} bytes is longer than a frame of {MAX_FRAME_BYTES} bytes: use smaller blocks or fewer shards a save"
    )]
    TooLong {
        /// What it is.
        what: &'static str,
        /// Its length.
        bytes: usize,
    },
}

impl WireError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// The header of a hop's stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHeader {
    /// The plan's run, drawn by its coordinator.
    pub run: [u8; 16],
    /// The stream within the plan.
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

/// The frame of a request.
pub fn request_to_bytes<C: Call>(call: &C) -> Result<Vec<u8>, WireError> {
    body(&[C::NUMBER], call, C::NAME)
}

/// The call's number and its body.
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

/// The frame of an answer.
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

/// Parses an answer frame.
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

/// A frame of any other message.
pub fn message_to_bytes<T: Serialize>(
    message: &T,
    what: &'static str,
) -> Result<Vec<u8>, WireError> {
    body(&[], message, what)
}

/// Parses a frame of any other message.
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
