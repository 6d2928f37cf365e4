//! Restores while nodes are down, go down, or are suspended with SIGSTOP.

use std::time::{Duration, Instant};

use rapidraid::stage::TracePoint;
use rustix::process::Signal;
use serde_json::Value;

use crate::fleet::{Fleet, Plan};
use crate::machine::bytes;
use crate::watch::Victim;

/// Number of daemons. The code needs all of them.
pub const NODES: usize = 16;
const CODE: &str = "16,11";
const MIB: usize = 1 << 20;

/// When a source is suspended: not at all, before the restore, or during it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Still {
    Nobody,
    Before,
    Amid,
}

/// Starts a fleet, and saves and archives a checkpoint with one shard of slightly more than `mib`
/// MiB. Returns the fleet and the bytes of the shard.
fn archived(mib: usize, set: &[&str]) -> (Fleet, Vec<u8>) {
    let fleet = Fleet::start(&Plan { nodes: NODES, code: CODE, set, small_disks: 0 });
    let data = bytes(mib * MIB + 12_345, mib as u64);
    fleet.write("in/a.bin", &data);
    fleet.ask("save j/1 in --json");
    fleet.until("all is archived", || fleet.ask("archive j/1 --json")["undropped"] == 0);
    (fleet, data)
}

impl Fleet {
    /// Restores step 1 and asserts that every byte is right. Returns the command's report and its
    /// duration.
    fn restored(&self, who: &str, data: &[u8]) -> (Value, Duration) {
        let began = Instant::now();
        let ended = self.run_as(who, &format!("restore j/1 --force --out out-{who}"));
        let took = began.elapsed();
        assert_eq!(ended.code, 0, "{ended:?}\n{}", self.watch.tails());
        let found = std::fs::read(self.path(&format!("out-{who}/a.bin"))).unwrap();
        assert!(found == data, "other bytes came back");
        (ended.json(), took)
    }

    fn stand_still(&self, at: usize, still: bool) {
        let signal = if still { Signal::STOP } else { Signal::CONT };
        assert!(self.watch.signal(&self.members[at].name, signal));
    }
}

/// Kills three nodes before a restore and two during it, the catalogue server among the latter.
/// These are n-k losses, so the restore must be complete. Then rebuilds the catalogue on another
/// node, and asserts that it lists the same steps.
pub fn five_die_around_a_restore(mib: usize) {
    let (fleet, data) = archived(mib, &["code.block=512KiB"]);
    let before = fleet.ask("ls --json")["steps"].clone();
    for at in [1, 6, 11] {
        assert!(fleet.kill(at));
        fleet.bury(at);
    }
    let home = fleet.members[fleet.home].name.clone();
    fleet.watch.set_trap(TracePoint::Deliver, Victim::Named(home));
    let other = std::thread::scope(|scope| {
        let also = scope.spawn(|| {
            fleet.until("the home is killed", || fleet.watch.killed().is_some());
            assert!(fleet.kill(3));
        });
        let (report, took) = fleet.restored("client", &data);
        also.join().unwrap();
        eprintln!("{mib} MiB with three nodes gone and two going: {:.2} s", took.as_secs_f64());
        report
    });
    assert_eq!(other["bytes"], data.len());
    fleet.bury(fleet.home);
    fleet.bury(3);
    let on = &fleet.members[0].address;
    let rebuilt = fleet.ask(&format!("catalogue rebuild --on {on} --json"));
    assert_eq!(rebuilt["steps"], 1, "{rebuilt}");
    assert_eq!(fleet.ask("ls --json")["steps"], before);
    fleet.restored("again", &data);
    for at in [1, 3, 6, 11, fleet.home] {
        fleet.restart(at);
    }
    fleet.until_idle();
    fleet.ask("rm j/1 --json");
    fleet.until_bare();
}

/// Measures restores with all nodes running, with one source suspended before the restore, and with
/// one suspended during it. Returns the three medians in this order, in seconds.
pub fn one_stands_still(mib: usize, rounds: usize) -> [f64; 3] {
    let (fleet, data) = archived(mib, &["code.block=4MiB"]);
    let ways = [Still::Nobody, Still::Before, Still::Amid];
    let mut took: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        for (way, took) in ways.into_iter().zip(&mut took) {
            // A restore reads the chain's first k pieces; this node has one of them.
            let at = 2 + round;
            fleet.until_idle();
            if way == Still::Before {
                fleet.stand_still(at, true);
            }
            let restored = std::thread::scope(|scope| {
                let amid = scope.spawn(|| {
                    if way == Still::Amid {
                        fleet.until("a third is there", || fleet.has_restored(data.len() / 3));
                        fleet.stand_still(at, true);
                    }
                });
                let (_, restored) = fleet.restored("client", &data);
                amid.join().unwrap();
                restored
            });
            if way != Still::Nobody {
                fleet.stand_still(at, false);
            }
            std::fs::remove_dir_all(fleet.path("out-client")).unwrap();
            took.push(restored.as_secs_f64());
            eprintln!("round {round}, {way:?} stands still: {:.2} s", restored.as_secs_f64());
        }
    }
    took.map(|mut took| {
        took.sort_by(f64::total_cmp);
        took[took.len() / 2]
    })
}

impl Fleet {
    /// Returns whether the output folder holds at least this many bytes. The function counts
    /// allocated disk space, because files are not written in order.
    fn has_restored(&self, bytes: usize) -> bool {
        use std::os::unix::fs::MetadataExt;
        let Ok(entries) = std::fs::read_dir(self.path("out-client")) else { return false };
        let blocks = entries.flatten().filter_map(|entry| entry.metadata().ok());
        blocks.map(|found| found.blocks() * 512).sum::<u64>() >= bytes as u64
    }
}

/// Keeps one of sixteen nodes down for a whole run. Saves take the next code, and all other
/// operations succeed as before.
pub fn one_is_away_all_along(steps: u64) {
    let set = ["code.block=256KiB"];
    let fleet =
        Fleet::start(&Plan { nodes: NODES, code: "16,11 14,10", set: &set, small_disks: 0 });
    let data = |step: u64| bytes(3 * MIB + step as usize, step);
    let save = |step: u64| {
        fleet.write("in/a.bin", &data(step));
        let saved = fleet.run(&format!("save j/{step} in --json")).ok().json();
        assert!(saved["n"] == 14 || step == 0, "{saved}");
    };
    let restore = |step: u64| {
        fleet.run(&format!("restore j/{step} --force --out out")).ok();
        assert!(std::fs::read(fleet.path("out/a.bin")).unwrap() == data(step), "step {step}");
    };
    // Step 0 is from before the loss: it has a piece or a block on the node that goes down.
    save(0);
    fleet.run("archive j/0").ok();
    assert!(fleet.kill(4));
    fleet.bury(4);
    fleet.until("it counts as away", || fleet.live() == NODES - 1);
    for step in 1..=steps {
        save(step);
        restore(step);
        let archived = fleet.run(&format!("archive j/{step} --json")).ok().json();
        assert_eq!(archived["undropped"], 0, "{archived}");
        restore(step);
    }
    restore(0);
    fleet.restart(4);
    for step in 0..=steps {
        fleet.ask(&format!("rm j/{step} --json"));
    }
    fleet.until_bare();
}
