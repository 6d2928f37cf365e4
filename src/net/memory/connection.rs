//! A connection of the memory network, and the streams that each side opens on it.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, mpsc};

use super::super::{Connection, NetError, Peer, RecvStream, SendStream};
use super::link::{Hold, Link, Side};
use super::outgoing::{Opened, Outgoing};
use super::pipe::Pipe;
use super::stream::{MemoryRecv, MemorySend};
use super::tap::Copied;

/// Maximum numbers of streams of each kind that one side may have open at once: the defaults of the
/// QUIC transport.
const MAX_BI_STREAMS: usize = 256;
const MAX_UNI_STREAMS: usize = 64;

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
