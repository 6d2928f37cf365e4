//! Requests between nodes, copied as they are sent, so that one may come again later: twice, or after a newer one.

use std::sync::Arc;

use bytes::Bytes;

use super::super::Peer;

/// A request that wrote more is not copied.
const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// All that a node wrote on one stream to another.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// Who sent it.
    pub from: Peer,
    /// The sender's address.
    pub from_address: String,
    /// The receiver's address.
    pub to: String,
    /// What was written, chunk by chunk.
    pub chunks: Vec<Bytes>,
}

/// Is given each message when its stream is let go.
#[derive(Clone)]
pub(super) struct Tap(pub(super) Arc<dyn Fn(Message) + Send + Sync>);

/// The copy of what one stream sends.
pub(super) struct Copied {
    tap: Tap,
    message: Message,
    len_bytes: usize,
}

impl Copied {
    /// Nothing yet, of a stream with these two ends.
    pub(super) fn new(tap: Tap, from: Peer, from_address: &str, to: &str) -> Self {
        let (from_address, to) = (from_address.to_owned(), to.to_owned());
        let message = Message { from, from_address, to, chunks: Vec::new() };
        Self { tap, message, len_bytes: 0 }
    }

    /// Takes note of what is sent.
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
