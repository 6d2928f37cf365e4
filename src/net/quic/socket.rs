//! The UDP socket: dual stack where IPv6 is, with buffers for a burst.

use std::io;
use std::net::{SocketAddr, UdpSocket};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::super::NetError;

/// Two default stream windows and a little: with the kernel's default of 208 KiB every burst loses
/// datagrams. Memory: up to this in each direction, once per process.
const BUFFER_BYTES: usize = 4 << 20;

/// A bound socket.
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

/// Asks for large buffers. The kernel grants what net.core.rmem_max and wmem_max allow: with less the
/// transport is slower, not wrong.
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
