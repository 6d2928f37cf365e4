//! The lost-sync matrix: the power is cut, or the disk is full, before each write, sync, rename,
//! removal and database batch of each machine. No reported outcome may be lost.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits in virtual time

#[path = "syncs/cell.rs"]
mod cell;
#[path = "syncs/launches.rs"]
mod launches;
#[path = "syncs/scenario.rs"]
mod scenario;

use cell::{Cell, Fault, run};
use scenario::Scenario;
use world::power::Leaves;
use world::runs::{number, play, play_all};

/// The suite plays every cell whose number is a multiple of this. It is prime, so that all machines
/// and variants have their turn.
const STRIDE: u64 = 61;

/// Returns all cells: each change of each machine in each scenario, with each fault, on that
/// machine alone and on all machines.
fn cells(changes: &[(Scenario, Vec<u64>)]) -> Vec<Cell> {
    let mut cells = Vec::new();
    let changes = changes.iter().flat_map(|(scenario, changes)| {
        changes.iter().enumerate().map(|(machine, &changes)| (*scenario, machine, changes))
    });
    for (scenario, machine, changes) in changes {
        for after in 0..changes {
            let dark = [Leaves::Synced, Leaves::Torn(after), Leaves::All, Leaves::Cache];
            for fault in dark.map(Fault::Dark).into_iter().chain([Fault::Full]) {
                for everywhere in [false, true] {
                    let number = cells.len();
                    cells.push(Cell { number, scenario, machine, after, fault, everywhere });
                }
            }
        }
    }
    cells
}

#[test]
fn nothing_is_lost_wherever_a_fault_comes() {
    let changes = scenario::ALL.map(|scenario| {
        let changes = play(run(scenario, None)).unwrap();
        assert_eq!(play(run(scenario, None)).unwrap(), changes, "two runs differ");
        (scenario, changes)
    });
    let stride = number("RAPIDRAID_MATRIX_STRIDE").unwrap_or(STRIDE).max(1) as usize;
    let cells = cells(&changes).into_iter();
    let cells: Vec<Cell> = match number("RAPIDRAID_MATRIX_CELL") {
        Some(cell) => cells.skip(cell as usize).take(1).collect(),
        None => cells.step_by(stride).collect(),
    };
    eprintln!("{changes:?} changes of the machines, {} cells", cells.len());
    play_all(&cells, |cell| {
        let replay =
            format!("RAPIDRAID_MATRIX_CELL={} cargo test --workspace --test syncs", cell.number);
        play(run(cell.scenario, Some(cell))).map(drop).map_err(|why| format!("{why}\n{replay}"))
    });
}
