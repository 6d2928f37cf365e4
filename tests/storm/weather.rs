//! The current faults of the cluster. Faults begin and end as the schedule says, and the clients
//! learn how much they may expect.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::store::Disk;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::clients::{Shared, take_off};
use super::lost::Lost;
use super::schedule::{Fault, Schedule, Wrong};
use world::power::Leaves;
use world::{DISK_BYTES, World, address};

/// Time without a change after which all earlier leases and timeouts are over.
const CALM: Duration = Duration::from_secs(60);
/// Time after which a connection that is cut in one direction is given up, as by QUIC.
const IDLE: Duration = Duration::from_secs(4);
/// Interval at which the director checks which daemon serves the catalogue, if the schedule may
/// lose it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Number of nodes that were taken off the list, in all storms of this process.
pub static DEPARTED: AtomicU64 = AtomicU64::new(0);

/// The faults that clients may know of.
#[derive(Clone, Default)]
pub struct Weather {
    /// Machines that are down, and the machine whose disk rots once it has begun to.
    pub away: BTreeSet<usize>,
    pub rotted: bool,
    /// Whether no daemon serves the catalogue. The catalogue may then be on any machine.
    pub is_lost: bool,
    /// The machine that served the catalogue last.
    pub home: usize,
    moves: bool,
    /// Whether requests are repeated. A repeated request that begins a save may open a step on
    /// which no client works, for the time of a lease.
    pub echoes: bool,
    /// Whether a node has been asked to leave. It gets nothing new, so that there may be too few
    /// others.
    pub leaves: bool,
    /// Number of cuts and full disks at present.
    wrong: usize,
    /// Number of changes so far.
    pub changes: u64,
    last: Option<Instant>,
}

impl Weather {
    fn change(&mut self) {
        self.changes += 1;
        self.last = Some(Instant::now());
    }

    /// Returns whether the catalogue server is up, all links and disks work, and at most `away`
    /// storage nodes are missing. While no catalogue is served or its server is missing, at most
    /// one storage node may be missing: both codes of a storm tolerate that. If the schedule may
    /// lose the catalogue, its server need not be up.
    pub fn is_fair(&self, away: usize) -> bool {
        let is_lost = self.is_lost || self.away.contains(&self.home);
        let away = if is_lost { away.min(1) } else { away };
        let storage = self.away.iter().filter(|machine| **machine != 0).count();
        let has_host = self.moves || !self.away.contains(&0);
        self.wrong == 0 && has_host && storage <= away
    }

    /// Returns whether no fault is active and there was no change for longer than `CALM`.
    pub fn is_calm(&self) -> bool {
        self.is_fair(0)
            && !self.leaves
            && !self.is_lost
            && self.last.is_none_or(|last| last.elapsed() > CALM)
    }
}

pub type Report = Arc<Mutex<Weather>>;

/// The beginning or the end of a fault.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Begin(Fault),
    End(Fault),
}

/// Applies the faults of a schedule to the cluster, and ends them all at the end of the storm.
pub struct Director {
    pub world: World,
    pub report: Report,
    pub lost: Lost,
    ledger: Shared,
    rotten: usize,
    /// The tasks that take nodes off the list.
    departures: Vec<JoinHandle<bool>>,
    /// By machine: while it is down, the rule for the data that its disk keeps when it comes back.
    down: Vec<Option<Leaves>>,
}

impl Director {
    pub fn new(world: World, schedule: &Schedule, report: Report, ledger: Shared) -> Self {
        let down = vec![None; world.machines.len()];
        let mut weather = report.lock().unwrap();
        (weather.moves, weather.echoes) = (schedule.is_lost, schedule.echo_ms > 0);
        drop(weather);
        let (lost, departures, rotten) = (Lost::default(), Vec::new(), schedule.rotten);
        Self { world, report, lost, departures, ledger, rotten, down }
    }

