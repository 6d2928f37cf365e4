//! A connection of the memory network: its closure, and the streams that each side opens on it.

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

/// Maximum numbers of streams of each kind that one side may have open at once: the defaults of the
/// QUIC transport.
const MAX_BI_STREAMS: usize = 256;
const MAX_UNI_STREAMS: usize = 64;

/// An end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Dialler,
    Listener,
}

/// The closure of a link: the side that closed it (`None` if the network broke it), and the reason.
#[derive(Clone)]
struct Closure {
    by: Option<Side>,
    code: u32,
    reason: String,
}

/// The state that both ends of a connection share.
pub(super) struct Link {
    addresses: [String; 2],
    closure: Mutex<Option<Closure>>,
    /// Notified when the link closes. It wakes the waiters in order, so that one seed replays one
    /// run; a `watch` channel wakes them in random order.
    closed: Notify,
    lag: Option<Lag>,
    paces: Arc<Paces>,
    tap: Option<Tap>,
    /// Set when nothing that the dialler (first) or the listener (second) sends leaves it any more.
    unheard: [AtomicBool; 2],
}

impl Link {
    /// Returns a link between the addresses of the dialler and of the listener.
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

    /// Lets nothing that `side` sends leave it from now on.
    pub(super) fn silence(&self, side: Side) {
        self.unheard(side).store(true, Ordering::Relaxed);
    }

    /// Returns whether one of the sides is silenced.
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

    /// Closes the link unless it is already closed.
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
        // Enabled before the check, so that a close between the check and the wait wakes it.
        closed.as_mut().enable();
        if !self.is_closed() {
            closed.await;
        }
    }
}

/// A handle of one side on a link. The connection and its streams share it; the link closes when
/// the last of them is dropped.
pub(super) struct Hold {
    link: Arc<Link>,
    side: Side,
    peer: Peer,
}

impl Hold {
    /// Returns the error that a closed link causes on this side, or `None` while the link is open.
    pub(super) fn broken(&self) -> Option<NetError> {
        let closure = self.link.closure().clone()?;
        let (code, reason) = match closure.by {
            None => (None, "it is lost".to_owned()),
            Some(side) if side == self.side => (None, format!("by this side: {}", closure.reason)),
            Some(_) => (Some(closure.code), closure.reason),
        };
        Some(NetError::Closed { peer: self.peer.to_string(), code, reason })
    }

    /// Waits for the delay of data that is sent now.
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

    /// Returns whether nothing that this side sends leaves it.
    pub(super) fn is_mute(&self) -> bool {
        matches!(self.pace(), Some(Pace::Mute))
    }

    /// Waits for the time that a slow side needs, and returns the part of `chunk` that may leave
    /// then.
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

    /// Waits until the link is closed. Returns the error for this side.
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

/// A stream as the accepting side receives it: the pipe that it reads, and the pipe that it writes
/// if the stream is bidirectional.
struct Opened {
    read: Arc<Pipe>,
    write: Option<Arc<Pipe>>,
}

/// The streams of one kind that one side opens.
pub(super) struct Outgoing {
    permits: Arc<Semaphore>,
    inbox: mpsc::Sender<Opened>,
    /// The streams that are opened but not yet visible to the other side.
    hidden: Mutex<Hidden>,
}

#[derive(Default)]
struct Hidden {
    /// The number of streams ever opened, which is also the number of the newest.
    opened: u64,
    /// The numbers and streams, in the order of opening.
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

    /// Makes all streams up to `number` visible to the other side (RFC 9000, 3.2: a stream opens
    /// all streams before it).
    pub(super) fn show(&self, number: u64) {
        let mut hidden = self.hidden.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((_, opened)) = hidden.streams.pop_front_if(|(first, _)| *first <= number) {
            // Each stream has a permit, so the inbox has room. The send fails only if the other
            // side is gone.
            let _ = self.inbox.try_send(opened);
        }
    }
}

/// An end of a connection.
pub(super) struct MemoryConnection {
    hold: Arc<Hold>,
    us: Peer,
    bi: Arc<Outgoing>,
    uni: Arc<Outgoing>,
    inbox_bi: AsyncMutex<mpsc::Receiver<Opened>>,
    inbox_uni: AsyncMutex<mpsc::Receiver<Opened>>,
}

impl MemoryConnection {
    /// Returns the dialler's end and the listener's end of `link`.
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

    /// Returns a recorder for a stream of this side, if the link has a tap.
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
        // Bidirectional streams always have a pipe back.
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
