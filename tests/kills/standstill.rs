//! Runs many plans at once, in all directions over the same nodes and with the least memory, while
//! saves and restores run. No operations may wait for each other in a cycle.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde_json::Value;

use crate::fleet::{Fleet, Plan};
use crate::machine::bytes;
use crate::restores::NODES;

/// Number of shards in each of the two checkpoints, with one stripe each. Their rings begin on
/// every node.
const SHARDS: u64 = 32;
/// Size of a stripe of (16,11) with blocks of 1 MiB, in bytes.
const STRIPE_BYTES: usize = 11 << 20;
/// The least memory with which a daemon runs, in bytes.
const MEMORY_BYTES: u64 = 64 << 20;

/// Archives 64 stripes at once. Panics when a plan stalls or a node exceeds its memory budget.
pub fn all_at_once() {
    let set = ["memory=64MiB", "code.block=1MiB"];
    let fleet = Fleet::start(&Plan { nodes: NODES, code: "16,11", set: &set, small_disks: 0 });
    let fleet = &fleet;
    for (job, seed) in [("a", 1), ("b", 1000)] {
        for shard in 0..SHARDS {
            let len = STRIPE_BYTES - shard as usize;
            fleet.write(&format!("{job}/{shard:02}.bin"), &bytes(len, seed + shard));
        }
        fleet.ask(&format!("save {job}/1 {job} --json"));
    }
    let (over, saves, restores) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fleet.write("c/c.bin", &bytes(STRIPE_BYTES, 7));
            while !over.load(Ordering::Relaxed) {
                fleet.run("save c/1 c --replace").ok();
                saves.fetch_add(1, Ordering::Relaxed);
            }
        });
        scope.spawn(|| {
            for job in ["a", "b"].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let out = format!("out-{job}");
                fleet.run(&format!("restore {job}/1 --shard 05.bin --force --out {out}")).ok();
                let same = |name: &str| std::fs::read(fleet.path(name)).unwrap();
                assert!(same(&format!("{out}/05.bin")) == same(&format!("{job}/05.bin")));
                restores.fetch_add(1, Ordering::Relaxed);
            }
        });
        let archive = |job: &str| {
            let archived = fleet.run(&format!("archive {job}/1 --parallel {SHARDS} --json"));
            let report = archived.ok().json();
            assert_eq!((&report["stripes"], &report["undropped"]), (&SHARDS.into(), &0.into()));
        };
        let both = [scope.spawn(move || archive("a")), scope.spawn(move || archive("b"))];
        let done: Vec<_> = both.into_iter().map(|archiving| archiving.join()).collect();
        over.store(true, Ordering::Relaxed);
        done.into_iter().for_each(|done| done.unwrap());
    });
    let took = began.elapsed().as_secs_f64();
    let (saves, restores) = (saves.into_inner(), restores.into_inner());
    eprintln!(
        "{} stripes in {took:.1} s, beside {saves} saves and {restores} restores",
        2 * SHARDS
    );
    fleet.until_idle();
    let status = fleet.ask("status --json");
    let number = |of: &Value| of.as_u64().unwrap();
    let mut most = 0;
    for node in status["nodes"].as_array().unwrap() {
        most = most.max(number(&node["peak_memory_bytes"]));
        let shares = node["budgets"].as_array().unwrap();
        assert!(shares.iter().all(|of| number(&of["peak_bytes"]) <= number(&of["total_bytes"])));
        let peaks: u64 = shares.iter().map(|of| number(&of["peak_bytes"])).sum();
        assert!(peaks <= MEMORY_BYTES, "{node}");
        let archive = &shares[0];
        eprintln!(
            "{}: archive share {} of {} KiB at most, process {} KiB at most",
            node["name"],
            number(&archive["peak_bytes"]) >> 10,
            number(&archive["total_bytes"]) >> 10,
            number(&node["peak_memory_bytes"]) >> 10,
        );
    }
    eprintln!("the largest process had {} MiB", most >> 20);
    for job in ["a", "b"] {
        fleet.ask(&format!("verify {job}/1 --json"));
    }
    for step in ["a/1", "b/1", "c/1"] {
        fleet.ask(&format!("rm {step} --json"));
    }
    fleet.until_bare();
}
