//! The lost-sync matrix: the power goes before each write, sync, rename, removal and map batch of each machine, and nothing that was
//! reported is lost.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits in virtual time
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test

mod world;

#[path = "syncs/cell.rs"]
mod cell;
#[path = "syncs/scenario.rs"]
mod scenario;

use cell::{Cell, run};
use world::power::Leaves;
use world::runs::{number, play, play_all};

/// Every so many cells are played in the suite; a prime, so that machines and variants all have their turn.
const STRIDE: u64 = 37;

/// All cells: each change of each machine, what the disk is left with, and who is dark.
fn cells(changes: &[u64]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (machine, &changes) in changes.iter().enumerate() {
        for after in 0..changes {
            for leaves in [Leaves::Synced, Leaves::Torn(after), Leaves::All, Leaves::Cache] {
                for everywhere in [false, true] {
                    let number = cells.len();
                    cells.push(Cell { number, machine, after, leaves, everywhere });
                }
            }
        }
    }
    cells
}

#[test]
fn nothing_is_lost_wherever_the_power_goes() {
    let changes = play(run(None)).unwrap();
    assert_eq!(play(run(None)).unwrap(), changes, "two runs differ");
    let stride = number("RAPIDRAID_MATRIX_STRIDE").unwrap_or(STRIDE).max(1) as usize;
    let cells = cells(&changes).into_iter();
    let cells: Vec<Cell> = match number("RAPIDRAID_MATRIX_CELL") {
        Some(cell) => cells.skip(cell as usize).take(1).collect(),
        None => cells.step_by(stride).collect(),
    };
    eprintln!("{changes:?} changes of the machines, {} cells", cells.len());
    play_all(&cells, |cell| {
        let replay = format!("RAPIDRAID_MATRIX_CELL={} cargo test --test syncs", cell.number);
        play(run(Some(cell))).map(drop).map_err(|why| format!("{why}\n{replay}"))
    });
}
