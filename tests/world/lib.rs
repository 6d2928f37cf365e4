//! A cluster in one process: the code of nodes and clients over disks, databases and a network in
//! memory.
//!
//! Under `start_paused` time advances only when no task can run. Waiting for a lease to end takes
//! no real time, and no load makes a lease end early.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits in real or virtual time

pub mod between;
pub mod echo;
pub mod ledger;
pub mod look;
pub mod power;
pub mod raw;
pub mod rest;
pub mod runs;
pub mod spy;
pub mod time;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use echo::Echo;
use power::{Host, Leaves, Power, PoweredKv};
use rapidraid::catalogue::record_access::shard_state_key;
use rapidraid::client::{
    Client, ClientError, NewShard, NodeReport, ProgressFn, RestoreRequest, SaveOptions,
};
use rapidraid::config::{DEFAULT_LEASE, Policy, RepairRules, Rule};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::records::Standing;
use rapidraid::id::{ClusterId, Job, LaunchId, PeerName, ShardId, Step};
use rapidraid::net::memory::{MemoryNetwork, MemoryTransport};
use rapidraid::net::{Peer, Role};
use rapidraid::node::{NewCatalogue, Node, NodeParts, NodeSettings};
use rapidraid::store::{
    CatalogueStorage, Disk, Kv, KvError, LOCK_FILE, MemoryDisk, MemoryKv, Store,
};
use rapidraid::wire::calls::{ArchiveOptions, LaunchClaim, PlanChoice};
use rapidraid::wire::order::Codec;
use rapidraid::workers::Workers;
use spy::{Requests, Spied};
use time::MachineTime;

pub const CLUSTER: ClusterId = ClusterId([7; 16]);
pub const DISK_BYTES: u64 = 4 << 30;

/// One node's machine: the state that survives when its process is killed.
#[derive(Clone)]
pub struct Machine {
    pub name: PeerName,
    pub disk: Arc<MemoryDisk>,
    pub index: Arc<MemoryKv>,
    pub catalogue: Arc<MapSlot>,
    pub power: Arc<Power>,
    pub time: Arc<MachineTime>,
}

impl Machine {
    fn new(index: usize) -> Self {
        Self {
            name: format!("node{index:02}").parse().unwrap(),
            disk: Arc::new(MemoryDisk::new(DISK_BYTES)),
            index: Arc::new(MemoryKv::new()),
            catalogue: Arc::default(),
            power: Arc::default(),
            time: Arc::default(),
        }
    }
}

/// The place where a machine keeps its catalogue database.
#[derive(Default)]
pub struct MapSlot(Mutex<Option<Arc<MemoryKv>>>);

impl MapSlot {
    pub fn get(&self) -> Option<Arc<MemoryKv>> {
        self.0.lock().unwrap().clone()
    }

    /// Replaces the catalogue database, or removes it, without the daemon's knowledge.
    pub fn set(&self, map: Option<Arc<MemoryKv>>) {
        *self.0.lock().unwrap() = map;
    }
}

/// The catalogue database of a machine, as its daemon opens it.
struct SlotMaps {
    slot: Arc<MapSlot>,
    host: Host,
}

impl SlotMaps {
    fn powered(&self, map: Arc<MemoryKv>) -> Arc<dyn Kv> {
        Arc::new(PoweredKv { map, host: self.host.clone() })
    }
}

impl CatalogueStorage for SlotMaps {
    fn open_existing(&self) -> Result<Option<Arc<dyn Kv>>, KvError> {
        Ok(self.slot.get().map(|map| self.powered(map)))
    }

    fn move_aside_and_create(&self) -> Result<Arc<dyn Kv>, KvError> {
        let map = Arc::new(MemoryKv::new());
        self.slot.set(Some(map.clone()));
        Ok(self.powered(map))
    }

    fn is_folder_gone(&self) -> bool {
        self.slot.get().is_none()
    }
}

