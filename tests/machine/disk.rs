//! File systems of a size of their own, which only root may mount.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The disk of a node, as a mounted tmpfs.
pub struct Tmpfs(pub PathBuf);

impl Tmpfs {
    /// Mounts a tmpfs. Returns `None` if that is impossible, and prints why.
    pub fn mount(path: PathBuf, limits: &str) -> Option<Self> {
        std::fs::create_dir_all(&path).unwrap();
        let options = format!("{limits},mode=700");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "rapidraid-test"])
            .arg(&path)
            .output();
        match mounted {
            Ok(done) if done.status.success() => Some(Self(path)),
            other => {
                eprintln!("skipped: no file system can be mounted here: {other:?}");
                None
            }
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Writes zeros until nothing more fits.
pub fn fill(path: &Path) {
    let mut file = File::options().append(true).create(true).open(path).unwrap();
    for len in [1 << 20, 4096, 1] {
        while file.write_all(&vec![0; len]).is_ok() {}
    }
}
