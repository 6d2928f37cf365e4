//! The demo's nodes: real daemons, each a process of its own.
//!
//! It promises that no daemon outlives the demo: they are killed when [`Daemons`] goes out of scope, whatever the
//! reason, and end by themselves when the demo is killed, since they watch a pipe that ends with it. Only
//! [`Daemons::leave`] lets them go on.

use std::io;
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::cli::files::{self, PUBLIC};
use crate::cli::init::NewCluster;
use crate::cli::printer::Failure;
use crate::clock::{Clock, SystemClock};
use crate::id::PeerName;
use crate::kind::ErrorKind;

/// How long all daemons together may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// A log that says `ready` does so in its first lines.
const MAX_LOG_BYTES: usize = 16 << 20;

/// Holds the number of the process, as long as the demo has not killed it.
const PID_FILE: &str = "pid";

struct NodeProcess {
    name: PeerName,
    folder: PathBuf,
    child: Child,
}

impl NodeProcess {
    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }
}

/// Running daemons.
pub struct Daemons {
    nodes: Vec<NodeProcess>,
}

/// Free UDP ports of this machine. Others may take them before the daemons do; then those say so.
pub fn free_ports(count: usize) -> Result<Vec<u16>, Failure> {
    let port = |socket: &UdpSocket| socket.local_addr().map(|address| address.port());
    // All are held until all are known, so that none comes twice.
    let sockets: io::Result<Vec<UdpSocket>> =
        (0..count).map(|_| UdpSocket::bind(("127.0.0.1", 0))).collect();
    sockets.and_then(|sockets| sockets.iter().map(port).collect()).map_err(|error| {
        Failure::new(ErrorKind::Io, format!("cannot find free UDP ports: {error}"))
    })
}

impl Daemons {
    /// Starts a daemon for each node. With `stay` they do not end with this process.
    pub fn start(cluster: &NewCluster, stay: bool, variables: &[&String]) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(|error| {
            Failure::new(ErrorKind::Io, format!("cannot find the program that is running: {error}"))
        })?;
        let mut daemons = Self { nodes: Vec::new() };
        for node in &cluster.nodes {
            let config = cluster.node_config(&node.name);
            let folder = config.parent().unwrap_or(Path::new("")).to_owned();
            let log = files::create_new(&folder.join("log"))?;
            let mut command = Command::new(&program);
            command.arg("node").arg("--config").arg(&config);
            command.args((!stay).then_some("--stop-at-eof"));
            // Settings for some other cluster are not for this one.
            for name in variables {
                command.env_remove(name);
            }
            let stdin = if stay { Stdio::null() } else { Stdio::piped() };
            command.stdin(stdin).stdout(Stdio::null()).stderr(log);
            // A group of its own: Ctrl-C is for the demo, which then ends its nodes.
            let child = command.process_group(0).spawn().map_err(|error| {
                Failure::new(ErrorKind::Io, format!("cannot start {}: {error}", program.display()))
            })?;
            let node = NodeProcess { name: node.name.clone(), folder, child };
            let pid = format!("{}\n", node.child.id());
            let pid_file = node.folder.join(PID_FILE);
            daemons.nodes.push(node);
            files::write_new(&pid_file, &pid, PUBLIC)?;
        }
        Ok(daemons)
    }

    /// Returns when every daemon has said that it is ready.
    pub async fn ready(&mut self) -> Result<(), Failure> {
        let clock = SystemClock::new();
        for node in &mut self.nodes {
            loop {
                let log = files::read_text(&node.log(), MAX_LOG_BYTES)?;
                if log.lines().any(|line| line.starts_with("ready: ")) {
                    break;
                }
                let ended = node.child.try_wait().ok().flatten();
                if ended.is_some() || clock.now() > READY_LIMIT {
                    let how = ended
                        .map_or("is not ready after 30 s".to_owned(), |s| format!("ended ({s})"));
                    let last = files::last_lines(&node.log(), 5);
                    let message = format!("{} {how}; the end of its log:\n{last}", node.name);
                    return Err(Failure::new(ErrorKind::Unavailable, message)
                        .with_hint("run the demo again"));
                }
                clock.sleep(POLL).await;
            }
        }
        Ok(())
    }

    /// Kills these nodes as a power cut would, as far as the process goes.
    pub fn kill(&mut self, names: &[PeerName]) {
        for node in self.nodes.iter_mut().filter(|node| names.contains(&node.name)) {
            end(&mut node.child);
            files::remove_file(&node.folder.join(PID_FILE));
        }
    }

    /// Lets the daemons go on after this process.
    pub fn leave(mut self) {
        // Dropping a child neither kills nor waits.
        self.nodes.clear();
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            end(&mut node.child);
        }
    }
}

/// Kills a child and takes its exit status, so that its number is not used again before. One that has ended is
/// left alone.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
