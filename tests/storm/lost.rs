//! Faults that lose the catalogue: its server goes down with or without the catalogue database, a
//! client requests a rebuild, and the server comes back with its old database, with an older copy,
//! or with none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::id::Epoch;
use rapidraid::kind::ErrorKind;
use rapidraid::net::Address;
use rapidraid::store::MemoryKv;
use tokio::task::JoinHandle;

use super::schedule::{Fault, Wrong};
use super::weather::{Director, Report};
use world::address;
use world::power::Leaves;

/// Maximum time for which a catalogue server, or a node during a rebuild, is down, in virtual
/// milliseconds.
const MAX_AWAY_MS: u64 = 60_000;
/// Maximum number of rebuilds after the storm until one succeeds.
const LAST_TRIES: usize = 20;

/// The catalogue database that a lost server has when it comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    Map,
    Nothing,
    /// A copy that was taken long before the loss.
    Older,
    /// No data at all, if the server is the machine that creates a catalogue; it then creates
    /// another one.
    NewDisk,
}

/// Returns whether the schedule of a seed may lose the catalogue. Seeds that end in 1, 2 or 3 do.
pub fn is_lost(seed: u64) -> bool {
    (1..=3).contains(&(seed % 10))
}

/// Returns the additional faults of a seed whose schedule may lose the catalogue, and none for
/// other seeds.
pub fn draw(seed: u64, nodes: u64) -> Vec<Wrong> {
    if !is_lost(seed) {
        return Vec::new();
    }
    let coin = SeededEntropy::new(!seed);
    let below = |bound| coin.below(bound);
    let leaves = || match below(3) {
        0 => Leaves::Synced,
        1 => Leaves::Torn(below(1 << 32)),
        _ => Leaves::All,
    };
    let mut wrongs = Vec::new();
    for number in 0..1 + below(2) {
        let from_ms = 1000 + below(45_000);
        let to_ms = from_ms + below(MAX_AWAY_MS);
        let map = [Kept::Map, Kept::Nothing, Kept::Older, Kept::NewDisk][below(4) as usize];
        wrongs.push(Wrong { from_ms, to_ms, fault: Fault::Lose { number, map } });
        let mut at_ms = from_ms;
        for _ in 0..below(4) {
            at_ms += below(20_000);
            let machine = || 1 + below(nodes) as usize;
            // Stop as many machines as a rebuild tolerates, and now and then one too many.
            for _ in 0..below(5) / 2 {
                let fault = Fault::Stop { machine: machine(), leaves: leaves() };
                let (from_ms, to_ms) = (at_ms.saturating_sub(below(5000)), at_ms + below(30_000));
                wrongs.push(Wrong { from_ms, to_ms, fault });
            }
            for _ in 0..1 + below(4) / 3 {
                let on = machine();
                if below(4) == 0 {
                    let fault =
                        Fault::StopAfter { machine: on, changes: below(40), leaves: leaves() };
                    wrongs.push(Wrong { from_ms: at_ms, to_ms: at_ms + below(20_000), fault });
                }
                let fault = Fault::Rebuild { on };
                wrongs.push(Wrong { from_ms: at_ms, to_ms: at_ms, fault });
            }
        }
    }
    wrongs
}

/// The director's knowledge of catalogues.
#[derive(Default)]
pub struct Lost {
    /// The machine that served the catalogue last.
    home: usize,
    /// By the number of the loss: the lost server, and its catalogue database.
    taken: BTreeMap<u64, (usize, Option<Arc<MemoryKv>>)>,
    /// By machine: an early copy of its catalogue database, and the epoch of the copy.
    copies: BTreeMap<usize, (Epoch, Arc<MemoryKv>)>,
    rebuilds: Vec<JoinHandle<()>>,
}

impl Director {
    /// Finds the daemon that serves the catalogue. Keeps an early copy of its database, and reports
    /// to the clients when the catalogue is lost or found.
    pub fn look_for_home(&mut self) {
        let serving = self.homes();
        if let [home] = serving[..] {
            self.lost.home = home;
            self.report.lock().unwrap().home = home;
            let epoch = self.world.nodes[&home].store().highest_seen_epoch();
            let copy =
                || Some((epoch, Arc::new(self.world.machines[home].catalogue.get()?.copy())));
            if !self.lost.copies.contains_key(&home) {
                self.lost.copies.extend(copy().map(|copy| (home, copy)));
            }
        }
        let is_lost = serving.len() != 1;
        if self.report.lock().unwrap().is_lost != is_lost {
            self.tell(|weather| weather.is_lost = is_lost);
        }
    }

    /// Returns the daemons that serve a catalogue which another node has recorded as the cluster's.
    /// The nodes on a catalogue's own list prove nothing: a repeated request to register puts them
    /// there.
    fn homes(&self) -> Vec<usize> {
        let mut serving = self.world.serving();
        serving.retain(|home| {
            let map = self.world.nodes[home].store().db_id_of_highest_epoch();
            let others = self.world.nodes.iter().filter(|(index, _)| *index != home);
            map.is_some()
                && others.into_iter().any(|(_, node)| node.store().db_id_of_highest_epoch() == map)
        });
        serving
    }

