//! A node on the real machine: with its disk, its UDP port, and the system's clock and randomness.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use super::budgets::{archive_share_bytes, save_share_bytes};
use super::context::NodeContext;
use super::{NewCatalogue, Node, NodeParts, NodeSettings};
use crate::catalogue::CatalogueError;
use crate::clock::SystemClock;
use crate::code::table;
use crate::config::{Congestion, NodeConfig};
use crate::entropy::SystemEntropy;
use crate::id::Epoch;
use crate::kind::ErrorKind;
use crate::net::call::Caller;
use crate::net::identity::Identity;
use crate::net::pool::Pool;
use crate::net::quic::{QuicTransport, TransportLimits};
use crate::net::{Address, NetError};
use crate::pipeline::executor::STREAM_WINDOW_BYTES;
use crate::store::{
    Disk, INDEX_DIR, Kv, KvError, LOCK_FILE, MemoryKv, RealDisk, SledCatalogueStorage, SledKv,
    SledOpening, Store, StoreError, adjust_reserve_probing_space,
};
use crate::wire::calls::Hello;
use crate::workers::Workers;

/// Folder of the catalogue database, within the data folder of the catalogue server.
const CATALOGUE_DIR: &str = "catalogue";
/// Maximum size in bytes of each of the two sled caches: that of the index and that of the
/// catalogue database. The caches are part of the last sixteenth of the memory, outside of all
/// budgets.
const MAX_INDEX_CACHE_BYTES: u64 = 4 << 20;
/// Divisor of the daemon's memory limit. The quotient is the maximum size of an index that is kept
/// in memory because the disk has no room for it.
const INDEX_IN_MEMORY_PART: u64 = 8;
/// Bytes of a connection's window that are reserved for everything but admitted streams: messages,
/// and files that this node reads from the peer.
const CONTROL_WINDOW_BYTES: u64 = 8 << 20;
/// Number of a connection's streams that are reserved for hops that were not admitted. Such streams
/// are refused, and must not hold up the admitted ones.
const SPARE_STREAMS: u64 = 64;
/// Time limit for a seed to tell a new catalogue server whether the cluster has a catalogue
/// already. The limit is short, because the seeds of a new cluster may not run yet. A seed that
/// answers too late introduces itself later, when it looks for its catalogue on this daemon, and is
/// asked again then.
const SEED_LIMIT: Duration = Duration::from_millis(500);
/// Number of threads for blocking work. The catalogue and the purges have further threads of their
/// own.
const WORKERS: usize = 8;

/// A reason why a daemon cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The certificate belongs to another node, or to a node of another cluster.
    #[error(
        "the certificate is for {certificate}, the configuration for {configured}: use the folder that `rapidraid cluster init` made for this node"
    )]
    Identity {
        /// The node and the cluster that the certificate names.
        certificate: String,
        /// The node and the cluster that the configuration names.
        configured: String,
    },
    /// The store failed to open.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The index failed to open.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// No certified chain of a configured code is known.
    #[error(
        "code {n},{k} is configured, but no certified chain of it is known: `rapidraid code list` shows those that are"
    )]
    Code {
        /// The number of pieces, n.
        n: u8,
        /// The number of blocks, k.
        k: u8,
    },
    /// The network transport failed to open.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The catalogue failed to open.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
}

impl NodeError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            NodeError::Identity { .. } | NodeError::Code { .. } => ErrorKind::Invalid,
            NodeError::Store(error) => error.kind(),
            NodeError::Kv(error) => error.kind(),
            NodeError::Net(error) => error.kind(),
            NodeError::Catalogue(error) => error.kind(),
        }
    }
}

/// Stops the node when the index or the catalogue database has failed. After a failure, its answers
/// may differ from what is on disk; the next start repairs that.
async fn stop_on_db_failure(context: Arc<NodeContext>, db_failures: [CancellationToken; 2]) {
    let [index, map] = &db_failures;
    tokio::select! {
        () = index.cancelled() => tracing::error!("the index has failed: stopping; the next start brings it in line with the files"),
        () = map.cancelled() => tracing::error!("the catalogue database has failed: stopping; the next start opens what is on disk"),
    }
    context.tasks.stop();
}

/// A running node.
pub struct Daemon {
    node: Arc<Node>,
    address: SocketAddr,
}

