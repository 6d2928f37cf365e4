//! A call on the serving side: the request, and the streams of its answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::context::NodeContext;
use crate::budget::Reservation;
use crate::clock::deadline;
use crate::kind::ErrorKind;
use crate::net::frame::{FramedRecv, write_frame};
use crate::net::{Peer, SendStream};
use crate::wire::{
    Call, MAX_FRAME_BYTES, RemoteError, WireError, answer_to_bytes, parse_request, split_request,
};

/// Time limit for a peer to take an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// A received request, with the memory reserved for it until it is parsed.
pub(in crate::node) struct Request {
    frame: Bytes,
    _memory: Reservation,
}

impl Request {
    /// Creates a request from its frame and the memory reserved for it.
    pub(in crate::node) fn new(frame: Bytes, memory: Reservation) -> Self {
        Self { frame, _memory: memory }
    }

    /// Returns the frame.
    pub(in crate::node) fn frame(&self) -> &Bytes {
        &self.frame
    }

    /// Parses the request. Returns the call and releases the memory.
    pub(in crate::node) fn parse<C: Call>(self) -> Result<C, WireError> {
        let (_, body) = split_request(&self.frame)?;
        parse_request(body)
    }
}

/// An open call on the serving side.
pub(in crate::node) struct IncomingCall {
    /// The node that serves the call.
    pub(in crate::node) context: Arc<NodeContext>,
    /// The peer that made the call.
    pub(in crate::node) peer: Peer,
    /// The stream for answers.
    pub(in crate::node) send: Box<dyn SendStream>,
    /// The stream of the request, from which its bulk bytes are read.
    pub(in crate::node) recv: FramedRecv,
}

impl IncomingCall {
    /// Answers the call with an error and ends its streams.
    pub(in crate::node) async fn refuse(mut self, refusal: RemoteError) {
        if self.answer::<()>(Err(refusal)).await {
            // Without a clean end, the caller would see a reset and lose the reason.
            let _ = self.send.finish().await;
        }
        self.recv.stop(ErrorKind::Invalid.wire_code());
    }

    /// Writes an answer. Returns whether it was delivered to the stream; if not, the peer is gone.
    pub(in crate::node) async fn answer<A: serde::Serialize>(
        &mut self,
        answer: Result<A, RemoteError>,
    ) -> bool {
        // Paths are the same on every machine, so the message names the node whose disk failed.
        let answer = answer.map_err(|failure| match failure.kind {
            ErrorKind::Io => {
                let message = format!("node {}: {}", self.context.settings.name, failure.message);
                RemoteError { message, ..failure }
            }
            _ => failure,
        });
        let bytes = match answer_to_bytes(&answer) {
            Ok(bytes) => bytes,
            Err(error) => match answer_to_bytes::<()>(&Err(error.into())) {
                Ok(bytes) => bytes,
                Err(_) => return false,
            },
        };
        let write = write_frame(&mut *self.send, MAX_FRAME_BYTES, bytes.into());
        matches!(deadline(&*self.context.clock, ANSWER_LIMIT, write).await, Ok(Ok(())))
    }
}
