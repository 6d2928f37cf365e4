//! The library that trainers and the command line use: save, restore, archive, list.
//!
//! A [`Client`] asks any live daemon of the cluster (its *gateway*) and streams blocks to and from the nodes that
//! hold them. What the calls promise is docs/semantics.md.
//!
//! ```no_run
//! # async fn example(identity: rapidraid::net::identity::Identity) -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use bytes::Bytes;
//! use rapidraid::client::{Client, NewShard, SaveOptions};
//!
//! let client = Client::connect(&identity, vec!["node01.example:7440".into()]).await?;
//! let shard = NewShard { name: "rank-0".parse()?, source: Arc::new(Bytes::from_static(b"weights")) };
//! let quiet = Arc::new(|_| ());
//! client.save(&"gpt".parse()?, rapidraid::id::Step(1000), vec![shard], SaveOptions::default(), quiet).await?;
//! # Ok(()) }
//! ```

mod error;
mod exam;
pub mod files;
mod index;
mod output;
mod parts;
mod reach;
mod record;
mod restore;
mod save;
mod save_driver;
mod verify;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;

pub use error::ClientError;
pub use exam::{Held, Wrong};
pub use index::Index;
pub use output::RestoreRequest;
pub use parts::{MemorySink, ReadRange};
use reach::HELLO_LIMIT;
pub use reach::{CatalogueReport, NodeReport};
pub use restore::RestoreReport;
pub use save::{SaveOptions, SaveReport};
pub use save_driver::{NewShard, SaveCode, SaveDriver, SaveFate};
pub use verify::{Away, Fault, VerifyReport};

use crate::clock::{Clock, SystemClock};
use crate::config::Congestion;
use crate::entropy::{Entropy, SystemEntropy};
use crate::format::records::{Node, ShardRoot, ShardState};
use crate::id::{ClusterId, Epoch, Job, PeerName, SaveId, Step};
use crate::kind::Kind;
use crate::net::call::{CallError, Caller, address};
use crate::net::identity::Identity;
use crate::net::pool::Pool;
use crate::net::quic::{QuicTransport, TransportLimits};
use crate::net::{Address, Transport};
use crate::pipeline::executor::STREAM_WINDOW_BYTES;
pub use crate::pipeline::read::Sink;
use crate::topology::Directory;
use crate::wire::calls::{
    Archive, ArchiveEvent, ArchiveOptions, Hello, List, Members, MoveAnswer, MoveCatalogue,
    NodeView, Nodes, PolicyStatus, Rebuild, RebuildAnswer, Remove, RemoveAnswer, RemoveNode, Show,
    ShowAnswer, StepView, StripeReport,
};
use crate::wire::policy::PolicyAnswer;
use crate::wire::{Call, NodeAddress};
use crate::workers::Workers;

/// A gateway answers a question within this.
const CALL_LIMIT: Duration = Duration::from_secs(12);
/// The nodes' inventories are read whole.
const REBUILD_LIMIT: Duration = Duration::from_secs(3600);
/// Commit and removal wait for many nodes.
const LONG_LIMIT: Duration = Duration::from_secs(120);
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

/// How an archiving went.
#[derive(Debug, Clone)]
pub struct ArchiveReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Stripes that are archived now.
    pub stripes: u64,
    /// Of these, stripes whose replicas are not all confirmed to be dropped.
    pub undropped: u64,
    /// Stripes archived by this call.
    pub reports: Vec<StripeReport>,
    /// Things worth knowing.
    pub notes: Vec<String>,
}

/// Everything about one step.
#[derive(Debug, Clone)]
pub struct ShowReport {
    /// The step.
    pub step: StepView,
    /// Its shards, and how far archiving has come.
    pub shards: Vec<(ShardRoot, ShardState)>,
    /// The nodes; those that answer are live, with a lease or without.
    pub nodes: Vec<NodeView>,
    /// The reason why nothing can be changed now. Looked at only when a node has no lease.
    pub unchanged: Option<String>,
}

/// The nodes and what they hold.
#[derive(Debug, Clone)]
pub struct StatusReport {
    /// Each node, and what it says.
    pub nodes: Vec<NodeReport>,
    /// The state of the catalogue.
    pub catalogue: CatalogueReport,
    /// The highest epoch that was heard of.
    pub epoch: Epoch,
    /// The policy that the catalogue's host applies, if it answers.
    pub policy: Option<PolicyAnswer>,
}

/// Addresses for an error: the first of many.
pub fn listed(addresses: &[String]) -> String {
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
    lease_keeper: OnceLock<LeaseKeeper>,
}

