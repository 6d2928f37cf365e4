//! One cell of the matrix: the power goes before one change of one machine, comes back, and the cluster comes to rest.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::scenario::{self, BLOCK, Shared};
use crate::world::power::Leaves;
use crate::world::{World, address};

/// Storage nodes: one more than the larger code needs.
pub const NODES: usize = 7;
const CODES: [(u8, u8); 2] = [(6, 4), (4, 2)];

#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// Its place in the matrix: `RAPIDRAID_MATRIX_CELL` plays it alone.
    pub number: usize,
    pub machine: usize,
    /// Changes of that machine before the cut, from the beginning of the scenario.
    pub after: u64,
    pub leaves: Leaves,
    /// All machines lose power in that moment.
    pub everywhere: bool,
}

impl Cell {
    /// Back before anybody's lease is over, or long after.
    fn away(&self) -> Duration {
        Duration::from_secs(if self.after.is_multiple_of(2) { 3 } else { 40 })
    }

    fn victims(&self) -> Vec<usize> {
        if self.everywhere { (0..=NODES).collect() } else { vec![self.machine] }
    }
}

/// Plays the scenario, with the power cut as `cell` says. Gives the changes of each machine during the scenario.
pub async fn run(cell: Option<Cell>) -> Vec<u64> {
    let mut world = World::simulated(NODES, &CODES, BLOCK, 0).await;
    let changes =
        |world: &World| -> Vec<u64> { world.machines.iter().map(|m| m.power.changes()).collect() };
    let before = changes(&world);
    let dark = Arc::new(Notify::new());
    if let Some(cell) = cell {
        plan(&world, cell, dark.clone());
    }
    let ledger = Shared::default();
    let client = world.connect([2, 3, 0].map(address).to_vec()).0;
    let play = tokio::spawn(scenario::play(client.clone(), ledger.clone()));
    if let Some(cell) = cell {
        dark.notified().await;
        tokio::time::sleep(cell.away()).await;
        for victim in cell.victims() {
            world.lose_unsynced(victim, cell.leaves).await;
            world.boot(victim);
        }
    }
    play.await.unwrap();
    let after = changes(&world);
    if cell.is_some() {
        world.until_live(NODES).await;
    }
    let mut ledger = std::mem::take(&mut *ledger.lock().unwrap());
    world.assert_rest(&client, &mut ledger, false).await;
    world.assert_saves(&client, &mut ledger, 9).await;
    world.assert_archivable(&client, &mut ledger, false).await;
    before.iter().zip(&after).map(|(before, after)| after - before).collect()
}

fn plan(world: &World, cell: Cell, dark: Arc<Notify>) {
    let network = world.network.clone();
    let victims: Vec<_> = cell
        .victims()
        .into_iter()
        .map(|victim| (world.machines[victim].power.clone(), address(victim)))
        .collect();
    world.machines[cell.machine].power.cut_after(cell.after, move || {
        for (power, address) in victims {
            power.turn(false);
            network.kill(&address);
        }
        dark.notify_one();
    });
}
