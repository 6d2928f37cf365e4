//! A cluster in one process: the node and client code over disks, maps and a network in memory.
//!
//! Under `start_paused` time passes only when nothing else can: leases end at once, and no load makes them end early.
#![allow(dead_code)] // each test binary uses its part

pub mod look;
pub mod raw;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use rapidraid::client::{Client, NewShard, ProgressFn, RestoreRequest, SaveOptions};
use rapidraid::clock::SystemClock;
use rapidraid::config::{Policy, Rule};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::id::{ClusterId, Job, PeerName, Step};
use rapidraid::net::memory::{MemoryNetwork, MemoryTransport};
use rapidraid::net::{Peer, Role};
use rapidraid::node::{Node, NodeParts, NodeSettings};
use rapidraid::pipeline::workers::Workers;
use rapidraid::store::{Disk, Kv, KvError, LOCK_FILE, Maps, MemoryDisk, MemoryKv, Store};
use rapidraid::wire::calls::{ArchiveOptions, PlanChoice};
use rapidraid::wire::order::Codec;

pub const CLUSTER: ClusterId = ClusterId([7; 16]);
const DISK_BYTES: u64 = 4 << 30;

/// One node's machine: what survives when its process is killed.
#[derive(Clone)]
pub struct Machine {
    pub name: PeerName,
    pub disk: Arc<MemoryDisk>,
    index: Arc<MemoryKv>,
    pub catalogue: Arc<MapSlot>,
}

/// Where a machine keeps its catalogue's map.
#[derive(Default)]
pub struct MapSlot(Mutex<Option<Arc<MemoryKv>>>);

impl MapSlot {
    pub fn get(&self) -> Option<Arc<MemoryKv>> {
        self.0.lock().unwrap().clone()
    }

    /// Puts another map there, or none, behind the daemon's back.
    pub fn set(&self, map: Option<Arc<MemoryKv>>) {
        *self.0.lock().unwrap() = map;
    }
}

/// Gives the daemon of a machine its map.
struct SlotMaps(Arc<MapSlot>);

impl Maps for SlotMaps {
    fn existing(&self) -> Result<Option<Arc<dyn Kv>>, KvError> {
        Ok(self.0.get().map(|kv| kv as _))
    }

    fn fresh(&self) -> Result<Arc<dyn Kv>, KvError> {
        let kv = Arc::new(MemoryKv::new());
        self.0.set(Some(kv.clone()));
        Ok(kv)
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
    clients: std::cell::Cell<u32>,
    boots: BTreeMap<usize, u64>,
}

pub fn address(index: usize) -> String {
    format!("node{index:02}:7440")
}

impl World {
    /// `count` storage nodes, numbered from 1; node 0 hosts the catalogue and stores nothing.
    pub async fn start(count: usize, codes: &[(u8, u8)], block_bytes: u64) -> Self {
        Self::with_memory(count, codes, block_bytes, 256 << 20).await
    }

    /// The same with daemons of `memory_bytes`.
    pub async fn with_memory(
        count: usize,
        codes: &[(u8, u8)],
        block_bytes: u64,
        memory_bytes: u64,
    ) -> Self {
        let machines = (0..=count).map(|index| Machine {
            name: format!("node{index:02}").parse().unwrap(),
            disk: Arc::new(MemoryDisk::new(DISK_BYTES)),
            index: Arc::new(MemoryKv::new()),
            catalogue: Arc::default(),
        });
        let mut world = Self {
            network: MemoryNetwork::new(),
            machines: machines.collect(),
            nodes: BTreeMap::new(),
            block_bytes,
            memory_bytes,
            codes: codes.to_vec(),
            lease: Duration::from_secs(10),
            policy: Policy { rule: Rule::NOTHING, jobs: BTreeMap::new() },
            clients: std::cell::Cell::new(0),
            boots: BTreeMap::new(),
        };
        for index in 0..=count {
            world.boot(index);
        }
        world.until_live(count).await;
        world
    }

