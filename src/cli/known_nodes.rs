//! The nodes that a client has learned of, kept beside its configuration: seeds may all be gone while other nodes are there.
//!
//! A help, not a need: a file that cannot be read or written is none.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::files;
use crate::client::Client;
use crate::clock::{SystemClock, deadline};
use crate::config::{HostPort, MAX_FILE_BYTES};

/// The name of the file, in the folder of the configuration: one HOST:PORT a line.
const FILE: &str = "known-nodes";
/// Nodes that are kept.
const MAX_KNOWN: usize = 4096;
/// Nodes are asked for again when the file is older than this.
const FRESH: Duration = Duration::from_secs(600);
/// The longest that a command is held up by this question.
const ASK_LIMIT: Duration = Duration::from_secs(2);

fn path(config: &Path) -> PathBuf {
    config.with_file_name(FILE)
}

/// The addresses that are kept beside `config`.
pub fn read(config: &Path) -> Vec<HostPort> {
    let text = files::read_text(&path(config), MAX_FILE_BYTES).unwrap_or_default();
    text.lines().take(MAX_KNOWN).filter_map(|line| line.parse().ok()).collect()
}

/// Asks for the nodes of the cluster, now and then, and keeps their addresses.
pub async fn learn(client: &Client, config: &Path) {
    let path = path(config);
    let age = fs::metadata(&path).and_then(|found| found.modified()).ok();
    if age.and_then(|at| at.elapsed().ok()).is_some_and(|age| age < FRESH) {
        return;
    }
    let asked = deadline(&*SystemClock::new(), ASK_LIMIT, client.members()).await;
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
    #![allow(clippy::disallowed_methods)] // makes the file that is read

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
