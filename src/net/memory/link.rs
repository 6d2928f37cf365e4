//! One connection of the memory network: who closed it, and the streams that each side opens on it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedSemaphorePermit, Semaphore, mpsc};

use super::super::{ABANDONED, Connection, NetError, Peer, RecvStream, SendStream};
use super::pipe::{MemoryRecv, MemorySend, Pipe};
use super::tap::{Copied, Tap};
use super::{Lag, PACE_BYTES, Pace, Paces};

/// How many streams of each kind one side may have open at once, as over QUIC by default.
const MAX_BI_STREAMS: usize = 256;
const MAX_UNI_STREAMS: usize = 64;

/// Which end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Dialler,
    Listener,
}

/// Who closed a link (`None`: the network broke it), and why.
#[derive(Clone)]
struct Closure {
    by: Option<Side>,
    code: u32,
    reason: String,
}

/// What both ends of a connection share.
pub(super) struct Link {
    addresses: [String; 2],
    closure: Mutex<Option<Closure>>,
    /// Wakes in the order of waiting, so that one seed replays one run; a `watch` channel draws lots.
    closed: Notify,
    lag: Option<Lag>,
    paces: Arc<Paces>,
    tap: Option<Tap>,
    /// Nothing that the dialler, or the listener, sends leaves it.
    unheard: [AtomicBool; 2],
}

impl Link {
    /// A link between the dialler's address and the listener's.
    pub(super) fn new(
        addresses: [String; 2],
        lag: Option<Lag>,
        paces: Arc<Paces>,
        tap: Option<Tap>,
    ) -> Arc<Self> {
        let (closure, closed, unheard) = Default::default();
        Arc::new(Self { addresses, closure, closed, lag, paces, tap, unheard })
    }

    fn unheard(&self, side: Side) -> &AtomicBool {
        let [dialler, listener] = &self.unheard;
        if side == Side::Dialler { dialler } else { listener }
    }

    /// From now on nothing leaves `side`.
    pub(super) fn silence(&self, side: Side) {
        self.unheard(side).store(true, Ordering::Relaxed);
    }

    /// Whether nothing leaves one of the sides.
    pub(super) fn is_silenced(&self) -> bool {
        self.unheard.iter().any(|unheard| unheard.load(Ordering::Relaxed))
    }

    pub(super) fn joins(&self, address: &str) -> bool {
        self.addresses.iter().any(|end| end == address)
    }

    pub(super) fn side_of(&self, address: &str) -> Option<Side> {
        let [dialler, listener] = &self.addresses;
        if dialler == address {
            Some(Side::Dialler)
        } else {
            (listener == address).then_some(Side::Listener)
        }
    }

    /// Closes the link unless it is closed.
    pub(super) fn close(&self, by: Option<Side>, code: u32, reason: &str) {
        self.closure().get_or_insert_with(|| Closure { by, code, reason: reason.to_owned() });
        self.closed.notify_waiters();
    }

    fn closure(&self) -> MutexGuard<'_, Option<Closure>> {
        self.closure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.closure().is_some()
    }

    async fn closed(&self) {
        let mut closed = std::pin::pin!(self.closed.notified());
        // Before the look: what is closed between the look and the wait wakes it.
        closed.as_mut().enable();
        if !self.is_closed() {
            closed.await;
        }
    }
}

/// One side's hold on a link. Connection and streams share it; with the last of them the link closes.
pub(super) struct Hold {
    link: Arc<Link>,
    side: Side,
    peer: Peer,
}

impl Hold {
    /// The error that a closed link gives on this side; `None` while it is open.
    pub(super) fn broken(&self) -> Option<NetError> {
        let closure = self.link.closure().clone()?;
        let (code, reason) = match closure.by {
            None => (None, "it is lost".to_owned()),
            Some(side) if side == self.side => (None, format!("by this side: {}", closure.reason)),
            Some(_) => (Some(closure.code), closure.reason),
        };
        Some(NetError::Closed { peer: self.peer.to_string(), code, reason })
    }

    /// Waits as long as what is sent now takes.
    pub(super) async fn lag(&self) {
        if let Some(Lag { clock, draw }) = &self.link.lag {
            let lag = draw();
            if !lag.is_zero() {
                clock.sleep(lag).await;
            }
        }
    }

