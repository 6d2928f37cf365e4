//! The binary as a person or script meets it: real daemons on this machine, real files, exit codes,
//! JSON, and error messages.
#![allow(clippy::disallowed_methods)] // makes and breaks files of the machine
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test

#[path = "cli/damage.rs"]
mod damage;
#[path = "cli/full.rs"]
mod full;
#[path = "cli/interrupts.rs"]
mod interrupts;
mod machine;
#[path = "cli/members.rs"]
mod members;
#[path = "cli/outages.rs"]
mod outages;
#[path = "cli/upgrade.rs"]
mod upgrade;

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use rapidraid::format::envelope::{RecordKind, seal_record};

use machine::{Cluster, Daemon, bytes, program, run, tree};
use rustix::process::Signal;
use serde_json::Value;

/// Writes a checkpoint with every awkward file length: empty, one byte, around a grain, and around
/// a stripe of (6,4) with blocks of 64 KiB.
fn write_checkpoint(cluster: &Cluster) {
    let lengths = [0, 1, 127, 65_535, 65_536, 65_537, 262_144, 262_145, 1_000_003];
    for (at, len) in lengths.into_iter().enumerate() {
        cluster.write(&format!("in/rank{}/part-{len}.bin", at % 2), &bytes(len, at as u64));
    }
}

#[test]
fn a_checkpoint_lives_its_life() {
    let mut cluster = Cluster::start(6, &["code.list=6,4"]);
    write_checkpoint(&cluster);
    let all = tree(&cluster.path("in"));
    let total: usize = all.iter().map(|(_, bytes)| bytes.len()).sum();

    let saved = cluster.run("save gpt/7 in --json").ok().json();
    assert_eq!((&saved["shards"], &saved["bytes"]), (&9.into(), &total.into()), "{saved}");
    assert_eq!((&saved["n"], &saved["k"]), (&6.into(), &4.into()), "{saved}");
    let listed = cluster.run("ls gpt --json").ok().json();
    assert_eq!(
        (&listed["steps"][0]["job"], &listed["steps"][0]["step"]),
        (&"gpt".into(), &7.into())
    );
    assert_eq!(cluster.run("ls other --json").ok().json()["steps"], serde_json::json!([]));
    assert!(cluster.run("ls").ok().out.contains("gpt/7"));
    let shown = cluster.run("show gpt/latest --json").ok().json();
    let names: Vec<&str> =
        shown["shards"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>());
    let verified = cluster.run("verify gpt/7 --quick --json").ok().json();
    assert_eq!((&verified["bytes"], &verified["decoded_stripes"]), (&total.into(), &0.into()));
    let verified = cluster.run("verify gpt/7 --json").ok().json();
    assert_eq!((&verified["bytes"], &verified["survives"]), (&(2 * total).into(), &1.into()));
    cluster.run("restore gpt/latest --out from-replicas").ok();
    assert_eq!(tree(&cluster.path("from-replicas")), all);

    let archived = cluster.run("archive gpt/7 --json --trace hops.json").ok().json();
    assert_eq!(archived["undropped"], 0, "{archived}");
    let reports = archived["reports"].as_array().unwrap();
    assert_eq!(archived["stripes"], reports.len(), "{archived}");
    for report in reports {
        let traffic = |side: &str| -> u64 {
            report["hops"].as_array().unwrap().iter().map(|hop| hop[side].as_u64().unwrap()).sum()
        };
        assert_eq!(traffic("in_bytes"), 5 * report["block_bytes"].as_u64().unwrap(), "{report}");
        assert_eq!(traffic("in_bytes"), traffic("out_bytes"), "{report}");
    }
    let trace: serde_json::Value = serde_json::from_slice(&cluster.read("hops.json")).unwrap();
    let of = |cat: &'static str| {
        trace["traceEvents"].as_array().unwrap().iter().filter(move |event| event["cat"] == cat)
    };
    assert_eq!(of("hop").count(), 6 * reports.len());
    // `rapidraid-cluster` draws these fields.
    for part in
        ["waited_upstream_us", "queued_us", "computed_us", "disk_us", "waited_downstream_us"]
    {
        assert!(of("hop").all(|hop| hop["args"][part].is_u64()), "{part}");
    }
    assert!(of("chunk").count() >= 6 * reports.len());
    assert!(cluster.run("archive gpt/7").ok().out.contains("nothing to do"));
    let rule = "policy: all but the newest 2 steps are archived, all are kept";
    let shown = cluster.run("status").ok().out;
    assert!(shown.contains(rule), "{shown}");
    let status = cluster.run("status --json").ok().json();
    assert_eq!(status["policy"]["rules"][0]["archive_all_but"], 2);
    let sum = |field: &str| -> u64 {
        status["nodes"].as_array().unwrap().iter().map(|node| node[field].as_u64().unwrap()).sum()
    };
    assert_eq!((sum("replicas"), sum("pieces")), (0, 6 * reports.len() as u64), "{status}");

    // (6,4) survives the loss of two nodes. The first node stays: it serves the catalogue.
    cluster.daemons.truncate(4);
    let restored = cluster.run("restore gpt/7 --out from-pieces --json").ok().json();
    assert_eq!((&restored["bytes"], &restored["replica_stripes"]), (&total.into(), &0.into()));
    assert_eq!(tree(&cluster.path("from-pieces")), all);
    let range = "restore gpt/7 --out part --shard rank0/part-1000003.bin --range 60KiB..700001";
    cluster.run(range).ok();
    let whole = cluster.read("in/rank0/part-1000003.bin");
    assert!(cluster.read("part/rank0/part-1000003.bin") == whole[60 * 1024..700_001]);

    let removed = cluster.run("rm gpt/7 --json");
    assert!(removed.code == 0 || removed.err.contains("not visible any more"), "{removed:?}");
    cluster.run("show gpt/7").fails(1, &["gpt/7"]);
    cluster.run("restore gpt/latest --out gone").fails(1, &["gpt"]);
}

