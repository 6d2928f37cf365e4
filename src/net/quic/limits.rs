//! The limits of a QUIC connection in bytes, streams and time, and the tuning that goes with them.

use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::{BbrConfig, ControllerFactory, CubicConfig};
use quinn::{EndpointConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig};

use super::super::NetError;
use crate::config::Congestion;
use crate::units::GRAIN_BYTES;

/// Maximum UDP payload that is sent or received, in bytes, without the headers of UDP and IP: the
/// payload that a path of 9,000 bytes carries over IPv6 (RFC 8200 and 768: 40 and 8 bytes).
pub(super) const MAX_DATAGRAM_BYTES: u16 = 8952;
/// Maximum payload of one UDP send over IPv4, in bytes (RFC 791 and 768: 65,535 - 20 - 8).
const MAX_BATCH_BYTES: usize = 65_507;
/// Maximum number of datagrams that are passed to the kernel as one batch, for it to segment.
///
/// quinn would pass ten. A batch longer than [`MAX_BATCH_BYTES`] is refused with EMSGSIZE, which
/// quinn's socket takes for a failed MTU probe: the batch vanishes without an error and the
/// connection stalls.
pub(super) const BATCH_DATAGRAMS: usize = MAX_BATCH_BYTES / MAX_DATAGRAM_BYTES as usize;
const _: () = assert!(BATCH_DATAGRAMS > 1);

/// Initial datagram size in bytes, which passes on every path (RFC 9000, 14). MTU discovery raises
/// it to what the path carries.
const INITIAL_DATAGRAM_BYTES: u16 = 1200;

/// Number of bytes that a connection may send before the first acknowledgement arrives: two grains.
///
/// RFC 9002, 7.2 recommends ten datagrams of 1,472 bytes. That equals one and a half of our
/// datagrams, and the receiver of a single datagram waits 25 ms for a second one before it
/// acknowledges. Each hop of a chain would then begin 25 ms later than the hop before it.
const INITIAL_WINDOW_BYTES: u64 = 2 * GRAIN_BYTES;

/// Returns quinn's controller for `congestion`. quinn calls its BBR experimental.
fn controller(congestion: Congestion) -> Arc<dyn ControllerFactory + Send + Sync> {
    match congestion {
        Congestion::Cubic => {
            let mut config = CubicConfig::default();
            config.initial_window(INITIAL_WINDOW_BYTES);
            Arc::new(config)
        }
        Congestion::Bbr => {
            let mut config = BbrConfig::default();
            config.initial_window(INITIAL_WINDOW_BYTES);
            Arc::new(config)
        }
    }
}

/// The limits of one transport and of each of its connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportLimits {
    /// Maximum number of bytes by which one stream's sender may be ahead of its reader. Memory: up
    /// to this per incoming stream while its reader is behind. The bandwidth of a stream is at most
    /// this per round trip. Default 1 MiB.
    pub stream_window_bytes: u32,
    /// Maximum number of bytes by which the senders of all streams of a connection together may be
    /// ahead of their readers. Memory: up to this per connection, which is the whole cost of
    /// received data whatever the number of streams. Default 16 MiB.
    pub connection_window_bytes: u32,
    /// The value that takes the place of `connection_window_bytes` for a connection that a client
    /// made to a node. Clients send less than nodes and are more numerous. Default 8 MiB.
    pub client_window_bytes: u32,
    /// Maximum number of bytes written but not yet acknowledged. Memory: up to this per connection;
    /// writers wait beyond it. Default 16 MiB.
    pub send_window_bytes: u32,
    /// Maximum number of bidirectional streams that the peer may have open at once. Memory: about 1
    /// KiB each, in addition to the windows. Default 256.
    pub max_bi_streams: u32,
    /// Maximum number of unidirectional streams that the peer may have open at once. Memory: about
    /// 1 KiB each, in addition to the windows. Default 64.
    pub max_uni_streams: u32,
    /// Maximum number of simultaneous connections, in both directions together. At this number, all
    /// incoming connections are refused; above three quarters of it, those of clients. Memory: each
    /// may hold both of its windows. Default 1024.
    pub max_connections: u32,
    /// Time without any packet after which a connection is lost. Default 4 s: a lease holder that
    /// uses the connection must find another daemon before its lease expires.
    pub idle_timeout: Duration,
    /// Interval at which a quiet connection is probed, so that only a dead one becomes idle. At
    /// most half of `idle_timeout`. Default 1 s.
    pub keep_alive: Duration,
    /// The congestion control for what this side sends. Default Cubic.
    pub congestion: Congestion,
}

