//! The folder of one run. Its name contains the id of the process that created it, so that a later
//! run can tell whether it is in use, and a random number that cannot be predicted. The folder is
//! removed at the end of the run. If the run is killed, the next run removes it.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rapidraid::entropy::{Entropy as _, SystemEntropy};

const PREFIX: &str = "rapidraid-cluster-";

/// A folder that is removed when the value is dropped.
#[derive(Debug)]
pub struct WorkFolder {
    path: PathBuf,
}

impl WorkFolder {
    /// Creates a folder under `parent`, after removing the folders of dead runs there. The folder
    /// holds private keys, so other users can neither read it nor have created it.
    pub fn create(parent: &Path) -> Result<Self> {
        remove_leftovers(parent);
        let random = SystemEntropy.below(1 << 32);
        let path = parent.join(format!("{PREFIX}{}-{random:08x}", std::process::id()));
        let made = std::fs::create_dir_all(parent)
            .and_then(|()| DirBuilder::new().mode(0o700).create(&path));
        let hint = || format!("cannot make {}; name another place with --work", path.display());
        made.with_context(hint)?;
        Ok(Self { path })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // If this fails, the next run removes the folder.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders of runs that have ended. Returns the number of folders that could not be
/// removed, such as those of root; they do not prevent a new run.
pub fn remove_leftovers(parent: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(parent) else { return 0 };
    let mut stay = 0;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner_of);
        if owner.is_none_or(is_running) {
            continue;
        }
        let path = entry.path();
        if let Err(error) = std::fs::remove_dir_all(&path) {
            eprintln!(
                "rapidraid-cluster: a killed run left {}, which stays: {error}; its owner removes it with \
                 `rapidraid-cluster clean`",
                path.display()
            );
            stay += 1;
        }
    }
    stay
}

/// Returns the id of the process that created a folder of this name: `PREFIX` and the id, with or
/// without a random number after them.
fn owner_of(name: &str) -> Option<u32> {
    let rest = name.strip_prefix(PREFIX)?;
    let (owner, random) = rest.split_once('-').unwrap_or((rest, "0"));
    let is_random = !random.is_empty() && random.bytes().all(|byte| byte.is_ascii_hexdigit());
    owner.parse().ok().filter(|_| is_random)
}

/// Returns whether the process `pid` is a run of this program. The kernel may have reused the id
/// for another program.
pub fn is_running(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    // The kernel keeps 15 bytes of a name.
    name.is_ok_and(|name| "rapidraid-cluster".starts_with(name.trim_end()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_folders_of_dead_runs_go() {
        let parent = tempfile::tempdir().unwrap();
        // Process 1 is the machine's first process; no process has the greatest id.
        for name in [
            "rapidraid-cluster-1",
            "rapidraid-cluster-4294967295",
            "rapidraid-cluster-4294967295-00c0ffee00c0ffee",
            "rapidraid-cluster-4294967295-notes",
            "rapidraid-cluster-x",
        ] {
            std::fs::create_dir(parent.path().join(name)).unwrap();
        }
        let work = WorkFolder::create(parent.path()).unwrap();
        let left = || {
            let entries = std::fs::read_dir(parent.path()).unwrap().flatten();
            let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let own = work.path().file_name().unwrap().to_str().unwrap().to_owned();
        let others = ["rapidraid-cluster-4294967295-notes", "rapidraid-cluster-x"];
        let mut expected = [&others[..], &[own.as_str()]].concat();
        expected.sort();
        assert_eq!(left(), expected);
        let mode = std::fs::metadata(work.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        drop(work);
        assert_eq!(left(), others);
    }

    #[test]
    fn two_folders_of_one_process_differ_and_what_cannot_be_removed_is_left() {
        let parent = tempfile::tempdir().unwrap();
        // The entry is a file, so that removing it as a folder fails, even for root.
        std::fs::write(parent.path().join("rapidraid-cluster-4294967295"), "").unwrap();
        let first = WorkFolder::create(parent.path()).unwrap();
        let second = WorkFolder::create(parent.path()).unwrap();
        assert_ne!(first.path(), second.path());
        assert_eq!(remove_leftovers(parent.path()), 1);
    }
}
