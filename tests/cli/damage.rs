//! Corruption on the disks of real daemons.

use std::path::{Path, PathBuf};

use crate::machine::{Cluster, Daemon};

/// Returns the files of the cluster's nodes whose path ends with `end`, sorted.
fn stored(cluster: &Cluster, end: &str) -> Vec<PathBuf> {
    fn below(folder: &Path, found: &mut Vec<PathBuf>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() { below(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    below(&cluster.path("cluster"), &mut found);
    found.retain(|path| path.to_string_lossy().ends_with(end));
    found.sort();
    found
}

fn flip(path: &Path, byte: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut value = [0];
    file.read_exact_at(&mut value, byte).unwrap();
    file.write_all_at(&[value[0] ^ 1], byte).unwrap();
    file.sync_all().unwrap();
}

/// Corrupts one byte in each of a block's two replicas, in different grains. All bytes are still
/// there and are restored, and both files are repaired.
#[test]
fn two_wrong_bytes_lose_nothing_and_are_mended() {
    let cluster = Cluster::start(6, &["code.list=6,4", "timeouts.lease_s=2", "code.block=256KiB"]);
    let bytes: Vec<u8> = (0..4_000_000_u32).map(|at| (at * 7 + at / 1000) as u8).collect();
    cluster.write("weights", &bytes);
    cluster.run("save job/1 weights").ok();
    let replicas = stored(&cluster, "00000000/block-01.rep");
    assert_eq!(replicas.len(), 2);
    let whole: Vec<Vec<u8>> = replicas.iter().map(|path| std::fs::read(path).unwrap()).collect();
    flip(&replicas[0], whole[0].len() as u64 - 40_000);
    flip(&replicas[1], 100);
    let restored = cluster.run("restore job/1 --out out").ok();
    assert_eq!(cluster.read("out/weights"), bytes);
    assert!(restored.out.contains("is damaged"), "{restored:?}");
    // The restore read at least one of the two corrupt grains. The repair of that replica reads the
    // other one.
    cluster.until("both replicas good again", |_| {
        let read = |path: &PathBuf| std::fs::read(path).unwrap();
        let are_whole = replicas
            .iter()
            .map(read)
            .zip(&whole)
            .all(|(now, then)| now[..then.len() - 10_000] == then[..then.len() - 10_000]);
        are_whole && stored(&cluster, "damage-block-01").is_empty()
    });
    assert!(stored(&cluster, ".why").is_empty(), "nothing was set aside");
    let verified = cluster.run("verify job/1").ok();
    assert!(verified.out.contains("all is whole; any 1 more node may be lost"), "{verified:?}");
    // `status` reports a damaged piece.
    cluster.run("archive job/1").ok();
    let pieces = stored(&cluster, ".pc");
    assert!(pieces.len() >= 6, "{pieces:?}");
    pieces[..2].iter().for_each(|piece| flip(piece, 7_000));
    cluster.run("restore job/1 --out again").ok();
    assert_eq!(cluster.read("again/weights"), bytes);
    cluster.until("status tells of a piece", |_| {
        cluster.run("status").ok().out.contains("piece is damaged and not counted")
    });
}

/// Corrupts two of six pieces: `verify` reports this by its exit code, names the pieces, and says
/// that any further loss may lose data. Of replicas, `verify --mend` repairs the damaged one.
#[test]
fn verify_finds_what_no_restore_would_read() {
    let cluster = Cluster::start(6, &["code.list=6,4", "timeouts.lease_s=2", "code.block=256KiB"]);
    let bytes: Vec<u8> = (0..900_000_u32).map(|at| (at * 11 + at / 700) as u8).collect();
    cluster.write("weights", &bytes);
    cluster.run("save job/1 weights").ok();
    let replica = stored(&cluster, "00000000/block-02.rep").remove(0);
    let whole = std::fs::read(&replica).unwrap();
    flip(&replica, 70_000);
    let found = cluster.run("verify job/1");
    assert_eq!(found.code, 1, "{found:?}");
    let text = &found.out;
    assert!(text.contains("1 replica damaged") && text.contains("replica of block 2"), "{text}");
    assert!(text.contains("verify --mend job/1"), "{text}");
    let is_rotten = std::fs::read(&replica).unwrap() != whole;
    assert!(is_rotten, "it is mended only when that is asked for");
    let mended = cluster.run("verify --mend job/1").ok();
    assert!(mended.out.contains("mended: replica of block 2 of stripe 0 of weights"), "{mended:?}");

    cluster.run("archive job/1").ok();
    let pieces: Vec<PathBuf> =
        ["piece-04", "piece-05"].map(|piece| stored_named(&cluster, piece)).into();
    pieces.iter().for_each(|piece| flip(piece, 900));
    let json = cluster.run("verify job/1 --json");
    assert_eq!(json.code, 1, "{json:?}");
    let json = json.json();
    assert_eq!((&json["survives"], &json["fault_count"]), (&0.into(), &2.into()), "{json}");
    let parts: Vec<&str> =
        json["faults"].as_array().unwrap().iter().map(|f| f["part"].as_str().unwrap()).collect();
    assert!(parts.contains(&"piece 4") && parts.contains(&"piece 5"), "{parts:?}");
    let text = cluster.run("verify job/1").out;
    assert!(text.contains("the loss of one more node may lose data"), "{text}");
    assert!(cluster.run("status").ok().out.contains("1 piece is damaged and not counted"));
}

/// Returns the path of the only piece file whose name begins with `begin`.
fn stored_named(cluster: &Cluster, begin: &str) -> PathBuf {
    let all = stored(cluster, ".pc").into_iter();
    let is_it = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begin))
    };
    let mut found: Vec<PathBuf> = all.filter(is_it).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Returns a cluster of seven nodes with an archived and a replicated step.
fn saved_cluster(set: &[&str]) -> Cluster {
    let common = ["code.list=6,4", "timeouts.lease_s=2", "code.block=256KiB"];
    let cluster = Cluster::start(7, &[&common[..], set].concat());
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at * 13 + at / 900) as u8).collect();
    cluster.write("weights", &bytes);
    for step in ["job/1", "job/2"] {
        cluster.run(&format!("save {step} weights")).ok();
    }
    cluster.run("archive job/1").ok();
    cluster
}

