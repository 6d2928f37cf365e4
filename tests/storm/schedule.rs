//! The schedule of a storm: the clients' operations, and the faults with their times. All of it is
//! drawn from the seed before the storm begins.

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::wire::calls::{PlanChoice, RepairPlan};

use super::lost::{self, Kept};
use world::power::Leaves;

/// Codes of a storm, in order of preference. The larger one needs six storage nodes.
pub const CODES: [(u8, u8); 2] = [(6, 4), (4, 2)];
pub const BLOCK: u64 = 64 << 10;
/// Number of steps that the clients work on.
pub const STEPS: u64 = 4;
/// Time within which faults begin, in virtual milliseconds.
const STORM_MS: u64 = 90_000;
/// Maximum duration of a fault, in virtual milliseconds.
const MAX_WRONG_MS: u64 = 45_000;
/// Units of date jumps, in seconds.
const HOUR: i64 = 3600;
const YEAR: i64 = 365 * 24 * HOUR;

/// An operation of a client.
#[derive(Debug, Clone, Copy)]
pub enum Deed {
    /// A save. If `patience_ms` is not 0, the client abandons it after that time, as if the client
    /// died.
    Save {
        step: u64,
        replace: bool,
        shape: u64,
        patience_ms: u64,
    },
    Archive {
        step: u64,
        plan: PlanChoice,
    },
    Repair {
        step: u64,
        plan: RepairPlan,
        /// Whether the pieces of nodes that do not answer are made on others.
        gives_up: bool,
    },
    Remove {
        step: u64,
    },
    Restore {
        step: u64,
    },
}

/// A fault, which lasts until the director ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A machine loses power, or its process is killed.
    Stop { machine: usize, leaves: Leaves },
    /// All machines lose power, or their processes are killed.
    Blackout { leaves: Leaves },
    /// A machine stops in the middle of its work: after `changes` changes, before the next one.
    StopAfter { machine: usize, changes: u64, leaves: Leaves },
    /// Two nodes cannot reach each other.
    Cut { machines: (usize, usize) },
    /// On existing connections nothing that `from` sends reaches `to`, while the other direction
    /// works.
    CutOneWay { from: usize, to: usize },
    /// A client and a node cannot reach each other.
    CutOff { client: usize, machine: usize },
    /// A disk has no free space.
    Full { machine: usize },
    /// A machine's date jumps. At the end of the fault it jumps half of the way back.
    Jump { machine: usize, by_seconds: i64 },
    /// Data of the rotten machine is corrupted: a block, a piece or a commit mark. The director
    /// never repairs it.
    Rot { pick: u64 },
    /// The catalogue server goes down. `map` says which catalogue database it has when it comes
    /// back.
    Lose { number: u64, map: Kept },
    /// A machine stops, and a client takes its node off the list, after a repair that gives it up.
    /// First the node may get a successor. At the end of the fault it comes back.
    Depart { machine: usize, by: Option<usize>, leaves: Leaves },
    /// A client requests a rebuild of the catalogue.
    Rebuild { on: usize },
}

/// A fault with its beginning and its end, in virtual milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct Wrong {
    pub from_ms: u64,
    pub to_ms: u64,
    pub fault: Fault,
}

pub struct Schedule {
    pub nodes: usize,
    /// The machine whose disk rots, if any does. With a single one, no block and no stripe is ever
    /// lost.
    pub rotten: usize,
    /// Maximum latency of a message, in virtual milliseconds.
    pub lag_ms: u64,
    /// Maximum pause between two repeated requests, in virtual milliseconds; 0 if none is repeated.
    pub echo_ms: u64,
    /// By client: the pause before each operation in virtual milliseconds, and the operation.
    pub clients: Vec<Vec<(u64, Deed)>>,
    pub wrongs: Vec<Wrong>,
    /// Whether the schedule may lose the catalogue.
    pub is_lost: bool,
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { nodes, rotten, lag_ms, echo_ms, .. } = self;
        writeln!(f, "{nodes} storage nodes, node {rotten} may rot, lag of up to {lag_ms} ms")?;
        writeln!(f, "requests come again after pauses of up to {echo_ms} ms (0: never)")?;
        for (client, deeds) in self.clients.iter().enumerate() {
            let mut at_ms = 0;
            for (wait_ms, deed) in deeds {
                at_ms += wait_ms;
                writeln!(f, "  client {client}, not before {at_ms} ms: {deed:?}")?;
            }
        }
        for Wrong { from_ms, to_ms, fault } in &self.wrongs {
            writeln!(f, "  {from_ms} to {to_ms} ms: {fault:?}")?;
        }
        Ok(())
    }
}

/// Returns whether nodes leave in the storm of a seed: in every third one.
pub fn nodes_leave(seed: u64) -> bool {
    seed.is_multiple_of(3)
}

