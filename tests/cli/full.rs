//! A node whose disk is full, with real daemons. The node needs a file system of its own, which
//! only root may mount.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::machine::disk::{Tmpfs, fill};
use crate::machine::{Cluster, Daemon, bytes, tree};

/// Runs a program. Returns `None` if it failed, and prints why.
fn run(program: &str, arguments: &[&str], paths: &[&Path]) -> Option<()> {
    let done = Command::new(program).args(arguments).args(paths).output();
    let is_done = done.as_ref().is_ok_and(|done| done.status.success());
    if !is_done {
        eprintln!("skipped: {program} {}: {done:?}", arguments.join(" "));
    }
    is_done.then_some(())
}

/// A btrfs file system in an image, whose root has a quota below its size.
struct Quota(Tmpfs);

impl Quota {
    /// Makes and mounts the file system. Returns `None` if that is impossible, and prints why.
    fn mount(image: &Path, path: PathBuf, limit: &str) -> Option<Self> {
        File::create(image).unwrap().set_len(512 << 20).unwrap();
        std::fs::create_dir_all(&path).unwrap();
        run("mkfs.btrfs", &["-q", "-m", "single"], &[image])?;
        run("mount", &["-o", "loop"], &[image, &path])?;
        let mounted = Self(Tmpfs(path));
        run("btrfs", &["quota", "enable"], &[&mounted.0.0])?;
        run("btrfs", &["qgroup", "limit", limit], &[&mounted.0.0])?;
        Some(mounted)
    }
}