/// Keeps leases for another client.
struct LeaseKeeper {
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
        let client = Self::unconnected(identity, seeds, congestion).await?;
        client.gateway().await?;
        Ok(client)
    }

    /// The same, but the first call connects: for whoever has to begin also while no daemon answers.
    pub async fn unconnected(
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
        Ok(Self::over(transport, clock, entropy, workers, seeds))
    }

    /// A client over any transport: for clusters in one process.
    pub fn over(
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
        let _ = self.inner.lease_keeper.set(LeaseKeeper { client: keeper, runtime });
    }

    fn caller(&self) -> &Arc<Caller> {
        &self.inner.caller
    }

    fn set_gateway(&self, gateway: Option<NodeAddress>) {
        *self.inner.gateway.lock().unwrap_or_else(PoisonError::into_inner) = gateway;
    }

    /// The nodes of the cluster, as the gateway last heard of them: also while no catalogue answers.
    pub async fn members(&self) -> Result<Vec<Node>, ClientError> {
        self.ask(&Members {}).await
    }

    /// A daemon that answers. A few seeds are asked at once, and more and more of them while none does.
    async fn gateway(&self) -> Result<NodeAddress, ClientError> {
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
                    Err(error) if error.kind() == Kind::Denied => denied = Some(error),
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
                return Err(ClientError::Unreachable { seeds: listed(&self.inner.seeds), reason });
            }
        }
    }

    /// Asks the gateway, or another one when it does not answer.
    async fn ask_within<C: Call>(
        &self,
        call: &C,
        limit: Duration,
    ) -> Result<C::Answer, ClientError> {
        let mut round = 0;
        loop {
            round += 1;
            let gateway = self.gateway().await?;
            match self.caller().call_within(&address(&gateway), call, limit).await {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_unanswered() && round < ROUNDS => self.set_gateway(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Asks one gateway, once: for what must not happen twice.
    async fn ask_once<C: Call>(&self, call: &C, limit: Duration) -> Result<C::Answer, ClientError> {
        let gateway = self.gateway().await?;
        let answer = self.caller().call_within(&address(&gateway), call, limit).await;
        if answer.as_ref().is_err_and(CallError::is_unanswered) {
            self.set_gateway(None);
        }
        Ok(answer?)
    }

    async fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, ClientError> {
        self.ask_within(call, CALL_LIMIT).await
    }

    /// The cluster, as the first gateway named it.
    async fn cluster(&self) -> Result<ClusterId, ClientError> {
        match self.inner.cluster.get() {
            Some(known) => Ok(*known),
            None => Ok(self.ask(&Hello { me: None }).await?.cluster),
        }
    }

    async fn directory(&self) -> Result<Directory, ClientError> {
        Ok(Directory::new(self.ask(&Nodes {}).await?))
    }

    /// The committed steps, in order of job and step.
    pub async fn list(&self, job: Option<&Job>) -> Result<Vec<StepView>, ClientError> {
        let (mut steps, mut after) = (Vec::new(), None);
        loop {
            let page = self.ask(&List { job: job.cloned(), after }).await?;
            steps.extend(page.steps);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(steps),
            }
        }
    }

    /// Has the daemon `on` (by default the first seed that answers) make a lost catalogue again from what the nodes hold, and serve it
    /// (docs/semantics.md, 8). `accept_loss`: also when fewer nodes are reached than that needs, or roots are missing.
    pub async fn rebuild_catalogue(
        &self,
        on: Option<&Address>,
        accept_loss: bool,
    ) -> Result<RebuildAnswer, ClientError> {
        let call = Rebuild { accept_loss };
        match on {
            Some(on) => Ok(self.caller().call_within(on, &call, REBUILD_LIMIT).await?),
            None => self.ask_once(&call, REBUILD_LIMIT).await,
        }
    }

    /// Has the daemon `on` copy the catalogue from the one that serves it, and serve it from then on (docs/semantics.md, 8).
    pub async fn move_catalogue(&self, on: &Address) -> Result<MoveAnswer, ClientError> {
        Ok(self.caller().call_within(on, &MoveCatalogue {}, REBUILD_LIMIT).await?)
    }

    /// Takes a node off the list of members: one that is not live, and on which no checkpoint may lie (docs/semantics.md, 10).
    pub async fn remove_node(&self, name: &PeerName) -> Result<(), ClientError> {
        self.ask_once(&RemoveNode { name: name.clone() }, LONG_LIMIT).await
    }

    async fn find(&self, job: &Job, step: Option<Step>) -> Result<ShowAnswer, ClientError> {
        let call = Show { job: job.clone(), step, first_shard: 0 };
        let mut answer = self.ask(&call).await?;
        while (answer.shards.len() as u64) < u64::from(answer.step.saved.shards) {
            let first_shard = answer.shards.len() as u32;
            let page = self
                .ask(&Show { job: job.clone(), step: Some(answer.step.step), first_shard })
                .await?;
            if page.step.saved != answer.step.saved || page.shards.is_empty() {
                return Err(ClientError::Removed { job: job.clone(), step: answer.step.step });
            }
            answer.shards.extend(page.shards);
        }
        Ok(answer)
    }

    /// Everything about a committed step (`None`: the latest).
    pub async fn show(&self, job: &Job, step: Option<Step>) -> Result<ShowReport, ClientError> {
        let found = self.find(job, step).await?;
        let step = found.step;
        let shards = found.shards.into_iter().map(|(root, state)| match state {
            Some(state) => Ok((root, state)),
            None => Err(ClientError::Removed { job: job.clone(), step: step.step }),
        });
        let shards = shards.collect::<Result<_, _>>()?;
        let nodes = self.known_nodes().await?;
        // Where all have leases the catalogue does its work, and nobody need be asked.
        let is_well = !step.by_marks && nodes.iter().all(|view| view.live);
        let (nodes, unchanged) = match is_well {
            true => (nodes, None),
            false => (self.with_answers(nodes).await, self.catalogue_report().await?.unchanged),
        };
        Ok(ShowReport { step, shards, nodes, unchanged })
    }

    /// Removes a committed step: the save that it is now. One that replaces it meanwhile stays, however late the request comes through.
    pub async fn remove(&self, job: &Job, step: Step) -> Result<RemoveAnswer, ClientError> {
        let save = self.look_up(job, step).await?;
        // Asked once: a repeat could report as missing what the first has removed.
        self.ask_once(&Remove { job: job.clone(), step, save }, LONG_LIMIT).await
    }

    /// Which save a step is.
    async fn look_up(&self, job: &Job, step: Step) -> Result<SaveId, ClientError> {
        let before = step.0.checked_sub(1).map(|before| (job.clone(), Step(before)));
        let page = self.ask(&List { job: Some(job.clone()), after: before }).await?;
        let found = page.steps.into_iter().find(|view| view.step == step);
        let found = found.ok_or_else(|| ClientError::NoStep { job: job.clone(), step })?;
        Ok(found.saved.save)
    }

    /// Archives a committed step (`None`: the latest) and watches; the work is a daemon's and goes on without us.
    pub async fn archive(
        &self,
        job: &Job,
        step: Option<Step>,
        options: ArchiveOptions,
        on_event: &mut (dyn FnMut(&ArchiveEvent) + Send),
    ) -> Result<ArchiveReport, ClientError> {
        let step = match step {
            Some(step) => step,
            None => self.find(job, None).await?.step.step,
        };
        let report = self.watch_archive(job, step, options, on_event).await;
        if let Err(ClientError::Call(error)) = &report
            && error.is_unanswered()
        {
            self.set_gateway(None);
        }
        report
    }

    async fn watch_archive(
        &self,
        job: &Job,
        step: Step,
        options: ArchiveOptions,
        on_event: &mut (dyn FnMut(&ArchiveEvent) + Send),
    ) -> Result<ArchiveReport, ClientError> {
        let gateway = self.gateway().await?;
        let call = Archive { job: job.clone(), step, options };
        let mut exchange = self.caller().open(&address(&gateway), &call).await?;
        exchange.finish().await?;
        let mut report = ArchiveReport {
            job: job.clone(),
            step,
            stripes: 0,
            undropped: 0,
            reports: Vec::new(),
            notes: Vec::new(),
        };
        loop {
            let event: ArchiveEvent = exchange.answer().await?;
            on_event(&event);
            match event {
                ArchiveEvent::Progress { .. } => {}
                ArchiveEvent::Stripe(mut stripe) => {
                    // For traces, as they come: of thousands of stripes they would fill the memory.
                    stripe.hops.iter_mut().for_each(|hop| hop.work.chunks = Vec::new());
                    report.reports.push(stripe);
                }
                ArchiveEvent::Note(note) => report.notes.push(note),
                ArchiveEvent::Done { stripes, undropped } => {
                    report.stripes = stripes;
                    report.undropped = undropped;
                    return Ok(report);
                }
            }
        }
    }

    /// The nodes and what they hold, asked of the nodes themselves: also while no catalogue answers, or one that changes nothing.
    pub async fn status(&self) -> Result<StatusReport, ClientError> {
        let nodes = self.reports(self.known_nodes().await?).await;
        let hello = self.ask(&Hello { me: None }).await?;
        let policy = match &hello.catalogue {
            Some(home) => {
                let to = address(home);
                self.caller().call_within(&to, &PolicyStatus {}, HELLO_LIMIT).await.ok()
            }
            None => None,
        };
        let catalogue = self.catalogue_report().await?;
        Ok(StatusReport { nodes, catalogue, epoch: hello.epoch, policy })
    }

    /// Returns how many of the newest steps of a job the cluster's policy keeps; `None`: it retires none of them.
    pub async fn retention(&self, job: &Job) -> Result<Option<u32>, ClientError> {
        let hello = self.ask(&Hello { me: None }).await?;
        let home = hello.catalogue.ok_or(ClientError::NoCatalogue)?;
        let policy = self.caller().call(&home, &PolicyStatus {}).await?;
        let own = policy.rules.iter().find(|rule| rule.job.as_ref() == Some(job));
        Ok(own.or(policy.rules.first()).and_then(|rule| rule.keep_newest))
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.inner.transport.close().await;
    }
}

/// What the CLI prints under a failure.
pub(crate) fn hint_for(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Unavailable | Kind::Timeout => Some("`rapidraid status` shows which nodes are live"),
        Kind::Busy => Some("try again in a moment"),
        Kind::Lost => Some("bring back nodes that hold what is missing, then run it again"),
        Kind::Denied => Some("check that the certificate is of this cluster and of the right role"),
        _ => None,
    }
}
