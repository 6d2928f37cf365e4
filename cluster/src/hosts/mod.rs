//! The hosts on which daemons and clients run: one trait, which says how a command reaches a host
//! and what its link carries.
//!
//! Everything else (starting a daemon, reading its processor time, killing it) is a command on a
//! host, so that the same experiment runs on namespaces of this machine, on machines behind ssh,
//! and unshaped on loopback.

pub mod loopback;
pub mod netns;
pub mod ssh;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The number of a host: nodes from 0, the client after the last node.
pub type HostNo = usize;

/// The UDP port of a daemon that has a host for itself.
pub const PORT: u16 = 7440;

/// The rate of a host's link in both directions, in Mbit/s. `None`: not shaped.
pub type RateMbit = Option<u32>;

/// Returns the path of this program, for hosts that are this machine.
fn own_program() -> Result<String> {
    let own = std::env::current_exe().context("cannot find this program")?;
    Ok(own.to_string_lossy().into_owned())
}

/// The hosts of one cluster. Dropping the value removes what it created.
pub trait Hosts: Sync {
    /// Returns the number of nodes. The client is the host with that number.
    fn nodes(&self) -> usize;

    /// Returns whether all hosts are this machine and so share its processors.
    fn is_here(&self) -> bool {
        true
    }

    /// Returns the address on which node `node` listens and is reached.
    fn address(&self, node: HostNo) -> SocketAddr;

    /// Returns a command that runs `program` with `arguments` on a host. Its streams are those of
    /// the remote program.
    fn command(&self, host: HostNo, program: &str, arguments: &[&str]) -> Command;

    /// Returns the `rapidraid` program on the hosts.
    fn program(&self) -> &str;

    /// Returns the path of `rapidraid-cluster` on the hosts. By default it is in the folder of
    /// `rapidraid`.
    fn own_program(&self) -> Result<String> {
        let beside = Path::new(self.program()).with_file_name("rapidraid-cluster");
        Ok(beside.to_string_lossy().into_owned())
    }

    /// Returns the folder of this run, which is the same on every host.
    fn folder(&self) -> &Path;

    /// Copies a local folder with its content to the same place under [`Hosts::folder`] of a host.
    /// Hosts that share this machine's disk have it there already. Returns the path on the host.
    fn deliver(&self, _host: HostNo, local: &Path, place: &Path) -> Result<PathBuf> {
        let there = self.folder().join(place);
        ensure!(there == local, "{} was not made at {}", local.display(), there.display());
        Ok(there)
    }

    /// Returns the network device whose counters are those of the host's link. `None`: hosts share
    /// one device.
    fn device(&self, host: HostNo) -> Option<&str>;

    /// Shapes a host's link. This works while daemons run.
    fn shape(&self, host: HostNo, rate: RateMbit) -> Result<()>;

    /// Returns how links are made, for the results.
    fn describe(&self) -> Value;
}