pub struct World {
    pub network: Arc<MemoryNetwork>,
    pub machines: Vec<Machine>,
    pub nodes: BTreeMap<usize, Arc<Node>>,
    pub block_bytes: u64,
    pub memory_bytes: u64,
    pub codes: Vec<(u8, u8)>,
    pub lease: Duration,
    pub policy: Policy,
    pub repair: RepairRules,
    /// Number of racks, over which the machines are spread one by one.
    pub racks: usize,
    /// The workers of the clients.
    pub workers: Workers,
    /// The workers of the daemons. They run inline: with a paused clock, time would jump while a
    /// job's result travels between threads.
    pub node_workers: Workers,
    /// The listening addresses of daemons whose advertised address belongs to a proxy.
    pub doors: BTreeMap<usize, String>,
    /// Machines besides 0 whose daemons store no data when they boot.
    pub without_storage: BTreeSet<usize>,
    /// The seed of all random numbers.
    pub seed: u64,
    /// The requests of clients and nodes.
    pub requests: Requests,
    /// Whether each machine has its own date and its own clock, both of them wrong.
    wrong_clocks: bool,
    /// The requests that the nodes of a simulated world sent each other.
    pub echo: Echo,
    lag_ms: Arc<AtomicU64>,
    boots: u64,
    clients: std::cell::Cell<u32>,
}

/// Repairs by themselves that have hardly any grace.
const HASTY_REPAIR: RepairRules =
    RepairRules { share_percent: 100, grace: Duration::from_secs(2), brake_percent: 50 };

pub fn address(index: usize) -> String {
    format!("node{index:02}:7440")
}

impl World {
    /// Starts `count` storage nodes, numbered from 1. Node 0 is the catalogue server and stores no
    /// data.
    pub async fn start(count: usize, codes: &[(u8, u8)], block_bytes: u64) -> Self {
        Self::with_memory(count, codes, block_bytes, 256 << 20).await
    }

    /// Starts a world like [`Self::start`], with `memory_bytes` of memory for each daemon.
    pub async fn with_memory(
        count: usize,
        codes: &[(u8, u8)],
        block_bytes: u64,
        memory_bytes: u64,
    ) -> Self {
        let mut world = Self::assemble(count, codes, block_bytes, memory_bytes);
        world.power_on().await;
        world
    }

    /// Starts a world that a single-threaded runtime with paused time runs the same way each time.
    pub async fn simulated(count: usize, codes: &[(u8, u8)], block_bytes: u64, seed: u64) -> Self {
        let mut world = Self::simulation(count, codes, block_bytes, seed);
        world.power_on().await;
        world
    }

    /// Starts a simulated world in which the date and the clock of every machine and client are
    /// wrong. With an odd seed it repairs automatically.
    pub async fn with_wrong_clocks(
        count: usize,
        codes: &[(u8, u8)],
        block_bytes: u64,
        seed: u64,
    ) -> Self {
        let mut world = Self::simulation(count, codes, block_bytes, seed);
        world.wrong_clocks = true;
        if seed % 2 == 1 {
            world.repair = HASTY_REPAIR;
        }
        for (index, machine) in (0..).zip(&mut world.machines) {
            machine.time = Arc::new(MachineTime::drawn(seed << 32 | (3 << 29) | index));
        }
        world.power_on().await;
        world
    }

    fn simulation(count: usize, codes: &[(u8, u8)], block_bytes: u64, seed: u64) -> Self {
        let mut world = Self::assemble(count, codes, block_bytes, 256 << 20);
        (world.seed, world.workers) = (seed, Workers::inline());
        let (coin, max) = (SeededEntropy::new(seed << 32 | (1 << 30)), world.lag_ms.clone());
        let draw = move || Duration::from_millis(coin.below(max.load(Ordering::Relaxed) + 1));
        world.network.set_lag(Arc::new(MachineTime::default()).clock(), draw);
        world.echo = Echo::of(&world.network);
        world
    }

