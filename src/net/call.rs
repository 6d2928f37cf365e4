//! Calls to other processes. Each call uses one bidirectional stream and has a deadline. A call
//! that was opened with [`Caller::open`] has none: its user sets one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::frame::{FramedRecv, write_frame};
use super::pool::Pool;
use super::{ABANDONED, Address, Connection, NetError, RecvStream, SendStream};
use crate::clock::{Clock, Elapsed, deadline};
use crate::kind::ErrorKind;
use crate::wire::{
    Call, MAX_FRAME_BYTES, NodeAddress, RemoteError, WireError, parse_answer, request_to_bytes,
};

/// An error of a call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The connection or stream failed.
    #[error("{call} to {to}: {source}")]
    Net {
        /// The name of the call.
        call: &'static str,
        /// The address that was called.
        to: String,
        /// The cause.
        source: NetError,
    },
    /// The received bytes are not a valid answer, or the request cannot be encoded.
    #[error("{call} to {to}: {source}")]
    Wire {
        /// The name of the call.
        call: &'static str,
        /// The address that was called.
        to: String,
        /// The error of parsing or encoding.
        source: WireError,
    },
    /// No answer arrived in time.
    #[error("{call} to {to}: {source}")]
    Late {
        /// The name of the call.
        call: &'static str,
        /// The address that was called.
        to: String,
        /// The time limit that elapsed.
        source: Elapsed,
    },
    /// The other side answered with an error.
    #[error(transparent)]
    Failed(#[from] RemoteError),
}

impl CallError {
    /// Returns the kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CallError::Net { source, .. } => source.kind(),
            CallError::Wire { source, .. } => source.kind(),
            CallError::Late { .. } => ErrorKind::Timeout,
            CallError::Failed(failure) => failure.kind,
        }
    }

    /// Returns whether no valid answer arrived, so that the call had no effect or an unknown one.
    /// Returns `false` for an error with which the other side answered.
    pub fn is_unanswered(&self) -> bool {
        !matches!(self, CallError::Failed(_))
    }
}

/// A caller: makes calls over pooled connections.
pub struct Caller {
    pool: Arc<Pool>,
    clock: Arc<dyn Clock>,
    limit: Duration,
}

/// An open call, used for calls with bulk bytes or several answers.
pub struct Exchange {
    /// The stream of bytes to the callee.
    pub send: Box<dyn SendStream>,
    /// The stream of bytes from the callee.
    pub recv: FramedRecv,
    call: &'static str,
    to: String,
}

impl Exchange {
    /// Returns `source` as an error of this call.
    pub fn net(&self, source: NetError) -> CallError {
        CallError::Net { call: self.call, to: self.to.clone(), source }
    }

    /// Writes bulk bytes.
    pub async fn write(&mut self, chunk: Bytes) -> Result<(), CallError> {
        let written = self.send.write(chunk).await;
        written.map_err(|source| self.net(source))
    }

    /// Writes a frame after the request.
    pub async fn write_frame(&mut self, body: Vec<u8>) -> Result<(), CallError> {
        let written = write_frame(&mut *self.send, MAX_FRAME_BYTES, body.into()).await;
        written.map_err(|source| self.net(source))
    }

    /// Ends this side of the exchange: nothing more is sent.
    pub async fn finish(&mut self) -> Result<(), CallError> {
        let finished = self.send.finish().await;
        finished.map_err(|source| self.net(source))
    }

    /// Reads and returns the next answer.
    pub async fn answer<A: DeserializeOwned>(&mut self) -> Result<A, CallError> {
        let frame =
            self.recv.read_frame(MAX_FRAME_BYTES).await.map_err(|source| self.net(source))?;
        let Some(frame) = frame else {
            let to = self.to.clone();
            return Err(self.net(NetError::Closed {
                peer: to,
                code: Some(ABANDONED),
                reason: "it ended without an answer".into(),
            }));
        };
        match parse_answer(&frame) {
            Ok(answer) => Ok(answer?),
            Err(source) => Err(CallError::Wire { call: self.call, to: self.to.clone(), source }),
        }
    }
}

