//! The link below a connection of the memory network: its closure, its delays and its pace.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use super::super::{ABANDONED, NetError, Peer};
use super::tap::Tap;
use super::{Lag, PACE_BYTES, Pace, Paces};

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
    pub(super) addresses: [String; 2],
    closure: Mutex<Option<Closure>>,
    /// Notified when the link closes. It wakes the waiters in order, so that one seed replays one
    /// run; a `watch` channel wakes them in random order.
    closed: Notify,
    lag: Option<Lag>,
    paces: Arc<Paces>,
    pub(super) tap: Option<Tap>,
    /// Set while nothing that the dialler (first) or the listener (second) sends is delivered.
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

    /// Makes everything that `side` sends from now on undeliverable.
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

    pub(super) fn is_closed(&self) -> bool {
        self.closure().is_some()
    }

    pub(super) async fn closed(&self) {
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
    pub(super) link: Arc<Link>,
    pub(super) side: Side,
    pub(super) peer: Peer,
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

    /// Returns whether nothing that this side sends is delivered.
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
