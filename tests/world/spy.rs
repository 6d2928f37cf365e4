//! A recorder of all requests in a cluster, with their senders and receivers. It changes nothing.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::net::memory::MemoryTransport;
use rapidraid::net::{Address, Connection, NetError, Peer, RecvStream, SendStream, Transport};
use rapidraid::wire::{Call, parse_request, split_request};

/// A request: the sender's name, the receiver's name, and the frame.
type Asked = (String, String, Bytes);

/// All requests since the recording began.
#[derive(Clone, Default)]
pub struct Requests(Arc<Mutex<Option<Vec<Asked>>>>);

impl Requests {
    pub fn listen(&self) {
        *self.0.lock().unwrap() = Some(Vec::new());
    }

    fn add(&self, asked: Asked) {
        if let Some(all) = &mut *self.0.lock().unwrap() {
            all.push(asked);
        }
    }

    /// Returns the requests of one kind, in order: the sender's name, the receiver's name, and the
    /// call.
    pub fn of<C: Call>(&self) -> Vec<(String, String, C)> {
        let all = self.0.lock().unwrap();
        let parsed = all.iter().flatten().filter_map(|(from, to, frame)| {
            // Skips the frame's length.
            let (number, body) = split_request(frame.get(4..)?).ok()?;
            let call = (number == C::NUMBER).then(|| parse_request(body).unwrap())?;
            Some((from.clone(), to.clone(), call))
        });
        parsed.collect()
    }
}

/// A peer's access to the network, with its requests recorded.
pub struct Spied {
    pub inner: MemoryTransport,
    pub name: String,
    pub requests: Requests,
}

struct SpiedConnection {
    inner: Arc<dyn Connection>,
    name: String,
    requests: Requests,
}

/// A stream whose first chunk is a request: a short frame is written as a single chunk.
struct SpiedSend {
    inner: Box<dyn SendStream>,
    first: Option<(String, String, Requests)>,
}

impl Spied {
    fn spied(&self, inner: Arc<dyn Connection>) -> Arc<dyn Connection> {
        let (name, requests) = (self.name.clone(), self.requests.clone());
        Arc::new(SpiedConnection { inner, name, requests })
    }
}

#[async_trait]
impl Transport for Spied {
    async fn connect(&self, to: &Address) -> Result<Arc<dyn Connection>, NetError> {
        Ok(self.spied(self.inner.connect(to).await?))
    }

    async fn accept(&self) -> Option<Arc<dyn Connection>> {
        Some(self.spied(self.inner.accept().await?))
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

#[async_trait]
impl Connection for SpiedConnection {
    fn peer(&self) -> &Peer {
        self.inner.peer()
    }

    async fn open_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError> {
        let (inner, recv) = self.inner.open_bi().await?;
        let to = self.inner.peer().name.to_string();
        let first = Some((self.name.clone(), to, self.requests.clone()));
        Ok((Box::new(SpiedSend { inner, first }), recv))
    }

    async fn open_uni(&self) -> Result<Box<dyn SendStream>, NetError> {
        self.inner.open_uni().await
    }

    async fn accept_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError> {
        self.inner.accept_bi().await
    }

    async fn accept_uni(&self) -> Result<Box<dyn RecvStream>, NetError> {
        self.inner.accept_uni().await
    }

    fn close(&self, code: u32, reason: &str) {
        self.inner.close(code, reason);
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    async fn closed(&self) {
        self.inner.closed().await;
    }
}

#[async_trait]
impl SendStream for SpiedSend {
    async fn write(&mut self, chunk: Bytes) -> Result<(), NetError> {
        if let Some((from, to, requests)) = self.first.take() {
            requests.add((from, to, chunk.clone()));
        }
        self.inner.write(chunk).await
    }

    async fn finish(&mut self) -> Result<(), NetError> {
        self.inner.finish().await
    }

    fn reset(&mut self, code: u32) {
        self.inner.reset(code);
    }
}
