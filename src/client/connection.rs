//! A client's connection to its cluster. The client finds a daemon that answers, its gateway, and
//! sends its requests to it.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;

use super::error::ClientError;
use crate::clock::{Clock, SystemClock};
use crate::config::Congestion;
use crate::entropy::{Entropy, SystemEntropy};
use crate::format::records::{Node, RingChanges};
use crate::id::ClusterId;
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Caller, address};
use crate::net::identity::Identity;
use crate::net::pool::Pool;
use crate::net::quic::{QuicTransport, TransportLimits};
use crate::net::{Address, Transport};
use crate::pipeline::executor::STREAM_WINDOW_BYTES;
use crate::topology::Directory;
use crate::wire::calls::{Hello, ListMembers, ListNodes, ListRingChanges};
use crate::wire::{Call, NodeAddress};
use crate::workers::Workers;

/// Time limit for an answer of a gateway.
const CALL_LIMIT: Duration = Duration::from_secs(12);
/// Time limit for an attempt at a call about committed steps. While no catalogue answers, the
/// gateway first reads the commit marks of all nodes, perhaps once for other calls and once for this
/// one.
const STEPS_LIMIT: Duration = Duration::from_secs(40);
/// Time limit for commits and removals, which wait for many nodes.
pub(super) const LONG_LIMIT: Duration = Duration::from_secs(120);
/// Number of seeds that are asked first, and the time they have before more are asked.
const FIRST_SEEDS: usize = 4;
const NEXT_SEEDS: Duration = Duration::from_millis(250);
/// Maximum number of seeds that are asked at once.
const MAX_ASKED: usize = 128;
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
    gateway: Mutex<Option<NodeAddress>>,
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

/// Returns the transport limits of a client. A restore reads up to four files from one node at
/// once, with one window each. Together they fit into the connection's window.
fn client_transport_limits(congestion: Congestion) -> TransportLimits {
    TransportLimits {
        stream_window_bytes: STREAM_WINDOW_BYTES as u32,
        connection_window_bytes: 4 << 20,
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
        let (gateway, cluster) = (Mutex::default(), OnceLock::new());
        let lease_keeper = OnceLock::new();
        let inner =
            Inner { transport, caller, seeds, gateway, cluster, entropy, workers, lease_keeper };
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

    pub(super) fn set_gateway(&self, gateway: Option<NodeAddress>) {
        *self.inner.gateway.lock().unwrap_or_else(PoisonError::into_inner) = gateway;
    }

    /// Returns the nodes of the cluster as far as the gateway knows them. The call also works while
    /// no catalogue answers.
    pub async fn fetch_members(&self) -> Result<Vec<Node>, ClientError> {
        self.call_gateway(&ListMembers {}).await
    }

    /// Returns the gateway in use. If there is none, finds a daemon that answers: asks a few seeds
    /// at once, and more and more of them while none answers.
    ///
    /// # Errors
    /// The daemon's error if all daemons that were asked denied the connection, otherwise
    /// [`ClientError::Unreachable`].
    pub(super) async fn find_gateway(&self) -> Result<NodeAddress, ClientError> {
        let known = self.inner.gateway.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(known) = known {
            return Ok(known);
        }
        let ask = |seed: String| async move {
            let to = Address { host_port: seed.clone(), node: None };
            let hello = self.caller().call_address(&to, &Hello { me: None }).await?;
            let _ = self.inner.cluster.set(hello.cluster);
            Ok::<_, CallError>(NodeAddress { name: hello.node, host_port: seed })
        };
        let clock = self.caller().clock();
        let mut seeds = self.inner.seeds.iter().cloned();
        let (mut asked, mut wave) = (FuturesUnordered::new(), FIRST_SEEDS);
        let (mut reason, mut denied) = (String::from("no seeds are configured"), None);
        let mut is_silent = false;
        loop {
            asked.extend(seeds.by_ref().take(wave.min(MAX_ASKED - asked.len())).map(ask));
            wave *= 2;
            let more = seeds.len() > 0;
            let next = clock.sleep(NEXT_SEEDS);
            tokio::pin!(next);
            loop {
                let answer = tokio::select! {
                    biased;
                    Some(answer) = asked.next() => answer,
                    () = &mut next, if more => break,
                    else => break,
                };
                match answer {
                    Ok(gateway) => {
                        self.set_gateway(Some(gateway.clone()));
                        return Ok(gateway);
                    }
                    // The certificate has expired, for example. Starting more daemons does not help
                    // then.
                    Err(error) if error.kind() == ErrorKind::Denied => denied = Some(error),
                    Err(error) => {
                        reason = error.to_string();
                        is_silent = true;
                    }
                }
            }
            if asked.is_empty() && !more {
                // If other daemons did not answer at all, the failure may be temporary.
                if let Some(denied) = denied.filter(|_| !is_silent) {
                    return Err(denied.into());
                }
                return Err(ClientError::Unreachable {
                    seeds: summarize_addresses(&self.inner.seeds),
                    reason,
                });
            }
        }
    }

    /// Sends a call to the gateway, and to another one if that gateway does not answer. Each
    /// attempt may take `limit`.
    pub(super) async fn call_any_gateway_within<C: Call>(
        &self,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, ClientError> {
        let mut round = 0;
        loop {
            round += 1;
            let gateway = self.find_gateway().await?;
            match self.caller().call_within(&address(&gateway), call, limit).await {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_unanswered() && round < ROUNDS => self.set_gateway(None),
                Err(error) => return Err(error.into()),
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
        if answer.as_ref().is_err_and(CallError::is_unanswered) {
            self.set_gateway(None);
        }
        Ok(answer?)
    }

    /// Makes a call to one gateway, once, that answers with events. `on_event` gets each of them,
    /// and returns a result with the last one.
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
        if watched.as_ref().is_err_and(CallError::is_unanswered) {
            self.set_gateway(None);
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