    /// Sets the network delay, also for open connections: from now on each sent chunk takes up to
    /// `max_ms`, drawn anew for each chunk.
    pub fn set_lag(&self, max_ms: u64) {
        self.lag_ms.store(max_ms, Ordering::Relaxed);
    }

    fn assemble(count: usize, codes: &[(u8, u8)], block_bytes: u64, memory_bytes: u64) -> Self {
        let machines = (0..=count).map(Machine::new);
        Self {
            network: MemoryNetwork::new(),
            machines: machines.collect(),
            nodes: BTreeMap::new(),
            block_bytes,
            memory_bytes,
            codes: codes.to_vec(),
            lease: DEFAULT_LEASE,
            policy: Policy { rule: Rule::NOTHING, jobs: BTreeMap::new() },
            repair: RepairRules::OFF,
            racks: 8,
            workers: Workers::new(4),
            node_workers: Workers::inline(),
            doors: BTreeMap::new(),
            without_storage: BTreeSet::new(),
            seed: 0,
            requests: Requests::default(),
            wrong_clocks: false,
            echo: Echo::default(),
            lag_ms: Arc::default(),
            boots: 0,
            clients: std::cell::Cell::new(0),
        }
    }

    async fn power_on(&mut self) {
        for index in 0..self.machines.len() {
            self.boot(index);
        }
        self.until_live(self.machines.len() - 1).await;
        self.until_caught_up().await;
    }

    /// Starts the daemon of machine `index` on the present contents of its disk.
    pub fn boot(&mut self, index: usize) {
        self.try_boot(index).unwrap();
    }

    /// Starts the daemon like [`Self::boot`], but returns errors: the power may fail during the
    /// boot.
    pub fn try_boot(&mut self, index: usize) -> Result<(), Box<dyn std::error::Error>> {
        let machine = self.machines[index].clone();
        let power = machine.power.clone();
        power.turn(true);
        let (network, at) = (self.network.clone(), address(index));
        let host = Host {
            power: power.clone(),
            disk: machine.disk.clone(),
            end: Arc::new(move || network.kill(&at)),
        };
        let index_map = Arc::new(PoweredKv { map: machine.index, host: host.clone() });
        let (disk, guard): (Arc<dyn Disk>, _) = (machine.disk.clone(), power);
        machine.disk.set_call_guard(move |change| guard.passes(change));
        let lock = disk.lock(LOCK_FILE).unwrap();
        let (store, _) = Store::open(disk, lock, index_map, CLUSTER, &machine.name)?;
        self.boots += 1;
        let peer = Peer { role: Role::Node, name: machine.name.clone() };
        let settings = NodeSettings {
            cluster: CLUSTER,
            name: machine.name.clone(),
            advertise: address(index),
            zone: String::new(),
            rack: format!("rack{}", index % self.racks),
            storage: index != 0 && !self.without_storage.contains(&index),
            new_catalogue: if index == 0 { NewCatalogue::Create } else { NewCatalogue::Never },
            seeds: vec![address(0)],
            codes: self.codes.clone(),
            block_bytes: self.block_bytes,
            memory_bytes: self.memory_bytes,
            high_water_percent: 85,
            lease: self.lease,
            policy: self.policy.clone(),
            repair: self.repair,
        };
        let parts = NodeParts {
            store,
            db_location: Arc::new(SlotMaps { slot: machine.catalogue.clone(), host }),
            transport: self.spied(peer, &self.door(index)),
            clock: machine.time.clock(),
            // No two boots draw the same random numbers.
            entropy: Arc::new(SeededEntropy::new(self.seed << 32 | self.boots)),
            workers: self.node_workers.clone(),
            segmentation_offload: false,
        };
        self.nodes.insert(index, Node::start(settings, parts)?);
        Ok(())
    }

    fn door(&self, index: usize) -> String {
        self.doors.get(&index).cloned().unwrap_or_else(|| address(index))
    }

    /// Kills the process of machine `index`. Its connections break without a message.
    pub async fn kill(&mut self, index: usize) {
        self.network.kill(&self.door(index));
        if let Some(node) = self.nodes.remove(&index) {
            node.stop().await;
        }
    }

