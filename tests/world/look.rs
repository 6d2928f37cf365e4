//! Checks of a cluster from outside: the files on its disks, the contents of its catalogue, and the
//! invariant that holds in every state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rapidraid::catalogue::record_access::{checkpoint_key, shard_root_key, shard_state_key};
use rapidraid::client::Client;
use rapidraid::code::{Code, reconstruct, table};
use rapidraid::format::file::FileName;
use rapidraid::format::records::{
    Checkpoint, Leaves, Receipt, Record, ShardRoot, ShardState, StripeFixed, StripeRecord,
    StripeState,
};
use rapidraid::id::{SaveId, Step, StripeId};
use rapidraid::store::{Disk, Kv, LOCK_FILE, MemoryKv, RecordScope, Store};

use super::ledger::{Ledger, Shards};
use super::{CLUSTER, Machine, World, job};

/// Maximum number of polls, 100 ms apart, for work in the background: eleven minutes of virtual time. A
/// removal waits up to ten minutes for its next try if the catalogue server did not notice that a node
/// was away, for example because a delayed call renewed the node's lease.
const ROUNDS: usize = 6600;

/// Counts of a step's stripes and files, as a power cut would leave them on the disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    pub stripes: usize,
    /// Number of stripes that the catalogue has as archived.
    pub archived: usize,
    /// Number of whole good replicas. `pieces` counts the whole good pieces of the attempts in the
    /// catalogue.
    pub replicas: usize,
    pub pieces: usize,
}

/// Returns the paths of all files below a folder.
pub fn files_below(disk: &dyn Disk, folder: &str) -> Vec<String> {
    let mut files = Vec::new();
    for entry in disk.list(folder).unwrap_or_default() {
        let path = if folder.is_empty() { entry.name } else { format!("{folder}/{}", entry.name) };
        if entry.is_dir {
            files.extend(files_below(disk, &path));
        } else {
            files.push(path);
        }
    }
    files
}

impl Machine {
    /// Returns the data folder as a power cut would leave it now.
    pub fn after_power_cut(&self) -> Store {
        let disk: Arc<dyn Disk> = Arc::new(self.disk.crash());
        let lock = disk.lock(LOCK_FILE).unwrap();
        let kv = Arc::new(MemoryKv::new());
        let (store, _) = Store::open(disk, lock, kv, CLUSTER, &self.name).unwrap();
        store
    }
}

impl World {
    /// Returns the machine and the path of every file under `shards/` whose path `wanted` accepts.
    pub fn files(&self, wanted: impl Fn(&str) -> bool) -> Vec<(usize, String)> {
        let of = |(index, machine): (usize, &Machine)| {
            files_below(&*machine.disk, "shards").into_iter().map(move |path| (index, path))
        };
        let all = self.machines.iter().enumerate().flat_map(of);
        all.filter(|(_, path)| wanted(path)).collect()
    }

    /// Returns the machine and the path of every file of a save, except for its tombstones.
    pub fn files_of(&self, save: SaveId) -> Vec<(usize, String)> {
        let folder = format!("shards/{save}");
        self.files(|path| path.starts_with(&folder) && !path.ends_with("/tombstone"))
    }

    /// Returns the machines that have a file of this name in quarantine.
    pub fn quarantined(&self, name: &str) -> Vec<usize> {
        let has = |machine: &Machine| {
            files_below(&*machine.disk, "quarantine").iter().any(|path| path.ends_with(name))
        };
        (0..self.machines.len()).filter(|&index| has(&self.machines[index])).collect()
    }

    /// Returns the machines whose daemons serve a catalogue.
    pub fn serving(&self) -> Vec<usize> {
        let serving = self.nodes.iter().filter(|(_, node)| node.is_writable_catalogue_server());
        serving.map(|(index, _)| *index).collect()
    }