/// Returns the departures of a storm in which nodes leave.
fn departures(seed: u64, nodes: u64) -> Vec<Wrong> {
    let coin = Draw(SeededEntropy::new(seed ^ (1 << 41)));
    let departure = |_| {
        let machine = 1 + coin.below(nodes) as usize;
        let by = (coin.below(3) == 0).then(|| 1 + coin.below(nodes) as usize);
        let (from_ms, leaves) = (coin.below(STORM_MS), coin.leaves());
        let to_ms = from_ms + 20_000 + coin.below(2 * MAX_WRONG_MS);
        Wrong { from_ms, to_ms, fault: Fault::Depart { machine, by, leaves } }
    };
    (0..1 + coin.below(3)).map(departure).collect()
}

struct Draw(SeededEntropy);

impl Draw {
    fn below(&self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn of<T: Copy>(&self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    fn leaves(&self) -> Leaves {
        let torn = Leaves::Torn(self.below(1 << 32));
        self.of(&[Leaves::Synced, torn, Leaves::All, Leaves::Cache])
    }

    fn deed(&self, client: u64, clients: u64) -> Deed {
        // All saves and removals of a step are from the same client, so they come one after the
        // other.
        let own = (0..STEPS).filter(|step| step % clients == client).collect::<Vec<_>>();
        let (step, any) = (self.of(&own) + 1, self.below(STEPS) + 1);
        match self.below(10) {
            0..4 => Deed::Save {
                step,
                replace: self.below(2) == 0,
                shape: self.below(1 << 32),
                patience_ms: if self.below(8) == 0 { 1 + self.below(2000) } else { 0 },
            },
            4..6 => Deed::Archive {
                step: any,
                plan: self.of(&[PlanChoice::Chain, PlanChoice::Chain, PlanChoice::BestStar]),
            },
            6 => Deed::Remove { step },
            7 => Deed::Repair {
                step: any,
                plan: self.of(&[RepairPlan::Chain, RepairPlan::Star]),
                gives_up: self.below(2) == 0,
            },
            _ => Deed::Restore { step: any },
        }
    }

    fn fault(&self, nodes: u64, clients: u64) -> Fault {
        let machine = self.below(nodes + 1) as usize;
        let other = self.below(nodes + 1) as usize;
        match self.below(19) {
            0..3 => Fault::Stop { machine, leaves: self.leaves() },
            3..5 => Fault::Blackout { leaves: self.leaves() },
            5..9 => {
                let changes = self.below(120);
                Fault::StopAfter { machine, changes, leaves: self.leaves() }
            }
            9..11 => Fault::Cut { machines: (machine, other) },
            11 => Fault::CutOff { client: self.below(clients) as usize, machine },
            12 => Fault::Full { machine },
            13..15 => Fault::CutOneWay { from: machine, to: other },
            15..18 => {
                let by_seconds =
                    self.of(&[HOUR, 24 * HOUR, 2 * YEAR, -HOUR, -24 * HOUR, -2 * YEAR]);
                Fault::Jump { machine, by_seconds }
            }
            _ => Fault::Rot { pick: self.below(1 << 32) },
        }
    }
}

impl Schedule {
    pub fn of(seed: u64) -> Self {
        let draw = Draw(SeededEntropy::new(seed));
        let nodes = 4 + draw.below(4);
        let clients = 1 + draw.below(3);
        let deeds = |client| {
            let count = 4 + draw.below(12 / clients);
            (0..count).map(|_| (draw.below(9000), draw.deed(client, clients))).collect()
        };
        let wrongs = (0..draw.below(8)).map(|_| {
            let from_ms = draw.below(STORM_MS);
            let to_ms = from_ms + draw.below(MAX_WRONG_MS);
            Wrong { from_ms, to_ms, fault: draw.fault(nodes, clients) }
        });
        let mut wrongs: Vec<Wrong> = wrongs.collect();
        // The next process sees the data that a dead one left in the page cache. Soon after, cut
        // the power as well, so that unsynced data is lost.
        for at in 0..wrongs.len() {
            if let Fault::StopAfter { machine, leaves: Leaves::Cache, .. } = wrongs[at].fault {
                let from_ms = wrongs[at].to_ms + draw.below(9000);
                let fault = Fault::Stop { machine, leaves: Leaves::Synced };
                wrongs.push(Wrong { from_ms, to_ms: from_ms + draw.below(9000), fault });
            }
        }
        let clients = (0..clients).map(deeds).collect();
        if nodes_leave(seed) {
            wrongs.extend(departures(seed, nodes));
        }
        let rotten = 1 + draw.below(nodes) as usize;
        let lag_ms = draw.of(&[0, 0, 3, 30, 150]);
        let echo_ms = draw.of(&[0, 0, 200, 3000]);
        let is_lost = lost::is_lost(seed);
        wrongs.extend(lost::draw(seed, nodes));
        Self { is_lost, nodes: nodes as usize, rotten, lag_ms, echo_ms, clients, wrongs }
    }
}
