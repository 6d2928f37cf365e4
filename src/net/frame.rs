//! Messages and bulk bytes on one stream. A frame is a little-endian `u32` length and that many
//! bytes. Bulk bytes follow a frame without a length of their own, because the frame announces
//! them.
//!
//! A length is checked before anything is allocated for it. `wire` defines the meaning of the
//! bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{NetError, RecvStream, SendStream};

/// Maximum length of one [`FramedRecv::read_exact`], in bytes. A longer read is refused with
/// [`NetError::FrameTooLong`].
pub const MAX_CONTIGUOUS_BYTES: usize = 1 << 20;

/// A received slice shorter than this many bytes is copied, because it may keep a 64 KiB batch of
/// datagrams in memory.
const MIN_SHARED_BYTES: usize = 16 << 10;

/// A body of at most this many bytes is copied next to its header, so that both leave in one
/// datagram.
const MAX_JOINED_BYTES: usize = 16 << 10;

/// Number of bytes requested to find out whether a stream has ended.
const PEEK_BYTES: usize = 64 << 10;

/// Writes `body` as one frame.
///
/// # Errors
/// [`NetError::FrameTooLong`] if the body is longer than `limit_bytes`; none of it is sent then.
pub async fn write_frame(
    send: &mut dyn SendStream,
    limit_bytes: usize,
    body: Bytes,
) -> Result<(), NetError> {
    let too_long =
        || NetError::FrameTooLong { len_bytes: body.len() as u64, limit_bytes: limit_bytes as u64 };
    if body.len() > limit_bytes {
        return Err(too_long());
    }
    let len = u32::try_from(body.len()).map_err(|_| too_long())?;
    if body.len() <= MAX_JOINED_BYTES {
        let mut frame = BytesMut::with_capacity(4 + body.len());
        frame.put_u32_le(len);
        frame.put_slice(&body);
        return send.write(frame.freeze()).await;
    }
    send.write(Bytes::copy_from_slice(&len.to_le_bytes())).await?;
    send.write(body).await
}

/// The reading end of a stream that carries frames and bulk bytes.
///
/// All reads are cancel safe except [`FramedRecv::read_into`]: bytes that arrived before the
/// cancellation are kept for the next read.
pub struct FramedRecv {
    recv: Box<dyn RecvStream>,
    /// Bytes read ahead of the caller. They precede everything that is still in `recv`, and
    /// `partial` precedes `ahead`.
    partial: BytesMut,
    ahead: Bytes,
    /// The length of the frame whose header was read and whose body was not.
    body_bytes: Option<usize>,
}

impl FramedRecv {
    /// Returns a reader of frames from `recv`.
    pub fn new(recv: Box<dyn RecvStream>) -> Self {
        Self { recv, partial: BytesMut::new(), ahead: Bytes::new(), body_bytes: None }
    }

    /// Returns the next frame's body, or `None` if the stream ended cleanly before it.
    pub async fn read_frame(&mut self, limit_bytes: usize) -> Result<Option<Bytes>, NetError> {
        let Some(len_bytes) = self.frame_len(limit_bytes).await? else { return Ok(None) };
        let body = self.assemble(len_bytes).await?;
        self.body_bytes = None;
        Ok(Some(body))
    }

    /// Returns the length of the next frame without reading its body, or `None` if the stream ended
    /// cleanly before it.
    pub async fn frame_len(&mut self, limit_bytes: usize) -> Result<Option<usize>, NetError> {
        let len_bytes = match self.body_bytes {
            Some(len_bytes) => len_bytes,
            None => {
                if self.at_end().await? {
                    return Ok(None);
                }
                let len_bytes = self.assemble(4).await?.get_u32_le() as usize;
                self.body_bytes = Some(len_bytes);
                len_bytes
            }
        };
        if len_bytes > limit_bytes {
            return Err(NetError::FrameTooLong {
                len_bytes: len_bytes as u64,
                limit_bytes: limit_bytes as u64,
            });
        }
        Ok(Some(len_bytes))
    }