impl Default for TransportLimits {
    fn default() -> Self {
        Self {
            stream_window_bytes: 1 << 20,
            connection_window_bytes: 16 << 20,
            client_window_bytes: 8 << 20,
            send_window_bytes: 16 << 20,
            max_bi_streams: 256,
            max_uni_streams: 64,
            max_connections: 1024,
            idle_timeout: Duration::from_secs(4),
            keep_alive: Duration::from_secs(1),
            congestion: Congestion::default(),
        }
    }
}

fn limit(field: &'static str, expected: &'static str) -> NetError {
    NetError::Limit { field, expected }
}

impl TransportLimits {
    fn check(&self) -> Result<(), NetError> {
        if self.stream_window_bytes == 0 {
            return Err(limit("stream_window_bytes", "more than 0"));
        }
        if self.connection_window_bytes < self.stream_window_bytes {
            return Err(limit("connection_window_bytes", "at least stream_window_bytes"));
        }
        if self.client_window_bytes < self.stream_window_bytes {
            return Err(limit("client_window_bytes", "at least stream_window_bytes"));
        }
        if self.send_window_bytes == 0 {
            return Err(limit("send_window_bytes", "more than 0"));
        }
        if self.max_connections == 0 {
            return Err(limit("max_connections", "more than 0"));
        }
        if self.keep_alive.is_zero() || self.keep_alive > self.idle_timeout / 2 {
            return Err(limit("keep_alive", "more than 0, at most half of idle_timeout"));
        }
        Ok(())
    }

    /// Returns these limits as quinn's configuration.
    ///
    /// Two of quinn's defaults are kept on purpose: segmentation offload stays on, and ACK
    /// frequency stays off (it stalls with large datagrams).
    pub(super) fn transport_config(&self) -> Result<Arc<TransportConfig>, NetError> {
        self.check()?;
        self.with_window(self.connection_window_bytes)
    }

    /// Returns the configuration for accepted connections. They get a client's window until the
    /// peer has proven to be a node.
    pub(super) fn accepting_config(&self) -> Result<Arc<TransportConfig>, NetError> {
        self.check()?;
        self.with_window(self.client_window_bytes.min(self.connection_window_bytes))
    }

    fn with_window(&self, window_bytes: u32) -> Result<Arc<TransportConfig>, NetError> {
        let idle = IdleTimeout::try_from(self.idle_timeout)
            .map_err(|_| limit("idle_timeout", "less than 2^62 ms"))?;
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(MAX_DATAGRAM_BYTES);
        let mut config = TransportConfig::default();
        config
            .stream_receive_window(self.stream_window_bytes.into())
            .receive_window(window_bytes.into())
            .send_window(self.send_window_bytes.into())
            .max_concurrent_bidi_streams(self.max_bi_streams.into())
            .max_concurrent_uni_streams(self.max_uni_streams.into())
            .max_idle_timeout(Some(idle))
            .keep_alive_interval(Some(self.keep_alive))
            .initial_mtu(INITIAL_DATAGRAM_BYTES)
            .mtu_discovery_config(Some(discovery))
            .congestion_controller_factory(controller(self.congestion))
            .datagram_receive_buffer_size(None);
        Ok(Arc::new(config))
    }
}

/// Returns the configuration of the socket. The receive buffer takes 64 x 32 times the largest
/// datagram in address space (18 MiB), of which the kernel's batches touch at most 2 MiB.
pub(super) fn endpoint_config() -> Result<EndpointConfig, NetError> {
    let mut config = EndpointConfig::default();
    config
        .max_udp_payload_size(MAX_DATAGRAM_BYTES)
        .map_err(|_| limit("max_udp_payload_size", "1200 to 65527"))?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_cannot_work_are_named() {
        let field = |change: fn(&mut TransportLimits)| {
            let mut limits = TransportLimits::default();
            change(&mut limits);
            match limits.transport_config() {
                Err(NetError::Limit { field, .. }) => field,
                _ => "",
            }
        };
        assert_eq!(field(|_| {}), "");
        assert_eq!(field(|l| l.stream_window_bytes = 0), "stream_window_bytes");
        assert_eq!(field(|l| l.connection_window_bytes = 1), "connection_window_bytes");
        assert_eq!(field(|l| l.client_window_bytes = 1), "client_window_bytes");
        assert_eq!(field(|l| l.send_window_bytes = 0), "send_window_bytes");
        assert_eq!(field(|l| l.max_connections = 0), "max_connections");
        assert_eq!(field(|l| l.keep_alive = Duration::from_secs(3)), "keep_alive");
        let forever = |l: &mut TransportLimits| l.idle_timeout = Duration::MAX;
        assert_eq!(field(forever), "idle_timeout");
    }
}