/// Returns the transport limits for this memory. All streams that the budgets can admit fit into
/// the windows and the stream count of one connection, even if all of them come from one node. A
/// stream that stalls because its hop waits therefore takes nothing that another stream needs.
fn transport_limits(memory_bytes: u64, congestion: Congestion) -> TransportLimits {
    let admitted_bytes = archive_share_bytes(memory_bytes) + save_share_bytes(memory_bytes);
    let window_bytes = admitted_bytes + CONTROL_WINDOW_BYTES;
    let streams = archive_share_bytes(memory_bytes) / STREAM_WINDOW_BYTES + SPARE_STREAMS;
    TransportLimits {
        stream_window_bytes: STREAM_WINDOW_BYTES as u32,
        connection_window_bytes: u32::try_from(window_bytes).unwrap_or(u32::MAX),
        send_window_bytes: 4 << 20,
        max_uni_streams: u32::try_from(streams).unwrap_or(u32::MAX),
        congestion,
        ..TransportLimits::default()
    }
}

/// Checks that the certificate is that of the configured node, and that a certified chain of each
/// configured code is known.
fn check_identity_and_codes(config: &NodeConfig, identity: &Identity) -> Result<(), NodeError> {
    let membership = &config.membership;
    if *identity.name() != membership.name || identity.cluster() != membership.cluster {
        let name = |name, cluster| format!("{name} of cluster {cluster}");
        return Err(NodeError::Identity {
            certificate: name(identity.name(), identity.cluster()),
            configured: name(&membership.name, membership.cluster),
        });
    }
    let unknown =
        config.codes.iter().find(|code| table::find(code.n.into(), code.k.into()).is_none());
    match unknown {
        Some(code) => Err(NodeError::Code { n: code.n, k: code.k }),
        None => Ok(()),
    }
}

/// The index of the files, and the token that is cancelled when it fails.
struct OpenedIndex {
    index: Arc<dyn Kv>,
    failed: CancellationToken,
    is_in_memory: bool,
}

/// Returns the opened index. If the disk has no room for it, returns an empty one in memory.
fn use_index_or_memory(
    opened: Result<(SledKv, SledOpening), KvError>,
    memory_bytes: u64,
) -> Result<OpenedIndex, NodeError> {
    match opened {
        Ok((index, opened)) => {
            tracing::info!(?opened, "index opened");
            let failed = index.failure_token();
            Ok(OpenedIndex { index: Arc::new(index), failed, is_in_memory: false })
        }
        Err(error) if error.is_disk_full() => {
            tracing::error!(%error, "the disk has no room for the index: it is kept in memory");
            let bytes = memory_bytes / INDEX_IN_MEMORY_PART;
            let index = MemoryKv::bounded(usize::try_from(bytes).unwrap_or(usize::MAX));
            let (index, failed) = (Arc::new(index), CancellationToken::new());
            Ok(OpenedIndex { index, failed, is_in_memory: true })
        }
        Err(error) => Err(error.into()),
    }
}

/// Decides whether a daemon may create a catalogue. A daemon that has a new data folder and is
/// configured to serve the catalogue asks its seeds: if one of them knows an epoch, the catalogue
/// was on another disk.
async fn decide_new_catalogue(
    config: &NodeConfig,
    store: &Store,
    transport: &Arc<QuicTransport>,
    clock: &Arc<SystemClock>,
) -> NewCatalogue {
    if !config.serve_catalogue {
        return NewCatalogue::Never;
    }
    let seeds = config.membership.seeds.iter().filter(|seed| **seed != config.advertise);
    let seeds: Vec<String> = seeds.map(ToString::to_string).collect();
    if store.highest_seen_epoch() != Epoch::default() || seeds.is_empty() {
        return NewCatalogue::Create;
    }
    let pool = Pool::new(transport.clone(), clock.clone());
    let caller = Caller::new(pool, clock.clone(), SEED_LIMIT);
    let asks = seeds.into_iter().map(|seed| {
        let caller = caller.clone();
        async move {
            let to = Address { host_port: seed.clone(), node: None };
            let hello = caller.call_within(&to, &Hello { me: None }, SEED_LIMIT).await.ok()?;
            (hello.epoch != Epoch::default()).then_some(seed)
        }
    });
    let known = join_all(asks).await.into_iter().flatten().next();
    known.map_or(NewCatalogue::Create, |seed| NewCatalogue::ExistsElsewhere { seed })
}

