//! Hosts as network namespaces of this machine: veth pairs into one bridge, with both directions of
//! every port shaped by `tbf`.
//!
//! Shaping the bridge's end of a port limits what reaches the host, so that many senders to one
//! coder share its link as they would at a switch. There is no route to the outside. The names
//! contain the id of the process that created them, so that the next run finds and removes the
//! namespaces of a killed run. Links that delay or lose packets are those of a relay
//! ([`crate::relay`]).

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{HostNo, Hosts, PORT, RateMbit, own_program};
use crate::conditions::Relayed;
use crate::stop::own_group;
use crate::work::{WorkFolder, is_running};

const PREFIX: &str = "rapidraid-";
/// The device of every host.
const DEVICE: &str = "eth0";
const MTU: u32 = 9000;
/// Room for a segment that the kernel has not cut yet (up to 64 KiB) and a datagram. An idle port
/// lets this much pass unshaped once: 2 % of a block of 4 MiB, so results for shorter blocks should
/// not be quoted.
const BURST_BYTES: u32 = 80 << 10;
const _: () = assert!(BURST_BYTES >= (64 << 10) + MTU, "a segment must fit into a full bucket");
/// Maximum time that a packet waits at a port before it is dropped. Deeper queues only add
/// round-trip time.
const QUEUE_MS: u32 = 50;
/// Hosts of one /24, without the bridge.
const MAX_HOSTS: usize = 250;

/// The namespaces `rapidraid-PID-0` to `-N` and their hub.
pub struct Namespaces {
    nodes: usize,
    relayed: Option<Relayed>,
    relay: Option<Child>,
    program: String,
    work: WorkFolder,
}

fn prefix() -> String {
    format!("{PREFIX}{}-", std::process::id())
}

fn namespace(host: HostNo) -> String {
    format!("{}{host}", prefix())
}

fn hub() -> String {
    format!("{}hub", prefix())
}

fn ip_of(host: HostNo) -> Ipv4Addr {
    let [.., last] = (host as u32 + 1).to_be_bytes();
    Ipv4Addr::new(10, 77, 0, last)
}

impl Namespaces {
    /// Creates namespaces for `nodes` nodes and a client. Some links may be relayed.
    pub fn up(
        nodes: usize,
        relayed: Option<Relayed>,
        program: String,
        work: WorkFolder,
    ) -> Result<Self> {
        ensure!(nodes < MAX_HOSTS, "{nodes} nodes: one bridge here takes {MAX_HOSTS}");
        check()?;
        remove_leftovers()?;
        // From here on, dropping the value removes the parts that exist.
        let mut hosts = Self { nodes, relayed, relay: None, program, work };
        let mut made = String::new();
        for name in (0..=nodes).map(namespace).chain([hub()]) {
            let _ = writeln!(made, "netns add {name}");
        }
        ip(&["-batch", "-"], &made)?;
        let mut ports =
            format!("link add br0 mtu {MTU} type bridge\nlink set br0 up\nlink set lo up\n");
        hosts.start_relay()?;
        for host in 0..=nodes {
            let name = namespace(host);
            if host < hosts.relayed_nodes() {
                let _ = writeln!(
                    ports,
                    "link set w{host} netns {name} name {DEVICE}\nlink set v{host} master br0 up"
                );
                continue;
            }
            let _ = writeln!(
                ports,
                "link add v{host} mtu {MTU} type veth peer name {DEVICE} mtu {MTU} netns {name}\n\
                 link set v{host} master br0 up"
            );
        }
        ip(&["-n", &hub(), "-batch", "-"], &ports)?;
        for host in 0..=nodes {
            let address = ip_of(host);
            let own = format!(
                "addr add {address}/24 dev {DEVICE}\nlink set {DEVICE} up\nlink set lo up\n"
            );
            ip(&["-n", &namespace(host), "-batch", "-"], &own)?;
        }
        Ok(hosts)
    }

    fn relayed_nodes(&self) -> usize {
        self.relayed.map_or(0, |relayed| relayed.nodes as usize)
    }

