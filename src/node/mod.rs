//! The daemon of a storage node: its store, its transport, the catalogue, and the calls that
//! clients and other nodes make.
//!
//! [`Node`] is the logic over traits, so that a whole cluster can run in one process. [`Daemon`] is
//! a node on the real machine. Any node is a gateway: a client may send any request to any node.

mod active_saves;
mod background;
mod catalogue_server;
mod context;
mod daemon;
mod gateway;
mod quorum;
mod registration;
mod remote_errors;
mod retry_schedule;
mod rpc;
mod status_warnings;
mod storage;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use active_saves::ActiveSaves;
use background::orphan_gc::RetainReason;
use background::retention::RetentionState;
use context::NodeContext;
pub use daemon::{Daemon, NodeError};
use gateway::reads_without_catalogue::OutageCache;
use registration::{CatchUpRequests, Registration};
use retry_schedule::RetrySchedule;
use storage::damage_mending::MendQueue;
use storage::examine_stripe::{DamagedRecords, ExamLimit};
use storage::fencing::Fencing;
use storage::full_disk::FullDiskState;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::budget::Budget;
use crate::catalogue::CatalogueError;
use crate::clock::Clock;
use crate::config::Policy;
use crate::entropy::Entropy;
use crate::format::records as formats;
use crate::id::{ClusterId, NodeId, PeerName, SaveId};
use crate::net::Transport;
use crate::pipeline::executor::Executor;
use crate::store::{CatalogueStorage, Store};
use crate::workers::Workers;

/// Time limit for the answer to a call, except for calls that move bulk data.
pub const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of nodes that are remembered because they introduced themselves.
const MAX_INTRODUCED: usize = 4096;

/// The configuration of a node.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// The cluster that the node belongs to.
    pub cluster: ClusterId,
    /// The node's name.
    pub name: PeerName,
    /// The address at which other nodes reach this one, as HOST:PORT.
    pub advertise: String,
    /// The outer failure domain.
    pub zone: String,
    /// The inner failure domain.
    pub rack: String,
    /// Whether the node stores data. A node that does not is a gateway, and may serve the
    /// catalogue.
    pub storage: bool,
    /// Whether the node creates a catalogue if its data folder is new.
    pub begin_catalogue: bool,
    /// Addresses of other daemons, as HOST:PORT, which know where the catalogue is.
    pub seeds: Vec<String>,
    /// The codes (n, k) that a save may use, in order of preference.
    pub codes: Vec<(u8, u8)>,
    /// Padded size of a full block, in bytes.
    pub block_bytes: u64,
    /// Memory limit of the daemon, in bytes.
    pub memory_bytes: u64,
    /// Percentage of the disk above which saves are refused.
    pub high_water_percent: u8,
    /// Duration of a lease. A node counts as live for as long after its last registration.
    pub lease: Duration,
    /// The policy for committed steps, which the node applies while it serves the catalogue.
    pub policy: Policy,
}

/// The resources that a node runs on.
pub struct NodeParts {
    /// The data folder.
    pub store: Store,
    /// The place of the catalogue database, which need not exist.
    pub db_location: Arc<dyn CatalogueStorage>,
    /// The network.
    pub transport: Arc<dyn Transport>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The source of randomness.
    pub entropy: Arc<dyn Entropy>,
    /// The threads for blocking work.
    pub workers: Workers,
    /// Whether the network card cuts large sends into datagrams.
    pub segmentation_offload: bool,
}

/// The shares of a daemon's memory. No share borrows from another.
struct Budgets {
    archive: Arc<Budget>,
    save: Arc<Budget>,
    restore: Arc<Budget>,
    control: Arc<Budget>,
    requests: Arc<Budget>,
}

impl Budgets {
    /// Returns the shares of `memory_bytes`: half for archiving, a quarter for saves, an eighth for
    /// reads, and a sixteenth for long messages. Of the last sixteenth, a quarter is for short
    /// requests; the rest is for the index and the catalogue.
    fn new(memory_bytes: u64) -> Self {
        Self {
            archive: Budget::new("archive", archive_share_bytes(memory_bytes)),
            save: Budget::new("save", save_share_bytes(memory_bytes)),
            restore: Budget::new("restore", memory_bytes / 8),
            control: Budget::new("control", memory_bytes / 16),
            requests: Budget::new("requests", memory_bytes / 64),
        }
    }
}

fn archive_share_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / 2
}

fn save_share_bytes(memory_bytes: u64) -> u64 {
    memory_bytes / 4
}