    /// Begins and ends all faults at their times.
    pub async fn storm(&mut self, wrongs: &[Wrong]) {
        let mut turns: Vec<(u64, Turn)> = Vec::new();
        for wrong in wrongs {
            turns.push((wrong.from_ms, Turn::Begin(wrong.fault)));
            turns.push((wrong.to_ms, Turn::End(wrong.fault)));
        }
        turns.sort_by_key(|(at, _)| *at);
        let began = Instant::now();
        for (at, turn) in turns {
            self.wait_until(began + Duration::from_millis(at)).await;
            match turn {
                Turn::Begin(fault) => self.begin(fault).await,
                Turn::End(fault) => self.end(fault).await,
            }
            // Check before any daemon has repaired anything. A catalogue that may move is checked
            // after the storm.
            if !self.report.lock().unwrap().moves {
                self.world.assert_reported(&mut self.ledger.lock().unwrap());
            }
        }
    }

    async fn wait_until(&mut self, at: Instant) {
        while self.report.lock().unwrap().moves && Instant::now() + LOOK_EVERY < at {
            self.look_for_home();
            tokio::time::sleep(LOOK_EVERY).await;
        }
        tokio::time::sleep_until(at).await;
    }

    pub fn tell(&self, change: impl FnOnce(&mut Weather)) {
        let mut weather = self.report.lock().unwrap();
        change(&mut weather);
        weather.change();
    }