#[test]
fn every_plan_archives_and_too_much_lost_is_refused() {
    let mut cluster = Cluster::start(4, &["code.list=4,2"]);
    let data = bytes(300_000, 1);
    cluster.write("a.bin", &data);
    // More shards than the number of files that the shell lets a process open: a save may raise the
    // number, a restore may not and has no more than a few open.
    for number in 0..200 {
        cluster.write(&format!("many/{number:03}"), &data[..number]);
    }
    for (limit, line) in [("-Sn", "save many/1 many"), ("-n", "restore many/1 --out again")] {
        let mut command = std::process::Command::new("sh");
        let program = env!("CARGO_BIN_EXE_rapidraid");
        let line = format!("ulimit {limit} 100; exec {program} {line}");
        command.args(["-c", &line]).current_dir(cluster.folder.path());
        command.env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
        run(command).ok();
    }
    assert!(tree(&cluster.path("many")) == tree(&cluster.path("again")));
    let plans = [
        "star",
        "naive-star",
        "striped-star",
        "random-star",
        "chain",
        "star --codec reed-solomon-erasure",
        "star --parallel 2",
    ];
    for (step, plan) in plans.into_iter().enumerate() {
        cluster.run(&format!("save job/{step} a.bin")).ok();
        cluster.run(&format!("archive job/{step} --plan {plan}")).ok();
        cluster.run(&format!("restore job/{step} --out out{step}")).ok();
        assert!(cluster.read(&format!("out{step}/a.bin")) == data, "{plan}");
    }
    let wrong = cluster.run("archive job/0 --codec reed-solomon-erasure");
    wrong.fails(2, &["cannot run a chain", "hint: add --plan star"]);

    // Beyond n-k losses a restore writes nothing, and names the shards and nodes that are missing.
    cluster.daemons.truncate(1);
    let lost = cluster.run("restore job/0 --out lost --json");
    lost.fails(1, &["nothing was written", "a.bin", "n2"]);
    assert_eq!(lost.json()["error"]["kind"], "lost");
    assert!(tree(&cluster.path("lost")).is_empty());
}

