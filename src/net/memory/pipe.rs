//! One direction of a stream in memory: a bounded queue that ends as a QUIC stream can end.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit};

use super::super::NetError;

/// Maximum number of bytes by which a writer may be ahead of its reader.
pub(super) const WINDOW_BYTES: usize = 256 << 10;

/// A queue between one writer and one reader.
pub(super) struct Pipe {
    state: Mutex<State>,
    /// Notified when the reader may find bytes or the end.
    pub(super) readable: Notify,
    /// Notified when the queue may have room, or the reader has stopped.
    pub(super) writable: Notify,
    /// Released when both sides have dropped both directions.
    _permit: Arc<OwnedSemaphorePermit>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Bytes>,
    queued_bytes: usize,
    end: Option<End>,
    stopped: Option<u32>,
}

/// The end of a stream, as the writer chose it.
#[derive(Clone, Copy)]
pub(super) enum End {
    Finished,
    Reset(u32),
}

impl Pipe {
    pub(super) fn new(permit: Arc<OwnedSemaphorePermit>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            readable: Notify::new(),
            writable: Notify::new(),
            _permit: permit,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues as much of `chunk` as fits. Returns whether all of it is queued.
    pub(super) fn offer(&self, chunk: &mut Bytes) -> Result<bool, NetError> {
        let mut state = self.lock();
        if let Some(code) = state.stopped {
            return Err(NetError::Stopped { code });
        }
        let part = chunk.split_to(chunk.len().min(WINDOW_BYTES - state.queued_bytes));
        if !part.is_empty() {
            state.queued_bytes += part.len();
            state.queue.push_back(part);
            self.readable.notify_one();
        }
        Ok(chunk.is_empty())
    }

    /// Returns the next bytes or the end of the stream, or `None` while the reader has to wait.
    pub(super) fn poll(&self, max_bytes: usize) -> Option<Result<Option<Bytes>, NetError>> {
        let mut state = self.lock();
        if let Some(End::Reset(code)) = state.end {
            return Some(Err(NetError::Reset { code }));
        }
        let Some(front) = state.queue.front_mut() else {
            return state.end.map(|_| Ok(None));
        };
        let part = front.split_to(front.len().min(max_bytes));
        if front.is_empty() {
            state.queue.pop_front();
        }
        state.queued_bytes -= part.len();
        self.writable.notify_one();
        Some(Ok(Some(part)))
    }

    /// Ends the stream. A reset discards the bytes that are queued.
    pub(super) fn end(&self, end: End) {
        let mut state = self.lock();
        if let End::Reset(_) = end {
            state.queue.clear();
            state.queued_bytes = 0;
        }
        state.end = Some(end);
        self.readable.notify_one();
    }

    /// Makes the writer fail with `code`, and discards the bytes that are queued.
    pub(super) fn stop(&self, code: u32) {
        let mut state = self.lock();
        state.stopped.get_or_insert(code);
        state.queue.clear();
        state.queued_bytes = 0;
        self.writable.notify_one();
    }
}
