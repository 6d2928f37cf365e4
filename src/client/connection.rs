//! A client's connection to its cluster. The client sends its requests to a daemon that answers,
//! its gateway.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;

use super::error::ClientError;
use super::gateway::Gateways;
use crate::clock::{Clock, SystemClock};
use crate::config::Congestion;
use crate::entropy::{Entropy, SystemEntropy};
use crate::format::records::{Node, RingChanges};
use crate::id::ClusterId;
use crate::kind::ErrorKind;
use crate::net::Transport;
use crate::net::call::{CallError, Caller, address};
use crate::net::identity::Identity;
use crate::net::pool::Pool;
use crate::net::quic::{QuicTransport, TransportLimits};
use crate::pipeline::executor::STREAM_WINDOW_BYTES;
use crate::topology::Directory;
use crate::wire::Call;
use crate::wire::calls::{Hello, ListMembers, ListNodes, ListRingChanges};
use crate::workers::Workers;

/// Default time limit for an answer of a gateway or of a node. Calls that may take longer have
/// limits of their own.
const CALL_LIMIT: Duration = Duration::from_secs(12);
/// Time limit for an attempt at a call about committed steps. While no catalogue answers, the
/// gateway first reads the commit marks of all nodes, perhaps once for other calls and once for this
/// one.
const STEPS_LIMIT: Duration = Duration::from_secs(40);
/// Time limit for calls that may take long: commits and removals, which wait for many nodes,
/// registrations of launches, and changes of a node's maintenance.
pub(super) const LONG_LIMIT: Duration = Duration::from_secs(120);
/// Maximum number of addresses that an error names.
const SHOWN_SEEDS: usize = 16;
/// Number of attempts before a call fails. Each attempt may use another gateway.
const ROUNDS: u32 = 2;
/// Minimum number of threads for reading, hashing and decoding. There is one thread per core, but
/// at least this number, because threads also wait for disks.
const MIN_WORKERS: usize = 4;
/// Maximum number of these threads. It leaves cores for other work on the machine.
const MAX_WORKERS: usize = 16;

/// The progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Number of bytes done.
    pub done_bytes: u64,
    /// Number of bytes in all.
    pub total_bytes: u64,
}

/// A callback for the progress of an operation. It may be called from any thread.
pub type ProgressFn = Arc<dyn Fn(Progress) + Send + Sync>;

/// Returns the addresses as text for an error message: the first few, and the number of the others.
pub fn summarize_addresses(addresses: &[String]) -> String {
    let shown = addresses.iter().take(SHOWN_SEEDS).cloned().collect::<Vec<_>>().join(", ");
    match addresses.len().saturating_sub(SHOWN_SEEDS) {
        0 => shown,
        more => format!("{shown} and {more} others"),
    }
}

/// A client of one cluster. Clones share their connections.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    transport: Arc<dyn Transport>,
    caller: Arc<Caller>,
    seeds: Vec<String>,
    gateways: Mutex<Gateways>,
    cluster: OnceLock<ClusterId>,
    entropy: Arc<dyn Entropy>,
    workers: Workers,
    lease_keeper: OnceLock<LeaseClient>,
}

/// The client that renews the leases of another client's saves.
struct LeaseClient {
    client: Client,
    runtime: Handle,
}

/// Returns the transport limits of a client. Each file that it reads from a node has a stream with a
/// window of its own. A stripe waits for all of its streams, so those of several reads at once must
/// fit into the connection's window.
fn client_transport_limits(congestion: Congestion) -> TransportLimits {
    TransportLimits {
        stream_window_bytes: STREAM_WINDOW_BYTES as u32,
        connection_window_bytes: 16 << 20,
        send_window_bytes: 2 << 20,
        congestion,
        ..TransportLimits::default()
    }
}

impl Client {
    /// Connects to a cluster as `identity`. `seeds` are the addresses, HOST:PORT, of some of its
    /// daemons.
    pub async fn connect(identity: &Identity, seeds: Vec<String>) -> Result<Self, ClientError> {
        Self::connect_with_congestion(identity, seeds, Congestion::default()).await
    }

    /// Connects as [`Client::connect`] does, with the given congestion control.
    pub async fn connect_with_congestion(
        identity: &Identity,
        seeds: Vec<String>,
        congestion: Congestion,
    ) -> Result<Self, ClientError> {
        let client = Self::new_unconnected(identity, seeds, congestion).await?;
        client.find_gateway().await?;
        Ok(client)
    }

    /// Returns a client that connects with its first call. It suits a process that must start even
    /// while no daemon answers.
    pub async fn new_unconnected(
        identity: &Identity,
        seeds: Vec<String>,
        congestion: Congestion,
    ) -> Result<Self, ClientError> {
        let clock = SystemClock::new();
        let limits = client_transport_limits(congestion);
        let transport = QuicTransport::connect_only(identity, &limits, clock.clone()).await?;
        let (transport, entropy) = (Arc::new(transport), Arc::new(SystemEntropy));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = Workers::new(cores.clamp(MIN_WORKERS, MAX_WORKERS));
        Ok(Self::with_transport(transport, clock, entropy, workers, seeds))
    }

    /// Returns a client over any transport, e.g. for clusters within one process.
    pub fn with_transport(
        transport: Arc<dyn Transport>,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        workers: Workers,
        seeds: Vec<String>,
    ) -> Self {
        let pool = Pool::new(transport.clone(), clock.clone());
        let caller = Caller::new(pool, clock, CALL_LIMIT);
        let (gateways, cluster) = (Mutex::default(), OnceLock::new());
        let lease_keeper = OnceLock::new();
        let inner =
            Inner { transport, caller, seeds, gateways, cluster, entropy, workers, lease_keeper };
        Self { inner: Arc::new(inner) }
    }

