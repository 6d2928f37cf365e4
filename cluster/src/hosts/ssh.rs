//! Hosts behind ssh: the machines of an inventory, such as the one that `cluster/ec2` writes.
//!
//! A connection to each host is kept open and shared, so that a command costs one round trip.
//! Links cannot be shaped: an experiment that asks for shaping is refused.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{HostNo, Hosts, PORT, RateMbit};
use crate::text::read_text;
use crate::work::WorkFolder;

const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum time of a host's first answer, in seconds.
const CONNECT_S: u32 = 10;
/// The exit code of ssh itself. All other codes are those of the remote command.
const SSH_FAILED: i32 = 255;
/// Creates the folder of a run, `$2`. Several hosts of an inventory may be the same machine: then
/// the folder exists already and belongs to this user.
const MAKE_FOLDER: &str = r#"mkdir -p "$1" && { mkdir -m 700 "$2" || test -O "$2"; }"#;
/// Removes those folders of runs in `$1` that no process names in its command line (exit code 1 of
/// `pgrep`). Prints the number of folders that stay. The pattern is spelt so that it does not match
/// the command line of this script.
const REMOVE_LEFTOVERS: &str = r#"stay=0; for run in "$1"/[r]apidraid-cluster-*-*; do
    test -d "$run" || continue
    name=${run##*/r}; pgrep -f "/[r]$name/" >/dev/null
    if [ $? -ne 1 ] || ! rm -rf "$run"; then stay=$((stay + 1)); fi
done; echo $stay"#;

/// An inventory file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// The user who logs in.
    pub user: String,
    /// The file of the private key. Absent: as ssh is configured.
    pub key: Option<PathBuf>,
    /// The `rapidraid` program on the hosts.
    #[serde(default = "default_program")]
    pub program: String,
    /// The folder for the daemons' data. A new folder is created in it, so `user` must be able to
    /// write there.
    pub folder: PathBuf,
    /// The device whose counters are the link's.
    #[serde(default)]
    pub device: Option<String>,
    /// The capacity of the machines' links, for the results.
    #[serde(default)]
    pub link: Option<String>,
    /// The nodes, followed by the client.
    #[serde(rename = "host")]
    pub hosts: Vec<SshHost>,
}

/// A machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SshHost {
    /// The address that ssh uses.
    pub ssh: String,
    /// The address that other hosts use. It must belong to the machine, because the daemon listens
    /// on it alone.
    pub address: IpAddr,
    /// The port of its ssh server.
    #[serde(default = "default_port")]
    pub port: u16,
}

fn default_program() -> String {
    "rapidraid".to_owned()
}

fn default_port() -> u16 {
    22
}

/// Machines behind ssh.
pub struct Machines {
    inventory: Inventory,
    nodes: usize,
    folder: PathBuf,
    sockets: PathBuf,
    /// Number of machines, from the first, that have a folder of this run.
    reached: usize,
    /// The folder in which configurations are created.
    _work: WorkFolder,
}

impl Inventory {
    /// Reads and checks an inventory.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = read_text(path, MAX_FILE_BYTES)?;
        let inventory: Inventory =
            toml::from_str(&text).with_context(|| format!("{shown} is no inventory"))?;
        for SshHost { ssh, .. } in &inventory.hosts {
            let plain = |c: char| c.is_ascii_alphanumeric() || ".-_:".contains(c);
            ensure!(
                !ssh.is_empty() && !ssh.starts_with('-') && ssh.chars().all(plain),
                "{shown}: {ssh:?} is no host"
            );
        }
        Ok(inventory)
    }

    /// Returns an error if the inventory has too few hosts for `nodes` nodes and a client.
    pub fn has_room(&self, nodes: usize) -> Result<()> {
        let have = self.hosts.len();
        ensure!(
            have > nodes,
            "the inventory has {have} hosts; {nodes} nodes and a client need {}",
            nodes + 1
        );
        Ok(())
    }
}

