//! The daemons of one cluster on its hosts, and the commands of its client.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::conditions::Conditions;
use crate::hosts::{HostNo, Hosts};
use crate::stop::{Stop, checked, own_group};

/// Maximum time for all daemons together to become ready.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time of a command that only asks.
const ASK_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Writes the process id to a file and replaces the shell by the daemon. Arguments: folder,
/// program, further options.
const START: &str = r#"home=$1 program=$2 && shift 2 && echo $$ > "$home/pid" &&
    exec "$program" node --stop-at-eof --config "$home/rapidraid.toml" "$@" >/dev/null 2>"$home/log""#;

/// Resets the memory peak of process `$1` to its present memory (proc(5), clear_refs).
const FORGET_PEAK: &str = r#"{ echo 5 > "/proc/$1/clear_refs"; } 2>/dev/null || true"#;

/// A running cluster. The daemons end with it, because each watches a pipe from here.
pub struct Daemons<'a> {
    hosts: &'a dyn Hosts,
    stop: Stop,
    folders: Vec<PathBuf>,
    client: PathBuf,
    running: Vec<Option<Running>>,
}

struct Running {
    child: Child,
    pid: u32,
}

/// The counters of a host's daemon and link since they began.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Reading {
    /// Bytes that the host sent; 0 if hosts share a device.
    pub sent_bytes: u64,
    /// Bytes that the host received.
    pub received_bytes: u64,
    /// Processor time of the daemon in seconds, user and system.
    pub cpu_s: f64,
    /// Maximum memory of the daemon in bytes since it began, or since [`Daemons::forget_peak`].
    pub peak_bytes: u64,
}

/// Returns the name of a node: `node-001` and so on. Names sort in the order of their numbers.
pub fn node_name(node: HostNo) -> String {
    format!("node-{:03}", node + 1)
}

impl<'a> Daemons<'a> {
    /// Creates the cluster's files, copies them to the hosts, starts the daemons and waits until
    /// all are ready.
    pub fn start(
        hosts: &'a dyn Hosts,
        local: &std::path::Path,
        at: &Conditions,
        stop: &Stop,
    ) -> Result<Self> {
        let files = local.join("cluster");
        let mut init = Command::new(local_program());
        init.args(["cluster", "init"]).arg(&files);
        for node in 0..hosts.nodes() {
            init.arg("--node").arg(format!("{}={}", node_name(node), hosts.address(node)));
        }
        for setting in [
            format!("memory={}", at.memory_bytes),
            format!("code.block={}", at.block_bytes),
            format!("code.list={},{}", at.n, at.k),
            // No policy archives, only the experiment itself, so that each archiving is measured.
            "policy.archive_all_but=never".to_owned(),
            "log.level=warn".to_owned(),
            // Other data on the disk of a shared machine must not make nodes refuse saves.
            "disk.high_water=99".to_owned(),
        ] {
            init.arg("--set").arg(setting);
        }
        if let Some(congestion) = &at.congestion {
            init.arg("--set").arg(format!("network.congestion={congestion}"));
        }
        if let Some(grace) = at.repair_grace_s {
            init.arg("--set").arg(format!("repair.grace_s={grace}"));
        }
        answer(stop, init, ASK_LIMIT)?;
        let mut folders = Vec::new();
        for node in 0..hosts.nodes() {
            let place = PathBuf::from("cluster/nodes").join(node_name(node));
            folders.push(hosts.deliver(node, &local.join(&place), &place)?);
        }
        let place = PathBuf::from("cluster/client");
        let client = hosts.deliver(hosts.nodes(), &local.join(&place), &place)?;
        let running = (0..hosts.nodes()).map(|_| None).collect();
        let mut daemons = Self { hosts, stop: stop.clone(), folders, client, running };
        let all: Vec<HostNo> = (0..hosts.nodes()).collect();
        daemons.revive(&all)?;
        Ok(daemons)
    }