/// Returns the pieces and the replicas of node n3 with their bytes.
fn parts_of_n3(cluster: &Cluster) -> [Vec<(PathBuf, Vec<u8>)>; 2] {
    [".pc", ".rep"].map(|end| {
        let mut files = stored(cluster, end);
        files.retain(|path| path.to_string_lossy().contains("nodes/n3/"));
        let read = |path: PathBuf| {
            let bytes = std::fs::read(&path).unwrap();
            (path, bytes)
        };
        files.into_iter().map(read).collect()
    })
}

/// Stops n3 and starts it with an empty data folder. Returns what it had.
fn empty_disk_of_n3(cluster: &mut Cluster) -> [Vec<(PathBuf, Vec<u8>)>; 2] {
    let before = parts_of_n3(cluster);
    assert!(before.iter().all(|files| !files.is_empty()));
    drop(cluster.daemons.remove(2));
    let (data, _) = before[0][0].0.to_str().unwrap().split_once("/shards/").unwrap();
    std::fs::remove_dir_all(data).unwrap();
    let daemon = Daemon::start(cluster.folder.path(), &cluster.config(3), &[]).ready();
    cluster.daemons.push(daemon);
    cluster.until("the node is live", |all| all.iter().all(|node| node["live"] == true));
    before
}

/// Follows *Replace a disk* of docs/operations.md: nothing is done but to start the node.
#[test]
fn a_disk_is_replaced_and_the_rest_happens_by_itself() {
    let mut cluster = saved_cluster(&["repair.grace_s=1", "repair.share=100"]);
    let before = empty_disk_of_n3(&mut cluster);
    let repair = |cluster: &Cluster| cluster.run("status --json").ok().json()["repair"].clone();
    cluster.until("everything is made again", |_| {
        let survey = &repair(&cluster)["survey"];
        survey["degraded"] == 0 && parts_of_n3(&cluster) == before
    });
    let status = cluster.run("status").ok();
    let first = status.out.lines().next().unwrap();
    assert!(
        first.starts_with("safety: any 1 more node may be lost; 2 checkpoints, surveyed"),
        "{status:?}"
    );
    assert_eq!(repair(&cluster)["waiting"].as_array().unwrap().len(), 0);
    let verified = cluster.run("verify job/1").ok();
    assert!(verified.out.contains("all is whole; any 2 more nodes may be lost"), "{verified:?}");
}

