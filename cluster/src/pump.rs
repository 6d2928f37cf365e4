//! `rapidraid-cluster pump`: one process of a transfer without daemons. It receives a stream, sends
//! one, or both at once, and reports the time and cost. This measures the network stack alone, for
//! comparison with the daemons that use it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use clap::ValueEnum;
use rapidraid::clock::SystemClock;
use rapidraid::config::Congestion;
use rapidraid::net::identity::Identity;
use rapidraid::net::quic::{QuicTransport, TransportLimits};
use rapidraid::net::{Address, RecvStream, SendStream, Transport};
use rapidraid::pipeline::executor::STREAM_WINDOW_BYTES;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::daemons::peak_of;
use crate::{pump_disk, pump_tls};

/// Maximum time for all processes to connect. They are started one after the other.
const MEET_LIMIT: Duration = Duration::from_secs(30);
/// Maximum time of a transfer over the slowest link that is measured.
const TRANSFER_LIMIT: Duration = Duration::from_secs(3600);
/// The first bytes on a connection, by which both sides know that it is established.
const HELLO: &[u8] = b"h";
/// Bytes of one write; a chunk of the pipeline.
const CHUNK_BYTES: usize = 64 << 10;
/// A window that is no limit even if sender and receiver wait for a processor. Daemons do not have
/// the memory for such a window in each stream.
const WIDE_BYTES: u32 = 4 << 20;

/// The transport of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Over {
    /// The daemons' transport
    Quic,
    /// The daemons' transport with a window of 4 MiB for each stream
    QuicWide,
    /// The daemons' transport with a window of 4 MiB and BBR
    QuicBbr,
    /// TCP without encryption
    Tcp,
    /// TLS 1.3 over TCP
    TcpTls,
    /// No transport: a piece is written, synced, read back and hashed below the folder of the
    /// identity
    Disk,
}

/// The arguments of one process.
#[derive(Debug, clap::Args)]
pub struct Pump {
    /// The transport of the bytes
    #[arg(long, value_enum)]
    over: Over,
    /// A folder with certificate.pem, key.pem and ca.pem of a node
    #[arg(long, value_name = "FOLDER")]
    identity: PathBuf,
    /// Receive a stream on this address
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<SocketAddr>,
    /// Send a stream to this address
    #[arg(long, value_name = "IP:PORT")]
    to: Option<SocketAddr>,
    /// Length of a stream in bytes
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    bytes: u64,
}

/// The time that a transfer took, and the processor time and peak memory of the process.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Took {
    /// Seconds from the first byte received to the last; 0 if nothing was received. With
    /// [`Over::Disk`], the seconds that the piece took.
    pub seconds: f64,
    /// Processor time of the process in seconds, since its connections were established.
    pub cpu_s: f64,
    /// Maximum memory of the process in bytes.
    pub peak_bytes: u64,
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A stream in both directions: bytes in one direction, and a short answer in the other at the end.
enum Link {
    Quic(Box<dyn SendStream>, Box<dyn RecvStream>),
    Bytes(Box<dyn Duplex>),
}

impl Link {
    async fn write(&mut self, chunk: Bytes) -> Result<()> {
        match self {
            Link::Quic(send, _) => Ok(send.write(chunk).await?),
            Link::Bytes(stream) => Ok(stream.write_all(&chunk).await?),
        }
    }

    async fn send(&mut self, bytes: u64) -> Result<()> {
        let chunk = Bytes::from(vec![0x5a; CHUNK_BYTES]);
        let mut left = bytes;
        while left > 0 {
            let now = left.min(CHUNK_BYTES as u64);
            self.write(chunk.slice(..now as usize)).await?;
            left -= now;
        }
        if let Link::Bytes(stream) = self {
            stream.flush().await?;
        }
        self.receive(HELLO.len() as u64, &mut []).await
    }

    /// Reads exactly `bytes` bytes and discards them.
    async fn receive(&mut self, bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let mut few = [0; HELLO.len()];
        let mut left = bytes;
        while left > 0 {
            let most = left.min(CHUNK_BYTES as u64) as usize;
            let read = match self {
                Link::Quic(_, recv) => recv.read(most).await?.map_or(0, |chunk| chunk.len()),
                Link::Bytes(stream) => {
                    let space = if buffer.is_empty() { &mut few[..] } else { &mut *buffer };
                    let most = most.min(space.len());
                    stream.read(&mut space[..most]).await?
                }
            };
            ensure!(read > 0, "the stream ended {left} bytes early");
            left -= read as u64;
        }
        Ok(())
    }
}

