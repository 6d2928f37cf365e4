//! Where daemons and clients run: one trait, which says how a command gets to a host and what its link carries.
//!
//! Everything else (starting a daemon, reading its processor time, killing it) is a command on a host, so that the same
//! experiment runs on namespaces of this machine, on machines behind ssh, and unshaped on loopback.

pub mod loopback;
pub mod netns;
pub mod ssh;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// A host, by number: nodes from 0, the client after the last node.
pub type HostNo = usize;

/// The UDP port of a daemon on a host of its own.
pub const PORT: u16 = 7440;

/// What the link of a host carries, in both directions; `None`: not shaped.
pub type RateMbit = Option<u32>;

/// This program, where hosts are this machine.
fn own_program() -> Result<String> {
    let own = std::env::current_exe().context("cannot find this program")?;
    Ok(own.to_string_lossy().into_owned())
}

/// The hosts of one cluster. Dropping it takes down what it has put up.
pub trait Hosts: Sync {
    /// How many nodes there are; the client is the host of that number.
    fn nodes(&self) -> usize;

    /// Whether all hosts are this machine, whose processors they then share.
    fn is_here(&self) -> bool {
        true
    }

    /// Where node `node` is reached, and listens.
    fn address(&self, node: HostNo) -> SocketAddr;

    /// `program` with `arguments` on a host. The command's streams are those of the program there.
    fn command(&self, host: HostNo, program: &str, arguments: &[&str]) -> Command;

    /// The `rapidraid` program on the hosts.
    fn program(&self) -> &str;

    /// This program on the hosts: beside the other one.
    fn own_program(&self) -> Result<String> {
        let beside = Path::new(self.program()).with_file_name("rapidraid-cluster");
        Ok(beside.to_string_lossy().into_owned())
    }

    /// A folder of this run on every host.
    fn folder(&self) -> &Path;

    /// Puts a local folder, with all that is in it, at the same place under [`Hosts::folder`] of a host.
    /// Hosts that share this machine's disk have it there already.
    fn deliver(&self, _host: HostNo, local: &Path, place: &Path) -> Result<PathBuf> {
        let there = self.folder().join(place);
        ensure!(there == local, "{} was not made at {}", local.display(), there.display());
        Ok(there)
    }

    /// The network device whose counters are the host's link; `None`: hosts share one.
    fn device(&self, host: HostNo) -> Option<&str>;

    /// Shapes a host's link, also while daemons run.
    fn shape(&self, host: HostNo, rate: RateMbit) -> Result<()>;

    /// How links are made, for the results.
    fn describe(&self) -> Value;
}