    /// Returns the hosts of the daemons.
    pub fn hosts(&self) -> &'a dyn Hosts {
        self.hosts
    }

    /// Returns the folder of a node's files on its host.
    pub fn folder(&self, node: HostNo) -> &Path {
        &self.folders[node]
    }

    /// Runs commands in parallel, each to its end. Returns their outputs in the same order.
    pub fn run_all(&self, commands: Vec<Command>, limit: Duration) -> Result<Vec<Output>> {
        self.stop.run_all(commands, limit)
    }

    /// Waits for this time. Returns an error once the run is to end.
    pub fn sleep(&self, long: Duration) -> Result<()> {
        self.stop.sleep(long)
    }

    /// Starts the daemons of these nodes, and waits until they are ready and live in the catalogue.
    pub fn revive(&mut self, nodes: &[HostNo]) -> Result<()> {
        for &node in nodes {
            let folder = self.folders[node].to_string_lossy().into_owned();
            // The files of an earlier daemon would be mistaken for those of this one.
            self.on(node, "rm", &["-f", &format!("{folder}/log"), &format!("{folder}/pid")])?;
            let program = self.hosts.program();
            let listen = format!("listen={}", self.hosts.address(node));
            let words = ["-c", START, "sh", &folder, program, "--set", &listen];
            let mut command = self.hosts.command(node, "sh", &words);
            forget_settings(&mut command);
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::inherit());
            let child = own_group(&mut command).spawn().context("cannot start a daemon")?;
            self.running[node] = Some(Running { child, pid: 0 });
        }
        let end = Instant::now() + READY_LIMIT;
        for &node in nodes {
            let log = self.folders[node].join("log").to_string_lossy().into_owned();
            while !self.has_line(node, &log, "^ready: ")? {
                let ended = self.running[node].as_mut().and_then(|r| r.child.try_wait().ok()?);
                if ended.is_some() || Instant::now() > end {
                    let tail = self.on(node, "tail", &["-n", "5", &log])?;
                    bail!("{} does not run; its log ends with:\n{tail}", node_name(node));
                }
                self.stop.sleep(POLL)?;
            }
            let file = self.folders[node].join("pid").to_string_lossy().into_owned();
            let pid = self.on(node, "cat", &[&file])?;
            let pid = pid.trim().parse().with_context(|| format!("{file}: {pid:?}"))?;
            if let Some(running) = &mut self.running[node] {
                running.pid = pid;
            }
        }
        self.until_live(self.running.iter().flatten().count())
    }

    /// Waits until the catalogue counts `wanted` nodes as live.
    pub fn until_live(&self, wanted: usize) -> Result<()> {
        let end = Instant::now() + READY_LIMIT;
        loop {
            let status = self.client(&["status"], ASK_LIMIT)?;
            let live = status["nodes"].as_array().map_or(0, |nodes| {
                nodes.iter().filter(|node| node["live"].as_bool() == Some(true)).count()
            });
            if live == wanted {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "{live} nodes are live after {READY_LIMIT:?}, not {wanted}"
            );
            self.stop.sleep(POLL)?;
        }
    }

    fn has_line(&self, node: HostNo, file: &str, pattern: &str) -> Result<bool> {
        let command = self.hosts.command(node, "grep", &["-q", pattern, file]);
        // The file does not exist before the daemon has started.
        Ok(self.stop.run(command, ASK_LIMIT, || Ok(()))?.status.success())
    }

    /// Returns the output of `program` on a host.
    pub fn on(&self, host: HostNo, program: &str, arguments: &[&str]) -> Result<String> {
        let command = self.hosts.command(host, program, arguments);
        let output = checked(&self.stop, command, ASK_LIMIT, || Ok(()))?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    /// Sends a signal (its name, such as `STOP`) to the daemon of a node.
    pub fn signal(&self, node: HostNo, signal: &str) -> Result<()> {
        let Some(running) = &self.running[node] else { return Ok(()) };
        self.on(node, "kill", &["-s", signal, &running.pid.to_string()])?;
        Ok(())
    }

    /// Kills daemons, which for the processes is like a power cut.
    pub fn kill(&mut self, nodes: &[HostNo]) -> Result<()> {
        for &node in nodes {
            self.signal(node, "KILL")?;
            if let Some(mut running) = self.running[node].take() {
                running.child.wait().context("cannot wait for a daemon's end")?;
            }
        }
        Ok(())
    }

    /// Runs `rapidraid` on the client's host. Returns its JSON.
    pub fn client(&self, arguments: &[&str], limit: Duration) -> Result<Value> {
        self.client_while(arguments, limit, || Ok(()))
    }

    /// Runs `rapidraid` as [`Daemons::client`] does, and calls `meanwhile` while it runs.
    pub fn client_while(
        &self,
        arguments: &[&str],
        limit: Duration,
        meanwhile: impl FnMut() -> Result<()>,
    ) -> Result<Value> {
        let config = self.client.join("rapidraid.toml").to_string_lossy().into_owned();
        let arguments = [arguments, &["--json", "--config", &config]].concat();
        let mut command = self.hosts.command(self.hosts.nodes(), self.hosts.program(), &arguments);
        forget_settings(&mut command);
        let output = checked(&self.stop, command, limit, meanwhile)?;
        serde_json::from_slice(&output)
            .with_context(|| format!("rapidraid {} printed no JSON", arguments.join(" ")))
    }

    /// Resets the memory peaks of all daemons to their present memory.
    pub fn forget_peaks(&self) -> Result<()> {
        for (node, running) in self.running.iter().enumerate() {
            if let Some(running) = running {
                self.forget_peak(node, running.pid)?;
            }
        }
        Ok(())
    }

    /// Resets the memory peak of a process of a host. A kernel that cannot do so leaves the peak
    /// unchanged.
    pub fn forget_peak(&self, host: HostNo, pid: u32) -> Result<()> {
        self.on(host, "sh", &["-c", FORGET_PEAK, "sh", &pid.to_string()])?;
        Ok(())
    }

    /// Returns the readings of all nodes. Those of daemons that do not run are zero.
    pub fn read(&self) -> Result<Vec<Reading>> {
        (0..self.hosts.nodes()).map(|node| self.read_one(node)).collect()
    }

    /// Returns the reading of one node.
    pub fn read_one(&self, node: HostNo) -> Result<Reading> {
        let Some(running) = &self.running[node] else { return Ok(Reading::default()) };
        let mut files =
            vec![format!("/proc/{}/stat", running.pid), format!("/proc/{}/status", running.pid)];
        if let Some(device) = self.hosts.device(node) {
            for counter in ["tx_bytes", "rx_bytes"] {
                files.push(format!("/sys/class/net/{device}/statistics/{counter}"));
            }
        }
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let text = self.on(node, "cat", &files)?;
        reading(&text)
            .with_context(|| format!("the counters of {} cannot be parsed", node_name(node)))
    }
}

