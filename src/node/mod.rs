//! The daemon of a storage node: store, transport, catalogue, and the calls that clients and other nodes make.
//!
//! [`Node`] is the logic over traits, so that a cluster of them runs in one process; [`Daemon`] is one on the real machine.
//! Any node is a gateway: a client may ask any of them for anything.

mod blocks;
mod custody;
mod daemon;
mod dispatch;
mod failure;
mod gateway;
mod marks;
mod records;
mod removal;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use daemon::{Daemon, NodeError};

use crate::budget::Budget;
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::remote::RemoteCatalogue;
use crate::catalogue::{Catalogue, CatalogueError};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::format::records::{self as formats, Fence};
use crate::id::{ClusterId, NodeId, PeerName, SaveId, ShardId};
use crate::net::Transport;
use crate::net::call::Caller;
use crate::net::pool::Pool;
use crate::pipeline::archive::Coordinator;
use crate::pipeline::run::Runs;
use crate::pipeline::workers::Workers;
use crate::store::{Kv, Store};
use crate::wire::NodeAddress;

/// An answer to a call comes within this, apart from those that move bulk bytes.
pub const CALL_LIMIT: Duration = Duration::from_secs(10);
/// The most tombstones that are kept in memory; older ones are looked up on disk.
const MAX_CACHED_TOMBSTONES: usize = 65_536;

/// What a node is told about itself.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its name.
    pub name: PeerName,
    /// Where others reach it, HOST:PORT.
    pub advertise: String,
    /// Failure domain, outer.
    pub zone: String,
    /// Failure domain, inner.
    pub rack: String,
    /// Whether it stores data; a node that does not is a gateway, and may host the catalogue.
    pub storage: bool,
    /// Other daemons that know where the catalogue is.
    pub seeds: Vec<String>,
    /// Codes that a save may take, in order of preference: (n, k).
    pub codes: Vec<(u8, u8)>,
    /// Padded bytes of a full block.
    pub block_bytes: u64,
    /// Memory of the daemon.
    pub memory_bytes: u64,
    /// Percentage of the disk above which saves are refused.
    pub high_water_percent: u8,
    /// How long leases live; liveness, too.
    pub lease: Duration,
}

/// What a node runs on.
pub struct NodeParts {
    /// Its data folder.
    pub store: Store,
    /// The catalogue's map, when this node hosts it.
    pub catalogue_kv: Option<Arc<dyn Kv>>,
    /// The network.
    pub transport: Arc<dyn Transport>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// Where blocking work runs.
    pub workers: Workers,
    /// Whether the network card cuts large sends into datagrams.
    pub segmentation_offload: bool,
}

/// The shares of a daemon's memory. None takes from another.
struct Budgets {
    archive: Arc<Budget>,
    save: Arc<Budget>,
    restore: Arc<Budget>,
    control: Arc<Budget>,
}

impl Budgets {
    /// Half for archiving, a quarter for saves, an eighth for reads, a sixteenth for messages; the last sixteenth is the
    /// index's and the catalogue's.
    fn new(memory_bytes: u64) -> Self {
        Self {
            archive: Budget::new("archive", archive_share_bytes(memory_bytes)),
            save: Budget::new("save", save_share_bytes(memory_bytes)),
            restore: Budget::new("restore", memory_bytes / 8),
            control: Budget::new("control", memory_bytes / 16),
        }
    }
}

fn archive_share_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / 2
}

fn save_share_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / 4
}

