//! The demo's nodes: real daemons, each in its own process.
//!
//! Dropping [`Daemons`] kills the daemons; only [`Daemons::leave`] lets them continue. If the demo is
//! killed, they end by themselves, because they watch a pipe that ends with the demo. Daemons that
//! are started to stay watch no pipe.

use std::io;
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::cli::files::{self, PUBLIC};
use crate::cli::init::NewCluster;
use crate::cli::printer::CommandFailure;
use crate::clock::{Clock, SystemClock};
use crate::id::PeerName;
use crate::kind::ErrorKind;

/// Maximum time for all daemons together to become ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// Maximum size of a log that is searched for `ready`, which is in its first lines.
const MAX_LOG_BYTES: usize = 16 << 20;

/// The file with the process id, which exists until the demo kills the process.
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

/// The running daemons.
pub struct Daemons {
    nodes: Vec<NodeProcess>,
}

/// Returns free UDP ports of this machine. Another process may take them before the daemons do;
/// then the daemons report an error.
pub fn free_ports(count: usize) -> Result<Vec<u16>, CommandFailure> {
    let port = |socket: &UdpSocket| socket.local_addr().map(|address| address.port());
    // All sockets stay open until all ports are known, so that no port occurs twice.
    let sockets: io::Result<Vec<UdpSocket>> =
        (0..count).map(|_| UdpSocket::bind(("127.0.0.1", 0))).collect();
    sockets.and_then(|sockets| sockets.iter().map(port).collect()).map_err(|error| {
        CommandFailure::new(ErrorKind::Io, format!("cannot find free UDP ports: {error}"))
    })
}

impl Daemons {
    /// Starts a daemon for each node, without the environment variables `variables`. With `stay` the
    /// daemons do not end with this process.
    pub fn start(
        cluster: &NewCluster,
        stay: bool,
        variables: &[&String],
    ) -> Result<Self, CommandFailure> {
        let program = std::env::current_exe().map_err(|error| {
            CommandFailure::new(
                ErrorKind::Io,
                format!("cannot find the program that is running: {error}"),
            )
        })?;
        let mut daemons = Self { nodes: Vec::new() };
        for node in &cluster.nodes {
            let config = cluster.node_config(&node.name);
            let folder = config.parent().unwrap_or(Path::new("")).to_owned();
            let log = files::create_new(&folder.join("log"))?;
            let mut command = Command::new(&program);
            command.arg("node").arg("--config").arg(&config);
            command.args((!stay).then_some("--stop-at-eof"));
            // The variables of this process are for other clusters.
            for name in variables {
                command.env_remove(name);
            }
            let stdin = if stay { Stdio::null() } else { Stdio::piped() };
            command.stdin(stdin).stdout(Stdio::null()).stderr(log);
            // Each daemon gets its own process group: Ctrl-C is for the demo, which then ends its
            // nodes.
            let child = command.process_group(0).spawn().map_err(|error| {
                CommandFailure::new(
                    ErrorKind::Io,
                    format!("cannot start {}: {error}", program.display()),
                )
            })?;
            let node = NodeProcess { name: node.name.clone(), folder, child };
            let pid = format!("{}\n", node.child.id());
            let pid_file = node.folder.join(PID_FILE);
            daemons.nodes.push(node);
            files::write_new(&pid_file, &pid, PUBLIC)?;
        }
        Ok(daemons)
    }

    /// Returns when every daemon has reported that it is ready.
    pub async fn ready(&mut self) -> Result<(), CommandFailure> {
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
                    return Err(CommandFailure::new(ErrorKind::Unavailable, message)
                        .with_hint("run the demo again"));
                }
                clock.sleep(POLL).await;
            }
        }
        Ok(())
    }

    /// Kills the processes of these nodes with SIGKILL, so that they do not stop in order.
    pub fn kill(&mut self, names: &[PeerName]) {
        for node in self.nodes.iter_mut().filter(|node| names.contains(&node.name)) {
            end(&mut node.child);
            files::remove_file(&node.folder.join(PID_FILE));
        }
    }

    /// Lets the daemons continue after this process.
    pub fn leave(mut self) {
        // Dropping a child neither kills it nor waits for it.
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

/// Kills a child and waits for its end. A child that has already ended is not signalled.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
