//! The folder of one run. Its name has the number of the process that made it, so that whoever comes later knows
//! whether it is in use; it goes with the run, and leftovers of runs that were killed go with the next one.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const PREFIX: &str = "rapidraid-cluster-";

/// A folder that is removed when this goes out of scope.
#[derive(Debug)]
pub struct WorkFolder {
    path: PathBuf,
}

impl WorkFolder {
    /// A new one under `parent`; those of dead runs there are removed first.
    pub fn create(parent: &Path) -> Result<Self> {
        remove_leftovers(parent)?;
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // What stays is removed by the next run.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders of runs that are no more.
pub fn remove_leftovers(parent: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(parent) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else {
            continue;
        };
        if owner.parse().is_ok_and(|owner| !is_running(owner)) {
            let path = entry.path();
            std::fs::remove_dir_all(&path).with_context(|| {
                format!("cannot remove what a killed run left: {}", path.display())
            })?;
        }
    }
    Ok(())
}

/// Whether the process `pid` is a run of this program. Another program may have got the number since.
pub fn is_running(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    // The kernel keeps 15 bytes of a name.
    name.is_ok_and(|name| "rapidraid-cluster".starts_with(name.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_runs_go() {
        let parent = tempfile::tempdir().unwrap();
        // 1 is the machine's first process; no process has the greatest number.
        for name in ["rapidraid-cluster-1", "rapidraid-cluster-4294967295", "rapidraid-cluster-x"] {
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
        let mut expected = vec!["rapidraid-cluster-x".to_owned(), own];
        expected.sort();
        assert_eq!(left(), expected);
        drop(work);
        assert_eq!(left(), ["rapidraid-cluster-x"]);
    }
}
