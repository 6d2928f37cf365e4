//! Sixteen real daemons and the code that needs all of them: restores with nodes down or suspended,
//! a node that is down for a whole run, and many plans at once with the least memory.
//!
//! The tests take minutes on two processors, so they are not part of the suite; `cargo xtask kills`
//! plays them (docs/testing.md).
#![allow(clippy::disallowed_methods)] // processes of the machine, in the machine's time
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test
#![allow(dead_code)] // the matrix of kills uses the rest of the fleet

mod machine;

#[path = "kills/damage.rs"]
mod damage;
#[path = "kills/fleet.rs"]
mod fleet;
#[path = "kills/rest.rs"]
mod rest;
#[path = "kills/restores.rs"]
mod restores;
#[path = "kills/standstill.rs"]
mod standstill;
#[path = "kills/watch.rs"]
mod watch;

/// Number of measurements for each way to suspend a source.
const ROUNDS: usize = 3;
/// Maximum ratio of the time of a restore with a suspended source to the time of one without.
const BAR: f64 = 2.0;

fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

#[test]
fn five_nodes_die_around_a_restore() {
    restores::five_die_around_a_restore(number("RAPIDRAID_KILLS_MIB", 128));
}

#[test]
fn a_source_that_stands_still_costs_at_most_as_much_again() {
    let mib = number("RAPIDRAID_KILLS_MIB", 512);
    let [all, before, amid] = restores::one_stands_still(mib, ROUNDS);
    eprintln!("{mib} MiB: {all:.2} s; stopped before: {before:.2} s; stopped amid: {amid:.2} s");
    assert!(before <= BAR * all && amid <= BAR * all, "more than {BAR} times as long");
}

#[test]
fn one_node_is_away_all_along() {
    restores::one_is_away_all_along(number("RAPIDRAID_KILLS_STEPS", 6) as u64);
}

#[test]
fn sixty_four_stripes_at_once_do_not_stand_still() {
    standstill::all_at_once();
}
