//! A cache of the cluster's node addresses beside a client's configuration, for the case that all
//! seeds are gone while other nodes are up.
//!
//! The cache is optional: a file that cannot be read counts as empty, and a failed write is
//! ignored.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::files;
use crate::client::Client;
use crate::clock::{SystemClock, deadline};
use crate::config::{HostPort, MAX_FILE_BYTES};

/// The name of the file, in the folder of the configuration. Each line is one HOST:PORT.
const FILE: &str = "known-nodes";
/// Maximum number of nodes in the file.
const MAX_KNOWN: usize = 4096;
/// Age of the file from which on the nodes are requested again.
const FRESH: Duration = Duration::from_secs(600);
/// Maximum time that a command waits for the list of nodes.
const ASK_LIMIT: Duration = Duration::from_secs(2);

fn path(config: &Path) -> PathBuf {
    config.with_file_name(FILE)
}

/// Returns the addresses in the file beside `config`; none if the file cannot be read.
pub fn read(config: &Path) -> Vec<HostPort> {
    let text = files::read_text(&path(config), MAX_FILE_BYTES).unwrap_or_default();
    text.lines().take(MAX_KNOWN).filter_map(|line| line.parse().ok()).collect()
}

/// Requests the nodes of the cluster if the file is older than [`FRESH`], and stores their
/// addresses.
pub async fn learn(client: &Client, config: &Path) {
    let path = path(config);
    let age = fs::metadata(&path).and_then(|found| found.modified()).ok();
    if age.and_then(|at| at.elapsed().ok()).is_some_and(|age| age < FRESH) {
        return;
    }
    let asked = deadline(&*SystemClock::new(), ASK_LIMIT, client.fetch_members()).await;
    let Ok(Ok(mut nodes)) = asked else { return };
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let lines = nodes.iter().take(MAX_KNOWN).map(|node| format!("{}\n", node.address));
    let text: String = lines.collect();
    if text.is_empty() {
        return;
    }
    let _ = files::replace(&path, &text);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)] // the test writes the file that is read

    use super::*;

    #[test]
    fn lines_that_are_no_addresses_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("rapidraid.toml");
        assert_eq!(read(&config), []);
        fs::write(path(&config), "10.0.0.1:7440\n\nnonsense\n[::1]:7\n").unwrap();
        let found: Vec<String> = read(&config).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.1:7440", "[::1]:7"]);
    }
}
