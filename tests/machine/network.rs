//! The machines of a test as network namespaces. Each has one link to the bridge of the storage
//! nodes, which a test can cut.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

use super::run_inside;

/// The address of the storage nodes, which share the namespace of the bridge.
pub const NODES: &str = "10.79.0.254";
/// All names begin with this and the id of the process that created the namespaces.
const PREFIX: &str = "rapidraid-test-";

/// A bridge in a namespace of its own, and the machines that were connected to it so far.
pub struct Network {
    hub: Namespace,
    machines: AtomicU8,
}

/// A machine with one link to the bridge.
pub struct Machine {
    own: Namespace,
    hub: String,
    /// The bridge's end of the link.
    port: String,
}

/// A network namespace, which is removed when it is dropped.
struct Namespace(String);

impl Network {
    /// Creates the bridge. Returns `None` if this user or this kernel cannot create network
    /// namespaces, bridges and pairs of links, or the tools for them are not installed.
    pub fn start() -> Option<Self> {
        remove_leftovers();
        let hub = Namespace::create("hub")?;
        let address = format!("{NODES}/24");
        let steps: [&[&str]; 5] = [
            &["link", "set", "lo", "up"],
            &["link", "add", "br0", "type", "bridge"],
            &["addr", "add", &address, "dev", "br0"],
            &["link", "set", "br0", "up"],
            &["link", "add", "probe0", "type", "veth", "peer", "name", "probe1"],
        ];
        let is_made = |step: &&[&str]| has_done(&[&["-n", &hub.0], *step].concat());
        steps.iter().all(is_made).then(|| Self { hub, machines: AtomicU8::new(0) })
    }

    /// Adds a machine and connects it.
    pub fn add_machine(&self) -> Machine {
        let number = 1 + self.machines.fetch_add(1, Ordering::Relaxed);
        assert!(number < 254, "a network has room for 253 machines");
        let own = Namespace::create(&number.to_string()).unwrap();
        let (hub, port) = (self.hub.0.clone(), format!("port{number}"));
        let link = ["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &own.0];
        ip(&[&["-n", &hub], &link[..]].concat());
        ip(&["-n", &hub, "link", "set", &port, "master", "br0", "up"]);
        ip(&["-n", &own.0, "addr", "add", &format!("10.79.0.{number}/24"), "dev", "eth0"]);
        ip(&["-n", &own.0, "link", "set", "eth0", "up"]);
        ip(&["-n", &own.0, "link", "set", "lo", "up"]);
        Machine { own, hub, port }
    }

    /// Returns a command that runs `command` beside the storage nodes.
    pub fn inside(&self, command: &Command) -> Command {
        self.hub.inside(command)
    }
}

impl Machine {
    /// Returns a command that runs `command` on this machine.
    pub fn inside(&self, command: &Command) -> Command {
        self.own.inside(command)
    }

    /// Cuts the link. Nothing on the machine notices.
    pub fn cut_link(&self) {
        ip(&["-n", &self.hub, "link", "set", &self.port, "down"]);
    }

    /// Connects the link again.
    pub fn mend_link(&self) {
        ip(&["-n", &self.hub, "link", "set", &self.port, "up"]);
    }
}

impl Namespace {
    fn create(name: &str) -> Option<Self> {
        let name = format!("{PREFIX}{}-{name}", std::process::id());
        let mut command = Command::new("ip");
        command.args(["netns", "add", &name]).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success()).then_some(Self(name))
    }

    fn inside(&self, command: &Command) -> Command {
        let mut enter = Command::new("nsenter");
        enter.arg(format!("--net=/run/netns/{}", self.0)).arg("--");
        run_inside(enter, command)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn ip(arguments: &[&str]) {
    assert!(has_done(arguments), "ip {arguments:?}");
}

fn has_done(arguments: &[&str]) -> bool {
    Command::new("ip").args(arguments).status().is_ok_and(|status| status.success())
}

fn remove(name: &str) {
    let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
}

/// Removes the namespaces of test processes that were killed.
fn remove_leftovers() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        if let Some((owner, _)) = owner
            && !Path::new("/proc").join(owner).exists()
        {
            remove(name);
        }
    }
}