    /// Kills the process of machine `index` and gives its address to a peer that accepts
    /// connections and never answers. Returns that peer; dropping it frees the address.
    pub async fn silence(&mut self, index: usize) -> MemoryTransport {
        self.kill(index).await;
        let name = self.machines[index].name.clone();
        self.network.join(Peer { role: Role::Node, name }, &address(index))
    }

    /// Slows down machine `index` until its next boot: sending each 64 KiB takes `each`.
    pub fn slow(&self, index: usize, each: Duration) {
        self.network.set_pace(&address(index), self.machines[index].time.clock(), each);
    }

    /// Mutes machine `index` until its next boot: its connections stay open and it receives
    /// everything, but it sends nothing more.
    pub fn mute(&self, index: usize) {
        self.network.mute(&address(index));
    }

    fn spied(&self, peer: Peer, address: &str) -> Arc<Spied> {
        let name = peer.name.to_string();
        let inner = self.network.join(peer, address);
        Arc::new(Spied { inner, name, requests: self.requests.clone() })
    }

    /// Replaces machine `index`, which does not run, by an empty machine.
    pub fn replace(&mut self, index: usize) {
        let machine = &mut self.machines[index];
        machine.disk = Arc::new(MemoryDisk::new(DISK_BYTES));
        machine.index = Arc::new(MemoryKv::new());
        machine.catalogue.set(None);
    }

    /// Adds `count` empty machines and boots them.
    pub fn grow(&mut self, count: usize) {
        for index in self.machines.len()..self.machines.len() + count {
            self.machines.push(Machine::new(index));
            self.boot(index);
        }
    }

    /// Cuts the power of machine `index`. Its process ends at the same moment.
    pub fn cut_power(&self, index: usize) {
        self.machines[index].power.turn(false);
        self.network.kill(&address(index));
    }

    /// Gives machine `index` the disk that a power cut leaves.
    pub async fn lose_unsynced(&mut self, index: usize, leaves: Leaves) {
        self.kill(index).await;
        let machine = &mut self.machines[index];
        machine.disk = leaves.of(&machine.disk);
    }