    /// Waits until every node has recorded all nodes. Before that, a node that knows only some of
    /// them would not know which others to ask.
    pub async fn until_acquainted(&self) {
        let all = self.machines.len();
        let knows =
            |store: &Store| store.read_members().is_ok_and(|members| members.nodes.len() == all);
        let acquainted = || self.nodes.values().all(|node| knows(node.store()));
        self.until("all nodes know each other", acquainted).await;
    }

    /// Returns the catalogue database of the running daemon that serves a catalogue, or of machine
    /// 0 if no daemon serves one.
    pub fn map(&self) -> Arc<MemoryKv> {
        let serves = |index: &usize| {
            self.nodes.get(index).is_some_and(|node| node.is_writable_catalogue_server())
        };
        let home = (0..self.machines.len()).find(serves).unwrap_or(0);
        self.machines[home].catalogue.get().unwrap()
    }

    /// Returns the catalogue's keys that begin with `prefix`.
    pub fn catalogue_keys(&self, prefix: &str) -> Vec<String> {
        let kv = self.map();
        let pairs = kv.scan(format!("k/{prefix}").as_bytes(), None, 1000).unwrap();
        pairs.into_iter().map(|(key, _)| String::from_utf8(key).unwrap()[2..].to_owned()).collect()
    }

    /// Returns the record of a key of the catalogue.
    pub fn record<R: Record>(&self, key: &str) -> Option<R> {
        let value = self.map().get(format!("k/{key}").as_bytes()).unwrap();
        // The revision precedes the record.
        value.map(|value| R::parse(&value[8..]).unwrap())
    }

    /// Returns the catalogue's record of a step, which is empty if it has none.
    pub fn checkpoint(&self, step: u64) -> Checkpoint {
        self.record(&checkpoint_key(job().at(Step(step)))).unwrap_or_default()
    }

    /// Returns the files of a step's first shard whose path within the shard's folder begins with
    /// `begins`, in order of machines.
    pub async fn files_of_step(&self, step: u64, begins: &str) -> Vec<(usize, String)> {
        let shown = self.client().show_step(&job(), Some(Step(step))).await.unwrap();
        let start = format!("shards/{}/{begins}", shown.shards[0].0.shard);
        self.files(|path| path.starts_with(&start))
    }

    /// Returns everything durable: all files with their bytes, and the catalogue's keys with their
    /// values.
    pub fn snapshot(&self) -> BTreeMap<String, Vec<u8>> {
        let mut all = BTreeMap::new();
        for (index, path) in self.files(|_| true) {
            let bytes = super::read_sectors(&*self.machines[index].disk, &path);
            all.insert(format!("{index}:{path}"), bytes);
        }
        let kv = self.map();
        for (key, value) in kv.scan(b"k/", None, 1000).unwrap() {
            all.insert(String::from_utf8(key).unwrap(), value);
        }
        all
    }

    /// Waits until work in the background has `reached` a state.
    pub async fn until(&self, what: &str, reached: impl Fn() -> bool) {
        self.until_or(what, reached, String::new).await;
    }

