//! Wrong bytes on the disks of real daemons.

use std::path::{Path, PathBuf};

use crate::machine::Cluster;

/// Files of the cluster's nodes whose path ends so.
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

/// Two wrong bytes in different grains of a block's two replicas: all bytes are there, are read, and both files are made good again.
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
    // The reader met at least one of the two; the other one is met when that is mended from it.
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
    cluster.run("verify job/1").ok();
    // A piece that is damaged is told of by status.
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