    /// Creates both ends of the relayed links in the hub.
    fn start_relay(&mut self) -> Result<()> {
        let Some(relayed) = self.relayed else { return Ok(()) };
        let own = own_program()?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &hub()]).arg(own).arg("relay");
        command.args(["--mtu", &MTU.to_string(), "--delay-ms", &relayed.delay_ms.to_string()]);
        command.args(["--loss-percent", &relayed.loss_percent.to_string()]);
        for host in 0..self.relayed_nodes() {
            command.args(["--link", &format!("v{host}=w{host}")]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = own_group(&mut command).spawn().context("cannot start the relay")?;
        let relay = self.relay.insert(child);
        let mut said = String::new();
        if let Some(stdout) = relay.stdout.take() {
            BufReader::new(stdout).read_line(&mut said).context("the relay says nothing")?;
        }
        ensure!(said == "ready\n", "the relay did not start; it needs /dev/net/tun");
        Ok(())
    }
}

/// Checks the requirements before anything is created.
pub fn check() -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "namespaces need root: run it with sudo, or use --on loopback, which is not shaped"
    );
    for (tool, arguments) in [("ip", "-V"), ("tc", "-V")] {
        let found = Command::new(tool).arg(arguments).stdout(Stdio::null()).status();
        ensure!(found.is_ok(), "{tool} is not installed: it is in the package iproute2");
    }
    Ok(())
}

/// Removes the namespaces of runs that have ended, and kills the processes in them. Returns the
/// number of removed namespaces.
pub fn remove_leftovers() -> Result<usize> {
    let listed = match std::fs::read_dir("/run/netns") {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name()).collect(),
        Err(_) => Vec::new(),
    };
    let mut removed = 0;
    for name in listed {
        let Some(name) = name.to_str() else { continue };
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        if let Some((owner, _)) = owner
            && owner.parse().is_ok_and(|owner| !is_running(owner))
        {
            remove(name)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Kills the processes in a namespace and removes it with its devices.
fn remove(name: &str) -> Result<()> {
    let inside = Command::new("ip").args(["netns", "pids", name]).output();
    let inside = inside.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    for pid in inside.unwrap_or_default().split_whitespace() {
        // The process may have ended meanwhile.
        let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
    }
    ip(&["netns", "del", name], "")
}

/// Runs `ip` with `input`. The error contains its stderr.
fn ip(arguments: &[&str], input: &str) -> Result<()> {
    run("ip", arguments, input)
}

fn run(program: &str, arguments: &[&str], input: &str) -> Result<()> {
    let line = || format!("{program} {}", arguments.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", line()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // The program may end before it has read all; then its status is the error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().with_context(line)?;
    if !output.status.success() {
        bail!("`{}` failed: {}", line(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

impl Hosts for Namespaces {
    fn nodes(&self) -> usize {
        self.nodes
    }

    fn address(&self, node: HostNo) -> SocketAddr {
        (ip_of(node), PORT).into()
    }

    fn command(&self, host: HostNo, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &namespace(host), program]).args(arguments);
        command
    }

    fn program(&self) -> &str {
        &self.program
    }

    fn own_program(&self) -> Result<String> {
        own_program()
    }

    fn folder(&self) -> &Path {
        self.work.path()
    }

    fn device(&self, _host: HostNo) -> Option<&str> {
        Some(DEVICE)
    }

    fn shape(&self, host: HostNo, rate: RateMbit) -> Result<()> {
        let port = format!("v{host}");
        for (namespace, device) in [(namespace(host), DEVICE), (hub(), &port)] {
            match rate {
                Some(rate) => {
                    let (rate, burst) = (format!("{rate}mbit"), BURST_BYTES.to_string());
                    let queue = format!("{QUEUE_MS}ms");
                    let arguments = [
                        "-n", &namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate",
                        &rate, "burst", &burst, "latency", &queue,
                    ];
                    run("tc", &arguments, "")?;
                }
                // There may be no rate to remove.
                None => {
                    let arguments = ["-n", &namespace, "qdisc", "del", "dev", device, "root"];
                    let _ = run("tc", &arguments, "");
                }
            }
        }
        Ok(())
    }

    fn describe(&self) -> Value {
        json!({
            "hosts": "netns", "mtu": MTU,
            "shaping": format!("tbf at both ends of every port, burst {BURST_BYTES}, queue {QUEUE_MS} ms"),
        })
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        if let Some(mut relay) = self.relay.take() {
            let _ = relay.kill();
            let _ = relay.wait();
        }
        for name in (0..=self.nodes).map(namespace).chain([hub()]) {
            if Path::new("/run/netns").join(&name).exists()
                && let Err(error) = remove(&name)
            {
                eprintln!("rapidraid-cluster: {name} stays until the next run: {error:#}");
            }
        }
    }
}
