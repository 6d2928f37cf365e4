//! A rolling upgrade from an older program to this one, and back, with real daemons. `cargo xtask
//! upgrade` builds the older program.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rustix::process::Signal;

use crate::machine::{Cluster, Daemon, Ended, bytes, program, run};

/// Environment variable that holds the path of the older program.
const OLDER: &str = "RAPIDRAID_OLDER_PROGRAM";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Older,
    This,
}

/// Returns the command of a version: the same environment with another program.
fn of_version(cluster: &Cluster, version: Version, older: &Path) -> Command {
    let this = program(cluster.folder.path());
    if version == Version::This {
        return this;
    }
    let mut command = Command::new(older);
    for (name, value) in this.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(cluster.folder.path());
    command
}

struct Upgrade {
    cluster: Cluster,
    older: std::path::PathBuf,
    /// Number of steps that were saved, which is also the number of the last one.
    steps: u64,
    archived: Vec<u64>,
}

impl Upgrade {
    fn client(&self, version: Version, line: &str) -> Ended {
        let mut command = of_version(&self.cluster, version, &self.older);
        command.args(line.split(' ')).env("RAPIDRAID_CONFIG", "cluster/client/rapidraid.toml");
        run(command)
    }

    fn daemon(&self, version: Version, at: usize) -> Daemon {
        let mut command = of_version(&self.cluster, version, &self.older);
        command.arg("node").arg("--config").arg(self.cluster.config(at));
        Daemon::told(command, Arc::new(|_| ()))
    }

    /// Stops node `at` gracefully and starts it with the program of `version`.
    fn exchange(&mut self, at: usize, version: Version) {
        let daemon = self.cluster.daemons.remove(at - 1);
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.ended().code, 0, "n{at} does not stop in order");
        let started = self.daemon(version, at).ready();
        self.cluster.daemons.insert(at - 1, started);
        self.cluster.until("all nodes are live", |nodes| nodes.iter().all(|n| n["live"] == true));
    }

    fn content(step: u64) -> Vec<u8> {
        bytes(700_000 + 1000 * step as usize, step)
    }

    /// Saves a step with the client of one version. The client of the other version archives every
    /// second step, and restores this step and early ones.
    fn work(&mut self, version: Version) {
        let other = match version {
            Version::Older => Version::This,
            Version::This => Version::Older,
        };
        self.steps += 1;
        let step = self.steps;
        self.cluster.write("weights", &Self::content(step));
        self.client(version, &format!("save job/{step} weights")).ok();
        if step.is_multiple_of(2) {
            self.client(other, &format!("archive job/{step}")).ok();
            self.archived.push(step);
        }
        for read in [step, 1, self.archived.first().copied().unwrap_or(1)] {
            let out = format!("out-{step}-{read}");
            self.client(other, &format!("restore job/{read} --out {out}")).ok();
            assert!(self.cluster.read(&format!("{out}/weights")) == Self::content(read));
            std::fs::remove_dir_all(self.cluster.path(&out)).unwrap();
        }
        let listed = self.client(version, "ls job --json").ok().json();
        assert_eq!(listed["steps"].as_array().unwrap().len() as u64, step);
    }
}

/// Exchanges the nodes one after the other, while either program saves, archives and restores
/// through the other. Then exchanges them back.
#[test]
fn a_rolling_upgrade_and_back_loses_nothing() {
    let Some(older) = std::env::var_os(OLDER) else {
        eprintln!("skipped: {OLDER} names no program; `cargo xtask upgrade` builds one");
        return;
    };
    let set = ["code.list=6,4", "timeouts.lease_s=2"];
    let cluster = Cluster::files(7, &set);
    let mut upgrade = Upgrade { cluster, older: older.into(), steps: 0, archived: Vec::new() };
    let daemons: Vec<Daemon> = (1..=7).map(|at| upgrade.daemon(Version::Older, at)).collect();
    upgrade.cluster.daemons = daemons.into_iter().map(Daemon::ready).collect();
    upgrade.cluster.until("all nodes are live", |nodes| nodes.iter().all(|n| n["live"] == true));
    upgrade.work(Version::Older);
    for at in 1..=7 {
        upgrade.exchange(at, Version::This);
        upgrade.work(if at % 2 == 0 { Version::Older } else { Version::This });
    }
    for step in upgrade.archived.clone() {
        upgrade.client(Version::This, &format!("verify job/{step}")).ok();
    }
    // Without the catalogue server the client reads the commit marks, also those that the older
    // program wrote.
    let home = upgrade.cluster.daemons.remove(0);
    home.signal(Signal::KILL);
    drop(home);
    upgrade.client(Version::This, "restore job/1 --out by-marks").ok();
    assert!(upgrade.cluster.read("by-marks/weights") == Upgrade::content(1));
    let back = upgrade.daemon(Version::This, 1).ready();
    upgrade.cluster.daemons.insert(0, back);
    upgrade.cluster.until("all nodes are live", |nodes| nodes.iter().all(|n| n["live"] == true));
    upgrade.client(Version::This, "rm job/2").ok();
    upgrade.cluster.write("weights", &Upgrade::content(2));
    upgrade.client(Version::This, "save job/2 weights").ok();
    upgrade.archived.retain(|step| *step != 2);
    for at in (1..=7).rev() {
        upgrade.exchange(at, Version::Older);
        upgrade.work(if at % 2 == 0 { Version::This } else { Version::Older });
    }
    let status = upgrade.client(Version::Older, "status --json").ok().json();
    for node in status["nodes"].as_array().unwrap() {
        assert_eq!(node["notes"], serde_json::json!([]), "{status}");
    }
}