    pub async fn until_live(&self, count: usize) {
        let client = self.client();
        for _ in 0..200 {
            let status = client.status().await;
            let live = status.map_or(0, |status| {
                let live = |node: &&NodeReport| node.view.live && node.view.node.storage;
                status.nodes.iter().filter(live).count()
            });
            if live == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the nodes did not become live");
    }

    /// Waits until all running storage nodes know what is committed and what was removed.
    pub async fn until_caught_up(&self) {
        let all = || {
            let stores = self.nodes.iter().filter(|(index, _)| **index != 0);
            stores
                .into_iter()
                .all(|(_, node)| node.store().read_catch_up_standing() == Standing::CaughtUp)
        };
        self.until("all nodes caught up", all).await;
    }

    pub fn client(&self) -> Client {
        self.numbered_client().0
    }

    /// Returns a client whose only seed is node `index`.
    pub fn client_of(&self, index: usize) -> Client {
        self.connect(vec![address(index)]).0
    }

    /// Returns a client, and the number N in its address `clientN:0`.
    pub fn numbered_client(&self) -> (Client, u32) {
        self.connect((0..3).map(address).collect())
    }

    /// Returns a client with these nodes as its seeds.
    pub fn client_of_all(&self, seeds: &[usize]) -> Client {
        self.connect(seeds.iter().map(|&index| address(index)).collect()).0
    }

    /// Returns a client with these addresses as its seeds, and the number in its address.
    pub fn connect(&self, seeds: Vec<String>) -> (Client, u32) {
        let number = self.clients.get();
        self.clients.set(number + 1);
        let name: PeerName = format!("client{number}").parse().unwrap();
        let transport = self.spied(Peer { role: Role::Client, name }, &format!("client{number}:0"));
        let seed = self.seed << 32 | (1 << 31) | u64::from(number);
        let time = match self.wrong_clocks {
            true => MachineTime::drawn(seed | (1 << 29)),
            false => MachineTime::default(),
        };
        let entropy = SeededEntropy::new(seed);
        (
            Client::with_transport(
                transport,
                Arc::new(time).clock(),
                Arc::new(entropy),
                self.workers.clone(),
                seeds,
            ),
            number,
        )
    }
}

pub fn job() -> Job {
    "job".parse().unwrap()
}

pub fn quiet() -> ProgressFn {
    Arc::new(|_| ())
}

/// Returns deterministic bytes that differ from every shift of themselves.
pub fn content(len: usize, seed: u64) -> Bytes {
    let mut bytes = vec![0; len];
    SeededEntropy::new(seed).fill(&mut bytes);
    bytes.into()
}

pub fn shard(name: &str, bytes: &Bytes) -> NewShard {
    NewShard { name: name.parse().unwrap(), source: Arc::new(bytes.clone()) }
}

/// Replaces step 1 through node 1, which dies when it is about to remove the replaced save. No node
/// has recorded that save as removed yet.
pub async fn replace_and_die(world: &mut World, weights: &Bytes) {
    let replaced = world.checkpoint(1).committed.unwrap().save;
    let fence = shard_state_key(ShardId::new(replaced, 0));
    let removes = world.requests.hold_write("node01", &fence);
    let (client, job) = (world.client_of(1), job());
    let newer = vec![shard("weights", weights)];
    let saving = client.save(&job, Step(1), newer, SaveOptions { replace: true }, quiet());
    let (saved, ()) = tokio::join!(saving, removes.has_come());
    saved.unwrap();
    world.kill(1).await;
}

pub async fn save(client: &Client, step: u64, shards: &[(&str, &Bytes)]) {
    let shards = shards.iter().map(|(name, bytes)| shard(name, bytes)).collect();
    client.save(&job(), Step(step), shards, SaveOptions::default(), quiet()).await.unwrap();
}

/// Registers a launch that begins now and has loaded the step `resumed`.
pub async fn register(
    client: &Client,
    launch: LaunchId,
    resumed: Option<u64>,
) -> Result<(), ClientError> {
    let order = client.fetch_launch_order(&job()).await?;
    let newest = order.newest().map(|newest| newest.launch);
    let claim = LaunchClaim::After { newest };
    client.register_launch(&job(), launch, resumed.map(Step), claim).await
}

pub fn options(plan: PlanChoice) -> ArchiveOptions {
    ArchiveOptions { plan, codec: Codec::Kernel, parallel: 0 }
}

/// Restores all shards into a fresh folder. Returns the folder and the report.
pub async fn restore(
    client: &Client,
    step: u64,
) -> Result<(Arc<MemoryDisk>, rapidraid::client::RestoreReport), rapidraid::client::ClientError> {
    let out = Arc::new(MemoryDisk::new(DISK_BYTES));
    let request = RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
    let report = client.restore(&job(), Some(Step(step)), request, quiet()).await?;
    Ok((out, report))
}

/// Returns the error with which a restore fails. Panics if it succeeds.
pub async fn restore_error(client: &Client, step: u64) -> rapidraid::client::ClientError {
    match restore(client, step).await {
        Ok((_, report)) => panic!("restored: {report:?}"),
        Err(error) => error,
    }
}

/// Returns the bytes of a file. Unreadable sectors read as zeros.
pub fn read_sectors(disk: &dyn Disk, path: &str) -> Vec<u8> {
    let file = disk.open(path).unwrap();
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    for (sector, bytes) in (0..).zip(bytes.chunks_mut(512)) {
        if file.read_at(bytes, sector * 512).is_err() {
            bytes.fill(0);
        }
    }
    bytes
}

pub fn read_file(disk: &dyn Disk, path: &str) -> Vec<u8> {
    let file = disk.open(path).unwrap();
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}
