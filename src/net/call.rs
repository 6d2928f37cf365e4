//! Calls to other processes: one bidirectional stream each, with a deadline.

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

/// A call did not give an answer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The connection or stream failed.
    #[error("{call} to {to}: {source}")]
    Net {
        /// Name of the call.
        call: &'static str,
        /// Whom it went to.
        to: String,
        /// What happened.
        source: NetError,
    },
    /// What came is no answer.
    #[error("{call} to {to}: {source}")]
    Wire {
        /// Name of the call.
        call: &'static str,
        /// Whom it went to.
        to: String,
        /// What is wrong with it.
        source: WireError,
    },
    /// Nothing came in time.
    #[error("{call} to {to}: {source}")]
    Late {
        /// Name of the call.
        call: &'static str,
        /// Whom it went to.
        to: String,
        /// The limit.
        source: Elapsed,
    },
    /// The other side refused or failed, and said why.
    #[error(transparent)]
    Failed(#[from] RemoteError),
}

impl CallError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CallError::Net { source, .. } => source.kind(),
            CallError::Wire { source, .. } => source.kind(),
            CallError::Late { .. } => ErrorKind::Timeout,
            CallError::Failed(failure) => failure.kind,
        }
    }

    /// Whether the other side was not reached, so that the call has certainly had no effect or an unknown one: not a refusal.
    pub fn is_unanswered(&self) -> bool {
        !matches!(self, CallError::Failed(_))
    }
}

/// Makes calls over pooled connections.
pub struct Caller {
    pool: Arc<Pool>,
    clock: Arc<dyn Clock>,
    limit: Duration,
}

/// An open call, for those with bulk bytes or several answers.
pub struct Exchange {
    /// Bytes towards the callee.
    pub send: Box<dyn SendStream>,
    /// Bytes from the callee.
    pub recv: FramedRecv,
    call: &'static str,
    to: String,
}

impl Exchange {
    /// Wraps what happened on this exchange's streams.
    pub fn net(&self, source: NetError) -> CallError {
        CallError::Net { call: self.call, to: self.to.clone(), source }
    }

    /// Writes bulk bytes.
    pub async fn write(&mut self, chunk: Bytes) -> Result<(), CallError> {
        let written = self.send.write(chunk).await;
        written.map_err(|source| self.net(source))
    }

    /// Writes a frame behind the request.
    pub async fn write_frame(&mut self, body: Vec<u8>) -> Result<(), CallError> {
        let written = write_frame(&mut *self.send, MAX_FRAME_BYTES, body.into()).await;
        written.map_err(|source| self.net(source))
    }

    /// Says that nothing more comes from this side.
    pub async fn finish(&mut self) -> Result<(), CallError> {
        let finished = self.send.finish().await;
        finished.map_err(|source| self.net(source))
    }

    /// The next answer.
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
    /// Calls over `pool`; each answer must come within `limit` unless the caller says otherwise.
    pub fn new(pool: Arc<Pool>, clock: Arc<dyn Clock>, limit: Duration) -> Arc<Self> {
        Arc::new(Self { pool, clock, limit })
    }

    /// The clock that deadlines are measured by.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// How long an answer may take unless the caller says otherwise.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The live connection to `to`.
    pub async fn connection(&self, to: &NodeAddress) -> Result<Arc<dyn Connection>, NetError> {
        self.pool.get(&address(to)).await
    }

    /// Opens a call and sends its request; the caller goes on with the exchange.
    pub async fn open<C: Call>(&self, to: &Address, call: &C) -> Result<Exchange, CallError> {
        let net = |source| CallError::Net { call: C::NAME, to: to.to_string(), source };
        // A pooled connection may have died without our noticing: then one new one is tried.
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

    /// As [`Caller::call_within`], over this connection to `to` and no other: to the process that was reached before.
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

    /// Makes a call and waits for its one answer, at most `limit`.
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

    /// As [`Caller::call_within`], but keeps our side open until the answer: when this is dropped, the callee sees
    /// a reset and ends the work.
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

    /// Makes a call to whoever answers at `to`.
    pub async fn call_address<C: Call>(
        &self,
        to: &Address,
        call: &C,
    ) -> Result<C::Answer, CallError> {
        self.call_within(to, call, self.limit).await
    }

    /// Makes a call to a node.
    pub async fn call<C: Call>(&self, to: &NodeAddress, call: &C) -> Result<C::Answer, CallError> {
        self.call_within(&address(to), call, self.limit).await
    }
}

/// The transport's address of a node.
pub fn address(to: &NodeAddress) -> Address {
    Address { host_port: to.host_port.clone(), node: Some(to.name.clone()) }
}