#[test]
fn a_lost_catalogue_is_made_again_by_one_command() {
    let mut cluster = Cluster::start(6, &["code.list=4,2"]);
    let (old, new) = (bytes(300_000, 1), bytes(500_000, 2));
    cluster.write("a.bin", &old);
    cluster.run("save job/1 a.bin").ok();
    cluster.run("archive job/1").ok();
    cluster.write("a.bin", &new);
    let saved = cluster.run("save job/2 a.bin --record two.rr --json").ok().json();
    assert_eq!(saved["record"], "two.rr", "{saved}");
    cluster.run("save job/3 a.bin --record two.rr").fails(1, &["two.rr"]);
    let listed = cluster.run("ls --json").ok().json()["steps"].clone();
    let refused = cluster.run("catalogue rebuild");
    refused.fails(1, &["the catalogue is served by n1"]);
    assert!(!refused.err.contains("hint:"), "the message of the node says all: {refused:?}");

    // Kill the catalogue server and delete its catalogue database.
    cluster.daemons[0].signal(Signal::KILL);
    let gone = cluster.daemons.remove(0);
    gone.ended();
    std::fs::remove_dir_all(cluster.path("cluster/nodes/n1/data/catalogue")).unwrap();
    // Committed checkpoints are readable without the catalogue.
    let found = cluster.run("ls").ok().out;
    assert!(found.contains("job/2") && found.contains("commit marks"), "{found}");
    for (step, data) in [("1", &old), ("latest", &new)] {
        let restored = cluster.run(&format!("restore job/{step} --out away{step}")).ok();
        assert!(restored.out.contains("found by its commit marks"), "{restored:?}");
        assert!(cluster.read(&format!("away{step}/a.bin")) == *data, "step {step}");
    }
    let recorded = cluster.run("restore --record two.rr --out recorded").ok();
    assert!(recorded.out.contains("restored by its record"), "{recorded:?}");
    assert!(cluster.read("recorded/a.bin") == new);
    cluster.run("restore job/2 --record two.rr --out both").fails(2, &["--record"]);
    cluster.run("save job/9 a.bin --record nine.rr").fails(1, &["catalogue"]);
    assert!(!cluster.path("nine.rr").exists(), "a save that failed leaves no record");
    let address = cluster.address(3);
    // Nodes that registered last may be unknown to all others until they introduce themselves. Until then
    // the rebuild is refused.
    let rebuild = || cluster.run(&format!("catalogue rebuild --on {address} --json"));
    let mut rebuilt = rebuild();
    for _ in 0..20 {
        if rebuilt.code == 0 {
            break;
        }
        assert_eq!(rebuilt.json()["error"]["kind"], "unavailable");
        std::thread::sleep(std::time::Duration::from_millis(500));
        rebuilt = rebuild();
    }
    let rebuilt = rebuilt.ok().json();
    assert_eq!((&rebuilt["home"], &rebuilt["epoch"]), (&"n3".into(), &2.into()), "{rebuilt}");
    assert_eq!((&rebuilt["steps"], &rebuilt["shards"]), (&2.into(), &2.into()), "{rebuilt}");
    assert_eq!(rebuilt["missing"], serde_json::json!(["n1"]));
    // A gateway may continue to answer from commit marks until it learns of the new catalogue
    // server.
    let mut steps = cluster.run("ls --json").ok().json()["steps"].clone();
    for _ in 0..100 {
        if steps[0]["by_marks"] == false {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
        steps = cluster.run("ls --json").ok().json()["steps"].clone();
    }
    assert_eq!(steps, listed);
    for (step, data) in [(1, &old), (2, &new)] {
        cluster.run(&format!("restore job/{step} --out out{step}")).ok();
        assert!(cluster.read(&format!("out{step}/a.bin")) == *data, "step {step}");
    }
    // The former catalogue server comes back without its database, as an ordinary node.
    let back = Daemon::start(cluster.folder.path(), &cluster.config(1), &[]).ready();
    cluster.daemons.push(back);
    cluster.run("save job/3 a.bin").ok();
    cluster.run("archive job/2").ok();
    cluster.run("verify job/2").ok();
    let status = cluster.run("status --json").ok().json();
    assert_eq!((&status["catalogue"], &status["epoch"]), (&"n3".into(), &2.into()), "{status}");
    assert_eq!(status["nodes"][0]["notes"], serde_json::json!([]), "it has nothing to mend");

    cluster.run("catalogue move --on 127.0.0.1:1").fails(1, &["127.0.0.1:1"]);
    cluster.run(&format!("catalogue move --on {address}")).fails(1, &["served here already"]);
    let home = cluster.address(1);
    let moved = cluster.run(&format!("catalogue move --on {home} --json")).ok().json();
    assert_eq!((&moved["home"], &moved["from"]), (&"n1".into(), &"n3".into()), "{moved}");
    cluster.run("save job/4 a.bin").ok();
    cluster.run("restore job/3 --out moved").ok();
    assert!(cluster.read("moved/a.bin") == new);
    let status = cluster.run("status --json").ok().json();
    assert_eq!((&status["catalogue"], &status["epoch"]), (&"n1".into(), &3.into()), "{status}");
}

#[test]
fn five_of_sixteen_are_gone_with_the_catalogue_and_then_half() {
    let mut cluster = Cluster::start(16, &["memory=64MiB"]);
    let data = bytes(1_000_000, 7);
    cluster.write("a.bin", &data);
    cluster.run("save gpt/1 a.bin").ok();
    cluster.run("archive gpt/1").ok();
    // Kill the first five: the catalogue server, and the nodes that a client would ask first.
    for daemon in cluster.daemons.drain(..5) {
        daemon.signal(Signal::KILL);
        daemon.ended();
    }
    let restored = cluster.run("restore gpt/latest --out away").ok();
    assert!(restored.out.contains("found by its commit marks"), "{restored:?}");
    assert!(cluster.read("away/a.bin") == data);

    for daemon in cluster.daemons.drain(..3) {
        daemon.signal(Signal::KILL);
        daemon.ended();
    }
    let needed = "8 of 16 storage nodes know what is committed, 9 are needed";
    let refused = || cluster.run("show gpt/1");
    cluster.until("the look at the nodes is over", |_| refused().code == 1);
    refused().fails(1, &[needed, "n1", "n8"]);
    let status = cluster.run("status").ok().out;
    assert!(status.contains("8 of 16 nodes live"), "{status}");
    assert!(status.contains("nothing can be saved, archived or removed now"), "{status}");
    let json = cluster.run("status --json").ok().json();
    let version = env!("CARGO_PKG_VERSION");
    let of = |name: &str| {
        let nodes = json["nodes"].as_array().unwrap();
        nodes.iter().find(|node| node["name"] == name).unwrap().clone()
    };
    assert_eq!((&of("n1")["answers"], &of("n1")["version"]), (&false.into(), &Value::Null));
    assert_eq!((&of("n9")["answers"], &of("n9")["version"]), (&true.into(), &version.into()));
}

#[test]
fn a_home_that_hears_half_of_the_nodes_says_so() {
    let mut cluster = Cluster::start(6, &["code.list=4,2", "timeouts.lease_s=2"]);
    cluster.write("a.bin", &bytes(300_000, 7));
    cluster.run("save gpt/1 a.bin").ok();
    for daemon in cluster.daemons.drain(3..) {
        daemon.signal(Signal::KILL);
        daemon.ended();
    }
    let why = "its catalogue changes nothing: it hears 3 of 6 storage nodes, 4 are needed";
    let status = || cluster.run("status").ok().out;
    cluster.until("a catalogue that changes nothing", |_| status().contains(why));
    // All leases have ended by then, and three daemons are up all the same.
    std::thread::sleep(std::time::Duration::from_secs(4));
    cluster.until("three that are up", |_| {
        let status = status();
        let up = status.contains("3 of 6 nodes live") && status.matches("no answer").count() == 3;
        up && status.contains(why)
    });
    cluster.until("show says so", |_| {
        let shown = cluster.run("show gpt/1").out;
        shown.contains("3 of 6 nodes answer") && shown.contains(why)
    });
    cluster.run("save gpt/2 a.bin").fails(1, &["no storage node has a lease", "status"]);
}

#[test]
fn nothing_is_overwritten_unless_asked() {
    let cluster = Cluster::start(4, &["code.list=4,2"]);
    cluster.write("a.bin", b"first");
    cluster.write("sub/b.bin", b"other");
    cluster.run("save job/1 a.bin sub").ok();
    cluster.write("a.bin", b"second");
    let again = cluster.run("save job/1 a.bin --json");
    again.fails(1, &["job/1", "--replace"]);
    assert_eq!(again.json()["error"]["kind"], "exists");
    cluster.run("restore job/1 --out out").ok();
    assert_eq!(cluster.read("out/a.bin"), b"first");

    cluster.write("out/a.bin", b"mine");
    std::fs::remove_file(cluster.path("out/b.bin")).unwrap();
    cluster.run("restore job/1 --out out").fails(1, &["a.bin exists", "--force"]);
    assert_eq!(tree(&cluster.path("out")), [("a.bin".to_owned(), b"mine".to_vec())]);
    cluster.run("restore job/1 --out out --force").ok();
    assert_eq!(cluster.read("out/a.bin"), b"first");

    cluster.run("save job/1 a.bin --replace").ok();
    cluster.run("restore job/latest --out new").ok();
    assert_eq!(tree(&cluster.path("new")), [("a.bin".to_owned(), b"second".to_vec())]);
    let no_such = cluster.run("restore job/1 --out new2 --shard b.bin --json");
    no_such.fails(1, &["no shard b.bin"]);
    assert_eq!(no_such.json()["error"]["kind"], "not_found");
    cluster.run("restore job/1 --out new3 --shard a.bin --range 2..100").fails(2, &["2..100"]);
    cluster.run("archive job/1 --trace a.bin").fails(1, &["a.bin", "remove what is there"]);
    assert_eq!(cluster.read("a.bin"), b"second");
    cluster.run("archive job/9 --trace hops.json").fails(1, &["job/9"]);
    assert!(!cluster.path("hops.json").exists());
}

#[test]
fn a_save_waits_for_one_whose_client_was_killed_and_refuses_what_it_cannot_trust() {
    let cluster = Cluster::start(4, &["code.list=4,2", "timeouts.lease_s=2"]);
    cluster.write("small", b"1");
    let big = std::fs::File::create(cluster.path("big")).unwrap();
    big.set_len(400 << 20).unwrap();
    let mut command = program(cluster.folder.path());
    command.args(["save", "job/1", "big"]);
    command.env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml").stderr(Stdio::null());
    let mut other = command.stdout(Stdio::null()).spawn().unwrap();
    cluster.until("a save under way", |_| {
        let refused = cluster.run("save job/1 small --replace");
        refused.code == 1 && refused.err.contains("aborted within 3 s")
    });
    other.kill().unwrap();
    other.wait().unwrap();
    let saved = cluster.run("save job/1 small --replace --wait").ok();
    assert!(saved.err.contains("waiting for it") && saved.out.contains("saved"), "{saved:?}");
    // A save does not wait for a committed step.
    cluster.run("save job/1 small --wait").fails(1, &["is committed"]);

    cluster.run("save job/2 /proc/self/status").fails(1, &["its length is 0"]);
    cluster.run("restore job/7 --out new/folder").fails(1, &["job"]);
    assert!(!cluster.path("new/folder").exists(), "a refused restore leaves nothing");
}

/// Runs a command with a file name of any bytes in `RAPIDRAID_CONFIG`.
fn run_with_config(mut command: std::process::Command, file: &[u8]) -> machine::Ended {
    use std::os::unix::ffi::OsStrExt;
    command.env("RAPIDRAID_CONFIG", std::ffi::OsStr::from_bytes(file));
    run(command)
}

#[test]
fn wrong_usage_is_told_at_once() {
    // No daemon runs: an invalid command is refused before the client contacts any node.
    let cluster = Cluster::files(2, &[]);
    cluster.write("a", b"1");
    cluster.write("d/a", b"2");
    cluster.write("empty", b"");
    std::os::unix::fs::symlink(cluster.path("a"), cluster.path("d/link")).unwrap();
    for (line, parts) in [
        ("save ../1 a", &["JOB/STEP", "job name"][..]),
        ("cluster init other --node n=h:1 --set code.list=10,7", &["code.list", "10,7"]),
        ("save job/../1 a", &["step"]),
        ("save job/latest a", &["not `latest`"]),
        ("save job/x a", &["decimal number"]),
        ("save job/1 a a", &["both be the shard a"]),
        ("save job/1 d", &["d/link is a symbolic link"]),
        ("restore job/1 --out o --shard ../x", &["relative path"]),
        ("restore job/1 --out o --range 0..1", &["--shard"]),
        ("restore job/1 --out o --shard a --range 2..1", &["A < B"]),
        ("restore job/1", &["--out"]),
        ("rm job/latest", &["not `latest`"]),
        ("archive job/1 --plan tree", &["striped-star"]),
        ("show job", &["JOB/STEP"]),
        ("nonsense", &["nonsense"]),
        ("ls --set seeds=nonsense", &["seeds", "HOST:PORT"]),
        ("ls --set sedes=h:1", &["sedes", "seeds"]),
        ("cluster init new --node a", &["NAME=HOST:PORT"]),
        ("cluster init new --node ..=h:1", &["node or client name"]),
        ("cluster init new --node a=h:1 --node a=h:2", &["two nodes have the name a"]),
        ("cluster init new --node a=h:1 --set memory=1MiB", &["memory", "64MiB"]),
        ("code show 3,9", &["k <= n <= 2k"]),
        ("demo --size lots", &["not a size"]),
        ("demo --input empty", &["something in it"]),
    ] {
        let ended = cluster.run(line);
        ended.fails(2, parts);
        let json = cluster.run(&format!("{line} --json"));
        json.fails(2, parts);
        assert_eq!(json.json()["error"]["kind"], "invalid", "{line}");
    }
    assert!(!cluster.path("new").exists() && !cluster.path("o").exists());
    let mut misspelt = program(cluster.folder.path());
    misspelt.args(["code", "list"]).env("RAPIDRAID_KERNEL", "avx513");
    run(misspelt).fails(2, &["RAPIDRAID_KERNEL", "avx513", "portable"]);
    let unreadable = |line: &str| {
        let mut command = program(cluster.folder.path());
        command.args(line.split(' '));
        run_with_config(command, b"other\xff.toml")
    };
    unreadable("ls").fails(2, &["RAPIDRAID_CONFIG", "UTF-8"]);
    let json = unreadable("ls --config cluster/client/rapidraid.toml --json");
    assert_eq!((json.code, &json.json()["error"]["kind"]), (2, &"invalid".into()));
    unreadable("ls --help").ok();
    for (line, parts) in [
        ("save job/1 missing", &["missing"][..]),
        ("ls --config nowhere.toml", &["nowhere.toml", "cluster init"]),
        ("cluster init cluster --node a=h:1", &["not an empty folder"]),
        ("node --config nowhere.toml", &["nowhere.toml"]),
        ("code show 12,6", &["no certified code", "code search 12,6"]),
        ("demo --input missing", &["missing"]),
    ] {
        cluster.run(line).fails(1, parts);
    }
}

#[test]
fn codes_certify_and_lies_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let code = |line: &str| {
        let mut command = program(folder.path());
        command.args(line.split(' '));
        run(command)
    };
    let listed = code("code list --json").ok().json();
    assert!(listed["codes"].as_array().unwrap().iter().all(|code| code["dependent_subsets"] == 0));
    let paper = code("code show 16,11 --paper-order --json").ok().json();
    assert_eq!(paper["natural_dependent_subsets"], 21);
    let mut ours = code("code show 16,11 --json").ok().json();
    assert_eq!(ours["dependent_subsets"], 0);
    std::fs::write(folder.path().join("code.json"), ours.to_string()).unwrap();
    assert!(code("code certify code.json").ok().out.contains("is so"));
    ours["xi"][0][0] = 1.into();
    std::fs::write(folder.path().join("lie.json"), ours.to_string()).unwrap();
    let lie = code("code certify lie.json --json");
    lie.fails(1, &["claims"]);
    assert_eq!(lie.json()["error"]["kind"], "corrupt");
    let found = code("code search 8,5 --seed 3 --json").ok().json();
    assert_eq!(found["dependent_subsets"], 0);
    assert!(code("--version").ok().out.starts_with("rapidraid "));
}

