//! The network traits over quinn's connections and streams.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use quinn::{ConnectionError, ReadError, TransportErrorCode, VarInt, WriteError};

use super::super::{ABANDONED, Connection, NetError, Peer, RecvStream, SendStream};
use crate::kind::ErrorKind;

/// A connection whose peer is verified.
pub(super) struct QuicConnection {
    inner: quinn::Connection,
    peer: Peer,
    /// The peer and its address, for error messages.
    label: Arc<str>,
}

impl QuicConnection {
    pub(super) fn new(inner: quinn::Connection, peer: Peer) -> Self {
        let label = format!("{peer} at {}", inner.remote_address()).into();
        Self { inner, peer, label }
    }

    /// Closes the connection before it has served anything, with a code that tells the peer to come
    /// back later. Returns the error.
    pub(super) fn refuse_as_busy(&self) -> NetError {
        let error = NetError::Busy { peer: self.label.to_string() };
        let reason =
            "too many clients are connected to this node: try again later, or ask another node";
        self.inner.close(ErrorKind::Busy.wire_code().into(), reason.as_bytes());
        error
    }

    #[cfg(test)]
    pub(super) fn path(&self) -> quinn::PathStats {
        self.inner.stats().path
    }

    fn send(&self, inner: quinn::SendStream) -> Box<dyn SendStream> {
        Box::new(QuicSend { inner, label: self.label.clone(), ended: false })
    }

    fn recv(&self, inner: quinn::RecvStream) -> Box<dyn RecvStream> {
        Box::new(QuicRecv { inner, label: self.label.clone(), over: None })
    }

    fn lost(&self) -> impl FnOnce(ConnectionError) -> NetError + '_ {
        |error| connection_error(&self.label, error)
    }
}

fn code_of(code: VarInt) -> u32 {
    u32::try_from(code.into_inner()).unwrap_or(u32::MAX)
}

/// Returns whether the code is a TLS alert. TLS alerts travel as QUIC errors 0x100 to 0x1ff (RFC
/// 9001, 4.8).
fn is_tls_alert(code: TransportErrorCode) -> bool {
    (0x100..0x200).contains(&u64::from(code))
}

/// Returns the error for the end of a connection with `peer`.
pub(super) fn connection_error(peer: &str, error: ConnectionError) -> NetError {
    let peer = peer.to_owned();
    let reason = error.to_string();
    match error {
        ConnectionError::VersionMismatch => NetError::Refused { peer, reason },
        ConnectionError::TransportError(ours) if is_tls_alert(ours.code) => {
            NetError::Refused { peer, reason }
        }
        ConnectionError::ConnectionClosed(theirs) if is_tls_alert(theirs.error_code) => {
            NetError::Refused { peer, reason }
        }
        ConnectionError::ConnectionClosed(theirs)
            if theirs.error_code == TransportErrorCode::CONNECTION_REFUSED =>
        {
            NetError::Busy { peer }
        }
        ConnectionError::ApplicationClosed(theirs) => {
            NetError::Closed { peer, code: Some(code_of(theirs.error_code)), reason }
        }
        _ => NetError::Closed { peer, code: None, reason },
    }
}

#[async_trait]
impl Connection for QuicConnection {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    async fn open_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError> {
        let (send, recv) = self.inner.open_bi().await.map_err(self.lost())?;
        Ok((self.send(send), self.recv(recv)))
    }

    async fn open_uni(&self) -> Result<Box<dyn SendStream>, NetError> {
        Ok(self.send(self.inner.open_uni().await.map_err(self.lost())?))
    }

    async fn accept_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError> {
        let (send, recv) = self.inner.accept_bi().await.map_err(self.lost())?;
        Ok((self.send(send), self.recv(recv)))
    }

    async fn accept_uni(&self) -> Result<Box<dyn RecvStream>, NetError> {
        Ok(self.recv(self.inner.accept_uni().await.map_err(self.lost())?))
    }

    fn close(&self, code: u32, reason: &str) {
        self.inner.close(code.into(), reason.as_bytes());
    }

    fn is_closed(&self) -> bool {
        self.inner.close_reason().is_some()
    }

    async fn closed(&self) {
        self.inner.closed().await;
    }
}

struct QuicSend {
    inner: quinn::SendStream,
    label: Arc<str>,
    ended: bool,
}

#[async_trait]
impl SendStream for QuicSend {
    async fn write(&mut self, chunk: Bytes) -> Result<(), NetError> {
        if self.ended {
            return Err(NetError::Ended);
        }
        self.inner.write_chunk(chunk).await.map_err(|error| match error {
            WriteError::Stopped(code) => NetError::Stopped { code: code_of(code) },
            WriteError::ConnectionLost(error) => connection_error(&self.label, error),
            WriteError::ClosedStream | WriteError::ZeroRttRejected => NetError::Ended,
        })
    }

    async fn finish(&mut self) -> Result<(), NetError> {
        if std::mem::replace(&mut self.ended, true) {
            return Err(NetError::Ended);
        }
        self.inner.finish().map_err(|_| NetError::Ended)
    }

    fn reset(&mut self, code: u32) {
        if !std::mem::replace(&mut self.ended, true) {
            // Fails only if the stream has already ended.
            let _ = self.inner.reset(code.into());
        }
    }
}

impl Drop for QuicSend {
    fn drop(&mut self) {
        // quinn would finish the stream, and half a stream would look complete.
        self.reset(ABANDONED);
    }
}

struct QuicRecv {
    inner: quinn::RecvStream,
    label: Arc<str>,
    /// The error that every further read returns; `None` while the stream is open and after a clean
    /// end. It is kept here because quinn itself reports a clean end once the reader has stopped the
    /// stream or has learned of its reset.
    over: Option<NetError>,
}

#[async_trait]
impl RecvStream for QuicRecv {
    async fn read(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError> {
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        let error = match self.inner.read_chunk(max_bytes.max(1), true).await {
            Ok(chunk) => return Ok(chunk.map(|chunk| chunk.bytes)),
            Err(ReadError::Reset(code)) => NetError::Reset { code: code_of(code) },
            Err(ReadError::ConnectionLost(error)) => connection_error(&self.label, error),
            Err(_) => NetError::Ended,
        };
        Err(self.over.insert(error).clone())
    }

    fn stop(&mut self, code: u32) {
        self.over.get_or_insert(NetError::Ended);
        // Fails only if the stream has already ended.
        let _ = self.inner.stop(code.into());
    }
}