    /// Takes the catalogue server down. Also removes its catalogue database for now, unless `map`
    /// keeps it.
    pub async fn lose(&mut self, number: u64, map: Kept) {
        self.look_for_home();
        let home = self.lost.home;
        self.take_down(home, Leaves::All).await;
        let slot = &self.world.machines[home].catalogue;
        self.lost.taken.insert(number, (home, slot.get()));
        if map != Kept::Map {
            slot.set(None);
        }
        self.look_for_home();
    }

    /// Boots the lost server again, with the data that `map` describes.
    pub async fn find(&mut self, number: u64, map: Kept) {
        let Some((home, kept)) = self.lost.taken.remove(&number) else { return };
        let slot = self.world.machines[home].catalogue.clone();
        // A rebuild may have created a database on this machine in the meantime; that one stays.
        if map == Kept::Older && slot.get().is_none() {
            self.take_down(home, Leaves::All).await;
            slot.set(self.over(home).or(kept));
        } else if map == Kept::NewDisk && home == 0 {
            self.take_down(home, Leaves::All).await;
            self.world.replace(home);
        }
        self.bring_back(home).await;
    }

    /// Returns the early copy of a machine's database if more than half of the storage nodes have a
    /// later epoch. With a current epoch, no node could distinguish the copy from the database that
    /// was lost.
    fn over(&self, home: usize) -> Option<Arc<MemoryKv>> {
        let (epoch, copy) = self.lost.copies.get(&home)?;
        let storage = self.world.machines.len() - 1;
        let nodes = self.world.nodes.iter().filter(|(index, _)| **index != 0);
        let later = nodes.filter(|(_, node)| node.store().highest_seen_epoch() > *epoch).count();
        (later * 2 > storage).then(|| copy.clone())
    }

    /// Requests a rebuild on storage node `on`, or on the next one that runs, and waits for it in a
    /// task of its own.
    pub fn call_rebuild(&mut self, on: usize) {
        let storage = self.world.machines.len() - 1;
        let mut others = (0..storage).map(|other| 1 + (on - 1 + other) % storage);
        let Some(on) = others.find(|on| self.world.nodes.contains_key(on)) else { return };
        let client = self.world.client_of(on);
        let report = self.report.clone();
        self.lost.rebuilds.push(tokio::spawn(async move {
            rebuild(&client, on, &report).await;
        }));
    }

    /// Rebuilds the catalogue if no daemon serves it. All other faults have ended.
    pub async fn restore_catalogue(&mut self) {
        for rebuild in std::mem::take(&mut self.lost.rebuilds) {
            rebuild.await.unwrap();
        }
        let lease = self.world.lease;
        for attempt in 0..LAST_TRIES {
            tokio::time::sleep(3 * lease).await;
            self.look_for_home();
            if !self.report.lock().unwrap().is_lost {
                return;
            }
            let on = 1 + attempt % (self.world.machines.len() - 1);
            rebuild(&self.world.client_of(on), on, &self.report).await;
        }
        panic!("no rebuild brings the catalogue back; these serve: {:?}", self.homes());
    }

    /// Asserts that exactly one daemon serves the catalogue, and continues to.
    pub async fn assert_one_home(&self) {
        for _ in 0..10 {
            assert_eq!(self.world.serving().len(), 1, "homes: {:?}", self.world.serving());
            tokio::time::sleep(self.world.lease / 3).await;
        }
    }
}

/// Runs a rebuild and checks its outcome. A rebuild that succeeds reports no incomplete step, and
/// no damaged one unless more than one node is missing or a disk has rotted.
async fn rebuild(client: &rapidraid::client::Client, on: usize, report: &Report) {
    let at = Address { host_port: address(on), node: None };
    let limit = Duration::from_secs(3600);
    let ended = tokio::time::timeout(limit, client.rebuild_catalogue(Some(&at))).await;
    let ended = ended.unwrap_or_else(|_| panic!("a rebuild on node {on} stands still"));
    match ended {
        Ok(answer) => {
            assert_eq!(answer.incomplete, Vec::<String>::new(), "of a rebuild on node {on}");
            let few = answer.missing.len() <= 1 && !report.lock().unwrap().rotted;
            assert!(answer.damaged.is_empty() || !few, "node {on}: {answer:?}");
        }
        Err(error) => {
            let wrong = matches!(
                error.kind(),
                ErrorKind::Lost
                    | ErrorKind::Corrupt
                    | ErrorKind::Internal
                    | ErrorKind::Invalid
                    | ErrorKind::Denied
            );
            assert!(!wrong, "a rebuild on node {on}: {error}");
        }
    }
}
