//! Transfers without daemons: one stream over one link, or the streams of a chain whose nodes do
//! not code.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};

use super::{MOVE_LIMIT, Meter, Stage};
use crate::arm::{Arm, Transfer};
use crate::daemons::node_name;
use crate::pump::Took;
use crate::record::RunRecord;

/// The port beside the daemon's.
const PORT: u16 = 7441;

/// Runs one transfer. The time is that of the slowest receiver; processor time is that of the
/// processes that send and receive.
pub fn run(stage: &mut Stage<'_>, arm: Arm, transfer: Transfer, round: u32) -> Result<RunRecord> {
    let hosts = stage.daemons.hosts();
    let at = |node: usize| SocketAddr::new(hosts.address(node).ip(), PORT).to_string();
    let (nodes, bytes) = match transfer.is_line {
        true => (stage.at.n as usize, stage.at.block_bytes * u64::from(stage.at.shards)),
        false => (2, stage.at.checkpoint_bytes()),
    };
    let (bytes, program) = (bytes.to_string(), hosts.own_program()?);
    let mut commands = Vec::new();
    for node in 0..nodes {
        let identity = stage.daemons.folder(node).to_string_lossy().into_owned();
        let (listen, to) = (at(node), at(node + 1));
        let mut pump = vec!["pump", "--over", transfer.over, "--identity", &identity];
        pump.extend(["--bytes", &bytes]);
        if node > 0 {
            pump.extend(["--listen", &listen]);
        }
        if node + 1 < nodes {
            pump.extend(["--to", &to]);
        }
        commands.push(hosts.command(node, &program, &pump));
    }
    let meter = Meter::start(&stage.daemons)?;
    let outputs = stage.daemons.run_all(commands, MOVE_LIMIT)?;
    let mut took = Vec::new();
    for (node, output) in outputs.iter().enumerate() {
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the transfer at {} failed: {said}", node_name(node));
        let one: Took =
            serde_json::from_slice(&output.stdout).context("a transfer printed no JSON")?;
        took.push(one);
    }
    let seconds = took.iter().map(|took| took.seconds).fold(0.0, f64::max);
    let mut run = meter.stop(&stage.daemons, (round, arm), (seconds, seconds))?;
    run.cpu_s = took.iter().map(|took| took.cpu_s).sum();
    run.peak_bytes = took.iter().map(|took| took.peak_bytes).max().unwrap_or(0);
    Ok(run)
}
