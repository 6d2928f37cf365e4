//! A client's connection to its cluster: it finds a daemon that answers, its gateway, and asks it.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;

use super::error::ClientError;
use crate::clock::{Clock, SystemClock};
use crate::config::Congestion;
use crate::entropy::{Entropy, SystemEntropy};
use crate::format::records::Node;
use crate::id::ClusterId;
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Caller, address};
use crate::net::identity::Identity;
use crate::net::pool::Pool;
use crate::net::quic::{QuicTransport, TransportLimits};
use crate::net::{Address, Transport};
use crate::pipeline::executor::STREAM_WINDOW_BYTES;
use crate::topology::Directory;
use crate::wire::calls::{Hello, ListMembers, ListNodes};
use crate::wire::{Call, NodeAddress};
use crate::workers::Workers;

/// A gateway answers a question within this.
const CALL_LIMIT: Duration = Duration::from_secs(12);
/// Commit and removal wait for many nodes.
pub(super) const LONG_LIMIT: Duration = Duration::from_secs(120);
/// Seeds that are asked first, and how long they have before more are asked.
const FIRST_SEEDS: usize = 4;
const NEXT_SEEDS: Duration = Duration::from_millis(250);
/// Seeds that are asked at once.
const MAX_ASKED: usize = 128;
/// Addresses that an error names.
const SHOWN_SEEDS: usize = 16;
/// Rounds over all seeds before a call fails.
const ROUNDS: u32 = 2;
/// Threads for reading, hashing and decoding: one a core, at least so many, because disks are waited for too.
const MIN_WORKERS: usize = 4;
/// And at most so many: what runs beside has cores left.
const MAX_WORKERS: usize = 16;

/// How far an operation has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// Called as an operation goes on, from any thread.
pub type ProgressFn = Arc<dyn Fn(Progress) + Send + Sync>;

/// Addresses for an error: the first of many.
pub fn join_some(addresses: &[String]) -> String {
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

/// Keeps leases for another client.
struct LeaseClient {
    client: Client,
    runtime: Handle,
}

/// A restore reads up to four files from one node at once, a window each: all of them fit into the connection's.
fn limits(congestion: Congestion) -> TransportLimits {
    TransportLimits {
        stream_window_bytes: STREAM_WINDOW_BYTES as u32,
        connection_window_bytes: 4 << 20,
        send_window_bytes: 2 << 20,
        congestion,
        ..TransportLimits::default()
    }
}

impl Client {
    /// Connects to a cluster as `identity`; `seeds` are HOST:PORT of some of its daemons.
    pub async fn connect(identity: &Identity, seeds: Vec<String>) -> Result<Self, ClientError> {
        Self::connect_by(identity, seeds, Congestion::default()).await
    }

    /// The same over a link of which one knows how it loses packets.
    pub async fn connect_by(
        identity: &Identity,
        seeds: Vec<String>,
        congestion: Congestion,
    ) -> Result<Self, ClientError> {
        let client = Self::new_unconnected(identity, seeds, congestion).await?;
        client.find_gateway().await?;
        Ok(client)
    }

    /// The same, but the first call connects: for whoever has to begin also while no daemon answers.
    pub async fn new_unconnected(
        identity: &Identity,
        seeds: Vec<String>,
        congestion: Congestion,
    ) -> Result<Self, ClientError> {
        let clock = SystemClock::new();
        let limits = limits(congestion);
        let transport = QuicTransport::connect_only(identity, &limits, clock.clone()).await?;
        let (transport, entropy) = (Arc::new(transport), Arc::new(SystemEntropy));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = Workers::new(cores.clamp(MIN_WORKERS, MAX_WORKERS));
        Ok(Self::with_transport(transport, clock, entropy, workers, seeds))
    }

    /// A client over any transport: for clusters in one process.
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

    /// Lets `keeper` keep the leases of this client's saves, by tasks on `runtime`. The threads of this client may then be slow without a lease
    /// that ends: the other client has connections of its own. The first call decides.
    pub fn keep_leases_by(&self, keeper: Client, runtime: Handle) {
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

    /// Returns the client that keeps the leases of this one's saves, and the runtime of its tasks.
    pub(super) fn lease_keeper(&self) -> Option<(&Client, &Handle)> {
        self.inner.lease_keeper.get().map(|keeper| (&keeper.client, &keeper.runtime))
    }

    pub(super) fn set_gateway(&self, gateway: Option<NodeAddress>) {
        *self.inner.gateway.lock().unwrap_or_else(PoisonError::into_inner) = gateway;
    }

    /// The nodes of the cluster, as the gateway last heard of them: also while no catalogue answers.
    pub async fn members(&self) -> Result<Vec<Node>, ClientError> {
        self.ask(&ListMembers {}).await
    }

    /// A daemon that answers. A few seeds are asked at once, and more and more of them while none does.
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
                    // A certificate that has expired, say: that more daemons are started does not help.
                    Err(error) if error.kind() == ErrorKind::Denied => denied = Some(error),
                    Err(error) => {
                        reason = error.to_string();
                        is_silent = true;
                    }
                }
            }
            if asked.is_empty() && !more {
                // Where others do not answer at all it may pass.
                if let Some(denied) = denied.filter(|_| !is_silent) {
                    return Err(denied.into());
                }
                return Err(ClientError::Unreachable {
                    seeds: join_some(&self.inner.seeds),
                    reason,
                });
            }
        }
    }

    /// Asks the gateway, or another one when it does not answer.
    pub(super) async fn ask_within<C: Call>(
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

    /// Asks one gateway, once: for what must not happen twice.
    pub(super) async fn ask_once<C: Call>(
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

    pub(super) async fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, ClientError> {
        self.ask_within(call, CALL_LIMIT).await
    }

    /// The cluster, as the first gateway named it.
    pub(super) async fn fetch_cluster_id(&self) -> Result<ClusterId, ClientError> {
        match self.inner.cluster.get() {
            Some(known) => Ok(*known),
            None => Ok(self.ask(&Hello { me: None }).await?.cluster),
        }
    }

    pub(super) async fn fetch_directory(&self) -> Result<Directory, ClientError> {
        Ok(Directory::new(self.ask(&ListNodes {}).await?))
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.inner.transport.close().await;
    }
}
