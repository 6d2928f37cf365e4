//! The daemon of a storage node: its store, its transport, the catalogue, and the calls that
//! clients and other nodes make.
//!
//! [`Node`] is the logic over traits, so that a whole cluster can run in one process. [`Daemon`] is
//! a node on the real machine. Any node is a gateway: a client may send any request to any node.

mod active_saves;
mod background;
mod budgets;
mod catalogue_contact;
mod catalogue_server;
mod context;
mod daemon;
mod failure_log;
mod gateway;
mod incoming_call;
mod quorum;
mod registration;
mod remote_errors;
mod retry_schedule;
mod rpc;
mod services;
mod standings;
mod storage;
mod tasks;

use std::sync::Arc;
use std::time::Duration;

use budgets::Budgets;
use context::NodeContext;

pub use daemon::{Daemon, NodeError};
use rpc::dispatch::RpcServer;
use services::Services;

use crate::catalogue::CatalogueError;
use crate::clock::Clock;
use crate::config::{Policy, RepairRules};
use crate::entropy::Entropy;
use crate::id::{ClusterId, NodeId, PeerName};
use crate::net::Transport;
use crate::pipeline::executor::Executor;
use crate::store::{CatalogueStorage, Store};
use crate::workers::Workers;

/// Default time limit for the answer to a call that a node makes. Many calls, also without bulk
/// data, have limits of their own.
pub const CALL_LIMIT: Duration = Duration::from_secs(10);

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
    pub new_catalogue: NewCatalogue,
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
    /// Duration of a lease. A node counts as live for this long after its last registration.
    pub lease: Duration,
    /// The policy for committed steps, which the node applies while it serves the catalogue.
    pub policy: Policy,
    /// The rules of automatic repair, which the node applies while it serves the catalogue.
    pub repair: RepairRules,
}

/// Whether a node with a new data folder creates a catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewCatalogue {
    /// Another daemon serves the catalogue.
    Never,
    /// The node creates an empty catalogue.
    Create,
    /// The node should serve the catalogue, but the cluster has a catalogue already, of which the
    /// daemon at `seed` knows. An empty catalogue beside it would hide every checkpoint.
    ExistsElsewhere {
        /// The address of the daemon that knows of the other catalogue.
        seed: String,
    },
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

/// A node: its services, and the resources that it runs on.
pub struct Node {
    context: Arc<NodeContext>,
    budgets: Arc<Budgets>,
    transport: Arc<dyn Transport>,
    rpc: Arc<RpcServer>,
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
        let budgets = Arc::new(Budgets::new(context.settings.memory_bytes));
        let executor = Arc::new(Executor::new(
            context.store.clone(),
            context.workers.clone(),
            context.caller.clone(),
            context.clock.clone(),
            budgets.archive.clone(),
        ));
        let services = Services::new(&context, &budgets, &executor, segmentation_offload);
        let rpc = RpcServer::new(context.clone(), budgets.clone(), transport.clone(), services);
        let rpc = Arc::new(rpc);
        context.tasks.spawn_until_stop(rpc.clone().accept_connections());
        rpc.services().spawn_background_work(&context.tasks);
        Ok(Arc::new(Self { context, budgets, transport, rpc }))
    }

    /// Stops serving, cancels the work that may be cancelled, closes the transport, and waits for
    /// the rest, such as a commit under way. Files that cancelled work was writing do not exist
    /// afterwards.
    pub async fn stop(&self) {
        self.context.tasks.stop();
        self.transport.close().await;
        self.context.tasks.wait_until_ended().await;
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
        self.context.is_writable_catalogue_server()
    }

    /// Returns the bytes in use in each memory share: archive, save, restore, control and requests.
    /// All are zero when nothing runs.
    pub fn used_memory_by_share(&self) -> [u64; 5] {
        let Budgets { archive, save, restore, control, requests } = &*self.budgets;
        [archive, save, restore, control, requests].map(|share| share.used_bytes())
    }
}

#[cfg(test)]
mod tests {
    use crate::gf::Fingerprint;
    use crate::node::budgets::archive_share_bytes;
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