impl Drop for Daemons<'_> {
    fn drop(&mut self) {
        for running in self.running.iter_mut().flatten() {
            // A stopped daemon would not notice the end of its pipe. Children on this machine are
            // killed; remote ones end with their pipes.
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }
}

/// Parses `/proc/PID/stat`, `/proc/PID/status` and, if they follow, the two counters.
pub fn reading(text: &str) -> Option<Reading> {
    /// Linux counts in hundredths of a second in all interfaces for processes (`USER_HZ`).
    const TICKS_PER_S: f64 = 100.0;
    let (stat, rest) = text.split_once('\n')?;
    // The name, in parentheses, may contain blanks.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let peak_bytes = peak_of(rest)?;
    let mut counters = rest.lines().filter_map(|line| line.parse::<u64>().ok());
    Some(Reading {
        sent_bytes: counters.next().unwrap_or(0),
        received_bytes: counters.next().unwrap_or(0),
        cpu_s: ticks as f64 / TICKS_PER_S,
        peak_bytes,
    })
}

/// Returns the peak resident memory of a process in bytes (`VmHWM`), from its `/proc/PID/status`.
pub fn peak_of(status: &str) -> Option<u64> {
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = peak.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// Returns the program on this machine: `$RAPIDRAID`, or the one beside this program, or the one on
/// the PATH.
pub fn local_program() -> PathBuf {
    let named = std::env::var_os("RAPIDRAID").map(PathBuf::from);
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name("rapidraid"));
    named.or_else(|| beside.filter(|path| path.is_file())).unwrap_or_else(|| "rapidraid".into())
}

/// Removes the variables of this process from a command, because they are for other clusters.
fn forget_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("RAPIDRAID_")) {
            command.env_remove(name);
        }
    }
}

fn answer(stop: &Stop, mut command: Command, limit: Duration) -> Result<Vec<u8>> {
    forget_settings(&mut command);
    checked(stop, command, limit, || Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_parsed_whatever_the_name() {
        let stat = "7 (a) b) S 1 1 1 0 -1 4194560 100 0 0 0 150 25 0 0 20 0 4 0 100 200 300";
        let status = "Name:\ta) b\nVmHWM:\t  2048 kB\nThreads:\t4";
        let found = reading(&format!("{stat}\n{status}\n1000\n2000\n")).unwrap();
        let expected =
            Reading { sent_bytes: 1000, received_bytes: 2000, cpu_s: 1.75, peak_bytes: 2 << 20 };
        assert_eq!(found, expected);
        let alone = reading(&format!("{stat}\n{status}\n")).unwrap();
        assert_eq!((alone.sent_bytes, alone.cpu_s), (0, 1.75));
        assert_eq!(reading("cat: no such file"), None);
    }

    #[test]
    fn a_peak_is_forgotten() {
        const BYTES: u64 = 256 << 20;
        let own = std::process::id().to_string();
        if !Path::new("/proc/self/clear_refs").exists() {
            return;
        }
        let peak = || peak_of(&std::fs::read_to_string("/proc/self/status").unwrap()).unwrap();
        drop(std::hint::black_box(vec![1u8; BYTES as usize]));
        assert!(peak() > BYTES);
        for pid in [own.as_str(), "4294967295"] {
            let forgot = Command::new("sh").args(["-c", FORGET_PEAK, "sh", pid]).status().unwrap();
            assert!(forgot.success());
        }
        assert!(peak() < BYTES, "{}", peak());
    }
}