    /// Starts the daemon of machine `index` on what its disk holds.
    pub fn boot(&mut self, index: usize) {
        let boots = *self.boots.entry(index).and_modify(|boots| *boots += 1).or_default();
        let machine = self.machines[index].clone();
        let disk: Arc<dyn Disk> = machine.disk.clone();
        let lock = disk.lock(LOCK_FILE).unwrap();
        let (store, _) =
            Store::open(disk, lock, machine.index.clone(), CLUSTER, &machine.name).unwrap();
        let peer = Peer { role: Role::Node, name: machine.name.clone() };
        let settings = NodeSettings {
            cluster: CLUSTER,
            name: machine.name.clone(),
            advertise: address(index),
            zone: String::new(),
            rack: format!("rack{}", index % 8),
            storage: index != 0,
            begin_catalogue: index == 0,
            seeds: vec![address(0)],
            codes: self.codes.clone(),
            block_bytes: self.block_bytes,
            memory_bytes: self.memory_bytes,
            high_water_percent: 85,
            lease: self.lease,
            policy: self.policy.clone(),
        };
        let parts = NodeParts {
            store,
            maps: Arc::new(SlotMaps(machine.catalogue.clone())),
            transport: Arc::new(self.network.join(peer, &address(index))),
            clock: SystemClock::new(),
            // Another one after each start: ids that were given out do not come again.
            entropy: Arc::new(SeededEntropy::new(index as u64 + 1 + (boots << 32))),
            workers: Workers::new(4),
            segmentation_offload: false,
        };
        self.nodes.insert(index, Node::start(settings, parts).unwrap());
    }

    /// Kills the process of machine `index`: connections break, nothing is said.
    pub async fn kill(&mut self, index: usize) {
        self.network.kill(&address(index));
        if let Some(node) = self.nodes.remove(&index) {
            node.stop().await;
        }
    }

    /// Kills the process of machine `index` and leaves its address to one that takes connections and never answers, until
    /// what is given is dropped.
    pub async fn silence(&mut self, index: usize) -> MemoryTransport {
        self.kill(index).await;
        let name = self.machines[index].name.clone();
        self.network.join(Peer { role: Role::Node, name }, &address(index))
    }

    pub async fn until_live(&self, count: usize) {
        let client = self.client();
        for _ in 0..200 {
            let status = client.status().await;
            let live = status.map_or(0, |status| {
                status.nodes.iter().filter(|(view, _)| view.live && view.node.storage).count()
            });
            if live == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the nodes did not become live");
    }

    pub fn client(&self) -> Client {
        self.numbered_client().0
    }

    /// A client whose only seed is node `index`.
    pub fn client_of(&self, index: usize) -> Client {
        self.connect(vec![address(index)]).0
    }

    /// A client, and the number in its address `clientN:0`.
    pub fn numbered_client(&self) -> (Client, u32) {
        self.connect((0..3).map(address).collect())
    }

    /// A client with these nodes as its seeds.
    pub fn client_of_all(&self, seeds: &[usize]) -> Client {
        self.connect(seeds.iter().map(|&index| address(index)).collect()).0
    }

    fn connect(&self, seeds: Vec<String>) -> (Client, u32) {
        let number = self.clients.get();
        self.clients.set(number + 1);
        let name: PeerName = format!("client{number}").parse().unwrap();
        let transport =
            self.network.join(Peer { role: Role::Client, name }, &format!("client{number}:0"));
        let entropy = Arc::new(SeededEntropy::new(1000 + u64::from(number)));
        (
            Client::over(Arc::new(transport), SystemClock::new(), entropy, Workers::new(4), seeds),
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

/// Deterministic bytes that differ from every shift of themselves.
pub fn content(len: usize, seed: u64) -> Bytes {
    let mut bytes = vec![0; len];
    SeededEntropy::new(seed).fill(&mut bytes);
    bytes.into()
}

pub fn shard(name: &str, bytes: &Bytes) -> NewShard {
    NewShard { name: name.parse().unwrap(), source: Arc::new(bytes.clone()) }
}

pub async fn save(client: &Client, step: u64, shards: &[(&str, &Bytes)]) {
    let shards = shards.iter().map(|(name, bytes)| shard(name, bytes)).collect();
    client.save(&job(), Step(step), shards, SaveOptions::default(), quiet()).await.unwrap();
}

pub fn options(plan: PlanChoice) -> ArchiveOptions {
    ArchiveOptions { plan, codec: Codec::Kernel, parallel: 0 }
}

/// Restores all shards into a fresh folder and gives it.
pub async fn restore(
    client: &Client,
    step: u64,
) -> Result<(Arc<MemoryDisk>, rapidraid::client::RestoreReport), rapidraid::client::ClientError> {
    let out = Arc::new(MemoryDisk::new(DISK_BYTES));
    let request = RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
    let report = client.restore(&job(), Some(Step(step)), request, quiet()).await?;
    Ok((out, report))
}

/// Why a restore is refused.
pub async fn restore_error(client: &Client, step: u64) -> rapidraid::client::ClientError {
    match restore(client, step).await {
        Ok((_, report)) => panic!("restored: {report:?}"),
        Err(error) => error,
    }
}

pub fn read_file(disk: &dyn Disk, path: &str) -> Vec<u8> {
    let file = disk.open(path).unwrap();
    let mut bytes = vec![0; file.len_bytes().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}