/// A node: its services, and the state that they share.
pub struct Node {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    registration: Arc<Registration>,
    transport: Arc<dyn Transport>,
    budgets: Budgets,
    executor: Executor,
    /// The saves that save recovery works on now.
    recovering: ActiveSaves,
    /// The removals that save recovery retries.
    removal_retries: Mutex<RetrySchedule>,
    rebuilding: tokio::sync::Mutex<()>,
    /// The nodes that introduced themselves.
    introduced: Mutex<BTreeMap<PeerName, formats::Node>>,
    retention: Mutex<RetentionState>,
    retained: Mutex<BTreeMap<SaveId, RetainReason>>,
    outage_cache: OutageCache,
    catching_up: Arc<CatchUpRequests>,
    mend_queue: MendQueue,
    damaged_records: DamagedRecords,
    exam_limit: ExamLimit,
    full_disk: FullDiskState,
    /// Whether the node has come back to the list of nodes, and may have missed orders.
    has_returned: AtomicBool,
    segmentation_offload: bool,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Node {
    /// Starts a node. It serves calls, registers, and keeps its lease until it is stopped. Returns
    /// the running node.
    ///
    /// # Errors
    /// If the catalogue database of this node fails to open.
    pub fn start(settings: NodeSettings, parts: NodeParts) -> Result<Arc<Self>, CatalogueError> {
        let (transport, segmentation_offload) =
            (parts.transport.clone(), parts.segmentation_offload);
        let context = Arc::new(NodeContext::open(settings, parts)?);
        let lease = context.settings.lease;
        let budgets = Budgets::new(context.settings.memory_bytes);
        let executor = Executor::new(
            context.store.clone(),
            context.workers.clone(),
            context.caller.clone(),
            context.clock.clone(),
            budgets.archive.clone(),
        );
        let catching_up = Arc::new(CatchUpRequests::default());
        let registration = Arc::new(Registration::new(context.clone(), catching_up.clone()));
        let fencing = Arc::new(Fencing::new(context.clone(), registration.clone()));
        let node = Arc::new(Self {
            context,
            fencing,
            registration,
            catching_up,
            transport,
            budgets,
            executor,
            recovering: Arc::default(),
            removal_retries: Mutex::new(RetrySchedule::new(lease)),
            rebuilding: tokio::sync::Mutex::default(),
            introduced: Mutex::default(),
            retention: RetentionState::new(lease),
            retained: Mutex::default(),
            outage_cache: OutageCache::default(),
            mend_queue: MendQueue::default(),
            damaged_records: DamagedRecords::default(),
            exam_limit: ExamLimit::default(),
            full_disk: FullDiskState::default(),
            has_returned: AtomicBool::new(false),
            segmentation_offload,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        node.spawn_background_work();
        Ok(node)
    }

    fn spawn_background_work(self: &Arc<Self>) {
        let node = self;
        node.spawn_until_stop(Self::accept_connections);
        node.spawn_until_stop(Self::keep_registered);
        node.spawn_until_stop(Self::run_archiving_takeover);
        node.spawn_until_stop(Self::run_majority_checks);
        node.spawn_until_stop(Self::run_save_recovery);
        node.spawn_until_stop(Self::run_cluster_orphan_gc);
        node.spawn_until_stop(Self::run_replica_gc);
        node.spawn_until_stop(Self::run_catch_up);
        node.spawn_until_stop(Self::run_mending);
    }

    /// Spawns `work`, which runs until it ends or the node stops. Returns the handle of its task.
    fn spawn_until_stop<F>(self: &Arc<Self>, work: impl FnOnce(Arc<Self>) -> F) -> JoinHandle<()>
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
        })
    }

    /// Stops serving, cancels all running work and closes the transport. Files that were being
    /// written do not exist afterwards.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.transport.close().await;
        self.tasks.wait().await;
    }

    /// Returns the node's id.
    pub fn id(&self) -> NodeId {
        self.context.id
    }

    /// Returns the node's settings.
    pub fn settings(&self) -> &NodeSettings {
        &self.context.settings
    }

    /// Returns the node's store.
    pub fn store(&self) -> &Store {
        &self.context.store
    }

    /// Returns whether the node serves the catalogue and accepts changes of it.
    pub fn is_writable_catalogue_server(&self) -> bool {
        self.context.local_catalogue().is_some_and(|local| !local.is_read_only())
    }

    /// Returns the bytes in use in each memory share: archive, save, restore, control and requests.
    /// All are zero when nothing runs.
    pub fn used_memory_by_share(&self) -> [u64; 5] {
        let Budgets { archive, save, restore, control, requests } = &self.budgets;
        [archive, save, restore, control, requests].map(|share| share.used_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::archive_share_bytes;
    use crate::gf::Fingerprint;
    use crate::pipeline::executor::hop_memory_bytes;
    use crate::plan::{Input, Output};
    use crate::store::PIECE_WRITER_BYTES;
    use crate::units::MIB;
    use crate::wire::order::{HopOrder, InputOrder, OutputOrder};

    /// Uses the smallest memory that the configuration accepts, and the largest n of any code.
    #[test]
    fn the_coder_of_the_widest_star_fits_into_the_smallest_memory() {
        for blocks in 16..32 {
            let input = |stream| InputOrder {
                input: Input::Stream(stream),
                expected: vec![Fingerprint::ZERO],
            };
            let stream = |stream| OutputOrder { output: Output::Stream(stream), to: None };
            let stored = OutputOrder { output: Output::Store(31), to: None };
            let coder = HopOrder {
                grains: (0, 1),
                inputs: (0..blocks).map(input).collect(),
                outputs: (blocks..31).map(stream).chain([stored]).collect(),
                matrix: Vec::new(),
            };
            let bytes = hop_memory_bytes(&coder) + PIECE_WRITER_BYTES;
            assert!(bytes <= archive_share_bytes(64 * MIB), "{bytes} with {blocks} blocks");
        }
    }
}
