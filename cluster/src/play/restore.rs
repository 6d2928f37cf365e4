//! Restores: from replicas, from pieces, with dead nodes, and with a node that is stopped during
//! the restore.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use super::{MOVE_LIMIT, Meter, Stage, number};
use crate::arm::Arm;
use crate::daemons::{Daemons, node_name};
use crate::hosts::HostNo;
use crate::record::{RunRecord, STOPPED};

/// A restore is in progress once a node has sent this many bytes, or used this much processor time.
const UNDER_WAY_BYTES: u64 = 1 << 20;
const UNDER_WAY_CPU_S: f64 = 0.05;

/// The checkpoints that are restored again and again.
pub struct Kept {
    replicas: Option<String>,
    pieces: Option<String>,
    /// The position of the nodes that are killed next. All nodes take turns, except the first one,
    /// which serves the catalogue.
    turn: usize,
}

impl Kept {
    /// Saves the checkpoints that the arms need.
    pub fn save(stage: &mut Stage<'_>, arms: &[Arm]) -> Result<Self> {
        let from_replicas = arms.contains(&Arm::RestoreReplicas);
        let replicas = if from_replicas { Some(stage.save()?) } else { None };
        let pieces = match arms.iter().any(|arm| *arm != Arm::RestoreReplicas) {
            false => None,
            true => {
                let step = stage.save()?;
                stage.daemons.client(&["archive", &step], MOVE_LIMIT)?;
                Some(step)
            }
        };
        Ok(Self { replicas, pieces, turn: 0 })
    }

    fn victims(&mut self, nodes: usize, count: usize) -> Vec<HostNo> {
        let others = nodes - 1;
        let chosen = (0..count).map(|at| 1 + (self.turn + at) % others).collect();
        self.turn = (self.turn + count) % others;
        chosen
    }
}

/// Runs one restore. The time is that of the whole command; the restored files are compared with
/// the saved ones.
pub fn run(stage: &mut Stage<'_>, kept: &mut Kept, arm: Arm, round: u32) -> Result<RunRecord> {
    let step = match arm {
        Arm::RestoreReplicas => &kept.replicas,
        _ => &kept.pieces,
    };
    let step = step.clone().context("the step of this arm was not saved")?;
    let nodes = stage.at.nodes as usize;
    let victims = kept.victims(nodes, arm.missing());
    stage.daemons.kill(&victims)?;
    let out = format!("{}.out", stage.data);
    let meter = Meter::start(&stage.daemons)?;
    let restore = ["restore", &step, "--out", &out];
    let daemons = &stage.daemons;
    let mut stopped: Option<HostNo> = None;
    let mut begun: Vec<(HostNo, f64)> = Vec::new();
    let clock = Instant::now();
    let done = match arm {
        Arm::RestoreStopped => daemons.client_while(&restore, MOVE_LIMIT, || {
            if stopped.is_none()
                && let Some(node) = source(daemons, &meter, nodes)?
            {
                daemons.signal(node, "STOP")?;
                stopped = Some(node);
                begun.push((node, clock.elapsed().as_secs_f64()));
            }
            Ok(())
        }),
        _ => daemons.client(&restore, MOVE_LIMIT),
    };
    if let Some(node) = stopped {
        daemons.signal(node, "CONT")?;
    }
    let done = done?;
    let seconds = number(&done, "seconds")?;
    let mut run = meter.stop(daemons, (round, arm), (seconds, seconds))?;
    if let Some((node, at_s)) = begun.first() {
        run.notes.insert(STOPPED.to_owned(), json!({ "node": node_name(*node), "at_s": at_s }));
    }
    let names: Vec<String> = victims.iter().map(|node| node_name(*node)).collect();
    run.notes.insert("killed".to_owned(), json!(names));
    run.notes.insert("incidents".to_owned(), done["incidents"].clone());
    // The comparison is bit for bit; the error of a difference names the file.
    let client = nodes;
    daemons.on(client, "diff", &["-rq", &stage.data, &out])?;
    daemons.on(client, "rm", &["-rf", &out])?;
    stage.daemons.revive(&victims)?;
    Ok(run)
}

/// Returns the node that has sent most since the restore began, once the restore is in progress. If
/// links cannot be read, returns the node that has used most processor time. The first node is
/// excluded, because it serves the catalogue.
fn source(daemons: &Daemons<'_>, meter: &Meter, nodes: usize) -> Result<Option<HostNo>> {
    let mut best = None;
    for node in 1..nodes {
        let (before, now) = (meter.before[node], daemons.read_one(node)?);
        let sent = now.sent_bytes.saturating_sub(before.sent_bytes);
        let worked = now.cpu_s - before.cpu_s;
        let is_source = match now.received_bytes {
            0 => worked >= UNDER_WAY_CPU_S,
            _ => sent >= UNDER_WAY_BYTES,
        };
        if is_source && best.is_none_or(|(_, most)| (sent, worked) > most) {
            best = Some((node, (sent, worked)));
        }
    }
    Ok(best.map(|(node, _)| node))
}