/// Follows *A node is gone for good* of docs/operations.md: nothing is done. Then the node is back,
/// and drops the pieces that were made elsewhere.
#[test]
fn a_node_is_gone_for_good() {
    let mut cluster = saved_cluster(&["repair.grace_s=1", "repair.share=100"]);
    assert!(parts_of_n3(&cluster).iter().all(|parts| !parts.is_empty()));
    drop(cluster.daemons.remove(2));
    cluster.until("the node is dead", |all| all.iter().any(|node| node["live"] == false));
    cluster.until("everything is made elsewhere", |_| {
        let status = cluster.run("status --json").ok().json();
        status["repair"]["survey"]["degraded"] == 0
    });
    let verified = cluster.run("verify job/1 --json").json();
    assert_eq!((&verified["survives"], &verified["faults"]), (&2.into(), &Vec::<u8>::new().into()));
    cluster.run("restore job/1 --out one --force").ok();
    let daemon = Daemon::start(cluster.folder.path(), &cluster.config(3), &[]).ready();
    cluster.daemons.push(daemon);
    cluster.until("the node is live", |all| all.iter().all(|node| node["live"] == true));
    cluster.until("its pieces are dropped", |_| {
        let is_on_n3 = |path: &PathBuf| path.to_string_lossy().contains("nodes/n3/");
        !stored(&cluster, ".pc").iter().any(is_on_n3)
    });
    let verified = cluster.run("verify job/1 --json").json();
    assert_eq!((&verified["survives"], &verified["faults"]), (&2.into(), &Vec::<u8>::new().into()));
    let nothing = cluster.run("repair").ok();
    assert!(nothing.out.contains("nothing to make of job/1"), "{nothing:?}");
}

/// All nodes are in the ring, so no other one can take what a dead node had. The command says what to
/// do.
#[test]
fn a_node_is_gone_and_nothing_can_take_its_place() {
    let set = ["code.list=6,4", "timeouts.lease_s=2", "code.block=256KiB", "repair.share=0"];
    let mut cluster = Cluster::start(6, &set);
    cluster.write("weights", &vec![7; 1_000_000]);
    cluster.run("save job/1 weights").ok();
    cluster.run("archive job/1").ok();
    drop(cluster.daemons.remove(2));
    cluster.until("the node is dead", |all| all.iter().any(|node| node["live"] == false));
    let away = "n3 does not answer: 1 part of it";
    let whole = cluster.run("repair job/1");
    assert_eq!(whole.code, 1, "{whole:?}");
    let next = format!("{away}; start it, or run `rapidraid repair --node n3`");
    assert!(whole.out.contains(&next), "{whole:?}");
    let given_up = cluster.run("repair --node n3");
    assert_eq!(given_up.code, 1, "{given_up:?}");
    let next = format!("{away}; no other node can take them; add one");
    assert!(given_up.out.contains(&next), "{given_up:?}");
}

/// Follows *Replace a disk* of docs/operations.md for a person who does not wait.
#[test]
fn a_disk_is_replaced_and_repaired_at_once() {
    let mut cluster = saved_cluster(&[]);
    let before = empty_disk_of_n3(&mut cluster);

    let missing = cluster.run("repair --node n3 --dry-run --json");
    assert_eq!(missing.code, 1, "{missing:?}");
    let missing = missing.json();
    let steps = missing["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 2);
    assert_eq!(steps[0]["pieces"], before[0].len(), "{missing}");
    assert_eq!(steps[1]["replicas"], before[1].len(), "{missing}");
    let verified = cluster.run("verify job/1");
    assert!(verified.out.contains("`rapidraid repair job/1` makes"), "{verified:?}");

    let repaired = cluster.run("repair --node n3").ok();
    let line = format!("repaired job/1: {} pieces", before[0].len());
    assert!(repaired.out.contains(&line), "{repaired:?}");
    assert_eq!(parts_of_n3(&cluster), before);
    let verified = cluster.run("verify job/1").ok();
    assert!(verified.out.contains("all is whole; any 2 more nodes may be lost"), "{verified:?}");
    let again = cluster.run("repair").ok();
    assert!(again.out.contains("nothing to make of job/2"), "{again:?}");
    cluster.run("repair --node n9").fails(1, &["no node n9"]);
    cluster.run("repair job/1 --node n3").fails(2, &["cannot be used with"]);
    cluster.run("repair job/7").fails(1, &["job/7 is not committed"]);
}
