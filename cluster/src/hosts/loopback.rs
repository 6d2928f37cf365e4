//! All hosts are this machine, with each daemon on its own port: no root, no shaping. It serves
//! first trials and CI.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{HostNo, Hosts, RateMbit, own_program};
use crate::work::WorkFolder;

/// The daemons of this machine.
pub struct Loopback {
    ports: Vec<u16>,
    program: String,
    work: WorkFolder,
}

impl Loopback {
    /// Finds free ports for `nodes` daemons. Another process may take the ports before; then the
    /// daemons report it.
    pub fn up(nodes: usize, program: String, work: WorkFolder) -> Result<Self> {
        // All sockets stay open until all ports are known, so that no port occurs twice.
        let sockets: std::io::Result<Vec<UdpSocket>> =
            (0..nodes).map(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))).collect();
        let sockets = sockets.context("cannot find free UDP ports")?;
        let ports: std::io::Result<Vec<u16>> =
            sockets.iter().map(|socket| socket.local_addr().map(|addr| addr.port())).collect();
        Ok(Self { ports: ports?, program, work })
    }
}

impl Hosts for Loopback {
    fn nodes(&self) -> usize {
        self.ports.len()
    }

    fn address(&self, node: HostNo) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports[node]).into()
    }

    fn command(&self, _host: HostNo, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments);
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
        None
    }

    fn shape(&self, host: HostNo, rate: RateMbit) -> Result<()> {
        match rate {
            None => Ok(()),
            Some(rate) => bail!(
                "host {host} is to have {rate} Mbit/s, but loopback is not shaped: use --on netns, or --unshaped"
            ),
        }
    }

    fn describe(&self) -> Value {
        json!({ "hosts": "loopback", "mtu": 65536, "shaping": null })
    }
}