    /// Returns exactly `len_bytes` bulk bytes (at most [`MAX_CONTIGUOUS_BYTES`]) as one contiguous
    /// slice.
    pub async fn read_exact(&mut self, len_bytes: usize) -> Result<Bytes, NetError> {
        if len_bytes > MAX_CONTIGUOUS_BYTES {
            return Err(NetError::FrameTooLong {
                len_bytes: len_bytes as u64,
                limit_bytes: MAX_CONTIGUOUS_BYTES as u64,
            });
        }
        self.assemble(len_bytes).await
    }

    /// Fills `out` with bulk bytes, which are copied straight into `out`.
    pub async fn read_into(&mut self, out: &mut [u8]) -> Result<(), NetError> {
        let wanted_bytes = out.len();
        let mut rest = out;
        while !rest.is_empty() {
            let got_bytes = wanted_bytes - rest.len();
            let Some(part) = self.read_some(rest.len()).await? else {
                return Err(truncated(wanted_bytes, got_bytes));
            };
            let (filled, left) = rest.split_at_mut(part.len());
            filled.copy_from_slice(&part);
            rest = left;
        }
        Ok(())
    }

    /// Returns the next 1 to `max_bytes` bulk bytes as they arrived, or `None` at the clean end.
    pub async fn read_some(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError> {
        let max_bytes = max_bytes.max(1);
        if !self.partial.is_empty() {
            let len = self.partial.len().min(max_bytes);
            return Ok(Some(self.partial.split_to(len).freeze()));
        }
        if !self.ahead.is_empty() {
            return Ok(Some(self.ahead.split_to(self.ahead.len().min(max_bytes))));
        }
        self.recv.read(max_bytes).await
    }

    /// Returns whether the stream has ended cleanly at this point. Waits for the next byte or the
    /// end.
    pub async fn at_end(&mut self) -> Result<bool, NetError> {
        if !self.partial.is_empty() || !self.ahead.is_empty() {
            return Ok(false);
        }
        match self.recv.read(PEEK_BYTES).await? {
            Some(part) => self.ahead = part,
            None => return Ok(true),
        }
        Ok(false)
    }

    /// Tells the sender that nothing more will be read.
    pub fn stop(&mut self, code: u32) {
        self.recv.stop(code);
    }

    /// Returns the next `len_bytes` bytes. Collects them in `self.partial`, so that a cancelled
    /// read loses nothing.
    async fn assemble(&mut self, len_bytes: usize) -> Result<Bytes, NetError> {
        while self.partial.len() < len_bytes {
            let missing_bytes = len_bytes - self.partial.len();
            let part = if self.ahead.is_empty() {
                match self.recv.read(missing_bytes).await? {
                    Some(part) => part,
                    None => return Err(truncated(len_bytes, self.partial.len())),
                }
            } else {
                self.ahead.split_to(self.ahead.len().min(missing_bytes))
            };
            if part.len() == len_bytes && len_bytes >= MIN_SHARED_BYTES {
                return Ok(part);
            }
            self.partial.reserve(missing_bytes);
            self.partial.extend_from_slice(&part);
        }
        Ok(self.partial.split_to(len_bytes).freeze())
    }
}

fn truncated(wanted_bytes: usize, got_bytes: usize) -> NetError {
    NetError::Truncated { wanted_bytes: wanted_bytes as u64, got_bytes: got_bytes as u64 }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use async_trait::async_trait;

    use super::*;

    /// A stream that returns its parts in order. An empty part is a read that has to wait once.
    struct Parts(VecDeque<Bytes>);

    #[async_trait]
    impl RecvStream for Parts {
        async fn read(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError> {
            let Some(front) = self.0.front_mut() else { return Ok(None) };
            if front.is_empty() {
                self.0.pop_front();
                std::future::pending::<()>().await;
                return Ok(None);
            }
            let part = front.split_to(front.len().min(max_bytes));
            if front.is_empty() {
                self.0.pop_front();
            }
            Ok(Some(part))
        }

        fn stop(&mut self, _: u32) {}
    }

    struct Sink(Vec<u8>);

    #[async_trait]
    impl SendStream for Sink {
        async fn write(&mut self, chunk: Bytes) -> Result<(), NetError> {
            self.0.extend_from_slice(&chunk);
            Ok(())
        }

        async fn finish(&mut self) -> Result<(), NetError> {
            Ok(())
        }

        fn reset(&mut self, _: u32) {}
    }

    fn framed(parts: impl IntoIterator<Item = Bytes>) -> FramedRecv {
        FramedRecv::new(Box::new(Parts(parts.into_iter().collect())))
    }

    fn poll_once<T>(work: impl Future<Output = T>) -> Poll<T> {
        pin!(work).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn pattern(len: usize) -> Bytes {
        (0..len).map(|i| (i % 251) as u8).collect()
    }

    #[tokio::test]
    async fn frames_and_bulk_bytes_come_back_however_they_are_cut() {
        let mut sink = Sink(Vec::new());
        let bodies = [pattern(0), pattern(1), pattern(MAX_JOINED_BYTES + 1), pattern(7)];
        for body in &bodies {
            write_frame(&mut sink, 1 << 20, body.clone()).await.unwrap();
        }
        assert_eq!(sink.0[..9], [0, 0, 0, 0, 1, 0, 0, 0, 0]);
        sink.0.extend_from_slice(&pattern(100_000));
        for cut in [1, 3, 1452, 65_536, 1 << 20] {
            let mut recv = framed(sink.0.chunks(cut).map(Bytes::copy_from_slice));
            for body in &bodies {
                assert_eq!(recv.read_frame(1 << 20).await.unwrap().as_ref(), Some(body));
            }
            assert_eq!(recv.read_exact(60_000).await.unwrap(), pattern(100_000)[..60_000]);
            let mut rest = vec![0; 40_000];
            recv.read_into(&mut rest).await.unwrap();
            assert_eq!(rest, pattern(100_000)[60_000..]);
            assert!(recv.at_end().await.unwrap());
            assert_eq!(recv.read_frame(1 << 20).await.unwrap(), None);
        }
    }

    #[tokio::test]
    async fn too_long_is_refused_by_both_sides() {
        let mut recv = framed([Bytes::from_static(&[0xff; 4])]);
        assert_eq!(
            recv.read_frame(64).await,
            Err(NetError::FrameTooLong { len_bytes: 0xffff_ffff, limit_bytes: 64 })
        );
        let mut sink = Sink(Vec::new());
        assert!(write_frame(&mut sink, 64, pattern(65)).await.is_err());
        assert!(sink.0.is_empty());
        assert!(recv.read_exact(MAX_CONTIGUOUS_BYTES + 1).await.is_err());
    }

    #[tokio::test]
    async fn an_end_inside_a_message_is_not_a_clean_end() {
        let wire = Bytes::from_static(&[8, 0, 0, 0, 1, 2, 3]);
        for len in 1..wire.len() {
            let mut recv = framed([wire.slice(..len)]);
            let error = recv.read_frame(64).await.unwrap_err();
            assert!(matches!(error, NetError::Truncated { .. }), "{len}: {error}");
        }
        let mut out = [0; 8];
        assert_eq!(framed([wire]).read_into(&mut out).await, Err(truncated(8, 7)));
    }

    #[tokio::test]
    async fn a_cancelled_read_loses_nothing() {
        let wire = Bytes::from_static(&[4, 0, 0, 0, 9, 8, 7, 6]);
        for cut in 1..wire.len() {
            let mut recv = framed([wire.slice(..cut), Bytes::new(), wire.slice(cut..)]);
            assert!(poll_once(recv.read_frame(64)).is_pending(), "{cut}");
            let body = recv.read_frame(64).await.unwrap().unwrap();
            assert_eq!(body, wire[4..], "{cut}");
        }
    }

    #[tokio::test]
    async fn large_slices_are_shared_and_short_ones_copied() {
        let large = pattern(MIN_SHARED_BYTES);
        let got = framed([large.clone()]).read_exact(large.len()).await.unwrap();
        assert_eq!(got.as_ptr(), large.as_ptr());
        let got = framed([large.clone()]).read_exact(100).await.unwrap();
        assert_ne!(got.as_ptr(), large.as_ptr());
    }
}