impl Caller {
    /// Returns a caller over `pool`. Each answer must arrive within `limit` unless a call gives its
    /// own limit.
    pub fn new(pool: Arc<Pool>, clock: Arc<dyn Clock>, limit: Duration) -> Arc<Self> {
        Arc::new(Self { pool, clock, limit })
    }

    /// Returns the clock that measures the deadlines.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Returns the default time limit of an answer.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns the live connection to `to`, and connects if there is none.
    pub async fn connection(&self, to: &NodeAddress) -> Result<Arc<dyn Connection>, NetError> {
        self.pool.get(&address(to)).await
    }

    /// Opens a call and sends its request. Returns the exchange, with which the caller continues.
    pub async fn open<C: Call>(&self, to: &Address, call: &C) -> Result<Exchange, CallError> {
        let net = |source| CallError::Net { call: C::NAME, to: to.to_string(), source };
        // A pooled connection may have died unnoticed: in that case try one new connection.
        let mut connection = self.pool.get(to).await.map_err(net)?;
        let streams = match connection.open_bi().await {
            Err(_) if connection.is_closed() => {
                connection = self.pool.get(to).await.map_err(net)?;
                connection.open_bi().await
            }
            streams => streams,
        };
        Self::send(streams.map_err(net)?, to, call).await
    }

    async fn send<C: Call>(
        (send, recv): (Box<dyn SendStream>, Box<dyn RecvStream>),
        to: &Address,
        call: &C,
    ) -> Result<Exchange, CallError> {
        let wire = |source| CallError::Wire { call: C::NAME, to: to.to_string(), source };
        let frame = request_to_bytes(call).map_err(wire)?;
        let mut exchange =
            Exchange { send, recv: FramedRecv::new(recv), call: C::NAME, to: to.to_string() };
        exchange.write_frame(frame).await?;
        Ok(exchange)
    }

    /// Makes a call like [`Caller::call_within`], but only over the given connection to `to`, that
    /// is, to the same process that was reached before.
    pub async fn call_on<C: Call>(
        &self,
        connection: &dyn Connection,
        to: &Address,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, CallError> {
        let work = async {
            let net = |source| CallError::Net { call: C::NAME, to: to.to_string(), source };
            let streams = connection.open_bi().await.map_err(net)?;
            let mut exchange = Self::send(streams, to, call).await?;
            exchange.finish().await?;
            exchange.answer().await
        };
        deadline(&*self.clock, limit, work).await.unwrap_or_else(|source| {
            Err(CallError::Late { call: C::NAME, to: to.to_string(), source })
        })
    }

    /// Makes a call and waits at most `limit` for its single answer. Returns the answer.
    pub async fn call_within<C: Call>(
        &self,
        to: &Address,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, CallError> {
        let work = async {
            let mut exchange = self.open(to, call).await?;
            exchange.finish().await?;
            exchange.answer().await
        };
        deadline(&*self.clock, limit, work).await.unwrap_or_else(|source| {
            Err(CallError::Late { call: C::NAME, to: to.to_string(), source })
        })
    }

    /// Makes a call like [`Caller::call_within`], but keeps our side of the stream open until the
    /// answer. If this future is dropped, the callee sees a reset and ends the work.
    pub async fn call_held<C: Call>(
        &self,
        to: &NodeAddress,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, CallError> {
        let to = address(to);
        let work = async { self.open(&to, call).await?.answer().await };
        deadline(&*self.clock, limit, work).await.unwrap_or_else(|source| {
            Err(CallError::Late { call: C::NAME, to: to.to_string(), source })
        })
    }

    /// Makes a call to the node that answers at `to`, with the default time limit. Returns the
    /// answer.
    pub async fn call_address<C: Call>(
        &self,
        to: &Address,
        call: &C,
    ) -> Result<C::Answer, CallError> {
        self.call_within(to, call, self.limit).await
    }

    /// Makes a call to a node, with the default time limit. Returns the answer.
    pub async fn call<C: Call>(&self, to: &NodeAddress, call: &C) -> Result<C::Answer, CallError> {
        self.call_within(&address(to), call, self.limit).await
    }
}

/// Returns the transport's address of a node.
pub fn address(to: &NodeAddress) -> Address {
    Address { host_port: to.host_port.clone(), node: Some(to.name.clone()) }
}