/// A foreign writer that takes every free byte until it is dropped.
struct Filler(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Filler {
    fn start(path: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let work = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                fill(&path);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self(stop, Some(work))
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.take().into_iter().for_each(|work| work.join().unwrap());
    }
}

/// Returns the number of replicas and pieces on a node's disk.
fn stored(disk: &Tmpfs) -> usize {
    let files = tree(&disk.0.join("shards"));
    files.iter().filter(|(name, _)| name.ends_with(".rep") || name.ends_with(".pc")).count()
}

fn start_with_disk(at: usize, limits: &str) -> Option<(Cluster, Tmpfs)> {
    let set = ["code.list=6,4", "timeouts.lease_s=2", "code.block=256KiB"];
    let cluster = Cluster::files(6, &set);
    let disk = Tmpfs::mount(cluster.path(&format!("cluster/nodes/n{at}/data")), limits)?;
    Some((cluster.started(6), disk))
}

/// Saves the same bytes as two steps. Returns the bytes.
fn save_twice(cluster: &Cluster, len: usize) -> Vec<u8> {
    let data = bytes(len, 1);
    cluster.write("weights", &data);
    for step in 1..=2 {
        cluster.run(&format!("save job/{step} weights")).ok();
    }
    data
}

/// Waits until the node has removed files. This may take a while: the catalogue server may learn
/// only from a call that the node's daemon has restarted.
fn until_fewer(disk: &Tmpfs, before: usize) {
    let started = Instant::now();
    while stored(disk) >= before {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing was removed");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn kill_and_start(cluster: &mut Cluster, at: usize) {
    let daemon = cluster.daemons.remove(at - 1);
    drop(daemon);
    let started = Daemon::start(cluster.folder.path(), &cluster.config(at), &[]).ready();
    cluster.daemons.insert(at - 1, started);
}

/// Waits until every node has a lease. After a time without a catalogue, the leases of the other
/// nodes have ended, and the new catalogue server knows a node only once it has registered again.
fn until_all_live(cluster: &Cluster) {
    cluster.until("all nodes are live", |nodes| nodes.iter().all(|node| node["live"] == true));
}

/// Lists the steps of the job. For some seconds after a time without a catalogue, a gateway may still
/// list what it has read from the nodes' commit marks.
fn list_from_catalogue(cluster: &Cluster) -> serde_json::Value {
    let started = Instant::now();
    loop {
        let listed = cluster.run("ls job --json").ok().json();
        let steps = listed["steps"].as_array().unwrap();
        if steps.iter().all(|step| step["by_marks"] == false) {
            return listed;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{listed:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Fills the disk of the catalogue server once: the node reports it, starts again after a kill, and
/// `rm` frees space on it.
#[test]
fn a_home_whose_disk_is_full_is_emptied_by_rm() {
    let Some((mut cluster, disk)) = start_with_disk(1, "size=64m") else { return };
    let data = save_twice(&cluster, 6_000_000);
    let before = stored(&disk);
    assert!(before > 0);
    fill(&disk.0.join("foreign"));
    cluster.until("status says that the disk is full", |nodes| {
        nodes[0]["notes"].to_string().contains("nearly full")
    });
    kill_and_start(&mut cluster, 1);
    until_all_live(&cluster);
    cluster.run("rm job/1").ok();
    until_fewer(&disk, before);
    cluster.run("restore job/2 --out out").ok();
    assert!(cluster.read("out/weights") == data);
    // A foreign writer takes the reserve, too. The daemon still starts each time, serves no
    // catalogue, and has not lost it.
    let filler = Filler::start(disk.0.join("foreign"));
    std::thread::sleep(Duration::from_secs(2));
    for _ in 0..3 {
        kill_and_start(&mut cluster, 1);
    }
    cluster.run("restore job/2 --out again").ok();
    drop(filler);
    std::fs::remove_file(disk.0.join("foreign")).unwrap();
    kill_and_start(&mut cluster, 1);
    until_all_live(&cluster);
    cluster.run("save job/3 weights").ok();
    let listed = list_from_catalogue(&cluster);
    let steps: Vec<&serde_json::Value> =
        listed["steps"].as_array().unwrap().iter().map(|step| &step["step"]).collect();
    assert_eq!(steps, [&2, &3], "{listed:#}");
    let left = tree(&disk.0);
    assert!(!left.iter().any(|(name, _)| name.contains("broken")), "a map was set aside");
}

/// A foreign writer takes every byte of another node's disk and does not stop. Archiving ends and
/// names the node, the node starts after a kill, and `rm` removes its files.
#[test]
fn a_node_is_emptied_though_somebody_takes_every_byte() {
    let Some((mut cluster, disk)) = start_with_disk(4, "size=64m") else { return };
    let data = save_twice(&cluster, 6_000_000);
    let filler = Filler::start(disk.0.join("foreign"));
    std::thread::sleep(Duration::from_secs(2));
    let archived = cluster.run("archive job/2");
    archived.fails(1, &["n4"]);
    kill_and_start(&mut cluster, 4);
    cluster.run("restore job/2 --out out").ok();
    assert!(cluster.read("out/weights") == data);
    for step in 1..=2 {
        let removed = cluster.run(&format!("rm job/{step}"));
        assert_eq!(removed.code, 0, "{removed:?}");
    }
    let started = Instant::now();
    while stored(&disk) > 0 {
        assert!(started.elapsed() < Duration::from_secs(90), "{} files stay", stored(&disk));
        if cluster.daemons[3].child.try_wait().unwrap().is_some() {
            // A sled database has failed, and the daemon has stopped. Start it again, as its
            // supervisor would.
            kill_and_start(&mut cluster, 4);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(filler);
    std::fs::remove_file(disk.0.join("foreign")).unwrap();
    kill_and_start(&mut cluster, 4);
    until_all_live(&cluster);
    cluster.run("save job/3 weights").ok();
    cluster.until("nothing is left to say", |nodes| nodes[3]["notes"] == serde_json::json!([]));
}

/// Foreign small files take every inode while there is room for bytes.
#[test]
fn a_node_without_inodes_is_emptied() {
    let Some((mut cluster, disk)) = start_with_disk(4, "size=256m,nr_inodes=400") else { return };
    let data = save_twice(&cluster, 2_000_000);
    let before = stored(&disk);
    let mut foreign = 0;
    while File::create_new(disk.0.join(format!("foreign-{foreign}"))).is_ok() {
        foreign += 1;
    }
    assert!(foreign > 0 && before > 0);
    cluster.run("archive job/2").fails(1, &["n4"]);
    kill_and_start(&mut cluster, 4);
    cluster.run("rm job/1").ok();
    until_fewer(&disk, before);
    cluster.run("restore job/2 --out out").ok();
    assert!(cluster.read("out/weights") == data);
}

/// A node's folder has a quota: the file system reports free space, and writes beyond the limit
/// fail. btrfs also never writes in place, so no slot can be written. The node reports that its
/// folder takes no writes, `archive` ends and names it, and `rm` frees space on it. The same holds
/// for the catalogue server.
#[test]
fn a_node_beyond_its_quota_is_emptied() {
    for at in [4, 1] {
        let set = ["code.list=6,4", "timeouts.lease_s=2", "code.block=256KiB"];
        let cluster = Cluster::files(6, &set);
        let folder = cluster.path(&format!("cluster/nodes/n{at}/data"));
        let image = cluster.path("quota.img");
        let Some(Quota(disk)) = Quota::mount(&image, folder, "160M") else { return };
        let mut cluster = cluster.started(6);
        let data = save_twice(&cluster, 6_000_000);
        let before = stored(&disk);
        assert!(before > 0);
        fill(&disk.0.join("foreign"));
        cluster.until("status says that the folder takes no writes", |nodes| {
            nodes[at - 1]["notes"].to_string().contains("takes no writes")
        });
        if at != 1 {
            cluster.run("archive job/2").fails(1, &["n4"]);
        }
        kill_and_start(&mut cluster, at);
        until_all_live(&cluster);
        cluster.run("restore job/2 --out out").ok();
        assert!(cluster.read("out/weights") == data);
        cluster.run("rm job/1").ok();
        until_fewer(&disk, before);
        until_all_live(&cluster);
        cluster.run("save job/3 weights").ok();
        std::fs::remove_file(disk.0.join("foreign")).unwrap();
        cluster.until("nothing is left to say", |nodes| {
            nodes[at - 1]["notes"] == serde_json::json!([])
        });
    }
}