    /// Lets `keeper` renew the leases of this client's saves, in tasks on `runtime`. The other
    /// client has connections of its own, so no lease ends because threads of this client are slow.
    /// Later calls have no effect.
    pub fn set_lease_keeper(&self, keeper: Client, runtime: Handle) {
        let _ = self.inner.lease_keeper.set(LeaseClient { client: keeper, runtime });
    }

    pub(super) fn caller(&self) -> &Arc<Caller> {
        &self.inner.caller
    }

    pub(super) fn workers(&self) -> &Workers {
        &self.inner.workers
    }

    pub(super) fn entropy(&self) -> &Arc<dyn Entropy> {
        &self.inner.entropy
    }

    /// Returns the client that renews the leases of this client's saves, and the runtime of its
    /// tasks.
    pub(super) fn lease_keeper(&self) -> Option<(&Client, &Handle)> {
        self.inner.lease_keeper.get().map(|keeper| (&keeper.client, &keeper.runtime))
    }

    pub(super) fn seeds(&self) -> &[String] {
        &self.inner.seeds
    }

    pub(super) fn gateways(&self) -> &Mutex<Gateways> {
        &self.inner.gateways
    }

    /// Records the id of the cluster. Later calls have no effect.
    pub(super) fn note_cluster(&self, cluster: ClusterId) {
        let _ = self.inner.cluster.set(cluster);
    }

    /// Returns the nodes of the cluster as far as the gateway knows them. The call also works while
    /// no catalogue answers.
    pub async fn fetch_members(&self) -> Result<Vec<Node>, ClientError> {
        self.call_gateway(&ListMembers {}).await
    }

    /// Sends a call to the gateway. If the gateway does not answer, sends the call once more, to
    /// the gateway that is found then. If the gateway answers that something is unavailable, sends
    /// the call once more only if a gateway is found that has not failed lately. Each attempt may
    /// take `limit`.
    pub(super) async fn call_any_gateway_within<C: Call>(
        &self,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, ClientError> {
        let mut round = 0;
        loop {
            round += 1;
            let gateway = self.find_gateway().await?;
            let error = match self.caller().call_within(&address(&gateway), call, limit).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if !self.give_up_gateway(&gateway, &error) || round >= ROUNDS {
                return Err(error.into());
            }
            if !error.is_unanswered() && !self.has_fresh_gateway().await {
                return Err(error.into());
            }
        }
    }

    /// Sends a call to one gateway, once: for operations that must not happen twice.
    pub(super) async fn call_gateway_once<C: Call>(
        &self,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, ClientError> {
        let gateway = self.find_gateway().await?;
        let answer = self.caller().call_within(&address(&gateway), call, limit).await;
        if let Err(error) = &answer {
            self.give_up_gateway(&gateway, error);
        }
        Ok(answer?)
    }

    /// Makes a call that is answered with events, once, to one gateway. Passes each event to
    /// `on_event`, until `on_event` returns a result.
    pub(super) async fn watch_gateway_call<C: Call, R>(
        &self,
        call: &C,
        mut on_event: impl FnMut(C::Answer) -> Option<R>,
    ) -> Result<R, ClientError> {
        let gateway = self.find_gateway().await?;
        let watch = async {
            let mut exchange = self.caller().open(&address(&gateway), call).await?;
            exchange.finish().await?;
            loop {
                if let Some(result) = on_event(exchange.answer().await?) {
                    return Ok(result);
                }
            }
        };
        let watched: Result<R, CallError> = watch.await;
        if let Err(error) = &watched {
            self.give_up_gateway(&gateway, error);
        }
        Ok(watched?)
    }

    pub(super) async fn call_gateway<C: Call>(&self, call: &C) -> Result<C::Answer, ClientError> {
        self.call_any_gateway_within(call, CALL_LIMIT).await
    }

    /// Makes a call about committed steps.
    pub(super) async fn ask_about_steps<C: Call>(
        &self,
        call: &C,
    ) -> Result<C::Answer, ClientError> {
        self.call_any_gateway_within(call, STEPS_LIMIT).await
    }

    /// Returns the cluster's id, as the first gateway reported it.
    pub(super) async fn fetch_cluster_id(&self) -> Result<ClusterId, ClientError> {
        match self.inner.cluster.get() {
            Some(known) => Ok(*known),
            None => Ok(self.call_gateway(&Hello { me: None }).await?.cluster),
        }
    }

    pub(super) async fn fetch_directory(&self) -> Result<Directory, ClientError> {
        // Without a catalogue, the gateway hears of ring changes when it lists the nodes.
        let views = self.call_gateway(&ListNodes {}).await?;
        Ok(Directory::new(views, self.fetch_ring_changes().await?))
    }

    /// Returns the ring changes, as far as the gateway knows them. The call also works while no
    /// catalogue answers.
    pub async fn fetch_ring_changes(&self) -> Result<RingChanges, ClientError> {
        match self.call_gateway(&ListRingChanges { only_stored: false }).await {
            // The daemon is of a version that knows no ring changes.
            Err(error) if error.kind() == ErrorKind::Invalid => Ok(RingChanges::default()),
            found => found,
        }
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.inner.transport.close().await;
    }
}