/// Removes, on the hosts of an inventory, the folders of runs that have no process left. Returns a
/// line for each host on which folders stay, and for each host that does not answer.
pub fn remove_leftovers(inventory: Inventory, work: WorkFolder) -> Result<Vec<String>> {
    let sockets = work.path().join("ssh");
    std::fs::create_dir_all(&sockets).context("cannot make a folder for ssh's sockets")?;
    let (nodes, folder) = (inventory.hosts.len(), inventory.folder.clone());
    // No machine has a folder of this run.
    let machines = Machines { inventory, nodes, folder, sockets, reached: 0, _work: work };
    let mut stay = Vec::new();
    for (host, of) in machines.inventory.hosts.iter().enumerate() {
        let folder = machines.folder_text();
        let asked = machines.command(host, "sh", &["-c", REMOVE_LEFTOVERS, "sh", &folder]);
        let asked = { asked }.stdin(Stdio::null()).output().context("cannot start ssh")?;
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match said(&asked.stdout).parse() {
            Ok(0) => {}
            Ok(1u64..) => stay.push(format!("{}: {} folders stay", of.ssh, said(&asked.stdout))),
            Err(_) => stay.push(format!("{} does not answer: {}", of.ssh, said(&asked.stderr))),
        }
    }
    Ok(stay)
}

impl Machines {
    /// Connects to the first `nodes` machines and to the last one, which is the client's.
    pub fn up(nodes: usize, mut inventory: Inventory, work: WorkFolder) -> Result<Self> {
        inventory.has_room(nodes)?;
        let last = inventory.hosts.len() - 1;
        inventory.hosts.drain(nodes..last);
        // The random number in the name distinguishes this run from runs that other machines
        // control on the same hosts.
        let run = work.path().file_name().context("a folder without a name")?;
        let folder = inventory.folder.join(run);
        let sockets = work.path().join("ssh");
        std::fs::create_dir_all(&sockets).context("cannot make a folder for ssh's sockets")?;
        let mut machines = Self { inventory, nodes, folder, sockets, reached: 0, _work: work };
        for host in 0..=nodes {
            // A failed attempt may leave files behind, so this host is cleaned up as well.
            machines.reached = host + 1;
            machines.reach(host)?;
        }
        Ok(machines)
    }

    fn reach(&self, host: HostNo) -> Result<()> {
        let (name, user) = (&self.inventory.hosts[host].ssh, &self.inventory.user);
        let (parent, folder) = (self.inventory.folder.to_string_lossy(), self.folder_text());
        let ask = |program: &str, arguments: &[&str]| -> Result<(bool, String)> {
            let asked = self.command(host, program, arguments).stdin(Stdio::null()).output();
            let asked = asked.context("cannot start ssh; is it installed?")?;
            let said = String::from_utf8_lossy(&asked.stderr).trim().to_owned();
            ensure!(
                asked.status.code() != Some(SSH_FAILED),
                "{name} does not answer as {user}: {said}; try `ssh {user}@{name}`"
            );
            Ok((asked.status.success(), said))
        };
        let (is_made, said) = ask("sh", &["-c", MAKE_FOLDER, "sh", &parent, &folder])?;
        ensure!(
            is_made,
            "{name} cannot make {folder}: {said}; let {user} write into {parent}, or name another \
             folder in the inventory"
        );
        let program = self.program();
        let (is_there, said) = ask(program, &["--version"])?;
        ensure!(
            is_there,
            "{name} cannot run {program}: {said}; install it, or name it in the inventory"
        );
        Ok(())
    }

    fn folder_text(&self) -> String {
        self.folder.to_string_lossy().into_owned()
    }

