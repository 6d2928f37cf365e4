//! The two ends of a stream in memory.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::super::{ABANDONED, NetError, RecvStream, SendStream};
use super::link::Hold;
use super::outgoing::Outgoing;
use super::pipe::{End, Pipe};
use super::tap::Copied;

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