    /// Waits like [`Self::until`]. On failure, `why` describes what is missing.
    pub async fn until_or(&self, what: &str, reached: impl Fn() -> bool, why: impl Fn() -> String) {
        for _ in 0..ROUNDS {
            if reached() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("never came: {what} {}", why());
    }

    /// Waits until all nodes have released all memory.
    pub async fn assert_idle(&self) {
        let idle = || self.nodes.values().all(|node| node.used_memory_by_share() == [0; 5]);
        self.until("all memory given back", idle).await;
    }

    /// Waits until every save that is not committed is purged: its files from all disks, its keys
    /// from the catalogue.
    pub async fn assert_swept(&self, client: &Client) {
        let listed = client.list_steps(None).await.unwrap();
        let kept: Vec<String> = listed.iter().map(|step| step.saved.save.to_string()).collect();
        let foreign = |text: &str| !kept.iter().any(|save| text.contains(save.as_str()));
        let left = || {
            let files = self.files(|path| foreign(path) && !path.ends_with("/tombstone"));
            let keys =
                ["s/", "t/", "j/", "o/", "d/"].map(|prefix| self.catalogue_keys(prefix)).concat();
            let keys = keys.into_iter().filter(|key| foreign(key)).map(|key| (0, key));
            files.into_iter().chain(keys).collect::<Vec<_>>()
        };
        for _ in 0..ROUNDS {
            if left().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("never went: {:?}", left());
    }

    /// Returns the root and the state of each shard in the catalogue, if the step is committed.
    pub fn committed(&self, step: u64) -> Option<Vec<(ShardRoot, ShardState)>> {
        let kv = self.map();
        let value = kv.get(format!("k/{}", checkpoint_key(job().at(Step(step)))).as_bytes());
        let saved = Checkpoint::parse(&value.unwrap()?[8..]).unwrap().committed?;
        let shard = |index| {
            let root =
                kv.get(format!("k/{}", shard_root_key(saved.save, index)).as_bytes()).unwrap();
            let root = ShardRoot::parse(&root.expect("a committed step without a root")[8..]);
            let root = root.unwrap();
            let state = kv.get(format!("k/{}", shard_state_key(root.shard)).as_bytes()).unwrap();
            let state = ShardState::parse(&state.expect("a committed step without a state")[8..]);
            (root, state.unwrap())
        };
        Some((0..saved.shards).map(shard).collect())
    }

    /// Checks the invariant at this moment, with operations in progress and nodes down. It covers
    /// each step whose content is certain: the step is committed as reported, and the state that a
    /// power cut would leave on all machines has every stripe whole.
    pub fn assert_reported(&self, ledger: &mut Ledger) {
        let images: Vec<_> = self.machines[1..].iter().map(Machine::after_power_cut).collect();
        for step in ledger.steps() {
            if let Some(version) = ledger.certain(step) {
                self.assert_whole(&images, step, ledger.shards(step, version));
            }
        }
    }

    fn assert_whole(&self, images: &[Store], step: u64, shards: &Shards) {
        let found = self.committed(step);
        let found = found.unwrap_or_else(|| panic!("step {step} was reported and is not there"));
        let has = |name: &str, len: u64| {
            shards.iter().any(|(is, bytes)| is == name && bytes.len() as u64 == len)
        };
        let same = found.len() == shards.len()
            && found.iter().all(|(root, _)| has(&root.name.to_string(), root.len_bytes));
        assert!(same, "step {step} is not what was reported");
        for (root, state) in &found {
            for index in 0..root.geometry().unwrap().stripes() {
                let found = look(images, root, index, [state, state]);
                let whole = found.replicated || found.spans;
                assert!(whole, "step {step}: stripe {index} of {} is lost: {found:?}", root.name);
            }
        }
    }

    /// Checks the invariant for each stripe of a committed step. A stripe that the catalogue has as
    /// archived has n proven pieces, of which any k that span the blocks are enough; any other
    /// stripe has a whole good replica of each block. The check reads the state that a power cut
    /// would leave on all machines, running or not. Returns the counts.
    pub async fn assert_invariant(&self, client: &Client, step: u64) -> Held {
        let before = client.show_step(&job(), Some(Step(step))).await.unwrap();
        let images: Vec<_> = self.machines[1..].iter().map(Machine::after_power_cut).collect();
        let after = client.show_step(&job(), Some(Step(step))).await.unwrap();
        let mut held = Held::default();
        for ((root, state), (_, later)) in before.shards.iter().zip(&after.shards) {
            let stripes = root.geometry().unwrap().stripes();
            for index in 0..stripes {
                let found = look(&images, root, index, [state, later]);
                let whole = found.replicated || found.spans;
                assert!(whole, "stripe {index} of {} is lost: {found:?}", root.name);
                let archived = matches!(state.stripe(index), Some(StripeState::Archived { .. }));
                held.stripes += 1;
                held.archived += usize::from(archived);
                held.replicas += found.replicas;
                held.pieces += found.pieces;
            }
        }
        held
    }
}

#[derive(Debug, Default)]
struct Found {
    replicas: usize,
    pieces: usize,
    replicated: bool,
    spans: bool,
}

fn record<T>(
    images: &[Store],
    scope: RecordScope,
    name: &str,
    parse: impl Fn(&[u8]) -> Option<T>,
) -> Option<T> {
    images.iter().find_map(|store| parse(&store.get_record_file(scope, name).ok()??))
}

/// Returns the fixed part of a stripe's record, checked against the catalogue's root.
pub fn fixed_part(images: &[Store], root: &ShardRoot, index: u32) -> StripeFixed {
    let stripe = StripeId { shard: root.shard, index };
    let leaves = record(images, RecordScope::Shard(root.shard), "leaves", |bytes| {
        Leaves::parse(bytes).ok().filter(|leaves| root.admits(leaves))
    });
    let leaves = leaves.expect("no node has the leaves");
    let fixed = record(images, RecordScope::Stripe(stripe), "record", |bytes| {
        StripeRecord::parse(bytes).ok()?.open(root, &leaves, index).ok()
    });
    fixed.expect("no node has the stripe's record")
}

fn look(images: &[Store], root: &ShardRoot, index: u32, states: [&ShardState; 2]) -> Found {
    let stripe = StripeId { shard: root.shard, index };
    let fixed = fixed_part(images, root, index);
    let mut found = Found::default();
    let mut good: Vec<(FileName, [u8; 32])> = Vec::new();
    for store in images {
        for info in store.list_undamaged_files(stripe).unwrap() {
            let whole =
                store.open_undamaged_file(info.key()).is_ok_and(|file| file.scrub().is_empty());
            if whole {
                good.push((info.content.name(), info.root));
            }
        }
    }
    let has_replica = |block: u8| {
        let root = fixed.blocks[usize::from(block)].root;
        good.iter().filter(|(name, is)| *name == FileName::Replica { block } && *is == root).count()
    };
    let wanted = (0..root.k).filter(|&block| fixed.cut.block_len(block) > 0);
    let copies: Vec<usize> = wanted.map(has_replica).collect();
    found.replicas = copies.iter().sum();
    found.replicated = copies.iter().all(|&copies| copies > 0);
    for state in states {
        let Some(StripeState::Archived { attempt, code, .. }) = state.stripe(index) else {
            continue;
        };
        let code = table::by_id(code).unwrap();
        let name = format!("receipt-{attempt}");
        let receipts = images.iter().filter_map(|store| {
            let bytes = store.get_record_file(RecordScope::Stripe(stripe), &name).ok()??;
            Receipt::parse(&bytes).ok().filter(|receipt| receipt.stripe == stripe)
        });
        // The one of the greatest order says in which form a piece is stored.
        let receipt = receipts.max_by_key(|receipt| receipt.order);
        let was_archived = matches!(states[0].stripe(index), Some(StripeState::Archived { .. }));
        let Some(receipt) = receipt else {
            assert!(!was_archived, "archived, and no node has the receipt");
            continue;
        };
        let proven = |(name, is): &&(FileName, [u8; 32])| match *name {
            FileName::Piece { piece, attempt: of } => {
                of == attempt && receipt.pieces[usize::from(piece)].root == *is
            }
            FileName::Replica { .. } => false,
        };
        let files: Vec<_> = good.iter().filter(proven).collect();
        found.pieces = files.len();
        let mut available: Vec<usize> = files
            .iter()
            .filter_map(|(name, _)| match name {
                FileName::Piece { piece, .. } => Some(usize::from(*piece)),
                FileName::Replica { .. } => None,
            })
            .collect();
        if matches!(code, Code::Rs(_)) {
            let kept = |block: &u8| fixed.cut.block_len(*block) == 0 || has_replica(*block) > 0;
            available.extend((0..root.k).filter(kept).map(usize::from));
        }
        available.sort_unstable();
        available.dedup();
        let all: Vec<usize> = (0..usize::from(root.k)).collect();
        found.spans = reconstruct(&code, &available, &all).is_ok();
    }
    found
}