    async fn begin(&mut self, fault: Fault) {
        match fault {
            Fault::Stop { machine, leaves } => self.take_down(machine, leaves).await,
            Fault::Blackout { leaves } => {
                // All are away before the first of them is taken down, which takes a while.
                self.tell(|weather| weather.away.extend(0..self.down.len()));
                (0..self.down.len()).for_each(|machine| self.world.cut_power(machine));
                for machine in 0..self.down.len() {
                    self.take_down(machine, leaves).await;
                }
            }
            Fault::StopAfter { machine, changes, .. } => {
                let power = self.world.machines[machine].power.clone();
                let (network, report) = (self.world.network.clone(), self.report.clone());
                power.clone().cut_after(changes, move || {
                    power.turn(false);
                    network.kill(&address(machine));
                    let mut weather = report.lock().unwrap();
                    weather.away.insert(machine);
                    weather.change();
                });
            }
            Fault::Cut { machines: (a, b) } => {
                self.tell(|weather| weather.wrong += 1);
                self.world.network.partition(&address(a), &address(b));
            }
            Fault::CutOneWay { from, to } => {
                self.tell(|weather| weather.wrong += 1);
                let (from, to) = (address(from), address(to));
                self.world.network.cut_one_way(&from, &to);
                let network = self.world.network.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(IDLE).await;
                    network.break_one_way(&from, &to);
                });
            }
            Fault::CutOff { client, machine } => {
                self.tell(|weather| weather.wrong += 1);
                self.world.network.partition(&client_address(client), &address(machine));
            }
            Fault::Full { machine } => {
                self.tell(|weather| weather.wrong += 1);
                self.world.machines[machine].disk.set_capacity(0);
            }
            Fault::Rot { pick } => self.rot(pick),
            Fault::Jump { machine, by_seconds } => {
                self.world.machines[machine].time.jump(by_seconds);
            }
            Fault::Lose { number, map } => self.lose(number, map).await,
            Fault::Depart { machine, by, leaves } => {
                self.tell(|weather| weather.leaves = true);
                self.take_down(machine, leaves).await;
                let seeds: Vec<usize> = (0..self.down.len()).collect();
                let client = self.world.client_of_all(&seeds);
                self.departures
                    .push(tokio::spawn(async move { take_off(&client, machine, by).await }));
            }
            Fault::Rebuild { on } => self.call_rebuild(on),
        }
    }

    async fn end(&mut self, fault: Fault) {
        match fault {
            Fault::Stop { machine, .. } | Fault::Depart { machine, .. } => {
                self.bring_back(machine).await;
            }
            Fault::Blackout { .. } => {
                for machine in 0..self.down.len() {
                    self.bring_back(machine).await;
                }
            }
            Fault::StopAfter { machine, leaves, .. } => {
                self.world.machines[machine].power.calm();
                if !self.world.machines[machine].power.is_on() && self.down[machine].is_none() {
                    self.take_down(machine, leaves).await;
                    self.bring_back(machine).await;
                }
            }
            Fault::Cut { machines: (a, b) } | Fault::CutOneWay { from: a, to: b } => {
                self.world.network.heal(&address(a), &address(b));
                self.tell(|weather| weather.wrong -= 1);
            }
            Fault::CutOff { client, machine } => {
                self.world.network.heal(&client_address(client), &address(machine));
                self.tell(|weather| weather.wrong -= 1);
            }
            Fault::Full { machine } => {
                self.world.machines[machine].disk.set_capacity(DISK_BYTES);
                // A daemon stops when its database fails.
                if !self.world.machines[machine].power.is_on() && self.down[machine].is_none() {
                    self.take_down(machine, Leaves::Cache).await;
                    self.bring_back(machine).await;
                }
                self.tell(|weather| weather.wrong -= 1);
            }
            Fault::Lose { number, map } => self.find(number, map).await,
            Fault::Jump { machine, by_seconds } => {
                self.world.machines[machine].time.jump(-by_seconds / 2);
            }
            Fault::Rot { .. } | Fault::Rebuild { .. } => {}
        }
    }

    pub async fn take_down(&mut self, machine: usize, leaves: Leaves) {
        self.tell(|weather| weather.away.extend([machine]));
        self.world.cut_power(machine);
        // A power cut after the end of the process also loses the data that the process had not
        // synced.
        let before = self.down[machine].unwrap_or(Leaves::Cache);
        self.down[machine] = Some(if leaves == Leaves::Cache { before } else { leaves });
        self.world.kill(machine).await;
    }

    /// Boots a machine unless it is up. This also ends any other fault that keeps the machine down.
    pub async fn bring_back(&mut self, machine: usize) {
        let Some(leaves) = self.down[machine].take() else { return };
        self.world.lose_unsynced(machine, leaves).await;
        if let Err(error) = self.world.try_boot(machine) {
            let stopped = !self.world.machines[machine].power.is_on();
            assert!(stopped, "node {machine} does not boot: {error}");
            self.down[machine] = Some(Leaves::Synced);
            return;
        }
        let rotten = self.rotten;
        self.tell(|weather| {
            if machine != rotten || !weather.rotted {
                weather.away.remove(&machine);
            }
        });
    }

    /// Flips bits of a block, a piece or a commit mark on the rotten machine. Sectors of a block or
    /// a piece may also become unreadable, and its end may be lost.
    fn rot(&mut self, pick: u64) {
        let machine = self.rotten;
        let rots = [".rep", ".pc", "/commit"];
        let mut files = self.world.files(|path| rots.iter().any(|end| path.ends_with(end)));
        files.retain(|(at, _)| *at == machine);
        let coin = SeededEntropy::new(pick);
        let disk = &self.world.machines[machine].disk;
        let Some((_, path)) = files.get(coin.below(files.len() as u64) as usize) else { return };
        let len_bytes = disk.open(path).and_then(|file| file.len_bytes()).unwrap();
        let is_mark = path.ends_with("/commit");
        for _ in 0..if is_mark { 1 } else { 1 + coin.below(4) } {
            let byte = coin.below(len_bytes);
            match coin.below(5) {
                3 if !is_mark => disk.make_sector_unreadable(path, byte).unwrap(),
                4 if !is_mark => {
                    disk.set_file_len(path, byte).unwrap();
                    break;
                }
                _ => disk.flip_bit(path, byte * 8 + coin.below(8)).unwrap(),
            }
        }
        self.tell(|weather| {
            weather.rotted = true;
            weather.away.insert(machine);
        });
    }

    /// Ends everything that is still wrong, except rot.
    pub async fn clear(&mut self) {
        for machine in 0..self.down.len() {
            self.world.machines[machine].power.calm();
            self.bring_back(machine).await;
        }
        if self.report.lock().unwrap().moves {
            self.restore_catalogue().await;
        }
        for departure in std::mem::take(&mut self.departures) {
            let is_off = departure.await.unwrap();
            DEPARTED.fetch_add(u64::from(is_off), Ordering::Relaxed);
        }
    }
}

pub fn client_address(client: usize) -> String {
    // The world's first client is the one that checked whether the nodes are up.
    format!("client{}:0", client + 1)
}