    fn pace(&self) -> Option<Pace> {
        if self.link.unheard(self.side).load(Ordering::Relaxed) {
            return Some(Pace::Mute);
        }
        let [dialler, listener] = &self.link.addresses;
        self.link.paces.of(if self.side == Side::Dialler { dialler } else { listener })
    }

    /// Whether nothing leaves this side.
    pub(super) fn is_mute(&self) -> bool {
        matches!(self.pace(), Some(Pace::Mute))
    }

    /// The part of `chunk` that may leave now, after the time that a slow side takes for it.
    pub(super) async fn paced(&self, chunk: &mut Bytes) -> Result<Bytes, NetError> {
        let (clock, each) = match self.pace() {
            None => return Ok(std::mem::take(chunk)),
            Some(Pace::Mute) => return Err(self.closed().await),
            Some(Pace::Slow(clock, each)) => (clock, each),
        };
        let part = chunk.split_to(chunk.len().min(PACE_BYTES));
        let wait = each.mul_f64(part.len() as f64 / PACE_BYTES as f64);
        tokio::select! {
            biased;
            error = self.closed() => Err(error),
            () = clock.sleep(wait) => Ok(part),
        }
    }

    /// Waits until the link is closed.
    pub(super) async fn closed(&self) -> NetError {
        self.link.closed().await;
        self.broken().unwrap_or(NetError::ShutDown)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.link.close(Some(self.side), ABANDONED, "the peer let it go");
    }
}

/// A stream as the side that did not open it receives it: what it reads, and what it writes if it may.
struct Opened {
    read: Arc<Pipe>,
    write: Option<Arc<Pipe>>,
}

/// The streams of one kind that one side opens.
pub(super) struct Outgoing {
    permits: Arc<Semaphore>,
    inbox: mpsc::Sender<Opened>,
    /// Opened, and not yet visible to the other side.
    hidden: Mutex<Hidden>,
}

#[derive(Default)]
struct Hidden {
    /// How many streams were ever opened; the number of the newest.
    opened: u64,
    /// Number and stream, in opening order.
    streams: VecDeque<(u64, Opened)>,
}

impl Outgoing {
    fn new(max_streams: usize) -> (Arc<Self>, mpsc::Receiver<Opened>) {
        let (inbox, receiver) = mpsc::channel(max_streams);
        let permits = Arc::new(Semaphore::new(max_streams));
        (Arc::new(Self { permits, inbox, hidden: Mutex::default() }), receiver)
    }

    fn hide(&self, opened: Opened) -> u64 {
        let mut hidden = self.hidden.lock().unwrap_or_else(PoisonError::into_inner);
        hidden.opened += 1;
        let number = hidden.opened;
        hidden.streams.push_back((number, opened));
        number
    }

    /// Shows the other side all streams up to `number` (RFC 9000, 3.2: a stream opens those before it).
    pub(super) fn show(&self, number: u64) {
        let mut hidden = self.hidden.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((_, opened)) = hidden.streams.pop_front_if(|(first, _)| *first <= number) {
            // Each stream has a permit, so the inbox has room; only a side that is gone refuses.
            let _ = self.inbox.try_send(opened);
        }
    }
}

/// One end of a connection.
pub(super) struct MemoryConnection {
    hold: Arc<Hold>,
    us: Peer,
    bi: Arc<Outgoing>,
    uni: Arc<Outgoing>,
    inbox_bi: AsyncMutex<mpsc::Receiver<Opened>>,
    inbox_uni: AsyncMutex<mpsc::Receiver<Opened>>,
}