/// A node.
pub struct Node {
    settings: NodeSettings,
    id: NodeId,
    store: Store,
    transport: Arc<dyn Transport>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    workers: Workers,
    caller: Arc<Caller>,
    local: Option<Arc<LocalCatalogue>>,
    remote: Option<Arc<RemoteCatalogue>>,
    budgets: Budgets,
    runs: Runs,
    fences: Mutex<HashMap<ShardId, Fence>>,
    tombstones: Mutex<HashMap<SaveId, bool>>,
    sweeping: Arc<Mutex<HashSet<SaveId>>>,
    segmentation_offload: bool,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Node {
    /// Starts a node: it serves, registers, and keeps its lease until it is stopped.
    pub fn start(settings: NodeSettings, parts: NodeParts) -> Result<Arc<Self>, CatalogueError> {
        let NodeParts {
            store,
            catalogue_kv,
            transport,
            clock,
            entropy,
            workers,
            segmentation_offload,
        } = parts;
        let pool = Pool::new(transport.clone(), clock.clone());
        let caller = Caller::new(pool, clock.clone(), CALL_LIMIT);
        let local = match catalogue_kv {
            Some(kv) => {
                let (clock, entropy) = (clock.clone(), entropy.clone());
                let seen = store.epoch();
                Some(Arc::new(LocalCatalogue::open(kv, clock, entropy, settings.lease, seen)?))
            }
            None => None,
        };
        let remote = match local {
            Some(_) => None,
            None => Some(Arc::new(RemoteCatalogue::new(caller.clone(), settings.seeds.clone()))),
        };
        let budgets = Budgets::new(settings.memory_bytes);
        let runs = Runs::new(
            store.clone(),
            workers.clone(),
            caller.clone(),
            clock.clone(),
            budgets.archive.clone(),
        );
        let node = Arc::new(Self {
            id: NodeId::of(&settings.name),
            settings,
            store,
            transport,
            clock,
            entropy,
            workers,
            caller,
            local,
            remote,
            budgets,
            runs,
            fences: Mutex::default(),
            tombstones: Mutex::default(),
            sweeping: Arc::default(),
            segmentation_offload,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        node.spawn(Self::accept);
        node.spawn(Self::keep_registered);
        node.spawn(Self::keep_looking);
        if node.local.is_some() {
            node.spawn(Self::collect);
        }
        Ok(node)
    }

    /// Runs `work` until it ends or the node stops.
    fn spawn<F>(self: &Arc<Self>, work: impl FnOnce(Arc<Self>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let stop = self.stop.clone();
        let work = work(self.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = work => {}
            }
        });
    }

    /// Stops serving, lets go of what runs, and closes the transport. Files that were being written are not there afterwards.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.transport.close().await;
        self.tasks.wait().await;
    }

    /// Its number.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Its settings.
    pub fn settings(&self) -> &NodeSettings {
        &self.settings
    }

    /// Its store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Bytes in use of each memory share: zero when nothing runs.
    pub fn memory_in_use(&self) -> [u64; 4] {
        let Budgets { archive, save, restore, control } = &self.budgets;
        [archive, save, restore, control].map(|share| share.used_bytes())
    }

    fn catalogue(&self) -> Arc<dyn Catalogue> {
        match (&self.local, &self.remote) {
            (Some(local), _) => local.clone(),
            (None, Some(remote)) => remote.clone(),
            (None, None) => unreachable!("start makes one of them"),
        }
    }

    /// Where this node believes the catalogue to be.
    fn catalogue_home(&self) -> Option<NodeAddress> {
        if self.local.is_some() {
            return Some(self.address());
        }
        self.remote.as_ref().and_then(|remote| remote.home())
    }

    fn address(&self) -> NodeAddress {
        NodeAddress { name: self.settings.name.clone(), host_port: self.settings.advertise.clone() }
    }

    fn record(&self) -> formats::Node {
        formats::Node {
            name: self.settings.name.clone(),
            address: self.settings.advertise.clone(),
            zone: self.settings.zone.clone(),
            rack: self.settings.rack.clone(),
            storage: self.settings.storage,
        }
    }

    fn coordinator(&self) -> Coordinator {
        Coordinator {
            cluster: self.settings.cluster,
            me: self.id,
            catalogue: self.catalogue(),
            caller: self.caller.clone(),
            clock: self.clock.clone(),
            entropy: self.entropy.clone(),
        }
    }

    /// Runs blocking work on the store off the network's threads.
    async fn on_store<T, E>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, E> + Send + 'static,
    ) -> Result<T, crate::wire::Failure>
    where
        T: Send + 'static,
        E: Into<crate::wire::Failure> + Send + 'static,
    {
        let store = self.store.clone();
        self.workers.run(move || work(&store)).await?.map_err(Into::into)
    }

    fn cached_tombstone(&self, save: SaveId) -> Option<bool> {
        let cache = self.tombstones.lock().unwrap_or_else(PoisonError::into_inner);
        cache.get(&save).copied()
    }

    fn cache_tombstone(&self, save: SaveId, is_there: bool) {
        let mut cache = self.tombstones.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() >= MAX_CACHED_TOMBSTONES {
            cache.clear();
        }
        // A tombstone may come between the look at the disk and this: what is buried stays so.
        *cache.entry(save).or_default() |= is_there;
    }
}