    fn ssh(&self, host: HostNo) -> Command {
        let machine = &self.inventory.hosts[host];
        let mut ssh = Command::new("ssh");
        ssh.args(["-o", "BatchMode=yes", "-o", "ControlMaster=auto", "-o", "ControlPersist=30"]);
        ssh.args(["-o", &format!("ConnectTimeout={CONNECT_S}")]);
        // A machine that vanishes must not block a run for ever.
        ssh.args(["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"]);
        ssh.arg("-o").arg(format!("ControlPath={}/%C", self.sockets.display()));
        if let Some(key) = &self.inventory.key {
            ssh.arg("-i").arg(key);
        }
        ssh.args(["-p", &machine.port.to_string(), "-l", &self.inventory.user, &machine.ssh, "--"]);
        ssh
    }
}

/// Returns a pattern for `pkill -f` that matches the command lines of a run's daemons. `[r]` keeps
/// it from matching the command line that contains it, and the `/` at its end from matching a
/// longer name.
fn pattern(folder: &str) -> String {
    let (parent, run) = folder.rsplit_once('/').unwrap_or(("", folder));
    let mut pattern = String::new();
    for c in parent.chars() {
        if r"\.^$*+?()[]{}|".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    format!("{pattern}/{}/", run.replacen('r', "[r]", 1))
}

/// Returns a word quoted for the shell at the other end.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Hosts for Machines {
    fn nodes(&self) -> usize {
        self.nodes
    }

    fn is_here(&self) -> bool {
        false
    }

    fn address(&self, node: HostNo) -> SocketAddr {
        SocketAddr::new(self.inventory.hosts[node].address, PORT)
    }

    fn command(&self, host: HostNo, program: &str, arguments: &[&str]) -> Command {
        let mut ssh = self.ssh(host);
        let words: Vec<String> =
            [program].iter().chain(arguments).map(|word| quoted(word)).collect();
        ssh.arg(words.join(" "));
        ssh
    }

    fn program(&self) -> &str {
        &self.inventory.program
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn deliver(&self, host: HostNo, local: &Path, place: &Path) -> Result<PathBuf> {
        let there = self.folder.join(place);
        let name = &self.inventory.hosts[host].ssh;
        let mut pack = Command::new("tar")
            .args(["-C".as_ref(), local.as_os_str(), "-cf".as_ref(), "-".as_ref(), ".".as_ref()])
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start tar")?;
        let shown = there.to_string_lossy();
        let script = format!("mkdir -p {0} && tar -C {0} -xf -", quoted(&shown));
        let mut unpack = self.command(host, "sh", &["-c", &script]);
        if let Some(packed) = pack.stdout.take() {
            unpack.stdin(packed);
        }
        let unpacked = unpack.output().context("cannot start ssh")?;
        let packed = pack.wait()?;
        if !packed.success() || !unpacked.status.success() {
            let said = String::from_utf8_lossy(&unpacked.stderr);
            bail!("cannot copy {} to {name}: {}", local.display(), said.trim());
        }
        Ok(there)
    }

    fn device(&self, _host: HostNo) -> Option<&str> {
        self.inventory.device.as_deref()
    }

    fn shape(&self, host: HostNo, rate: RateMbit) -> Result<()> {
        match rate {
            None => Ok(()),
            Some(rate) => bail!(
                "{} is to have {rate} Mbit/s, but machines keep the links that they have: use --unshaped",
                self.inventory.hosts[host].ssh
            ),
        }
    }

    fn describe(&self) -> Value {
        json!({ "hosts": "ssh", "link": self.inventory.link, "shaping": null })
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        let folder = self.folder_text();
        let run = pattern(&folder);
        for host in 0..self.reached {
            // The daemons end with the pipes that they watch; this kills any that remain.
            let _ = self.command(host, "pkill", &["-9", "-f", &run]).stdin(Stdio::null()).output();
            let ended = self.command(host, "rm", &["-rf", &folder]).stdin(Stdio::null()).output();
            let is_clean = ended.is_ok_and(|output| output.status.success());
            if !is_clean {
                eprintln!(
                    "rapidraid-cluster: {} may still have {folder}",
                    self.inventory.hosts[host].ssh
                );
            }
            // This closes the shared connection, which would end by itself half a minute later.
            let mut last = self.ssh(host);
            last.args(["-O", "exit"]).stdout(Stdio::null()).stderr(Stdio::null());
            let _ = last.status();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_other_shell_as_they_are() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }

    #[test]
    fn only_daemons_of_the_run_match() {
        let found = pattern("/srv/a.b+c/rapidraid-cluster-7-00ff");
        assert_eq!(found, r"/srv/a\.b\+c/[r]apidraid-cluster-7-00ff/");
        let matches = |line: &str| {
            let mut grep = Command::new("grep");
            grep.args(["-qE", "-e", &found]).stdin(Stdio::piped());
            let mut grep = grep.spawn().unwrap();
            std::io::Write::write_all(&mut grep.stdin.take().unwrap(), line.as_bytes()).unwrap();
            grep.wait().unwrap().success()
        };
        assert!(matches("node --config /srv/a.b+c/rapidraid-cluster-7-00ff/cluster/nodes/a.toml"));
        for other in
            ["/srv/a.b+c/rapidraid-cluster-7-00ff0/a", "/srv/axb+c/rapidraid-cluster-7-00ff/"]
        {
            assert!(!matches(other), "{other}");
        }
        assert!(!matches(&format!("sh -c pkill -9 -f {found}")));
    }

    #[test]
    fn a_folder_is_made_once_for_its_owner_only() {
        let parent = tempfile::tempdir().unwrap();
        let at = |place: &str| parent.path().join(place).to_string_lossy().into_owned();
        let make = |parent: &str, folder: &str| {
            let mut sh = Command::new("sh");
            sh.args(["-c", MAKE_FOLDER, "sh", parent, folder]).stderr(Stdio::null());
            sh.status().unwrap().success()
        };
        assert!(make(&at("a/b"), &at("a/b/run")));
        let mode = std::fs::metadata(at("a/b/run")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&mode.permissions());
        assert_eq!(mode & 0o777, 0o700);
        // The folder exists already, as for a second host on the same machine.
        assert!(make(&at("a/b"), &at("a/b/run")));
        assert!(!make(&at("a"), "/proc/run"));
    }

    #[test]
    fn folders_go_when_no_process_names_them() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        let names = ["rapidraid-cluster-1-aa", "rapidraid-cluster-2-bb", "others"];
        names.iter().for_each(|name| std::fs::create_dir(at(name)).unwrap());
        let mut process = Command::new("sh");
        process.args(["-c", "read _", "sh"]).arg(at(names[0]).join("node")).stdin(Stdio::piped());
        let mut process = process.spawn().unwrap();
        let mut script = Command::new("sh");
        script.args(["-c", REMOVE_LEFTOVERS, "sh"]).arg(parent.path());
        let output = script.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n", "{output:?}");
        assert_eq!(names.map(|name| at(name).exists()), [true, false, true]);
        drop(process.stdin.take());
        process.wait().unwrap();
    }

    #[test]
    fn an_inventory_is_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("inventory.toml");
        let text = "user = \"admin\"\nfolder = \"/var/tmp\"\n[[host]]\nssh = \"10.0.0.1\"\naddress = \"10.0.0.1\"\n";
        std::fs::write(&file, text).unwrap();
        let inventory = Inventory::read(&file).unwrap();
        assert_eq!((inventory.hosts[0].port, inventory.program.as_str()), (22, "rapidraid"));
        inventory.has_room(0).unwrap();
        let few = inventory.has_room(20).unwrap_err().to_string();
        assert!(few.contains("has 1 hosts") && few.contains("need 21"), "{few}");
        for (from, to, named) in [
            ("user", "usr", "usr"),
            ("ssh = \"10.0.0.1\"", "ssh = \"-oProxyCommand=x\"", "no host"),
            ("address = \"10.0.0.1\"", "address = \"node-1\"", "IP address"),
        ] {
            std::fs::write(&file, text.replace(from, to)).unwrap();
            let error = Inventory::read(&file).unwrap_err();
            assert!(format!("{error:#}").contains(named), "{error:#}");
        }
    }
}