#[test]
fn a_cluster_that_is_not_there_is_an_error_in_bounded_time() {
    let cluster = Cluster::files(2, &[]);
    let start = std::time::Instant::now();
    let ended = cluster.run("ls --json");
    ended.fails(1, &["127.0.0.1:", "rapidraid node"]);
    assert_eq!(ended.json()["error"]["kind"], "unavailable");
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn too_few_nodes_are_told_with_their_number() {
    let cluster = Cluster::start(3, &["code.list=6,4"]);
    cluster.write("a", b"1");
    let ended = cluster.run("save job/1 a");
    ended.fails(1, &["3", "6"]);
    assert_eq!(cluster.run("ls --json").ok().json()["steps"], serde_json::json!([]));
}

#[test]
fn a_daemon_refuses_what_would_hurt_and_stops_when_told() {
    let cluster = Cluster::files(2, &[]);
    let folder = cluster.folder.path();
    let start = |at: usize, more: &[&str]| Daemon::start(folder, &cluster.config(at), more);

    let key = cluster.path("cluster/nodes/n1/key.pem");
    let mode =
        |mode| std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o640);
    start(1, &[]).ended().fails(1, &["key.pem", "chmod 600"]);
    mode(0o600);

    let text = std::fs::read_to_string(cluster.config(1)).unwrap();
    let line = text.lines().count() + 2;
    cluster.write(
        "cluster/nodes/n1/odd.toml",
        format!("{text}\n[log]\nlevle = \"info\"\n").as_bytes(),
    );
    let odd = Daemon::start(folder, &cluster.path("cluster/nodes/n1/odd.toml"), &[]).ended();
    odd.fails(2, &[&format!("odd.toml:{}", line + 1), "log.levle", "log.level"]);
    let bad = start(1, &["--set", "memory=lots"]).ended();
    bad.fails(2, &["memory", "lots"]);
    let stranger = Daemon::start(folder, &cluster.config(1), &["--set", "name=n2"]).ended();
    stranger.fails(1, &["n2", "n1"]);

    let first = start(1, &[]).ready();
    let port = text.lines().find(|line| line.starts_with("listen")).unwrap();
    let port = port.trim_end_matches('"').rsplit(':').next().unwrap();
    let taken = format!("listen=127.0.0.1:{port}");
    start(2, &["--set", &taken]).ended().fails(1, &[port]);
    start(1, &["--set", "listen=127.0.0.1:0"])
        .ended()
        .fails(1, &["locked by another process", "pgrep"]);

    first.signal(Signal::TERM);
    let ended = first.ended();
    assert_eq!(ended.code, 0, "{ended:?}");
    let again = start(1, &[]).ready();
    again.signal(Signal::INT);
    assert_eq!(again.ended().code, 0);

    let id = cluster.path("cluster/nodes/n1/data/node.id");
    let whole = std::fs::read(&id).unwrap();
    std::fs::write(&id, &whole[..9]).unwrap();
    start(1, &[]).ended().fails(1, &["starting version=", "restore node.id from a copy"]);
    let later = seal_record(RecordKind::NodeIdentity, 2, &[7u8; 30]).unwrap();
    std::fs::write(&id, later).unwrap();
    start(1, &[]).ended().fails(2, &["node.id", "version 2", "a later release wrote it"]);
    std::fs::write(&id, whole).unwrap();
    let orphan = start(1, &["--set", "log.format=json"]);
    let mut orphan = orphan;
    drop(orphan.child.stdin.take());
    assert_eq!(orphan.ended().code, 0);
}

