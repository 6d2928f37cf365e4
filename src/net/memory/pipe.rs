//! One direction of a stream in memory: a bounded queue that ends as a QUIC stream can end.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit};

use super::super::{ABANDONED, NetError, RecvStream, SendStream};
use super::link::{Hold, Outgoing};
use super::tap::Copied;

/// Maximum number of bytes by which a writer may be ahead of its reader.
pub(super) const WINDOW_BYTES: usize = 256 << 10;

/// A queue between one writer and one reader.
pub(super) struct Pipe {
    state: Mutex<State>,
    readable: Notify,
    writable: Notify,
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

#[derive(Clone, Copy)]
enum End {
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
    fn offer(&self, chunk: &mut Bytes) -> Result<bool, NetError> {
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
    fn poll(&self, max_bytes: usize) -> Option<Result<Option<Bytes>, NetError>> {
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

    fn end(&self, end: End) {
        let mut state = self.lock();
        if let End::Reset(_) = end {
            state.queue.clear();
            state.queued_bytes = 0;
        }
        state.end = Some(end);
        self.readable.notify_one();
    }

    fn stop(&self, code: u32) {
        let mut state = self.lock();
        state.stopped.get_or_insert(code);
        state.queue.clear();
        state.queued_bytes = 0;
        self.writable.notify_one();
    }
}

/// The writing end.
pub(super) struct MemorySend {
    pipe: Arc<Pipe>,
    hold: Arc<Hold>,
    /// The stream that becomes visible to the other side at the first use; `None` after that.
    hidden: Option<(Arc<Outgoing>, u64)>,
    /// The recorder of the sent bytes, if there is a tap.
    pub(super) copied: Option<Copied>,
    ended: bool,
}

impl MemorySend {
    /// Returns a writer into `pipe`. A stream that this side opened stays `hidden` until it is
    /// used.
    pub(super) fn new(
        pipe: Arc<Pipe>,
        hold: Arc<Hold>,
        hidden: Option<(Arc<Outgoing>, u64)>,
    ) -> Self {
        Self { pipe, hold, hidden, copied: None, ended: false }
    }

    async fn push(&mut self, mut part: Bytes) -> Result<(), NetError> {
        loop {
            if let Some(error) = self.hold.broken() {
                return Err(error);
            }
            let taken = self.pipe.offer(&mut part)?;
            self.show();
            if taken {
                return Ok(());
            }
            tokio::select! {
                biased;
                error = self.hold.closed() => return Err(error),
                () = self.pipe.writable.notified() => {}
            }
        }
    }

    fn show(&mut self) {
        if let Some((outgoing, number)) = self.hidden.take() {
            outgoing.show(number);
        }
    }
}

#[async_trait]
impl SendStream for MemorySend {
    async fn write(&mut self, mut chunk: Bytes) -> Result<(), NetError> {
        if self.ended {
            return Err(NetError::Ended);
        }
        self.hold.lag().await;
        if let Some(copied) = &mut self.copied {
            copied.add(&chunk);
        }
        loop {
            let part = self.hold.paced(&mut chunk).await?;
            self.push(part).await?;
            if chunk.is_empty() {
                return Ok(());
            }
        }
    }

    async fn finish(&mut self) -> Result<(), NetError> {
        if self.ended {
            return Err(NetError::Ended);
        }
        self.hold.lag().await;
        if self.hold.is_mute() {
            return Err(self.hold.closed().await);
        }
        if let Some(error) = self.hold.broken() {
            return Err(error);
        }
        self.ended = true;
        self.pipe.end(End::Finished);
        self.show();
        Ok(())
    }

    fn reset(&mut self, code: u32) {
        if !std::mem::replace(&mut self.ended, true) && !self.hold.is_mute() {
            self.pipe.end(End::Reset(code));
            self.show();
        }
    }
}

impl Drop for MemorySend {
    fn drop(&mut self) {
        self.reset(ABANDONED);
    }
}

/// The reading end.
pub(super) struct MemoryRecv {
    pipe: Arc<Pipe>,
    hold: Arc<Hold>,
    stopped: bool,
}

impl MemoryRecv {
    pub(super) fn new(pipe: Arc<Pipe>, hold: Arc<Hold>) -> Self {
        Self { pipe, hold, stopped: false }
    }
}

#[async_trait]
impl RecvStream for MemoryRecv {
    async fn read(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError> {
        if self.stopped {
            return Err(NetError::Ended);
        }
        loop {
            // Bytes that have arrived can be read after the connection is gone, as over QUIC.
            if let Some(result) = self.pipe.poll(max_bytes.max(1)) {
                return result;
            }
            if let Some(error) = self.hold.broken() {
                return Err(error);
            }
            tokio::select! {
                biased;
                _ = self.hold.closed() => {}
                () = self.pipe.readable.notified() => {}
            }
        }
    }

    fn stop(&mut self, code: u32) {
        self.stopped = true;
        if !self.hold.is_mute() {
            self.pipe.stop(code);
        }
    }
}

impl Drop for MemoryRecv {
    fn drop(&mut self) {
        if !self.hold.is_mute() {
            self.pipe.stop(ABANDONED);
        }
    }
}
