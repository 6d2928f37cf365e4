//! The setting of the demo: folder, input, cluster and client.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use super::daemons::free_ports;
use crate::cli::args::{Connect, Demo};
use crate::cli::init::{self, NewCluster};
use crate::cli::printer::CommandFailure;
use crate::cli::sample::write_sample;
use crate::cli::status::stored_bytes;
use crate::cli::words::{NewNode, Setting, WordError};
use crate::cli::{connect, files};
use crate::client::Client;
use crate::clock::{Clock, SystemClock};
use crate::kind::ErrorKind;
use crate::units::ByteCount;

/// Number of nodes: the number of pieces of the default code (16,11).
pub const NODES: usize = 16;
/// Settings of the daemons. With these, sixteen daemons fit into the memory of a laptop, and store
/// data until its disk is 99 % full.
const SETTINGS: [&str; 2] = ["memory=64MiB", "disk.high_water=99"];
/// Disk space needed for each byte of input: the input, two replicas, pieces before the replicas
/// are dropped, the restored file, and some room.
const SPACE_FACTOR: u64 = 6;
/// Disk space that one daemon allocates for a moment when it starts, to find out whether the disk
/// has room for its reserve.
const START_BYTES: u64 = 64 << 20;
/// Maximum time for the nodes to find each other.
const LIVE_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);
const BUSY: &str = "is the machine very busy? run the demo again";

/// Creates a new folder on a disk with enough room. Dropping the returned value removes the folder.
pub fn folder(options: &Demo) -> Result<TempDir, CommandFailure> {
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    files::make_folder(&parent)?;
    let made = tempfile::Builder::new().prefix("rapidraid-demo-").tempdir_in(&parent);
    let folder = made.map_err(|error| files::io_failure("create a folder in", &parent, &error))?;
    let input_bytes = match &options.input {
        Some(path) => given_bytes(path)?,
        None => options.size.0,
    };
    let above_mark_bytes = files::total_bytes(&parent)? / 100;
    let needed = input_bytes
        .saturating_mul(SPACE_FACTOR)
        .saturating_add(NODES as u64 * START_BYTES + above_mark_bytes);
    let free = files::free_bytes(&parent)?;
    if needed > free {
        let (place, needed, free) = (parent.display(), ByteCount(needed), ByteCount(free));
        let message = format!("the demo needs {needed} in {place}, where {free} are free");
        return Err(CommandFailure::new(ErrorKind::Busy, message)
            .with_hint("name another disk with --dir, or a smaller --size"));
    }
    Ok(folder)
}

/// Returns the length of the given file. Returns `Invalid` for an empty file, which has nothing to
/// archive.
fn given_bytes(path: &Path) -> Result<u64, CommandFailure> {
    match files::length(path)? {
        bytes if bytes > 0 && files::kind_of(path)?.is_file() => Ok(bytes),
        _ => {
            let message = format!("{} is not a file with something in it", path.display());
            Err(CommandFailure::new(ErrorKind::Invalid, message)
                .with_hint("name a file of some megabytes"))
        }
    }
}

/// Returns the file to save and a description of it.
pub async fn input(options: &Demo, folder: &Path) -> Result<(PathBuf, String), CommandFailure> {
    if let Some(path) = &options.input {
        let about = format!("{} as checkpoint demo/1, straight to the nodes", path.display());
        return Ok((path.clone(), about));
    }
    let path = folder.join("model.safetensors");
    let mut file = files::create_new(&path)?;
    let (target_bytes, seed) = (options.size.0, options.seed);
    let written = blocking(move || write_sample(&mut file, target_bytes, seed)).await?;
    let info = written.map_err(|error| files::io_failure("write", &path, &error))?;
    let about = format!(
        "a generated model of {:.1} million parameters with its Adam state, as checkpoint demo/1",
        info.parameters as f64 / 1e6
    );
    Ok((path, about))
}

/// Creates the files of a cluster on free ports.
pub fn cluster(folder: &Path) -> Result<NewCluster, CommandFailure> {
    let wrong = |error: WordError| CommandFailure::of(ErrorKind::Internal, &error);
    let node = |(at, port): (usize, &u16)| -> Result<NewNode, CommandFailure> {
        format!("node-{:02}=127.0.0.1:{port}", at + 1).parse().map_err(wrong)
    };
    let nodes: Vec<NewNode> =
        free_ports(NODES)?.iter().enumerate().map(node).collect::<Result<_, _>>()?;
    let set = SETTINGS.map(|setting| setting.parse().map_err(wrong));
    let set: Vec<Setting> = set.into_iter().collect::<Result<_, _>>()?;
    init::create(&folder.join("cluster"), &nodes, &set)
}

/// Connects a client by the client configuration of the new cluster, without environment variables.
pub async fn client(cluster: &NewCluster) -> Result<Client, CommandFailure> {
    let connect = Connect { config: Some(cluster.client_config()), set: Vec::new() };
    // The variables of this process are for other clusters.
    connect::client(&connect, &std::collections::BTreeMap::new()).await
}

/// Returns when all nodes are live.
pub async fn all_live(client: &Client) -> Result<(), CommandFailure> {
    let clock = SystemClock::new();
    loop {
        let status = connect::ask(client.status()).await?;
        let live = status.nodes.iter().filter(|node| node.view.live).count();
        if live >= NODES {
            return Ok(());
        }
        if clock.now() > LIVE_LIMIT {
            let limit = LIVE_LIMIT.as_secs();
            let message = format!("only {live} of {NODES} nodes are live after {limit} s");
            return Err(CommandFailure::new(ErrorKind::Timeout, message).with_hint(BUSY));
        }
        clock.sleep(POLL).await;
    }
}

/// Returns the bytes of blocks and pieces on all nodes, as the nodes report them. A node that does
/// not answer is asked again, because a sum without it would be wrong.
pub async fn stored(client: &Client) -> Result<u64, CommandFailure> {
    let clock = SystemClock::new();
    loop {
        let status = connect::ask(client.status()).await?;
        let silent = status.nodes.iter().find(|node| node.held.is_none());
        match silent {
            None => return Ok(stored_bytes(&status)),
            Some(node) if clock.now() > LIVE_LIMIT => {
                let message = format!("{} does not say what it holds", node.view.node.name);
                return Err(CommandFailure::new(ErrorKind::Timeout, message).with_hint(BUSY));
            }
            Some(_) => clock.sleep(POLL).await,
        }
    }
}

/// Returns the BLAKE3 hash of a file.
pub async fn hash(path: PathBuf) -> Result<blake3::Hash, CommandFailure> {
    blocking(move || files::hash(&path)).await?
}

/// Runs blocking work outside the runtime, so that Ctrl-C is handled meanwhile.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CommandFailure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| {
        CommandFailure::new(ErrorKind::Internal, format!("a task of the demo died: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::config::{NodeConfig, Sources};

    #[test]
    fn the_daemons_store_data_on_a_disk_that_is_nearly_full() {
        let folder = tempfile::tempdir().unwrap();
        let made = cluster(folder.path()).unwrap();
        let path = made.node_config(&made.nodes[0].name);
        let text = std::fs::read_to_string(&path).unwrap();
        let none = BTreeMap::new();
        let sources = Sources { file: &path, text: &text, env: &none, options: &none };
        assert_eq!(NodeConfig::parse(sources).unwrap().high_water_percent, 99);
    }
}
