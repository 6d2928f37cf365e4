//! Copies of requests between nodes, so that a test can deliver one again later: a second time, or
//! after a newer one.

use std::sync::Arc;

use bytes::Bytes;

use super::super::Peer;

/// A request of more bytes than this is not copied.
const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// Everything that a node wrote to another on one stream.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// The sender.
    pub from: Peer,
    /// The sender's address.
    pub from_address: String,
    /// The receiver's address.
    pub to: String,
    /// The written bytes, chunk by chunk.
    pub chunks: Vec<Bytes>,
}

/// A callback that receives each message when its stream is dropped.
#[derive(Clone)]
pub(super) struct Tap(pub(super) Arc<dyn Fn(Message) + Send + Sync>);

/// A recorder of what one stream sends.
pub(super) struct Copied {
    tap: Tap,
    message: Message,
    len_bytes: usize,
}

impl Copied {
    /// Returns an empty recorder for a stream with these two ends.
    pub(super) fn new(tap: Tap, from: Peer, from_address: &str, to: &str) -> Self {
        let (from_address, to) = (from_address.to_owned(), to.to_owned());
        let message = Message { from, from_address, to, chunks: Vec::new() };
        Self { tap, message, len_bytes: 0 }
    }

    /// Records a sent chunk.
    pub(super) fn add(&mut self, chunk: &Bytes) {
        self.len_bytes = self.len_bytes.saturating_add(chunk.len());
        if self.len_bytes <= MAX_MESSAGE_BYTES {
            self.message.chunks.push(chunk.clone());
        } else {
            self.message.chunks.clear();
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let chunks = std::mem::take(&mut self.message.chunks);
        if !chunks.is_empty() {
            (self.tap.0)(Message { chunks, ..self.message.clone() });
        }
    }
}
