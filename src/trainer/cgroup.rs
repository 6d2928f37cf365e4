//! The memory that a process's control groups still allow it. The kernel kills a process that
//! exceeds the limit: allocating shared memory that does not fit into the group does not fail as a
//! call (cgroups(7); `Documentation/admin-guide/cgroup-v2.rst`, "Memory Interface Files").
#![allow(clippy::disallowed_methods)] // files of the kernel, outside any store

use std::path::{Path, PathBuf};

const MEMBERSHIP: &str = "/proc/self/cgroup";
const MOUNT: &str = "/sys/fs/cgroup";
/// Version 1 of control groups expresses "no limit" as a number near the largest one. A limit of at least this value
/// is treated as no limit.
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// Returns how many more bytes of memory this process may use, or `None` if no group has a limit.
pub fn room_bytes() -> Option<u64> {
    room_of(Path::new(MOUNT), &std::fs::read_to_string(MEMBERSHIP).ok()?)
}

/// Returns the smallest room among the groups in `membership` (the content of [`MEMBERSHIP`]) and
/// their ancestors.
fn room_of(mount: &Path, membership: &str) -> Option<u64> {
    let hierarchies = membership.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some((mount.to_owned(), path)),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some((mount.join("memory"), path))
            }
            _ => None,
        }
    });
    hierarchies.flat_map(|(root, path)| groups(&root, path)).filter_map(|group| room(&group)).min()
}

/// Returns the folders of a group and its ancestors. In a container the process's own group may be
/// the root of the mount, whatever `path` says.
fn groups(root: &Path, path: &str) -> Vec<PathBuf> {
    let inner = root.join(path);
    let from = if inner.is_dir() { inner } else { root.to_owned() };
    from.ancestors().take_while(|group| group.starts_with(root)).map(Path::to_owned).collect()
}

fn room(group: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"));
    let limit = limit.filter(|limit| *limit < NO_LIMIT_BYTES)?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = read("memory.stat").unwrap_or_default();
    let of = |name: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.parse::<u64>().ok())
    };
    // The kernel evicts pages of files when the group needs memory. Version 1 has lines that
    // include the pages of nested groups; their names begin with `total_`.
    let file = ["inactive_file", "active_file"]
        .map(|name| of(&format!("total_{name}")).or_else(|| of(name)).unwrap_or(0));
    Some(limit.saturating_sub(used.saturating_sub(file[0].saturating_add(file[1]))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(path: &Path, files: &[(&str, &str)]) {
        std::fs::create_dir_all(path).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(path.join(name), text).unwrap());
    }

    #[test]
    fn the_tightest_group_counts() {
        let mount = tempfile::tempdir().unwrap();
        let limits = |max, current| [("memory.max", max), ("memory.current", current)];
        group(&mount.path().join("slice"), &limits("1000\n", "400\n"));
        group(&mount.path().join("slice/job"), &limits("max\n", "300\n"));
        assert_eq!(room_of(mount.path(), "0::/slice/job\n"), Some(600));
        group(&mount.path().join("slice/job"), &limits("350\n", "300\n"));
        assert_eq!(room_of(mount.path(), "0::/slice/job\n"), Some(50));
        // File pages count as room; shared-memory pages do not.
        let stat = "anon 20\nfile 280\nshmem 200\ninactive_file 30\nactive_file 50\n";
        group(&mount.path().join("slice/job"), &[("memory.stat", stat)]);
        assert_eq!(room_of(mount.path(), "0::/slice/job\n"), Some(130));
        assert_eq!(room_of(mount.path(), "0::/elsewhere\n"), None);
        assert_eq!(room_of(mount.path(), ""), None);
    }

    #[test]
    fn groups_of_version_1_count() {
        let mount = tempfile::tempdir().unwrap();
        let limit = "9223372036854771712\n";
        let root = mount.path().join("memory");
        group(&root, &[("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", "5\n")]);
        let membership = "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n";
        assert_eq!(room_of(mount.path(), membership), None);
        let stat = "inactive_file 1\ntotal_inactive_file 40\ntotal_active_file 0\n";
        let files = [
            ("memory.limit_in_bytes", "500\n"),
            ("memory.usage_in_bytes", "450\n"),
            ("memory.stat", stat),
        ];
        group(&root.join("a/b"), &files);
        assert_eq!(room_of(mount.path(), membership), Some(90));
        // A container sees its own group as the root.
        group(&root, &files);
        assert_eq!(room_of(mount.path(), "4:memory:/docker/0123\n"), Some(90));
    }
}