fn node_settings(config: &NodeConfig, new_catalogue: NewCatalogue) -> NodeSettings {
    let membership = &config.membership;
    NodeSettings {
        cluster: membership.cluster,
        name: membership.name.clone(),
        advertise: config.advertise.to_string(),
        zone: config.zone.clone().unwrap_or_default(),
        rack: config.rack.clone().unwrap_or_default(),
        storage: config.storage,
        new_catalogue,
        seeds: membership.seeds.iter().map(ToString::to_string).collect(),
        codes: config.codes.iter().map(|code| (code.n, code.k)).collect(),
        block_bytes: config.block_bytes,
        memory_bytes: config.memory_bytes,
        high_water_percent: config.high_water_percent,
        lease: config.timeouts.lease,
        policy: config.policy.clone(),
        repair: config.repair,
    }
}

impl Daemon {
    /// Starts the daemon that `config` describes, with the certificate of `identity`. Returns the
    /// running daemon.
    ///
    /// # Errors
    /// Fails with kind `Invalid` if the certificate names another node or cluster than `config`, or
    /// if no certified chain of a configured code is known. Otherwise the error of the store, the
    /// index, the network transport or the catalogue that failed to open.
    pub async fn start(config: NodeConfig, identity: Identity) -> Result<Self, NodeError> {
        let membership = &config.membership;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), node = %membership.name, "starting");
        check_identity_and_codes(&config, &identity)?;
        let disk = RealDisk::open(&config.data_dir).map_err(StoreError::from)?;
        let lock = disk.lock(LOCK_FILE).map_err(StoreError::from)?;
        let cache_bytes = (config.memory_bytes / 64).min(MAX_INDEX_CACHE_BYTES);
        let disk = Arc::new(disk);
        // The reserve is adjusted before sled opens: sled needs free space to open, and its first
        // failed write stops the daemon.
        if let Err(error) = adjust_reserve_probing_space(&*disk) {
            tracing::warn!(%error, "failed to adjust the disk reserve");
        }
        let maps = SledCatalogueStorage::new(&lock, disk.root().join(CATALOGUE_DIR), cache_bytes);
        let opened = SledKv::open(&lock, &disk.root().join(INDEX_DIR), cache_bytes);
        let OpenedIndex { index, failed: index_failed, is_in_memory } =
            use_index_or_memory(opened, config.memory_bytes)?;
        let failed = [index_failed, maps.failure_token()];
        let (cluster, name) = (membership.cluster, &membership.name);
        let (store, found) = Store::open(disk.clone(), lock, index, cluster, name)?;
        tracing::info!(?found, "data folder opened");
        let clock = SystemClock::new();
        let transport = QuicTransport::listen(
            config.listen,
            &identity,
            &transport_limits(config.memory_bytes, config.congestion),
            clock.clone(),
        )
        .await?;
        let address = transport.local_addr()?;
        let segmentation_offload = transport.segmentation_offload();
        let transport = Arc::new(transport);
        let new_catalogue = decide_new_catalogue(&config, &store, &transport, &clock).await;
        let parts = NodeParts {
            store,
            db_location: Arc::new(maps),
            transport,
            clock,
            entropy: Arc::new(SystemEntropy),
            workers: Workers::new(WORKERS),
            segmentation_offload,
        };
        let node = Node::start(node_settings(&config, new_catalogue), parts)?;
        let tasks = &node.context.tasks;
        tasks.spawn_until_stop(stop_on_db_failure(node.context.clone(), failed));
        let disk_space = &node.rpc.services().disk_space;
        if is_in_memory {
            disk_space.note_index_in_memory();
        }
        tasks.spawn_until_stop(disk_space.clone().run_reserve_adjustment(disk));
        Ok(Self { node, address })
    }

    /// Returns the address on which the daemon listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns the node.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Waits until the daemon begins to stop.
    pub async fn wait_until_stopping(&self) {
        self.node.context.tasks.wait_for_stop().await;
    }

    /// Stops the daemon. Returns when all of its tasks have ended.
    pub async fn stop(&self) {
        self.node.stop().await;
    }
}