/// Keeps connections open.
enum Kept {
    Quic(Box<QuicTransport>),
    Nothing,
}

impl Pump {
    /// Runs the transfer on a runtime like that of the daemon.
    pub fn run(&self) -> Result<Took> {
        if self.over == Over::Disk {
            let before = cpu_s();
            let seconds = pump_disk::piece(&self.identity, self.bytes)?;
            return Ok(Took { seconds, cpu_s: cpu_s() - before, peak_bytes: peak_bytes() });
        }
        ensure!(self.listen.is_some() || self.to.is_some(), "--listen, --to, or both");
        rapidraid::cli::runtime()?.block_on(self.both())
    }

    async fn both(&self) -> Result<Took> {
        let (kept, incoming, outgoing) =
            timeout(MEET_LIMIT, self.meet()).await.with_context(|| {
                format!("the other processes did not connect within {MEET_LIMIT:?}")
            })??;
        let before = cpu_s();
        let sending = async {
            match outgoing {
                Some(mut link) => link.send(self.bytes).await,
                None => Ok(()),
            }
        };
        let receiving = async {
            let Some(mut link) = incoming else { return Ok(0.0) };
            let mut buffer = vec![0; CHUNK_BYTES];
            link.receive(1, &mut buffer).await?;
            let first = Instant::now();
            link.receive(self.bytes - 1, &mut buffer).await?;
            let seconds = first.elapsed().as_secs_f64();
            link.write(Bytes::from_static(HELLO)).await?;
            match &mut link {
                // The sender has received the answer when it closes the connection.
                Link::Quic(send, recv) => {
                    send.finish().await?;
                    let _ = recv.read(1).await;
                }
                Link::Bytes(stream) => stream.shutdown().await?,
            }
            anyhow::Ok(seconds)
        };
        let transfer = async { tokio::try_join!(sending, receiving) };
        let ((), seconds) = timeout(TRANSFER_LIMIT, transfer)
            .await
            .with_context(|| format!("the transfer has not ended within {TRANSFER_LIMIT:?}"))??;
        let took = Took { seconds, cpu_s: cpu_s() - before, peak_bytes: peak_bytes() };
        if let Kept::Quic(transport) = kept {
            // Without a close, the other side would wait until it considers this one lost.
            transport.close().await;
        }
        Ok(took)
    }

    /// Establishes the connections in both directions, and uses each once.
    async fn meet(&self) -> Result<(Kept, Option<Link>, Option<Link>)> {
        match self.over {
            Over::Quic => self.meet_quic(STREAM_WINDOW_BYTES as u32, Congestion::Cubic).await,
            Over::QuicWide => self.meet_quic(WIDE_BYTES, Congestion::Cubic).await,
            Over::QuicBbr => self.meet_quic(WIDE_BYTES, Congestion::Bbr).await,
            Over::Tcp => self.meet_tcp(None).await,
            Over::TcpTls => self.meet_tcp(Some(pump_tls::Tls::read(&self.identity)?)).await,
            Over::Disk => bail!("nothing is sent"),
        }
    }

    async fn meet_quic(
        &self,
        stream_window_bytes: u32,
        congestion: Congestion,
    ) -> Result<(Kept, Option<Link>, Option<Link>)> {
        let limits =
            TransportLimits { stream_window_bytes, congestion, ..TransportLimits::default() };
        let (identity, clock) = (identity(&self.identity)?, SystemClock::new());
        let transport = match self.listen {
            Some(at) => QuicTransport::listen(at, &identity, &limits, clock).await?,
            None => QuicTransport::connect_only(&identity, &limits, clock).await?,
        };
        let accept = async {
            if self.listen.is_none() {
                return Ok(None);
            }
            let connection = transport.accept().await.context("the endpoint closed")?;
            let (send, recv) = connection.accept_bi().await?;
            let mut link = Link::Quic(send, recv);
            link.receive(HELLO.len() as u64, &mut []).await?;
            anyhow::Ok(Some(link))
        };
        let dial = async {
            let Some(to) = self.to else { return Ok(None) };
            let to = Address { host_port: to.to_string(), node: None };
            let connection = loop {
                match transport.connect(&to).await {
                    Ok(connection) => break connection,
                    Err(error) if error.kind().is_transient() => pause().await,
                    Err(error) => bail!(error),
                }
            };
            let (send, recv) = connection.open_bi().await?;
            let mut link = Link::Quic(send, recv);
            link.write(Bytes::from_static(HELLO)).await?;
            Ok(Some(link))
        };
        let (incoming, outgoing) = tokio::try_join!(accept, dial)?;
        Ok((Kept::Quic(Box::new(transport)), incoming, outgoing))
    }

