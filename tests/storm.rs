//! Seeded storms: clients save, archive, restore and remove while machines crash, lose power, lose
//! connections, run out of disk space and rot. Every reported outcome holds during the storm, and
//! after it no operation is left half done.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits in virtual time

#[path = "storm/clients.rs"]
mod clients;
#[path = "storm/lost.rs"]
mod lost;
#[path = "storm/schedule.rs"]
mod schedule;
#[path = "storm/weather.rs"]
mod weather;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use clients::Shared;
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::records::{LeaveState, Record, RingChange};
use rapidraid::id::PeerName;
use rapidraid::net::Address;
use rapidraid::store::Kv;
use schedule::{BLOCK, CODES, Schedule};
use weather::{DEPARTED, Director, Report};
use world::runs::{number, play, play_all};
use world::{World, address};

/// Number of seeds in the suite.
const SEEDS: u64 = 30;

/// Seeds beyond [`SEEDS`] whose storms have shown a defect.
///
/// - 592: a rebuild misses a decided save, and its step is saved again.
/// - 351517: a receipt of a failed try of an archiving arrives after that of the next try.
const REGRESSIONS: [u64; 2] = [592, 351517];

/// Runs the storm of a seed. Returns all durable state at its end.
async fn storm(seed: u64) -> BTreeMap<String, Vec<u8>> {
    let schedule = Schedule::of(seed);
    let world = World::with_wrong_clocks(schedule.nodes, &CODES, BLOCK, seed).await;
    if schedule.is_lost {
        world.until_acquainted().await;
    }
    let (ledger, report) = (Shared::default(), Report::default());
    let mut director = Director::new(world, &schedule, report.clone(), ledger.clone());
    let mut work = Vec::new();
    for (index, deeds) in schedule.clients.iter().enumerate() {
        let seeds = match schedule.is_lost {
            true => (0..4).map(|other| address(1 + (index + other) % schedule.nodes)).collect(),
            false => [1 + index, 2, 0].map(address).to_vec(),
        };
        let (client, number) = director.world.connect(seeds);
        assert_eq!(weather::client_address(index), format!("client{number}:0"));
        let deeds = deeds.clone();
        work.push(tokio::spawn(clients::work(client, deeds, ledger.clone(), report.clone())));
    }
    director.world.set_lag(schedule.lag_ms);
    let coin = SeededEntropy::new(seed ^ (1 << 40));
    let (echo, network) = (director.world.echo.clone(), director.world.network.clone());
    let echoes = (schedule.echo_ms > 0).then(|| {
        tokio::spawn(echo.run(network, SeededEntropy::new(coin.below(1 << 60)), schedule.echo_ms))
    });
    director.storm(&schedule.wrongs).await;
    director.clear().await;
    for work in work {
        work.await.unwrap();
    }
    if let Some(echoes) = &echoes {
        echoes.abort();
    }
    let rotted = report.lock().unwrap().rotted;
    director.world.set_lag(0);
    if schedule.is_lost {
        director.assert_one_home().await;
    }
    let mut world = director.world;
    world.until_live(schedule.nodes).await;
    if schedule::nodes_leave(seed) {
        keep_all_nodes(&mut world).await;
    }
    let client = world.client();
    let mut ledger = std::mem::take(&mut *ledger.lock().unwrap());
    world.assert_rest(&client, &mut ledger, rotted).await;
    world.assert_saves(&client, &mut ledger, 9).await;
    world.assert_archivable(&client, &mut ledger, rotted).await;
    if echoes.is_some() {
        world.echo.all(&world.network, &coin).await;
        world.assert_rest(&client, &mut ledger, rotted).await;
    }
    if !rotted {
        let machine = |number| 1 + (seed as usize + number) % schedule.nodes;
        world.assert_repairable(&client, &[machine(0), machine(1)]).await;
        world.assert_rest(&client, &mut ledger, rotted).await;
    }
    world.snapshot()
}

/// Restarts the nodes that are to leave, so that they stay.
async fn keep_all_nodes(world: &mut World) {
    // A client may be answered from what nodes have heard, which is less.
    let stored = world.map().scan(b"k/r/", None, 1000).unwrap();
    let changes = stored.iter().map(|(_, value)| RingChange::parse(&value[8..]).unwrap());
    let leaving = changes.filter(|change| change.state == LeaveState::Leaving);
    let number = |name: PeerName| name.as_str().trim_start_matches("node").parse().unwrap();
    let machines: Vec<usize> = leaving.map(|change| number(change.node)).collect();
    for machine in machines {
        // A server that starts again counts every lease as alive, its own one, too.
        if world.serving().contains(&machine) {
            let other = Address { host_port: address(0), node: None };
            world.client().move_catalogue(&other).await.unwrap();
        }
        world.kill(machine).await;
        tokio::time::sleep(2 * world.lease).await;
        world.boot(machine);
        world.until_live(world.machines.len() - 1).await;
    }
}

fn run(seed: u64) -> Result<(), String> {
    play(storm(seed)).map(drop).map_err(|why| {
        let replay = format!("RAPIDRAID_STORM_SEED={seed} cargo test --workspace --test storm");
        format!("{why}\n{}{replay}", Schedule::of(seed))
    })
}

#[test]
fn what_was_reported_holds_in_every_storm() {
    let seeds: Vec<u64> = match number("RAPIDRAID_STORM_SEED") {
        Some(seed) => vec![seed],
        None => {
            let from = number("RAPIDRAID_STORM_FROM").unwrap_or(0);
            let drawn = from..from + number("RAPIDRAID_STORM_SEEDS").unwrap_or(SEEDS);
            drawn.chain(REGRESSIONS).collect()
        }
    };
    play_all(&seeds, run);
    let departed = DEPARTED.load(Ordering::Relaxed);
    assert!(departed > 0 || seeds.len() < SEEDS as usize, "no node was taken off the list");
    println!("{departed} nodes were taken off the list");
}

#[test]
fn one_seed_is_one_storm() {
    for seed in 0..6 {
        let first = play(storm(seed)).unwrap();
        assert!(first == play(storm(seed)).unwrap(), "two storms of seed {seed} differ");
    }
}