impl MemoryConnection {
    /// The dialler's end and the listener's end of `link`.
    pub(super) fn both_ends(
        link: &Arc<Link>,
        dialler: Peer,
        listener: Peer,
    ) -> (Arc<Self>, Arc<Self>) {
        let (dialler_bi, from_dialler_bi) = Outgoing::new(MAX_BI_STREAMS);
        let (dialler_uni, from_dialler_uni) = Outgoing::new(MAX_UNI_STREAMS);
        let (listener_bi, from_listener_bi) = Outgoing::new(MAX_BI_STREAMS);
        let (listener_uni, from_listener_uni) = Outgoing::new(MAX_UNI_STREAMS);
        let hold = |side, peer| Arc::new(Hold { link: link.clone(), side, peer });
        let at_dialler = Self {
            hold: hold(Side::Dialler, listener.clone()),
            us: dialler.clone(),
            bi: dialler_bi,
            uni: dialler_uni,
            inbox_bi: AsyncMutex::new(from_listener_bi),
            inbox_uni: AsyncMutex::new(from_listener_uni),
        };
        let at_listener = Self {
            hold: hold(Side::Listener, dialler),
            us: listener,
            bi: listener_bi,
            uni: listener_uni,
            inbox_bi: AsyncMutex::new(from_dialler_bi),
            inbox_uni: AsyncMutex::new(from_dialler_uni),
        };
        (Arc::new(at_dialler), Arc::new(at_listener))
    }

    /// Where requests from node to node are copied.
    fn copied(&self) -> Option<Copied> {
        let Link { addresses: [dialler, listener], tap, .. } = &*self.hold.link;
        let (from, to) = match self.hold.side {
            Side::Dialler => (dialler, listener),
            Side::Listener => (listener, dialler),
        };
        Some(Copied::new(tap.clone()?, self.us.clone(), from, to))
    }

    async fn permit(&self, of: &Outgoing) -> Result<Arc<OwnedSemaphorePermit>, NetError> {
        if let Some(error) = self.hold.broken() {
            return Err(error);
        }
        tokio::select! {
            biased;
            error = self.hold.closed() => Err(error),
            permit = of.permits.clone().acquire_owned() => {
                permit.map(Arc::new).map_err(|_| NetError::ShutDown)
            }
        }
    }

    async fn accept(&self, inbox: &AsyncMutex<mpsc::Receiver<Opened>>) -> Result<Opened, NetError> {
        tokio::select! {
            biased;
            error = self.hold.closed() => Err(error),
            opened = async { inbox.lock().await.recv().await } => {
                match opened {
                    Some(opened) => Ok(opened),
                    None => Err(self.hold.closed().await),
                }
            }
        }
    }
}

#[async_trait]
impl Connection for MemoryConnection {
    fn peer(&self) -> &Peer {
        &self.hold.peer
    }

    async fn open_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError> {
        let permit = self.permit(&self.bi).await?;
        let (out, back) = (Pipe::new(permit.clone()), Pipe::new(permit));
        let number = self.bi.hide(Opened { read: out.clone(), write: Some(back.clone()) });
        let mut send = MemorySend::new(out, self.hold.clone(), Some((self.bi.clone(), number)));
        send.copied = self.copied();
        Ok((Box::new(send), Box::new(MemoryRecv::new(back, self.hold.clone()))))
    }

    async fn open_uni(&self) -> Result<Box<dyn SendStream>, NetError> {
        let out = Pipe::new(self.permit(&self.uni).await?);
        let number = self.uni.hide(Opened { read: out.clone(), write: None });
        Ok(Box::new(MemorySend::new(out, self.hold.clone(), Some((self.uni.clone(), number)))))
    }

    async fn accept_bi(&self) -> Result<(Box<dyn SendStream>, Box<dyn RecvStream>), NetError> {
        let opened = self.accept(&self.inbox_bi).await?;
        // Streams of this kind always have a way back.
        let write = opened.write.ok_or(NetError::Ended)?;
        let recv = MemoryRecv::new(opened.read, self.hold.clone());
        Ok((Box::new(MemorySend::new(write, self.hold.clone(), None)), Box::new(recv)))
    }

    async fn accept_uni(&self) -> Result<Box<dyn RecvStream>, NetError> {
        let opened = self.accept(&self.inbox_uni).await?;
        Ok(Box::new(MemoryRecv::new(opened.read, self.hold.clone())))
    }

    fn close(&self, code: u32, reason: &str) {
        self.hold.link.close(Some(self.hold.side), code, reason);
    }

    fn is_closed(&self) -> bool {
        self.hold.link.is_closed()
    }

    async fn closed(&self) {
        self.hold.link.closed().await;
    }
}