    async fn meet_tcp(
        &self,
        tls: Option<pump_tls::Tls>,
    ) -> Result<(Kept, Option<Link>, Option<Link>)> {
        let tls = tls.map(Arc::new);
        let accept = async {
            let Some(at) = self.listen else { return Ok(None) };
            let (stream, _) = TcpListener::bind(at).await?.accept().await?;
            stream.set_nodelay(true)?;
            let mut link = Link::Bytes(match &tls {
                None => Box::new(stream),
                Some(tls) => Box::new(tls.accept(stream).await?),
            });
            link.receive(HELLO.len() as u64, &mut []).await?;
            anyhow::Ok(Some(link))
        };
        let dial = async {
            let Some(to) = self.to else { return Ok(None) };
            let stream = loop {
                match TcpStream::connect(to).await {
                    Ok(stream) => break stream,
                    Err(_) => pause().await,
                }
            };
            stream.set_nodelay(true)?;
            let mut link = Link::Bytes(match &tls {
                None => Box::new(stream),
                Some(tls) => Box::new(tls.connect(stream).await?),
            });
            link.write(Bytes::from_static(HELLO)).await?;
            if let Link::Bytes(stream) = &mut link {
                stream.flush().await?;
            }
            Ok(Some(link))
        };
        let (incoming, outgoing) = tokio::try_join!(accept, dial)?;
        Ok((Kept::Nothing, incoming, outgoing))
    }
}

async fn pause() {
    sleep(Duration::from_millis(50)).await;
}

fn identity(folder: &Path) -> Result<Identity> {
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    Ok(Identity::from_pem(&read("ca.pem")?, &read("certificate.pem")?, &read("key.pem")?)?)
}

/// Returns the processor time of this process so far, in seconds.
fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    peak_of(&status).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the files of two nodes, as `cluster init` does, and finds two free ports.
    fn pumps(folder: &Path, over: Over) -> (Pump, Pump) {
        let authority =
            rapidraid::net::authority::Authority::create(rapidraid::id::ClusterId([7; 16]))
                .unwrap();
        for name in ["a", "b"] {
            let issued =
                authority.issue(rapidraid::net::Role::Node, &name.parse().unwrap()).unwrap();
            let home = folder.join(name);
            std::fs::create_dir_all(&home).unwrap();
            std::fs::write(home.join("ca.pem"), authority.cert_pem()).unwrap();
            std::fs::write(home.join("certificate.pem"), &issued.cert_pem).unwrap();
            std::fs::write(home.join("key.pem"), &*issued.key_pem).unwrap();
        }
        let free = || std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (first, second) = (free(), free());
        let pump = |name, listen, to| Pump {
            over,
            identity: folder.join(name),
            listen: Some(listen),
            to: Some(to),
            bytes: 1_000_001,
        };
        (pump("a", first, second), pump("b", second, first))
    }

    #[test]
    fn two_processes_send_to_each_other_over_each_transport() {
        for over in [Over::Quic, Over::QuicWide, Over::QuicBbr, Over::Tcp, Over::TcpTls] {
            let folder = tempfile::tempdir().unwrap();
            let (a, b) = pumps(folder.path(), over);
            let other = std::thread::spawn(move || b.run().unwrap());
            let (took, other) = (a.run().unwrap(), other.join().unwrap());
            for took in [took, other] {
                assert!(took.seconds > 0.0 && took.cpu_s > 0.0, "{over:?}: {took:?}");
            }
        }
    }

    #[test]
    fn one_process_sends_to_another() {
        for over in [Over::Quic, Over::TcpTls] {
            let folder = tempfile::tempdir().unwrap();
            let (mut sender, mut receiver) = pumps(folder.path(), over);
            (sender.listen, receiver.to) = (None, None);
            let sending = std::thread::spawn(move || sender.run().unwrap());
            let (received, sent) = (receiver.run().unwrap(), sending.join().unwrap());
            assert!(received.seconds > 0.0 && sent.seconds == 0.0, "{over:?}: {received:?}");
        }
    }
}
