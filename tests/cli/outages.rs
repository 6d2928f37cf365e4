//! Commands while no catalogue answers, and the record of a save, with which they need none.

use std::process::Command;
use std::sync::Arc;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::machine::{Cluster, Running, bytes, program, run};

/// Starts a cluster with two steps of a job, one of which has a label. The policy of these clusters
/// archives older steps.
fn cluster_with_steps() -> Cluster {
    let cluster = Cluster::start(6, &["code.list=4,2", "timeouts.lease_s=2"]);
    cluster.write("a.bin", &bytes(300_000, 1));
    (1..=2).for_each(|step| drop(cluster.run(&format!("save job/{step} a.bin")).ok()));
    cluster.run("label job/2 good").ok();
    cluster
}

/// Kills the daemon that serves the catalogue.
fn kill_catalogue_server(cluster: &mut Cluster) {
    let gone = cluster.daemons.remove(0);
    gone.signal(Signal::KILL);
    gone.ended();
}

#[test]
fn what_is_not_known_without_a_catalogue_is_not_reported_as_empty() {
    let mut cluster = cluster_with_steps();
    let listed = cluster.run("ls job --label good --json").ok().json();
    assert_eq!(listed["steps"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed["steps"][0]["labels"], json!(["good"]), "{listed}");
    assert!(cluster.run("ls job --label bad").ok().out.contains("no checkpoints"));
    kill_catalogue_server(&mut cluster);

    let listed = cluster.run("ls job --json").ok().json();
    assert_eq!(listed["steps"].as_array().unwrap().len(), 2, "{listed}");
    let unknown = [&listed["steps"][1]["labels"], &listed["open_saves"], &listed["launches"]];
    assert_eq!(unknown, [&Value::Null; 3], "{listed}");
    let text = cluster.run("ls job").ok().out;
    assert!(text.contains("labels, launches and saves that are not committed are not known"));
    let refused = cluster.run("ls job --label good --json");
    refused.fails(1, &["not known which steps have the label good"]);
    assert_eq!(refused.json()["error"]["kind"], "unavailable");

    let status = cluster.run("status").ok().out;
    let first = "nothing can be saved, archived or removed now: no";
    assert!(status.starts_with(first), "{status}");
    assert!(status.contains("\nsafety: not known: no catalogue server surveys"), "{status}");
    let status = cluster.run("status --json").ok().json();
    assert!(status["unchanged"].is_string() && status["repair"].is_null(), "{status}");
}

/// The second checkpoint would fail as the first one did.
#[test]
fn a_repair_of_all_checkpoints_ends_when_the_catalogue_is_away() {
    let mut cluster = cluster_with_steps();
    let repaired = cluster.run("repair --node n2 --dry-run --json").ok();
    assert!(repaired.err.contains("checkpoint "), "{repaired:?}");
    assert_eq!(repaired.json()["not_examined"], 0, "{repaired:?}");
    kill_catalogue_server(&mut cluster);
    let repaired = cluster.run("repair");
    assert_eq!(repaired.code, 1, "{repaired:?}");
    assert!(!repaired.out.contains("job/2"), "{repaired:?}");
}

#[test]
fn all_checkpoints_are_verified_by_one_command() {
    let cluster = cluster_with_steps();
    let verified = cluster.run("verify").ok();
    assert!(verified.err.contains("checkpoint 2 of 2: job/2"), "{verified:?}");
    assert!(verified.out.contains("verified 2 checkpoints: "), "{verified:?}");
    assert!(
        verified.out.ends_with("none is damaged; any 1 more node may be lost\n"),
        "{verified:?}"
    );
    let files = crate::machine::files_below(&cluster.path("cluster/nodes"));
    let replica = files.iter().find(|file| file.ends_with("block-01.rep")).unwrap();
    let replica = cluster.path("cluster/nodes").join(replica);
    let mut data = std::fs::read(&replica).unwrap();
    data[9000] ^= 1;
    std::fs::write(&replica, data).unwrap();
    let found = cluster.run("verify --json");
    assert_eq!(found.code, 1, "{found:?}");
    let found = found.json();
    let counts = [&found["bad"], &found["not_verified"], &found["survives"]];
    assert_eq!(counts, [&json!(1), &json!(0), &json!(0)], "{found}");
    let faults = found["steps"].as_array().unwrap().iter();
    let faults: u64 = faults.map(|step| step["fault_count"].as_u64().unwrap()).sum();
    assert_eq!(faults, 1, "{found}");
}

/// A save whose record cannot be written is committed, and its record can be written later.
#[test]
fn a_record_is_written_whole_or_not_at_all() {
    let mut cluster = Cluster::start(6, &["code.list=4,2"]);
    cluster.write("a.bin", &bytes(300_000, 1));
    // Every write to a file fails in this process.
    let line = format!(
        "ulimit -f 0; trap '' XFSZ; exec {} save job/1 a.bin --record one.rr",
        env!("CARGO_BIN_EXE_rapidraid")
    );
    let mut command = Command::new("bash");
    command.args(["-c", &line]).current_dir(cluster.folder.path());
    command.env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
    let failed = Running::start(command, Arc::new(|_| ())).ended(crate::machine::LIMIT);
    let parts = ["job/1 is committed, but its record is missing", "show job/1 --record FILE"];
    failed.fails(1, &parts);
    assert!(!cluster.path("one.rr").exists());

    let shown = cluster.run("show job/latest --record one.rr --json").ok().json();
    assert_eq!((&shown["step"], &shown["record"]), (&1.into(), &"one.rr".into()), "{shown}");
    cluster.run("show job/1 --record one.rr").fails(1, &["one.rr"]);
    kill_catalogue_server(&mut cluster);
    let restored = cluster.run("restore --record one.rr --out out").ok();
    assert!(restored.out.contains("restored by its record"), "{restored:?}");
    assert!(cluster.read("out/a.bin") == bytes(300_000, 1));
}

#[test]
fn a_filter_of_log_lines_that_does_not_parse_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(folder.path());
    command.args(["code", "list"]).env("RUST_LOG", "rapidraid=loud");
    let ended = run(command).ok();
    assert!(ended.err.contains("RUST_LOG=rapidraid=loud is ignored"), "{ended:?}");
    assert!(ended.err.contains("RUST_LOG=warn,rapidraid=info,"), "{ended:?}");
}