#[test]
fn the_demo_tells_a_true_story() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(folder.path());
    command.args(["demo", "--size", "8MiB", "--seed", "5", "--json", "--dir", "play"]);
    let demo = run(command).ok();
    let story = demo.json();
    let number = |field: &str| story[field].as_u64().unwrap_or_else(|| panic!("{field}: {story}"));
    assert_eq!((number("n"), number("k"), number("stripes")), (16, 11, 1));
    assert_eq!(story["verified"], true);
    let (input, block) = (number("input_bytes"), number("block_bytes"));
    // Each file has less than one percent of overhead beside its data.
    let about = |stored: u64, data: u64| (data..data + data / 100).contains(&stored);
    assert!(about(number("stored_bytes_replicated"), 2 * input), "{story}");
    assert!(about(number("stored_bytes_archived"), 16 * block), "{story}");
    let hops = story["hops"].as_array().unwrap();
    let traffic =
        |side: &str| -> Vec<u64> { hops.iter().map(|hop| hop[side].as_u64().unwrap()).collect() };
    let once = |count: usize| vec![block; count];
    assert_eq!(traffic("in_bytes"), [vec![0], once(15)].concat());
    assert_eq!(traffic("out_bytes"), [once(15), vec![0]].concat());
    let killed = story["killed"].as_array().unwrap();
    assert!(killed.len() == 5 && !killed.contains(&"node-01".into()), "{story}");
    assert_eq!(std::fs::read_dir(folder.path().join("play")).unwrap().count(), 0);
}
