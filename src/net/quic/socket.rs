//! The UDP socket: dual stack where IPv6 is available, with buffers for a burst, and with batches
//! that the kernel accepts.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::super::NetError;
use super::limits::BATCH_DATAGRAMS;

/// Length of each socket buffer in bytes: four default stream windows. With the kernel's default of
/// 208 KiB every burst loses datagrams. Memory: up to this in each direction, once per process.
const BUFFER_BYTES: usize = 4 << 20;

/// Returns a socket that is bound to `addr`.
pub(super) fn bind(addr: SocketAddr) -> Result<UdpSocket, NetError> {
    let socket = open(addr).map_err(|error| {
        let addr = addr.to_string();
        match error.kind() {
            io::ErrorKind::AddrInUse => NetError::AddrInUse { addr },
            _ => NetError::Socket { addr, reason: error.to_string() },
        }
    })?;
    widen(&socket);
    Ok(socket.into())
}

fn open(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    Ok(socket)
}

/// Requests large buffers. The kernel grants what `net.core.rmem_max` and `net.core.wmem_max`
/// allow. With less, the transport is slower, but still correct.
fn widen(socket: &Socket) {
    let socket = SockRef::from(socket);
    let _ = socket.set_recv_buffer_size(BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(BUFFER_BYTES);
    // Linux reports twice what it grants, for its own bookkeeping.
    let granted = |size: io::Result<usize>| size.map_or(0, |bytes| bytes / 2);
    let (recv_bytes, send_bytes) =
        (granted(socket.recv_buffer_size()), granted(socket.send_buffer_size()));
    if recv_bytes < BUFFER_BYTES || send_bytes < BUFFER_BYTES {
        tracing::warn!(
            recv_bytes,
            send_bytes,
            wanted_bytes = BUFFER_BYTES,
            "small UDP buffers lose datagrams: raise net.core.rmem_max and net.core.wmem_max"
        );
    }
}

/// A socket that accepts at most [`BATCH_DATAGRAMS`] at once. Everything else is delegated to the
/// inner socket.
#[derive(Debug)]
pub(super) struct Batched(pub(super) Arc<dyn AsyncUdpSocket>);

impl AsyncUdpSocket for Batched {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.0.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.0.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.0.max_transmit_segments().min(BATCH_DATAGRAMS)
    }

    fn max_receive_segments(&self) -> usize {
        self.0.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.0.may_fragment()
    }
}
