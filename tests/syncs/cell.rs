//! A cell of the matrix: the fault begins before one change of one machine and ends later, and then
//! the cluster comes to rest.

use std::sync::Arc;
use std::time::Duration;

use rapidraid::client::Client;
use rapidraid::store::Disk;
use tokio::sync::Notify;

use super::launches::Registry;
use super::scenario::{BLOCK, Scenario, Shared};
use world::power::Leaves;
use world::{DISK_BYTES, World, address, restore};

/// Number of storage nodes: one more than the larger code needs.
pub const NODES: usize = 7;
const CODES: [(u8, u8); 2] = [(6, 4), (4, 2)];
/// Time within which reported data must be readable: after the beginning of a fault that must be
/// survived, and after the end of any fault.
const SOON: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The power is cut.
    Dark(Leaves),
    /// The disk has no room for another byte until a file is removed.
    Full,
}

#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// The cell's index in the matrix. `RAPIDRAID_MATRIX_CELL` plays this cell alone.
    pub number: usize,
    pub scenario: Scenario,
    pub machine: usize,
    /// Number of changes of the machine before the fault, from the beginning of the scenario.
    pub after: u64,
    pub fault: Fault,
    /// Whether all machines have the fault at that moment.
    pub everywhere: bool,
}

impl Cell {
    /// Returns how long the fault lasts: it ends before any lease does, or long after.
    fn lasts(&self) -> Duration {
        Duration::from_secs(if self.after.is_multiple_of(2) { 3 } else { 40 })
    }

    fn victims(&self, world: &World) -> Vec<usize> {
        if self.everywhere { world.nodes.keys().copied().collect() } else { vec![self.machine] }
    }

    /// Returns whether everything must be readable during the fault, because at most one machine
    /// lacks anything.
    fn is_survived(&self) -> bool {
        !self.everywhere && self.scenario != Scenario::Mend
    }

    /// Returns whether every save and removal must succeed during the fault. This holds if a single
    /// machine has no room, and it is neither the catalogue server nor the node that the client
    /// asks, whose daemon may stop.
    fn is_fair(&self) -> bool {
        self.is_survived() && self.fault == Fault::Full && !matches!(self.machine, 0 | 2)
    }

    /// Arranges for the fault to begin in the midst of a change of the cell's machine. The fault
    /// notifies `begun`.
    fn plan(self, world: &World, begun: Arc<Notify>) {
        let network = world.network.clone();
        let victims = self.victims(world).into_iter();
        let victims: Vec<_> =
            victims.map(|victim| (world.machines[victim].clone(), address(victim))).collect();
        world.machines[self.machine].power.cut_after(self.after, move || {
            for (machine, address) in victims {
                match self.fault {
                    Fault::Dark(_) => {
                        machine.power.turn(false);
                        network.kill(&address);
                    }
                    Fault::Full => {
                        let space = machine.disk.space().unwrap();
                        machine.disk.set_capacity(space.total_bytes - space.free_bytes);
                    }
                }
            }
            begun.notify_one();
        });
    }

    /// Ends the fault.
    async fn end(self, world: &mut World) {
        for victim in self.victims(world) {
            match self.fault {
                Fault::Dark(leaves) => {
                    world.lose_unsynced(victim, leaves).await;
                    world.boot(victim);
                }
                Fault::Full => {
                    world.machines[victim].disk.set_capacity(DISK_BYTES);
                    // A daemon stops when its database fails.
                    if !world.machines[victim].power.is_on() {
                        world.kill(victim).await;
                        world.boot(victim);
                    }
                }
            }
        }
    }
}

/// Plays the scenario, with the fault of `cell` if there is one. Returns the number of changes of
/// each machine during the scenario.
pub async fn run(scenario: Scenario, cell: Option<Cell>) -> Vec<u64> {
    let mut world = World::with_wrong_clocks(NODES, &CODES, BLOCK, 0).await;
    let changes =
        |world: &World| -> Vec<u64> { world.machines.iter().map(|m| m.power.changes()).collect() };
    let (ledger, registry) = (Shared::default(), Registry::default());
    let client = world.connect(scenario.seeds()).0;
    let reader = world.connect(scenario.seeds()).0;
    scenario.prepare(&mut world, &client, &ledger).await;
    let before = changes(&world);
    let begun = Arc::new(Notify::new());
    if let Some(cell) = cell {
        cell.plan(&world, begun.clone());
    }
    let fair = cell.is_none_or(|cell| cell.is_fair());
    let playing = scenario.play(client.clone(), ledger.clone(), registry.clone(), fair);
    let play = tokio::spawn(playing);
    if let Some(cell) = cell {
        begun.notified().await;
        assert_whole(&world, &ledger);
        if cell.is_survived() {
            assert_readable(&reader, &ledger).await;
        }
        tokio::time::sleep(cell.lasts()).await;
        cell.end(&mut world).await;
        // Check before any daemon has repaired anything.
        assert_whole(&world, &ledger);
        assert_readable(&reader, &ledger).await;
        registry.assert_kept(&reader).await;
    }
    play.await.unwrap();
    let after = changes(&world);
    scenario.mend(&mut world, &client).await;
    world.until_live(NODES).await;
    scenario.check(&world, &client, &ledger).await;
    let mut ledger = std::mem::take(&mut *ledger.lock().unwrap());
    world.assert_rest(&client, &mut ledger, false).await;
    registry.assert_kept(&client).await;
    world.assert_saves(&client, &mut ledger, 9).await;
    world.assert_archivable(&client, &mut ledger, false).await;
    before.iter().zip(&after).map(|(before, after)| after - before).collect()
}

/// Asserts the invariant at this moment. Without a catalogue nothing is asserted; later calls do
/// that when there is one.
fn assert_whole(world: &World, ledger: &Shared) {
    if world.machines[0].catalogue.get().is_some() || world.serving().len() == 1 {
        world.assert_reported(&mut ledger.lock().unwrap());
    }
}

/// Asserts that each step with a single possible outcome is readable within [`SOON`], unless
/// another outcome becomes possible meanwhile.
async fn assert_readable(reader: &Client, ledger: &Shared) {
    let steps = ledger.lock().unwrap().steps();
    for step in steps {
        let look = || {
            let mut ledger = ledger.lock().unwrap();
            (ledger.certain(step), ledger.versions(step))
        };
        let before = look();
        let Some(version) = before.0 else { continue };
        let began = tokio::time::Instant::now();
        loop {
            let ended = restore(reader, step).await;
            if look() != before {
                break;
            }
            match ended {
                Ok((out, _)) => {
                    let found = ledger.lock().unwrap().version_of(step, &out);
                    assert_eq!(found, Some(version), "step {step}");
                    break;
                }
                Err(error) => assert!(began.elapsed() < SOON, "step {step}: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
