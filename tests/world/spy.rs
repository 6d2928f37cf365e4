//! A recorder of all requests in a cluster, with their senders and receivers. It changes nothing,
//! except that it holds back the requests that a test asks it to.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::net::memory::MemoryTransport;
use rapidraid::net::{Address, Connection, NetError, Peer, RecvStream, SendStream, Transport};
use rapidraid::wire::calls::{CompareAndSetKey, CompareAndSetKeyGuarded};
use rapidraid::wire::{Call, parse_request, split_request};
use tokio::sync::{oneshot, watch};

/// Maximum time of a wait for a request.
const LIMIT: Duration = Duration::from_secs(600);

/// A request: the sender's name, the receiver's name, and the frame.
type Asked = (String, String, Bytes);

/// All requests since the recording began, and the requests that are to be held back.
#[derive(Clone, Default)]
pub struct Requests {
    all: Arc<Mutex<Option<Vec<Asked>>>>,
    holds: Arc<Mutex<Vec<Hold>>>,
}

/// The description of a request that is to be held back: a compare-and-set of a catalogue key.
struct Hold {
    from: String,
    key: String,
    has_come: watch::Sender<bool>,
    /// Ends when the [`HeldWrite`] is dropped.
    may_go: oneshot::Receiver<()>,
}

/// A request that its sender is about to make, and that is held back until this is dropped.
pub struct HeldWrite {
    has_come: watch::Receiver<bool>,
    may_go: oneshot::Sender<()>,
}

impl HeldWrite {
    /// Waits until the sender makes the request.
    pub async fn has_come(&self) {
        let mut has_come = self.has_come.clone();
        let comes = has_come.wait_for(|has_come| *has_come);
        tokio::time::timeout(LIMIT, comes).await.expect("the request never came").unwrap();
    }

    /// Sends the request.
    pub fn let_go(self) {
        drop(self.may_go);
    }

    /// Waits until the sender makes the request, then for the end of `change`, and sends the
    /// request. Returns the result of `change`.
    pub async fn during<T>(self, change: impl Future<Output = T>) -> T {
        self.has_come().await;
        let result = change.await;
        self.let_go();
        result
    }
}

/// Returns the key of the catalogue that a request changes by a compare-and-set, with a guard or
/// without.
fn changed_key(frame: &[u8]) -> Option<String> {
    // Skips the frame's length.
    let (number, body) = split_request(frame.get(4..)?).ok()?;
    match number {
        CompareAndSetKey::NUMBER => Some(parse_request::<CompareAndSetKey>(body).ok()?.key),
        CompareAndSetKeyGuarded::NUMBER => {
            Some(parse_request::<CompareAndSetKeyGuarded>(body).ok()?.key)
        }
        _ => None,
    }
}

impl Requests {
    pub fn listen(&self) {
        *self.all.lock().unwrap() = Some(Vec::new());
    }

    /// Holds back the next compare-and-set of a catalogue key that the peer `from` makes on another
    /// node, with a guard or without.
    pub fn hold_write(&self, from: &str, key: &str) -> HeldWrite {
        let (has_come, comes) = watch::channel(false);
        let (lets_go, may_go) = oneshot::channel();
        let hold = Hold { from: from.to_owned(), key: key.to_owned(), has_come, may_go };
        self.holds.lock().unwrap().push(hold);
        HeldWrite { has_come: comes, may_go: lets_go }
    }

    fn add(&self, asked: Asked) {
        if let Some(all) = &mut *self.all.lock().unwrap() {
            all.push(asked);
        }
    }

    fn take_hold(&self, from: &str, frame: &[u8]) -> Option<Hold> {
        let mut holds = self.holds.lock().unwrap();
        if holds.is_empty() {
            return None;
        }
        let key = changed_key(frame)?;
        let at = holds.iter().position(|hold| hold.from == from && hold.key == key)?;
        Some(holds.remove(at))
    }

    /// Waits until a request may be sent.
    async fn wait_while_held(&self, from: &str, frame: &[u8]) {
        if let Some(hold) = self.take_hold(from, frame) {
            hold.has_come.send_replace(true);
            let _ = hold.may_go.await;
        }
    }

    /// Returns the requests of one kind, in order: the sender's name, the receiver's name, and the
    /// call.
    pub fn of<C: Call>(&self) -> Vec<(String, String, C)> {
        let all = self.all.lock().unwrap();
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
            requests.add((from.clone(), to, chunk.clone()));
            requests.wait_while_held(&from, &chunk).await;
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
